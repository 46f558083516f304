"""The page on planning is true."""

from __future__ import annotations

from tests.test_readme import ROOT, check_page
from weft.search.joint.tuning import TUNING
from weft.show.plan_tables import MAX_TRIED

PAGE = ROOT / "docs" / "plan.md"


def test_the_page_on_planning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(PAGE, capsys) >= 3
    assert (tmp_path / "fast.json").stat().st_size > 0


def test_its_numbers_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    assert f"On more than {TUNING.large} devices" in text
    assert f"the best {MAX_TRIED} settings" in text
