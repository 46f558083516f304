"""Units: nodes of a strategy graph whose strategies determine each other, taken as one; exact, and undone at the end.

Strategy graphs from compilers are full of edges that only say "the two choose alike": every strategy of one node goes
with exactly one of the other. Such nodes become one *unit*. What a unit's strategies mean for its nodes is in
``option``; which of them are left is in ``kept``. All later reductions work on units:

    make_units      parallel edges added up, strategies that are ruled out removed, nodes that choose alike joined
    remove          takes strategies from a unit, and what thereby becomes impossible from its neighbours
    choice_of       the way back: from strategies of units to strategies of nodes, through the units eliminated

Usage over time: the times that matter, what every unit uses then, and strategies that can never fit.

Of all times only those matter at which no more nodes are alive a moment earlier or later. What a unit uses by its
strategy is cut into spans of equal usage; the least of each span is paid in any case and moves to ``base``. A strategy
that exceeds the limit even if all others use their least is removed; a time that cannot exceed it even if all use their
most does not matter. Both follow from each other, so they are repeated until nothing changes.
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
        units = plain_units(list(self.cost), [dict(edges) for edges in self.edges], self.members, self.option)
        units.kept, units.constant, units.eliminated = list(self.kept), self.constant, list(self.eliminated)
        return units

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


def plain_units(cost: list[F64], edges: list[dict[int, F64]], members: list[list[int]], option: list[I64]) -> Units:
    """Return units with all their strategies left, whose usage counts for nothing."""
    return Units(cost=cost, edges=edges, members=members, option=option, spans=[NO_SPANS] * len(cost),
                 kept=[np.arange(len(item), dtype=np.int64) for item in cost], base=np.zeros(0),
                 amounts=[np.zeros((0, len(item))) for item in cost], times=np.zeros(0, dtype=np.int64))


def make_units(graph: StrategyGraph) -> Units:
    """Return the units of the graph; raise ``NoFeasiblePlan`` if costs rule every choice out."""
    units = plain_units([_as_float(cost) for cost in graph.costs], _join_parallel(graph),
                        [[node] for node in range(graph.num_nodes)], [np.arange(len(cost)) for cost in graph.costs])
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
    merged = plain_units([np.zeros(len(units.cost[old])) for old in number], [{} for _ in number],
                         [[] for _ in number], list(units.option))
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


# ---- usage over time -------------------------------------------------------------------------------------------------


ROUNDING = 5e-10
"""Of the limit; sums of usages that are not whole numbers may be off by so much."""


def add_usage(graph: StrategyGraph, units: Units) -> None:
    """Give the units their usage over the times that matter; nothing where the graph has no limit."""
    if graph.usage_limit is None:
        return
    is_whole = all(usage.dtype.kind == "i" for usage in graph.usages)
    units.limit = float(graph.usage_limit) * (1.0 if is_whole else 1.0 + ROUNDING)
    times = maximal_times(graph.intervals)
    span = np.searchsorted(times, graph.intervals)
    units.base, units.times = np.zeros(len(times)), np.arange(len(times), dtype=np.int64)
    fixed = np.zeros(len(times) + 1)
    for unit, members in enumerate(units.members):
        alive = [node for node in members if span[node, 1] > span[node, 0]]
        if not alive:
            continue
        used = np.array([graph.usages[node][units.option[node][units.kept[unit]]] for node in alive], dtype=np.float64)
        if used.shape[1] == 1:
            np.add.at(fixed, span[alive, 0], used[:, 0])
            np.subtract.at(fixed, span[alive, 1], used[:, 0])
        else:
            units.spans[unit], units.amounts[unit] = _stack(span[alive], used)
    units.base += np.cumsum(fixed)[:-1]


def maximal_times(intervals: I64) -> I64:
    """Return the times that matter: a node begins there, and the next thing that happens is the end of a node."""
    is_alive = intervals[:, 1] > intervals[:, 0]
    begins, ends = np.unique(intervals[is_alive, 0]), np.unique(intervals[is_alive, 1])
    events = np.union1d(begins, ends)
    return events[:-1][np.isin(events[:-1], begins) & np.isin(events[1:], ends)] if len(events) else events


def _stack(span: I64, used: F64) -> tuple[I64, F64]:
    """Return disjoint spans and the sums of what is used there."""
    points = np.unique(span)
    change = np.zeros((len(points), used.shape[1]))
    np.add.at(change, np.searchsorted(points, span[:, 0]), used)
    np.subtract.at(change, np.searchsorted(points, span[:, 1]), used)
    return np.stack([points[:-1], points[1:]], axis=1), np.cumsum(change, axis=0)[:-1]


def settle(units: Units) -> None:
    """Remove strategies that never fit and times that never matter; raise ``NoFeasiblePlan`` where nothing fits."""
    if not len(units.base):
        return
    while _remove_misfits(units):
        pass
    _drop_times(units, _highest(units) > units.limit)
    _drop_times(units, ~_dominated(units))


def _remove_misfits(units: Units) -> bool:
    has_removed = False
    which = [unit for unit, spans in enumerate(units.spans) if len(spans)]
    for unit in which:
        _rebase(units, unit)
    worst = int(units.base.argmax())
    if units.base[worst] > units.limit:
        least = float(units.base[worst])
        raise NoFeasiblePlan(f"no choice fits: even if every node uses its least, the peak is {least:.15g}, above the "
                             f"usage limit of {units.limit:.15g}. Raise usage_limit to {least:.15g} or more.",
                             needed=least)
    for unit in which:
        spans, amounts = units.spans[unit], units.amounts[unit]
        if not len(spans):
            continue
        peaks = np.array([units.base[begin:end].max() for begin, end in spans.tolist()])
        is_bad = ((amounts + peaks[:, None]) > units.limit).any(axis=0)
        if is_bad.all():
            node = units.members[unit][0]
            raise NoFeasiblePlan(
                f"no choice fits: whatever strategy node {node} takes, some time needs more than the usage limit of "
                f"{units.limit:.15g} even if all other nodes use their least. Raise usage_limit.")
        if is_bad.any():
            remove(units, unit, is_bad)
            has_removed = True
    return has_removed


def _rebase(units: Units, unit: int) -> None:
    """Move what the unit uses in any case to the base; keep spans in which strategies differ."""
    amounts = units.amounts[unit]
    least = amounts.min(axis=1)
    for (begin, end), amount in zip(units.spans[unit].tolist(), least.tolist(), strict=True):
        if amount > 0:
            units.base[begin:end] += amount
    rest = amounts - least[:, None]
    differs = rest.any(axis=1)
    units.spans[unit], units.amounts[unit] = units.spans[unit][differs], rest[differs]


def _highest(units: Units) -> F64:
    change = np.zeros(len(units.base) + 1)
    for spans, amounts in zip(units.spans, units.amounts, strict=True):
        if len(spans):
            most = amounts.max(axis=1)
            np.add.at(change, spans[:, 0], most)
            np.subtract.at(change, spans[:, 1], most)
    return units.base + np.cumsum(change)[:-1]


def _dominated(units: Units) -> Bools:
    """Return the times beside which, just before or just after, every choice uses at least as much."""
    count = len(units.base)
    has_rise, has_fall = np.zeros(count + 1, dtype=np.bool_), np.zeros(count + 1, dtype=np.bool_)
    for spans, amounts in zip(units.spans, units.amounts, strict=True):
        if not len(spans):
            continue
        points = np.unique(spans)
        value = np.zeros((len(points) + 1, amounts.shape[1]))
        value[np.searchsorted(points, spans[:, 0]) + 1] = amounts
        change = np.diff(value, axis=0)
        has_rise[points[(change > 0).any(axis=1)]] = True
        has_fall[points[(change < 0).any(axis=1)]] = True
    step = np.diff(units.base)
    result = np.zeros(count, dtype=np.bool_)
    result[:-1] |= ~has_fall[1:count] & (step >= 0)
    result[1:] |= ~has_rise[1:count] & ((step < 0) | ((step == 0) & has_fall[1:count]))
    return result


def _drop_times(units: Units, is_kept: Bools) -> None:
    if is_kept.all():
        return
    place = np.concatenate([[0], np.cumsum(is_kept)])
    units.base, units.times = units.base[is_kept], units.times[is_kept]
    for unit, spans in enumerate(units.spans):
        if len(spans):
            moved = place[spans]
            is_there = moved[:, 1] > moved[:, 0]
            units.spans[unit], units.amounts[unit] = moved[is_there], units.amounts[unit][is_there]
            if not is_there.all():
                units.touched.add(unit)
