"""Annealer search around a timetable, with memory for weights and for tensors that live for a while."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.test_timetable import random_order, random_placement
from tests.search.place.worlds import problem_of
from weft.search.common.budget import Budget
from weft.search.place.latency.anneal import Annealer
from weft.search.place.timetable import Timetable, check_timetable, make_timetable


def tight_start(seed: int, *, room: float = 1.0) -> Timetable:
    """Return a random timetable whose devices have just the memory it takes at its peaks, or ``room`` times that."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 20, 3, contention=("link", "port", "none")[seed % 3], lifetimes=True,
                             colocate=seed % 2 == 0, shared_weights=seed % 3 == 0)
    device, order = random_placement(rng, problem), random_order(rng, problem)
    peaks = make_timetable(problem, device, order).peak_bytes()
    return make_timetable(replace(problem, capacity=np.maximum(1, peaks * room)), device, order)


# ---- rounds of annealing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_only_better_timetables_that_fit_are_yielded(seed):
    start = tight_start(seed)
    check_timetable(start)
    last = start
    for table in Annealer(start.problem, seed).improve(start, Budget(effort=5.0), effort=0.001):
        check_timetable(table)
        assert table.latency_s < last.latency_s
        last = table


def test_full_memory_leaves_something_to_find():
    """With tensors that take memory, most random starts are improved; with some room to spare, all are."""
    improved = {}
    for room in (1.0, 1.3):
        starts = [tight_start(seed, room=room) for seed in range(8)]
        improved[room] = sum(bool(list(Annealer(start.problem, 0).improve(start, Budget(effort=5.0), effort=0.001)))
                             for start in starts)
    assert improved[1.0] >= 4
    assert improved[1.3] >= 7


def test_the_seed_decides():
    start = tight_start(1, room=1.3)
    one, two = ([table.latency_s for table in Annealer(start.problem, 5).improve(start, Budget(effort=5.0), effort=0.001)]
                for _ in range(2))
    assert one == two


def test_what_it_costs_is_taken_from_the_budget():
    start, budget = tight_start(2), Budget(effort=5.0)
    list(Annealer(start.problem, 0).improve(start, budget, effort=0.001))
    assert budget.effort < 5.0


@pytest.mark.parametrize("budget", [Budget(effort=5.0, is_interrupted=True), Budget(effort=0.0),
                                    Budget(effort=5.0, deadline=0.0)])
def test_a_spent_budget_begins_nothing(budget):
    start = tight_start(2, room=2.0)
    assert list(Annealer(start.problem, 0).improve(start, budget, effort=1.0)) == []


def test_each_call_tries_something_new():
    start = tight_start(3, room=1.3)
    local = Annealer(start.problem, 0)
    for _ in range(2):
        list(local.improve(start, Budget(effort=5.0), effort=0.001))
    assert local.num_runs == 8


# ---- making room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_placements_are_made_to_fit_where_there_is_room(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 15, 3, colocate=seed % 2 == 0)
    problem = replace(problem, capacity=np.full(3, problem.weight_bytes.sum() * 0.55))
    start = make_timetable(problem, random_placement(rng, problem), np.arange(problem.num_ops))
    found = Annealer(problem, seed).make_fit(start, Budget(effort=5.0), effort=0.05)
    assert found is not None
    check_timetable(found)
    assert np.all(found.peak_bytes() <= problem.capacity)


def test_where_nothing_fits_there_is_nothing():
    problem = problem_of(graph([op(name, memory=5) for name in "abc"]), cluster(memory={"x": 5, "y": 5}))
    start = make_timetable(problem, np.zeros(3, dtype=np.int64), np.arange(3))
    assert Annealer(problem, 0).make_fit(start, Budget(effort=5.0), effort=0.01) is None


def test_a_price_on_memory_leads_through_what_does_not_fit():
    """x has room for the large operator or for both small ones, which are better there; y is full, so that no single
    move fits."""
    ops = [op("large", 5, 6, memory=10), op("a", 1, 4, memory=5), op("b", 1, 4, memory=5)]
    problem = problem_of(graph(ops), cluster(memory={"x": 10, "y": 10}))
    start = make_timetable(problem, np.array([0, 1, 1]), np.arange(3))
    found = Annealer(problem, 0).make_fit(start, Budget(effort=5.0), effort=0.01)
    assert found is not None
    assert found.device.tolist() == [1, 0, 0]
