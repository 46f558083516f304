"""Units: nodes of a strategy graph whose strategies determine each other, taken as one; exact, and undone at the end.

Strategy graphs from compilers are full of edges that only say "the two choose alike": every strategy of one node goes
with exactly one of the other. Such nodes become one *unit*. What a unit's strategies mean for its nodes is in
``option``; which of them are left is in ``kept``. All later reductions work on units:

    make_units      parallel edges added up, strategies that are ruled out removed, nodes that choose alike joined
    remove          takes strategies from a unit, and what thereby becomes impossible from its neighbours
    choice_of       the way back: from strategies of units to strategies of nodes, through the units eliminated
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.strategies.strategy_graph import FORBIDDEN, Numbers, StrategyGraph

NO_SPANS: Final[I64] = np.zeros((0, 2), dtype=np.int64)
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eliminated:
    """A unit whose best strategy follows from those of its neighbours."""

    unit: int
    neighbours: tuple[int, ...]
    kept: tuple[I64, ...]
    """Strategies of the neighbours at that time; the axes of ``best``."""
    best: I64
    """The unit's strategy, as in its ``kept``."""


@dataclass(kw_only=True)
class Units:
    """Units and what is left of them. ``u`` units; emptied entries of ``cost`` are units that are gone."""

    cost: list[F64]
    """[u][strategies left]; infinite nowhere."""
    edges: list[dict[int, F64]]
    """[u][neighbour] costs by own strategy and the neighbour's; infinity for a pair that is ruled out."""
    kept: list[I64]
    """[u] the strategies left, by their number in ``option``; rising."""
    members: list[list[int]]
    """[u] nodes."""
    option: list[I64]
    """[node] its strategy by strategy of its unit."""
    spans: list[I64]
    """[u][s, 2] times, half open and apart from each other, in which the unit's usage depends on its strategy."""
    amounts: list[F64]
    """[u][s, strategies left] what the unit uses then beyond the least, which is in ``base``."""
    base: F64
    """[times] what is used in any case."""
    times: I64
    """[times] the number that each had at first."""
    limit: float = np.inf
    constant: float = 0.0
    """What is paid in any case."""
    eliminated: list[Eliminated] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    """Units that changed since someone looked."""

    def without_usage(self) -> Units:
        """Return a copy to be reduced apart, in which usage counts for nothing."""
        return Units(cost=list(self.cost), edges=[dict(edges) for edges in self.edges], kept=list(self.kept),
                     members=self.members, option=self.option, spans=[NO_SPANS] * len(self.cost),
                     amounts=[np.zeros((0, len(cost))) for cost in self.cost], base=np.zeros(0),
                     times=np.zeros(0, dtype=np.int64), constant=self.constant, eliminated=list(self.eliminated))

    def disconnect(self, unit: int) -> None:
        """Take the unit's edges out."""
        for other in self.edges[unit]:
            del self.edges[other][unit]
            self.touched.add(other)
        self.edges[unit] = {}

    def connect(self, first: int, second: int, matrix: F64) -> None:
        """Add an edge, or to the edge that is there."""
        if second in self.edges[first]:
            matrix = self.edges[first][second] + matrix
        self.edges[first][second] = matrix
        self.edges[second][first] = matrix.T
        self.touched |= {first, second}

    def all_strategies(self, strategy: dict[int, int]) -> dict[int, int]:
        """Return the strategy of every unit (as in ``kept``), given those of the units that are not eliminated."""
        chosen = dict(strategy)
        for step in reversed(self.eliminated):
            at = tuple(int(np.searchsorted(kept, chosen[other]))
                       for other, kept in zip(step.neighbours, step.kept, strict=True))
            chosen[step.unit] = int(step.best[at])
        return chosen

    def choice_of(self, chosen: dict[int, int]) -> list[int]:
        """Return the strategy of every node, given that of every unit (as in ``kept``)."""
        choice = [0] * len(self.option)
        for unit, members in enumerate(self.members):
            for node in members:
                choice[node] = int(self.option[node][chosen[unit]])
        return choice


def make_units(graph: StrategyGraph) -> Units:
    """Return the units of the graph; raise ``NoFeasiblePlan`` if costs rule every choice out."""
    units = Units(
        cost=[_as_float(cost) for cost in graph.costs], edges=_join_parallel(graph),
        kept=[np.arange(len(cost), dtype=np.int64) for cost in graph.costs],
        members=[[node] for node in range(graph.num_nodes)],
        option=[np.arange(len(cost), dtype=np.int64) for cost in graph.costs],
        spans=[NO_SPANS] * graph.num_nodes, amounts=[np.zeros((0, len(cost))) for cost in graph.costs],
        base=np.zeros(0), times=np.zeros(0, dtype=np.int64))
    while True:
        for unit, cost in enumerate(units.cost):
            if np.isinf(cost).any():
                remove(units, unit, np.isinf(cost), and_spread=False)
        spread(units, range(len(units.cost)))
        merged = _merge(units)
        if merged is None:
            return units
        units = merged


def _as_float(array: Numbers) -> F64:
    result = array.astype(np.float64)
    result[array >= FORBIDDEN] = np.inf
    return result


def _join_parallel(graph: StrategyGraph) -> list[dict[int, F64]]:
    joined: dict[tuple[int, int], F64] = {}
    for (a, b), array in zip(graph.edges.tolist(), graph.edge_costs, strict=True):
        key = (min(a, b), max(a, b))
        matrix = _as_float(array) if a < b else _as_float(array).T
        joined[key] = joined[key] + matrix if key in joined else matrix
    edges: list[dict[int, F64]] = [{} for _ in graph.costs]
    for (a, b), matrix in joined.items():
        edges[a][b], edges[b][a] = matrix, matrix.T
    return edges


def remove(units: Units, unit: int, is_bad: Bools, *, and_spread: bool = True) -> None:
    """Take strategies from a unit; with ``and_spread`` also what has no partner left in its neighbours."""
    good = ~is_bad
    if not good.any():
        node = units.members[unit][0]
        raise NoFeasiblePlan(f"no choice is allowed: every strategy of node {node} has a cost of 10^18 or more, by "
                             "itself or with every strategy that is left to a neighbour")
    units.cost[unit] = units.cost[unit][good]
    units.kept[unit] = units.kept[unit][good]
    units.amounts[unit] = units.amounts[unit][:, good]
    units.touched.add(unit)
    for other, matrix in units.edges[unit].items():
        smaller = matrix[good]
        units.edges[unit][other], units.edges[other][unit] = smaller, smaller.T
        units.touched.add(other)
    if and_spread:
        spread(units, [unit])


def spread(units: Units, changed: Iterable[int]) -> None:
    """Remove strategies that no strategy of some neighbour goes with, until none is left."""
    waiting = dict.fromkeys(changed)
    while waiting:
        unit, _ = waiting.popitem()
        for other, matrix in list(units.edges[unit].items()):
            is_bad: Bools = np.isinf(matrix).all(axis=0)  # type: ignore[assignment]
            if is_bad.any():
                remove(units, other, is_bad, and_spread=False)
                waiting[other] = None


def _merge(units: Units) -> Units | None:
    """Return the units with those joined that choose alike; None where there are none."""
    leader, position, silent = _alike(units)
    count = len(leader)
    if len(set(leader)) == count:
        return None
    number = {old: new for new, old in enumerate(sorted(set(leader)))}
    merged = Units(cost=[np.zeros(len(units.cost[old])) for old in number], edges=[{} for _ in number],
                   kept=[np.arange(len(units.cost[old]), dtype=np.int64) for old in number],
                   members=[[] for _ in number], option=list(units.option), spans=[NO_SPANS] * len(number),
                   amounts=[np.zeros((0, len(units.cost[old]))) for old in number], base=units.base,
                   times=units.times)
    for old in range(count):
        new = number[leader[old]]
        merged.cost[new] = merged.cost[new] + units.cost[old][position[old]]
        merged.members[new] += units.members[old]
        for node in units.members[old]:
            merged.option[node] = units.option[node][units.kept[old][position[old]]]
    for old in range(count):
        for other, matrix in units.edges[old].items():
            if other < old or (old, other) in silent:
                continue
            first, second = number[leader[old]], number[leader[other]]
            rows = matrix[position[old]]
            if first == second:
                merged.cost[first] = merged.cost[first] + rows[np.arange(len(rows)), position[other]]
            else:
                merged.connect(first, second, rows[:, position[other]])
    return merged


def _alike(units: Units) -> tuple[list[int], list[I64], set[tuple[int, int]]]:
    """Return for every unit its leader, and its strategy by strategy of the leader.

    An edge that says nothing but that the two choose alike, at no cost, is named in the last part.
    """
    leader = [-1] * len(units.cost)
    position = [np.zeros(0, dtype=np.int64)] * len(units.cost)
    silent: set[tuple[int, int]] = set()
    for start in range(len(leader)):
        if leader[start] >= 0:
            continue
        leader[start], position[start] = start, np.arange(len(units.cost[start]), dtype=np.int64)
        stack = [start]
        while stack:
            unit = stack.pop()
            for other, matrix in units.edges[unit].items():
                if leader[other] >= 0 or len(units.cost[unit]) != len(units.cost[other]) or len(units.cost[unit]) == 1:
                    continue
                is_pair = np.isfinite(matrix)
                if np.count_nonzero(is_pair) != len(matrix):
                    continue
                match = is_pair.argmax(axis=1)
                if len(set(match.tolist())) != len(match):
                    continue
                leader[other], position[other] = start, match[position[unit]]
                if not matrix[np.arange(len(match)), match].any():
                    silent.add((min(unit, other), max(unit, other)))
                stack.append(other)
    return leader, position, silent
