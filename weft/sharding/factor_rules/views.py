"""Factor rules of operators that move entries and change none: reshapes, permutations, pieces, joins and copies.

All of them are linear: of sums they make sums. A dimension that an operator cuts, shifts or pads is whole; a cut into
equal pieces and its opposite keep their dimension as ``(pieces, entries)``, which splits it in blocks.

A reshape is described by the pieces of which the dimensions before and after are both made. ``[batch, seq, 3 * heads *
size] -> [batch, seq, 3, heads, size]`` has five; the last dimension before is three of them. Where sizes do not divide
one another (``[6, 4] -> [4, 6]``), the outermost and innermost common divisors are pieces still (the first 12 entries
are half of both), and what is left in between is never split.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.sharding.factor_rules.common import Call, aligned, dims_in, rule, shape_of
from weft.sharding.factors import Dims, OpFactors


def _moved(call: Call, inside: Sequence[tuple[int, ...]], *outside: Sequence[tuple[int, ...]]) -> OpFactors | None:
    """Return the factors of a call that moves the entries of its first tensor."""
    source = call.tensors[0]
    return call.done([(source, inside)], outside, linear=[(source,)])


# ---- reshapes -------------------------------------------------------------------------------------------------------


@rule
def _reshape(call: Call) -> OpFactors | None:
    source, (before, after) = call.args["self"], _reshape_dims(call)
    shape = "shape" if "shape" in call.args else "size"
    return call.done([(source, before)], [after], linear=[(source,)], shape_args=call.shape_arg(shape))


@rule
def _reshape_as(call: Call) -> OpFactors | None:
    source, (before, after) = call.args["self"], _reshape_dims(call)
    return call.done([(source, before), (call.args["other"], after)], [after], linear=[(source,)])


@rule
def _flatten(call: Call) -> OpFactors | None:
    return _moved(call, *_reshape_dims(call))


@rule
def _unflatten(call: Call) -> OpFactors | None:
    dim = call.dim()
    made = range(dim, dim + len(call.output) - len(call.shape) + 1)  # their sizes are arguments
    return _moved(call, *_reshape_dims(call, special=made))


@rule
def _squeeze(call: Call) -> OpFactors | None:
    asked = dims_in(call.args.get("dim"), len(call.shape))
    kept = [dim for dim, size in enumerate(call.shape) if dim not in asked or size != 1]
    in_danger = [place for place, dim in enumerate(kept) if dim in asked]  # a part of size 1 would vanish
    return _moved(call, *_reshape_dims(call, special=in_danger))


@rule
def _permute(call: Call) -> OpFactors | None:
    import torch

    marked = torch.empty([dim + 2 for dim in range(len(call.shape))], device="meta")
    order = [size - 2 for size in call.node.target(marked, *call.node.args[1:], **call.node.kwargs).shape]
    dims = call.plain(call.shape)
    return _moved(call, dims, [dims[dim] for dim in order])


# ---- the pieces of a reshape ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A factor of a reshape: the dimension it is in before and after, None where it is only in one of them."""

    size: int
    before: int | None
    after: int | None


def common_pieces(before: Sequence[int], after: Sequence[int]) -> tuple[Piece, ...]:
    """Return the pieces of two shapes of equally many entries; those of one dimension stand outermost first."""
    result: list[Piece] = []
    for left, right in _groups(before, after):
        outer = _matched(left, right, list(left), list(right))
        inner = _matched(left, right, list(left)[::-1], list(right)[::-1])
        result += outer
        result += [Piece(size=size, before=dim, after=None) for dim, size in left.items() if size > 1]
        result += [Piece(size=size, before=None, after=dim) for dim, size in right.items() if size > 1]
        result += inner[::-1]
    return tuple(result)


def _reshape_dims(call: Call, *, special: Collection[int] = ()) -> tuple[Dims, Dims]:
    """Return how both shapes are made of new factors; those in the dimensions ``special`` of the result are special."""
    pieces = common_pieces(call.shape, call.output)
    left: list[tuple[int, ...]] = [()] * len(call.shape)
    right: list[tuple[int, ...]] = [()] * len(call.output)
    for piece in pieces:
        alone = sum(other.after == piece.after for other in pieces) == 1
        name = f"from{piece.before}" if piece.after is None else f"d{piece.after}" if alone else \
            f"d{piece.after}{'abcdefghijklmnopqrstuvwxyz'[len(right[piece.after])]}"
        factor = call.factor(name, piece.size, special=piece.after in special,
                             fixed=piece.before is None or piece.after is None)
        if piece.before is not None:
            left[piece.before] += factor
        if piece.after is not None:
            right[piece.after] += factor
    return tuple(left), tuple(right)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Yield the smallest runs of dimensions with equally many entries on both sides, as sizes by dimension."""
    if 0 in before:
        return
    left = [(dim, size) for dim, size in enumerate(before) if size > 1]
    right = [(dim, size) for dim, size in enumerate(after) if size > 1]
    while left:
        num_left = num_right = 1
        product_left, product_right = left[0][1], right[0][1]
        while product_left != product_right:
            if product_left < product_right:
                product_left *= left[num_left][1]
                num_left += 1
            else:
                product_right *= right[num_right][1]
                num_right += 1
        yield dict(left[:num_left]), dict(right[:num_right])
        left, right = left[num_left:], right[num_right:]


def _matched(left: dict[int, int], right: dict[int, int], left_order: list[int], right_order: list[int]) -> list[Piece]:
    """Return the pieces at one end of a group, and leave in ``left`` and ``right`` what they do not cover."""
    found: list[Piece] = []
    while left_order and right_order:
        before, after = left_order[0], right_order[0]
        if left[before] == 1:
            left_order = left_order[1:]
        elif right[after] == 1:
            right_order = right_order[1:]
        elif (size := math.gcd(left[before], right[after])) == 1:
            break
        else:
            found.append(Piece(size=size, before=before, after=after))
            left[before] //= size
            right[after] //= size
    return found


# ---- copies ---------------------------------------------------------------------------------------------------------


@rule
def _expand(call: Call) -> OpFactors | None:
    source = call.args["self"]
    after = call.plain(call.output)
    before = aligned(call.shape, after)
    if "other" in call.args:
        return call.done([(source, before), (call.args["other"], after)], [after], linear=[(source,)])
    return call.done([(source, before)], [after], linear=[(source,)], shape_args=call.shape_arg("size"))


@rule
def _broadcast(call: Call) -> OpFactors | None:
    """Return the factors of tensors that are all copied to one shape."""
    tensors, after = call.args["tensors"], call.plain(call.output)
    return call.done([(tensor, aligned(shape_of(tensor), after)) for tensor in tensors], [after] * len(call.outputs),
                     linear=[tensors])


@rule
def _repeat(call: Call) -> OpFactors | None:
    before, rank = call.plain(call.shape), len(call.output) - len(call.shape)
    padded, sizes = [()] * rank + before, (1,) * rank + call.shape
    after = [call.factor(f"copies{dim}", full // size if size else 0, special=True) + inner
             for dim, (size, full, inner) in enumerate(zip(sizes, call.output, padded, strict=True))]
    return _moved(call, before, after)


@rule
def _repeat_interleave(call: Call) -> OpFactors | None:
    if call.args.get("output_size") is not None:  # the size is written down: that dimension stays whole
        return None if call.args["dim"] is None else _along(call)
    before = call.plain(call.shape)
    copies = call.factor("copies", call.args["repeats"], special=True)
    if call.args["dim"] is None:
        return _moved(call, before, [(*(factor for dim in before for factor in dim), *copies)])
    at = call.dim()
    return _moved(call, before, [dim + copies if place == at else dim for place, dim in enumerate(before)])


# ---- dimensions that are cut, shifted or padded ---------------------------------------------------------------------


@rule
def _resize(call: Call) -> OpFactors | None:
    source, shape = call.args["self"], call.shape
    touched = {dim for dim, (size, kept) in enumerate(zip(shape, call.output, strict=True)) if size != kept}
    if "pad" in call.args or "padding" in call.args:
        pads = call.args.get("pad") or call.args.get("padding") or ()
        touched |= {len(shape) - 1 - place // 2 for place, pad in enumerate(pads) if pad}
    elif "narrow" in call.operator:
        touched.add(call.dim())  # its length is that of the whole
    dims = call.plain(shape, but=touched)
    linear = [(source,)] if not call.args.get("value") else []  # padding with another number than 0 is not
    return call.done([(source, dims)], [dims], linear=linear)


@rule
def _select(call: Call) -> OpFactors | None:
    at = call.dim()
    dims = call.plain(call.shape, but=[at])
    return _moved(call, dims, *[[dim for place, dim in enumerate(dims) if place != at]] * len(call.outputs))


@rule
def _along(call: Call) -> OpFactors | None:
    """Return the factors where some dimensions (the last two, if none are named) are needed whole."""
    named = call.args["dims"] if "dims" in call.args else call.args.get("dim", [-2, -1])
    dims = call.plain(call.shape, but=dims_in(named, len(call.shape)))
    return _moved(call, dims, dims)


@rule
def _diagonal(call: Call) -> OpFactors | None:
    pair = dims_in([call.args["dim1"], call.args["dim2"]], len(call.shape))
    dims = call.plain(call.shape, but=pair)
    return _moved(call, dims, [*(dim for place, dim in enumerate(dims) if place not in pair), ()])


@rule
def _unfold(call: Call) -> OpFactors | None:
    dims = call.plain(call.shape, but=dims_in(call.args["dimension"], len(call.shape)))
    return _moved(call, dims, [*dims, ()])


@rule
def _pixel_shuffle(call: Call) -> OpFactors | None:
    """Return ``(channels rows columns, height, width) <-> (channels, height rows, width columns)``."""
    is_apart = "unshuffle" in call.operator
    coarse = call.output if is_apart else call.shape
    step = call.args["downscale_factor"] if is_apart else call.args["upscale_factor"]
    leading = call.plain(coarse[:-3])
    channels, height, width = (call.factor(name, size) for name, size in
                               (("channels", coarse[-3] // step**2), ("height", coarse[-2]), ("width", coarse[-1])))
    rows, columns = call.factor("rows", step, fixed=True), call.factor("columns", step, fixed=True)
    before = [*leading, channels + rows + columns, height, width]
    after = [*leading, channels, height + rows, width + columns]
    return _moved(call, after, before) if is_apart else _moved(call, before, after)


# ---- pieces and joins -----------------------------------------------------------------------------------------------

def _in_pieces(call: Call, *, names_sizes: bool) -> OpFactors | None:
    """Return the factors of a dimension in pieces; where their sizes are named, a device with a part names others."""
    at = call.dim()
    dims = call.plain(call.shape, but=[at])
    pieces = {output[at] for output in call.outputs}
    if len(pieces) > 1:
        return _moved(call, dims, *[dims] * len(call.outputs))
    outer = call.factor("pieces", len(call.outputs), fixed=True)
    inner = call.factor(f"d{at}", pieces.pop(), special=names_sizes)
    before, after = ([*dims[:at], dim, *dims[at + 1:]] for dim in (outer + inner, inner))
    return _moved(call, before, *[after] * len(call.outputs))


@rule
def _split(call: Call) -> OpFactors | None:
    return _in_pieces(call, names_sizes=True)


@rule
def _chunk(call: Call) -> OpFactors | None:
    return _in_pieces(call, names_sizes=False)


@rule
def _cat(call: Call) -> OpFactors | None:
    tensors = call.args["tensors"]
    if any(len(shape_of(tensor)) != len(call.output) for tensor in tensors):
        return None  # an empty list of another rank is allowed and left out
    at = call.dim(len(call.output))
    dims = call.plain(call.output, but=[at])
    sizes = {shape_of(tensor)[at] for tensor in tensors}
    is_equal = len(sizes) == 1
    outer = call.factor("pieces", len(tensors) if is_equal else 1, fixed=True)
    inner = call.factor(f"d{at}", max(sizes) if is_equal else 1)
    before, after = ([*dims[:at], dim, *dims[at + 1:]] for dim in (inner, outer + inner))
    return call.done([(tensor, before) for tensor in tensors], [after], linear=[tensors])


@rule
def _stack(call: Call) -> OpFactors | None:
    tensors = call.args["tensors"]
    at = call.dim(len(call.output))
    dims = call.plain(call.shape)
    return call.done([(tensor, dims) for tensor in tensors], [[*dims[:at], (), *dims[at:]]], linear=[tensors])
