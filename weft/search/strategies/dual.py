"""The bound of a core while it rises, and what it says about strategies.

Compiled lower bounds of strategy graphs: sequential message passing with prices on usage.

With a price per time, usage is a cost of strategies, and what is left is a sum of costs of single units and of pairs.
A sweep goes through the units in one direction. At a unit it adds up its cost and the messages of all its arcs; the
minimum goes to the bound, and the rest is shared among the arcs ahead, from which the neighbours ahead get the minimum
over this unit's strategies. For any messages from ahead this is a valid bound: what a unit keeps for itself is not
negative, and everything handed over is a minimum (Kolmogorov 2006, sequential tree-reweighted message passing).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.strategies.core import Compact, Core
from weft.search.strategies.tuning import TUNING


class Dual:
    """Messages, prices and bound of a core. Costs here are those of the core, without its constant."""

    def __init__(self, compact: Compact, before: Dual | None = None) -> None:
        core = compact.core
        self.compact = compact
        self.messages: F64 = np.zeros(int(core.message[-1]))
        self.price: F64 = np.zeros(len(core.base))
        self.reach: F64 = np.full(len(core.cost), -np.inf)
        """A bound of all choices with the strategy."""
        self.x: I64 = np.zeros(compact.num_units, dtype=np.int64)
        self._state: F64 = np.array([-np.inf, 0.0, 0.0, np.inf, 0.0])
        self._history: list[tuple[float, float]] = []
        if before is not None:
            self._take_over(before)
        self._direction: F64 = np.zeros(len(core.base))
        self.best_price: F64 = self.price.copy()
        """Those of the best bound."""
        self._best_messages: F64 = self.messages.copy()

    @property
    def bound(self) -> float:
        """Return the best bound so far."""
        return float(self._state[0])

    @property
    def is_stalled(self) -> bool:
        """Return whether going on promises little."""
        bound, hope, _, best, sweeps = self._state.tolist()
        gap = best - bound if np.isfinite(best) else 1e-3 * abs(bound)
        before = [old for count, old in self._history if count <= sweeps - TUNING.sweeps]
        return bool(before) and bound - before[-1] < TUNING.least_rise * gap and 0 < hope < TUNING.least_hope * gap

    def advance(self, sweeps: int, *, best: float) -> None:
        """Raise the bound by some sweeps, towards the least cost known."""
        self._state[3] = best
        ascend(self.compact.core, self._state, self.price, self._direction, self.messages, self.best_price,
               self._best_messages, self.reach, self.x, sweeps)
        self._history.append((float(self._state[4]), self.bound))

    def _take_over(self, before: Dual) -> None:
        """Begin with prices and messages of a larger core of the same units."""
        old, new = before.compact, self.compact
        place = np.searchsorted(old.times, new.times)
        self.price[:] = before.best_price[place]
        self._state[1] = before._state[1]
        number = {unit: index for index, unit in enumerate(old.unit)}
        arcs = {(index, int(old.core.head[arc])): arc for index in range(old.num_units)
                for arc in range(old.core.arc[index], old.core.arc[index + 1])}
        for index, unit in enumerate(new.unit):
            at = np.searchsorted(old.kept[number[unit]], new.kept[index])
            for arc in range(new.core.arc[index], new.core.arc[index + 1]):
                source = arcs.get((number[unit], number[new.unit[new.core.head[arc]]]))
                if source is not None:
                    begin = new.core.message[arc]
                    self.messages[begin : begin + len(at)] = before.messages[old.core.message[source] + at]


# ---- compiled --------------------------------------------------------------------------------------------------------


PATIENCE: Final = TUNING.patience
MOST_SWEEPS: Final = TUNING.most_sweeps
TOO_FAR: Final = TUNING.too_far
MEMORY: Final = TUNING.memory
SOFTNESS: Final = TUNING.softness


@compiled
def priced(core: Core, price: F64, theta: F64) -> float:
    """Set ``theta`` to the strategies' cost with usage at these prices; return the cost of the usage of the core's base
    less that of the limit."""
    times = len(price)
    total = np.zeros(times + 1)
    fixed = 0.0
    for time in range(times):
        total[time + 1] = total[time] + price[time]
        fixed += price[time] * (core.base[time] - core.limit)
    for unit in range(len(core.first) - 1):
        begin, end = core.first[unit], core.first[unit + 1]
        theta[begin:end] = core.cost[begin:end]
        for span in range(core.span[unit], core.span[unit + 1]):
            weight = total[core.end[span]] - total[core.begin[span]]
            if weight > 0:
                place = core.amount[span]
                for index in range(end - begin):
                    theta[begin + index] += weight * core.amounts[place + index]
    return fixed


@compiled
def sweep(core: Core, theta: F64, messages: F64, is_forward: bool, x: I64, above: F64) -> float:
    """Return the bound of one sweep, which updates the messages; ``x`` becomes the choice that the sweep suggests.

    ``above`` becomes, per strategy, how much more the messages say a choice with it costs than the best without.
    """
    count = len(core.first) - 1
    widest = 0
    for unit in range(count):
        widest = max(widest, core.first[unit + 1] - core.first[unit])
    here, seen, out = np.empty(widest), np.empty(widest), np.empty(widest)
    bound = 0.0
    for step in range(count):
        unit = step if is_forward else count - 1 - step
        begin = core.first[unit]
        size = core.first[unit + 1] - begin
        here[:size] = theta[begin : begin + size]
        seen[:size] = here[:size]
        num_ahead = 0
        for arc in range(core.arc[unit], core.arc[unit + 1]):
            other = core.head[arc]
            place = core.message[arc]
            is_ahead = (other > unit) == is_forward
            row = core.matrix[core.back[arc]] + x[other] * size
            num_ahead += is_ahead
            for index in range(size):
                here[index] += messages[place + index]
            if is_ahead:
                for index in range(size):
                    seen[index] += messages[place + index]
            else:
                for index in range(size):
                    seen[index] += core.matrices[row + index]
        least = here[:size].min()
        x[unit] = seen[:size].argmin()
        bound += least
        num_arcs = core.arc[unit + 1] - core.arc[unit]
        share = 1.0 / max(num_ahead, num_arcs - num_ahead, 1)
        for index in range(size):
            above[begin + index] = here[index] - least
            here[index] = (here[index] - least) * share
        for arc in range(core.arc[unit], core.arc[unit + 1]):
            if (core.head[arc] > unit) == is_forward:
                bound += _send(core, arc, size, here, messages, out)
    return bound


@compiled
def _send(core: Core, arc: int, size: int, here: F64, messages: F64, out: F64) -> float:
    """Send along an arc what a share of ``here`` means for the neighbour; return what is in common to all of it."""
    place, back = core.message[arc], core.back[arc]
    target = core.message[back]
    width = core.message[back + 1] - target
    row = core.matrix[arc]
    out[:width] = np.inf
    for index in range(size):
        value = here[index] - messages[place + index]
        for column in range(width):
            out[column] = min(out[column], value + core.matrices[row + column])
        row += width
    least = out[:width].min()
    for column in range(width):
        messages[target + column] = out[column] - least
    return float(least)


@compiled
def ascend(core: Core, state: F64, price: F64, direction: F64, messages: F64, best_price: F64, best_messages: F64,
           reach: F64, x: I64, sweeps: int) -> None:
    """Raise the bound by about so many sweeps there and back, and move prices between them.

    ``state``: the best bound, by how much it is hoped to rise, steps since it rose, the least cost known (infinite if
    none), sweeps so far. ``reach`` becomes per strategy a bound of all choices with it, ``x`` the choice that the last
    sweep suggests.
    """
    theta, above = np.empty(len(core.cost)), np.empty(len(core.cost))
    last = state[4] + sweeps
    while state[4] < last:
        bound = _settle(core, price, theta, messages, x, above, reach, state)
        if state[1] <= 0:
            state[1] = max(0.2 * abs(bound), 1e-300)
        state[2] += 1
        if bound > state[0]:
            if bound > state[0] + 0.02 * state[1]:
                state[1] *= 1.1 if state[0] > -np.inf else 1.0
                state[2] = 0
            state[0] = bound
            best_price[:] = price
            best_messages[:] = messages
        if state[0] >= state[3]:
            return
        if state[2] > PATIENCE or bound < state[0] - TOO_FAR * state[1]:
            state[1] *= 0.6
            state[2] = 0
            price[:] = best_price
            messages[:] = best_messages
            direction[:] = 0.0
        elif len(price):
            heat = SOFTNESS * state[1] / (len(core.first) - 1)
            _step(core, price, direction, above, heat, min(state[0] + state[1] - bound, 3 * state[1]))


@compiled
def _settle(core: Core, price: F64, theta: F64, messages: F64, x: I64, above: F64, reach: F64, state: F64) -> float:
    """Return the bound after sweeps there and back, repeated while it rises by some part of the hope."""
    fixed = priced(core, price, theta)
    bound = -np.inf
    for _ in range(MOST_SWEEPS):
        low = fixed + sweep(core, theta, messages, True, x, above)
        before, bound = bound, fixed + sweep(core, theta, messages, False, x, above)
        for index in range(len(reach)):
            reach[index] = max(reach[index], low + above[index])
        state[4] += 1
        if bound - before < 0.02 * state[1]:
            break
    return bound


@compiled
def _step(core: Core, price: F64, direction: F64, above: F64, heat: float, length: float) -> None:
    """Move prices along the excess of usage, averaged over the last steps, to where the bound may rise by ``length``.

    The usage is that of a blend of strategies, each the more weight the less a choice with it costs beyond the best:
    that of a single choice jumps back and forth between far ends.
    """
    usage = _blend(core, above, heat)
    is_new = not direction.any()
    long, short = 0.0, 0.0
    for time in range(len(price)):
        excess = usage[time] / core.limit - 1.0
        direction[time] = excess if is_new else MEMORY * direction[time] + (1.0 - MEMORY) * excess
        if price[time] > 0 or excess > 0:
            long += excess * excess
        if price[time] > 0 or direction[time] > 0:
            short += direction[time] * direction[time]
    square = max(long, short)
    if square > 0:
        for time in range(len(price)):
            price[time] = max(0.0, price[time] + length / core.limit / square * direction[time])


@compiled
def _blend(core: Core, above: F64, heat: float) -> F64:
    """Return the usage over time if every unit takes each strategy in part, by how much it costs beyond the best."""
    change = np.zeros(len(core.base) + 1)
    for unit in range(len(core.first) - 1):
        if core.span[unit] == core.span[unit + 1]:
            continue
        weight = np.exp(-above[core.first[unit] : core.first[unit + 1]] / heat)
        weight /= weight.sum()
        for span in range(core.span[unit], core.span[unit + 1]):
            amount = 0.0
            for index in range(len(weight)):
                amount += weight[index] * core.amounts[core.amount[span] + index]
            change[core.begin[span]] += amount
            change[core.end[span]] -= amount
    return core.base + np.cumsum(change)[: len(core.base)]


@compiled
def cost_of(core: Core, x: I64) -> float:
    """Return the cost of a choice."""
    total = 0.0
    for unit in range(len(x)):
        total += core.cost[core.first[unit] + x[unit]]
        for arc in range(core.arc[unit], core.arc[unit + 1]):
            other = core.head[arc]
            if other > unit:
                width = core.first[other + 1] - core.first[other]
                total += core.matrices[core.matrix[arc] + x[unit] * width + x[other]]
    return total


@compiled
def usage_of(core: Core, x: I64) -> F64:
    """Return the usage at every time of a choice."""
    change = np.zeros(len(core.base) + 1)
    for unit in range(len(x)):
        for span in range(core.span[unit], core.span[unit + 1]):
            amount = core.amounts[core.amount[span] + x[unit]]
            change[core.begin[span]] += amount
            change[core.end[span]] -= amount
    return core.base + np.cumsum(change)[: len(core.base)]
