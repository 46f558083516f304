"""``weft deploy``: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from weft.cli import deploy_commands
from weft.cli.main import main
from weft.search.common.budget import OutOfTime
from weft.search.deploy import search

MIXED = """
format: weft.cluster
version: 1
hosts:
  - {name: a, devices: "1 x A100-80GB", intra: nvlink3}
  - {name: b, devices: "1 x V100", intra: pcie3}
network: {bandwidth: 10Gbit/s, latency: 20us}
"""
ARGUMENTS = ["--batch", "8", "--time-limit", "1", "--quiet"]


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    return str(path)


def test_the_result_and_the_plan(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(deploy_commands, "PLAIN_GRACE_S", 60.0)
    out = tmp_path / "plan.json"
    assert main(["deploy", "gpt2-tiny", cluster, *ARGUMENTS, "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "feasible"
    assert result["bound"] <= result["step_time"] <= result["data_parallel"]
    assert result["plan"] == json.loads(out.read_text())
    assert main(["check", str(out)]) == 0


def test_data_parallelism_that_is_not_timed_in_time_is_not_called_too_large(cluster, capsys, monkeypatch):
    original = search.deploy

    def late(problem, options=None, **more):
        if options.method == "data-parallel":
            raise OutOfTime
        return original(problem, options, **more)

    monkeypatch.setattr(search, "deploy", late)
    assert main(["deploy", "gpt2-tiny", cluster, *ARGUMENTS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["data_parallel"], result["data_parallel_reason"]) == (None, "not timed: the time limit was reached")


def test_a_missing_weights_file_costs_one_warning_only(cluster, tmp_path, capsys, caplog):
    weights = str(tmp_path / "none.safetensors")
    assert main(["deploy", "gpt2-tiny", cluster, *ARGUMENTS, "--weights", weights]) == 0
    assert "data parallel" in capsys.readouterr().out
    assert [record.message for record in caplog.records if "without the network" in record.message]


def test_hosts_without_a_way_between_them(tmp_path, capsys):
    path = tmp_path / "apart.yaml"
    path.write_text(MIXED.replace("network: {bandwidth: 10Gbit/s, latency: 20us}", ""))
    assert main(["deploy", "gpt2-tiny", str(path), *ARGUMENTS]) == 2
    assert "disconnected" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--method", "magic"], "--method"), (["--dtype", "int8"], "--dtype"), (["--microbatches", "3"], "cannot be divided")])
def test_what_it_refuses(cluster, capsys, arguments, message):
    assert main(["deploy", "gpt2-tiny", cluster, *ARGUMENTS, *arguments]) == 2
    assert message in capsys.readouterr().err
