"""Schedules: orders played as early as possible, what they hold and how long they take, and their phases."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.oracle import min_makespan, place
from tests.search.schedule.random_problems import random_problem
from weft.base.errors import PlanError
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer
from weft.search.schedule.schedule import Schedule, check_schedule, phases, play, replay


def one_f_one_b(num_devices: int, num_microbatches: int) -> list[list[tuple[int, int]]]:
    """Return the order of 1F1B for shape ``v``: forward is task ``device``, backward ``2 * num_devices - 1 - device``."""
    orders = []
    for device in range(num_devices):
        ahead = min(num_devices - device, num_microbatches)
        order = [(device, index) for index in range(ahead)]
        for index in range(num_microbatches):
            order.append((2 * num_devices - 1 - device, index))
            if ahead + index < num_microbatches:
                order.append((device, ahead + index))
        orders.append(order)
    return orders


def two_devices(link: str | None = None) -> ScheduleProblem:
    """Return a on d0, b on d1 after a transfer of 2, c on both after b."""
    return ScheduleProblem(
        device_names=("d0", "d1"), device_memory=(None, None),
        blocks=(Block(name="a", devices=(0,), time=1.0, memory=2.0), Block(name="b", devices=(1,), time=1.0, after=(0,)),
                Block(name="c", devices=(0, 1), time=1.0, memory=-2.0, after=(1,))),
        transfers=(Transfer(source=0, target=1, time=2.0, link=link),))


@pytest.mark.parametrize("num_devices", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 3, 12])
def test_1f1b_takes_what_the_formula_says(num_devices, num_microbatches):
    problem = shape("v", num_devices, memory=num_devices)
    schedule = replay(problem, num_microbatches, one_f_one_b(num_devices, num_microbatches))
    check_schedule(schedule)
    assert schedule.makespan == 4 * (num_microbatches + num_devices - 1)
    assert schedule.peak_memory() == {f"d{device}": min(num_devices - device, num_microbatches) for device in range(num_devices)}


def test_a_delay_does_not_hold_a_link():
    orders = [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (1, 1), (2, 0), (2, 1)]]
    delayed = replay(two_devices(), 2, orders)
    assert delayed.starts.tolist() == [[0, 1], [3, 4], [5, 6]]
    linked = replay(two_devices("wire"), 2, orders)
    assert linked.starts.tolist() == [[0, 1], [3, 5], [6, 7], [1, 3]]
    assert (delayed.makespan, linked.makespan) == (7, 8)
    assert delayed.peak_memory() == {"d0": 4, "d1": 0}


def test_other_times_and_delays_can_be_given():
    problem = shape("v", 2, memory=None)
    assert play(problem, 1, one_f_one_b(2, 1), times=[2, 2, 1, 1], delays=[0, 1, 3])[:, 0].tolist() == [0, 2, 5, 9]


@pytest.mark.parametrize("seed", range(40))
def test_the_orders_of_an_optimum_give_it_back(seed):
    """Exact starts of an optimal sequence against the replay of its orders, all resources given."""
    case = random_problem(seed)
    answer = min_makespan(case.problem, case.num_microbatches)
    if answer is not None:
        exact = place(case.problem, answer.sequence)
        orders = [[item for item in answer.sequence if item[0] in tasks] for tasks in case.problem.resource_tasks]
        schedule = replay(case.problem, case.num_microbatches, orders)
        check_schedule(schedule)
        for (task, index), start in exact.items():
            assert schedule.starts[task, index] == pytest.approx(float(start), abs=1e-9)
        again = replay(case.problem, case.num_microbatches, schedule.orders())
        assert np.allclose(again.starts, schedule.starts, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_links_without_an_order_serve_what_is_ready_first(seed):
    case = random_problem(seed)
    problem = case.problem
    answer = min_makespan(problem, case.num_microbatches)
    if answer is not None and problem.linked:
        orders = [[item for item in answer.sequence if item[0] in tasks] for tasks in problem.resource_tasks]
        schedule = replay(problem, case.num_microbatches, orders[: problem.num_devices])
        check_schedule(schedule)
        assert schedule.makespan >= float(answer.makespan) - 1e-9
        ready = np.asarray([schedule.ends[transfer.source] for transfer in problem.linked])
        for order in schedule.orders()[problem.num_devices:]:
            times = [ready[task - problem.num_blocks, index] for task, index in order]
            assert times == sorted(times), "first come, first served"


def test_orders_that_wait_for_each_other_are_named():
    problem = shape("v", 2, memory=None)
    with pytest.raises(PlanError, match="wait for each other: d0 waits with b1 of micro-batch 0") as caught:
        replay(problem, 1, [[(3, 0), (0, 0)], [(1, 0), (2, 0)]])
    assert caught.value.problems == ("d0 waits with b1 of micro-batch 0", "d1 waits with f1 of micro-batch 0")


@pytest.mark.parametrize(("order", "message"), [
    ([(0, 0)], "has 1 entries and 1 different tasks, it needs each of its 2"),
    ([(0, 0), (0, 0)], "has 2 entries and 1 different"),
    ([(0, 0), (1, 0)], "has 2 entries and 1 different"),
    ([(0, 0), (3, 1)], "has 2 entries and 1 different"),
    ([(0, 0), (3, -1)], "has 2 entries and 1 different")])
def test_incomplete_orders_are_refused(order, message):
    with pytest.raises(PlanError, match=f"the order of 'd0' {message}"):
        replay(shape("v", 2, memory=None), 1, [order, [(1, 0), (2, 0)]])


def test_phases_of_1f1b():
    """Warm-up and cool-down are what is not one period (4) after the micro-batch before."""
    problem = shape("v", 3, memory=3)
    schedule = replay(problem, 8, one_f_one_b(3, 8))
    result = phases(schedule, 4.0, 1)
    for row, starts in zip(result, schedule.starts, strict=True):
        assert len(row) == 8
        assert row == sorted(row, key=["warm-up", "steady", "cool-down"].index)
        steady = [start for start, phase in zip(starts, row, strict=True) if phase == "steady"]
        assert len(steady) >= 2
        assert np.diff(steady).tolist() == [4.0] * (len(steady) - 1)
    assert result[2].count("steady") == 8, "the last stage alternates from the start"
    assert result[0][0] == "warm-up"


def test_phases_with_several_micro_batches_per_period():
    problem = ScheduleProblem(device_names=("d",), device_memory=(None,), blocks=(Block(name="a", devices=(0,), time=1.0),))
    starts = np.asarray([[0.0, 4.0, 5.0, 7.0, 8.0, 10.0, 11.0, 20.0]])
    result = phases(Schedule(problem=problem, starts=starts), 3.0, 2)
    assert result == [["warm-up"] * 1 + ["steady"] * 6 + ["cool-down"]]


def test_no_steady_phase_where_nothing_repeats():
    problem = ScheduleProblem(device_names=("d",), device_memory=(None,), blocks=(Block(name="a", devices=(0,), time=1.0),))
    for starts in ([0.0], [0.0, 5.0], [0.0, 5.0, 6.0]):
        row = phases(Schedule(problem=problem, starts=np.asarray([starts])), 3.0, 1)[0]
        assert "steady" not in row
        assert len(row) == len(starts)


def test_schedules_start_together_in_order_of_their_ends():
    problem = ScheduleProblem(device_names=("d",), device_memory=(None,),
                              blocks=(Block(name="a", devices=(0,), time=1.0), Block(name="b", devices=(0,), time=0.0)))
    assert Schedule(problem=problem, starts=np.asarray([[0.0], [0.0]])).orders() == [[(1, 0), (0, 0)]]
