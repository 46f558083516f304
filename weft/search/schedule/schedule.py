"""A schedule: when every task of every micro-batch starts. Also: playing device orders as early as possible.

``starts[t, n]`` is the start of task ``t`` (see ``ScheduleProblem``) of micro-batch ``n``; blocks of an overlap that
start together run at once. ``moves`` says what leaves the devices, and when. ``replay`` turns an order of
blocks on each device into the earliest schedule with that order; every searcher and every named schedule ends in it.
``check_schedule`` knows no search and says exactly what is wrong with a schedule. ``ScheduleResult`` is what a search
returns: a checked schedule, how good it is known to be, and the steady state it repeats.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import F64, I64
from weft.search.schedule.pairs import Pair, find_pairs
from weft.search.schedule.problem import ScheduleProblem

Instance = tuple[int, int]
"""(task, micro-batch)."""
Orders = Sequence[Sequence[Instance]]
"""For each device (or resource) its tasks in order."""
Phase = Literal["warm-up", "steady", "cool-down"]

TOLERANCE: Final = 1e-9
"""Relative to the makespan: smaller differences between times are rounding."""
NO_PAIRS: Final[Mapping[tuple[int, int], Any]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Start times of all tasks of all micro-batches; ``check_schedule`` says whether they are allowed."""

    problem: ScheduleProblem
    starts: F64
    """[tasks, micro-batches]"""
    moves: F64 | None = None
    """[2 * copies, micro-batches]: when what the block of copy i takes leaves (row 2 i) and comes back (row 2 i + 1);
    NaN where it stays on its devices. None: all of it stays."""

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches."""
        return int(self.starts.shape[1])

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Return the blocks that run at once, by start."""
        return find_pairs(self.problem, self.starts, self.tolerance) if self.problem.overlaps else ()

    @property
    def tolerance(self) -> float:
        """Return by how much two times may differ that are the same."""
        return TOLERANCE * max(1e-30, float(self._ends_alone.max(initial=0.0)))

    @property
    def _ends_alone(self) -> F64:
        return self.starts + np.asarray(self.problem.task_times, dtype=np.float64)[:, None]

    @property
    def ends(self) -> F64:
        """Return when every task ends."""
        ends = self._ends_alone
        for pair in self.pairs:
            joint = self.problem.joint[pair[0][0], pair[1][0]]
            for item in pair:
                ends[item] = self.starts[item] + joint
        return ends

    @cached_property
    def offloads(self) -> tuple[tuple[int, int, float, float], ...]:
        """Return (copy, micro-batch, start of the copy to the host, start of the copy back), by start."""
        if self.moves is None:
            return ()
        away = np.argwhere(~np.isnan(self.moves[::2]))
        return tuple(sorted(((copy, index, float(self.moves[2 * copy, index]), float(self.moves[2 * copy + 1, index]))
                             for copy, index in away.tolist()), key=lambda item: (item[2], item)))

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
        for pair in self.pairs:  # memory of both counts: what is given back at the end comes after what is taken
            for task, index in pair:
                first[task, index] = (self.problem.memory_of(task) < 0) == (self.problem.free_at == "end")
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
        return {name: float(np.cumsum(amounts).max(initial=0.0))
                for name, (_, amounts) in zip(self.problem.device_names, self.memory_changes(), strict=True)}

    def memory_changes(self) -> Iterator[tuple[F64, F64]]:
        """Yield for each device (times, amounts): by how much what it holds changes, in order."""
        amounts = np.asarray([self.problem.memory_of(task) for task in range(self.problem.num_tasks)], dtype=np.float64)
        starts, ends, is_late = self.starts, self.ends, self.problem.free_at == "end"
        for device, (tasks, indices) in enumerate(self.order_arrays()[: self.problem.num_devices]):
            changes = amounts[tasks]
            times = np.where((changes < 0) & is_late, ends[tasks, indices], starts[tasks, indices])
            if device in self.problem.copied and self.offloads:
                events = memory_events(self, device)
                yield np.asarray([event.time for event in events]), np.asarray([event.amount for event in events])
            else:
                yield times, changes

    def peak_host_memory(self) -> float:
        """Return the most that the host keeps at any time; what comes back is gone when its copy ends."""
        slack, rows = self.tolerance, []
        for copy, _, out, back in self.offloads:
            amount = self.problem.host_amount(copy)
            rows += [(out, amount), (back + self.problem.copies[copy].time - slack, -amount)]
        return max(itertools.accumulate((amount for _, amount in sorted(rows)), initial=0.0))

    def busy(self, resource: int) -> float:
        """Return how long the resource does something; of a pair once."""
        tasks = list(self.problem.resource_tasks[resource])
        twice = sum(self.problem.joint[pair[0][0], pair[1][0]] for pair in self.pairs if pair[0][0] in tasks)
        return float((self.ends[tasks] - self.starts[tasks]).sum()) - twice


class MemoryEvent(NamedTuple):
    """What changes the memory of a device."""

    time: float
    amount: float
    node: Instance
    """(task, micro-batch); of copy i the task is ``num_tasks + 2 i`` for the way out, one more for the way back."""
    at_end: bool
    """It changes when that ends, not when it starts."""


def memory_events(schedule: Schedule, device: int) -> list[MemoryEvent]:
    """Return what changes the memory of a device, in order.

    What leaves is gone when its copy ends, what comes back is there when its copy starts; of what happens at one time,
    what leaves is first.
    """
    problem, slack = schedule.problem, schedule.tolerance
    starts, ends, is_late = schedule.starts, schedule.ends, problem.free_at == "end"
    events: list[MemoryEvent] = []
    place: dict[Instance, int] = {}
    tasks, indices = schedule.order_arrays()[device]
    for node in zip(tasks.tolist(), indices.tolist(), strict=True):
        amount = problem.memory_of(node[0])
        if amount:
            place[node] = len(events)
            at_end = amount < 0 and is_late
            events.append(MemoryEvent(float(ends[node] if at_end else starts[node]), amount, node, at_end))
    times, rows = [event.time for event in events], []
    for copy, index, out, back in schedule.offloads:
        item, row = problem.copies[copy], problem.num_tasks + 2 * copy
        if device not in problem.blocks[item.block].devices:
            continue
        gone, amount = out + item.time, problem.memory_of(item.block)
        after = max(bisect_left(times, gone - slack), place[item.block, index] + 1)
        rows.append((after, gone - slack, MemoryEvent(gone, -amount, (row, index), True)))
        last = [place[task, index] for task in problem.returns[copy] if (task, index) in place]
        before = min([bisect_right(times, back + slack), *last])
        while before and times[before - 1] >= back - slack and events[before - 1].amount > 0:
            before -= 1  # it may be what a block that starts at the same time waits for
        rows.append((before, back, MemoryEvent(back, amount, (row + 1, index), False)))
    for count, (at, _, event) in enumerate(sorted(rows)):
        events.insert(at + count, event)
    return events


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


def replay(problem: ScheduleProblem, num_microbatches: int, orders: Orders, pairs: Iterable[Pair] = ()) -> Schedule:
    """Return the earliest schedule in which every resource runs its tasks in the given order, pairs at once.

    ``orders`` covers the devices, or all resources; links without an order serve transfers as they become ready. The
    blocks of a pair stand next to each other. Raises ``PlanError`` if the orders wait for each other in a circle, or do
    not hold every task exactly once.
    """
    delays = [edge.delay for edge in problem.edges]
    return Schedule(problem=problem, starts=play(problem, num_microbatches, orders, times=problem.task_times,
                                                 delays=delays, pairs=pairs, joint=problem.joint))


def play(problem: ScheduleProblem, num_microbatches: int, orders: Orders, *, times: Sequence[float],
         delays: Sequence[float], pairs: Iterable[Pair] = (), joint: Mapping[tuple[int, int], float] = NO_PAIRS) -> F64:
    """Return the starts as ``replay`` does, with other durations of tasks and pairs and delays of ``problem.edges``."""
    _check_complete(problem, num_microbatches, orders)
    player = _Player(problem, num_microbatches, orders, times, delays)
    for pair in pairs:
        player.join(pair, joint)
    return player.play()


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
        self.partner: dict[Instance, tuple[Instance, float]] = {}

    def join(self, pair: Pair, joint: Mapping[tuple[int, int], float]) -> None:
        """Let the pair run at once."""
        for one, other in (pair, pair[::-1]):
            self.partner[one] = other, joint[one[0], other[0]]

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
        if self.partner and (task, index) in self.partner:
            self._offer_pair((task, index), self.partner[task, index][0])
            return
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

    def _offer_pair(self, one: Instance, other: Instance) -> None:
        """Queue a pair if nothing but time keeps it from starting."""
        if self.missing[one[0]][one[1]] or self.missing[other[0]][other[1]] or self.starts[one[0]][one[1]] is not None:
            return
        resources = self.problem.task_resources[one[0]]
        for resource in resources:
            place = self.heads[resource]
            if {one, other} != set(self.orders[resource][place: place + 2]):
                return
        at = max(self.ready_at[one[0]][one[1]], self.ready_at[other[0]][other[1]],
                 *[self.free_at[resource] for resource in resources])
        self.starts[one[0]][one[1]] = self.starts[other[0]][other[1]] = at
        heapq.heappush(self.queue, (at, one[1], one[0]))

    def _start(self, task: int, index: int) -> None:
        resources = self.problem.task_resources[task]
        if resources[0] >= len(self.orders):  # a link that serves transfers as they come
            self.starts[task][index] = max(self.ready_at[task][index], self.free_at[resources[0]])
        start = self.starts[task][index]
        assert start is not None, "it is set when a task is offered, or just now"
        items, time = [(task, index)], self.times[task]
        if self.partner and (task, index) in self.partner:
            other, time = self.partner[task, index]
            items.append(other)
        end = start + time
        self.left -= len(items)
        for resource in resources:
            self.free_at[resource] = end
            if resource < len(self.orders):
                self.heads[resource] += len(items)
        for item, number in items:
            for target, delay in self.later[item]:
                self.missing[target][number] -= 1
                ready_at = self.ready_at[target]
                ready_at[number] = max(ready_at[number], end + delay)
                self._offer(target, number)
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
    tolerance = schedule.tolerance
    early = [f"{_name(problem, task, index)} starts at {starts[task, index]:.6g}, before 0"
             for task, index in np.argwhere(starts < -tolerance).tolist()]
    moved = _moves(schedule, tolerance) if schedule.moves is not None else []
    return [*early, *_dependencies(schedule, tolerance), *_overlaps(schedule, tolerance), *moved,
            *(_memory(schedule) if not moved else [])]


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
    pairs = {items for pair in schedule.pairs for items in (pair, pair[::-1])}
    for name, (tasks, indices) in zip(problem.resource_names, schedule.order_arrays(), strict=True):
        late = ends[tasks[:-1], indices[:-1]] - starts[tasks[1:], indices[1:]] > tolerance
        for place in np.flatnonzero(late).tolist():
            before, after = ((int(tasks[at]), int(indices[at])) for at in (place, place + 1))
            if (before, after) in pairs:
                continue
            yield (f"{name} runs {_name(problem, *before)} until {ends[before]:.6g} and "
                   f"{_name(problem, *after)} from {starts[after]:.6g}")


def _moves(schedule: Schedule, tolerance: float) -> list[str]:
    """Return what is wrong with the copies: their form, when they run, and that a stream makes one at a time."""
    problem, moves = schedule.problem, schedule.moves
    shape = 2 * len(problem.copies), schedule.num_microbatches
    if moves is None or moves.shape != shape:
        return [f"it has {None if moves is None else moves.shape} times of copies, the problem's copies need {shape}"]
    if np.isinf(moves).any() or (np.isnan(moves[::2]) != np.isnan(moves[1::2])).any():
        return ["some copies have only one of the times at which they leave and come back, or infinite ones"]
    result, ends = [], schedule.ends
    streams: list[list[tuple[float, float, str]]] = [[] for _ in problem.device_names]
    for copy, index, out, back in schedule.offloads:
        item = problem.copies[copy]
        name = f"what {_name(problem, item.block, index)} takes"
        if out < ends[item.block, index] - tolerance:
            result.append(f"{name} leaves at {out:.6g}, but its block ends at {ends[item.block, index]:.6g}")
        if back < out + item.time - tolerance:
            result.append(f"{name} comes back from {back:.6g}, but its copy to the host ends at {out + item.time:.6g}")
        result += [f"{name} is back at {back + item.time:.6g}, but {_name(problem, task, index)}, which gives it back, "
                   f"starts at {schedule.starts[task, index]:.6g}" for task in problem.returns[copy]
                   if schedule.starts[task, index] < back + item.time - tolerance]
        for device in problem.blocks[item.block].devices:
            streams[device] += [(start, start + item.time, name) for start in (out, back)]
    for where, copies in zip(problem.device_names, streams, strict=True):
        result += [f"{where} copies {one} until {end:.6g} and {other} from {start:.6g}"
                   for (_, end, one), (start, _, other) in itertools.pairwise(sorted(copies))
                   if start < end - tolerance]
    return result


def _memory(schedule: Schedule) -> Iterator[str]:
    peaks = schedule.peak_memory()
    host, most = schedule.problem.host_memory, schedule.peak_host_memory()
    if host is not None and exceeds(most, host):
        yield f"the host keeps {most:.6g} at its fullest, its memory is {host:.6g}"
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
    period_busy: float | None = None
    """How long the busiest device does something in a period; None: every block runs alone."""
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
        busy = self.period_busy
        if busy is None:
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
            **({"transfer_starts": moved} if moved else {}),
            **({"pairs": [[names[one[0]], one[1], names[other[0]], other[1]] for one, other in self.schedule.pairs]}
               if problem.overlaps else {}),
            **({"offloads": [[names[problem.copies[copy].block], index, out, back]
                             for copy, index, out, back in self.schedule.offloads],
                "peak_host_memory": self.schedule.peak_host_memory()} if problem.copies else {}),
            "seconds": self.seconds}
