from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coarsen.helpers import make
from tests.coarsen.random_graphs import random_graph
from weft.base.errors import InputError, ModelError
from weft.coarsen.coarsen import find_groups
from weft.coarsen.groups import check_groups, choose_kernels, number_groups, single_groups

DIAMOND = make(("a", "aten.matmul", "x w"), ("b", "aten.relu", "a"), ("c", "aten.softmax", "a"),
               ("d", "aten.add", "b c"), ("k", "aten.arange", ""), ("e", "aten.mul", "d k"))


def test_single_groups_leave_out_constants():
    groups = single_groups(DIAMOND)
    assert groups.of_op.tolist() == [0, 1, 2, 3, -1, 4]
    assert groups.labels == ("matmul", "relu", "softmax", "add", "mul")
    assert groups.members() == ((0,), (1,), (2,), (3,), (5,))


def test_groups_are_numbered_in_topological_order():
    groups = number_groups(DIAMOND, [7, 3, 9, 3, 3, 3], how="rules")
    assert groups.of_op.tolist() == [0, 2, 1, 2, -1, 2]
    assert groups.labels == ("matmul", "softmax", "relu+add+mul")


def test_groups_that_feed_each_other_are_taken_apart():
    """a and d are one group, and c, which is between them, is another: the larger one falls apart."""
    groups = number_groups(DIAMOND, [1, 1, 2, 1, 0, 3], how="inductor")
    assert groups.num_groups == 5
    check_groups(DIAMOND, groups)


BROKEN = {
    "too few": ([0, 1, 2, 3, -1], "there are 5 entries for 6 operators"),
    "no group": ([0, 1, -1, 2, -1, 3], "operator 'c' has no group"),
    "constant in a group": ([0, 1, 2, 3, 4, 4], "operator 'k' is a constant"),
    "number left out": ([0, 1, 2, 4, -1, 4], "the numbers in use are not 0 to 4"),
    "wrong order": ([1, 0, 2, 3, -1, 4], "operator 'a' feeds 'b'"),
    "not convex": ([0, 1, 2, 0, -1, 4], "groups must be convex"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_says_what_is_wrong(name):
    of_op, message = BROKEN[name]
    groups = replace(single_groups(DIAMOND), of_op=np.array(of_op))
    if name == "not convex":
        groups = replace(groups, of_op=np.array([0, 1, 2, 0, -1, 3]), labels=("a", "b", "c", "d"))
    with pytest.raises(ModelError, match=message):
        check_groups(DIAMOND, groups)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 30), st.integers(1, 6))
def test_any_numbers_become_convex_groups(seed, num_ops, num_groups):
    graph = random_graph(seed, num_ops)
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, num_groups, graph.num_ops).tolist()
    groups = number_groups(graph, wanted, how="rules")
    check_groups(graph, groups)
    for ops in groups.members():
        assert len({wanted[op] for op in ops}) == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 30))
def test_operators_in_many_kernels_get_one_that_keeps_the_order(seed, num_ops):
    graph = random_graph(seed, num_ops)
    rng = np.random.default_rng(seed)
    known = [rng.integers(0, 8, rng.integers(0, 4)).tolist() for _ in range(graph.num_ops)]
    chosen = choose_kernels(graph, known)
    groups = number_groups(graph, chosen, how="inductor")
    for source, target, _ in graph.edges:
        if groups.of_op[source] >= 0 and groups.of_op[target] >= 0:
            assert chosen[source] <= chosen[target]


def test_ways_that_need_more_than_a_graph_say_so():
    with pytest.raises(InputError, match="inductor needs a PyTorch model"):
        find_groups(DIAMOND, "inductor")
    with pytest.raises(InputError, match="needs the ONNX file"):
        find_groups(DIAMOND, "onnxruntime")
    with pytest.raises(InputError, match="choose one of none, rules, inductor, onnxruntime"):
        find_groups(DIAMOND, "magic")
