"""Walks: annealing and large steps in rounds, from the best choice known and from what the bound's messages suggest.

Compiled large steps: the best strategies of many units at once, all others as they are.

Units are chosen so that the edges among them form a forest; then their best strategies follow from the leaves to the
roots, by the least cost of what hangs below each strategy of a unit. Usage counts at given prices.

Compiled local search on a strategy graph, with a tree over time that knows the peak of usage in any span.

The tree's node ``p`` covers the times of nodes ``2 p`` and ``2 p + 1``; ``peak[p]`` is the largest usage there, apart
from what was added to whole nodes above it; ``added[p]`` is what was added to the whole of ``p``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.strategies.core import Core
from weft.search.strategies.dual import cost_of, priced, usage_of
from weft.search.strategies.tuning import TUNING


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


# ---- small steps, compiled -------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A choice that fits."""

    cost: float
    x: I64


class Walker:
    """A walk on a core. Every round is a function of what it is given and the seed."""

    def __init__(self, core: Core, *, seed: int) -> None:
        self._core = core
        self._random = np.random.default_rng(seed)
        self._round = 0
        self._x: I64 = np.zeros(0, dtype=np.int64)
        self._hot = 1.0
        size = len(core.cost) + len(core.base) + len(core.head) + len(core.matrices) // 64
        self._tries = min(max(TUNING.looked_at // (size + 1), 10), 300)

    def suggest(self, x: I64, price: F64, *, best: float, heat: float, part: float) -> Found | None:
        """Return the choice that a suggestion leads to; None if it does not fit or is far off."""
        x = x.copy()
        if not repair(self._core, x, 4 * len(x)):
            return None
        if np.isfinite(best) and cost_of(self._core, x) - best > (TUNING.worth_walking - 1.0) * abs(best):
            return None
        return self._descend(x, price, heat, 0.01 * heat, part)

    def walk(self, start: I64, price: F64, *, heat: float, part: float) -> Found:
        """Return the best choice of a round of the walk, which begins at ``start`` where the last one has ended.

        ``part`` of a round's work is done.
        """
        if self._round % TUNING.rounds_per_walk == 0:
            self._x = start.copy()
            self._hot = heat * 10.0 ** self._random.uniform(-1.0, 1.0)
        hot = self._hot * 0.01 ** (self._round % TUNING.rounds_per_walk / TUNING.rounds_per_walk)
        self._round += 1
        return self._descend(self._x, price, hot, hot * 0.01 ** (1 / TUNING.rounds_per_walk), part)

    def _descend(self, x: I64, price: F64, hot: float, cold: float, part: float) -> Found:
        """Return the best choice near a walk of small steps, which moves ``x``, with large steps from there."""
        found = np.empty_like(x)
        anneal(self._core, x, found, int(part * min(TUNING.steps, 1000 * len(x))), hot, cold, self._seed())
        most = int(min(10.0 ** self._random.uniform(0.5, 3.5), len(x)))
        return Found(improve(self._core, found, price, most, int(part * self._tries) + 3, self._seed()), found)

    def _seed(self) -> int:
        return int(self._random.integers(2**31))


# ---- large steps, compiled -------------------------------------------------------------------------------------------


MAX_REPAIRS: Final = TUNING.max_repairs


@compiled
def choose_forest(core: Core, most: int, order: I64, parent_arc: I64) -> int:
    """Set ``order`` to units that form a forest, every one after its parent; return how many.

    ``parent_arc`` becomes the arc to the parent, -1 for roots, -2 for units that are not in. They are gathered around
    units drawn at random.
    """
    count = len(parent_arc)
    parent_arc[:] = -2
    tree = np.full(count, -1)
    waiting = np.empty(count + len(core.head), dtype=np.int64)
    num_chosen, num_tries = 0, 0
    while num_chosen < most and num_tries < 4 * most:
        num_tries += 1
        root = np.random.randint(count)
        begin, end = 0, 1
        waiting[0] = root
        while begin < end and num_chosen < most:
            pick = np.random.randint(begin, min(end, begin + 8))
            unit = waiting[pick]
            waiting[pick] = waiting[begin]
            begin += 1
            if parent_arc[unit] != -2 or not _may_join(core, unit, root, tree):
                continue
            tree[unit] = root
            order[num_chosen] = unit
            num_chosen += 1
            for arc in range(core.arc[unit], core.arc[unit + 1]):
                other = core.head[arc]
                if tree[other] != -1 and parent_arc[unit] == -2 and other != unit:
                    parent_arc[unit] = arc
                elif tree[other] == -1 and end < len(waiting):
                    waiting[end] = other
                    end += 1
            if parent_arc[unit] == -2:
                parent_arc[unit] = -1
    return num_chosen


@compiled
def _may_join(core: Core, unit: int, root: int, tree: I64) -> bool:
    """Return whether at most one neighbour is in the forest, and that one in the tree that grows now."""
    num_inside = 0
    for arc in range(core.arc[unit], core.arc[unit + 1]):
        if tree[core.head[arc]] != -1:
            num_inside += 1
            if num_inside > 1 or tree[core.head[arc]] != root:
                return False
    return True


@compiled
def solve_forest(core: Core, theta: F64, x: I64, order: I64, num_chosen: int, parent_arc: I64) -> None:
    """Give the chosen units the strategies that together cost least, by ``theta`` and the edges' costs."""
    total = 0
    place = np.empty(len(x), dtype=np.int64)
    for index in range(num_chosen):
        place[order[index]] = total
        total += core.first[order[index] + 1] - core.first[order[index]]
    value = np.empty(total)
    for index in range(num_chosen):
        _outside(core, theta, x, order[index], parent_arc, value, place[order[index]])
    for index in range(num_chosen - 1, -1, -1):
        unit = order[index]
        if parent_arc[unit] >= 0:
            _to_parent(core, unit, parent_arc[unit], value, place)
    for index in range(num_chosen):
        unit = order[index]
        size = core.first[unit + 1] - core.first[unit]
        here = value[place[unit] : place[unit] + size]
        if parent_arc[unit] >= 0:
            row = core.matrix[core.back[parent_arc[unit]]] + x[core.head[parent_arc[unit]]] * size
            x[unit] = (here + core.matrices[row : row + size]).argmin()
        else:
            x[unit] = here.argmin()


@compiled
def _outside(core: Core, theta: F64, x: I64, unit: int, parent_arc: I64, value: F64, place: int) -> None:
    """Set the unit's values to its own costs and those with neighbours that keep their strategy."""
    begin = core.first[unit]
    size = core.first[unit + 1] - begin
    value[place : place + size] = theta[begin : begin + size]
    for arc in range(core.arc[unit], core.arc[unit + 1]):
        if parent_arc[core.head[arc]] == -2:
            row = core.matrix[core.back[arc]] + x[core.head[arc]] * size
            for index in range(size):
                value[place + index] += core.matrices[row + index]


@compiled
def _to_parent(core: Core, unit: int, arc: int, value: F64, place: I64) -> None:
    """Add to the values of the unit's parent what the unit costs at best."""
    parent = core.head[arc]
    size, width = core.first[unit + 1] - core.first[unit], core.first[parent + 1] - core.first[parent]
    least = np.full(width, np.inf)
    row = core.matrix[arc]
    for index in range(size):
        here = value[place[unit] + index]
        for column in range(width):
            least[column] = min(least[column], here + core.matrices[row + column])
        row += width
    for column in range(width):
        value[place[parent] + column] += least[column]


@compiled
def improve(core: Core, x: I64, price: F64, most: int, tries: int, seed: int) -> float:
    """Return the cost of ``x``, which fits, after attempts to better it by large steps; it fits still."""
    np.random.seed(seed)
    count = len(x)
    order, parent_arc = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    theta, scaled = np.empty(len(core.cost)), np.empty(len(price))
    now = cost_of(core, x)
    for _ in range(tries):
        num_chosen = choose_forest(core, min(most, count), order, parent_arc)
        factor = 2.0 * np.random.random()
        for _ in range(4 if price.any() else 1):  # Dearer usage if the step does not fit.
            scaled[:] = factor * price
            priced(core, scaled, theta)
            trial = x.copy()
            solve_forest(core, theta, trial, order, num_chosen, parent_arc)
            if cost_of(core, trial) > now:
                break
            is_fitting = (len(price) == 0 or usage_of(core, trial).max() <= core.limit
                          or repair(core, trial, MAX_REPAIRS))
            cost = cost_of(core, trial)
            if is_fitting and cost <= now:
                x[:] = trial
                now = cost
                break
            factor = 2.0 * factor + 0.1
    return now
