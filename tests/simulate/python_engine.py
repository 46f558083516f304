"""The event engine in plain Python: the readable twin that the compiled one must match bit for bit."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64
from weft.simulate.tasks import Describe, TaskGraph, check_finished, name_task


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTimes:
    """When each task ran."""

    starts: F64
    ends: F64
    makespan: float


def simulate_python(
    graph: TaskGraph, durations: F64 | None = None, *, describe: Describe = name_task
) -> TaskTimes:
    """Return when each task runs, in plain Python: what the compiled engine must match bit for bit."""
    seconds = (graph.durations if durations is None else durations).tolist()
    resource_start, resources = graph.resource_start.tolist(), graph.resources.tolist()
    successor_start, successors = graph.successor_start.tolist(), graph.successors.tolist()
    missing = graph.num_predecessors.tolist()
    ready = [0.0] * graph.num_tasks
    starts = [0.0] * graph.num_tasks
    ends = [0.0] * graph.num_tasks
    free = [0.0] * graph.num_resources
    heap = [(0.0, task) for task in range(graph.num_tasks) if missing[task] == 0]
    while heap:
        start, task = heapq.heappop(heap)
        held = resources[resource_start[task]:resource_start[task + 1]]
        for resource in held:
            start = max(start, free[resource])
        end = start + seconds[task]
        starts[task], ends[task] = start, end
        for resource in held:
            free[resource] = end
        for successor in successors[successor_start[task]:successor_start[task + 1]]:
            ready[successor] = max(ready[successor], end)
            missing[successor] -= 1
            if missing[successor] == 0:
                heapq.heappush(heap, (ready[successor], successor))
    check_finished(graph, np.array(missing) > 0, describe)
    return TaskTimes(starts=np.array(starts), ends=np.array(ends), makespan=max(ends, default=0.0))
