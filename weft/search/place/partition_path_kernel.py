"""The least latency along one path of a dnn-partitioning problem, compiled: a bound, and sets to start from.

A set that holds two nodes of a path holds all between them, or it would wait for itself: on the path, sets are
intervals ``i..j``, and each holds every node that something in it leads to and that leads to something in it.
The path takes at least the CPU times of its nodes outside sets and, for each interval, the least load:

    accelerator times of all nodes that must be inside, and of those in their colour classes
    + costs of what comes from, or goes to, the path outside
    + for other neighbours: the cheaper of the cost, and of taking the neighbour in with what that costs in turn

Each interval within the memory, and no more intervals than sets: ``best_cover`` finds the least sum by a dynamic
program. Nothing is counted twice: what a neighbour reads, or what reads it, only where no other way leads to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.partition_latency_kernel import SLACK, Graph


class Interval(NamedTuple):
    """What an interval of the path takes, as its end moves on."""

    inside: I64
    """[units] 1 for those that must be inside."""
    enter_s: F64
    """[nodes] what is counted for a node outside that is read inside."""
    exit_s: F64
    """[nodes] what is counted for a node inside that is read outside."""
    total: F64
    """Load and memory."""


@compiled
def spans(g: Graph, path: I64) -> tuple[I64, I64, I64]:
    """Return each node's place on the path (or -1), the last place that leads to it, and the first it leads to."""
    nodes, length = len(g.cpu_s), len(path)
    place = np.full(nodes, -1, dtype=np.int64)
    for index in range(length):
        place[path[index]] = index
    after, before = place.copy(), np.full(nodes, length, dtype=np.int64)
    for node in range(nodes):
        for slot in range(g.target_start[node], g.target_start[node + 1]):
            if place[g.targets[slot]] < 0:
                after[g.targets[slot]] = max(after[g.targets[slot]], after[node])
    for node in range(nodes - 1, -1, -1):
        if place[node] >= 0:
            before[node] = place[node]
            continue
        for slot in range(g.target_start[node], g.target_start[node + 1]):
            before[node] = min(before[node], before[g.targets[slot]])
    return place, after, before


@compiled
def _is_alone(g: Graph, node: int) -> bool:
    return bool(g.member_start[g.unit[node] + 1] - g.member_start[g.unit[node]] == 1)


@compiled
def _least_entering(g: Graph, place: I64, begin: int, least: F64) -> None:
    """Set for each node off the path the least that a set pays which begins at ``begin`` and reads the node."""
    for node in range(len(least)):
        if place[node] >= 0:
            continue
        least[node] = g.cost_s[node]
        if g.can_set[g.unit[node]] == 0:
            continue
        inside = g.fpga_s[node]
        for slot in range(g.source_start[node], g.source_start[node + 1]):
            source = g.sources[slot]
            if not _is_alone(g, source):
                continue
            num_off, is_late = 0, False
            for index in range(g.target_start[source], g.target_start[source + 1]):
                there = place[g.targets[index]]
                num_off += there < 0
                is_late = is_late or there >= begin
            if place[source] >= 0:
                inside += g.cost_s[source] if num_off == 1 and not is_late else 0.0
            elif g.target_start[source + 1] - g.target_start[source] == 1:
                inside += least[source]
        least[node] = min(least[node], inside)


@compiled
def _least_leaving(g: Graph, place: I64, take_s: F64, inside: I64, node: int) -> float:
    """Return the least that a set pays which holds the node, for those outside that read it."""
    least = 0.0
    for slot in range(g.target_start[node], g.target_start[node + 1]):
        target = g.targets[slot]
        if inside[g.unit[target]]:
            continue
        if place[target] >= 0:
            return float(g.cost_s[node])
        if g.source_start[target + 1] - g.source_start[target] == 1 and _is_alone(g, target):
            least = max(least, min(g.cost_s[node], take_s[target]))
    return float(least)


@compiled
def _take(g: Graph, place: I64, least: F64, take_s: F64, node: int, v: Interval) -> None:
    """Count a node that must be inside, and its class."""
    unit = g.unit[node]
    if v.inside[unit] == 0:
        v.inside[unit] = 1
        for index in range(g.member_start[unit], g.member_start[unit + 1]):
            member = g.members[index]
            v.total[0] += g.fpga_s[member] - v.enter_s[member]
            v.total[1] += g.size[member]
            v.enter_s[member] = 0.0
    for slot in range(g.source_start[node], g.source_start[node + 1]):
        source = g.sources[slot]
        if v.inside[g.unit[source]]:
            if v.exit_s[source] > 0:
                v.total[0] -= v.exit_s[source]
                v.exit_s[source] = _least_leaving(g, place, take_s, v.inside, source)
                v.total[0] += v.exit_s[source]
        elif v.enter_s[source] == 0:
            v.enter_s[source] = g.cost_s[source] if place[source] >= 0 else least[source]
            v.total[0] += v.enter_s[source]
    v.exit_s[node] = _least_leaving(g, place, take_s, v.inside, node)
    v.total[0] += v.exit_s[node]


@compiled
def best_cover(g: Graph, path: I64) -> tuple[float, I64]:
    """Return the least sum along the path, and for each place the end of the interval that begins there (or -1)."""
    nodes, length = len(g.cpu_s), len(path)
    place, after, before = spans(g, path)
    order = np.argsort(before, kind="mergesort")
    least, take_s = np.zeros(nodes), np.zeros(nodes)
    v = Interval(np.zeros(len(g.can_set), dtype=np.int64), np.zeros(nodes), np.zeros(nodes), np.zeros(2))
    for node in range(nodes - 1, -1, -1):
        take_s[node] = g.fpga_s[node] + _least_leaving(g, place, take_s, v.inside, node)
        if g.can_set[g.unit[node]] == 0:
            take_s[node] = np.inf
    best = np.zeros((length + 1, g.num_sets + 1))
    ends = np.full((length + 1, g.num_sets + 1), -1, dtype=np.int64)
    for begin in range(length - 1, -1, -1):
        for k in range(g.num_sets + 1):
            best[begin, k] = best[begin + 1, k] + g.cpu_s[path[begin]]
        _least_entering(g, place, begin, least)
        v.inside[:] = 0
        v.enter_s[:] = 0
        v.exit_s[:] = 0
        v.total[:] = 0
        is_allowed = True
        for index in range(nodes):
            node = order[index]
            if before[node] < begin or after[node] < begin:
                continue
            if before[node] >= length:
                break
            is_allowed = is_allowed and g.can_set[g.unit[node]] == 1
            if not is_allowed:
                break
            _take(g, place, least, take_s, node, v)
            if v.total[1] > g.capacity * (1 + SLACK):
                break
            end = place[node]
            if end < 0:
                continue
            for k in range(1, g.num_sets + 1):
                if v.total[0] + best[end + 1, k - 1] < best[begin, k]:
                    best[begin, k] = v.total[0] + best[end + 1, k - 1]
                    ends[begin, k] = end
    cover = np.full(length, -1, dtype=np.int64)
    at, k = 0, g.num_sets
    while at < length:
        if ends[at, k] < 0:
            at += 1
        else:
            cover[at] = ends[at, k]
            at, k = ends[at, k] + 1, k - 1
    return float(best[0, g.num_sets]), cover
