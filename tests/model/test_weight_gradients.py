"""Which gradients of parameters can wait: the list that costs and memory follow is the runtime's."""

from __future__ import annotations

import numpy as np

from tests.worlds import chain_graph, plain_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.weight_gradients import DEFERRED, can_wait, ops_that_can_wait
from weft.run import split_backward


def of_kinds(*kinds: str) -> Graph:
    from dataclasses import replace

    return replace(chain_graph(len(kinds)), op_kinds=kinds)


def test_the_runtime_has_a_rule_for_each_operator_of_the_list_and_for_no_other():
    assert {f"aten.{target._schema.name.partition('::')[2]}" for target in split_backward._RULES} == DEFERRED


def test_an_elementwise_scale_cannot_wait_and_operators_that_are_not_run_can():
    assert not can_wait("aten.mul")
    assert can_wait("Gemm")
    assert ops_that_can_wait(of_kinds("aten.linear", "aten.mul", "conv2d")).tolist() == [True, False, True]


def test_what_cannot_wait_is_computed_in_the_first_part_and_both_parts_add_up():
    graph = of_kinds("aten.linear", "aten.mul")
    costs = estimate_costs(graph, plain_cluster(1))
    first, second, whole = (costs.op_seconds(phase, 0.5)[:, 0] for phase in ("I", "W", "B"))
    assert second[0] > 0
    assert second[1] == 0
    assert first[1] > first[0]
    np.testing.assert_allclose(first + second, whole)
