"""The problem as the constraint solver wants it: memory as intervals, times and amounts in whole numbers.

*Holds.* Every release of memory is matched with blocks of the same micro-batch that took before it (its ancestors), so
that memory becomes a sum of intervals, which a constraint solver handles far better than running sums. Any matching
describes the same levels. What is never released is held to the end, what is released without having been taken is held
from the begin.

*Whole numbers.* Decimal times with a small common denominator are scaled exactly. Others are rounded *up* to a grid of
``TUNING.resolution`` ticks per busiest device and micro-batch: the orders found there are played back in real time, so
rounding costs quality of the order only, never correctness. For lower bounds times and memory are rounded *down*
instead (limits up): what is impossible then is impossible in real time, since a real schedule with shorter durations
can be shifted onto the grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Generic, Literal, TypeVar

import numpy as np

from weft.model.graph import F64
from weft.search.schedule.moves import Clock, earliest, from_rows, realise, rows_of
from weft.search.schedule.pairs import find_pairs, least_sums
from weft.search.schedule.problem import ScheduleProblem, find_ancestors, follow, grouped, match_memory, turned_round
from weft.search.schedule.schedule import TOLERANCE, Schedule, play
from weft.search.schedule.tuning import TUNING

Amount = TypeVar("Amount", int, float)
Rounding = Literal["up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Generic[Amount]):
    """``amount`` on a device from the start of ``take`` to the end of ``release``."""

    device: int
    take: int | None
    """None: held from the begin."""
    release: int | None
    """None: held to the end."""
    amount: Amount


def balanced_holds(problem: ScheduleProblem) -> dict[int, list[tuple[int, int, float]]]:
    """Return (take, release, amount) by device, for the devices where every take is matched with a release.

    Only there is what is held never less than nothing, so that holds bound how many micro-batches there is room for.
    """
    result: dict[int, list[tuple[int, int, float]]] = {}
    holds = find_holds(problem)
    balanced = _balanced(holds)
    for hold in holds:
        if hold.device in balanced and hold.take is not None and hold.release is not None:
            result.setdefault(hold.device, []).append((hold.take, hold.release, hold.amount))
    return result


def _balanced(holds: Sequence[Hold[Amount]]) -> frozenset[int]:
    """Return the devices on which every take is matched with a release."""
    loose = {hold.device for hold in holds if hold.take is None or hold.release is None}
    return frozenset(hold.device for hold in holds if hold.device not in loose)


def find_holds(problem: ScheduleProblem) -> tuple[Hold[float], ...]:
    """Return the holds of one micro-batch on all devices with a limit; their sums are the blocks' amounts."""
    ancestors = find_ancestors(problem)
    holds: list[Hold[float]] = []
    for device in range(problem.num_devices):
        if problem.device_memory[device] is not None:
            holds += [Hold(device=device, take=take, release=release, amount=amount)
                      for take, release, amount in match_memory(problem, device, ancestors)]
    return tuple(holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What the host can keep, and what each copy puts there."""

    limit: int
    amounts: tuple[int, ...]
    is_exact: bool


@dataclass(frozen=True, kw_only=True)
class WholeProblem:
    """Whole times and amounts of a problem, by task."""

    problem: ScheduleProblem
    """The problem itself, in real numbers."""
    times: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]
    """(source, target, delay)"""
    holds: tuple[Hold[int], ...]
    limits: tuple[int | None, ...]
    """Memory of each device."""
    ticks: Fraction
    """Ticks in one unit of time."""
    is_exact: bool
    """Nothing was rounded, neither times nor memory."""
    joint: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """How long blocks take at once."""
    copy_times: tuple[int, ...] = ()
    host: HostMemory | None = None
    """None: no limit."""

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return len(self.times)

    @property
    def balanced(self) -> frozenset[int]:
        """Return the devices on which every take is matched with a release."""
        return _balanced(self.holds)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Return the least busy ticks of each resource for one micro-batch, rounded down."""
        if self.joint:
            return tuple(math.floor(work + 1e-6) for work in least_sums(self.problem, self.times, self.joint))
        return tuple(sum(self.times[task] for task in tasks) for tasks in self.resource_tasks)

    @property
    def resource_tasks(self) -> tuple[tuple[int, ...], ...]:
        """Return the tasks of each resource."""
        return self.problem.resource_tasks

    def to_real(self, starts: F64) -> Schedule:
        """Return the schedule in real time with the orders of these starts (in ticks, of tasks and copies)."""
        scaled = from_rows(self.problem, starts / float(self.ticks))
        return scaled if self.is_exact else earliest(scaled)

    def in_ticks(self, schedule: Schedule) -> F64:
        """Return the starts, in ticks, of the earliest schedule in ticks with the same orders."""
        clock = Clock(self.times, [delay for _, _, delay in self.edges], self.joint, self.copy_times)
        if schedule.moves is not None:
            return realise(schedule, clock)
        starts = play(self.problem, schedule.num_microbatches, schedule.orders(), times=self.times,
                      delays=clock.delays, pairs=schedule.pairs, joint=self.joint)
        return rows_of(Schedule(problem=self.problem, starts=starts))

    def end_of(self, starts: F64) -> int:
        """Return when the last task ends, in ticks, with these starts [tasks, micro-batches]."""
        tasks = starts[: self.num_tasks]
        ends = tasks + np.asarray(self.times, dtype=np.float64)[:, None]
        for one, other in find_pairs(self.problem, tasks, 0.0):
            ends[one] = ends[other] = tasks[one] + self.joint[one[0], other[0]]
        return round(float(ends.max()))

    def heads(self) -> list[int]:
        """Return the earliest start of each task in a micro-batch alone."""
        return follow(self._incoming, self.problem.topological, self.times, [0] * self.num_tasks)

    def tails(self) -> list[int]:
        """Return the least time from the end of each task to the end of its micro-batch."""
        turned = [(target, source, delay) for source, target, delay in self.edges]
        return follow(grouped(turned, 1, self.num_tasks), self.problem.topological[::-1], self.times,
                      [0] * self.num_tasks)

    def lags_from(self, task: int) -> list[int | None]:
        """Return the least time from the start of ``task`` to the start of every task; None where it need not wait."""
        starts = [-math.inf] * self.num_tasks
        starts[task] = 0.0
        lags = follow(self._incoming, self.problem.topological, self.times, starts)
        return [None if lag == -math.inf else int(lag) for lag in lags]

    @cached_property
    def _incoming(self) -> list[list[tuple[int, int, int]]]:
        return grouped(self.edges, 1, self.num_tasks)

    def reversed(self) -> WholeProblem:
        """Return the problem backwards in time: takes become releases, so that cool-downs become warm-ups.

        Where memory can leave a device, there is no limit backwards.
        """
        mirror = turned_round(self.problem)
        return WholeProblem(
            problem=mirror, times=self.times, edges=tuple((b, a, delay) for a, b, delay in self.edges),
            holds=tuple(replace(hold, take=hold.release, release=hold.take) for hold in self.holds),
            limits=tuple(None if device in self.problem.copied else limit for device, limit in enumerate(self.limits)),
            ticks=self.ticks, is_exact=self.is_exact, joint=self.joint)


def to_whole(problem: ScheduleProblem, *, rounding: Rounding = "up", max_exact: int = TUNING.max_exact,
             resolution: int = TUNING.resolution) -> WholeProblem:
    """Return the problem in ticks: exactly where that takes at most ``max_exact`` ticks, else rounded."""
    work = max(*problem.device_work, 1e-300)
    longest = max((edge.delay for edge in problem.edges), default=0.0)
    scale = _common_scale([*problem.task_times, *(item.time for item in problem.transfers),
                           *(item.time for item in problem.overlaps), *(item.time for item in problem.copies)])
    is_exact = scale is not None and work * scale <= max_exact and longest * scale <= TUNING.max_delay
    if scale is None or not is_exact:
        scale = min(Fraction(resolution) / Fraction(work), Fraction(TUNING.max_delay) / Fraction(max(longest, 1e-300)))
    up = rounding == "up"
    holds, limits, exact_memory = _whole_memory(problem, up=up)
    host = _whole_host(problem, up=up)
    exact_memory &= host is None or host.is_exact
    return WholeProblem(
        problem=problem, times=tuple(_round(time, scale, up=up) for time in problem.task_times),
        edges=tuple((edge.source, edge.target, _round(edge.delay, scale, up=up)) for edge in problem.edges),
        holds=holds, limits=limits, ticks=scale, is_exact=is_exact and exact_memory, host=host,
        joint={key: _round(time, scale, up=up) for key, time in problem.joint.items()},
        copy_times=tuple(_round(item.time, scale, up=up) for item in problem.copies))


def _common_scale(values: Iterable[float]) -> Fraction | None:
    """Return the factor that makes all values whole and as small as can be; None if it would be huge."""
    fractions = [Fraction(repr(float(value))) for value in values if value]
    if not fractions:
        return Fraction(1)
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    if denominator > 1 << 40:
        return None
    divisor = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return Fraction(denominator, divisor)


def _whole_memory(problem: ScheduleProblem, *, up: bool) -> tuple[tuple[Hold[int], ...], tuple[int | None, ...], bool]:
    """Return holds and limits in whole numbers, each device in its own units, and whether nothing was rounded.

    Limits are a little larger by as much as ``check_schedule`` forgives.
    """
    holds: list[Hold[int]] = []
    limits: list[int | None] = []
    is_exact = True
    found = find_holds(problem)
    for device, limit in enumerate(problem.device_memory):
        mine = [hold for hold in found if hold.device == device]
        largest = max([hold.amount for hold in mine], default=0.0)
        if limit is None or not mine or limit > TUNING.max_held * largest:
            limits.append(None)
            continue
        exact = _memory_scale([hold.amount for hold in mine], limit)
        scale = exact or Fraction(TUNING.max_memory / max(largest, limit))
        is_exact &= exact is not None
        for hold in mine:
            product = Fraction(hold.amount) * scale
            amount = round(product) if exact else math.ceil(product) if up else math.floor(product)
            holds.append(Hold(device=device, take=hold.take, release=hold.release, amount=amount))
        room = Fraction(limit * (1 + TOLERANCE)) * scale
        limits.append(math.floor(room) if up or exact else math.ceil(room))
    return tuple(holds), tuple(limits), is_exact


def _whole_host(problem: ScheduleProblem, *, up: bool) -> HostMemory | None:
    """Return the host's memory in whole numbers, None where it has no limit that matters."""
    limit, amounts = problem.host_memory, [problem.host_amount(copy) for copy in range(len(problem.copies))]
    if limit is None or not amounts or limit > TUNING.max_held * max(amounts):
        return None
    exact = _memory_scale(amounts, limit)
    scale = exact or Fraction(TUNING.max_memory / max(*amounts, limit))
    products = [Fraction(amount) * scale for amount in amounts]
    room = Fraction(limit * (1 + TOLERANCE)) * scale
    return HostMemory(is_exact=exact is not None, limit=math.floor(room) if up or exact else math.ceil(room),
                      amounts=tuple(round(item) if exact else math.ceil(item) if up else math.floor(item)
                                    for item in products))


def _memory_scale(amounts: list[float], limit: float) -> Fraction | None:
    """Return the factor that makes all amounts whole, but for rounding of real numbers; None if it would be huge."""
    largest = max(amounts)
    ratios = [Fraction(amount / largest).limit_denominator(1000) for amount in amounts]
    is_near = all(abs(float(ratio) * largest - amount) <= 1e-12 * amount
                  for ratio, amount in zip(ratios, amounts, strict=True))
    near = Fraction(math.lcm(*(ratio.denominator for ratio in ratios))) / Fraction(largest) if is_near else None
    for scale in (_common_scale(amounts), near):
        if scale is not None and max(largest, limit) * scale <= TUNING.max_memory:
            return scale
    return None


def _round(value: float, scale: Fraction, *, up: bool) -> int:
    product = Fraction(repr(float(value))) * scale
    return math.ceil(product) if up else math.floor(product)
