"""Bounds by simple arguments: never above what the oracle or any other schedule reaches, and as high as they should be."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.oracle_period import can_repeat, gives_back_all, min_period, num_candidates
from tests.search.schedule.random_problems import random_problem
from tests.search.schedule.random_schedules import allowed_schedules, in_order
from tests.search.schedule.test_shapes import PROBLEMS
from weft.search.schedule.bounds import filling_idle, grows, hold_times, makespan_bound, period_bound, task_tails
from weft.search.schedule.problem import Block, ScheduleProblem, load_problem, turned_round
from weft.search.schedule.schedule import Schedule
from weft.search.schedule.whole import balanced_holds

SEEDS = (*range(3000, 3070), 248, 439, 603)
"""In the last three, sets of more than half of a resource's tasks that run early would count idle time twice."""


def test_the_seeds_have_blocks_on_several_devices_and_tight_memory():
    cases = [random_problem(seed) for seed in SEEDS]
    assert sum(any(len(block.devices) > 1 for block in case.problem.blocks) for case in cases) >= 15
    assert sum(bool(balanced_holds(case.problem)) for case in cases) >= 15


@pytest.mark.parametrize("seed", SEEDS)
def test_no_schedule_is_below_the_bounds(seed):
    case, schedules = allowed_schedules(seed)
    problem, number = case.problem, case.num_microbatches
    bound, steady = makespan_bound(problem, number), period_bound(problem)
    assert (steady is None) == (not can_repeat(problem))
    for schedule in schedules:
        assert bound <= schedule.makespan + 1e-9
        if steady is not None:
            assert steady <= schedule.makespan / number + 1e-9, "it can be run again and again"
        for resource in range(len(problem.resource_names)):
            mirror = Schedule(problem=turned_round(problem), starts=schedule.ends.max() - schedule.ends)
            for side in (schedule, mirror):
                assert filling_idle(side.problem, resource) <= idle_before_last(side, resource) + 1e-9


def idle_before_last(schedule: Schedule, resource: int) -> float:
    """Return how long the resource is idle before it begins its last task."""
    tasks = list(schedule.problem.resource_tasks[resource])
    if not tasks:
        return 0.0
    last = schedule.starts[tasks].max()
    times = np.asarray(schedule.problem.task_times)[tasks, None]
    return float(last - np.minimum(times, last - schedule.starts[tasks]).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_held_is_held_as_long_as_said(seed):
    case, schedules = allowed_schedules(seed)
    for holds in balanced_holds(case.problem).values():
        for (take, release, _), time in zip(holds, hold_times(case.problem, [item[:2] for item in holds]), strict=True):
            for schedule in schedules:
                held = in_order(schedule.ends)[release] - in_order(schedule.starts)[take]
                assert time <= held.min() + 1e-9


@pytest.mark.parametrize("seed", range(3000, 3150))
def test_no_period_is_below_the_bound(seed):
    problem = random_problem(seed).problem
    for number in (1, 2):
        if gives_back_all(problem) and num_candidates(problem, number, 2) <= 1500:
            steady = min_period(problem, number, 2)
            assert steady is None or period_bound(problem) <= float(steady.period) / number + 1e-9


@pytest.mark.parametrize(("file", "idle", "makespan"), [
    ("v-train-mem4", 12, 524), ("m-train-mem6", 12, 780), ("nn-train-mem6", 12, 1036), ("k-train-mem6", 4, 772)])
def test_known_idle_times(file, idle, makespan):
    problem = load_problem(PROBLEMS / f"{file}.json")
    assert makespan_bound(problem, 128) == makespan == 128 * max(problem.device_work) + idle


@pytest.mark.parametrize(("file", "period"), [("v-train-mem3", 16 / 3), ("v-train-mem4", 4), ("m-train-mem5", 6)])
def test_known_periods(file, period):
    assert period_bound(load_problem(PROBLEMS / f"{file}.json")) == pytest.approx(period)


@pytest.mark.parametrize("num_microbatches", [1, 3, 9])
def test_equal_stages(num_microbatches):
    """A pipeline fills and drains before and after each stage: the bound of 1F1B is met."""
    assert makespan_bound(shape("v", 5, memory=5), num_microbatches) == 4 * (num_microbatches + 4)


def test_only_whole_amounts_fit():
    """With room for 3.9 there is room for 3."""
    assert period_bound(shape("v", 4, memory=3.9)) == period_bound(shape("v", 4, memory=3)) == pytest.approx(16 / 3)


def test_growing_memory_has_no_period():
    keeps = ScheduleProblem(device_names=("d0", "d1"), device_memory=(None, 5.0), blocks=(
        Block(name="a", devices=(0,), time=1.0, memory=1.0), Block(name="b", devices=(1,), time=1.0, memory=1.0)))
    assert [grows(keeps, device) for device in (0, 1)] == [False, True]
    assert period_bound(keeps) is None


def test_tails_are_the_longest_paths_backwards():
    for seed in range(30):
        problem = random_problem(seed).problem
        assert task_tails(problem) == pytest.approx(turned_round(problem).longest_paths())
