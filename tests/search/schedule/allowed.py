"""Whether start times are allowed, straight from the problem's description: pairs of tasks, and memory over time.

Slow and separate from ``weft.search.schedule.schedule``; for schedules whose tasks with memory take time.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

from weft.search.schedule.problem import ScheduleProblem

Starts = dict[tuple[int, int], Fraction]


def is_allowed(problem: ScheduleProblem, starts: Starts) -> bool:
    """Return whether the starts (of every task and micro-batch) break no rule of the problem."""
    end = {item: start + Fraction(problem.task_times[item[0]]) for item, start in starts.items()}
    if min(starts.values()) < 0:
        return False
    for edge in problem.edges:
        for task, index in starts:
            if task == edge.source and starts[edge.target, index] < end[task, index] + Fraction(edge.delay):
                return False
    for a, b in combinations(starts, 2):
        if set(problem.task_resources[a[0]]) & set(problem.task_resources[b[0]]) and not (
                end[a] <= starts[b] or end[b] <= starts[a]):
            return False
    return all(limit is None or _most(problem, device, starts) <= Fraction(limit)
               for device, limit in enumerate(problem.device_memory))


def _most(problem: ScheduleProblem, device: int, starts: Starts) -> Fraction:
    """Return the most that the device holds; what is given back at an instant is free for what is taken then."""
    changes: list[tuple[Fraction, Fraction]] = []
    for (task, _), start in starts.items():
        if task < problem.num_blocks and device in problem.blocks[task].devices:
            block = problem.blocks[task]
            late = block.memory < 0 and problem.free_at == "end"
            changes.append((start + (Fraction(block.time) if late else 0), Fraction(block.memory)))
    level = most = Fraction(0)
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
