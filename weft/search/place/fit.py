"""Is there enough memory at all, and if not, how much is missing and what does not fit?

The least total excess over the devices' memories is a small integer program: units on devices, each weight counted once
per device, tensors of short life left out. Its optimum is zero exactly if what stays resident fits.
"""

from __future__ import annotations

import math

import numpy as np
from ortools.sat.python import cp_model

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.place.problem import PlaceProblem, unit_weights

_EFFORT = 10.0
_MAX_AMOUNT = 2**44
"""Bytes are rounded up to so many steps in all, so that sums stay whole numbers of moderate size."""


def fitting_devices(problem: PlaceProblem, *, seed: int = 0) -> I64:
    """Return a device for every operator with which all that is resident fits; raise ``NoFeasiblePlan`` otherwise."""
    weights = unit_weights(problem)
    _refuse_too_large(problem, weights)
    if not np.isfinite(problem.capacity).any():
        return np.array([int(np.flatnonzero(problem.is_allowed[unit])[0]) for unit in problem.unit_of_op])
    device, excess = _least_excess(problem, weights, seed)
    if excess.sum() <= 0:
        return device
    raise _too_little(problem, weights, device, excess)


def _refuse_too_large(problem: PlaceProblem, weights: list[list[int]]) -> None:
    """Raise if a unit alone is larger than every device that it may run on."""
    for unit, items in enumerate(weights):
        size = float(problem.weight_bytes[items].sum())
        allowed = np.flatnonzero(problem.is_allowed[unit])
        ops = np.flatnonzero(problem.unit_of_op == unit)
        if not len(allowed):
            raise NoFeasiblePlan(f"the operators {_names(problem, ops)} share a device, but there is none that all of "
                                 "them may run on: allow more kinds, or do not colocate them")
        best = int(allowed[np.argmax(problem.capacity[allowed])])
        lacking = size - problem.capacity[best]
        if lacking > 0:
            raise NoFeasiblePlan(
                f"{_names(problem, ops)} cannot fit: {format_bytes(size)} stay resident, and the largest device that "
                f"may run it, {problem.device_names[best]!r}, has {format_bytes(problem.capacity[best])}: "
                f"{format_bytes(lacking)} are missing ({math.ceil(lacking)} bytes). Try a larger device or a smaller "
                "dtype.", missing_bytes=math.ceil(lacking), device=problem.device_names[best])


def _least_excess(problem: PlaceProblem, weights: list[list[int]], seed: int) -> tuple[I64, F64]:
    """Return devices with the least bytes over capacity in all, and that excess by device."""
    total = float(problem.weight_bytes.sum()) * problem.num_devices
    step = max(1.0, total / _MAX_AMOUNT)
    model = cp_model.CpModel()
    x = [{device: model.new_bool_var(f"x{unit},{device}") for device in np.flatnonzero(row).tolist()}
         for unit, row in enumerate(problem.is_allowed)]
    users: list[list[int]] = [[] for _ in problem.weight_bytes]
    for unit, items in enumerate(weights):
        model.add_exactly_one(x[unit].values())
        for weight in items:
            users[weight].append(unit)
    over = []
    for device in np.flatnonzero(np.isfinite(problem.capacity)).tolist():
        terms: list[cp_model.LinearExprT] = []
        for weight, units in enumerate(users):
            here = [x[unit][device] for unit in units if device in x[unit]]
            if not here or problem.weight_bytes[weight] <= 0:
                continue
            held = here[0] if len(here) == 1 else model.new_bool_var(f"w{weight},{device}")
            if len(here) > 1:
                model.add_max_equality(held, here)
            terms.append(math.ceil(problem.weight_bytes[weight] / step) * held)
        excess = model.new_int_var(0, 2 * _MAX_AMOUNT, f"over{device}")
        model.add(excess >= sum(terms) - math.floor(problem.capacity[device] / step))
        over.append(excess)
    model.minimize(sum(over))
    found = solve(model, Budget(effort=_EFFORT), effort=_EFFORT, seed=seed, stop_at=0.0)
    if not found.has_values:
        first = np.array([int(np.flatnonzero(row)[0]) for row in problem.is_allowed], dtype=np.int64)
        device_of_unit = first
    else:
        device_of_unit = np.array([next(device for device, chosen in choices.items() if found.value(chosen))
                                   for choices in x], dtype=np.int64)
    chosen_devices: I64 = device_of_unit[problem.unit_of_op]
    excess_bytes = np.maximum(problem.resident_bytes(chosen_devices) - problem.capacity, 0.0)
    return chosen_devices, np.asarray(excess_bytes, dtype=np.float64)


def _too_little(problem: PlaceProblem, weights: list[list[int]], device: I64, excess: F64) -> NoFeasiblePlan:
    """Return the error that says how much is missing, where, and which operators are left over there."""
    worst = int(np.argmax(excess))
    units = sorted({int(problem.unit_of_op[op]) for op in np.flatnonzero(device == worst)},
                   key=lambda unit: float(problem.weight_bytes[weights[unit]].sum()))
    left, freed = [], 0.0
    for unit in units:
        if freed >= excess[worst]:
            break
        size = float(problem.weight_bytes[weights[unit]].sum())
        if size > 0:
            left.append(unit)
            freed += size
    ops = np.flatnonzero(np.isin(problem.unit_of_op, left))
    missing = math.ceil(float(excess.sum()))
    needed, room = float(problem.weight_bytes.sum()), float(problem.capacity.sum())
    return NoFeasiblePlan(
        f"{problem.name!r} does not fit: {format_bytes(needed)} stay resident and the devices have "
        f"{format_bytes(room)} in all, but however operators are placed, {format_bytes(missing)} are missing "
        f"({missing} bytes), best on {problem.device_names[worst]!r}, for {_names(problem, ops)}. Try more memory, one "
        "more device, or a smaller dtype.", missing_bytes=missing, device=problem.device_names[worst])


def _names(problem: PlaceProblem, ops: I64) -> str:
    shown = ", ".join(repr(problem.op_names[op]) for op in ops[:3])
    return shown + (f" and {len(ops) - 3} more" if len(ops) > 3 else "")
