"""Lower bounds that hold for every schedule, by simple arguments: work, paths, and memory held.

    period    >= work of the busiest resource
    period    >= (sum of amount * shortest time that it can be held) / limit, on every device
    makespan  >= the longest path of one micro-batch
    makespan  >= N * work of a resource + its idle time while the pipeline fills, and while it drains
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from weft.model.graph import F64
from weft.search.schedule.holds import balanced_holds
from weft.search.schedule.problem import ScheduleProblem, turned_round
from weft.search.schedule.schedule import TOLERANCE

_CHUNK: Final = 256
"""Paths are followed from so many tasks at once."""
_MAX_STEPS: Final = 200_000
"""Steps along edges, about, in all searches for idle time while filling."""


def period_bound(problem: ScheduleProblem) -> float | None:
    """Return the least time per micro-batch of any steady state; None if memory grows with every micro-batch."""
    if any(grows(problem, device) for device in range(problem.num_devices)):
        return None
    bound = max(problem.device_work, default=0.0)
    for device, holds in balanced_holds(problem).items():
        limit = problem.device_memory[device]
        assert limit is not None, "without a limit there are no holds"
        bound = max(bound, _memory_period(problem, holds, limit))
    return bound


def grows(problem: ScheduleProblem, device: int) -> bool:
    """Return whether every micro-batch leaves more on a device with a limit than it found there."""
    if problem.device_memory[device] is None:
        return False
    amounts = [problem.memory_of(task) for task in problem.resource_tasks[device]]
    return sum(amounts) > 1e-9 * max([1e-300, *map(abs, amounts)])


def _memory_period(problem: ScheduleProblem, holds: list[tuple[int, int, float]], limit: float) -> float:
    """Return the least period at which what must be held fits: amount times duration over the usable limit."""
    times = hold_times(problem, [(take, release) for take, release, _ in holds])
    held = sum(amount * time for (_, _, amount), time in zip(holds, times, strict=True))
    usable = _usable(limit, {amount for _, _, amount in holds})
    return held / usable if usable > 0 else 0.0


def hold_times(problem: ScheduleProblem, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return for each (take, release) the least time from the start of ``take`` to the end of ``release``.

    Every release depends on its take.
    """
    takes = sorted({take for take, _ in pairs})
    reach: dict[tuple[int, int], float] = {}
    for begin in range(0, len(takes), _CHUNK):
        chunk = takes[begin: begin + _CHUNK]
        table = _paths_from(problem, chunk)
        column = {take: number for number, take in enumerate(chunk)}
        reach.update({(take, release): float(table[release, column[take]])
                      for take, release in pairs if take in column})
    return [reach[take, release] + problem.task_times[release] for take, release in pairs]


def _paths_from(problem: ScheduleProblem, sources: Sequence[int]) -> F64:
    """Return the longest paths [task, source] from start to start; -inf where there is none."""
    table = np.full((problem.num_tasks, len(sources)), -np.inf)
    table[list(sources), np.arange(len(sources))] = 0.0
    for task in problem.topological:
        for edge in problem.predecessors[task]:
            length = problem.task_times[edge.source] + edge.delay
            np.maximum(table[task], table[edge.source] + length, out=table[task])
    return table


def _usable(limit: float, amounts: set[float]) -> float:
    """Return the part of the limit that can be filled: a multiple of the amount where there is only one."""
    if len(amounts) == 1:
        amount = next(iter(amounts))
        return amount * math.floor(limit / amount * (1 + TOLERANCE) + 1e-9)
    return limit


def makespan_bound(problem: ScheduleProblem, num_microbatches: int) -> float:
    """Return a time before which no schedule of so many micro-batches ends."""
    heads, tails = problem.longest_paths(), task_tails(problem)
    times = problem.task_times
    bound = max((head + time + tail for head, time, tail in zip(heads, times, tails, strict=True)), default=0.0)
    backwards = turned_round(problem)
    for resource, work in enumerate(problem.device_work):
        idle = filling_idle(problem, resource) + filling_idle(backwards, resource)
        bound = max(bound, num_microbatches * work + idle)
    return bound


def filling_idle(problem: ScheduleProblem, resource: int) -> float:
    """Return how long the resource is idle, in every schedule, before it has begun its first task that is not *early*.

    Let some tasks of the resource be early, E; the others, R, come later. Before the first task of R starts, a path of
    its ancestors has run, and of the resource's tasks only E can have run meanwhile. While an ancestor runs that needs
    a resource which every task of E needs too, none of E runs, so the resource is idle. With E empty that is the time
    until anything can reach the resource at all. Blocks on all devices are what makes E interesting: they can be run
    ahead, but not while the pipeline fills. All sets E of tasks with the earliest possible starts are tried
    (the smaller ones where there are many).

    Backwards in time the same bounds the idle time at the end; the two do not overlap, since some task is in both R.
    """
    tasks = problem.resource_tasks[resource]
    heads = problem.longest_paths()
    ordered = sorted(tasks, key=lambda task: (heads[task], task))
    most = 0.0
    tried = min((len(ordered) + 1) // 2, 1 + _MAX_STEPS // (problem.num_tasks * len(problem.resource_names)))
    for number in range(tried):  # at least half are in R, so that both R share a task
        most = max(most, _idle_before(problem, resource, set(ordered[:number])))
    return most


def _idle_before(problem: ScheduleProblem, resource: int, early: set[int]) -> float:
    """Return the least idle time before the first task of the resource that is not early."""
    shared = set.intersection(*(set(problem.task_resources[task]) for task in early)) if early else None
    reach = [0.0] * problem.num_tasks
    for task in problem.topological:
        for edge in problem.predecessors[task]:
            source = problem.task_resources[edge.source]
            blocks = shared is None or (resource not in source and not shared.isdisjoint(source))
            gain = problem.task_times[edge.source] if blocks else 0.0
            reach[task] = max(reach[task], reach[edge.source] + gain + (edge.delay if shared is None else 0.0))
    return min((reach[task] for task in problem.resource_tasks[resource] if task not in early), default=0.0)


def task_tails(problem: ScheduleProblem) -> list[float]:
    """Return the least time from the end of each task to the end of its micro-batch."""
    result = [0.0] * problem.num_tasks
    for task in reversed(problem.topological):
        for edge in problem.successors[task]:
            result[task] = max(result[task], edge.delay + problem.task_times[edge.target] + result[edge.target])
    return result
