"""Schedules by simple rules: allowed whenever there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.schedule_shapes import SHAPES, shape
from tests.search.schedule.random_problems import random_problem
from weft.search.common.budget import Budget
from weft.search.schedule.first import greedy_schedules, rules, sequential
from weft.search.schedule.problem import with_memory
from weft.search.schedule.schedule import check_schedule


def greedy(problem, num_microbatches, in_flight, effort=9.0):
    return list(greedy_schedules(problem, num_microbatches, in_flight, Budget(effort=effort)))


@pytest.mark.parametrize("seed", range(6000, 6080))
def test_what_comes_back_is_allowed(seed):
    case = random_problem(seed, max_instances=60)
    limits = (1, 2, case.num_microbatches)
    for schedule in greedy(case.problem, case.num_microbatches, limits):
        check_schedule(schedule)
        assert schedule.num_microbatches == case.num_microbatches
    free = replace(case.problem, device_memory=(None,) * case.problem.num_devices)
    assert len(greedy(free, case.num_microbatches, limits)) == 3 * len(rules(free)), "without limits nothing stops a rule"


@pytest.mark.parametrize("name", SHAPES)
def test_some_rule_finds_its_way_through_every_shape(name):
    """One at a time is as long as micro-batches one after the other; more at a time make it shorter."""
    problem = shape(name, 4, memory=4)
    alone = [schedule.makespan for schedule in greedy(problem, 9, (1,))]
    together = [schedule.makespan for schedule in greedy(problem, 9, (2, 4))]
    assert min(alone) == 9 * max(problem.longest_paths()[task] + problem.task_times[task] for task in range(problem.num_tasks))
    assert min(together) < min(alone) <= sequential(problem, 9).makespan


def test_known_makespans():
    """Nothing in the way: inference fills the pipeline, nearest the end first is 1F1B."""
    assert {item.makespan for item in greedy(shape("v", 4, memory=None, training=False), 8, (8,))} == {11}
    assert min(item.makespan for item in greedy(shape("v", 4, memory=4), 8, (4,))) == 44


def test_a_deadlock_gives_nothing():
    assert greedy(with_memory(shape("v", 4, memory=4), {"d2": 0.5}), 4, (1, 2, 4)) == []


def test_nothing_without_time():
    assert greedy(shape("v", 4, memory=4), 4, (1, 2), effort=0.0) == []
