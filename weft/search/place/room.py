"""Memory while operators are placed one after the other, and what to do where it runs out.

The weights of a whole unit count when its first operator is placed; a weight counts once per device. Where that leaves
an operator without room, ``place_with_room`` starts again with room kept for the operator's unit: the published lists
know no memory, and on tight devices they would rarely end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.place.assignment import Assignment, Bools, no_room
from weft.search.place.problem import PlaceProblem

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
    owner = np.repeat(problem.unit_of_op, np.diff(problem.weight_start))
    pairs = np.unique(np.stack([owner, problem.weights], axis=1), axis=0)
    counts = np.bincount(pairs[:, 0], minlength=problem.num_units)
    return Room(
        unit_of_op=problem.unit_of_op, allowed=allowed, weight_bytes=problem.weight_bytes,
        weight_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int64), weights=pairs[:, 1].copy(),
        free=problem.capacity.copy(), home=np.full(problem.num_units, -1, dtype=np.int64),
        held=np.zeros((problem.num_devices, len(problem.weight_bytes)), dtype=np.bool_))


@compiled
def can_take_unit(room: Room, unit: int, device: int) -> bool:
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
def can_take(room: Room, op: int, device: int) -> bool:
    """Return whether the operator may run on the device and its unit's weights fit there."""
    return can_take_unit(room, room.unit_of_op[op], device)


@compiled
def take_unit(room: Room, unit: int, device: int) -> None:
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
def take(room: Room, op: int, device: int) -> None:
    """Let the operator's unit live on the device, if it has no home yet."""
    take_unit(room, room.unit_of_op[op], device)


@compiled
def _pack(room: Room, units: I64, time_s: F64, is_tight: bool) -> bool:
    """Give each of the units a home in this order; return whether all found one.

    The fastest device with room, or if ``is_tight`` the one that has the least memory left.
    """
    for unit in units:
        best, best_value = -1, np.inf
        for device in range(len(room.free)):
            if can_take_unit(room, unit, device):
                value = room.free[device] if is_tight else time_s[unit, device]
                if best < 0 or value < best_value:
                    best, best_value = device, value
        if best < 0:
            return False
        take_unit(room, unit, best)
    return True


def _room_with(problem: PlaceProblem, allowed: Bools, units: list[int]) -> Room | None:
    """Return the memory with room kept for these units, the largest first, or None if that cannot be."""
    times = np.zeros((problem.num_units, problem.num_devices))
    np.add.at(times, problem.unit_of_op, problem.time_s)
    for is_tight in (False, True):
        room = make_room(problem, allowed)
        owner = np.repeat(np.arange(problem.num_units), np.diff(room.weight_start))
        sizes = np.bincount(owner, weights=room.weight_bytes[room.weights], minlength=problem.num_units)
        largest_first = np.array(sorted(units, key=lambda unit: (-sizes[unit], unit)), dtype=np.int64)
        if _pack(room, largest_first, times, is_tight):
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
