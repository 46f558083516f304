"""A replica's devices as a mesh, seen from one of them: its groups along every axis, and changes of a tensor's layout.

Every collective but ``pass_on`` waits until it is done. ``ReplicaMesh.counts`` says how often each kind was issued.

A layout changes one axis of the mesh at a time, in the steps that ``weft.sharding.layout_steps`` finds; ``_LocalStep``
is a step as one device does it. ``Reshard`` is the autograd function, with one change for the value in the forward and
one for its gradient in the backward: that is not the transpose of the forward but follows from the gradient's own
layouts (``weft.sharding.factors``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.base.errors import ClusterError
from weft.cluster.cluster_file import parse_cluster
from weft.cost.mesh import Mesh
from weft.plan.plan import Plan, Replica
from weft.plan.sharding import axis_sizes, coordinates_of, factor_name
from weft.run.transport import Transport
from weft.sharding.expert_rows import Ends, Rows
from weft.sharding.layout_steps import Step, find_steps
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, part_sizes

T = TypeVar("T")


class AxisGroup:
    """The devices along some axes of a mesh, in the order of their coordinates."""

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int, counts: Counter[str]) -> None:
        self.size, self.rank = len(ranks), rank
        self._transport, self._counts = transport, counts
        self._ranks = tuple(sorted(ranks))
        self._order = [self._ranks.index(item) for item in ranks]
        """Where the device at each coordinate stands in the transport's group, which is sorted by rank."""

    def all_reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Return the sum (or ``max``) of the tensor over the group, a new tensor, on every device."""
        if self.size == 1:
            return tensor.clone()
        self._counts["all_reduce"] += 1
        return self._transport.reduced(tensor, self._ranks, how)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all devices; they have one shape."""
        if self.size == 1:
            return [tensor]
        self._counts["all_gather"] += 1
        gathered = self._transport.gathered(tensor, self._ranks)
        return [gathered[place] for place in self._order]

    def reduce_scatter(self, parts: Sequence[Tensor], longest: Sequence[int]) -> Tensor:
        """Return the sum over the group of this device's part, within a tensor of the longest part's shape."""
        if self.size == 1:
            return parts[0].clone()
        self._counts["reduce_scatter"] += 1
        room = parts[0].new_zeros((self.size, *longest))
        for entry, part in zip(room, self._sorted(parts), strict=True):
            entry[tuple(slice(size) for size in part.shape)].copy_(part)
        return self._transport.sum_scattered(room, self._ranks)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what every device has for this one; ``parts`` are what this one has for each, in any shapes."""
        if self.size == 1:
            return [parts[0]]
        self._counts["all_to_all"] += 1
        sent = self._sorted(parts)
        given, wanted = [part.numel() for part in sent], [math.prod(shape) for shape in self._sorted(shapes)]
        room = parts[0].new_empty(sum(given))
        for place, part in zip(room.split(given), sent, strict=True):
            place.view(part.shape).copy_(part)
        pieces = self._transport.all_to_all(room, self._ranks, sent=given, received=wanted).split(wanted)
        return [pieces[place].view(shape) for place, shape in zip(self._order, shapes, strict=True)]

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start sending to the next device; return what waits for the tensor, of the same shape, of the one before."""
        self._counts["pass_on"] += 1
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        sizes = [[tensor.numel() if place == other else 0 for place in range(self.size)] for other in (after, before)]
        done = self._transport.exchanged(tensor.reshape(-1), self._ranks, sent=self._sorted(sizes[0]),
                                         received=self._sorted(sizes[1]))
        return lambda: done().view(tensor.shape)

    def _sorted(self, items: Sequence[T]) -> list[T]:
        return [item for _, item in sorted(zip(self._order, items, strict=True), key=lambda pair: pair[0])]


class ReplicaMesh:
    """The devices of a replica; see the module's docstring."""

    def __init__(self, transport: Transport, ranks: Sequence[int], sizes: Sequence[int],
                 weights: tuple[float, ...] = ()) -> None:
        """``weights`` say how long a byte takes along each axis, see ``axis_weights``."""
        self.sizes, self.ranks, self.weights = tuple(sizes), tuple(ranks), weights
        self.coordinates = coordinates_of(self.ranks.index(transport.rank), self.sizes)
        self.counts: Counter[str] = Counter()
        self._transport = transport
        self._groups: dict[tuple[int, ...], AxisGroup] = {}

    def group(self, axes: tuple[int, ...]) -> AxisGroup:
        """Return the devices that differ from this one along these axes only."""
        if axes not in self._groups:
            ranks = group_ranks(self.ranks, self.sizes, self.coordinates, axes)
            mine = ranks.index(self._transport.rank)
            self._groups[axes] = AxisGroup(self._transport, ranks, mine, self.counts)
        return self._groups[axes]


def axis_weights(plan: Plan, replica: Replica) -> tuple[float, ...]:
    """Return how long a byte takes along each axis of a replica's mesh, in relation to the others.

    Nothing (all alike) where the plan does not describe its cluster, or not in a way that can be read: it only decides
    between ways of the same result.
    """
    try:
        cluster = parse_cluster(plan.cluster.description, where="cluster.description")
        position = {device.name: index for index, device in enumerate(cluster.devices)}
        return Mesh(cluster, [position[name] for name in replica.devices], axis_sizes(replica)).weights
    except (ClusterError, KeyError):
        return ()


def group_ranks(ranks: Sequence[int], sizes: Sequence[int], coordinates: Sequence[int],
                axes: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that differ from the one at ``coordinates`` along these axes only, by coordinate."""
    index = tuple(slice(None) if axis in axes else coordinates[axis] for axis in range(len(sizes)))
    return tuple(np.ravel(np.reshape(ranks, sizes)[index]).tolist())


def mesh_groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that the stages of a plan exchange in, sorted, in the same order on every rank."""
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    for stage in plan.stages:
        used = _axes_used(stage.sharding.ops)
        for replica in stage.replicas:
            sizes = axis_sizes(replica)
            ranks = [rank_of[device] for device in replica.devices]
            for axes in [*((axis,) for axis in range(len(sizes))), *used]:
                for position in range(len(ranks)):
                    yield tuple(sorted(group_ranks(ranks, sizes, coordinates_of(position, sizes), axes)))


def _axes_used(ops: Mapping[str, tuple[str, ...]]) -> list[tuple[int, ...]]:
    """Return the sets of several axes that split one factor of some operator."""
    found = {tuple(axis for axis, other in enumerate(words) if factor_name(other) == factor_name(word))
             for words in ops.values() for word in words if word and not word.startswith("+")}
    return sorted(axes for axes in found if len(axes) > 1)


class Change:
    """Changes the layout of tensors of one shape on one device; call it with the device's part."""

    def __init__(self, mesh: ReplicaMesh, shape: Sequence[int], source: Layout, target: Layout, *,
                 rows: Rows | None = None) -> None:
        """``rows`` is the dimension that is cut where experts' rows end: call what ``cut_at`` returns."""
        whole = tuple(shape)
        self.rows_dim = None if rows is None else rows.dim
        if rows is not None:
            whole = (*whole[:rows.dim], rows.num_experts, *whole[rows.dim + 1:])
        self.steps = [_LocalStep(mesh, whole, step) for step in
                      find_steps(source, target, mesh.sizes, whole, mesh.weights)]

    def cut_at(self, ends: Ends) -> Change:
        """Return the change of a tensor whose experts' rows end there."""
        found = copy(self)
        found.steps = [step.cut_at(self.rows_dim, ends) for step in self.steps]
        return found

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the device's part in the new layout."""
        for step in self.steps:
            tensor = step(tensor)
        return tensor


class _LocalStep:
    """A step as one device does it."""

    def __init__(self, mesh: ReplicaMesh, shape: tuple[int, ...], step: Step) -> None:
        self.group: AxisGroup = mesh.group((step.axis,))
        self.now, self.after = step.before[step.axis], step.after
        self.old, self.new = (_Parts.of(placement, mesh, shape, step) for placement in (self.now, self.after))

    def cut_at(self, dim: int | None, ends: Ends) -> _LocalStep:
        """Return the step with parts of this dimension that are experts' rows, not experts."""
        found = copy(self)
        found.old, found.new = (parts.cut_at(ends) if parts is not None and parts.dim == dim else parts
                                for parts in (self.old, self.new))
        return found

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
        return new.cut(tensor, rank).contiguous()

    def _gather(self, tensor: Tensor, parts: _Parts) -> Tensor:
        padded = parts.pad(tensor)
        return parts.join([parts.unpad(item, rank) for rank, item in enumerate(self.group.all_gather(padded))])

    def _reduce_scatter(self, tensor: Tensor, parts: _Parts) -> Tensor:
        pieces = [parts.cut(tensor, rank) for rank in range(self.group.size)]
        longest = max((tuple(piece.shape) for piece in pieces), key=lambda shape: shape[parts.dim])
        return parts.unpad(self.group.reduce_scatter(pieces, longest), self.group.rank)

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
    zigzag: bool = False
    first: int = 0
    """Entries before the parts, which devices have that differ along earlier axes."""

    @staticmethod
    def of(placement: Placement, mesh: ReplicaMesh, shape: tuple[int, ...], step: Step) -> _Parts | None:
        """Return the parts of a placement that splits, as it is after the axes that cut before."""
        if not placement.is_split:
            return None
        length, first = shape[placement.dim] // placement.blocks, 0
        for axis in range(step.axis):
            if step.before[axis].dim == placement.dim:
                sizes = part_sizes(length, mesh.sizes[axis], unit=placement.unit)
                length = sizes[mesh.coordinates[axis]]
                first += sum(sizes[:mesh.coordinates[axis]])
        return _Parts(placement.dim, placement.blocks,
                      part_sizes(length, mesh.sizes[step.axis], unit=placement.unit), placement.zigzag, first)

    def cut_at(self, ends: Ends) -> _Parts:
        """Return the parts as rows, where they are experts whose rows end there."""
        places = list(accumulate(self.sizes, initial=self.first))
        return replace(self, sizes=tuple(ends[last] - ends[first] for first, last in pairwise(places)), first=0)

    def cut(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a device's part, a view where it can be one."""
        start, size = sum(self.sizes[:rank]), self.sizes[rank]
        if self.blocks == 1:
            return tensor.narrow(self.dim, start, size)
        if self.zigzag:
            pairs = tensor.unflatten(self.dim, (self.blocks // 2, 2 * sum(self.sizes)))
            ends = start, 2 * sum(self.sizes) - start - size
            return torch.cat([pairs.narrow(self.dim + 1, end, size) for end in ends],
                             dim=self.dim + 1).flatten(self.dim, self.dim + 1)
        blocks = tensor.unflatten(self.dim, (self.blocks, sum(self.sizes)))
        return blocks.narrow(self.dim + 1, start, size).flatten(self.dim, self.dim + 1)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return what the parts of all devices are together."""
        if self.blocks == 1:
            return torch.cat(list(pieces), dim=self.dim)
        if self.zigzag:
            pairs = [piece.unflatten(self.dim, (self.blocks // 2, 2, size))
                     for piece, size in zip(pieces, self.sizes, strict=True)]
            halves = [*(pair.select(self.dim + 1, 0) for pair in pairs),
                      *(pair.select(self.dim + 1, 1) for pair in reversed(pairs))]
            return torch.cat(halves, dim=self.dim + 1).flatten(self.dim, self.dim + 1)
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
