"""Exact reductions of units: constants, dominated strategies, and units with few neighbours.

A unit with one strategy left is a constant. A strategy is dominated if another costs no more whatever the neighbours
choose, and never uses more. A unit whose usage does not matter and that has at most two neighbours is eliminated: its
best strategy is a function of theirs, and the cost of that becomes a cost of the neighbours (an edge between two).
A unit whose usage does matter but that has one neighbour is joined with it if, for every strategy of the neighbour, one
of its own strategies is both the cheapest and the least used.

Compiled parts of the reductions: dominated strategies, and the minimum over a unit between two others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.strategies.tuning import TUNING
from weft.search.strategies.units import NO_SPANS, Bools, Eliminated, Units, remove, settle


def shrink(units: Units, is_late: Callable[[], bool] = lambda: False) -> None:
    """Reduce the units until nothing changes; raise ``NoFeasiblePlan`` where usage or costs rule everything out.

    Once it ``is_late`` they stay as they are by then.
    """
    settle(units)
    units.touched |= set(range(len(units.cost)))
    while units.touched:
        # In rounds: a unit with hundreds of neighbours is looked at once, not after each of them.
        for unit in sorted(units.touched):
            if is_late():
                return
            units.touched.discard(unit)
            _shrink_one(units, unit)
        if not units.touched:
            settle(units)


def _shrink_one(units: Units, unit: int) -> None:
    if len(units.cost[unit]) > 1:
        _remove_dominated(units, unit)
    if len(units.cost[unit]) == 1:
        _fix(units, unit)
    elif len(units.cost[unit]) and not len(units.spans[unit]):
        if len(units.edges[unit]) <= 2:
            _eliminate(units, unit)
    elif len(units.edges[unit]) == 1:
        _join_leaf(units, unit)


def _remove_dominated(units: Units, unit: int) -> None:
    matrices = list(units.edges[unit].values())
    begins = np.cumsum([0, *(matrix.shape[1] for matrix in matrices)])
    count = len(units.cost[unit])
    if count * count * max(int(begins[-1]), 1) > TUNING.max_compared:
        return
    joint = np.concatenate([np.zeros((count, 0)), *matrices], axis=1)
    # A pair that is ruled out for both is no reason against either: any equal finite number will do.
    joint[np.isinf(joint)] = np.abs(joint[np.isfinite(joint)]).max(initial=1.0) * 1e6
    is_bad = dominated(units.cost[unit], joint, begins, units.amounts[unit])
    if is_bad.any():
        remove(units, unit, is_bad)


def _drop(units: Units, unit: int, neighbours: tuple[int, ...], best: I64) -> None:
    """Record how the unit follows from its neighbours, and take it out."""
    units.eliminated.append(Eliminated(unit=unit, neighbours=neighbours, best=units.kept[unit][best],
                                       kept=tuple(units.kept[other] for other in neighbours)))
    units.disconnect(unit)
    units.cost[unit] = np.zeros(0)
    units.spans[unit], units.amounts[unit] = NO_SPANS, np.zeros((0, 0))
    units.touched.discard(unit)


def _fix(units: Units, unit: int) -> None:
    """Take out a unit of one strategy."""
    units.constant += float(units.cost[unit][0])
    for other, matrix in units.edges[unit].items():
        units.cost[other] = units.cost[other] + matrix[0]
    for (begin, end), amount in zip(units.spans[unit].tolist(), units.amounts[unit][:, 0].tolist(), strict=True):
        units.base[begin:end] += amount
    _drop(units, unit, (), np.zeros((), dtype=np.int64))


def _eliminate(units: Units, unit: int) -> None:
    """Take out a unit whose usage does not matter and that has at most two neighbours."""
    cost, neighbours = units.cost[unit], tuple(units.edges[unit])
    matrices = [np.ascontiguousarray(units.edges[unit][other]) for other in neighbours]
    if len(cost) * int(np.prod([matrix.shape[1] for matrix in matrices])) > TUNING.max_table:
        return
    if not neighbours:
        best: I64 = cost.argmin()  # type: ignore[assignment]
        units.constant += float(cost[best])
    elif len(neighbours) == 1:
        table = cost[:, None] + matrices[0]
        best = table.argmin(axis=0)
        units.cost[neighbours[0]] = units.cost[neighbours[0]] + table.min(axis=0)
    else:
        best = np.zeros((matrices[0].shape[1], matrices[1].shape[1]), dtype=np.int64)
        table = through(cost, matrices[0], matrices[1], best)
    _drop(units, unit, neighbours, np.asarray(best))
    if len(neighbours) == 2:
        units.connect(neighbours[0], neighbours[1], table)


def _join_leaf(units: Units, unit: int) -> None:
    """Join a unit with its one neighbour, if what is cheapest given the neighbour's strategy also uses least."""
    other, matrix = next(iter(units.edges[unit].items()))
    table, amounts = units.cost[unit][:, None] + matrix, units.amounts[unit]
    best = table.argmin(axis=0)
    # Among the cheapest, the one that uses least in sum is the only candidate.
    is_cheapest = table <= table[best, np.arange(table.shape[1])]
    best = np.where(is_cheapest, amounts.sum(axis=0)[:, None], np.inf).argmin(axis=0)
    if not (amounts[:, best] == 0).all():
        return
    units.cost[other] = units.cost[other] + table[best, np.arange(len(best))]
    _drop(units, unit, (other,), best)


def left(units: Units) -> list[int]:
    """Return the units that are not eliminated."""
    return [unit for unit, cost in enumerate(units.cost) if len(cost)]


def lowest(units: Units) -> float:
    """Return a bound of what choices cost: the least of every unit and every edge by itself."""
    return units.constant + sum(float(units.cost[unit].min()) + sum(
        float(matrix.min()) for other, matrix in units.edges[unit].items() if other > unit) for unit in left(units))


# ---- compiled --------------------------------------------------------------------------------------------------------


@compiled
def dominated(cost: F64, joint: F64, begins: I64, amounts: F64) -> Bools:
    """Return the strategies than which another is never worse, in cost with any neighbours nor in usage.

    ``joint`` [strategies, all strategies of all neighbours], those of one neighbour from one of ``begins`` to the next.
    Most others are ruled out by the neighbours' strategies that suit the victim best, without a look at all of them.
    """
    count = len(cost)
    result = np.zeros(count, dtype=np.bool_)
    suits = np.zeros(len(begins) - 1, dtype=np.int64)
    for victim in range(count):
        for part in range(len(begins) - 1):
            suits[part] = begins[part] + np.argmin(joint[victim, begins[part]:begins[part + 1]])
        for other in range(count):
            if other == victim or result[other]:
                continue
            worst = cost[other] - cost[victim]
            for part in range(len(begins) - 1):
                worst += joint[other, suits[part]] - joint[victim, suits[part]]
            if worst > 0:
                continue
            worst = cost[other] - cost[victim]
            for part in range(len(begins) - 1):
                most = -np.inf
                for column in range(begins[part], begins[part + 1]):
                    most = max(most, joint[other, column] - joint[victim, column])
                worst += most
                if worst == np.inf:
                    break
            if worst > 0:
                continue
            uses_more = False
            for span in range(len(amounts)):
                if amounts[span, other] > amounts[span, victim]:
                    uses_more = True
                    break
            if not uses_more:
                result[victim] = True
                break
    return result


@compiled
def through(cost: F64, left: F64, right: F64, best: I64) -> F64:
    """Return the least cost of a unit by the strategies of two neighbours; ``best`` becomes the unit's strategy."""
    count, rows = left.shape
    columns = right.shape[1]
    result = np.full((rows, columns), np.inf)
    for strategy in range(count):
        for row in range(rows):
            here = cost[strategy] + left[strategy, row]
            for column in range(columns):
                value = here + right[strategy, column]
                if value < result[row, column]:
                    result[row, column] = value
                    best[row, column] = strategy
    return result
