"""Lower bounds that hold for every schedule: by work, paths and memory held, and by a solver for the first ticks.

    period    >= least work of the busiest resource, with the best pairs                            (period_bound)
    period    >= (sum of amount * shortest time that it can be held) / limit, on every device       (_memory_period)
    makespan  >= the longest path of one micro-batch                                                (makespan_bound)
    makespan  >= N * work of a resource + its idle time while the pipeline fills, and drains        (filling_idle)
    makespan  >= the end of the last of N alike micro-batches, in order, within memory              (earliest_starts)
    makespan  >= N * work + idle in the first H ticks + idle in the last H ticks, on every device   (least_idle)

The last one holds if the makespan is 2 H at least: in the first H ticks of any schedule, a device can do only so much
work, what reaches it in time, through the other devices, within everybody's memory. The most it can do is a small
constraint problem of its own, with as many micro-batches as could matter (``earliest_starts`` says which); the rest of
the window is idle time that no schedule avoids. Backwards in time the same holds for the last H ticks. The starts in a
window are those of a schedule cut off at H: a task that would start later "starts" at H and does nothing there.

Where memory can leave a device, only its times of holding bound anything: those of a block, of both copies, and of the
block that gives back. Where blocks can run at once, the window is not looked at, and idle time only while nothing at
all has reached a resource.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.schedule.pairs import least_work
from weft.search.schedule.problem import ScheduleProblem, grouped, turned_round
from weft.search.schedule.schedule import TOLERANCE
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.whole import WholeProblem, balanced_holds


def period_bound(problem: ScheduleProblem) -> float | None:
    """Return the least time per micro-batch of any steady state; None if memory grows with every micro-batch."""
    if any(grows(problem, device) for device in range(problem.num_devices)):
        return None
    bound = max(least_work(problem), default=0.0)
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
    if not problem.releases_late:
        times = [time - problem.task_times[release] for time, (_, release, _) in zip(times, holds, strict=True)]
    away = {item.block: 2 * item.time for item in problem.copies}
    for number, (take, release, _) in enumerate(holds):
        if take in away:
            least = problem.task_times[take] + away[take]
            least += problem.task_times[release] if problem.releases_late else 0.0
            times[number] = min(times[number], least)
    held = sum(amount * time for (_, _, amount), time in zip(holds, times, strict=True))
    usable = _usable(limit, {amount for _, _, amount in holds})
    return held / usable if usable > 0 else 0.0


def hold_times(problem: ScheduleProblem, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return for each (take, release) the least time from the start of ``take`` to the end of ``release``.

    Every release depends on its take.
    """
    takes = sorted({take for take, _ in pairs})
    reach: dict[tuple[int, int], float] = {}
    for begin in range(0, len(takes), TUNING.path_chunk):
        chunk = takes[begin: begin + TUNING.path_chunk]
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
    for resource, work in enumerate(least_work(problem)):
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
    allowed = 1 + TUNING.max_filling_steps // (problem.num_tasks * len(problem.resource_names))
    if problem.overlaps:  # what is early may run beside an ancestor
        allowed = 1
    for number in range(min((len(ordered) + 1) // 2, allowed)):  # at least half are in R, so that both R share a task
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


def earliest_starts(whole: WholeProblem, num_microbatches: int, *, until: int | None = None) -> list[list[int]]:
    """Return a lower bound on the start of every task of every micro-batch: ``result[n][task]``.

    Micro-batches are alike, so tasks of one kind run in their order, one after the other; and where a device has room
    for c holds of one kind, the take of micro-batch n comes after the release of micro-batch n - c. Micro-batches of
    which every task starts at ``until`` or later are left out.
    """
    incoming = grouped(whole.edges, 1, whole.num_tasks)
    rooms: dict[int, list[tuple[int, int]]] = {}
    for hold in whole.holds:
        limit = whole.limits[hold.device]
        is_room = hold.device in whole.balanced and hold.amount > 0 and hold.device not in whole.problem.copied
        if limit is not None and is_room and hold.take is not None and hold.release is not None:
            rooms.setdefault(hold.take, []).append((hold.release, limit // hold.amount))
    result: list[list[int]] = []
    for index in range(num_microbatches):
        row = [0] * whole.num_tasks
        for task in whole.problem.topological:
            at = result[index - 1][task] + whole.times[task] if index else 0
            for source, _, delay in incoming[task]:
                at = max(at, row[source] + whole.times[source] + delay)
            for release, room in rooms.get(task, ()):
                if 0 <= index - room < index:
                    late = whole.times[release] if whole.problem.releases_late else 0
                    at = max(at, result[index - room][release] + late)
            row[task] = at
        if until is not None and min(row) >= until:
            break
        result.append(row)
    return result


def least_idle(whole: WholeProblem, device: int, window: int, num_microbatches: int, budget: Budget, *,
               effort: float, seed: int = 0) -> int:
    """Return ticks that the device is idle in the first ``window`` ticks of every schedule."""
    early = earliest_starts(whole, num_microbatches, until=window)
    builder = _Window(whole, window, early)
    work = sum(builder.inside[key] for key in builder.keys if device in whole.problem.task_resources[key[0]])
    if isinstance(work, int):
        return window
    builder.model.maximize(work)
    solution = solve(builder.model, budget, effort=effort, seed=seed)
    if solution.bound is None:
        return 0
    return max(0, window - math.floor(solution.bound + 1e-6))


class _Window:
    """A schedule cut off at the end of the window."""

    def __init__(self, whole: WholeProblem, window: int, early: list[list[int]]) -> None:
        self.whole, self.window = whole, window
        self.model = cp_model.CpModel()
        self.keys = [(task, index) for index, row in enumerate(early) for task, at in enumerate(row) if at < window]
        self.is_known = set(self.keys).__contains__
        self.start = {key: self.model.new_int_var(early[key[1]][key[0]], window, "") for key in self.keys}
        self.inside = {key: self.model.new_int_var(0, whole.times[key[0]], "") for key in self.keys}
        self.end = {key: self.model.new_int_var(0, window, "") for key in self.keys}
        self._add_starts()
        self._add_edges()
        for tasks in whole.resource_tasks:
            keys = [key for key in self.keys if key[0] in tasks]
            self.model.add_no_overlap([self.model.new_interval_var(self.start[key], self.inside[key], self.end[key], "")
                                       for key in keys])
        self._add_memory()

    def _add_starts(self) -> None:
        """A task does in the window what is left of it there, after the same task of the micro-batch before."""
        model = self.model
        for key in self.keys:
            model.add_hint(self.start[key], self.window)  # to do nothing is allowed
            model.add_min_equality(self.inside[key], [self.window - self.start[key], self.whole.times[key[0]]])
            model.add(self.end[key] == self.start[key] + self.inside[key])
            if key[1] and self.is_known((key[0], key[1] - 1)):
                model.add(self.start[key] >= self.end[key[0], key[1] - 1])

    def _add_edges(self) -> None:
        """A task starts after what it needs, or not in the window."""
        num_microbatches = 1 + max((index for _, index in self.keys), default=-1)
        for (source, target, delay), index in itertools.product(self.whole.edges, range(num_microbatches)):
            if not self.is_known((target, index)):
                continue
            assert self.is_known((source, index)), "what comes before starts no later"
            starts = self.model.new_bool_var("")
            ready = self.start[source, index] + self.whole.times[source] + delay
            self.model.add(self.start[target, index] >= ready).only_enforce_if(starts)
            self.model.add(self.start[target, index] == self.window).only_enforce_if(~starts)

    def _add_memory(self) -> None:
        """Add the memory of the devices where it can be judged in a window: all that is taken there is given back."""
        num_microbatches = 1 + max((index for _, index in self.keys), default=-1)
        for device, limit in enumerate(self.whole.limits):
            intervals, amounts = [], []
            for hold, index in itertools.product(self.whole.holds, range(num_microbatches)):
                if hold.device != device or hold.take is None or not self.is_known((hold.take, index)):
                    continue
                is_seen = hold.release is not None and self.is_known((hold.release, index))
                end = self.end[hold.release, index] if is_seen and hold.release is not None else self.window
                size = self.model.new_int_var(0, self.window, "")
                intervals.append(self.model.new_interval_var(self.start[hold.take, index], size, end, ""))
                amounts.append(hold.amount)
            is_known = device in self.whole.balanced and device not in self.whole.problem.copied
            if limit is not None and intervals and is_known:
                self.model.add_cumulative(intervals, amounts, limit)
