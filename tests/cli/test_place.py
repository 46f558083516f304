"""``weft place``: what it prints where, its files, its exit codes, and messages for odd input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.search.place.check_json import check_result
from tests.show.place_results import DIAMOND, PAIR, result_of
from weft.base.errors import NoFeasiblePlan
from weft.cli.main import main
from weft.search.place.methods import METHODS
from weft.search.place.timetable import PlaceResult

SEARCH = "weft.search.place.search"


@dataclass(frozen=True)
class Row:
    method: str
    value: float | None
    reason: str
    result: PlaceResult | None


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Return a graph file and a cluster file."""
    (tmp_path / "net.json").write_text(json.dumps(DIAMOND))
    (tmp_path / "pair.json").write_text(json.dumps(PAIR))
    return [tmp_path / "net.json", tmp_path / "pair.json"]


@pytest.fixture
def calls(monkeypatch):
    """Replace the search by one that puts everything but ``right`` on the GPU, and notes how it was called."""
    made = []

    def result(problem, objective, **more):
        devices = [1 if name == "right" else 0 for name in problem.op_names]
        loads = {"loads": {"g": 6.0, "c": 3.0}, "value": 6.0} if objective == "throughput" else {}
        return result_of(problem, devices, objective=objective, **{**loads, **more})

    def place(problem, *, progress, **options):
        made.append({"ops": problem.num_ops, **options})
        progress("latency 6.5 s, bound 3.25 s, gap 50 %")
        return result(problem, options["objective"], is_interrupted=options["seed"] == 99)

    def compare(problem, *, progress, **options):
        made.append({"ops": problem.num_ops, "compare": True, **options})
        rows = [Row("sequential", None, "does not fit: 30 bytes are missing on 'g'", None),
                Row("single", 8.0, "", result_of(problem, [0] * problem.num_ops, by="single", is_interrupted=options["seed"] == 99)),
                Row("auto", 6.5, "", result(problem, options["objective"]))]
        return tuple(row for row in rows if options["seed"] != 7 or row.result is None)

    monkeypatch.setitem(sys.modules, SEARCH, types.SimpleNamespace(place=place, compare=compare, load_compiled=lambda: None))
    return made


def run(capsys, *arguments: object, code: int = 0):
    capsys.readouterr()
    assert main(["place", *map(str, arguments)]) == code
    return capsys.readouterr()


def fails(capsys, *arguments: object, code: int = 2) -> str:
    captured = run(capsys, *arguments, code=code)
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_json_is_exactly_the_result_and_progress_goes_to_stderr(capsys, files, calls):
    captured = run(capsys, *files, "--method", "heft", "--time-limit", 7.5, "--seed", 3, "--json")
    assert 0 < calls[0].pop("time_limit") < 7.5  # what reading has left of it
    assert calls == [{"ops": 4, "method": "heft", "objective": "latency", "contiguous": False, "seed": 3}]
    value = json.loads(captured.out)
    assert list(value) == ["status", "objective", "value", "bound", "placement", "starts", "transfers", "peak_memory", "by", "seconds",
                           "import_seconds"]
    assert value["value"] == 6.5
    assert value["placement"] == {"in": "g", "left": "g", "right": "c", "out": "g"}
    assert value["starts"]["right"] == ["c", 1.5, 4.5]
    assert value["transfers"] == [["in", "right", 1.0, 1.5], ["right", "out", 4.5, 5.5]]
    assert captured.err == "latency 6.5 s, bound 3.25 s, gap 50 %\n"
    assert run(capsys, *files, "--json", "--quiet").err == ""


def test_without_json_there_are_summary_devices_path_and_chart(capsys, files, calls):
    text = run(capsys, *files, "--width", 70).out
    squeezed = " ".join(text.split())
    for part in ("placement net on pair", "latency 6.5 s (bound 3.25 s, gap 50.0 %)", "status feasible, by hand", "operators 4 ",
                 "busiest c>g with 1 s", "g gpu 3 6 s 92.3 % 300 B 1000 B 30.0 %", "Critical path", "1.5 s c right 3 s 46.2 % transfer",
                 "g |AAAAAAA", "search 0.25 CPU seconds"):
        assert part in squeezed, part
    assert "Methods" not in text
    assert max(map(len, text.splitlines())) <= 70


def test_throughput_shows_loads(capsys, files, calls):
    text = run(capsys, *files, "--objective", "throughput", "--contiguous").out
    assert calls[0]["objective"] == "throughput"
    assert calls[0]["contiguous"] is True
    assert "Load per request" in text
    assert "g is the bottleneck" in text


def test_compare_sorts_methods_and_says_why_one_has_none(capsys, files, calls):
    text = " ".join(run(capsys, *files, "--compare").out.split())
    assert "auto 6.5 s 1.000 single 8 s 1.231 sequential - - does not fit: 30 bytes are missing on 'g'" in text
    assert "latency 6.5 s" in text
    value = json.loads(run(capsys, *files, "--compare", "--json").out)
    assert value["methods"] == [{"method": "auto", "value": 6.5, "reason": ""}, {"method": "single", "value": 8.0, "reason": ""},
                                {"method": "sequential", "value": None, "reason": "does not fit: 30 bytes are missing on 'g'"}]
    assert value["value"] == 6.5
    one = json.loads(run(capsys, *files, "--compare", "--json", "--method", "single").out)
    assert (one["value"], one["by"]) == (8.0, "single")
    assert len(one["methods"]) == 3
    run(capsys, *files, "--compare", "--json", "--seed", 7)  # no method has one: the search itself is asked
    assert "compare" not in calls[-1]


def test_files_are_written(capsys, files, tmp_path, calls):
    html, svg, out = tmp_path / "new" / "a.html", tmp_path / "a.svg", tmp_path / "a.json"
    captured = run(capsys, *files, "--html", html, "--svg", svg, "--out", out, "--compare", "--json")
    printed = json.loads(captured.out)
    assert json.loads(out.read_text()) == {key: item for key, item in printed.items() if key != "seconds"}
    assert "<h1>net on pair</h1>" in html.read_text()
    assert "Methods" in html.read_text()
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {path.name for path in tmp_path.iterdir()} == {"net.json", "pair.json", "new", "a.svg", "a.json"}


def test_an_output_that_cannot_be_written_is_found_before_the_search(capsys, files, tmp_path, calls):
    for option in ("--html", "--svg", "--out", "--plan"):
        assert "it is a folder" in fails(capsys, *files, option, tmp_path)
    assert calls == []
    assert "cannot write" in fails(capsys, *files, "--svg", files[0] / "a.svg", "-q")


BAD = [
    (["NET"], "CLUSTER is missing: give a cluster file or a text such as '2 x A100-80GB'"),
    ([], "Missing argument"),
    (["NET", "PAIR", "--contiguous"], "--contiguous is for --objective throughput"),
    (["NET", "PAIR", "--objective", "speed"], "--objective must be one of latency, throughput, not 'speed'"),
    (["NET", "PAIR", "--fusion", "magic"], "--fusion must be one of none, rules, inductor, onnxruntime, not 'magic'"),
    (["NET", "PAIR", "--format", "onnx"], "--format must be one of weft, dnn-partitioning, not 'onnx'"),
    (["NET", "PAIR", "--time-limit", "0"], "--time-limit must be a number of seconds above 0"),
    (["NET", "PAIR", "--time-limit", "nan"], "--time-limit must be a number of seconds above 0"),
    (["NET", "PAIR", "--width", "0"], "--width must be at least 1"),
    (["NET", "PAIR", "--batch", "4"], "--batch is for models; the graph file"),
    (["NET", "PAIR", "--dtype", "int8"], "--dtype must be one of"),
    (["NET", "PAIR", "--profile", "none.sqlite"], "no profile store 'none.sqlite'"),
    (["NET", "PAIR", "--colour"], "No such option"),
    (["NET", "nowhere.yaml"], "no file 'nowhere.yaml'"),
    (["NET", "4 x Q100"], "Q100"),
    (["NET", "2 x A100-40GB"], "have no time on device kind 'A100-40GB'"),
    (["gpt3", "PAIR"], "no model 'gpt3'"),
    (["none.json", "PAIR"], "no file 'none.json'"),
    (["none.onnx", "PAIR"], "none.onnx"),
    (["PAIR", "PAIR"], "format must be 'weft.graph', not 'weft.cluster'"),
    (["NET", "PAIR", "--format", "dnn-partitioning"], "--format dnn-partitioning takes no CLUSTER: the file has its own devices and times"),
    (["NET", "--format", "dnn-partitioning", "--batch", "2", "--compare"], "takes no --batch or --compare"),
    (["NET", "--format", "dnn-partitioning", "--svg", "a.svg"], "takes no --svg"),
    (["none.json", "--format", "dnn-partitioning"], "no file 'none.json'"),
    (["NET", "--format", "dnn-partitioning"], "is not a known field"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(item[0]) for item in BAD])
def test_bad_input_gives_one_message(capsys, files, calls, arguments, message):
    named = {"NET": files[0], "PAIR": files[1]}
    text = fails(capsys, *(named.get(item, item) for item in arguments), "-q")
    assert message in " ".join(text.replace("\u2502", " ").split())
    assert len(text) < 2000
    assert calls == []


def test_infeasible_memory_has_its_own_exit_code(capsys, files, monkeypatch):
    def place(*_, **__):
        raise NoFeasiblePlan("memory is 200 bytes short: 'left' fits nowhere", missing_bytes=200)

    monkeypatch.setitem(sys.modules, SEARCH, types.SimpleNamespace(place=place, compare=None, load_compiled=lambda: None))
    assert "'left' fits nowhere" in fails(capsys, *files, code=3)


def test_an_interrupted_search_says_so(capsys, files, calls):
    captured = run(capsys, *files, "--seed", 99, code=130)
    assert "interrupted: this is the best so far" in captured.err
    assert "feasible, by hand, interrupted" in captured.out
    assert "interrupted: this is the best so far" in run(capsys, *files, "--seed", 99, "--compare", code=130).err


def test_devices_without_a_way_between_them_are_named(capsys, tmp_path, files, calls):
    (tmp_path / "apart.json").write_text(json.dumps({**PAIR, "links": []}))
    assert "nothing can be sent from" in fails(capsys, files[0], tmp_path / "apart.json")


def test_the_library_is_not_loaded_for_help():
    script = ("import sys; from weft.cli.main import main; main(['place', '--help']); "
              "print(sorted({'numpy', 'ortools', 'numba', 'torch'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    for option in ("--objective", "--method", "--contiguous", "--time-limit", "--seed", "--compare", "--fusion", "--profile", "--batch",
                   "--dtype", "--format", "--out", "--plan", "--html", "--svg", "--width", "--json", "--quiet"):
        assert option in done.stdout, option


# ---- with the search itself


def branches(num_blocks: int) -> dict:
    """Return blocks of three branches each, too many for a quick proof."""
    ops, edges = [{"name": "in", "kind": "op", "times": {"gpu": 1.0, "cpu": 1.5}, "memory": 10}], []
    for block in range(num_blocks):
        last = ops[-1]["name"]
        for branch in range(3):
            for step in range(2):
                name = f"b{block}.{branch}.{step}"
                time = 1.0 + (7 * block + 5 * branch + 3 * step) % 11 / 10
                ops.append({"name": name, "kind": "op", "times": {"gpu": time, "cpu": 1.7 * time}, "memory": 20})
                edges.append({"from": f"b{block}.{branch}.0" if step else last, "to": name, "bytes": 20 + 13 * branch})
        ops.append({"name": f"join{block}", "kind": "op", "times": {"gpu": 0.5, "cpu": 0.6}})
        edges += [{"from": f"b{block}.{branch}.1", "to": f"join{block}", "bytes": 30} for branch in range(3)]
    return {"format": "weft.graph", "version": 1, "ops": ops, "edges": edges}


def tangle(num_layers: int) -> dict:
    """Return layers of six operators that each read from three of the layer before: nowhere is the graph in series."""
    ops = [{"name": f"t{layer}.{index}", "kind": "op", "memory": 1, "times": {"gpu": time, "cpu": (1.3 + index / 10) * time}}
           for layer in range(num_layers) for index in range(6) for time in [1.0 + (7 * layer + 5 * index) % 11 / 10]]
    edges = [{"from": f"t{layer - 1}.{(index + step) % 6}", "to": f"t{layer}.{index}", "bytes": 20 + (layer * index + step) % 7}
             for layer in range(1, num_layers) for index in range(6) for step in (0, 1, 3)]
    return {"format": "weft.graph", "version": 1, "ops": ops, "edges": edges}


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("graph", [DIAMOND, branches(2)], ids=["diamond", "branches"])
def test_the_search_gives_a_checked_placement(capsys, tmp_path, files, objective, graph):
    (tmp_path / "g.json").write_text(json.dumps(graph))
    arguments = [tmp_path / "g.json", files[1], "--objective", objective, "--time-limit", 2]
    value = json.loads(run(capsys, *arguments, "--json", "--compare").out)
    assert check_result(graph, PAIR, value) == []
    values = [row["value"] for row in value["methods"] if row["value"] is not None]
    assert value["value"] == min(values) == values[0]
    assert len(value["methods"]) == len(METHODS) + 1
    text = run(capsys, *arguments, "--html", tmp_path / "a.html", "--svg", tmp_path / "a.svg").out
    assert "g " in text
    assert (tmp_path / "a.html").stat().st_size > 0


def test_every_method_can_be_asked_for_by_name(capsys, files):
    for method in METHODS:
        value = json.loads(run(capsys, *files, "--method", method, "--json", "-q").out)
        assert value["by"] == method
    assert f"--method must be one of auto, {', '.join(METHODS)}, not 'magic'" in fails(capsys, *files, "--method", "magic")


def test_memory_that_is_too_small_says_what_is_missing_and_what_does_not_fit(capsys, tmp_path, files):
    tight = {**PAIR, "devices": [{**device, "memory": 250} for device in PAIR["devices"]]}
    (tmp_path / "tight.json").write_text(json.dumps(tight))
    text = fails(capsys, files[0], tmp_path / "tight.json", "--time-limit", 2, "-q", code=3)
    assert "'right'" in text
    assert "50 B" in text


def test_ctrl_c_prints_the_best_placement_so_far(tmp_path, files):
    (tmp_path / "g.json").write_text(json.dumps(tangle(20)))
    process = subprocess.Popen([sys.executable, "-m", "weft.cli.main", "place", tmp_path / "g.json", files[1], "--time-limit", "60", "--json"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "best" not in (line := process.stderr.readline()) or "inf" in line:
            assert line, "it ended before it was interrupted"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert process.returncode == 130
    assert "interrupted: this is the best so far" in err
    value = json.loads(out)
    assert value["status"] == "feasible"
    assert check_result(tangle(20), PAIR, value) == []


def test_the_same_input_gives_the_same_placement(capsys, tmp_path, files):
    (tmp_path / "g.json").write_text(json.dumps(branches(2)))
    first, second = (json.loads(run(capsys, tmp_path / "g.json", files[1], "--method", "heft", "--json").out) for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


# ---- models, plans, and the dnn-partitioning benchmark

MODEL = "gpt2-tiny:layers=1"
MIXED = "2 x A100-80GB, 1 x RTX3090"


def test_a_model_is_fused_placed_and_planned(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    captured = run(capsys, MODEL, MIXED, "--method", "even", "--batch", 2, "--plan", plan, "--json")
    value = json.loads(captured.out)
    assert "tracing gpt2-tiny" in captured.err
    assert f"{len(value['placement'])} after it" in captured.err
    assert f"plan written to {plan}: " in captured.err
    assert set(value["groups"]) <= set(value["placement"])
    assert any(len(ops) > 2 for ops in value["groups"].values())
    assert main(["check", str(plan), "--json"]) == 0
    saved = json.loads(plan.read_text())
    device_of = {op: stage["replicas"][0]["devices"][0] for stage in saved["stages"] for op in stage["ops"]}
    for name, device in value["placement"].items():
        assert {device_of[op] for op in value["groups"].get(name, [name])} == {device}
    assert saved["model"]["mode"] == "inference"
    assert saved["model"]["batch"] == 2
    assert saved["search"]["by"] == "place"
    text = run(capsys, MODEL, MIXED, "--method", "even", "--batch", 2, "-q").out
    assert "before fusion (rules)" in text
    assert "request    2 samples" in text


def test_without_fusion_only_constants_are_left_out(capsys):
    value = json.loads(run(capsys, MODEL, MIXED, "--method", "single", "--fusion", "none", "--json", "-q").out)
    assert value["groups"] == {}
    assert len(set(value["placement"].values())) == 1


def test_a_graph_file_can_be_planned(capsys, tmp_path, files):
    run(capsys, *files, "--method", "heft", "--plan", tmp_path / "plan.json", "-q")
    assert main(["check", str(tmp_path / "plan.json"), "--model", str(files[0])]) == 0


def test_fusions_that_need_another_kind_of_model_say_so(capsys, files):
    assert "inductor needs a PyTorch model" in fails(capsys, *files, "--fusion", "inductor")
    assert "ONNX Runtime needs the ONNX file" in fails(capsys, MODEL, MIXED, "--fusion", "onnxruntime")


PARTITION = {"maxSizePerFPGA": 10.0, "maxFPGAs": 2, "maxCPUs": 1,
             "nodes": [{"id": 3 * index, "supportedOnFpga": 1, "cpuLatency": 20.0, "fpgaLatency": 4.0, "size": 4.0, "isBackwardNode": 0}
                       for index in range(4)],
             "edges": [{"sourceId": 3 * index, "destId": 3 * index + 3, "cost": 0.5} for index in range(3)]}
"""Four nodes in a row; an accelerator holds two of them."""


@pytest.mark.parametrize(("objective", "value"), [("throughput", 8.5), ("latency", 17.0)])
def test_problems_of_the_benchmark_are_solved(capsys, tmp_path, objective, value):
    (tmp_path / "p.json").write_text(json.dumps(PARTITION))
    arguments = [tmp_path / "p.json", "--format", "dnn-partitioning", "--objective", objective, "--time-limit", 5]
    result = json.loads(run(capsys, *arguments, "--json", "--out", tmp_path / "out.json").out)
    assert result["value"] == pytest.approx(value)
    assert result["bound"] <= result["value"] + 1e-9
    assert set(result["placement"]) == {"0", "3", "6", "9"}
    nodes = [node for machine in (*result["split"]["fpgas"], *result["split"]["cpus"]) for node in machine["nodes"]]
    assert sorted(nodes) == [0, 3, 6, 9]
    assert json.loads((tmp_path / "out.json").read_text()) == {
        key: item for key, item in result.items() if key not in ("seconds", "import_seconds")}
    text = " ".join(run(capsys, *arguments, "-q").out.split())
    assert f"{value:g} (bound" in text
    assert "fpga0 2 8.5 " in text
    assert "8 B of 10 B" in text


def test_a_benchmark_problem_without_room_has_its_own_exit_code(capsys, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({**PARTITION, "maxCPUs": 0, "maxSizePerFPGA": 7.0}))
    text = fails(capsys, tmp_path / "p.json", "--format", "dnn-partitioning", "--objective", "throughput", "--time-limit", 5, "-q", code=3)
    assert "bytes are missing" in text
