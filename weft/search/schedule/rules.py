"""Schedules by rule, and a search for the rules that do best.

A rule gives every task i a number ``ahead(i)``; a free device runs the ready task of the smallest

    n + ahead(i)         n: the micro-batch                                                                  (_play)

A task waits while its micro-batch is ``window`` or more after the oldest that is not done, and while its memory would
leave less than the older micro-batches have still to take, so that these can always go on: no rule ends in a deadlock
where one micro-batch after the other fits.

Such a schedule soon repeats itself, most often with several micro-batches per period, at whatever memory there is.
``RuleSearch`` looks for the rule of the smallest period, or of the shortest schedule of N micro-batches: from random
rules, changing a few numbers at a time and keeping what is no worse (``_climb``). A period is counted only where
the schedule truly repeats (``_rate``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import TOLERANCE, Schedule
from weft.search.schedule.tuning import TUNING


class Tables(NamedTuple):
    """What compiled code needs of a problem."""

    times: F64
    num_before: I64
    """Edges into each task."""
    first_edge: I64
    """Edges out of task t: ``first_edge[t] .. first_edge[t + 1]`` of ``targets`` and ``delays``."""
    targets: I64
    delays: F64
    first_resource: I64
    resources: I64
    memory: F64
    """By task, on each of its devices."""
    limits: F64
    """By resource; infinite for none."""
    takes: F64
    """By resource: all that one micro-batch takes."""

    @staticmethod
    def of(problem: ScheduleProblem) -> Tables:
        """Return the tables of a problem."""
        edges = [edge for row in problem.successors for edge in row]
        num_resources = len(problem.resource_names)
        memory = np.array([problem.memory_of(task) for task in range(problem.num_tasks)], dtype=np.float64)
        limits, takes = np.full(num_resources, np.inf), np.zeros(num_resources)
        for device, limit in enumerate(problem.device_memory):
            takes[device] = memory[list(problem.resource_tasks[device])].clip(min=0.0).sum()
            if limit is not None:
                limits[device] = limit + TOLERANCE * max(1.0, abs(limit))
        return Tables(
            times=np.array(problem.task_times, dtype=np.float64),
            num_before=np.array([len(row) for row in problem.predecessors], dtype=np.int64),
            first_edge=_starts([len(row) for row in problem.successors]),
            targets=np.array([edge.target for edge in edges], dtype=np.int64),
            delays=np.array([edge.delay for edge in edges], dtype=np.float64),
            first_resource=_starts([len(row) for row in problem.task_resources]),
            resources=np.array([item for row in problem.task_resources for item in row], dtype=np.int64),
            memory=memory, limits=limits, takes=takes)


def _starts(sizes: list[int]) -> I64:
    return np.cumsum([0, *sizes], dtype=np.int64)


class RuleSearch:
    """Good rules for one problem; the same for a seed, whatever the machine."""

    def __init__(self, problem: ScheduleProblem, period: float, seed: int) -> None:
        self.problem, self.tables = problem, Tables.of(problem)
        self.rng = np.random.default_rng(seed)
        heads = np.array(problem.longest_paths(), dtype=np.float64)
        self.laps = heads / period if period > 0 else 0.0 * heads
        """Periods, about, from the start of a micro-batch to each of its tasks."""

    def shortest(self, num_microbatches: int, plays: int, budget: Budget) -> Schedule | None:
        """Return the shortest schedule among so many, as far as the budget goes."""
        return self._best(num_microbatches, plays, budget, by_rate=False)

    def repeating(self, plays: int, budget: Budget) -> Schedule | None:
        """Return the schedule of smallest period among so many, long enough to see it."""
        return self._best(TUNING.rule_length, plays, budget, by_rate=True)

    def _best(self, num_microbatches: int, plays: int, budget: Budget, *, by_rate: bool) -> Schedule | None:
        """Climb from several random rules, then on from the best."""
        num_tasks = self.problem.num_tasks
        seconds = TUNING.seconds_per_start * (1 + num_tasks / TUNING.rule_scan) * num_tasks * num_microbatches
        plays = min(plays, int(budget.effort / seconds))
        value, rule, window = np.inf, self.laps, 1
        for number in range(TUNING.rule_starts + 1):
            if number < TUNING.rule_starts:
                trial = self.rng.choice(TUNING.rule_tilts) * self.laps + self.rng.normal(
                    0.0, self.rng.choice(TUNING.rule_spreads), num_tasks)
                wide, left = int(self.rng.choice(TUNING.rule_windows)), plays // (2 * TUNING.rule_starts)
            else:
                trial, wide, left = rule, window, plays // 2
            while left > 0 and not budget.is_spent:  # in parts: compiled code looks neither at the clock nor for Ctrl-C
                part = min(left, max(1, int(TUNING.rule_part_s / seconds)))
                left -= part
                budget.effort -= part * seconds
                found, wide = _climb(self.tables, trial, wide, num_microbatches, part, int(self.rng.integers(1 << 31)),
                                     by_rate)
                if found < value:
                    value, rule, window = float(found), trial.copy(), int(wide)
        if not np.isfinite(value):
            return None
        starts = np.empty((num_tasks, num_microbatches))
        _play(self.tables, rule, window, starts)
        return Schedule(problem=self.problem, starts=starts)


@compiled
def _climb(tables: Tables, ahead: F64, window: int, num_microbatches: int, plays: int, seed: int,
           by_rate: bool) -> tuple[float, int]:
    """Improve the rule in place; return its value and window."""
    np.random.seed(seed)
    num_tasks = len(ahead)
    starts = np.empty((num_tasks, num_microbatches))
    value = _value(tables, ahead, window, starts, by_rate)
    for _ in range(plays):
        trial, wide = ahead.copy(), window
        for _ in range(1 + np.random.randint(0, 3)):
            trial[np.random.randint(0, num_tasks)] += np.random.normal() * 0.2 * 4.0 ** np.random.randint(0, 3)
        if np.random.random() < 0.2:
            wide = max(1, wide + np.random.randint(-1, 2))
        other = _value(tables, trial, wide, starts, by_rate)
        if other <= value * (1 + 1e-12):
            value, window = other, wide
            ahead[:] = trial
    return value, window


@compiled
def _value(tables: Tables, ahead: F64, window: int, starts: F64, by_rate: bool) -> float:
    """Return the period per micro-batch, or the makespan, of the rule's schedule; infinity if it does not end."""
    if not _play(tables, ahead, window, starts):
        return np.inf
    if by_rate:
        return _rate(starts, tables.times)
    makespan = 0.0
    for task in range(starts.shape[0]):
        makespan = max(makespan, starts[task, -1] + tables.times[task])
    return makespan


@compiled
def _rate(starts: F64, times: F64) -> float:
    """Return the period per micro-batch where the schedule repeats; else a little more than what it looks like."""
    num_tasks, total = starts.shape
    begin, end = total // 3, total - total // 4
    for number in range(1, (end - begin) // 3 + 1):
        period = starts[0, begin + number] - starts[0, begin]
        task = 0 if period > 0 else num_tasks + 1
        while task < num_tasks:
            for index in range(begin, end - number):
                if abs(starts[task, index + number] - starts[task, index] - period) > 1e-9 * starts[0, -1]:
                    task = num_tasks
                    break
            task += 1
        if task == num_tasks:
            return period / number
    early = late = 0.0
    for task in range(num_tasks):
        early = max(early, starts[task, begin] + times[task])
        late = max(late, starts[task, end - 1] + times[task])
    return 1.2 * (late - early) / (end - 1 - begin)


@compiled
def _play(tables: Tables, ahead: F64, window: int, starts: F64) -> bool:
    """Fill in when every task of every micro-batch starts; return False if they wait for each other for ever."""
    num_tasks, total = starts.shape
    num_resources = len(tables.limits)
    following = np.zeros(num_tasks, dtype=np.int64)
    missing = np.empty((num_tasks, total), dtype=np.int64)
    missing[:, :] = tables.num_before.reshape(-1, 1)
    ready_at = np.zeros((num_tasks, total))
    free_at, level = np.zeros(num_resources), np.zeros(num_resources)
    to_take = np.empty((total, num_resources))
    to_take[:, :] = tables.takes.reshape(1, -1)
    left = np.full(total, num_tasks)
    oldest, to_start, now = 0, num_tasks * total, 0.0
    while True:
        while True:
            task, least = -1, np.inf
            for other in range(num_tasks):
                index = following[other]
                if index >= total or index >= oldest + window or missing[other, index] or ready_at[other, index] > now:
                    continue
                key = index + ahead[other]
                if key < least and _can_start(tables, other, index, oldest, now, free_at, level, to_take):
                    task, least = other, key
            if task < 0:
                break
            index = following[task]
            starts[task, index] = now
            following[task] += 1
            to_start -= 1
            left[index] -= 1
            end = now + tables.times[task]
            for place in range(tables.first_resource[task], tables.first_resource[task + 1]):
                resource = tables.resources[place]
                free_at[resource] = end
                level[resource] += tables.memory[task]
                to_take[index, resource] -= max(0.0, tables.memory[task])
            for place in range(tables.first_edge[task], tables.first_edge[task + 1]):
                target = tables.targets[place]
                missing[target, index] -= 1
                ready_at[target, index] = max(ready_at[target, index], end + tables.delays[place])
            while oldest < total and not left[oldest]:
                oldest += 1
        if not to_start:
            return True
        then = np.inf
        for resource in range(num_resources):
            if now < free_at[resource] < then:
                then = free_at[resource]
        for other in range(num_tasks):
            index = following[other]
            if index < total and not missing[other, index] and now < ready_at[other, index] < then:
                then = ready_at[other, index]
        if then == np.inf:
            return False
        now = then


@compiled
def _can_start(tables: Tables, task: int, index: int, oldest: int, now: float, free_at: F64, level: F64,
               to_take: F64) -> bool:
    """Return whether the task's resources are free, with room for it beside what older micro-batches have to take."""
    for place in range(tables.first_resource[task], tables.first_resource[task + 1]):
        resource = tables.resources[place]
        if free_at[resource] > now:
            return False
        if tables.memory[task] > 0 and tables.limits[resource] < np.inf:
            total = level[resource] + tables.memory[task]
            for other in range(oldest, index):
                total += to_take[other, resource]
            if total > tables.limits[resource]:
                return False
    return True
