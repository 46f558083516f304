"""Times that no placement can beat: by the longest ways, and by linear programming.

*Ways*: ``heads[i, d]`` is the earliest start of operator i on device d if every operator that it needs could run on the
device that suits i best, as if operators could be copied and nothing were shared:

    heads[i, d] = max over tensors t that i reads of min over devices c of
                  heads[w, c] + time[w, c] + transfer(t, c, d)        w = writer of t

and ``tails[i, d]`` likewise the least time from the end of i on d to the end of all. So head + time + tail bounds the
latency of every placement that has i on d, and the largest of the smallest over d bounds every placement.

*Relaxation*: fractions of operators on devices, with ways, loads, sends and memory together.

    x[u, d]      the part of unit u on device d                        sum over d = 1, x >= 0
    S[i]         start of operator i
    z[t, i]      the part of tensor t that reader i gets from another device:   z >= x[writer, d] - x[reader, d]
    T            latency

    S[i] + sum_d time[i, d] x[i, d] + least transfer time of t * z[t, i] <= S[j]     j reads t of i (``_add_ways``)
    S[i] + sum_d time[i, d] x[i, d] + tail <= T                                                     (``_add_ways``)
    sum_i time[i, d] x[i, d] <= T                                      each core                   (``_add_loads``)
    S[a] + sum_d time[a, d] x[a, d] + sum_i time[i, d] x[i, d] <= S[b]  each core; i on ways from a to b, a join
                                                                                           (``_add_loads_between``)
    sum_w bytes[w] x[.., d] <= capacity[d]                              each device (a weight of many: its largest part)
    sum_w bytes[w] x[.., d] + bytes that i reads and writes * x[i, d] <= capacity[d]  tensors count (``_add_memory``)

Every placement is a solution with 0 and 1, so the least T bounds them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem, Rows


def heads_and_tails(problem: PlaceProblem) -> tuple[F64, F64]:
    """Return the least time before and after every operator on every device, [n, m] each."""
    num_ops, num_devices = problem.time_s.shape
    heads, tails = np.zeros((num_ops, num_devices)), np.zeros((num_ops, num_devices))
    for op in range(num_ops):
        for tensor in problem.inputs_of(op).tolist():
            writer = int(problem.producer[tensor])
            ready = (heads[writer] + problem.time_s[writer])[:, None] + problem.transfers_of(tensor)
            np.maximum(heads[op], _least(problem, ready, writer, op, axis=0), out=heads[op])
    for op in range(num_ops - 1, -1, -1):
        for tensor in problem.inputs_of(op).tolist():
            writer = int(problem.producer[tensor])
            rest = problem.transfers_of(tensor) + (problem.time_s[op] + tails[op])[None, :]
            np.maximum(tails[writer], _least(problem, rest, writer, op, axis=1), out=tails[writer])
    return heads, tails


def _least(problem: PlaceProblem, seconds: F64, writer: int, op: int, *, axis: int) -> F64:
    """Return the least over the other end's devices; operators that share a device have no choice."""
    if problem.unit_of_op[writer] == problem.unit_of_op[op]:
        return np.asarray(np.diagonal(seconds), dtype=np.float64)
    return np.asarray(seconds.min(axis=axis), dtype=np.float64)


def way_bound(problem: PlaceProblem, heads: F64, tails: F64) -> float:
    """Return the latency that no placement beats by the longest way alone."""
    through = heads + problem.time_s + tails
    return float(through.min(axis=1, initial=np.inf).max(initial=0.0)) if problem.num_ops else 0.0


def tighten(problem: PlaceProblem, limit: float) -> PlaceProblem | None:
    """Return the problem without devices that no placement faster than ``limit`` can use; None if there is no such one.

    A unit cannot be on a device if the way through one of its operators there takes too long; every device that goes
    makes the ways of others longer, so this is repeated until nothing changes.
    """
    while True:
        heads, tails = heads_and_tails(problem)
        is_late = heads + problem.time_s + tails >= limit * (1 - 1e-12)
        late_units = np.zeros((problem.num_units, problem.num_devices), dtype=np.bool_)
        np.logical_or.at(late_units, problem.unit_of_op, is_late)
        keep = problem.is_allowed & ~late_units
        if not keep.any(axis=1).all():
            return None
        if np.array_equal(keep, problem.is_allowed):
            return problem
        problem = replace(problem, time_s=np.where(keep[problem.unit_of_op], problem.time_s, np.inf))


MAX_TERMS: Final = 60_000
"""Larger programs are not solved: they would take minutes."""


MAX_BETWEEN: Final = 20_000
"""Operators in all sets between two operators; smaller sets come first."""


class Relaxation:
    """The linear program of a problem, solved with fractions (a bound) or with whole units (a bound and devices)."""

    def __init__(self, problem: PlaceProblem) -> None:
        self.problem = problem
        self.allowed, self.unit = problem.is_allowed, problem.unit_of_op
        self.num_x = int(self.allowed.sum())
        self.pairs = problem.edges[self.unit[problem.edges[:, 0]] != self.unit[problem.edges[:, 1]]]
        num_terms = self.num_x + (2 * problem.num_devices + 3) * len(self.pairs)
        self.is_of_use = problem.num_ops > 0 and num_terms <= MAX_TERMS
        """The program is small enough to be solved."""
        if self.is_of_use:
            self._build()

    def _build(self) -> None:
        problem, rows = self.problem, Rows()
        self.column = np.full(self.allowed.shape, -1, dtype=np.int64)
        self.column[self.allowed] = np.arange(self.num_x)
        self.scale = float(np.where(np.isfinite(problem.time_s), problem.time_s, 0.0).sum(axis=0).max()) or 1.0
        self.first_s = self.num_x
        self.latency = self.first_s + problem.num_ops + len(self.pairs)
        self._add_ways(rows)
        self._add_loads(rows)
        self._add_loads_between(rows)
        self.num_vars = self._add_memory(rows, self.latency + 1)
        whole = Rows()
        for row in self.column:
            whole.add([(column, 1.0) for column in row[row >= 0].tolist()], 1.0)
        self.equal, self.matrix = whole.matrix(self.num_vars), rows.matrix(self.num_vars)
        self.limits = np.asarray(rows.limits)
        self.cost = np.zeros(self.num_vars)
        self.cost[self.latency] = 1.0

    def _work(self, op: int, devices: Iterable[int]) -> list[tuple[int, float]]:
        """Return the operator's time on these devices, in parts of the scale."""
        return [(int(self.column[self.unit[op], device]), float(self.problem.time_s[op, device]) / self.scale)
                for device in devices if self.column[self.unit[op], device] >= 0]

    def _cores(self) -> list[list[int]]:
        """Return the devices of each core."""
        cores = self.problem.core_of_device
        return [np.flatnonzero(cores == core).tolist() for core in range(int(cores.max(initial=-1)) + 1)]

    def _add_ways(self, rows: Rows) -> None:
        unit, column, devices = self.unit, self.column, range(self.problem.num_devices)
        work = [self._work(op, devices) for op in range(self.problem.num_ops)]
        for op in range(self.problem.num_ops):
            rows.add([(self.first_s + op, 1.0), *work[op], (self.latency, -1.0)], 0.0)
        for source, reader in np.unique(self.problem.edges[:, :2], axis=0).tolist():
            if unit[source] == unit[reader]:
                rows.add([(self.first_s + source, 1.0), *work[source], (self.first_s + reader, -1.0)], 0.0)
        for place, (source, reader, tensor) in enumerate(self.pairs.tolist(), self.first_s + self.problem.num_ops):
            apart = self.allowed[unit[source]][:, None] & self.allowed[unit[reader]] & ~np.eye(len(devices), dtype=bool)
            least = float(self.problem.transfers_of(tensor)[apart].min(initial=np.inf)) / self.scale
            rows.add([(self.first_s + source, 1.0), *work[source], (place, least if np.isfinite(least) else 0.0),
                      (self.first_s + reader, -1.0)], 0.0)
            for here, there in zip(column[unit[source]].tolist(), column[unit[reader]].tolist(), strict=True):
                if here >= 0:
                    rows.add([(here, 1.0), (place, -1.0), *([(there, -1.0)] if there >= 0 else [])], 0.0)

    def _add_loads(self, rows: Rows) -> None:
        for core in self._cores():
            work = [term for device in core for op in range(self.problem.num_ops) for term in self._work(op, [device])]
            rows.add([*work, (self.latency, -1.0)], 0.0)

    def _add_loads_between(self, rows: Rows) -> None:
        """Add that all on the ways from an operator to a later one is done in between, on whichever core it is."""
        for first, last, members in _sets_between(self.problem):
            begin = [] if first < 0 else [(self.first_s + first, 1.0),
                                          *self._work(first, range(self.problem.num_devices))]
            for core in self._cores():
                work = [term for device in core for op in members for term in self._work(op, [device])]
                rows.add([*begin, *work, (self.first_s + last, -1.0)], 0.0)

    def _add_memory(self, rows: Rows, next_var: int) -> int:
        """Add the memory of each device that could be exceeded; return the number of variables then."""
        problem = self.problem
        total, alive = float(problem.weight_bytes.sum()), _alive_bytes(problem)
        for device in np.flatnonzero(problem.capacity < total + alive.max(initial=0.0)).tolist():
            room = max(1.0, float(problem.capacity[device]))
            terms = []
            for weight, units in enumerate(problem.weight_users):
                here = [int(self.column[unit, device]) for unit in units if self.column[unit, device] >= 0]
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
                if self.column[self.unit[op], device] >= 0:
                    rows.add([(held, 1.0), (int(self.column[self.unit[op], device]), float(alive[op]) / room)], 1.0)
        return next_var

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


def _sets_between(problem: PlaceProblem) -> list[tuple[int, int, list[int]]]:
    """Return (first, last, what is on the ways between) for operators that join ways; first is -1 for the begin of all.

    The first is the last operator that every way to the join leads through.
    """
    num_ops = problem.num_ops
    ancestors = [0] * num_ops
    dominators = [0] * num_ops
    sets = []
    for op in range(num_ops):
        writers = set(problem.producer[problem.inputs_of(op)].tolist())
        common = -1
        for writer in writers:
            ancestors[op] |= ancestors[writer] | 1 << writer
            common &= dominators[writer] | 1 << writer
        dominators[op] = common if writers else 0
        if len(writers) > 1:
            first = dominators[op].bit_length() - 1
            after = [item for item in range(ancestors[op].bit_length()) if ancestors[op] >> item & 1
                     and item != first and (first < 0 or ancestors[item] >> first & 1)]
            sets.append((first, op, after))
    sets.sort(key=lambda item: len(item[2]))
    total = np.cumsum([len(members) for _, _, members in sets])
    return sets[: int(np.searchsorted(total, MAX_BETWEEN, side="right"))]


def _alive_bytes(problem: PlaceProblem) -> F64:
    """Return [n] the bytes that an operator reads and writes, which are all on its device while it runs."""
    alive = np.zeros(problem.num_ops)
    if problem.has_lifetimes:
        reader = np.repeat(np.arange(problem.num_ops), np.diff(problem.input_start))
        np.add.at(alive, reader, problem.tensor_bytes[problem.inputs])
        np.add.at(alive, problem.producer, problem.tensor_bytes)
    return alive
