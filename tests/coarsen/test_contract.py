from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coarsen.helpers import make
from tests.coarsen.random_graphs import random_graph
from tests.cost.worlds import FAST, SLOW, make_cluster
from weft.base.errors import InputError, ModelError
from weft.coarsen.coarsen import coarsen, contract, expand
from weft.coarsen.groups import number_groups, single_groups
from weft.cost.costs import estimate_costs
from weft.cost.op_classes import op_class
from weft.model.graph import TensorRole

CONV, BN, RELU, ADD, MM, VIEW = ("aten.conv2d", "aten.batch_norm", "aten.relu", "aten.add", "aten.matmul", "aten.view")


def reads_of(graph, op):
    return [graph.tensor_names[tensor] for tensor in graph.op_inputs(op)]


def writes_of(graph, op):
    return [graph.tensor_names[tensor] for tensor in graph.op_outputs(op)]


def test_a_fused_group_is_one_operator_with_the_bytes_of_its_border():
    graph = make(("c", CONV, "x w"), ("n", BN, "c g"), ("a", ADD, "n x"), ("r", RELU, "a"), ("y", "aten.max_pool2d", "r"),
                 sizes={"x": 40, "w": 1000, "g": 8, "c": 64, "n": 64, "a": 64, "r": 64, "y": 16})
    coarse = coarsen(graph).graph
    assert coarse.op_names == ("c", "y")
    assert coarse.op_kinds == ("fused:conv2d+batch_norm+add+relu", "aten.max_pool2d")
    assert coarse.flops.tolist() == [graph.flops[:4].sum(), graph.flops[4]]
    assert coarse.bytes_read.tolist() == [40 + 1000 + 8, 64]
    assert coarse.bytes_written.tolist() == [64, 16]
    assert reads_of(coarse, 0) == ["x", "w", "g"]
    assert coarse.tensor_names == ("x", "w", "g", "r", "y")
    assert [coarse.tensor_names[tensor] for tensor in coarse.outputs] == ["y"]


def test_views_count_by_what_they_are_of_and_cross_with_their_own_bytes():
    """The product is written once, and read through two views of it, of which only parts are taken."""
    graph = make(("m", MM, "x w"), ("s", "aten.split", "m"), ("u", VIEW, "s"), ("a", ADD, "u x2"), ("b", "aten.softmax", "s"),
                 sizes={"m": 80, "s": 80, "u": 40, "a": 40}, outputs=("a", "b"))
    groups = number_groups(graph, [0, 0, 1, 1, 2], how="rules")
    coarse = contract(graph, groups).graph
    assert writes_of(coarse, 0) == ["s"]
    assert coarse.bytes_written.tolist() == [80, 40, 100]
    assert coarse.bytes_read.tolist() == [200, 40 + 100, 80]
    assert coarse.tensor_base.tolist() == [-1] * coarse.num_tensors
    assert coarse.tensor_bytes[coarse.tensor_index["s"]] == 80


def test_a_view_of_a_parameter_stays_one_where_it_crosses():
    graph = make(("t", "aten.transpose", "w"), ("m", MM, "x t"), ("n", MM, "m t"))
    coarse = coarsen(graph).graph
    assert coarse.op_kinds == ("aten.transpose", "aten.matmul", "aten.matmul")
    root = coarse.memory_root[coarse.tensor_index["t"]]
    assert coarse.tensor_names[root] == "w"
    assert coarse.tensor_role[root] == TensorRole.PARAMETER


def test_of_a_gathered_table_only_what_is_taken_is_read():
    graph = make(("e", "aten.embedding", "w x"), ("a", ADD, "e b"), sizes={"w": 10**6, "x": 8, "e": 64, "a": 64, "b": 64})
    assert coarsen(graph).graph.bytes_read.tolist() == [64 + 8 + 64]


def test_constants_are_gone_and_what_they_make_is_a_buffer():
    graph = make(("k", "aten.arange", ""), ("s", "aten.mul", "k"), ("m", MM, "x w"), ("a", ADD, "m s"),
                 ("n", MM, "a s"))
    coarse = coarsen(graph)
    assert coarse.graph.op_names == ("m", "n")
    assert reads_of(coarse.graph, 0) == ["x", "w", "s"]
    tensor = coarse.graph.tensor_index["s"]
    assert coarse.graph.tensor_role[tensor] == TensorRole.BUFFER
    assert coarse.graph.tensor_producer[tensor] == -1
    assert expand(coarse, np.array([3, 5])).tolist() == [3, 3, 3, 3, 5]


def test_given_costs_add_up():
    graph = make(("m", MM, "x w"), ("v", VIEW, "m"), ("r", RELU, "v"), given={
        "m": {"times": {"gpu": 2.0, "cpu": 5.0}, "memory": 7, "on": ("gpu", "cpu"), "colocate": "t"},
        "v": {"times": None}, "r": {"times": {"gpu": 1.0, "cpu": 1.5}, "memory": 1, "on": ("cpu", "tpu")}})
    given_costs = coarsen(graph).graph.given
    assert given_costs.times == ({"gpu": 3.0, "cpu": 6.5},)
    assert given_costs.memory_bytes == (8,)
    assert given_costs.allowed_kinds == (("cpu",),)
    assert given_costs.colocate == ("t",)


def test_groups_that_the_graph_file_forbids_are_refused():
    graph = make(("m", MM, "x w"), ("r", RELU, "m"), given={"m": {"colocate": "a"}, "r": {"colocate": "b"}})
    with pytest.raises(InputError, match="operators 'm', 'r' cannot be one group"):
        contract(graph, number_groups(graph, [0, 0], how="rules"))


def test_wrong_groups_and_placements_are_refused():
    graph = make(("m", MM, "x w"), ("r", RELU, "m"))
    with pytest.raises(ModelError, match="entries for 2 operators"):
        contract(graph, replace(single_groups(graph), of_op=np.zeros(3, dtype=np.int64)))
    with pytest.raises(InputError, match="3 devices for 1 groups"):
        expand(coarsen(graph), np.zeros(3, dtype=np.int64))


def test_what_is_kept_for_the_backward_pass_inside_a_group_still_counts():
    graph = make(("m", MM, "x w"), ("r", RELU, "m"), sizes={"m": 64})
    graph = replace(graph, is_saved=np.array([name in ("m", "r") for name in graph.tensor_names]),
                    weight_grad_flops=np.array([5.0, 2.0]), has_backward=True)
    coarse = coarsen(graph).graph
    assert coarse.saved_inside_bytes.tolist() == [64]
    assert coarse.is_saved.tolist() == [name == "r" for name in coarse.tensor_names]
    assert coarse.weight_grad_flops.tolist() == [7.0]


@pytest.mark.parametrize(("kind", "expected"), [
    ("fused:conv2d+batch_norm+relu", "convolution"), ("fused:add+layer_norm", "normalisation"),
    ("fused:matmul+div+add+softmax+matmul", "attention"), ("fused:matmul+softmax", "matmul"),
    ("fused:silu+linear+mul", "matmul"), ("fused:mul+exp", "transcendental"), ("fused:view+transpose", "view"),
    ("fused:embedding+add", "embedding")])
def test_a_group_is_like_its_heaviest_part(kind, expected):
    assert op_class(kind) == expected


def test_a_fused_group_costs_one_overhead_and_less_than_its_parts():
    graph = make(("c", CONV, "x w"), ("n", BN, "c g"), ("r", RELU, "n"))
    cluster = make_cluster((1, 1), kinds=(FAST, SLOW))
    fine, fused = estimate_costs(graph, cluster), estimate_costs(coarsen(graph).graph, cluster)
    for column, kind in enumerate((FAST, SLOW)):
        assert kind.overhead_s < fused.forward_s[0, column] < 2 * kind.overhead_s
        assert fused.forward_s[:, column].sum() < fine.forward_s[:, column].sum()


def crossing(graph, groups):
    """Return the names of tensors that some group reads and another one, or none, makes; by definition."""
    names = set()
    for op in range(graph.num_ops):
        for tensor in graph.op_inputs(op).tolist():
            producer = graph.tensor_producer[tensor]
            if groups.of_op[op] >= 0 and (producer < 0 or groups.of_op[producer] != groups.of_op[op]):
                names.add(graph.tensor_names[tensor])
    return names


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40), st.sampled_from(("rules", "none", "any")))
def test_contraction_keeps_all_that_is_seen_from_outside(seed, num_ops, how):
    graph = random_graph(seed, num_ops)
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 5, graph.num_ops).tolist()
    coarse = contract(graph, number_groups(graph, numbers, how="rules")) if how == "any" else coarsen(graph, how)
    placed = coarse.groups.of_op >= 0
    small = coarse.graph
    assert small.flops.sum() == pytest.approx(graph.flops[placed].sum())
    assert small.bytes_written.sum() <= graph.bytes_written[placed].sum()
    assert small.bytes_read.sum() <= graph.bytes_read[placed].sum()
    assert set(small.op_names) <= set(graph.op_names)
    assert [small.tensor_names[tensor] for tensor in small.outputs] == [graph.tensor_names[t] for t in graph.outputs]
    assert {graph.tensor_names[t] for t in graph.parameters} <= set(small.tensor_names)
    assert {name for op in range(small.num_ops) for name in reads_of(small, op)} == crossing(graph, coarse.groups)
    for name, size in zip(small.tensor_names, small.tensor_bytes, strict=True):
        assert size == graph.tensor_bytes[graph.tensor_index[name]]
    devices = rng.integers(0, 4, small.num_ops)
    device = expand(coarse, devices)
    assert device.shape == (graph.num_ops,)
    assert np.array_equal(device[placed], devices[coarse.groups.of_op[placed]])
    if how == "none":
        assert np.array_equal(small.bytes_read, graph.bytes_read[placed])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_coarsening_twice_is_coarsening_once(seed, num_ops):
    coarse = coarsen(random_graph(seed, num_ops), "none").graph
    assert coarsen(coarse, "none").graph.digest == coarse.digest
