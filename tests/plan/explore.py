"""An executor for small programs that knows nothing of the checker: it finds out by playing whether a program works.

``rank_faults`` plays one rank's instructions with the tensors that are really there; what a rank holds depends only on
how far it has come, so each rank can be played alone. ``ways_to_block`` walks through every interleaving of all ranks
in which a send, a receive, a collective and the compute of a stage on several ranks need all parties at once.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

from tests.plan.meaning import Meaning, Member
from weft.plan.program import Op, Phase, Program

Row = tuple[int, int, int, int, int, int]
"""(op, instance, microbatch, phase, channel, bucket)."""


class TooLargeError(Exception):
    """There are more states than the caller wants to visit."""


def rows_of(program: Program) -> list[list[Row]]:
    """Return the instructions of each rank as plain tuples."""
    columns = (program.op, program.instance, program.microbatch, program.phase, program.channel, program.bucket)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    starts = program.rank_start.tolist()
    return [rows[first:last] for first, last in pairwise(starts)]


def works(program: Program, *, max_states: int = 200_000) -> bool:
    """Return whether every interleaving of the program runs to the end with every tensor in its place."""
    meaning = Meaning(program.plan, program.graph)
    faults = [fault for rank in range(program.num_ranks) for fault in rank_faults(program, meaning, rank)]
    return not faults and not ways_to_block(program, max_states=max_states)


class _Rank:
    """What one rank has done and holds."""

    def __init__(self, program: Program, meaning: Meaning, rank: int) -> None:
        self.program, self.meaning, self.rank = program, meaning, rank
        self.done: Counter[tuple[object, ...]] = Counter()
        self.arrived: set[tuple[str, Member, int, int, Member]] = set()
        self.faults: list[str] = []

    def need(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(f"rank {self.rank}: {fault}")

    def member(self, instance: int) -> Member:
        item = self.program.instances[instance]
        return item.stage, item.replica

    def has_done(self, member: Member, microbatch: int, *phases: Phase) -> bool:
        return any(self.done["compute", member, microbatch, int(phase)] for phase in phases)

    def play(self, row: Row) -> None:
        op, instance, microbatch, phase, channel, bucket = row
        self.need(not self.done["step",], "something comes after the step")
        if op == Op.COMPUTE:
            self.compute(self.member(instance), microbatch, Phase(phase))
            self.done["compute", self.member(instance), microbatch, phase] += 1
        elif op == Op.SEND:
            self.send(channel, microbatch)
            self.done["send", channel, microbatch] += 1
        elif op == Op.RECV:
            self.receive(channel, microbatch)
            self.done["receive", channel, microbatch] += 1
        elif op == Op.COLLECTIVE:
            self.collect(bucket)
            self.done["collective", bucket] += 1
        else:
            self.done["step",] += 1

    def compute(self, member: Member, microbatch: int, phase: Phase) -> None:
        meaning = self.meaning
        if self.rank not in meaning.ranks[member] or microbatch not in meaning.microbatches[member[0]]:
            self.need(False, f"{member} mb {microbatch} is not for this rank")
            return
        if phase == Phase.W:
            self.need(self.has_done(member, microbatch, Phase.I), "W before I")
        elif phase == Phase.F:
            for tensor, source in meaning.feeds(member, microbatch):
                here = self.rank in meaning.ranks[source] and self.has_done(source, microbatch, Phase.F)
                self.need(here or ("activation", member, tensor, microbatch, source) in self.arrived,
                          f"F {member} mb {microbatch} lacks {tensor} of {source}")
        else:
            self.need(self.has_done(member, microbatch, Phase.F), "backward before forward")
            for tensor, reader in meaning.gradients(member, microbatch):
                here = self.rank in meaning.ranks[reader] and self.has_done(reader, microbatch, Phase.B, Phase.I)
                self.need(here or ("gradient", member, tensor, microbatch, reader) in self.arrived,
                          f"backward of {member} mb {microbatch} lacks the gradient of {tensor} from {reader}")

    def send(self, channel_id: int, microbatch: int) -> None:
        channel = self.program.channels[channel_id]
        phases = (Phase.F,) if channel.kind == "activation" else (Phase.B, Phase.I)
        self.need(channel.source == self.rank, "a send on the wrong rank")
        self.need(self.has_done(self.member(channel.producer), microbatch, *phases), "nothing there to send")

    def receive(self, channel_id: int, microbatch: int) -> None:
        channel = self.program.channels[channel_id]
        self.need(channel.target == self.rank, "a receive on the wrong rank")
        source = self.member(channel.producer)
        for consumer in channel.consumers:
            target = self.member(consumer)
            both = (self.meaning.samples[source], self.meaning.samples[target])
            first, last = max(low for low, _ in both), min(high for _, high in both)
            if channel.whole or (channel.samples[0] <= first and last <= channel.samples[1]):
                self.arrived |= {(channel.kind, target, tensor, microbatch, source) for tensor in channel.tensors}

    def collect(self, bucket_id: int) -> None:
        bucket = self.program.buckets[bucket_id]
        self.need(self.rank in bucket.ranks, "a collective on the wrong rank")
        for member, ranks in self.meaning.ranks.items():
            if self.rank in ranks and self.meaning.parameters[member[0]] & set(bucket.parameters):
                for microbatch in self.meaning.microbatches[member[0]]:
                    self.need(self.has_done(member, microbatch, Phase.B, Phase.W), "a collective before its gradients")

    def expected(self) -> Counter[tuple[object, ...]]:
        """Return everything that must have been done, each thing once."""
        program, meaning = self.program, self.meaning
        wanted: Counter[tuple[object, ...]] = Counter()
        for member, ranks in meaning.ranks.items():
            if self.rank in ranks:
                for microbatch in meaning.microbatches[member[0]]:
                    phases = [Phase.F]
                    if meaning.training:
                        split = self.done["compute", member, microbatch, int(Phase.I)] > 0
                        phases += [Phase.I, Phase.W] if split else [Phase.B]
                    wanted.update(("compute", member, microbatch, int(phase)) for phase in phases)
        for index, channel in enumerate(program.channels):
            if channel.source == self.rank:
                wanted.update(("send", index, microbatch) for microbatch in channel.microbatches)
            if channel.target == self.rank:
                wanted.update(("receive", index, microbatch) for microbatch in channel.microbatches)
        wanted.update(("collective", index) for index, item in enumerate(program.buckets) if self.rank in item.ranks)
        if wanted and meaning.training and program.plan.optimizer.kind != "none":
            wanted["step",] += 1
        return wanted


def rank_faults(program: Program, meaning: Meaning, rank: int) -> list[str]:
    """Return what goes wrong on one rank if every message comes as sent: missing tensors, things lost or done twice."""
    state = _Rank(program, meaning, rank)
    for row in rows_of(program)[rank]:
        if not _exists(program, row):
            return [f"rank {rank}: {row} refers to nothing"]
        state.play(row)
    done = Counter({key: count for key, count in state.done.items() if count})
    state.need(done == state.expected(), "not everything is done exactly once")
    return state.faults


def _exists(program: Program, row: Row) -> bool:
    op, instance, _, phase, channel, bucket = row
    if op == Op.COMPUTE:
        return 0 <= instance < len(program.instances) and phase in tuple(Phase)
    if op in (Op.SEND, Op.RECV):
        return 0 <= channel < len(program.channels)
    return op == Op.STEP or (op == Op.COLLECTIVE and 0 <= bucket < len(program.buckets))


def _parties(program: Program, row: Row, rank: int) -> list[tuple[int, Row]]:
    """Return (rank, row) of all who must stand at this row at once."""
    op, instance, microbatch, _, channel, bucket = row
    if op in (Op.SEND, Op.RECV):
        item = program.channels[channel]
        return [(item.source, (int(Op.SEND), -1, microbatch, 0, channel, -1)),
                (item.target, (int(Op.RECV), -1, microbatch, 0, channel, -1))]
    if op == Op.COLLECTIVE:
        return [(member, row) for member in program.buckets[bucket].ranks]
    if op == Op.COMPUTE and len(program.instances[instance].ranks) > 1:
        return [(member, row) for member in program.instances[instance].ranks]
    return [(rank, row)]


def _moves(program: Program, rows: list[list[Row]], at: tuple[int, ...]) -> list[tuple[int, ...]]:
    found = []
    for rank, position in enumerate(at):
        if position < len(rows[rank]):
            parties = _parties(program, rows[rank][position], rank)
            ready = all(at[member] < len(rows[member]) and rows[member][at[member]] == row for member, row in parties)
            if ready and any(member == rank for member, _ in parties):
                moving = {member for member, _ in parties}
                found.append(tuple(index + (member in moving) for member, index in enumerate(at)))
    return found


def ways_to_block(program: Program, *, max_states: int) -> list[tuple[int, ...]]:
    """Return all reachable states in which no rank can move although some rank has not ended."""
    rows = rows_of(program)
    if not all(_exists(program, row) for items in rows for row in items):
        return [tuple(0 for _ in rows)]
    end = tuple(len(items) for items in rows)
    start = tuple(0 for _ in rows)
    seen, frontier, blocked = {start}, [start], []
    while frontier:
        at = frontier.pop()
        moves = _moves(program, rows, at)
        if not moves and at != end:
            blocked.append(at)
        for state in moves:
            if state not in seen:
                seen.add(state)
                frontier.append(state)
        if len(seen) > max_states:
            raise TooLargeError(f"more than {max_states} states")
    return blocked


def walk(program: Program, rng: Random) -> bool:
    """Return whether one random interleaving comes to the end."""
    rows = rows_of(program)
    if not all(_exists(program, row) for items in rows for row in items):
        return False
    at = tuple(0 for _ in rows)
    while moves := _moves(program, rows, at):
        at = rng.choice(moves)
    return at == tuple(len(items) for items in rows)
