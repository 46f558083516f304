"""Schedules with memory that leaves devices: the order of what changes memory, and the earliest schedule that keeps it.

What is held is no matter of each device's order alone where copies run beside the blocks. So the order that counts is
that of all that takes memory of a device (blocks, copies back) or gives it back (blocks, copies out): as long as every
take still starts after the take before it, and after the end of all that was given back before, no level rises above
what it was. ``realise`` plays blocks, pairs and copies as early as that allows:

    start(v) >= start(u) + length(u) + delay      what waits for what, and the order of every device, link and stream
    start(v) >= start(u)                          takes of a device, or of the host, in order
    start(v) >= end(u)                            a take after what was given back before it
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.model.graph import F64
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule, memory_events, replay

Node = tuple[int, int]
"""(row, micro-batch): a task, or of copy i the way out (row tasks + 2 i) or back (the next row)."""


class NoOrder(ArithmeticError):  # noqa: N818 - it says what was found
    """Copies and blocks that take no time wait for each other: their order was lost."""


class Clock(NamedTuple):
    """How long everything takes: in real time or in ticks."""

    times: Sequence[float]
    delays: Sequence[float]
    """Of ``problem.edges``."""
    joint: Mapping[tuple[int, int], float]
    copy_times: Sequence[float]

    @staticmethod
    def of(problem: ScheduleProblem) -> Clock:
        """Return real times."""
        return Clock(problem.task_times, [edge.delay for edge in problem.edges], problem.joint,
                     [item.time for item in problem.copies])


def rows_of(schedule: Schedule) -> F64:
    """Return the starts of tasks and copies in one table, NaN for copies that are not made."""
    copies = 2 * len(schedule.problem.copies)
    if not copies:
        return schedule.starts
    moves = schedule.moves if schedule.moves is not None else np.full((copies, schedule.num_microbatches), np.nan)
    return np.vstack([schedule.starts, moves])


def from_rows(problem: ScheduleProblem, rows: F64) -> Schedule:
    """Return the schedule of such a table."""
    moves = rows[problem.num_tasks:] if problem.copies else None
    return Schedule(problem=problem, starts=rows[: problem.num_tasks],
                    moves=None if moves is None or np.isnan(moves).all() else moves)


def earliest(template: Schedule) -> Schedule:
    """Return the earliest schedule with the template's orders, pairs and copies."""
    problem = template.problem
    if template.moves is None:
        return replay(problem, template.num_microbatches, template.orders(), template.pairs)
    try:
        return from_rows(problem, realise(template, Clock.of(problem)))
    except NoOrder:
        return template


def realise(template: Schedule, clock: Clock) -> F64:
    """Return the earliest starts of tasks and copies (``rows_of``) that keep all orders of the template.

    Raises ``NoOrder`` where the order of what happens at one time is not known.
    """
    graph = _Graph(template, clock)
    return graph.play()


class _Graph:
    """What waits for what; the blocks of a pair are one node."""

    def __init__(self, template: Schedule, clock: Clock) -> None:
        self.problem, self.template, self.clock = template.problem, template, clock
        self.same: dict[Node, Node] = {pair[1]: pair[0] for pair in template.pairs}
        self.length: dict[Node, float] = {item: clock.joint[pair[0][0], pair[1][0]]
                                          for pair in template.pairs for item in pair}
        self.later: dict[Node, list[tuple[Node, float]]] = {}
        self.missing: dict[Node, int] = {}
        self._add_tasks()
        self._add_copies()
        for device in sorted(self.problem.copied):
            if self.problem.device_memory[device] is not None:
                self._add_takes((sign > 0, node, at_end) for _, sign, node, at_end in memory_events(template, device))
        if self.problem.host_memory is not None:
            self._add_takes(self._host_events())

    def _out(self, copy: int, index: int) -> Node:
        return self.problem.num_tasks + 2 * copy, index

    def _length(self, node: Node) -> float:
        if node[0] >= self.problem.num_tasks:
            return self.clock.copy_times[(node[0] - self.problem.num_tasks) // 2]
        return self.length.get(node, self.clock.times[node[0]])

    def _add(self, before: Node, after: Node, lag: float) -> None:
        before, after = self.same.get(before, before), self.same.get(after, after)
        if before != after:
            self.later[before].append((after, lag))
            self.missing[after] += 1

    def _add_tasks(self) -> None:
        problem, count = self.problem, self.template.num_microbatches
        for node in itertools.product(range(problem.num_tasks), range(count)):
            if node not in self.same:
                self.later[node], self.missing[node] = [], 0
        for edge, delay in zip(problem.edges, self.clock.delays, strict=True):
            for index in range(count):
                source = edge.source, index
                self._add(source, (edge.target, index), self._length(source) + delay)
        for order in self.template.orders():
            for before, after in itertools.pairwise(order):
                self._add(before, after, self._length(before))

    def _add_copies(self) -> None:
        problem = self.problem
        streams: list[list[tuple[float, Node]]] = [[] for _ in problem.device_names]
        for copy, index, out, back in self.template.offloads:
            away = self._out(copy, index)
            home, block = (away[0] + 1, index), (problem.copies[copy].block, index)
            for node in (away, home):
                self.later[node], self.missing[node] = [], 0
            self._add(block, away, self._length(block))
            self._add(away, home, self._length(away))
            for task in problem.returns[copy]:
                self._add(home, (task, index), self._length(home))
            for device in problem.blocks[block[0]].devices:
                streams[device] += [(out, away), (back, home)]
        for stream in streams:
            for (_, before), (_, after) in itertools.pairwise(sorted(stream)):
                self._add(before, after, self._length(before))

    def _host_events(self) -> Iterator[tuple[bool, Node, bool]]:
        """Yield (whether it takes, what, whether at its end) by time; what comes back is first."""
        rows: list[tuple[float, bool, Node, bool]] = []
        slack = self.template.tolerance
        for copy, index, out, back in self.template.offloads:
            away = self._out(copy, index)
            rows += [(out, True, away, False),
                     (back + self.problem.copies[copy].time - slack, False, (away[0] + 1, index), True)]
        for _, takes, node, at_end in sorted(rows):
            yield takes, node, at_end

    def _add_takes(self, events: Iterator[tuple[bool, Node, bool]]) -> None:
        last: Node | None = None
        given: list[tuple[Node, bool]] = []
        for takes, node, at_end in events:
            if not takes:
                given.append((node, at_end))
                continue
            for before, is_late in given:
                self._add(before, node, self._length(before) if is_late else 0.0)
            if last is not None:
                self._add(last, node, 0.0)
            last, given = node, []

    def play(self) -> F64:
        """Return the earliest starts."""
        starts = dict.fromkeys(self.later, 0.0)
        queue = sorted(node for node, count in self.missing.items() if not count)
        done = 0
        while queue:
            node = heapq.heappop(queue)
            done += 1
            for after, lag in self.later[node]:
                starts[after] = max(starts[after], starts[node] + lag)
                self.missing[after] -= 1
                if not self.missing[after]:
                    heapq.heappush(queue, after)
        if done < len(self.later):
            raise NoOrder
        rows = np.full((self.problem.num_tasks + 2 * len(self.problem.copies), self.template.num_microbatches), np.nan)
        for node, start in starts.items():
            rows[node] = start
        for node, other in self.same.items():
            rows[node] = starts[other]
        return rows
