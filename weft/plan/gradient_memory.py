"""What gradients of activations take while a backward runs: a walk over its operators, as autograd takes them.

The backward of an operator is given the gradients of its results and makes one for each of its operands, in new memory
or in that of what it was given (additions and views hand it on). While it runs both are there. Then what it was given
goes, and each new gradient is joined to what earlier readers of the same tensor have left: in place where nobody else
has that memory and it is no view, which holds on to what it is a view of; else in a third tensor. The gradient of a
tensor that came from outside gets memory of its own at the end, because it is handed on, and is copied if it does not
lie as the tensor.

What the backward begins with stays until it ends: in the buffer it came in, with the stage on the rank that made it, or
as a sum or an assembly of pieces. Only the last is counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from weft.model.graph import F64, Bool

if TYPE_CHECKING:
    from weft.plan.again_memory import AgainLive

HANDING_ON: Final = frozenset({"aten.add", "aten.add_", "prims.add", "aten.reshape", "aten.flatten", "aten.clone",
                                "aten.contiguous", "aten.alias", "aten.dropout"})
"""Operators whose backward gives what it is given to operands of the same size."""
_AS_IT_IS: Final = HANDING_ON - {"aten.reshape", "aten.flatten"} | {"aten.sub", "aten.rsub"}
"""Of those the ones that give the very tensor, and not a view of it."""
_FIRST_ONLY: Final = frozenset({"aten.sub", "aten.rsub"})
"""The same, to their first operand only."""
_JOINING: Final = frozenset({"aten.cat", "aten.stack"})
"""Operators whose backward gives views of what it is given."""
_SCATTERING: Final = frozenset({"aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter"})
"""The same, to their second operand only: the part that they put into the first."""


class BackwardStep(Protocol):
    """What the walk needs to know of an operator, or of a move of a tensor to the layout in which it is read."""

    @property
    def kind(self) -> str:
        """Return what operator it is."""

    @property
    def read(self) -> list[int]:
        """Return the tensors that it reads."""

    @property
    def written(self) -> list[int]:
        """Return the tensors that it gives."""

    @property
    def is_view(self) -> bool:
        """Return whether it gives nothing but views."""

    @property
    def copies_gradient(self) -> bool:
        """Return whether it gives a copy where others of its kind hand on: the gradient lies in another order."""

    @property
    def gives_views(self) -> bool:
        """Return whether the gradients that it gives are views of what it has made for them."""

    @property
    def can_wait(self) -> bool:
        """Return whether gradients of its parameters can be computed later."""

    @property
    def backward_room(self) -> float:
        """Return the bytes that its backward takes besides gradients."""


@dataclass(slots=True)
class _Memory:
    """The memory behind some gradients."""

    size: float
    users: int = 1
    later: float = 0.0
    """What is counted elsewhere while the backward runs, and here after it."""
    is_deferred: bool = False
    """Gradients of weights that are computed later need it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientsLive:
    """Bytes of gradients, by operator in the order of the backward."""

    during: F64
    """While its backward runs."""
    joining: F64
    """When it has run, while what it made is joined to other gradients; what it needed is gone by then."""
    deferred: float
    """What gradients of weights that are computed later keep."""

    def above(self, released: F64, again: AgainLive | None = None) -> F64:
        """Return the most by operator, less what is ``released`` when each begins, and when the last one ends.

        What is made ``again`` comes to it.
        """
        if again is None:
            return np.maximum(self.during - released[:-1], self.joining - released[1:])
        before = np.concatenate((self.during[:1], self.joining[:-1]))
        making = np.where(again.making > 0, np.minimum(self.during, before) + again.making - released[:-1], 0.0)
        return np.maximum(making, np.maximum(self.during + again.during - released[:-1],
                                             self.joining + again.after - released[1:]))

    def most(self) -> F64:
        """Return the most by operator."""
        return np.maximum(self.during, self.joining)


def gives_on(step: BackwardStep, tensor: int, sizes: F64) -> bool:
    """Return whether the gradient of an operand is in the memory of that of the step's result."""
    if step.kind in _JOINING or (step.kind in _SCATTERING and tensor == step.read[1]):
        return True
    handing = step.is_view or step.kind in HANDING_ON or (step.kind in _FIRST_ONLY and tensor == step.read[0])
    is_handed = handing and not step.copies_gradient
    return is_handed and len(step.written) == 1 and bool(sizes[tensor] == sizes[step.written[0]])


def gradients_live(steps: Sequence[BackwardStep], *, sizes: F64, wanted: Bool, inputs: Sequence[int],
                   begins: Mapping[int, float], elsewhere: Mapping[int, float], defers: bool,
                   turned: frozenset[int] = frozenset()) -> GradientsLive:
    """Return what gradients take; ``steps`` are in the order of the forward.

    ``wanted`` are the tensors with a gradient, ``inputs`` those that came from outside. The backward ``begins`` with
    the gradients of these tensors and takes so many bytes for them. ``elsewhere``: what of these is not counted while
    the backward runs, but is if gradients of weights that are computed later, ``defers``, still need it. Gradients of
    ``turned`` tensors may not lie as these.
    """
    walk = _Walk(sizes=sizes, live=sum(begins.values()), turned=turned)
    walk.gradients = {tensor: _Memory(size, users=2, later=elsewhere.get(tensor, 0.0))  # the caller has it, too
                      for tensor, size in begins.items()}
    first_reader = {tensor: place for place in range(len(steps) - 1, -1, -1) for tensor in steps[place].read}
    outside = {tensor for tensor in inputs if wanted[tensor]}
    during, joining = np.zeros((2, len(steps)))
    deferred = 0.0
    for place in range(len(steps) - 1, -1, -1):
        step, at = steps[place], len(steps) - 1 - place
        during[at], given = walk.run(step, wanted)
        for memory in given:
            if not (defers and step.can_wait):
                walk.drop(memory)
            elif not memory.is_deferred:
                memory.is_deferred = True
                deferred += memory.size + memory.later
        joining[at] = walk.join([tensor for tensor in step.read if tensor in outside and first_reader[tensor] == place])
    return GradientsLive(during=during, joining=joining, deferred=deferred)


@dataclass(slots=True)
class _Walk:
    """Where the backward is."""

    sizes: F64
    live: float
    turned: frozenset[int] = frozenset()
    gradients: dict[int, _Memory] = field(default_factory=dict)
    views: set[int] = field(default_factory=set)
    """Tensors whose gradients are views of something that only they still hold."""
    made: list[tuple[int, _Memory, bool]] = field(default_factory=list)
    """Gradients that are not joined to others yet, and whether they are views."""

    def new(self, tensor: int) -> _Memory:
        memory = _Memory(float(self.sizes[tensor]))
        self.live += memory.size
        return memory

    def drop(self, memory: _Memory) -> None:
        memory.users -= 1
        if memory.users == 0:
            self.live -= memory.size

    def run(self, step: BackwardStep, wanted: Bool) -> tuple[float, list[_Memory]]:
        """Make the gradients of a step's operands; return what is there while it runs, and what it was given."""
        given = [self.gradients.pop(tensor) for tensor in step.written if tensor in self.gradients]
        was_view = any(tensor in self.views for tensor in step.written)
        if not given:
            moves = not step.written and any(tensor in self.gradients for tensor in step.read)
            return self.live + (step.backward_room if moves else 0.0), given
        for tensor in step.read:
            if wanted[tensor]:
                handed_on = gives_on(step, tensor, self.sizes)
                given[0].users += handed_on
                is_view = handed_on and (was_view or step.kind not in _AS_IT_IS)
                self.made.append((tensor, given[0] if handed_on else self.new(tensor), is_view or step.gives_views))
        return self.live + step.backward_room, given

    def join(self, finished: Sequence[int]) -> float:
        """Join what was made to what is there, and give ``finished`` tensors a gradient of their own."""
        most = self.live
        for tensor, memory, is_view in self.made:
            there = self.gradients.get(tensor)
            if there is None:
                self.gradients[tensor] = memory
                (self.views.add if is_view else self.views.discard)(tensor)
            elif there.users == 1 and tensor not in self.views:
                self.drop(memory)
            else:
                most = max(most, self._replace(tensor, there, memory))
        self.made.clear()
        for tensor in finished:
            own = self.gradients.get(tensor)
            if own is not None and (own.users > 1 or tensor in self.turned):
                most = max(most, self._replace(tensor, own))
        return most

    def _replace(self, tensor: int, *old: _Memory) -> float:
        self.gradients[tensor] = self.new(tensor)
        self.views.discard(tensor)
        most = self.live
        for memory in old:
            self.drop(memory)
        return most
