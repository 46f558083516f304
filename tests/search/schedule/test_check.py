"""The checker of schedules: every kind of fault by its sentence, and a slow second opinion on seeded faults."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.allowed import is_allowed
from tests.search.schedule.oracle import min_makespan, place
from tests.search.schedule.random_problems import random_problem
from tests.search.schedule.test_schedule import one_f_one_b, two_devices
from weft.base.errors import PlanError
from weft.search.schedule.problem import with_memory
from weft.search.schedule.schedule import Schedule, check_schedule, find_problems, replay


def good() -> Schedule:
    return replay(shape("v", 2, memory=2), 3, one_f_one_b(2, 3))


def moved(task: int, index: int, start: float) -> Schedule:
    schedule = good()
    starts = schedule.starts.copy()
    starts[task, index] = start
    return Schedule(problem=schedule.problem, starts=starts)


FAULTS = [
    (moved(0, 0, -1.0), ["f0 of micro-batch 0 starts at -1, before 0"]),
    (moved(1, 0, 0.5), ["f1 of micro-batch 0 starts at 0.5, but f0 of micro-batch 0 ends at 1"]),
    (moved(0, 0, 0.5), ["f1 of micro-batch 0 starts at 1, but f0 of micro-batch 0 ends at 1.5",
                        "d0 runs f0 of micro-batch 0 until 1.5 and f0 of micro-batch 1 from 1"]),
    (moved(0, 2, float("nan")), ["some starts are not finite numbers"]),
    (moved(0, 2, float("inf")), ["some starts are not finite numbers"]),
    (Schedule(problem=good().problem, starts=np.zeros((3, 2))),
     ["it has starts for 3 tasks and 2 micro-batches, the problem has 4 tasks"]),
    (Schedule(problem=good().problem, starts=np.zeros((4, 0))),
     ["it has starts for 4 tasks and 0 micro-batches, the problem has 4 tasks"]),
    (Schedule(problem=with_memory(good().problem, {"d0": 1.0}), starts=good().starts),
     ["d0 holds 2 at its fullest, its memory is 1"]),
]


def test_a_good_schedule_has_no_problems():
    assert find_problems(good()) == []
    check_schedule(good())


@pytest.mark.parametrize(("schedule", "problems"), FAULTS)
def test_faults_are_named(schedule, problems):
    assert find_problems(schedule) == problems
    with pytest.raises(PlanError, match="the schedule is not allowed: ") as caught:
        check_schedule(schedule)
    assert caught.value.problems == tuple(problems)


def test_a_transfer_that_has_not_arrived():
    late = Schedule(problem=two_devices(), starts=np.asarray([[0.0], [2.0], [3.0]]))
    assert find_problems(late) == ["b of micro-batch 0 starts at 2, but a of micro-batch 0 ends at 1 and takes 2 to arrive"]


def test_two_transfers_at_once_on_a_link():
    starts = np.asarray([[0.0, 1.0], [3.0, 4.0], [5.0, 6.0], [1.0, 2.0]])
    assert find_problems(Schedule(problem=two_devices("wire"), starts=starts)) == [
        "wire+ runs a>b of micro-batch 0 until 3 and a>b of micro-batch 1 from 2"]


def test_rounding_is_forgiven_and_no_more():
    assert find_problems(moved(0, 1, 1.0 - 1e-10)) == []
    assert find_problems(moved(0, 1, 1.0 - 1e-6)) != []


def test_many_problems_are_counted():
    schedule = Schedule(problem=shape("v", 4, memory=None), starts=np.zeros((8, 9)))
    with pytest.raises(PlanError, match=r"; \.\.\. and \d+ more"):
        check_schedule(schedule)


@pytest.mark.parametrize("seed", range(40))
def test_seeded_faults_against_the_description(seed):
    """Optimal schedules with some starts changed: the checker agrees with pairs of tasks and memory over time."""
    case, rng = random_problem(seed), Random(seed)
    answer = min_makespan(case.problem, case.num_microbatches)
    if answer is None:
        return
    exact = place(case.problem, answer.sequence)
    verdicts = []
    for _ in range(12):
        changed = dict(exact)
        for item in rng.sample(sorted(changed), min(len(changed), rng.randint(0, 2))):
            changed[item] += rng.choice([-2, -1, Fraction(-1, 4), Fraction(1, 4), 1, 2, 5])
        if rng.random() < 0.3:
            changed = {item: start * 2 for item, start in changed.items()}
        starts = np.asarray([[float(changed[task, index]) for index in range(case.num_microbatches)]
                             for task in range(case.problem.num_tasks)])
        allowed = not find_problems(Schedule(problem=case.problem, starts=starts))
        verdicts.append(allowed)
        assert allowed == is_allowed(case.problem, changed)
    assert len(verdicts) == 12
