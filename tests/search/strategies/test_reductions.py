"""Reductions are exact: the best choice of what is left, taken back, is a best choice of all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.search.strategies.random_graphs import best_cost, random_graph
from weft.base.errors import NoFeasiblePlan
from weft.search.strategies.core import make_core
from weft.search.strategies.dual import cost_of, usage_of
from weft.search.strategies.shrink import left, shrink
from weft.search.strategies.strategy_graph import FORBIDDEN, StrategyGraph, evaluate
from weft.search.strategies.units import Units, add_usage, make_units, maximal_times, settle


def graph_of(costs, edges=(), *, usages=None, intervals=None, limit=None) -> StrategyGraph:
    """Return a graph from lists; ``edges`` are (a, b, matrix)."""
    return StrategyGraph(
        intervals=np.array(intervals or [[0, 1]] * len(costs), dtype=np.int64),
        costs=tuple(np.array(cost) for cost in costs),
        usages=tuple(np.array(usage) for usage in usages or [[0] * len(cost) for cost in costs]),
        edges=np.array([(a, b) for a, b, _ in edges], dtype=np.int64).reshape(-1, 2),
        edge_costs=tuple(np.array(matrix) for _, _, matrix in edges), usage_limit=limit)


def reduced(graph: StrategyGraph) -> Units:
    units = make_units(graph)
    add_usage(graph, units)
    shrink(units)
    return units


def best_of_core(graph: StrategyGraph, units: Units) -> float | None:
    """Return the least cost of choices of the core, taken back to nodes; None if none fits."""
    compact = make_core(units)
    core, best = compact.core, None
    for item in itertools.product(*(range(size) for size in np.diff(core.first))):
        x = np.array(item, dtype=np.int64)
        cost = cost_of(core, x)
        if cost >= compact.penalty or usage_of(core, x).max(initial=0.0) > core.limit:
            continue
        judged = evaluate(graph, units.choice_of(units.all_strategies(compact.strategies(x))))
        assert judged.is_feasible(graph.usage_limit)
        assert judged.cost == pytest.approx(cost + compact.constant, rel=1e-12)
        best = judged.cost if best is None else min(best, judged.cost)
    return best


@pytest.mark.parametrize("seed", range(300))
def test_what_is_left_has_the_same_best_choice(seed):
    graph = random_graph(np.random.default_rng(seed))
    want = best_cost(graph)
    try:
        units = reduced(graph)
    except NoFeasiblePlan:
        assert want is None
        return
    got = best_of_core(graph, units)
    assert (got is None) == (want is None)
    if want is not None:
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_without_usage_only_what_has_three_neighbours_is_left(seed):
    units = reduced(random_graph(np.random.default_rng(seed), limit="none", forbidden=0.0))
    assert all(len(units.edges[unit]) > 2 for unit in left(units))


def test_nodes_that_choose_alike_become_one_unit():
    alike = np.where(np.eye(3, dtype=bool)[[2, 0, 1]], 0, FORBIDDEN)
    graph = graph_of([[1, 2, 3], [10, 20, 30], [0, 5]], [(0, 1, alike), (1, 2, [[1, 1], [2, 2], [3, 3]])])
    units = make_units(graph)
    assert sorted(map(len, units.members)) == [1, 2]
    joined = next(unit for unit, members in enumerate(units.members) if len(members) == 2)
    assert units.cost[joined].tolist() == [1 + 30, 2 + 10, 3 + 20]


def test_parallel_edges_that_contradict_each_other_leave_nothing():
    same, other = np.where(np.eye(2), 0, FORBIDDEN), np.where(np.eye(2)[::-1], 0, FORBIDDEN)
    with pytest.raises(NoFeasiblePlan, match="no choice is allowed: every strategy of node"):
        make_units(graph_of([[1, 2], [1, 2]], [(0, 1, same), (1, 0, other)]))


def test_a_strategy_is_dominated_only_if_it_never_uses_less():
    costs, usages = [[1, 2], [0, 9], [0, 9]], [[5, 1], [5, 0], [5, 0]]
    assert left(reduced(graph_of(costs, usages=usages, limit=None))) == []
    assert left(reduced(graph_of(costs, usages=usages, limit=15))) == [], "the limit does not matter"
    assert len(left(reduced(graph_of(costs, usages=usages, limit=11)))) == 3


def test_only_times_at_which_most_are_alive_matter():
    intervals = np.array([[0, 4], [1, 3], [2, 6], [5, 7], [3, 3]])
    assert maximal_times(intervals).tolist() == [2, 5]


def test_strategies_that_never_fit_are_removed():
    graph = graph_of([[1, 2], [3, 4]], usages=[[9, 2], [3, 1]], limit=9)
    units = make_units(graph)
    add_usage(graph, units)
    settle(units)
    assert units.kept[0].tolist() == [1]


def test_a_peak_that_nothing_avoids_is_named_with_the_limit_that_would_do():
    graph = graph_of([[1, 2], [3, 4]], usages=[[9, 5], [7, 6]], limit=10)
    with pytest.raises(NoFeasiblePlan, match="the peak is 11, above the usage limit of 10") as caught:
        reduced(graph)
    assert caught.value.needed == 11
