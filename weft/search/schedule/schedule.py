"""A schedule: when every task of every micro-batch starts. Also: playing device orders as early as possible.

``starts[t, n]`` is the start of task ``t`` (see ``ScheduleProblem``) of micro-batch ``n``. ``replay`` turns an order of
blocks on each device into the earliest schedule with that order; every searcher and every named schedule ends in it.
``check_schedule`` knows no search and says exactly what is wrong with a schedule. ``ScheduleResult`` is what a search
returns: a checked schedule, how good it is known to be, and the steady state it repeats.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import F64, I64
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
        return [list(zip(tasks.tolist(), indices.tolist(), strict=True)) for tasks, indices in self.order_arrays()]

    def order_arrays(self) -> list[tuple[I64, I64]]:
        """Return what ``orders`` does, as the tasks and the micro-batches of each resource."""
        rank = np.empty(self.problem.num_tasks, dtype=np.int64)
        rank[list(self.problem.topological)] = np.arange(self.problem.num_tasks)
        ends, first = self.ends, np.zeros(self.starts.shape, dtype=np.int64)
        for (task, index), place in self._instant_places(dict(enumerate(rank.tolist()))).items():
            first[task, index] = place
        result = []
        for held in self.problem.resource_tasks:
            tasks = np.repeat(np.asarray(held, dtype=np.int64), self.num_microbatches)
            indices = np.tile(np.arange(self.num_microbatches), len(held))
            order = np.lexsort((tasks, rank[tasks], indices, first[tasks, indices], ends[tasks, indices],
                                self.starts[tasks, indices]))
            result.append((tasks[order], indices[order]))
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
        amounts = np.asarray([self.problem.memory_of(task) for task in range(self.problem.num_tasks)], dtype=np.float64)
        return {name: float(np.cumsum(amounts[tasks]).max(initial=0.0))
                for name, (tasks, _) in zip(self.problem.device_names, self.order_arrays(), strict=False)}


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
        self.num_microbatches = num_microbatches
        # Lists of lists: one entry at a time, they take a fraction of an array's time.
        self.starts: list[list[float | None]] = [[None] * num_microbatches for _ in range(problem.num_tasks)]
        self.missing = [[len(edges)] * num_microbatches for edges in problem.predecessors]
        self.ready_at = [[0.0] * num_microbatches for _ in range(problem.num_tasks)]
        self.queue: list[tuple[float, int, int]] = []
        self.left = problem.num_tasks * num_microbatches

    def play(self) -> F64:
        """Return the starts of all tasks."""
        for order in self.orders:
            if order:
                self._offer(*order[0])
        for task, resources in enumerate(self.problem.task_resources):
            if resources[0] >= len(self.orders) and not self.problem.predecessors[task]:  # a link without an order
                for index in range(self.num_microbatches):
                    self._offer(task, index)
        while self.queue:
            _, index, task = heapq.heappop(self.queue)
            self._start(task, index)
        if self.left:
            self._raise_blocked()
        return np.asarray(self.starts, dtype=np.float64).reshape(self.problem.num_tasks, self.num_microbatches)

    def _offer(self, task: int, index: int) -> None:
        """Queue the task if nothing but time keeps it from starting."""
        if self.missing[task][index] or self.starts[task][index] is not None:
            return
        resources = self.problem.task_resources[task]
        for resource in resources:
            if resource < len(self.orders) and self.orders[resource][self.heads[resource]] != (task, index):
                return
        at = self.ready_at[task][index]
        if resources[0] < len(self.orders):
            at = max(at, *[self.free_at[resource] for resource in resources])
            self.starts[task][index] = at
        heapq.heappush(self.queue, (at, index, task))

    def _start(self, task: int, index: int) -> None:
        resources = self.problem.task_resources[task]
        if resources[0] >= len(self.orders):  # a link that serves transfers as they come
            self.starts[task][index] = max(self.ready_at[task][index], self.free_at[resources[0]])
        start = self.starts[task][index]
        assert start is not None, "it is set when a task is offered, or just now"
        end = start + self.times[task]
        self.left -= 1
        for resource in resources:
            self.free_at[resource] = end
            if resource < len(self.orders):
                self.heads[resource] += 1
        for target, delay in self.later[task]:
            self.missing[target][index] -= 1
            ready_at = self.ready_at[target]
            ready_at[index] = max(ready_at[index], end + delay)
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
        repeats = (np.abs(step - period) <= tolerance).tolist()
        runs = [list(run) for flag, run in itertools.groupby(range(len(repeats)), repeats.__getitem__) if flag]
        steady = max(runs, key=len, default=[])
        first, end = (steady[0], steady[-1] + 1 + period_microbatches) if steady else (0, 0)
        result.append(["warm-up" if index < first else "steady" if index < end else "cool-down"
                       for index in range(len(row))])
    return result


def check_schedule(schedule: Schedule) -> None:
    """Raise ``PlanError`` that lists all that is wrong: starts, order, overlaps, memory."""
    problems = find_problems(schedule)
    if problems:
        raise PlanError("the schedule is not allowed: " + "; ".join(problems[:8])
                        + (f"; ... and {len(problems) - 8} more" if len(problems) > 8 else ""), problems)


def find_problems(schedule: Schedule) -> list[str]:
    """Return everything that is wrong with the schedule, as sentences."""
    problem, starts = schedule.problem, schedule.starts
    if starts.shape[0] != problem.num_tasks or starts.shape[1] < 1:
        return [f"it has starts for {starts.shape[0]} tasks and {starts.shape[1]} micro-batches, "
                f"the problem has {problem.num_tasks} tasks"]
    if not np.isfinite(starts).all():
        return ["some starts are not finite numbers"]
    tolerance = TOLERANCE * max(1e-30, float(schedule.ends.max()))
    early = [f"{_name(problem, task, index)} starts at {starts[task, index]:.6g}, before 0"
             for task, index in np.argwhere(starts < -tolerance).tolist()]
    return [*early, *_dependencies(schedule, tolerance), *_overlaps(schedule, tolerance), *_memory(schedule)]


def _name(problem: ScheduleProblem, task: int, index: int) -> str:
    return f"{problem.task_names[task]} of micro-batch {index}"


def _dependencies(schedule: Schedule, tolerance: float) -> Iterator[str]:
    problem, starts, ends = schedule.problem, schedule.starts, schedule.ends
    for source, target, delay in problem.edges:
        for index in np.flatnonzero(ends[source] + delay - starts[target] > tolerance).tolist():
            yield (f"{_name(problem, target, index)} starts at {starts[target, index]:.6g}, but "
                   f"{_name(problem, source, index)} ends at {ends[source, index]:.6g}"
                   + (f" and takes {delay:.6g} to arrive" if delay else ""))


def _overlaps(schedule: Schedule, tolerance: float) -> Iterator[str]:
    problem, starts, ends = schedule.problem, schedule.starts, schedule.ends
    for name, (tasks, indices) in zip(problem.resource_names, schedule.order_arrays(), strict=True):
        late = ends[tasks[:-1], indices[:-1]] - starts[tasks[1:], indices[1:]] > tolerance
        for place in np.flatnonzero(late).tolist():
            before, after = ((int(tasks[at]), int(indices[at])) for at in (place, place + 1))
            yield (f"{name} runs {_name(problem, *before)} until {ends[before]:.6g} and "
                   f"{_name(problem, *after)} from {starts[after]:.6g}")


def _memory(schedule: Schedule) -> Iterator[str]:
    peaks = schedule.peak_memory()
    for name, limit in zip(schedule.problem.device_names, schedule.problem.device_memory, strict=True):
        if limit is not None and exceeds(peaks[name], limit):
            yield f"{name} holds {peaks[name]:.6g} at its fullest, its memory is {limit:.6g}"


def exceeds(held: float, limit: float) -> bool:
    """Return whether this is more than the limit, beyond rounding."""
    return held > limit + TOLERANCE * max(1.0, abs(limit))


Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, kw_only=True)
class ScheduleResult:
    """The best schedule found, with bounds."""

    schedule: Schedule
    status: Status
    """``optimal`` if no schedule for so many micro-batches is shorter, by proof."""
    makespan_bound: float
    """No schedule of so many micro-batches ends earlier."""
    period: float | None
    """Duration of the steady state that was found; None where memory admits none (blocks that keep what they take)."""
    period_microbatches: int | None
    """Micro-batches in one period."""
    period_bound: float | None
    """No steady state takes less time per micro-batch; of however many micro-batches its period is."""
    seconds: float
    """CPU seconds of the search."""
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""
    by: str = "search"
    """What made the schedule: the search, or the named schedule that it could not beat."""

    @property
    def makespan(self) -> float:
        """Return when the last block ends."""
        return self.schedule.makespan

    @property
    def bubble(self) -> float | None:
        """Return the part of a period in which the busiest device is idle."""
        if self.period is None or self.period_microbatches is None:
            return None
        problem = self.schedule.problem
        busy = max(problem.device_work[: problem.num_devices], default=0.0) * self.period_microbatches
        return max(0.0, 1.0 - busy / self.period) if self.period > 0 else 0.0

    def phases(self) -> list[list[Phase]]:
        """Return for each task and micro-batch whether it is in the warm-up, the steady state or the cool-down."""
        if self.period is None or self.period_microbatches is None:
            return [["warm-up"] * self.schedule.num_microbatches for _ in range(self.schedule.problem.num_tasks)]
        return phases(self.schedule, self.period, self.period_microbatches)

    def to_json(self) -> dict[str, Any]:
        """Return the result object that ``weft schedule --json`` prints."""
        problem, starts = self.schedule.problem, self.schedule.starts
        order = np.argsort(starts, axis=None, kind="stable")  # of equals by task, then by micro-batch
        tasks, indices = np.divmod(order, self.schedule.num_microbatches)
        rows = list(zip(starts.ravel()[order].tolist(), tasks.tolist(), indices.tolist(), strict=True))
        names, num_blocks = problem.task_names, problem.num_blocks
        listed = [[names[task], index, start] for start, task, index in rows if task < num_blocks]
        moved = [[problem.blocks[problem.linked[task - problem.num_blocks].source].name,
                  problem.blocks[problem.linked[task - problem.num_blocks].target].name, index, start]
                 for start, task, index in rows if task >= num_blocks]
        return {
            "status": self.status, "microbatches": self.schedule.num_microbatches, "makespan": self.makespan,
            "makespan_bound": self.makespan_bound, "period": self.period,
            "period_microbatches": self.period_microbatches, "period_bound": self.period_bound, "bubble": self.bubble,
            "peak_memory": self.schedule.peak_memory(), "starts": listed,
            **({"transfer_starts": moved} if moved else {}), "seconds": self.seconds}
