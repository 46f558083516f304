"""Exact answers for tiny schedule problems, written apart from Weft's search (only the problem type is shared).

A schedule is found by a *dispatch sequence*: all tasks of all micro-batches in some order that respects dependencies,
each placed as early as its predecessors and its resources' previous tasks allow. Sequences hold an optimum: sort the
tasks of an optimal schedule by start (of equal starts what ends first, then dependencies first) and dispatch them in
that order. On every resource the order is the same, so memory, which depends on order alone, is the same, and no task
starts later than before.

``min_makespan`` builds sequences breadth first. What happens after a set of tasks has been dispatched depends only on

- the set itself: it fixes which tasks are left and what every device holds;
- when each resource is free, when each task with a dispatched predecessor could start, and the latest end so far.

Of two states with one set, one whose times are all at most the other's is as good or better: the other's completion,
dispatched from it, starts nothing later. Only such dominated states, states whose lower bound reaches a schedule
already known, and copies that differ by the names of micro-batches alone (all have the same blocks) are dropped.
Numbers are exact: times become integers by their common denominator.

``min_makespan_naive`` tries every permutation instead, to test ``min_makespan``; so does ``oracle_cp``, which knows
nothing of sequences. ``oracle_period`` has the same for steady states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from random import Random

from weft.search.schedule.problem import ScheduleProblem

Instance = tuple[int, int]
"""(task, micro-batch)."""

MEMORY_TOLERANCE = Fraction(1, 10**9)
"""Of the limit, or of 1 if that is more: what the checker forgives."""


@dataclass(frozen=True)
class Answer:
    """An optimum and a dispatch sequence that reaches it."""

    makespan: Fraction
    sequence: tuple[Instance, ...]


class World:
    """The problem in whole numbers."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        edges = [[(edge.source, Fraction(edge.delay)) for edge in into] for into in problem.predecessors]
        self.unit = common_denominator([*map(Fraction, problem.task_times), *(delay for into in edges for _, delay in into)])
        self.times = [int(Fraction(time) * self.unit) for time in problem.task_times]
        self.before = [[(source, int(delay * self.unit)) for source, delay in into] for into in edges]
        self.after: list[list[tuple[int, int]]] = [[] for _ in self.times]
        for task, into in enumerate(self.before):
            for source, delay in into:
                self.after[source].append((task, delay))
        self.resources = problem.task_resources
        self.num_resources = len(problem.resource_names)
        self.memory = [Fraction(problem.memory_of(task)) for task in range(problem.num_tasks)]
        self.limits = [None if limit is None else Fraction(limit) + MEMORY_TOLERANCE * max(1, abs(Fraction(limit)))
                       for limit in problem.device_memory]
        self.tails = self._tails()

    @property
    def num_tasks(self) -> int:
        return len(self.times)

    @cached_property
    def needs(self) -> list[int]:
        """For each task the tasks that it waits for, as bits."""
        return [sum({1 << source for source, _ in into}) for into in self.before]

    def _tails(self) -> list[int]:
        """Return for each task the least time from its start to the end of all that depends on it."""
        tails = [0] * self.num_tasks
        for task in reversed(self.problem.topological):
            tails[task] = self.times[task] + max((delay + tails[later] for later, delay in self.after[task]), default=0)
        return tails

    def level(self, masks: Iterable[int], device: int) -> Fraction:
        """Return what the device holds once the tasks in the masks (one for each micro-batch) have been dispatched."""
        return sum((self.memory[task] for mask in masks for task in range(self.num_tasks)
                    if mask >> task & 1 and device in self.resources[task]), Fraction(0))

    def fits(self, task: int, masks: Sequence[int]) -> bool:
        """Return whether the devices of the task can hold it after the tasks in the masks."""
        if task >= self.problem.num_blocks:
            return True
        return all(limit is None or self.level(masks, device) + self.memory[task] <= limit
                   for device in self.resources[task] for limit in (self.limits[device],))


def common_denominator(values: Iterable[Fraction]) -> int:
    return math.lcm(1, *(value.denominator for value in values))


def place(problem: ScheduleProblem, sequence: Sequence[Instance]) -> dict[Instance, Fraction]:
    """Return the starts when tasks are dispatched in that order, each as early as possible."""
    starts: dict[Instance, Fraction] = {}
    free = [Fraction(0)] * len(problem.resource_names)
    for task, index in sequence:
        ready = [starts[edge.source, index] + Fraction(problem.task_times[edge.source]) + Fraction(edge.delay)
                 for edge in problem.predecessors[task]]
        start = max([*ready, *(free[resource] for resource in problem.task_resources[task])], default=Fraction(0))
        starts[task, index] = start
        for resource in problem.task_resources[task]:
            free[resource] = start + Fraction(problem.task_times[task])
    return starts


def end_of(problem: ScheduleProblem, starts: dict[Instance, Fraction]) -> Fraction:
    return max(start + Fraction(problem.task_times[task]) for (task, _), start in starts.items())


def is_feasible(problem: ScheduleProblem, num_microbatches: int) -> bool:
    """Return whether any order of the tasks keeps every device within its memory."""
    world = World(problem)
    done = (1 << world.num_tasks) - 1
    start = (0,) * num_microbatches
    seen, stack = {start}, [start]
    while stack:
        masks = stack.pop()
        if all(mask == done for mask in masks):
            return True
        for index, mask in enumerate(masks):
            for task in _ready(world, mask):
                if world.fits(task, masks):
                    after = tuple(sorted((*masks[:index], mask | 1 << task, *masks[index + 1:])))
                    if after not in seen:
                        seen.add(after)
                        stack.append(after)
    return False


def _ready(world: World, mask: int) -> list[int]:
    return [task for task in range(world.num_tasks) if not mask >> task & 1 and mask & world.needs[task] == world.needs[task]]


@dataclass(frozen=True)
class _Part:
    """One micro-batch in a state: what has been dispatched, and when what comes next could start."""

    mask: int
    ready: tuple[int, ...]
    """For every task; 0 for tasks that are done or have no dispatched predecessor."""
    label: int


@dataclass(frozen=True)
class _State:
    parts: tuple[_Part, ...]
    free: tuple[int, ...]
    end: int
    sequence: tuple[Instance, ...]

    @cached_property
    def masks(self) -> tuple[int, ...]:
        return tuple(part.mask for part in self.parts)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        return (self.end, *self.free, *(value for part in self.parts for value in part.ready))


def min_makespan(problem: ScheduleProblem, num_microbatches: int) -> Answer | None:
    """Return the shortest schedule, or None where memory admits none."""
    world = World(problem)
    best = _greedy(world, num_microbatches)
    parts = tuple(_Part(mask=0, ready=(0,) * world.num_tasks, label=label) for label in range(num_microbatches))
    layer = [_State(parts=parts, free=(0,) * world.num_resources, end=0, sequence=())]
    for _ in range(num_microbatches * world.num_tasks):
        fronts: dict[tuple[int, ...], dict[tuple[int, ...], _State]] = {}
        for state in layer:
            for after in _dispatches(world, state):
                if best is None or _bound(world, after) < best.end:
                    _insert(fronts.setdefault(after.masks, {}), after)
        layer = [state for front in fronts.values() for state in front.values()]
    best = min([*([best] if best else []), *layer], key=lambda state: state.end, default=None)
    return Answer(Fraction(best.end, world.unit), best.sequence) if best else None


def _dispatches(world: World, state: _State) -> Iterator[_State]:
    """Yield the states after one more task, without copies that differ by names of micro-batches alone."""
    for index, part in enumerate(state.parts):
        if index and (part.mask, part.ready) == (state.parts[index - 1].mask, state.parts[index - 1].ready):
            continue
        for task in _ready(world, part.mask):
            if world.fits(task, state.masks):
                yield _dispatch(world, state, index, task)


def _dispatch(world: World, state: _State, index: int, task: int) -> _State:
    part = state.parts[index]
    end = max([part.ready[task], *(state.free[resource] for resource in world.resources[task])]) + world.times[task]
    free = [end if resource in world.resources[task] else at for resource, at in enumerate(state.free)]
    ready = list(part.ready)
    for later, delay in world.after[task]:
        ready[later] = max(ready[later], end + delay)
    changed = _Part(mask=part.mask | 1 << task, ready=tuple(ready), label=part.label)
    parts = [*state.parts[:index], changed, *state.parts[index + 1:]]
    return _tidy(world, parts, free, max(state.end, end), (*state.sequence, (task, part.label)))


def _tidy(world: World, parts: list[_Part], free: list[int], end: int, sequence: tuple[Instance, ...]) -> _State:
    """Return the state with numbers that no longer matter made equal, and its micro-batches sorted.

    A task cannot start before its resources are free, so being ready earlier changes nothing; a task that is done, or a
    resource without further tasks, needs no time at all.
    """
    result = []
    for part in parts:
        ready = tuple(0 if part.mask >> task & 1 or not part.mask & world.needs[task] else
                      max(at, *(free[resource] for resource in world.resources[task]))
                      for task, at in enumerate(part.ready))
        result.append(_Part(mask=part.mask, ready=ready, label=part.label))
    left = {resource for part in parts for task in range(world.num_tasks) if not part.mask >> task & 1
            for resource in world.resources[task]}
    result.sort(key=lambda part: (part.mask, part.ready, part.label))
    return _State(parts=tuple(result), free=tuple(at if resource in left else 0 for resource, at in enumerate(free)),
                  end=end, sequence=sequence)


def _insert(front: dict[tuple[int, ...], _State], state: _State) -> None:
    """Add the state unless one of its set is as good; drop those that it is as good as."""
    new = state.numbers
    if new in front or any(all(a <= b for a, b in zip(old, new, strict=True)) for old in front):
        return
    for old in [old for old in front if all(a <= b for a, b in zip(new, old, strict=True))]:
        del front[old]
    front[new] = state


def _bound(world: World, state: _State) -> int:
    """Return a time before which no completion of the state ends."""
    bound = state.end
    work: dict[int, list[tuple[int, int, int]]] = {}
    for part in state.parts:
        starts: dict[int, int] = {}
        for task in world.problem.topological:
            if not part.mask >> task & 1:
                starts[task] = max([part.ready[task], *(state.free[resource] for resource in world.resources[task]),
                                    *(starts[source] + world.times[source] + delay
                                      for source, delay in world.before[task] if source in starts)])
                bound = max(bound, starts[task] + world.tails[task])
                for resource in world.resources[task]:
                    item = (starts[task], world.times[task], world.tails[task] - world.times[task])
                    work.setdefault(resource, []).append(item)
    for items in work.values():
        first, last = min(item[0] for item in items), min(item[2] for item in items)
        bound = max(bound, first + sum(item[1] for item in items) + last)
    return bound


def _greedy(world: World, num_microbatches: int, num_tries: int = 10) -> _State | None:
    """Return the best of some random sequences that fit the memory, to start from; one that meets the bound is enough."""
    best: _State | None = None
    parts = tuple(_Part(mask=0, ready=(0,) * world.num_tasks, label=label) for label in range(num_microbatches))
    start = _State(parts=parts, free=(0,) * world.num_resources, end=0, sequence=())
    least = _bound(world, start)
    for seed in range(num_tries):
        if best is not None and best.end <= least:
            break
        rng, state = Random(seed), start
        while choices := list(_dispatches(world, state)):
            state = min(choices, key=lambda item: (_bound(world, item), item.end, rng.random()) if rng.random() < 0.9
                        else (0, 0, 0.0))
        complete = len(state.sequence) == num_microbatches * world.num_tasks
        if complete and (best is None or state.end < best.end):
            best = state
    return best


def min_makespan_naive(problem: ScheduleProblem, num_microbatches: int) -> Fraction | None:
    """Return the shortest makespan over all permutations of all tasks, or None; for a handful of tasks."""
    instances = [(task, index) for index in range(num_microbatches) for task in range(problem.num_tasks)]
    best: Fraction | None = None
    for sequence in itertools.permutations(instances):
        place_of = {item: number for number, item in enumerate(sequence)}
        if any(place_of[edge.source, index] > place_of[edge.target, index]
               for edge in problem.edges for index in range(num_microbatches)):
            continue
        if _over_memory(problem, sequence):
            continue
        end = end_of(problem, place(problem, sequence))
        best = end if best is None else min(best, end)
    return best


def _over_memory(problem: ScheduleProblem, sequence: Sequence[Instance]) -> bool:
    for device, limit in enumerate(problem.device_memory):
        if limit is not None:
            levels = itertools.accumulate(Fraction(problem.blocks[task].memory) for task, _ in sequence
                                          if task < problem.num_blocks and device in problem.blocks[task].devices)
            if max(levels, default=Fraction(0)) > Fraction(limit) + MEMORY_TOLERANCE * max(1, Fraction(limit)):
                return True
    return False
