"""Bounds by prices: never above the best of all placements, and met where the graph is narrow."""

from __future__ import annotations

import numpy as np
import pytest

from tests.search.place.partition.problems import random_partition
from weft.model.graph import F64
from weft.search.common.budget import Budget
from weft.search.place.partition.search import loads_of
from weft.search.place.throughput import sets
from weft.search.place.throughput.exact import average_bound
from weft.search.place.throughput.model import LoadProblem, reduce_problem
from weft.search.place.throughput.prices import priced_bound
from weft.search.place.throughput.sets import SetSolver


def set_costs(problem: LoadProblem, device: int) -> F64:
    """Return what every set of units (bits of the index) costs on the device; infinite where it does not fit."""
    a, count = problem.arrays, problem.num_units
    inside = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
    cost = np.where(inside, a.time_s[:, device], 0.0).sum(axis=1)
    for tensor, owner in enumerate(a.owner.tolist()):
        num_inside = inside[:, [owner, *a.readers_of(tensor)]].sum(axis=1)
        is_parted = (num_inside > 0) & (num_inside <= len(a.readers_of(tensor)))
        cost += np.where(is_parted, a.touch_s[tensor, device], 0.0)
    return np.where(inside @ problem.unit_bytes <= a.capacity[device] * (1 + 1e-9), cost, np.inf)


def best_value(problem: LoadProblem) -> float:
    """Return the least largest load, by sets of units for one device after the other."""
    best = np.full(1 << problem.num_units, np.inf)
    best[0] = 0.0
    for device in range(problem.num_devices):
        cost, now = set_costs(problem, device), best.copy()
        for units in range(1, len(now)):
            part = units
            while part:
                now[units] = min(now[units], max(best[units ^ part], cost[part]))
                part = (part - 1) & units
        best = now
    return float(best[-1])


def draw(seed: int) -> LoadProblem:
    rng = np.random.default_rng(seed)
    return loads_of(random_partition(rng, int(rng.integers(3, 8)), accelerators=int(rng.integers(1, 5)),
                                     cpus=int(rng.integers(0, 3)), tight=seed % 3 == 0))


@pytest.mark.parametrize("most_states", [2, sets.MOST_STATES])
def test_no_bound_is_above_the_best_placement(most_states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "MOST_STATES", most_states)
    num_judged = num_met = num_better = 0
    for seed in range(60):
        problem = draw(1000 * most_states + seed)
        best = best_value(problem)
        if not 0 < best < np.inf:
            continue
        small = reduce_problem(problem, best).problem if seed % 2 else problem
        found = priced_bound(small, best, low=0.0, budget=Budget(effort=10.0), effort=1.0)
        if found is not None:
            assert found.bound <= best * (1 + 1e-9), f"seed {seed}"
            num_judged += 1
            num_met += found.bound >= best * (1 - 1e-6)
            num_better += found.bound > average_bound(problem) * (1 + 1e-6)
    assert num_judged >= 25
    assert num_met >= num_judged / 3
    assert num_better >= num_judged / 4


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_sets_are_those_of_trying_all(seed: int) -> None:
    problem = draw(seed)
    free = LoadProblem(arrays=problem.arrays._replace(capacity=problem.arrays.capacity + np.inf),
                       class_of_device=problem.class_of_device, contiguous=False)
    rng, cost = np.random.default_rng(seed), set_costs(free, 0)
    worth = rng.integers(0, 9, problem.num_units)
    inside = (np.arange(len(cost))[:, None] >> np.arange(problem.num_units)) & 1
    value, total = inside @ worth, int(worth.sum())
    found = SetSolver(free, 0).solve(worth, total, 10.0, 60)
    for least in range(total + 1):
        expected = cost[value >= least].min()
        assert found.cost_s[least] == pytest.approx(expected) or (found.cost_s[least] > 1e200 and np.isinf(expected))
    for row, seconds in zip(found.inside, found.inside_s, strict=True):
        assert cost[int((row * (1 << np.arange(len(row)))).sum())] == pytest.approx(seconds)
        assert seconds <= 10.0


def test_a_chain_with_dear_tensors_has_a_far_better_bound_than_work() -> None:
    rng = np.random.default_rng(0)
    problem = loads_of(random_partition(rng, 12, accelerators=3, cpus=0, classes=False))
    a = problem.arrays
    dear = LoadProblem(arrays=a._replace(touch_s=a.touch_s * 10), class_of_device=problem.class_of_device, contiguous=False)
    limit = float(dear.value(np.zeros(dear.num_units, dtype=np.int64)))
    found = priced_bound(dear, limit, low=0.0, budget=Budget(effort=10.0), effort=5.0)
    assert found is not None
    assert found.bound > 1.5 * average_bound(dear)
