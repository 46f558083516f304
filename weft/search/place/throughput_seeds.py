"""Placements to start from: intervals of an order of the units, one for each device, balanced by time and memory."""

from __future__ import annotations

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.throughput_model import LoadProblem, Loads

BISECTIONS = 40


def blocks_in_order(problem: LoadProblem, *, contiguous: bool) -> list[list[int]]:
    """Return the units in blocks, so that any interval of blocks is contiguous; single units where that is not asked.

    Blocks follow the order of the nodes. Units whose nodes depend on each other both ways are one block.
    """
    a, count = problem.arrays, problem.num_units
    position = _positions(a, count)
    if not contiguous:
        return [[int(unit)] for unit in np.lexsort((np.arange(count), position))]
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    reader = np.repeat(np.arange(len(a.node_unit)), np.diff(a.source_start))
    rows, columns = a.node_unit[a.sources], a.node_unit[reader]
    graph = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(count, count))
    num_blocks, label = connected_components(graph, directed=True, connection="strong")
    blocks: list[list[int]] = [[] for _ in range(num_blocks)]
    for unit in range(count):
        blocks[label[unit]].append(unit)
    return [blocks[index] for index in _ordered(num_blocks, label[rows], label[columns],
                                                np.array([position[block].min() for block in blocks]))]


def _positions(a: Loads, count: int) -> F64:
    """Return where each unit stands in the order of the nodes; units without nodes stand beside those they feed."""
    position = np.full(count, np.inf)
    np.minimum.at(position, a.node_unit, np.arange(len(a.node_unit), dtype=np.float64))
    owner = np.repeat(a.owner, np.diff(a.reader_start))
    for _ in range(3):
        near = np.full(count, np.inf)
        np.minimum.at(near, a.readers, position[owner])
        np.minimum.at(near, owner, position[a.readers])
        position = np.where(np.isinf(position), near + 0.5, position)
    return position


def _ordered(count: int, sources: I64, targets: I64, position: F64) -> list[int]:
    """Return the blocks in topological order, earliest position first."""
    import heapq

    follow: list[set[int]] = [set() for _ in range(count)]
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source != target:
            follow[source].add(target)
    waits = np.zeros(count, dtype=np.int64)
    for items in follow:
        for target in items:
            waits[target] += 1
    ready = [(float(position[block]), block) for block in range(count) if waits[block] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, block = heapq.heappop(ready)
        order.append(block)
        for target in sorted(follow[block]):
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(ready, (float(position[target]), target))
    return order


def interval_placement(problem: LoadProblem, blocks: list[list[int]], sequence: list[int]) -> I64 | None:
    """Return the placement by intervals over the devices in this sequence with the least largest time, if any fits."""
    a = problem.arrays
    times = np.array([a.time_s[block].sum(axis=0) for block in blocks])
    sizes = np.array([problem.unit_bytes[block].sum() for block in blocks])
    finite = np.where(np.isfinite(times), times, 0.0)
    low, high = 0.0, float(finite.max(axis=1).sum()) + 1e-300
    best = _packed(times, sizes, a.capacity, sequence, high)
    if best is None:
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _packed(times, sizes, a.capacity, sequence, middle)
        low, high = (middle, high) if found is None else (low, middle)
        best = found if found is not None else best
    device = np.zeros(problem.num_units, dtype=np.int64)
    for block, where in zip(blocks, best, strict=True):
        device[block] = where
    return device


def _packed(times: F64, sizes: F64, capacity: F64, sequence: list[int], limit: float) -> list[int] | None:
    """Return a device for each block with no device's time above the limit, filling one after the other."""
    where: list[int] = []
    turn, time_s, size = 0, 0.0, 0.0
    for block in range(len(times)):
        while turn < len(sequence) and (time_s + times[block, sequence[turn]] > limit
                                        or size + sizes[block] > capacity[sequence[turn]]):
            turn, time_s, size = turn + 1, 0.0, 0.0
        if turn == len(sequence):
            return None
        where.append(sequence[turn])
        time_s += times[block, sequence[turn]]
        size += sizes[block]
    return where


def seeds(problem: LoadProblem) -> list[I64]:
    """Return placements by intervals for a few sequences of the devices, and those on one device; allowed ones only."""
    a = problem.arrays
    total = np.where(np.isfinite(a.time_s), a.time_s, 0.0).sum(axis=0)
    fast = np.argsort(total, kind="stable").tolist()
    orders = [blocks_in_order(problem, contiguous=True)]
    if not problem.contiguous:
        orders.append(blocks_in_order(problem, contiguous=False))
    found = [interval_placement(problem, blocks, sequence) for blocks in orders for sequence in
             (fast, fast[::-1], list(range(problem.num_devices)), fast[1:] + fast[:1])]
    found += [np.full(problem.num_units, device, dtype=np.int64) for device in range(problem.num_devices)]
    kept: list[I64] = []
    for device in found:
        if device is None or any((device == other).all() for other in kept):
            continue
        if np.isfinite(problem.value(device)):
            kept.append(device)
    return sorted(kept, key=problem.value)


def hopeful(problem: LoadProblem) -> list[I64]:
    """Return placements that may hold too much, for a search to repair: intervals, and the largest units first."""
    a = problem.arrays
    sequence = np.argsort(np.where(np.isfinite(a.time_s), a.time_s, 0.0).sum(axis=0), kind="stable").tolist()
    blocks = blocks_in_order(problem, contiguous=problem.contiguous)
    device = np.argmin(a.time_s, axis=1).astype(np.int64)
    times = np.array([a.time_s[block].sum(axis=0) for block in blocks])
    free = a.capacity.copy()
    for unit in np.argsort(-problem.unit_bytes, kind="stable").tolist():
        room = np.where(np.isfinite(a.time_s[unit]), free, -np.inf)
        device[unit] = int(np.argmax(room))
        free[device[unit]] -= problem.unit_bytes[unit]
    high = float(np.where(np.isfinite(times), times, 0.0).max(axis=1).sum())
    limit = high / max(1, problem.num_devices - 1) + 1e-300
    packed = _packed(times, np.zeros(len(blocks)), a.capacity, sequence, limit)
    found = [] if problem.contiguous else [device]
    if packed is not None:
        spread = np.zeros(problem.num_units, dtype=np.int64)
        for block, where in zip(blocks, packed, strict=True):
            spread[block] = where
        found.append(spread)
    return found
