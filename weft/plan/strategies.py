"""What the words of ``Sharding.ops`` mean: how an operator is split over the axes of a mesh.

    ("heads", "")     the first axis splits the factor ``heads``, on the second all do the same
    ("n/3",)          the axis splits each of three equal blocks of the factor ``n`` (queries, keys and values)
    ("+0",)           the operands in the first of ``OpFactors.linear`` are sums over the axis
    (":P",)           on the axis all do the same, but the gradients of results are sums, and so are those of operands
                      (a backward is linear in them, whatever the operator is)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from weft.base.errors import PlanError
from weft.plan.sharding import TensorLayout
from weft.sharding.factors import (
    NOT_SPLIT,
    OpFactors,
    Strategy,
    in_blocks,
    input_gradient_layout,
    input_layout,
    is_valid,
    linear_choice,
    output_gradient_layout,
    output_layout,
)
from weft.sharding.tensor_layout import SUM, WHOLE, Layout

LayoutOf = Callable[[OpFactors, Strategy, Sequence[int], int], Layout]


SUMS: Final = ":P"
"""The word for: not split, and gradients are sums."""

_NO_FACTORS: Final = OpFactors(factors=(), inputs=(), outputs=())


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
        return TensorLayout(self._values(output_layout, position), self._gradients(output_gradient_layout, position))

    def wanted(self, position: int) -> TensorLayout:
        """Return the layout in which an operand is wanted, and that in which its gradient comes out."""
        return TensorLayout(self._values(input_layout, position), self._gradients(input_gradient_layout, position))

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
        factor, slash, blocks = word.partition("/")
        if slash:
            op = _in_blocks(op, _factor(op, factor, name), blocks, name)
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
        return _factor(op, word.partition("/")[0], name)
    if word[1:].isdecimal() and int(word[1:]) < len(op.linear):
        return linear_choice(int(word[1:]))
    raise PlanError(f"sharding.ops.{name}: {word!r} is none of its {len(op.linear)} sets of operands that may be sums")


def _factor(op: OpFactors, word: str, name: str) -> int:
    for index, factor in enumerate(op.factors):
        if factor.name == word:
            return index
    known = ", ".join(factor.name for factor in op.factors)
    raise PlanError(f"sharding.ops.{name}: there is no factor {word!r}; it has {known or 'none'}")


def _in_blocks(op: OpFactors, index: int, count: str, name: str) -> OpFactors:
    """Return the operator with a factor taken as so many blocks, of which a part is to be taken from each."""
    factor = op.factors[index]
    if any(item.name == f"{factor.name}/" for item in op.factors):
        return op  # along another axis it was taken so already
    if factor.special or not count.isdecimal() or int(count) < 1 or factor.size % int(count):
        why = "it is looked up or summed by its order" if factor.special else f"its size is {factor.size}"
        raise PlanError(f"sharding.ops.{name}: {factor.name!r} cannot be split in {count!r} equal blocks: {why}")
    return in_blocks(op, index, int(count))
