"""Copies for a schedule that holds too much: what should leave, and when, with all blocks where they are.

    time order   whenever a block, or a copy back, takes more than there is room for
    what leaves  of all that is there and not needed before: what comes back last
    when         out as early as the stream is free, back as late as the stream is free

Blocks are not delayed, so what is found takes no longer than the schedule that had more memory. It need not be found
where it exists: a copy that has been made is never changed again.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort

import numpy as np

from weft.search.schedule.schedule import TOLERANCE, Schedule, find_problems


def with_copies(schedule: Schedule) -> Schedule | None:
    """Return the schedule with copies that keep it within memory; None if none are found."""
    problem = schedule.problem
    fitted = _Fitter(schedule).run() if problem.copies else schedule
    return fitted if fitted is not None and not find_problems(fitted) else None


class _Fitter:
    """The copies made so far."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.problem = schedule, schedule.problem
        self.slack, ends = schedule.tolerance, schedule.ends
        self.streams: list[list[tuple[float, float]]] = [[] for _ in self.problem.device_names]
        """When each device's stream is busy, by time."""
        self.away: list[list[tuple[float, float, float]]] = [[] for _ in self.problem.device_names]
        """(from, until, amount) that is not on the device."""
        self.moves = np.full((2 * len(self.problem.copies), schedule.num_microbatches), np.nan)
        self.here: list[list[tuple[float, float, int, int]]] = [[] for _ in self.problem.device_names]
        """(needed again, done with, copy, micro-batch) of what could leave a device, what is needed last first."""
        for copy, index in itertools.product(range(len(self.problem.copies)), range(schedule.num_microbatches)):
            block = self.problem.copies[copy].block
            needed = min(float(schedule.starts[task, index]) for task in self.problem.returns[copy])
            for device in self.problem.blocks[block].devices:
                self.here[device].append((needed, float(ends[block, index]), copy, index))
        for rows in self.here:
            rows.sort(reverse=True)
        self.curves = [(times.tolist(), np.cumsum(changes).tolist()) for times, changes in schedule.memory_changes()]
        self.takes: list[tuple[float, int, int]] = []
        """(time, device, place among its changes; -1: whatever is the last one by then)"""
        for device, (_, changes) in enumerate(schedule.memory_changes()):
            if device in self.problem.copied and self.problem.device_memory[device] is not None:
                times = self.curves[device][0]
                self.takes += [(times[place], device, place) for place in np.flatnonzero(changes > 0).tolist()]
        heapq.heapify(self.takes)

    def run(self) -> Schedule | None:
        """Return the schedule with its copies, or None where there is no room."""
        while self.takes:
            time, device, place = heapq.heappop(self.takes)
            limit = self.problem.device_memory[device]
            assert limit is not None
            while self._level(device, time, place) > limit * (1 + TOLERANCE):
                if not self._make_room(device, time):
                    return None
        moves = None if np.isnan(self.moves).all() else self.moves
        return Schedule(problem=self.problem, starts=self.schedule.starts, moves=moves)

    def _level(self, device: int, time: float, place: int) -> float:
        times, levels = self.curves[device]
        at = place if place >= 0 else bisect_right(times, time + self.slack) - 1
        gone = sum(amount for begin, end, amount in self.away[device]
                   if begin <= time + self.slack and end > time + self.slack)
        return float(levels[at] - gone)

    def _make_room(self, device: int, time: float) -> bool:
        """Let what comes back last leave before this time; return whether anything can."""
        best: tuple[float, float, int, int] | None = None
        for needed, done, copy, index in self.here[device]:
            length = self.problem.copies[copy].time
            if (best is not None and needed - length <= best[0]) or needed - length <= time:
                break
            if not np.isnan(self.moves[2 * copy, index]):
                continue
            devices = self.problem.blocks[self.problem.copies[copy].block].devices
            out = self._earliest(devices, done, length)
            if out + length > time + self.slack:
                continue
            back = self._latest(devices, needed, length)
            if back > time + self.slack and (best is None or back > best[0]):
                best = back, out, copy, index
        if best is None:
            return False
        self._move(*best)
        return True

    def _move(self, back: float, out: float, copy: int, index: int) -> None:
        block, length = self.problem.blocks[self.problem.copies[copy].block], self.problem.copies[copy].time
        self.moves[2 * copy, index], self.moves[2 * copy + 1, index] = out, back
        for device in block.devices:
            for start in (out, back):
                insort(self.streams[device], (start, start + length))
            self.away[device].append((out + length, back, block.memory))
            if self.problem.device_memory[device] is not None:
                heapq.heappush(self.takes, (back, device, -1))

    def _busy(self, devices: tuple[int, ...]) -> list[tuple[float, float]]:
        """Return when any of the streams is busy, by time."""
        if len(devices) == 1:
            return self.streams[devices[0]]
        return sorted({item for device in devices for item in self.streams[device]})

    def _earliest(self, devices: tuple[int, ...], begin: float, length: float) -> float:
        """Return the first time from ``begin`` on at which all streams are free for so long."""
        busy = self._busy(devices)
        first = bisect_left(busy, (begin, begin)) - 1 if len(devices) == 1 else 0
        for start, end in itertools.islice(busy, max(0, first), None):
            if start + self.slack >= begin + length:
                break
            begin = max(begin, end)
        return begin

    def _latest(self, devices: tuple[int, ...], end: float, length: float) -> float:
        """Return the last time at which all streams are free for so long, until ``end`` at most."""
        for start, until in reversed(self._busy(devices)):
            if until <= end - length + self.slack:
                break
            end = min(end, start)
        return end - length
