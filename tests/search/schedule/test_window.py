"""Idle time in windows, and earliest starts: never more than in real schedules, and as much as is known for some."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.random_schedules import allowed_schedules, in_order
from weft.search.common.budget import Budget
from weft.search.schedule.bounds import earliest_starts, least_idle
from weft.search.schedule.first import greedy_schedules
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule
from weft.search.schedule.whole import WholeProblem, to_whole


def all_schedules(seed: int) -> tuple[ScheduleProblem, int, list[Schedule]]:
    case, schedules = allowed_schedules(seed)
    greedy = greedy_schedules(case.problem, case.num_microbatches, (1, 2, 9), Budget(effort=9.0))
    return case.problem, case.num_microbatches, [*schedules, *greedy]


def on_the_grid(whole: WholeProblem, starts: np.ndarray) -> np.ndarray:
    """Return starts in ticks, micro-batches in order; with times rounded down nothing overlaps after this."""
    return in_order(np.floor(starts * float(whole.ticks) * (1 + 1e-12) + 1e-9))


def work_in(whole: WholeProblem, device: int, window: int, starts: np.ndarray) -> float:
    tasks = list(whole.resource_tasks[device])
    times = np.asarray(whole.times)[tasks, None]
    return float(np.clip(window - starts[tasks], 0, times).sum())


@pytest.mark.parametrize("seed", range(5000, 5050))
def test_no_schedule_starts_earlier(seed):
    problem, number, schedules = all_schedules(seed)
    whole = to_whole(problem, rounding="down", resolution=20 if seed % 2 else 240)
    for side, turn in ((whole, False), (whole.reversed(), True)):
        early = np.asarray(earliest_starts(side, number)).T
        for schedule in schedules:
            starts = schedule.ends.max() - schedule.ends if turn else schedule.starts
            assert (early <= on_the_grid(side, starts)).all()


@pytest.mark.parametrize("seed", range(5000, 5050))
def test_no_schedule_is_less_idle(seed):
    problem, number, schedules = all_schedules(seed)
    whole = to_whole(problem, rounding="down", resolution=20)
    longest = max(head + time + tail for head, time, tail in zip(whole.heads(), whole.times, whole.tails(), strict=True))
    for side, turn in ((whole, False), (whole.reversed(), True)):
        for device in range(problem.num_devices):
            for window in {max(1, longest // 2), longest}:
                idle = least_idle(side, device, window, number, Budget(effort=2.0), effort=0.5)
                for schedule in schedules:
                    starts = schedule.ends.max() - schedule.ends if turn else schedule.starts
                    if schedule.makespan * float(whole.ticks) >= window:
                        assert idle <= window - work_in(side, device, window, on_the_grid(side, starts))


def idle(problem: ScheduleProblem, device: int, window: int, number: int = 8) -> int:
    return least_idle(to_whole(problem, rounding="down"), device, window, number, Budget(effort=20.0), effort=10.0)


def test_a_pipeline_fills():
    problem = shape("v", 4, memory=None, training=False)
    assert [idle(problem, device, 8) for device in range(4)] == [0, 1, 2, 3]
    assert idle(problem, 3, 3) == 3, "nothing arrives in this window"
    assert idle(problem, 0, 8, number=5) == 3, "there is no more to do"


def test_memory_keeps_a_device_idle():
    """One in flight: in 16 ticks the first device does one forward and one backward."""
    assert [idle(shape("v", 4, memory=memory), 0, 16) for memory in (1, 4)] == [12, 9]


def test_two_kinds_of_holds_share_the_room():
    """Two opposite pipelines, room for one: the first device works 1-5 for the one that begins elsewhere, then 5-6 for its own."""
    assert idle(shape("x", 2, memory=1), 0, 8) == 3


def test_earliest_starts_with_room_for_few():
    """Room for two: the third begins when the first has ended, after 12 ticks; the second ends a backward (3) later."""
    rows = earliest_starts(to_whole(shape("v", 3, memory=2)), 5)
    assert [row[0] for row in rows] == [0, 1, 12, 15, 24]


def test_micro_batches_after_the_window_are_left_out():
    whole = to_whole(shape("v", 3, memory=2))
    assert earliest_starts(whole, 5, until=13) == earliest_starts(whole, 5)[:3]


def test_without_effort_nothing_is_claimed():
    assert least_idle(to_whole(shape("nn", 4, memory=6)), 3, 30, 8, Budget(effort=0.0), effort=0.0) <= 12
