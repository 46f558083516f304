"""A simple schedule for any problem: what is ready runs, what releases memory first, with few enough in flight."""

from __future__ import annotations

from weft.base.errors import NoFeasiblePlan
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Instance, Schedule, ScheduleResult, find_problems, replay


def greedy_search(problem: ScheduleProblem, microbatches: int) -> ScheduleResult:
    """Return the list schedule with the most micro-batches in flight that memory admits."""
    for in_flight in range(microbatches, 0, -1):
        schedule = replay(problem, microbatches, list_orders(problem, microbatches, in_flight))
        if not find_problems(schedule):
            return result_of(schedule)
    raise NoFeasiblePlan("memory does not admit one micro-batch after another")


def result_of(schedule: Schedule) -> ScheduleResult:
    work = max(schedule.problem.device_work)
    return ScheduleResult(schedule=schedule, status="feasible", makespan_bound=work * schedule.num_microbatches, period=None,
                          period_microbatches=None, period_bound=None, seconds=0.0, by="greedy")


def list_orders(problem: ScheduleProblem, microbatches: int, in_flight: int) -> list[list[Instance]]:
    """Return device orders made block by block: of those that could start earliest, releases and old ones first."""
    orders: list[list[Instance]] = [[] for _ in problem.device_names]
    free = [0.0] * problem.num_devices
    ends: dict[Instance, float] = {}
    after = [set(block.after) | {item.source for item in problem.transfers if item.target == index}
             for index, block in enumerate(problem.blocks)]
    missing = {(block, index): len(before) for block, before in enumerate(after) for index in range(microbatches)}
    waiting = {item for item, number in missing.items() if number == 0}
    num_left, oldest = [problem.num_blocks] * microbatches, 0
    while waiting:
        while num_left[oldest] == 0:
            oldest += 1
        ready = [item for item in waiting if item[1] < oldest + in_flight]
        block, index = min(ready, key=lambda item: (_start(problem, item, after, ends, free), problem.blocks[item[0]].memory > 0,
                                                    item[1], item[0]))
        end = _start(problem, (block, index), after, ends, free) + problem.blocks[block].time
        for device in problem.blocks[block].devices:
            orders[device].append((block, index))
            free[device] = end
        ends[block, index] = end
        waiting.remove((block, index))
        num_left[index] -= 1
        for later in (later for later, before in enumerate(after) if block in before):
            missing[later, index] -= 1
            if missing[later, index] == 0:
                waiting.add((later, index))
    return orders


def _start(problem: ScheduleProblem, item: Instance, after: list[set[int]], ends: dict[Instance, float],
           free: list[float]) -> float:
    block, index = item
    return max([free[device] for device in problem.blocks[block].devices] + [ends[before, index] for before in after[block]])
