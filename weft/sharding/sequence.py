"""Where a model's sequence is: which factor of which operator is a place in the sequence of a sample.

It begins at attention, whose rows are places. From there it goes to all tensors that attention reads and gives, to the
operators that make or read these, and so on: a dimension of a tensor is one factor of each of its operators. Where
samples and places are one dimension (rows of a product), the factor is taken in as many blocks as there are samples.
Operators that need the whole sequence (a shift of labels, a convolution over places) are where it ends.

With a context axis every operator that is found splits this factor; ``words`` says so for a plan. In zig-zag each
device has a part from the front and one from the back, so that all have the same work where attention is causal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from weft.base.errors import InputError
from weft.sharding.factors import ROWS, Dims, OpFactors, by_parts
from weft.sharding.named_ops import NamedOp

Passing = Literal["gather", "ring"]
PASSING = get_args(Passing)


class Place(NamedTuple):
    """The factor of an operator that is a place in the sequence, and in how many blocks it is taken."""

    factor: int
    blocks: int


class _Fact(NamedTuple):
    """A dimension of a tensor has the sequence, whole in each of its blocks."""

    dim: int
    blocks: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSequence:
    """A model's sequence; without places where it has no attention."""

    places: Mapping[str, Place] = field(default_factory=dict)
    """By operator."""
    lengths: tuple[int, ...] = ()
    """Those of all sequences: a model may have one of an encoder and one of a decoder."""
    is_causal: bool = False
    """Some attention is."""

    def check(self, num_parts: int, *, what: str = "the model") -> None:
        """Raise ``InputError`` if so many devices cannot divide the sequence."""
        if not self.places:
            raise InputError(f"{what} has no sequence to split: it has no attention that can be split by its rows. "
                             "Leave the context axis out")
        step = num_parts * (2 if self.is_causal else 1)
        for length in self.lengths:
            if length % step:
                pieces = f"{num_parts} devices with a part from the front and one from the back each" * self.is_causal
                fitting = [count for count in range(1, length + 1) if length % (count * step // num_parts) == 0]
                near = min(fitting, key=lambda count: (abs(count - num_parts), count))
                raise InputError(f"a context axis of {num_parts} does not divide the sequence of {length} of {what} "
                                 f"evenly ({pieces or f'{num_parts} parts'}): the nearest that does is {near}")

    def words(self, ops: Mapping[str, NamedOp], passing: Passing = "gather", *,
              zigzag: bool | None = None) -> dict[str, str]:
        """Return the word of each operator for a context axis; in zig-zag, if not said, where attention is causal."""
        is_zigzag = self.is_causal if zigzag is None else zigzag
        result = {}
        for name, place in self.places.items():
            op = ops[name].factors
            assert op is not None
            result[name] = op.factors[place.factor].name + blocks_word(place.blocks, is_zigzag) + (
                "@ring" if passing == "ring" and op.keys else "")
        return result


def blocks_word(blocks: int, is_zigzag: bool) -> str:
    """Return what stands behind the name of a factor that is taken in blocks, or in zig-zag in each of them."""
    return f"/{2 * blocks}z" if is_zigzag else f"/{blocks}" if blocks > 1 else ""


def find_sequence(ops: Mapping[str, NamedOp]) -> ModelSequence:
    """Return where the sequence of these operators is."""
    users: dict[str, list[str]] = {}
    for name, op in ops.items():
        for tensor in (*op.inputs, *op.outputs):
            users.setdefault(tensor, []).append(name)
    places: dict[str, Place] = {}
    facts: dict[str, _Fact] = {}
    lengths: dict[int, None] = {}
    waiting = []
    is_causal = False
    for name, op in ops.items():
        for index, factor in enumerate(op.factors.factors if op.factors is not None else ()):
            if factor.name == ROWS and not factor.fixed and op.factors is not None and _is_attention(op.factors, index):
                waiting.append((name, Place(index, 1)))
                lengths[factor.size] = None
                is_causal |= factor.grows
    while waiting:
        name, place = waiting.pop()
        if name in places:
            continue
        places[name] = place
        for tensor, fact in _facts(ops[name], place):
            if tensor not in facts:
                facts[tensor] = fact
                waiting += [(user, found) for user in users[tensor]
                            if user not in places and (found := _place(ops[user], tensor, fact)) is not None]
    order = {name: places[name] for name in ops if name in places}
    return ModelSequence(places=order, lengths=tuple(lengths), is_causal=is_causal)


def _is_attention(op: OpFactors, rows: int) -> bool:
    """Return whether the factor is in the first operand and the result, next to the last dimension, and nowhere alone.
    """
    return len(op.inputs) >= 3 and len(op.outputs) == 1 and op.outputs[0][-2:-1] == ((rows,),)


def _facts(op: NamedOp, place: Place) -> Iterator[tuple[str, _Fact]]:
    factors = op.factors
    assert factors is not None
    length = factors.factors[place.factor].size // place.blocks
    for tensor, dims in (*zip(op.inputs, factors.inputs, strict=True),
                         *zip(op.outputs, factors.outputs, strict=False)):
        for dim, items in enumerate(dims):
            if place.factor in items:
                yield tensor, _Fact(dim, _before(factors, items, items.index(place.factor)) * place.blocks, length)


def _before(op: OpFactors, items: tuple[int, ...], place: int) -> int:
    return math.prod(op.factors[item].size for item in items[:place])


def _place(op: NamedOp, tensor: str, fact: _Fact) -> Place | None:
    """Return which factor of an operator has a tensor's sequence, if any that a part of can be taken."""
    factors = op.factors
    if factors is None:
        return None
    described: list[tuple[str, Dims]] = [*zip(op.inputs, factors.inputs, strict=True),
                                         *zip(op.outputs, factors.outputs, strict=False)]
    items = next((dims[fact.dim] for name, dims in described if name == tensor), ())
    for place, index in enumerate(items):
        factor, before = factors.factors[index], _before(factors, items, place)
        blocks = fact.blocks // before if fact.blocks % before == 0 else 0
        if blocks and factor.size == blocks * fact.length:
            return None if factor.fixed or (factor.special and not by_parts(factor)) else Place(index, blocks)
    return None
