"""From one layout of a tensor to another, for its value in the forward and for its gradient in the backward.

A layout changes one axis of the mesh at a time, in the steps that ``weft.sharding.layout_steps`` finds; ``_LocalStep``
is a step as one device does it. ``Reshard`` is the autograd function: what its backward does is not the transpose of
its forward but follows from the gradient's own layouts (``weft.sharding.factors``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.run.mesh import AxisGroup, DeviceMesh
from weft.sharding.layout_steps import Step, find_steps
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, part_sizes


class Change:
    """Changes the layout of tensors of one shape on one device; call it with the device's part."""

    def __init__(self, mesh: DeviceMesh, shape: Sequence[int], source: Layout, target: Layout) -> None:
        self.steps = [_LocalStep(mesh, tuple(shape), step) for step in
                      find_steps(source, target, mesh.sizes, shape, mesh.weights)]

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the device's part in the new layout."""
        for step in self.steps:
            tensor = step(tensor)
        return tensor


class _LocalStep:
    """A step as one device does it."""

    def __init__(self, mesh: DeviceMesh, shape: tuple[int, ...], step: Step) -> None:
        self.group: AxisGroup = mesh.group((step.axis,))
        self.now, self.after = step.before[step.axis], step.after
        self.old, self.new = (_Parts.of(placement, mesh, shape, step) for placement in (self.now, self.after))

    def __call__(self, tensor: Tensor) -> Tensor:
        rank, old, new = self.group.rank, self.old, self.new
        if old is not None:
            if new is not None:
                return self._exchange(tensor, old, new)
            return self._gather(tensor, old) if self.after == WHOLE else old.within_zeros(tensor, rank)
        if self.now == SUM:
            return self.group.all_reduce(tensor) if new is None else self._reduce_scatter(tensor, new)
        if new is None:
            return tensor if rank == 0 else torch.zeros_like(tensor)
        return new.cut(tensor, rank)

    def _gather(self, tensor: Tensor, parts: _Parts) -> Tensor:
        padded = parts.pad(tensor)
        return parts.join([parts.unpad(item, rank) for rank, item in enumerate(self.group.all_gather(padded))])

    def _reduce_scatter(self, tensor: Tensor, parts: _Parts) -> Tensor:
        pieces = [parts.pad(parts.cut(tensor, rank)) for rank in range(self.group.size)]
        return parts.unpad(self.group.reduce_scatter(pieces), self.group.rank)

    def _exchange(self, tensor: Tensor, old: _Parts, new: _Parts) -> Tensor:
        pieces = [new.cut(tensor, rank) for rank in range(self.group.size)]
        mine = pieces[self.group.rank].shape
        shapes = [(*mine[: old.dim], old.blocks * size, *mine[old.dim + 1:]) for size in old.sizes]
        return old.join(self.group.all_to_all(pieces, shapes))


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the devices along one axis divide a dimension of what they hold together, block by block."""

    dim: int
    blocks: int
    sizes: tuple[int, ...]
    """Entries of each coordinate's part of a block."""

    @staticmethod
    def of(placement: Placement, mesh: DeviceMesh, shape: tuple[int, ...], step: Step) -> _Parts | None:
        """Return the parts of a placement that splits, as it is after the axes that cut before."""
        if not placement.is_split:
            return None
        length = shape[placement.dim] // placement.blocks
        for axis in range(step.axis):
            if step.before[axis].dim == placement.dim:
                length = part_sizes(length, mesh.sizes[axis], unit=placement.unit)[mesh.coordinates[axis]]
        return _Parts(placement.dim, placement.blocks,
                      part_sizes(length, mesh.sizes[step.axis], unit=placement.unit))

    def cut(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a device's part."""
        start, size = sum(self.sizes[:rank]), self.sizes[rank]
        if self.blocks == 1:
            return tensor.narrow(self.dim, start, size).contiguous()
        blocks = tensor.unflatten(self.dim, (self.blocks, sum(self.sizes)))
        return blocks.narrow(self.dim + 1, start, size).flatten(self.dim, self.dim + 1).contiguous()

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return what the parts of all devices are together."""
        if self.blocks == 1:
            return torch.cat(list(pieces), dim=self.dim)
        blocks = [piece.unflatten(self.dim, (self.blocks, size))
                  for piece, size in zip(pieces, self.sizes, strict=True)]
        return torch.cat(blocks, dim=self.dim + 1).flatten(self.dim, self.dim + 1)

    def pad(self, tensor: Tensor) -> Tensor:
        """Return a part with zeros behind it, so that it is as long as the longest."""
        missing = max(self.sizes) * self.blocks - tensor.shape[self.dim]
        if not missing:
            return tensor
        zeros = tensor.new_zeros((*tensor.shape[: self.dim], missing, *tensor.shape[self.dim + 1:]))
        return torch.cat([tensor, zeros], dim=self.dim)

    def unpad(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a part of that coordinate without what ``pad`` put behind it."""
        return tensor.narrow(self.dim, 0, self.blocks * self.sizes[rank])

    def within_zeros(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a part in its place in the whole, and zeros elsewhere."""
        shape = list(tensor.shape)
        pieces = []
        for other, size in enumerate(self.sizes):
            shape[self.dim] = self.blocks * size
            pieces.append(tensor if other == rank else tensor.new_zeros(shape))
        return self.join(pieces)


class Reshard(torch.autograd.Function):
    """A value in another layout; its gradient takes the way back between layouts of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Change, gradient: Change) -> Tensor:
        """Return the value in the new layout."""
        ctx.gradient = gradient
        return value(tensor) if value else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        """Return the gradient in the layout that the producer wants."""
        return ctx.gradient(gradients[0]), None, None
