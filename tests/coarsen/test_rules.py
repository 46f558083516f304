from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coarsen.helpers import make
from tests.coarsen.random_graphs import random_graph
from weft.coarsen.groups import check_groups
from weft.coarsen.rules import STEPS, Role, fuse_by_rules, role_of


def groups_of(graph):
    """Return the groups as sorted names joined by spaces, in order."""
    groups = fuse_by_rules(graph)
    return [" ".join(sorted(graph.op_names[op] for op in ops)) for ops in groups.members()]


CONV, BN, RELU, ADD, MM, SOFTMAX = ("aten.conv2d", "aten.batch_norm", "aten.relu", "aten.add", "aten.matmul",
                                    "aten.softmax")
NORM, VIEW, MUL = "aten.layer_norm", "aten.view", "aten.mul"

FIRES = {
    "conv+bn+activation": ([("c", CONV, "x w"), ("n", BN, "c g"), ("r", RELU, "n")], ["c n r"]),
    "conv+activation": ([("c", CONV, "x w"), ("r", "aten.silu", "c")], ["c r"]),
    "conv+bn+add+relu": ([("c", CONV, "x w"), ("n", BN, "c g"), ("a", ADD, "n x"), ("r", RELU, "a")], ["a c n r"]),
    "two convs into one add: the later one joins": (
        [("c", CONV, "x w"), ("d", CONV, "x v"), ("a", ADD, "c d"), ("r", RELU, "a")], ["c", "a d r"]),
    "matmul+bias+activation": ([("m", MM, "x w"), ("a", ADD, "m b"), ("g", "aten.gelu", "a")], ["a g m"]),
    "addmm+activation": ([("m", "aten.addmm", "b x w"), ("r", "aten.tanh", "m")], ["m r"]),
    "gelu written out": (
        [("m", "aten.linear", "x w"), ("h", MUL, "m"), ("p", "aten.pow", "m"), ("a", ADD, "m p"),
         ("t", "aten.tanh", "a"), ("y", MUL, "h t")], ["a h m p t y"]),
    "residual add + norm": ([("m", MM, "x w"), ("a", ADD, "m x"), ("n", NORM, "a g")], ["m", "a n"]),
    "norm + elementwise": ([("n", NORM, "x g"), ("a", MUL, "n s")], ["a n"]),
    "rms norm written out": (
        [("p", "aten.pow", "x"), ("m", "aten.mean", "p"), ("a", ADD, "m"), ("q", "aten.rsqrt", "a"), ("s", MUL, "x q"),
         ("y", MUL, "s w")], ["a m p q s y"]),
    "layer norm written out in ONNX": (
        [("m", "ReduceMean", "x"), ("d", "Sub", "x m"), ("p", "Pow", "d"), ("v", "ReduceMean", "p"), ("e", "Add", "v"),
         ("q", "Sqrt", "e"), ("i", "Div", "d q"), ("g", "Mul", "i w"), ("h", "Add", "g b")], ["d e g h i m p q v"]),
    "scale, mask + softmax": ([("s", MUL, "x"), ("a", ADD, "s mask"), ("p", SOFTMAX, "a"), ("y", CONV, "p w")],
                              ["a p s", "y"]),
    "attention": (
        [("q", MM, "x k"), ("s", "aten.div", "q"), ("a", ADD, "s mask"), ("p", SOFTMAX, "a"), ("o", MM, "p v")],
        ["a o p q s"]),
    "matmul then softmax is no attention": ([("m", MM, "x w"), ("p", SOFTMAX, "m")], ["m", "p"]),
    "elementwise chain": ([("a", MUL, "x"), ("b", "aten.exp", "a"), ("c", "aten.where", "b x")], ["a b c"]),
    "rotary: concatenation inside a chain": (
        [("m", MUL, "x cos"), ("n", "aten.neg", "x"), ("c", "aten.cat", "n x"), ("s", MUL, "c sin"), ("y", ADD, "m s")],
        ["c m n s y"]),
    "concatenation at the end": ([("a", RELU, "x"), ("b", RELU, "x2"), ("c", "aten.cat", "a b")], ["a", "b", "c"]),
    "embedding + elementwise": ([("e", "aten.embedding", "w x"), ("a", ADD, "e b")], ["a e"]),
    "view joins its producer": ([("m", MM, "x w"), ("v", VIEW, "m"), ("n", NORM, "v g")], ["m v", "n"]),
    "view of a parameter joins its reader": ([("v", "aten.transpose", "w"), ("m", MM, "x v")], ["m v"]),
    "view of what others read joins its reader": (
        [("n", NORM, "x g"), ("v", VIEW, "n"), ("m", MM, "v w"), ("y", CONV, "n m")], ["n", "m v", "y"]),
    "views are no obstacle": ([("m", MM, "x w"), ("v", VIEW, "m"), ("r", RELU, "v"), ("u", VIEW, "r")], ["m r u v"]),
    "ONNX conv+bn+relu": ([("c", "Conv", "x w"), ("n", "BatchNormalization", "c g"), ("r", "Relu", "n")], ["c n r"]),
    "ONNX gemm + relu": ([("m", "Gemm", "x w b"), ("r", "Relu", "m")], ["m r"]),
    "ONNX gelu parts": (
        [("m", "MatMul", "x w"), ("d", "Div", "m"), ("e", "Erf", "d"), ("a", "Add", "e"), ("p", "Mul", "m a"),
         ("y", "Mul", "p")], ["a d e m p y"]),
    "copy is no epilogue of a matmul": ([("m", MM, "x w"), ("c", "aten.contiguous", "m")], ["m", "c"]),
    "layer norm is no epilogue of a conv": ([("c", CONV, "x w"), ("n", NORM, "c g")], ["c", "n"]),
    "pooling stays alone": ([("c", CONV, "x w"), ("p", "aten.max_pool2d", "c"), ("r", RELU, "p")], ["c", "p", "r"]),
}


@pytest.mark.parametrize("name", FIRES)
def test_what_each_rule_makes(name):
    rows, expected = FIRES[name]
    assert groups_of(make(*rows)) == expected


def test_every_rule_fires_in_some_model():
    """Each rule's own chain, made of one operator for each role, becomes one group."""
    kind = {Role.CONV: CONV, Role.MATMUL: MM, Role.BATCH_NORM: BN, Role.NORM: NORM, Role.SOFTMAX: SOFTMAX,
            Role.POINTWISE: MUL, Role.REORDER: "aten.contiguous", Role.JOIN: "aten.cat", Role.REDUCE: "aten.mean",
            Role.GATHER: "aten.embedding"}
    for rule in (rule for step in STEPS for rule in step):
        rows = [(f"o{index}", kind[role], f"o{index - 1}" if index else "x") for index, role in enumerate(rule.chain)]
        assert groups_of(make(*rows)) == [" ".join(name for name, _, _ in rows)], rule.name


BLOCKED = {
    "another reader of the conv": (
        [("c", CONV, "x w"), ("n", BN, "c g"), ("r", RELU, "n"), ("y", MM, "r c")], (), ["c", "n r", "y"]),
    "another reader of the norm": (
        [("c", CONV, "x w"), ("n", BN, "c g"), ("r", RELU, "n"), ("y", MM, "r n")], (), ["c n", "r", "y"]),
    "the intermediate is a result of the model": ([("m", MM, "x w"), ("r", RELU, "m")], ("m", "r"), ["m", "r"]),
    "a view of the intermediate is read elsewhere": (
        [("m", MM, "x w"), ("r", RELU, "m"), ("v", VIEW, "m"), ("y", MM, "r v")], (), ["m", "r", "v y"]),
    "the scores are read elsewhere": (
        [("q", MM, "x k"), ("p", SOFTMAX, "q"), ("o", MM, "p v"), ("y", CONV, "o p")], (), ["q", "p", "o", "y"]),
    "pre-norm residual": (
        [("a", ADD, "x x2"), ("n", NORM, "a g"), ("m", MM, "n w"), ("y", ADD, "a m")], (), ["a", "n", "m y"]),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_an_intermediate_with_another_reader_blocks(name):
    rows, outputs, expected = BLOCKED[name]
    assert groups_of(make(*rows, outputs=outputs)) == expected


CHAIN = [("m", MM, "x w"), ("r", RELU, "m")]
GIVEN = {
    "the same everywhere": ({}, True),
    "one text": ({"m": {"colocate": "a"}}, True),
    "two texts": ({"m": {"colocate": "a"}, "r": {"colocate": "b"}}, False),
    "kinds in common": ({"m": {"on": ("gpu", "cpu")}, "r": {"on": ("gpu",)}}, True),
    "no kind in common": ({"m": {"on": ("cpu",)}, "r": {"on": ("gpu",)}}, False),
    "times by different kinds": ({"m": {"times": {"gpu": 1.0, "cpu": 2.0}}}, False),
    "times and operations": ({"m": {"times": None}}, False),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_graph_file_says_can_block(name):
    given_costs, is_fused = GIVEN[name]
    assert (len(groups_of(make(*CHAIN, given=given_costs))) == 1) == is_fused


def test_constants_tie_nothing_together():
    graph = make(("k", "aten.arange", ""), ("s", MUL, "k"), ("a", MM, "x w"), ("b", ADD, "a s"), ("c", ADD, "b s"),
                 ("d", MM, "c v"))
    groups = fuse_by_rules(graph)
    assert groups.of_op.tolist() == [-1, -1, 0, 0, 0, 1]
    assert groups.labels == ("matmul+add+add", "matmul")


def test_a_constant_that_is_returned_has_a_group():
    graph = make(("k", "aten.arange", ""), ("s", MUL, "k"), ("a", MM, "x w"), outputs=("a", "s"))
    assert fuse_by_rules(graph).of_op.tolist() == [-1, 0, 1]


def test_roles_of_unknown_operators_never_fuse():
    assert role_of("whatever") is Role.OTHER
    assert groups_of(make(("a", "whatever", "x"), ("b", "whatever", "a"), ("c", "aten.relu", "b"))) == ["a", "b", "c"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_groups_of_random_graphs_are_convex_and_have_one_exit(seed, num_ops):
    graph = random_graph(seed, num_ops)
    groups = fuse_by_rules(graph)
    check_groups(graph, groups)
    for group, ops in enumerate(groups.members()):
        leaving = {int(source) for source, target, _ in graph.edges
                   if source in ops and groups.of_op[target] not in (group, -1)}
        leaving |= {int(graph.tensor_producer[tensor]) for tensor in graph.outputs} & set(ops)
        assert len(leaving) <= 1


def test_a_long_chain_is_quick():
    rows = [("o0", MUL, "x"), *((f"o{index}", MUL, f"o{index - 1}") for index in range(1, 4000))]
    groups = fuse_by_rules(make(*rows))
    assert groups.num_groups == 1
    assert np.all(groups.of_op == 0)
