"""Annealing on compiled timetables: values that are true, limits that hold, runs that repeat and end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, diamond, edge, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.test_timetable import random_order, random_placement
from tests.search.place.worlds import problem_of
from weft.search.place.fit import fitting_devices
from weft.search.place.latency import anneal
from weft.search.place.latency.anneal import Annealed, Annealer, least_tails
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import check_timetable, make_timetable

STEPS = 30_000


def draw(seed: int, num_ops: int = 25) -> PlaceProblem:
    return random_problem(np.random.default_rng(seed), num_ops, 2 + seed % 3, contention=("link", "port", "none")[seed % 3],
                          tight_memory=seed % 2 == 0, colocate=seed % 4 < 2, shared_cores=seed % 5 == 0,
                          shared_weights=seed % 3 == 0)


def run(problem: PlaceProblem, *, seed: int = 0, steps: int = STEPS, hot: float = 0.05) -> tuple[float, Annealed]:
    """Return the value of a start that fits, and what a run from there comes to."""
    rng = np.random.default_rng(seed)
    device, order = fitting_devices(problem), random_order(rng, problem)
    kept = device.copy(), order.copy()
    found = Annealer(problem).run(device, order, steps=steps, seed=seed, hot=hot, cold=0.0002)
    assert np.array_equal(device, kept[0])  # the caller's arrays are as they were
    assert np.array_equal(order, kept[1])
    return make_timetable(problem, device, order).latency_s, found


@pytest.mark.parametrize("seed", range(16))
def test_what_it_returns_is_valid_worth_its_value_and_not_worse(seed):
    problem = draw(seed, 8 + 2 * seed)
    start, found = run(problem, seed=seed)
    table = make_timetable(problem, found.device, found.order)
    check_timetable(table)  # allowed devices, units, memory, and all times
    assert table.latency_s == found.value
    assert found.value <= start
    assert found.num_steps >= STEPS
    assert sorted(found.order.tolist()) == list(range(problem.num_ops))


def test_it_improves_most_starts():
    results = [run(draw(seed), seed=seed) for seed in range(8)]
    assert sum(found.value < start * 0.95 for start, found in results) >= 6


def test_it_finds_the_optimum_of_a_diamond():
    problem = problem_of(diamond(1, 0.5), cluster())
    _, found = run(problem)
    assert found.value == 1 + 4 + 1  # the shorter branch goes there and back meanwhile
    assert len(set(found.device[1:3].tolist())) == 2


def test_the_seed_decides():
    problem = draw(4, 40)
    (_, one), (_, two), (_, other) = (run(problem, steps=2000, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.device, two.device)
    assert np.array_equal(one.order, two.order)
    assert (one.value, one.num_steps) == (two.value, two.num_steps)
    assert not (np.array_equal(one.device, other.device) and np.array_equal(one.order, other.order))


def test_a_device_that_is_full_takes_nothing():
    """y is much faster but holds one of four."""
    problem = problem_of(graph([op(f"op{index}", 10, 1, memory=5) for index in range(4)]), cluster(memory={"y": 9}))
    _, found = run(problem)
    assert np.bincount(found.device, minlength=2).tolist() == [3, 1]
    assert found.value == 30


def test_it_may_start_from_what_does_not_fit_but_makes_it_no_fuller():
    problem = problem_of(graph([op(f"op{index}", 1, 1, memory=5) for index in range(6)]), cluster(memory={"x": 10, "y": 25}))
    found = Annealer(problem).run(np.array([0, 0, 0, 0, 1, 1]), np.arange(6), steps=STEPS, seed=0, hot=0.05, cold=0.001)
    assert problem.resident_bytes(found.device)[0] <= 20
    assert problem.resident_bytes(found.device)[1] <= 25


def test_units_swap_where_both_devices_are_full():
    """Each device holds two; the start has the wrong two on each, and nothing can move alone."""
    ops = [op("a", 1, 9, memory=5), op("b", 9, 1, memory=5), op("c", 1, 9, memory=5), op("d", 9, 1, memory=5)]
    problem = problem_of(graph(ops), cluster(memory={"x": 10, "y": 10}))
    found = Annealer(problem).run(np.array([1, 0, 1, 0]), np.arange(4), steps=STEPS, seed=0, hot=0.2, cold=0.001)
    assert found.device.tolist() == [0, 1, 0, 1]
    assert found.value == 2


def test_it_stops_between_pieces(monkeypatch):
    monkeypatch.setattr(anneal, "TUNING", replace(anneal.TUNING, piece=1000))
    problem = draw(1)
    rng = np.random.default_rng(1)
    start = random_placement(rng, replace(problem, capacity=np.full(problem.num_devices, np.inf))), random_order(rng, problem)
    annealer = Annealer(replace(problem, capacity=np.full(problem.num_devices, np.inf)))
    asked: list[int] = []

    def is_spent() -> bool:
        asked.append(1)
        return len(asked) == 3

    stopped = annealer.run(*start, steps=20_000, seed=0, hot=0.05, cold=0.001, is_spent=is_spent)
    assert len(asked) == 3
    assert 3000 <= stopped.num_steps < 4000
    whole = annealer.run(*start, steps=20_000, seed=0, hot=0.05, cold=0.001)
    assert 20_000 <= whole.num_steps < 25_000
    assert whole.value <= stopped.value  # the same first pieces
    at_once = annealer.run(*start, steps=20_000, seed=0, hot=0.05, cold=0.001, is_spent=lambda: True)
    assert 1000 <= at_once.num_steps < 2000  # one piece there always is


def test_least_tails_by_hand():
    problem = problem_of(graph([op("a", 1, 9), op("b", 7, 2), op("c", 3, 4), op("d", 9, 5)],
                               [edge("a", "b", 9), edge("a", "c", 9), edge("b", "d", 9), edge("c", "d", 9)]), cluster())
    assert least_tails(problem).tolist() == [3 + 5, 5, 5, 0]


@pytest.mark.parametrize("seed", range(6))
def test_least_tails_hold_in_every_timetable(seed):
    problem = draw(seed)
    rng = np.random.default_rng(seed)
    table = make_timetable(problem, random_placement(rng, problem), random_order(rng, problem))
    assert np.all(table.end_s + least_tails(problem) <= table.latency_s * (1 + 1e-9))
