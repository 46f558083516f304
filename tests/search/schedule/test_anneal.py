"""Annealed cyclic orders: allowed at every memory, never below the bound, the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from benchmarks.tight_problems import tight_problem
from weft.search.common.budget import Budget
from weft.search.schedule.anneal import Annealer
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.first import first_schedule
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import check_schedule
from weft.search.schedule.steady import SteadyState, make_steady


def annealed(problem: ScheduleProblem, number: int, effort: float, seed: int = 0) -> SteadyState | None:
    """Anneal from one micro-batch after the other."""
    alone, bound = first_schedule(problem, 1, Budget(effort=5.0)), period_bound(problem)
    begin = (alone.starts / alone.makespan + np.arange(number)) / number
    places = Annealer(problem, bound, seed).run(begin, effort, Budget(effort=effort))
    return None if places is None else make_steady(problem, places, 1.0, bound)


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_with_little_memory(seed):
    problem = tight_problem(seed)
    for number in (1, 3):
        steady = annealed(problem, number, 0.1)
        assert steady is not None
        assert steady.num_microbatches == number
        assert period_bound(problem) * (1 - 1e-9) <= steady.rate <= sum(problem.task_times)
        assert steady.starts.max() < 200 * steady.period, "micro-batches begin in the first lap"
        check_schedule(steady.unroll(12))


@pytest.mark.parametrize(("name", "memory", "number", "rate"), [("v", 3, 3, 16 / 3), ("nn", 3, 2, 10.5), ("m", 4, 4, 6.5)])
def test_periods_of_several_micro_batches(name, memory, number, rate):
    assert annealed(shape(name, 4, memory=memory), number, 0.3).rate <= rate * (1 + 1e-9)


def test_the_same_seed_gives_the_same_order():
    first, again, other = (annealed(shape("x", 4, memory=3), 2, 0.1, seed) for seed in (3, 3, 4))
    assert first.starts.tolist() == again.starts.tolist() != other.starts.tolist()


def test_nothing_without_effort():
    assert annealed(shape("v", 4, memory=3), 1, 0.0) is None
