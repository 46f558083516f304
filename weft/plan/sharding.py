"""What the words of ``Stage.sharding`` mean: layouts of values and gradients, and the parts that devices hold.

    ("S0", "R:P")    on the first axis split along dimension 0; on the second whole, and its gradient a sum to be taken
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.base.errors import InputError
from weft.model.graph import Graph
from weft.plan.plan import Replica, Stage
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, dim_ranges, largest_part, parse_placement

Region = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension the (start, stop) ranges that a device holds; empty for a whole tensor."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor's value and its gradient lie over a mesh."""

    value: Layout
    gradient: Layout


def whole_layout(num_axes: int) -> TensorLayout:
    """Return the layout of a tensor that all devices have, with its gradient."""
    return TensorLayout((WHOLE,) * num_axes, (WHOLE,) * num_axes)


def parse_layout(words: Sequence[str]) -> TensorLayout:
    """Return the layout that an entry of ``Sharding.tensors`` means."""
    pairs = [_parse_word(word) for word in words]
    return TensorLayout(tuple(value for value, _ in pairs), tuple(gradient for _, gradient in pairs))


def format_layout(layout: TensorLayout) -> tuple[str, ...]:
    """Return the entry of ``Sharding.tensors`` for a layout."""
    items = zip(layout.value, layout.gradient, usual_gradient(layout.value), strict=True)
    return tuple(str(value) if gradient == usual else f"{value}:{gradient}" for value, gradient, usual in items)


def _parse_word(word: str) -> tuple[Placement, Placement]:
    first, colon, second = word.partition(":")
    value = parse_placement(first)
    return value, parse_placement(second) if colon else usual_gradient((value,))[0]


def usual_gradient(value: Layout) -> Layout:
    """Return the layout of a gradient where nothing is said: like the value, and whole for a sum."""
    return tuple(WHOLE if item == SUM else item for item in value)


def axis_sizes(replica: Replica) -> tuple[int, ...]:
    """Return the sizes of the axes of a replica's mesh."""
    return tuple(replica.mesh.values())


def coordinates_of(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where on the mesh the device at a position of the replica's list is; the last axis changes fastest."""
    result = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        result.append(coordinate)
    return tuple(reversed(result))


def part_held(stage: Stage, replica: Replica, tensor: str, shape: Sequence[int]) -> float:
    """Return the part of a tensor that the device of the replica with most of it holds."""
    words = stage.sharding.tensors.get(tensor)
    return 1.0 if words is None else largest_part(shape, parse_layout(words).value, axis_sizes(replica))


def region_held(shape: Sequence[int], layout: Layout, sizes: Sequence[int], coordinates: Sequence[int]) -> Region:
    """Return the ranges of a tensor that a device holds; empty if it holds all."""
    return dim_ranges(shape, layout, sizes, coordinates) if any(item.is_split for item in layout) else ()


def sharding_problems(stage: Stage, graph: Graph, path: str) -> Iterator[str]:
    """Yield what is wrong with the words of a stage's sharding; references to factors are checked when it is run."""
    if not stage.sharding or not stage.replicas:
        return
    axes = {tuple(replica.mesh) for replica in stage.replicas}
    if len(axes) != 1:
        yield f"{path}.replicas: a stage that shards needs the same axes in every replica, in the same order"
        return
    num_axes, inside = len(axes.pop()), set(stage.ops)
    for name, words in stage.sharding.ops.items():
        if name not in inside:
            yield f"{path}.sharding.ops: the stage has no operator {name!r}"
        elif len(words) != num_axes:
            yield f"{path}.sharding.ops.{name} has {len(words)} words for {num_axes} axes"
    for table in ("tensors", "made"):
        here = f"{path}.sharding.{table}"
        for name, words in getattr(stage.sharding, table).items():
            if name not in graph.tensor_index:
                yield f"{here}: the model has no tensor {name!r}"
            elif len(words) != num_axes:
                yield f"{here}.{name} has {len(words)} words for {num_axes} axes"
            else:
                shape = graph.tensor_shapes[graph.tensor_index[name]]
                yield from itertools.islice(_layout_problems(stage, words, shape, f"{here}.{name}"), 1)


def _layout_problems(stage: Stage, words: Sequence[str], shape: tuple[int, ...], here: str) -> Iterator[str]:
    try:
        layout = parse_layout(words)
    except InputError as problem:
        yield f"{here}: {problem}"
        return
    for value, axis in zip((*layout.value, *layout.gradient), (*stage.replicas[0].mesh,) * 2, strict=True):
        if not value.is_split:
            continue
        if value.dim >= len(shape):
            yield f"{here}: axis {axis!r} splits dimension {value.dim}, but the tensor has {len(shape)} dimensions"
        elif shape[value.dim] % (value.blocks * value.unit):
            yield (f"{here}: {value} does not fit dimension {value.dim} of size {shape[value.dim]}: it is no multiple "
                   f"of {value.blocks * value.unit}")
