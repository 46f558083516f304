"""``weft shard``: what it prints where, its exit codes, and messages for files of any sort."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from weft.cli.main import main

TWO = {"problem": {
    "name": "two", "usage_limit": 6,
    "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [3, 4]], "usages": [[5, 1], [4, 2]]},
    "edges": {"nodes": [[0, 1]], "costs": [[0, 9, 9, 0]]}}}


@pytest.fixture
def problem(tmp_path) -> Path:
    (tmp_path / "two.json").write_text(json.dumps(TWO))
    return tmp_path / "two.json"


def run(capsys, *arguments: object, code: int = 0):
    capsys.readouterr()
    assert main(["shard", *map(str, arguments)]) == code
    return capsys.readouterr()


def fails(capsys, *arguments: object, code: int = 2) -> str:
    captured = run(capsys, *arguments, code=code)
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_json_is_exactly_the_result_and_progress_goes_to_stderr(capsys, problem):
    captured = run(capsys, problem, "--json")
    result = json.loads(captured.out)
    assert list(result) == ["status", "cost", "bound", "usage_peak", "choice", "seconds"]
    # Strategies 0, 0 would cost 4 but use 9 where both are alive.
    assert (result["status"], result["cost"], result["bound"], result["usage_peak"]) == ("optimal", 6, 6, 3)
    assert result["choice"] == [1, 1]
    assert "2 nodes, 1 edges, usage limit 6" in captured.err
    assert "best 6, bound 6, gap 0 %" in captured.err
    assert run(capsys, problem, "--json", "--quiet").err == ""


def test_the_tables_tell_cost_usage_and_what_costs_most(capsys, problem):
    text = run(capsys, problem, "--quiet").out
    assert "6 (bound 6, gap 0 %)" in text
    assert "3 at time 1 (limit 6, 50.0 % used)" in text
    assert text.index("node 1") < text.index("node 0") < text.index("edge 0 - 1")


def test_compressed_files_and_problems_without_a_limit(capsys, tmp_path):
    value = json.loads(json.dumps(TWO))
    del value["problem"]["usage_limit"]
    path = tmp_path / "free.json.gz"
    path.write_bytes(gzip.compress(json.dumps(value).encode()))
    assert json.loads(run(capsys, path, "--json").out)["cost"] == 4
    assert "no limit" in run(capsys, path, "--quiet").out


def test_a_limit_that_nothing_meets_has_exit_code_3(capsys, tmp_path):
    value = json.loads(json.dumps(TWO))
    value["problem"]["usage_limit"] = 2
    (tmp_path / "tight.json").write_text(json.dumps(value))
    message = fails(capsys, tmp_path / "tight.json", "--quiet", code=3)
    assert message == ("weft: no choice fits: even if every node uses its least, the peak is 3, above the usage limit of "
                       "2. Raise usage_limit to 3 or more.\n")


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not valid JSON"),
    ("[]", "the file must be an object with 'problem'"),
    ('{"problem": {"nodes": {}}}', "problem.nodes.intervals is missing"),
    ('{"problem": {"nodes": {"intervals": [[0, 1]], "costs": [[NaN]], "usages": [[1]]}}}', "NaN is not a JSON number"),
])
def test_damaged_files_are_refused(capsys, tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    assert message in fails(capsys, tmp_path / "bad.json")


def test_a_file_that_is_not_there(capsys, tmp_path):
    assert "no file" in fails(capsys, tmp_path / "none.json")


@pytest.mark.parametrize(("options", "message"), [
    (("--time-limit", "0"), "--time-limit must be a number of seconds above 0, not 0.0"),
    (("--time-limit", "nan"), "--time-limit must be a number of seconds above 0"),
    (("--seed", "-1"), "Invalid value for '--seed'"),
])
def test_options_are_checked(capsys, problem, options, message):
    assert message in fails(capsys, problem, *options)


def test_ctrl_c_prints_the_best_so_far(tmp_path):
    rng = np.random.default_rng(1)
    count, size = 300, 12
    edges = [[a, b] for a in range(count) for b in (a + 1, a + 2, a + 5, a + 11) if b < count]
    value = {"problem": {
        "usage_limit": 40 * count, "edges": {"nodes": edges, "costs": [rng.integers(0, 99, size**2).tolist() for _ in edges]},
        "nodes": {"intervals": [[0, 1]] * count, "costs": rng.integers(0, 99, (count, size)).tolist(),
                  "usages": rng.integers(0, 99, (count, size)).tolist()}}}
    (tmp_path / "big.json").write_text(json.dumps(value))
    command = [sys.executable, "-m", "weft", "shard", str(tmp_path / "big.json"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "best" in line:
                    break
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    result = json.loads(out)
    assert result["status"] == "feasible"
    assert result["usage_peak"] <= 40 * count
    assert len(result["choice"]) == count
