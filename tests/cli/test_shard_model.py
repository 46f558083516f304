"""``weft shard MODEL CLUSTER``."""

from __future__ import annotations

import json

import pytest

from weft.cli.main import main

MODEL = "llama-tiny:layers=4"
CLUSTER = "4 x A100-80GB"
SMALL = (MODEL, CLUSTER, "--mesh", "2x2", "--batch", "8")


def run(capsys, *arguments):
    code = main(["shard", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_result_as_json_adds_up(capsys):
    code, out, err = run(capsys, *SMALL, "--json", "--compare")
    assert code == 0, err
    result = json.loads(out)
    assert result["status"] == "optimal"
    assert result["mesh"] == [2, 2]
    assert result["seconds"] == pytest.approx(result["compute_seconds"] + sum(result["axis_seconds"]), rel=1e-9)
    sent = sum(item["seconds"] for layer in result["layers"] for item in layer["collectives"])
    assert sent == pytest.approx(sum(result["axis_seconds"]), abs=1e-12)
    assert result["held_bytes"] == pytest.approx(result["parameter_bytes"] + result["activation_bytes"], abs=2)
    assert {f"model.layers.{layer}.mlp.down_proj.linear" for layer in range(4)} <= set(result["ops"])
    assert {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(4)} <= set(result["parameters"])
    assert {row["plan"] for row in result["compare"]} == {"data", "zero1", "zero3", "megatron", "attention", "ffn",
                                                           "sequence"}
    assert all(row["seconds"] >= result["seconds"] * (1 - 1e-9) for row in result["compare"] if row["feasible"])


def test_tables_and_the_file(capsys, tmp_path):
    code, out, err = run(capsys, *SMALL, "--out", tmp_path / "found.json")
    assert code == 0, err
    assert "mesh 2x2" in err
    for text in ("sharding", "4 x model.layers", "Collectives", "optimizer states", "bound"):
        assert text in out, text
    assert json.loads((tmp_path / "found.json").read_text())["model"] == "llama-tiny"


def test_all_meshes_are_tried_without_one(capsys):
    code, _, err = run(capsys, MODEL, CLUSTER, "--batch", "8", "--json")
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines() if line.startswith("mesh")] == ["mesh 4", "mesh 2x2"]


def test_quiet_says_nothing(capsys):
    code, _, err = run(capsys, *SMALL, "--json", "--quiet")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(("arguments", "message"), [
    ((MODEL, CLUSTER, "--mesh", "3x2"), "a mesh of 3x2 has 6 places, but the group has 4 devices: choose sizes whose"),
    ((MODEL, CLUSTER, "--mesh", "2y2"), "is not a mesh: write the sizes of its axes, such as 8, 2x4 or 2x2x2"),
    ((MODEL, "16 x A100-80GB", "--mesh", "2x2x2x2"), "has 4 axes: at most 3 are searched"),
    ((MODEL, CLUSTER, "--mode", "sleeping"), "--mode must be one of training, inference"),
    ((MODEL, CLUSTER, "--dtype", "int3"), "--dtype must be one of"),
    ((MODEL, CLUSTER, "--optimizer", "magic"), "--optimizer must be one of"),
    ((MODEL, CLUSTER, "--memory", "0GiB"), "--memory must be more than nothing"),
    ((MODEL, CLUSTER, "--memory", "lots"), "cannot read size"),
    ((MODEL, CLUSTER, "--export", "word"), "--export must be one of parallelize-module, torchtitan"),
    ((MODEL,), "'llama-tiny:layers=4' is a model, so CLUSTER is missing"),
    (("problem.json", "--mesh", "2x2"), "a strategy graph takes no --mesh: that is for a model"),
])
def test_bad_input_is_refused(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_memory_that_nothing_meets(capsys):
    code, out, err = run(capsys, *SMALL, "--memory", "1MiB")
    assert (code, out) == (3, "")
    assert "does not fit on a mesh of 2x2: a device has 1 MiB, and holds at least" in err
    assert "of parameters with gradients and optimizer states" in err
    least = int(err.rpartition(" bytes)")[0].rpartition("(")[2])
    code, out, err = run(capsys, *SMALL, "--memory", f"{least + 1}B", "--json")
    assert code == 0, err
    assert json.loads(out)["held_bytes"] <= least + 1


def test_heads_that_do_not_divide_are_explained(capsys):
    code, out, err = run(capsys, "gpt2-tiny:heads=2,layers=4", CLUSTER, "--mesh", "4", "--batch", "8")
    assert code == 0, err
    assert "2 heads do not divide evenly by the 4 devices" in " ".join(out.split())


def test_an_operator_without_a_rule_is_named_once(capsys, tmp_path):
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        for _ in range(2):\n"
        "            x = torch.linalg.matrix_exp(self.linear(x).reshape(-1, 8, 8)).reshape(-1, 8)\n"
        "        return x.sum()\n"
        "def odd():\n"
        "    return Odd(), (torch.zeros(16, 8),)\n")
    code, _, err = run(capsys, f"{tmp_path}/odd.py:odd", CLUSTER, "--mesh", "4", "--json")
    assert code == 0, err
    lines = [line for line in err.splitlines() if line.startswith("warning")]
    assert len(lines) == 1, err
    assert "matrix_exp" in lines[0]
    assert "has no rule, so every device does all of it" in lines[0]
    assert "odd.py:8" in lines[0]


def test_inference(capsys):
    code, out, err = run(capsys, *SMALL, "--mode", "inference", "--json")
    assert code == 0, err
    when = {item["when"] for layer in json.loads(out)["layers"] for item in layer["collectives"]}
    assert when <= {"forward", "weights"}
