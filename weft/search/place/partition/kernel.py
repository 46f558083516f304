"""Compiled code for the latency of dnn-partitioning problems: evaluation, annealing over it, and small changes.

A placement gives each unit a set from 1 to K (an accelerator's) or 0 (CPUs). Each set is one task, and so is each
node on a CPU; a task starts when all it reads from other tasks has ended. A circle of tasks has no latency.
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
