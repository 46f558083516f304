"""The comparison itself: a right answer draws no complaint, each wrong one does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.compare import compare
from tests.search.schedule.oracle import is_feasible, min_makespan, place
from tests.search.schedule.oracle_period import can_repeat
from tests.search.schedule.random_problems import RandomProblem, random_problem
from weft.base.errors import NoFeasiblePlan
from weft.search.schedule.problem import with_memory
from weft.search.schedule.schedule import Schedule, ScheduleResult


def by_oracle(problem, number, **changes) -> ScheduleResult:
    """Return the oracle's answer as a result of the search, with some fields changed."""
    answer = min_makespan(problem, number)
    if answer is None:
        raise _infeasible(problem, number)
    starts = place(problem, answer.sequence)
    table = np.asarray([[float(starts[task, index]) for index in range(number)] for task in range(problem.num_tasks)])
    repeats = can_repeat(problem)
    result = ScheduleResult(
        schedule=Schedule(problem=problem, starts=table), status="optimal", makespan_bound=float(answer.makespan),
        period=float(answer.makespan) if repeats else None, period_microbatches=number if repeats else None,
        period_bound=max(problem.device_work) if repeats else None, seconds=0.0)
    return replace(result, **changes)


def _infeasible(problem, number, extra=0.0) -> NoFeasiblePlan:
    """Return the error for the first device that is too small even if all later ones are unlimited."""
    for index, device in enumerate(problem.device_names):
        later = dict.fromkeys(problem.device_names[index + 1:])
        needed = next(amount / 8 for amount in range(1000)
                      if is_feasible(with_memory(problem, {**later, device: amount / 8}), number))
        limit = problem.device_memory[index]
        if limit is not None and needed > limit:
            error = NoFeasiblePlan(f"{device} needs {needed + extra:.6g}", device=device)
            error.needed = needed + extra
            return error
    raise AssertionError("no device is too small")


@pytest.mark.parametrize("seed", range(2000, 2025))
def test_the_oracle_has_no_complaint_about_itself(seed):
    assert compare(random_problem(seed), by_oracle).complaints == []


PLAIN = RandomProblem(0, shape("v", 2, memory=2), 3)
LATE = by_oracle(PLAIN.problem, 3).schedule.starts + 1.0


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"makespan_bound": 16.1}, "makespan_bound 16.1 is above the optimum 16.0"),
    ({"makespan_bound": 15.0}, "optimal is claimed for 16.0 with the bound 15.0"),
    ({"schedule": Schedule(problem=PLAIN.problem, starts=LATE)}, "optimal is claimed for 17.0, the optimum is 16.0"),
    ({"schedule": Schedule(problem=PLAIN.problem, starts=LATE * 0.5)}, "makespan .* is below the optimum"),
    ({"schedule": Schedule(problem=PLAIN.problem, starts=LATE[:, :2])}, "another problem"),
    ({"period_bound": 5.4}, "period_bound 5.4 is above .*, 3 one after the other"),
    ({"period_bound": 4.1}, "period_bound 4.1 is above 4.0, a steady state of 1"),
    ({"period": 11.0, "period_bound": 3.0}, "is below the work"),
    ({"period": None}, "no period"),
])
def test_wrong_results_are_noticed(changes, complaint):
    import re

    complaints = compare(PLAIN, lambda problem, number: by_oracle(problem, number, **changes)).complaints
    assert any(re.search(complaint, line) for line in complaints), complaints


@pytest.mark.parametrize(("extra", "complaint"), [(0.5, "works with less than 1.5"), (-0.25, "'d1' has 0.75, 0.75 is named")])
def test_a_wrong_memory_is_noticed(extra, complaint):
    def search(problem, number):
        if not is_feasible(problem, number):
            raise _infeasible(problem, number, extra)
        return by_oracle(problem, number)

    case = RandomProblem(0, with_memory(shape("v", 2, memory=2), {"d1": 0.5}), 2)
    complaints = compare(case, search).complaints
    assert any(complaint in line for line in complaints), complaints


def test_a_wrong_refusal_is_noticed():
    def search(problem, number):
        raise NoFeasiblePlan("no", device="d0")

    assert "said to be infeasible, but 16 is possible" in compare(PLAIN, search).complaints[0]
