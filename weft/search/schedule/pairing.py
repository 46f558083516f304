"""Schedules by rule, with pairs: neighbours in the order of a device that may overlap run at once.

Orders by pattern have the forward and the backward that DualPipe runs at once next to each other (``F0 I1``), as have
those of 1F1B in its steady part. Which neighbours become pairs is greedy, from the first on, by one of a few rules
(``_RULES``): any two; only a block that takes memory followed by one that does not; only the other way round. Pairs
that wait for each other in a circle are parted again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from weft.base.errors import PlanError
from weft.search.schedule.pairs import Pair
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Instance, Schedule, replay

Rule = Callable[[float, float], bool]
_RULES: Final[tuple[Rule, ...]] = (lambda one, other: True, lambda one, other: one > other,
                                   lambda one, other: one < other)
"""Whether neighbours that take so much memory may be a pair."""
_MOST_PARTED: Final = 8
"""Rounds in which pairs that wait for each other are parted. A guess."""


def with_pairs(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with the order of this one, neighbours at once; nothing where no two blocks gain by it."""
    problem, orders = schedule.problem, schedule.orders()[: schedule.problem.num_devices]
    gains = {key: time for key, time in problem.joint.items()
             if time < (problem.task_times[key[0]] + problem.task_times[key[1]]) * (1 - 1e-9)}
    seen: set[tuple[Pair, ...]] = set()
    for rule in _RULES if gains else ():
        pairs = _neighbours(problem, orders, gains, rule)
        for _ in range(_MOST_PARTED):
            if not pairs or tuple(pairs) in seen:
                break
            seen.add(tuple(pairs))
            try:
                yield replay(problem, schedule.num_microbatches, orders, pairs)
            except PlanError as error:
                pairs = _without(problem, pairs, error)
            else:
                break


def _neighbours(problem: ScheduleProblem, orders: list[list[Instance]], gains: dict[tuple[int, int], float],
                rule: Rule) -> list[Pair]:
    places = [{item: place for place, item in enumerate(order)} for order in orders]
    taken: set[Instance] = set()
    pairs: list[Pair] = []
    for device, order in enumerate(orders):
        for one, other in itertools.pairwise(order):
            devices = problem.blocks[one[0]].devices
            if device != devices[0] or not taken.isdisjoint((one, other)) or (one[0], other[0]) not in gains:
                continue
            is_near = all(places[item][other] == places[item][one] + 1 for item in devices)
            if is_near and rule(problem.memory_of(one[0]), problem.memory_of(other[0])):
                taken.update((one, other))
                pairs.append((one, other))
    return pairs


def _without(problem: ScheduleProblem, pairs: list[Pair], error: PlanError) -> list[Pair]:
    """Return the pairs but those for which a device waits."""
    waiting = {line.split(" waits with ")[1] for line in error.problems}
    return [pair for pair in pairs if waiting.isdisjoint(
        f"{problem.task_names[task]} of micro-batch {index}" for task, index in pair)]
