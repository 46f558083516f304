"""The smallest period of a cyclic order: every resource keeps its order of tasks, round the clock; only times move.

With the order fixed, all constraints are ``start(j) >= start(i) + length - P * laps``; the smallest P is the largest
ratio length / laps over all cycles. Starting from a P that is too small, a cycle that is violated gives the next P
(Lawler's method); it ends at the exact ratio of the critical cycle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.schedule.pairs import find_pairs, least_work
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.whole import WholeProblem

Clock = ScheduleProblem | WholeProblem
"""A problem in real time or in ticks."""
Key = tuple[int, int]
"""(task, copy)"""
ROUNDING: Final = 1e-13
"""Relative to the period: smaller differences between times are rounding."""


class NoPeriod(ArithmeticError):  # noqa: N818 - it says what was found
    """Starts whose laps were lost in rounding, as with times of 1e-9 beside 1e9: no period satisfies their order, or
    none so short as was asked."""


@dataclass(frozen=True, kw_only=True)
class Tight:
    """The result: starts by task and copy, and the period."""

    starts: F64
    period: float


def tighten(clock: Clock, starts: F64, period: float, *, whole: bool = False, most: float = math.inf) -> Tight:
    """Return the smallest period of the cyclic order that ``starts`` [tasks, K] have at ``period``, and its starts.

    ``starts`` may be in other units than the clock's times: only their order and laps count. ``whole`` rounds the
    period up to a whole number. Raise ``NoPeriod`` where rounding has lost the order, or the period is above ``most``.
    """
    times: Sequence[float] = clock.task_times if isinstance(clock, ScheduleProblem) else clock.times
    system = _build_system(clock, times, starts, period)
    work: Sequence[float] = least_work(clock) if isinstance(clock, ScheduleProblem) else clock.work
    trial = max(work, default=0.0) * starts.shape[1]
    if trial > most or (most < math.inf and _longest_paths(system, starts.size, most)[1] is not None):
        raise NoPeriod("the smallest period is longer than asked")
    while True:
        potential, cycle = _longest_paths(system, starts.size, trial)
        if cycle is None and whole and trial != math.ceil(trial - 1e-9):
            trial = float(math.ceil(trial - 1e-9))
            continue
        if cycle is None:
            return Tight(starts=potential.reshape(starts.shape), period=trial)
        laps, length = int(system.laps[cycle].sum()), float(system.lengths[cycle].sum())
        if laps <= 0:
            raise NoPeriod("a cycle that no period satisfies cannot come from a schedule")
        assert length / laps > trial, "the cycle was violated"
        trial = length / laps


@dataclass(frozen=True, kw_only=True)
class _System:
    sources: I64
    targets: I64
    lengths: F64
    laps: I64


def _build_system(clock: Clock, times: Sequence[float], starts: F64, period: float) -> _System:
    num_copies = starts.shape[1]
    lap = np.floor(starts / period + 1e-9) if period > 0 else np.zeros_like(starts)
    offsets = starts - lap * period
    partner, lengths = _partners(clock, offsets, period)
    rows: list[tuple[int, int, float, int]] = []

    def add(source: Key, target: Key, length: float, wraps: int) -> None:
        rows.append((source[0] * num_copies + source[1], target[0] * num_copies + target[1], length,
                     int(lap[source] - lap[target]) + wraps))

    for source, target, delay in clock.edges:
        for k in range(num_copies):
            length = lengths.get((source, k), times[source]) + delay
            rows.append((source * num_copies + k, target * num_copies + k, length, 0))
    place = _places(offsets, period)
    for tasks in clock.resource_tasks:
        # What takes no time comes before what starts with it.
        keys = sorted(itertools.product(tasks, range(num_copies)),
                      key=lambda key: (place[key], times[key[0]], key))
        groups = [(key, partner[key]) if key in partner else (key,) for key in keys
                  if key not in partner or key < partner[key]]
        for group, others in itertools.pairwise([*groups, groups[0]] if groups else []):
            for one, other in itertools.product(group, others):
                add(one, other, lengths.get(one, times[one[0]]), 1 if others == groups[0] else 0)
            if len(group) == 2:
                add(*group, 0.0, 0)
                add(*group[::-1], 0.0, 0)
    columns = list(zip(*rows, strict=True))
    return _System(sources=np.asarray(columns[0]), targets=np.asarray(columns[1]),
                   lengths=np.asarray(columns[2], dtype=np.float64), laps=np.asarray(columns[3]))


def _partners(clock: Clock, offsets: F64, period: float) -> tuple[dict[Key, Key], dict[Key, float]]:
    """Return the other block of every pair, and how long the blocks of pairs take."""
    problem = clock if isinstance(clock, ScheduleProblem) else clock.problem
    pairs = find_pairs(problem, offsets, 1e-9 * period) if problem.overlaps else ()
    partner = {item: other for one, two in pairs for item, other in ((one, two), (two, one))}
    return partner, {item: clock.joint[item[0], other[0]] for item, other in partner.items()}


def _places(offsets: F64, period: float) -> I64:
    """Return for every offset its place among all, the same for those that differ by rounding alone."""
    order = np.argsort(offsets, axis=None, kind="stable")
    steps = np.diff(offsets.ravel()[order], prepend=offsets.min(initial=0.0)) > ROUNDING * period
    places = np.empty(offsets.size, dtype=np.int64)
    places[order] = np.cumsum(steps)
    return places.reshape(offsets.shape)


def _longest_paths(system: _System, num: int, period: float) -> tuple[F64, list[int] | None]:
    """Return the longest paths from anywhere, and a cycle (edge indices) of positive length if there is one."""
    weights = system.lengths - period * system.laps
    largest = system.lengths.max(initial=0.0) + period * np.abs(system.laps).max(initial=0)
    tolerance = ROUNDING * float(largest) * (num + 1)
    potential, through = np.zeros(num), np.full(num, -1)
    for _ in range(num + 1):
        reached = potential[system.sources] + weights
        order = np.argsort(reached, kind="stable")
        best = np.full(num, -np.inf)
        edge = np.full(num, -1)
        best[system.targets[order]] = reached[order]
        edge[system.targets[order]] = order
        better = best > potential + tolerance
        if not better.any():
            return potential, None
        potential = np.where(better, best, potential)
        through = np.where(better, edge, through)
        cycle = _find_cycle(system, through)
        if cycle is not None and weights[cycle].sum() > tolerance:
            return potential, cycle
    raise AssertionError("longest paths without a cycle end after one round for each task")


def _find_cycle(system: _System, through: I64) -> list[int] | None:
    """Return the edges of a cycle among the last improving edges, if there is one."""
    state = np.zeros(len(through), dtype=np.int8)
    for begin in np.flatnonzero(through >= 0).tolist():
        path: list[int] = []
        node = begin
        while state[node] == 0 and through[node] >= 0:
            state[node] = 1
            path.append(node)
            node = int(system.sources[through[node]])
        if state[node] == 1 and node in path:
            return [int(through[item]) for item in path[path.index(node):]]
        state[path] = 2
    return None
