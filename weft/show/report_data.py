"""What the page's script gets: the program and its timelines in columns, as plain JSON values of linear size.

    {"devices": [{"name": "d0", "capacity": 16e9}], "microbatches": 8,
     "what": [{"label": "F s0", "op": "compute", "phase": "F", "backward": false, "bytes": null}, ...],
     "program": {"rank_start": [0, 30, ...], "what": [0, 0, 1, ...], "microbatch": [0, 1, 0, ...]},
     "timelines": [{"title": "predicted", "unit_s": 1e-9, "start": [...], "duration": [...],
                    "memory": [{"at": [...], "bytes": [...]}, ...], ...}]}

Instructions that differ in nothing but the micro-batch share an entry of ``what``. Times are whole multiples of
``unit_s``, nine digits for the whole step. Of many devices those that do the same at the same times are one row
(``alike`` names them), and of very many instructions only the first rows are there (``left_out`` counts the others), so
that pages stay small. Where the step repeats, ``period`` is one period, and each timeline's ``steady`` the span.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from weft.base.units import format_time
from weft.model.graph import F64, I64
from weft.plan.program import Op, Phase, Program
from weft.show.names import short_list
from weft.show.period import Period
from weft.simulate.timeline import Timeline

MAX_SINGLE: Final = 32
"""Of more devices, those that do the same are one row."""
MAX_INSTRUCTIONS: Final = 120_000
"""Rows are left out beyond so many; a page then has about six million characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A rank that is drawn, and all that do the same at the same times."""

    rank: int
    members: tuple[int, ...]


def report_data(program: Program, timelines: Sequence[Timeline], capacities: Mapping[str, int | None],
                period: Period | None = None, *, only_used: bool = False) -> dict[str, Any]:
    """Return everything that the page's script draws; ``only_used`` leaves out devices that have nothing to do."""
    rows = shown_rows(program, timelines, only_used=only_used)
    parts = [np.arange(int(program.rank_start[row.rank]), int(program.rank_start[row.rank + 1])) for row in rows]
    kept = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    columns = np.stack([column[kept] for column in (
        program.op, program.instance, program.phase, program.channel, program.bucket)], axis=1)
    _, first, what = np.unique(columns.astype(np.int64), axis=0, return_index=True, return_inverse=True)
    titles = _titles(timelines)
    data: dict[str, Any] = {
        "devices": [_device(program, row, capacities) for row in rows],
        "left_out": 0 if only_used else program.num_ranks - sum(len(row.members) for row in rows),
        "microbatches": program.plan.microbatches,
        "what": [_describe(program, int(kept[index])) for index in first],
        "program": {"rank_start": np.cumsum([0, *map(len, parts)]).tolist(), "what": what.reshape(-1).tolist(),
                    "microbatch": program.microbatch[kept].tolist()},
        "timelines": [_timeline_data(timeline, title, rows, kept)
                      for timeline, title in zip(timelines, titles, strict=True)],
    }
    if period is not None:
        count = f", {period.num_microbatches} micro-batches" if period.num_microbatches > 1 else ""
        data["period"] = {"from": period.period_start_s, "to": period.period_end_s,
                          "text": f"one period: {format_time(period.length_s)}{count}"}
        shown = data["timelines"][next((index for index, item in enumerate(timelines) if item.kind == "predicted"), 0)]
        span = [round(value / shown["unit_s"]) for value in (period.start_s, period.end_s)]
        shown["steady"] = [span] * len(rows)
    return data


def shown_rows(program: Program, timelines: Sequence[Timeline], *, only_used: bool = False) -> list[ShownRow]:
    """Return the rows of the chart: all devices, or where there are many, alike ones together, as many as fit."""
    members: dict[object, list[int]] = {}
    sizes = np.diff(program.rank_start).tolist()
    for rank in (rank for rank, size in enumerate(sizes) if size or not only_used):
        key = rank if program.num_ranks <= MAX_SINGLE else _behaviour(program, timelines, rank)
        members.setdefault(key, []).append(rank)
    rows: list[ShownRow] = []
    total = 0
    for ranks in members.values():
        total += sizes[ranks[0]]
        if rows and total > MAX_INSTRUCTIONS:
            break
        rows.append(ShownRow(rank=ranks[0], members=tuple(ranks)))
    return rows


def _behaviour(program: Program, timelines: Sequence[Timeline], rank: int) -> tuple[bytes, ...]:
    """Return what a rank does when, and holds, so that equal ranks have equal ones."""
    part = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    stages = np.asarray([instance.stage for instance in program.instances], dtype=np.int64)
    instance = program.instance[part]
    stage = np.where(instance >= 0, stages[instance], -1)
    times = [np.round(column[part] / (timeline.step_time_s or 1.0) * 1e6).astype(np.int64).tobytes()
             for timeline in timelines for column in (timeline.start_s, timeline.end_s)]
    columns = (program.op[part], stage, program.phase[part], program.microbatch[part], timelines[0].memory.held(rank))
    return (*(column.tobytes() for column in columns), *times)


def _device(program: Program, row: ShownRow, capacities: Mapping[str, int | None]) -> dict[str, Any]:
    name = program.rank_names[row.rank]
    alike = {"alike": short_list((program.rank_names[rank] for rank in row.members), limit=8),
             "count": len(row.members)} if len(row.members) > 1 else {}
    return {"name": name, "capacity": capacities.get(name), **alike}


def _titles(timelines: Sequence[Timeline]) -> list[str]:
    """Return the timelines' kinds, numbered where there are several of one kind."""
    kinds = [timeline.kind for timeline in timelines]
    return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[: index + 1].count(kind)}"
            for index, kind in enumerate(kinds)]


def _describe(program: Program, index: int) -> dict[str, Any]:
    item = program.instruction(index)
    backward, num_bytes = item.phase is not Phase.F, None
    if item.op in (Op.SEND, Op.RECV):
        channel = program.channels[item.channel]
        backward, num_bytes = channel.kind == "gradient", channel.num_bytes
    elif item.op is Op.COLLECTIVE:
        num_bytes = program.buckets[item.bucket].num_bytes
    return {"label": program.label(index).removesuffix(f" mb {item.microbatch}"), "op": item.op.name.lower(),
            "phase": item.phase.name if item.op is Op.COMPUTE else "", "backward": backward, "bytes": num_bytes}


def _timeline_data(timeline: Timeline, title: str, rows: Sequence[ShownRow], kept: I64) -> dict[str, Any]:
    step_time_s = timeline.step_time_s
    unit_s = 10.0 ** (math.floor(math.log10(step_time_s)) - 8) if step_time_s > 0 else 1.0
    ranks = [row.rank for row in rows]
    busy = timeline.busy_s[ranks] / (step_time_s if step_time_s > 0 else 1.0)
    start, end = _whole(timeline.start_s[kept], unit_s), _whole(timeline.end_s[kept], unit_s)
    return {
        "title": title, "step_time_s": step_time_s, "unit_s": unit_s, "busy": np.round(busy, 6).tolist(),
        "start": start.tolist(), "duration": (end - start).tolist(),
        "memory": [_curve_data(timeline, rank, unit_s) for rank in ranks],
    }


def _whole(values: F64, unit_s: float) -> I64:
    return np.round(values / unit_s).astype(np.int64)


def _curve_data(timeline: Timeline, rank: int, unit_s: float) -> dict[str, Any]:
    """Return the steps of the rank's memory curve at which the total changes."""
    curve = timeline.memory_curve(rank)
    total = curve.num_bytes.sum(axis=1)
    kept = np.concatenate(([True], np.diff(total) != 0)) if len(total) else np.zeros(0, dtype=bool)
    return {"at": _whole(curve.time_s[kept], unit_s).tolist(), "bytes": total[kept].tolist()}
