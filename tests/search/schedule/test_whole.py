"""Problems in whole numbers: exact where that is possible, else rounded to the safe side; schedules back in real time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.random_problems import random_problem
from tests.search.schedule.random_schedules import allowed_schedules
from weft.search.schedule.problem import Block, ScheduleProblem
from weft.search.schedule.schedule import check_schedule, play
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.whole import WholeProblem, to_whole


def with_times(*times: float) -> ScheduleProblem:
    return ScheduleProblem(device_names=("d0",), device_memory=(None,),
                           blocks=tuple(Block(name=f"n{index}", devices=(0,), time=time) for index, time in enumerate(times)))


def with_amounts(rng: Random, limit: float) -> ScheduleProblem:
    problem = shape("v", 3, memory=limit)
    amounts = [rng.uniform(0.1, 1.0) for _ in range(3)]
    return replace(problem, blocks=tuple(replace(block, devices=(0,), memory=block.memory * amounts[block.devices[0]])
                                         for block in problem.blocks))


def exact(value: float) -> Fraction:
    return Fraction(repr(value))


@pytest.mark.parametrize(("times", "ticks", "whole"), [
    ((0.1, 0.2, 0.3), 10, (1, 2, 3)), ((2.0, 4.0), Fraction(1, 2), (1, 2)), ((0.0, 0.0), 1, (0, 0)), ((0.0, 0.5), 2, (0, 1)),
    ((0.75, 1.5, 0.0), Fraction(4, 3), (1, 2, 0)), ((1e-9, 3e-9), 10**9, (1, 3)), ((1e300,), Fraction(1, 10**300), (1,))])
def test_small_common_denominators_are_exact(times, ticks, whole):
    result = to_whole(with_times(*times))
    assert result.is_exact
    assert (result.ticks, result.times) == (ticks, whole)


@pytest.mark.parametrize("times", [(0.1 * 3, 1.0), (1 / 3, 1.0), (1.0, float(TUNING.max_exact)), (1e-30, 1.0)])
def test_others_are_rounded(times):
    result = to_whole(with_times(*times))
    assert not result.is_exact
    assert TUNING.resolution <= sum(result.times) <= TUNING.resolution + len(times)
    assert sum(to_whole(with_times(*times), rounding="down").times) <= TUNING.resolution


@pytest.mark.parametrize("seed", range(60))
def test_rounding_is_to_the_safe_side_and_by_less_than_a_tick(seed):
    problem = random_problem(seed, whole_times=False if seed % 2 else None).problem
    for rounding, resolution in (("up", 7), ("up", 240), ("down", 7), ("down", 240)):
        whole = to_whole(problem, rounding=rounding, max_exact=10 if seed % 3 else TUNING.max_exact, resolution=resolution)
        pairs = [*zip(whole.times, problem.task_times, strict=True),
                 *((delay, edge.delay) for (_, _, delay), edge in zip(whole.edges, problem.edges, strict=True))]
        for ticks, time in pairs:
            difference = ticks - exact(time) * whole.ticks
            assert difference == 0 if whole.is_exact else (0 <= difference < 1 if rounding == "up" else -1 < difference <= 0)


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_rounded_to_the_safe_side(seed):
    """As parts of the limit (and what the checker forgives of it)."""
    rng = Random(seed)
    limit = rng.choice([1.0, 3.7, 1e10 / 7, 1e-9 / 3])
    problem = with_amounts(rng, limit)
    problem = replace(problem, blocks=tuple(replace(block, memory=block.memory * limit) for block in problem.blocks))
    amounts = {index: Fraction(block.memory) for index, block in enumerate(problem.blocks)}
    room = Fraction(limit) * (1 + Fraction(1, 10**9))
    for rounding in ("up", "down"):
        whole = to_whole(problem, rounding=rounding)
        assert not whole.is_exact
        assert whole.limits[1:] == (None, None), "nothing is taken there"
        assert len(whole.holds) == 3
        for hold in whole.holds:
            part, truth = Fraction(hold.amount, whole.limits[0]), amounts[hold.take] / room
            assert abs(part - truth) < 1e-8
            assert part >= truth - Fraction(1, 10**16) if rounding == "up" else part <= truth + Fraction(1, 10**16)


@pytest.mark.parametrize("seed", range(40))
def test_schedules_in_ticks_are_allowed_in_real_time(seed):
    """An optimum in ticks, its times coarse and rounded up, has the optimum's own orders."""
    case, schedules = allowed_schedules(seed)
    for whole in (to_whole(case.problem), to_whole(case.problem, max_exact=0, resolution=9)):
        assert whole.problem == case.problem
        for schedule in schedules:
            real = whole.to_real(in_ticks(whole, schedule.orders(), case.num_microbatches))
            check_schedule(real)
            assert real.makespan == pytest.approx(schedule.makespan)


def in_ticks(whole: WholeProblem, orders, num_microbatches: int) -> np.ndarray:
    return play(whole.problem, num_microbatches, orders, times=whole.times, delays=[delay for _, _, delay in whole.edges])


@pytest.mark.parametrize("seed", range(40))
def test_paths(seed):
    """Heads against the problem's own longest paths; tails are the heads backwards; lags by all paths."""
    case = random_problem(seed, whole_times=True)
    whole = to_whole(case.problem)
    assert whole.is_exact
    assert [head / whole.ticks for head in whole.heads()] == case.problem.longest_paths()
    assert whole.tails() == whole.reversed().heads()
    twice = whole.reversed().reversed()
    assert (twice.edges, twice.holds, twice.resource_tasks) == (whole.edges, whole.holds, whole.resource_tasks)
    for begin in range(whole.num_tasks):
        assert whole.lags_from(begin) == [longest_path(whole, begin, end) for end in range(whole.num_tasks)]


def longest_path(whole: WholeProblem, begin: int, end: int) -> int | None:
    if begin == end:
        return 0
    lengths = [(longest_path(whole, target, end), whole.times[source] + delay)
               for source, target, delay in whole.edges if source == begin]
    return max((rest + length for rest, length in lengths if rest is not None), default=None)
