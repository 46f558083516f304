"""The dynamic program over intervals of an order of blocks, compiled.

``best[i, k]`` is the least sum for the first ``i`` blocks with ``k`` sets: the last block is on CPUs, or it ends an
interval that is one set. An interval pays for what it reads from before it and for what is read after it.
"""

from __future__ import annotations

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64


@compiled
def best_intervals(cpu_s: F64, fpga_s: F64, size: F64, can_set: I64, read_start: I64, reads: I64, node_start: I64,
                   nodes: I64, cost_s: F64, last: I64, block: I64, num_sets: int, capacity: float,
                   longest: int) -> I64:
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
