"""The files, commands, outputs and code of the pages in docs are true."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.test_readme import ROOT, check_page
from weft.cli.export_commands import FORMATS
from weft.search.place.methods import METHODS
from weft.search.schedule.problem import MAX_BLOCKS
from weft.search.schedule.tuning import TUNING

PAGE = ROOT / "docs" / "schedule.md"
PLACE_PAGE = ROOT / "docs" / "place.md"


def test_the_page_on_schedules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(PAGE, capsys) >= 11
    for name in ("small.html", "small.svg", "result.json", "searched.csv", "again.json"):
        assert (tmp_path / name).stat().st_size > 0, name


def test_limits_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    for sentence in (f"up to {TUNING.max_exact:,} ticks", f"a grid of {TUNING.resolution} ticks", f"1/{TUNING.resolution} of it",
                     f"{MAX_BLOCKS:,} blocks in a problem", f"{TUNING.max_instances:,} blocks and transfers over all",
                     f"up to {TUNING.max_free} blocks and transfers", f"up to {TUNING.max_unrolled:,} in warm-up",
                     f"ones up to {TUNING.max_greedy:,} blocks and transfers",
                     f"about {TUNING.default_seconds:.0f} CPU seconds, up to {6 * TUNING.default_seconds:.0f}"):
        assert sentence in text, sentence
    assert (TUNING.max_microbatches, TUNING.max_exact_microbatches) == (8, 4), "the page says eight and four"


def test_the_page_on_placements(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(PLACE_PAGE, capsys) >= 12
    for name in ("net.html", "net.svg", "result.json", "placed.json", "side-by-side.json.gz"):
        assert (tmp_path / name).stat().st_size > 0, name


def test_the_page_on_placements_names_every_method():
    rows = PLACE_PAGE.read_text().partition("## Methods")[2].partition("## Models")[0]
    assert set(re.findall(r"`([a-z-]+)`", rows)) >= set(METHODS)


def test_the_page_on_deployments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(ROOT / "docs" / "deploy.md", capsys) >= 1
    assert (tmp_path / "vgg.json").stat().st_size > 0


def test_the_page_on_other_tools(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(ROOT / "docs" / "interchange.md", capsys) >= 14


def test_the_page_on_other_tools_names_every_format():
    rows = (ROOT / "docs" / "interchange.md").read_text().partition("## Training")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", rows, re.MULTILINE)) == set(FORMATS)


def test_the_page_on_training(tmp_path, monkeypatch, capsys):
    """Its script runs under torchrun; ``benchmarks.bench_resume`` kills one of its ranks, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert check_page(ROOT / "docs" / "training.md", capsys) >= 4
    sys.modules.pop("train", None)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000035", "step-00000040", "plan.json"}
