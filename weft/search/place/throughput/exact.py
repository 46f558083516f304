"""The least largest load by CP-SAT, and lower bounds on it.

Variables: ``x[u, d]`` unit u runs on device d; ``y[t, d]`` tensor t leaves or enters device d where that takes its
time; ``s[t, i, j]`` tensor t is sent from i to j where that occupies something; ``T`` the value.

    sum_d x[u, d] = 1                                                        (_units)
    items kept on d <= capacity of d                                         (_memory)
    y[t, d] >= |x[owner, d] - x[reader, d]|                                  (_tensors)
    s[t, i, j] >= x[owner, i] + x[reader, j] - 1                             (_tensors)
    T >= loads of cores and resources                                        (_loads)
    no path leaves a device and comes back                                   (_contiguity)
    of interchangeable devices, the first unit of each comes before that of the next  (``fit.add_numbering``)

Times are scaled to whole numbers and rounded down, so that the solver's bound is one for the real problem.

*Bounds* are from work alone (``average_bound``), and, where ``prices`` has none or the graph is too wide for it, from
what one of several equal devices must take (``shared_bound``). Let K devices be interchangeable, and let W be the time
of what they must take together, after the others took all they can within the value T. Then

- the fullest of them takes at least W / K, and pays for what leaves and enters it (``_fullest``);
- each takes at least W - (K - 1) T, so each pays at least c = the least that such a set pays, and
  T >= W / K + c (``_everyone``);
- of n units that only they can run, one takes at least n / K (``_pigeonhole``).

The least that one device pays for such sets is a small problem of its own (``_OneDevice``), solved by CP-SAT.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve, whole
from weft.search.place.fit import add_hints, add_numbering, add_parted, chosen, held_on, numbered, unit_choices
from weft.search.place.throughput.model import LoadProblem

RESOLUTION: Final = float(1 << 27)
"""The known value in whole numbers."""
_BEYOND: Final = float(1 << 53)
"""More than the work of any set of units."""
SECONDS_PER_UNIT: Final = 1.1
"""CPU seconds of a unit of deterministic time for these models: 0.85 to 1.2 on 13 random ones."""
MAX_TERMS: Final = 400_000
"""Larger models are not built."""


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

    def least(self, amounts: Iterable[tuple[int, int]], at_least: int, *, with_time: bool) -> float:
        """Return a bound on the load (or the communication alone) of a set whose units have at least so much in all."""
        a, model = self.problem.arrays, cp_model.CpModel()
        x = [model.new_bool_var(f"x{unit}") for unit in range(self.problem.num_units)]
        for unit in np.flatnonzero(np.isinf(a.time_s[:, self.device])).tolist():
            model.add(x[unit] == 0)
        paid = []
        for tensor, owner in enumerate(a.owner.tolist()):
            amount = whole(a.touch_s[tensor, self.device], self.scale, RESOLUTION)
            if amount:
                touched = model.new_bool_var(f"y{tensor}")
                for reader in a.readers_of(tensor):
                    add_parted(model, touched, x[owner], x[reader])
                    model.add_bool_or([touched, x[owner], x[reader].negated()])
                paid.append(touched * amount)
        time_s = np.where(np.isinf(a.time_s[:, self.device]), 0.0, a.time_s[:, self.device])
        taken = sum(item * whole(seconds, self.scale, RESOLUTION) for item, seconds in zip(x, time_s, strict=True))
        model.add(taken + sum(paid) <= int(RESOLUTION))
        _add_room(model, self.problem, [{self.device: item} for item in x], self.device)
        model.add(sum(x[unit] * amount for unit, amount in amounts) >= at_least)
        model.minimize(taken + sum(paid) if with_time else sum(paid))
        found = solve(model, self.budget, effort=self.effort, seed=self.seed, seconds_per_unit=SECONDS_PER_UNIT)
        if found.status == "infeasible":
            return self.limit
        return max(0.0, found.bound / self.scale) if found.bound is not None else 0.0

    def with_time_at_least(self, seconds: float, *, with_time: bool) -> float:
        """Return the least load or communication of a set that takes at least so much time."""
        times = self.problem.arrays.time_s[:, self.device].tolist()
        amounts = [0 if math.isinf(item) else math.ceil(min(item * self.scale, RESOLUTION + 1)) for item in times]
        return self.least(enumerate(amounts), whole(seconds, self.scale, _BEYOND), with_time=with_time)


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
    best, heaviest, share = 0.0, order[:0], 0
    for first in range(len(order)):
        count = math.ceil((len(order) - first) / work.count)
        value = float(work.time_s[order[first : first + count]].sum())
        if value > best:
            best, heaviest, share = value, order[first:], count
    if share == 0:
        return 0.0
    return max(best, single.least([(unit, 1) for unit in heaviest.tolist()], share, with_time=True))


def model_size(problem: LoadProblem) -> int:
    """Return about how many terms the model has."""
    a, count = problem.arrays, problem.num_devices
    per_edge = count * (count - 1 if len(a.resources) else 2)
    per_node = 6 * count if problem.contiguous else 0
    return problem.num_units * count + len(a.readers) * per_edge + (len(a.node_unit) + len(a.sources)) * per_node


def improve_or_prove(problem: LoadProblem, device: I64 | None, *, budget: Budget, effort: float, seed: int
                     ) -> tuple[I64 | None, float]:
    """Return a better placement, if one was found, and a bound; the given placement is the hint.

    Without a given placement, the bound is infinite if there is none at all.
    """
    if model_size(problem) > MAX_TERMS:
        return None, 0.0
    builder = _Builder(problem, device)
    found = solve(builder.model, budget, effort=effort, seed=seed, seconds_per_unit=SECONDS_PER_UNIT)
    if found.status == "infeasible":
        return None, builder.value if device is not None else float("inf")
    if not found.has_values or found.bound is None:
        return None, 0.0
    return chosen(found, builder.x), min(builder.value, found.bound / builder.scale)


class _Builder:
    """The model, built once."""

    def __init__(self, problem: LoadProblem, device: I64 | None) -> None:
        self.problem, self.a = problem, problem.arrays
        self.order = [int(unit) for unit in np.argsort(-problem.arrays.time_s.min(axis=1), kind="stable")]
        self.alike = [np.flatnonzero(problem.class_of_device == label).tolist()
                      for label in np.unique(problem.class_of_device)]
        self.device = None if device is None else numbered(device, self.order, self.alike)
        self.value = _most(problem) if device is None else problem.value(device)
        self.scale = RESOLUTION / max(self.value, 1e-300)
        self.model = cp_model.CpModel()
        self.top = self.model.new_int_var(0, int(RESOLUTION), "T")
        self.terms: list[list[tuple[cp_model.IntVar, int]]] = [
            [] for _ in range(self.a.num_cores + self.a.num_resources)]
        self.x = self._units()
        for index in range(problem.num_devices):
            _add_room(self.model, problem, self.x, index)
        self._tensors()
        self._loads()
        if problem.contiguous:
            self._contiguity()
        add_numbering(self.model, self.x, self.order, self.alike)
        self.model.minimize(self.top)

    def _units(self) -> list[dict[int, cp_model.IntVar]]:
        x = unit_choices(self.model, np.isfinite(self.a.time_s))
        if self.device is not None:
            add_hints(self.model, x, self.device)
        for unit, row in enumerate(x):
            for index, item in row.items():
                self.terms[self.a.core[index]].append((item, whole(self.a.time_s[unit, index], self.scale, RESOLUTION)))
        return x

    def _tensors(self) -> None:
        a, count = self.a, self.problem.num_devices
        occupied = np.diff(a.resource_start)
        for tensor, owner in enumerate(a.owner.tolist()):
            readers, seconds = a.readers_of(tensor), a.pair_seconds(tensor)
            for device in np.flatnonzero(a.touch_s[tensor] * self.scale >= 1).tolist():
                self._touch(tensor, owner, readers, device)
            for source in self.x[owner]:
                for target in range(count):
                    if source != target and (np.isinf(seconds[source, target]) or (
                            occupied[source * count + target] and seconds[source, target] * self.scale >= 1)):
                        self._send(tensor, readers, source, target, float(seconds[source, target]))

    def _touch(self, tensor: int, owner: int, readers: list[int], device: int) -> None:
        touched = self.model.new_bool_var(f"y{tensor}_{device}")
        inside = self.x[owner].get(device)
        for reader in readers:
            other = self.x[reader].get(device)
            add_parted(self.model, touched, inside, other)
            add_parted(self.model, touched, other, inside)
        self.terms[self.a.core[device]].append((touched, whole(self.a.touch_s[tensor, device], self.scale, RESOLUTION)))

    def _send(self, tensor: int, readers: list[int], source: int, target: int, seconds: float) -> None:
        a = self.a
        start = self.x[int(a.owner[tensor])][source]
        ends = [self.x[reader][target] for reader in readers if target in self.x[reader]]
        if not ends:
            return
        if np.isinf(seconds):
            for end in ends:
                self.model.add_bool_or([start.negated(), end.negated()])
            return
        sent = self.model.new_bool_var(f"s{tensor}_{source}_{target}")
        for end in ends:
            self.model.add_bool_or([sent, start.negated(), end.negated()])
        pair = source * self.problem.num_devices + target
        for resource in a.resources[a.resource_start[pair] : a.resource_start[pair + 1]].tolist():
            self.terms[a.num_cores + resource].append((sent, whole(seconds, self.scale, RESOLUTION)))

    def _loads(self) -> None:
        for terms in self.terms:
            if terms:
                self.model.add(sum(item * amount for item, amount in terms if amount) <= self.top)
        self.model.add(self.top >= whole(average_bound(self.problem), self.scale, RESOLUTION))

    def _contiguity(self) -> None:
        """``above`` (a node of the device is above) and ``below`` hold together only on the device."""
        a, model = self.a, self.model
        count = len(a.node_unit)
        for device in range(self.problem.num_devices):
            above = [model.new_bool_var("") for _ in range(count)]
            below = [model.new_bool_var("") for _ in range(count)]
            for node in range(count):
                inside = self.x[int(a.node_unit[node])].get(device)
                if inside is not None:
                    model.add_implication(inside, above[node])
                    model.add_implication(inside, below[node])
                model.add_bool_or([above[node].negated(), below[node].negated(), *([] if inside is None else [inside])])
                for source in a.sources_of(node):
                    model.add_implication(above[source], above[node])
                    model.add_implication(below[node], below[source])


def _add_room(model: cp_model.CpModel, problem: LoadProblem, x: list[dict[int, cp_model.IntVar]], device: int) -> None:
    """Let what the device holds be within its memory."""
    a, users, capacity = problem.arrays, problem.users, float(problem.arrays.capacity[device])
    if not problem.is_memory_free and np.isfinite(capacity) and capacity < a.item_bytes.sum():
        scale = min(1.0, RESOLUTION / max(capacity, 1.0))
        sizes = [whole(size, scale, RESOLUTION) for size in a.item_bytes]
        held = held_on(model, x, users, sizes, device)
        model.add(sum(kept * sizes[item] for kept, item in held) <= int(capacity * scale))


def _most(problem: LoadProblem) -> float:
    """Return a value that no placement exceeds."""
    a = problem.arrays
    pair_s = np.where(np.isfinite(a.latency_s), a.latency_s, 0.0).max(initial=0.0) + (
        np.where(np.isfinite(a.s_per_byte), a.s_per_byte, 0.0).max(initial=0.0) * a.tensor_bytes.max(initial=0.0))
    given_s = np.where(np.isfinite(a.given_s), a.given_s, 0.0).max(initial=0.0)
    sent_s = problem.num_devices * len(a.owner) * max(float(pair_s), float(given_s))
    return float(np.where(np.isfinite(a.time_s), a.time_s, 0.0).max(axis=1).sum() + a.touch_s.sum() + sent_s) + 1e-300
