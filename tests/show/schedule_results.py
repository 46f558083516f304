"""Schedules to show: pipelines in 1F1B order, blocks on several devices, transfers on links, names that try to escape."""

from __future__ import annotations

from dataclasses import replace

from tests.show.helpers import HOSTILE
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer
from weft.search.schedule.schedule import Schedule, ScheduleResult, replay


def chain(num_devices: int, *, links: bool = False, free_at="end", backward: float = 3.0) -> ScheduleProblem:
    """Return a pipeline: forward 1, backward 3, one unit of memory in between; transfers of 0.5 if there are links."""
    last = 2 * num_devices - 1
    blocks = [Block(name=f"f{index}", devices=(index,), time=1.0, memory=1.0, after=(index - 1,) if index else ())
              for index in range(num_devices)]
    blocks += [Block(name=f"b{last - index}", devices=(last - index,), time=backward, memory=-1.0, after=(index - 1,))
               for index in range(num_devices, last + 1)]
    transfers = tuple(Transfer(source=index, target=index + 1, time=0.5, link=f"l{min(index, last - 1 - index)}")
                      for index in range(last) if index != num_devices - 1) if links else ()
    return ScheduleProblem(device_names=tuple(f"d{index}" for index in range(num_devices)), free_at=free_at,
                           device_memory=(float(num_devices),) * num_devices, blocks=tuple(blocks), transfers=transfers)


def joint() -> ScheduleProblem:
    """Return two devices that begin and end together: ``e`` and ``h`` are on both."""
    return ScheduleProblem(device_names=("d0", "d1"), device_memory=(8.0, None), blocks=(
        Block(name="e", devices=(0, 1), time=1.0), Block(name="f0", devices=(0,), time=1.0, memory=1.0, after=(0,)),
        Block(name="f1", devices=(1,), time=1.0, memory=1.0, after=(1,)),
        Block(name="b1", devices=(1,), time=2.0, memory=-1.0, after=(2,)),
        Block(name="b0", devices=(0,), time=2.0, memory=-1.0, after=(3,)),
        Block(name="h", devices=(0, 1), time=1.0, after=(4,))))


def hostile() -> ScheduleProblem:
    """Return a problem whose devices, blocks and links have hostile names, one of them not even valid Unicode."""
    problem = chain(2, links=True)
    blocks = tuple(replace(block, name=name) for block, name in zip(problem.blocks, HOSTILE[:4], strict=True))
    transfers = tuple(replace(transfer, link=HOSTILE[0]) for transfer in problem.transfers)
    return replace(problem, blocks=blocks, device_names=(HOSTILE[5], "\ud800" + HOSTILE[4]), transfers=transfers)


def one_f_one_b(problem: ScheduleProblem, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule of a chain."""
    orders = []
    for device in range(problem.num_devices):
        forward, backward = problem.resource_tasks[device]
        ahead = min(num_microbatches, problem.num_devices - device)
        order = [(forward, index) for index in range(ahead)]
        for index in range(num_microbatches):
            order.append((backward, index))
            if ahead + index < num_microbatches:
                order.append((forward, ahead + index))
        orders.append(order)
    return replay(problem, num_microbatches, orders)


def in_groups(problem: ScheduleProblem, num_microbatches: int, size: int) -> Schedule:
    """Return the schedule that runs so many micro-batches at a time, block by block, one group after the other."""
    orders = [[(task, index) for first in range(0, num_microbatches, size)
               for task in problem.topological if task in tasks
               for index in range(first, min(first + size, num_microbatches))]
              for tasks in problem.resource_tasks[: problem.num_devices]]
    return replay(problem, num_microbatches, orders)


def result_of(schedule: Schedule, period: float | None = 4.0, number: int | None = 1, **more) -> ScheduleResult:
    """Return the schedule as a search's result."""
    given = {"status": "feasible", "makespan_bound": schedule.makespan / 2, "period_bound": 2.0, "seconds": 0.25}
    return ScheduleResult(schedule=schedule, period=period, period_microbatches=number, **{**given, **more})


def pipelined(num_devices: int, num_microbatches: int, **options) -> ScheduleResult:
    """Return a 1F1B schedule, whose period is 4 without transfers."""
    return result_of(one_f_one_b(chain(num_devices, **options), num_microbatches))
