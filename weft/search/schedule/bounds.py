"""Lower bounds that hold for every schedule, by simple arguments: work, paths, and memory held.

    period    >= work of the busiest resource
    period    >= (sum of amount * shortest time that it can be held) / limit, on every device
    makespan  >= the longest path of one micro-batch
    makespan  >= N * work of a resource + the shortest way to it + the shortest way from it
"""

from __future__ import annotations

import math

from weft.search.schedule.holds import Hold, find_holds
from weft.search.schedule.problem import ScheduleProblem


def period_bound(problem: ScheduleProblem) -> float | None:
    """Return the least time per micro-batch of any steady state; None if memory grows with every micro-batch."""
    holds = find_holds(problem)
    if any(hold.take is None or hold.release is None for hold in holds):
        return None
    bound = max(problem.device_work, default=0.0)
    for device, limit in enumerate(problem.device_memory):
        if limit is not None:
            bound = max(bound, _memory_period(problem, [hold for hold in holds if hold.device == device], limit))
    return bound


def _memory_period(problem: ScheduleProblem, holds: list[Hold], limit: float) -> float:
    """Return the least period at which what must be held fits: amount times duration over the usable limit."""
    held = 0.0
    for hold in holds:
        assert hold.take is not None
        assert hold.release is not None
        held += hold.amount * hold_time(problem, hold.take, hold.release)
    usable = _usable(limit, {hold.amount for hold in holds})
    if held <= 0:
        return 0.0
    return held / usable if usable > 0 else 0.0


def hold_time(problem: ScheduleProblem, take: int, release: int) -> float:
    """Return the least time from the start of ``take`` to the end of ``release``, which depends on it."""
    times = problem.task_times
    reach: dict[int, float] = {take: 0.0}
    for task in problem.topological:
        if task in reach:
            for edge in problem.successors[task]:
                value = reach[task] + times[task] + edge.delay
                reach[edge.target] = max(reach.get(edge.target, value), value)
    return reach[release] + times[release]


def _usable(limit: float, amounts: set[float]) -> float:
    """Return the part of the limit that can be filled: a multiple of the amount where there is only one."""
    if len(amounts) == 1:
        amount = next(iter(amounts))
        return amount * math.floor(limit / amount * (1 + 1e-12) + 1e-9)
    return limit


def makespan_bound(problem: ScheduleProblem, num_microbatches: int) -> float:
    """Return a time before which no schedule of so many micro-batches ends."""
    heads, tails = problem.longest_paths(), task_tails(problem)
    times = problem.task_times
    bound = max((head + time + tail for head, time, tail in zip(heads, times, tails, strict=True)), default=0.0)
    for tasks, work in zip(problem.resource_tasks, problem.device_work, strict=True):
        if tasks:
            busy = num_microbatches * work
            bound = max(bound, min(heads[task] for task in tasks) + busy + min(tails[task] for task in tasks))
    return bound


def task_tails(problem: ScheduleProblem) -> list[float]:
    """Return the least time from the end of each task to the end of its micro-batch."""
    result = [0.0] * problem.num_tasks
    for task in reversed(problem.topological):
        for edge in problem.successors[task]:
            result[task] = max(result[task], edge.delay + problem.task_times[edge.target] + result[edge.target])
    return result
