"""One closure per instruction, made once: everything that does not change from step to step is decided here.

The closures of a rank, called in order, are a step. ``weft.run.wiring`` finds where arguments and gradients lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from weft.base.errors import RunError
from weft.plan.memory import SEND_WINDOW
from weft.plan.program import Channel, Instruction, Op, Phase, Program, inside_backward
from weft.run.cells import Cell, Transfer, occupy, vacate
from weft.run.clock import Clock, Moment
from weft.run.exchange import Early, EarlyExchanges, make_exchange, summed_in
from weft.run.lane import Lane
from weft.run.parameters import StateShares
from weft.run.prepare import Prepared
from weft.run.transport import Transport
from weft.run.wire import settled
from weft.run.wiring import Key, Rows, Wiring

Action = Callable[[], None]
_MAX_TAG = 1 << 28


class Binder:
    """The closures of one rank: called in order, they are a step."""

    def __init__(self, prepared: Prepared, transport: Transport, *, optimizer: torch.optim.Optimizer | None,
                 shares: StateShares, clock: Clock, starts: list[Moment], ends: list[Moment]) -> None:
        program = prepared.program
        self.program, self.stages, self.parameters = program, prepared.stages, prepared.parameters
        self.compiler = prepared.compiler
        self.optimizer, self.shares, self.transport, self.starts, self.ends = optimizer, shares, transport, starts, ends
        self.clock = clock
        self.factors, self.lane = prepared.factors, Lane(transport.device, is_gloo=transport.is_gloo)
        self.products: list[Action] = []
        """What makes gradients of gathered factors, before the optimizer step."""
        self.training = program.plan.model.mode == "training"
        self.wiring = Wiring(program, transport.rank, stages=prepared.stages, device=transport.device)
        self.steps = any(item.op == Op.STEP for item in self.wiring.instructions)
        self.split = {(item.instance, item.microbatch) for item in self.wiring.instructions
                      if item.op == Op.COMPUTE and item.phase == Phase.I}
        self.early_places = _early_places(program, transport.rank)
        self.recomputes: dict[Key, Action] = {}
        """What a backward does first in a stage that recomputes."""
        self.transfers: dict[Key, Transfer] = {}
        self.sent: dict[Key, list[Transfer]] = {}
        self.sent_on: dict[int, list[Transfer]] = {}
        self.collectives: list[Transfer] = []
        self.early: dict[int, EarlyExchanges] = {}
        """Exchanges that are issued inside a backward, by its position."""
        self.issued_early: dict[int, Action] = {}
        """What is left to do, at its own position, for an exchange that is issued inside a backward."""
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
            self.actions.append(partial(_release_after, action, released) if released else action)

    def _bind(self, position: int, item: Instruction) -> Action:
        match item.op:
            case Op.COMPUTE if item.phase == Phase.F:
                return self._forward(position, (item.instance, item.microbatch))
            case Op.COMPUTE if item.phase == Phase.W:
                return _weight_gradients(self.wiring.cells[item.instance, item.microbatch])
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
        """Return the forward of a micro-batch; in inference nothing is kept for a backward.

        In training it keeps the edges of the autograd graph at the stage's outputs (not the outputs themselves, so that
        their memory can go) and the leaves at its inputs. In a stage that recomputes it keeps its arguments only, and
        the states of random numbers that it met.
        """
        instance, microbatch = key
        item, stage, wiring = self.program.instances[instance], self.stages[instance], self.wiring
        cell, begin = wiring.cells[key], self._begin(position, self._arrivals(item.forward_channels, microbatch))
        keeps, report, training = key in wiring.readers.outputs, self._report(key), self.training
        arguments: list[Any] = [None] * len(stage.module.inputs)
        dynamic = wiring.fill(key, arguments)
        """Arguments that change from step to step: place, and function that returns the value."""
        call = stage.split_forward if key in self.split else stage.forward
        assert call is not None, "a stage with split actions has a split forward"
        leaf_places, root_places = wiring.leaf_places(instance), wiring.root_places(key)
        updates = _by_dtype(stage.updates)
        random = stage.random if stage.module.uses_random else None
        recomputes = training and self.program.plan.stages[item.stage].recompute

        def connect(outputs: tuple[Tensor, ...]) -> None:
            cell.edges = [_edge(outputs[place]) for place in root_places]
            cell.leaves = [arguments[place] for place in leaf_places]

        def let_go() -> None:
            for place, _ in dynamic:
                arguments[place] = None

        def action() -> None:
            begin()
            for place, fetch in dynamic:
                arguments[place] = fetch()
            if recomputes:
                if random is not None:
                    cell.random_states = random.snapshot()
                with torch.no_grad():
                    outputs = call(*arguments)
                cell.arguments = list(arguments)
            else:
                outputs = call(*arguments)
                if training:
                    connect(outputs)
            if keeps:
                cell.outputs = outputs
            if report is not None:
                report(outputs)
            for places, buffers in updates:
                torch._foreach_copy_([buffer.data for buffer in buffers], [outputs[place].detach() for place in places])
            let_go()

        def recompute() -> None:  # it draws the same numbers again
            arguments[:], cell.arguments = cell.arguments, []
            with nullcontext() if random is None else random.replaying(cell.random_states):
                connect(call(*arguments))
            let_go()

        if recomputes:
            self.recomputes[key] = recompute
        return action

    def _begin(self, position: int, arrivals: Sequence[Transfer]) -> Action:
        """Return what a compute does first: wait for what must have arrived, and note the time."""
        starts, now = self.starts, self.clock.now

        def begin() -> None:
            for arrival in arrivals:
                arrival.wait()
            if arrivals:
                starts[position] = now()

        return begin

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
        """Return the backward of a micro-batch, whole or its first part.

        It runs autograd from the edges that the forward has kept with the gradients that have arrived, and leaves the
        gradients of the inputs in the cell. The cell's own activations on their way out have arrived before.
        """
        instance, microbatch = key
        item, wiring, stage = self.program.instances[instance], self.wiring, self.stages[instance]
        cell, prepare, readers = wiring.cells[key], self.recomputes.get(key), wiring.readers.gradients
        begin = self._begin(position, [*self._arrivals(item.gradient_channels, microbatch), *self.sent.get(key, ())])
        wanted = [wiring.gradient(key, place) for place in wiring.root_places(key)]
        fixed = None if any(callable(item) for item in wanted) else tuple(wanted)
        queue, keeps = stage.queue if key in self.split else None, key in readers
        used_up = [wiring.cells[consumer, microbatch] for consumer in item.consumers
                   if readers[consumer, microbatch] == position and (consumer, microbatch) in wiring.cells]
        early = self._early(position, instance) or nullcontext()

        def action() -> None:
            begin()
            if prepare is not None:
                prepare()
            gradients = fixed or [item() if callable(item) else item for item in wanted]
            with early:
                _run_backward(cell.edges, gradients)
            for other in used_up:
                other.gradients = []
            leaves = cell.leaves
            if keeps:
                cell.gradients = [_own(leaf.grad, gradients) for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            cell.edges, cell.leaves = [], []
            if queue is not None:
                cell.deferred = queue.take()

        return action

    def _early(self, position: int, instance: int) -> EarlyExchanges | None:
        """Return the exchanges that are issued inside a backward, and bind their instructions."""
        places = self.early_places.get(position, ())
        if not places:
            return None
        graph, items = self.program.graph, []
        ops = self.program.stage_ops[self.program.instances[instance].stage]
        ops = ops[graph.on_path_to_loss[ops]]
        for place in places:
            bucket = self.wiring.instructions[place].bucket
            tensors = [self.parameters.tensors[graph.tensor_names[tensor]]
                       for tensor in summed_in(graph, ops, self.program.buckets[bucket])]
            rows = self.factors[bucket].filled_by(ops) if bucket in self.factors else []
            items.append(Early(position=place, parameters=[*(item for item in tensors if item.requires_grad), *rows],
                               issue=self._exchange(place, bucket), transfer=self.collectives[-1]))
        early = self.early[position] = EarlyExchanges(items, starts=self.starts, clock=self.clock,
                                                      compiler=self.compiler,
                                                      num_uses=self.stages[instance].num_uses)
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
        transfer = self.transfers[key] = self._transfer(position)
        before: Transfer | None = None
        if is_activation and self.training:
            self.sent.setdefault(producer, []).append(transfer)
        else:  # nothing else waits for it, so a later one of the channel does
            earlier = self.sent_on.setdefault(key[0], [])
            before = earlier[-SEND_WINDOW] if len(earlier) >= SEND_WINDOW else None
            earlier.append(transfer)
        parts = [(place, cut, self._tag(key, number))
                 for number, (place, cut) in enumerate(self._parts_to_send(channel))]
        send, target = self.transport.send, channel.target

        def action() -> None:
            source = getattr(cell, name)
            if clears:  # it is the last to read them
                setattr(cell, name, None if is_activation else [])
            tensors = transfer.tensors = [cut(source[place]) for place, cut, _ in parts]
            transfer.works = [send(tensor, target, part[2]) for tensor, part in zip(tensors, parts, strict=True)]
            if before is not None:
                before.wait()

        return action

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
        return Transfer(position, self.ends, self.clock, self.transport.status)

    def _exchange(self, position: int, index: int) -> Action:
        transfer = self._transfer(position)
        self.collectives.append(transfer)
        start = make_exchange(self.program, index, parameters=self.parameters, factors=self.factors,
                              transport=self.transport, lane=self.lane, later=self.products if self.steps else None)

        def action() -> None:
            transfer.works = start()

        return action

    def _step(self, position: int) -> Action:
        optimizer, finish, starts, now = self.optimizer, self.finish, self.starts, self.clock.now
        products = self.products
        shares, updates = self.shares, self.program.plan.optimizer.kind != "none"

        def action() -> None:
            finish()  # an output may be a view of a parameter, so messages end before parameters change
            starts[position] = now()
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
        for transfer in (*self.transfers.values(), *self.collectives):
            transfer.wait()


def _early_places(program: Program, rank: int) -> dict[int, list[int]]:
    """Return the positions on a rank of the exchanges that are issued inside each backward, by its position."""
    first, last = int(program.rank_start[rank]), int(program.rank_start[rank + 1])
    places: dict[int, list[int]] = {}
    for place, backward_place in enumerate(inside_backward(program)[first:last].tolist()):
        if backward_place >= 0:
            places.setdefault(backward_place - first, []).append(place)
    return places


def _release_after(action: Action, buffers: list[Tensor]) -> None:
    """Do the action, then give back the memory of buffers that nobody reads any more."""
    action()
    vacate(buffers)


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


def _by_dtype(updates: Sequence[tuple[int, Tensor]]) -> list[tuple[list[int], list[Tensor]]]:
    """Return the results that are new values of buffers with these buffers, so that few kernels copy them."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for place, buffer in updates:
        places, buffers = found.setdefault(buffer.dtype, ([], []))
        places.append(place)
        buffers.append(buffer)
    return list(found.values())


def _edge(output: Tensor) -> GradientEdge:
    """Return where the gradient of ``output`` enters the graph; it keeps the graph alive, but not the output.

    The node of a Python function would not: a view of the output has a node that does.
    """
    node = output.grad_fn
    if isinstance(node, BackwardCFunction):
        return GradientEdge(output.view_as(output).grad_fn, 0)
    return GradientEdge(node, output.output_nr)


def _own(gradient: Tensor | None, given: Sequence[Any]) -> Tensor | None:
    """Return the gradient of an input in memory of its own.

    Behind an operator that only views, autograd hands on a view of what was given, and that may be a buffer which a
    later message overwrites while this gradient is still read or on its way.
    """
    if gradient is None:
        return None
    places = {item.untyped_storage().data_ptr() for item in given}
    return gradient.clone() if gradient.untyped_storage().data_ptr() in places else gradient


def _run_backward(edges: list[GradientEdge], gradients: Sequence[Any]) -> None:
    pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True)
             if edge.node is not None]  # else no parameter reaches the output after all
    if pairs:  # ``torch.autograd.backward`` does the same after checks of about ten microseconds
        torch.autograd.Variable._execution_engine.run_backward(
            *zip(*pairs, strict=True), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _weight_gradients(cell: Cell) -> Action:
    """Return the second part of a backward; autograd must not follow it, since its factors are part of its graph."""

    def action() -> None:
        with torch.no_grad():
            for item in cell.deferred:
                item.accumulate()
        cell.deferred = []

    return action
