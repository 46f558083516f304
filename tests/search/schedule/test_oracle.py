"""The oracles against slower ones, and against values that are known."""

from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.allowed import is_allowed
from tests.search.schedule.oracle import end_of, is_feasible, min_makespan, min_makespan_naive, place
from tests.search.schedule.oracle_cp import min_makespan_cp
from tests.search.schedule.oracle_period import gives_back_all, min_period, num_candidates
from tests.search.schedule.random_problems import random_problem
from weft.search.schedule.problem import with_memory


def value(answer):
    return None if answer is None else answer.makespan


@pytest.mark.parametrize("seed", range(30))
def test_against_all_permutations(seed):
    case = random_problem(seed, max_instances=6)
    assert value(min_makespan(case.problem, case.num_microbatches)) == min_makespan_naive(case.problem, case.num_microbatches)


@pytest.mark.parametrize("seed", range(100, 125))
def test_against_a_solver_with_memory_over_time(seed):
    case = random_problem(seed, whole_times=True)
    assert value(min_makespan(case.problem, case.num_microbatches)) == min_makespan_cp(case.problem, case.num_microbatches)


@pytest.mark.parametrize("seed", range(40))
def test_its_schedule_is_allowed_and_as_long_as_it_says(seed):
    case = random_problem(seed)
    answer = min_makespan(case.problem, case.num_microbatches)
    assert is_feasible(case.problem, case.num_microbatches) == (answer is not None)
    if answer:
        starts = place(case.problem, answer.sequence)
        assert len(starts) == case.problem.num_tasks * case.num_microbatches
        assert is_allowed(case.problem, starts)
        assert end_of(case.problem, starts) == answer.makespan


@pytest.mark.parametrize(("name", "memory", "num_microbatches", "makespan"), [
    ("v", 4, 3, 24), ("v", 4, 4, 28), ("v", 1, 2, 32), ("k", 6, 2, 16)])
def test_known_optima(name, memory, num_microbatches, makespan):
    """1F1B of equal stages is optimal: (micro-batches + stages - 1) * 4."""
    assert min_makespan(shape(name, 4, memory=memory), num_microbatches).makespan == makespan


@pytest.mark.parametrize(("name", "num_microbatches", "makespan"), [("v", 8, 11), ("x", 2, 6), ("m", 6, 15), ("nn", 4, 15)])
def test_known_optima_of_inference(name, num_microbatches, makespan):
    assert min_makespan(shape(name, 4, memory=None, training=False), num_microbatches).makespan == makespan


@pytest.mark.parametrize(("memory", "period"), [(3, 4), (2, 8)])
def test_known_periods(memory, period):
    assert min_period(shape("v", 3, memory=memory)).period == period


def test_two_micro_batches_per_period_can_be_shorter():
    """Three stages at memory 2: one per period takes 8 (see above), yet two more micro-batches take 12, 6 each."""
    problem = shape("v", 3, memory=2)
    assert [min_makespan(problem, number).makespan for number in (2, 4)] == [16, 28]


def test_infeasible_memory():
    problem = with_memory(shape("v", 2, memory=1), {"d1": 0.5})
    assert min_makespan(problem, 1) is None
    assert not is_feasible(problem, 1)
    assert min_period(problem) is None


@pytest.mark.parametrize("seed", range(60))
def test_no_period_is_longer_than_schedules_one_after_the_other(seed):
    """A schedule of N micro-batches that ends with empty devices can be repeated: a period of its makespan for N."""
    problem = random_problem(seed).problem
    if gives_back_all(problem) and num_candidates(problem, 1, 1) <= 2000:
        steady, alone = min_period(problem, max_shift=1), min_makespan(problem, 1)
        assert (steady is None) == (alone is None)
        if steady and alone:
            work = max(sum(Fraction(problem.task_times[task]) for task in tasks) for tasks in problem.resource_tasks)
            assert work <= steady.period <= alone.makespan


def test_the_random_problems_are_of_every_kind():
    cases = [random_problem(seed) for seed in range(300)]
    problems = [case.problem for case in cases]
    kinds = {
        "several devices": lambda p: any(len(block.devices) > 1 for block in p.blocks),
        "branches": lambda p: any(len(edges) > 1 for edges in p.successors),
        "limited memory": lambda p: any(limit is not None for limit in p.device_memory),
        "kept memory": lambda p: not gives_back_all(p),
        "freed at the start": lambda p: p.free_at == "start",
        "freed at the end": lambda p: p.free_at == "end",
        "delays": lambda p: any(item.link is None for item in p.transfers),
        "shared links": lambda p: any(len(tasks) > 1 for tasks in p.resource_tasks[p.num_devices:]),
        "both directions": lambda p: any(f"{name[:-1]}-" in p.resource_names for name in p.resource_names if name[-1] == "+"),
        "no time": lambda p: 0.0 in p.task_times,
        "real times": lambda p: any(time != int(time) for time in p.task_times),
    }
    for name, is_kind in kinds.items():
        assert sum(map(is_kind, problems)) >= 10, name
    assert sum(not is_feasible(case.problem, case.num_microbatches) for case in cases) >= 10
    assert len({case.num_microbatches for case in cases}) >= 4
    assert random_problem(7) == random_problem(7)
