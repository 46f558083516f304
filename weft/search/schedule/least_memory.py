"""Whether memory admits a schedule at all, and if not, the smallest memory that would do.

Where every release follows what it releases, and all that is taken is released, N micro-batches fit if one fits alone,
one after the other, and only then: a second one never leaves less on a device. So one micro-batch is enough to decide
it, and to find how much more memory the devices need: a constraint problem over orders only, in which every task takes
one tick. Micro-batches that keep memory, or release what they have not taken, are looked at all together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.base.errors import NoFeasiblePlan
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.schedule.check import exceeds, find_problems
from weft.search.schedule.holds import find_holds
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule, replay
from weft.search.schedule.whole import WholeProblem, to_whole

MAX_TASKS: Final = 600
"""More tasks are not searched together, but in equal groups of micro-batches, one group after the other."""


@dataclass(frozen=True, kw_only=True)
class _Need:
    device: int
    limit: float
    needed: float


def sequential(problem: ScheduleProblem, num_microbatches: int, order: Sequence[int] | None = None) -> Schedule:
    """Return the schedule that runs one micro-batch after the other, tasks in the given (topological) order."""
    place = {task: number for number, task in enumerate(problem.topological if order is None else order)}
    orders = [[(task, index) for index in range(num_microbatches) for task in sorted(tasks, key=place.__getitem__)]
              for tasks in problem.resource_tasks]
    return replay(problem, num_microbatches, orders)


def first_schedule(problem: ScheduleProblem, num_microbatches: int, budget: Budget) -> Schedule:
    """Return some schedule within memory; raise ``NoFeasiblePlan`` that names device and memory if there is none."""
    for order in (problem.topological, _frugal_order(problem)):
        simple = sequential(problem, num_microbatches, order)
        if not find_problems(simple):
            return simple
    is_alike = all(hold.take is not None and hold.release is not None for hold in find_holds(problem))
    copies = 1 if is_alike else max((number for number in range(1, num_microbatches + 1)
                                     if num_microbatches % number == 0 and number * problem.num_tasks <= MAX_TASKS),
                                    default=1)
    found = _least_excess(problem, copies, num_microbatches, budget)
    if found is not None and not find_problems(found[0]):
        return found[0]
    if budget.is_interrupted:
        raise KeyboardInterrupt
    best, is_proven = found if found is not None else (simple, False)
    raise _error(problem, _find_needs(best), is_proven=is_proven and (is_alike or copies == num_microbatches))


def _frugal_order(problem: ScheduleProblem) -> list[int]:
    """Return an order of one micro-batch: releases first, then what takes nothing, then what became ready last."""
    missing = [len(edges) for edges in problem.predecessors]
    ready = [(problem.memory_of(task), task) for task, number in enumerate(missing) if number == 0]
    heap = [(min(0, memory), memory > 0, 0, task) for memory, task in ready]
    heapq.heapify(heap)
    result: list[int] = []
    while heap:
        task = heapq.heappop(heap)[-1]
        result.append(task)
        for edge in problem.successors[task]:
            missing[edge.target] -= 1
            if missing[edge.target] == 0:
                memory = problem.memory_of(edge.target)
                heapq.heappush(heap, (min(0, memory), memory > 0, -len(result), edge.target))
    return result


def _least_excess(problem: ScheduleProblem, copies: int, num_microbatches: int,
                  budget: Budget) -> tuple[Schedule, bool] | None:
    """Return the schedule that needs the least memory beyond the limits, in sum, and whether that is proven."""
    whole = to_whole(replace(problem, blocks=tuple(replace(block, time=1.0) for block in problem.blocks),
                             transfers=tuple(replace(item, time=0.0) for item in problem.transfers)))
    model = cp_model.CpModel()
    horizon = whole.num_tasks * copies * max(whole.times, default=1) + 1
    start = {(task, index): model.new_int_var(0, horizon, "") for task in range(whole.num_tasks)
             for index in range(copies)}
    for index in range(copies):
        for source, target, _ in whole.edges:
            model.add(start[target, index] >= start[source, index] + whole.times[source])
        for task in range(whole.num_tasks):
            if index:
                model.add(start[task, index] >= start[task, index - 1] + whole.times[task])
    for tasks in problem.resource_tasks:
        model.add_no_overlap([model.new_fixed_size_interval_var(start[task, index], whole.times[task], "")
                              for task in tasks for index in range(copies)])
    excess = [_add_memory(model, whole, start, device, copies, horizon) for device in range(problem.num_devices)]
    model.minimize(sum(excess))
    solution = solve(model, budget, effort=max(5.0, budget.effort / 4), stop_at=0)
    if not solution.has_values:
        return None
    starts = np.asarray([[solution.value(start[task, index]) for index in range(copies)]
                         for task in range(whole.num_tasks)], dtype=np.float64)
    one = Schedule(problem=whole.problem, starts=starts)
    return _repeat(problem, one, num_microbatches), solution.status == "optimal" and solution.value(sum(excess)) > 0


def _add_memory(model: cp_model.CpModel, whole: WholeProblem, start: dict[tuple[int, int], cp_model.IntVar],
                device: int, copies: int, horizon: int) -> cp_model.LinearExprT:
    """Return the variable by which the device's limit is exceeded."""
    limit = whole.limits[device]
    holds = [hold for hold in whole.holds if hold.device == device]
    if limit is None or not holds:
        return 0
    total = copies * sum(hold.amount for hold in holds)
    excess = model.new_int_var(0, max(0, total), "")
    intervals, amounts = [], []
    for hold in holds:
        for index in range(copies):
            begin = 0 if hold.take is None else start[hold.take, index]
            end = horizon if hold.release is None else start[hold.release, index] + whole.times[hold.release]
            intervals.append(model.new_interval_var(begin, model.new_int_var(0, horizon, ""), end, ""))
            amounts.append(hold.amount)
    before = copies * sum(hold.amount for hold in holds if hold.take is None)
    model.add_cumulative(intervals, amounts, limit + before + excess)
    return excess


def _repeat(problem: ScheduleProblem, one: Schedule, num_microbatches: int) -> Schedule:
    """Return the schedule of all micro-batches that plays the orders again and again."""
    copies = one.num_microbatches
    orders = [[(task, index + round_ * copies) for round_ in range(num_microbatches // copies)
               for task, index in order] for order in one.orders()]
    return replay(problem, num_microbatches, orders)


def _find_needs(schedule: Schedule) -> list[_Need]:
    """Return the devices whose limit the schedule exceeds, and what it needs there."""
    problem, peaks = schedule.problem, schedule.peak_memory()
    return [_Need(device=device, limit=limit, needed=peaks[problem.device_names[device]])
            for device, limit in enumerate(problem.device_memory)
            if limit is not None and exceeds(peaks[problem.device_names[device]], limit)]


def _error(problem: ScheduleProblem, needs: list[_Need], *, is_proven: bool) -> NoFeasiblePlan:
    worst = max(needs, key=lambda need: (need.needed - need.limit, -need.device))
    ordered = [worst, *(need for need in needs if need is not worst)]
    what = "needs at least" if is_proven else "would do with"
    parts = [f"{problem.device_names[need.device]!r} has memory {need.limit:.12g} and {what} {need.needed:.12g}"
             for need in ordered]
    return NoFeasiblePlan(
        f"{'memory admits no schedule' if is_proven else 'no schedule within memory was found'}: {'; '.join(parts)}. "
        f"Give {'it' if len(parts) == 1 else 'each'} that much, or take less in its blocks (recomputation, smaller "
        f"micro-batches){'' if is_proven else ', or allow more time'}.",
        device=problem.device_names[worst.device], needed=worst.needed)
