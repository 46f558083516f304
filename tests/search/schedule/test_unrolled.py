"""Schedules as one constraint problem: optima against the oracle, and steady middles that can be prolonged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.oracle import min_makespan
from tests.search.schedule.random_problems import random_problem
from weft.search.common.budget import Budget
from weft.search.schedule.bounds import makespan_bound
from weft.search.schedule.first import sequential
from weft.search.schedule.schedule import check_schedule
from weft.search.schedule.tuning import TUNING, Slice
from weft.search.schedule.unrolled import Middle, Unrolled, prolong, solve_unrolled
from weft.search.schedule.whole import WholeProblem, to_whole

MIDDLES = [
    ("v", 4, Middle(period=4, microbatches=1, first=3, laps=5)),
    ("v", 3, Middle(period=16, microbatches=3, first=3, laps=2)),
    ("m", 6, Middle(period=6, microbatches=1, first=2, laps=6)),
    ("x", 4, Middle(period=8, microbatches=1, first=2, laps=4))]


def solved(whole: WholeProblem, number: int, **options) -> Unrolled | None:
    horizon = number * (sum(whole.times) + sum(delay for _, _, delay in whole.edges))
    return solve_unrolled(whole, number, Budget(effort=20.0), **{"horizon": horizon, "effort": 10.0, **options})


@pytest.mark.parametrize("seed", range(7000, 7030))
def test_optima(seed):
    case = random_problem(seed, max_instances=10, whole_times=True)
    whole, answer = to_whole(case.problem), min_makespan(case.problem, case.num_microbatches)
    assert whole.is_exact
    found = solved(whole, case.num_microbatches)
    assert (found is None) == (answer is None)
    if found is not None:
        assert found.is_optimal
        assert found.makespan == found.bound == answer.makespan * whole.ticks
        real = whole.to_real(found.starts)
        check_schedule(real)
        assert real.makespan == pytest.approx(float(answer.makespan))


@pytest.mark.parametrize(("name", "memory", "middle"), MIDDLES)
def test_a_middle_can_be_prolonged(name, memory, middle):
    """By any number of periods; each takes exactly one period more."""
    problem = shape(name, 4, memory=memory)
    whole = to_whole(problem)
    total = middle.end + middle.first
    found = solved(whole, total, middle=middle, effort=2.0)
    assert found is not None
    for extra in (0, 1, 2, 3, 7, 20):
        starts = prolong(found.starts, middle, total + extra * middle.microbatches)
        assert starts.shape == (whole.num_tasks, total + extra * middle.microbatches)
        assert makespan(whole, starts) == found.makespan + extra * middle.period
        check_schedule(whole.to_real(starts))
        assert_repeats(starts, replace(middle, laps=middle.laps + extra))


def makespan(whole: WholeProblem, starts: np.ndarray) -> float:
    return (starts + np.asarray(whole.times)[:, None]).max()


def assert_repeats(starts: np.ndarray, middle: Middle) -> None:
    inside = starts[:, middle.first: middle.end]
    assert np.array_equal(inside[:, middle.microbatches:], inside[:, : -middle.microbatches] + middle.period)


def test_a_middle_that_need_not_grow():
    """It repeats as well, and can be shorter than what separates its first and its last period."""
    whole = to_whole(shape("v", 4, memory=4))
    middle = Middle(period=4, microbatches=1, first=1, laps=1, can_grow=False)
    found = solved(whole, 4, middle=middle)
    assert (found.makespan, found.is_optimal) == (28, True)
    assert_repeats(found.starts, middle)
    check_schedule(whole.to_real(found.starts))
    grown = solved(whole, 4, middle=replace(middle, can_grow=True))
    assert grown is None or grown.makespan > 28


def test_periods_that_no_steady_state_has():
    whole = to_whole(shape("v", 4, memory=3))
    assert solved(whole, 12, middle=Middle(period=5, microbatches=1, first=2, laps=7), effort=3.0) is None


def test_only_whole_periods_are_inserted():
    with pytest.raises(AssertionError, match="only whole periods"):
        prolong(np.zeros((2, 9)), Middle(period=4, microbatches=3, first=1, laps=1), 10)


def test_the_horizon_is_kept():
    whole = to_whole(shape("v", 3, memory=3))
    assert solved(whole, 4, horizon=23) is None
    assert solved(whole, 4, horizon=24).makespan == 24


def test_a_known_bound_ends_the_search():
    whole = to_whole(shape("m", 4, memory=6))
    hint = sequential(whole.problem, 3).starts
    assert makespan(whole, hint) == 54
    assert solved(whole, 3, hint=hint, least=54).makespan == 54, "the hint is good enough"
    optimum = solved(whole, 3, hint=hint)
    assert (optimum.makespan, optimum.is_optimal) == (makespan_bound(whole.problem, 3), True)


@pytest.mark.parametrize("slices", [(Slice(1.0, lns=True),), TUNING.to_prove])
def test_hints_are_improved(slices):
    """Also by large neighbourhood search alone, and with memory, whose variables have no hint."""
    whole = to_whole(shape("nn", 4, memory=4))
    hint = sequential(whole.problem, 5).starts
    found = solved(whole, 5, hint=hint, slices=slices, effort=2.0)
    assert found.makespan < makespan(whole, hint)
    assert found.bound <= found.makespan
    check_schedule(whole.to_real(found.starts))
