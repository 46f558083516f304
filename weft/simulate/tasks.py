"""Task graphs: what the event engine runs. Durations, resources and who waits for whom, in columns.

A task is *ready* when all its predecessors have ended. Tasks are handled in the order of (ready time, id); the task at
hand reserves all its resources from ``start = max(ready, the time each of them is free)`` until ``start + duration``:

    task 0  2 s on resource 0    0..2
    task 1  1 s on resource 0    2..3   ready at 0 as well, but task 0 has the smaller id
    task 2  5 s, after task 0    2..7   no resource: a pure delay

So a resource serves tasks in the order in which they became ready, and a task with several resources holds all of
them at once. ``weft.simulate.engine`` computes the times; its readable twin, in plain Python, is with the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, PlanError
from weft.model.graph import F64, I64, Bool

U32 = npt.NDArray[np.uint32]
Describe = Callable[[int], str]
"""Says what a task is, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskGraph:
    """Tasks in columns; build one with ``make_task_graph``."""

    durations: F64
    """Seconds, by task."""
    num_resources: int
    resource_start: U32
    """Task ``i`` holds ``resources[resource_start[i]:resource_start[i + 1]]``."""
    resources: U32
    successor_start: U32
    """Task ``i`` is waited for by ``successors[successor_start[i]:successor_start[i + 1]]``, ids ascending."""
    successors: U32
    num_predecessors: U32

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return len(self.durations)

    def num_held(self) -> I64:
        """Return how many resources each task holds."""
        return (self.resource_start[1:] - self.resource_start[:-1]).astype(np.int64)

    def edge_sources(self) -> I64:
        """Return, for each entry of ``successors``, the task it waits for."""
        counts = (self.successor_start[1:] - self.successor_start[:-1]).astype(np.int64)
        return np.repeat(np.arange(self.num_tasks), counts)


def make_task_graph(
    durations: npt.ArrayLike, *, edges: npt.ArrayLike, holds: npt.ArrayLike, num_resources: int
) -> TaskGraph:
    """Return the task graph of rows ``edges`` (task, task that waits for it) and ``holds`` (task, resource).

    Raises ``InputError`` if a duration is negative or not finite, or an id is out of range. Number the tasks so that
    edges go from smaller to larger ids where that is easy: the engine is faster then.

    >>> graph = make_task_graph([2.0, 1.0, 5.0], edges=[(0, 2)], holds=[(0, 0), (1, 0)], num_resources=1)
    >>> graph.num_tasks, graph.successors
    (3, array([2], dtype=uint32))
    """
    seconds = np.array(durations, dtype=np.float64).reshape(-1)
    edge_rows, hold_rows = _rows(edges, "edges"), _rows(holds, "holds")
    check_durations(seconds)
    num_tasks = len(seconds)
    _check_ids(edge_rows, num_tasks, "an edge names task")
    _check_ids(hold_rows[:, 0], num_tasks, "holds names task")
    _check_ids(hold_rows[:, 1], num_resources, "holds names resource")
    successor_start, successors = _group(edge_rows, num_tasks)
    resource_start, resources = _group(hold_rows, num_tasks)
    return TaskGraph(
        durations=seconds, num_resources=num_resources, resource_start=resource_start, resources=resources,
        successor_start=successor_start, successors=successors,
        num_predecessors=np.bincount(edge_rows[:, 1], minlength=num_tasks).astype(np.uint32))


def check_durations(durations: F64) -> None:
    """Raise ``InputError`` if a duration is negative or not finite."""
    bad = np.flatnonzero(~(np.isfinite(durations) & (durations >= 0)))
    if len(bad):
        raise InputError(f"the duration of task {bad[0]} is {durations[bad[0]]}: it must be zero or more and finite")


def is_topological(graph: TaskGraph) -> bool:
    """Return whether every edge goes from a smaller to a larger id."""
    return bool(np.all(graph.edge_sources() < graph.successors))


def name_task(task: int) -> str:
    """Return ``task 7``: what a task is called where nothing better is known."""
    return f"task {task}"


def check_finished(graph: TaskGraph, unfinished: Bool, describe: Describe) -> None:
    """Raise ``PlanError`` with tasks that wait for each other, if some task is ``unfinished``."""
    if unfinished.any():
        cycle = find_cycle(graph, unfinished)
        shown = "; ".join(describe(task) for task in cycle[:10]) + ("; ..." if len(cycle) > 10 else "")
        raise PlanError(f"{int(unfinished.sum())} of {graph.num_tasks} tasks can never run, because these wait for "
                        f"each other in a circle (each for the one before it): {shown}")


def find_cycle(graph: TaskGraph, unfinished: Bool) -> tuple[int, ...]:
    """Return tasks that wait for each other in a circle, each for the one before it, among the ``unfinished``."""
    sources, targets = graph.edge_sources(), graph.successors.astype(np.int64)
    kept = unfinished[sources] & unfinished[targets]
    waits_for = np.full(graph.num_tasks, -1, dtype=np.int64)
    waits_for[targets[kept]] = sources[kept]
    path: list[int] = []
    position: dict[int, int] = {}
    task = int(np.flatnonzero(unfinished)[0])
    while task not in position:
        position[task] = len(path)
        path.append(task)
        task = int(waits_for[task])
    return tuple(reversed(path[position[task]:]))


def _rows(pairs: npt.ArrayLike, what: str) -> I64:
    rows = np.asarray(pairs, dtype=np.int64)
    if rows.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise InputError(f"{what} must be rows of two numbers, not of shape {rows.shape}")
    return rows


def _check_ids(ids: I64, limit: int, what: str) -> None:
    bad = ids[(ids < 0) | (ids >= limit)]
    if bad.size:
        raise InputError(f"{what} {bad.flat[0]}, but there are {limit}")


def _group(rows: I64, num_groups: int) -> tuple[U32, U32]:
    """Return the second column ordered by (first, second), and where each value of the first begins."""
    start = np.zeros(num_groups + 1, dtype=np.uint32)
    start[1:] = np.cumsum(np.bincount(rows[:, 0], minlength=num_groups))
    span = int(rows[:, 1].max()) + 1 if len(rows) else 1
    keys = np.sort(rows[:, 0] * span + rows[:, 1])
    return start, (keys % span).astype(np.uint32)
