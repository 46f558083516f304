"""Blocks that run at once: which ones do, and the least work that is left.

Two blocks of an overlap that start together are a pair: both end after the overlap's time. So starts say which blocks
are pairs (``find_pairs``). In any schedule a block is in one pair at most, so with x(a, b) of them per micro-batch

    work of a device  >=  sum of times - max sum of (time(a) + time(b) - joint(a, b)) * x(a, b)
                          where   sum over b of x(a, b) <= 1  for every block a,   x >= 0                  (least_work)

This linear program is a fractional matching; it is half of an assignment of every block to itself or to one that it
overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from weft.model.graph import F64
from weft.search.schedule.problem import Number, ScheduleProblem

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two (block, micro-batch) that run at once."""


def find_pairs(problem: ScheduleProblem, starts: F64, tolerance: float) -> tuple[Pair, ...]:
    """Return the pairs by start, the blocks of each as in its overlap; blocks that take no time need no pair."""
    found = []
    for item in problem.overlaps:
        one, other = item.blocks
        if not problem.task_times[one] or not problem.task_times[other]:
            continue
        order = np.argsort(starts[other], kind="stable")
        late = starts[other][order]
        places = np.searchsorted(late, starts[one] - tolerance)
        for index in np.flatnonzero(places < len(late)).tolist():
            if late[places[index]] <= starts[one, index] + tolerance:
                found.append((float(starts[one, index]), ((one, index), (other, int(order[places[index]])))))
    taken: set[tuple[int, int]] = set()
    pairs = []
    for _, pair in sorted(found):
        if taken.isdisjoint(pair):
            taken.update(pair)
            pairs.append(pair)
    return tuple(pairs)


def least_work(problem: ScheduleProblem) -> tuple[float, ...]:
    """Return for each resource the least busy time of one micro-batch, on average over any number of them."""
    return least_sums(problem, problem.task_times, problem.joint)


def least_sums(problem: ScheduleProblem, times: Sequence[Number],
               joint: Mapping[tuple[int, int], Number]) -> tuple[float, ...]:
    """Return what ``least_work`` does, with other times."""
    saved = [0.0] * len(problem.resource_names)
    for devices in sorted({problem.blocks[item.blocks[0]].devices for item in problem.overlaps}):
        most = _largest_gain({item.blocks: times[item.blocks[0]] + times[item.blocks[1]] - joint[item.blocks]
                              for item in problem.overlaps if problem.blocks[item.blocks[0]].devices == devices})
        for device in devices:
            saved[device] += most
    return tuple(sum(times[task] for task in tasks) - gain
                 for tasks, gain in zip(problem.resource_tasks, saved, strict=True))


def _largest_gain(gains: dict[tuple[int, int], float]) -> float:
    """Return the most that is gained by fractional pairs."""
    from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

    largest = max(gains.values())
    if largest <= 0:
        return 0.0
    number = {block: index for index, block in enumerate(sorted({block for pair in gains for block in pair}))}
    scale = (1 << 40) / (largest * (len(number) + 1))
    assignment = SimpleLinearSumAssignment()
    for index in number.values():
        assignment.add_arc_with_cost(index, index, 0)
    for (one, other), gain in gains.items():
        cost = -math.ceil(max(0.0, gain) * scale)
        assignment.add_arc_with_cost(number[one], number[other], cost)
        assignment.add_arc_with_cost(number[other], number[one], cost)
    status = assignment.solve()
    assert status == assignment.OPTIMAL, "every block may be assigned to itself"
    chosen = {(block, other) for block, place in number.items() for other, at in number.items()
              if assignment.right_mate(place) == at}
    return sum(gain / 2 for pair, gain in gains.items() for item in (pair, pair[::-1]) if item in chosen)
