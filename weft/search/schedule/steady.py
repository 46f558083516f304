"""The steady state: the smallest period in which every block runs once for each of K micro-batches.

Modulo scheduling. For a trial period P (ticks), every task i of each of the K micro-batches has

    start(i, k) = offset(i, k) + P * lap(i, k)          0 <= offset < P

    start(j, k) >= start(i, k) + time(i) + delay                        for every edge i -> j            (_add_edges)
    on every resource, offsets do not overlap, round the clock of P                                      (_add_resource)
    what a device holds when x starts = sum over holds (take a, release b) on it of
        amount * (lap(b) - lap(a) + [a is not after x] - [b is before x])   <=  limit                    (_add_memory)
    sum over holds of amount * (end of b - start of a)  <=  limit * P      (implied; makes proofs quick) (_add_memory)

Micro-batches are interchangeable, so copies of one task are in order of k and within one period of each other. A period
is feasible if a smaller one is (stretch time), so the smallest is found by bisection; every solution found is tightened
to the smallest period of its own cyclic order (``tighten``), in real time at the end.

No period is smaller, per micro-batch and for any K, than the work of the busiest resource, nor than what memory admits:
(sum of amount x shortest possible time held) / limit, on every device (``period_bound``).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64
from weft.search.cpsat import Budget, solve
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.cyclic import real_clock, tighten
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule
from weft.search.schedule.whole import WholeProblem, to_whole

MAX_MICROBATCHES: Final = 4
"""Micro-batches per period that are tried."""
QUICK_UNITS: Final = 0.5
"""Deterministic time for one trial period."""


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """A pattern that can repeat for ever: task i of micro-batch k + K m starts at ``starts[i, k] + m * period``."""

    problem: ScheduleProblem
    starts: F64
    """[tasks, K], the earliest is 0."""
    period: float
    bound: float
    """No steady state takes less per micro-batch."""
    proven: tuple[int, ...] = ()
    """The K for which no smaller period exists on the solver's grid, by exhaustive search."""

    @property
    def num_microbatches(self) -> int:
        """Return K."""
        return int(self.starts.shape[1])

    @property
    def rate(self) -> float:
        """Return the time per micro-batch."""
        return self.period / self.num_microbatches

    @property
    def is_optimal(self) -> bool:
        """Return whether the bound is met."""
        return self.rate <= self.bound * (1 + 1e-9)

    def unroll(self, num_microbatches: int) -> Schedule:
        """Return the schedule that repeats the pattern from the first micro-batch to the last."""
        laps, copies = np.divmod(np.arange(num_microbatches), self.num_microbatches)
        starts = self.starts[:, copies] + laps * self.period
        return Schedule(problem=self.problem, starts=starts - starts.min())


def find_steady_state(problem: ScheduleProblem, *, budget: Budget, seed: int = 0,
                      max_microbatches: int = MAX_MICROBATCHES) -> SteadyState | None:
    """Return the steady state of smallest period per micro-batch that was found; None if memory admits none at all.

    First the bound is tried for each K, since meeting it ends the search; then each K is bisected between its bound and
    the best found so far.
    """
    bound = period_bound(problem)
    if bound is None:
        return None
    search = _Search(to_whole(problem), bound, budget, seed)
    for number in range(1, max_microbatches + 1):
        if search.has_time and not search.is_done:
            search.try_bound(number)
    for number in range(1, max_microbatches + 1):
        if not search.is_done and (search.has_time or search.best is None):
            search.bisect(number)
    if search.best is None:
        return None
    return replace(search.best, proven=tuple(sorted(search.proven)))


class _Search:
    """The best steady state so far, and what is known to be impossible for each K."""

    def __init__(self, whole: WholeProblem, bound: float, budget: Budget, seed: int) -> None:
        self.whole, self.bound, self.budget, self.seed = whole, bound, budget, seed
        self.best: SteadyState | None = None
        self.lowest: dict[int, int] = {}
        """Smallest period (ticks) not yet excluded, by K."""
        self.proven: set[int] = set()

    @property
    def has_time(self) -> bool:
        return not self.budget.is_spent

    @property
    def is_done(self) -> bool:
        return self.best is not None and self.best.is_optimal

    def try_bound(self, number: int) -> None:
        """Try the smallest period that the bound admits for K = ``number``."""
        period = self._least(number)
        if self._is_useful(period, number):
            self._try(period, number)

    def bisect(self, number: int) -> None:
        """Bisect between what is excluded and what is known for K = ``number``."""
        low, high = self._least(number), None
        unknown = 0
        period = self.lowest.get(number, low)
        while self.has_time or self.best is None:
            if not self._is_useful(period, number):
                high = period
                period = (low + high) // 2
                if low >= high:
                    break
                continue
            found = self._try(period, number)
            if found is not None:
                high = math.floor(found.period * float(self.whole.ticks) + 1e-6)
            else:
                low = period + 1
                unknown += self.lowest.get(number, 0) <= period
            if self.is_done or (high is not None and low >= high) or unknown > 3:
                break
            period = math.ceil(period * 1.25) if high is None else (low + high) // 2
        if high is not None and self.lowest.get(number, 0) >= high:
            self.proven.add(number)

    def _least(self, number: int) -> int:
        """Return the bound for K = ``number`` in ticks, of the rounded times."""
        rounded = max((sum(self.whole.times[task] for task in tasks)
                       for tasks in self.whole.problem.resource_tasks), default=0) * number
        return max(1, rounded, math.ceil(self.bound * float(self.whole.ticks) * number - 1e-6))

    def _is_useful(self, period: int, number: int) -> bool:
        """Return whether such a period would be better than the best so far."""
        return self.best is None or period < self.best.rate * number * float(self.whole.ticks) * (1 - 1e-9)

    def _try(self, period: int, number: int) -> SteadyState | None:
        """Return the tightened steady state of this period, if there is one and the solver finds it."""
        ticks = float(self.whole.ticks)
        best = f"{self.best.rate:.6g}" if self.best is not None else "none yet"
        self.budget.report(f"steady state: {number} per period, trying {period / ticks:.6g}; best {best} per "
                           f"micro-batch, bound {self.bound:.6g}")
        model = _build(self.whole, period, number)
        limit = QUICK_UNITS if self.has_time else 10 * QUICK_UNITS
        solution = solve(model.model, self.budget, units=limit, seed=self.seed)
        if not solution.has_values:
            if solution.status == "infeasible":
                self.lowest[number] = max(self.lowest.get(number, 0), period + 1)
            return None
        starts = np.asarray([[solution.value(model.starts[task, k]) for k in range(number)]
                             for task in range(self.whole.num_tasks)], dtype=np.float64)
        found = make_steady(self.whole, starts, float(period), self.bound)
        if self.best is None or found.rate < self.best.rate * (1 - 1e-12):
            self.best = found
        return found


def make_steady(whole: WholeProblem, starts: F64, period: float, bound: float) -> SteadyState:
    """Return the steady state with the cyclic order of these starts (in ticks), tightened in real time."""
    problem = whole.problem
    tight = tighten(real_clock(problem), starts, period)
    return SteadyState(problem=problem, starts=tight.starts - tight.starts.min(), period=tight.period, bound=bound)


@dataclass(frozen=True, kw_only=True)
class _Model:
    model: cp_model.CpModel
    starts: dict[tuple[int, int], cp_model.LinearExprT]


class _Builder:
    """Variables and constraints of one trial period; see the module's docstring."""

    def __init__(self, whole: WholeProblem, period: int, number: int) -> None:
        self.whole, self.period, self.number = whole, period, number
        self.model = cp_model.CpModel()
        longest = max((whole.times[a] + delay for a, _, delay in whole.edges), default=0)
        # Tasks further apart than this could be moved together by whole periods without harm.
        max_lap = whole.num_tasks * number * (1 + longest // period) + 2
        self.offset = {key: self.model.new_int_var(0, period - 1, "") for key in self._keys()}
        self.lap = {key: self.model.new_int_var(0, max_lap, "") for key in self._keys()}
        self.start = {key: self.offset[key] + period * self.lap[key] for key in self._keys()}
        self.before: dict[tuple[tuple[int, int], tuple[int, int]], cp_model.LiteralT] = {}

    def _keys(self) -> list[tuple[int, int]]:
        return list(itertools.product(range(self.whole.num_tasks), range(self.number)))

    def build(self) -> _Model:
        first = self.whole.problem.topological[0]
        self.model.add(self.offset[first, 0] == 0)
        self._add_edges()
        self._add_order_of_copies()
        self._add_lags()
        for resource, tasks in enumerate(self.whole.problem.resource_tasks):
            keys = list(itertools.product(tasks, range(self.number)))
            self._add_resource(keys)
            if resource < self.whole.problem.num_devices and self.whole.limits[resource] is not None:
                self._add_memory(resource, keys)
        return _Model(model=self.model, starts=dict(self.start))

    def _add_edges(self) -> None:
        for (source, target, delay), k in itertools.product(self.whole.edges, range(self.number)):
            self.model.add(self.start[target, k] >= self.start[source, k] + self.whole.times[source] + delay)

    def _add_order_of_copies(self) -> None:
        for task in range(self.whole.num_tasks) if self.number > 1 else ():
            time = self.whole.times[task]
            for k in range(self.number - 1):
                self.model.add(self.start[task, k + 1] >= self.start[task, k] + time)
            self.model.add(self.start[task, 0] + self.period >= self.start[task, self.number - 1] + time)

    def _add_resource(self, keys: list[tuple[int, int]]) -> None:
        """Forbid overlap round the clock: by a literal for each pair, which memory uses too, and as a whole."""
        times, model = self.whole.times, self.model
        for one, other in itertools.combinations(keys, 2):
            literal = self.before.get((one, other))
            if literal is not None:
                continue
            literal = model.new_bool_var("")
            self.before[one, other], self.before[other, one] = literal, ~literal
            for early, late, holds in ((one, other, literal), (other, one, ~literal)):
                model.add(self.offset[late] >= self.offset[early] + times[early[0]]).only_enforce_if(holds)
                model.add(self.offset[early] + self.period >= self.offset[late] + times[late[0]]).only_enforce_if(holds)
        model.add_no_overlap([model.new_fixed_size_interval_var(self.offset[key] + lap * self.period, times[key[0]], "")
                              for key in keys for lap in range(2)])

    def _add_memory(self, device: int, keys: list[tuple[int, int]]) -> None:
        limit = self.whole.limits[device]
        assert limit is not None
        holds = [hold for hold in self.whole.holds if hold.device == device]
        amounts: dict[int, int] = {}
        for hold in holds:
            assert hold.take is not None, "period_bound refuses what is not balanced"
            assert hold.release is not None
            amounts[hold.take] = amounts.get(hold.take, 0) + hold.amount
            amounts[hold.release] = amounts.get(hold.release, 0) - hold.amount
        changing = [key for key in keys if amounts.get(key[0])]
        base = sum(-amounts[key[0]] * self.lap[key] for key in changing)
        for key in changing:
            if amounts[key[0]] > 0:
                earlier = sum(amounts[other[0]] * self.before[other, key] for other in changing if other != key)
                self.model.add(base + amounts[key[0]] + earlier <= limit)
        held = sum(hold.amount * (self.start[hold.release, k] + self.whole.times[hold.release]
                                  - self.start[hold.take, k])
                   for hold in holds for k in range(self.number)
                   if hold.take is not None and hold.release is not None)
        self.model.add(held <= limit * self.period)

    def _add_lags(self) -> None:
        """Add what follows from the edges: a hold is at least as long as the longest path from take to release."""
        pairs = sorted({(hold.take, hold.release) for hold in self.whole.holds
                        if hold.take is not None and hold.release is not None})
        for take, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            lags = self.whole.lags_from(take)
            for (_, release), k in itertools.product(group, range(self.number)):
                lag = lags[release]
                assert lag is not None, "a release depends on its take"
                self.model.add(self.start[release, k] >= self.start[take, k] + lag)


def _build(whole: WholeProblem, period: int, number: int) -> _Model:
    return _Builder(whole, period, number).build()
