"""The whole search: the best choice with a proof on small problems, honest bounds on larger ones."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.search.strategies.random_graphs import best_cost, random_graph
from tests.search.strategies.test_reductions import graph_of
from weft.base.errors import InputError, NoFeasiblePlan
from weft.search.common.budget import Budget
from weft.search.strategies.search import Search, solve
from weft.search.strategies.strategy_graph import StrategyGraph, evaluate


def chain(count: int, strategies: int, *, seed: int, share: float | None, is_float: bool = False) -> StrategyGraph:
    """Return a chain with skips; ``share`` of the way from least to most usage is the limit."""
    rng = np.random.default_rng(seed)
    edges = [(node, node + 1) for node in range(count - 1)] + [(node, node + 3) for node in range(0, count - 3, 2)]
    edges += [(node, node + 5) for node in range(0, count - 5, 3)]
    usages = [rng.integers(1, 100, strategies) for _ in range(count)]
    least, most = sum(int(usage.min()) for usage in usages), sum(int(usage.max()) for usage in usages)

    def costs(*shape: int) -> np.ndarray:
        return rng.random(shape) if is_float else rng.integers(0, 1000, shape)

    return StrategyGraph(
        intervals=np.tile([0, 1], (count, 1)), costs=tuple(costs(strategies) for _ in range(count)), usages=tuple(usages),
        edges=np.array(edges), edge_costs=tuple(costs(strategies, strategies) for _ in edges),
        usage_limit=None if share is None else int(least + share * (most - least)))


def test_small_problems_are_solved_and_proven():
    statuses = {"optimal": 0, "none": 0}
    for seed in range(300):
        graph = random_graph(np.random.default_rng(10_000 + seed))
        want = best_cost(graph)
        try:
            found = solve(graph, seed=seed)
        except NoFeasiblePlan:
            assert want is None, seed
            statuses["none"] += 1
            continue
        assert want is not None, seed
        assert found.cost == pytest.approx(want, rel=1e-9), seed
        assert found.bound <= found.cost
        judged = evaluate(graph, found.choice)
        assert (judged.cost, judged.usage_peak) == (found.cost, found.usage_peak)
        assert judged.is_feasible(graph.usage_limit)
        statuses[found.status] += 1
    assert min(statuses.values()) > 30


@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("share", [None, 0.1, 0.9])
def test_middling_problems_are_solved_and_proven(share, is_float):
    graph = chain(14, 4, seed=3, share=share, is_float=is_float)
    found = solve(graph)
    assert found.status == "optimal"
    assert found.bound == found.cost
    if share is not None:
        freer = solve(StrategyGraph(**{**{name: getattr(graph, name) for name in graph.__dataclass_fields__},
                                       "usage_limit": graph.usage_limit + 50}))
        assert freer.cost <= found.cost


def test_the_same_seed_gives_the_same_choice():
    graph = chain(40, 8, seed=5, share=0.05)
    assert solve(graph, seed=1).choice == solve(graph, seed=1).choice


def test_a_time_limit_is_kept_and_the_bound_honest():
    graph = chain(300, 20, seed=7, share=0.05)
    begin = time.monotonic()
    lines: list[str] = []
    found = solve(graph, time_limit=1.0, progress=lines.append)
    assert time.monotonic() - begin < 20
    assert found.status == "feasible"
    assert 0 < found.bound < found.cost
    assert found.gap == pytest.approx((found.cost - found.bound) / found.cost)
    assert "best" in lines[-1]
    assert "bound" in lines[-1]


def test_no_time_at_all_still_gives_a_choice():
    found = solve(chain(60, 6, seed=8, share=0.2), time_limit=1e-9)
    assert found.cost >= found.bound


def test_ctrl_c_keeps_the_best_so_far():
    graph = chain(300, 20, seed=7, share=0.05)
    budget = Budget(effort=1e9)
    search = Search(graph, budget=budget, seed=0)

    def interrupt(text: str) -> None:
        budget.is_interrupted = True

    budget.report = interrupt
    search.run()
    assert search.best.answer is not None
    assert evaluate(graph, search.best.answer).is_feasible(graph.usage_limit)


def test_a_limit_that_every_pair_of_strategies_breaks_is_found_out():
    """Each strategy alone would fit beside the least of the others, at every time; together none does."""
    graph = graph_of([[0, 0], [0, 0]], usages=[[4, 0], [4, 0]], limit=3, intervals=[[0, 1], [0, 1]],
                     edges=[(0, 1, [[0, 0], [0, 10**18]])])
    with pytest.raises(NoFeasiblePlan, match="usage limit of 3"):
        solve(graph)


def test_whole_numbers_that_floating_point_cannot_tell_apart_are_summed_exactly_but_not_called_optimal():
    big = 2**54
    found = solve(graph_of([[big + 1, big + 2], [1, 2]], [(0, 1, [[5, 0], [1, 1]])]))
    assert found.status == "feasible"
    assert found.cost == evaluate(graph_of([[big + 1, big + 2], [1, 2]], [(0, 1, [[5, 0], [1, 1]])]), found.choice).cost
    assert found.bound <= big + 3 <= found.cost <= big + 5


def test_costs_may_be_negative():
    found = solve(graph_of([[-5, 3], [-1, -2]], [(0, 1, [[0, -7], [4, 0]])]))
    assert (found.cost, found.bound, found.choice) == (-14, -14, (0, 1))


def test_infinite_costs_rule_out():
    found = solve(graph_of([[np.inf, 2.0], [1.0, 0.5]], [(0, 1, [[0.0, 0.0], [0.0, np.inf]])]))
    assert found.choice == (1, 0)


def test_a_graph_that_is_wrong_is_refused():
    with pytest.raises(InputError, match="usage limit"):
        solve(graph_of([[1]], limit=-1))


def test_results_as_json():
    value = solve(graph_of([[3, 1]], usages=[[1, 2]], limit=2)).to_json()
    assert list(value) == ["status", "cost", "bound", "usage_peak", "choice", "seconds"]
    assert (value["status"], value["cost"], value["bound"], value["usage_peak"], value["choice"]) == (
        "optimal", 1, 1, 2, [1])
