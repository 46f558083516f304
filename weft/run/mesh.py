"""A replica's devices as a mesh, seen from one of them: its place on every axis, and the groups it exchanges with.

Every call waits until it is done. ``DeviceMesh.counts`` says how often each kind of collective was issued.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from weft.base.errors import ClusterError
from weft.plan.plan import Plan, Replica
from weft.plan.sharding import axis_sizes, coordinates_of
from weft.run.transport import Transport

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

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over the group of this device's part; all parts have one shape."""
        if self.size == 1:
            return parts[0].clone()
        self._counts["reduce_scatter"] += 1
        return self._transport.sum_scattered(torch.stack(self._sorted(parts)), self._ranks)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what every device has for this one; ``parts`` are what this one has for each, in any shapes."""
        if self.size == 1:
            return [parts[0]]
        self._counts["all_to_all"] += 1
        sent = self._sorted(parts)
        wanted = [math.prod(shape) for shape in self._sorted(shapes)]
        flat = self._transport.all_to_all(torch.cat([part.reshape(-1) for part in sent]), self._ranks,
                                          sent=[part.numel() for part in sent], received=wanted)
        pieces = flat.split(wanted)
        return [pieces[place].view(shape) for place, shape in zip(self._order, shapes, strict=True)]

    def _sorted(self, items: Sequence[T]) -> list[T]:
        return [item for _, item in sorted(zip(self._order, items, strict=True), key=lambda pair: pair[0])]


class DeviceMesh:
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
    from weft.cluster.cluster_file import parse_cluster
    from weft.cost.mesh import Mesh

    try:
        cluster = parse_cluster(plan.cluster.description, where="cluster.description")
        position = {device.name: index for index, device in enumerate(cluster.devices)}
        return Mesh(cluster, [position[name] for name in replica.devices], axis_sizes(replica)).weights
    except (ClusterError, KeyError):
        return ()


def group_ranks(ranks: Sequence[int], sizes: Sequence[int], coordinates: Sequence[int],
                axes: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that differ from the one at ``coordinates`` along these axes only, by coordinate."""
    choices = [range(size) if axis in axes else (coordinates[axis],) for axis, size in enumerate(sizes)]
    return tuple(ranks[_position(place, sizes)] for place in itertools.product(*choices))


def _position(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    position = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        position = position * size + coordinate
    return position


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
    found = {tuple(axis for axis, other in enumerate(words) if other == word)
             for words in ops.values() for word in words if word and not word.startswith("+")}
    return sorted(axes for axes in found if len(axes) > 1)
