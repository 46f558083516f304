"""Devices in an ONNX file's node metadata: every node has its own, and nothing else has changed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.worlds import plain_cluster
from weft.base.errors import InputError
from weft.cli.main import main
from weft.cost.costs import estimate_costs
from weft.export.device_map import op_properties
from weft.model.graph import Graph
from weft.model.onnx import annotate_onnx, load_onnx
from weft.plan.check import check_plan
from weft.plan.plan import Plan, save_plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.place.placed_plan import OpPlacement, placed_plan

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def branched_file(path: Path, *, external: bool = False, metadata: bool = False) -> Path:
    """Write a model with a constant node, constant operators, branches, and nodes without names."""
    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(np.random.default_rng(0).normal(size=shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Constant", [], ["two"], value=helper.make_tensor("t", TensorProto.FLOAT, (), [2.0])),
        helper.make_node("Range", ["zero", "four", "one"], ["positions"]),
        helper.make_node("Cast", ["positions"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"),
        helper.make_node("Mul", ["h", "two"], ["a"]),
        helper.make_node("Add", ["h", "floats"], ["b"]),
        helper.make_node("Split", ["b"], ["b0", "b1"], name="split", num_outputs=2, axis=1),
        helper.make_node("Concat", ["b1", "b0"], ["c"], axis=1),
        helper.make_node("Gemm", ["a", "v"], ["d"], name="gemm"),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    if metadata:
        nodes[3].metadata_props.add(key="owner", value="somebody")
        nodes[3].metadata_props.add(key="weft.device", value="an old one")
    whole = [helper.make_tensor(name, TensorProto.INT64, (), [number])
             for name, number in (("zero", 0), ("four", 4), ("one", 1))]
    graph = helper.make_graph(
        nodes, "branched", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 4))],
        initializer=[weight("w", 4, 4), weight("v", 4, 4), *whole])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if external:
        onnx.save_model(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    else:
        path.write_bytes(model.SerializeToString())
    return path


def random_plan(graph: Graph, num_devices: int = 3, *, seed: int = 0) -> Plan:
    rng = random.Random(seed)
    cluster = plain_cluster(num_devices)
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                      options=PlanOptions(batch=graph.batch, mode="inference"))
    device = np.asarray([rng.randrange(num_devices) for _ in range(graph.num_ops)])
    plan = placed_plan(problem, OpPlacement(device=device, order=np.arange(graph.num_ops)))
    check_plan(plan, graph, cluster)
    return plan


def properties_of(node) -> dict[str, str]:
    return {item.key: item.value for item in node.metadata_props}


def without_metadata(model) -> bytes:
    copy = type(model)()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        del node.metadata_props[:]
    return copy.SerializeToString(deterministic=True)


def test_every_node_has_its_device_and_all_else_is_as_before(tmp_path):
    path, out = branched_file(tmp_path / "m.onnx"), tmp_path / "placed.onnx"
    graph = load_onnx(path)
    plan = random_plan(graph)
    done = annotate_onnx(path, out, graph, op_properties(plan, graph))
    before, after = onnx.load(path), onnx.load(out)
    onnx.checker.check_model(after, full_check=True)
    assert without_metadata(after) == without_metadata(before)
    assert (done.num_nodes, done.num_annotated) == (10, 9)
    stage_of = {op: stage for stage in plan.stages for op in stage.ops}
    for node in after.graph.node:
        if node.op_type == "Constant":
            assert not node.metadata_props
        elif node.op_type in ("Range", "Cast"):
            assert properties_of(node)["weft.stage"]
        else:
            producer = int(graph.tensor_producer[graph.tensor_index[node.output[0]]])
            stage = stage_of[graph.op_names[producer]]
            assert properties_of(node) == {"weft.device": stage.replicas[0].devices[0], "weft.stage": stage.name}
    assert len({properties_of(node)["weft.device"] for node in after.graph.node if node.op_type != "Constant"}) == 3


def test_the_written_file_computes_the_same(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    path, out = branched_file(tmp_path / "m.onnx"), tmp_path / "placed.onnx"
    graph = load_onnx(path)
    annotate_onnx(path, out, graph, op_properties(random_plan(graph), graph))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    first, second = (runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
                     for file in (path, out))
    np.testing.assert_array_equal(first, second)
    assert load_onnx(out).digest == graph.digest


def test_other_properties_stay_and_old_ones_are_replaced(tmp_path):
    path, out = branched_file(tmp_path / "m.onnx", metadata=True), tmp_path / "placed.onnx"
    graph = load_onnx(path)
    annotate_onnx(path, out, graph, op_properties(random_plan(graph), graph))
    found = properties_of(onnx.load(out).graph.node[3])
    assert found["owner"] == "somebody"
    assert found["weft.device"].startswith("d")


def test_weights_in_another_file_are_left_there(tmp_path):
    path = branched_file(tmp_path / "m.onnx", external=True)
    graph = load_onnx(path)
    properties = op_properties(random_plan(graph), graph)
    hidden = (tmp_path / "weights.bin").rename(tmp_path / "moved")  # it is not even looked at
    annotate_onnx(path, tmp_path / "placed.onnx", graph, properties)
    hidden.rename(tmp_path / "weights.bin")
    onnx.checker.check_model(str(tmp_path / "placed.onnx"))
    assert onnx.load(tmp_path / "placed.onnx").graph.initializer[0].raw_data == onnx.load(path).graph.initializer[0].raw_data
    with pytest.raises(InputError, match=r"keeps weights in 'weights\.bin' beside it"):
        annotate_onnx(path, tmp_path / "elsewhere" / "placed.onnx", graph, properties)


def test_another_file_is_refused(tmp_path):
    graph = load_onnx(branched_file(tmp_path / "m.onnx"))
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.node[-1].output[0] = "z"
    model.graph.output[0].name = "z"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(InputError, match=r"no node that makes the outputs of operator 'Add_\d'"):
        annotate_onnx(tmp_path / "other.onnx", tmp_path / "out.onnx", graph, op_properties(random_plan(graph), graph))
    assert not (tmp_path / "out.onnx").exists()


# ---- command line ---------------------------------------------------------------------------------------------------


def test_export_command(tmp_path, capsys):
    path, plan_file, out = branched_file(tmp_path / "m.onnx"), tmp_path / "plan.json", tmp_path / "placed.onnx"
    save_plan(random_plan(load_onnx(path)), plan_file)
    arguments = ["export", str(plan_file), "--format", "onnx"]
    assert main([*arguments, "--model", str(path), "-o", str(out), "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out) == {"format": "onnx", "nodes": 10, "annotated": 9}
    assert onnx.load(out).graph.node[3].metadata_props
    assert main([*arguments, "-o", str(out)]) == 2
    assert "--model FILE.onnx" in capsys.readouterr().err
    assert main([*arguments, "--model", str(path)]) == 2
    assert "--out FILE.onnx" in capsys.readouterr().err
    assert main(["export", str(plan_file), "--format", "device-map", "--model", str(path)]) == 2
    assert "use --format onnx" in capsys.readouterr().err


def test_an_onnx_file_is_planned_and_exported_from_the_command_line(tmp_path, capsys):
    path, plan_file, out = branched_file(tmp_path / "m.onnx"), tmp_path / "plan.json", tmp_path / "placed.onnx"
    assert main(["plan", str(path), "2 x A100-80GB", "--mode", "inference", "--batch", "4", "--strategy", "gpipe",
                 "-o", str(plan_file), "-q"]) == 0
    assert main(["export", str(plan_file), "--format", "onnx", "--model", str(path), "-o", str(out), "-q"]) == 0
    devices = {properties_of(node).get("weft.device") for node in onnx.load(out).graph.node}
    assert {"a0", "a1"} <= devices
    capsys.readouterr()
