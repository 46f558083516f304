"""Compiled list scheduling: operators are taken one after the other and get the device that a rule likes best.

``place_all`` books operators, and the transfers that they need, in a *calendar*: one row of busy intervals for each
core and for each thing that transfers occupy. *Into gaps*, it takes the ready operator of the highest priority and puts
everything into the earliest gaps. HEFT, PEFT and CPoP differ in priorities and in what they add to the finish time.

*By earliest start*, it takes, of all ready operators and devices, the pair that can start first. Nothing is put into
gaps, so the times are those of ``make_timetable``. Two additions to ETF, each idle unless used:

- *favourite children* (m-SCT): the device whose last operator has a favourite child waits for it; another operator may
  only start there once what it reads could be on every device (it is *urgent*).
- *preferred devices* (GETF): an operator goes to one of these, to others only if none of them has room.

*Memory* (``Room``): the weights of a whole unit count when its first operator is placed; a weight counts once per
device. Where that leaves an operator without room, ``place_with_room`` starts again with room kept for the operator's
unit: the published lists know no memory, and on tight devices they would rarely end.

*Ranks* are passes over the edges: (producer, reader, tensor) rows in the readers' order, operators in topological
order. Read backwards, every operator is complete before it is used; read forwards as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.place.kernel import Arrays, sort_inputs, transfer_s
from weft.search.place.problem import Bools, PlaceProblem, csr, starts_of
from weft.search.place.timetable import Assignment, no_room

_MAX_ROUNDS: Final = 16
"""Times that a list is started, with room kept for ever more units; the last time for all of them."""


class Room(NamedTuple):
    """Where units may run and what they keep there; the last three change while operators are placed."""

    unit_of_op: I64
    allowed: Bools
    """[units, m]"""
    weight_start: I64
    """[units + 1]"""
    weights: I64
    weight_bytes: F64
    free: F64
    """[m] bytes left."""
    held: Bools
    """[m, weights] the device has the weight."""
    home: I64
    """[units] the device, or -1."""


def make_room(problem: PlaceProblem, allowed: Bools) -> Room:
    """Return the memory of the problem with nothing placed."""
    start, weights = csr(problem.unit_weights)
    return Room(
        unit_of_op=problem.unit_of_op, allowed=allowed, weight_start=start, weights=weights,
        weight_bytes=problem.weight_bytes, free=problem.capacity.copy(),
        held=np.zeros((problem.num_devices, len(problem.weight_bytes)), dtype=np.bool_),
        home=np.full(problem.num_units, -1, dtype=np.int64))


@compiled
def can_take(room: Room, unit: int, device: int) -> bool:
    """Return whether the unit may run on the device and its weights fit there, or it lives there."""
    if room.home[unit] >= 0:
        return bool(room.home[unit] == device)
    if not room.allowed[unit, device]:
        return False
    needed = 0.0
    for slot in range(room.weight_start[unit], room.weight_start[unit + 1]):
        if not room.held[device, room.weights[slot]]:
            needed += room.weight_bytes[room.weights[slot]]
    return bool(needed <= room.free[device])


@compiled
def take(room: Room, unit: int, device: int) -> None:
    """Let the unit live on the device, if it has no home yet."""
    if room.home[unit] >= 0:
        return
    room.home[unit] = device
    for slot in range(room.weight_start[unit], room.weight_start[unit + 1]):
        weight = room.weights[slot]
        if not room.held[device, weight]:
            room.held[device, weight] = True
            room.free[device] -= room.weight_bytes[weight]


@compiled
def _pack(room: Room, units: I64, time_s: F64, is_tight: bool) -> bool:
    """Give each of the units a home in this order; return whether all found one.

    The fastest device with room, or if ``is_tight`` the one that has the least memory left.
    """
    for unit in units:
        best, best_value = -1, np.inf
        for device in range(len(room.free)):
            if can_take(room, unit, device):
                value = room.free[device] if is_tight else time_s[unit, device]
                if best < 0 or value < best_value:
                    best, best_value = device, value
        if best < 0:
            return False
        take(room, unit, best)
    return True


def _room_with(problem: PlaceProblem, allowed: Bools, units: list[int]) -> Room | None:
    """Return the memory with room kept for these units, the largest first, or None if that cannot be."""
    times = np.zeros((problem.num_units, problem.num_devices))
    np.add.at(times, problem.unit_of_op, problem.time_s)
    largest_first = sorted(units, key=lambda unit: (-problem.weight_bytes[problem.unit_weights[unit]].sum(), unit))
    for is_tight in (False, True):
        room = make_room(problem, allowed)
        if _pack(room, np.array(largest_first, dtype=np.int64), times, is_tight):
            return room
    return None


def place_with_room(problem: PlaceProblem, allowed: Bools, place: Callable[[Room], tuple[int, Assignment]]
                    ) -> Assignment:
    """Return the assignment of ``place``, which returns (the operator for which there was no room or -1, assignment).

    Where there was no room it is called again, with the units that had none on devices chosen beforehand. Raise
    ``NoFeasiblePlan`` if this cannot help.
    """
    everything = list(range(problem.num_units))
    kept: list[int] = []
    error: NoFeasiblePlan | None = None
    for turn in range(_MAX_ROUNDS):
        room = _room_with(problem, allowed, kept) if turn < _MAX_ROUNDS - 1 else None
        room = room or _room_with(problem, allowed, everything)
        if room is None:
            break
        failed, found = place(room)
        if failed < 0:
            return found
        error = error or no_room(problem, failed, found.device, allowed[problem.unit_of_op[failed]])
        if not kept and _room_with(problem, allowed, everything) is None:
            break
        kept.append(int(problem.unit_of_op[failed]))
    assert error is not None
    raise error


class State(NamedTuple):
    """How far a list got, and space to work in."""

    flow_start: I64
    """[n + 1] ``flow[flow_start[i]:flow_start[i + 1]]`` read what operator ``i`` writes, once for each tensor."""
    flow: I64
    device: I64
    """[n] -1 where nothing is placed yet."""
    start_s: F64
    end_s: F64
    arrival: F64
    """[tensors, m] when a tensor is there, infinite where it was never sent."""
    order: I64
    """[n] operators in the order in which they were taken."""
    waiting: I64
    """[n] reads that are not written yet."""
    ready: I64
    """Operators that can be taken, as many as the list says."""
    missing: I64
    """The tensors that the operator at hand must still get."""
    sent_s: F64
    """When each of them would be sent."""
    last: I64
    """[m] the last operator on each device, or -1."""
    trial_row: I64
    trial_s: F64
    """Bookings for the operator at hand: rows, and [bookings, 2] begin and end."""


def make_state(problem: PlaceProblem) -> State:
    """Return the state before anything is placed: ready is what reads nothing."""
    edges, waiting = problem.edges, np.diff(problem.input_start)
    count, num_devices = problem.num_ops, problem.num_devices
    widest = max(1, int(np.diff(problem.input_start).max(initial=0)))
    bookings = widest * max(1, int(np.diff(problem.resource_start).max(initial=0)))
    return State(
        flow_start=starts_of(edges[:, 0], count), flow=edges[np.argsort(edges[:, 0], kind="stable"), 1].copy(),
        device=np.full(count, -1, dtype=np.int64), start_s=np.zeros(count), end_s=np.zeros(count),
        arrival=np.full((problem.num_tensors, num_devices), np.inf), order=np.full(count, -1, dtype=np.int64),
        waiting=waiting, ready=np.argsort(waiting > 0, kind="stable").astype(np.int64),
        missing=np.empty(widest, dtype=np.int64), sent_s=np.empty(widest),
        last=np.full(num_devices, -1, dtype=np.int64),
        trial_row=np.empty(bookings, dtype=np.int64), trial_s=np.empty((bookings, 2)))


@compiled
def release(state: State, op: int, num_ready: int) -> int:
    """Return how many operators are ready once this one is placed."""
    for slot in range(state.flow_start[op], state.flow_start[op + 1]):
        reader = state.flow[slot]
        state.waiting[reader] -= 1
        if state.waiting[reader] == 0:
            state.ready[num_ready] = reader
            num_ready += 1
    return num_ready


# ---- when things are free -----------------------------------------------------------------------------------------


class Calendar(NamedTuple):
    """Busy intervals by row, in order of time; rows are cores, then what transfers occupy."""

    begin: F64
    end: F64
    length: I64
    """[rows] how many intervals each row has."""
    in_gaps: bool
    """Gaps are used; else all comes after the last interval of its row, and only that is kept, as the first."""


@compiled
def _gap(calendar: Calendar, row: int, ready: float, length: float) -> float:
    """Return the earliest time from ``ready`` on at which the row is free for ``length``."""
    if not calendar.in_gaps:
        return float(max(ready, calendar.end[row, 0]))
    low, high = 0, calendar.length[row]
    while low < high:
        middle = (low + high) // 2
        if calendar.end[row, middle] > ready:
            high = middle
        else:
            low = middle + 1
    begin = ready
    for index in range(low, calendar.length[row]):
        if begin + length <= calendar.begin[row, index]:
            break
        begin = max(begin, calendar.end[row, index])
    return float(begin)


@compiled
def _wider(calendar: Calendar) -> Calendar:
    """Return the calendar with twice the space."""
    num_rows, size = calendar.begin.shape
    begin, end = np.empty((num_rows, 2 * size)), np.empty((num_rows, 2 * size))
    for row in range(num_rows):  # element by element: assigning slices takes numba seconds to compile
        for index in range(calendar.length[row]):
            begin[row, index] = calendar.begin[row, index]
            end[row, index] = calendar.end[row, index]
    return Calendar(begin, end, calendar.length, calendar.in_gaps)


@compiled
def _book(calendar: Calendar, row: int, begin: float, end: float) -> Calendar:
    """Return the calendar with one more interval; into gaps, what takes no time is not written down."""
    if not calendar.in_gaps:
        calendar.end[row, 0] = end
        return calendar
    if end <= begin:
        return calendar
    count = calendar.length[row]
    if count == calendar.begin.shape[1]:
        calendar = _wider(calendar)
    place = count
    while place > 0 and calendar.begin[row, place - 1] > begin:
        calendar.begin[row, place] = calendar.begin[row, place - 1]
        calendar.end[row, place] = calendar.end[row, place - 1]
        place -= 1
    calendar.begin[row, place] = begin
    calendar.end[row, place] = end
    calendar.length[row] = count + 1
    return calendar


@compiled
def _slot(a: Arrays, calendar: Calendar, state: State, num_trial: int, pair: int, ready: float, length: float) -> float:
    """Return the earliest time at which all that the transfer occupies is free, trial bookings included."""
    num_devices = a.time_s.shape[1]
    begin = ready
    while True:
        before = begin
        for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
            row = num_devices + a.resources[index]
            begin = _gap(calendar, row, begin, length)
            for other in range(num_trial):
                if state.trial_row[other] == row and begin < state.trial_s[other, 1] and (
                        begin + length > state.trial_s[other, 0] or not calendar.in_gaps):
                    begin = state.trial_s[other, 1]
        if begin == before:
            return begin


@compiled
def _try(a: Arrays, calendar: Calendar, state: State, op: int, here: int) -> tuple[int, float]:
    """Return how many tensors are sent (``state.missing`` at ``state.sent_s``) and when the operator would start."""
    num_devices = a.time_s.shape[1]
    count, ready = sort_inputs(a, op, here, state.device, state.end_s, state.arrival, state.missing, 0.0)
    num_trial = 0
    for index in range(count):
        tensor = state.missing[index]
        source = state.device[a.producer[tensor]]
        length = transfer_s(a, tensor, source, here)
        if not length < np.inf:
            return count, np.inf
        pair = source * num_devices + here
        begin = _slot(a, calendar, state, num_trial, pair, state.end_s[a.producer[tensor]], length)
        state.sent_s[index] = begin
        ready = max(ready, begin + length)
        for slot in range(a.resource_start[pair], a.resource_start[pair + 1]):
            state.trial_row[num_trial] = num_devices + a.resources[slot]
            state.trial_s[num_trial, 0] = begin
            state.trial_s[num_trial, 1] = begin + length
            num_trial += 1
    return count, _gap(calendar, a.core_of_device[here], ready, a.time_s[op, here])


@compiled
def _put(a: Arrays, calendar: Calendar, state: State, op: int, here: int, not_before: float) -> Calendar:
    """Return the calendar with the operator on the device, and what it needs sent there."""
    num_devices = a.time_s.shape[1]
    count, start = _try(a, calendar, state, op, here)
    start = max(start, not_before)
    for index in range(count):
        tensor, begin = state.missing[index], state.sent_s[index]
        source = state.device[a.producer[tensor]]
        end = begin + transfer_s(a, tensor, source, here)
        state.arrival[tensor, here] = end
        pair = source * num_devices + here
        for slot in range(a.resource_start[pair], a.resource_start[pair + 1]):
            calendar = _book(calendar, num_devices + a.resources[slot], begin, end)
    state.device[op] = here
    state.start_s[op] = start
    state.end_s[op] = start + a.time_s[op, here]
    state.last[here] = op
    return _book(calendar, a.core_of_device[here], start, state.end_s[op])


# ---- which operator is next, and where ----------------------------------------------------------------------------

SLICE: Final = 1_000_000
"""Pairs of operator and device that are looked at in one go, about."""


class Wishes(NamedTuple):
    """What decides beside the earliest start or finish."""

    priority: F64
    """[n] the higher first."""
    extra: F64
    """[n, m] seconds on top of the finish time (into gaps)."""
    pinned: I64
    """[n] a device that the operator takes if it can, or -1 (into gaps)."""
    favourite: I64
    """[n] an operator's favourite child, or -1 (by earliest start)."""
    preferred: Bools
    """[units, m] (by earliest start)"""
    sent_anywhere_s: F64
    """[tensors] seconds after which a tensor could be on any device."""


@compiled
def _highest(state: State, num_ready: int, priority: F64) -> int:
    """Return the position of the ready operator of the highest priority; the first operator among equals."""
    best = 0
    for index in range(1, num_ready):
        op, other = state.ready[index], state.ready[best]
        if priority[op] > priority[other] or (priority[op] == priority[other] and op < other):
            best = index
    return best


@compiled
def _best_device(a: Arrays, calendar: Calendar, room: Room, state: State, wishes: Wishes, op: int) -> int:
    """Return the device where finish time + ``extra`` is smallest, or the pinned one if it has room; -1 for none."""
    if wishes.pinned[op] >= 0 and can_take(room, room.unit_of_op[op], wishes.pinned[op]):
        return int(wishes.pinned[op])
    best, best_value = -1, np.inf
    for here in range(a.time_s.shape[1]):
        if can_take(room, room.unit_of_op[op], here):
            value = _try(a, calendar, state, op, here)[1] + a.time_s[op, here] + wishes.extra[op, here]
            if value < best_value:
                best, best_value = here, value
    return best


@compiled
def _reserved_until(a: Arrays, room: Room, state: State, wishes: Wishes, op: int, here: int) -> float:
    """Return the time before which the operator may not start on a device that waits for a favourite child."""
    last = state.last[here]
    child = wishes.favourite[last] if last >= 0 else -1
    if child < 0 or child == op or state.device[child] >= 0 or not can_take(room, room.unit_of_op[child], here):
        return 0.0
    urgent = 0.0
    for slot in range(a.input_start[op], a.input_start[op + 1]):
        tensor = a.inputs[slot]
        urgent = max(urgent, state.end_s[a.producer[tensor]] + wishes.sent_anywhere_s[tensor])
    return urgent


@compiled
def _has_preferred(room: Room, wishes: Wishes, op: int) -> bool:
    """Return whether one of the preferred devices can take the operator."""
    for here in range(wishes.preferred.shape[1]):
        if wishes.preferred[room.unit_of_op[op], here] and can_take(room, room.unit_of_op[op], here):
            return True
    return False


@compiled
def _comes_first(wishes: Wishes, op: int, other: int, end: float, other_end: float) -> bool:
    """Return whether the first of two pairs that start at the same time is taken."""
    if wishes.priority[op] != wishes.priority[other]:
        return bool(wishes.priority[op] > wishes.priority[other])
    if end != other_end:
        return bool(end < other_end)
    return bool(op < other)


@compiled
def _pick_pair(a: Arrays, calendar: Calendar, room: Room, state: State, wishes: Wishes, known: F64, num_ready: int
               ) -> tuple[int, int, float]:
    """Return (position among the ready operators, device or -1 if it has no room anywhere, start) of the next pair.

    Starts grow while others are placed (with rare exceptions), so a pair whose last ``known`` start is too late is not
    tried again.
    """
    best, best_index, best_start, best_end = -1, 0, np.inf, np.inf
    for index in range(num_ready):
        op = state.ready[index]
        unit = room.unit_of_op[op]
        is_choosy = _has_preferred(room, wishes, op)
        is_stuck = True
        for here in range(a.time_s.shape[1]):
            if not can_take(room, room.unit_of_op[op], here) or (is_choosy and not wishes.preferred[unit, here]):
                continue
            is_stuck = False
            if known[op, here] > best_start:
                continue
            known[op, here] = _try(a, calendar, state, op, here)[1]
            start = max(known[op, here], _reserved_until(a, room, state, wishes, op, here))
            end = start + a.time_s[op, here]
            other = state.ready[best_index]
            if start < best_start or (start == best_start and _comes_first(wishes, op, other, end, best_end)):
                best, best_index, best_start, best_end = here, index, start, end
        if is_stuck:
            return index, -1, np.inf
    return best_index, best, best_start


@compiled
def _place_some(a: Arrays, calendar: Calendar, room: Room, state: State, wishes: Wishes, known: F64, turn: int,
                num_ready: int) -> tuple[Calendar, int, int, int]:
    """Place operators from ``turn`` on, about ``SLICE`` pairs.

    Return the calendar, turn, how many operators are ready, and the one that has no room (or -1).
    """
    num_ops, num_devices = a.time_s.shape
    num_tried = 0
    while turn < num_ops and num_tried < SLICE:
        if calendar.in_gaps:
            num_tried += num_devices
            index = _highest(state, num_ready, wishes.priority)
            here, start = _best_device(a, calendar, room, state, wishes, state.ready[index]), 0.0
        else:
            num_tried += num_ready * num_devices
            index, here, start = _pick_pair(a, calendar, room, state, wishes, known, num_ready)
        op = state.ready[index]
        if here < 0:
            return calendar, turn, num_ready, int(op)
        num_ready -= 1
        state.ready[index] = state.ready[num_ready]
        take(room, room.unit_of_op[op], here)
        calendar = _put(a, calendar, state, op, here, start)
        state.order[turn] = op
        num_ready = release(state, op, num_ready)
        turn += 1
    return calendar, turn, num_ready, -1


def place_all(a: Arrays, room: Room, state: State, wishes: Wishes, *, in_gaps: bool) -> int:
    """Fill ``state``; return -1, or the operator for which no device has room.

    ``in_gaps``: the ready operator of the highest priority next, where finish time + ``extra`` is smallest. Else the
    pair of operator and device that can start first; among equals the higher priority, then the earlier end, then the
    first operator and device. Between slices Python gets its turn, and with it whatever ends the search.
    """
    num_ops, num_devices = a.time_s.shape
    num_rows, width = num_devices + a.num_resources, 64 if in_gaps else 1
    calendar = Calendar(np.zeros((num_rows, width)), np.zeros((num_rows, width)), np.zeros(num_rows, dtype=np.int64),
                        in_gaps)
    known = np.zeros((num_ops, num_devices))
    turn, num_ready, failed = 0, int(np.count_nonzero(state.waiting == 0)), -1
    while turn < num_ops and failed < 0:
        calendar, turn, num_ready, failed = _place_some(a, calendar, room, state, wishes, known, turn, num_ready)
    return failed


@compiled
def upward(op_s: F64, sent_s: F64, edges: I64) -> F64:
    """Return [n] the longest way from the start of each operator to the end."""
    after = np.zeros(len(op_s))
    for row in range(len(edges) - 1, -1, -1):
        op, reader, tensor = edges[row]
        after[op] = max(after[op], sent_s[tensor] + op_s[reader] + after[reader])
    return op_s + after


@compiled
def downward(op_s: F64, sent_s: F64, edges: I64) -> F64:
    """Return [n] the longest way from the beginning to the start of each operator."""
    before = np.zeros(len(op_s))
    for row in range(len(edges)):
        op, reader, tensor = edges[row]
        before[reader] = max(before[reader], before[op] + op_s[op] + sent_s[tensor])
    return before


@compiled
def optimistic(time_s: F64, sent_s: F64, edges: I64) -> F64:
    """Return [n, m] the longest way from each operator's end on a device, every later operator where it is best."""
    table = np.zeros(time_s.shape)
    for row in range(len(edges) - 1, -1, -1):
        op, reader, tensor = edges[row]
        elsewhere = np.min(table[reader] + time_s[reader]) + sent_s[tensor]
        for device in range(time_s.shape[1]):
            best = min(elsewhere, table[reader, device] + time_s[reader, device])
            table[op, device] = max(table[op, device], best)
    return table


@compiled
def critical_path(up: F64, sent_s: F64, edges: I64) -> I64:
    """Return the operators of a longest way, first to last, given the upward ranks."""
    following = np.full(len(up), -1, dtype=np.int64)
    longest = np.full(len(up), -1.0)
    for row in range(len(edges)):
        op, reader, tensor = edges[row]
        if sent_s[tensor] + up[reader] > longest[op]:
            longest[op] = sent_s[tensor] + up[reader]
            following[op] = reader
    path = np.empty(len(up), dtype=np.int64)
    count = 0
    op = np.argmax(up)
    while op >= 0:
        path[count] = op
        count += 1
        op = following[op]
    return path[:count].copy()
