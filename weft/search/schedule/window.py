"""Stronger bounds on the makespan: how long a device must idle while the pipeline fills, and while it drains.

In the first H ticks of any schedule, a device can do only so much work: what reaches it in time, through the other
devices, within everybody's memory. The most it can do is a small constraint problem of its own, with as many
micro-batches as could matter; the rest of the window is idle time that no schedule avoids. Backwards in time the same
holds for the last H ticks. So, if the makespan is 2 H at least,

    makespan >= N * work + idle in the first H ticks + idle in the last H ticks          for every device

The starts in a window are those of a schedule cut off at H: a task that would start later "starts" at H and does
nothing there. ``earliest_starts`` limits which micro-batches can matter.
"""

from __future__ import annotations

import itertools
import math

from ortools.sat.python import cp_model

from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.schedule.whole import WholeProblem


def earliest_starts(whole: WholeProblem, num_microbatches: int, *, until: int | None = None) -> list[list[int]]:
    """Return a lower bound on the start of every task of every micro-batch: ``result[n][task]``.

    Micro-batches are alike, so tasks of one kind run in their order, one after the other; and where a device has room
    for c holds of one kind, the take of micro-batch n comes after the release of micro-batch n - c. Micro-batches of
    which every task starts at ``until`` or later are left out.
    """
    incoming: list[list[tuple[int, int]]] = [[] for _ in whole.times]
    for source, target, delay in whole.edges:
        incoming[target].append((source, delay))
    rooms: dict[int, list[tuple[int, int]]] = {}
    for hold in whole.holds:
        limit = whole.limits[hold.device]
        is_room = hold.device in whole.balanced and hold.amount > 0
        if limit is not None and is_room and hold.take is not None and hold.release is not None:
            rooms.setdefault(hold.take, []).append((hold.release, limit // hold.amount))
    result: list[list[int]] = []
    for index in range(num_microbatches):
        row = [0] * whole.num_tasks
        for task in whole.problem.topological:
            at = result[index - 1][task] + whole.times[task] if index else 0
            for source, delay in incoming[task]:
                at = max(at, row[source] + whole.times[source] + delay)
            for release, room in rooms.get(task, ()):
                if 0 <= index - room < index:
                    at = max(at, result[index - room][release] + whole.times[release])
            row[task] = at
        if until is not None and min(row) >= until:
            break
        result.append(row)
    return result


def least_idle(whole: WholeProblem, device: int, window: int, num_microbatches: int, budget: Budget, *,
               effort: float, seed: int = 0) -> int:
    """Return ticks that the device is idle in the first ``window`` ticks of every schedule."""
    early = earliest_starts(whole, num_microbatches, until=window)
    builder = _Window(whole, window, early)
    builder.build()
    work = sum(builder.inside[key] for key in builder.keys if device in whole.problem.task_resources[key[0]])
    if isinstance(work, int):
        return window
    builder.model.maximize(work)
    solution = solve(builder.model, budget, effort=effort, seed=seed)
    if solution.bound is None:
        return 0
    return max(0, window - math.floor(solution.bound + 1e-6))


class _Window:
    """A schedule cut off at the end of the window."""

    def __init__(self, whole: WholeProblem, window: int, early: list[list[int]]) -> None:
        self.whole, self.window = whole, window
        self.model = cp_model.CpModel()
        self.keys = [(task, index) for index, row in enumerate(early) for task, at in enumerate(row) if at < window]
        known = set(self.keys)
        self.start = {key: self.model.new_int_var(early[key[1]][key[0]], window, "") for key in self.keys}
        self.inside = {key: self.model.new_int_var(0, whole.times[key[0]], "") for key in self.keys}
        self.end = {key: self.model.new_int_var(0, window, "") for key in self.keys}
        self.is_known = known.__contains__

    def build(self) -> None:
        """Add all constraints."""
        model = self.model
        for key in self.keys:
            model.add_hint(self.start[key], self.window)  # to do nothing is allowed
            model.add_min_equality(self.inside[key], [self.window - self.start[key], self.whole.times[key[0]]])
            model.add(self.end[key] == self.start[key] + self.inside[key])
            if key[1] and self.is_known((key[0], key[1] - 1)):
                model.add(self.start[key] >= self.end[key[0], key[1] - 1])
        self._add_edges()
        for tasks in self.whole.problem.resource_tasks:
            keys = [key for key in self.keys if key[0] in tasks]
            model.add_no_overlap([model.new_interval_var(self.start[key], self.inside[key], self.end[key], "")
                                  for key in keys])
        self._add_memory()

    def _add_edges(self) -> None:
        """A task starts after what it needs, or not in the window."""
        num_microbatches = 1 + max((index for _, index in self.keys), default=-1)
        for (source, target, delay), index in itertools.product(self.whole.edges, range(num_microbatches)):
            if not self.is_known((target, index)):
                continue
            assert self.is_known((source, index)), "what comes before starts no later"
            starts = self.model.new_bool_var("")
            ready = self.start[source, index] + self.whole.times[source] + delay
            self.model.add(self.start[target, index] >= ready).only_enforce_if(starts)
            self.model.add(self.start[target, index] == self.window).only_enforce_if(~starts)

    def _add_memory(self) -> None:
        """Add the memory of the devices where it can be judged in a window: all that is taken there is given back."""
        num_microbatches = 1 + max((index for _, index in self.keys), default=-1)
        for device, limit in enumerate(self.whole.limits):
            intervals, amounts = [], []
            for hold, index in itertools.product(self.whole.holds, range(num_microbatches)):
                if hold.device != device or hold.take is None or not self.is_known((hold.take, index)):
                    continue
                is_seen = hold.release is not None and self.is_known((hold.release, index))
                end = self.end[hold.release, index] if is_seen and hold.release is not None else self.window
                size = self.model.new_int_var(0, self.window, "")
                intervals.append(self.model.new_interval_var(self.start[hold.take, index], size, end, ""))
                amounts.append(hold.amount)
            if limit is not None and intervals and device in self.whole.balanced:
                self.model.add_cumulative(intervals, amounts, limit)
