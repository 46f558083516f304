"""Usage over time: the times that matter, what every unit uses then, and strategies that can never fit.

Of all times only those matter at which no more nodes are alive a moment earlier or later. What a unit uses by its
strategy is cut into spans of equal usage; the least of each span is paid in any case and moves to ``base``. A strategy
that exceeds the limit even if all others use their least is removed; a time that cannot exceed it even if all use their
most does not matter. Both follow from each other, so they are repeated until nothing changes.
"""

from __future__ import annotations

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.strategies.strategy_graph import StrategyGraph
from weft.search.strategies.units import Bools, Units, remove

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
