"""Where the inputs and the gradients of every stage instance come from, read off the program.

A tensor that an instance needs arrives in *pieces*: whole or as some samples of it, from a channel or from another
instance on the same rank. For gradients the pieces are those of the instances that read the tensor; they are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from weft.model.graph import NO_BATCH_DIM
from weft.plan.layout import stage_inputs
from weft.plan.program import Instance, Program


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


def rows_of(samples: tuple[int, int] | None, holder: Instance, num_rows: int) -> Rows | None:
    """Return the rows that ``samples`` have in a tensor of ``num_rows`` rows that covers the holder's samples.

    None means all of them.
    """
    if samples is None or samples == holder.samples:
        return None
    per_sample = num_rows // holder.num_samples
    return Rows((samples[0] - holder.samples[0]) * per_sample, (samples[1] - samples[0]) * per_sample)
