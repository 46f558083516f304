"""The cheapest sets of units for one device, by the worth of what is in them.

A set costs the time of its units and ``touch_s`` of each tensor that it parts: one with some of its units (owner and
readers) inside and some outside. Each unit has a worth, a whole number. ``SetSolver`` says what a set of at least so
much worth costs at least, for every worth, by a dynamic program along an order of the units:

    state       of each tensor that is open (some units have been passed, some not): all outside so far, all inside,
                or parted, and then paid                                                              (``_Frontier``)
    cost[s, m]  of the units still to come, the least with worth m or more, when the state is s          (``_sweep``)

Graphs of layers have few open tensors at any place (6 states for ResNet-50, 192 for the operators of BERT), so this
is exact and quick. Where there would be more than ``MOST_STATES``, the open tensor that costs least is forgotten: what
parts it later pays nothing. Then costs are bounds from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.throughput.model import LoadProblem

Bools: TypeAlias = npt.NDArray[np.bool_]
Tensors: TypeAlias = dict[tuple[int, ...], float]
"""What parting the units of a tensor costs, by these units."""

MOST_STATES: Final = 2000
"""Between two units of the order."""
MOST_IN_ALL: Final = 60_000
"""States over all places, about: tables are made in plain Python, some microseconds for each."""
NUM_ORDERS: Final = 12
"""Beginnings from which an order with few open tensors is looked for."""
_OUTSIDE, _INSIDE, _PARTED, _NEW = 0, 1, 2, 3
_NEVER: Final = 1e300


class Steps(NamedTuple):
    """The states between units, for compiled code. State 0 is always that nothing is inside."""

    first: I64
    """[n + 1] where the states before each unit begin."""
    then: I64
    """[states, 2] the state after the unit, if it is outside and if it is inside."""
    pays_s: F64
    """[states, 2] what is paid for tensors by that."""
    time_s: F64
    """[n] of the units, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one sweep finds."""

    cost_s: F64
    """[worth + 1] of the cheapest set with at least so much worth."""
    inside: Bools
    """[sets, units] sets within the limit, each the one of most worth among those that begin at its first unit."""
    inside_s: F64
    """[sets] what these cost."""


class SetSolver:
    """Answers for one device; ``is_exact`` says that no tensor was forgotten."""

    def __init__(self, problem: LoadProblem, device: int) -> None:
        a, tensors = problem.arrays, Tensors()
        for tensor, owner in enumerate(a.owner.tolist()):
            seconds = float(a.touch_s[tensor, device])
            if seconds > 0:
                units = tuple(sorted({owner, *a.readers_of(tensor)}))
                tensors[units] = tensors.get(units, 0.0) + seconds
        position = np.full(problem.num_units, len(a.node_unit))
        np.minimum.at(position, a.node_unit, np.arange(len(a.node_unit)))
        self.order = _best_order(tensors, position)
        frontier = _Frontier(tensors, self.order)
        self.is_exact = frontier.is_exact
        time_s = a.time_s[self.order, device]
        self.steps = Steps(
            first=np.concatenate([[0], np.cumsum([len(item) for item in frontier.then])]).astype(np.int64),
            then=np.concatenate(frontier.then), pays_s=np.concatenate(frontier.pays_s),
            time_s=np.where(np.isfinite(time_s), time_s, _NEVER))
        self.width = max(len(item) for item in frontier.then)

    @property
    def num_states(self) -> int:
        """Return the number of states over all places."""
        return len(self.steps.then)

    def solve(self, worth: I64, most: int, limit: float, num_sets: int) -> Found:
        """Return the least costs up to this worth, and some good sets that cost at most the limit."""
        ordered = worth[self.order]
        is_taken = np.empty((self.num_states, most + 1), dtype=np.bool_)
        cost_s, reached, reached_s = _sweep(self.steps, ordered, most, limit, self.width, is_taken)
        firsts = np.argsort(-reached, kind="stable")[:num_sets]
        firsts = firsts[reached[firsts] > 0]
        inside = np.zeros((len(firsts), len(worth)), dtype=np.bool_)
        for row, start in zip(inside, firsts, strict=True):
            row[self.order] = _follow(self.steps, ordered, is_taken, start, reached[start])
        return Found(cost_s=cost_s, inside=inside, inside_s=reached_s[firsts])


def _best_order(tensors: Tensors, position: I64) -> I64:
    """Return an order of the units with few open tensors: that of the nodes, or one that grows from some unit."""
    count = len(position)
    natural = np.argsort(position, kind="stable")
    orders = [natural]
    for start in natural[np.unique(np.linspace(0, count - 1, NUM_ORDERS).astype(np.int64))].tolist():
        orders.append(_grown(tensors, position, start))
    return min(orders, key=lambda order: _num_states(tensors, order))


def _of_units(tensors: Tensors, count: int) -> list[list[int]]:
    """Return the tensors of each unit, by index."""
    found: list[list[int]] = [[] for _ in range(count)]
    for index, units in enumerate(tensors):
        for unit in units:
            found[unit].append(index)
    return found


def _num_states(tensors: Tensors, order: I64) -> float:
    """Return about how many states an order has: two for each unit passed of which a tensor is open."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    last = np.zeros(len(order), dtype=np.int64)
    opened = np.zeros(len(order) + 1, dtype=np.int64)
    for units in tensors:
        places = place[list(units)]
        np.maximum.at(last, places, places.max())
        opened[places.min()] += 1
        opened[places.max()] -= 1
    units_open = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(units_open, np.arange(len(order)), 1)
    np.add.at(units_open, np.maximum(last, np.arange(len(order))), -1)
    width = np.minimum(np.cumsum(units_open), 1.6 * np.cumsum(opened))
    return float((2.0 ** np.minimum(width, 200.0)).sum())


def _grown(tensors: Tensors, position: I64, start: int) -> I64:
    """Return the order from a unit in which each next one opens the fewest tensors, and closes the most."""
    count, units_of = len(position), list(tensors)
    near = _of_units(tensors, count)
    left = [len(units) for units in units_of]
    is_passed, reached, order = np.zeros(count, dtype=np.bool_), set[int](), list[int]()

    def opened(unit: int) -> tuple[int, int]:
        change = sum((left[tensor] == len(units_of[tensor])) - (left[tensor] == 1) for tensor in near[unit])
        return change, int(position[unit])

    others = iter([start, *np.argsort(position, kind="stable").tolist()])
    while len(order) < count:
        unit = min(reached, key=opened) if reached else next(item for item in others if not is_passed[item])
        reached.discard(unit)
        is_passed[unit] = True
        order.append(unit)
        for tensor in near[unit]:
            left[tensor] -= 1
            reached.update(item for item in units_of[tensor] if not is_passed[item])
    return np.array(order, dtype=np.int64)


class _Frontier:
    """Makes the table of states, unit by unit."""

    def __init__(self, tensors: Tensors, order: I64) -> None:
        self.costs = list(tensors.values())
        self.near = _of_units(tensors, len(order))
        self.left = [len(units) for units in tensors]
        self.is_exact = True
        self.then: list[I64] = []
        self.pays_s: list[F64] = []
        self.open: list[int] = []
        self.states: dict[tuple[int, ...], int] = {(): 0}
        most = max(4, min(MOST_STATES, MOST_IN_ALL // max(1, len(order))))
        for unit in order.tolist():
            self._pass(unit, most)

    def _pass(self, unit: int, most: int) -> None:
        """Go on by a unit; keep at most so many states, or few more."""
        known = {tensor: index for index, tensor in enumerate(self.open)}
        mine = [tensor for tensor in self.near[unit] if tensor in known or self.left[tensor] > 0]
        tensors = [*self.open, *(tensor for tensor in mine if tensor not in known)]
        own = [(index, self.costs[tensor]) for index, tensor in enumerate(tensors) if tensor in set(mine)]
        for tensor in mine:
            self.left[tensor] -= 1
        kept = [index for index, tensor in enumerate(tensors) if self.left[tensor] > 0]
        steps = [self._step(state, len(tensors), own) for state in self.states]
        while True:
            states: dict[tuple[int, ...], int] = {}
            then = [[states.setdefault(tuple(side[index] for index in kept), len(states)) for side, _ in both]
                    for both in steps]
            if len(states) <= most or not kept:
                break
            forgotten = min(kept, key=lambda index: self.costs[tensors[index]])
            kept.remove(forgotten)
            self.left[tensors[forgotten]] = 0
            self.is_exact = False
        self.then.append(np.array(then, dtype=np.int64))
        self.pays_s.append(np.array([[paid for _, paid in both] for both in steps], dtype=np.float64))
        self.open, self.states = [tensors[index] for index in kept], states

    @staticmethod
    def _step(state: Sequence[int], count: int, own: Sequence[tuple[int, float]]) -> list[tuple[list[int], float]]:
        """Return the state, of so many tensors, and what is paid, with the unit outside and inside."""
        both = []
        for side in (_OUTSIDE, _INSIDE):
            now, paid = [*state, *[_NEW] * (count - len(state))], 0.0
            for index, cost in own:
                if now[index] == _NEW:
                    now[index] = side
                elif now[index] not in (_PARTED, side):
                    now[index] = _PARTED
                    paid += cost
            both.append((now, paid))
        return both


@compiled
def _sweep(steps: Steps, worth: I64, most: int, limit: float, width: int, is_taken: Bools) -> tuple[F64, I64, F64]:
    """Return the least cost for every worth; by first unit the most worth of sets within the limit, and its cost.

    ``is_taken`` [states, worth] becomes whether the unit is inside in the cheapest set from there on.
    """
    count = len(worth)
    after = np.full((width, most + 1), _NEVER)
    after[:, 0] = 0.0
    now = np.empty((width, most + 1))
    reached = np.zeros(count, dtype=np.int64)
    reached_s = np.zeros(count)
    for place in range(count - 1, -1, -1):
        begin, amount = steps.first[place], min(worth[place], most)
        for state in range(steps.first[place + 1] - begin):
            row = begin + state
            without, having = after[steps.then[row, 0]], after[steps.then[row, 1]]
            paid, taken = steps.pays_s[row, 0], steps.pays_s[row, 1] + steps.time_s[place]
            for total in range(most + 1):
                left = paid + without[total]
                right = taken + having[max(0, total - amount)]
                is_taken[row, total] = right < left
                now[state, total] = min(left, right)
        having, taken = after[steps.then[begin, 1]], steps.pays_s[begin, 1] + steps.time_s[place]
        for total in range(most, 0, -1):
            seconds = taken + having[max(0, total - amount)]
            if seconds <= limit:
                reached[place], reached_s[place] = total, seconds
                break
        after, now = now, after
    return after[0].copy(), reached, reached_s


@compiled
def _follow(steps: Steps, worth: I64, is_taken: Bools, start: int, amount: int) -> Bools:
    """Return which places of the order are in the cheapest set of so much worth whose first unit is at this place."""
    inside = np.zeros(len(worth), dtype=np.bool_)
    state = 0
    for place in range(start, len(worth)):
        row = steps.first[place] + state
        takes = place == start or is_taken[row, amount]
        if takes:
            inside[place] = True
            amount = max(0, amount - worth[place])
        state = steps.then[row, 1 if takes else 0]
    return inside
