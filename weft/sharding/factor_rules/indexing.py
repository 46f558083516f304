"""Factor rules of operators that look entries up, or write them, where other tensors say.

Dimensions that are not indexed are factors; so are those of the index tensors, which results have in their place. The
dimension that is looked up is whole, except where one index tensor alone looks it up: then a device with a part of it
(some experts of a layer) gives its entries and zeros for the others, and the result is the sum. Rows of experts may be
looked up where both are split: devices ask each other for the rows that they have (``exchanged``, an all-to-all).
"""

from __future__ import annotations

import math
from typing import Any

from weft.sharding.expert_rows import experts_sort, numbers_rows
from weft.sharding.factor_rules.common import Call, Shape, aligned, dims_in, rule, shape_of
from weft.sharding.factor_rules.layers import experts_factor
from weft.sharding.factors import OpFactors


def _is_by_number(indices: list[Any]) -> bool:
    """Return whether some tensors index by number and none is a mask."""
    given = [str(index.meta["val"].dtype) for index in indices if index is not None]
    return bool(given) and not {"torch.bool", "torch.uint8"} & set(given)


def _is_number(node: Any) -> bool:
    """Return whether a tensor's entries can be summed."""
    return str(node.meta["val"].dtype) != "torch.bool"


def _index_shape(indices: list[Any]) -> Shape:
    """Return the shape to which index tensors are broadcast."""
    shapes = [shape_of(index) for index in indices]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


class _Indexed:
    """The factors of ``x[i, :, j]``: of the indices, the operand and the result.

    Without ``lookup`` (entries are written there) those of the indices have none, and the result is what is written.
    """

    def __init__(self, call: Call, source: Any, indices: list[Any], *, lookup: bool) -> None:
        given = {dim: index for dim, index in enumerate(indices) if index is not None}
        shape, places = shape_of(source), list(given)
        rows_shape = _index_shape(list(given.values()))
        rows = [call.factor(f"i{dim}", size if lookup else 1) for dim, size in enumerate(rows_shape)]
        self.source = call.plain(shape, but=given)
        if lookup and len(given) == 1 and _is_number(source):
            self.source[places[0]] = call.factor("looked_up", shape[places[0]], special=True)
        is_run = places == list(range(places[0], places[0] + len(places)))
        before = [self.source[dim] for dim in range(len(shape)) if dim < places[0] and is_run]
        after = [self.source[dim] for dim in range(len(before), len(shape)) if dim not in given]
        self.result = [*before, *rows, *after]
        self.indices = [(index, aligned(shape_of(index), rows)) for index in given.values()]


@rule
def _index(call: Call) -> OpFactors | None:
    source, indices = call.args["self"], call.args["indices"]
    if not _is_by_number(indices):
        return None  # the size of the result depends on the values
    if experts_sort(call.node) is not None:
        return _of_experts(call, source, indices[0])
    found = _Indexed(call, source, indices, lookup=True)
    if numbers_rows(indices[0]) and found.source[0] and found.result[0]:
        num_bytes = math.prod(call.output) * source.meta["val"].dtype.itemsize
        call.joint_factor("exchanged", (*found.source[0], *found.result[0]), exchanged=float(num_bytes))
    return call.done([(source, found.source), *found.indices], [found.result], linear=[(source,)])


def _of_experts(call: Call, source: Any, index: Any) -> OpFactors | None:
    """Return the factors of ``bias[ids]`` for rows sorted by expert: every device has those of its experts."""
    experts = experts_factor(call, shape_of(source)[0])
    dims = call.plain(shape_of(source), but=[0])[1:]
    return call.done([(source, [experts, *dims]), (index, [experts])], [[experts, *dims]], linear=[(source,)])


@rule
def _index_put(call: Call) -> OpFactors | None:
    source, values = call.args["self"], call.args["values"]
    if not _is_by_number(call.args["indices"]):
        return None
    found = _Indexed(call, source, call.args["indices"], lookup=False)
    written = aligned(shape_of(values), found.result)
    return call.done([(source, found.source), (values, written)], [found.source], linear=[(source, values)])


@rule
def _index_select(call: Call) -> OpFactors | None:
    source, index, shape, at = call.args["self"], call.args["index"], call.shape, call.dim()
    before = call.plain(shape, but=[at])
    rows = call.factor("i0", call.output[at] if shape else 1)
    after = [*before[:at], rows, *before[at + 1:]] if shape else []
    if shape and _is_number(source):
        before[at] = call.factor("looked_up", shape[at], special=True)
    return call.done([(source, before), (index, [rows] * len(shape_of(index)))], [after], linear=[(source,)])


@rule
def _gather(call: Call) -> OpFactors | None:
    source, shape = call.args["self"], call.shape
    index = call.args["index"] if "index" in call.args else call.args["indices"]
    if call.args["dim"] is None or len(shape_of(index)) != len(shape):
        return None
    at = call.dim()
    same = [dim for dim in range(len(shape)) if dim != at and shape[dim] == shape_of(index)[dim]]
    after = [call.factor(f"d{dim}", size) if dim in same or dim == at else () for dim, size in enumerate(call.output)]
    before = [dim if place in same else () for place, dim in enumerate(after)]
    return call.done([(source, before), (index, after)], [after], linear=[(source,)])


@rule
def _scatter(call: Call) -> OpFactors | None:
    source, index, values = call.args["self"], call.args["index"], call.args.get("src", call.args.get("value"))
    others = [index, values] if values in call.tensors else [index]
    at = dims_in(call.args["dim"], len(call.output))
    differing = {dim for dim, size in enumerate(call.output) for other in others if shape_of(other)[dim] != size}
    dims = call.plain(call.output, but=differing | set(at))
    is_linear = call.operator in ("aten.scatter.src", "aten.scatter_add.default")
    return call.done([(tensor, dims) for tensor in (source, *others)], [dims],
                     linear=[(source, values)] if is_linear else [])


@rule
def _write_along(call: Call) -> OpFactors | None:
    """Return the factors where a tensor is written, or added, at places of one dimension of another."""
    own, source = call.args["self"], call.args["source"] if "source" in call.args else call.args["src"]
    at = dims_in(call.args["dim"], len(call.output))
    dims = call.plain(call.output, but=at)
    written = [dim for place, dim in enumerate(dims) if place not in at] if "select" in call.operator else dims
    if len(shape_of(source)) != len(written):
        return None
    return call.done([(own, dims), (source, written)], [dims], linear=[(own, source)])


@rule
def _index_fill(call: Call) -> OpFactors | None:
    own = call.args["self"]
    dims = call.plain(call.output, but=dims_in(call.args["dim"], len(call.output)))
    return call.done([(own, dims)], [dims], linear=[(own,)] if call.args["value"] == 0 else [])


@rule
def _one_hot(call: Call) -> OpFactors | None:
    if call.args["num_classes"] < 0:
        return None  # their number depends on the values
    dims = call.plain(call.output[:-1])
    return call.done([(call.args["self"], dims)], [[*dims, ()]])
