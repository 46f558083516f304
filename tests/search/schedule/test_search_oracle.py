"""The search against brute force on random problems of every kind; ``benchmarks/bench_schedule.py`` does more of them."""

from __future__ import annotations

import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.compare import compare, compare_joint
from tests.search.schedule.oracle import min_makespan
from tests.search.schedule.random_problems import random_joint_problem, random_problem
from weft.base.errors import NoFeasiblePlan
from weft.search.schedule.problem import with_memory
from weft.search.schedule.schedule import ScheduleResult
from weft.search.schedule.search import schedule


def search(problem, num_microbatches) -> ScheduleResult:
    return schedule(problem, microbatches=num_microbatches, time_limit=4.0, progress=lambda line: None)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_against_brute_force(seed):
    verdict = compare(random_problem(seed), search)
    assert verdict.complaints == []


@pytest.mark.parametrize("seed", range(40))
def test_pairs_and_copies_against_brute_force(seed):
    """Blocks that may run at once, memory that may leave its device: what is claimed holds."""
    verdict = compare_joint(random_joint_problem(seed), lambda problem, number: schedule(
        problem, microbatches=number, effort=1.0))
    assert verdict.complaints == []


@pytest.mark.parametrize("name", ["v", "x", "m", "nn", "k"])
def test_shapes_of_two_devices(name):
    """Fewer micro-batches than blocks, as many, and tight memory."""
    for memory, number in ((2, 1), (2, 2), (3, 3)):
        problem = shape(name, 2, memory=memory)
        result = search(problem, number)
        assert result.status == "optimal"
        assert result.makespan == min_makespan(problem, number).makespan


@pytest.mark.parametrize(("limits", "device", "needed"), [
    ({"d0": 0.5}, "d0", 1.0), ({"d1": 0.0}, "d1", 1.0), ({"d2": 0.75, "d0": 1.0}, "d2", 1.0)])
def test_the_smallest_memory_is_named(limits, device, needed):
    with pytest.raises(NoFeasiblePlan, match=device) as caught:
        search(with_memory(shape("v", 4, memory=4), limits), 4)
    assert (caught.value.exit_code, caught.value.device, caught.value.needed) == (3, device, needed)
    assert search(with_memory(shape("v", 4, memory=4), {**limits, device: needed}), 4).makespan > 0


def test_memory_that_is_kept_limits_the_number_of_micro_batches():
    """Each micro-batch keeps 1: four fit, the fifth does not, and there is no steady state."""
    problem = shape("v", 1, memory=4)
    keeps = type(problem)(device_names=problem.device_names, device_memory=(4.0,), blocks=problem.blocks[:1])
    result = search(keeps, 4)
    assert (result.makespan, result.period) == (4.0, None)
    with pytest.raises(NoFeasiblePlan, match="d0") as caught:
        search(keeps, 5)
    assert caught.value.needed == 5.0


def test_bounds_where_a_device_gives_back_more_than_it_takes():
    """Backwards in time such a device has more room than its limit; the bound by windows was 24 for an optimum of 21."""
    assert compare(random_problem(5247, max_instances=20), search).complaints == []
