"""Compiled code for the latency of dnn-partitioning problems: evaluation, annealing, and paths.

A placement gives each unit a set from 1 to K (an accelerator's) or 0 (CPUs). Each set is one task, and so is each
node on a CPU; a task starts when all it reads from other tasks has ended. A circle of tasks has no latency.

*Paths*: the least latency along one path is a bound, and its sets are some to start from.

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

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.kernel import accepts, draw

MAX_CLUSTER = 24
TIE = 1e-6
"""Weight of the loads beside the latency, for a direction where it is flat."""
VIOLATION = 2.0
"""Weight of an accelerator's memory taken twice, in latencies."""
SLACK = 1e-12
"""Relative: memory sums may be off by so much."""


class Graph(NamedTuple):
    """Nodes in topological order, by index; units by colour class."""

    cpu_s: F64
    fpga_s: F64
    size: F64
    cost_s: F64
    unit: I64
    target_start: I64
    targets: I64
    source_start: I64
    sources: I64
    member_start: I64
    """[units + 1]"""
    members: I64
    """Nodes by unit."""
    near_start: I64
    """[units + 1]"""
    near: I64
    """Units that an edge joins with the unit."""
    can_set: I64
    """[units] 1 where the unit may be on an accelerator."""
    num_sets: int
    capacity: float


class Scratch(NamedTuple):
    """Room for an evaluation."""

    load: F64
    used: F64
    finish: F64
    """[nodes + sets + 1] tasks: nodes, then sets."""
    ready: F64
    waits: I64
    queue: I64
    head: I64
    """[sets + 1] first node of the set, or -1."""
    next_node: I64
    stamp: I64

    @staticmethod
    def of(g: Graph) -> Scratch:
        """Return room for the graph."""
        nodes, tasks = len(g.cpu_s), len(g.cpu_s) + g.num_sets + 1
        return Scratch(np.zeros(g.num_sets + 1), np.zeros(g.num_sets + 1), np.zeros(tasks), np.zeros(tasks),
                       np.zeros(tasks, dtype=np.int64), np.zeros(tasks, dtype=np.int64),
                       np.zeros(g.num_sets + 1, dtype=np.int64), np.zeros(nodes, dtype=np.int64),
                       np.zeros(g.num_sets + 1, dtype=np.int64))


@compiled
def _add_loads(g: Graph, where: I64, s: Scratch) -> None:
    """Set loads, memory, what tasks wait for, and the lists of the sets' nodes."""
    nodes = len(g.cpu_s)
    s.load[:] = 0
    s.used[:] = 0
    s.waits[:] = 0
    s.ready[:] = 0
    s.head[:] = -1
    s.stamp[:] = -1
    for node in range(nodes):
        here = where[g.unit[node]]
        if here > 0:
            s.load[here] += g.fpga_s[node]
            s.used[here] += g.size[node]
            s.next_node[node] = s.head[here]
            s.head[here] = node
        leaves = False
        for slot in range(g.target_start[node], g.target_start[node + 1]):
            target = g.targets[slot]
            there = where[g.unit[target]]
            if there == here and here > 0:
                continue
            leaves = True
            s.waits[target if there == 0 else nodes + there] += 1
            if there > 0 and s.stamp[there] != node:
                s.stamp[there] = node
                s.load[there] += g.cost_s[node]
        if leaves and here > 0:
            s.load[here] += g.cost_s[node]


@compiled
def _release(g: Graph, where: I64, s: Scratch, node: int, here: int, end: float, tail: int) -> int:
    """Tell the tasks that read the node when it ended; put those that wait no more into the queue."""
    nodes = len(g.cpu_s)
    for slot in range(g.target_start[node], g.target_start[node + 1]):
        target = g.targets[slot]
        there = where[g.unit[target]]
        if there == here and here > 0:
            continue
        task = target if there == 0 else nodes + there
        s.ready[task] = max(s.ready[task], end)
        s.waits[task] -= 1
        if s.waits[task] == 0:
            s.queue[tail] = task
            tail += 1
    return tail


@compiled
def latency(g: Graph, where: I64, s: Scratch) -> float:
    """Return when the last task ends; infinite where tasks wait for each other. Memory is left to the caller."""
    nodes = len(g.cpu_s)
    _add_loads(g, where, s)
    tail = 0
    for node in range(nodes):
        if where[g.unit[node]] == 0 and s.waits[node] == 0:
            s.queue[tail] = node
            tail += 1
    for index in range(1, g.num_sets + 1):
        if s.head[index] >= 0 and s.waits[nodes + index] == 0:
            s.queue[tail] = nodes + index
            tail += 1
    last, done, at = 0.0, 0, 0
    while at < tail:
        task = s.queue[at]
        at += 1
        if task < nodes:
            end = s.ready[task] + g.cpu_s[task]
            s.finish[task] = end
            done += 1
            tail = _release(g, where, s, task, 0, end, tail)
        else:
            here = task - nodes
            end = s.ready[task] + s.load[here]
            s.finish[task] = end
            node = s.head[here]
            while node >= 0:
                done += 1
                tail = _release(g, where, s, node, here, end, tail)
                node = s.next_node[node]
        last = max(last, end)
    return float(last if done == nodes else np.inf)


@compiled
def excess(g: Graph, s: Scratch) -> float:
    """Return how much memory the sets of the last evaluation lack, in parts of accelerators."""
    total = 0.0
    for index in range(1, g.num_sets + 1):
        if s.used[index] > g.capacity * (1 + SLACK):
            total += (s.used[index] - g.capacity) / max(g.capacity, 1.0)
    return float(total)


@compiled
def _near(g: Graph, random: I64, unit: int) -> int:
    num = g.near_start[unit + 1] - g.near_start[unit]
    return int(g.near[g.near_start[unit] + draw(random, num)]) if num else unit


@compiled
def _grow(g: Graph, where: I64, random: I64, cluster: I64, first: int, size: int) -> int:
    """List the first unit and some near it in its set; return how many."""
    cluster[0] = first
    end = 1
    for _ in range(3 * size):
        if end >= size:
            break
        other = _near(g, random, cluster[draw(random, end)])
        is_new = where[other] == where[first]
        for slot in range(end):
            is_new = is_new and cluster[slot] != other
        if is_new:
            cluster[end] = other
            end += 1
    return end


@compiled
def close(g: Graph, where: I64, cluster: I64, end: int, is_in: I64, upwards: bool) -> int:
    """Add to the cluster all in its set that it reads from (or that read from it), however far; return its size."""
    for slot in range(end):
        is_in[cluster[slot]] = 1
    here = where[cluster[0]]
    at = 0
    while at < end:
        unit = cluster[at]
        at += 1
        for index in range(g.member_start[unit], g.member_start[unit + 1]):
            node = g.members[index]
            begin = g.source_start[node] if upwards else g.target_start[node]
            stop = g.source_start[node + 1] if upwards else g.target_start[node + 1]
            for slot in range(begin, stop):
                other = g.unit[g.sources[slot] if upwards else g.targets[slot]]
                if where[other] == here and is_in[other] == 0:
                    is_in[other] = 1
                    cluster[end] = other
                    end += 1
    for slot in range(end):
        is_in[cluster[slot]] = 0
    return end


@compiled
def _move(g: Graph, where: I64, random: I64, cluster: I64, taken: I64, is_in: I64) -> int:
    """Change the placement in ``where``; return how many units of ``cluster`` changed (0: none).

    Kinds: a cluster goes to the set of a neighbour, to the CPUs or anywhere, alone or with all of its set before or
    after it; all of a set goes to CPUs or another set; the part of a set after a random node becomes a set of its own.
    """
    nodes = len(g.cpu_s)
    kind = draw(random, 20)
    first = g.unit[draw(random, nodes)]
    here = where[first]
    if kind >= 3:
        size = 1
        while size < MAX_CLUSTER and draw(random, 5) < 3:
            size += 1
        end = _grow(g, where, random, cluster, first, size if kind >= 10 else min(size, 3))
        if kind < 10:
            end = close(g, where, cluster, end, is_in, kind % 2 == 0)
        there = where[_near(g, random, cluster[draw(random, end)])]
        if there == here or kind % 5 == 3:
            there = draw(random, g.num_sets + 1)
    else:
        if here == 0:
            return 0
        there = draw(random, g.num_sets + 1) if kind == 0 else where[_near(g, random, first)]
        cut = 0
        if kind == 2:
            cut = draw(random, nodes)
            there = 0
            taken[:] = 0
            for unit in range(len(where)):
                taken[where[unit]] = 1
            for index in range(1, g.num_sets + 1):
                if taken[index] == 0:
                    there = index
        end = 0
        for node in range(cut, nodes):
            if where[g.unit[node]] == here and (end == 0 or cluster[end - 1] != g.unit[node]):
                cluster[end] = g.unit[node]
                end += 1
    if there == here:
        return 0
    for slot in range(end):
        if there > 0 and g.can_set[cluster[slot]] == 0:
            return 0
    for slot in range(end):
        where[cluster[slot]] = there
    return end


@compiled
def anneal(g: Graph, where: I64, s: Scratch, steps: int, hot: float, cold: float, seed: int) -> tuple[I64, float]:
    """Return the best allowed placement on the way and its latency (infinite if there was none).

    ``where`` is where it starts and, afterwards, where it ended: another run can go on from there. The temperature
    falls from ``hot`` to ``cold``, both in seconds.
    """
    trial = where.copy()
    value = latency(g, where, s)
    scale = value if value < np.inf else g.cpu_s.sum()
    now = value + TIE * s.load.sum() + VIOLATION * scale * excess(g, s)
    best, best_value = where.copy(), value if excess(g, s) == 0 else np.inf
    random = np.array([seed * 7919 + 12345], dtype=np.int64)
    cluster = np.empty(len(g.cpu_s), dtype=np.int64)
    is_in = np.zeros(len(where), dtype=np.int64)
    taken = np.zeros(g.num_sets + 1, dtype=np.int64)
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(1, steps // 50))
    for step in range(steps):
        if step % 50 == 49:
            temperature *= cooling
        num = _move(g, trial, random, cluster, taken, is_in)
        if num == 0:
            continue
        value = latency(g, trial, s)
        lacks = excess(g, s)
        new = value + TIE * s.load.sum() + VIOLATION * scale * lacks
        if accepts(random, now, new, temperature):
            now = new
            for slot in range(num):
                where[cluster[slot]] = trial[cluster[slot]]
            if lacks == 0 and value < best_value * (1 - 1e-12):
                best_value = value
                best[:] = where
        else:
            for slot in range(num):
                trial[cluster[slot]] = where[cluster[slot]]
    return best, best_value


# ---- paths ----------------------------------------------------------------------------------------------------------


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
