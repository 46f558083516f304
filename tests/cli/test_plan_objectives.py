"""``weft plan`` with objectives: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from weft.cli.main import main
from weft.cluster import read_cluster
from weft.plan.plan import load_plan

MODEL, CLUSTER = "gpt2-tiny", "2 x A100-80GB"
QUICK = ["--batch", "8", "--no-deploy", "-q"]


def run_json(capsys, *arguments):
    assert main(["plan", MODEL, CLUSTER, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_latency_is_planned_for_one_request(tmp_path, capsys):
    out = tmp_path / "plan.json"
    result = run_json(capsys, "--objective", "latency", "-q", "-o", str(out))
    plan = load_plan(out)
    assert (plan.model.mode, plan.model.batch, plan.microbatches) == ("inference", 1, 1)
    assert result["objective"] == "latency"
    assert "joint" in [row["strategy"] for row in result["strategies"]], "operators may be divided in inference, too"
    assert main(["check", str(out)]) == 0


def test_a_target_uses_few_devices_of_the_whole_cluster(tmp_path, capsys):
    out = tmp_path / "plan.json"
    result = run_json(capsys, *QUICK, "--strategy", "single", "--target", "10s", "-o", str(out))
    assert (result["target"], result["devices"]) == ("10s", ["a0"])
    plan = load_plan(out)
    assert plan.cluster.digest == read_cluster(CLUSTER).digest
    assert len(plan.cluster.devices) == 2
    assert main(["check", str(out)]) == 0


def test_headroom_is_kept_free_and_the_plan_is_for_the_real_cluster(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run_json(capsys, *QUICK, "--strategy", "1f1b", "--headroom", "79GB", "-o", str(out))
    assert load_plan(out).cluster.digest == read_cluster(CLUSTER).digest
    assert main(["check", str(out)]) == 0


def test_what_was_tried_is_printed(capsys):
    assert main(["plan", MODEL, CLUSTER, *QUICK, "--tried"]) == 0
    text = capsys.readouterr().out
    assert "Strategies" in text
    assert "stages 2x1 (replicas x tensor)" in text
    assert "the best" in text


@pytest.mark.parametrize(("code", "arguments", "message"), [
    (3, ["--strategy", "single", "--target", "1us"], "is not reached: the best plan for all 2 devices takes"),
    (2, ["--target", "100"], "has no unit"), (2, ["--headroom", "90GiB"], "leaves no memory on 'a0'"),
    (2, ["--objective", "cost"], "--objective must be one of throughput, latency"),
    (2, ["--objective", "latency", "--mode", "training"], "which is inference"),
    (2, ["--objective", "latency", "--microbatches", "4"], "plans one micro-batch, not 4"),
    (3, ["--strategy", "single", "--headroom", "79.999GB"], "too little")])
def test_what_it_refuses(capsys, code, arguments, message):
    assert main(["plan", MODEL, CLUSTER, *QUICK, *arguments]) == code
    assert message in capsys.readouterr().err


def test_the_bound_of_a_target_is_that_of_the_whole_cluster(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run_json(capsys, *QUICK, "--target", "10s", "-o", str(out))
    alone = run_json(capsys, *QUICK)
    assert load_plan(out).search.bound == pytest.approx(alone["bound"])


def test_no_input_is_written_over(tmp_path, capsys):
    cluster, plan, page = tmp_path / "cluster.yaml", tmp_path / "plan.json", tmp_path / "page.html"
    cluster.write_text('format: weft.cluster\nversion: 1\nhosts: [{name: a, devices: "1 x A100-80GB"}]\n')
    before = cluster.read_text()
    for arguments, message in (
            (["plan", MODEL, str(cluster), "-o", str(cluster)], "is an input as well, which would be lost"),
            (["plan", MODEL, CLUSTER, "-o", str(plan), "--html", str(plan)], "is that of --out as well"),
            (["plan", MODEL, CLUSTER, "-o", str(tmp_path)], "it is a folder"),
            (["plan", MODEL, CLUSTER, "--time-limit", "0"], "--time-limit must be a number of seconds above 0"),
            (["plan", MODEL, CLUSTER, "--time-limit", "nan"], "--time-limit must be a number of seconds above 0"),
            (["plan", MODEL, CLUSTER, "--headroom=-5%"], "must be at least 0% and less than 100%"),
            (["plan", MODEL, CLUSTER, "--headroom", "much"], "--headroom is a size such as 4GiB or a percentage")):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert cluster.read_text() == before
    assert not plan.exists()
    assert main(["plan", MODEL, str(cluster), *QUICK, "-o", str(plan)]) == 0
    kept = plan.read_text()
    assert main(["show", str(plan), "--html", str(plan)]) == 2
    assert plan.read_text() == kept
    assert main(["show", str(plan), "--html", str(page)]) == 0
