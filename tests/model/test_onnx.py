from __future__ import annotations

import contextlib
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.model.helpers import source_of
from weft.base.errors import ModelError
from weft.model.graph import TensorRole, check_graph
from weft.model.onnx import load_onnx
from weft.model.source import resolve_model
from weft.model.trace import trace

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return torch.softmax(self.head(self.pool(self.deep(y) + y).flatten(1)), dim=1)


def export(module, inputs, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), inputs, str(path), dynamo=False, **options)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    return export(Net(), (torch.randn(2, 3, 16, 16),), tmp_path_factory.mktemp("onnx") / "net.onnx",
                  input_names=["x"], do_constant_folding=False, training=torch.onnx.TrainingMode.EVAL)


def model_of(nodes, inputs, outputs, initializers=(), path=None):
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializer=list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    if path is not None:
        path.write_bytes(model.SerializeToString())
    return path


def value(name, *shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def stored(name, *shape):
    return helper.make_tensor(name, TensorProto.FLOAT, shape, np.zeros(shape, dtype=np.float32).tobytes(), raw=True)


def test_exported_model_agrees_with_the_trace(exported):
    graph = load_onnx(exported)
    check_graph(graph)
    ours = trace(source_of(lambda: Net(), (3, 16, 16), mode="inference")).graph
    pairs = {"Conv": "aten.conv2d", "Gemm": "aten.linear"}
    for theirs, mine in pairs.items():
        here = graph.flops[np.array(graph.op_kinds) == theirs].sum()
        # ONNX's products count no bias, aten's neither
        assert here == ours.flops[np.array(ours.op_kinds) == mine].sum(), theirs
    assert graph.batch == 2
    weights = {graph.tensor_names[index]: graph.tensor_shapes[index] for index in graph.parameters}
    assert weights["deep.weight"] == (8, 2, 3, 3)
    assert "/conv/Conv" in graph.op_names
    assert graph.op_modules[graph.op_index["/conv/Conv"]] == "conv"
    assert [graph.tensor_shapes[tensor] for tensor in graph.outputs] == [(2, 10)]
    assert not graph.has_backward
    edges = {(graph.op_kinds[a], graph.op_kinds[b]) for a, b, _ in graph.edges}
    assert ("Conv", "Add") in edges
    assert isinstance(resolve_model(str(exported)), type(graph))


def test_flops_and_bytes_by_hand(tmp_path):
    constant = helper.make_node("Constant", [], ["two"], value=helper.make_tensor("t", TensorProto.FLOAT, (), [2.0]))
    path = model_of(
        [constant,
         helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"),
         helper.make_node("Mul", ["h", "two"], ["s"], name="mul"),
         helper.make_node("Reshape", ["s", "shape"], ["r"], name="view"),
         helper.make_node("Gemm", ["r", "v"], ["y"], name="gemm", transA=0, transB=1)],
        [value("x", 2, 3, 4)], [value("y", 6, 7)],
        [stored("w", 4, 5), stored("v", 7, 5), helper.make_tensor("shape", TensorProto.INT64, (2,), [6, 5])],
        tmp_path / "m.onnx")
    graph = load_onnx(path)
    assert graph.op_names == ("mm", "mul", "view", "gemm")
    assert graph.flops.tolist() == [2 * 2 * 3 * 4 * 5, 30, 0, 2 * 6 * 5 * 7]
    assert graph.bytes_read.tolist() == [4 * (24 + 20), 4 * (30 + 1), 0, 4 * (30 + 35)]
    assert graph.bytes_written.tolist() == [120, 120, 0, 168]
    role = {name: TensorRole(int(kind)) for name, kind in zip(graph.tensor_names, graph.tensor_role, strict=True)}
    assert role["w"] is TensorRole.PARAMETER
    assert role["two"] is role["shape"] is TensorRole.BUFFER
    assert role["x"] is TensorRole.INPUT
    assert graph.tensor_base[graph.tensor_index["r"]] == graph.tensor_index["s"]


def test_recurrent_and_transposed_layers(tmp_path):
    path = model_of(
        [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=6, name="lstm")],
        [value("x", 5, 2, 4)], [value("y", 5, 1, 2, 6)], [stored("w", 1, 24, 4), stored("r", 1, 24, 6)],
        tmp_path / "lstm.onnx")
    assert load_onnx(path).flops.tolist() == [2 * 5 * 2 * (24 * 4 + 24 * 6)]
    path = model_of(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], name="up")],
        [value("x", 1, 3, 4, 4)], [value("y", 1, 5, 8, 8)], [stored("w", 3, 5, 2, 2)], tmp_path / "up.onnx")
    assert load_onnx(path).flops.tolist() == [2 * (3 * 4 * 4) * (5 * 2 * 2)]


def test_constant_parts_are_marked(tmp_path):
    path = model_of(
        [helper.make_node("Range", ["a", "b", "c"], ["positions"], name="range"),
         helper.make_node("Cast", ["positions"], ["floats"], to=TensorProto.FLOAT, name="cast"),
         helper.make_node("Add", ["x", "floats"], ["y"], name="add")],
        [value("x", 2, 4)], [value("y", 2, 4)],
        [helper.make_tensor(name, TensorProto.INT64, (), [number]) for name, number in (("a", 0), ("b", 4), ("c", 1))],
        tmp_path / "c.onnx")
    graph = load_onnx(path)
    assert dict(zip(graph.op_names, graph.is_constant.tolist(), strict=True)) == {
        "range": True, "cast": True, "add": False}


def test_symbolic_sizes_are_named_or_given(tmp_path):
    path = model_of([helper.make_node("Relu", ["x"], ["y"], name="relu")],
                    [value("x", "N", "length", 3)], [value("y", "N", "length", 3)], path=tmp_path / "s.onnx")
    with pytest.raises(ModelError, match=r"input 'x': dimension 0 is symbolic \(N\).*N=8"):
        load_onnx(path)
    with pytest.raises(ModelError, match=r"dimension 1 is symbolic \(length\)"):
        load_onnx(path, batch=4)
    graph = resolve_model(str(path), batch=4, options={"length": "6"})
    assert graph.tensor_shapes[graph.outputs[0]] == (4, 6, 3)
    assert graph.batch == 4
    with pytest.raises(ModelError, match="must be a whole number"):
        resolve_model(str(path), options={"length": "long"})


@pytest.mark.parametrize(("nodes", "message"), [
    ([helper.make_node("Relu", ["nothing"], ["y"], name="n")], "Relu, node name: n"),
    ([helper.make_node("NonZero", ["x"], ["i"], name="nz"), helper.make_node("Cast", ["i"], ["y"], to=1, name="c")],
     r"the shape of 'i', made by node 'nz' \(NonZero\), cannot be inferred"),
    ([helper.make_node("MatMul", ["x"], ["y"], name="mm")], "MatMul"),
    ([helper.make_node("NoSuchOperator", ["x"], ["y"], name="q")], "NoSuchOperator"),
])
def test_models_that_cannot_be_read_are_explained(nodes, message, tmp_path):
    path = model_of(nodes, [value("x", 2, 2)], [value("y", 2, 2)], path=tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=message):
        load_onnx(path)


def test_loops_are_refused(tmp_path):
    body = helper.make_graph([helper.make_node("Identity", ["x"], ["b"])], "body", [], [value("b", 2)])
    path = model_of([helper.make_node("If", ["p"], ["y"], name="if", then_branch=body, else_branch=body)],
                    [value("x", 2), value("p", kind=TensorProto.BOOL)], [value("y", 2)], path=tmp_path / "if.onnx")
    with pytest.raises(ModelError, match=r"'if' is If: loops and branches cannot be planned"):
        load_onnx(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ModelError, match="no file"):
        load_onnx(tmp_path / "nothing.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="no operators"):
        load_onnx(tmp_path / "empty.onnx")
    (tmp_path / "text.onnx").write_text("this is not a model")
    with pytest.raises(ModelError, match=r"not a readable ONNX file|no operators"):
        load_onnx(tmp_path / "text.onnx")


def test_a_missing_package_gives_the_install_command(monkeypatch, exported):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModelError, match=r"pip install 'weft\[onnx\]'"):
        load_onnx(exported)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_raise_only_model_errors(exported, tmp_path_factory, data):
    content = bytearray(exported.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[position] = data.draw(st.integers(0, 255))
        else:
            del content[position : position + data.draw(st.integers(1, 200))]
        content = content or bytearray(b"\0")
    path = tmp_path_factory.mktemp("damaged") / "net.onnx"
    path.write_bytes(bytes(content))
    with contextlib.suppress(ModelError):
        check_graph(load_onnx(path))


def test_a_size_that_no_model_has_is_refused(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "huge", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2**40, 2**40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    path = tmp_path / "huge.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    with pytest.raises(ModelError, match=r"tensor 'x' has the shape .* elements in all"):
        load_onnx(path)


# ---- small files that would become large ------------------------------------------------------------------------------


def nested_functions(depth, size=1):
    """Return functions each of which calls the one before it twice; the first has so many numbers in it."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    constant = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.FLOAT, [size], [0.0] * size))
    functions = [helper.make_function("f", "F0", ["a"], ["b"], [constant, helper.make_node("Relu", ["a"], ["b"])], imports)]
    for number in range(1, depth):
        calls = [helper.make_node(f"F{number - 1}", [read], [made], domain="f") for read, made in (("a", "t"), ("t", "b"))]
        functions.append(helper.make_function("f", f"F{number}", ["a"], ["b"], calls, imports))
    return functions


def with_functions(path, functions):
    graph = helper.make_graph([helper.make_node(functions[-1].name, ["x"], ["y"], domain="f")], "g", [value("x", 2, 3)],
                              [value("y", 2, 3)])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    path.write_bytes(helper.make_model(graph, functions=functions, opset_imports=imports).SerializeToString())
    return path


def test_functions_that_call_each_other_twice_are_counted_before_they_are_inlined(tmp_path):
    assert load_onnx(with_functions(tmp_path / "few.onnx", nested_functions(5))).num_ops == 16
    with pytest.raises(ModelError, match=r"so often that [\d,]{13} operators of [\d,]+ bytes would come from them: at most 100,000"):
        load_onnx(with_functions(tmp_path / "many.onnx", nested_functions(31)))
    with pytest.raises(ModelError, match=r"so often that [\d,]+ operators of [\d,]{13} bytes would come from them"):
        load_onnx(with_functions(tmp_path / "large.onnx", nested_functions(16, size=20_000)))


def test_functions_that_call_themselves_are_refused(tmp_path):
    functions = nested_functions(3)
    functions[0].node[1].op_type, functions[0].node[1].domain = "F2", "f"
    with pytest.raises(ModelError, match="must not be recursive"):
        load_onnx(with_functions(tmp_path / "cycle.onnx", functions))


def test_many_nodes_of_one_name_take_no_longer_than_others(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], [f"t{index}"], name="n") for index in range(20_000)]
    begin = time.process_time()
    graph = load_onnx(model_of(nodes, [value("x", 2)], [value("t0", 2)], path=tmp_path / "names.onnx"))
    assert time.process_time() - begin < 10  # more than 40 s where each name was tried from the first number on
    assert len(set(graph.op_names)) == 20_000


def growing(kind):
    """Return nodes whose values onnx would write down one by one: 2^28 or more of them."""
    start, limit, step = (helper.make_tensor(name, TensorProto.INT64, [], [number])
                          for name, number in (("a", 0), ("b", 2**40), ("d", 1)))
    if kind == "range":
        return [helper.make_node("Range", ["a", "b", "d"], ["r"])], [start, limit, step]
    doubled = [helper.make_node("Concat", [f"s{index}"] * 2, [f"s{index + 1}"], axis=0) for index in range(28)]
    return [helper.make_node("Shape", ["x"], ["s0"]), *doubled, helper.make_node("Identity", ["s28"], ["r"])], []


@pytest.mark.parametrize("kind", ["range", "concat"])
@pytest.mark.parametrize("complete", [True, False])
def test_values_of_long_shape_tensors_are_not_followed(tmp_path, kind, complete):
    nodes, stored_ = growing(kind)
    nodes.append(helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT))
    outputs = [value("y", 1)]
    if not complete:  # a shape that depends on values
        nodes += [helper.make_node("Shape", ["x"], ["p"]), helper.make_node("Slice", ["p", "p", "p"], ["q"]),
                  helper.make_node("ConstantOfShape", ["q"], ["z"])]
        outputs.append(value("z", 1))
    path = model_of(nodes, [value("x", 2, 3)], outputs, stored_, tmp_path / "long.onnx")
    begin = time.process_time()
    with contextlib.nullcontext() if complete else pytest.raises(ModelError, match="cannot be inferred"):
        load_onnx(path)
    assert time.process_time() - begin < 5
