"""What one device of a sharded stage has of each tensor: the part that is made, the part that is read, and moves.

An operator gives a tensor in one layout (``Sharding.made``), its readers find it in another (``Sharding.tensors``).
Where that is not the same, the part that is read is memory of its own, and the exchange takes room while it goes on.
Where nothing is said, an operator that is not split makes whole tensors, and one that is split a sum if readers find it
whole. Tensors between stages are whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from weft.model.graph import I64, Graph
from weft.plan.plan import Replica, Stage
from weft.plan.sharding import RING, SUMS, TensorLayout, axis_sizes, factor_name, parse_layout, whole_layout
from weft.sharding.factors import ROWS
from weft.sharding.layout_steps import find_steps
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, largest_part

LOSSES: Final = frozenset({"aten.nll_loss", "aten.nll_loss_nd"})
"""Where classes are split, they take the true class out of what they read, and keep nothing of it."""
CROSS_ENTROPY: Final = frozenset({"aten.cross_entropy_loss"})
"""Where classes are split, it has differences from the maximum, and their exponentials, before it has the loss."""

ATTENTION: Final = "aten.scaled_dot_product_attention"
_DTYPE_BYTES: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

PRODUCTS: Final = {"aten.linear": 0, "aten.mm": 0, "aten.matmul": 0, "aten.bmm": 0, "aten.addmm": 1}
"""Of which operand a product reads rows: where its columns ``n`` are split, the gradient of that comes as a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """Parts of a tensor on the device that has most of it."""

    made: float = 1.0
    """Of what its operator gives (or how a parameter is stored)."""
    read: float = 1.0
    """Of what its readers find."""
    is_copied: bool = False
    """These two are not the same memory."""
    forward_room: float = 0.0
    """What bringing it from the one to the other takes besides them."""
    backward_room: float = 0.0
    """The same for its gradient, on the way back."""
    is_kept: bool = True
    """The backward of its readers may need it."""
    keeps_made: bool = False
    """It is brought together only to be sent: readers of its own stage find, and may keep, the part that is made."""
    takers: frozenset[int] = frozenset()
    """Operators that find more of it than others, each device having it brought there once more."""
    taken: float = 1.0
    """What these find."""
    taken_room: float = 0.0
    """What bringing it there takes besides."""
    returned_room: float = 0.0
    """The same for its gradient, on the way back."""
    forward_inside: float = 0.0
    """What its operator takes besides, where it makes it in parts."""
    backward_inside: float = 0.0
    """The same for gradients of what it reads."""

    def part_for(self, op: int) -> float:
        """Return the part that an operator finds."""
        return self.taken if op in self.takers else self.read


def local_tensors(graph: Graph, stage: Stage, replica: Replica, ops: I64, crossing: I64) -> dict[int, LocalTensor]:
    """Return what a device of the replica has of the stage's tensors; those that are not named are whole.

    ``ops`` are the stage's operators, ``crossing`` the tensors between stages.
    """
    if not stage.sharding or len(replica.devices) == 1:
        return {}
    sizes, between = axis_sizes(replica), set(crossing.tolist())
    result = {}
    readers: dict[int, list[int]] = {}
    summed: set[tuple[int, int]] = set()
    for op in ops.tolist() if stage.sharding.ops else ():
        for place, tensor in enumerate(graph.op_inputs(op).tolist()):
            readers.setdefault(tensor, []).append(op)
            if PRODUCTS.get(graph.op_kinds[op]) == place:
                summed |= {(tensor, axis) for axis, word in enumerate(stage.sharding.ops.get(graph.op_names[op], ()))
                           if word.partition("/")[0] == "n"}
    forgotten, scores = (_scores(graph, stage, ops, kinds) for kinds in (LOSSES, CROSS_ENTROPY))
    for name in stage.sharding.tensors:
        tensor = graph.tensor_index[name]
        if graph.tensor_producer[tensor] < 0:
            part = largest_part(graph.tensor_shapes[tensor], parse_layout(stage.sharding.tensors[name]).value, sizes)
            result[tensor] = LocalTensor(made=part, read=part)
    for op in ops.tolist():
        words = stage.sharding.ops.get(graph.op_names[op], ())
        for tensor in graph.op_outputs(op).tolist():
            found = _made_and_read(stage, graph.tensor_names[tensor], words, len(sizes), tensor in between,
                                   [axis for axis in range(len(sizes)) if (tensor, axis) in summed])
            if found is not None:
                item = _local(graph.tensor_shapes[tensor], *found, sizes, is_kept=tensor not in forgotten)
                room = 2 * item.read if tensor in scores else 0.0
                item = replace(item, forward_room=max(item.forward_room, room),
                               keeps_made=tensor in between and _is_read_in_parts(stage, tensor, graph, readers))
                if graph.op_kinds[op] == ATTENTION:
                    item = _with_inside(graph, op, words, sizes, item, result)
                result[tensor] = _with_takers(graph, stage, tensor, readers.get(tensor, ()), item, found[1], sizes)
    return result


def _with_inside(graph: Graph, op: int, words: Sequence[str], sizes: Sequence[int], item: LocalTensor,
                 known: Mapping[int, LocalTensor]) -> LocalTensor:
    """Return attention's result with what is inside it (``weft.sharding.attention``) where rows are in zig-zag or
    keys and values passed round: the result of a part, and in the backward gradients of a part, messages both ways.
    """
    count = math.prod(size for word, size in zip(words, sizes, strict=True) if factor_name(word) == ROWS)
    is_zigzag, is_round = any(word.partition("@")[0].endswith("z") for word in words), any(
        word.endswith(RING) for word in words)
    if count == 1 or not (is_zigzag or is_round):
        return item
    (out,), (query, *pair) = graph.op_outputs(op).tolist(), graph.op_inputs(op).tolist()[:3]
    held = {tensor: float(graph.tensor_bytes[tensor]) * (
        known[tensor].part_for(op) if tensor in known else 1.0) for tensor in (query, *pair)}
    rows, keys = held[query], sum(held[tensor] for tensor in pair)
    more = max(1.0, 4 / int(_DTYPE_BYTES.get(graph.tensor_dtypes[out], 4)))  # sums are taken in single precision
    wide = more if more > 1 else 0.0
    if is_round:
        forward = (1 + 2 * wide) * rows + 2 * keys
        part = max(rows + keys / 2, rows / 2 + keys) if is_zigzag else rows + keys
        backward = part + wide * (rows + keys) + ((1 if count == 2 else 2) + 2 * more) * keys
    else:
        forward = (0.5 + 1.5 * wide) * rows
        backward = rows / 2 + (1 - 0.5 / count) * keys + wide * (rows + keys)
    whole = float(graph.tensor_bytes[out])
    return replace(item, forward_inside=forward / whole, backward_inside=backward / whole)


def _with_takers(graph: Graph, stage: Stage, tensor: int, readers: Sequence[int], item: LocalTensor, read: Layout,
                 sizes: Sequence[int]) -> LocalTensor:
    """Return the tensor with those readers that want all of it on axes where others find parts.

    Those that are not split do, and products with rows of a matrix. Of others it is not known without their factors.
    """
    shape, nothing = graph.tensor_shapes[tensor], ("",) * len(sizes)
    wanted: dict[int, tuple[Layout, Layout]] = {}
    for op in readers if any(own.is_split for own in read) else ():
        words = stage.sharding.ops.get(graph.op_names[op], nothing)
        is_product = graph.op_kinds[op] == "aten.linear" and int(graph.op_inputs(op)[0]) == tensor
        whole = [word in ("", SUMS) or (is_product and word.partition("/")[0] == "n") for word in words]
        value = tuple(WHOLE if is_whole else own for is_whole, own in zip(whole, read, strict=True))
        if value != read:
            wanted[op] = value, tuple(SUM if is_whole and word else own
                                      for is_whole, word, own in zip(whole, words, value, strict=True))
    if not wanted:
        return item
    value, gradient = max(wanted.values(), key=lambda pair: largest_part(shape, pair[0], sizes))
    return replace(item, takers=frozenset(wanted), taken=largest_part(shape, value, sizes),
                   taken_room=_room(shape, read, value, sizes), returned_room=_room(shape, gradient, read, sizes))


def _is_read_in_parts(stage: Stage, tensor: int, graph: Graph, readers: Mapping[int, Sequence[int]]) -> bool:
    """Return whether operators of the stage itself read a tensor in parts."""
    words = stage.sharding.tensors.get(graph.tensor_names[tensor]) if tensor in readers else None
    return words is not None and any(item.is_split for item in parse_layout(words).value)


def _scores(graph: Graph, stage: Stage, ops: I64, kinds: frozenset[str]) -> set[int]:
    """Return what losses of these kinds read whose classes are split."""
    return {int(graph.op_inputs(op)[0]) for op in ops.tolist() if graph.op_kinds[op] in kinds
            and "classes" in stage.sharding.ops.get(graph.op_names[op], ())}


def _made_and_read(stage: Stage, name: str, words: Sequence[str], num_axes: int, is_between: bool,
                   summed: Sequence[int]) -> tuple[Layout, Layout, Layout] | None:
    """Return how a tensor is made, how it is read, and how its gradient comes from readers; None if all is whole.

    On the axes in ``summed`` readers give sums, if they read the whole.
    """
    tensors: Mapping[str, Sequence[str]] = stage.sharding.tensors
    whole = whole_layout(num_axes)
    own_readers = parse_layout(tensors[name]) if name in tensors else whole
    read = whole if is_between else own_readers
    read = TensorLayout(read.value, tuple(SUM if axis in summed and read.value[axis] == WHOLE else own
                                          for axis, own in enumerate(read.gradient)))
    if name in stage.sharding.made:
        made = parse_layout(stage.sharding.made[name]).value
    elif not stage.sharding.ops:  # nothing is said about operators
        made = read.value
    else:
        split = [bool(word) and word != SUMS for word in words] if words else [False] * num_axes
        made = tuple((own if own.is_split else SUM) if is_split else WHOLE
                     for own, is_split in zip(own_readers.value, split, strict=True))
    if made == read.value == whole.value and read == whole:
        return None
    return made, read.value, read.gradient


@lru_cache(maxsize=1 << 12)  # equal layers have equal ones
def _local(shape: tuple[int, ...], made: Layout, read: Layout, gradient: Layout, sizes: tuple[int, ...], *,
           is_kept: bool) -> LocalTensor:
    parts = {layout: largest_part(shape, layout, sizes) for layout in (made, read)}
    is_copied = any(before != after and not (before == SUM and after == WHOLE)
                    for before, after in zip(made, read, strict=True))
    wanted = tuple(WHOLE if item == SUM else item for item in made)
    return LocalTensor(made=parts[made], read=parts[read], is_copied=is_copied, is_kept=is_kept,
                       forward_room=_room(shape, made, read, sizes),
                       backward_room=_room(shape, gradient, wanted, sizes))


def _room(shape: Sequence[int], before: Layout, after: Layout, sizes: Sequence[int]) -> float:
    """Return what a change of layout takes besides the tensors before and after it, as ``weft.run.mesh`` does it."""
    steps = find_steps(before, after, tuple(sizes), shape) if before != after else ()
    most, given = 0.0, largest_part(shape, before, sizes)
    for number, step in enumerate(steps):
        found = largest_part(shape, (*step.before[:step.axis], step.after, *step.before[step.axis + 1:]), sizes)
        between = given * (number > 0) + found * (number < len(steps) - 1)
        most = max(most, between + _step_room(step.before[step.axis], step.after, given, found, sizes[step.axis]))
        given = found
    return most


def _step_room(old: Placement, new: Placement, given: float, found: float, num_devices: int) -> float:
    """Return what one step takes besides: a sum's terms, pieces to send, what arrives, zeros to be added to."""
    if old in (new, WHOLE) or num_devices == 1:
        return 0.0
    pieces = given if new.blocks > 1 else 0.0  # a part of every block is copied out first
    if old == SUM:
        return num_devices * found + pieces if new.is_split else found
    if new.is_split:
        return max(given, found) + pieces  # pieces put together, then what arrived
    padded = given if num_devices * given > found else 0.0
    return num_devices * given + padded if new == WHOLE else found
