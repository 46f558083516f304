"""Timeline files: ``weft.timeline``, version 1, JSON or JSON in gzip.

Each rank has its instructions in columns of equal length; an instruction is known by its place in the whole list, rank
after rank. ``pairs`` are (send, receive), ``needs`` are (compute or step, receive or collective that it waits for). The
summaries are there for other readers: Weft derives them anew.

Traces for https://ui.perfetto.dev and chrome://tracing, in their common JSON form.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final, Literal

import numpy as np

from weft.base.errors import PlanError
from weft.base.files import check_header, decode, encode, load_json, write_atomic
from weft.cost.figure import SOURCES, Source
from weft.model.graph import I64
from weft.plan.memory import CATEGORIES, MemoryAccount
from weft.plan.plan import ClusterRef, ModelRef
from weft.plan.program import Op, Program, last_before
from weft.plan.structure import raise_problems
from weft.simulate.timeline import Kind, MemorySource, RankSummary, Timeline

FORMAT: Final = "weft.timeline"
VERSION: Final = 1
MAX_BYTES: Final = 1 << 60
"""Amounts of memory above this are refused; sums of them must stay below 2^63."""

OpName = Literal["compute", "send", "recv", "collective", "step"]
_OP_NAMES: Final[tuple[OpName, ...]] = ("compute", "send", "recv", "collective", "step")
_COLUMNS: Final = ("op", "label", "start_s", "end_s", "source", "activations", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank of a timeline file; the columns have one entry per instruction."""

    device: str
    op: tuple[OpName, ...]
    label: tuple[str, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    source: tuple[Source, ...]
    """Where each duration is from."""
    activations: tuple[int, ...]
    """Bytes of activations held while the instruction runs."""
    buffers: tuple[int, ...]
    """Bytes of received tensors held while the instruction runs."""
    static: Mapping[str, int]
    """Bytes held all the time, by category."""
    gradients: tuple[int, ...] = ()
    """Bytes of gradients, besides those in ``static``, held while the instruction runs; none if it is empty."""
    summary: RankSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRecord:
    """A timeline file."""

    kind: Kind
    model: ModelRef
    cluster: ClusterRef
    step_time_s: float
    ranks: tuple[RankRecord, ...]
    pairs: tuple[tuple[int, int], ...]
    needs: tuple[tuple[int, int], ...]
    memory_source: MemorySource = "account"
    """Whether amounts of memory are the account's or measured."""


def save_timeline(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write the timeline to the file, whole or not at all; a name that ends in ``.gz`` is compressed."""
    write_atomic(path, json.dumps(timeline_to_json(timeline), separators=(",", ":"), allow_nan=False) + "\n")


def load_timeline(path: str | PathLike[str], program: Program | None = None) -> Timeline:
    """Return the timeline in the file; with ``program``, raise ``PlanError`` unless it is that program's."""
    return parse_timeline(load_json(path, error=PlanError), program, where=str(path))


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as plain JSON values."""
    sends = np.flatnonzero(timeline.op == Op.SEND)
    record = TimelineRecord(
        kind=timeline.kind, model=timeline.model, cluster=timeline.cluster, step_time_s=timeline.step_time_s,
        ranks=tuple(_rank_record(timeline, rank, summary) for rank, summary in enumerate(timeline.summary())),
        pairs=tuple(zip(sends.tolist(), timeline.partner[sends].tolist(), strict=True)),
        needs=tuple((waiting, arriving) for waiting, arriving in timeline.needs.tolist()),
        memory_source=timeline.memory_source)
    return {"format": FORMAT, "version": VERSION, **encode(record)}


def _rank_record(timeline: Timeline, rank: int, summary: RankSummary) -> RankRecord:
    part = slice(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1]))
    memory = timeline.memory
    return RankRecord(
        device=timeline.devices[rank], op=tuple(_OP_NAMES[op] for op in timeline.op[part]),
        label=timeline.labels[part], start_s=tuple(timeline.start_s[part].tolist()),
        end_s=tuple(timeline.end_s[part].tolist()), source=tuple(SOURCES[code] for code in timeline.source[part]),
        activations=tuple(memory.activations[part].tolist()), buffers=tuple(memory.buffers[part].tolist()),
        static=dict(zip(CATEGORIES, memory.static[rank].tolist(), strict=True)),
        gradients=tuple(memory.gradients[part].tolist()), summary=summary)


def parse_timeline(value: Any, program: Program | None = None, *, where: str = "timeline") -> Timeline:
    """Return the timeline in the plain JSON value; raise ``PlanError`` with every problem found."""
    body = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=PlanError)
    record = decode(TimelineRecord, body, where=where, error=PlanError)
    problems = [*_rank_problems(record)] or [*_reference_problems(record)]
    if not problems and program is not None:
        problems = [*_binding_problems(record, program)][:20]
    if problems:
        raise_problems(where, problems)
    return _to_timeline(record, program)


def _rank_problems(record: TimelineRecord) -> Iterator[str]:
    devices = tuple(rank.device for rank in record.ranks)
    if devices != record.cluster.devices:
        yield f"ranks are of devices {devices}, but cluster.devices is {record.cluster.devices}"
    for index, rank in enumerate(record.ranks):
        lengths = {name: len(getattr(rank, name)) for name in (*_COLUMNS, *(("gradients",) if rank.gradients else ()))}
        if len(set(lengths.values())) > 1:
            yield f"ranks[{index}]: the columns differ in length: {lengths}"
        for start, end in zip(rank.start_s, rank.end_s, strict=False):
            if not 0 <= start <= end:
                yield f"ranks[{index}]: an instruction runs from {start} to {end} s"
                break
        if set(rank.static) != set(CATEGORIES):
            yield f"ranks[{index}].static must have {', '.join(CATEGORIES)}, not {', '.join(rank.static)}"
        for amount in (*rank.static.values(), *rank.gradients, *rank.activations, *rank.buffers):
            if not 0 <= amount <= MAX_BYTES:
                yield f"ranks[{index}]: {amount} bytes of memory: amounts must be zero or more, and sane"
                break
    latest = max((end for rank in record.ranks for end in rank.end_s), default=0.0)
    if record.step_time_s != latest:
        yield f"step_time_s is {record.step_time_s}, but the last instruction ends at {latest}"


def _reference_problems(record: TimelineRecord) -> Iterator[str]:
    ops = [op for rank in record.ranks for op in rank.op]
    kinds = {"pairs": (("send",), ("recv",)), "needs": (("compute", "step"), ("recv", "collective"))}
    for name, allowed in kinds.items():
        for index, row in enumerate(getattr(record, name)):
            for place, options in zip(row, allowed, strict=True):
                found = ops[place] if 0 <= place < len(ops) else "missing"
                if found not in options:
                    yield f"{name}[{index}]: instruction {place} is {found}, not {' or '.join(options)}"
    for side, op in enumerate(("send", "recv")):
        paired = sorted(pair[side] for pair in record.pairs)
        if paired != [index for index, found in enumerate(ops) if found == op]:
            yield f"pairs must name every {op} once"


def _binding_problems(record: TimelineRecord, program: Program) -> Iterator[str]:
    plan = program.plan
    for name, mine, other in (("model", record.model, plan.model), ("cluster", record.cluster, plan.cluster)):
        if mine != other:
            yield f"the timeline is of {name} {mine}, but the program is of {other}"
    counts = [len(rank.op) for rank in record.ranks]
    expected = np.diff(program.rank_start).tolist()
    if counts != expected:
        yield f"the timeline has {counts} instructions by rank, but the program {expected}: it is of another plan"
        return
    labels = [label for rank in record.ranks for label in rank.label]
    for index, label in enumerate(labels):
        if label != program.label(index):
            yield f"the timeline has {label!r} where the program has {program.place(index)}"


def _to_timeline(record: TimelineRecord, program: Program | None) -> Timeline:
    ranks = record.ranks
    rank_start = np.cumsum([0, *(len(rank.op) for rank in ranks)], dtype=np.int64)
    op = np.asarray([_OP_NAMES.index(item) for rank in ranks for item in rank.op], dtype=np.uint8)
    partner = np.full(len(op), -1, dtype=np.int64)
    pairs, needs = _rows(record.pairs), _rows(record.needs)
    partner[pairs[:, 0]], partner[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    static = [[rank.static[name] for name in CATEGORIES] for rank in ranks]
    memory = MemoryAccount(
        static=np.asarray(static, dtype=np.int64).reshape(len(ranks), len(CATEGORIES)),
        gradients=np.asarray([item for rank in ranks for item in rank.gradients or [0] * len(rank.op)], dtype=np.int64),
        activations=np.asarray([item for rank in ranks for item in rank.activations], dtype=np.int64),
        buffers=np.asarray([item for rank in ranks for item in rank.buffers], dtype=np.int64), rank_start=rank_start)
    return Timeline(
        kind=record.kind, model=record.model, cluster=record.cluster, rank_start=rank_start, op=op,
        start_s=np.asarray([item for rank in ranks for item in rank.start_s], dtype=np.float64),
        end_s=np.asarray([item for rank in ranks for item in rank.end_s], dtype=np.float64),
        source=np.asarray([item.code for rank in ranks for item in rank.source], dtype=np.uint8),
        previous=last_before(rank_start, np.isin(op, (Op.COMPUTE, Op.STEP))), partner=partner,
        needs=needs[np.argsort(needs[:, 0], kind="stable")], program=program,
        stored_labels=tuple(label for rank in ranks for label in rank.label),
        stored_memory=memory if program is None or record.memory_source == "measured" else None,
        memory_source=record.memory_source)


def _rows(pairs: tuple[tuple[int, int], ...]) -> I64:
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2)


# ---- traces for Perfetto and Chrome ----------------------------------------------------------------------------------


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
