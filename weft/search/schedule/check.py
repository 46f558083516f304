"""The checker of schedules: small, separate from every search, and exact about what is wrong."""

from __future__ import annotations

import itertools

import numpy as np

from weft.base.errors import PlanError
from weft.search.schedule.schedule import TOLERANCE, Schedule


def check_schedule(schedule: Schedule) -> None:
    """Raise ``PlanError`` that lists all that is wrong: starts, order, overlaps, memory."""
    problems = find_problems(schedule)
    if problems:
        raise PlanError("the schedule is not allowed: " + "; ".join(problems[:8])
                        + (f"; ... and {len(problems) - 8} more" if len(problems) > 8 else ""), problems)


def find_problems(schedule: Schedule) -> list[str]:
    """Return everything that is wrong with the schedule, as sentences."""
    problem, starts = schedule.problem, schedule.starts
    if starts.shape[0] != problem.num_tasks or starts.shape[1] < 1:
        return [f"it has starts for {starts.shape[0]} tasks and {starts.shape[1]} micro-batches, "
                f"the problem has {problem.num_tasks} tasks"]
    if not np.isfinite(starts).all():
        return ["some starts are not finite numbers"]
    tolerance = TOLERANCE * max(1e-30, float(schedule.ends.max()))
    return [*_early(schedule, tolerance), *_dependencies(schedule, tolerance), *_overlaps(schedule, tolerance),
            *_memory(schedule)]


def _name(schedule: Schedule, task: int, index: int) -> str:
    return f"{schedule.problem.task_names[task]} of micro-batch {index}"


def _early(schedule: Schedule, tolerance: float) -> list[str]:
    return [f"{_name(schedule, task, index)} starts at {schedule.starts[task, index]:.6g}, before 0"
            for task, index in np.argwhere(schedule.starts < -tolerance).tolist()]


def _dependencies(schedule: Schedule, tolerance: float) -> list[str]:
    problems = []
    ends = schedule.ends
    for edge in schedule.problem.edges:
        late = ends[edge.source] + edge.delay - schedule.starts[edge.target] > tolerance
        problems += [f"{_name(schedule, edge.target, index)} starts at {schedule.starts[edge.target, index]:.6g}, but "
                     f"{_name(schedule, edge.source, index)} ends at {ends[edge.source, index]:.6g}"
                     + (f" and takes {edge.delay:.6g} to arrive" if edge.delay else "")
                     for index in np.flatnonzero(late).tolist()]
    return problems


def _overlaps(schedule: Schedule, tolerance: float) -> list[str]:
    problems = []
    ends = schedule.ends
    for name, order in zip(schedule.problem.resource_names, schedule.orders(), strict=True):
        for before, after in itertools.pairwise(order):
            if ends[before] - schedule.starts[after] > tolerance:
                problems.append(f"{name} runs {_name(schedule, *before)} until {ends[before]:.6g} and "
                                f"{_name(schedule, *after)} from {schedule.starts[after]:.6g}")
    return problems


def _memory(schedule: Schedule) -> list[str]:
    problems = []
    peaks = schedule.peak_memory()
    for name, limit in zip(schedule.problem.device_names, schedule.problem.device_memory, strict=True):
        if limit is not None and exceeds(peaks[name], limit):
            problems.append(f"{name} holds {peaks[name]:.6g} at its fullest, its memory is {limit:.6g}")
    return problems


def exceeds(held: float, limit: float) -> bool:
    """Return whether this is more than the limit, beyond rounding."""
    return held > limit + TOLERANCE * max(1.0, abs(limit))
