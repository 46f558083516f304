"""What a device does for views, reductions and look-ups whose special factors are split.

Mostly the operator names sizes of the whole that are others for a part: of pieces, copies or dimensions. The mean of a
part counts by its share of the whole, and a look-up in a part gives zeros for what is elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from weft.sharding.factor_rules.common import arguments, dims_in
from weft.sharding.local_ops import LocalCall, local


def _arguments(call: LocalCall) -> dict[str, Any]:
    return arguments(call.target, call.args, call.kwargs)


def _size_of(call: LocalCall, factors: tuple[int, ...]) -> int:
    """Return the size of the device's part of a dimension."""
    ranges = map(call.range_of, factors)
    return math.prod(stop - start for start, stop in ranges)


@local("aten.unflatten.int", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _reshape(call: LocalCall) -> Tensor:
    """Give the part the shape that the result has here."""
    source: Tensor = call.args[0]
    return source.reshape([_size_of(call, factors) for factors in call.op.outputs[0]])


@local("aten.split.Tensor", "aten.unsafe_split.Tensor")
def _split(call: LocalCall) -> Any:
    """Cut the part into as many pieces as the whole has."""
    args = _arguments(call)
    return call.target(args["self"], args["self"].shape[args["dim"]] // len(call.op.outputs), args["dim"])


@local("aten.split.sizes", "aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default")
def _split_with_sizes(call: LocalCall) -> Any:
    args = _arguments(call)
    num_pieces = len(call.op.outputs)
    return call.target(args["self"], [args["self"].shape[args["dim"]] // num_pieces] * num_pieces, args["dim"])


@local("aten.repeat.default", "aten.tile.default")
def _repeat(call: LocalCall) -> Tensor:
    """Copy as often as the device's part of the copies says."""
    source: Tensor = call.args[0]
    outputs = call.op.outputs[0]
    rank = len(outputs) - source.dim()
    sizes = [1] * rank + list(source.shape)
    return source.repeat([_size_of(call, factors) // size for factors, size in zip(outputs, sizes, strict=True)])


@local("aten.repeat_interleave.self_int")
def _repeat_interleave(call: LocalCall) -> Any:
    args = _arguments(call)
    return call.target(args["self"], _size_of(call, (call.factor("copies"),)), args["dim"])


@local("aten.mean.default", "aten.mean.dim")
def _mean(call: LocalCall) -> Tensor:
    """Weigh the mean of the part by its share of the whole (a sum could overflow)."""
    args = _arguments(call)
    dims = dims_in(args.get("dim"), args["self"].dim())
    reduced = [factor for dim in dims for factor in call.op.inputs[0][dim]]
    whole = math.prod(call.op.factors[factor].size for factor in reduced)
    mean: Tensor = call.with_args(*call.args)
    return mean * (_size_of(call, tuple(reduced)) / whole)


@local("aten.index.Tensor")
def _index(call: LocalCall) -> Tensor:
    """Look up what the part has, with zeros for the rest."""
    args = _arguments(call)
    place = next(dim for dim, index in enumerate(args["indices"]) if index is not None)
    index, is_elsewhere = _here(call, args["indices"][place])
    found: Tensor = call.target(args["self"], [*args["indices"][:place], index, *args["indices"][place + 1:]])
    inner = args["self"].dim() - place - 1
    return found.masked_fill(is_elsewhere.reshape([*is_elsewhere.shape, *[1] * inner]), 0)


@local("aten.index_select.default")
def _index_select(call: LocalCall) -> Tensor:
    args = _arguments(call)
    source: Tensor = args["self"]
    index, is_elsewhere = _here(call, args["index"])
    found: Tensor = call.target(source, args["dim"], index)
    inner = source.dim() - args["dim"] % source.dim() - 1
    return found.masked_fill(is_elsewhere.reshape([-1, *[1] * inner]), 0)


def _here(call: LocalCall, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in the device's part of what is looked up, and where it is in none of its entries."""
    factor = call.factor("looked_up")
    start, stop = call.range_of(factor)
    size = call.op.factors[factor].size
    index = index.remainder(size) - start  # negative ones count from the end
    is_elsewhere = (index < 0) | (index >= stop - start)
    return index.masked_fill(is_elsewhere, 0), is_elsewhere
