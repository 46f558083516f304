"""Holds: memory as intervals between takes and releases gives the same levels as adding up the blocks."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from benchmarks.schedule_shapes import SHAPES, shape
from tests.search.schedule.oracle import place
from tests.search.schedule.random_problems import random_problem
from tests.search.schedule.random_schedules import random_sequence
from weft.search.schedule.problem import Block, ScheduleProblem
from weft.search.schedule.whole import Hold, balanced_holds, find_ancestors, find_holds


def one_device(*blocks: tuple[float, tuple[int, ...]]) -> ScheduleProblem:
    """Return blocks (memory, after) on one device."""
    return ScheduleProblem(device_names=("d0",), device_memory=(9.0,), blocks=tuple(
        Block(name=f"n{index}", devices=(0,), time=1.0, memory=memory, after=after)
        for index, (memory, after) in enumerate(blocks)))


@pytest.mark.parametrize("seed", range(60))
def test_holds_add_up_to_what_the_blocks_do(seed):
    """In any schedule, when a block starts: what came before it and it takes itself = the holds that are open then."""
    case = random_problem(seed, max_instances=20)
    problem = replace(case.problem, device_memory=(8.0,) * case.problem.num_devices)
    sequence = random_sequence(problem, case.num_microbatches, Random(seed), ignore_memory=True)
    starts = place(problem, sequence)
    holds = find_holds(problem)
    for device in range(problem.num_devices):
        level = Fraction(0)
        for task, index in (item for item in sequence if item[0] in problem.resource_tasks[device]):
            change = Fraction(problem.memory_of(task))
            at = starts[task, index]
            held = sum((_held(problem, hold, at, starts) for hold in holds if hold.device == device), Fraction(0))
            if problem.task_times[task] > 0:
                assert held == level + max(Fraction(0), change)
            level += change


def _held(problem, hold, at, starts) -> Fraction:
    """Return what all micro-batches hold at a time; what is there from the begin counts as 0 until it is released."""
    total = Fraction(0)
    for index in {index for _, index in starts}:
        is_taken = hold.take is None or starts[hold.take, index] <= at
        is_released = hold.release is not None and (
            starts[hold.release, index] + Fraction(problem.task_times[hold.release]) <= at)
        total += Fraction(hold.amount) * (is_taken - is_released - (hold.take is None))
    return total


@pytest.mark.parametrize("seed", range(60))
def test_a_release_depends_on_its_take(seed):
    problem = random_problem(seed).problem
    ancestors = find_ancestors(problem)
    for hold in find_holds(problem):
        assert hold.amount > 0
        assert problem.device_memory[hold.device] is not None
        if hold.take is not None and hold.release is not None:
            assert ancestors[hold.release] >> hold.take & 1
            assert hold.device in problem.task_resources[hold.take]
            assert hold.device in problem.task_resources[hold.release]


def test_short_holds_and_what_is_left_over():
    nested = one_device((2.0, ()), (1.0, (0,)), (-1.0, (1,)), (-2.0, (2,)))
    assert balanced_holds(nested) == {0: [(1, 2, 1.0), (0, 3, 2.0)]}
    split = one_device((3.0, ()), (-1.0, (0,)), (-1.0, (1,)))
    assert find_holds(split) == (Hold(device=0, take=0, release=1, amount=1.0), Hold(device=0, take=0, release=2, amount=1.0),
                                 Hold(device=0, take=0, release=None, amount=1.0))
    assert balanced_holds(split) == {}
    unordered = one_device((1.0, ()), (-1.0, ()))
    assert find_holds(unordered) == (Hold(device=0, take=0, release=None, amount=1.0),
                                     Hold(device=0, take=None, release=1, amount=1.0))


def test_rounding_leaves_nothing_over():
    """0.1 + 0.2 is not quite 0.3."""
    problem = one_device((0.1, ()), (0.2, (0,)), (-0.3, (1,)))
    assert {(take, release) for take, release, _ in balanced_holds(problem)[0]} == {(0, 2), (1, 2)}


def test_no_holds_without_a_limit():
    assert find_holds(shape("v", 4, memory=None)) == ()


@pytest.mark.parametrize("name", SHAPES)
def test_every_forward_is_matched_with_its_backward(name):
    problem = shape(name, 4, memory=4)
    for hold in find_holds(problem):
        take, release = problem.blocks[hold.take], problem.blocks[hold.release]
        assert (take.memory, release.memory, take.devices) == (1.0, -1.0, release.devices)
