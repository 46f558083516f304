"""What a strategy means: which layouts follow from factors, how much work, and which strategies there are not."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from weft.sharding.factor_rules import factors_of, has_rule
from weft.sharding.factors import (
    NOT_SPLIT,
    Factor,
    OpFactors,
    factor_counts,
    input_gradient_layout,
    input_layout,
    is_valid,
    linear_choice,
    output_gradient_layout,
    output_layout,
    work_part,
)

M, N, K = range(3)
MATMUL = OpFactors(factors=(Factor(name="m", size=8), Factor(name="n", size=6), Factor(name="k", size=4)),
                   inputs=(((M,), (K,)), ((K,), (N,))), outputs=(((M,), (N,)),), linear=((0,), (1,)))
MERGE = OpFactors(factors=(Factor(name="b", size=2), Factor(name="heads", size=3), Factor(name="d", size=5)),
                  inputs=(((0,), (1,), (2,)),), outputs=(((0,), (1, 2)),), linear=((0,),))
JOINED = OpFactors(factors=(Factor(name="three", size=3, fixed=True), Factor(name="heads", size=4),
                            Factor(name="d", size=5)),
                   inputs=(((0, 1, 2),),), outputs=(((0,), (1,), (2,)),))


def texts(layout):
    return " ".join(map(str, layout))


def account(op, strategy, mesh):
    """Return all layouts as text: inputs, their gradients, results, their gradients."""
    return [[texts(function(op, strategy, mesh, position)) for position in range(count)]
            for function, count in ((input_layout, len(op.inputs)), (input_gradient_layout, len(op.inputs)),
                                    (output_layout, len(op.outputs)), (output_gradient_layout, len(op.outputs)))]


@pytest.mark.parametrize(("strategy", "expected"), [
    ((M,), [["S0", "R"], ["S0", "P"], ["S0"], ["S0"]]),
    ((N,), [["R", "S1"], ["P", "S1"], ["S1"], ["S1"]]),
    ((K,), [["S1", "S0"], ["S1", "S0"], ["P"], ["R"]]),
    ((NOT_SPLIT,), [["R", "R"], ["R", "R"], ["R"], ["R"]]),
    ((linear_choice(0),), [["P", "R"], ["R", "P"], ["P"], ["R"]]),
    ((linear_choice(1),), [["R", "P"], ["P", "R"], ["P"], ["R"]]),
])
def test_layouts_of_a_matrix_product_on_one_axis(strategy, expected):
    assert account(MATMUL, strategy, (2,)) == expected


def test_each_axis_has_its_own_factor():
    assert account(MATMUL, (M, K), (2, 2)) == [["S0 S1", "R S0"], ["S0 S1", "P S0"], ["S0 P"], ["S0 R"]]
    assert account(MATMUL, (N, linear_choice(0)), (2, 4)) == [["R P", "S1 R"], ["P R", "S1 P"], ["S1 P"], ["S1 R"]]


def test_two_axes_may_split_one_factor():
    assert is_valid(MATMUL, (M, M), (2, 4))
    assert account(MATMUL, (M, M), (2, 4)) == [["S0 S0", "R R"], ["S0 S0", "P P"], ["S0 S0"], ["S0 S0"]]
    assert factor_counts((M, NOT_SPLIT, M), (2, 3, 4)) == {M: 8}
    assert work_part(MATMUL, (M, M), (2, 4)) == pytest.approx(1 / 8)


@pytest.mark.parametrize(("strategy", "mesh", "part"), [
    ((NOT_SPLIT,), (2,), 1.0), ((M,), (2,), 1 / 2), ((M,), (3,), 3 / 8), ((N,), (4,), 2 / 6), ((M, N), (2, 3), 1 / 6),
    ((K, NOT_SPLIT), (4, 2), 1 / 4), ((linear_choice(0),), (2,), 1.0), ((M, M), (2, 2), 1 / 4), ((N, N), (2, 2), 2 / 6),
])
def test_work_is_that_of_the_device_with_the_most(strategy, mesh, part):
    assert is_valid(MATMUL, strategy, mesh)
    assert work_part(MATMUL, strategy, mesh) == pytest.approx(part)


def test_parts_must_not_be_empty():
    assert not is_valid(MATMUL, (K,), (5,))
    assert not is_valid(MATMUL, (K, K), (2, 4))
    assert is_valid(MATMUL, (K, M), (4, 4))


def test_even_factors_have_equal_parts():
    op = OpFactors(factors=(Factor(name="b", size=6, even=True),), inputs=(((0,),),), outputs=(((0,),),))
    assert [is_valid(op, (0,), (count,)) for count in (2, 3, 4, 6)] == [True, True, False, True]


def test_no_dimension_is_split_by_two_factors():
    assert not is_valid(MERGE, (1, 2), (3, 5))
    assert is_valid(MERGE, (0, 1), (2, 3))


def test_uneven_heads_are_cut_between_heads():
    assert is_valid(MERGE, (1,), (2,))
    assert account(MERGE, (1,), (2,)) == [["S1"], ["S1"], ["S1x5"], ["S1x5"]]
    assert account(MERGE, (1,), (3,)) == [["S1"], ["S1"], ["S1"], ["S1"]]  # even: no unit is needed


def test_an_inner_factor_is_split_in_every_block_and_only_evenly():
    assert account(MERGE, (2,), (5,)) == [["S2"], ["S2"], ["S1/3"], ["S1/3"]]
    assert not is_valid(MERGE, (2,), (2,))


def test_joined_matrices_are_split_inside_each_of_them():
    assert account(JOINED, (1,), (2,)) == [["S0/3"], ["S0/3"], ["S1"], ["S1"]]
    assert account(JOINED, (1, 1), (2, 2))[0] == ["S0/3 S0/3"]
    assert not is_valid(JOINED, (0,), (3,))  # what is fixed is never split
    assert not is_valid(JOINED, (1,), (3,))  # uneven inside blocks


def test_results_that_are_equal_everywhere_are_whole():
    op = OpFactors(factors=(Factor(name="b", size=4), Factor(name="c", size=4, special=True)),
                   inputs=(((0,), (1,)),), outputs=(((0,),), ((0,),)), whole_outputs=(1,))
    assert account(op, (1,), (2,))[2:] == [["P", "R"], ["R", "R"]]


def test_the_sum_of_a_matrix_product_with_its_parts_is_the_product():
    """Column then row parallel: the layouts fit without any exchange between, forward and backward."""
    column = output_layout(MATMUL, (N,), (2,), 0), output_gradient_layout(MATMUL, (N,), (2,), 0)
    row = input_layout(MATMUL, (K,), (2,), 0), input_gradient_layout(MATMUL, (K,), (2,), 0)
    assert column == row


def test_a_call_without_a_rule_has_no_factors():
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.linalg_det.default, (graph.placeholder("x"),))
    assert not has_rule(node.target)
    assert factors_of(node) is None
    assert has_rule(torch.ops.aten.linear.default)
