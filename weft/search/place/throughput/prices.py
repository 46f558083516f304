"""A lower bound on the largest load by prices of units: some device has its share of all prices, and the cheapest set
of units with so much is a bound.

Let the units have any prices, of P in all, and let class c have n[c] devices that may be exchanged. Of a value T, let
g[c](T) be the most that a set of units is worth which a device of class c can run within T, with what it pays for the
tensors that the set parts. All units must be somewhere, so

    T is impossible if   sum_c n[c] g[c](T) < P                                              (``_least_value``)

``sets.SetSolver`` gives g for all T at once, exactly where the graph is narrow, else from above. Prices are whole
numbers there, so nothing is rounded. With times as prices this is the bound by work with what the fullest device pays;
the best prices are the dual of covering the units with sets within T, where sets may be taken in fractions:

    minimise   sum_c n[c] a[c]   over prices p >= 0 of 1 in all, a                           (``_Prices.next_trial``)
               a[c] >= sum of p over S,  for the sets S found so far that cost at most T on class c
               (1 - r) p' <= p <= (1 + r) p' + a little,  p' being the best prices so far

Each trial gives a bound of its own, and sets that were missing. The radius r grows where a trial was better, and
shrinks where not; where it is small, prices get finer whole numbers, and then T, which lies between the bound and what
may still be hoped for, becomes smaller.

Memory is left out: sets may hold more than a device has room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.place.throughput.model import LoadProblem
from weft.search.place.throughput.sets import Bools, Found, SetSolver

RESOLUTIONS: Final = (1000, 4000, 16_000)
"""What a device's share of all prices is in whole numbers, in turn."""
MOST_CELLS: Final = 30_000_000
"""Of a table of states and prices: some 30 MB."""
SECONDS_PER_CELL: Final = 2.5e-9
SECONDS_PER_PIVOT: Final = 6e-8
"""CPU seconds of the simplex method for each of its steps, and each row and column."""
NUM_SETS: Final = 60
"""That are kept of a trial, for each class."""
MOST_SETS: Final = 1500
"""That the linear program has for each class; a third goes where there are more."""
NEAR: Final = 0.9
"""Sets that are worth less than this part of the best are not kept."""
RADIUS, LEAST_RADIUS, NEW_RADIUS = 0.3, 0.002, 0.02
WIDER, NARROWER = 1.5, 0.7
FINER: Final = 1e-5
"""Of all prices: less is no improvement."""
AT_ONCE: Final = 0.2
"""Part of an average price by which any price may rise, times the radius: so prices of 0 need not stay so."""
PROVEN: Final = 1e-8
"""Relative: nothing is to be gained beyond a bound so close to the limit."""
CLOSE: Final = 1e-4
"""Relative: what may be hoped for is no further above the bound: the search is done."""
SAFE: Final = 1 - 1e-9
"""For rounding of sums."""
SHARE_SLACK: Final = 1.5
"""What sets are worth is looked at up to so many times a device's share of all work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Prices, and what follows from them."""

    price: F64
    """[n], of 1 in all."""
    bound: float
    reached: tuple[tuple[F64, int], ...]
    """Least costs by worth, and devices, of each class."""
    total: int
    """Of prices in whole numbers."""

    def excess(self, value: float) -> float:
        """Return how much more than all prices fits within the value, as a part; infinite if unknown."""
        worth = [_worth_within(cost_s, value) for cost_s, _ in self.reached]
        return sum(item * count for item, (_, count) in zip(worth, self.reached, strict=True)) / self.total - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The best bound by prices."""

    bound: float
    price: F64
    """[n] with which it was found."""
    is_exact: bool
    """No tensor was forgotten."""
    is_done: bool
    """More effort would find little more."""


def priced_bound(problem: LoadProblem, limit: float, *, low: float, budget: Budget, effort: float,
                 price: F64 | None = None) -> Priced | None:
    """Return the best bound found, true of all placements within the limit; None if there can be none.

    ``low`` is a bound that is known; ``price`` is where to begin.
    """
    a = problem.arrays
    if len(np.unique(a.core)) < problem.num_devices or not a.touch_s.any() or budget.is_spent:
        return None
    prices, least = _Prices(problem, limit, low), budget.effort - effort
    trial = prices.first() if price is None else price
    best = prices.judge(trial)
    budget.effort -= prices.making_s + prices.spent_s
    while not prices.is_done and budget.effort > max(least, 0.0) and not budget.is_spent:
        trial = prices.next_trial()
        budget.effort -= prices.spent_s
        made = prices.judge(trial)
        budget.effort -= prices.spent_s
        best = made if made.bound > best.bound else best
    return Priced(bound=best.bound, price=best.price, is_exact=all(solver.is_exact for solver in prices.solvers),
                  is_done=prices.is_done)


def _worth_within(cost_s: F64, value: float) -> float:
    """Return the most that a set within the value is worth; infinite where it is beyond what was looked at."""
    worth = int(np.searchsorted(cost_s, value, side="right")) - 1
    return worth if worth < len(cost_s) - 1 else math.inf


class _Prices:
    """The best prices so far, and the sets that say which may be better."""

    def __init__(self, problem: LoadProblem, limit: float, low: float) -> None:
        self.problem, self.limit, self.low = problem, limit, low
        _, first, counts = np.unique(problem.class_of_device, return_index=True, return_counts=True)
        self.counts = counts.tolist()
        self.solvers = [SetSolver(problem, device) for device in first.tolist()]
        times = problem.arrays.time_s[:, first]
        self.time_s = np.where(np.isfinite(times), times, times.min(axis=1, keepdims=True))
        speed = 1 / np.maximum(self.time_s.sum(axis=0), 1e-300)
        self.share = float((speed / (speed * counts).sum()).max())
        states = sum(solver.num_states for solver in self.solvers)
        self.making_s = 3e-5 * states
        self.resolutions = [item for item in RESOLUTIONS if item * states <= MOST_CELLS] or [MOST_CELLS // states]
        self.step, self.radius, self.top = 0, RADIUS, limit
        self.inside: list[Bools] = [np.zeros((0, problem.num_units), dtype=np.bool_) for _ in self.solvers]
        self.inside_s: list[F64] = [np.zeros(0) for _ in self.solvers]
        self.best: Trial | None = None
        self.spent_s = 0.0

    @property
    def is_done(self) -> bool:
        """Return whether nothing more may be hoped for."""
        is_met = self.low >= self.limit * (1 - PROVEN)
        return is_met or (self.top < self.limit and self.top - self.low <= CLOSE * self.limit)

    @property
    def target(self) -> float:
        """Return the value that is to be shown impossible."""
        return (self.low + self.top) / 2

    def first(self) -> F64:
        """Return times as prices."""
        time_s = self.time_s[:, int(np.argmax(self.counts))] + 1e-300
        return np.asarray(time_s / time_s.sum(), dtype=np.float64)

    def judge(self, price: F64) -> Trial:
        """Return what follows from the prices, keep the sets found, and go on from there if they are better."""
        resolution = self.resolutions[self.step]
        worth = np.round(price * (resolution / self.share)).astype(np.int64)
        total = max(1, int(worth.sum()))
        most = min(total, math.ceil(total * self.share * SHARE_SLACK))
        found = [solver.solve(worth, most, self.target, NUM_SETS) for solver in self.solvers]
        reached = tuple((item.cost_s, count) for item, count in zip(found, self.counts, strict=True))
        trial = Trial(price=price, reached=reached, total=total,
                      bound=min(self.limit, SAFE * _least_value(reached, total)))
        self.spent_s = SECONDS_PER_CELL * most * sum(solver.num_states for solver in self.solvers)
        self.low = max(self.low, trial.bound)
        for index, item in enumerate(found):
            self._keep(index, item, worth)
        self._move(trial)
        return trial

    def _keep(self, index: int, found: Found, worth: I64) -> None:
        """Keep what is worth nearly as much as anything."""
        values = found.inside @ worth
        is_good = values >= NEAR * values.max(initial=1)
        self.inside[index] = np.concatenate([self.inside[index], found.inside[is_good]])
        self.inside_s[index] = np.concatenate([self.inside_s[index], found.inside_s[is_good]])

    def _move(self, trial: Trial) -> None:
        """Go on from the trial if it is better, with a larger radius; else with a smaller one."""
        if self.best is None or self._is_better(trial, self.best):
            self.best, self.radius = trial, min(1.0, self.radius * WIDER)
            return
        self.radius *= NARROWER
        if self.radius >= LEAST_RADIUS:
            return
        self.radius = NEW_RADIUS
        if self.step + 1 < len(self.resolutions):
            self.step += 1
        else:
            self.top = self.target

    def _is_better(self, trial: Trial, other: Trial) -> bool:
        """Return whether less of the prices fits within the target; where too much does of both, by the bounds."""
        excess, known = trial.excess(self.target), other.excess(self.target)
        return excess < known - FINER if math.isfinite(min(excess, known)) else trial.bound > other.bound

    def next_trial(self) -> F64:
        """Return prices that would be better if there were no other sets, near the best."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        assert self.best is not None, "something was judged before"
        center, count, classes = self.best.price, self.problem.num_units, len(self.solvers)
        rows = []
        for index in range(classes):
            self._forget(index, center)
            is_within = self.inside_s[index] <= self.target
            share = np.zeros((int(is_within.sum()), classes))
            share[:, index] = -1
            rows.append(np.hstack([self.inside[index][is_within], share]))
        matrix = csr_matrix(np.concatenate(rows))
        cost = np.concatenate([np.zeros(count), self.counts])
        lower, upper = (1 - self.radius) * center, (1 + self.radius) * center + self.radius * AT_ONCE / count
        bounds = np.stack([np.concatenate([lower, np.zeros(classes)]),
                           np.concatenate([upper, np.full(classes, np.inf)])], axis=1)
        sums = csr_matrix(np.concatenate([np.ones(count), np.zeros(classes)])[None, :])
        found = linprog(cost, A_ub=matrix, b_ub=np.zeros(matrix.shape[0]), A_eq=sums, b_eq=[1.0], bounds=bounds,
                        method="highs")
        self.spent_s = 0.005 + SECONDS_PER_PIVOT * int(found.nit) * sum(matrix.shape)
        if found.status != 0:
            return center
        price = np.maximum(found.x[:count], 0.0)
        return np.asarray(price / price.sum(), dtype=np.float64)

    def _forget(self, index: int, price: F64) -> None:
        """Keep no more sets than the linear program should have: those worth most."""
        if len(self.inside[index]) > MOST_SETS:
            kept = np.argsort(-(self.inside[index] @ price), kind="stable")[: MOST_SETS * 2 // 3]
            self.inside[index], self.inside_s[index] = self.inside[index][kept], self.inside_s[index][kept]


def _least_value(reached: tuple[tuple[F64, int], ...], total: int) -> float:
    """Return the least value at which all devices together may have all prices."""
    values = np.unique(np.concatenate([cost_s for cost_s, _ in reached]))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        worth = [_worth_within(cost_s, float(values[middle])) * count for cost_s, count in reached]
        low, high = (low, middle) if sum(worth) >= total else (middle + 1, high)
    return float(values[low])
