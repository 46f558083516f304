"""The shortest makespan by a constraint solver, with memory as events in time: shares no idea with ``oracle``.

Every block takes its memory at its start, and gives it back at its end or, with ``free_at`` ``start``, at its start; the
solver keeps the running sum of these events within each device's memory. Whole-number times only.
"""

from __future__ import annotations

from weft.search.schedule.problem import ScheduleProblem


def min_makespan_cp(problem: ScheduleProblem, num_microbatches: int) -> int | None:
    """Return the shortest makespan, or None where memory admits no schedule."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    times = [int(time) for time in problem.task_times]
    delays = {(edge.source, edge.target): int(edge.delay) for edge in problem.edges}
    horizon = num_microbatches * (sum(times) + sum(delays.values()))
    instances = [(task, index) for task in range(problem.num_tasks) for index in range(num_microbatches)]
    start = {item: model.new_int_var(0, horizon, str(item)) for item in instances}
    for (source, target), delay in delays.items():
        for index in range(num_microbatches):
            model.add(start[target, index] >= start[source, index] + times[source] + delay)
    for tasks in problem.resource_tasks:
        model.add_no_overlap(model.new_fixed_size_interval_var(start[item], times[item[0]], "")
                             for item in instances if item[0] in tasks)
    for device, limit in enumerate(problem.device_memory):
        if limit is not None:
            _keep_within(model, problem, device, limit, start)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, [start[item] + times[item[0]] for item in instances])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), solver.status_name(status)
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None


def _keep_within(model, problem, device, limit, start):
    scale = 4  # the random problems' amounts are quarters
    when, amounts = [], []
    for (task, _), variable in start.items():
        if task < problem.num_blocks and device in problem.blocks[task].devices:
            block = problem.blocks[task]
            late = block.memory < 0 and problem.free_at == "end"
            when.append(variable + int(block.time) if late else variable)
            amounts.append(round(block.memory * scale))
    if when:
        model.add_reservoir_constraint(when, amounts, -10**6, int(limit * scale))
