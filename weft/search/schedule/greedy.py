"""Schedules by simple rules, for a start: whenever a device is free, run the ready task that a rule likes best.

A rule orders tasks; ``in_flight`` limits how many micro-batches are begun and not ended, which keeps memory from being
filled by forwards that wait for each other. Where a rule runs into such a deadlock, it gives nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from weft.model.graph import F64
from weft.search.common.budget import Budget
from weft.search.schedule.bounds import task_tails
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import TOLERANCE, Schedule

Rule = Callable[[int, int], tuple[float, ...]]
"""(task, micro-batch) -> key; the smallest runs first."""


def rules(problem: ScheduleProblem) -> dict[str, Rule]:
    """Return the rules by name."""
    tails = task_tails(problem)
    return {
        "nearest the end first": lambda task, index: (tails[task], index),
        "oldest micro-batch first": lambda task, index: (index, -tails[task]),
        "furthest from the end first": lambda task, index: (-tails[task], index),
    }


def greedy_schedules(problem: ScheduleProblem, num_microbatches: int, in_flight: Sequence[int],
                     budget: Budget) -> Iterator[Schedule]:
    """Yield the schedules of all rules and limits that do not run into a deadlock, until time is up."""
    for limit in in_flight:
        for rule in rules(problem).values():
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
