"""Exact answers for tiny problems with pairs and copies: ``min_makespan_joint``, written apart from Weft's search.

A schedule is found by dispatching blocks, pairs, transfers and copies in order of their starts, each as early as what
came before allows: not before the one dispatched before it, nor before what it waits for has ended, its resources are
free, and there is room in memory. Such sequences hold an optimum: take the starts of an optimal schedule in order (of
equal ones what gives back memory first, else what is waited for first). By induction nothing starts later than there:
everything before it started no later, so it has ended, or given back memory, no later; and what takes memory after it
is asked for its own room. Whether a copy is made, and which blocks are pairs, is part of the sequence.

Of two states that have dispatched the same things, one whose times are all at most the other's is as good or better.
Numbers are whole, by their common denominator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tests.search.schedule.oracle import MEMORY_TOLERANCE, common_denominator
from weft.search.schedule.problem import ScheduleProblem

Item = tuple[str, int, int]
"""("task", task, micro-batch), ("out", copy, micro-batch) or ("in", copy, micro-batch)."""


class TooLargeError(Exception):
    """More states than asked for."""


@dataclass(frozen=True)
class _State:
    last: int
    """The start of what was dispatched last."""
    end: int
    """The latest end of a task."""
    ends: dict[Item, int]
    """When everything that has been dispatched ends."""
    frees: dict[Item, int]
    """When it gives memory back: devices' for tasks and copies out, the host's for copies back."""
    free: tuple[int, ...]
    """When each resource, then each device's copy stream, is free."""


class _World:
    def __init__(self, problem: ScheduleProblem, number: int) -> None:
        self.problem, self.number = problem, number
        exact = [*map(Fraction, problem.task_times), *(Fraction(edge.delay) for edge in problem.edges),
                 *(Fraction(item.time) for item in problem.overlaps), *(Fraction(item.time) for item in problem.copies)]
        self.unit = common_denominator(exact)
        self.times = [int(Fraction(time) * self.unit) for time in problem.task_times]
        self.copy_times = [int(Fraction(item.time) * self.unit) for item in problem.copies]
        self.joint = {item.blocks: int(Fraction(item.time) * self.unit) for item in problem.overlaps}
        self.before = [[(edge.source, int(Fraction(edge.delay) * self.unit)) for edge in into]
                       for into in problem.predecessors]
        self.longest_delay = [max((int(Fraction(edge.delay) * self.unit) for edge in out), default=0)
                              for out in problem.successors]
        self.backs = [[copy for copy, tasks in enumerate(problem.returns) if task in tasks]
                      for task in range(problem.num_tasks)]
        self.limits = [None if limit is None else Fraction(limit) + MEMORY_TOLERANCE * max(1, Fraction(limit))
                       for limit in (*problem.device_memory, problem.host_memory)]
        self.tails = [0] * problem.num_tasks
        for task in reversed(problem.topological):
            self.tails[task] = self.times[task] + max(
                (int(Fraction(edge.delay) * self.unit) + self.tails[edge.target] for edge in problem.successors[task]), default=0)
        gains = {block: max(self.times[a] + self.times[b] - joint for (a, b), joint in self.joint.items() if block in (a, b))
                 for pair in self.joint for block in pair}
        self.least = [Fraction(time) - Fraction(gains.get(task, 0), 2) for task, time in enumerate(self.times)]

    def changes(self, item: Item) -> Iterator[tuple[int, Fraction, bool]]:
        """Yield (device, or the host behind them, amount, whether it is given back) of what is dispatched."""
        kind, which, _ = item
        if kind == "task":
            amount = Fraction(self.problem.memory_of(which))
            for device in self.problem.task_resources[which] if which < self.problem.num_blocks and amount else ():
                yield device, abs(amount), amount < 0
            return
        block = self.problem.blocks[self.problem.copies[which].block]
        for device in block.devices:
            yield device, Fraction(block.memory), kind == "out"
        yield self.problem.num_devices, Fraction(block.memory) * len(block.devices), kind == "in"

    def level(self, state: _State, place: int, at: int) -> Fraction:
        """Return what is held at that time of what has been dispatched."""
        total = Fraction(0)
        for item in state.ends:
            for where, amount, is_given in self.changes(item):
                if where == place:
                    total += amount if not is_given else -amount if state.frees[item] <= at else 0
        return total

    def fits(self, state: _State, items: list[Item], at: int) -> bool:
        """Return whether there is room for what is taken when the items start."""
        need: dict[int, Fraction] = {}
        for item in items:
            for where, amount, is_given in self.changes(item):
                at_once = is_given and item[0] == "task" and self.problem.free_at == "start"
                if not is_given or at_once:
                    need[where] = need.get(where, Fraction(0)) + (-amount if at_once else amount)
        takes = {where for item in items for where, _, is_given in self.changes(item) if not is_given}
        return all(limit is None or self.level(state, where, at) + need[where] <= limit
                   for where in takes for limit in (self.limits[where],))

    def resources(self, item: Item) -> tuple[int, ...]:
        kind, which, _ = item
        if kind == "task":
            return self.problem.task_resources[which]
        streams = len(self.problem.resource_names)
        return tuple(streams + device for device in self.problem.blocks[self.problem.copies[which].block].devices)

    def ready(self, state: _State, item: Item) -> int | None:
        """Return when what the item waits for has ended; None if it may not be dispatched."""
        kind, which, index = item
        if item in state.ends:
            return None
        if kind == "out":
            return state.ends.get(("task", self.problem.copies[which].block, index))
        if kind == "in":
            return state.ends.get(("out", which, index))
        at = 0
        for source, delay in self.before[which]:
            if ("task", source, index) not in state.ends:
                return None
            at = max(at, state.ends["task", source, index] + delay)
        for copy in self.backs[which]:
            if ("out", copy, index) in state.ends:
                if ("in", copy, index) not in state.ends:
                    return None
                at = max(at, state.ends["in", copy, index])
        return at

    def may_leave(self, state: _State, item: Item) -> bool:
        """Return whether nothing that gives the memory back has been dispatched."""
        return item[0] != "out" or all(("task", task, item[2]) not in state.ends for task in self.problem.returns[item[1]])


def min_makespan_joint(problem: ScheduleProblem, number: int, *, below: Fraction | None = None,
                       max_states: int = 60_000) -> Fraction | None:
    """Return the shortest makespan that is less than ``below``; None where there is none."""
    world = _World(problem, number)
    best = None if below is None else below * world.unit
    start = _State(last=0, end=0, ends={}, frees={}, free=(0,) * (len(problem.resource_names) + problem.num_devices))
    stack, fronts, count, total, found = [start], {}, 0, number * problem.num_tasks, None
    while stack:
        state = stack.pop()
        if sum(item[0] == "task" for item in state.ends) == total:
            if best is None or state.end < best:
                best = found = Fraction(state.end)
            continue
        nexts = []
        for after in _dispatches(world, state):
            if best is None or _bound(world, after) < best:
                key, numbers = _key(world, after)
                front = fronts.setdefault(key, [])
                if not any(all(a <= b for a, b in zip(old, numbers, strict=True)) for old in front):
                    front[:] = [old for old in front if not all(a <= b for a, b in zip(numbers, old, strict=True))]
                    front.append(numbers)
                    nexts.append(after)
                    count += 1
        if count > max_states:
            raise TooLargeError
        stack += sorted(nexts, key=lambda item: (-_bound(world, item), -item.last))
    return None if found is None else found / world.unit


def _dispatches(world: _World, state: _State) -> Iterator[_State]:
    problem = world.problem
    touched = {index for _, _, index in state.ends}
    fresh = min((index for index in range(world.number) if index not in touched), default=None)
    single: list[tuple[Item, int]] = []
    for index in range(world.number):
        if index in touched or index == fresh:
            items = [("task", task, index) for task in range(problem.num_tasks)]
            items += [(kind, copy, index) for copy in range(len(problem.copies)) for kind in ("out", "in")]
            for item in items:
                at = world.ready(state, item)
                if at is not None and world.may_leave(state, item):
                    single.append((item, at))
    for item, at in single:
        time = world.times[item[1]] if item[0] == "task" else world.copy_times[item[1]]
        after = _dispatch(world, state, [item], at, time)
        if after is not None:
            yield after
    later = {index for index in range(world.number) if index not in touched and index != fresh}
    for (one, other), joint in world.joint.items():
        for a, at in [(item, at) for item, at in single if item[:2] == ("task", one)]:
            second = [(item, ready) for item, ready in single if item[:2] == ("task", other) and item != a]
            if a[2] == fresh and later:  # two micro-batches that begin together
                number = min(later)
                ready = world.ready(state, ("task", other, number))
                second += [] if ready is None else [(("task", other, number), ready)]
            for b, ready in second:
                if world.times[one] and world.times[other]:
                    after = _dispatch(world, state, [a, b], max(at, ready), joint)
                    if after is not None:
                        yield after


def _dispatch(world: _World, state: _State, items: list[Item], at: int, time: int) -> _State | None:
    resources = world.resources(items[0])
    at = max([at, state.last, *(state.free[resource] for resource in resources)])
    for moment in sorted({at, *(free for free in state.frees.values() if free > at)}):
        if world.fits(state, items, moment):
            break
    else:
        return None
    end = moment + time
    frees = dict(state.frees)
    for item in items:
        frees[item] = moment if item[0] == "task" and world.problem.free_at == "start" else end
    is_task = items[0][0] == "task"
    return _State(last=moment, end=max(state.end, end) if is_task else state.end,
                  ends={**state.ends, **dict.fromkeys(items, end)}, frees=frees,
                  free=tuple(end if place in resources else old for place, old in enumerate(state.free)))


def _key(world: _World, state: _State) -> tuple[frozenset[Item], tuple[int, ...]]:
    """Return what has been dispatched, and all times that may still matter, none before the last start."""
    items = sorted(state.ends)
    return frozenset(items), (state.last, state.end, *(max(at, state.last) for at in state.free),
                              *(max(state.ends[item] + (world.longest_delay[item[1]] if item[0] == "task" else 0), state.last)
                                for item in items),
                              *(max(state.frees[item], state.last) for item in items))


def _bound(world: _World, state: _State) -> Fraction:
    bound = Fraction(state.end)
    work: dict[int, Fraction] = {}
    for index in range(world.number):
        starts: dict[int, int] = {}
        for task in world.problem.topological:
            if ("task", task, index) not in state.ends:
                at = max([state.last, *(state.free[resource] for resource in world.problem.task_resources[task])])
                for source, delay in world.before[task]:
                    before = starts[source] + world.times[source] if source in starts else state.ends["task", source, index]
                    at = max(at, before + delay)
                starts[task] = at
                bound = max(bound, Fraction(at + world.tails[task]))
                for resource in world.problem.task_resources[task]:
                    work[resource] = work.get(resource, Fraction(0)) + world.least[task]
    return max([bound, *(max(state.free[resource], state.last) + left for resource, left in work.items())])
