"""Small changes to the sets of a dnn-partitioning problem until none makes the latency less, compiled."""

from __future__ import annotations

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import I64
from weft.search.place.partition_latency_kernel import TIE, Graph, Scratch, close, excess, latency


@compiled
def _worth(g: Graph, where: I64, s: Scratch) -> float:
    """Return the latency and a little for the loads; infinite where it is not allowed."""
    value = latency(g, where, s)
    return float(np.inf if excess(g, s) > 0 else value + TIE * s.load.sum())


@compiled
def _try(g: Graph, where: I64, s: Scratch, cluster: I64, num: int, there: int, least: float) -> float:
    """Move the units to the set if that is worth it; return what the sets are worth then."""
    here = where[cluster[0]]
    for slot in range(num):
        if there > 0 and g.can_set[cluster[slot]] == 0:
            return least
    for slot in range(num):
        where[cluster[slot]] = there
    new = _worth(g, where, s)
    if new < least * (1 - 1e-12):
        return new
    for slot in range(num):
        where[cluster[slot]] = here
    return least


@compiled
def _gather(g: Graph, where: I64, cluster: I64, is_in: I64, unit: int, kind: int) -> int:
    """List the units that move: one alone, with all of its set before it or after it, or with one near it."""
    cluster[0] = unit
    if kind == 0:
        return 1
    if kind <= 2:
        return int(close(g, where, cluster, 1, is_in, kind == 1))
    slot = g.near_start[unit] + kind - 3
    if slot >= g.near_start[unit + 1] or where[g.near[slot]] != where[unit]:
        return 0
    cluster[1] = g.near[slot]
    return 2


@compiled
def polish(g: Graph, where: I64, s: Scratch, limit: int) -> int:
    """Improve the sets in place until nothing small helps or ``limit`` evaluations are spent; return how many were.

    Tried for each unit: to move to CPUs or to the set of a neighbour, alone, with all of its own set that it depends
    on or that depends on it, and with each of its neighbours.
    """
    cluster, is_in = np.zeros(len(g.cpu_s), dtype=np.int64), np.zeros(len(where), dtype=np.int64)
    least = _worth(g, where, s)
    count, is_better = 1, True
    while is_better and count < limit:
        is_better = False
        for unit in range(len(where)):
            if count >= limit:
                break
            num_near = g.near_start[unit + 1] - g.near_start[unit]
            for kind in range(3 + num_near):
                num = _gather(g, where, cluster, is_in, unit, kind)
                tried = where[unit]
                for at in range(-1, num_near if num else -1):
                    there = 0 if at < 0 else where[g.near[g.near_start[unit] + at]]
                    if there == where[unit] or there == tried:
                        continue
                    tried = there
                    new = _try(g, where, s, cluster, num, there, least)
                    count += 1
                    if new < least:
                        least, is_better = new, True
                        break
    return count
