"""The parameters and buffers that one rank holds: which parts of them, their gradients, and what its optimizer changes.

A parameter that several stages of the rank use is one tensor. The gradients of a bucket lie side by side in one flat
tensor per dtype, and each ``parameter.grad`` is a view of it, so the exchange needs no copy. Gradients are sums over
micro-batches and ranks, because every loss was weighted by its share of the batch.

Ranks that hold the same part of a parameter have the same gradient when the step begins. With ``optimizer.sharded``
each of them has the state of some rows and changes these alone; then all gather what the others have changed, one
parameter after the other, in the same order everywhere (``StateShares``). A parameter with fewer rows than ranks is the
first rank's. Without ``sharded`` a rank changes all that it holds. Of what is kept in pieces (``weft.run.pieces``) a
rank changes its rows.

Buffers that the forward changes, such as a batch norm's statistics, change in each replica by the samples it sees.
After a step all take over those of the first of them, as PyTorch's data parallelism does (``BufferShares``); so a
checkpoint has one value for each, and a resumed run goes on as it would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.plan.holders import in_pieces, parameter_copies, parameter_holdings
from weft.plan.program import Program
from weft.plan.sharding import Region, TensorLayout, axis_sizes, coordinates_of, parse_layout
from weft.plan.units import Unit, rows_of_region
from weft.run.mesh import group_ranks
from weft.run.pieces import Units
from weft.run.transport import Transport
from weft.run.wire import ExchangeGroup
from weft.sharding.tensor_layout import SUM, WHOLE


class Parameters:
    """Parameters by tensor name; see the module's docstring."""

    def __init__(self, tensors: Mapping[str, torch.nn.Parameter], buckets: Sequence[Sequence[str]],
                 units: Units) -> None:
        """``tensors`` are what stages compute with; of units the rank may keep only pieces of these."""
        self.units = units
        self.tensors = {name: tensor for name, tensor in tensors.items() if name not in units.of} | dict(units.kept())
        """What the rank has all the time."""
        self.flat: tuple[tuple[Tensor, ...], ...] = tuple(self._flatten(names) for names in buckets)
        bucketed = {name for names in buckets for name in names}
        self._loose = [tensor for name, tensor in self.tensors.items() if name not in bucketed and name not in units.of]

    def _flatten(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for name in names:
            by_dtype.setdefault(self.tensors[name].dtype, []).append(self.tensors[name])
        result = []
        for dtype, members in by_dtype.items():
            flat = torch.zeros(sum(item.numel() for item in members), dtype=dtype, device=members[0].device)
            start = 0
            for item in members:
                item.grad = flat[start : start + item.numel()].view(item.shape)
                start += item.numel()
            result.append(flat)
        return tuple(result)

    def clear_gradients(self) -> None:
        """Forget all gradients: those in buckets and units become zero, the others absent."""
        self.units.clear()
        for tensors in self.flat:
            for flat in tensors:
                flat.zero_()
        for parameter in self._loose:
            parameter.grad = None

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a parameter, or the rank's piece of it; zero where the loss does not depend on it."""
        if name in self.units.of:
            return self.units.of[name].own_gradient(name)
        parameter = self.tensors[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def held_regions(program: Program, rank: int) -> dict[str, Region]:
    """Return which entries of its parameters a rank holds; empty for all of them."""
    device, names = program.rank_names[rank], program.graph.tensor_names
    return {names[tensor]: held[device][0].region
            for tensor, held in parameter_holdings(program.plan, program.graph).items() if device in held}


def kept_regions(program: Program, rank: int) -> dict[str, Region]:
    """Return which entries of its parameters a rank has all the time: of those in pieces, its rows."""
    return _piece_regions(program, rank, lambda unit: unit.storage.pieces == "parameters")


def gradient_regions(program: Program, rank: int) -> dict[str, Region]:
    """Return of which entries of its parameters a rank has the whole gradient at the end of a step."""
    return _piece_regions(program, rank, lambda unit: True)


def _piece_regions(program: Program, rank: int, chosen: Callable[[Unit], bool]) -> dict[str, Region]:
    regions, graph = held_regions(program, rank), program.graph
    for unit in program.units:
        for tensor, rows in unit.rows(rank).items() if rank in unit.ranks and chosen(unit) else ():
            name = graph.tensor_names[tensor]
            regions[name] = rows_of_region(regions[name], graph.tensor_shapes[tensor], rows)
    return regions


def cut_region(whole: Tensor, region: Region) -> Tensor:
    """Return the entries of a tensor that lie in a region, a copy; the tensor itself if the region is all of it."""
    result = whole
    for dim, ranges in enumerate(region):
        if ranges != ((0, whole.shape[dim]),):
            result = torch.cat([result.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return result


def put_region(whole: Tensor, region: Region, part: Tensor) -> None:
    """Write the entries of a region, given in any shape, into the whole tensor."""
    if not region:
        whole.copy_(part.view(whole.shape))
        return
    part = part.view([sum(stop - start for start, stop in ranges) for ranges in region])
    for block in itertools.product(*(list(_places(ranges)) for ranges in region)):
        target = whole[tuple(slice(start, start + length) for start, _, length in block)]
        target.copy_(part[tuple(slice(place, place + length) for _, place, length in block)])


def _places(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the whole, start in the part, length) of each range."""
    place = 0
    for start, stop in ranges:
        yield start, place, stop - start
        place += stop - start


def parameter_layouts(program: Program, instance: int, rank: int) -> dict[str, TensorLayout]:
    """Return how the parameters of an instance lie over its mesh, where they are not simply whole.

    Gradients that are summed over some axis in an exchange are sums on that axis: where all devices have the same
    gradient, all but the first leave it out.
    """
    item, plan, names = program.instances[instance], program.plan, program.graph.tensor_names
    stage = plan.stages[item.stage]
    sizes = axis_sizes(stage.replicas[item.replica])
    coordinates = coordinates_of(item.ranks.index(rank), sizes)
    lines = [set(group_ranks(item.ranks, sizes, coordinates, (axis,))) for axis in range(len(sizes))]
    summed = {names[tensor]: bucket.ranks for bucket in program.buckets if rank in bucket.ranks
              for tensor in bucket.parameters if bucket.method != "all_gather"}
    stored = {name for name in stage.sharding.tensors if program.graph.tensor_index[name] in program.graph.parameters}
    result = {}
    for name in sorted(stored | summed.keys()):
        layout = parse_layout(stage.sharding.tensors.get(name, ("R",) * len(sizes)))
        gradient = tuple(SUM if own == WHOLE and len(line.intersection(summed.get(name, ()))) > 1 else own
                         for own, line in zip(layout.gradient, lines, strict=True))
        result[name] = TensorLayout(layout.value, gradient)
    return result


def divided_states(program: Program) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parameters whose state several ranks divide, with these ranks, in the same order on every rank."""
    if not program.plan.optimizer.sharded:
        return []
    rank_of = {name: rank for rank, name in enumerate(program.rank_names)}
    others = in_pieces(program.plan, program.graph)
    return [(program.graph.tensor_names[tensor], tuple(sorted(rank_of[device] for device in item.devices)))
            for tensor, copies in parameter_copies(program.plan, program.graph).items()
            for item in copies if len(item.devices) > 1 and tensor not in others]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A parameter that several ranks hold and change in parts."""

    parameter: torch.nn.Parameter
    ranks: tuple[int, ...]
    group: ExchangeGroup
    bounds: tuple[int, ...]
    """Rows of rank ``ranks[i]`` are from ``bounds[i]`` on, up to the next; with one bound the first rank has all."""
    own: torch.nn.Parameter | None
    """The rows of this rank, in the parameter's memory."""
    place: int
    """Of this rank among the ranks."""


class StateShares:
    """One rank's part in the update; see the module's docstring."""

    def __init__(self, program: Program, parameters: Parameters, transport: Transport) -> None:
        self.tensors: dict[str, torch.nn.Parameter] = dict(parameters.tensors)
        """What the optimizer changes, by the parameter's name."""
        self.rows: dict[str, tuple[int, int]] = {}
        """The rows of the rank's part that it changes, where not all."""
        self._transport, self._shared = transport, list[_Shared]()
        self._units = parameters.units
        self._take_units()
        for name, ranks in divided_states(program):
            parameter = parameters.tensors.get(name)
            if transport.rank in ranks and parameter is not None and parameter.requires_grad:
                self._share(name, parameter, ranks)

    def _take_units(self) -> None:
        """Let the optimizer change the rank's rows of what is kept in pieces."""
        for name, store in self._units.of.items():
            self.tensors.pop(name, None)
            if name in store.rows:
                self.tensors[name], self.rows[name] = store.own[name], store.rows[name]

    def _share(self, name: str, parameter: torch.nn.Parameter, ranks: tuple[int, ...]) -> None:
        group = self._transport.lane_group(ranks)
        assert group is not None, "the rank is a member"
        place, count = ranks.index(self._transport.rank), parameter.shape[0] if parameter.dim() else 0
        bounds = tuple(count * index // len(ranks) for index in range(len(ranks) + 1)) if count >= len(ranks) else (0,)
        own: torch.nn.Parameter | None = None
        if len(bounds) > 1:
            first, last = bounds[place : place + 2]
            own = torch.nn.Parameter(parameter.data[first:last])
            self.tensors[name], self.rows[name] = own, (first, last)
        elif place:
            del self.tensors[name]
        self._shared.append(_Shared(parameter=parameter, ranks=ranks, group=group, bounds=bounds, own=own, place=place))

    def take_gradients(self) -> None:
        """Give the rows that this rank changes their gradients."""
        for name, store in self._units.of.items():
            if name in store.rows and store.piece_gradient is not None and store.own[name].requires_grad:
                store.own[name].grad = store.own_gradient(name)
        for item in self._shared:
            if item.own is not None:
                gradient = item.parameter.grad
                first, last = item.bounds[item.place : item.place + 2]
                item.own.grad = None if gradient is None else gradient[first:last]

    def spread(self) -> None:
        """Bring what every rank has changed to all others that hold it."""
        for store in self._units.stores.values():
            if not store.is_gathered and store.piece_gradient is not None:
                self._transport.status.begin_wait()
                store.gather(self._transport)
                self._transport.status.end_wait()
        for item in self._shared:
            self._transport.status.begin_wait()
            data = item.parameter.data
            if item.own is None:
                self._transport.through_wire(data, partial(item.group.spread, root=item.ranks[0]))
            else:
                self._gather(item, data)
            self._transport.status.end_wait()

    def _gather(self, item: _Shared, data: Tensor) -> None:
        rows = max(last - first for first, last in zip(item.bounds, item.bounds[1:], strict=False))
        first, last = item.bounds[item.place : item.place + 2]
        room = data.new_zeros((rows, *data.shape[1:]))
        room[: last - first] = data[first:last]
        wire = self._transport.on_wire(room)
        parts = item.group.gather(wire.reshape(-1))
        for index, part in enumerate(parts):
            begin, end = item.bounds[index : index + 2]
            if index != item.place:
                data[begin:end] = part.view(room.shape)[: end - begin].to(data.device)


def buffer_holders(program: Program, updates: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that change each buffer; ``updates`` names the tensor that is its new value."""
    found: dict[str, tuple[int, ...]] = {}
    for path, tensor in updates.items():
        op = int(program.graph.tensor_producer[program.graph.tensor_index[tensor]])
        ranks = {rank for item in program.instances if op in program.stage_ops[item.stage] for rank in item.ranks}
        found[path] = tuple(sorted(ranks))
    return found


class BufferShares:
    """One rank's shared buffers."""

    def __init__(self, program: Program, updates: Mapping[str, str], buffers: Mapping[str, Tensor],
                 transport: Transport) -> None:
        self._transport = transport
        self._shared: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for path, ranks in buffer_holders(program, updates).items():
            if transport.rank in ranks and len(ranks) > 1:
                self._shared.setdefault((ranks, buffers[path].dtype), []).append(buffers[path])

    def spread(self) -> None:
        """Take over what the first of the ranks has."""
        for (ranks, _), tensors in self._shared.items():
            group = self._transport.lane_group(ranks)
            assert group is not None, "the rank is a member"
            wire = self._transport.on_wire(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            self._transport.status.begin_wait()
            group.spread(wire, ranks[0])
            self._transport.status.end_wait()
            for tensor, part in zip(tensors, wire.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
