"""Does a program come to its end if nothing is buffered? Every send, receive and collective blocks until it is met.

Each rank stands at one instruction. Compute and optimizer steps pass at once; a send passes together with its receive
when both ranks stand at it; a collective when all its members do. No rank ever has a choice, so any order of steps ends
in the same state, and one play decides: if some rank cannot reach its end, the program can hang.
"""

from __future__ import annotations

from collections import deque

from weft.plan.program import Op, Program

_LOCAL = (int(Op.COMPUTE), int(Op.STEP))
_COLLECTIVE = int(Op.COLLECTIVE)


def rendezvous_problems(program: Program) -> list[str]:
    """Return a line for each rank that cannot come to its end under rendezvous; empty if the program is safe."""
    at = play_rendezvous(program)
    stuck = [rank for rank in range(program.num_ranks) if at[rank] < program.rank_start[rank + 1]]
    return [f"{program.place(at[rank])}: waits for ever for {_partner(program, at, rank)}" for rank in stuck]


def play_rendezvous(program: Program) -> list[int]:
    """Return the instruction at which each rank stands when nothing moves any more."""
    at: list[int] = program.rank_start[:-1].tolist()
    end = program.rank_start[1:].tolist()
    ops = program.op.tolist()
    # What an instruction must meet: the same exchange, seen from each side.
    exchange = list(zip(program.bucket.tolist(), program.channel.tolist(), program.microbatch.tolist(), strict=True))
    queue = deque(range(program.num_ranks))
    while queue:
        rank = queue.popleft()
        while at[rank] < end[rank]:
            index = at[rank]
            if ops[index] in _LOCAL:
                at[rank] += 1
                continue
            sides = _sides(program, ops[index], exchange[index])
            if not all(at[member] < end[member] and ops[at[member]] == side and exchange[at[member]] == exchange[index]
                       for member, side in sides) or all(member != rank for member, _ in sides):
                break
            for member, _ in sides:
                at[member] += 1
                if member != rank:
                    queue.append(member)
    return at


def _sides(program: Program, op: int, exchange: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Return (rank, operation) of everyone that takes part in an exchange."""
    bucket, channel_id, _ = exchange
    if op == _COLLECTIVE:
        return [(rank, _COLLECTIVE) for rank in program.buckets[bucket].ranks]
    channel = program.channels[channel_id]
    return [(channel.source, int(Op.SEND)), (channel.target, int(Op.RECV))]


def _partner(program: Program, at: list[int], rank: int) -> str:
    """Return what the ranks it waits for are doing instead."""
    item = program.instruction(at[rank])
    lines = []
    for member, _ in _sides(program, int(item.op), (item.bucket, item.channel, item.microbatch)):
        if member != rank:
            ended = at[member] >= program.rank_start[member + 1]
            lines.append(f"rank {member} ({program.rank_names[member]}), which "
                         + ("has ended" if ended else f"is at {program.label(at[member])!r}"))
    return "; ".join(lines[:4]) or "itself"
