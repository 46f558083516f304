"""First schedules: one within memory, if there is one, and schedules by simple rules.

*Within memory* (``first_schedule``), or else the smallest memory that would do. Where every release follows what it
releases, and all that is taken is released, N micro-batches fit if one fits alone, one after the other, and only then:
a second one never leaves less on a device. So one micro-batch is enough to decide it, and to find how much more memory
the devices need: a constraint problem over orders only, in which every task takes one tick (``_least_excess``).
Micro-batches that keep memory, or release what they have not taken, are looked at all together.

*Simple rules* (``greedy_schedules``): whenever a device is free and has room, run the ready task that a rule likes
best. A rule orders tasks, or is the order of a schedule that holds too much, which is made to fit so; ``in_flight``
limits how many micro-batches are begun and not ended, which keeps memory from being filled by forwards that wait for
each other. Where a rule runs into such a deadlock, it gives nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from ortools.sat.python import cp_model

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.schedule.bounds import task_tails
from weft.search.schedule.moves import Clock, from_rows, realise, rows_of
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import TOLERANCE, Schedule, exceeds, find_problems, replay
from weft.search.schedule.timeline_model import TimelineModel
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.whole import find_holds, to_whole

Rule = Callable[[int, int], tuple[float, ...]]
"""(task, micro-batch) -> key; the smallest runs first."""


def sequential(problem: ScheduleProblem, num_microbatches: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the schedule that runs one micro-batch after the other, tasks in the given (topological) order."""
    place = {task: number for number, task in enumerate(problem.topological if order is None else order)}
    orders = [[(task, index) for index in range(num_microbatches) for task in sorted(tasks, key=place.__getitem__)]
              for tasks in problem.resource_tasks]
    return replay(problem, num_microbatches, orders)


def repeated(problem: ScheduleProblem, num_microbatches: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the schedule that runs one micro-batch as often as needed, as soon as it can without overlap.

    The order of tasks is that of ``sequential``, which may start some of them earlier.
    """
    starts = sequential(problem, 1, order).starts
    ends = starts + np.asarray(problem.task_times)[:, None]
    period = max((float(ends[list(tasks)].max() - starts[list(tasks)].min())
                  for tasks in problem.resource_tasks if tasks), default=0.0)
    return Schedule(problem=problem, starts=starts + period * np.arange(num_microbatches))


def first_schedule(problem: ScheduleProblem, num_microbatches: int, budget: Budget) -> Schedule:
    """Return some schedule within memory; raise ``NoFeasiblePlan`` that names device and memory if there is none."""
    orders = (problem.topological, _frugal_order(problem))
    if problem.num_tasks * num_microbatches > TUNING.max_played:
        for order in orders:
            simple = repeated(problem, num_microbatches, order)
            if not find_problems(simple):
                return simple
    for order in orders:
        simple = sequential(problem, num_microbatches, order)
        if not find_problems(simple):
            return simple
    is_alike = all(hold.take is not None and hold.release is not None for hold in find_holds(problem))
    joint = range(1, min(num_microbatches, TUNING.max_joint_tasks // problem.num_tasks) + 1)
    copies = 1 if is_alike else max((number for number in joint if num_microbatches % number == 0), default=1)
    found = _least_excess(problem, copies, num_microbatches, budget)
    if found is not None and not find_problems(found[0]):
        return found[0]
    if budget.is_interrupted:
        raise KeyboardInterrupt
    best, is_proven = found if found is not None else (simple, False)
    raise _error(best, is_proven=is_proven and (is_alike or copies == num_microbatches))


def _frugal_order(problem: ScheduleProblem) -> list[int]:
    """Return an order of one micro-batch: releases first, then what takes nothing, then what became ready last."""
    def key(task: int, place: int) -> tuple[float, ...]:
        memory = problem.memory_of(task)
        return min(0, memory), memory > 0, -place

    return problem.ordered(key)


def _least_excess(problem: ScheduleProblem, copies: int, num_microbatches: int,
                  budget: Budget) -> tuple[Schedule, bool] | None:
    """Return the schedule that needs the least memory beyond the limits, in sum, and whether that is proven."""
    whole = to_whole(replace(problem, blocks=tuple(replace(block, time=1.0) for block in problem.blocks),
                             transfers=tuple(replace(item, time=0.0) for item in problem.transfers), overlaps=(),
                             copies=tuple(replace(item, time=1.0) for item in problem.copies)))
    model = cp_model.CpModel()
    horizon = (whole.num_tasks + 2 * len(problem.copies)) * copies * max(whole.times, default=1) + 1
    start = {(task, index): model.new_int_var(0, horizon, "") for task in range(whole.num_tasks)
             for index in range(copies)}
    timeline = TimelineModel(model, whole, start, copies, horizon)
    timeline.add_order()
    timeline.add_resources()
    excess = [_add_memory(timeline, device) for device in range(problem.num_devices)]
    model.minimize(sum(excess))
    solution = solve(model, budget, effort=max(5.0, budget.effort / 4), stop_at=0)
    if not solution.has_values:
        return None
    one = from_rows(whole.problem, timeline.read(solution))
    return _repeat(problem, one, num_microbatches), solution.status == "optimal" and solution.value(sum(excess)) > 0


def _add_memory(timeline: TimelineModel, device: int) -> cp_model.LinearExprT:
    """Return the variable by which the device's limit is exceeded."""
    amounts = [hold.amount for hold in timeline.whole.holds if hold.device == device]
    if timeline.whole.limits[device] is None or not amounts:
        return 0
    excess = timeline.model.new_int_var(0, max(0, timeline.num_microbatches * sum(amounts)), "")
    timeline.add_memory(device, excess=excess)
    return excess


def _repeat(problem: ScheduleProblem, one: Schedule, num_microbatches: int) -> Schedule:
    """Return the schedule of all micro-batches that plays the orders again and again."""
    copies = one.num_microbatches
    if one.moves is not None:
        laps = np.arange(num_microbatches // copies).repeat(copies) * (one.tolerance / TOLERANCE + 1)
        rows = np.tile(rows_of(one), num_microbatches // copies) + laps
        return from_rows(problem, realise(from_rows(one.problem, rows), Clock.of(problem)))
    orders = [[(task, index + round_ * copies) for round_ in range(num_microbatches // copies)
               for task, index in order] for order in one.orders()]
    return replay(problem, num_microbatches, orders)


def _error(schedule: Schedule, *, is_proven: bool) -> NoFeasiblePlan:
    """Return what to raise where this, the most frugal schedule found, exceeds the limits of devices."""
    problem = schedule.problem
    levels = zip(problem.device_names, problem.device_memory, schedule.peak_memory().values(), strict=True)
    needs = [(name, limit, needed) for name, limit, needed in levels if limit is not None and exceeds(needed, limit)]
    worst = max(needs, key=lambda need: need[2] - need[1])
    needs = [worst, *(need for need in needs if need is not worst)]
    what = "needs at least" if is_proven else "would do with"
    parts = [f"{name!r} has memory {limit:.12g} and {what} {needed:.12g}" for name, limit, needed in needs]
    return NoFeasiblePlan(
        f"{'memory admits no schedule' if is_proven else 'no schedule within memory was found'}: {'; '.join(parts)}. "
        f"Give {'it' if len(parts) == 1 else 'each'} that much, or take less in its blocks (recomputation, smaller "
        f"micro-batches){'' if is_proven else ', or allow more time'}.", device=worst[0], needed=worst[2])


def rules(problem: ScheduleProblem) -> dict[str, Rule]:
    """Return the rules by name."""
    tails = task_tails(problem)
    return {
        "nearest the end first": lambda task, index: (tails[task], index),
        "oldest micro-batch first": lambda task, index: (index, -tails[task]),
        "furthest from the end first": lambda task, index: (-tails[task], index),
    }


def greedy_schedules(problem: ScheduleProblem, num_microbatches: int, in_flight: Sequence[int], budget: Budget, *,
                     models: Sequence[Schedule] = ()) -> Iterator[Schedule]:
    """Yield the schedules of all rules and limits that do not run into a deadlock, until time is up.

    ``models`` are schedules that hold too much: the earlier a task starts there, the better is it liked.
    """
    def like(model: Schedule) -> Rule:
        return lambda task, index: (float(model.starts[task, index]),)

    for limit in in_flight:
        for rule in (*rules(problem).values(), *map(like, models)):
            starts = _Dispatcher(problem, num_microbatches, limit, rule).run(budget)
            if starts is not None:
                yield Schedule(problem=problem, starts=starts)


class _Dispatcher:
    """Plays one rule; of each task only the next micro-batch can be ready."""

    def __init__(self, problem: ScheduleProblem, num_microbatches: int, in_flight: int, rule: Rule) -> None:
        self.problem, self.num_microbatches, self.in_flight, self.rule = problem, num_microbatches, in_flight, rule
        self.next = [0] * problem.num_tasks
        self.ready = {task for task, edges in enumerate(problem.predecessors) if not edges}
        """Tasks whose next micro-batch waits for no other task."""
        self.starts = np.full((problem.num_tasks, num_microbatches), np.nan)
        self.ready_at = np.zeros((problem.num_tasks, num_microbatches))
        self.missing = np.repeat(np.asarray([[len(edges)] for edges in problem.predecessors]), num_microbatches, axis=1)
        self.free_at = [0.0] * len(problem.resource_names)
        self.level = [0.0] * problem.num_devices
        self.left_of = [problem.num_tasks] * num_microbatches
        self.ended = 0

    def run(self, budget: Budget) -> F64 | None:
        """Return the starts, or None after a deadlock or when time is up."""
        events = [0.0]
        while events and not budget.is_spent:
            now = heapq.heappop(events)
            while events and events[0] <= now:
                heapq.heappop(events)
            started = True
            while started:
                started = self._start_one(now, events)
        return None if np.isnan(self.starts).any() else self.starts

    def _start_one(self, now: float, events: list[float]) -> bool:
        best: tuple[float, ...] | None = None
        chosen = -1
        for task in self.ready:
            if self._can_start(task, self.next[task], now):
                key = (*self.rule(task, self.next[task]), task)
                if best is None or key < best:
                    best, chosen = key, task
        if best is None:
            return False
        self._start(chosen, self.next[chosen], now, events)
        return True

    def _can_start(self, task: int, index: int, now: float) -> bool:
        if self.ready_at[task, index] > now or index >= self.ended + self.in_flight:
            return False
        resources = self.problem.task_resources[task]
        if any(self.free_at[resource] > now for resource in resources):
            return False
        memory = self.problem.memory_of(task)
        return memory <= 0 or all(self._fits(device, memory) for device in resources)

    def _fits(self, device: int, memory: float) -> bool:
        limit = self.problem.device_memory[device]
        return limit is None or self.level[device] + memory <= limit * (1 + TOLERANCE)

    def _start(self, task: int, index: int, now: float, events: list[float]) -> None:
        self.starts[task, index] = now
        self.next[task] += 1
        if index + 1 == self.num_microbatches or self.missing[task, index + 1]:
            self.ready.remove(task)
        end = now + self.problem.task_times[task]
        memory = self.problem.memory_of(task)
        for resource in self.problem.task_resources[task]:
            self.free_at[resource] = end
            if memory:
                self.level[resource] += memory
        heapq.heappush(events, end)
        for edge in self.problem.successors[task]:
            self.missing[edge.target, index] -= 1
            if not self.missing[edge.target, index] and self.next[edge.target] == index:
                self.ready.add(edge.target)
            at = end + edge.delay
            if at > self.ready_at[edge.target, index]:
                self.ready_at[edge.target, index] = at
            if edge.delay:
                heapq.heappush(events, at)
        self.left_of[index] -= 1
        while self.ended < self.num_microbatches and self.left_of[self.ended] == 0:
            self.ended += 1
