"""The problem in whole numbers, which is what the constraint solver wants; and schedules back in real time.

Decimal times with a small common denominator are scaled exactly. Others are rounded *up* to a grid of ``RESOLUTION``
ticks per busiest device and micro-batch: the orders found there are played back in real time, so rounding costs quality
of the order only, never correctness. For lower bounds times and memory are rounded *down* instead (limits up): what is
impossible then is impossible in real time, since a real schedule with shorter durations can be shifted onto the grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from weft.model.graph import F64
from weft.search.schedule.holds import find_holds
from weft.search.schedule.problem import ScheduleProblem, turned_round
from weft.search.schedule.schedule import TOLERANCE, Schedule, replay

Rounding = Literal["up", "down"]

RESOLUTION: Final = 240
"""Ticks per busiest device and micro-batch where times have no small common denominator."""
MAX_EXACT: Final = 2_000
"""Exact scaling is used up to so many ticks: finer grids make the solver many times slower."""
MAX_DELAY: Final = 1_000_000
"""No delay takes more ticks; beside a longer one, blocks are short, and so are their ticks."""
MAX_MEMORY: Final = 1 << 30
"""Amounts and limits of memory are scaled to at most this."""
MAX_HELD: Final = 1_000_000
"""A limit that is more than so many times the largest amount is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeHold:
    """A hold (see ``weft.search.schedule.holds``) with a whole amount."""

    device: int
    take: int | None
    release: int | None
    amount: int


@dataclass(frozen=True, kw_only=True)
class WholeProblem:
    """Whole times and amounts of a problem, by task."""

    problem: ScheduleProblem
    """The problem itself, in real numbers."""
    times: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]
    """(source, target, delay)"""
    holds: tuple[WholeHold, ...]
    limits: tuple[int | None, ...]
    """Memory of each device."""
    ticks: Fraction
    """Ticks in one unit of time."""
    is_exact: bool
    """Nothing was rounded, neither times nor memory."""

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return len(self.times)

    @property
    def balanced(self) -> frozenset[int]:
        """Return the devices on which every take is matched with a release."""
        loose = {hold.device for hold in self.holds if hold.take is None or hold.release is None}
        return frozenset(hold.device for hold in self.holds if hold.device not in loose)

    @property
    def resource_tasks(self) -> tuple[tuple[int, ...], ...]:
        """Return the tasks of each resource."""
        return self.problem.resource_tasks

    def to_real(self, starts: F64) -> Schedule:
        """Return the schedule in real time with the orders of these starts (in ticks)."""
        scaled = Schedule(problem=self.problem, starts=starts / float(self.ticks))
        return scaled if self.is_exact else replay(self.problem, scaled.num_microbatches, scaled.orders())

    def heads(self) -> list[int]:
        """Return the earliest start of each task in a micro-batch alone."""
        result = [0] * self.num_tasks
        incoming = _grouped(self.edges, 1, self.num_tasks)
        for task in self.problem.topological:
            for source, _, delay in incoming[task]:
                result[task] = max(result[task], result[source] + self.times[source] + delay)
        return result

    def tails(self) -> list[int]:
        """Return the least time from the end of each task to the end of its micro-batch."""
        result = [0] * self.num_tasks
        outgoing = _grouped(self.edges, 0, self.num_tasks)
        for task in reversed(self.problem.topological):
            for _, target, delay in outgoing[task]:
                result[task] = max(result[task], delay + self.times[target] + result[target])
        return result

    def lags_from(self, task: int) -> list[int | None]:
        """Return the least time from the start of ``task`` to the start of every task; None where it need not wait."""
        result: list[int | None] = [None] * self.num_tasks
        result[task] = 0
        outgoing = _grouped(self.edges, 0, self.num_tasks)
        for source in self.problem.topological:
            begin = result[source]
            if begin is not None:
                for _, target, delay in outgoing[source]:
                    known = result[target]
                    result[target] = max(begin + self.times[source] + delay, known if known is not None else 0)
        return result

    def reversed(self) -> WholeProblem:
        """Return the problem backwards in time: takes become releases, so that cool-downs become warm-ups."""
        from dataclasses import replace

        mirror = turned_round(self.problem)
        return WholeProblem(
            problem=mirror, times=self.times, edges=tuple((b, a, delay) for a, b, delay in self.edges),
            holds=tuple(replace(hold, take=hold.release, release=hold.take) for hold in self.holds),
            limits=self.limits, ticks=self.ticks, is_exact=self.is_exact)


def _grouped(edges: tuple[tuple[int, int, int], ...], key: int, num_tasks: int) -> list[list[tuple[int, int, int]]]:
    result: list[list[tuple[int, int, int]]] = [[] for _ in range(num_tasks)]
    for edge in edges:
        result[edge[key]].append(edge)
    return result


def to_whole(problem: ScheduleProblem, *, rounding: Rounding = "up", max_exact: int = MAX_EXACT,
             resolution: int = RESOLUTION) -> WholeProblem:
    """Return the problem in ticks: exactly where that takes at most ``max_exact`` ticks, else rounded."""
    work = max(*problem.device_work, 1e-300)
    longest = max((edge.delay for edge in problem.edges), default=0.0)
    scale = _common_scale([*problem.task_times, *(item.time for item in problem.transfers)])
    is_exact = scale is not None and work * scale <= max_exact and longest * scale <= MAX_DELAY
    if scale is None or not is_exact:
        scale = min(Fraction(resolution) / Fraction(work), Fraction(MAX_DELAY) / Fraction(max(longest, 1e-300)))
    up = rounding == "up"
    holds, limits, exact_memory = _whole_memory(problem, up=up)
    return WholeProblem(
        problem=problem, times=tuple(_round(time, scale, up=up) for time in problem.task_times),
        edges=tuple((edge.source, edge.target, _round(edge.delay, scale, up=up)) for edge in problem.edges),
        holds=holds, limits=limits, ticks=scale, is_exact=is_exact and exact_memory)


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


def _whole_memory(problem: ScheduleProblem, *, up: bool) -> tuple[tuple[WholeHold, ...], tuple[int | None, ...], bool]:
    """Return holds and limits in whole numbers, each device in its own units, and whether nothing was rounded.

    Limits are a little larger by as much as ``check_schedule`` forgives.
    """
    holds: list[WholeHold] = []
    limits: list[int | None] = []
    is_exact = True
    found = find_holds(problem)
    for device, limit in enumerate(problem.device_memory):
        mine = [hold for hold in found if hold.device == device]
        largest = max([hold.amount for hold in mine], default=0.0)
        if limit is None or not mine or limit > MAX_HELD * largest:
            limits.append(None)
            continue
        exact = _memory_scale([hold.amount for hold in mine], limit)
        scale = exact or Fraction(MAX_MEMORY / max(largest, limit))
        is_exact &= exact is not None
        for hold in mine:
            product = Fraction(hold.amount) * scale
            amount = round(product) if exact else math.ceil(product) if up else math.floor(product)
            holds.append(WholeHold(device=device, take=hold.take, release=hold.release, amount=amount))
        room = Fraction(limit * (1 + TOLERANCE)) * scale
        limits.append(math.floor(room) if up or exact else math.ceil(room))
    return tuple(holds), tuple(limits), is_exact


def _memory_scale(amounts: list[float], limit: float) -> Fraction | None:
    """Return the factor that makes all amounts whole, but for rounding of real numbers; None if it would be huge."""
    largest = max(amounts)
    ratios = [Fraction(amount / largest).limit_denominator(1000) for amount in amounts]
    is_near = all(abs(float(ratio) * largest - amount) <= 1e-12 * amount
                  for ratio, amount in zip(ratios, amounts, strict=True))
    near = Fraction(math.lcm(*(ratio.denominator for ratio in ratios))) / Fraction(largest) if is_near else None
    for scale in (_common_scale(amounts), near):
        if scale is not None and max(largest, limit) * scale <= MAX_MEMORY:
            return scale
    return None


def _round(value: float, scale: Fraction, *, up: bool) -> int:
    product = Fraction(repr(float(value))) * scale
    return math.ceil(product) if up else math.floor(product)
