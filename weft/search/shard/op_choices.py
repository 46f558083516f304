"""The strategies of one operator on a mesh: what each needs, gives and takes, in numbers of layouts and seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from weft.cost.costs import Costs
from weft.cost.mesh import Mesh
from weft.cost.roofline import PARTS, Part, Terms
from weft.model.graph import F64, I64
from weft.search.shard.mesh import Resharding
from weft.sharding import factors
from weft.sharding.factors import NOT_SPLIT, OpFactors, Strategy
from weft.sharding.layout_steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from weft.sharding.sequence import Place, blocks_word
from weft.sharding.tensor_layout import Layout, largest_part

FORWARD, BACKWARD = 0, 1
"""The two passes of a step."""
PASSES: Final[tuple[tuple[Part, ...], ...]] = (("forward",), ("input_grad", "weight_grad"))
"""What each of them has of an operator."""
Shapes = Sequence[tuple[int, ...]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, eq=False)
class OpChoices:
    """All ways to run an operator on a mesh, ``s`` of them."""

    op: OpFactors
    strategies: tuple[Strategy, ...]
    words: tuple[tuple[str, ...], ...]
    """[s] what each axis does, as plans say it: a factor's name (``n/3`` in blocks), ``""``, or ``+0``."""
    input_value: tuple[I64, ...]
    """[inputs][s] number of the layout in which an input is needed."""
    input_gradient: tuple[I64, ...]
    output_value: tuple[I64, ...]
    output_gradient: tuple[I64, ...]
    work: F64
    """[s] part of the work that the device with the most does."""
    moved: F64
    """[s] part of the bytes that it reads and writes."""
    input_part: tuple[F64, ...]
    """[inputs][s] part of an input that it holds."""


@dataclass(frozen=True, slots=True)
class InContext:
    """What an operator does on a mesh whose first axis is a context axis: it splits its place in the sequence."""

    place: Place | None
    """None: it has none, and does not split there."""
    zigzag: bool


def op_choices(op: OpFactors | None, input_shapes: Shapes, output_shapes: Shapes, resharding: Resharding,
               blocks: Sequence[tuple[int, int]] = (), context: InContext | None = None) -> OpChoices:
    """Return the strategies of an operator; only that of doing it everywhere where it has no factors.

    ``blocks`` are (factor, count): it may also be split in so many blocks, because a reader wants it so.
    """
    mesh = resharding.mesh.shape
    if op is None:
        op = OpFactors(factors=(), inputs=tuple(((),) * len(shape) for shape in input_shapes),
                       outputs=tuple(((),) * len(shape) for shape in output_shapes))
    ways = _ways(op, mesh, blocks) if context is None else _context_ways(op, mesh, blocks, context)
    number = resharding.number

    def numbers(function: Callable[[OpFactors, Strategy, Sequence[int], int], Layout], count: int) -> tuple[I64, ...]:
        return tuple(np.array([number(function(form, choice, mesh, position)) for form, choice, _ in ways],
                              dtype=np.int64) for position in range(count))

    inputs = numbers(factors.input_layout, len(input_shapes))
    outputs = numbers(factors.output_layout, len(output_shapes))
    layouts = resharding.layouts
    parts = [[_part(shape, layouts, items, mesh) for shape, items in zip(shapes, tensors, strict=True)]
             for shapes, tensors in ((input_shapes, inputs), (output_shapes, outputs))]
    sizes = [[float(np.prod(shape)) for shape in shapes] for shapes in (input_shapes, output_shapes)]
    total = sum(map(sum, sizes)) or 1.0
    moved = np.zeros(len(ways))
    for part, size in zip((*parts[0], *parts[1]), (*sizes[0], *sizes[1]), strict=True):
        moved += part * (size / total)
    return OpChoices(op=op, strategies=tuple(choice for _, choice, _ in ways), words=tuple(word for _, _, word in ways),
                     input_value=inputs, output_value=outputs,
                     input_gradient=numbers(factors.input_gradient_layout, len(input_shapes)),
                     output_gradient=numbers(factors.output_gradient_layout, len(output_shapes)),
                     work=np.array([factors.work_part(form, choice, mesh) for form, choice, _ in ways]), moved=moved,
                     input_part=tuple(parts[0]))


def _ways(op: OpFactors, mesh: Sequence[int], blocks: Sequence[tuple[int, int]]
          ) -> list[tuple[OpFactors, Strategy, tuple[str, ...]]]:
    """Return (the operator, perhaps with a factor in blocks, strategy, words) for all strategies."""
    options = [NOT_SPLIT, *(index for index, factor in enumerate(op.factors) if factor.size > 1),
               *(factors.linear_choice(index) for index in range(len(op.linear)))]
    ways = []
    for factor, count in ((-1, 1), *blocks):
        form = op if factor < 0 else factors.in_blocks(op, factor, count)
        for choice in product(options, repeat=len(mesh)):
            if (factor < 0 or factor in choice) and factors.is_valid(form, choice, mesh):
                ways.append((form, choice, tuple(_word(op, item, count if item == factor else 1) for item in choice)))
    return ways


def _context_ways(op: OpFactors, mesh: Sequence[int], blocks: Sequence[tuple[int, int]], context: InContext
                  ) -> list[tuple[OpFactors, Strategy, tuple[str, ...]]]:
    """Return the same where the first axis splits the sequence, and nothing else; attention in two forms."""
    place = context.place
    if place is None:
        return [way for way in _ways(op, mesh, blocks) if way[1][0] <= NOT_SPLIT]
    count = place.blocks * (2 if context.zigzag else 1)
    split = op if count == 1 else factors.in_blocks(op, place.factor, count, zigzag=context.zigzag)
    said = op.factors[place.factor].name + blocks_word(place.blocks, context.zigzag)
    round_form = factors.passed_round(split)
    found = []
    for form, ending in ((split, ""), *([] if round_form is None else [(round_form, "@ring")])):
        for way, choice, words in _ways(form, mesh, [item for item in blocks if item[0] != place.factor]):
            others = [words[axis + 1] if own != place.factor else said for axis, own in enumerate(choice[1:])]
            if choice[0] == place.factor and (not ending or place.factor not in choice[1:]):
                found.append((way, choice, (said + ending, *others)))
    return found


def _word(op: OpFactors, choice: int, count: int) -> str:
    if choice >= 0:
        return op.factors[choice].name + (f"/{count}" if count > 1 else "")
    return "" if choice == NOT_SPLIT else f"+{-2 - choice}"


def wanted_blocks(op: OpFactors, wanted: Sequence[set[tuple[int, int]]]
                  ) -> tuple[list[tuple[int, int]], list[set[tuple[int, int]]]]:
    """Return (factors to take in blocks, what is then wanted of each input) if readers want results in blocks.

    ``wanted`` has for each result (dimension, blocks).
    """
    found: dict[tuple[int, int], None] = {}
    for dims, items in zip(op.outputs, wanted, strict=False):
        for dim, count in sorted(items):
            first = dims[dim][0] if dim < len(dims) and dims[dim] else None
            if first is not None and not op.factors[first].special and op.factors[first].size % count == 0 and (
                    op.factors[first].size > count):
                found[first, count] = None
    needs: list[set[tuple[int, int]]] = [set() for _ in op.inputs]
    for factor, count in ((-1, 1), *found):
        form = op if factor < 0 else factors.in_blocks(op, factor, count)
        for need, dims in zip(needs, form.inputs, strict=True):
            for dim, own in enumerate(dims):
                for place in range(1, len(own)):
                    need.add((dim, math.prod(form.factors[item].size for item in own[:place])))
    return list(found), needs


def _part(shape: tuple[int, ...], layouts: list[Layout], numbers: I64, mesh: tuple[int, ...]) -> F64:
    known = {number: largest_part(shape, layouts[number], mesh) for number in set(numbers.tolist())}
    return np.array([known[number] for number in numbers.tolist()])


def whole_seconds(costs: Costs, op: int, column: int) -> dict[Part, float]:
    """Return the seconds of all parts of a whole operator on a kind of device."""
    return {"forward": float(costs.forward_s[op, column]), "input_grad": float(costs.input_grad_s[op, column]),
            "weight_grad": float(costs.weight_grad_s[op, column])}


def op_seconds(choices: OpChoices, whole_s: Mapping[Part, float], terms: Mapping[Part, Terms] | None, op: int) -> F64:
    """Return [s] the seconds of all parts of an operator on the device with the most work.

    What was estimated or measured for the whole operator shrinks as the roofline does: computing with the work, moving
    with the bytes.
    """
    total = np.zeros(len(choices.strategies))
    for part in PARTS:
        if whole_s[part] <= 0:
            continue
        if terms is None:
            total += whole_s[part] * choices.work
            continue
        item = terms[part]
        compute, moved = float(item.compute_s[op]), float(item.fixed_s[op] + item.moved_s[op])
        overhead, sums = float(item.overhead_s[op]), float(item.sum_s[op])
        whole = overhead + max(compute, moved) + sums
        if whole > 0:
            total += whole_s[part] / whole * (overhead + np.maximum(compute * choices.work, moved * choices.moved)
                                              + sums * choices.moved)
    return total


def pass_seconds(costs: Costs, op: int, column: int, choices: OpChoices, which: int) -> F64:
    """Return [s] the seconds of an operator's work in one pass."""
    whole: dict[Part, float] = {part: seconds if part in PASSES[which] else 0.0
                                for part, seconds in whole_seconds(costs, op, column).items()}
    return op_seconds(choices, whole, costs.terms[column], op)


def inside_sums(choices: OpChoices, strategy: int, mesh: Sequence[int]) -> Iterator[tuple[int, int, int, F64]]:
    """Yield (axis, pass, collective, bytes) of what devices exchange inside an operator where a factor needs it."""
    op, chosen = choices.op, choices.strategies[strategy]
    counts = factors.factor_counts(chosen, mesh)
    for axis, index in enumerate(chosen):
        if index >= 0 and op.factors[index].special:
            others = math.prod(-(-op.factors[other].size // count) / op.factors[other].size
                               for other, count in counts.items() if other != index)
            for which, sums in ((FORWARD, op.factors[index].forward_sums), (BACKWARD, op.factors[index].backward_sums)):
                if sums:
                    yield axis, which, ALL_REDUCE, np.array(sums, dtype=np.float64) * others
                if op.factors[index].exchanged:  # each device has a part
                    part = op.factors[index].exchanged * others / counts[index]
                    yield axis, which, ALL_TO_ALL, np.array([part])


def inside_seconds(choices: OpChoices, strategy: int, mesh: Mesh, work_s: Sequence[float],
                   num_bytes: float = 1.0) -> tuple[float, float]:
    """Return the seconds in forward and backward of what devices exchange inside an operator.

    ``work_s`` are those of its work on a device: keys and values go round beside it, but for the last part of it, which
    nothing follows. With ``num_bytes`` next to nothing it is what so many times the bytes would take.
    """
    found = [0.0, 0.0]
    for axis, which, kind, sizes in inside_sums(choices, strategy, mesh.shape):
        found[which] += float(mesh.seconds(axis, kind, sizes * num_bytes).sum())
    if choices.words[strategy][0].endswith("@ring"):
        count, place = mesh.shape[0], choices.op.keys[0][0]
        part = float(choices.input_part[place][strategy]) * count
        for which, whole in enumerate(choices.op.passed):
            sent = float(mesh.seconds(0, ALL_GATHER, np.array([whole * part * num_bytes]))[0])
            found[which] += max(0.0, sent - work_s[which] * num_bytes * (count - 1) / count)
    return found[0], found[1]


def describe(choices: OpChoices, index: int, axes: Sequence[str]) -> str:
    """Return a strategy in words: ``tensor: heads``."""
    said = [f"{axis}: {'sum' if word.startswith('+') else word}"
            for axis, word in zip(axes, choices.words[index], strict=True) if word]
    return ", ".join(said) or "whole"


