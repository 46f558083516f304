"""What a device does for an operator whose factors are split: mostly the operator itself, on the device's parts.

``run_local`` is the one place that knows: the lowering of stages and the tests of the rules both call it. Operators
with a shape among their arguments get the shape of the device's result (``OpFactors.shape_args``). Where a factor is
*special* (``Factor.special``: a vocabulary that is looked up, the classes of a loss, a mean), a function entered by
``local`` does it; it may exchange tensors with the others of the axis through ``LocalCall.group``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx

from weft.sharding.factors import NOT_SPLIT, OpFactors, Strategy, output_layout
from weft.sharding.tensor_layout import local_ranges, local_shape


class Group(Protocol):
    """The devices along some axes of a mesh that work on one operator together; autograd does not see its calls."""

    size: int
    rank: int

    def all_reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Return the sum (or ``max``) of the tensor over the group, a new tensor, on every device."""
        ...


@dataclass(frozen=True, kw_only=True)
class LocalCall:
    """One device's part of a call."""

    target: Any
    args: tuple[Any, ...]
    """With the device's own tensors in place of nodes; everything else as in the whole graph."""
    kwargs: Mapping[str, Any]
    op: OpFactors
    strategy: Strategy
    mesh: tuple[int, ...]
    coordinates: tuple[int, ...]
    group: Callable[[tuple[int, ...]], Group]
    """From axes of the mesh to the group of devices along them."""

    def axes(self, factor: int) -> tuple[int, ...]:
        """Return the axes that split a factor."""
        return tuple(axis for axis, choice in enumerate(self.strategy) if choice == factor)

    def range_of(self, factor: int) -> tuple[int, int]:
        """Return the (start, stop) of the device's part of a factor."""
        cuts = [(self.coordinates[axis], self.mesh[axis]) for axis in self.axes(factor)]
        return local_ranges(self.op.factors[factor].size, cuts)[0]

    def factor(self, name: str) -> int:
        """Return the index of a factor by name, -1 if there is none."""
        return next((index for index, item in enumerate(self.op.factors) if item.name == name), NOT_SPLIT)

    def is_split(self, name: str) -> bool:
        """Return whether some axis splits the factor of this name."""
        return (index := self.factor(name)) >= 0 and index in self.strategy

    def with_args(self, *args: Any) -> Any:
        """Return the result of the operator with other positional arguments."""
        return self.target(*args, **self.kwargs)


Local = Callable[[LocalCall], Any]

_LOCAL: dict[str, Local] = {}

_ON_PARTS: Final = {torch.ops.aten.view.default: torch.ops.aten.reshape.default,
                    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
                    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default}
"""What takes the place of an operator that needs its whole operand's strides."""


def local(*targets: str) -> Callable[[Local], Local]:
    """Return a decorator that enters what a device does for operators whose special factors are split."""
    def enter(function: Local) -> Local:
        for target in targets:
            assert target not in _LOCAL, f"two local forms of {target}"
            _LOCAL[target] = function
        return function

    return enter


def run_local(call: LocalCall, output_shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return what the operator returns on this device; ``output_shapes`` are those of the whole results."""
    if is_special(call.op, call.strategy):
        return _LOCAL[str(call.target)](call)
    target, args = plain_call(call, output_shapes)
    return target(*args, **call.kwargs)


def is_special(op: OpFactors, strategy: Strategy) -> bool:
    """Return whether a device does something else than the operator on its parts."""
    return any(choice >= 0 and op.factors[choice].special for choice in strategy)


def plain_call(call: LocalCall, output_shapes: Sequence[tuple[int, ...]]) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that a device calls where nothing is special, and its positional arguments."""
    args = list(call.args)
    for position, place in enumerate(call.op.shape_args):
        layout = output_layout(call.op, call.strategy, call.mesh, position)
        args[place] = list(local_shape(output_shapes[position], layout, call.mesh, call.coordinates))
    return _ON_PARTS.get(call.target, call.target), tuple(args)


def wide(x: Tensor) -> Tensor:
    """Return the tensor in at least single precision, in which sums over devices are taken."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def input_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that a call reads, each once, in the order in which rules and layouts list them."""
    return tuple(node.all_input_nodes)
