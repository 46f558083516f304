"""List scheduling by the classic rules: HEFT (and over device subsets), PEFT, CPoP, ETF, GETF.

All take what the problem says into account while they place: units, allowed devices, memory for weights, transfers
that are sent once and occupy links or ports, devices that share a core. Means over devices are over those on which
the operator may run; means of transfer times are over all ordered pairs of devices that have a way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.place.assignment import Assignment, Bools, with_room_for_tensors
from weft.search.place.problem import PlaceProblem

if TYPE_CHECKING:
    from weft.search.place.room import Room

_ALL_SUBSETS: Final = 8
"""With at most so many devices, HEFT over subsets tries all of them."""
_SUBSET_OPS: Final = 400_000
"""About so many operators in all are placed by HEFT over subsets, if the caller does not say how many subsets."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Means:
    """Times of operators and transfers without regard to where they run."""

    allowed: Bools
    """[units, m]"""
    op_s: F64
    """[n]"""
    sent_s: F64
    """[tensors]"""


def make_means(problem: PlaceProblem, allowed: Bools) -> Means:
    """Return the mean times over the devices and pairs of devices that are allowed."""
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
    return Means(allowed=allowed, op_s=op_s, sent_s=np.asarray(sent_s, dtype=np.float64))


def _mean(table: F64, where: Bools) -> float:
    return float(table[where].mean()) if where.any() else 0.0


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
    allowed = _allowed_on(problem, devices)
    check_allowed(problem, allowed)
    return with_room_for_tensors(problem, partial(_heft, allowed=allowed))


def _heft(problem: PlaceProblem, *, allowed: Bools) -> Assignment:
    means = make_means(problem, allowed)
    return _by_priority(problem, allowed, upward_rank(problem, means.op_s, means.sent_s))


def _allowed_on(problem: PlaceProblem, devices: Sequence[int]) -> Bools:
    mask = np.zeros(problem.num_devices, dtype=np.bool_)
    mask[list(devices)] = True
    return problem.is_allowed & mask


def check_allowed(problem: PlaceProblem, allowed: Bools) -> None:
    """Raise ``NoFeasiblePlan`` if operators that share a device may all run on none of the devices."""
    stuck = np.flatnonzero(~allowed.any(axis=1))
    if len(stuck):
        ops = np.flatnonzero(problem.unit_of_op == stuck[0])[:3]
        names = ", ".join(repr(problem.op_names[op]) for op in ops)
        raise NoFeasiblePlan(f"no device of those asked for may run {names}, which must share one: allow them on a "
                             "common device, or use more devices")


def best_heft(problem: PlaceProblem, max_subsets: int | None = None) -> Assignment:
    """Return the best of HEFT's placements on subsets of the devices, by the latency of their timetables.

    All subsets with up to 8 devices; else all devices, each alone, the fastest ones, and neighbours by link speed.
    ``max_subsets`` limits how many are tried; None lets the number of operators decide.
    """
    if max_subsets is None:
        max_subsets = int(np.clip(_SUBSET_OPS // max(1, problem.num_ops), 24, 2**_ALL_SUBSETS))
    best: Assignment | None = None
    best_s, problems = np.inf, []
    for count, devices in enumerate(device_subsets(problem)):
        if count >= max_subsets and best is not None:
            break
        try:
            found = heft_on(problem, devices)
        except NoFeasiblePlan as error:
            problems.append(error)
            continue
        latency_s = latency_of(problem, found)
        if latency_s < best_s:
            best, best_s = found, latency_s
    if best is None:
        raise problems[0]
    return best


def latency_of(problem: PlaceProblem, assignment: Assignment) -> float:
    """Return the latency of the assignment's timetable, without making it in full."""
    from weft.search.place import kernel

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


def upward_rank(problem: PlaceProblem, op_s: F64, sent_s: F64) -> F64:
    """Return [n] the longest way from the start of each operator to the end, transfers included."""
    from weft.search.place import rank_kernel

    return rank_kernel.upward(op_s, sent_s, problem.edges)


def _by_priority(problem: PlaceProblem, allowed: Bools, priority: F64, *, extra: F64 | None = None,
                 pinned: I64 | None = None) -> Assignment:
    """Return the list schedule into gaps; operators by the start that it found for them."""
    from weft.search.place import kernel, list_kernel
    from weft.search.place.room import place_with_room

    added = np.zeros_like(problem.time_s) if extra is None else extra
    fixed = np.full(problem.num_ops, -1, dtype=np.int64) if pinned is None else pinned
    arrays, flow = kernel.Arrays.of(problem), list_kernel.make_flow(problem)

    def place(room: Room) -> tuple[int, Assignment]:
        state = list_kernel.make_state(problem)
        failed = list_kernel.place_by_priority(arrays, room, flow, state, priority, added, fixed)
        turn = np.empty(problem.num_ops, dtype=np.int64)
        turn[state.order] = np.arange(problem.num_ops)
        order = np.lexsort((turn, state.start_s)).astype(np.int64)
        return failed, Assignment(device=state.device, order=order)

    return place_with_room(problem, allowed, place)


def peft(problem: PlaceProblem) -> Assignment:
    """Return the placement of PEFT.

    Ready operators by the mean of their row in the optimistic cost table, each where finish time plus table entry is
    smallest. The entry of an operator on a device is the longest way from its end to the end of all, each operator
    after it on the device that is best for it. Arabnejad and Barbosa, "List Scheduling Algorithm for Heterogeneous
    Systems by an Optimistic Cost Table", IEEE TPDS 2014.
    """
    check_allowed(problem, problem.is_allowed)
    return with_room_for_tensors(problem, _peft)


def _peft(problem: PlaceProblem) -> Assignment:
    from weft.search.place import rank_kernel

    means = make_means(problem, problem.is_allowed)
    where = problem.is_allowed[problem.unit_of_op]
    table = rank_kernel.optimistic(np.where(where, problem.time_s, np.inf), means.sent_s, problem.edges)
    rank = np.where(where, table, 0.0).sum(axis=1) / where.sum(axis=1)
    return _by_priority(problem, problem.is_allowed, rank, extra=table)


def cpop(problem: PlaceProblem) -> Assignment:
    """Return the placement of CPoP.

    Ready operators by the length of the longest way through them (mean times); those of the critical path go to the
    one device that runs the path fastest, the others where they finish first, into gaps. An operator of the path that
    this device may not run, or has no room for, is placed as the others. Topcuoglu, Hariri and Wu, 2002.
    """
    check_allowed(problem, problem.is_allowed)
    return with_room_for_tensors(problem, _cpop)


def _cpop(problem: PlaceProblem) -> Assignment:
    from weft.search.place import rank_kernel

    means = make_means(problem, problem.is_allowed)
    up = upward_rank(problem, means.op_s, means.sent_s)
    down = rank_kernel.downward(means.op_s, means.sent_s, problem.edges)
    path = rank_kernel.critical_path(up, means.sent_s, problem.edges)
    pinned = np.full(problem.num_ops, -1, dtype=np.int64)
    times = np.where(problem.is_allowed[problem.unit_of_op[path]], problem.time_s[path], np.inf)
    forbidden = np.isinf(times).sum(axis=0)
    total = np.where(np.isinf(times), 0.0, times).sum(axis=0)
    pinned[path] = np.lexsort((total, forbidden))[0]
    return _by_priority(problem, problem.is_allowed, up + down, pinned=pinned)


# ---- earliest start -----------------------------------------------------------------------------------------------


def etf(problem: PlaceProblem) -> Assignment:
    """Return the placement of ETF: always the ready operator and the device that can start first.

    Among equal starts the operator with the longest way to the end (times only), then the earliest end. Hwang, Chow,
    Anger and Lee, "Scheduling Precedence Graphs in Systems with Interprocessor Communication Times", SIAM J. Computing
    1989.
    """
    check_allowed(problem, problem.is_allowed)
    return with_room_for_tensors(problem, by_earliest_start)


def by_earliest_start(problem: PlaceProblem, *, favourite: I64 | None = None, preferred: Bools | None = None
                      ) -> Assignment:
    """Return ETF's placement with favourite children ([n], -1 for none) and preferred devices ([units, m])."""
    from weft.search.place import earliest_kernel, kernel, list_kernel
    from weft.search.place.room import place_with_room

    means = make_means(problem, problem.is_allowed)
    arrays, flow = kernel.Arrays.of(problem), list_kernel.make_flow(problem)
    wishes = earliest_kernel.Wishes(
        level=upward_rank(problem, means.op_s, np.zeros(problem.num_tensors)),
        favourite=np.full(problem.num_ops, -1, dtype=np.int64) if favourite is None else favourite,
        preferred=problem.is_allowed if preferred is None else preferred, sent_anywhere_s=means.sent_s)

    def place(room: Room) -> tuple[int, Assignment]:
        state = list_kernel.make_state(problem)
        failed = earliest_kernel.place_earliest(arrays, room, flow, state, wishes)
        return failed, Assignment(device=state.device, order=state.order)

    return place_with_room(problem, problem.is_allowed, place)
