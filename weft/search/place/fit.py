"""Is there enough memory at all, and if not, how much is missing and what does not fit?

The least total excess over the devices' memories is a small integer program: units on devices, each weight counted once
per device, tensors of short life left out. Its optimum is zero exactly if what stays resident fits.

    x[u, d]   unit u is on device d; one d for each u                          (``unit_choices``)
    w[i, d]   device d holds item i: one of the units that need i is there     (``held_on``)
    minimise  sum_d max(0, sum_i bytes[i] w[i, d] - capacity[d])               (``_least_excess``)

The exact models of latency and throughput state units and memory in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import Solution, solve
from weft.search.place.problem import Bools, PlaceProblem

_EFFORT = 10.0
_MAX_ORDERED = 80
"""Rows that choices which are alike are numbered by; all of them would be too many literals."""
_MAX_AMOUNT = 2**44
"""Bytes are rounded up to so many steps in all, so that sums stay whole numbers of moderate size."""


def fitting_devices(problem: PlaceProblem, *, seed: int = 0) -> I64:
    """Return a device for every operator with which all that is resident fits; raise ``NoFeasiblePlan`` otherwise."""
    _refuse_too_large(problem)
    if not np.isfinite(problem.capacity).any():
        return np.asarray(problem.is_allowed.argmax(axis=1)[problem.unit_of_op], dtype=np.int64)
    device, excess = _least_excess(problem, seed)
    if excess.sum() <= 0:
        return device
    raise _too_little(problem, device, excess)


def _refuse_too_large(problem: PlaceProblem) -> None:
    """Raise if a unit alone is larger than every device that it may run on."""
    for unit, items in enumerate(problem.unit_weights):
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


def unit_choices(model: cp_model.CpModel, is_allowed: Bools) -> list[dict[int, cp_model.IntVar]]:
    """Return for each unit (row) the variable of each device (column) that it may run on, of which one is chosen."""
    choices = [{device: model.new_bool_var(f"x{unit},{device}") for device in np.flatnonzero(row).tolist()}
               for unit, row in enumerate(is_allowed)]
    for row in choices:
        model.add_exactly_one(row.values())
    return choices


def add_hints(model: cp_model.CpModel, choices: list[dict[int, cp_model.IntVar]], where: I64) -> None:
    """Let the solver start from what is chosen in each row."""
    for row, here in zip(choices, where.tolist(), strict=True):
        for index, item in row.items():
            model.add_hint(item, index == here)


def numbered(where: I64, order: Sequence[int], classes: Sequence[Sequence[int]]) -> I64:
    """Return what is chosen in each row, the choices of each class, which are alike, by their first rows in the order.
    """
    new = np.arange(1 + max((max(alike) for alike in classes), default=0))
    for alike in classes:
        used = [item for item in dict.fromkeys(where[order].tolist()) if item in alike]
        new[[*used, *(item for item in alike if item not in used)]] = alike
    return np.asarray(new[where], dtype=np.int64)


def add_numbering(model: cp_model.CpModel, choices: list[dict[int, cp_model.IntVar]], order: Sequence[int],
                  classes: Sequence[Sequence[int]]) -> None:
    """Let only what is ``numbered`` be chosen, as far as the first rows tell."""
    for alike in classes:
        for previous, item in pairwise(alike):
            earlier: list[cp_model.IntVar] = []
            for row in order[:_MAX_ORDERED]:
                if item in choices[row]:
                    model.add_bool_or([choices[row][item].negated(), *earlier])
                if previous in choices[row]:
                    earlier.append(choices[row][previous])


def chosen(found: Solution, choices: list[dict[int, cp_model.IntVar]]) -> I64:
    """Return what was chosen in each row."""
    return np.array([next(index for index, item in row.items() if found.value(item)) for row in choices],
                    dtype=np.int64)


def add_parted(model: cp_model.CpModel, parted: cp_model.IntVar, one: cp_model.IntVar | None,
               other: cp_model.IntVar | None) -> None:
    """Let ``parted`` hold where the first does and the other does not; None is what never holds."""
    if one is not None:
        model.add_bool_or([parted, one.negated(), *([] if other is None else [other])])


def held_on(model: cp_model.CpModel, choices: list[dict[int, cp_model.IntVar]], users: Sequence[Sequence[int]],
            sizes: Sequence[float], device: int, *, is_exact: bool = False) -> list[tuple[cp_model.IntVar, int]]:
    """Return (whether the device holds it, index) for what has a size and a user that may run there.

    ``users`` are the units that need each item: one of them on the device is enough. If ``is_exact``, nothing is held
    without need; where less is better anyway, that need not be said.
    """
    held = []
    for item, units in enumerate(users):
        here = [choices[unit][device] for unit in units if device in choices[unit]]
        if not here or sizes[item] <= 0:
            continue
        kept = here[0] if len(here) == 1 else model.new_bool_var(f"w{item},{device}")
        if len(here) > 1 and is_exact:
            model.add_max_equality(kept, here)
        elif len(here) > 1:
            for user in here:
                model.add_implication(user, kept)
        held.append((kept, item))
    return held


def _least_excess(problem: PlaceProblem, seed: int) -> tuple[I64, F64]:
    """Return devices with the least bytes over capacity in all, and that excess by device."""
    total = float(problem.weight_bytes.sum()) * problem.num_devices
    step = max(1.0, total / _MAX_AMOUNT)
    model = cp_model.CpModel()
    x, sizes = unit_choices(model, problem.is_allowed), problem.weight_bytes.tolist()
    over = []
    for device in np.flatnonzero(np.isfinite(problem.capacity)).tolist():
        held = held_on(model, x, problem.weight_users, sizes, device, is_exact=True)
        terms = [math.ceil(sizes[weight] / step) * item for item, weight in held]
        excess = model.new_int_var(0, 2 * _MAX_AMOUNT, f"over{device}")
        model.add(excess >= sum(terms) - math.floor(problem.capacity[device] / step))
        over.append(excess)
    model.minimize(sum(over))
    found = solve(model, Budget(effort=_EFFORT), effort=_EFFORT, seed=seed, stop_at=0.0)
    device_of_unit = chosen(found, x) if found.has_values else problem.is_allowed.argmax(axis=1)
    chosen_devices = np.asarray(device_of_unit[problem.unit_of_op], dtype=np.int64)
    excess_bytes = np.maximum(problem.resident_bytes(chosen_devices) - problem.capacity, 0.0)
    return chosen_devices, np.asarray(excess_bytes, dtype=np.float64)


def _too_little(problem: PlaceProblem, device: I64, excess: F64) -> NoFeasiblePlan:
    """Return the error that says how much is missing, where, and which operators are left over there."""
    worst = int(np.argmax(excess))
    sizes = {unit: float(problem.weight_bytes[problem.unit_weights[unit]].sum())
             for unit in np.unique(problem.unit_of_op[device == worst]).tolist()}
    left, freed = [], 0.0
    for unit in sorted(sizes, key=sizes.__getitem__):
        if freed < excess[worst] and sizes[unit] > 0:
            left.append(unit)
            freed += sizes[unit]
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
