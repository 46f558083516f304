"""The units of one rank (``weft.plan.units``): pieces that are always there, and wholes that come and go.

A unit's parameters are views of one flat tensor, whose memory is there only while they are gathered; autograd and
stages hold the views and find the values in them again when they are gathered for the backward. What the optimizer
changes are the rank's rows of each parameter, views of its piece. Gradients add up in views of another flat tensor, and
are scattered to pieces: the first time in a step these are set, later added to.

    whole       [ p0 | p1 ........ | p2 .... ]    memory from the gather to the last compute that needs it
    piece            [ p1 rows 2-5 ]              always; a part of ``whole`` where that is always there

The collectives run on the rank's lane, in the order of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from weft.plan.program import Bucket, Program
from weft.plan.units import Unit, row_length
from weft.run.cells import occupy, vacate
from weft.run.lane import Lane
from weft.run.transport import Transport
from weft.run.wire import Work


class UnitStore:
    """One unit on one rank."""

    def __init__(self, program: Program, unit: Unit, rank: int, device: torch.device) -> None:
        names = program.graph.tensor_names
        dtype: torch.dtype = getattr(torch, program.graph.tensor_dtypes[unit.parameters[0]])
        self.unit, self.place = unit, unit.ranks.index(rank)
        self.names = tuple(names[tensor] for tensor in unit.parameters)
        self.rows = {names[tensor]: rows for tensor, rows in unit.rows(rank).items()}
        """Of each parameter that has some in the rank's piece."""
        self._shapes = dict(zip(self.names, unit.shapes, strict=True))
        self._starts = dict(zip(self.names, unit.starts, strict=False))
        low, high = unit.bounds[self.place : self.place + 2]
        self._low = low
        self.whole = torch.empty(unit.bounds[-1], dtype=dtype, device=device)
        self.is_gathered = unit.storage.pieces == "parameters"
        self.piece = torch.empty(high - low, dtype=dtype, device=device) if self.is_gathered else self.whole[low:high]
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(self._of(name, self.whole.data), requires_grad=False) for name in self.names}
        """What stages compute with."""
        self.own: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(self._rows_of(name, self.piece.data), requires_grad=False) for name in self.rows}
        """What the optimizer changes."""
        self.gradient: Tensor | None = None
        self.piece_gradient: Tensor | None = None
        self.room = torch.empty(0, dtype=torch.uint8, device=device)
        """Where what others add to the piece arrives; the stores of a rank have it together."""
        self._is_new = True
        """No gradients of this step are in the piece."""
        if unit.is_trained and program.plan.model.mode == "training":
            self.gradient = torch.zeros_like(self.whole)
            self.piece_gradient = self.gradient[low:high] if unit.storage.scatters_once else (
                torch.zeros_like(self.piece))
        self._gradients = {} if self.gradient is None else {
            name: self._of(name, self.gradient) for name in self.names}
        vacate([item for item, goes in ((self.whole, self.is_gathered), (self.gradient, self.comes_and_goes))
                if item is not None and goes])  # views must be made before

    @property
    def comes_and_goes(self) -> bool:
        """Return whether whole gradients are there only for a while."""
        return self.gradient is not None and not self.unit.storage.scatters_once

    def _of(self, name: str, flat: Tensor) -> Tensor:
        start, shape = self._starts[name], self._shapes[name]
        return flat[start : start + math.prod(shape)].view(shape)

    def _rows_of(self, name: str, piece: Tensor) -> Tensor:
        """Return the rank's rows of a parameter, in its piece."""
        shape, (first, last) = self._shapes[name], self.rows[name]
        length = row_length(shape)
        begin = self._starts[name] + first * length - self._low
        return piece[begin : begin + (last - first) * length].view((last - first, *shape[1:]) if shape else ())

    def fill(self, name: str, value: Tensor, *, needs_gradient: bool) -> torch.nn.Parameter:
        """Take the value of a parameter, and return it as stages see it."""
        parameter = self.parameters[name]
        if not self.is_gathered:
            parameter.data.copy_(value)
        elif name in self.rows:
            first, last = self.rows[name]
            self.own[name].data.copy_(value[first:last] if value.dim() else value)
        for item in (parameter, self.own.get(name)):
            if item is not None:
                item.requires_grad_(needs_gradient)
        if needs_gradient:
            parameter.grad = self._gradients.get(name)
        return parameter

    def own_gradient(self, name: str) -> Tensor:
        """Return the rank's rows of a parameter's gradient; none where it has no rows."""
        shape = self._shapes[name]
        if name not in self.rows or self.piece_gradient is None:
            return self.whole.new_zeros((0, *shape[1:]))
        return self._rows_of(name, self.piece_gradient)

    def clear(self) -> None:
        """Forget the gradients."""
        self._is_new = True
        if self.piece_gradient is not None:
            self.piece_gradient.zero_()
        if self.gradient is not None and not self.comes_and_goes:
            self.gradient.zero_()

    def begin_gradients(self) -> None:
        """Make room for whole gradients, which are zero at first."""
        assert self.gradient is not None, "it is trained"
        occupy(self.gradient)
        self.gradient.zero_()

    def let_go(self) -> None:
        """Forget the gathered parameters."""
        vacate([self.whole])

    def _drop_gradients(self) -> None:
        if self.comes_and_goes and self.gradient is not None:
            vacate([self.gradient])

    # ---- collectives ------------------------------------------------------------------------------------------------

    def gather(self, transport: Transport) -> None:
        """Bring the pieces of all ranks together in ``whole``."""
        group = transport.lane_group(self.unit.ranks)
        assert group is not None, "units are of several ranks"
        low, high = self.unit.bounds[self.place : self.place + 2]
        if self.is_gathered:
            self.whole[low:high].copy_(self.piece)
        wire = transport.on_wire(self.whole)
        group.gather_pieces(wire, self.unit.bounds)
        if wire is not self.whole:
            self.whole.copy_(wire)

    def scatter(self, transport: Transport) -> None:
        """Add up the whole gradients of all ranks, each rank its piece of them."""
        group = transport.lane_group(self.unit.ranks)
        assert group is not None, "units are of several ranks"
        assert self.gradient is not None, "it is trained"
        assert self.piece_gradient is not None, "it is trained"
        adds = not (self._is_new or self.unit.storage.scatters_once)
        self._is_new = False
        wire, own = transport.on_wire(self.gradient), self.piece_gradient
        room = self.room[: own.numel() * own.element_size()].view(own.dtype)
        room = room if wire is self.gradient else transport.on_wire(own)
        transport.through_wire(self.piece_gradient, lambda into: group.scatter_pieces(
            wire, self.unit.bounds, into, room=room, adds=adds))

    def sum_over_groups(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        """Add up the piece of the gradients over ranks of several groups that have the same one."""
        group = transport.lane_group(ranks)
        assert group is not None, "there are several groups"
        assert self.piece_gradient is not None, "it is trained"
        transport.through_wire(self.piece_gradient, group.sum_all)

    def start(self, bucket: Bucket, transport: Transport, lane: Lane) -> Callable[[], list[Work]]:
        """Return what starts one of the unit's collectives.

        The memory of whole gradients goes when their scattering has been waited for.
        """
        match bucket.method:
            case "all_gather":
                def gather() -> list[Work]:
                    occupy(self.whole)
                    return [lane.submit(lambda: self.gather(transport))]

                return gather
            case "reduce_scatter":
                return lambda: [lane.submit(lambda: self.scatter(transport), then=self._drop_gradients)]
            case _:
                return lambda: [lane.submit(lambda: self.sum_over_groups(transport, bucket.ranks))]


class Units:
    """All units of one rank."""

    def __init__(self, program: Program, rank: int, device: torch.device) -> None:
        self.stores: dict[int, UnitStore] = {
            index: UnitStore(program, unit, rank, device) for index, unit in enumerate(program.units)
            if rank in unit.ranks}
        """By the unit's place in the program."""
        trained = [store.piece_gradient for store in self.stores.values() if store.piece_gradient is not None]
        self.room = torch.empty(max((item.numel() * item.element_size() for item in trained), default=0),
                                dtype=torch.uint8, device=device)
        for store in self.stores.values():
            store.room = self.room
        self.of: Mapping[str, UnitStore] = {name: store for store in self.stores.values() for name in store.names}
        """By parameter."""

    def kept(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield what the rank always has of each parameter: its rows, or the whole."""
        for store in self.stores.values():
            yield from (store.own if store.is_gathered else store.parameters).items()

    def clear(self) -> None:
        """Forget all gradients."""
        for store in self.stores.values():
            store.clear()

    def wholes(self) -> Iterator[Tensor]:
        """Yield what has memory only while it is gathered."""
        yield from (store.whole for store in self.stores.values() if store.is_gathered)

    def lasting_gradients(self) -> Iterator[Tensor]:
        """Yield gradients that are always there."""
        yield from (store.piece_gradient for store in self.stores.values() if store.piece_gradient is not None)

    def passing_gradients(self) -> Iterator[Tensor]:
        """Yield those that come and go."""
        yield from (store.gradient for store in self.stores.values()
                    if store.gradient is not None and store.comes_and_goes)

