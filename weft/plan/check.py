"""Checkers: a plan that passes ``check_plan`` runs; a program that passes ``check_program`` cannot hang.

``check_program`` looks at the instructions alone, whoever wrote them: every action exactly once and on its own rank,
everything that a compute needs received or computed before it on its rank, every message sent after what it carries was
computed, sends and receives between two ranks in the same order on both sides, collectives after the gradients they
exchange, parameters in pieces gathered before what needs them, and progress under rendezvous: even if every send,
receive and collective blocks its rank until the other side is at the same point, all ranks come to the end. Every
problem is reported with its place. The tables of a program (instances, channels, buckets, units) are taken as
``weft.plan.layout`` builds them.

**nccl.** Its communicators are queues without tags or buffers: one for the messages of each source and target, one for
the collectives of each group and use (``weft.run.transport``). Nothing more has to be checked for it:

- *Order.* Sends and receives of a pair are the same list on both sides, and two members of a group that come to
  different collectives wait for ever under rendezvous, which is reported with both instructions. So what meets in a
  queue belongs together.
- *Progress.* Rendezvous gives one global sequence, of which all lists are cuts and in which a send and its receive are
  one event. In a queue, a stream or a whole GPU that does one thing at a time, an instruction waits for earlier ones of
  its rank and for its partner, so the earliest in that sequence that is not done can always go on. A program may be
  refused here that would pass on queues for each direction (two sends head-on); none is accepted that would not.

``tests/plan/queues.py`` plays programs so, with exchanges inside backwards where the runtime issues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.plan.binding import bind_plan
from weft.plan.lower import lower
from weft.plan.memory import MemoryAccount, account_memory
from weft.plan.plan import Plan
from weft.plan.program import Instruction, Op, Phase, Program
from weft.plan.structure import raise_problems, require_structure
from weft.plan.units import Unit

_Key = tuple[str, int, int, int]
"""What a rank has done: ("compute", instance, microbatch, phase) or ("receive", channel, microbatch, 0)."""
_COMPUTE, _SEND, _RECV, _COLLECTIVE = int(Op.COMPUTE), int(Op.SEND), int(Op.RECV), int(Op.COLLECTIVE)

_Meeting = tuple[int, int, int, int]
"""What instructions that pass together have in common: operation, channel or bucket or instance, microbatch, phase."""


def check_plan(plan: Plan, graph: Graph, cluster: Cluster) -> Program:
    """Return the plan's program after all checks; raise ``PlanError``, or ``NoFeasiblePlan`` if memory is exceeded."""
    bound = bind_plan(plan, graph)
    require_structure(bound, graph, cluster)
    program = lower(bound, graph)
    check_program(program)
    check_memory(program, cluster)
    return program


def check_program(program: Program) -> None:
    """Raise ``PlanError`` with every problem of the instructions; see the module's docstring."""
    problems = [*_column_problems(program)]
    if not problems:
        needs = _Needs(program)
        for rank in range(program.num_ranks):
            problems.extend(_rank_problems(program, needs, rank))
        problems.extend(_pair_problems(program))
        problems.extend(rendezvous_problems(program))
    if problems:
        raise_problems("the program", problems)


def check_memory(program: Program, cluster: Cluster, account: MemoryAccount | None = None) -> None:
    """Raise ``NoFeasiblePlan`` with what is missing where, if the peak of any device exceeds its capacity."""
    account = account or account_memory(program)
    over = []
    for rank, name in enumerate(program.rank_names):
        capacity = cluster.devices[cluster.device_index[name]].memory_bytes
        need = account.peak_bytes(rank)
        if capacity is not None and need > capacity:
            over.append((need - capacity, -rank, name, need, capacity))
    if not over:
        return
    missing, rank, name, need, capacity = max(over)
    parts = ", ".join(f"{key} {format_bytes(value)}" for key, value in account.peak(-rank).items() if value)
    others = f", and {len(over) - 1} more devices have too little as well" if len(over) > 1 else ""
    raise NoFeasiblePlan(
        f"{name!r} needs {format_bytes(need)} but has {format_bytes(capacity)}: {format_bytes(missing)} too little "
        f"({parts}){others}. Try more micro-batches, recomputation, another strategy, or more devices.",
        missing_bytes=missing, device=name)


def excess_bytes(plan: Plan, graph: Graph, cluster: Cluster) -> dict[str, int]:
    """Return by how much the plan exceeds the memory of the devices where it does."""
    account, over = account_memory(lower(plan, graph)), {}
    for rank, name in enumerate(plan.cluster.devices):
        capacity = cluster.devices[cluster.device_index[name]].memory_bytes
        if capacity is not None and account.peak_bytes(rank) > capacity:
            over[name] = account.peak_bytes(rank) - capacity
    return over


def _by_rank(num_ranks: int, members: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return for each rank the places at which it is a member."""
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, ranks in enumerate(members):
        for rank in ranks:
            found[rank].append(index)
    return found


class _Needs:
    """What each compute needs on its rank, from the program's tables."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.used = [frozenset(channel.microbatches) for channel in program.channels]
        self.handled = [frozenset(instance.microbatches) for instance in program.instances]
        self.training = program.plan.model.mode == "training"
        self.instances_of = _by_rank(program.num_ranks, [item.ranks for item in program.instances])
        self.channels_of = _by_rank(program.num_ranks, [(item.source, item.target) for item in program.channels])
        self.buckets_of = _by_rank(program.num_ranks, [item.ranks for item in program.buckets])
        updates = self.training and program.plan.optimizer.kind != "none"
        self.steps = [updates and bool(instances) for instances in self.instances_of]
        read = [{int(tensor) for op in ops for tensor in program.graph.op_inputs(int(op))} for ops in program.stage_ops]
        self.stages_of_bucket = [
            frozenset(stage for stage, tensors in enumerate(read) if not tensors.isdisjoint(bucket.parameters))
            for bucket in program.buckets]

    def of_compute(self, item: Instruction, rank: int) -> Iterator[tuple[tuple[_Key, ...], str]]:
        """Yield (any of these must be done before, words) for a compute instruction."""
        program, microbatch = self.program, item.microbatch
        instance = program.instances[item.instance]
        forward = item.phase == Phase.F
        if item.phase == Phase.W:
            yield (("compute", item.instance, microbatch, Phase.I),), "its I"
            return
        if not forward:
            yield (("compute", item.instance, microbatch, Phase.F),), "its F"
        for channel in instance.forward_channels if forward else instance.gradient_channels:
            if program.channels[channel].target == rank and microbatch in self.used[channel]:
                yield (("receive", channel, microbatch, 0),), f"the receive of {self._channel_name(channel)}"
        for other in instance.producers if forward else instance.consumers:
            if rank in program.instances[other].ranks and microbatch in self.handled[other]:
                phases = (Phase.F,) if forward else (Phase.B, Phase.I)
                keys = tuple(("compute", other, microbatch, int(phase)) for phase in phases)
                yield keys, f"{'/'.join(phase.name for phase in phases)} {program.instance_name(other)} mb {microbatch}"

    def _channel_name(self, channel: int) -> str:
        item = self.program.channels[channel]
        consumers = "+".join(self.program.instance_name(index) for index in item.consumers)
        what = "the gradient " if item.kind == "gradient" else ""
        return f"{what}{self.program.instance_name(item.producer)}>{consumers}"

    def of_send(self, channel_id: int, microbatch: int) -> tuple[_Key, ...]:
        """Return the computes of which one must be done before the send."""
        channel = self.program.channels[channel_id]
        phases = (Phase.F,) if channel.kind == "activation" else (Phase.B, Phase.I)
        return tuple(("compute", channel.producer, microbatch, int(phase)) for phase in phases)

    def of_bucket(self, bucket_id: int, rank: int) -> Iterator[tuple[_Key, ...]]:
        """Yield, for each backward that contributes on this rank, the computes of which one must be done."""
        for index in self.instances_of[rank]:
            instance = self.program.instances[index]
            if instance.stage in self.stages_of_bucket[bucket_id]:
                for microbatch in instance.microbatches:
                    yield tuple(("compute", index, microbatch, int(phase)) for phase in (Phase.B, Phase.W))


def _column_problems(program: Program) -> Iterator[str]:
    columns = (program.instance, program.microbatch, program.phase, program.channel, program.bucket)
    starts = program.rank_start
    if any(len(column) != program.num_instructions for column in columns) or len(starts) != len(program.rank_names) + 1:
        yield f"the columns are not of one length, or not for {len(program.rank_names)} ranks"
        return
    if starts[0] != 0 or starts[-1] != program.num_instructions or (np.diff(starts) < 0).any():
        yield "rank_start does not divide the instructions among the ranks"
        return
    references = {Op.COMPUTE: (("instance", program.instance, len(program.instances)),
                               ("phase", program.phase, len(Phase))),
                  Op.SEND: (("channel", program.channel, len(program.channels)),),
                  Op.RECV: (("channel", program.channel, len(program.channels)),),
                  Op.COLLECTIVE: (("bucket", program.bucket, len(program.buckets)),), Op.STEP: ()}
    for index in np.flatnonzero(program.op >= len(Op)).tolist():
        yield f"{program.position(index)}: there is no operation {program.op[index]}"
    for op, parts in references.items():
        for what, column, size in parts:
            for index in np.flatnonzero((program.op == op) & ((column < 0) | (column >= size))).tolist():
                yield f"{program.position(index)}: a {op.name.lower()} names {what} {column[index]}; there are {size}"


def _rank_problems(program: Program, needs: _Needs, rank: int) -> Iterator[str]:
    done: set[_Key] = set()
    counts: Counter[tuple[object, ...]] = Counter()
    ended, units = False, _UnitRules(program, rank)
    for item in program.instructions(rank):
        if ended:
            yield f"{program.place(item.index)}: stands after the optimizer step"
        match item.op:
            case Op.COMPUTE:
                yield from _compute_problems(program, needs, rank, item, done)
                yield from units.compute(item)
                key: _Key = ("compute", item.instance, item.microbatch, int(item.phase))
            case Op.SEND | Op.RECV:
                yield from _message_problems(program, needs, rank, item, done)
                kind = "send" if item.op == Op.SEND else "receive"
                key = (kind, item.channel, item.microbatch, 0)
            case Op.COLLECTIVE:
                key = ("collective", item.bucket, -1, 0)
                if program.buckets[item.bucket].is_of_unit:
                    yield from units.exchange(item)
                    occurrence = item.microbatch * len(program.instances) + item.instance
                    key = ("collective of a unit", item.bucket, occurrence, int(item.phase))
                else:
                    yield from _collective_problems(program, needs, rank, item, done)
            case Op.STEP:
                yield from units.step(item)
                if not needs.steps[rank]:
                    yield f"{program.place(item.index)}: there is nothing to update on this rank"
                ended = True
                key = ("step", 0, 0, 0)
        counts[key] += 1
        if counts[key] == 2:
            yield f"{program.place(item.index)}: is there more than once on this rank"
        done.add(key)
    yield from units.end()
    yield from _missing_problems(program, needs, rank, done)


def _compute_problems(program: Program, needs: _Needs, rank: int, item: Instruction,
                      done: set[_Key]) -> Iterator[str]:
    instance = program.instances[item.instance]
    if rank not in instance.ranks:
        yield f"{program.place(item.index)}: this stage runs on {_rank_list(program, instance.ranks)}"
        return
    if item.microbatch not in needs.handled[item.instance]:
        yield f"{program.place(item.index)}: the stage does not handle micro-batch {item.microbatch}"
        return
    if item.phase != Phase.F and not needs.training:
        yield f"{program.place(item.index)}: a backward in an inference program"
        return
    for keys, words in needs.of_compute(item, rank):
        if not any(key in done for key in keys):
            yield f"{program.place(item.index)}: comes before {words}, which it needs"


def _message_problems(program: Program, needs: _Needs, rank: int, item: Instruction,
                      done: set[_Key]) -> Iterator[str]:
    channel = program.channels[item.channel]
    side = channel.source if item.op == Op.SEND else channel.target
    if side != rank:
        verb = "leaves" if item.op == Op.SEND else "arrives at"
        yield f"{program.place(item.index)}: is on the wrong rank; the message {verb} {_rank_list(program, (side,))}"
    elif item.microbatch not in needs.used[item.channel]:
        yield f"{program.place(item.index)}: the message is not used for micro-batch {item.microbatch}"
    elif item.op == Op.SEND and not any(key in done for key in needs.of_send(item.channel, item.microbatch)):
        producer = program.instance_name(channel.producer)
        phase = "F" if channel.kind == "activation" else "backward"
        yield f"{program.place(item.index)}: comes before {phase} {producer} mb {item.microbatch}, which makes it"


def _collective_problems(program: Program, needs: _Needs, rank: int, item: Instruction,
                         done: set[_Key]) -> Iterator[str]:
    bucket = program.buckets[item.bucket]
    if rank not in bucket.ranks:
        yield f"{program.place(item.index)}: is on the wrong rank; its members are {_rank_list(program, bucket.ranks)}"
        return
    for keys in needs.of_bucket(item.bucket, rank):
        if not any(key in done for key in keys):
            _, index, microbatch, _ = keys[0]
            name = program.instance_name(index)
            yield f"{program.place(item.index)}: comes before the backward of {name} mb {microbatch}"
            return


def _missing_problems(program: Program, needs: _Needs, rank: int, done: set[_Key]) -> Iterator[str]:
    where = f"rank {rank} ({program.rank_names[rank]})"
    for index in needs.instances_of[rank]:
        for microbatch in program.instances[index].microbatches:
            phases = {phase for phase in Phase if ("compute", index, microbatch, int(phase)) in done}
            yield from (f"{where}: {text} {program.instance_name(index)} mb {microbatch}"
                        for text in _phase_problems(phases, needs.training))
    for index in needs.channels_of[rank]:
        channel = program.channels[index]
        for kind, side in (("send", channel.source), ("receive", channel.target)):
            if side == rank:
                for microbatch in channel.microbatches:
                    if (kind, index, microbatch, 0) not in done:
                        name = program.instance_name(channel.producer)
                        yield f"{where}: the {kind} of {channel.kind} from {name} mb {microbatch} is missing"
    for index in needs.buckets_of[rank]:
        if ("collective", index, -1, 0) not in done and not program.buckets[index].is_of_unit:
            yield f"{where}: the {program.buckets[index].method} of gradient bucket {index} is missing"
    if needs.steps[rank] and ("step", 0, 0, 0) not in done:
        yield f"{where}: the optimizer step is missing"


def _phase_problems(phases: set[Phase], training: bool) -> Iterator[str]:
    if Phase.F not in phases:
        yield "missing F of"
    if not training:
        return
    if Phase.B in phases and phases & {Phase.I, Phase.W}:
        yield "both B and I or W of"
    elif Phase.B not in phases:
        if Phase.I not in phases:
            yield "missing backward (B, or I and W) of"
        elif Phase.W not in phases:
            yield "missing W of"


class _UnitRules:
    """What must hold on one rank of the collectives of units (``weft.plan.units``), whoever wrote the program.

    A compute's parameters are gathered before it, gradients are scattered behind the backwards that make them, all of
    them before they are added up over groups, and that before the optimizer's step.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.units = [(index, unit) for index, unit in enumerate(program.units) if rank in unit.ranks]
        self.of_stage: dict[int, list[tuple[int, Unit]]] = {}
        for index, unit in self.units:
            for stage in unit.stages:
                self.of_stage.setdefault(stage, []).append((index, unit))
        self.gathered: set[int] = set()
        self.unscattered: dict[int, Instruction] = {}
        """By unit a backward whose gradients are not scattered yet."""
        self.scattered: set[int] = set()
        self.summed: set[int] = set()

    def compute(self, item: Instruction) -> Iterator[str]:
        """Yield what is wrong with a compute."""
        for index, unit in self.of_stage.get(self.program.instances[item.instance].stage, ()):
            if unit.gather >= 0 and index not in self.gathered:
                yield f"{self.program.place(item.index)}: comes before the all_gather of its parameters"
            if unit.reduce >= 0 and item.phase != Phase.F:
                self.unscattered[index] = item
                if index in self.summed:
                    yield f"{self.program.place(item.index)}: comes after the sum of its gradients over groups"

    def exchange(self, item: Instruction) -> Iterator[str]:
        """Yield what is wrong with a collective of a unit."""
        bucket = self.program.buckets[item.bucket]
        if self.rank not in bucket.ranks:
            members = _rank_list(self.program, bucket.ranks)
            yield f"{self.program.place(item.index)}: is on the wrong rank; its members are {members}"
            return
        own = next(index for index in bucket.units if self.rank in self.program.units[index].ranks)
        if bucket.method == "all_gather":
            self.gathered.add(own)
        elif bucket.method == "reduce_scatter":
            if self.unscattered.pop(own, None) is None:
                yield f"{self.program.place(item.index)}: there is no backward before it whose gradients it scatters"
            self.scattered.add(own)
        else:
            if own in self.unscattered or own not in self.scattered:
                yield f"{self.program.place(item.index)}: comes before the reduce_scatter of what it adds up"
            self.summed.add(own)

    def step(self, item: Instruction) -> Iterator[str]:
        """Yield what is missing before the optimizer's step."""
        for index, before in sorted(self.unscattered.items()):
            yield (f"{self.program.place(item.index)}: comes before the reduce_scatter of the gradients of "
                   f"{self.program.label(before.index)!r} (unit {index})")
        self.unscattered.clear()

    def end(self) -> Iterator[str]:
        """Yield what is missing on the rank."""
        where = f"rank {self.rank} ({self.program.rank_names[self.rank]})"
        for index, before in sorted(self.unscattered.items()):
            yield (f"{where}: the reduce_scatter of the gradients of {self.program.label(before.index)!r} "
                   f"(unit {index}) is missing")
        for index, unit in self.units:
            if unit.sums and index not in self.summed:
                yield f"{where}: the sum of the gradients of unit {index} over groups is missing"


def _pair_problems(program: Program) -> Iterator[str]:
    """Yield a problem for each pair of ranks whose sends and receives are not in the same order on both sides."""
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    ends = [(channel.source, channel.target) for channel in program.channels]
    for table, op in ((sent, Op.SEND), (received, Op.RECV)):
        chosen = np.flatnonzero(program.op == int(op))
        for index, channel in zip(chosen.tolist(), program.channel[chosen].tolist(), strict=True):
            table.setdefault(ends[channel], []).append(index)
    for pair in sorted(sent.keys() | received.keys()):
        yield from _sequence_problems(program, pair, sent.get(pair, []), received.get(pair, []))


def _sequence_problems(program: Program, pair: tuple[int, int], sends: list[int], receives: list[int]) -> Iterator[str]:
    length = min(len(sends), len(receives))
    first, second = np.asarray(sends[:length], dtype=np.int64), np.asarray(receives[:length], dtype=np.int64)
    differ = program.channel[first] != program.channel[second]
    differ |= program.microbatch[first] != program.microbatch[second]
    for at in np.flatnonzero(differ)[:1].tolist():
        yield (f"ranks {pair[0]} and {pair[1]} disagree on the order of messages: {program.place(sends[at])} "
               f"meets {program.place(receives[at])}")
        return
    if len(sends) != len(receives):
        longer = sends if len(sends) > len(receives) else receives
        extra = program.place(longer[min(len(sends), len(receives))])
        yield (f"ranks {pair[0]} and {pair[1]}: {len(sends)} sends but {len(receives)} receives; "
               f"without a partner: {extra}")


def _rank_list(program: Program, ranks: tuple[int, ...]) -> str:
    shown = ", ".join(f"rank {rank} ({program.rank_names[rank]})" for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


# ---- rendezvous -----------------------------------------------------------------------------------------------------
#
# Does the program come to its end if nothing is buffered? Each rank stands at one instruction. A send passes together
# with its receive when both ranks stand at it, a collective when all its members do, the compute of an instance with
# several ranks when all of them do (they exchange shards inside it); all else passes at once. No rank ever has a
# choice, so any order of steps ends in the same state, and one play decides: if some rank cannot reach its end, the
# program can hang.


def rendezvous_problems(program: Program) -> list[str]:
    """Return a line for each rank that cannot come to its end under rendezvous; empty if the program is safe."""
    at = play_rendezvous(program)
    stuck = [rank for rank in range(program.num_ranks) if at[rank] < program.rank_start[rank + 1]]
    meetings = _meetings(program) if stuck else []
    problems = []
    for rank in stuck:
        meeting = meetings[at[rank]]
        assert meeting is not None, "a rank waits only where others must be"
        problems.append(f"{program.place(at[rank])}: waits for ever for {_partner(program, meeting, at, rank)}")
    return problems


def play_rendezvous(program: Program) -> list[int]:
    """Return the instruction at which each rank stands when nothing moves any more."""
    at: list[int] = program.rank_start[:-1].tolist()
    end = program.rank_start[1:].tolist()
    ops = program.op.tolist()
    meetings = _meetings(program)
    parties: dict[tuple[int, int], dict[int, int]] = {}
    arrived: dict[_Meeting, list[int]] = {}
    moving = list(range(program.num_ranks))
    while moving:
        rank = moving.pop()
        while at[rank] < end[rank]:
            meeting = meetings[at[rank]]
            if meeting is None:
                at[rank] += 1
                continue
            wanted = parties.get(meeting[:2]) or parties.setdefault(meeting[:2], _parties(program, meeting))
            if wanted.get(rank) != ops[at[rank]]:
                break
            here = arrived.setdefault(meeting, [])
            here.append(rank)
            if len(here) < len(wanted):
                break
            del arrived[meeting]
            for member in here:
                at[member] += 1
            moving.extend(member for member in here if member != rank)
    return at


def _meetings(program: Program) -> list[_Meeting | None]:
    """Return what each instruction must meet, or None for those that pass alone."""
    joint = [len(instance.ranks) > 1 for instance in program.instances]
    of_unit = [bucket.is_of_unit for bucket in program.buckets]
    columns = (program.op, program.instance, program.microbatch, program.phase, program.channel, program.bucket)
    result: list[_Meeting | None] = []
    for op, instance, microbatch, phase, channel, bucket in zip(*(item.tolist() for item in columns), strict=True):
        if op in (_SEND, _RECV):
            result.append((_SEND, channel, microbatch, 0))
        elif op == _COLLECTIVE:
            result.append((_COLLECTIVE, bucket, 0, 0) if not of_unit[bucket] else
                          (_COLLECTIVE, bucket, microbatch * len(program.instances) + instance, phase))
        else:
            result.append((_COMPUTE, instance, microbatch, phase) if op == _COMPUTE and joint[instance] else None)
    return result


def _parties(program: Program, meeting: _Meeting) -> dict[int, int]:
    """Return, for each rank that takes part, the operation at which it must stand."""
    op, index, _, _ = meeting
    if op == _SEND:
        channel = program.channels[index]
        return {channel.source: _SEND, channel.target: _RECV}
    ranks = program.buckets[index].ranks if op == _COLLECTIVE else program.instances[index].ranks
    return dict.fromkeys(ranks, op)


def _partner(program: Program, meeting: _Meeting, at: list[int], rank: int) -> str:
    """Return what the ranks that it waits for are doing instead."""
    lines = []
    for member in _parties(program, meeting):
        if member != rank:
            ended = at[member] >= program.rank_start[member + 1]
            lines.append(f"rank {member} ({program.rank_names[member]}), which "
                         + ("has ended" if ended else f"is at {program.label(at[member])!r}"))
    return "; ".join(lines[:4]) or "itself"
