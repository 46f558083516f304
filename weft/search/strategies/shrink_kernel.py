"""Compiled parts of the reductions: dominated strategies, and the minimum over a unit between two others."""

from __future__ import annotations

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.strategies.units import Bools


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
