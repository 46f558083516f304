"""Weight gradients in the gaps: the part of a split-backward schedule that depends on real times.

A split-backward schedule fixes the order of forwards and input gradients on every device. Weight gradients can wait,
but hold memory while they do. ``fill_weights`` plays the fixed orders with the problem's times and, whenever a device
would stand idle, runs its oldest weight gradient there, unless that would delay the next fixed block too much:

    fixed order of a device    F4 I1    F5 I2 ...
    played, gaps filled        F4 I1 W0 F5 I2 W1 ...

It also runs them before a block that would hold more than the schedule's own limit or than the device's memory.
Transfers count with their times; who waits for whom on a link is left to ``replay``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from weft.search.schedule.named_orders import DeviceOrders
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Roles
from weft.search.schedule.schedule import TOLERANCE, Instance

Place = tuple[int, ...]
"""Devices that run a stage together."""

_OVERHANGS: Final = (0.0, 0.5, 1.0)
"""Tried: which part of a weight gradient may delay the next fixed block; the best is taken."""


def fill_weights(problem: ScheduleProblem, roles: Roles, num_microbatches: int,
                 orders: Mapping[Place, Sequence[Instance]], *, limit: int) -> DeviceOrders:
    """Return the fixed orders of forwards and input gradients with weight gradients in their gaps.

    ``limit`` is how many forwards a device may hold without their weight gradient (or backward, where it has none), as
    far as the fixed orders allow it.
    """
    overhangs = _OVERHANGS if roles.is_split else _OVERHANGS[:1]
    players = [_Filler(problem, roles, num_microbatches, orders, limit, overhang) for overhang in overhangs]
    best = min(players, key=lambda player: player.play())
    result: DeviceOrders = [[] for _ in problem.device_names]
    for place, order in zip(orders, best.orders, strict=True):
        for device in place:
            result[device] = order
    return result


class _Filler:
    """Plays fixed orders as early as possible and fills gaps as they are found; a line is a place that runs blocks."""

    def __init__(self, problem: ScheduleProblem, roles: Roles, num_microbatches: int,
                 orders: Mapping[Place, Sequence[Instance]], limit: int, overhang: float) -> None:
        self.fixed, self.limit, self.overhang = list(orders.values()), limit, overhang
        self.times, self.memory = problem.task_times, [block.memory for block in problem.blocks]
        stages = [stage for pipeline in roles.pipelines for stage in pipeline.stages]
        self.weight_of = {stage.backward: stage.weight for stage in stages if stage.weight is not None}
        self.holds = {stage.forward: 1 for stage in stages}
        self.holds.update({stage.backward if stage.weight is None else stage.weight: -1 for stage in stages
                           if stage.backward is not None})
        self.before = _block_edges(problem)
        self.wakes = _wakes(problem, self.before, {place: line for line, place in enumerate(orders)})
        self.room = [min((room * (1 + TOLERANCE) for device in place
                          if (room := problem.device_memory[device]) is not None), default=float("inf"))
                     for place in orders]
        self.ends: list[list[float]] = [[-1.0] * num_microbatches for _ in problem.blocks]
        self.orders: list[list[Instance]] = [[] for _ in orders]
        self.waiting: list[deque[Instance]] = [deque() for _ in orders]
        self.heads, self.held, self.asleep = [0] * len(orders), [0] * len(orders), [False] * len(orders)
        self.free_at, self.level = [0.0] * len(orders), [0.0] * len(orders)
        self.queue: list[tuple[float, int]] = [(0.0, line) for line in range(len(orders))]

    def play(self) -> float:
        """Return when the last block ends."""
        while self.queue:
            now, line = heapq.heappop(self.queue)
            if self.free_at[line] <= now:
                self._decide(now, line)
        return max(self.free_at)

    def _decide(self, now: float, line: int) -> None:
        """Start what the device should run now, or say when to look again."""
        self.asleep[line] = False
        waiting = self.waiting[line]
        if self.heads[line] == len(self.fixed[line]):
            if waiting:
                self._start(now, line, *waiting.popleft())
            return
        block, number = self.fixed[line][self.heads[line]]
        if waiting and self._is_full(line, block):
            self._start(now, line, *waiting.popleft())
            return
        ready = self._ready(block, number)
        if ready <= now:
            self.heads[line] += 1
            self._start(now, line, block, number)
        elif waiting and now + self.times[waiting[0][0]] * (1 - self.overhang) <= ready * (1 + TOLERANCE):
            self._start(now, line, *waiting.popleft())
        elif ready < float("inf"):
            heapq.heappush(self.queue, (ready, line))
        else:
            self.asleep[line] = True

    def _is_full(self, line: int, block: int) -> bool:
        """Return whether the block would hold more than is allowed."""
        return ((self.held[line] >= self.limit and self.holds.get(block, 0) > 0)
                or (self.memory[block] > 0 and self.level[line] + self.memory[block] > self.room[line]))

    def _ready(self, block: int, number: int) -> float:
        """Return when the block can start; infinity if it needs something that has not started yet."""
        ready = 0.0
        for source, delay in self.before[block]:
            end = self.ends[source][number]
            if end < 0:
                return float("inf")
            ready = max(ready, end + delay)
        return ready

    def _start(self, now: float, line: int, block: int, number: int) -> None:
        end = now + self.times[block]
        self.ends[block][number] = end
        self.free_at[line] = end
        self.orders[line].append((block, number))
        self.level[line] += self.memory[block]
        self.held[line] += self.holds.get(block, 0)
        if block in self.weight_of:
            self.waiting[line].append((self.weight_of[block], number))
        heapq.heappush(self.queue, (end, line))
        for other in self.wakes[block]:
            if self.asleep[other]:
                self.asleep[other] = False
                heapq.heappush(self.queue, (now, other))


def _block_edges(problem: ScheduleProblem) -> list[list[tuple[int, float]]]:
    """Return what each block needs, and how long that takes to arrive; a link counts as if it were free."""
    delays: list[dict[int, float]] = [dict.fromkeys(block.after, 0.0) for block in problem.blocks]
    for item in problem.transfers:
        delays[item.target][item.source] = max(delays[item.target].get(item.source, 0.0), item.time)
    return [sorted(edges.items()) for edges in delays]


def _wakes(problem: ScheduleProblem, before: Sequence[Sequence[tuple[int, float]]],
           lines: Mapping[Place, int]) -> list[list[int]]:
    """Return for each block the other lines that may wait for it."""
    result: list[list[int]] = [[] for _ in problem.blocks]
    for block, edges in enumerate(before):
        for source, _ in edges:
            if problem.blocks[source].devices != problem.blocks[block].devices:
                result[source].append(lines[problem.blocks[block].devices])
    return result
