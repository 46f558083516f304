"""A lower bound by linear programming: fractions of operators on devices, with ways, loads, sends and memory together.

    x[u, d]      the part of unit u on device d                        sum over d = 1, x >= 0
    S[i]         start of operator i
    z[t, i]      the part of tensor t that reader i gets from another device:   z >= x[writer, d] - x[reader, d]
    T            latency

    S[i] + sum_d time[i, d] x[i, d] + least transfer time of t * z[t, i] <= S[j]     j reads t of i
    S[i] + sum_d time[i, d] x[i, d] + tail <= T
    sum_i time[i, d] x[i, d] <= T                                      each core
    sum_w bytes[w] x[.., d] <= capacity[d]                              each device (a weight of many: its largest part)

Every placement is a solution with 0 and 1, so the least T bounds them all.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.model.graph import I64
from weft.search.place.bounds import transfers_of
from weft.search.place.problem import PlaceProblem, unit_weights

MAX_TERMS: Final = 60_000
"""Larger programs are not solved: they would take minutes."""


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


def relaxation_bound(problem: PlaceProblem, *, time_limit: float) -> float:
    """Return the least latency of the relaxation; zero where the program is too large or not solved in time."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    allowed = problem.is_allowed
    num_x = int(allowed.sum())
    pairs = problem.edges[problem.unit_of_op[problem.edges[:, 0]] != problem.unit_of_op[problem.edges[:, 1]]]
    num_terms = num_x + (2 * problem.num_devices + 3) * len(pairs)
    if not problem.num_ops or num_terms > MAX_TERMS:
        return 0.0
    column = np.full(allowed.shape, -1, dtype=np.int64)
    column[allowed] = np.arange(num_x)
    scale = float(np.where(np.isfinite(problem.time_s), problem.time_s, 0.0).sum(axis=0).max()) or 1.0
    first_s = num_x
    first_z = first_s + problem.num_ops
    latency = first_z + len(pairs)
    rows = _Rows()
    _add_ways(problem, column, pairs, rows, scale, first_s, first_z, latency)
    _add_loads(problem, column, rows, scale, latency)
    num_vars = _add_memory(problem, column, rows, latency + 1)
    equal_rows = np.repeat(np.arange(problem.num_units), allowed.sum(axis=1))
    equal = csr_array((np.ones(num_x), (equal_rows, np.arange(num_x))), shape=(problem.num_units, num_vars))
    matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.limits), num_vars))
    cost = np.zeros(num_vars)
    cost[latency] = 1.0
    found = linprog(cost, A_ub=matrix, b_ub=rows.limits, A_eq=equal, b_eq=np.ones(problem.num_units),
                    bounds=(0, None), method="highs", options={"time_limit": time_limit})
    if found.status != 0:
        return 0.0
    # The dual solution is a proof; a little is taken off for what the solver's tolerances may hide.
    return max(0.0, float(found.fun) * scale * (1 - 1e-6) - 1e-7 * scale)


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


def _add_memory(problem: PlaceProblem, column: I64, rows: _Rows, next_var: int) -> int:
    """Add the memory of each device that could be exceeded; return the number of variables then."""
    users: list[list[int]] = [[] for _ in problem.weight_bytes]
    for unit, items in enumerate(unit_weights(problem)):
        for weight in items:
            users[weight].append(unit)
    total = float(problem.weight_bytes.sum())
    for device in np.flatnonzero(problem.capacity < total).tolist():
        terms = []
        for weight, units in enumerate(users):
            here = [int(column[unit, device]) for unit in units if column[unit, device] >= 0]
            size = float(problem.weight_bytes[weight]) / max(1.0, float(problem.capacity[device]))
            if not here or size <= 0:
                continue
            if len(here) > 1:
                for item in here:
                    rows.add([(item, 1.0), (next_var, -1.0)], 0.0)
                here, next_var = [next_var], next_var + 1
            terms.append((here[0], size))
        rows.add(terms, min(1.0, float(problem.capacity[device])))
    return next_var
