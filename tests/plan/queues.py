"""Plays a program as nccl would: nobody waits to issue, but every communicator is a queue without tags or buffers.

A rank issues its list, with the exchanges that belong inside a backward in the middle of it. Computes run one after the
other; a message or collective is behind the computes before it and behind what was issued before it on its communicator.
There the first of each rank meet, whatever they are for: if that is not the same, data go astray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weft.plan.program import Instruction, Op, Phase, Program, inside_backward

Queue = tuple[Any, ...]


@dataclass
class Item:
    """What a rank has issued."""

    rank: int
    label: str
    queue: Queue | None = None
    """Its communicator and the way it goes; None for what meets nobody."""
    content: tuple[int, ...] = ()
    after: list[Item] = field(default_factory=list)
    is_done: bool = False


def by_direction(source: int, target: int) -> Queue:
    return ("message", source, target)


def by_pair(source: int, target: int) -> Queue:
    return ("message", *sorted((source, target)))


def play(program: Program, *, communicator: Callable[[int, int], Queue] = by_direction, one_at_a_time: bool = False,
         early: bool = True) -> str:
    """Return what goes wrong, or nothing.

    ``one_at_a_time``: a device begins what it is told only when all before it is done, over all communicators.
    """
    ranks = [_issued(program, rank, communicator, early=early) for rank in range(program.num_ranks)]
    queues: dict[Queue, dict[int, list[Item]]] = {}
    for items in ranks:
        last: dict[Queue, Item] = {}
        for before, item in zip([None, *items], items, strict=False):
            if item.queue is not None:
                if item.queue in last:
                    item.after.append(last[item.queue])
                last[item.queue] = item
                queues.setdefault(item.queue, {}).setdefault(item.rank, []).append(item)
            if one_at_a_time and before is not None:
                item.after.append(before)
    moved = True
    while moved:
        moved = False
        for items in ranks:
            for item in items:
                if item.is_done or not all(other.is_done for other in item.after):
                    continue
                if item.queue is not None:
                    place = queues[item.queue][item.rank].index(item)
                    met = [queue[place] for rank in _parties(item.queue)
                           if len(queue := queues[item.queue].get(rank, [])) > place]
                    if any(other.content != item.content for other in met):
                        return f"{item.label} meets {[other.label for other in met]}"
                    if len(met) < len(_parties(item.queue)) or not all(
                            before.is_done for other in met for before in other.after):
                        continue
                    for other in met:
                        other.is_done = True
                item.is_done = moved = True
    stuck = [item.label for items in ranks for item in items if not item.is_done]
    return f"stuck: {stuck}" if stuck else ""


def _parties(queue: Queue) -> tuple[int, ...]:
    return queue[1:] if queue[0] == "message" else queue[1]


def _issued(program: Program, rank: int, communicator: Callable[[int, int], Queue], *, early: bool) -> list[Item]:
    """Return what a rank issues, in that order."""
    first, inside = int(program.rank_start[rank]), inside_backward(program)
    rows = list(program.instructions(rank))
    result: list[Item] = []
    computed: list[Item] = []
    received: dict[tuple[int, int], Item] = {}
    place = 0
    while place < len(rows):
        row = rows[place]
        place += 1
        label = program.place(row.index)
        if row.op == Op.COMPUTE:
            halves = _computes(program, rank, row, label)
            needed = program.instances[row.instance]
            channels = needed.forward_channels if row.phase == Phase.F else needed.gradient_channels
            halves[0].after += [received[key] for key in ((channel, row.microbatch) for channel in channels)
                                if key in received]
            for half in halves:
                half.after += computed[-1:]
                computed.append(half)
                result.append(half)
                while half is halves[0] and early and place < len(rows) and inside[first + place] == row.index:
                    result.append(_collective(program, rows[place], rank, computed))
                    place += 1
        elif row.op == Op.COLLECTIVE:
            result.append(_collective(program, row, rank, computed))
        elif row.op == Op.STEP:
            result.append(Item(rank, label, after=list(result)))
        else:
            channel = program.channels[row.channel]
            item = Item(rank, label, communicator(channel.source, channel.target), (row.channel, row.microbatch),
                        computed[-1:])
            if row.op == Op.RECV:
                received[row.channel, row.microbatch] = item
            result.append(item)
    return result


def _computes(program: Program, rank: int, row: Instruction, label: str) -> list[Item]:
    """Return the two halves of a compute; the ranks of a stage on several meet in each."""
    ranks = program.instances[row.instance].ranks
    queue = ("stage", ranks) if len(ranks) > 1 else None
    return [Item(rank, label, queue, (row.instance, row.microbatch, int(row.phase), half)) for half in range(2)]


def _collective(program: Program, row: Instruction, rank: int, computed: list[Item]) -> Item:
    return Item(rank, program.place(row.index), ("exchange", program.buckets[row.bucket].ranks), (row.bucket,),
                computed[-1:])
