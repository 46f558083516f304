"""Does a program come to its end if nothing is buffered? Every send, receive and collective blocks until it is met.

Each rank stands at one instruction. A send passes together with its receive when both ranks stand at it, a collective
when all its members do, the compute of an instance with several ranks when all of them do (they exchange shards inside
it); all else passes at once. No rank ever has a choice, so any order of steps ends in the same state, and one play
decides: if some rank cannot reach its end, the program can hang.
"""

from __future__ import annotations

from weft.plan.program import Op, Program

_COMPUTE, _SEND, _RECV, _COLLECTIVE = int(Op.COMPUTE), int(Op.SEND), int(Op.RECV), int(Op.COLLECTIVE)

_Meeting = tuple[int, int, int, int]
"""What instructions that pass together have in common: operation, channel or bucket or instance, microbatch, phase."""


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
    columns = (program.op, program.instance, program.microbatch, program.phase, program.channel, program.bucket)
    result: list[_Meeting | None] = []
    for op, instance, microbatch, phase, channel, bucket in zip(*(item.tolist() for item in columns), strict=True):
        if op in (_SEND, _RECV):
            result.append((_SEND, channel, microbatch, 0))
        elif op == _COLLECTIVE:
            result.append((_COLLECTIVE, bucket, 0, 0))
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
