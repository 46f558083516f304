"""What of each parameter a rank's optimizer changes, where the ranks that hold it divide the optimizer's state.

Ranks that hold the same part of a parameter have the same gradient when the step begins. With ``optimizer.sharded``
each of them has the state of some rows and changes these alone; then all gather what the others have changed, one
parameter after the other, in the same order everywhere. A parameter with fewer rows than ranks is the first rank's.
Without ``sharded`` a rank changes all that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.plan.holders import parameter_copies
from weft.plan.program import Program
from weft.plan.sharding import Region
from weft.run.exchange_group import ExchangeGroup
from weft.run.parameters import Parameters
from weft.run.transport import Transport


def share_groups(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that divide states, in the same order on every rank."""
    if program.plan.optimizer.sharded:
        rank_of = {name: rank for rank, name in enumerate(program.rank_names)}
        groups = (tuple(sorted(rank_of[device] for device in item.devices))
                  for copies in parameter_copies(program.plan, program.graph).values() for item in copies)
        yield from dict.fromkeys(group for group in groups if len(group) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A parameter that several ranks hold and change in parts."""

    parameter: torch.nn.Parameter
    ranks: tuple[int, ...]
    group: ExchangeGroup
    bounds: tuple[int, ...]
    """Rows of rank ``ranks[i]`` are from ``bounds[i]`` on, up to the next; two of them alone: all is the first's."""
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
        if program.plan.optimizer.sharded:
            self._divide(program, parameters)

    def _divide(self, program: Program, parameters: Parameters) -> None:
        rank, graph = self._transport.rank, program.graph
        rank_of = {name: index for index, name in enumerate(program.rank_names)}
        for tensor, copies in parameter_copies(program.plan, graph).items():
            for item in copies:
                ranks = tuple(sorted(rank_of[device] for device in item.devices))
                parameter = parameters.tensors.get(graph.tensor_names[tensor])
                if rank not in ranks or len(ranks) < 2 or parameter is None or not parameter.requires_grad:
                    continue
                self._share(graph.tensor_names[tensor], parameter, ranks)

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
        for item in self._shared:
            if item.own is not None:
                gradient = item.parameter.grad
                first, last = item.bounds[item.place : item.place + 2]
                item.own.grad = None if gradient is None else gradient[first:last]

    def spread(self) -> None:
        """Bring what every rank has changed to all others that hold it."""
        for item in self._shared:
            self._transport.status.begin_wait()
            data = item.parameter.data
            if item.own is None:
                wire = self._transport.on_wire(data)
                item.group.spread(wire, item.ranks[0])
                if wire is not data:
                    data.copy_(wire)
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


def rows_of_region(region: Region, shape: tuple[int, ...], rows: tuple[int, int]) -> Region:
    """Return the part of a region with these of its rows; an empty region is the whole of the shape.

    >>> rows_of_region((((0, 2), (6, 8)), ((0, 3),)), (8, 3), (1, 3))
    (((1, 2), (6, 7)), ((0, 3),))
    """
    whole = region or tuple(((0, size),) for size in shape)
    place, ranges = 0, []
    for begin, end in whole[0]:
        first, last = max(rows[0] - place, 0), min(rows[1] - place, end - begin)
        if first < last:
            ranges.append((begin + first, begin + last))
        place += end - begin
    return (tuple(ranges), *whole[1:])
