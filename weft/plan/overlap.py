"""Which collectives are issued inside a backward, beside the rest of it, instead of after it.

The collectives that directly follow a whole backward on a rank, with no message between, wait for nothing but that
backward, so each may be issued in the middle of it: as soon as the gradients of its own parameters are final there and
the collectives before it in the list are issued. Where they stand in the list does not change, and neither does their
order on any rank, so what ``weft.plan.check`` has found safe stays safe:

    list:   B s0 mb 7        all_reduce 0   all_reduce 1
    time:   B s0 mb 7 ----------------------------->
                     all_reduce 0 ----> all_reduce 1 ---->

The devices of an instance that has several also meet inside its backward; so there the same parameters must follow, in
the same order, on all of them: then all issue everything in one order. Factors that are gathered instead of gradients
are final when the backward of their operator is done, as its gradients would be.
"""

from __future__ import annotations

import numpy as np

from weft.model.graph import I64, Bool
from weft.plan.program import Op, Phase, Program


def inside_backward(program: Program) -> I64:
    """Return for each instruction the backward that it is issued inside, or -1.

    Both are known by their places in the program's columns. What is issued inside the backward at place ``p`` stands at
    ``p + 1``, ``p + 2``, ... in that order.
    """
    inside = np.full(program.num_instructions, -1, dtype=np.int64)
    collectives = np.flatnonzero(program.op == Op.COLLECTIVE)
    if len(collectives) == 0:
        return inside
    before = last_before(program.rank_start, program.op != Op.COLLECTIVE)[collectives]
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
