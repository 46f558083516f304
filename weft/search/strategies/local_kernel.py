"""Compiled local search on a strategy graph, with a tree over time that knows the peak of usage in any span.

The tree's node ``p`` covers the times of nodes ``2 p`` and ``2 p + 1``; ``peak[p]`` is the largest usage there, apart
from what was added to whole nodes above it; ``added[p]`` is what was added to the whole of ``p``.
"""

from __future__ import annotations

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.strategies.core import Core
from weft.search.strategies.dual import cost_of, usage_of


@compiled
def make_peaks(usage: F64) -> F64:
    """Return the tree of peaks of a usage over time."""
    size = 1
    while size < len(usage):
        size *= 2
    peak = np.full(2 * size, -np.inf)
    peak[size : size + len(usage)] = usage
    for node in range(size - 1, 0, -1):
        peak[node] = max(peak[2 * node], peak[2 * node + 1])
    return peak


@compiled
def peak_in(peak: F64, added: F64, begin: int, end: int) -> float:
    """Return the largest usage from ``begin`` to before ``end``."""
    left, right = begin + len(added), end - 1 + len(added)
    low, high = peak[left], peak[right]
    if left != right:
        while left >> 1 != right >> 1:
            if left & 1 == 0:
                low = max(low, peak[left + 1])
            if right & 1 == 1:
                high = max(high, peak[right - 1])
            left >>= 1
            right >>= 1
            low += added[left]
            high += added[right]
    low = max(low, high)
    left >>= 1
    while left >= 1:
        low += added[left]
        left >>= 1
    return float(low)


@compiled
def add_to(peak: F64, added: F64, begin: int, end: int, amount: float) -> None:
    """Add an amount to the usage from ``begin`` to before ``end``."""
    size = len(added)
    left, right = begin + size, end - 1 + size
    peak[left] += amount
    if left != right:
        peak[right] += amount
        while left >> 1 != right >> 1:
            if left & 1 == 0:
                peak[left + 1] += amount
                if left + 1 < size:
                    added[left + 1] += amount
            if right & 1 == 1:
                peak[right - 1] += amount
                if right - 1 < size:
                    added[right - 1] += amount
            left >>= 1
            right >>= 1
            peak[left] = max(peak[2 * left], peak[2 * left + 1]) + added[left]
            peak[right] = max(peak[2 * right], peak[2 * right + 1]) + added[right]
    left >>= 1
    while left >= 1:
        peak[left] = max(peak[2 * left], peak[2 * left + 1]) + added[left]
        left >>= 1


@compiled
def fits(core: Core, peak: F64, added: F64, unit: int, old: int, new: int) -> bool:
    """Return whether the unit may change its strategy: nowhere is more used than the limit, or than before."""
    room = core.limit - peak[1]
    for span in range(core.span[unit], core.span[unit + 1]):
        place = core.amount[span]
        more = core.amounts[place + new] - core.amounts[place + old]
        if more > 0 and more > room and peak_in(peak, added, core.begin[span], core.end[span]) + more > core.limit:
            return False
    return True


@compiled
def change(core: Core, peak: F64, added: F64, unit: int, old: int, new: int) -> None:
    """Give the unit another strategy in the tree of peaks."""
    for span in range(core.span[unit], core.span[unit + 1]):
        place = core.amount[span]
        more = core.amounts[place + new] - core.amounts[place + old]
        if more != 0:
            add_to(peak, added, core.begin[span], core.end[span], more)


@compiled
def costs_at(core: Core, x: I64, unit: int, out: F64) -> int:
    """Set ``out`` to the cost of every strategy of the unit with the neighbours as they are; return how many."""
    begin = core.first[unit]
    size = core.first[unit + 1] - begin
    for index in range(size):
        out[index] = core.cost[begin + index]
    for arc in range(core.arc[unit], core.arc[unit + 1]):
        row = core.matrix[core.back[arc]] + x[core.head[arc]] * size
        for index in range(size):
            out[index] += core.matrices[row + index]
    return int(size)


@compiled
def repair(core: Core, x: I64, most: int) -> bool:
    """Change at most so many strategies until the choice fits the limit, at little cost; return whether it does."""
    usage = usage_of(core, x)
    peak = make_peaks(usage)
    added = np.zeros(len(peak) // 2)
    costs = np.empty(np.diff(core.first).max())
    while peak[1] > core.limit:
        most -= 1
        if most < 0:
            return False
        time = 1
        while time < len(added):
            time = 2 * time if peak[2 * time] >= peak[2 * time + 1] else 2 * time + 1
        time -= len(added)
        excess = peak[1] - core.limit
        best, best_unit, best_strategy = np.inf, -1, -1
        for unit in range(len(x)):
            for span in range(core.span[unit], core.span[unit + 1]):
                if not core.begin[span] <= time < core.end[span] or core.amounts[core.amount[span] + x[unit]] == 0:
                    continue
                used = core.amounts[core.amount[span] + x[unit]]
                size = costs_at(core, x, unit, costs)
                for strategy in range(size):
                    less = min(used - core.amounts[core.amount[span] + strategy], excess)
                    if less <= 0:
                        continue
                    more = costs[strategy] - costs[x[unit]]
                    score = more / less if more > 0 else more * less
                    if score < best and fits(core, peak, added, unit, x[unit], strategy):
                        best, best_unit, best_strategy = score, unit, strategy
        if best_unit < 0:
            return False
        change(core, peak, added, best_unit, x[best_unit], best_strategy)
        x[best_unit] = best_strategy
    return True


@compiled
def anneal(core: Core, x: I64, best: I64, steps: int, hot: float, cold: float, seed: int) -> float:
    """Return the least cost on a walk from ``x``, which fits, and leave ``x`` where it ends; ``best`` has that cost.

    A step gives a unit another strategy; one that costs more is taken with a chance that falls with the heat.
    """
    np.random.seed(seed)
    count = len(x)
    peak = make_peaks(usage_of(core, x))
    added = np.zeros(len(peak) // 2)
    now = cost_of(core, x)
    least = now
    best[:] = x
    heat, decay = hot, (cold / hot) ** (1000.0 / max(steps, 1000))
    for step in range(steps):
        if step % 1000 == 999:
            heat *= decay
        unit = np.random.randint(count)
        begin, old = core.first[unit], x[unit]
        size = core.first[unit + 1] - begin
        if size == 1:
            continue
        new = np.random.randint(size - 1)
        new += new >= old
        more = core.cost[begin + new] - core.cost[begin + old]
        for arc in range(core.arc[unit], core.arc[unit + 1]):
            row = core.matrix[core.back[arc]] + x[core.head[arc]] * size
            more += core.matrices[row + new] - core.matrices[row + old]
        if more > 0 and np.random.random() >= np.exp(-more / heat):
            continue
        if not fits(core, peak, added, unit, old, new):
            continue
        if more > 0 and now < least:  # About to leave the best so far: only here is it worth a copy.
            least = now
            best[:] = x
        change(core, peak, added, unit, old, new)
        x[unit] = new
        now += more
    if now < least:
        best[:] = x
    return cost_of(core, best)


@compiled
def complete(core: Core, x: I64) -> None:
    """Give every unit without a strategy (-1) the one that is cheapest with the neighbours that have one."""
    costs = np.empty(np.diff(core.first).max())
    for unit in range(len(x)):
        if x[unit] >= 0:
            continue
        begin = core.first[unit]
        size = core.first[unit + 1] - begin
        costs[:size] = core.cost[begin : begin + size]
        for arc in range(core.arc[unit], core.arc[unit + 1]):
            if x[core.head[arc]] >= 0:
                row = core.matrix[core.back[arc]] + x[core.head[arc]] * size
                costs[:size] += core.matrices[row : row + size]
        x[unit] = costs[:size].argmin()
