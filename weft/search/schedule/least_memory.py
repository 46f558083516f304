"""Whether memory admits a schedule at all, and if not, the smallest memory that would do.

Where every micro-batch gives back what it takes, N micro-batches fit if one fits alone: they can run one after the
other. So one micro-batch is enough to decide it, and to find how much more memory the devices need: a constraint
problem over orders only, in which every task takes one tick. Micro-batches that keep memory are counted all together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.errors import NoFeasiblePlan
from weft.search.cpsat import Budget, solve
from weft.search.schedule.bounds import grows
from weft.search.schedule.check import find_problems
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule, replay
from weft.search.schedule.whole import WholeProblem, to_whole

MAX_TASKS: Final = 600
"""More tasks of micro-batches that keep memory are not searched together; then one after the other is what is tried."""


@dataclass(frozen=True, kw_only=True)
class _Need:
    device: int
    limit: float
    needed: float


def sequential(problem: ScheduleProblem, num_microbatches: int, order: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule that runs one micro-batch after the other, tasks in the given (topological) order."""
    tasks = problem.topological if order is None else order
    orders = [[(task, index) for index in range(num_microbatches) for task in tasks
               if resource in problem.task_resources[task]] for resource in range(len(problem.resource_names))]
    return replay(problem, num_microbatches, orders)


def first_schedule(problem: ScheduleProblem, num_microbatches: int, budget: Budget) -> Schedule:
    """Return some schedule within memory; raise ``NoFeasiblePlan`` that names device and memory if there is none."""
    simple = sequential(problem, num_microbatches)
    if not find_problems(simple):
        return simple
    keeps = any(grows(problem, device) for device in range(problem.num_devices))
    copies = num_microbatches if keeps and num_microbatches * problem.num_tasks <= MAX_TASKS else 1
    found = _least_excess(problem, copies, num_microbatches, budget)
    if isinstance(found, Schedule):
        return found
    raise _error(problem, found)


def _least_excess(problem: ScheduleProblem, copies: int, num_microbatches: int,
                  budget: Budget) -> Schedule | list[_Need]:
    """Return a schedule within memory, or how much memory the devices need, least in sum."""
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
    assert solution.has_values, "any order is allowed if the excess is large enough"
    starts = np.asarray([[solution.value(start[task, index]) for index in range(copies)]
                         for task in range(whole.num_tasks)], dtype=np.float64)
    return _judge(problem, Schedule(problem=whole.problem, starts=starts), num_microbatches)


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


def _judge(problem: ScheduleProblem, one: Schedule, num_microbatches: int) -> Schedule | list[_Need]:
    """Return the schedule of all micro-batches with these orders if it fits, else what it needs."""
    orders = one.orders()
    copies = one.num_microbatches
    repeated = [[(task, index + round_ * copies) for round_ in range(num_microbatches // copies)
                 for task, index in order] for order in orders]
    schedule = replay(problem, num_microbatches, repeated)
    if not find_problems(schedule):
        return schedule
    peaks = schedule.peak_memory()
    return [_Need(device=device, limit=limit, needed=peaks[problem.device_names[device]])
            for device, limit in enumerate(problem.device_memory)
            if limit is not None and peaks[problem.device_names[device]] > limit * (1 + 1e-9) + 1e-12]


def _error(problem: ScheduleProblem, needs: list[_Need]) -> NoFeasiblePlan:
    worst = max(needs, key=lambda need: (need.needed - need.limit, -need.device))
    ordered = [worst, *(need for need in needs if need is not worst)]
    parts = [f"{problem.device_names[need.device]!r} has memory {need.limit:g} and needs at least {need.needed:.12g}"
             for need in ordered]
    return NoFeasiblePlan(
        f"memory admits no schedule: {'; '.join(parts)}. Give {'it' if len(parts) == 1 else 'each'} that much, "
        "or take less in its blocks (recomputation, smaller micro-batches).",
        device=problem.device_names[worst.device], needed=worst.needed)
