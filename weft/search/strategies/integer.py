"""A reduced strategy graph as a mixed integer program, solved with HiGHS (the adapter to ``scipy.optimize.milp``).

    minimise    sum of cost[i, k] x[i, k] + sum of cost[e, k, l] z[e, k, l]
    such that   x[i, .] sum to 1; z[e, k, .] sum to x[i, k]; z[e, ., l] sum to x[j, l]; usage at every time <= limit

``x`` is 0 or 1, ``z`` follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.model.graph import F64, I64
from weft.search.strategies.core import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerResult:
    """What the solver found: the choice, if any, and a bound of the core's cost."""

    x: I64 | None
    bound: float
    is_infeasible: bool


def solve_integer(original: Core, messages: F64, *, best: float, seconds: float) -> IntegerResult:
    """Return the best choice of the core and a bound of its cost, given the least cost known (infinite if none).

    Messages move costs between units and edges, so that what the solver sees are differences near the optimum instead
    of large sums: its tolerances are relative to these. A part above what separates bound and best is never chosen, so
    it need not be told how far above it is.
    """
    from scipy.optimize import Bounds, milp

    core, constant = moved(original, messages)
    if np.isfinite(best):
        most = 1.01 * max(best - constant, 0.0) + 1e-9 * abs(best)
        core = core._replace(cost=np.minimum(core.cost, most), matrices=np.minimum(core.matrices, most))
    scale = max(float(core.cost.max(initial=0.0)), float(core.matrices.max(initial=0.0)), 1e-300)
    pair_costs, constraints = _program(core)
    num_x, costs = len(core.cost), np.concatenate([core.cost, pair_costs]) / scale
    found = milp(costs, integrality=np.arange(len(costs)) < num_x, bounds=Bounds(0.0, 1.0), constraints=constraints,
                 options={"time_limit": max(seconds, 0.01), "mip_rel_gap": 0.0})
    bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) * scale + constant
    if found.status == 2:
        return IntegerResult(x=None, bound=np.inf, is_infeasible=True)
    if found.x is None:
        return IntegerResult(x=None, bound=bound, is_infeasible=False)
    taken = found.x[:num_x]
    x = np.array([int(taken[begin:end].argmax()) for begin, end in zip(core.first[:-1], core.first[1:], strict=True)],
                 dtype=np.int64)
    return IntegerResult(x=x, bound=bound, is_infeasible=False)


def moved(core: Core, messages: F64) -> tuple[Core, float]:
    """Return the core with costs moved along messages and nothing below 0, and the cost that all choices lost."""
    cost, matrices, constant = core.cost.copy(), core.matrices.copy(), 0.0
    for unit in range(len(core.first) - 1):
        begin, end = core.first[unit], core.first[unit + 1]
        for arc in range(core.arc[unit], core.arc[unit + 1]):
            sent = messages[core.message[arc] : core.message[arc + 1]]
            received = messages[core.message[core.back[arc]] : core.message[core.back[arc] + 1]]
            cost[begin:end] += sent
            view = matrices[core.matrix[arc] : core.matrix[arc] + len(sent) * len(received)].reshape(len(sent), -1)
            view -= sent[:, None]
            view -= received[None, :]
            least = float(view.min())
            view -= least
            constant += least if core.head[arc] > unit else 0.0
        least = float(cost[begin:end].min())
        cost[begin:end] -= least
        constant += least
    return core._replace(cost=cost, matrices=matrices), constant


def _program(core: Core) -> tuple[F64, Any]:
    """Return the costs of all pairs of strategies, and the constraints."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix, vstack

    owner, sizes = np.repeat(np.arange(len(core.first) - 1), np.diff(core.arc)), np.diff(core.first)
    costs, equations, strategies, count = [np.zeros(0)], [np.zeros((2, 0), dtype=np.int64)], list[I64](), 0
    for arc in np.flatnonzero(core.head > owner).tolist():
        unit, other = owner[arc], core.head[arc]
        height, width = sizes[unit], sizes[other]
        costs.append(core.matrices[core.matrix[arc] : core.matrix[arc] + height * width])
        # A pair counts in the equation of the first unit's strategy, and in that of the second's.
        rows, columns = np.indices((height, width)).reshape(2, -1)
        equations.append(count + np.stack([rows, height + columns]))
        strategies += [np.arange(core.first[unit], core.first[unit + 1]),
                       np.arange(core.first[other], core.first[other + 1])]
        count += height + width
    of_pair, pair_costs = np.concatenate(equations, axis=1), np.concatenate(costs)
    num_x, num_z = len(core.cost), len(pair_costs)
    one = csr_matrix((np.ones(num_x), (np.repeat(np.arange(len(sizes)), sizes), np.arange(num_x))),
                     shape=(len(sizes), num_x + num_z))
    variables = np.concatenate([np.tile(num_x + np.arange(num_z), 2), *strategies])
    follow = csr_matrix((np.concatenate([np.ones(2 * num_z), -np.ones(count)]),
                         (np.concatenate([*of_pair, np.arange(count)]), variables)), shape=(count, num_x + num_z))
    usage = _usage(core, num_x + num_z)
    lower = np.concatenate([np.ones(len(sizes)), np.zeros(count), np.full(len(core.base), -np.inf)])
    upper = np.concatenate([np.ones(len(sizes)), np.zeros(count), 1.0 - core.base / core.limit])
    return pair_costs, LinearConstraint(vstack([one, follow, usage]).tocsr(), lower, upper)


def _usage(core: Core, width: int) -> Any:
    """Return the share of the limit that every strategy uses at every time."""
    from scipy.sparse import csr_matrix

    rows, columns, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for unit in range(len(core.first) - 1):
        size = core.first[unit + 1] - core.first[unit]
        for span in range(core.span[unit], core.span[unit + 1]):
            amounts = core.amounts[core.amount[span] : core.amount[span] + size]
            used = np.flatnonzero(amounts)
            times = np.arange(core.begin[span], core.end[span])
            rows.append(np.repeat(times, len(used)))
            columns.append(np.tile(core.first[unit] + used, len(times)))
            values.append(np.tile(amounts[used], len(times)) / core.limit)
    return csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
                      shape=(len(core.base), width))
