"""Timeline files: ``weft.timeline``, version 1, JSON or JSON in gzip.

Each rank has its instructions in columns of equal length; an instruction is known by its place in the whole list, rank
after rank. ``pairs`` are (send, receive), ``needs`` are (compute or step, receive or collective that it waits for). The
summaries are there for other readers: Weft derives them anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
