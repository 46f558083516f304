"""Lower bounds on the largest load, from work alone and from what one of several equal devices must take.

Let K devices be interchangeable, and let W be the time of what they must take together, after the others took all they
can within the value T. Then

- the fullest of them takes at least W / K, and pays for what leaves and enters it (``_fullest``);
- each takes at least W - (K - 1) T, so each pays at least c = the least that such a set pays, and
  T >= W / K + c (``_everyone``);
- of n units that only they can run, one takes at least n / K (``_pigeonhole``).

The least that one device pays for such sets is a small problem of its own (``_OneDevice``), solved by CP-SAT.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.place.throughput_model import LoadProblem

RESOLUTION = float(1 << 27)
"""The known value in whole numbers."""


def average_bound(problem: LoadProblem) -> float:
    """Return a bound by work alone: units may be split among cores, transfers are free."""
    a = problem.arrays
    by_core = np.full((problem.num_units, a.num_cores), np.inf)
    for device, core in enumerate(a.core.tolist()):
        by_core[:, core] = np.minimum(by_core[:, core], a.time_s[:, device])
    single = float(by_core.min(axis=1).max(initial=0.0))
    return max(single, _split_bound(by_core))


def _split_bound(by_core: F64) -> float:
    """Return the value of the linear program that splits units; cores with equal times count as one.

    With any prices y of a core's time, of 1 in all, a unit costs at least its least time x price, and all units
    together cost at most the value. The program's duals are the best prices; what follows from them is a bound whatever
    the solver's tolerances, which matters where times differ by many powers of ten.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    kinds, counts = np.unique(by_core, axis=1, return_counts=True)
    num_units, num_kinds = kinds.shape
    rows, columns = np.nonzero(np.isfinite(kinds))
    largest = float(kinds[rows, columns].max(initial=0.0))
    if largest <= 0:
        return 0.0
    index = np.arange(len(rows))
    top = np.full(num_kinds, len(rows))
    upper = coo_matrix((np.concatenate([kinds[rows, columns] / largest, -counts.astype(np.float64)]),
                        (np.concatenate([columns, np.arange(num_kinds)]), np.concatenate([index, top]))),
                       shape=(num_kinds, len(rows) + 1))
    equal = coo_matrix((np.ones(len(rows)), (rows, index)), shape=(num_units, len(rows) + 1))
    cost = np.zeros(len(rows) + 1)
    cost[-1] = 1.0
    found = linprog(cost, A_ub=upper.tocsr(), b_ub=np.zeros(num_kinds), A_eq=equal.tocsr(), b_eq=np.ones(num_units),
                    method="highs")
    price = np.maximum(-found.ineqlin.marginals, 0.0) if found.status == 0 else np.zeros(num_kinds)
    if not counts @ price > 0:
        return 0.0
    costs = np.full(kinds.shape, np.inf)
    costs[rows, columns] = kinds[rows, columns] * (price / (counts @ price))[columns]
    return float(costs.min(axis=1).sum()) * (1 - 1e-12)


def shared_bound(problem: LoadProblem, limit: float, *, budget: Budget, effort: float, seed: int) -> float:
    """Return a bound on the value of all placements if it is at most the limit; the limit if there is no such one.

    It looks at the largest class of interchangeable devices; 0 if there is none with several.
    """
    labels, counts = np.unique(problem.class_of_device, return_counts=True)
    devices = np.flatnonzero(problem.class_of_device == labels[np.argmax(counts)])
    if len(devices) < 2 or len(np.unique(problem.arrays.core[devices])) < len(devices):
        return 0.0
    work = _Work(problem, devices, limit)
    single = _OneDevice(problem, int(devices[0]), limit, budget, effort / 2, seed)
    return min(limit, max(_everyone(work, single), _pigeonhole(work, single), _fullest(work, single)))


class _Work:
    """What the devices of one class must take together."""

    def __init__(self, problem: LoadProblem, devices: I64, limit: float) -> None:
        a = problem.arrays
        others = np.setdiff1d(np.arange(problem.num_devices), devices)
        self.limit, self.count = limit, len(devices)
        self.time_s = a.time_s[:, devices[0]]
        self.num_others = len(np.unique(a.core[others])) if len(others) else 0
        self.other_s = a.time_s[:, others].min(axis=1) if len(others) else np.full(problem.num_units, np.inf)

    def must_take(self, limit: float) -> float:
        """Return the least time on the class if the other cores take at most the limit each (units may be split)."""
        room = self.num_others * limit
        if np.isinf(self.time_s).any():
            is_own = np.isfinite(self.time_s)
            room = max(0.0, room - float(self.other_s[~is_own].sum()))
        else:
            is_own = np.ones(len(self.time_s), dtype=np.bool_)
        total = float(self.time_s[is_own].sum())
        can = np.flatnonzero(is_own & np.isfinite(self.other_s) & (self.time_s > 0))
        ratio = self.time_s[can] / np.maximum(self.other_s[can], 1e-300)
        for unit in can[np.argsort(-ratio, kind="stable")]:
            if self.other_s[unit] >= room:
                return total - float(self.time_s[unit]) * room / max(float(self.other_s[unit]), 1e-300)
            room -= float(self.other_s[unit])
            total -= float(self.time_s[unit])
        return total

    def least_value(self, paid: float) -> float:
        """Return the least T with T >= must_take(T) / K + paid."""
        low, high = 0.0, self.limit
        if self.must_take(high) / self.count + paid > high:
            return self.limit
        for _ in range(60):
            middle = (low + high) / 2
            is_enough = self.must_take(middle) / self.count + paid <= middle
            low, high = (low, middle) if is_enough else (middle, high)
        return low


class _OneDevice:
    """The least that one device of the class pays, for sets of units that are large enough."""

    def __init__(self, problem: LoadProblem, device: int, limit: float, budget: Budget, effort: float,
                 seed: int) -> None:
        self.problem, self.device, self.limit = problem, device, limit
        self.budget, self.effort, self.seed = budget, effort, seed
        self.scale = RESOLUTION / max(limit, 1e-300)

    def least(self, restrict: Callable[[cp_model.CpModel, list[cp_model.IntVar]], None], *, with_time: bool) -> float:
        """Return a bound on the load (or the communication alone) of a set within ``restrict``."""
        a, model = self.problem.arrays, cp_model.CpModel()
        x = [model.new_bool_var(f"x{unit}") for unit in range(self.problem.num_units)]
        for unit in np.flatnonzero(np.isinf(a.time_s[:, self.device])).tolist():
            model.add(x[unit] == 0)
        paid = []
        for tensor, owner in enumerate(a.owner.tolist()):
            amount = int(a.touch_s[tensor, self.device] * self.scale)
            if amount:
                touched = model.new_bool_var(f"y{tensor}")
                for reader in a.readers[a.reader_start[tensor] : a.reader_start[tensor + 1]].tolist():
                    model.add_bool_or([touched, x[owner].negated(), x[reader]])
                    model.add_bool_or([touched, x[owner], x[reader].negated()])
                paid.append(touched * amount)
        time_s = np.where(np.isinf(a.time_s[:, self.device]), 0.0, a.time_s[:, self.device])
        taken = sum(item * int(seconds * self.scale) for item, seconds in zip(x, time_s, strict=True))
        model.add(taken + sum(paid) <= int(RESOLUTION))
        restrict(model, x)
        model.minimize(taken + sum(paid) if with_time else sum(paid))
        found = solve(model, self.budget, effort=self.effort, seed=self.seed)
        if found.status == "infeasible":
            return self.limit
        return max(0.0, found.bound / self.scale) if found.bound is not None else 0.0

    def with_time_at_least(self, seconds: float, *, with_time: bool) -> float:
        """Return the least load or communication of a set that takes at least so much time."""
        times = self.problem.arrays.time_s[:, self.device].tolist()
        amounts = [0 if math.isinf(item) else math.ceil(item * self.scale) for item in times]

        def restrict(model: cp_model.CpModel, x: list[cp_model.IntVar]) -> None:
            model.add(sum(item * amount for item, amount in zip(x, amounts, strict=True)) >=
                      math.floor(seconds * self.scale))

        return self.least(restrict, with_time=with_time)


def _fullest(work: _Work, single: _OneDevice) -> float:
    share = work.must_take(work.limit) / work.count
    return single.with_time_at_least(share, with_time=True) if share > 0 else 0.0


def _everyone(work: _Work, single: _OneDevice) -> float:
    total = work.must_take(work.limit)
    least = total - (work.count - 1) * work.limit
    paid = single.with_time_at_least(least, with_time=False) if least > 0 else 0.0
    return work.least_value(paid)


def _pigeonhole(work: _Work, single: _OneDevice) -> float:
    """Return the least load of a device with its share of the units that only the class can run."""
    own = np.flatnonzero(np.isinf(work.other_s) & np.isfinite(work.time_s))
    order = own[np.argsort(work.time_s[own], kind="stable")]
    best, chosen, share = 0.0, order[:0], 0
    for first in range(len(order)):
        count = math.ceil((len(order) - first) / work.count)
        value = float(work.time_s[order[first : first + count]].sum())
        if value > best:
            best, chosen, share = value, order[first:], count
    if share == 0:
        return 0.0
    least = single.least(lambda model, x: model.add(sum(x[unit] for unit in chosen.tolist()) >= share) and None,
                         with_time=True)
    return max(best, least)
