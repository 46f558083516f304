"""A schedule: when every task of every micro-batch starts. Also: playing device orders as early as possible.

``starts[t, n]`` is the start of task ``t`` (see ``ScheduleProblem``) of micro-batch ``n``. ``replay`` turns an order of
blocks on each device into the earliest schedule with that order; every searcher and every named schedule ends in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import F64
from weft.search.schedule.problem import ScheduleProblem

Instance = tuple[int, int]
"""(task, micro-batch)."""
Orders = Sequence[Sequence[Instance]]
"""For each device (or resource) its tasks in order."""
Phase = Literal["warm-up", "steady", "cool-down"]

TOLERANCE: Final = 1e-9
"""Relative to the makespan: smaller differences between times are rounding."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Start times of all tasks of all micro-batches; ``check_schedule`` says whether they are allowed."""

    problem: ScheduleProblem
    starts: F64
    """[tasks, micro-batches]"""

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches."""
        return int(self.starts.shape[1])

    @property
    def ends(self) -> F64:
        """Return when every task ends."""
        return self.starts + np.asarray(self.problem.task_times, dtype=np.float64)[:, None]

    @property
    def makespan(self) -> float:
        """Return when the last block ends; schedules start at 0."""
        return float(self.ends[: self.problem.num_blocks].max(initial=0.0))

    def orders(self) -> list[list[Instance]]:
        """Return for each resource its tasks by start; of tasks that start together the one that ends first is first.

        Tasks without duration that start together are in order of micro-batch, then of dependencies; but what releases
        memory runs before what takes it, as far as dependencies allow.
        """
        rank = {task: place for place, task in enumerate(self.problem.topological)}
        ends = self.ends
        first = self._instant_places(rank)
        result = []
        for tasks in self.problem.resource_tasks:
            items = [(self.starts[task, index], ends[task, index], first.get((task, index), 0), index, rank[task], task)
                     for task in tasks for index in range(self.num_microbatches)]
            result.append([(task, index) for *_, index, _, task in sorted(items)])
        return result

    def _instant_places(self, rank: Mapping[int, int]) -> dict[Instance, int]:
        """Return places of tasks without duration among those that start together; none if they leave memory alone."""
        instant = [task for task, time in enumerate(self.problem.task_times) if not time]
        if not any(self.problem.memory_of(task) for task in instant):
            return {}
        groups: dict[float, set[Instance]] = {}
        for task in instant:
            for index in range(self.num_microbatches):
                groups.setdefault(float(self.starts[task, index]), set()).add((task, index))
        return {item: place for group in groups.values()
                for place, item in enumerate(_releases_first(self.problem, group, rank))}

    def peak_memory(self) -> dict[str, float]:
        """Return the most that each device holds at any time."""
        peaks = {}
        for name, order in zip(self.problem.device_names, self.orders(), strict=False):
            levels = np.cumsum([self.problem.memory_of(task) for task, _ in order])
            peaks[name] = float(levels.max(initial=0.0))
        return peaks


def _releases_first(problem: ScheduleProblem, group: Set[Instance], rank: Mapping[int, int]) -> list[Instance]:
    """Return the tasks in an order that respects dependencies: releases as soon as can be, takes as late."""
    def key(task: int, index: int) -> tuple[float, int, int, int]:
        return float(np.sign(problem.memory_of(task))), index, rank[task], task

    missing = {(task, index): sum((edge.source, index) in group for edge in problem.predecessors[task])
               for task, index in group}
    ready = [key(*item) for item, number in missing.items() if not number]
    heapq.heapify(ready)
    result: list[Instance] = []
    while ready:
        _, index, _, task = heapq.heappop(ready)
        result.append((task, index))
        for edge in problem.successors[task]:
            if (edge.target, index) in group:
                missing[edge.target, index] -= 1
                if not missing[edge.target, index]:
                    heapq.heappush(ready, key(edge.target, index))
    return result


def replay(problem: ScheduleProblem, num_microbatches: int, orders: Orders) -> Schedule:
    """Return the earliest schedule in which every resource runs its tasks in the given order.

    ``orders`` covers the devices, or all resources; links without an order serve transfers as they become ready.
    Raises ``PlanError`` if the orders wait for each other in a circle, or do not hold every task exactly once.
    """
    delays = [edge.delay for edge in problem.edges]
    return Schedule(problem=problem, starts=play(problem, num_microbatches, orders, times=problem.task_times,
                                                 delays=delays))


def play(problem: ScheduleProblem, num_microbatches: int, orders: Orders, *, times: Sequence[float],
         delays: Sequence[float]) -> F64:
    """Return the starts as ``replay`` does, with other durations of tasks and delays of ``problem.edges``."""
    _check_complete(problem, num_microbatches, orders)
    return _Player(problem, num_microbatches, orders, times, delays).play()


def _check_complete(problem: ScheduleProblem, num_microbatches: int, orders: Orders) -> None:
    for resource, order in enumerate(orders):
        wanted = len(problem.resource_tasks[resource]) * num_microbatches
        known = set(problem.resource_tasks[resource])
        items = {(task, index) for task, index in order if task in known and 0 <= index < num_microbatches}
        if len(order) != wanted or len(items) != wanted:
            raise PlanError(f"the order of {problem.resource_names[resource]!r} has {len(order)} entries and "
                            f"{len(items)} different tasks, it needs each of its {wanted} tasks once")


class _Player:
    """Starts each task as soon as it is first on all its resources and what it needs has ended."""

    def __init__(self, problem: ScheduleProblem, num_microbatches: int, orders: Orders, times: Sequence[float],
                 delays: Sequence[float]) -> None:
        self.problem, self.times, self.orders = problem, times, orders
        self.later: list[list[tuple[int, float]]] = [[] for _ in range(problem.num_tasks)]
        for edge, delay in zip(problem.edges, delays, strict=True):
            self.later[edge.source].append((edge.target, delay))
        self.heads = [0] * len(orders)
        self.free_at = [0.0] * len(problem.resource_names)
        self.starts = np.full((problem.num_tasks, num_microbatches), np.nan)
        self.missing = np.tile(np.asarray([[len(edges)] for edges in problem.predecessors]), (1, num_microbatches))
        self.ready_at = np.zeros((problem.num_tasks, num_microbatches))
        self.queue: list[tuple[float, int, int]] = []
        self.left = self.starts.size

    def play(self) -> F64:
        """Return the starts of all tasks."""
        for order in self.orders:
            if order:
                self._offer(*order[0])
        self._offer_free_links()
        while self.queue:
            _, index, task = heapq.heappop(self.queue)
            self._start(task, index)
        if self.left:
            self._raise_blocked()
        return self.starts

    def _offer_free_links(self) -> None:
        for task in range(self.problem.num_tasks):
            if self.problem.task_resources[task][0] >= len(self.orders) and not self.problem.predecessors[task]:
                for index in range(self.starts.shape[1]):
                    self._offer(task, index)

    def _offer(self, task: int, index: int) -> None:
        """Queue the task if nothing but time keeps it from starting."""
        if self.missing[task, index] or not np.isnan(self.starts[task, index]):
            return
        for resource in self.problem.task_resources[task]:
            if resource < len(self.orders) and self.orders[resource][self.heads[resource]] != (task, index):
                return
        at = float(self.ready_at[task, index])
        if self.problem.task_resources[task][0] < len(self.orders):
            at = max(at, *(self.free_at[resource] for resource in self.problem.task_resources[task]))
            self.starts[task, index] = at
        heapq.heappush(self.queue, (at, index, task))

    def _start(self, task: int, index: int) -> None:
        resources = self.problem.task_resources[task]
        if resources[0] >= len(self.orders):  # a link that serves transfers as they come
            self.starts[task, index] = max(float(self.ready_at[task, index]), self.free_at[resources[0]])
        end = float(self.starts[task, index]) + self.times[task]
        self.left -= 1
        for resource in resources:
            self.free_at[resource] = end
            if resource < len(self.orders):
                self.heads[resource] += 1
        for target, delay in self.later[task]:
            self.missing[target, index] -= 1
            self.ready_at[target, index] = max(self.ready_at[target, index], end + delay)
            self._offer(target, index)
        for resource in resources:
            if resource < len(self.orders) and self.heads[resource] < len(self.orders[resource]):
                self._offer(*self.orders[resource][self.heads[resource]])

    def _raise_blocked(self) -> None:
        lines = []
        for resource, order in enumerate(self.orders):
            if self.heads[resource] < len(order):
                task, index = order[self.heads[resource]]
                lines.append(f"{self.problem.resource_names[resource]} waits with {self.problem.task_names[task]} "
                             f"of micro-batch {index}")
        raise PlanError("the orders wait for each other: " + "; ".join(lines[:8]), lines)


def phases(schedule: Schedule, period: float, period_microbatches: int) -> list[list[Phase]]:
    """Return for each task and micro-batch whether it belongs to the warm-up, the steady state or the cool-down.

    Steady are, of each task, the micro-batches in the longest run in which each starts one period after the one
    ``period_microbatches`` before it.
    """
    tolerance = TOLERANCE * max(1.0, schedule.makespan)
    result: list[list[Phase]] = []
    for row in schedule.starts:
        step = row[period_microbatches:] - row[: max(0, len(row) - period_microbatches)]
        first, last = _longest_run(np.abs(step - period) <= tolerance)
        end = last + period_microbatches if last > first else first
        result.append(["warm-up" if index < first else "steady" if index < end else "cool-down"
                       for index in range(len(row))])
    return result


def _longest_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Return (first, last + 1) of the longest run of true values, the first of equals."""
    best, begin = (0, 0), 0
    for index, flag in enumerate([*flags.tolist(), False]):
        if not flag:
            best = (begin, index) if index - begin > best[1] - best[0] else best
            begin = index + 1
    return best
