"""The least latency along one path of a dnn-partitioning problem, compiled: a bound, and sets to start from.

A set that holds two nodes of a path holds all between them, or it would wait for itself: on the path, sets are
intervals ``i..j``, and each holds every node that something in it leads to and that leads to something in it.
The path takes at least the CPU times of its nodes outside sets and, for each interval, the least load:

    accelerator times of all nodes that must be inside, and of those in their colour classes
    + costs of what comes from, or goes to, the path outside
    + for other neighbours: the cheaper of the cost, and of taking the neighbour in with what that costs in turn

Each interval within the memory, and no more intervals than sets: ``best_cover`` finds the least sum by a dynamic
program. Nothing is counted twice: what a neighbour reads, or what reads it, only where no other way leads to it.

``best_intervals`` is a dynamic program over intervals of a whole order of blocks instead of a path, for sets to start
from. ``best[i, k]`` is the least sum for the first ``i`` blocks with ``k`` sets: the last block is on CPUs, or it ends
an interval that is one set. An interval pays for what it reads from before it and for what is read after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.partition.kernel import SLACK, Graph


class Interval(NamedTuple):
    """What an interval of the path takes, as its end moves on."""

    inside: I64
    """[units] 1 for those that must be inside."""
    is_between: I64
    """[nodes] 1 for those between places of the path; others are inside for their unit."""
    enter_s: F64
    """[nodes] what is counted for a node outside that is read inside."""
    exit_s: F64
    """[nodes] what is counted for a node inside that is read outside."""
    total: F64
    """Load and memory."""


@compiled
def longest_path(g: Graph, weights: F64) -> I64:
    """Return the nodes of the path with the largest sum of weights."""
    best = weights.copy()
    came = np.full(len(best), -1, dtype=np.int64)
    for node in range(len(best)):
        for slot in range(g.target_start[node], g.target_start[node + 1]):
            target = g.targets[slot]
            if best[node] + weights[target] > best[target]:
                best[target] = best[node] + weights[target]
                came[target] = node
    path = np.full(len(best), -1, dtype=np.int64)
    at = len(best) - 1
    path[at] = np.argmax(best)
    while came[path[at]] >= 0:
        path[at - 1] = came[path[at]]
        at -= 1
    return path[at:]


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
def _least_entering(g: Graph, reaches: I64, reached: I64, begin: int, least: F64) -> None:
    """Set for each node the least that a set pays which begins at ``begin`` and reads the node.

    A unit that leads to an earlier place cannot be inside. What a node reads counts where it alone could read it, and
    where no interval that begins here must hold it.
    """
    for node in range(len(least)):
        least[node] = g.cost_s[node]
        if reaches[g.unit[node]] < begin or g.can_set[g.unit[node]] == 0:
            continue
        inside = g.fpga_s[node]
        for slot in range(g.source_start[node], g.source_start[node + 1]):
            source = g.sources[slot]
            num_readers = 0
            for index in range(g.target_start[source], g.target_start[source + 1]):
                num_readers += reaches[g.unit[g.targets[index]]] >= begin
            if num_readers == 1 and reached[g.unit[source]] < begin:
                inside += least[source]
        least[node] = min(least[node], inside)


@compiled
def _least_leaving(g: Graph, place: I64, take_s: F64, inside: I64, node: int, is_between: bool) -> float:
    """Return the least that a set pays which holds the node, for those outside that read it.

    Readers off the path count for nodes between places alone: for others the cost of reading may be counted.
    """
    least = 0.0
    for slot in range(g.target_start[node], g.target_start[node + 1]):
        target = g.targets[slot]
        if inside[g.unit[target]]:
            continue
        if place[target] >= 0:
            return float(g.cost_s[node])
        num_sources = 0
        for index in range(g.source_start[target], g.source_start[target + 1]):
            num_sources += g.unit[g.sources[index]] != g.unit[target]
        if is_between and num_sources == 1:
            least = max(least, min(g.cost_s[node], take_s[target]))
    return float(least)


@compiled
def _count_exit(g: Graph, place: I64, take_s: F64, v: Interval, node: int) -> None:
    v.total[0] -= v.exit_s[node]
    v.exit_s[node] = _least_leaving(g, place, take_s, v.inside, node, v.is_between[node] == 1)
    v.total[0] += v.exit_s[node]


@compiled
def _count_sources(g: Graph, place: I64, least: F64, take_s: F64, v: Interval, node: int) -> None:
    """Count what the node reads; for a node not between places only what comes from the path."""
    for slot in range(g.source_start[node], g.source_start[node + 1]):
        source = g.sources[slot]
        if v.inside[g.unit[source]]:
            _count_exit(g, place, take_s, v, source)
        elif v.enter_s[source] == 0 and (v.is_between[node] == 1 or place[source] >= 0):
            v.enter_s[source] = least[source]
            v.total[0] += v.enter_s[source]


@compiled
def _take(g: Graph, place: I64, least: F64, take_s: F64, v: Interval, node: int) -> None:
    """Count a node between places, and all of its unit."""
    unit = g.unit[node]
    v.is_between[node] = 1
    if v.inside[unit] == 0:
        v.inside[unit] = 1
        for index in range(g.member_start[unit], g.member_start[unit + 1]):
            member = g.members[index]
            v.total[0] += g.fpga_s[member] - v.enter_s[member]
            v.total[1] += g.size[member]
            v.enter_s[member] = 0.0
        for index in range(g.member_start[unit], g.member_start[unit + 1]):
            _count_sources(g, place, least, take_s, v, g.members[index])
            _count_exit(g, place, take_s, v, g.members[index])
        return
    _count_sources(g, place, least, take_s, v, node)
    _count_exit(g, place, take_s, v, node)


@compiled
def _unit_ends(g: Graph, after: I64, before: I64) -> tuple[I64, I64]:
    """Return for each unit the first place any of its nodes leads to, and the last that leads to any."""
    reaches = np.full(len(g.can_set), len(after) + 1, dtype=np.int64)
    reached = np.full(len(g.can_set), -1, dtype=np.int64)
    for node in range(len(after)):
        reaches[g.unit[node]] = min(reaches[g.unit[node]], before[node])
        reached[g.unit[node]] = max(reached[g.unit[node]], after[node])
    return reaches, reached


@compiled
def best_cover(g: Graph, path: I64) -> tuple[float, I64]:
    """Return the least sum along the path, and for each place the end of the interval that begins there (or -1)."""
    nodes, length = len(g.cpu_s), len(path)
    place, after, before = spans(g, path)
    reaches, reached = _unit_ends(g, after, before)
    order = np.argsort(before, kind="mergesort")
    least, take_s = np.zeros(nodes), np.zeros(nodes)
    v = Interval(np.zeros(len(g.can_set), dtype=np.int64), np.zeros(nodes, dtype=np.int64), np.zeros(nodes),
                 np.zeros(nodes), np.zeros(2))
    for node in range(nodes - 1, -1, -1):
        others = 0
        for index in range(g.member_start[g.unit[node]], g.member_start[g.unit[node] + 1]):
            others += g.members[index] != node and after[g.members[index]] >= 0
        if g.can_set[g.unit[node]] == 0:
            take_s[node] = np.inf
        elif others == 0:
            take_s[node] = g.fpga_s[node] + _least_leaving(g, place, take_s, v.inside, node, True)
    best = np.zeros((length + 1, g.num_sets + 1))
    ends = np.full((length + 1, g.num_sets + 1), -1, dtype=np.int64)
    for begin in range(length - 1, -1, -1):
        best[begin] = best[begin + 1] + g.cpu_s[path[begin]]
        _least_entering(g, reaches, reached, begin, least)
        v.inside[:] = 0
        v.is_between[:] = 0
        v.enter_s[:] = 0
        v.exit_s[:] = 0
        v.total[:] = 0
        last = -1
        for index in range(nodes):
            node = order[index]
            if before[node] < begin or after[node] < begin:
                continue
            if before[node] >= length or reaches[g.unit[node]] < begin or g.can_set[g.unit[node]] == 0:
                break
            _take(g, place, least, take_s, v, node)
            if v.total[1] > g.capacity * (1 + SLACK):
                break
            last = max(last, reached[g.unit[node]])
            end = place[node]
            if end < 0 or last > end:
                continue
            for k in range(1, g.num_sets + 1):
                if v.total[0] + best[end + 1, k - 1] < best[begin, k]:
                    best[begin, k] = v.total[0] + best[end + 1, k - 1]
                    ends[begin, k] = end
    return float(best[0, g.num_sets]), _chosen(ends)


@compiled
def _chosen(ends: I64) -> I64:
    cover = np.full(len(ends) - 1, -1, dtype=np.int64)
    at, k = 0, ends.shape[1] - 1
    while at < len(cover):
        if ends[at, k] < 0:
            at += 1
        else:
            cover[at] = ends[at, k]
            at, k = ends[at, k] + 1, k - 1
    return cover


@compiled
def best_intervals(cpu_s: F64, fpga_s: F64, size: F64, can_set: I64, read_start: I64, reads: I64, node_start: I64,
                   nodes: I64, cost_s: F64, last: I64, num_sets: int, capacity: float, longest: int) -> I64:
    """Return the set of every block, 0 for CPUs.

    ``reads`` lists what blocks read from others, ``nodes`` what is in them; ``last`` is the last block that reads a
    node.
    """
    count = len(cpu_s)
    best = np.full((count + 1, num_sets + 1), np.inf)
    came = np.full((count + 1, num_sets + 1), -1, dtype=np.int64)
    best[0, :] = 0.0
    seen = np.full(len(cost_s), -1, dtype=np.int64)
    for end in range(1, count + 1):
        for k in range(num_sets + 1):
            best[end, k] = best[end - 1, k] + cpu_s[end - 1]
            came[end, k] = -1
        time_s, taken, outside, leaving = 0.0, 0.0, 0.0, 0.0
        for begin in range(end - 1, max(-1, end - 1 - longest), -1):
            if can_set[begin] == 0:
                break
            time_s += fpga_s[begin]
            taken += size[begin]
            if taken > capacity * (1 + 1e-12):
                break
            for slot in range(read_start[begin], read_start[begin + 1]):
                node = reads[slot]
                if seen[node] != end:
                    seen[node] = end
                    outside += cost_s[node]
            for slot in range(node_start[begin], node_start[begin + 1]):
                node = nodes[slot]
                if seen[node] == end:  # it is inside from now on
                    outside -= cost_s[node]
                if last[node] >= end:
                    leaving += cost_s[node]
            load = time_s + outside + leaving
            for k in range(1, num_sets + 1):
                if best[begin, k - 1] + load < best[end, k]:
                    best[end, k] = best[begin, k - 1] + load
                    came[end, k] = begin
    where = np.zeros(count, dtype=np.int64)
    end, k = count, num_sets
    while end > 0:
        if came[end, k] < 0:
            end -= 1
        else:
            where[came[end, k] : end] = k
            end = came[end, k]
            k -= 1
    return where
