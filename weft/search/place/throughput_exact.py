"""The least largest load by CP-SAT, or a bound on it.

Variables: ``x[u, d]`` unit u runs on device d; ``y[t, d]`` tensor t leaves or enters device d where that takes its
time; ``s[t, i, j]`` tensor t is sent from i to j where that occupies something; ``T`` the value.

    sum_d x[u, d] = 1                                                        (_units)
    items kept on d <= capacity of d                                         (_memory)
    y[t, d] >= |x[owner, d] - x[reader, d]|                                  (_tensors)
    s[t, i, j] >= x[owner, i] + x[reader, j] - 1                             (_tensors)
    T >= loads of cores and resources                                        (_loads)
    no path leaves a device and comes back                                   (_contiguity)
    of interchangeable devices, the first unit of each comes before that of the next  (_symmetry)

Times are scaled to whole numbers and rounded down, so that the solver's bound is one for the real problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.place.throughput_bounds import average_bound
from weft.search.place.throughput_model import LoadProblem

RESOLUTION = float(1 << 27)
"""The known value in whole numbers."""
MAX_TERMS = 400_000
"""Larger models are not built."""
MAX_ORDERED = 80
"""Units that interchangeable devices are ordered by; all of them would be too many literals."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """What the solver found out."""

    device: I64 | None
    """A better placement than the given one."""
    bound: float
    """No placement has a smaller value."""


def model_size(problem: LoadProblem) -> int:
    """Return about how many terms the model has."""
    a, count = problem.arrays, problem.num_devices
    per_edge = count * (count - 1 if len(a.resources) else 2)
    per_node = 6 * count if problem.contiguous else 0
    return problem.num_units * count + len(a.readers) * per_edge + (len(a.node_unit) + len(a.sources)) * per_node


def improve_or_prove(problem: LoadProblem, device: I64 | None, *, budget: Budget, effort: float, seed: int) -> Exact:
    """Return a better placement or a bound; the given placement is the hint.

    Without a given placement, the bound is infinite if there is none at all.
    """
    if model_size(problem) > MAX_TERMS:
        return Exact(device=None, bound=0.0)
    builder = _Builder(problem, device)
    found = solve(builder.model, budget, effort=effort, seed=seed)
    if found.status == "infeasible":
        return Exact(device=None, bound=builder.value if device is not None else float("inf"))
    if not found.has_values or found.bound is None:
        return Exact(device=None, bound=0.0)
    better = np.array([next(index for index, item in row.items() if found.value(item)) for row in builder.x],
                      dtype=np.int64)
    return Exact(device=better, bound=min(builder.value, found.bound / builder.scale))


class _Builder:
    """The model, built once."""

    def __init__(self, problem: LoadProblem, device: I64 | None) -> None:
        self.problem, self.a = problem, problem.arrays
        self.device = None if device is None else _canonical(problem, device)
        self.value = _most(problem) if device is None else problem.value(device)
        self.scale = RESOLUTION / max(self.value, 1e-300)
        self.model = cp_model.CpModel()
        self.top = self.model.new_int_var(0, int(RESOLUTION), "T")
        self.terms: list[list[tuple[cp_model.IntVar, int]]] = [
            [] for _ in range(self.a.num_cores + self.a.num_resources)]
        self.x = self._units()
        self._memory()
        self._tensors()
        self._loads()
        if problem.contiguous:
            self._contiguity()
        self._symmetry()
        self.model.minimize(self.top)

    def _units(self) -> list[dict[int, cp_model.IntVar]]:
        x: list[dict[int, cp_model.IntVar]] = []
        for unit in range(self.problem.num_units):
            row = {int(index): self.model.new_bool_var(f"x{unit}_{index}")
                   for index in np.flatnonzero(np.isfinite(self.a.time_s[unit]))}
            self.model.add_exactly_one(row.values())
            for index, item in row.items():
                if self.device is not None:
                    self.model.add_hint(item, int(self.device[unit] == index))
                self.terms[self.a.core[index]].append((item, int(self.a.time_s[unit, index] * self.scale)))
            x.append(row)
        return x

    def _memory(self) -> None:
        if self.problem.is_memory_free:
            return
        users: list[list[int]] = [[] for _ in self.a.item_bytes]
        for unit in range(self.problem.num_units):
            for item in self.a.items[self.a.item_start[unit] : self.a.item_start[unit + 1]].tolist():
                users[item].append(unit)
        for device, capacity in enumerate(self.a.capacity.tolist()):
            if not np.isfinite(capacity) or capacity >= self.a.item_bytes.sum():
                continue
            scale = min(1.0, RESOLUTION / max(capacity, 1.0))
            terms = []
            for item, units in enumerate(users):
                here = [self.x[unit][device] for unit in units if device in self.x[unit]]
                size = int(self.a.item_bytes[item] * scale)
                if not here or size == 0:
                    continue
                kept = here[0] if len(here) == 1 else self.model.new_bool_var(f"k{item}_{device}")
                for unit_here in here if len(here) > 1 else ():
                    self.model.add_implication(unit_here, kept)
                terms.append(kept * size)
            self.model.add(sum(terms) <= int(capacity * scale))

    def _tensors(self) -> None:
        a, count = self.a, self.problem.num_devices
        occupied = np.diff(a.resource_start)
        for tensor, owner in enumerate(a.owner.tolist()):
            readers = a.readers[a.reader_start[tensor] : a.reader_start[tensor + 1]].tolist()
            for device in np.flatnonzero(a.touch_s[tensor] * self.scale >= 1).tolist():
                self._touch(tensor, owner, readers, device)
            row = a.given_row[tensor]
            seconds = a.given_s[row] if row >= 0 else a.latency_s + a.s_per_byte * a.tensor_bytes[tensor]
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
            if inside is not None:
                self.model.add_bool_or([touched, inside.negated(), *([] if other is None else [other])])
            if other is not None:
                self.model.add_bool_or([touched, other.negated(), *([] if inside is None else [inside])])
        self.terms[self.a.core[device]].append((touched, int(self.a.touch_s[tensor, device] * self.scale)))

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
            self.terms[a.num_cores + resource].append((sent, int(seconds * self.scale)))

    def _loads(self) -> None:
        for terms in self.terms:
            if terms:
                self.model.add(sum(item * amount for item, amount in terms if amount) <= self.top)
        self.model.add(self.top >= int(average_bound(self.problem) * self.scale))

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
                for source in a.sources[a.source_start[node] : a.source_start[node + 1]].tolist():
                    model.add_implication(above[source], above[node])
                    model.add_implication(below[node], below[source])

    def _symmetry(self) -> None:
        order = _heaviest_first(self.problem)
        for devices in _classes(self.problem):
            for previous, device in pairwise(devices):
                for rank, unit in enumerate(order[:MAX_ORDERED]):
                    if device in self.x[unit]:
                        earlier = [self.x[other][previous] for other in order[:rank] if previous in self.x[other]]
                        self.model.add_bool_or([self.x[unit][device].negated(), *earlier])


def _most(problem: LoadProblem) -> float:
    """Return a value that no placement exceeds."""
    a = problem.arrays
    pair_s = np.where(np.isfinite(a.latency_s), a.latency_s, 0.0).max(initial=0.0) + (
        np.where(np.isfinite(a.s_per_byte), a.s_per_byte, 0.0).max(initial=0.0) * a.tensor_bytes.max(initial=0.0))
    given_s = np.where(np.isfinite(a.given_s), a.given_s, 0.0).max(initial=0.0)
    sent_s = problem.num_devices * len(a.owner) * max(float(pair_s), float(given_s))
    return float(np.where(np.isfinite(a.time_s), a.time_s, 0.0).max(axis=1).sum() + a.touch_s.sum() + sent_s) + 1e-300


def _classes(problem: LoadProblem) -> list[list[int]]:
    """Return the devices of each class."""
    return [np.flatnonzero(problem.class_of_device == label).tolist() for label in np.unique(problem.class_of_device)]


def _heaviest_first(problem: LoadProblem) -> list[int]:
    least = np.min(problem.arrays.time_s, axis=1)
    return [int(unit) for unit in np.argsort(-least, kind="stable")]


def _canonical(problem: LoadProblem, device: I64) -> I64:
    """Return the placement with interchangeable devices in the order of their first units."""
    new = np.arange(problem.num_devices)
    order = _heaviest_first(problem)
    for devices in _classes(problem):
        used = list(dict.fromkeys(int(device[unit]) for unit in order if int(device[unit]) in devices))
        rest = [index for index in devices if index not in used]
        for old, position in zip([*used, *rest], devices, strict=True):
            new[old] = position
    return np.asarray(new[device], dtype=np.int64)
