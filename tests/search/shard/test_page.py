"""The files, commands, outputs and code on strategy graphs in docs/shard.md are true."""

from __future__ import annotations

from tests.test_readme import ROOT, check_page
from weft.search.strategies.search import DEFAULT_ROUNDS


def test_the_page_on_strategy_graphs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "shard.md"
    assert check_page(page, capsys) >= 4
    assert f"at most {DEFAULT_ROUNDS} rounds" in " ".join(page.read_text().split())
