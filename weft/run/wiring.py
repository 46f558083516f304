"""Where the arguments of a forward and the gradients of a backward come from, and where they lie when they are needed.

A tensor that a stage instance needs arrives in *pieces*: whole or as some samples of it, from a channel or from another
instance on the same rank; ``Routes`` reads them off the program. For gradients the pieces are those of the instances
that read the tensor; they are added up.

What arrives whole lies in a buffer that never changes place, so it is bound once. What another instance of the rank
has computed is taken from its cell, and what comes in pieces is put together, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.model.graph import NO_BATCH_DIM, TensorRole
from weft.plan.layout import stage_inputs
from weft.plan.program import Channel, Instance, Instruction, Op, Phase, Program
from weft.run.cells import Buffers, Cell, occupy
from weft.run.stage import Stage
from weft.run.wire import memory_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One source of a tensor: a channel, or an instance on the same rank (the other one is -1)."""

    channel: int = -1
    instance: int = -1
    samples: tuple[int, int] | None = None
    """The samples of the micro-batch that it covers; None for the whole tensor."""


class Routes:
    """The ways of tensors to and from the instances of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self._ops = [frozenset(ops.tolist()) for ops in program.stage_ops]
        self._inputs = [frozenset(stage_inputs(program.graph, ops).tolist()) for ops in program.stage_ops]
        self._samples: dict[int, set[tuple[int, int]]] = {}
        for item in program.instances:
            self._samples.setdefault(item.stage, set()).add(item.samples)

    def outputs(self, stage: int) -> tuple[int, ...]:
        """Return the tensors that a stage must return: those that other stages read, and the model's outputs."""
        graph, inside = self.program.graph, self._ops[stage]
        wanted = set(graph.outputs).union(*(read for other, read in enumerate(self._inputs) if other != stage))
        return tuple(sorted(tensor for tensor in wanted if int(graph.tensor_producer[tensor]) in inside))

    def input_pieces(self, instance: int, tensor: int, microbatch: int) -> tuple[Piece, ...]:
        """Return where an instance gets one of its inputs from, in order of samples."""
        item = self.program.instances[instance]
        pieces = list(self._channel_pieces(item.forward_channels, tensor, microbatch))
        op = int(self.program.graph.tensor_producer[tensor])
        for producer in item.producers:
            source = self.program.instances[producer]
            if self._is_here(source, microbatch) and op in self._ops[source.stage]:
                pieces.extend(self._local_pieces(producer, instance, tensor, via=producer))
        return tuple(sorted(pieces, key=lambda piece: piece.samples or (0, 0)))

    def gradient_pieces(self, instance: int, tensor: int, microbatch: int) -> tuple[Piece, ...]:
        """Return whose gradients add up to that of a tensor which the instance has computed."""
        item = self.program.instances[instance]
        pieces = list(self._channel_pieces(item.gradient_channels, tensor, microbatch))
        for consumer in item.consumers:
            target = self.program.instances[consumer]
            if self._is_here(target, microbatch) and tensor in self._inputs[target.stage]:
                pieces.extend(self._local_pieces(instance, consumer, tensor, via=consumer))
        return tuple(pieces)

    def _is_here(self, item: Instance, microbatch: int) -> bool:
        return self.rank in item.ranks and microbatch in item.microbatches

    def _channel_pieces(self, channels: tuple[int, ...], tensor: int, microbatch: int) -> Iterator[Piece]:
        for index in channels:
            channel = self.program.channels[index]
            if channel.target == self.rank and tensor in channel.tensors and microbatch in channel.microbatches:
                yield Piece(channel=index, samples=None if channel.whole else channel.samples)

    def _local_pieces(self, producer: int, consumer: int, tensor: int, *, via: int) -> Iterator[Piece]:
        """Yield what goes from producer to consumer on one rank, by the rule that the lowering has for channels."""
        source, target = self.program.instances[producer], self.program.instances[consumer]
        if target.samples in self._samples[source.stage]:
            if source.samples == target.samples:
                yield Piece(instance=via)
        elif self.program.graph.tensor_batch_dim[tensor] == NO_BATCH_DIM:
            if source.samples[0] <= target.samples[0] < source.samples[1]:
                yield Piece(instance=via)
        else:
            low, high = max(source.samples[0], target.samples[0]), min(source.samples[1], target.samples[1])
            if low < high:
                yield Piece(instance=via, samples=(low, high))


@dataclass(frozen=True, slots=True)
class Rows:
    """A range of rows along dimension 0."""

    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor, as a view."""
        return tensor.narrow(0, self.start, self.length)


def rows_of(samples: tuple[int, int] | None, holder: Instance, value: Tensor) -> Rows | None:
    """Return the rows that ``samples`` have in a tensor that covers the holder's samples.

    None means all of them.
    """
    if samples is None or samples == holder.samples:
        return None
    per_sample = value.shape[0] // holder.num_samples
    return Rows((samples[0] - holder.samples[0]) * per_sample, (samples[1] - samples[0]) * per_sample)


Fetch = Callable[[], Tensor]
Key = tuple[int, int]
"""(instance, micro-batch) or (channel, micro-batch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A place in the arguments of a forward that takes some samples of an input of the model."""

    arguments: list[Any]
    place: int
    name: str
    shape: tuple[int, ...]
    first_sample: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Readers:
    """Positions in a rank's instructions: of a cell's last compute and forward, of the last readers of what it left."""

    compute: dict[Key, int] = field(default_factory=dict)
    forward: dict[Key, int] = field(default_factory=dict)
    outputs: dict[Key, int] = field(default_factory=dict)
    gradients: dict[Key, int] = field(default_factory=dict)
    """Of the gradients of a cell's inputs."""


def find_readers(program: Program, instructions: tuple[Instruction, ...]) -> Readers:
    """Return who reads what last on one rank."""
    readers = Readers()
    for position, item in enumerate(instructions):
        if item.op == Op.COMPUTE:
            readers.compute[item.instance, item.microbatch] = position
            instance = program.instances[item.instance]
            if item.phase == Phase.F:
                readers.forward[item.instance, item.microbatch] = position
                readers.outputs.update({(other, item.microbatch): position for other in instance.producers})
            elif item.phase != Phase.W:
                readers.gradients.update({(other, item.microbatch): position for other in instance.consumers})
        elif item.op == Op.SEND:
            channel = program.channels[item.channel]
            table = readers.outputs if channel.kind == "activation" else readers.gradients
            table[channel.producer, item.microbatch] = position
    return readers


class Wiring:
    """Finds the sources of arguments and gradients on one rank; see the module's docstring."""

    def __init__(self, program: Program, rank: int, *, stages: Mapping[int, Stage], device: torch.device) -> None:
        self.program, self.graph, self.stages, self.device = program, program.graph, stages, device
        self.training = program.plan.model.mode == "training"
        self.routes = Routes(program, rank)
        self.instructions = tuple(program.instructions(rank))
        self.readers = find_readers(program, self.instructions)
        self.cells: dict[Key, Cell] = {key: Cell() for key in self.readers.compute}
        self.buffers = Buffers(device)
        self.released: dict[int, list[Tensor]] = {}
        self.arrived: dict[Key, tuple[Tensor, ...]] = {}
        """The buffers of a channel's tensors, by (channel, micro-batch)."""
        self.given: list[Given] = []

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def value(self, instance: int, tensor: int) -> Tensor:
        """Return a tensor as traced for an instance: its shape and dtype."""
        return self.stages[instance].module.values[self.graph.tensor_names[tensor]]

    def rows(self, channel: Channel, holder: int, value: Tensor) -> Rows | None:
        """Return which rows of a tensor at ``holder`` a channel carries; None for all."""
        return None if channel.whole else rows_of(channel.samples, self.program.instances[holder], value)

    def order(self, channel: Channel, value: Tensor) -> tuple[int, ...]:
        """Return the order of dimensions in which a channel carries a tensor, the same on both sides.

        Those whose traces have other samples may have traced it in another one.
        """
        samples = {self.program.instances[item].num_samples for item in (channel.producer, *channel.consumers)}
        return memory_order(value) if channel.whole and len(samples) == 1 else tuple(range(value.dim()))

    def take_buffer(self, value: Tensor, rows: Rows | None, users: list[Key], *, order: tuple[int, ...],
                    forward_only: bool = False) -> Tensor:
        """Return a buffer that is kept until the last compute of its users has run, its dimensions in this order.

        One for pieces of what they read, ``forward_only``, is kept until their last forward: it copies them.
        """
        shape = tuple(value.shape) if rows is None else (rows.length, *value.shape[1:])
        buffer = self.buffers.take(shape, value.dtype, order)
        positions = self.readers.forward if forward_only else self.readers.compute
        self.released.setdefault(max(positions[user] for user in users), []).append(buffer)
        return buffer

    def release_buffers(self, position: int) -> list[Tensor]:
        """Take back the buffers that nobody reads after an instruction, and return them."""
        released = self.released.pop(position, [])
        self.buffers.give(released)
        return released

    # ---- arguments --------------------------------------------------------------------------------------------------

    def leaf_places(self, instance: int) -> tuple[int, ...]:
        """Return which arguments of a stage need a gradient."""
        ids = [self.graph.tensor_index[name] for name in self.stages[instance].module.inputs]
        return tuple(place for place, tensor in enumerate(ids) if self.training and self.graph.needs_gradient[tensor]
                     and self.graph.tensor_role[tensor] == TensorRole.ACTIVATION)

    def fill(self, key: Key, arguments: list[Any]) -> list[tuple[int, Fetch]]:
        """Put fixed arguments into the list, note inputs of the model, and return how to get the others."""
        instance, microbatch = key
        item, module = self.program.instances[instance], self.stages[instance].module
        leaves = self.leaf_places(instance)
        dynamic: list[tuple[int, Fetch]] = []
        for place, name in enumerate(module.inputs):
            tensor = self.graph.tensor_index[name]
            if self.graph.tensor_role[tensor] == TensorRole.INPUT:
                self.given.append(Given(
                    arguments=arguments, place=place, name=name, shape=tuple(module.values[name].shape),
                    first_sample=microbatch * self.program.plan.microbatch_size + item.samples[0],
                    num_samples=item.num_samples))
                continue
            pieces = self.routes.input_pieces(instance, tensor, microbatch)
            if len(pieces) == 1 and pieces[0].instance >= 0 and pieces[0].samples is None:
                dynamic.append((place, self._handed_over(pieces[0], key, tensor, place in leaves)))
            elif len(pieces) == 1 and pieces[0].samples is None:
                arguments[place] = _leaf(self._arrived(pieces[0], microbatch, tensor), place in leaves)
            else:
                dynamic.append((place, self._assembled(pieces, key, tensor, place in leaves)))
        return dynamic

    def _handed_over(self, piece: Piece, key: Key, tensor: int, is_leaf: bool) -> Fetch:
        """Return a function that takes a tensor from an instance on the same rank."""
        producer = (piece.instance, key[1])
        cell = self.cells[producer]
        place = self.stages[piece.instance].module.outputs.index(self.graph.tensor_names[tensor])
        is_last = self._reads_last(producer, key, tensor)

        def fetch() -> Tensor:
            assert cell.outputs is not None
            value = cell.outputs[place].detach()
            if is_last:
                cell.outputs = None
            return value.requires_grad_() if is_leaf else value

        return fetch

    def _reads_last(self, producer: Key, reader: Key, tensor: int) -> bool:
        """Return whether the reader's forward is the last to read the producer's outputs, and this tensor its last."""
        item = self.instructions[self.readers.outputs[producer]]
        if item.op != Op.COMPUTE or (item.instance, item.microbatch) != reader:
            return False
        made = self.stages[producer[0]].module.outputs
        shared = [name for name in self.stages[reader[0]].module.inputs if name in made]
        return shared[-1] == self.graph.tensor_names[tensor]

    def _arrived(self, piece: Piece, microbatch: int, tensor: int) -> Tensor:
        place = self.program.channels[piece.channel].tensors.index(tensor)
        return self.arrived[piece.channel, microbatch][place]

    def _assembled(self, pieces: tuple[Piece, ...], key: Key, tensor: int, is_leaf: bool) -> Fetch:
        """Return a function that puts a tensor together from the samples that several sources hold."""
        item, value = self.program.instances[key[0]], self.value(key[0], tensor)
        whole = self.take_buffer(value, None, [key], order=memory_order(value))
        leaf = _leaf(whole, is_leaf)
        steps = [(rows_of(piece.samples, item, value), self._piece_of_input(piece, key, tensor))
                 for piece in pieces]

        def fetch() -> Tensor:
            occupy(whole)
            for rows, source in steps:
                (whole if rows is None else rows.of(whole)).copy_(source())
            return leaf

        return fetch

    def _piece_of_input(self, piece: Piece, key: Key, tensor: int) -> Fetch:
        if piece.channel >= 0:
            arrived = self._arrived(piece, key[1], tensor)
            return lambda: arrived
        source = self.program.instances[piece.instance]
        rows = rows_of(piece.samples, source, self.value(piece.instance, tensor))
        fetch = self._handed_over(piece, key, tensor, False)
        return fetch if rows is None else lambda: rows.of(fetch())

    # ---- gradients --------------------------------------------------------------------------------------------------

    def root_places(self, key: Key) -> tuple[int, ...]:
        """Return which outputs of a stage get a gradient: those that somebody reads, and the loss."""
        if not self.training:
            return ()
        ids = [self.graph.tensor_index[name] for name in self.stages[key[0]].module.outputs]
        return tuple(place for place, tensor in enumerate(ids) if self.graph.needs_gradient[tensor] and (
            tensor == self.graph.outputs[0] or self.routes.gradient_pieces(key[0], tensor, key[1])))

    def loss_weight(self, instance: int) -> float:
        """Return the part of the batch that an instance sees in one micro-batch: what its losses count."""
        return self.program.instances[instance].num_samples / self.program.plan.model.batch

    def gradient(self, key: Key, place: int) -> Tensor | Fetch:
        """Return the gradient of an output where it is always the same tensor, else a function that adds it up."""
        instance, microbatch = key
        tensor = self.graph.tensor_index[self.stages[instance].module.outputs[place]]
        value, item, device = self.value(instance, tensor), self.program.instances[instance], self.device
        pieces = self.routes.gradient_pieces(instance, tensor, microbatch)
        sources: list[tuple[Rows | None, Callable[[], Tensor | None]]] = []
        if tensor == self.graph.outputs[0]:
            seed = torch.tensor(self.loss_weight(instance), dtype=value.dtype, device=device)
            if not pieces:
                return seed
            sources.append((None, lambda: seed))
        elif len(pieces) == 1 and pieces[0].channel >= 0 and pieces[0].samples is None:
            arrived = self._arrived(pieces[0], microbatch, tensor)
            return arrived if self._is_read_only(tensor) else arrived.clone
        for piece in pieces:
            sources.append((rows_of(piece.samples, item, value), self._piece_of_gradient(piece, key, tensor)))
        return lambda: _add_up(sources, value, device)

    def _is_read_only(self, tensor: int) -> bool:
        """Return whether the gradient of a tensor is only read: that of one made of nothing but parameters may become a
        parameter's as it is, or a view of it may, so it must not lie in a buffer that the next message comes into."""
        return bool(self.graph.depends_on_inputs[tensor])

    def _piece_of_gradient(self, piece: Piece, key: Key, tensor: int) -> Callable[[], Tensor | None]:
        if piece.channel >= 0:
            arrived = self._arrived(piece, key[1], tensor)
            return (lambda: arrived) if self._is_read_only(tensor) else arrived.clone
        cell, names = self.cells[piece.instance, key[1]], self.stages[piece.instance].module.inputs
        place = [names[leaf] for leaf in self.leaf_places(piece.instance)].index(self.graph.tensor_names[tensor])
        reader = self.program.instances[piece.instance]
        rows = rows_of(piece.samples, reader, self.value(piece.instance, tensor))

        def fetch() -> Tensor | None:
            gradient = cell.gradients[place]
            return gradient if rows is None or gradient is None else rows.of(gradient)

        return fetch


def _leaf(buffer: Tensor, needs_gradient: bool) -> Tensor:
    """Return the buffer as autograd sees it; ``data`` has its own version, because arrivals change the buffer."""
    return buffer.data.requires_grad_() if needs_gradient else buffer


def _add_up(sources: list[tuple[Rows | None, Callable[[], Tensor | None]]], value: Tensor,
            device: torch.device) -> Tensor:
    """Return the sum of gradients, each of the whole tensor or of some rows."""
    found = [(rows, gradient) for rows, fetch in sources if (gradient := fetch()) is not None]
    if len(found) == 1 and found[0][0] is None:
        return found[0][1]
    total = torch.zeros(tuple(value.shape), dtype=value.dtype, device=device)
    for rows, gradient in found:
        (total if rows is None else rows.of(total)).add_(gradient)
    return total
