"""Compiled list scheduling by earliest start: ETF, and what m-SCT and GETF add to it.

``place_earliest`` takes, of all ready operators and devices, the pair that can start first. Nothing is put into gaps,
so the times are those of ``make_timetable``. Two additions, each idle unless used:

- *favourite children* (m-SCT): the device whose last operator has a favourite child waits for it; another operator may
  only start there once what it reads could be on every device (it is *urgent*).
- *preferred devices* (GETF): an operator goes to one of these, to others only if none of them has room.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.assignment import Bools
from weft.search.place.kernel import Arrays, transfer_s
from weft.search.place.list_kernel import Flow, State, find_missing, first_ready, release
from weft.search.place.room import Room, can_take, take

SLICE: Final = 1_000_000
"""Pairs of operator and device that are looked at in one go, about."""


class Wishes(NamedTuple):
    """What decides beside the earliest start."""

    level: F64
    """[n] the higher first among pairs that start at the same time."""
    favourite: I64
    """[n] an operator's favourite child, or -1."""
    preferred: Bools
    """[units, m]"""
    sent_anywhere_s: F64
    """[tensors] seconds after which a tensor could be on any device."""


class Busy(NamedTuple):
    """Until when cores and what transfers occupy are taken; the last operator on each device."""

    core_free: F64
    way_free: F64
    trial_free: F64
    """``way_free`` while an operator is tried: only the entries stamped with ``token`` count."""
    stamp: I64
    token: I64
    """[1]"""
    last: I64


@compiled
def _ways_free(a: Arrays, busy: Busy, pair: int) -> float:
    """Return when all that a transfer occupies is free, after what the operator at hand has been tried with."""
    free = 0.0
    for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
        way = a.resources[index]
        free = max(free, busy.trial_free[way] if busy.stamp[way] == busy.token[0] else busy.way_free[way])
    return free


@compiled
def _try(a: Arrays, state: State, busy: Busy, op: int, here: int) -> tuple[int, float]:
    """Return how many tensors are sent (``state.missing`` at ``state.sent_s``) and when the operator could start."""
    num_devices = a.time_s.shape[1]
    busy.token[0] += 1
    count, ready = find_missing(a, state, op, here)
    ready = max(ready, busy.core_free[a.core_of_device[here]])
    for index in range(count):
        tensor = state.missing[index]
        source = state.device[a.producer[tensor]]
        pair = source * num_devices + here
        begin = max(state.end_s[a.producer[tensor]], _ways_free(a, busy, pair))
        end = begin + transfer_s(a, tensor, source, here)
        state.sent_s[index] = begin
        for slot in range(a.resource_start[pair], a.resource_start[pair + 1]):
            busy.stamp[a.resources[slot]] = busy.token[0]
            busy.trial_free[a.resources[slot]] = end
        ready = max(ready, end)
    return count, ready


@compiled
def _put(a: Arrays, state: State, busy: Busy, op: int, here: int, not_before: float) -> None:
    """Run the operator on the device, and send there what it needs."""
    num_devices = a.time_s.shape[1]
    count, start = _try(a, state, busy, op, here)
    start = max(start, not_before)
    for index in range(count):
        tensor, begin = state.missing[index], state.sent_s[index]
        source = state.device[a.producer[tensor]]
        state.arrival[tensor, here] = begin + transfer_s(a, tensor, source, here)
        pair = source * num_devices + here
        for slot in range(a.resource_start[pair], a.resource_start[pair + 1]):
            busy.way_free[a.resources[slot]] = state.arrival[tensor, here]
    state.device[op] = here
    state.start_s[op] = start
    state.end_s[op] = start + a.time_s[op, here]
    busy.core_free[a.core_of_device[here]] = state.end_s[op]
    busy.last[here] = op


@compiled
def _reserved_until(a: Arrays, room: Room, state: State, wishes: Wishes, busy: Busy, op: int, here: int) -> float:
    """Return the time before which the operator may not start on a device that waits for a favourite child."""
    last = busy.last[here]
    child = wishes.favourite[last] if last >= 0 else -1
    if child < 0 or child == op or state.device[child] >= 0 or not can_take(room, child, here):
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
        if wishes.preferred[room.unit_of_op[op], here] and can_take(room, op, here):
            return True
    return False


@compiled
def _comes_first(wishes: Wishes, op: int, other: int, end: float, other_end: float) -> bool:
    """Return whether the first of two pairs that start at the same time is taken."""
    if wishes.level[op] != wishes.level[other]:
        return bool(wishes.level[op] > wishes.level[other])
    if end != other_end:
        return bool(end < other_end)
    return bool(op < other)


@compiled
def _pick(a: Arrays, room: Room, state: State, wishes: Wishes, busy: Busy, known: F64, num_ready: int
          ) -> tuple[int, int, float]:
    """Return (position among the ready operators, device or -1 if it has no room anywhere, start) of the next pair."""
    best, best_index, best_start, best_end = -1, 0, np.inf, np.inf
    for index in range(num_ready):
        op = state.ready[index]
        unit = room.unit_of_op[op]
        is_choosy = _has_preferred(room, wishes, op)
        is_stuck = True
        for here in range(a.time_s.shape[1]):
            if not can_take(room, op, here) or (is_choosy and not wishes.preferred[unit, here]):
                continue
            is_stuck = False
            if known[op, here] > best_start:
                continue
            known[op, here] = _try(a, state, busy, op, here)[1]
            start = max(known[op, here], _reserved_until(a, room, state, wishes, busy, op, here))
            end = start + a.time_s[op, here]
            other = state.ready[best_index]
            if start < best_start or (start == best_start and _comes_first(wishes, op, other, end, best_end)):
                best, best_index, best_start, best_end = here, index, start, end
        if is_stuck:
            return index, -1, np.inf
    return best_index, best, best_start


def make_busy(num_devices: int, num_ways: int) -> Busy:
    """Return what is taken before anything is placed: nothing."""
    return Busy(np.zeros(num_devices), np.zeros(num_ways), np.zeros(num_ways), np.zeros(num_ways, dtype=np.int64),
                np.zeros(1, dtype=np.int64), np.full(num_devices, -1, dtype=np.int64))


def place_earliest(a: Arrays, room: Room, flow: Flow, state: State, wishes: Wishes) -> int:
    """Fill ``state``, the pair that can start first next; return -1, or the operator for which no device has room.

    Among equal starts: the higher level, then the earlier end, then the first operator and device. Starts grow
    while others are placed (with rare exceptions), so a pair whose last known start is too late is not tried again.
    Between slices Python gets its turn, and with it whatever ends the search.
    """
    num_ops, num_devices = a.time_s.shape
    busy = make_busy(num_devices, max(1, a.num_resources))
    known = np.zeros((num_ops, num_devices))
    turn, num_ready, failed = 0, int(first_ready(state)), -1
    while turn < num_ops and failed < 0:
        turn, num_ready, failed = _place_some(a, room, flow, state, wishes, busy, known, turn, num_ready)
    return failed


@compiled
def _place_some(a: Arrays, room: Room, flow: Flow, state: State, wishes: Wishes, busy: Busy, known: F64, turn: int,
                num_ready: int) -> tuple[int, int, int]:
    """Place operators from ``turn`` on, about ``SLICE`` pairs; return turn, ready operators, and what has no room."""
    num_ops, num_devices = a.time_s.shape
    num_tried = 0
    while turn < num_ops and num_tried < SLICE:
        num_tried += num_ready * num_devices
        index, here, start = _pick(a, room, state, wishes, busy, known, num_ready)
        op = state.ready[index]
        if here < 0:
            return turn, num_ready, int(op)
        num_ready -= 1
        state.ready[index] = state.ready[num_ready]
        take(room, op, here)
        _put(a, state, busy, op, here, start)
        state.order[turn] = op
        num_ready = release(flow, state, op, num_ready)
        turn += 1
    return turn, num_ready, -1
