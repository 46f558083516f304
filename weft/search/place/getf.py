"""GETF: groups of equally fast devices by a linear program, then earliest task first inside each operator's group.

Devices are grouped by speed (within a factor of 2 from the fastest on, which is log m / log log m for 16 devices);
those slower than the fastest by more than the number of devices m are left out. With ``t_jk`` the mean time of operator
j on group k, ``x_jk`` the part of it that is done there and ``C_j`` its end, the linear program (``_solve``) is

    minimise T    with    C_j >= C_i + sum_k t_jk x_jk      for every edge (i, j), without C_i for every operator
                          C_j <= T
                          sum_j t_jk x_jk <= T * (number of devices in k)
                          sum_k x_jk = 1,  x >= 0

Let l(j) be the fastest group such that at least half of j is done there or on faster ones; j is assigned to the group
of the largest total speed among l(j) and all faster ones (``_choose``). Units take the mean of their operators. ETF
then places every operator on a device of its group; where none of the group may run it or has room, on any other.

Su, Ren, Vardi and Wierman, "Communication-Aware Scheduling of Precedence-Constrained Tasks on Related Machines", 2020;
the grouping is of Chudak and Shmoys, 1999. Their machines are related (one speed for all operators); here ``t_jk`` are
the times themselves, and the speeds are geometric means.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.assignment import Assignment, Bools, with_room_for_tensors
from weft.search.place.lists import by_earliest_start, check_allowed, device_speeds
from weft.search.place.problem import PlaceProblem

MAX_VARIABLES: Final = 12_000
"""Above this (operators x groups) there is no linear program: all operators get the group of the largest speed."""


def getf(problem: PlaceProblem) -> Assignment:
    """Return the placement of GETF; see the module's docstring.

    With more than ``MAX_VARIABLES`` operators x groups, all operators are assigned to the group of the largest total
    speed.
    """
    check_allowed(problem, problem.is_allowed)
    return with_room_for_tensors(problem, partial(by_earliest_start, preferred=_preferred(problem)))


def speed_groups(problem: PlaceProblem) -> tuple[tuple[int, ...], ...]:
    """Return the devices in groups of about equal speed, the slowest group first."""
    speed = device_speeds(problem)
    groups: dict[int, list[int]] = {}
    for device in np.flatnonzero(speed * problem.num_devices >= 1.0).tolist():
        groups.setdefault(int(np.floor(-np.log2(speed[device]) + 1e-9)), []).append(device)
    return tuple(tuple(groups[key]) for key in sorted(groups, reverse=True))


def _preferred(problem: PlaceProblem) -> Bools:
    """Return [units, m] the devices of each unit's group."""
    groups = speed_groups(problem)
    if problem.num_ops * len(groups) <= MAX_VARIABLES:
        shares = _solve(problem, groups)
    else:
        shares = np.eye(len(groups))[np.zeros(problem.num_ops, dtype=np.int64)]
    by_unit = np.zeros((problem.num_units, len(groups)))
    np.add.at(by_unit, problem.unit_of_op, shares)
    chosen = _choose(problem, groups, by_unit / by_unit.sum(axis=1, keepdims=True))
    member = np.zeros((len(groups), problem.num_devices), dtype=np.bool_)
    for index, group in enumerate(groups):
        member[index, list(group)] = True
    return np.asarray(member[chosen])


def _choose(problem: PlaceProblem, groups: tuple[tuple[int, ...], ...], shares: F64) -> I64:
    """Return [units] the group of each unit by its shares."""
    speed = device_speeds(problem)
    total = np.array([speed[list(group)].sum() for group in groups])
    faster = np.cumsum(shares[:, ::-1], axis=1)[:, ::-1]
    slowest = np.where(faster >= 0.5 - 1e-9, np.arange(len(groups)), 0).max(axis=1)
    allowed = np.stack([problem.is_allowed[:, list(group)].any(axis=1) for group in groups], axis=1)
    fit = allowed & (np.arange(len(groups)) >= slowest[:, None])
    return np.asarray(np.argmax(np.where(fit, total, 0.0), axis=1), dtype=np.int64)


def _solve(problem: PlaceProblem, groups: tuple[tuple[int, ...], ...]) -> F64:
    """Return [n, groups] x of the linear program; all on the slowest group if the solver gives up."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    count, num_groups = problem.num_ops, len(groups)
    time_s, is_possible = _group_times(problem, groups)
    ops, wide = np.arange(count), count * num_groups
    size, last = wide + count + 1, wide + count
    pairs = np.unique(problem.edges[:, :2], axis=0)
    sources, targets = np.concatenate([pairs[:, 0], np.full(count, -1)]), np.concatenate([pairs[:, 1], ops])
    rows = np.arange(len(targets))
    has_source = sources >= 0
    follow = csr_array(
        (np.concatenate([time_s[targets].ravel(), -np.ones(len(rows)), np.ones(int(has_source.sum()))]),
         (np.concatenate([np.repeat(rows, num_groups), rows, rows[has_source]]),
          np.concatenate([(targets[:, None] * num_groups + np.arange(num_groups)).ravel(), wide + targets,
                          wide + sources[has_source]]))), shape=(len(rows), size))
    ends = csr_array((np.concatenate([np.ones(count), -np.ones(count)]),
                      (np.tile(ops, 2), np.concatenate([wide + ops, np.full(count, last)]))), shape=(count, size))
    loads = csr_array((np.concatenate([time_s.ravel(), [-float(len(group)) for group in groups]]),
                       (np.concatenate([np.tile(np.arange(num_groups), count), np.arange(num_groups)]),
                        np.concatenate([np.arange(wide), np.full(num_groups, last)]))), shape=(num_groups, size))
    whole = csr_array((np.ones(wide), (np.repeat(ops, num_groups), np.arange(wide))), shape=(count, size))
    upper = np.concatenate([np.where(is_possible, 1.0, 0.0).ravel(), np.full(count + 1, np.inf)])
    objective = np.zeros(size)
    objective[last] = 1.0
    result = linprog(objective, A_ub=vstack([follow, ends, loads]), b_ub=np.zeros(len(rows) + count + num_groups),
                     A_eq=whole, b_eq=np.ones(count), method="highs",
                     bounds=np.stack([np.zeros(size), upper], axis=1))
    if result.x is None:
        return np.eye(num_groups)[np.zeros(count, dtype=np.int64)]
    return np.asarray(result.x[:wide].reshape(count, num_groups), dtype=np.float64)


def _group_times(problem: PlaceProblem, groups: tuple[tuple[int, ...], ...]) -> tuple[F64, Bools]:
    """Return [n, groups] the mean times, scaled to a mean of 1, and where operators may run at all.

    An operator that may run in none of the groups counts as free in all: ETF places it elsewhere.
    """
    means, possible = [], []
    for group in groups:
        times = problem.time_s[:, list(group)]
        finite = np.isfinite(times)
        means.append(np.where(finite, times, 0.0).sum(axis=1) / np.maximum(1, finite.sum(axis=1)))
        possible.append(finite.any(axis=1))
    time_s, is_possible = np.stack(means, axis=1), np.stack(possible, axis=1)
    return time_s / max(float(time_s.mean()), 1e-300), is_possible | ~is_possible.any(axis=1, keepdims=True)
