"""What a placement method returns, and what all methods share about memory.

Methods take weights into account while they place. Tensors that are alive only for a while (``has_lifetimes``) are
known once there is a timetable: ``with_room_for_tensors`` makes it, takes what is over from the memory that weights may
use, and lets the method place again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import I64
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import make_timetable

Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_MAX_ROUNDS: Final = 8
"""Times that a method places again because tensors do not fit beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Where every operator runs, and in which order operators are taken."""

    device: I64
    """[n]"""
    order: I64
    """[n] all operators, each after those it reads from."""


Method = Callable[[PlaceProblem], Assignment]


def with_room_for_tensors(problem: PlaceProblem, method: Method) -> Assignment:
    """Return the method's answer with which weights and tensors fit; raise ``NoFeasiblePlan`` if there is none."""
    found = method(problem)
    if not problem.has_lifetimes or not np.isfinite(problem.capacity).any():
        return found
    limit = problem.capacity.copy()
    missing, held, worst = np.inf, 0.0, 0
    for _ in range(_MAX_ROUNDS):
        peaks = make_timetable(problem, found.device, found.order).peak_bytes()
        over = np.maximum(peaks - problem.capacity, 0.0)
        if not over.any():
            return found
        if over.max() < missing:
            worst = int(np.argmax(over))
            missing, held = float(over[worst]), float(peaks[worst])
        resident = problem.resident_bytes(found.device)
        limit = np.where(over > 0, np.minimum(limit - over, resident - 1), limit)  # so that something has to change
        try:
            found = method(replace(problem, capacity=limit))
        except NoFeasiblePlan:
            break
    name = problem.device_names[worst]
    raise NoFeasiblePlan(
        f"{name!r} would hold {format_bytes(held)} at its peak, tensors included, but has "
        f"{format_bytes(problem.capacity[worst])}: {format_bytes(missing)} are missing. Try another method, a smaller "
        "batch, or a device with more memory.", missing_bytes=int(np.ceil(missing)), device=name)


def check_room(problem: PlaceProblem, assignment: Assignment) -> Assignment:
    """Return the assignment; raise ``NoFeasiblePlan`` if it does not fit: for rules that do not look at memory."""
    held = problem.resident_bytes(assignment.device)
    if problem.has_lifetimes and np.isfinite(problem.capacity).any():
        held = make_timetable(problem, assignment.device, assignment.order).peak_bytes()
    over = held - problem.capacity
    worst = int(np.argmax(over))
    if over[worst] <= 0:
        return assignment
    name = problem.device_names[worst]
    raise NoFeasiblePlan(
        f"{name!r} would hold {format_bytes(held[worst])} but has {format_bytes(problem.capacity[worst])}: "
        f"{format_bytes(over[worst])} are missing for {_some_names(problem, assignment.device, worst)}. Try a method "
        "that looks at memory, or a device with more memory.", missing_bytes=int(np.ceil(over[worst])), device=name)


def _some_names(problem: PlaceProblem, device: I64, index: int) -> str:
    """Return the operators that keep the most on the device."""
    ops = np.flatnonzero(device == index)
    sizes = [float(problem.weight_bytes[op_weights(problem, int(op))].sum()) for op in ops]
    largest = ops[np.argsort(sizes, kind="stable")[::-1][:3]]
    rest = f" and {len(ops) - len(largest)} more operators" if len(ops) > len(largest) else ""
    return ", ".join(repr(problem.op_names[op]) for op in largest) + rest


def op_weights(problem: PlaceProblem, op: int) -> I64:
    """Return what the operator keeps resident."""
    return problem.weights[problem.weight_start[op] : problem.weight_start[op + 1]]


def no_room(problem: PlaceProblem, op: int, device: I64, allowed: Bools) -> NoFeasiblePlan:
    """Return the error that the operator's unit fits nowhere; ``device`` is -1 for what has no place yet.

    ``allowed`` [m] says where the unit may run.
    """
    placed = device >= 0
    units = np.unique(problem.unit_of_op[placed])
    home = np.full(problem.num_units, -1, dtype=np.int64)
    home[problem.unit_of_op[placed]] = device[placed]
    held = np.zeros((problem.num_devices, len(problem.weight_bytes)), dtype=np.bool_)
    needs = np.zeros(len(problem.weight_bytes), dtype=np.bool_)
    unit = int(problem.unit_of_op[op])
    is_placed_unit = np.isin(problem.unit_of_op, units)
    for index in range(problem.num_ops):
        if is_placed_unit[index]:
            held[home[problem.unit_of_op[index]], op_weights(problem, index)] = True
        elif problem.unit_of_op[index] == unit:
            needs[op_weights(problem, index)] = True
    lacking = (~held & needs) @ problem.weight_bytes - (problem.capacity - held @ problem.weight_bytes)
    lacking = np.where(allowed, lacking, np.inf)
    best = int(np.argmin(lacking))
    members = np.flatnonzero(problem.unit_of_op == unit)
    what = repr(problem.op_names[op]) + (f" (with {len(members) - 1} more that share its device)"
                                         if len(members) > 1 else "")
    if not lacking[best] > 0:
        return NoFeasiblePlan(f"operator {what} cannot get what it reads on any device with room for it: there is no "
                              "way between the devices. Add links to the cluster file, or try another method.")
    name = problem.device_names[best]
    size = float(needs @ problem.weight_bytes)
    return NoFeasiblePlan(
        f"operator {what} keeps {format_bytes(size)} and fits on no device that it may run on: "
        f"{format_bytes(lacking[best])} are missing on {name!r}, the best of them, beside what was placed before. "
        "Try another method, or a device with more memory.", missing_bytes=int(np.ceil(lacking[best])), device=name)
