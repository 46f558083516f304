"""The linear relaxation: below every optimum, and equal to what a pencil finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, edge, graph, op
from tests.search.place.oracle import min_latency
from tests.search.place.random_problems import random_problem
from tests.search.place.test_oracle import draw
from tests.search.place.worlds import problem_of
from weft.search.place.latency import bounds as relaxation
from weft.search.place.latency.bounds import Relaxation, heads_and_tails, way_bound


def relaxation_bound(problem):
    """Return the least latency of the relaxation; zero where the program is too large."""
    found = Relaxation(problem)
    return found.bound(time_limit=10) if found.is_of_use else 0.0


@pytest.mark.parametrize("seed", range(300, 345))
def test_it_is_within_the_optimum(seed):
    problem = draw(seed, 6)
    best = min_latency(problem)
    assert best is not None
    bound = relaxation_bound(problem)
    assert 0 <= bound <= best.latency_s * (1 + 1e-9)


def test_it_is_often_better_than_ways_alone():
    num_better = 0
    for seed in range(300, 330):
        problem = draw(seed, 6)
        num_better += relaxation_bound(problem) > way_bound(problem, *heads_and_tails(problem)) * 1.001
    assert num_better >= 5


def test_work_is_divided_among_devices():
    problem = problem_of(graph([op("a", 4), op("b", 4), op("c", 4)]), cluster())
    assert relaxation_bound(problem) == pytest.approx(6, rel=1e-5)


def test_devices_with_one_core_do_the_work_of_one():
    problem = problem_of(graph([op("a", 4), op("b", 4), op("c", 4)]), cluster(units={"x": "core", "y": "core"}))
    assert relaxation_bound(problem) == pytest.approx(12, rel=1e-5)


def test_memory_for_half_of_a_chain_costs_a_transfer():
    """Each device holds one operator of two: one is sent, whatever fractions are used (x and y are equal)."""
    ops = [op("a", 5, memory=10), op("b", 5, memory=10)]
    wire = [edge("a", "b", 3)]
    tight = problem_of(graph(ops, wire), cluster(memory={"x": 10, "y": 10}))
    roomy = problem_of(graph(ops, wire), cluster(memory={"x": 20, "y": 20}))
    pins = [{**ops[0], "on": ["x"]}, ops[1]]
    assert relaxation_bound(roomy) == pytest.approx(10, rel=1e-5)
    # Fractions may halve both operators, so only pinning one of them forces the other away as a whole.
    assert relaxation_bound(problem_of(graph(pins, wire), cluster(memory={"x": 10, "y": 10}))) == pytest.approx(
        13, rel=1e-5)
    assert relaxation_bound(tight) == pytest.approx(10, rel=1e-5)


def test_a_slow_device_that_memory_forces_is_counted():
    """x is fast but holds one of two operators; y takes 9 s for the other, or for as much of both."""
    problem = problem_of(graph([op("a", 1, 9, memory=10), op("b", 1, 9, memory=10)], [edge("a", "b", 0)]),
                         cluster(memory={"x": 10, "y": 100}))
    assert relaxation_bound(problem) == pytest.approx(10, rel=1e-5)


def test_weights_of_many_operators_count_once():
    problem = problem_of(graph([op("a", 1, 9, memory=10), op("b", 1, 9, memory=10)], [edge("a", "b", 0)]),
                         cluster(memory={"x": 10, "y": 100}))
    shared = replace(problem, weights=np.zeros(2, dtype=np.int64), weight_bytes=np.array([10.0, 0.0]))
    assert relaxation_bound(shared) == pytest.approx(2, rel=1e-5)
    half = replace(shared, capacity=np.array([5.0, 100.0]))  # half of the weight, so half of each operator on x
    assert relaxation_bound(half) == pytest.approx(2 * (0.5 * 1 + 0.5 * 9), rel=1e-5)


@pytest.mark.parametrize("exponent", [-12, -6, 9])
def test_it_follows_the_scale_of_times(exponent):
    problem = random_problem(np.random.default_rng(5), 8, 3, tight_memory=True)
    factor = 10.0**exponent
    scaled = replace(problem, time_s=problem.time_s * factor, latency_s=problem.latency_s * factor,
                     s_per_byte=problem.s_per_byte * factor, given_s=problem.given_s * factor)
    assert relaxation_bound(scaled) == pytest.approx(
        factor * relaxation_bound(problem), rel=1e-4)


def test_large_programs_are_left_out(monkeypatch):
    problem = draw(300, 6)
    assert relaxation_bound(problem) > 0
    monkeypatch.setattr(relaxation, "MAX_TERMS", 3)
    assert relaxation_bound(problem) == 0.0
