"""Local search around a timetable, with memory for weights and for tensors that live for a while."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.test_timetable import random_order, random_placement
from tests.search.place.worlds import problem_of
from weft.search.budget import Budget
from weft.search.place.local import Local, make_fit
from weft.search.place.problem import check_placement
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
    for table in Local(start.problem, seed).improve(start, Budget(effort=5.0), effort=0.001):
        check_timetable(table)
        assert table.latency_s < last.latency_s
        last = table


def test_full_memory_leaves_something_to_find():
    """With tensors that take memory, most random starts are improved; with some room to spare, all are."""
    improved = {}
    for room in (1.0, 1.3):
        starts = [tight_start(seed, room=room) for seed in range(8)]
        improved[room] = sum(bool(list(Local(start.problem, 0).improve(start, Budget(effort=5.0), effort=0.001)))
                             for start in starts)
    assert improved[1.0] >= 4
    assert improved[1.3] >= 7


def test_the_seed_decides():
    start = tight_start(1, room=1.3)
    one, two = ([table.latency_s for table in Local(start.problem, 5).improve(start, Budget(effort=5.0), effort=0.001)]
                for _ in range(2))
    assert one == two


def test_what_it_costs_is_taken_from_the_budget():
    start, budget = tight_start(2), Budget(effort=5.0)
    list(Local(start.problem, 0).improve(start, budget, effort=0.001))
    assert budget.effort < 5.0


@pytest.mark.parametrize("budget", [Budget(effort=5.0, is_interrupted=True), Budget(effort=0.0),
                                    Budget(effort=5.0, deadline=0.0)])
def test_a_spent_budget_begins_nothing(budget):
    start = tight_start(2, room=2.0)
    assert list(Local(start.problem, 0).improve(start, budget, effort=1.0)) == []


def test_each_call_tries_something_new():
    start = tight_start(3, room=1.3)
    local = Local(start.problem, 0)
    for _ in range(2):
        list(local.improve(start, Budget(effort=5.0), effort=0.001))
    assert local.num_runs == 8


# ---- making room ----------------------------------------------------------------------------------------------------------


def test_what_fits_stays():
    problem = problem_of(graph([op(name, 1, 5, memory=4) for name in "abc"]), cluster(memory={"x": 12, "y": 12}))
    device = np.array([0, 1, 0])
    assert make_fit(problem, device, problem.capacity).tolist() == [0, 1, 0]


def test_what_costs_the_least_time_for_a_byte_goes_first():
    """x is over by 6 bytes: b is as large as c but loses less; a loses little, but for one byte only."""
    problem = problem_of(graph([op("a", 1, 3, memory=1), op("b", 1, 4, memory=6), op("c", 1, 9, memory=6)]),
                         cluster(memory={"x": 7, "y": 20}))
    device = np.zeros(3, dtype=np.int64)
    assert make_fit(problem, device, problem.capacity).tolist() == [0, 1, 0]
    assert device.tolist() == [0, 0, 0]  # the caller's array is as it was


def test_units_go_together_and_only_where_they_may():
    ops = [op("a", 1, 1, memory=5, colocate="g"), op("b", memory=3, on=["x"]), op("c", 1, 1, memory=5, colocate="g")]
    problem = problem_of(graph(ops), cluster(memory={"x": 8, "y": 10}))
    device = make_fit(problem, np.zeros(3, dtype=np.int64), problem.capacity)
    assert device.tolist() == [1, 0, 1]
    pinned = problem_of(graph([op("a", memory=3, on=["y"])]), cluster(memory={"x": 9, "y": 2}))
    assert make_fit(pinned, np.array([1]), pinned.capacity).tolist() == [1]  # too large, but it may go nowhere else


def test_what_cannot_fit_is_left_as_near_as_it_came():
    problem = problem_of(graph([op("a", memory=5), op("b", memory=5), op("c", memory=5)]), cluster(memory={"x": 5, "y": 5}))
    device = make_fit(problem, np.zeros(3, dtype=np.int64), problem.capacity)
    assert sorted(np.bincount(device, minlength=2).tolist()) == [1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_random_placements_are_made_to_fit_where_there_is_room(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 15, 3, colocate=seed % 2 == 0, limited=seed % 3 == 0)
    capacity = np.full(3, problem.weight_bytes.sum() * 0.55)
    device = make_fit(problem, random_placement(rng, problem), capacity)
    check_placement(problem, device)
    if seed % 3:
        assert np.all(problem.resident_bytes(device) <= capacity)
