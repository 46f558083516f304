"""A lower bound by linear programming: fractions of operators on devices, with ways, loads, sends and memory together.

    x[u, d]      the part of unit u on device d                        sum over d = 1, x >= 0
    S[i]         start of operator i
    z[t, i]      the part of tensor t that reader i gets from another device:   z >= x[writer, d] - x[reader, d]
    T            latency

    S[i] + sum_d time[i, d] x[i, d] + least transfer time of t * z[t, i] <= S[j]     j reads t of i
    S[i] + sum_d time[i, d] x[i, d] + tail <= T
    sum_i time[i, d] x[i, d] <= T                                      each core
    S[a] + sum_d time[a, d] x[a, d] + sum_i time[i, d] x[i, d] <= S[b]  each core; i on ways from a to b, a join
    sum_w bytes[w] x[.., d] <= capacity[d]                              each device (a weight of many: its largest part)
    sum_w bytes[w] x[.., d] + bytes that i reads and writes * x[i, d] <= capacity[d]           where tensors count

Every placement is a solution with 0 and 1, so the least T bounds them all.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.bounds import transfers_of
from weft.search.place.problem import PlaceProblem, unit_weights

MAX_TERMS: Final = 60_000
"""Larger programs are not solved: they would take minutes."""


MAX_BETWEEN: Final = 20_000
"""Operators in all sets between two operators; smaller sets come first."""


class _Rows:
    """Rows of an inequality system ``A v <= b``, as triplets."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = []

    def add(self, terms: list[tuple[int, float]], limit: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.limits))
            self.columns.append(column)
            self.values.append(value)
        self.limits.append(limit)


class Relaxation:
    """The linear program of a problem, solved with fractions (a bound) or with whole units (a bound and devices)."""

    def __init__(self, problem: PlaceProblem) -> None:
        self.problem = problem
        self.allowed = problem.is_allowed
        self.num_x = int(self.allowed.sum())
        unit = problem.unit_of_op
        self.pairs = problem.edges[unit[problem.edges[:, 0]] != unit[problem.edges[:, 1]]]
        num_terms = self.num_x + (2 * problem.num_devices + 3) * len(self.pairs)
        self.is_of_use = problem.num_ops > 0 and num_terms <= MAX_TERMS
        """The program is small enough to be solved."""
        if self.is_of_use:
            self._build()

    def _build(self) -> None:
        from scipy.sparse import csr_array

        problem = self.problem
        column = np.full(self.allowed.shape, -1, dtype=np.int64)
        column[self.allowed] = np.arange(self.num_x)
        self.scale = float(np.where(np.isfinite(problem.time_s), problem.time_s, 0.0).sum(axis=0).max()) or 1.0
        first_s = self.num_x
        first_z = first_s + problem.num_ops
        self.latency = first_z + len(self.pairs)
        rows = _Rows()
        _add_ways(problem, column, self.pairs, rows, self.scale, first_s, first_z, self.latency)
        _add_loads(problem, column, rows, self.scale, self.latency)
        _add_loads_between(problem, column, rows, self.scale, first_s)
        self.num_vars = _add_memory(problem, column, rows, self.latency + 1)
        units = np.repeat(np.arange(problem.num_units), self.allowed.sum(axis=1))
        self.equal = csr_array((np.ones(self.num_x), (units, np.arange(self.num_x))),
                               shape=(problem.num_units, self.num_vars))
        self.matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.limits), self.num_vars))
        self.limits = np.asarray(rows.limits)
        self.cost = np.zeros(self.num_vars)
        self.cost[self.latency] = 1.0

    def bound(self, *, time_limit: float) -> float:
        """Return the least latency with fractions of operators; zero if it was not found in time."""
        from scipy.optimize import linprog

        found = linprog(self.cost, A_ub=self.matrix, b_ub=self.limits, A_eq=self.equal,
                        b_eq=np.ones(self.problem.num_units), bounds=(0, None), method="highs",
                        options={"time_limit": time_limit})
        return self._proven(float(found.fun)) if found.status == 0 else 0.0

    def whole(self, *, time_limit: float, max_nodes: int) -> tuple[float, I64 | None]:
        """Return (what no placement beats, the devices of the best found) with every unit whole on one device."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        is_whole = np.zeros(self.num_vars)
        is_whole[: self.num_x] = 1
        found = milp(self.cost, integrality=is_whole, bounds=Bounds(0, np.inf),
                     constraints=[LinearConstraint(self.matrix, -np.inf, self.limits),
                                  LinearConstraint(self.equal, 1.0, 1.0)],
                     options={"time_limit": time_limit, "node_limit": max_nodes})
        lower = getattr(found, "mip_dual_bound", None)
        bound = self._proven(float(lower)) if lower is not None and np.isfinite(lower) else 0.0
        if found.x is None:
            return bound, None
        part = np.zeros(self.allowed.shape)
        part[self.allowed] = found.x[: self.num_x]
        return bound, part.argmax(axis=1)[self.problem.unit_of_op].astype(np.int64)

    def _proven(self, least: float) -> float:
        """Return the seconds that a dual solution proves; a little is taken off for what tolerances may hide."""
        return max(0.0, least * self.scale * (1 - 1e-6) - 1e-7 * self.scale)


def _add_ways(problem: PlaceProblem, column: I64, pairs: I64, rows: _Rows, scale: float, first_s: int,
              first_z: int, latency: int) -> None:
    unit = problem.unit_of_op
    devices = range(problem.num_devices)
    work = [[(int(column[unit[op], device]), float(problem.time_s[op, device]) / scale) for device in devices
             if column[unit[op], device] >= 0] for op in range(problem.num_ops)]
    for op in range(problem.num_ops):
        rows.add([(first_s + op, 1.0), *work[op], (latency, -1.0)], 0.0)
    joined = {(int(source), int(reader)) for source, reader, _ in problem.edges.tolist()}
    for source, reader in sorted(joined):
        if unit[source] == unit[reader]:
            rows.add([(first_s + source, 1.0), *work[source], (first_s + reader, -1.0)], 0.0)
    for index, (source, reader, tensor) in enumerate(pairs.tolist()):
        table = transfers_of(problem, tensor)[np.ix_(column[unit[source]] >= 0, column[unit[reader]] >= 0)]
        apart = table[np.flatnonzero(column[unit[source]] >= 0)[:, None] != np.flatnonzero(column[unit[reader]] >= 0)]
        least = float(apart.min(initial=np.inf))
        least = 0.0 if not np.isfinite(least) else least / scale
        rows.add([(first_s + source, 1.0), *work[source], (first_z + index, least), (first_s + reader, -1.0)], 0.0)
        for device in devices:
            here, there = int(column[unit[source], device]), int(column[unit[reader], device])
            if here >= 0:
                terms = [(here, 1.0), (first_z + index, -1.0)]
                rows.add(terms if there < 0 else [*terms, (there, -1.0)], 0.0)


def _add_loads(problem: PlaceProblem, column: I64, rows: _Rows, scale: float, latency: int) -> None:
    for core in range(int(problem.core_of_device.max(initial=-1)) + 1):
        terms = [(int(column[problem.unit_of_op[op], device]), float(problem.time_s[op, device]) / scale)
                 for device in np.flatnonzero(problem.core_of_device == core) for op in range(problem.num_ops)
                 if column[problem.unit_of_op[op], device] >= 0]
        rows.add([*terms, (latency, -1.0)], 0.0)


def _add_loads_between(problem: PlaceProblem, column: I64, rows: _Rows, scale: float, first_s: int) -> None:
    """Add that all which is on the ways from an operator to a later one is done in between, on whichever core it is."""
    unit, devices = problem.unit_of_op, range(problem.num_devices)
    for first, last, members in _sets_between(problem):
        begin = [] if first < 0 else [(first_s + first, 1.0), *(
            (int(column[unit[first], device]), float(problem.time_s[first, device]) / scale)
            for device in devices if column[unit[first], device] >= 0)]
        for core in range(int(problem.core_of_device.max(initial=-1)) + 1):
            work = [(int(column[unit[op], device]), float(problem.time_s[op, device]) / scale)
                    for device in np.flatnonzero(problem.core_of_device == core) for op in members
                    if column[unit[op], device] >= 0]
            rows.add([*begin, *work, (first_s + last, -1.0)], 0.0)


def _sets_between(problem: PlaceProblem) -> list[tuple[int, int, list[int]]]:
    """Return (first, last, what is on the ways between) for operators that join ways; first is -1 for the begin of all.

    The first is the last operator that every way to the join leads through.
    """
    num_ops = problem.num_ops
    ancestors = [0] * num_ops
    dominators = [0] * num_ops
    sets = []
    for op in range(num_ops):
        writers = {int(writer) for writer in
                   problem.producer[problem.inputs[problem.input_start[op] : problem.input_start[op + 1]]]}
        common = -1
        for writer in writers:
            ancestors[op] |= ancestors[writer] | 1 << writer
            common &= dominators[writer] | 1 << writer
        dominators[op] = common if writers else 0
        if len(writers) > 1:
            first = dominators[op].bit_length() - 1
            after = [item for item in _members(ancestors[op]) if item != first and (
                first < 0 or ancestors[item] >> first & 1)]
            sets.append((first, op, after))
    sets.sort(key=lambda item: len(item[2]))
    total = np.cumsum([len(members) for _, _, members in sets])
    return sets[: int(np.searchsorted(total, MAX_BETWEEN, side="right"))]


def _members(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]


def _add_memory(problem: PlaceProblem, column: I64, rows: _Rows, next_var: int) -> int:
    """Add the memory of each device that could be exceeded; return the number of variables then."""
    users: list[list[int]] = [[] for _ in problem.weight_bytes]
    for unit, items in enumerate(unit_weights(problem)):
        for weight in items:
            users[weight].append(unit)
    total = float(problem.weight_bytes.sum())
    alive = _alive_bytes(problem)
    for device in np.flatnonzero(problem.capacity < total + alive.max(initial=0.0)).tolist():
        room = max(1.0, float(problem.capacity[device]))
        terms = []
        for weight, units in enumerate(users):
            here = [int(column[unit, device]) for unit in units if column[unit, device] >= 0]
            size = float(problem.weight_bytes[weight]) / room
            if not here or size <= 0:
                continue
            if len(here) > 1:
                for item in here:
                    rows.add([(item, 1.0), (next_var, -1.0)], 0.0)
                here, next_var = [next_var], next_var + 1
            terms.append((here[0], size))
        held, next_var = next_var, next_var + 1
        rows.add([*terms, (held, -1.0)], 0.0)
        rows.add([(held, 1.0)], min(1.0, float(problem.capacity[device])))
        for op in np.flatnonzero((alive > room - total) & (problem.time_s[:, device] > 0)).tolist():
            if column[problem.unit_of_op[op], device] >= 0:
                rows.add([(held, 1.0), (int(column[problem.unit_of_op[op], device]), float(alive[op]) / room)], 1.0)
    return next_var


def _alive_bytes(problem: PlaceProblem) -> F64:
    """Return [n] the bytes that an operator reads and writes, which are all on its device while it runs."""
    alive = np.zeros(problem.num_ops)
    if problem.has_lifetimes:
        reader = np.repeat(np.arange(problem.num_ops), np.diff(problem.input_start))
        np.add.at(alive, reader, problem.tensor_bytes[problem.inputs])
        np.add.at(alive, problem.producer, problem.tensor_bytes)
    return alive
