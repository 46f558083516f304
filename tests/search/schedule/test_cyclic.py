"""Tightening of cyclic orders, against the constraints themselves: they hold at the period, and not below it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from tests.search.schedule.oracle_period import (
    Constraint,
    _edge_constraints,
    _late_circle,
    _order_constraints,
    _smallest,
    copies,
)
from tests.search.schedule.random_problems import random_problem
from weft.search.schedule.cyclic import tighten
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.whole import to_whole


@dataclass(frozen=True)
class Cyclic:
    """A random cyclic order: starts that have it, and its constraints between tasks of K copies."""

    problem: ScheduleProblem
    many: ScheduleProblem
    number: int
    shifts: list[int]
    constraints: list[Constraint]
    starts: np.ndarray
    period: float

    def flat(self, starts: np.ndarray) -> np.ndarray:
        """Return starts [tasks, K] as those of ``many``."""
        size = self.problem.num_blocks
        return np.concatenate([starts[:size].T.ravel(), starts[size:].T.ravel()])


def random_cyclic(seed: int) -> Cyclic | None:
    """Return a random order and random laps; None if no period has them. Starts have them with room to spare."""
    rng = Random(seed)
    problem = random_problem(seed, max_instances=rng.choice([8, 14]), whole_times=seed % 2 == 0).problem
    number = rng.randint(1, 3)
    many = copies(problem, number)
    orders = [rng.sample(tasks, len(tasks)) for tasks in many.resource_tasks]
    shifts = [0] * many.num_tasks
    for task in many.topological:
        shifts[task] = max([rng.randint(0, 2), *(shifts[edge.source] + rng.randint(0, 1) for edge in many.predecessors[task])])
    constraints = [*_order_constraints(many, [order for order in orders if order]), *_edge_constraints(many, shifts)]
    loose = [(source, target, time + 1, laps) for source, target, time, laps in constraints]
    period = _smallest(many.num_tasks, loose, None)
    if period is None:
        return None
    offsets = _potentials(many.num_tasks, loose, period)
    flat = np.asarray([float(offset + period * shift) for offset, shift in zip(offsets, shifts, strict=True)])
    size = problem.num_blocks
    starts = np.concatenate([flat[:size * number].reshape(number, size).T, flat[size * number:].reshape(number, -1).T])
    return Cyclic(problem, many, number, shifts, constraints, starts, float(period))


def _potentials(num_tasks: int, constraints: list[Constraint], period: Fraction) -> list[Fraction]:
    offsets = [Fraction(0)] * num_tasks
    for _ in range(num_tasks + 1):
        for source, target, time, laps in constraints:
            offsets[target] = max(offsets[target], offsets[source] + time - period * laps)
    return offsets


CYCLIC = {seed: item for seed in range(200) if (item := random_cyclic(seed)) is not None}


def test_there_are_enough_orders():
    assert len(CYCLIC) >= 40
    assert {item.number for item in CYCLIC.values()} == {1, 2, 3}
    assert sum(bool(item.problem.linked) for item in CYCLIC.values()) >= 5


@pytest.mark.parametrize("seed", CYCLIC)
def test_the_smallest_period_of_the_same_order(seed):
    item = CYCLIC[seed]
    tight = tighten(item.problem, item.starts, item.period)
    assert tight.starts.shape == item.starts.shape
    offsets = item.flat(tight.starts) - tight.period * np.asarray(item.shifts)
    slack = 1e-9 * max(1.0, tight.period)
    for source, target, time, laps in item.constraints:
        assert offsets[target] >= offsets[source] + float(time) - tight.period * laps - slack
    assert tight.period == pytest.approx(bisected(item), rel=1e-9)


def bisected(item: Cyclic) -> float:
    """Return the smallest period at which the longest paths end, by bisection; it is at least all work in turn."""
    low, high = Fraction(0), Fraction(item.period)
    while high - low > Fraction(item.period) / 10**11:
        middle = (low + high) / 2
        low, high = (low, middle) if _late_circle(item.many.num_tasks, item.constraints, middle) is None else (middle, high)
        low, high = low.limit_denominator(10**15), high.limit_denominator(10**15)
    return float(high)


@pytest.mark.parametrize("seed", [seed for seed in CYCLIC if seed % 2 == 0])
def test_whole_periods(seed):
    """In ticks, the next whole number; starts are whole too."""
    item = CYCLIC[seed]
    whole = to_whole(item.problem)
    assert whole.is_exact
    period = tighten(whole, item.starts, item.period).period
    tight = tighten(whole, item.starts, item.period, whole=True)
    assert tight.period == math.ceil(period - 1e-9)
    assert np.array_equal(tight.starts, np.round(tight.starts))


def test_an_order_that_is_tight_already_is_kept():
    for item in list(CYCLIC.values())[:20]:
        once = tighten(item.problem, item.starts, item.period)
        if once.period > 0 and min(item.problem.task_times) > 0:
            again = tighten(item.problem, once.starts, once.period)
            assert again.period == pytest.approx(once.period)
