"""Compiled list scheduling: operators are taken one after the other and get the device that a rule likes best.

``place_by_priority`` takes the ready operator of the highest priority and puts it, and the transfers that it needs,
into the earliest gaps of a *calendar*: one row of busy intervals for each core and for each thing that transfers
occupy. HEFT, PEFT and CPoP differ in priorities and in what they add to the finish time.
``weft.search.place.earliest_kernel`` has the lists that take what can start first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.kernel import Arrays, transfer_s
from weft.search.place.problem import PlaceProblem
from weft.search.place.room import Room, can_take, take


class Flow(NamedTuple):
    """Who reads what an operator writes: ``readers[start[op]:start[op + 1]]``, once for each tensor that they read."""

    start: I64
    readers: I64
    num_inputs: I64
    """[n] how often each operator stands among the readers."""


class State(NamedTuple):
    """How far a list got, and space to work in."""

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
    trial_row: I64
    trial_s: F64
    """Bookings for the operator at hand: rows, and [bookings, 2] begin and end."""


def make_flow(problem: PlaceProblem) -> Flow:
    """Return the readers of every operator."""
    edges = problem.edges
    order = np.argsort(edges[:, 0], kind="stable")
    start = np.concatenate(([0], np.cumsum(np.bincount(edges[:, 0], minlength=problem.num_ops)))).astype(np.int64)
    return Flow(start=start, readers=edges[order, 1].copy(), num_inputs=np.diff(problem.input_start))


def make_state(problem: PlaceProblem) -> State:
    """Return the state before anything is placed, without ready operators."""
    count, num_devices = problem.num_ops, problem.num_devices
    widest = max(1, int(np.diff(problem.input_start).max(initial=0)))
    bookings = widest * max(1, int(np.diff(problem.resource_start).max(initial=0)))
    return State(
        device=np.full(count, -1, dtype=np.int64), start_s=np.zeros(count), end_s=np.zeros(count),
        arrival=np.full((problem.num_tensors, num_devices), np.inf), order=np.full(count, -1, dtype=np.int64),
        waiting=np.diff(problem.input_start), ready=np.empty(count, dtype=np.int64),
        missing=np.empty(widest, dtype=np.int64), sent_s=np.empty(widest),
        trial_row=np.empty(bookings, dtype=np.int64), trial_s=np.empty((bookings, 2)))


@compiled
def first_ready(state: State) -> int:
    """Return how many operators read nothing; they are in ``state.ready``."""
    count = 0
    for op in range(len(state.device)):
        if state.waiting[op] == 0:
            state.ready[count] = op
            count += 1
    return count


@compiled
def release(flow: Flow, state: State, op: int, num_ready: int) -> int:
    """Return how many operators are ready once this one is placed."""
    for slot in range(flow.start[op], flow.start[op + 1]):
        reader = flow.readers[slot]
        state.waiting[reader] -= 1
        if state.waiting[reader] == 0:
            state.ready[num_ready] = reader
            num_ready += 1
    return num_ready


@compiled
def find_missing(a: Arrays, state: State, op: int, here: int) -> tuple[int, float]:
    """Return how many tensors must be sent to the device (``state.missing``, first written first), and when all
    others are there."""
    ready, count = 0.0, 0
    for slot in range(a.input_start[op], a.input_start[op + 1]):
        tensor = a.inputs[slot]
        writer = a.producer[tensor]
        if state.device[writer] == here:
            ready = max(ready, state.end_s[writer])
        elif state.arrival[tensor, here] < np.inf:
            ready = max(ready, state.arrival[tensor, here])
        else:
            place = count
            while place > 0 and state.end_s[a.producer[state.missing[place - 1]]] > state.end_s[writer]:
                state.missing[place] = state.missing[place - 1]
                place -= 1
            state.missing[place] = tensor
            count += 1
    return count, ready


# ---- into gaps ----------------------------------------------------------------------------------------------------


class Calendar(NamedTuple):
    """Busy intervals by row, in order of time; rows are cores, then what transfers occupy."""

    begin: F64
    end: F64
    length: I64
    """[rows] how many intervals each row has."""


@compiled
def _gap(calendar: Calendar, row: int, ready: float, length: float) -> float:
    """Return the earliest time from ``ready`` on at which the row is free for ``length``."""
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
    return Calendar(begin, end, calendar.length)


@compiled
def _book(calendar: Calendar, row: int, begin: float, end: float) -> Calendar:
    """Return the calendar with one more interval; what takes no time is not written down."""
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
                        begin + length > state.trial_s[other, 0]):
                    begin = state.trial_s[other, 1]
        if begin == before:
            return begin


@compiled
def _try(a: Arrays, calendar: Calendar, state: State, op: int, here: int) -> tuple[int, float]:
    """Return how many tensors are sent (``state.missing`` at ``state.sent_s``) and when the operator would start."""
    num_devices = a.time_s.shape[1]
    count, ready = find_missing(a, state, op, here)
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
def _put(a: Arrays, calendar: Calendar, state: State, op: int, here: int) -> Calendar:
    """Return the calendar with the operator on the device, and what it needs sent there."""
    num_devices = a.time_s.shape[1]
    count, start = _try(a, calendar, state, op, here)
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
    return _book(calendar, a.core_of_device[here], start, state.end_s[op])


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
def _best_device(a: Arrays, calendar: Calendar, room: Room, state: State, op: int, extra: F64, pinned: int) -> int:
    """Return the device where finish time + ``extra`` is smallest, or the pinned one if it has room; -1 for none."""
    if pinned >= 0 and can_take(room, op, pinned):
        return pinned
    best, best_value = -1, np.inf
    for here in range(a.time_s.shape[1]):
        if can_take(room, op, here):
            value = _try(a, calendar, state, op, here)[1] + a.time_s[op, here] + extra[op, here]
            if value < best_value:
                best, best_value = here, value
    return best


@compiled
def place_by_priority(a: Arrays, room: Room, flow: Flow, state: State, priority: F64, extra: F64, pinned: I64) -> int:
    """Fill ``state``, each operator where finish time + ``extra[op, device]`` is smallest; return -1.

    ``pinned[op]`` is a device that the operator takes if it can, or -1. Where no device has room for an operator,
    return that operator.
    """
    num_ops, num_devices = a.time_s.shape
    num_rows = num_devices + a.num_resources
    calendar = Calendar(np.empty((num_rows, 64)), np.empty((num_rows, 64)), np.zeros(num_rows, dtype=np.int64))
    num_ready = first_ready(state)
    for turn in range(num_ops):
        index = _highest(state, num_ready, priority)
        op = state.ready[index]
        num_ready -= 1
        state.ready[index] = state.ready[num_ready]
        best = _best_device(a, calendar, room, state, op, extra, pinned[op])
        if best < 0:
            return int(op)
        take(room, op, best)
        calendar = _put(a, calendar, state, op, best)
        state.order[turn] = op
        num_ready = release(flow, state, op, num_ready)
    return -1
