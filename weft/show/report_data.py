"""What the page's script gets: the program and its timelines in columns, as plain JSON values of linear size.

    {"devices": [{"name": "d0", "capacity": 16e9}], "microbatches": 8,
     "what": [{"label": "F s0", "op": "compute", "phase": "F", "backward": false, "bytes": null}, ...],
     "program": {"rank_start": [0, 30, ...], "what": [0, 0, 1, ...], "microbatch": [0, 1, 0, ...]},
     "timelines": [{"title": "predicted", "unit_s": 1e-9, "start": [...], "duration": [...],
                    "memory": [{"at": [...], "bytes": [...]}, ...], ...}]}

Instructions that differ in nothing but the micro-batch share an entry of ``what``. Times are whole multiples of
``unit_s``, nine digits for the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft.model.graph import F64, I64
from weft.plan.program import Op, Phase, Program
from weft.simulate.timeline import Timeline


def report_data(
    program: Program, timelines: Sequence[Timeline], capacities: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return everything that the page's script draws."""
    columns = np.stack([program.op, program.instance, program.phase, program.channel, program.bucket], axis=1)
    _, first, what = np.unique(columns.astype(np.int64), axis=0, return_index=True, return_inverse=True)
    titles = _titles(timelines)
    return {
        "devices": [{"name": name, "capacity": capacities.get(name)} for name in program.rank_names],
        "microbatches": program.plan.microbatches,
        "what": [_describe(program, int(index)) for index in first],
        "program": {"rank_start": program.rank_start.tolist(), "what": what.reshape(-1).tolist(),
                    "microbatch": program.microbatch.tolist()},
        "timelines": [_timeline_data(timeline, title) for timeline, title in zip(timelines, titles, strict=True)],
    }


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


def _timeline_data(timeline: Timeline, title: str) -> dict[str, Any]:
    step_time_s = timeline.step_time_s
    unit_s = 10.0 ** (math.floor(math.log10(step_time_s)) - 8) if step_time_s > 0 else 1.0
    busy = timeline.busy_s / step_time_s if step_time_s > 0 else timeline.busy_s
    return {
        "title": title, "step_time_s": step_time_s, "unit_s": unit_s, "busy": np.round(busy, 6).tolist(),
        "start": _whole(timeline.start_s, unit_s).tolist(),
        "duration": (_whole(timeline.end_s, unit_s) - _whole(timeline.start_s, unit_s)).tolist(),
        "memory": [_curve_data(timeline, rank, unit_s) for rank in range(timeline.num_ranks)],
    }


def _whole(values: F64, unit_s: float) -> I64:
    return np.round(values / unit_s).astype(np.int64)


def _curve_data(timeline: Timeline, rank: int, unit_s: float) -> dict[str, Any]:
    """Return the steps of the rank's memory curve at which the total changes."""
    curve = timeline.memory_curve(rank)
    total = curve.num_bytes.sum(axis=1)
    kept = np.concatenate(([True], np.diff(total) != 0)) if len(total) else np.zeros(0, dtype=bool)
    return {"at": _whole(curve.time_s[kept], unit_s).tolist(), "bytes": total[kept].tolist()}
