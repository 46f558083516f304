"""Traces for https://ui.perfetto.dev and chrome://tracing, in their common JSON form.

Each device of each timeline is a process with the tracks compute, send, receive and collective; a track has further
lanes (``send 1``, ``send 2``) where its slices overlap, because Perfetto drops a slice that overlaps another on its
track. Arrows lead from sends to their receives; the memory held is a counter by category. Slices have the same names
in predicted and measured timelines, so that both can be laid side by side and searched together.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, Final

import numpy as np

from weft.cost.figure import SOURCES
from weft.files import write_atomic
from weft.model.graph import I64
from weft.plan.memory import CATEGORIES
from weft.plan.program import Op
from weft.simulate.timeline import Timeline

Event = dict[str, Any]

TICKS_PER_US: Final = 8
"""Times are whole multiples of 1/8 us: the finest unit that stays exact when a reader turns floats into nanoseconds."""
TRACKS: Final = {"compute": (Op.COMPUTE, Op.STEP), "send": (Op.SEND,), "receive": (Op.RECV,),
                 "collective": (Op.COLLECTIVE,)}


def write_trace(timelines: Sequence[Timeline], path: str | PathLike[str]) -> None:
    """Write the timelines side by side to a trace file; it is compressed if its name ends in ``.gz``."""
    document = {"traceEvents": list(trace_events(timelines)), "displayTimeUnit": "ms"}
    write_atomic(path, json.dumps(document, separators=(",", ":"), allow_nan=False))


def trace_events(timelines: Sequence[Timeline]) -> Iterator[Event]:
    """Yield the trace's events; processes are ordered by device, then by timeline."""
    flow = 0
    for position, timeline in enumerate(timelines):
        earlier = sum(other.kind == timeline.kind for other in timelines[:position])
        title = f"{timeline.kind} {earlier + 1}" if earlier else timeline.kind
        ticks = to_ticks(timeline)
        lanes: dict[int, int] = {}
        for rank, device in enumerate(timeline.devices):
            process = 1 + rank * len(timelines) + position
            yield _metadata("process_name", process, 0, name=f"{device} {title}")
            yield _metadata("process_sort_index", process, 0, sort_index=process)
            yield from _slices(timeline, rank, process, ticks, lanes)
            yield from _counters(timeline, rank, process)
        yield from _flows(timeline, ticks, lanes, position, len(timelines), flow)
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


def _slices(timeline: Timeline, rank: int, process: int, ticks: I64, lanes: dict[int, int]) -> Iterator[Event]:
    """Yield the tracks and slices of one device; note the thread of each instruction in ``lanes``."""
    first, last = int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1])
    thread = 0
    for track, ops in TRACKS.items():
        chosen = first + np.flatnonzero(np.isin(timeline.op[first:last], ops))
        lane_of = assign_lanes(ticks[chosen])
        num_lanes = max(lane_of, default=0) + 1
        for lane in range(num_lanes):
            name = track if lane == 0 else f"{track} {lane}"
            yield _metadata("thread_name", process, thread + lane, name=name)
            yield _metadata("thread_sort_index", process, thread + lane, sort_index=thread + lane)
        for index, lane in zip(chosen.tolist(), lane_of, strict=True):
            lanes[index] = thread + lane
            start, end = ticks[index].tolist()
            yield {"ph": "X", "name": timeline.labels[index], "cat": track, "pid": process, "tid": thread + lane,
                   "ts": start / TICKS_PER_US, "dur": (end - start) / TICKS_PER_US,
                   "args": {"source": SOURCES[timeline.source[index]].value}}
        thread += num_lanes


def _flows(
    timeline: Timeline, ticks: I64, lanes: dict[int, int], position: int, num_timelines: int, first_flow: int
) -> Iterator[Event]:
    for send in np.flatnonzero(timeline.op == Op.SEND).tolist():
        receive = int(timeline.partner[send])
        for phase, index in (("s", send), ("f", receive)):
            process = 1 + int(timeline.rank[index]) * num_timelines + position
            event: Event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": first_flow + send, "pid": process,
                            "tid": lanes[index], "ts": int(ticks[index, 0]) / TICKS_PER_US}
            yield event | {"bp": "e"} if phase == "f" else event


def _counters(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    curve = timeline.memory_curve(rank)
    for time_s, amounts in zip(curve.time_s.tolist(), curve.num_bytes.tolist(), strict=True):
        yield {"ph": "C", "name": "memory", "pid": process, "ts": round(time_s * 1e6 * TICKS_PER_US) / TICKS_PER_US,
               "args": dict(zip(CATEGORIES, amounts, strict=True))}


def _metadata(what: str, process: int, thread: int, **arguments: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}
