"""Factor rules of operators that work entry by entry, of reductions and softmax, and of operators that make tensors.

Entry by entry, every dimension of the result is a factor, which the operands have where they are not broadcast. A
reduction has those dimensions that it keeps; the reduced ones are factors only of sums and means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.sharding.factor_rules.common import Call, aligned, dims_in, nonnegative, rule, shape_of
from weft.sharding.factors import OpFactors


def _entrywise(call: Call, linear: Iterable[Iterable[Any]] = ()) -> OpFactors | None:
    """Return the factors of a call whose tensors are broadcast to the shape of its result."""
    dims = call.plain(call.output)
    inputs = [(tensor, aligned(shape_of(tensor), dims)) for tensor in call.tensors]
    return call.done(inputs, [dims] * len(call.outputs), linear=linear)


# ---- entry by entry -------------------------------------------------------------------------------------------------


@rule
def _pointwise(call: Call) -> OpFactors | None:
    return _entrywise(call)


@rule
def _same(call: Call) -> OpFactors | None:
    return _entrywise(call, [call.tensors])


@rule
def _same_as(call: Call) -> OpFactors | None:
    """The other tensor gives only its type; where it has the same shape it need not be whole for that."""
    source, other = call.args["self"], call.args["other"]
    dims = call.plain(call.output)
    inputs = [(source, dims)] + ([(other, dims)] if shape_of(other) == call.output else [])
    return call.done(inputs, [dims], linear=[(source,)])


@rule
def _add(call: Call) -> OpFactors | None:
    """Every entry is a sum or one of two; where one of them is the number 0, only the other counts."""
    pair = call.args["self"], call.args["other"] if "other" in call.args else call.args["value"]
    summed = [value for value in pair if not (isinstance(value, int | float) and value == 0)]
    return _entrywise(call, [summed] if summed else [])


@rule
def _mul(call: Call) -> OpFactors | None:
    own, other = call.args["self"], call.args["other"]
    return _entrywise(call, [] if own is other else [(own,), (other,)])


@rule
def _div(call: Call) -> OpFactors | None:
    own, other = call.args["self"], call.args["other"]
    return _entrywise(call, [] if own is other or call.args.get("rounding_mode") else [(own,)])


@rule
def _dropout(call: Call) -> OpFactors | None:
    is_active = call.args.get("p") != 0 and call.args.get("train") is not False
    return _entrywise(call, [] if is_active or len(call.outputs) > 1 else [call.tensors])


@rule
def _copy(call: Call) -> OpFactors | None:
    """The first tensor gives only shape and type."""
    return _entrywise(call, [(call.args["src"] if "src" in call.args else call.args["value"],)])


@rule
def _prelu(call: Call) -> OpFactors | None:
    dims = call.plain(call.output)
    weight = call.args["weight"]
    channels = dims[1] if len(dims) > 1 and shape_of(weight)[0] == call.output[1] else ()
    return call.done([(call.args["self"], dims), (weight, [channels])], [dims])


@rule
def _glu(call: Call) -> OpFactors | None:
    after = call.plain(call.output)
    at = nonnegative(call.args["dim"], len(after))
    halves = call.factor("halves", 2, fixed=True)
    before = [halves + dim if place == at else dim for place, dim in enumerate(after)]
    return call.done([(call.args["self"], before)], [after])


# ---- reductions -----------------------------------------------------------------------------------------------------


@rule
def _sum(call: Call) -> OpFactors | None:
    """Parts of a sum are summed; a device with a part of a mean divides by the size of the whole."""
    source, shape = call.args["self"], call.shape
    reduced = set(dims_in(call.args.get("dim"), len(shape)))
    is_mean = "mean" in call.operator
    before = [call.factor(f"d{dim}", size, special=is_mean and dim in reduced) for dim, size in enumerate(shape)]
    return call.done([(source, before)], [_kept(call, before, reduced)],
                     linear=[] if "nansum" in call.operator else [(source,)])


@rule
def _reduce(call: Call) -> OpFactors | None:
    reduced = set(dims_in(call.args.get("dim"), len(call.shape)))
    before = call.plain(call.shape, but=reduced)
    return call.done([(call.args["self"], before)], [_kept(call, before, reduced)] * len(call.outputs))


def _kept(call: Call, before: list[tuple[int, ...]], reduced: set[int]) -> list[tuple[int, ...]]:
    """Return the dimensions of a reduction's result."""
    if call.args.get("keepdim"):
        return [() if dim in reduced else factors for dim, factors in enumerate(before)]
    return [factors for dim, factors in enumerate(before) if dim not in reduced]


@rule
def _along(call: Call) -> OpFactors | None:
    """Return the factors where one dimension is needed whole and stays."""
    dims = call.plain(call.shape, but=dims_in(call.args["dim"], len(call.shape)))
    return call.done([(call.args["self"], dims)], [dims] * len(call.outputs))


# ---- making tensors -------------------------------------------------------------------------------------------------


@rule
def _constant(call: Call) -> OpFactors | None:
    return call.done([], [call.plain(call.output)], shape_args=call.shape_arg("size"))


@rule
def _by_position(call: Call) -> OpFactors | None:
    """Entries depend on where they are (or on the ones drawn before them): every device makes them all."""
    return call.done([], [[()] * len(shape) for shape in call.outputs])
