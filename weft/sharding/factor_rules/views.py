"""Factor rules of operators that move entries and change none: reshapes, permutations, pieces, joins and copies.

All of them are linear: of sums they make sums. A dimension that an operator cuts, shifts or pads is whole; a cut into
equal pieces and its opposite keep their dimension as ``(pieces, entries)``, which splits it in blocks.
"""

from __future__ import annotations

from typing import Any

from weft.sharding.factor_rules.common import Call, Shape, dims_in, nonnegative, shape_of
from weft.sharding.factor_rules.refine import reshape_dims
from weft.sharding.factors import OpFactors, rule


def _moved(call: Call, inside: list[tuple[int, ...]], *outside: list[tuple[int, ...]]) -> OpFactors | None:
    """Return the factors of a call that moves the entries of its first tensor."""
    source = call.tensors[0]
    return call.done([(source, inside)], outside, linear=[(source,)])


# ---- reshapes -------------------------------------------------------------------------------------------------------


@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten._reshape_copy.default",
      "aten.view_copy.default")
def _reshape(node: Any) -> OpFactors | None:
    call = Call(node)
    source = call.args["self"]
    before, after = reshape_dims(call, shape_of(source), call.output)
    shape = "shape" if "shape" in call.args else "size"
    return call.done([(source, before)], [after], linear=[(source,)], shape_args=call.shape_arg(shape))


@rule("aten.view_as.default", "aten.reshape_as.default")
def _reshape_as(node: Any) -> OpFactors | None:
    call = Call(node)
    source = call.args["self"]
    before, after = reshape_dims(call, shape_of(source), call.output)
    return call.done([(source, before), (call.args["other"], after)], [after], linear=[(source,)])


@rule("aten.flatten.using_ints", "aten.unsqueeze.default", "aten.ravel.default")
def _flatten(node: Any) -> OpFactors | None:
    call = Call(node)
    before, after = reshape_dims(call, shape_of(call.args["self"]), call.output)
    return _moved(call, list(before), list(after))


@rule("aten.unflatten.int")
def _unflatten(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    dim = nonnegative(call.args["dim"], len(shape))
    made = range(dim, dim + len(call.output) - len(shape) + 1)  # their sizes are arguments
    before, after = reshape_dims(call, shape, call.output, special=made)
    return _moved(call, list(before), list(after))


@rule("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    asked = dims_in(call.args.get("dim"), len(shape))
    kept = [dim for dim, size in enumerate(shape) if dim not in asked or size != 1]
    in_danger = [place for place, dim in enumerate(kept) if dim in asked]  # a part of size 1 would vanish
    before, after = reshape_dims(call, shape, call.output, special=in_danger)
    return _moved(call, list(before), list(after))


@rule("aten.transpose.int", "aten.t.default", "aten.permute.default", "aten.swapaxes.default", "aten.swapdims.default",
      "aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist", "aten.numpy_T.default",
      "aten.mT.default")
def _permute(node: Any) -> OpFactors | None:
    import torch

    call = Call(node)
    shape = shape_of(call.tensors[0])
    marked = torch.empty([dim + 2 for dim in range(len(shape))], device="meta")
    order = [size - 2 for size in node.target(marked, *node.args[1:], **node.kwargs).shape]
    dims = call.plain(shape)
    return _moved(call, dims, [dims[dim] for dim in order])


# ---- copies ---------------------------------------------------------------------------------------------------------


@rule("aten.expand.default", "aten.broadcast_to.default", "aten.expand_as.default")
def _expand(node: Any) -> OpFactors | None:
    call = Call(node)
    source = call.args["self"]
    after = call.plain(call.output)
    before = broadcast(shape_of(source), call.output, after)
    if "other" in call.args:
        return call.done([(source, before), (call.args["other"], after)], [after], linear=[(source,)])
    return call.done([(source, before)], [after], linear=[(source,)], shape_args=call.shape_arg("size"))


def broadcast(shape: Shape, output: Shape, dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the factors of a tensor that is broadcast to ``output``, whose dimensions have the factors ``dims``."""
    aligned = zip(shape, output[len(output) - len(shape):], dims[len(output) - len(shape):], strict=True)
    return [dim if size == full else () for size, full, dim in aligned]


@rule("aten.repeat.default", "aten.tile.default")
def _repeat(node: Any) -> OpFactors | None:
    call = Call(node)
    shape, output = shape_of(call.args["self"]), call.output
    before = call.plain(shape)
    padded = [()] * (len(output) - len(shape)) + before
    sizes = (1,) * (len(output) - len(shape)) + shape
    after = [call.factor(f"copies{dim}", full // size if size else 0, special=True) + inner
             for dim, (size, full, inner) in enumerate(zip(sizes, output, padded, strict=True))]
    return _moved(call, before, after)


@rule("aten.repeat_interleave.self_int")
def _repeat_interleave(node: Any) -> OpFactors | None:
    call = Call(node)
    if call.args.get("output_size") is not None:  # the size is written down: that dimension stays whole
        return _repeat_to_size(call)
    before = call.plain(shape_of(call.args["self"]))
    copies = call.factor("copies", call.args["repeats"], special=True)
    if call.args["dim"] is None:
        return _moved(call, before, [(*(factor for dim in before for factor in dim), *copies)])
    at = nonnegative(call.args["dim"], len(before))
    return _moved(call, before, [dim + copies if place == at else dim for place, dim in enumerate(before)])


def _repeat_to_size(call: Call) -> OpFactors | None:
    if call.args["dim"] is None:
        return None
    shape = shape_of(call.args["self"])
    dims = call.plain(shape, but=[nonnegative(call.args["dim"], len(shape))])
    return _moved(call, dims, dims)


# ---- dimensions that are cut, shifted or padded ---------------------------------------------------------------------


@rule("aten.slice.Tensor", "aten.narrow.default", "aten.pad.default", "aten.constant_pad_nd.default",
      "aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.replication_pad1d.default",
      "aten.replication_pad2d.default")
def _resize(node: Any) -> OpFactors | None:
    call = Call(node)
    source = call.args["self"]
    shape = shape_of(source)
    touched = {dim for dim, (size, kept) in enumerate(zip(shape, call.output, strict=True)) if size != kept}
    if "pad" in call.args or "padding" in call.args:
        pads = call.args.get("pad") or call.args.get("padding") or ()
        touched |= {len(shape) - 1 - place // 2 for place, pad in enumerate(pads) if pad}
    elif node.target._schema.name == "aten::narrow":
        touched.add(nonnegative(call.args["dim"], len(shape)))  # its length is that of the whole
    dims = call.plain(shape, but=touched)
    linear = [(source,)] if not call.args.get("value") else []  # padding with another number than 0 is not
    return call.done([(source, dims)], [dims], linear=linear)


@rule("aten.select.int", "aten.unbind.int")
def _select(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    at = nonnegative(call.args["dim"], len(shape))
    dims = call.plain(shape, but=[at])
    return _moved(call, dims, *[[dim for place, dim in enumerate(dims) if place != at]] * len(call.outputs))


@rule("aten.roll.default", "aten.flip.default")
def _shift(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    dims = call.plain(shape, but=dims_in(call.args["dims"], len(shape)))
    return _moved(call, dims, dims)


@rule("aten.tril.default", "aten.triu.default")
def _triangle(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    dims = call.plain(shape, but=dims_in([-2, -1], len(shape)))
    return _moved(call, dims, dims)


@rule("aten.diagonal.default")
def _diagonal(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    pair = dims_in([call.args["dim1"], call.args["dim2"]], len(shape))
    dims = call.plain(shape, but=pair)
    return _moved(call, dims, [*(dim for place, dim in enumerate(dims) if place not in pair), ()])


@rule("aten.unfold.default")
def _unfold(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    dims = call.plain(shape, but=[nonnegative(call.args["dimension"], len(shape))])
    return _moved(call, dims, [*dims, ()])


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def _pixel_shuffle(node: Any) -> OpFactors | None:
    """Return ``(channels rows columns, height, width) <-> (channels, height rows, width columns)``."""
    call = Call(node)
    is_apart = node.target._schema.name == "aten::pixel_unshuffle"
    coarse = call.output if is_apart else shape_of(call.args["self"])
    step = call.args["downscale_factor"] if is_apart else call.args["upscale_factor"]
    leading = call.plain(coarse[:-3])
    channels, height, width = (call.factor(name, size) for name, size in
                               (("channels", coarse[-3] // step**2), ("height", coarse[-2]), ("width", coarse[-1])))
    rows, columns = call.factor("rows", step, fixed=True), call.factor("columns", step, fixed=True)
    before = [*leading, channels + rows + columns, height, width]
    after = [*leading, channels, height + rows, width + columns]
    return _moved(call, after, before) if is_apart else _moved(call, before, after)


# ---- pieces and joins -----------------------------------------------------------------------------------------------

_BY_SIZE = ("aten.split.Tensor", "aten.unsafe_split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default",
            "aten.unsafe_split_with_sizes.default")
"""Operators that name the sizes of the pieces, so that a device with a part must name others."""


@rule(*_BY_SIZE, "aten.chunk.default", "aten.unsafe_chunk.default", "aten.tensor_split.sections")
def _split(node: Any) -> OpFactors | None:
    call = Call(node)
    shape = shape_of(call.args["self"])
    at = nonnegative(call.args["dim"], len(shape))
    dims = call.plain(shape, but=[at])
    pieces = {output[at] for output in call.outputs}
    if len(pieces) > 1:
        return _moved(call, dims, *[dims] * len(call.outputs))
    outer = call.factor("pieces", len(call.outputs), fixed=True)
    inner = call.factor(f"d{at}", pieces.pop(), special=str(node.target) in _BY_SIZE)
    before, after = ([*dims[:at], dim, *dims[at + 1:]] for dim in (outer + inner, inner))
    return _moved(call, before, *[after] * len(call.outputs))


@rule("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def _cat(node: Any) -> OpFactors | None:
    call = Call(node)
    tensors = call.args["tensors"]
    output = call.output
    at = nonnegative(call.args["dim"], len(output))
    if any(len(shape_of(tensor)) != len(output) for tensor in tensors):
        return None  # an empty list of another rank is allowed and left out
    dims = call.plain(output, but=[at])
    sizes = {shape_of(tensor)[at] for tensor in tensors}
    is_equal = len(sizes) == 1
    outer = call.factor("pieces", len(tensors) if is_equal else 1, fixed=True)
    inner = call.factor(f"d{at}", max(sizes) if is_equal else 1)
    before, after = ([*dims[:at], dim, *dims[at + 1:]] for dim in (inner, outer + inner))
    return call.done([(tensor, before) for tensor in tensors], [after], linear=[tensors])


@rule("aten.stack.default")
def _stack(node: Any) -> OpFactors | None:
    call = Call(node)
    tensors = call.args["tensors"]
    at = nonnegative(call.args["dim"], len(call.output))
    dims = call.plain(shape_of(tensors[0]))
    return call.done([(tensor, dims) for tensor in tensors], [[*dims[:at], (), *dims[at:]]], linear=[tensors])
