"""The event engine, compiled: one event per task, no allocation while it runs.

The rules are those of ``weft.simulate.tasks``; tests hold the same in plain Python. Ready tasks lie in a binary heap
of (ready time, id). Two things make it fast:

- The task at hand stays at the heap's root until the first of its successors becomes ready and takes its place: one
  sift instead of two.
- *Inline* tasks never enter the heap: they are handled together with their only predecessor, since nothing can come
  between. These are delays without resources, and tasks such as transfers on a link that is fed by one device only:
  their resources serve only such tasks, whose predecessors all hold one resource in common. That resource serves its
  tasks one after the other, so the transfers become ready in the order in which they are handled. The exception, a
  predecessor of zero duration (two transfers ready at the same instant, to be handled by id), is seen while running;
  then the run starts over with every task in the heap. Inline handling needs ids in topological order, without which a
  task may become ready after tasks of its own ready time and larger id were handled.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weft.base.compiled import compiled
from weft.model.graph import F64, Bool
from weft.simulate.tasks import U32, Describe, TaskGraph, check_finished, is_topological, name_task

_UNORDERED: Final = -1
"""Returned by ``_run`` instead of the number of tasks run: inline handling would have changed the order."""

class Simulator:
    """Runs one task graph again and again, with its own or other durations; keeps the times of the last run.

    >>> from weft.simulate.tasks import make_task_graph
    >>> graph = make_task_graph([2.0, 1.0, 5.0], edges=[(0, 2)], holds=[(0, 0), (1, 0)], num_resources=1)
    >>> simulator = Simulator(graph)
    >>> simulator.run(), simulator.starts.tolist(), simulator.run(np.array([1.0, 1.0, 1.0]))
    (7.0, [0.0, 2.0, 2.0], 2.0)
    """

    def __init__(self, graph: TaskGraph, *, describe: Describe = name_task) -> None:
        self.graph = graph
        self.starts: F64 = np.zeros(graph.num_tasks)
        """Start of each task in the last run; overwritten by the next."""
        self.ends: F64 = np.zeros(graph.num_tasks)
        """End of each task in the last run; overwritten by the next."""
        self._describe = describe
        self._missing = np.zeros(graph.num_tasks, dtype=np.uint32)
        self._inline = inline_tasks(graph)
        self._no_inline = np.zeros_like(self._inline)
        roots = np.flatnonzero(graph.num_predecessors == 0).astype(np.uint32)
        num_tasks, num_resources = graph.num_tasks, graph.num_resources
        self._arguments: tuple[npt.NDArray[Any], ...] = (
            graph.resource_start, graph.resources, graph.successor_start, graph.successors, graph.num_predecessors,
            roots, self.starts, self.ends, self._missing,
            np.zeros(num_tasks), np.zeros(num_resources), np.zeros(num_resources, dtype=np.uint32),
            np.zeros(num_tasks), np.zeros(num_tasks, dtype=np.uint32))

    def run(self, durations: F64 | None = None) -> float:
        """Return the time at which the last task ends; the times of all tasks are in ``starts`` and ``ends``.

        ``durations`` replaces the graph's own and is taken as it is: float64, one per task, none negative. Raises
        ``PlanError`` with the tasks involved if some wait for each other.
        """
        seconds = self.graph.durations if durations is None else durations
        assert seconds.shape == self.ends.shape
        num_done, makespan = _run(seconds, self._inline, *self._arguments)
        if num_done == _UNORDERED:
            num_done, makespan = _run(seconds, self._no_inline, *self._arguments)
        if num_done < self.graph.num_tasks:
            check_finished(self.graph, self._missing > 0, self._describe)
        return float(makespan)


def inline_tasks(graph: TaskGraph) -> Bool:
    """Return which tasks can be handled together with their last predecessor; see the module's docstring."""
    if not is_topological(graph):
        return np.zeros(graph.num_tasks, dtype=np.bool_)
    num_held = graph.num_held()
    predecessor = np.zeros(graph.num_tasks, dtype=np.int64)
    predecessor[graph.successors] = graph.edge_sources()
    has_one = graph.num_predecessors == 1
    inline: Bool = has_one & (num_held > 0) & (num_held[predecessor] > 0)
    if inline.any():
        # What orders an inline task is the first resource that its predecessor holds.
        feeder = graph.resources[np.minimum(graph.resource_start[predecessor], len(graph.resources) - 1)]
        inline = _drop_unfit(graph, inline, feeder)
        while inline[predecessor[inline]].any():
            inline = _drop_unfit(graph, inline & ~inline[predecessor], feeder)
    inline |= has_one & (num_held == 0)
    inline &= ~(inline[predecessor] & (num_held == 0))
    return inline


def _drop_unfit(graph: TaskGraph, inline: Bool, feeder: U32) -> Bool:
    """Return the inline tasks whose resources serve only inline tasks with one feeder."""
    holder = np.repeat(np.arange(graph.num_tasks), graph.num_held())
    while True:
        first = np.zeros(graph.num_resources, dtype=np.uint32)
        first[graph.resources] = feeder[holder]
        unfit = np.zeros(graph.num_resources, dtype=np.bool_)
        unfit[graph.resources[~inline[holder] | (first[graph.resources] != feeder[holder])]] = True
        kept = inline.copy()
        kept[holder[unfit[graph.resources]]] = False
        if np.array_equal(kept, inline):
            return inline
        inline = kept


@compiled
def _run(
    durations: F64, inline: Bool, resource_start: U32, resources: U32, successor_start: U32, successors: U32,
    num_predecessors: U32, roots: U32, starts: F64, ends: F64, missing: U32, ready: F64, free: F64, latest: U32,
    heap_time: F64, heap_task: U32,
) -> tuple[int, float]:
    """Return the number of tasks run (or ``_UNORDERED``) and the end of the last; fill ``starts`` and ``ends``.

    ``free`` is when each resource is free, and ``latest`` the last inline task on it.
    """
    one = np.uint32(1)
    missing[:] = num_predecessors
    ready[:], free[:], latest[:] = 0.0, 0.0, 0
    size = len(roots)
    heap_time[:size], heap_task[:size] = 0.0, roots
    num_done, makespan = 0, 0.0
    while size > 0:
        root_is_done = True
        task = heap_task[0]
        end = _reserve(task, ready[task], durations, resource_start, resources, free, starts, ends)
        makespan = max(makespan, end)
        num_done += 1
        for edge in range(successor_start[task], successor_start[task + one]):
            successor = successors[edge]
            if not inline[successor]:
                if _arrive(successor, end, ready, missing):
                    size = _push(heap_time, heap_task, size, root_is_done, ready[successor], successor)
                    root_is_done = False
                continue
            if not _is_in_order(successor, end == starts[task], resource_start, resources, latest):
                return _UNORDERED, 0.0
            inline_end = _reserve(successor, end, durations, resource_start, resources, free, starts, ends)
            makespan = max(makespan, inline_end)
            num_done += 1
            missing[successor] = 0
            for inline_edge in range(successor_start[successor], successor_start[successor + one]):
                target = successors[inline_edge]
                if _arrive(target, inline_end, ready, missing):
                    size = _push(heap_time, heap_task, size, root_is_done, ready[target], target)
                    root_is_done = False
        if root_is_done:
            size -= 1
            if size > 0:
                _sift_down(heap_time, heap_task, size, heap_time[size], heap_task[size])
    return num_done, makespan


@compiled
def _reserve(
    task: int, ready: float, durations: F64, resource_start: U32, resources: U32, free: F64, starts: F64, ends: F64
) -> float:
    """Return the end of the task that became ready at this time, and note it with its resources."""
    first, last = resource_start[task], resource_start[task + np.uint32(1)]
    start = ready
    for index in range(first, last):
        start = max(start, free[resources[index]])
    end: float = start + durations[task]
    starts[task], ends[task] = start, end
    for index in range(first, last):
        free[resources[index]] = end
    return end


@compiled
def _arrive(task: int, time: float, ready: F64, missing: U32) -> bool:
    """Note that one predecessor of the task has ended; return whether it was the last."""
    ready[task] = max(ready[task], time)
    missing[task] -= np.uint32(1)
    return bool(missing[task] == 0)


@compiled
def _is_in_order(task: int, may_tie: bool, resource_start: U32, resources: U32, latest: U32) -> bool:
    """Return whether the inline task comes after those before it on its resources, by id where ready times may tie."""
    for index in range(resource_start[task], resource_start[task + np.uint32(1)]):
        if may_tie and latest[resources[index]] > task:
            return False
        latest[resources[index]] = task
    return True


@compiled
def _push(heap_time: F64, heap_task: U32, size: int, replaces_root: bool, time: float, task: int) -> int:
    """Put the entry into the heap, in the place of the root or as one more; return the heap's size."""
    if replaces_root:
        _sift_down(heap_time, heap_task, size, time, task)
        return size
    _sift_up(heap_time, heap_task, size, time, task)
    return size + 1


@compiled
def _sift_down(heap_time: F64, heap_task: U32, size: int, time: float, task: int) -> None:
    """Put the entry in the place of the root and restore the heap."""
    # Unsigned indices skip the test for negative ones, and selecting the child needs no branch: 25 % less per run.
    one, limit = np.uint64(1), np.uint64(size)
    place, child = np.uint64(0), np.uint64(1)
    while child < limit:
        right = min(child + one, limit - one)
        left_time, right_time = heap_time[child], heap_time[right]
        is_right = right_time < left_time
        if right_time == left_time:
            is_right = heap_task[right] < heap_task[child]
        child = right if is_right else child
        child_time = min(left_time, right_time)
        if child_time > time or (child_time == time and heap_task[child] > task):
            break
        heap_time[place], heap_task[place] = child_time, heap_task[child]
        place, child = child, child + child + one
    heap_time[place], heap_task[place] = time, task


@compiled
def _sift_up(heap_time: F64, heap_task: U32, size: int, time: float, task: int) -> None:
    """Add the entry to a heap of ``size`` entries."""
    one = np.uint64(1)
    place = np.uint64(size)
    while place > 0:
        parent = (place - one) >> one
        parent_time = heap_time[parent]
        if parent_time < time or (parent_time == time and heap_task[parent] < task):
            break
        heap_time[place], heap_task[place] = parent_time, heap_task[parent]
        place = parent
    heap_time[place], heap_task[place] = time, task
