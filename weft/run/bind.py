"""One closure per instruction, made once: everything that does not change from step to step is decided here.

The closures of a rank, called in order, are a step. ``weft.run.wiring`` finds where arguments and gradients lie,
``weft.run.compute`` makes the closures of computes, and this module those of messages, collectives and the optimizer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.base.errors import RunError
from weft.plan.memory import SEND_WINDOW
from weft.plan.overlap import inside_backward
from weft.plan.program import Channel, Instruction, Op, Phase, Program
from weft.run.cells import Cell, Transfer, occupy, vacate
from weft.run.compute import (
    Action,
    BackwardWork,
    ForwardWork,
    backward,
    forgetful_forward,
    forward,
    recompute,
    weight_gradients,
)
from weft.run.exchange import Early, EarlyExchanges, Lane, leads_to_loss, make_exchange
from weft.run.exchange_factors import summed_in
from weft.run.parameters import StateShares
from weft.run.prepare import Prepared
from weft.run.transport import Transport
from weft.run.wire import settled
from weft.run.wiring import Key, Rows, Wiring

_MAX_TAG = 1 << 28


class Binder:
    """The closures of one rank; see the module's docstring."""

    def __init__(self, prepared: Prepared, transport: Transport, *, optimizer: torch.optim.Optimizer | None,
                 shares: StateShares, starts: array[int], ends: array[int]) -> None:
        program = prepared.program
        self.program, self.stages, self.parameters = program, prepared.stages, prepared.parameters
        self.optimizer, self.shares, self.transport, self.starts, self.ends = optimizer, shares, transport, starts, ends
        self.factors, self.lane = prepared.factors, Lane(transport.device)
        self.products: list[Action] = []
        """What makes gradients of gathered factors, before the optimizer step."""
        self.training = program.plan.model.mode == "training"
        self.wiring = Wiring(program, transport.rank, stages=prepared.stages, device=transport.device)
        self.steps = any(item.op == Op.STEP for item in self.wiring.instructions)
        self.split = {(item.instance, item.microbatch) for item in self.wiring.instructions
                      if item.op == Op.COMPUTE and item.phase == Phase.I}
        self.early_places = _early_places(program, transport.rank)
        self.forwards: dict[Key, ForwardWork] = {}
        self.transfers: dict[Key, Transfer] = {}
        self.sent: dict[Key, list[Transfer]] = {}
        self.sent_on: dict[int, list[Transfer]] = {}
        self.collectives: list[Transfer] = []
        self.early: dict[int, EarlyExchanges] = {}
        """Exchanges that are issued inside a backward, by its position."""
        self.issued_early: dict[int, Action] = {}
        """What is left to do for them at their own positions."""
        self.widest = max((len(channel.tensors) for channel in program.channels), default=1)
        self.given = self.wiring.given
        """Where the model's inputs go."""
        self.losses: list[tuple[Tensor, float]] = []
        """Losses of the step's micro-batches with their weights; the caller empties the list."""
        self.results: list[tuple[int, int, dict[str, Tensor]]] = []
        """In inference, (instance, micro-batch, outputs of the model by tensor) of stages that make one; likewise."""
        self.actions: list[Action] = []
        """The rank's step: one closure for each instruction."""
        for position, item in enumerate(self.wiring.instructions):
            action = self._bind(position, item)
            released = self.wiring.release_buffers(position)
            self.actions.append(_releasing(action, released) if released else action)

    def _bind(self, position: int, item: Instruction) -> Action:
        match item.op:
            case Op.COMPUTE if item.phase == Phase.F:
                return self._forward(position, (item.instance, item.microbatch))
            case Op.COMPUTE if item.phase == Phase.W:
                return weight_gradients(self.wiring.cells[item.instance, item.microbatch])
            case Op.COMPUTE:
                return self._backward(position, (item.instance, item.microbatch))
            case Op.SEND:
                return self._send(position, (item.channel, item.microbatch))
            case Op.RECV:
                return self._receive(position, (item.channel, item.microbatch))
            case Op.COLLECTIVE:
                return self.issued_early.get(position) or self._exchange(position, item.bucket)
            case Op.STEP:
                return self._step(position)

    # ---- compute ----------------------------------------------------------------------------------------------------

    def _forward(self, position: int, key: Key) -> Action:
        instance, microbatch = key
        item, stage, wiring = self.program.instances[instance], self.stages[instance], self.wiring
        arguments: list[Any] = [None] * len(stage.module.inputs)
        dynamic = wiring.fill(key, arguments)
        call = stage.split_forward if key in self.split else stage.forward
        assert call is not None, "a stage with split actions has a split forward"
        work = self.forwards[key] = ForwardWork(
            position=position, starts=self.starts, cell=wiring.cells[key],
            arrivals=self._arrivals(item.forward_channels, microbatch), arguments=arguments, dynamic=dynamic,
            call=call, leaf_places=wiring.leaf_places(instance), root_places=wiring.root_places(key),
            updates=stage.updates, keep=key in wiring.readers.outputs, report=self._report(key))
        if self.training and self.program.plan.stages[item.stage].recompute:
            return forgetful_forward(work, random=stage.random if stage.module.uses_random else None)
        return forward(work, is_training=self.training)

    def _report(self, key: Key) -> Callable[[tuple[Tensor, ...]], None] | None:
        """Return what takes the model's own outputs from those of a stage; the first of its ranks does so."""
        if self.program.instances[key[0]].ranks[0] != self.transport.rank:
            return None
        graph, outputs = self.program.graph, self.stages[key[0]].module.outputs
        names = [graph.tensor_names[tensor] for tensor in graph.outputs]
        if not self.training:
            results = self.results
            wanted = [(name, outputs.index(name)) for name in dict.fromkeys(names) if name in outputs]
            return (lambda values: results.append((*key, {name: values[place] for name, place in wanted}))
                    ) if wanted else None
        if not names or names[0] not in outputs:
            return None
        place, losses, weight = outputs.index(names[0]), self.losses, self.wiring.loss_weight(key[0])
        return lambda values: losses.append((values[place].detach(), weight))

    def _backward(self, position: int, key: Key) -> Action:
        instance, microbatch = key
        item, wiring, stage = self.program.instances[instance], self.wiring, self.stages[instance]
        recomputes = self.program.plan.stages[item.stage].recompute
        readers = wiring.readers.gradients
        return backward(BackwardWork(
            position=position, starts=self.starts, cell=wiring.cells[key],
            arrivals=[*self._arrivals(item.gradient_channels, microbatch), *self.sent.get(key, ())],
            gradients=[wiring.gradient(key, place) for place in wiring.root_places(key)],
            prepare=recompute(self.forwards[key], random=stage.random if stage.module.uses_random else None)
            if recomputes else None, queue=stage.queue if key in self.split else None, keep=key in readers,
            used_up=[wiring.cells[consumer, microbatch] for consumer in item.consumers
                     if readers[consumer, microbatch] == position and (consumer, microbatch) in wiring.cells],
            early=self._early(position, instance)))

    def _early(self, position: int, instance: int) -> EarlyExchanges | None:
        """Return the exchanges that are issued inside a backward, and bind their instructions."""
        places = self.early_places.get(position, ())
        if not places:
            return None
        graph, items = self.program.graph, []
        ops = self.program.stage_ops[self.program.instances[instance].stage]
        ops = ops[leads_to_loss(graph)[ops]]
        for place in places:
            bucket = self.wiring.instructions[place].bucket
            tensors = [self.parameters.tensors[graph.tensor_names[tensor]]
                       for tensor in summed_in(graph, ops, self.program.buckets[bucket])]
            rows = self.factors[bucket].filled_by(ops) if bucket in self.factors else []
            items.append(Early(position=place, parameters=[*(item for item in tensors if item.requires_grad), *rows],
                               issue=self._exchange(place, bucket), transfer=self.collectives[-1]))
        early = self.early[position] = EarlyExchanges(items, starts=self.starts, device=self.transport.device)
        self.issued_early.update({place: early.instruction(number) for number, place in enumerate(places)})
        return early

    def _arrivals(self, channels: tuple[int, ...], microbatch: int) -> list[Transfer]:
        found = [(index, self.program.channels[index]) for index in channels]
        return [self.transfers[index, microbatch] for index, channel in found
                if channel.target == self.transport.rank and microbatch in channel.microbatches]

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, position: int, key: Key) -> Action:
        channel, wiring = self.program.channels[key[0]], self.wiring
        users = [(consumer, key[1]) for consumer in channel.consumers]
        is_piece = channel.kind == "activation" and not channel.whole
        parts = []
        for number, tensor in enumerate(channel.tensors):
            value = wiring.value(users[0][0], tensor)
            order = wiring.order(channel, value)
            buffer = wiring.take_buffer(value, wiring.rows(channel, users[0][0], value), users, order=order,
                                        forward_only=is_piece)
            parts.append((buffer, order, self._tag(key, number)))
        wiring.arrived[key] = tuple(buffer for buffer, _, _ in parts)
        transfer = self.transfers[key] = self._transfer(position)
        receive, source = self.transport.receive, channel.source

        def action() -> None:
            for buffer, _, _ in parts:
                occupy(buffer)
            transfer.works = [receive(buffer.permute(order), source, tag) for buffer, order, tag in parts]

        return action

    def _send(self, position: int, key: Key) -> Action:
        channel, wiring = self.program.channels[key[0]], self.wiring
        producer, is_activation = (channel.producer, key[1]), channel.kind == "activation"
        cell = wiring.cells[producer]
        name = "outputs" if is_activation else "gradients"
        clears = (wiring.readers.outputs if is_activation else wiring.readers.gradients)[producer] == position
        transfer, before = self._outgoing(position, key, is_awaited=is_activation and self.training)
        parts = [(place, cut, self._tag(key, number))
                 for number, (place, cut) in enumerate(self._parts_to_send(channel))]
        send, target = self.transport.send, channel.target

        def action() -> None:
            source = _taken(cell, name, clears)
            tensors = transfer.tensors = [cut(source[place]) for place, cut, _ in parts]
            transfer.works = [send(tensor, target, part[2]) for tensor, part in zip(tensors, parts, strict=True)]
            if before is not None:
                before.wait()

        return action

    def _outgoing(self, position: int, key: Key, *, is_awaited: bool) -> tuple[Transfer, Transfer | None]:
        """Return a new outgoing message, and an earlier one of the channel to wait for, if nothing else does."""
        transfer = self.transfers[key] = self._transfer(position)
        if is_awaited:
            self.sent.setdefault((self.program.channels[key[0]].producer, key[1]), []).append(transfer)
            return transfer, None
        earlier = self.sent_on.setdefault(key[0], [])
        earlier.append(transfer)
        return transfer, earlier[-1 - SEND_WINDOW] if len(earlier) > SEND_WINDOW else None

    def _parts_to_send(self, channel: Channel) -> list[tuple[int, Callable[[Tensor | None], Tensor]]]:
        """Return, for each tensor of a channel, its place in the cell and the function that cuts out what is sent."""
        wiring, module = self.wiring, self.stages[channel.producer].module
        names = module.outputs
        if channel.kind == "gradient":
            names = tuple(module.inputs[place] for place in wiring.leaf_places(channel.producer))
        parts = []
        for tensor in channel.tensors:
            value = wiring.value(channel.producer, tensor)
            name = self.program.graph.tensor_names[tensor]
            stage = self.program.plan.stages[self.program.instances[channel.producer].stage].name
            cut = _cutter(value, wiring.rows(channel, channel.producer, value), wiring.order(channel, value),
                          self.transport.device, what=f"{channel.kind} {name!r} of stage {stage!r}")
            parts.append((names.index(name), cut))
        return parts

    def _tag(self, key: Key, number: int) -> int:
        return ((key[0] * self.program.plan.microbatches + key[1]) * self.widest + number) % _MAX_TAG

    def _transfer(self, position: int) -> Transfer:
        return Transfer(position, self.ends, self.transport.synchronize, self.transport.status)

    def _exchange(self, position: int, index: int) -> Action:
        transfer = self._transfer(position)
        self.collectives.append(transfer)
        start = make_exchange(self.program, index, parameters=self.parameters, factors=self.factors,
                              transport=self.transport, lane=self.lane, later=self.products if self.steps else None)

        def action() -> None:
            transfer.works = start()

        return action

    def _step(self, position: int) -> Action:
        optimizer, finish, starts, products = self.optimizer, self.finish, self.starts, self.products
        shares, updates = self.shares, self.program.plan.optimizer.kind != "none"

        def action() -> None:
            finish()  # an output may be a view of a parameter, so messages end before parameters change
            starts[position] = time.perf_counter_ns()
            for multiply in products:
                multiply()
            shares.take_gradients()
            if optimizer is not None:
                optimizer.step()
            if updates:
                shares.spread()

        return action

    def finish(self) -> None:
        """Return when all messages and collectives of the step are done."""
        for transfer in self.transfers.values():
            transfer.wait()
        for collective in self.collectives:
            collective.wait()


def _early_places(program: Program, rank: int) -> dict[int, list[int]]:
    """Return the positions on a rank of the exchanges that are issued inside each backward, by its position."""
    first, last = int(program.rank_start[rank]), int(program.rank_start[rank + 1])
    places: dict[int, list[int]] = {}
    for place, backward_place in enumerate(inside_backward(program)[first:last].tolist()):
        if backward_place >= 0:
            places.setdefault(backward_place - first, []).append(place)
    return places


def _releasing(action: Action, buffers: list[Tensor]) -> Action:
    """Return the action followed by giving back the memory of buffers that nobody reads any more."""

    def releasing() -> None:
        action()
        vacate(buffers)

    return releasing


def _taken(cell: Cell, name: str, clears: bool) -> Any:
    """Return a cell's outputs or gradients; the last to read them lets the cell forget them."""
    found = getattr(cell, name)
    if clears:
        setattr(cell, name, None if name == "outputs" else [])
    return found


def _cutter(value: Tensor, rows: Rows | None, order: tuple[int, ...], device: torch.device, *,
            what: str) -> Callable[[Tensor | None], Tensor]:
    """Return a function that makes a tensor ready to be sent: some rows, contiguous in this order of dimensions.

    Where there is no tensor, zeros are sent.

    The receiver has room for what was planned and would read anything else wrongly, so the function raises
    ``RunError``, in which ``what`` is the tensor, unless it has the shape and dtype of ``value``.
    """
    shape, dtype = value.shape, value.dtype

    def cut(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        if tensor.dtype is not dtype or tensor.shape != shape:
            raise RunError(f"{what} is {tensor.dtype} of {tuple(tensor.shape)}, but {dtype} of {tuple(shape)} was "
                           "planned: autocast, the default dtype or a hook has changed since the model was traced")
        tensor = tensor.detach()
        return settled((tensor if rows is None else rows.of(tensor)).permute(order))

    return cut
