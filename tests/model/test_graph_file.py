from __future__ import annotations

import copy
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.helpers import zoo
from weft.base.errors import ModelError
from weft.model.graph import Graph, check_graph
from weft.model.graph_file import graph_to_json, load_graph, parse_graph, save_graph
from weft.model.trace import trace

PLAIN: dict[str, Any] = {
    "format": "weft.graph", "version": 1,
    "ops": [
        {"name": "relu1", "kind": "relu", "flops": 401408, "bytes_read": 401408, "bytes_written": 401408},
        {"name": "conv1", "kind": "conv2d", "times": {"gpu": 0.8, "cpu": 9.1}, "memory": 1048576, "on": ["gpu", "cpu"]},
        {"name": "pool", "kind": "pool", "times": {"gpu": 0.1}, "colocate": "a"},
        {"name": "head", "kind": "gemm", "times": {"gpu": 0.2, "d3": 0.4}, "colocate": "a"}],
    "edges": [
        {"from": "conv1", "to": "relu1", "bytes": 401408, "tensor": "conv1:0"},
        {"from": "conv1", "to": "pool", "bytes": 401408, "tensor": "conv1:0"},
        {"from": "relu1", "to": "head", "times": {"d0>d1": 0.5, "d1>d0": 0.25}},
        {"from": "pool", "to": "head", "bytes": 10}]}


@pytest.fixture(scope="module")
def traced() -> Graph:
    return trace(zoo("gpt2-tiny:layers=2"), batch_dims=True).graph


def equal(a: Graph, b: Graph) -> None:
    assert a.digest == b.digest
    for key in Graph.__dataclass_fields__:
        left, right = getattr(a, key), getattr(b, key)
        assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right, key


# ---- good files ---------------------------------------------------------------------------------------------------


def test_plain_file_becomes_a_graph_in_topological_order():
    graph = parse_graph(PLAIN, name="small")
    check_graph(graph)
    assert graph.name == "small"
    assert graph.op_names.index("conv1") < graph.op_names.index("relu1") < graph.op_names.index("head")
    conv, relu = graph.op_index["conv1"], graph.op_index["relu1"]
    assert graph.given is not None
    assert graph.given.times[conv] == {"gpu": 0.8, "cpu": 9.1}
    assert graph.given.times[relu] is None
    assert graph.given.memory_bytes[conv] == 1048576
    assert graph.given.allowed_kinds[conv] == ("gpu", "cpu")
    assert graph.given.colocate[graph.op_index["pool"]] == graph.given.colocate[graph.op_index["head"]] == "a"
    assert graph.flops[relu] == graph.bytes_read[relu] == graph.bytes_written[relu] == 401408
    shared = graph.tensor_index["conv1:0"]
    assert (graph.inputs == shared).sum() == 2
    assert graph.tensor_bytes[shared] == 401408
    timed = next(index for index, times in enumerate(graph.given.transfer_times) if times)
    assert graph.given.transfer_times[timed] == {"d0>d1": 0.5, "d1>d0": 0.25}
    assert graph.num_tensors == 3
    assert len(graph.edges) == 4


def test_edges_without_a_name_are_separate_tensors_and_labels_may_repeat():
    value = {**PLAIN, "ops": [{"name": name, "flops": 1} for name in "abc"], "edges": [
        {"from": "a", "to": "c", "bytes": 1}, {"from": "a", "to": "c", "bytes": 2},
        {"from": "a", "to": "b", "bytes": 3, "tensor": "out"}, {"from": "b", "to": "c", "bytes": 4, "tensor": "out"}]}
    graph = parse_graph(value)
    assert sorted(graph.tensor_bytes) == [1, 2, 3, 4]
    assert len(set(graph.tensor_names)) == 4


def test_plain_graph_is_written_as_it_was_read(tmp_path):
    graph = parse_graph(PLAIN, name="g")
    for name in ("g.json", "g.json.gz"):
        save_graph(graph, tmp_path / name)
        equal(load_graph(tmp_path / name), graph)
    assert set(graph_to_json(graph)) == {"format", "version", "name", "ops", "edges"}


def test_traced_graph_survives_saving(traced, tmp_path):
    save_graph(traced, tmp_path / "gpt2.json.gz")
    equal(load_graph(tmp_path / "gpt2.json.gz"), traced)
    first = (tmp_path / "gpt2.json.gz").read_bytes()
    save_graph(load_graph(tmp_path / "gpt2.json.gz"), tmp_path / "gpt2.json.gz")
    assert (tmp_path / "gpt2.json.gz").read_bytes() == first


def test_traced_file_still_has_the_documented_fields(traced):
    value = graph_to_json(traced)
    assert all({"name", "kind", "flops"} <= op.keys() for op in value["ops"])
    assert all({"from", "to", "bytes", "tensor"} == edge.keys() for edge in value["edges"])
    assert len(value["edges"]) == len(traced.edges)


SHARED = Path(__file__).parents[3] / "shared" / "data" / "place"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public placement problems are not here")
@pytest.mark.parametrize("name", ["example-1", "googlenet", "yolov5x"])
def test_published_problems_load(name):
    graph = load_graph(SHARED / f"moirai-{name}.graph.json.gz")
    assert graph.given is not None
    assert all(graph.given.times)
    equal(parse_graph(graph_to_json(graph), name=graph.name), graph)


def test_a_large_graph_loads_in_time_that_grows_with_its_size():
    """100,000 operators take a few seconds; here a tenth, against a tenth of that (a quadratic step would show)."""
    def seconds(count: int) -> float:
        value = {"format": "weft.graph", "version": 1,
                 "ops": [{"name": f"op{i}", "flops": 1.0, "bytes_read": 2, "bytes_written": 3}
                         for i in reversed(range(count))],
                 "edges": [{"from": f"op{i // 2}", "to": f"op{i}", "bytes": 5} for i in range(1, count)] * 2}
        start = time.process_time()
        assert parse_graph(value).num_ops == count
        return time.process_time() - start

    small = min(seconds(1000) for _ in range(3))
    assert seconds(10_000) < 40 * small + 0.5


# ---- bad files ----------------------------------------------------------------------------------------------------


def changed(*path: Any, to: Any = ..., base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return ``PLAIN`` with the value at ``path`` replaced, or removed."""
    value = copy.deepcopy(PLAIN if base is None else base)
    place: Any = value
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    elif isinstance(place, list) and path[-1] == len(place):
        place.append(to)
    else:
        place[path[-1]] = to
    return value


@pytest.mark.parametrize(("value", "message"), [
    ([], "must be an object"),
    (changed("format", to="weft.plan"), "format must be 'weft.graph'"),
    (changed("version", to=2), "version must be 1, not 2"),
    (changed("version", to=True), "version must be 1"),
    (changed("ops"), "ops is missing"),
    (changed("ops", to=[]), "ops is empty"),
    (changed("ops", to={}), "ops must be a list"),
    (changed("extra", to=1), "extra is not a known field"),
    (changed("ops", 1, "time", to=1), r"ops\[1\]\.time is not a known field"),
    (changed("ops", 1, "name"), r"ops\[1\]\.name is missing"),
    (changed("ops", 1, "name", to=""), r"ops\[1\]\.name is empty"),
    (changed("ops", 1, "name", to="relu1"), r"ops\[1\]\.name: 'relu1' is the name of ops\[0\]"),
    (changed("ops", 1, "times", "gpu", to=-1), r"ops\[1\]\.times\.gpu must be zero or more, not -1"),
    (changed("ops", 1, "times", "gpu", to=float("nan")), r"ops\[1\]\.times\.gpu must be a finite number"),
    (changed("ops", 1, "times", "gpu", to="1s"), r"ops\[1\]\.times\.gpu must be"),
    (changed("ops", 1, "times", to={}), r"ops\[1\]\.times is empty"),
    (changed("ops", 1, "memory", to=-5), r"ops\[1\]\.memory must be zero or more"),
    (changed("ops", 1, "memory", to=1e300), r"ops\[1\]\.memory"),
    (changed("ops", 1, "on", to=[]), r"ops\[1\]\.on must name at least one"),
    (changed("ops", 1, "on", to="gpu"), r"ops\[1\]\.on must be a list"),
    (changed("ops", 0, "flops"), r"ops\[0\] \('relu1'\) needs times, or flops"),
    (changed("ops", 0, "flops", to=-2), r"ops\[0\]\.flops must be zero or more"),
    (changed("ops", 0, "flops", to=float("inf")), r"ops\[0\]\.flops must be a finite number"),
    (changed("edges", 0, "to", to="nowhere"), r"edges\[0\]\.to: there is no operator 'nowhere'"),
    (changed("edges", 0, "from", to="nobody"), r"edges\[0\]\.from: there is no operator 'nobody'"),
    (changed("edges", 3, "bytes"), r"edges\[3\] \('pool' to 'head'\) needs bytes or times"),
    (changed("edges", 3, "bytes", to=-1), r"edges\[3\]\.bytes must be from 0"),
    (changed("edges", 3, "bytes", to=2**70), r"edges\[3\]\.bytes must be from 0"),
    (changed("edges", 2, "times", to={"d0": 1}), r"edges\[2\]\.times: the key 'd0' must be an ordered device pair"),
    (changed("edges", 1, "bytes", to=7), r"edges\[1\]: tensor 'conv1:0' of 'conv1' has other bytes.*edges\[0\]"),
    (changed("edges", 4, to={"from": "head", "to": "conv1", "bytes": 1}),
     r"'conv1' -> 'relu1' -> 'head' -> 'conv1' form a cycle|form a cycle.*"),
    (changed("edges", 4, to={"from": "head", "to": "head", "bytes": 1}), r"'head' -> 'head' form a cycle"),
])
def test_broken_files_name_the_field(value, message):
    with pytest.raises(ModelError, match=message):
        parse_graph(value, where="g.json")


def test_a_cycle_names_only_the_operators_on_it():
    with pytest.raises(ModelError) as caught:
        parse_graph(changed("edges", 4, to={"from": "head", "to": "relu1", "bytes": 1}))
    assert "'relu1' -> 'head' -> 'relu1'" in str(caught.value) or "'head' -> 'relu1' -> 'head'" in str(caught.value)
    assert "conv1" not in str(caught.value)


@pytest.mark.parametrize(("data", "message"), [
    (b"", "not valid JSON"), (b"{", "not valid JSON"), (b'{"a": NaN}', "NaN"), (b'{"a": 1, "a": 2}', "there twice"),
    (b"\xff\xfe", "not valid JSON"), (b"[" * 100_000, "nested more than 100 deep"),
])
def test_files_that_are_not_json(tmp_path, data, message):
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        load_graph(tmp_path / "bad.json")


def test_damaged_compressed_files(tmp_path):
    packed = gzip.compress(json.dumps(PLAIN).encode())
    for name, data in (("cut.json.gz", packed[:-20]), ("noise.json.gz", b"not gzip"), ("empty.json.gz", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError):
            load_graph(tmp_path / name)


@pytest.mark.parametrize(("path", "to", "message"), [
    (("ops", 3, "inputs", 0), "nothing", r"ops\[3\]\.inputs: there is no tensor 'nothing'"),
    (("tensors", 2, "op"), "nobody", r"tensors\[2\]\.op: there is no operator 'nobody'"),
    (("tensors", 0, "role"), "weight", r"tensors\[0\]\.role 'weight'"),
    (("tensors", 0, "batch_dim"), 9, r"tensors\[0\]\.batch_dim must be a dimension"),
    (("tensors", 1, "name"), "transformer.wte.weight", r"tensors\[\d+\]\.name"),
    (("tensors", -1, "view_of"), "cross_entropy_loss", r"view_of: 'cross_entropy_loss' is a view itself"),
    (("tensors", 1, "shape"), [-1], r"tensors\[1\]: bytes, sizes and the number of elements"),
    (("tensors", 1, "shape"), [1 << 50] * 3, r"tensors\[1\]: bytes, sizes and the number of elements"),
    (("tensors", 1, "shape"), [1] * 65, r"tensors\[1\]\.shape has 65 dimensions, at most 64"),
    (("outputs", 0), "nothing", r"outputs\[0\]: there is no tensor"),
    (("backward",), "guess", "backward must be joint, rule or none"),
    (("batch",), 0, "batch must be 1 or more"),
    (("edges", 0, "to"), "cross_entropy_loss", "edges do not repeat"),
])
def test_broken_traced_files(traced, path, to, message):
    with pytest.raises(ModelError, match=message):
        parse_graph(changed(*path, to=to, base=graph_to_json(traced)))


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.just(2**80), st.floats(), st.text(max_size=4),
                 st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
                 st.sampled_from(["conv1", "relu1", "head", "conv1:0", "d0>d1", "joint", "parameter"]))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def mutated(value: Any, data: st.DataObject) -> Any:
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(value)))
        if not path:
            return data.draw(JUNK)
        place: Any = value
        for key in path[:-1]:
            place = place[key]
        action = data.draw(st.sampled_from(["replace", "remove", "copy", "rename"]))
        if action == "replace":
            place[path[-1]] = data.draw(JUNK)
        elif action == "remove":
            del place[path[-1]]
        elif action == "copy" and isinstance(place, list):
            place.insert(0, copy.deepcopy(place[path[-1]]))
        elif isinstance(place, dict):
            place[data.draw(st.text(max_size=3))] = place.pop(path[-1])
    return value


def only_model_errors(value: Any) -> None:
    try:
        graph = parse_graph(value)
    except ModelError:
        return
    check_graph(graph)
    equal(parse_graph(json.loads(json.dumps(graph_to_json(graph))), name=graph.name), graph)


@settings(max_examples=175, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutations_of_plain_files_raise_only_model_errors(data):
    only_model_errors(mutated(copy.deepcopy(PLAIN), data))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutations_of_traced_files_raise_only_model_errors(data):
    only_model_errors(mutated(copy.deepcopy(SMALL_TRACED), data))


SMALL_TRACED: dict[str, Any] = {
    "format": "weft.graph", "version": 1, "name": "n", "batch": 2, "backward": "joint", "outputs": ["loss"],
    "tied": [["w", "v"]], "ops": [
        {"name": "linear", "kind": "aten.linear", "flops": 8.0, "bytes_read": 4, "input_grad_flops": 3, "module": "m",
         "inputs": ["x", "w"], "source": "a.py:1"},
        {"name": "loss", "kind": "aten.mean", "flops": 1, "inputs": ["linear"], "constant": False}],
    "edges": [{"from": "linear", "to": "loss", "bytes": 8, "tensor": "linear"}],
    "tensors": [{"name": "x", "bytes": 8, "role": "input", "shape": [2], "dtype": "float32", "batch_dim": 0},
                {"name": "w", "bytes": 4, "role": "parameter"},
                {"name": "linear", "bytes": 8, "op": "linear", "saved": True, "view_of": "x"},
                {"name": "loss", "bytes": 4, "op": "loss"}]}
