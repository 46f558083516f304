"""Operators described by their factors, as an einsum does: all ways to split an operator follow from the description.

A matrix product ``(m k, k n) -> (m n)`` has the factors m, n and k. To split it over some devices is to give each of
them a part of one factor:

- operands and results that have the factor in a dimension are split there; operands that do not have it are whole;
- a factor that no result has is *summed*: every device gets a part of the sum, so the results are sums to be taken;
- the gradient of an operand that has the factor is split like the operand; that of one that does not is a sum.

A dimension may be several factors, the outermost first: a view that merges heads and head size into one dimension has
there ``(h, d)``. Where the factor is not the outermost of its dimension, the dimension is split in blocks
(``tensor_layout.Placement``). ``in_blocks`` takes a factor so, in zig-zag too.

Attention's rows meet all keys and values: split, each device gathers these. In the form that ``passed_round`` gives
they are split like the rows, and the devices pass them round.

Rules (``weft.sharding.factor_rules``) give the factors of an fx node; ``factors_of`` there looks them up. Operators
without a rule are not split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement

Dims = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor its factors, the outermost first; empty for a dimension that is never split."""

NOT_SPLIT: Final = -1
"""In a strategy: the axis does not divide the operator; all its coordinates do the same."""


def linear_choice(index: int) -> int:
    """Return what stands in a strategy for: the inputs ``OpFactors.linear[index]`` are sums, and so are the results."""
    return -2 - index


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One index of an operator."""

    name: str
    """Short, for people: ``b``, ``heads``, ``k``; unique in the operator."""
    size: int
    special: bool = False
    """A device with a part of it has to do something else than the operator on them (``weft.sharding.local_ops``)."""
    even: bool = False
    """Parts must be equal."""
    divides: float = 1.0
    """The part of the operator's work that is divided with it: half for the width of attention's values."""
    ragged: bool = False
    """A dimension of it may have any number of rows for each of its entries (``weft.sharding.expert_rows``)."""
    fixed: bool = False
    """Never split: it only says of what blocks a dimension is made (three matrices that are joined in one)."""
    zigzag: bool = False
    """Of a fixed one: every second of its blocks is given out from the last coordinate to the first."""
    grows: bool = False
    """Work grows with it from nothing, as that of rows does in causal attention: the last part has most of it."""
    forward_sums: tuple[float, ...] = ()
    """Bytes of each all-reduce inside the operator where this factor, and no other, is split (if it is special)."""
    backward_sums: tuple[float, ...] = ()
    """The same for its backward."""
    joins: tuple[int, ...] = ()
    """It is in no dimension: to split it is to split these others, each tensor by the one that it has."""
    exchanged: float = 0.0
    """Bytes that devices exchange in an all-to-all inside the operator where it is split, and again in its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFactors:
    """How an operator's tensors are made of its factors."""

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    """For each tensor argument, in the order of ``fx.Node.all_input_nodes`` of the call (each node once)."""
    outputs: tuple[Dims, ...]
    """For each tensor that it returns."""
    linear: tuple[tuple[int, ...], ...] = ()
    """Sets of inputs in which the operator is linear when all others are given: if these are sums, results are."""
    shape_args: tuple[int, ...] = field(default=())
    """Positions of arguments that are the result's shape, or the shape of result ``i`` for the ``i``-th of them."""
    whole_outputs: tuple[int, ...] = ()
    """Results that are whole, not sums, on axes that split a factor they lack: its special form makes them equal."""
    keys: tuple[tuple[int, int], ...] = ()
    """(input, dimension) of attention's keys and values, where these are as many as its ``rows``."""
    passed: tuple[float, float] = (0.0, 0.0)
    """Where these are passed round: bytes of all of them in the forward, with their gradients in the backward."""


Strategy = tuple[int, ...]
"""For each axis of a mesh: the index of a factor, ``NOT_SPLIT``, or ``linear_choice(i)``."""


# ---- what a strategy means ------------------------------------------------------------------------------------------


def is_valid(op: OpFactors, strategy: Strategy, mesh: Sequence[int]) -> bool:
    """Return whether the parts are not empty, even where they must be, and no dimension is split by two factors."""
    counts = split_counts(op, strategy, mesh)
    if counts is None:
        return False
    tensors = (*op.inputs, *op.outputs)
    for index, count in counts.items():
        factor = op.factors[index]
        if factor.fixed or factor.size < count or (factor.even and factor.size % count):
            return False
        if factor.size % count and any(index in dim[1:] for dims in tensors for dim in dims):
            return False  # uneven parts of every block: they would not be ranges of equal blocks
    return len(counts) < 2 or not any(sum(factor in counts for factor in dim) > 1 for dims in tensors for dim in dims)


def factor_counts(strategy: Strategy, mesh: Sequence[int]) -> dict[int, int]:
    """Return into how many parts each factor that is split is split."""
    counts: dict[int, int] = {}
    for choice, count in zip(strategy, mesh, strict=True):
        if choice >= 0:
            counts[choice] = counts.get(choice, 1) * count
    return counts


def split_counts(op: OpFactors, strategy: Strategy, mesh: Sequence[int]) -> dict[int, int] | None:
    """Return into how many parts dimensions are split, by the factors they have; None if one is split in two ways."""
    counts: dict[int, int] = {}
    for index, count in factor_counts(strategy, mesh).items():
        for member in op.factors[index].joins or (index,):
            if member in counts:
                return None
            counts[member] = count
    return counts


def in_blocks(op: OpFactors, index: int, count: int, *, zigzag: bool = False) -> OpFactors:
    """Return the operator with a factor taken as ``count`` equal blocks: to split it takes a part of each of them."""
    outer = len(op.factors)

    def divided(dims: Dims) -> Dims:
        return tuple(tuple(part for item in dim for part in ((outer, item) if item == index else (item,)))
                     for dim in dims)

    factor = op.factors[index]
    inner = replace(factor, size=factor.size // count, even=factor.even or zigzag, grows=factor.grows and not zigzag)
    block = Factor(name=f"{factor.name}/", size=count, fixed=True, zigzag=zigzag)
    return replace(op, factors=(*op.factors[:index], inner, *op.factors[index + 1:], block),
                   inputs=tuple(map(divided, op.inputs)), outputs=tuple(map(divided, op.outputs)))


ROWS: Final = "rows"
"""What attention's factor of queries is called; those of a loss begin so."""


def by_parts(factor: Factor) -> bool:
    """Return whether a device with any entries of a special factor can do its part: not only with some in a row."""
    return factor.name.startswith(ROWS) or factor.name[:1] == "d"


def passed_round(op: OpFactors) -> OpFactors | None:
    """Return attention with keys and values split like its rows; None if they are not as many, or it is none."""
    if not op.keys:
        return None
    rows = next(index for index, factor in enumerate(op.factors) if factor.name == ROWS)
    block = [index for index, factor in enumerate(op.factors) if factor.name == f"{ROWS}/"]
    places = set(op.keys)
    inputs = tuple(tuple((*block, rows) if (position, dim) in places else own for dim, own in enumerate(dims))
                   for position, dims in enumerate(op.inputs))
    factors = tuple(replace(factor, special=True, even=True) if index == rows else factor
                    for index, factor in enumerate(op.factors))
    return replace(op, factors=factors, inputs=inputs)


def is_passed_round(op: OpFactors) -> bool:
    """Return whether this is the form of attention in which devices pass keys and values round."""
    return bool(op.keys) and bool(op.inputs[op.keys[0][0]][op.keys[0][1]])


def input_layout(op: OpFactors, strategy: Strategy, mesh: Sequence[int], position: int) -> Layout:
    """Return the layout in which the operator needs an input."""
    return _layout(op, strategy, mesh, op.inputs[position], WHOLE,
                   [SUM if position in inputs else WHOLE for inputs in op.linear])


def output_layout(op: OpFactors, strategy: Strategy, mesh: Sequence[int], position: int) -> Layout:
    """Return the layout in which a result comes out."""
    lacking = WHOLE if position in op.whole_outputs else SUM
    return _layout(op, strategy, mesh, op.outputs[position], lacking, [SUM] * len(op.linear))


def input_gradient_layout(op: OpFactors, strategy: Strategy, mesh: Sequence[int], position: int) -> Layout:
    """Return the layout in which the gradient of an input comes out."""
    return _layout(op, strategy, mesh, op.inputs[position], SUM,
                   [WHOLE if position in inputs else SUM for inputs in op.linear])


def output_gradient_layout(op: OpFactors, strategy: Strategy, mesh: Sequence[int], position: int) -> Layout:
    """Return the layout in which the operator needs the gradient of a result."""
    return _layout(op, strategy, mesh, op.outputs[position], WHOLE, [WHOLE] * len(op.linear))


def work_part(op: OpFactors, strategy: Strategy, mesh: Sequence[int]) -> float:
    """Return the part of the operator's work that the device with the most does."""
    part = 1.0
    for index, count in factor_counts(strategy, mesh).items():
        factor = op.factors[index]
        largest = -(-factor.size // count) / factor.size
        part *= 1 - factor.divides + factor.divides * (largest * (2 - largest) if factor.grows else largest)
    return part


def _layout(op: OpFactors, strategy: Strategy, mesh: Sequence[int], dims: Dims, lacking: Placement,
            linear: Sequence[Placement]) -> Layout:
    """Return a tensor's layout: ``lacking`` where it does not have the factor, ``linear`` for each linear choice."""
    counts = factor_counts(strategy, mesh)
    return tuple(linear[-2 - choice] if choice < NOT_SPLIT else WHOLE if choice < 0 else
                 _placement(op, dims, choice, counts, lacking) for choice in strategy)


def _placement(op: OpFactors, dims: Dims, factor: int, counts: Mapping[int, int], otherwise: Placement) -> Placement:
    """Return where a tensor has the factor, or one that it joins, or ``otherwise``."""
    for member in op.factors[factor].joins or (factor,):
        for dim, items in enumerate(dims):
            if member in items:
                place = items.index(member)
                blocks = math.prod(op.factors[item].size for item in items[:place])
                inner = math.prod(op.factors[item].size for item in items[place + 1:])
                return Placement(dim, blocks, inner if op.factors[member].size % counts[factor] else 1,
                                 place > 0 and op.factors[items[place - 1]].zigzag)
    return otherwise
