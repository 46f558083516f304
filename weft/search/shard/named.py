"""Plans with names, as restrictions of what parts may choose; the best that a restriction allows is the named plan.

| name | what it allows |
|---|---|
| data | samples are split; every parameter is whole, gradients are all-reduced |
| zero1 | the same, with optimizer states in pieces |
| zero3 | the same, with parameters in pieces too, gathered for use |
| megatron | attention by heads, feed-forward by its width; all else inside layers is whole |
| attention, ffn | only the one or the other of these |
| sequence | as megatron, with what is between them split by positions |

On a mesh of several axes all but the last split samples, and the last is as named; ``data`` and ``zero`` use all axes.
An operator that cannot do on all axes what the plan says (the batch divides over some of them only, or a view cannot be
split by samples and positions at once) does it on as many as it can, and is whole on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from weft.base.errors import InputError
from weft.search.shard.op_choices import Bools
from weft.search.shard.parts import ModelPart, ModelParts
from weft.search.shard.roles import Roles
from weft.sharding.factors import NOT_SPLIT
from weft.sharding.tensor_layout import WHOLE

Restriction = Callable[[ModelParts, int], Bools | None]
"""From a part to which of its choices are allowed; None for all."""

NAMES: Final = ("data", "zero1", "zero3", "megatron", "attention", "ffn", "sequence")
_DATA: Final = ("data", "zero1", "zero3")


def named(name: str, roles: Roles, num_axes: int) -> Restriction:
    """Return the restriction of a named plan."""
    if name not in NAMES:
        raise InputError(f"there is no plan named {name!r}: choose one of {', '.join(NAMES)}")
    by_axis = [name if axis == num_axes - 1 or name in _DATA else "data" for axis in range(num_axes)]

    def allowed(parts: ModelParts, index: int) -> Bools | None:
        part = parts.parts[index]
        if part.kind == "tensor":
            return None
        if part.kind == "parameter" and name in _DATA:
            return _stored_by_samples(part, name)
        if part.kind == "op":
            return _most_axes([_op_axis(part, index, axis, plan, roles) for axis, plan in enumerate(by_axis)], part)
        result = np.ones(len(part.seconds), dtype=np.bool_)
        for axis, plan in enumerate(by_axis):
            result &= _parameter_axis(part, index, axis, plan, roles)
        return result

    return allowed


def _most_axes(wanted: list[Bools], part: ModelPart) -> Bools:
    """Return the strategies that do what is wanted on as many axes as any, and are whole on the others."""
    assert part.choices is not None
    whole = (np.array(part.choices.strategies).reshape(-1, len(wanted)) == NOT_SPLIT).T
    is_allowed = np.all(np.array(wanted) | whole, axis=0)
    count = np.sum(wanted, axis=0)
    return np.asarray(is_allowed & (count == count[is_allowed].max()))


def _op_axis(part: ModelPart, index: int, axis: int, plan: str, roles: Roles) -> Bools:
    """Return which strategies of an operator do on one axis what the plan says."""
    assert part.choices is not None
    chosen = np.array([strategy[axis] for strategy in part.choices.strategies])
    samples, positions = roles.samples.get(index, NOT_SPLIT), roles.positions.get(index, NOT_SPLIT)
    if plan in _DATA:
        return np.asarray(chosen == samples)
    is_free: Bools = (chosen == NOT_SPLIT) | ((chosen != samples) & (chosen != positions))
    if index not in roles.layers:
        return is_free
    if (index in roles.attention and plan != "ffn") or (index in roles.feed_forward and plan != "attention"):
        return is_free
    if plan == "sequence":
        return np.asarray(chosen == positions)
    return np.asarray(chosen == NOT_SPLIT)


def _stored_by_samples(part: ModelPart, name: str) -> Bools:
    """Return which ways to store a parameter are those of a plan that splits samples alone: as fine as they get."""
    values = np.array([sum(placement != WHOLE for placement in item.layout) for item in part.stored])
    gradients = np.array([sum(placement != WHOLE for placement in item.gradient) for item in part.stored])
    if name == "data":
        return np.asarray((values == 0) & (gradients == 0))
    is_open = values == gradients if name == "zero3" else values == 0
    return np.asarray(is_open & (gradients == gradients[is_open].max(initial=0)))


def _parameter_axis(part: ModelPart, index: int, axis: int, plan: str, roles: Roles) -> Bools:
    """Return which ways to store a parameter are as the plan says on one axis."""
    values: Bools = np.array([item.layout[axis] == WHOLE for item in part.stored])
    gradients: Bools = np.array([item.gradient[axis] == WHOLE for item in part.stored])
    if plan == "data":
        return values & gradients
    as_used: Bools = np.array([item.layout[axis] == item.gradient[axis] for item in part.stored])
    is_matrix = any(placement.dim > 0 for item in part.stored for placement in item.layout)
    is_split = (index in roles.attention and plan != "ffn") or (index in roles.feed_forward and plan != "attention")
    if is_split and is_matrix and (as_used & ~values).any():
        return as_used & ~values
    return as_used
