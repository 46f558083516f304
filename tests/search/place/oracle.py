"""The exact latency of tiny placement problems, by brute force: shares nothing with Weft's search but the problem type.

``min_latency`` tries every placement that units, allowed devices, ways and memory admit, and for each one every
*semi-active* schedule: operators and transfers are tasks of their own, a task occupies all its resources at once (an
operator the core of its device, a transfer what its pair of devices says) for its whole time. Sort the tasks of any
schedule by start and put them down in that order, each as soon as what it needs is done and its resources are free:
nothing starts later than before. So an optimum is among the schedules made by putting tasks down in the order of their
starts, and all of those are tried: transfers in any order, and later than they could be. The only cut is against the
best schedule known: a lower bound (longest path, work left on a resource) that reaches it.

What takes no time occupies nothing, the weakest reading, which every bound must hold for; with ``zero_occupies`` it
waits for its resources to be free, as every timetable of Weft's. Memory is what operators keep resident (no lifetimes).

``all_latencies`` is the same without any cut, over permutations, to test ``min_latency`` where even that is possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Sent, Timetable

MEMORY_TOLERANCE = 1e-9
"""Of the capacity: what the checker forgives."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best latency and a timetable that has it."""

    latency_s: float
    timetable: Timetable


@dataclass(slots=True)
class _Tasks:
    """One placement's operators (first) and transfers."""

    device: tuple[int, ...]
    sends: list[tuple[int, int]]
    """(tensor, target device) of the tasks after the operators."""
    time: list[float]
    after: list[list[int]]
    """The tasks that a task waits for."""
    before: list[list[int]]
    resources: list[tuple[int, ...]]
    tail: list[float] = field(default_factory=list)
    """Time from a task's start to the end of all that follows it."""

    @property
    def order(self) -> list[int]:
        """Return the tasks in an order that respects what they wait for."""
        missing = [len(items) for items in self.after]
        ready = [task for task, count in enumerate(missing) if count == 0]
        for task in ready:
            for follower in self.before[task]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
        return ready


class _World:
    """A problem as plain lists."""

    def __init__(self, problem: PlaceProblem, zero_occupies: bool) -> None:
        assert not problem.has_lifetimes, "the brute force knows no lifetimes"
        self.problem = problem
        self.zero_occupies = zero_occupies
        self.limit = float("inf")
        self.num_ops, self.num_devices = problem.num_ops, problem.num_devices
        self.time: list[list[float]] = problem.time_s.tolist()
        self.unit: list[int] = problem.unit_of_op.tolist()
        self.core: list[int] = problem.core_of_device.tolist()
        self.producer: list[int] = problem.producer.tolist()
        starts = problem.input_start.tolist()
        self.inputs = [problem.inputs[starts[op] : starts[op + 1]].tolist() for op in range(self.num_ops)]
        self.send_s = [[[problem.transfer_s(tensor, source, target) for target in range(self.num_devices)]
                        for source in range(self.num_devices)] for tensor in range(problem.num_tensors)]
        keeps = problem.weight_start.tolist()
        self.keeps = [problem.weights[keeps[op] : keeps[op + 1]].tolist() for op in range(self.num_ops)]
        self.num_cores = max(self.core, default=-1) + 1
        first = problem.resource_start.tolist()
        self.ways = [[tuple(self.num_cores + int(item) for item in
                            problem.resources[first[self.pair(i, j)] : first[self.pair(i, j) + 1]])
                      for j in range(self.num_devices)] for i in range(self.num_devices)]
        self.num_resources = self.num_cores + problem.num_resources
        self.least_tail = self._least_tails()

    def pair(self, source: int, target: int) -> int:
        return source * self.num_devices + target

    def _least_tails(self) -> list[float]:
        """Return what is left from the start of each operator at least: its fastest time and the longest way on."""
        tail = [0.0] * self.num_ops
        for op in reversed(range(self.num_ops)):
            tail[op] += min(self.time[op])
            for tensor in self.inputs[op]:
                tail[self.producer[tensor]] = max(tail[self.producer[tensor]], tail[op])
        return tail

    def fits(self, device: Sequence[int]) -> bool:
        """Return whether what the first operators (those that have a device) keep fits."""
        held: list[set[int]] = [set() for _ in range(self.num_devices)]
        for op, where in enumerate(device):
            held[where].update(self.keeps[op])
        sizes = self.problem.weight_bytes
        return all(sum(float(sizes[item]) for item in items) <= float(limit) * (1 + MEMORY_TOLERANCE)
                   for items, limit in zip(held, self.problem.capacity, strict=True))

    def choices(self, device: Sequence[int]) -> list[int]:
        """Return where the next operator may run, the fastest first."""
        op = len(device)
        same = [device[other] for other in range(op) if self.unit[other] == self.unit[op]]
        return sorted((where for where in (same[:1] or range(self.num_devices)) if self.time[op][where] < np.inf),
                      key=lambda where: self.time[op][where])

    def tasks(self, device: tuple[int, ...]) -> _Tasks | None:
        """Return the tasks of a placement, or None where something cannot be sent."""
        time = [self.time[op][where] for op, where in enumerate(device)]
        after: list[list[int]] = [[] for _ in device]
        resources: list[tuple[int, ...]] = [(self.core[where],) for where in device]
        sends: dict[tuple[int, int], int] = {}
        for op, where in enumerate(device):
            for tensor in self.inputs[op]:
                writer = self.producer[tensor]
                if device[writer] == where:
                    after[op].append(writer)
                    continue
                if (tensor, where) not in sends:
                    sends[tensor, where] = len(time)
                    time.append(self.send_s[tensor][device[writer]][where])
                    after.append([writer])
                    resources.append(self.ways[device[writer]][where])
                after[op].append(sends[tensor, where])
        if max(time, default=0.0) == np.inf:
            return None
        if not self.zero_occupies:
            resources = [items if seconds > 0 else () for items, seconds in zip(resources, time, strict=True)]
        before: list[list[int]] = [[] for _ in time]
        for task, items in enumerate(after):
            for other in items:
                before[other].append(task)
        tasks = _Tasks(device, list(sends), time, after, before, resources, list(time))
        for task in reversed(tasks.order):
            tasks.tail[task] += max((tasks.tail[follower] for follower in before[task]), default=0.0)
        return tasks

    def timetable(self, tasks: _Tasks, start: Sequence[float]) -> Timetable:
        """Return the schedule as Weft's type, for Weft's checker."""
        sent = []
        for index, (tensor, target) in enumerate(tasks.sends):
            task = self.num_ops + index
            source = tasks.device[self.producer[tensor]]
            sent.append(Sent(tensor, source, target, start[task], start[task] + tasks.time[task]))
        return Timetable(problem=self.problem, device=np.array(tasks.device, dtype=np.int64),
                         start_s=np.array(start[: self.num_ops], dtype=np.float64), transfers=tuple(sent))


def min_latency(problem: PlaceProblem, *, zero_occupies: bool = False) -> Optimum | None:
    """Return the best of all placements and schedules, or None where no placement is possible."""
    world = _World(problem, zero_occupies)
    best: Timetable | None = None
    for tasks in _placements(world):
        found = _Dispatch(world, tasks).run()
        if found is not None:
            world.limit, best = found[0], world.timetable(tasks, found[1])
    return None if best is None else Optimum(world.limit, best)


def _placements(world: _World) -> Iterator[_Tasks]:
    """Yield the placements whose partial bounds stay below the best latency known, operator by operator."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        device = pending.pop()
        if _partial_bound(world, device) >= world.limit or not world.fits(device):
            continue
        if len(device) == world.num_ops:
            tasks = world.tasks(device)
            if tasks is not None:
                yield tasks
            continue
        pending.extend((*device, where) for where in reversed(world.choices(device)))


def _partial_bound(world: _World, device: Sequence[int]) -> float:
    """Return what the placed operators take at least: longest way with transfers, and the busiest core."""
    end: list[float] = []
    bound, load = -1.0, [0.0] * world.num_cores
    for op, where in enumerate(device):
        start = 0.0
        for tensor in world.inputs[op]:
            writer = world.producer[tensor]
            start = max(start, end[writer] + world.send_s[tensor][device[writer]][where])
        end.append(start + world.time[op][where])
        bound = max(bound, start + world.least_tail[op] + world.time[op][where] - min(world.time[op]))
        load[world.core[where]] += world.time[op][where]
    return max([bound, *load])


class _Dispatch:
    """All semi-active schedules of one placement, as far as they can be better than the best known."""

    def __init__(self, world: _World, tasks: _Tasks) -> None:
        self.tasks = tasks
        self.limit = world.limit
        self.best: list[float] | None = None
        self.free = [0.0] * world.num_resources
        self.left = [0.0] * world.num_resources
        for seconds, resources in zip(tasks.time, tasks.resources, strict=True):
            for resource in resources:
                self.left[resource] += seconds
        self.missing = [len(items) for items in tasks.after]
        self.known = [0.0] * len(tasks.time)
        self.start = [-1.0] * len(tasks.time)
        self.ready = [task for task, count in enumerate(self.missing) if count == 0]

    def run(self) -> tuple[float, list[float]] | None:
        """Return the best latency below the limit and the starts, or None."""
        self._next(-1, 0.0)
        return None if self.best is None else (self.limit, self.best)

    def _next(self, last: int, end: float) -> None:
        if not self.ready:
            if end < self.limit:
                self.limit, self.best = end, list(self.start)
            return
        tasks, free = self.tasks, self.free
        starts = []
        for task in self.ready:
            start = self.known[task]
            for resource in tasks.resources[task]:
                start = max(start, free[resource])
            if start + tasks.tail[task] >= self.limit:
                return
            starts.append((start, task))
        if any(when + work >= self.limit for when, work in zip(free, self.left, strict=True) if work > 0):
            return
        now = self.start[last] if last >= 0 else 0.0
        for start, task in sorted(starts):
            if start < now or (start == now and task < last and tasks.time[task] > 0 and tasks.time[last] > 0
                               and last not in tasks.after[task]):
                continue  # schedules are made in the order of starts; two tasks at one time in one order only
            self._put(task, start, end)

    def _put(self, task: int, start: float, end: float) -> None:
        """Put the task down, try all that may follow, and take it back."""
        tasks = self.tasks
        done = start + tasks.time[task]
        freed = [self.free[resource] for resource in tasks.resources[task]]
        for resource in tasks.resources[task]:
            self.free[resource] = done
            self.left[resource] -= tasks.time[task]
        self.start[task] = start
        ready, known = self.ready, [self.known[follower] for follower in tasks.before[task]]
        self.ready = [other for other in ready if other != task]
        for follower in tasks.before[task]:
            self.missing[follower] -= 1
            self.known[follower] = max(self.known[follower], done)
            if self.missing[follower] == 0:
                self.ready.append(follower)
        self._next(task, max(end, done))
        for follower, when in zip(tasks.before[task], known, strict=True):
            self.missing[follower] += 1
            self.known[follower] = when
        self.ready = ready
        for resource, when in zip(tasks.resources[task], freed, strict=True):
            self.free[resource] = when
            self.left[resource] += tasks.time[task]


def all_latencies(problem: PlaceProblem, *, zero_occupies: bool = False) -> float | None:
    """Return the same latency from all permutations of all tasks of all placements, without a cut."""
    world = _World(problem, zero_occupies)
    best: float | None = None
    for device in itertools.product(range(world.num_devices), repeat=world.num_ops):
        homes: dict[int, int] = {}
        if any(homes.setdefault(unit, where) != where for unit, where in zip(world.unit, device, strict=True)):
            continue
        if not world.fits(device) or any(world.time[op][where] == np.inf for op, where in enumerate(device)):
            continue
        tasks = world.tasks(device)
        if tasks is None:
            continue
        latency = min(_latency_of(world, tasks, order) for order in itertools.permutations(range(len(tasks.time))))
        best = latency if best is None else min(best, latency)
    return best


def _latency_of(world: _World, tasks: _Tasks, order: Sequence[int]) -> float:
    """Return when the last task ends if tasks are put down in this order; infinite if the order is impossible."""
    free = [0.0] * world.num_resources
    end: dict[int, float] = {}
    for task in order:
        if any(other not in end for other in tasks.after[task]):
            return np.inf
        start = max([0.0, *(end[other] for other in tasks.after[task]),
                     *(free[item] for item in tasks.resources[task])])
        end[task] = start + tasks.time[task]
        for resource in tasks.resources[task]:
            free[resource] = end[task]
    return max(end.values(), default=0.0)
