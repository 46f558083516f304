"""The latency objective of dnn-partitioning problems: sets for accelerators, everything else on CPUs.

Starts come from a dynamic program over intervals of topological orders (``interval_sets``); annealing with exact
evaluation improves them; CP-SAT improves further or proves (``partition_latency_exact``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.partition_latency_kernel import Graph
from weft.search.place.partition_problem import PartitionProblem
from weft.search.place.throughput_model import csr, inverse

MAX_INTERVAL = 400
"""Blocks in one interval at most, where there are many: the dynamic program takes time for each."""


def latency_graph(problem: PartitionProblem) -> Graph:
    """Return the problem for compiled code: nodes in topological order."""
    order = problem.order
    position = np.empty(problem.num_nodes, dtype=np.int64)
    position[order] = np.arange(problem.num_nodes)
    targets: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    unit = problem.unit_of_node
    near: list[dict[int, None]] = [{} for _ in range(problem.num_units)]
    for source, target in problem.edges.tolist():
        targets[position[source]].append(int(position[target]))
        if unit[source] != unit[target]:
            near[unit[source]][int(unit[target])] = None
            near[unit[target]][int(unit[source])] = None
    start, items = csr([sorted(entry) for entry in targets])
    near_start, near_items = csr([list(entry) for entry in near])
    can_set = np.ones(problem.num_units, dtype=np.int64)
    np.minimum.at(can_set, unit, problem.is_supported.astype(np.int64))
    unit_size = np.bincount(unit, weights=problem.size, minlength=problem.num_units)
    can_set[unit_size > problem.capacity * (1 + 1e-12)] = 0
    source_start, sources = inverse(start, items, problem.num_nodes)
    member_start, members = inverse(np.arange(problem.num_nodes + 1, dtype=np.int64), unit[order], problem.num_units)
    return Graph(cpu_s=problem.cpu_s[order], fpga_s=problem.fpga_s[order], size=problem.size[order],
                 cost_s=problem.cost_s[order], unit=unit[order], target_start=start, targets=items,
                 source_start=source_start, sources=sources, member_start=member_start, members=members,
                 near_start=near_start, near=near_items, can_set=can_set, num_sets=problem.num_accelerators,
                 capacity=problem.capacity)


def block_orders(g: Graph) -> list[list[list[int]]]:
    """Return orders of blocks of units of which any interval is contiguous: by index, depth first, and by level."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    count = len(g.can_set)
    source = np.repeat(np.arange(len(g.cpu_s)), np.diff(g.target_start))
    rows, columns = g.unit[source], g.unit[g.targets]
    graph = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(count, count))
    num_blocks, label = connected_components(graph, directed=True, connection="strong")
    blocks: list[list[int]] = [[] for _ in range(num_blocks)]
    for unit in range(count):
        blocks[label[unit]].append(unit)
    follow: list[set[int]] = [set() for _ in range(num_blocks)]
    for one, other in zip(label[rows].tolist(), label[columns].tolist(), strict=True):
        if one != other:
            follow[one].add(other)
    first = np.full(num_blocks, len(g.cpu_s))
    np.minimum.at(first, label[g.unit], np.arange(len(g.cpu_s)))
    listed = [sorted(items) for items in follow]
    return [[blocks[index] for index in order] for order in
            (_topological(listed, first.tolist(), by_depth=False), _topological(listed, first.tolist(), by_depth=True))]


def _topological(follow: Sequence[Sequence[int]], position: Sequence[int], *, by_depth: bool) -> list[int]:
    """Return a topological order: the earliest position first, or the latest made ready first.

    Depth first, sources wait until something that reads them is next: they go right before it.
    """
    count = len(follow)
    waits = [0] * count
    before: list[list[int]] = [[] for _ in range(count)]
    for block, items in enumerate(follow):
        for target in items:
            waits[target] += 1
            before[target].append(block)
    is_source = [wait == 0 for wait in waits]
    order: list[int] = []
    is_done = [False] * count
    if not by_depth:
        ready = [(position[block], block) for block in range(count) if waits[block] == 0]
        heapq.heapify(ready)
        while ready:
            _, block = heapq.heappop(ready)
            order.append(block)
            for target in follow[block]:
                waits[target] -= 1
                if waits[target] == 0:
                    heapq.heappush(ready, (position[target], target))
        return order
    inner = [sum(not is_source[item] for item in before[block]) for block in range(count)]
    stack = [block for block in sorted(range(count), key=lambda item: -position[item])
             if not is_source[block] and inner[block] == 0]
    while stack:
        block = stack.pop()
        for item in before[block]:
            if is_source[item] and not is_done[item]:
                is_done[item] = True
                order.append(item)
        is_done[block] = True
        order.append(block)
        for target in sorted(follow[block], key=lambda item: -position[item]):
            inner[target] -= 1
            if inner[target] == 0:
                stack.append(target)
    return [*order, *(block for block in range(count) if not is_done[block])]


def interval_sets(g: Graph, blocks: Sequence[Sequence[int]]) -> I64:
    """Return the sets by intervals of blocks with the least sum of loads and of CPU times in between."""
    from weft.search.place.partition_interval_kernel import best_intervals

    count = len(blocks)
    block_of_unit = np.zeros(len(g.can_set), dtype=np.int64)
    for index, units in enumerate(blocks):
        block_of_unit[list(units)] = index
    block = block_of_unit[g.unit]
    cpu_s, fpga_s, size = (np.bincount(block, weights=items, minlength=count).astype(np.float64)
                           for items in (g.cpu_s, g.fpga_s, g.size))
    can_set = np.ones(count, dtype=np.int64)
    np.minimum.at(can_set, block_of_unit, g.can_set)
    source = np.repeat(np.arange(len(g.cpu_s)), np.diff(g.target_start))
    last = block.copy()
    np.maximum.at(last, source, block[g.targets])
    order = np.argsort(block, kind="stable")
    starts = best_intervals(cpu_s, fpga_s, size, can_set, *_reads_by_block(g, block, count),
                            np.searchsorted(block[order], np.arange(count + 1)).astype(np.int64),
                            order.astype(np.int64), g.cost_s, last, block, g.num_sets, g.capacity, MAX_INTERVAL)
    return np.asarray(starts[block_of_unit], dtype=np.int64)


def _reads_by_block(g: Graph, block: I64, count: int) -> tuple[I64, I64]:
    """Return the nodes of other blocks that each block reads, each once."""
    reads: list[dict[int, None]] = [{} for _ in range(count)]
    for node in range(len(g.cpu_s)):
        for target in g.targets[g.target_start[node] : g.target_start[node + 1]].tolist():
            if block[target] != block[node]:
                reads[block[target]][node] = None
    return csr([list(items) for items in reads])


def loads_of_sets(problem: PartitionProblem, where: I64) -> F64:
    """Return the load of every set of a placement (sets 1 and up by unit, 0 for CPUs), first the first set's."""
    node_set = where[problem.unit_of_node]
    loads = np.bincount(node_set, weights=problem.fpga_s, minlength=problem.num_accelerators + 1)
    paid = {(int(node), int(there)) for source, target in problem.edges.tolist() if node_set[source] != node_set[target]
            for node, there in ((source, node_set[source]), (source, node_set[target])) if there > 0}
    for node, there in paid:
        loads[there] += problem.cost_s[node]
    return np.asarray(loads[1:], dtype=np.float64)
