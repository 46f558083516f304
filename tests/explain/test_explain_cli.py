"""``weft explain`` on the command line, and the page about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_readme import ROOT, check_page
from weft.cli.main import main

MODEL = "gpt2-tiny:layers=2"
SMALL = """format: weft.cluster
version: 1
kinds:
  small: {memory: 400KiB, memory_bandwidth: 900GB/s, flops: {float32: 19TFLOP/s}, overhead: 5us}
hosts:
  - {name: a, devices: "2 x small", intra: pcie4}
"""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["plan", MODEL, "2 x A100-80GB", "--batch", "8", "--mode", "inference", "--microbatches", "4",
                 "--strategy", "1f1b", "-o", str(path), "-q"]) == 0
    return path


def run_json(capsys, *arguments: object) -> dict[str, object]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, code: int, *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_plan_is_explained_by_itself(capsys, plan_file):
    result = run_json(capsys, "explain", plan_file, "--no-replan")
    assert result["binding"] == "compute"
    assert sum(share["seconds"] for share in result["path"]) == pytest.approx(result["step_time"])
    for row in result["devices"]:
        waits = row["first_work"] + row["end"] + sum(row["others"].values()) + sum(row["messages"].values())
        assert row["busy"] + waits == pytest.approx(result["step_time"])
    assert {row["device"] for row in result["memory"]} == {"a0", "a1"}
    assert result["changes"] == []
    assert result["second"] is None


def test_what_would_help_is_planned(capsys, plan_file):
    result = run_json(capsys, "explain", plan_file, "--time-limit", 60)
    names = [row["change"] for row in result["changes"]]
    assert names[0] == "one more A100-80GB on host a"
    assert "twice the bandwidth of" in names[1]
    assert names[-1] == "10 GiB more memory on every device"
    assert "memory does not bind" in result["changes"][-1]["note"]
    best = min(row["step_time"] for row in result["strategies"] if row["step_time"] is not None)
    for row in result["changes"][:-1]:
        assert row["step_time"] <= min(best, result["step_time"]) * (1 + 1e-9)
        assert row["gain"] == pytest.approx(1 - row["step_time"] / min(best, result["step_time"]))
    assert result["faster"]["step_time"] == best


def test_the_text_begins_with_what_bounds_the_step(capsys, plan_file):
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--no-replan", "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The step of ")
    assert "is bound by computing" in lines[0]
    assert "Critical path" in [line.strip() for line in lines]


def test_a_model_that_does_not_fit_gets_the_smallest_changes(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    result = run_json(capsys, "explain", MODEL, path, "--batch", 4, "--mode", "inference")
    assert result["status"] == "infeasible"
    kinds = {row["kind"]: row for row in result["relaxations"]}
    assert {"memory", "devices"} <= set(kinds)
    assert kinds["devices"]["change"].endswith("more small on host a")
    assert all(row["step_time"] > 0 for row in result["relaxations"])


BAD = [
    (["explain", "gpt2-tiny"], "CLUSTER is missing"),
    (["explain", "no-such-plan.json"], "no-such-plan.json"),
    (["explain", "plan.json", "--batch", "4"], "--batch is for a model with a CLUSTER after it"),
    (["explain", MODEL, "2 x A100-80GB", "--model", MODEL], "--model is for a plan file"),
    (["explain", "plan.json", "--time-limit", "0"], "--time-limit must be a number of seconds above 0"),
    (["fit", MODEL, "2 x A100-80GB", "--dtype", "int8"], "--dtype must be one of"),
    (["fit", MODEL, "2 x A100-80GB", "--batch", "0"], "the batch must be 1 or more"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_wrong_requests_are_refused(capsys, arguments, words):
    assert words in fails(capsys, 2, *arguments)


def test_both_commands_have_help_and_json(capsys):
    for command in ("explain", "fit"):
        capsys.readouterr()
        assert main([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_the_page_on_explanations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(ROOT / "docs" / "explain.md", capsys) >= 4
