"""Bounds against the optimum: never above it, and never without a device that the optimum uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import chain, cluster, edge, graph, op
from tests.search.place.oracle import min_latency
from tests.search.place.test_oracle import draw
from tests.search.place.worlds import problem_of
from weft.search.place.latency.bounds import heads_and_tails, tighten, way_bound
from weft.search.place.latency.exact import subproblem
from weft.search.place.problem import PlaceProblem
from weft.search.place.search import pinned
from weft.search.place.timetable import Timetable

SEEDS = range(200, 240)


def optimum_of(problem: PlaceProblem) -> Timetable:
    best = min_latency(problem)
    assert best is not None
    return best.timetable


@pytest.mark.parametrize("seed", SEEDS)
def test_ways_are_within_the_optimum(seed):
    problem = draw(seed, 6)
    best = optimum_of(problem)
    heads, tails = heads_and_tails(problem)
    rows = np.arange(problem.num_ops)
    slack = 1e-9 * best.latency_s
    assert np.all(heads[rows, best.device] <= best.start_s + slack)
    assert np.all(best.end_s + tails[rows, best.device] <= best.latency_s + slack)
    assert way_bound(problem, heads, tails) <= best.latency_s + slack


@pytest.mark.parametrize("seed", SEEDS)
def test_tightening_keeps_every_optimal_placement(seed):
    problem = draw(seed, 5)
    best = optimum_of(problem)
    above = tighten(problem, best.latency_s * (1 + 1e-9) + 1e-9)
    assert above is not None
    assert not np.any(above.is_allowed & ~problem.is_allowed)
    for unit, device in np.argwhere(problem.is_allowed & ~above.is_allowed).tolist():  # with the unit there, nothing is as good
        time_s = problem.time_s.copy()
        kept = time_s[problem.unit_of_op == unit, device]
        time_s[problem.unit_of_op == unit] = np.inf
        time_s[problem.unit_of_op == unit, device] = kept
        other = min_latency(replace(problem, time_s=time_s))
        assert other is None or other.latency_s > best.latency_s


def test_tightening_removes_something():
    num_gone = 0
    for seed in SEEDS:
        problem = draw(seed, 5)
        above = tighten(problem, optimum_of(problem).latency_s * (1 + 1e-9) + 1e-9)
        assert above is not None
        num_gone += int(problem.is_allowed.sum() - above.is_allowed.sum())
    assert num_gone > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_something_is_left_above_the_optimum_and_nothing_below_the_ways(seed):
    problem = draw(seed, 5)
    latency_s = optimum_of(problem).latency_s
    for factor in (1 + 1e-9, 1.01, 1.5):
        assert tighten(problem, latency_s * factor + 1e-9) is not None
    ways = way_bound(problem, *heads_and_tails(problem))
    assert tighten(problem, ways) is None
    assert tighten(problem, 0.0) is None


def test_bounds_of_a_chain_by_hand():
    """Three operators of 1, 2 and 3 s on x, of 4 s each on y, 1 s to send."""
    problem = problem_of(graph([op("a", 1, 4), op("b", 2, 4), op("c", 3, 4)], [edge("a", "b", 1), edge("b", "c", 1)]),
                         cluster())
    heads, tails = heads_and_tails(problem)
    assert heads.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert tails.tolist() == [[5, 6], [3, 4], [0, 0]]
    assert way_bound(problem, heads, tails) == 6
    less = tighten(problem, 7.5)
    assert less is not None
    assert less.is_allowed.tolist() == [[True, False]] * 3
    assert tighten(problem, 6) is None  # nothing takes less than 6
    assert tighten(problem, 6.001) is not None


def test_operators_of_a_unit_have_no_transfer_between_them_and_no_choice():
    free = graph([op("a", 1, 9), op("b", 9, 1)], [edge("a", "b", 1)])
    together = graph([op("a", 1, 9, colocate="g"), op("b", 9, 1, colocate="g")], [edge("a", "b", 1)])
    apart, joined = problem_of(free, cluster()), problem_of(together, cluster())
    assert way_bound(apart, *heads_and_tails(apart)) == 3
    assert way_bound(joined, *heads_and_tails(joined)) == 10


def test_a_device_that_goes_makes_other_ways_longer():
    """b fits only on x in time; so a must be on x as well, since sending takes too long."""
    problem = problem_of(graph([op("a", 3, 1), op("b", 1, 9)], [edge("a", "b", 4)]), cluster())
    less = tighten(problem, 4.5)
    assert less is not None
    assert less.is_allowed.tolist() == [[True, False], [True, False]]


def test_the_bound_of_a_fixed_placement_is_its_longest_way():
    problem = problem_of(chain(3, 2, 5), cluster())
    there_and_back = pinned(problem, np.array([0, 1, 0]))
    assert way_bound(there_and_back, *heads_and_tails(there_and_back)) == 2 + 5 + 2 + 5 + 2


def test_nothing_takes_no_time():
    problem = subproblem(draw(3, 5), np.arange(0), entry=False)
    assert way_bound(problem, *heads_and_tails(problem)) == 0.0
