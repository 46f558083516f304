"""Steady states: the smallest periods of the committed problems, their proofs, and patterns that repeat for ever."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.oracle_period import gives_back_all, min_period, num_candidates
from tests.search.schedule.random_problems import random_problem
from tests.search.schedule.test_shapes import PROBLEMS
from weft.search.common.budget import Budget
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.problem import Block, ScheduleProblem, load_problem, with_memory
from weft.search.schedule.schedule import check_schedule
from weft.search.schedule.steady import SteadyState, find_steady_state, variants

PERIODS = {
    "v-train-mem4": (4, 1), "x-train-mem4": (8, 1), "m-train-mem6": (6, 1), "nn-train-mem6": (8, 1), "k-train-mem6": (6, 1),
    "v-infer": (1, 1), "x-infer": (2, 1), "m-infer": (2, 1), "nn-infer": (3, 1), "k-infer": (2, 1),
    "v-train-mem3": (16, 3), "m-train-mem5": (6, 1), "zb-p4": (3, 1), "zbv-p4": (3, 1), "zbv-p4-comm": (3, 1)}
"""(period, micro-batches in it); the bound is met."""
LITTLE_MEMORY = {"m-train-mem4": 6.5, "x-train-mem3": 9.0, "nn-train-mem3": 10.5, "m8-train-mem10": 6.5, "hetero-train-mem8": 17.5}
"""Period per micro-batch, at most."""


@cache
def steady_of(file: str) -> SteadyState:
    steady = find_steady_state(load_problem(PROBLEMS / f"{file}.json"), budget=Budget(effort=10.0))
    assert steady is not None
    return steady


def test_all_problems_are_listed():
    assert sorted([*PERIODS, *LITTLE_MEMORY]) == sorted(path.stem for path in PROBLEMS.glob("*.json"))


@pytest.mark.parametrize("file", PERIODS)
def test_the_periods_of_the_committed_problems(file):
    steady, (period, number) = steady_of(file), PERIODS[file]
    assert steady.period == pytest.approx(period)
    assert steady.num_microbatches == number
    assert steady.is_optimal
    assert steady.bound == pytest.approx(period / number)


@pytest.mark.parametrize("file", LITTLE_MEMORY)
def test_the_periods_of_problems_with_little_memory(file):
    steady = steady_of(file)
    assert steady.bound <= steady.rate <= LITTLE_MEMORY[file] * (1 + 1e-9)


@pytest.mark.parametrize("file", [*PERIODS, *LITTLE_MEMORY])
def test_patterns_repeat(file):
    """Allowed for every number of micro-batches; with one period more everything is one period later."""
    steady = steady_of(file)
    for number in range(1, 13):
        schedule = steady.unroll(number)
        check_schedule(schedule)
        if number > steady.num_microbatches:
            before = schedule.starts[:, : number - steady.num_microbatches]
            assert schedule.starts[:, steady.num_microbatches:] == pytest.approx(before + steady.period)


@pytest.mark.parametrize("file", ["v-train-mem3", "m-train-mem5", "x-train-mem4", "zb-p4"])
def test_variants_have_the_same_rate(file):
    steady = steady_of(file)
    found = list(itertools.islice(variants(steady, budget=Budget(effort=3.0)), 4))
    assert len(found) >= 2
    for other in found:
        assert other.rate == pytest.approx(steady.rate)
        check_schedule(other.unroll(9))


@pytest.mark.parametrize("file", ["x-train-mem4", "m-train-mem6", "nn-train-mem6"])
def test_variants_are_others_each_time(file):
    found = list(itertools.islice(variants(steady_of(file), budget=Budget(effort=3.0)), 8))
    assert len({tuple(other.starts.ravel().round(6)) for other in found}) >= 2


def test_proof_for_one_micro_batch_per_period():
    """Three in flight: every period below 8 is impossible with one micro-batch; with three it is 16 / 3 each."""
    problem = load_problem(PROBLEMS / "v-train-mem3.json")
    steady = find_steady_state(problem, budget=Budget(effort=20.0), max_microbatches=1)
    assert (steady.period, steady.num_microbatches, steady.proven) == (8.0, 1, (1,))
    assert not steady.is_optimal, "the bound is for any number"
    assert steady.bound == pytest.approx(16 / 3)


@pytest.mark.parametrize("seed", range(4000, 4120))
def test_one_per_period_against_all_orders(seed):
    """The oracle tries every order with laps up to 2: no more is needed where there are so few blocks, or it is worse."""
    problem = random_problem(seed, whole_times=True).problem
    if not gives_back_all(problem) or num_candidates(problem, 1, 2) > 1500:
        return
    oracle = min_period(problem, 1, 2)
    steady = find_steady_state(problem, budget=Budget(effort=5.0), max_microbatches=1)
    if oracle is None or oracle.period == 0:
        assert steady is None or oracle is not None
        return
    assert period_bound(problem) <= steady.period <= float(oracle.period) + 1e-9
    check_schedule(steady.unroll(5))
    if steady.proven == (1,) or steady.is_optimal:
        assert steady.period == pytest.approx(float(oracle.period))


def test_the_same_seed_gives_the_same_pattern():
    found = [find_steady_state(shape("x", 3, memory=3), budget=Budget(effort=3.0), seed=5) for _ in range(2)]
    assert found[0].starts.tolist() == found[1].starts.tolist()


def test_memory_that_grows_has_no_steady_state():
    keeps = ScheduleProblem(device_names=("d0",), device_memory=(9.0,),
                            blocks=(Block(name="a", devices=(0,), time=1.0, memory=1.0),))
    assert find_steady_state(keeps, budget=Budget(effort=1.0)) is None


def test_too_little_memory_has_no_steady_state():
    problem = with_memory(shape("v", 2, memory=1), {"d1": 0.5})
    assert find_steady_state(problem, budget=Budget(effort=5.0)) is None


def test_without_time_there_are_named_schedules_and_one_micro_batch_after_the_other():
    for memory, period in ((4, 4.0), (3, 16.0)):
        steady = find_steady_state(shape("v", 4, memory=memory), budget=Budget(effort=0.0))
        assert (steady.period, steady.num_microbatches) == (period, 1)
        check_schedule(steady.unroll(4))
