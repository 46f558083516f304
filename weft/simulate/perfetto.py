"""Traces for https://ui.perfetto.dev and chrome://tracing, in their common JSON form.

Each device of each timeline is a process with the tracks compute, send, receive and collective; a track has further
lanes (``send 1``, ``send 2``) where its slices overlap, because Perfetto drops a slice that overlaps another on its
track. Arrows lead from sends to their receives; the memory held is a counter by category.

A predicted and a measured timeline of a plan lie side by side: the two processes of a device are neighbours, have the
same tracks (as many lanes as the one with more overlap needs) and the same names of slices, so that both can be
compared and searched together.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, Final

import numpy as np

from weft.base.files import write_atomic
from weft.cost.figure import SOURCES
from weft.model.graph import I64
from weft.plan.memory import CATEGORIES
from weft.plan.program import Op
from weft.simulate.timeline import Timeline

Event = dict[str, Any]

TICKS_PER_US: Final = 8
"""Times are whole multiples of 1/8 us: the finest unit that stays exact when a reader turns floats into nanoseconds."""
TRACKS: Final = {"compute": (Op.COMPUTE, Op.STEP), "send": (Op.SEND,), "receive": (Op.RECV,),
                 "collective": (Op.COLLECTIVE,)}
_TRACK_OF: Final[I64] = np.asarray(
    [next(number for number, ops in enumerate(TRACKS.values()) if op in ops) for op in Op], dtype=np.int64)
"""The track of each ``Op``."""


def write_trace(timelines: Sequence[Timeline], path: str | PathLike[str]) -> None:
    """Write the timelines side by side to a trace file; it is compressed if its name ends in ``.gz``."""
    document = {"traceEvents": list(trace_events(timelines)), "displayTimeUnit": "ms"}
    write_atomic(path, json.dumps(document, separators=(",", ":"), allow_nan=False))


def trace_events(timelines: Sequence[Timeline]) -> Iterator[Event]:
    """Yield the trace's events; processes are ordered by device, then by timeline."""
    ticks = [to_ticks(timeline) for timeline in timelines]
    lanes = [_lanes(timeline, times) for timeline, times in zip(timelines, ticks, strict=True)]
    widths = _widths(timelines, lanes)
    flow = 0
    for position, timeline in enumerate(timelines):
        earlier = sum(other.kind == timeline.kind for other in timelines[:position])
        title = f"{timeline.kind} {earlier + 1}" if earlier else timeline.kind
        threads = _threads(timeline, lanes[position], widths)
        for rank, device in enumerate(timeline.devices):
            process = 1 + rank * len(timelines) + position
            yield _metadata("process_name", process, 0, name=f"{device} {title}")
            yield _metadata("process_sort_index", process, 0, sort_index=process)
            yield from _tracks(process, widths[device])
            yield from _slices(timeline, rank, process, ticks[position], threads)
            yield from _counters(timeline, rank, process)
        yield from _flows(timeline, ticks[position], threads, position, len(timelines), flow)
        flow += timeline.num_instructions


def to_ticks(timeline: Timeline) -> I64:
    """Return [instruction, 2]: start and end in ticks; rounding keeps what did not overlap apart."""
    seconds = np.stack([timeline.start_s, timeline.end_s], axis=1)
    return np.round(seconds * (1e6 * TICKS_PER_US)).astype(np.int64)


def assign_lanes(ticks: I64) -> list[int]:
    """Return for each interval (start, end) the first lane in which it overlaps none before it."""
    lanes = [0] * len(ticks)
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    num_lanes = 0
    for index in np.lexsort((ticks[:, 1], ticks[:, 0])).tolist():
        start, end = ticks[index].tolist()
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, num_lanes)
            num_lanes += 1
        lanes[index] = heapq.heappop(free)
        heapq.heappush(busy, (end, lanes[index]))
    return lanes


def _lanes(timeline: Timeline, ticks: I64) -> I64:
    """Return the lane of each instruction on its track."""
    lanes = np.zeros(timeline.num_instructions, dtype=np.int64)
    for rank in range(timeline.num_ranks):
        first, last = int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1])
        for track in range(len(TRACKS)):
            chosen = first + np.flatnonzero(_TRACK_OF[timeline.op[first:last]] == track)
            lanes[chosen] = assign_lanes(ticks[chosen])
    return lanes


def _widths(timelines: Sequence[Timeline], lanes: Sequence[I64]) -> dict[str, I64]:
    """Return how many lanes each track of a device has, which is enough for all timelines."""
    widths: dict[str, I64] = {}
    for timeline, used in zip(timelines, lanes, strict=True):
        track = _TRACK_OF[timeline.op]
        for rank, device in enumerate(timeline.devices):
            part = slice(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1]))
            width = widths.setdefault(device, np.ones(len(TRACKS), dtype=np.int64))
            np.maximum.at(width, track[part], used[part] + 1)
    return widths


def _threads(timeline: Timeline, lanes: I64, widths: dict[str, I64]) -> I64:
    """Return the thread of each instruction: lanes are numbered through the tracks of its device."""
    first = np.stack([np.cumsum(widths[device]) - widths[device] for device in timeline.devices])
    threads: I64 = first[timeline.rank, _TRACK_OF[timeline.op]] + lanes
    return threads


def _tracks(process: int, widths: I64) -> Iterator[Event]:
    names = [track if lane == 0 else f"{track} {lane}"
             for track, width in zip(TRACKS, widths.tolist(), strict=True) for lane in range(width)]
    for thread, name in enumerate(names):
        yield _metadata("thread_name", process, thread, name=name)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _slices(timeline: Timeline, rank: int, process: int, ticks: I64, threads: I64) -> Iterator[Event]:
    names = tuple(TRACKS)
    for index in range(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1])):
        start, end = ticks[index].tolist()
        yield {"ph": "X", "name": timeline.labels[index], "cat": names[_TRACK_OF[timeline.op[index]]], "pid": process,
               "tid": int(threads[index]), "ts": start / TICKS_PER_US, "dur": (end - start) / TICKS_PER_US,
               "args": {"source": SOURCES[timeline.source[index]].value}}


def _flows(
    timeline: Timeline, ticks: I64, threads: I64, position: int, num_timelines: int, first_flow: int
) -> Iterator[Event]:
    for send in np.flatnonzero(timeline.op == Op.SEND).tolist():
        receive = int(timeline.partner[send])
        for phase, index in (("s", send), ("f", receive)):
            process = 1 + int(timeline.rank[index]) * num_timelines + position
            event: Event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": first_flow + send, "pid": process,
                            "tid": int(threads[index]), "ts": int(ticks[index, 0]) / TICKS_PER_US}
            yield event | {"bp": "e"} if phase == "f" else event


def _counters(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    curve = timeline.memory_curve(rank)
    for time_s, amounts in zip(curve.time_s.tolist(), curve.num_bytes.tolist(), strict=True):
        yield {"ph": "C", "name": "memory", "pid": process, "ts": round(time_s * 1e6 * TICKS_PER_US) / TICKS_PER_US,
               "args": dict(zip(CATEGORIES, amounts, strict=True))}


def _metadata(what: str, process: int, thread: int, **arguments: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}
