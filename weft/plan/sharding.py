"""What the words of ``Stage.sharding`` mean: for tensors layouts, and the parts that devices hold; for operators how
they are split over the axes of a mesh.

A tensor:

    ("S0", "R:P")    on the first axis split along dimension 0; on the second whole, and its gradient a sum to be taken

An operator:

    ("heads", "")     the first axis splits the factor ``heads``, on the second all do the same
    ("n/3",)          the axis splits each of three equal blocks of the factor ``n`` (queries, keys and values)
    ("d1/2z",)        the same in two blocks, the second from the last device to the first: zig-zag
    ("rows@ring",)    attention whose keys and values are split like its rows, and passed round (``rows/2z@ring``)
    ("+0",)           the operands in the first of ``OpFactors.linear`` are sums over the axis
    (":P",)           on the axis all do the same, but the gradients of results are sums, and so are those of operands
                      (a backward is linear in them, whatever the operator is)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from weft.base.errors import InputError, PlanError
from weft.model.graph import Graph
from weft.plan.plan import Replica, Stage
from weft.sharding import factors
from weft.sharding.factors import (
    NOT_SPLIT,
    ROWS,
    OpFactors,
    Strategy,
    by_parts,
    in_blocks,
    is_valid,
    linear_choice,
    passed_round,
)
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, dim_ranges, largest_part, parse_placement

LayoutOf = Callable[[OpFactors, Strategy, Sequence[int], int], Layout]
Region = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension the (start, stop) ranges that a device holds; empty for a whole tensor."""
SUMS: Final = ":P"
"""The word for: not split, and gradients are sums."""
RING: Final = "@ring"
"""Behind attention's rows: keys and values are passed round."""
_NO_FACTORS: Final = OpFactors(factors=(), inputs=(), outputs=())


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


@lru_cache(maxsize=1 << 10)
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


# ---- operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitOp:
    """An operator and how it is split over a mesh."""

    op: OpFactors
    strategy: Strategy
    mesh: tuple[int, ...]
    sums: frozenset[int] = frozenset()
    """The axes on which it is not split and takes and gives gradients that are sums."""

    def made(self, position: int) -> TensorLayout:
        """Return the layout in which a result comes out, and that in which its gradient is wanted."""
        return TensorLayout(self._values(factors.output_layout, position),
                            self._gradients(factors.output_gradient_layout, position))

    def wanted(self, position: int) -> TensorLayout:
        """Return the layout in which an operand is wanted, and that in which its gradient comes out."""
        return TensorLayout(self._values(factors.input_layout, position),
                            self._gradients(factors.input_gradient_layout, position))

    def _values(self, layout_of: LayoutOf, position: int) -> Layout:
        if all(choice == NOT_SPLIT for choice in self.strategy):
            return (WHOLE,) * len(self.mesh)
        return layout_of(self.op, self.strategy, self.mesh, position)

    def _gradients(self, layout_of: LayoutOf, position: int) -> Layout:
        layout = self._values(layout_of, position)
        return tuple(SUM if axis in self.sums else item for axis, item in enumerate(layout))


def parse_strategy(op: OpFactors | None, words: Sequence[str], mesh: Sequence[int], *, name: str) -> SplitOp:
    """Return what the words mean for an operator called ``name`` with these factors (None: it has no rule).

    Raise ``PlanError`` if it cannot be split so.
    """
    sums = frozenset(axis for axis, word in enumerate(words) if word == SUMS)
    words = ["" if word == SUMS else word for word in words]
    if op is None and any(words):
        raise PlanError(f"sharding.ops.{name}: there is no rule for this operator, or not for its arguments: leave it "
                        "out, so that all devices do the same")
    op = op or _NO_FACTORS
    for word in words:
        factor, slash, blocks = word.removesuffix(RING).partition("/")
        if slash:
            op = _in_blocks(op, _factor(op, factor, name), blocks, name)
    if any(word.endswith(RING) for word in words):
        op = _passed_round(op, words, name)
    strategy = tuple(_choice(op, word, name) for word in words)
    if not is_valid(op, strategy, mesh):
        sizes = ", ".join(f"{item.name} {item.size}" for item in op.factors)
        raise PlanError(f"sharding.ops.{name}: {list(words)} does not fit axes of sizes {list(mesh)}; the operator has "
                        f"the factors {sizes}. No part may be empty, parts of blocks must be equal, and a dimension "
                        "is split by one factor only")
    return SplitOp(op, strategy, tuple(mesh), sums)


def _choice(op: OpFactors, word: str, name: str) -> int:
    if not word:
        return NOT_SPLIT
    if not word.startswith("+"):
        return _factor(op, factor_name(word), name)
    if word[1:].isdecimal() and int(word[1:]) < len(op.linear):
        return linear_choice(int(word[1:]))
    raise PlanError(f"sharding.ops.{name}: {word!r} is none of its {len(op.linear)} sets of operands that may be sums")


def factor_name(word: str) -> str:
    """Return the name of the factor that a word splits."""
    return word.removesuffix(RING).partition("/")[0]


def _factor(op: OpFactors, word: str, name: str) -> int:
    for index, factor in enumerate(op.factors):
        if factor.name == word:
            return index
    known = ", ".join(factor.name for factor in op.factors)
    raise PlanError(f"sharding.ops.{name}: there is no factor {word!r}; it has {known or 'none'}")


def _in_blocks(op: OpFactors, index: int, count: str, name: str) -> OpFactors:
    """Return the operator with a factor taken as so many blocks, of which a part is to be taken from each."""
    factor, number = op.factors[index], count.removesuffix("z")
    is_zigzag = number != count
    if any(item.name == f"{factor.name}/" for item in op.factors):
        return op  # along another axis it was taken so already
    by_order = factor.special and not by_parts(factor)
    if by_order or not number.isdecimal() or int(number) < 1 or factor.size % int(number) or (
            is_zigzag and int(number) % 2):
        why = ("it is looked up or summed by its order" if by_order else f"its size is {factor.size}"
               + ", and zig-zag needs an even number" * is_zigzag)
        raise PlanError(f"sharding.ops.{name}: {factor.name!r} cannot be split in {count!r} equal blocks: {why}")
    return in_blocks(op, index, int(number), zigzag=is_zigzag)


def _passed_round(op: OpFactors, words: Sequence[str], name: str) -> OpFactors:
    found = passed_round(op)
    if found is None or any(word.endswith(RING) and factor_name(word) != ROWS for word in words):
        raise PlanError(f"sharding.ops.{name}: {RING!r} stands behind the {ROWS!r} of attention without a mask that "
                        "has as many keys as rows, which this operator is not: leave it out")
    return found
