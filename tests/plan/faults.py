"""Faults to seed in a good program by rewriting its columns: rows dropped, doubled, swapped, moved or retargeted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from tests.plan.explore import Row, rows_of
from weft.plan.program import Op, Program

Lists = list[list[Row]]
_MESSAGES = (int(Op.SEND), int(Op.RECV))


def program_of(program: Program, lists: Lists) -> Program:
    """Return the program with these instructions instead of its own."""
    table = np.asarray([row for rows in lists for row in rows], dtype=np.int64).reshape(-1, 6)
    starts = np.concatenate(([0], np.cumsum([len(rows) for rows in lists]))).astype(np.int64)
    return replace(
        program, rank_start=starts, op=table[:, 0].astype(np.uint8), instance=table[:, 1].astype(np.int32),
        microbatch=table[:, 2].astype(np.int32), phase=table[:, 3].astype(np.uint8),
        channel=table[:, 4].astype(np.int32), bucket=table[:, 5].astype(np.int32))


def _pick(lists: Lists, rng: Random, ops: tuple[int, ...] | None = None) -> tuple[int, int] | None:
    places = [(rank, index) for rank, rows in enumerate(lists) for index, row in enumerate(rows)
              if ops is None or row[0] in ops]
    return rng.choice(places) if places else None


def _dropped(program: Program, lists: Lists, rng: Random) -> bool:
    place = _pick(lists, rng)
    del lists[place[0]][place[1]]
    return True


def _duplicated(program: Program, lists: Lists, rng: Random) -> bool:
    rank, index = _pick(lists, rng)
    lists[rank].insert(rng.randint(0, len(lists[rank])), lists[rank][index])
    return True


def _swapped(program: Program, lists: Lists, rng: Random) -> bool:
    rank, index = _pick(lists, rng)
    other = rng.randrange(len(lists[rank]))
    rows = lists[rank]
    rows[index], rows[other] = rows[other], rows[index]
    return rows[index] != rows[other]


def _neighbours_swapped(program: Program, lists: Lists, rng: Random) -> bool:
    rank, index = _pick(lists, rng)
    rows = lists[rank]
    if index + 1 >= len(rows):
        return False
    rows[index], rows[index + 1] = rows[index + 1], rows[index]
    return True


def _moved(program: Program, lists: Lists, rng: Random) -> bool:
    rank, index = _pick(lists, rng)
    row = lists[rank].pop(index)
    lists[rank].insert(rng.randint(0, len(lists[rank])), row)
    return True


def _other_rank(program: Program, lists: Lists, rng: Random) -> bool:
    rank, index = _pick(lists, rng)
    target = rng.randrange(len(lists))
    row = lists[rank].pop(index)
    lists[target].insert(rng.randint(0, len(lists[target])), row)
    return target != rank


def _retarget(column: int, ops: tuple[int, ...], count: Callable[[Program], int]) -> Callable[..., bool]:
    def fault(program: Program, lists: Lists, rng: Random) -> bool:
        place = _pick(lists, rng, ops)
        if place is None:
            return False
        row = list(lists[place[0]][place[1]])
        before = row[column]
        row[column] = rng.randint(-1, count(program)) if rng.random() < 0.1 else rng.randrange(count(program))
        lists[place[0]][place[1]] = tuple(row)
        return row[column] != before
    return fault


def _sides_of_message(lists: Lists, rng: Random) -> list[tuple[int, int]]:
    """Return the places of a send and its receive."""
    place = _pick(lists, rng, (int(Op.SEND),))
    if place is None:
        return []
    key = lists[place[0]][place[1]][2], lists[place[0]][place[1]][4]
    return [(rank, index) for rank, rows in enumerate(lists) for index, row in enumerate(rows)
            if row[0] in _MESSAGES and (row[2], row[4]) == key]


def _message_lost(program: Program, lists: Lists, rng: Random) -> bool:
    places = _sides_of_message(lists, rng)
    for rank, index in places:
        del lists[rank][index]
    return bool(places)


def _message_twice(program: Program, lists: Lists, rng: Random) -> bool:
    places = _sides_of_message(lists, rng)
    for rank, index in places:
        lists[rank].insert(index, lists[rank][index])
    return bool(places)


def _message_too_many(program: Program, lists: Lists, rng: Random) -> bool:
    """Send something else that is there, for another micro-batch, and receive it, right after a message."""
    places = _sides_of_message(lists, rng)
    other = rng.randrange(program.plan.microbatches)
    for rank, index in places:
        row = lists[rank][index]
        lists[rank].insert(index + 1, (*row[:2], other, *row[3:]))
    return bool(places)


def _other_direction(program: Program, lists: Lists, rng: Random) -> bool:
    """Turn a send into a receive, or a receive into a send."""
    place = _pick(lists, rng, _MESSAGES)
    if place is None:
        return False
    row = lists[place[0]][place[1]]
    lists[place[0]][place[1]] = (_MESSAGES[row[0] == _MESSAGES[0]], *row[1:])
    return True


def _messages_permuted(program: Program, lists: Lists, rng: Random) -> bool:
    """Put the sends, receives and collectives of one rank (or all) in another order, in the same places."""
    chosen = range(len(lists)) if rng.random() < 0.3 else [rng.randrange(len(lists))]
    changed = False
    for rank in chosen:
        places = [index for index, row in enumerate(lists[rank]) if row[0] in (*_MESSAGES, int(Op.COLLECTIVE))]
        rows = [lists[rank][index] for index in places]
        mixed = rng.sample(rows, len(rows))
        changed |= mixed != rows
        for index, row in zip(places, mixed, strict=True):
            lists[rank][index] = row
    return changed


FAULTS: dict[str, Callable[[Program, Lists, Random], bool]] = {
    "dropped": _dropped,
    "duplicated": _duplicated,
    "swapped": _swapped,
    "neighbours swapped": _neighbours_swapped,
    "moved": _moved,
    "on another rank": _other_rank,
    "other instance": _retarget(1, (int(Op.COMPUTE),), lambda program: len(program.instances)),
    "other micro-batch": _retarget(2, (int(Op.COMPUTE), *_MESSAGES), lambda program: program.plan.microbatches),
    "other phase": _retarget(3, (int(Op.COMPUTE),), lambda program: 4),
    "other channel": _retarget(4, _MESSAGES, lambda program: len(program.channels)),
    "other bucket": _retarget(5, (int(Op.COLLECTIVE),), lambda program: len(program.buckets)),
    "other operation": _retarget(0, tuple(map(int, Op)), lambda program: len(Op)),
    "message lost": _message_lost,
    "message twice": _message_twice,
    "message too many": _message_too_many,
    "other direction": _other_direction,
    "messages permuted": _messages_permuted,
}
"""Each changes the lists in place and returns whether there was something to change."""


def seed_fault(program: Program, kind: str, rng: Random) -> Program | None:
    """Return the program with one fault of the kind, or None where it has no place for one."""
    lists = rows_of(program)
    return program_of(program, lists) if FAULTS[kind](program, lists, rng) else None
