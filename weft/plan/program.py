"""The program: per rank, the list of instructions that a plan means. The simulator times it, the runtime executes it.

All instructions of all ranks lie in columns, rank after rank, so that a million of them stay cheap; ``instructions``
gives those of one rank as objects. What instructions refer to is in three tables:

- ``instances``: one replica of one stage on its ranks;
- ``channels``: tensors that go from one instance to a rank, forward (activations) or backward (their gradients);
- ``buckets``: parameters whose gradients are exchanged together among ranks, or that are gathered together;
- ``units``: parameters kept in pieces (``weft.plan.units``), with their buckets.

Semantics. A rank issues its instructions in order. A compute instruction runs when the compute before it is done and
all tensors it needs have arrived. A send, receive or collective is issued when the compute before it in the list is
done, and then proceeds beside later compute; a send and its receive move data together, a collective starts when all
members have issued it. The compute of an instance with several ranks runs on all of them at once.

The collectives of a unit come again and again, for some computes: a gather stands before what needs it, and what was
gathered is let go of after the last compute before the unit's next gather that needs it. Gradients of a unit add up
whole until they are scattered; those who issue the next scattering wait for the one before (``weft.plan.unit_flow``).

The exchanges of gradients that directly follow a whole backward (``B``) on a rank are issued inside that backward:
each as soon as the gradients of its parameters are final there and those before it in the list are issued, so that
gradients travel beside the rest of the backward (``inside_backward`` says which, and why the list stays as it is).
Behind a weight gradient (``W``) or a message they are issued after it, as all others.

``weft.plan.check`` demands more, so that a program is safe on any transport: it must make progress even if every send,
receive and collective blocks its rank until the other side is there (rendezvous).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from weft.model.graph import I64, Bool, Graph
from weft.plan.factors import NO_FACTORS, Factors
from weft.plan.plan import GradientMethod, Plan
from weft.plan.units import Unit

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class Op(enum.IntEnum):
    """What an instruction does."""

    COMPUTE = 0
    SEND = 1
    RECV = 2
    COLLECTIVE = 3
    STEP = 4


class Phase(enum.IntEnum):
    """Which part of the work a compute instruction does."""

    F = 0
    """Forward."""
    B = 1
    """Whole backward."""
    I = 2  # noqa: E741 - the upstream spelling of schedules
    """Backward: gradients of the inputs."""
    W = 3
    """Backward: gradients of the weights."""


_OPS = tuple(Op)
_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One replica of one stage."""

    stage: int
    """Index into ``Plan.stages``."""
    replica: int
    """Index into ``Stage.replicas``."""
    ranks: tuple[int, ...]
    samples: tuple[int, int]
    """First and last-plus-one sample of each micro-batch."""
    microbatches: tuple[int, ...]
    forward_channels: tuple[int, ...] = ()
    """Channels that must have been received before its forward, for the micro-batches they are used for."""
    gradient_channels: tuple[int, ...] = ()
    """Channels that must have been received before its backward, likewise."""
    producers: tuple[int, ...] = ()
    """All instances, on any rank, whose forward feeds this one's."""
    consumers: tuple[int, ...] = ()
    """All instances, on any rank, whose backward feeds this one's (training)."""

    @property
    def num_samples(self) -> int:
        """Return the samples this instance processes of each micro-batch."""
        return self.samples[1] - self.samples[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Tensors that one instance sends to one rank, once for each micro-batch."""

    kind: Literal["activation", "gradient"]
    producer: int
    """The instance that computes what is sent."""
    consumers: tuple[int, ...]
    """The instances that need it, all on rank ``target``."""
    source: int
    """The sending rank."""
    target: int
    """The receiving rank."""
    tensors: tuple[int, ...]
    """Tensor ids in the graph, in the order they are sent."""
    samples: tuple[int, int]
    """The samples of the micro-batch that are sent."""
    whole: bool
    """The tensors are sent as they are; else the rows of ``samples`` are cut out along dimension 0."""
    microbatches: tuple[int, ...]
    """The micro-batches it is used for."""
    num_bytes: int


UnitMethod = Literal["all_gather", "reduce_scatter", "sum_pieces"]
UNIT_METHODS: Final[tuple[UnitMethod, ...]] = ("all_gather", "reduce_scatter", "sum_pieces")
"""What a unit's collectives do; the last adds up pieces of gradients that several groups have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are exchanged among some ranks in one collective, or that are gathered in one."""

    parameters: tuple[int, ...]
    """Tensor ids in the graph."""
    method: GradientMethod | UnitMethod
    ranks: tuple[int, ...]
    num_bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    """For ``hierarchical``: the ranks in groups; the first of each sums for it."""
    server: int | None = None
    """For ``parameter_server``: the rank that sums."""
    factors: Factors = NO_FACTORS
    """For ``sufficient_factors``: what is gathered."""
    units: tuple[int, ...] = ()
    """The unit that is gathered or scattered, or those whose pieces are added up."""

    @property
    def is_of_unit(self) -> bool:
        """Return whether it may come several times in a step."""
        return bool(self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of one rank, as an object."""

    index: int
    """Position in the program's columns."""
    op: Op
    instance: int = -1
    microbatch: int = -1
    phase: Phase = Phase.F
    channel: int = -1
    bucket: int = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ByRank:
    """Columns over the instructions of all ranks, rank after rank."""

    rank_start: I64
    """Rank ``r`` has the instructions ``rank_start[r]`` up to ``rank_start[r + 1]``."""
    op: U8

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.rank_start) - 1

    @property
    def num_instructions(self) -> int:
        """Return the number of instructions over all ranks."""
        return len(self.op)

    def rank_of(self) -> I64:
        """Return each instruction's rank."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int64), np.diff(self.rank_start))


@dataclass(frozen=True, kw_only=True, eq=False)
class Program(ByRank):
    """The instructions of all ranks in columns, and the tables they refer to; see the module's docstring."""

    plan: Plan
    graph: Graph
    stage_ops: tuple[I64, ...]
    """Operator ids of each stage."""
    instances: tuple[Instance, ...]
    channels: tuple[Channel, ...]
    buckets: tuple[Bucket, ...]
    units: tuple[Unit, ...]
    instance: I32
    microbatch: I32
    phase: U8
    channel: I32
    bucket: I32

    @property
    def rank_names(self) -> tuple[str, ...]:
        """Return the device name of each rank."""
        return self.plan.cluster.devices

    def instruction(self, index: int) -> Instruction:
        """Return one instruction as an object."""
        return next(self._between(index, index + 1))

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Yield the instructions of ``rank`` in order."""
        return self._between(int(self.rank_start[rank]), int(self.rank_start[rank + 1]))

    def _between(self, first: int, last: int) -> Iterator[Instruction]:
        columns = (self.op, self.instance, self.microbatch, self.phase, self.channel, self.bucket)
        rows = zip(*(column[first:last].tolist() for column in columns), strict=True)
        for index, (op, instance, microbatch, phase, channel, bucket) in enumerate(rows, first):
            yield Instruction(index=index, op=_OPS[op], instance=instance, microbatch=microbatch, phase=_PHASES[phase],
                              channel=channel, bucket=bucket)

    def instance_name(self, instance: int) -> str:
        """Return the stage's name, with the replica's number where there are several."""
        item = self.instances[instance]
        stage = self.plan.stages[item.stage]
        return stage.name if len(stage.replicas) == 1 else f"{stage.name}.{item.replica}"

    def label(self, index: int) -> str:
        """Return what an instruction does, for people: ``F s0 mb 3``, ``send s0>s1 mb 3``, ``adamw step``."""
        item = self.instruction(index)
        match item.op:
            case Op.COMPUTE:
                return f"{item.phase.name} {self.instance_name(item.instance)} mb {item.microbatch}"
            case Op.SEND | Op.RECV:
                channel = self.channels[item.channel]
                what = "grad " if channel.kind == "gradient" else ""
                consumers = "+".join(self.instance_name(consumer) for consumer in channel.consumers)
                return (f"{item.op.name.lower()} {what}{self.instance_name(channel.producer)}>{consumers} "
                        f"mb {item.microbatch}")
            case Op.COLLECTIVE:
                bucket = self.buckets[item.bucket]
                which = f" (bucket {item.bucket})" if len(self.buckets) > 1 else ""
                if bucket.is_of_unit:
                    unit = "+".join(self.plan.stages[stage].name for stage in self.units[bucket.units[0]].stages)
                    when = f" mb {item.microbatch}" if item.microbatch >= 0 else ""
                    return f"{bucket.method} {unit}{when}{which}"
                return f"{bucket.method} {len(bucket.parameters)} parameters{which}"
            case Op.STEP:
                return f"{self.plan.optimizer.kind} step"

    def place(self, index: int) -> str:
        """Return where an instruction is, for messages: ``rank 1 (a1), instruction 7: F s1 mb 0``."""
        return f"{self.position(index)}: {self.label(index)}"

    def position(self, index: int) -> str:
        """Return the rank and the place in its list, for messages: ``rank 1 (a1), instruction 7``."""
        rank = int(np.searchsorted(self.rank_start, index, side="right")) - 1
        return f"rank {rank} ({self.rank_names[rank]}), instruction {index - int(self.rank_start[rank])}"


def inside_backward(program: Program) -> I64:
    """Return for each instruction the backward that it is issued inside, beside the rest of it, or -1.

    Both are known by their places in the program's columns. What is issued inside the backward at place ``p`` stands at
    ``p + 1``, ``p + 2``, ... in that order.

    The collectives that directly follow a whole backward on a rank, with no message between, wait for nothing but that
    backward, so each may be issued in the middle of it: as soon as the gradients of its own parameters are final there
    and the collectives before it in the list are issued. Where they stand in the list does not change, and neither does
    their order on any rank, so what ``weft.plan.check`` has found safe stays safe:

        list:   B s0 mb 7        all_reduce 0   all_reduce 1
        time:   B s0 mb 7 ----------------------------->
                         all_reduce 0 ----> all_reduce 1 ---->

    The devices of an instance that has several also meet inside its backward; so there the same parameters must follow,
    in the same order, on all of them: then all issue everything in one order. Factors that are gathered instead of
    gradients are final when the backward of their operator is done, as its gradients would be.
    """
    inside = np.full(program.num_instructions, -1, dtype=np.int64)
    collectives = np.flatnonzero(program.op == Op.COLLECTIVE)
    if len(collectives) == 0:
        return inside
    of_unit = np.asarray([bucket.is_of_unit for bucket in program.buckets], dtype=np.bool_)
    is_exchange = program.op == Op.COLLECTIVE
    is_exchange[collectives] = ~of_unit[program.bucket[collectives]]
    collectives = np.flatnonzero(is_exchange)
    before = last_before(program.rank_start, ~is_exchange)[collectives]
    found = (before >= 0) & (program.op[before] == Op.COMPUTE) & (program.phase[before] == Phase.B)
    inside[collectives[found]] = before[found]
    for first, last in _differing(program, inside):
        inside[first:last] = -1
    return inside


def last_before(rank_start: I64, chosen: Bool) -> I64:
    """Return, for each instruction, the last ``chosen`` one before it on its rank, or -1."""
    latest = np.full(len(chosen) + 1, -1, dtype=np.int64)
    latest[1:] = np.where(chosen, np.arange(len(chosen)), -1)
    latest = np.maximum.accumulate(latest)[:-1]
    first = np.repeat(rank_start[:-1], np.diff(rank_start))
    return np.where(latest >= first, latest, -1)


def _differing(program: Program, inside: I64) -> list[tuple[int, int]]:
    """Return the ranges of collectives behind backwards whose devices are not followed by the same parameters."""
    joint = np.asarray([len(instance.ranks) > 1 for instance in program.instances], dtype=np.bool_)
    places, counts = np.unique(inside[inside >= 0], return_counts=True)
    is_joint = joint[program.instance[places]]
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, count in zip(places[is_joint].tolist(), counts[is_joint].tolist(), strict=True):
        key = int(program.instance[place]), int(program.microbatch[place])
        groups.setdefault(key, []).append((place + 1, place + 1 + count))
    result = []
    for (instance, _), ranges in groups.items():
        followed = {tuple(program.buckets[bucket].parameters for bucket in program.bucket[first:last].tolist())
                    for first, last in ranges}
        if len(followed) > 1 or len(ranges) < len(program.instances[instance].ranks):
            result.extend(ranges)
    return result
