"""The page on the report in docs: its commands run, and its limits are those of the code."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.show.test_html import Page
from tests.show.test_timeline_chart import SPACE
from tests.test_readme import ROOT, check_page
from weft.show.timeline_chart import MAX_INSTRUCTIONS, MAX_MICROBATCHES, MAX_SINGLE, TOLERANCE

PAGE = ROOT / "docs" / "show.md"


def test_the_commands_write_the_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(PAGE, capsys) == 4
    picture = ElementTree.parse(tmp_path / "tiny.svg").getroot()
    assert any(rect.get("class") == "period" for rect in picture.iter(f"{SPACE}rect"))
    planned, both = Page((tmp_path / "tiny.html").read_text()), Page((tmp_path / "both.html").read_text())
    assert "Strategies" in planned.text
    assert "Predicted against measured" in both.text
    assert [item["title"] for item in both.data["timelines"]] == ["predicted", "measured"]
    for section in ("Cluster", "Layers", "Memory", "Communication by link"):
        assert section in both.text


def test_limits_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    for sentence in (f"Of more than {MAX_SINGLE} devices", f"{MAX_INSTRUCTIONS:,} instructions at most",
                     f"(to {100 * TOLERANCE:.1f} %)"):
        assert sentence in text, sentence
    assert MAX_MICROBATCHES == 4, "the page says four"
