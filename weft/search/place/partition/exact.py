"""The least latency of a dnn-partitioning problem by CP-SAT, or a bound on it.

Variables: ``x[u, k]`` unit u is in set k (0: on CPUs); ``y[v, k]`` what node v writes enters or leaves set k;
``i[v, k]`` it enters; ``f[v]`` when node v ends; ``S[k]``, ``F[k]`` when set k starts and ends.

    f[v] >= f[u] + cpu[v] x[v, 0]   for every edge u -> v
    F[k] >= S[k] + times and costs of k;  f[v] >= F[k] if v is in k;  S[k] >= f[u] if u enters k
    every path: the times of its nodes and the costs of its edges, where they are, are within the latency

Times are scaled to whole numbers and rounded down: the solver's bound is one for the real problem. Circles of sets that
take no time are not excluded; such a solution is not used.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve, whole
from weft.search.place.fit import add_hints, add_numbering, add_parted, chosen, numbered, unit_choices
from weft.search.place.partition.kernel import Graph, longest_path

RESOLUTION = float(1 << 27)
"""The known latency in whole numbers."""
SECONDS_PER_UNIT = (4.8, 7.5)
"""CPU seconds of a unit of deterministic time for these models, by linearization."""
MAX_TERMS = 300_000
"""Larger models are not built."""
SECONDS_PER_TERM = 1.5e-5
"""CPU seconds to build a model, about; not more than half of the effort goes there."""


def improve_or_prove(g: Graph, where: I64, value: float, *, budget: Budget, effort: float, seed: int,
                     linearization: int) -> tuple[I64 | None, float]:
    """Return better sets, perhaps, and a bound; the given sets are the hint."""
    num_terms = (len(g.cpu_s) + len(g.targets)) * (g.num_sets + 1) * 4
    if num_terms > MAX_TERMS or num_terms * SECONDS_PER_TERM > effort / 2:
        return None, 0.0
    builder = _Builder(g, where, value)
    found = solve(builder.model, budget, effort=effort, seed=seed, linearization=linearization,
                  seconds_per_unit=SECONDS_PER_UNIT[linearization], max_seconds=3 * effort + 1)
    if found.status == "infeasible":
        return None, value
    if not found.has_values or found.bound is None:
        return None, 0.0
    return chosen(found, builder.x), min(value, found.bound / builder.scale)


class _Builder:
    def __init__(self, g: Graph, where: I64, value: float) -> None:
        self.g, self.model = g, cp_model.CpModel()
        self.scale = RESOLUTION / max(value, 1e-300)
        self.top = int(RESOLUTION)
        allowed = (g.can_set[:, None] == 1) | (np.arange(g.num_sets + 1) == 0)
        self.x = unit_choices(self.model, allowed)
        order, alike = list(dict.fromkeys(g.unit.tolist())), [list(range(1, g.num_sets + 1))] * (g.num_sets > 0)
        add_hints(self.model, self.x, numbered(where, order, alike))
        self.cpu, self.fpga, self.cost = ([whole(item, self.scale, RESOLUTION) for item in times]
                                          for times in (g.cpu_s, g.fpga_s, g.cost_s))
        self.latency = self.model.new_int_var(0, self.top, "latency")
        self.finish = [self.model.new_int_var(0, self.top, f"f{node}") for node in range(len(g.cpu_s))]
        self.start = [self.model.new_int_var(0, self.top, f"S{index}") for index in range(g.num_sets + 1)]
        self.end = [self.model.new_int_var(0, self.top, f"F{index}") for index in range(g.num_sets + 1)]
        self.paid: dict[tuple[int, int], cp_model.IntVar] = {}
        for node in range(len(g.cpu_s)):
            self._node(node)
        for index in range(1, g.num_sets + 1):
            self._set(index)
        self._paths()
        add_numbering(self.model, self.x, order, alike)
        self.model.minimize(self.latency)

    def _node(self, node: int) -> None:
        g, model, x = self.g, self.model, self.x
        unit = int(g.unit[node])
        model.add(self.finish[node] >= self.cpu[node] * x[unit][0])
        model.add(self.latency >= self.finish[node])
        for index, item in x[unit].items():
            if index:
                model.add(self.finish[node] >= self.end[index]).only_enforce_if(item)
        targets = g.targets[g.target_start[node] : g.target_start[node + 1]].tolist()
        for target in targets:
            model.add(self.finish[target] >= self.finish[node] + self.cpu[target] * x[int(g.unit[target])][0])
        for index in range(1, g.num_sets + 1) if targets else ():
            self._crossing(node, sorted({int(g.unit[target]) for target in targets} - {unit}), index)

    def _crossing(self, node: int, readers: list[int], index: int) -> None:
        """What the node writes enters or leaves the set."""
        model, x = self.model, self.x
        inside = x[int(self.g.unit[node])].get(index)
        others = [x[reader].get(index) for reader in readers]
        if not readers or (inside is None and all(other is None for other in others)):
            return
        paid = model.new_bool_var(f"y{node}_{index}")
        enters = model.new_bool_var(f"i{node}_{index}")
        self.paid[node, index] = paid
        model.add_implication(enters, paid)
        for other in others:
            add_parted(model, paid, inside, other)
            add_parted(model, enters, other, inside)
        model.add(self.start[index] >= self.finish[node]).only_enforce_if(enters)

    def _set(self, index: int) -> None:
        g, x = self.g, self.x
        nodes = [node for node in range(len(g.cpu_s)) if index in x[int(g.unit[node])]]
        load = sum(x[int(g.unit[node])][index] * self.fpga[node] for node in nodes if self.fpga[node])
        load += sum(item * self.cost[node] for (node, there), item in self.paid.items()
                    if there == index and self.cost[node])
        self.model.add(self.end[index] >= self.start[index] + load)
        self.model.add(self.latency >= self.end[index])
        scale = min(1.0, RESOLUTION / max(g.capacity, 1.0))
        sizes = np.bincount(g.unit, weights=g.size, minlength=len(g.can_set))
        if sizes.sum() > g.capacity:
            self.model.add(sum(row[index] * whole(sizes[unit], scale, RESOLUTION)
                               for unit, row in enumerate(x) if index in row) <= int(g.capacity * scale))

    def _paths(self) -> None:
        """Add the linear inequality of the path that is longest by fastest times, and of the one by costs."""
        g = self.g
        for weights in (np.minimum(g.cpu_s, g.fpga_s), g.cost_s + 1e-9, g.cpu_s):
            path = longest_path(g, weights).tolist()
            terms = []
            for node in path:
                for index, item in self.x[int(g.unit[node])].items():
                    terms.append(item * (self.fpga[node] if index else self.cpu[node]))
            for node, follower in pairwise(path):
                terms += self._step(node, follower)
            self.model.add(sum(terms) <= self.latency)

    def _step(self, node: int, follower: int) -> list[cp_model.LinearExpr]:
        """Return what an edge of a path costs the sets at both of its ends, which are on the path as well."""
        unit, other = int(self.g.unit[node]), int(self.g.unit[follower])
        if unit == other or not self.cost[node]:
            return []
        if self.g.target_start[node + 1] - self.g.target_start[node] == 1:
            return [item * self.cost[node] for index in range(1, self.g.num_sets + 1)
                    if (item := self.paid.get((node, index))) is not None]
        terms = []
        for index in sorted((self.x[unit].keys() | self.x[other].keys()) - {0}):
            parted = self.model.new_bool_var(f"d{node}_{follower}_{index}")
            for one, two in ((unit, other), (other, unit)):
                add_parted(self.model, parted, self.x[one].get(index), self.x[two].get(index))
            terms.append(parted * self.cost[node])
        return terms
