"""List scheduling by the classic rules: HEFT (and over device subsets), PEFT, CPoP, ETF, m-SCT, GETF.

All take what the problem says into account while they place: units, allowed devices, memory for weights, transfers
that are sent once and occupy links or ports, devices that share a core. Means over devices are over those on which
the operator may run; means of transfer times are over all ordered pairs of devices that have a way.

*m-SCT*: small communication times with memory, after Baechi.

Each operator has at most one *favourite child*, which should follow it on its device without a transfer, and is the
favourite child of at most one operator. With ``p_i`` mean times, ``c_e`` mean transfer times, ``s_i`` starts, ``x_e``
0 for an edge to a favourite child and 1 for others, they come from the linear program (``_solve_favourites``)

    minimise w    with    s_i + p_i + c_e x_e <= s_j    for every edge e = (i, j)
                          s_i + p_i <= w                for every operator
                          sum of x over the edges out of i >= their number - 1, over the edges into j likewise
                          0 <= x <= 1,  s >= 0

rounded: an edge with ``x_e < 1/2`` leads to a favourite child; by the sums there is at most one such edge out of and
into an operator. ETF then places, and a device whose last operator has a favourite child waits for it: any other
operator may start there only once what it reads could be everywhere (``weft.search.place.list_kernel``). A device
without room for the child does not wait. Times are means because SCT was made for equal devices; ETF uses those of each
device.

Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020; the linear program is of Hanen and
Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small communication delays",
1995.

*GETF*: groups of equally fast devices by a linear program, then earliest task first inside each operator's group.

Devices are grouped by speed (within a factor of 2 from the fastest on, which is log m / log log m for 16 devices);
those slower than the fastest by more than the number of devices m are left out. With ``t_jk`` the mean time of operator
j on group k, ``x_jk`` the part of it that is done there and ``C_j`` its end, the linear program (``_solve_groups``) is

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

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.place import kernel, list_kernel
from weft.search.place.list_kernel import Room
from weft.search.place.problem import Bools, PlaceProblem, Rows
from weft.search.place.timetable import Assignment, Method, with_room_for_tensors

_ALL_SUBSETS: Final = 8
"""With at most so many devices, HEFT over subsets tries all of them."""
_SUBSET_OPS: Final = 400_000
"""About so many operators in all are placed by HEFT over subsets, on at least ``_LEAST_SUBSETS``."""
_LEAST_SUBSETS: Final = 24
MAX_EDGES: Final = 8_000
"""Above this, m-SCT chooses favourite children greedily: the linear program would take longer than all else."""
MAX_VARIABLES: Final = 12_000
"""Above this (operators x groups) GETF has no linear program: all operators get the group of the largest speed."""


def make_means(problem: PlaceProblem, allowed: Bools) -> tuple[F64, F64]:
    """Return the mean times of operators [n] and of sending tensors, over the devices and pairs that are allowed."""
    where = allowed[problem.unit_of_op]
    op_s = np.where(where, problem.time_s, 0.0).sum(axis=1) / np.maximum(1, where.sum(axis=1))
    used = np.asarray(allowed.any(axis=0))
    pairs = used[:, None] & used[None, :] & ~np.eye(problem.num_devices, dtype=np.bool_)
    by_bytes = np.asarray(pairs & np.isfinite(problem.latency_s))
    sent_s = _mean(problem.latency_s, by_bytes) + _mean(problem.s_per_byte, by_bytes) * problem.tensor_bytes
    given = problem.given_row >= 0
    if given.any():
        rows = np.array([_mean(table, np.asarray(pairs & np.isfinite(table))) for table in problem.given_s])
        sent_s = np.where(given, rows[problem.given_row], sent_s)
    return op_s, np.asarray(sent_s, dtype=np.float64)


def _mean(table: F64, where: Bools) -> float:
    return float(table[where].mean()) if where.any() else 0.0


def _by_list(problem: PlaceProblem, method: Method, allowed: Bools | None = None) -> Assignment:
    """Return the list's answer with room for tensors; raise ``NoFeasiblePlan`` where a unit may run nowhere at all."""
    stuck = np.flatnonzero(~(problem.is_allowed if allowed is None else allowed).any(axis=1))
    if len(stuck):
        ops = np.flatnonzero(problem.unit_of_op == stuck[0])[:3]
        names = ", ".join(repr(problem.op_names[op]) for op in ops)
        raise NoFeasiblePlan(f"no device of those asked for may run {names}, which must share one: allow them on a "
                             "common device, or use more devices")
    return with_room_for_tensors(problem, method)


# ---- HEFT ---------------------------------------------------------------------------------------------------------


def heft(problem: PlaceProblem) -> Assignment:
    """Return the placement of HEFT on all devices.

    Operators by falling upward rank (mean time plus the longest way to the end, mean transfers included), each into
    the gap of the device where it finishes first. Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity
    Task Scheduling for Heterogeneous Computing", IEEE TPDS 2002.
    """
    return heft_on(problem, range(problem.num_devices))


def heft_on(problem: PlaceProblem, devices: Sequence[int]) -> Assignment:
    """Return the placement of HEFT on these devices only; raise ``NoFeasiblePlan`` where an operator fits on none."""
    allowed = problem.is_allowed & np.isin(np.arange(problem.num_devices), devices)

    def place(problem: PlaceProblem) -> Assignment:
        return _schedule(problem, allowed, list_kernel.upward(*make_means(problem, allowed), problem.edges))

    return _by_list(problem, place, allowed)


def best_heft(problem: PlaceProblem) -> Assignment:
    """Return the best of HEFT's placements on subsets of the devices, by the latency of their timetables.

    All subsets with up to 8 devices; else all devices, each alone, the fastest ones, and neighbours by link speed; the
    more, the fewer operators there are.
    """
    num_subsets = int(np.clip(_SUBSET_OPS // max(1, problem.num_ops), _LEAST_SUBSETS, 2**_ALL_SUBSETS))
    best: Assignment | None = None
    best_s, misses = np.inf, []
    for count, devices in enumerate(device_subsets(problem)):
        if count >= num_subsets and best is not None:
            break
        try:
            found = heft_on(problem, devices)
        except NoFeasiblePlan as miss:
            misses.append(miss)
            continue
        latency_s = latency_of(problem, found)
        if latency_s < best_s:
            best, best_s = found, latency_s
    if best is None:
        raise misses[0]
    return best


def latency_of(problem: PlaceProblem, assignment: Assignment) -> float:
    """Return the latency of the assignment's timetable, without making it in full."""
    start_s = kernel.decode(kernel.Arrays.of(problem), assignment.device, assignment.order)[0]
    ends = start_s + problem.time_s[np.arange(problem.num_ops), assignment.device]
    return float(ends.max(initial=0.0))


def device_subsets(problem: PlaceProblem) -> Iterator[tuple[int, ...]]:
    """Yield sets of devices to try, the most promising first: all, singles, the fastest ones, neighbours, others."""
    count = problem.num_devices
    speed = device_speeds(problem)
    by_speed = sorted(range(count), key=lambda device: (-speed[device], device))
    family = [tuple(range(count)), *((device,) for device in by_speed),
              *(tuple(sorted(by_speed[:size])) for size in range(2, count)), *_neighbours(problem)]
    if count <= _ALL_SUBSETS:
        family += [subset for size in range(2, count) for subset in combinations(range(count), size)]
    yield from dict.fromkeys(family)


def device_speeds(problem: PlaceProblem) -> F64:
    """Return each device's speed relative to the fastest: the geometric mean over operators that run on all devices.

    Where no operator runs on all, over those that run on the device.
    """
    times = np.where(problem.time_s > 0, problem.time_s, np.nan)
    times = np.where(np.isfinite(times), times, np.nan)
    everywhere = np.isfinite(times).all(axis=1)
    if everywhere.any():
        times = times[everywhere]
    ratio = np.log(times / np.nanmin(np.where(np.isnan(times), np.inf, times), axis=1, keepdims=True))
    known = np.isfinite(ratio)
    mean = np.where(known, ratio, 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
    speed = np.exp(-mean) * (known.any(axis=0) | ~known.any())
    return np.asarray(speed / max(speed.max(initial=0.0), 1e-300), dtype=np.float64)


def _neighbours(problem: PlaceProblem) -> list[tuple[int, ...]]:
    """Return the sets of devices that are joined by links of at least some speed, for every speed."""
    probe = float(problem.tensor_bytes.mean()) if problem.num_tensors else 0.0
    cost = problem.latency_s + problem.s_per_byte * probe
    if len(problem.given_s):
        cost = problem.given_s.mean(axis=0)
    cost = np.maximum(cost, cost.T)
    group = np.arange(problem.num_devices)
    found: list[tuple[int, ...]] = []
    pairs = sorted(combinations(range(problem.num_devices), 2), key=lambda pair: (float(cost[pair]), pair))
    for index, (one, other) in enumerate(pairs):
        group[group == group[other]] = group[one]
        is_last_of_cost = index + 1 == len(pairs) or cost[pairs[index + 1]] > cost[one, other]
        if is_last_of_cost:
            members = [tuple(np.flatnonzero(group == label).tolist()) for label in dict.fromkeys(group.tolist())]
            found += [items for items in members if len(items) > 1]
    return list(dict.fromkeys(found))


# ---- ranks --------------------------------------------------------------------------------------------------------


def _schedule(problem: PlaceProblem, allowed: Bools, priority: F64, *, in_gaps: bool = True, extra: F64 | None = None,
              pinned: I64 | None = None, favourite: I64 | None = None, preferred: Bools | None = None) -> Assignment:
    """Return the list schedule (see ``list_kernel.place_all``); into gaps, operators by the start found for them."""
    none = np.full(problem.num_ops, -1, dtype=np.int64)
    wishes = list_kernel.Wishes(
        priority=priority, extra=np.zeros_like(problem.time_s) if extra is None else extra,
        pinned=none if pinned is None else pinned, favourite=none if favourite is None else favourite,
        preferred=problem.is_allowed if preferred is None else preferred,
        sent_anywhere_s=make_means(problem, problem.is_allowed)[1])
    arrays = kernel.Arrays.of(problem)

    def place(room: Room) -> tuple[int, Assignment]:
        state = list_kernel.make_state(problem)
        failed = list_kernel.place_all(arrays, room, state, wishes, in_gaps=in_gaps)
        turn = np.empty(problem.num_ops, dtype=np.int64)
        turn[state.order] = np.arange(problem.num_ops)
        order = np.lexsort((turn, state.start_s)).astype(np.int64) if in_gaps else state.order
        return failed, Assignment(device=state.device, order=order)

    return list_kernel.place_with_room(problem, allowed, place)


def peft(problem: PlaceProblem) -> Assignment:
    """Return the placement of PEFT.

    Ready operators by the mean of their row in the optimistic cost table, each where finish time plus table entry is
    smallest. The entry of an operator on a device is the longest way from its end to the end of all, each operator
    after it on the device that is best for it. Arabnejad and Barbosa, "List Scheduling Algorithm for Heterogeneous
    Systems by an Optimistic Cost Table", IEEE TPDS 2014.
    """
    return _by_list(problem, _peft)


def _peft(problem: PlaceProblem) -> Assignment:
    _, sent_s = make_means(problem, problem.is_allowed)
    where = problem.is_allowed[problem.unit_of_op]
    table = list_kernel.optimistic(np.where(where, problem.time_s, np.inf), sent_s, problem.edges)
    rank = np.where(where, table, 0.0).sum(axis=1) / where.sum(axis=1)
    return _schedule(problem, problem.is_allowed, rank, extra=table)


def cpop(problem: PlaceProblem) -> Assignment:
    """Return the placement of CPoP.

    Ready operators by the length of the longest way through them (mean times); those of the critical path go to the
    one device that runs the path fastest, the others where they finish first, into gaps. An operator of the path that
    this device may not run, or has no room for, is placed as the others. Topcuoglu, Hariri and Wu, 2002.
    """
    return _by_list(problem, _cpop)


def _cpop(problem: PlaceProblem) -> Assignment:
    op_s, sent_s = make_means(problem, problem.is_allowed)
    up = list_kernel.upward(op_s, sent_s, problem.edges)
    down = list_kernel.downward(op_s, sent_s, problem.edges)
    path = list_kernel.critical_path(up, sent_s, problem.edges)
    pinned = np.full(problem.num_ops, -1, dtype=np.int64)
    times = np.where(problem.is_allowed[problem.unit_of_op[path]], problem.time_s[path], np.inf)
    forbidden = np.isinf(times).sum(axis=0)
    total = np.where(np.isinf(times), 0.0, times).sum(axis=0)
    pinned[path] = np.lexsort((total, forbidden))[0]
    return _schedule(problem, problem.is_allowed, up + down, pinned=pinned)


# ---- earliest start -----------------------------------------------------------------------------------------------


def etf(problem: PlaceProblem) -> Assignment:
    """Return the placement of ETF: always the ready operator and the device that can start first.

    Among equal starts the operator with the longest way to the end (times only), then the earliest end. Hwang, Chow,
    Anger and Lee, "Scheduling Precedence Graphs in Systems with Interprocessor Communication Times", SIAM J. Computing
    1989.
    """
    return _by_list(problem, by_earliest_start)


def by_earliest_start(problem: PlaceProblem, *, favourite: I64 | None = None, preferred: Bools | None = None
                      ) -> Assignment:
    """Return ETF's placement with favourite children ([n], -1 for none) and preferred devices ([units, m])."""
    level = list_kernel.upward(make_means(problem, problem.is_allowed)[0], np.zeros(problem.num_tensors), problem.edges)
    return _schedule(problem, problem.is_allowed, level, in_gaps=False, favourite=favourite, preferred=preferred)


# ---- m-SCT ----------------------------------------------------------------------------------------------------------


def m_sct(problem: PlaceProblem) -> Assignment:
    """Return the placement of m-SCT; see the module's docstring.

    With more than ``MAX_EDGES`` edges, favourite children are chosen without the linear program: edges by falling
    transfer time, where neither end has one yet.
    """
    return _by_list(problem, partial(by_earliest_start, favourite=favourite_children(problem)))


def favourite_children(problem: PlaceProblem) -> I64:
    """Return [n] the favourite child of each operator, or -1."""
    op_s, sent_s = make_means(problem, problem.is_allowed)
    pairs, index = np.unique(problem.edges[:, :2], axis=0, return_inverse=True)
    edge_s = sent_s[problem.edges[:, 2]]
    pair_s = np.bincount(index.ravel(), weights=edge_s, minlength=len(pairs)).astype(np.float64)
    favourite = np.full(problem.num_ops, -1, dtype=np.int64)
    if 0 < len(pairs) <= MAX_EDGES:
        chosen = pairs[_solve_favourites(op_s, pairs, pair_s) < 0.5]
        favourite[chosen[:, 0]] = chosen[:, 1]
        return favourite
    has_parent = np.zeros(problem.num_ops, dtype=np.bool_)
    for source, target in pairs[np.argsort(-pair_s, kind="stable")].tolist():
        if favourite[source] < 0 and not has_parent[target]:
            favourite[source] = target
            has_parent[target] = True
    return favourite


def _solve_favourites(op_s: F64, pairs: I64, pair_s: F64) -> F64:
    """Return [pairs] x of the linear program; all 1 if the solver gives up. Times are scaled to a mean of 1."""
    from scipy.optimize import linprog

    num_ops, num_pairs = len(op_s), len(pairs)
    scale, last = 1.0 / max(float(op_s.mean()), float(pair_s.mean()), 1e-300), num_ops + num_pairs
    rows = Rows()
    for pair, (source, target) in enumerate(pairs.tolist()):
        rows.add([(source, 1.0), (target, -1.0), (num_ops + pair, pair_s[pair] * scale)], -op_s[source] * scale)
    for op in range(num_ops):
        rows.add([(op, 1.0), (last, -1.0)], -op_s[op] * scale)
    for ends in pairs.T:
        for op in range(num_ops):
            edges = np.flatnonzero(ends == op)
            rows.add([(num_ops + int(pair), -1.0) for pair in edges], 1.0 - len(edges))
    upper = np.concatenate([np.full(num_ops, np.inf), np.ones(num_pairs), [np.inf]])
    result = linprog(np.eye(1, last + 1, last)[0], A_ub=rows.matrix(last + 1), b_ub=rows.limits, method="highs",
                     bounds=np.stack([np.zeros(last + 1), upper], axis=1))
    return np.ones(num_pairs) if result.x is None else np.asarray(result.x[num_ops:-1], dtype=np.float64)


# ---- GETF -----------------------------------------------------------------------------------------------------------


def getf(problem: PlaceProblem) -> Assignment:
    """Return the placement of GETF; see the module's docstring.

    With more than ``MAX_VARIABLES`` operators x groups, all operators are assigned to the group of the largest total
    speed.
    """
    return _by_list(problem, partial(by_earliest_start, preferred=_preferred(problem)))


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
        shares = _solve_groups(problem, groups)
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


def _solve_groups(problem: PlaceProblem, groups: tuple[tuple[int, ...], ...]) -> F64:
    """Return [n, groups] x of the linear program; all on the slowest group if the solver gives up."""
    from scipy.optimize import linprog

    count, num_groups = problem.num_ops, len(groups)
    time_s, is_possible = _group_times(problem, groups)
    wide, last = count * num_groups, count * num_groups + count
    work = [list(zip(range(op * num_groups, (op + 1) * num_groups), time_s[op].tolist(), strict=True))
            for op in range(count)]
    follow, rows, whole = np.unique(problem.edges[:, :2], axis=0).tolist(), Rows(), Rows()
    for source, target in follow:
        rows.add([*work[target], (wide + target, -1.0), (wide + source, 1.0)], 0.0)
    for op in range(count):
        rows.add([*work[op], (wide + op, -1.0)], 0.0)
    for op in range(count):
        rows.add([(wide + op, 1.0), (last, -1.0)], 0.0)
    for index, group in enumerate(groups):
        rows.add([*(terms[index] for terms in work), (last, -float(len(group)))], 0.0)
    for terms in work:
        whole.add([(column, 1.0) for column, _ in terms], 1.0)
    upper = np.concatenate([np.where(is_possible, 1.0, 0.0).ravel(), np.full(count + 1, np.inf)])
    result = linprog(np.eye(1, last + 1, last)[0], A_ub=rows.matrix(last + 1), b_ub=rows.limits,
                     A_eq=whole.matrix(last + 1), b_eq=whole.limits, method="highs",
                     bounds=np.stack([np.zeros(last + 1), upper], axis=1))
    if result.x is None:
        return np.eye(num_groups)[np.zeros(count, dtype=np.int64)]
    return np.asarray(result.x[:wide].reshape(count, num_groups), dtype=np.float64)


def _group_times(problem: PlaceProblem, groups: tuple[tuple[int, ...], ...]) -> tuple[F64, Bools]:
    """Return [n, groups] the mean times, scaled to a mean of 1, and where operators may run at all.

    An operator that may run in none of the groups counts as free in all: ETF places it elsewhere.
    """
    finite = np.isfinite(problem.time_s)
    times = np.where(finite, problem.time_s, 0.0)
    time_s = np.stack([times[:, list(group)].sum(axis=1) / np.maximum(1, finite[:, list(group)].sum(axis=1))
                       for group in groups], axis=1)
    is_possible = np.stack([finite[:, list(group)].any(axis=1) for group in groups], axis=1)
    return time_s / max(float(time_s.mean()), 1e-300), is_possible | ~is_possible.any(axis=1, keepdims=True)
