"""``weft diff``: what it prints, its exit codes, and traces of prediction and run from ``weft show``."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.export.test_interchange import decoder, pipeline
from tests.worlds import plain_cluster
from weft.cli.main import main
from weft.cluster.cluster_file import to_json
from weft.model.graph_file import save_graph
from weft.plan.orders import gpipe
from weft.plan.plan import Plan, load_plan, save_plan


@pytest.fixture
def files(tmp_path) -> tuple[str, str, str]:
    """Write a model and two plans of it, 1F1B with cuts at 2 of 4 layers and GPipe with a cut at 1."""
    save_graph(decoder(), tmp_path / "model.json")

    def write(name: str, plan: Plan) -> str:
        described = replace(plan, cluster=replace(plan.cluster, description=to_json(plain_cluster(2))))
        save_plan(described, tmp_path / name)
        return str(tmp_path / name)

    return (write("a.json", pipeline(2, 2)), write("b.json", pipeline(1, 3, order=gpipe(2, 4))),
            str(tmp_path / "model.json"))


def test_plans_that_differ(files, capsys):
    a, b, model = files
    assert main(["diff", a, b, "--model", model]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "order 1f1b gpipe differs" in text
    assert "d0 d1 2 layers.1" in text, "operators that moved"
    assert "the plans differ: stages, placement, order" in text
    assert main(["diff", a, b, "--model", model, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["same"], result["differs"]) == (False, ["stages", "placement", "order"])
    assert [len(move["ops"]) for move in result["moves"]] == [2]
    assert result["predicted"]["peak_memory"].keys() == {"d0", "d1"}
    assert all(first == second for first, second in result["predicted"]["link_bytes"].values()), "all tensors are alike"
    assert {item["device"]: item["position"] for item in result["orders"]} == {"d0": 2, "d1": 1}


def test_plans_that_are_the_same(files, tmp_path, capsys):
    a, _, model = files
    plan = load_plan(a)
    again = tmp_path / "again.json"
    names = {"s0": "first", "s1": "second"}
    save_plan(replace(plan, stages=tuple(replace(stage, name=names[stage.name]) for stage in plan.stages), order={
        device: tuple(names[token[:2]] + token[2:] for token in tokens) for device, tokens in plan.order.items()}), again)
    assert main(["diff", a, str(again), "--model", model]) == 0
    assert capsys.readouterr().out.endswith("the plans are the same\n")
    assert main(["diff", a, str(again), "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


@pytest.mark.parametrize(("arguments", "message"), [
    (["none.json", "a.json"], "no file 'none.json'"), (["a.json"], "Missing argument 'B'"),
    (["a.json", "model.json", "--model", "model.json"], "format must be 'weft.plan'"),
    (["a.json", "b.json"], "is not a name from `weft models`: give it as well (--model)"),
    (["a.json", "b.json", "--model", "model.json", "--cluster", "2 x A100-80GB"], "made for another cluster")])
def test_bad_input(files, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(Path(files[0]).parent)
    assert main(["diff", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_show_lays_timelines_side_by_side(files, tmp_path, capsys):
    a, _, model = files
    timeline, trace = tmp_path / "run.json.gz", tmp_path / "trace.json.gz"
    assert main(["simulate", a, "--model", model, "-o", str(timeline)]) == 0
    record = json.loads(gzip.decompress(timeline.read_bytes()))
    timeline.write_bytes(gzip.compress(json.dumps({**record, "kind": "measured"}).encode()))
    capsys.readouterr()
    assert main(["show", a, "--model", model, "--timeline", str(timeline), "--trace", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "weft.plan"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(names) == ["d0 measured", "d0 predicted", "d1 measured", "d1 predicted"]
    slices = {kind: {event["name"] for event in events if event["ph"] == "X" and event["pid"] % 2 == number}
              for number, kind in enumerate(("measured", "predicted"))}
    assert slices["measured"] == slices["predicted"] != set()
