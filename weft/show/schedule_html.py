"""A schedule as one self-contained page: key figures, an interactive Gantt chart with memory, devices, named schedules.

The page and its chart are those of ``weft.show.html``; the data says that numbers have no units, which phase each block
is in, and where one period is. Transfers that occupy a link are in the thin row of the device that sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any, Final

import numpy as np

from weft.base.files import write_atomic
from weft.model.graph import F64, I64
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import ScheduleResult
from weft.show.drawing import Shade, number
from weft.show.names import printable, short_list
from weft.show.page import escape, number_cells, render_page, row_header, section, share_bar, table, tile
from weft.show.schedule_facts import Row, ScheduleFacts, block_shades, find_steady, memory_curve, rows_of
from weft.show.schedule_svg import period_text
from weft.show.schedule_tables import fits_text, gap_text, limit_text, peaks_text, period_texts
from weft.show.tables import UNKNOWN, percent

MAX_ROWS: Final = 256
"""Longer tables of devices are cut; the chart has all of them."""
_PARTS: Final = ("warm-up", "steady", "cool-down")
_LETTERS: Final[dict[Shade, str]] = {"forward": "F", "backward": "B", "weight": "W"}


def write_schedule_report(path: str | PathLike[str], result: ScheduleResult, *, title: str = "Schedule",
                          compared: Sequence[ScheduleFacts] = ()) -> None:
    """Write the page to the file, whole or not at all; ``compared`` adds the table of named schedules."""
    write_atomic(path, render_schedule_report(result, title=title, compared=compared))


def render_schedule_report(result: ScheduleResult, *, title: str = "Schedule",
                           compared: Sequence[ScheduleFacts] = ()) -> str:
    """Return the page's text; see ``write_schedule_report``."""
    rows, problem = rows_of(result), result.schedule.problem
    return render_page({
        "title": escape(f"{printable(title)}: Weft schedule"), "mark": "schedule", "last_column": "Phase",
        "heading": escape(printable(title)), "subtitle": escape(_subtitle(result)), "tiles": _tiles(result),
        "sections": "\n".join([_compared(compared) if compared else "", _devices(result, rows)]),
        "footer": escape("Written by Weft. Times and memory are in the units of the problem; memory is taken when a "
                         f"block starts and released when it {problem.free_at}s."),
    }, schedule_data(result))


def _subtitle(result: ScheduleResult) -> str:
    problem, count = result.schedule.problem, result.schedule.num_microbatches
    return (f"{count} micro-batch{'es' if count > 1 else ''} of {problem.num_blocks} blocks on {problem.num_devices} "
            f"device{'s' if problem.num_devices > 1 else ''}, by {printable(result.by)}")


def _tiles(result: ScheduleResult) -> str:
    period = period_texts(result)
    items = [("Makespan", number(result.makespan), f"status {result.status}"),
             ("Lower bound", number(result.makespan_bound), f"gap {gap_text(result)}"),
             ("Period per micro-batch", period.each, period.note),
             ("Bubble", percent(result.bubble), "of a period, on the busiest device"),
             ("Peak memory", *_fullest(result))]
    return "".join(tile(*item) for item in items)


def _fullest(result: ScheduleResult) -> tuple[str, str]:
    """Return the peak of the device that is fullest, and a note on it."""
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    names = dict(zip(problem.device_names, problem.device_memory, strict=True))
    name = max(names, key=lambda item: (peaks[item] / (names[item] or math.inf), peaks[item]), default="")
    if not names:
        return UNKNOWN, ""
    return number(peaks[name]), f"on {printable(name)}, limit {limit_text(names[name])}"


def _compared(rows: Sequence[ScheduleFacts]) -> str:
    best = min((row.makespan for row in rows if row.makespan is not None and row.reason is None), default=None)
    body = []
    for row in rows:
        name = row_header(row.name, tag="best" if row.is_best else "")
        if row.makespan is None:
            body.append(f'<tr class="refused">{name}<td colspan="5" class="wrap">{_text(row.reason or "")}</td></tr>')
            continue
        slower = percent(row.makespan / best - 1, signed=True) if best else UNKNOWN
        cells = [number(row.makespan), slower, percent(row.idle), peaks_text(row)]
        style = ' class="chosen"' if row.is_best else ' class="refused"' if row.reason else ""
        body.append(f'<tr{style}>{name}{number_cells(cells)}<td class="wrap">{_text(fits_text(row))}</td></tr>')
    header = ("Schedule", "#Makespan", "#Against best", "#Idle", "#Peak memory per device", "Fits")
    return section("Named schedules", table("Named schedules", header, body),
                   lead="Idle is the part of the makespan in which the device with the most work does nothing.")


def _text(text: str) -> str:
    return escape(printable(text))


def _devices(result: ScheduleResult, rows: Sequence[Row]) -> str:
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    body = []
    for row, limit in zip(rows[: min(MAX_ROWS, problem.num_devices)], problem.device_memory, strict=False):
        whole = max(peaks[row.name], limit or 0.0)
        memory = share_bar({"activations": peaks[row.name] / whole if whole > 0 else 0.0}) if limit else ""
        body.append(f"<tr>{row_header(printable(row.name))}<td>busy {_text(percent(row.busy))}"
                    f"{share_bar({'busy': row.busy})}</td>"
                    f"<td>{_text(f'{number(peaks[row.name])} of {limit_text(limit)}')}{memory}</td></tr>")
    if problem.num_devices > MAX_ROWS:
        body.append(f'<tr><td colspan="3" class="dim">{problem.num_devices - MAX_ROWS} more</td></tr>')
    return section("Devices", table("Devices", ("Device", "Time", "Memory at its peak"), body))


def schedule_data(result: ScheduleResult) -> dict[str, Any]:
    """Return everything that the page's script draws, in the columns of ``report_data``."""
    problem, rows, steady = result.schedule.problem, rows_of(result), find_steady(result)
    unit = 10.0 ** (math.floor(math.log10(result.makespan)) - 8) if result.makespan > 0 else 1.0
    tasks, microbatches, rank_start = _columns(problem, rows)
    starts = _whole(result.schedule.starts[tasks, microbatches], unit)
    ends = _whole(result.schedule.ends[tasks, microbatches], unit)
    program: dict[str, Any] = {"rank_start": rank_start, "what": tasks.tolist(), "microbatch": microbatches.tolist()}
    timeline: dict[str, Any] = {
        "title": "schedule", "step_time_s": result.makespan, "unit_s": unit, "start": starts.tolist(),
        "duration": (ends - starts).tolist(), "busy": [round(row.busy, 6) for row in rows[: problem.num_devices]],
        "memory": [_memory_data(result, row, unit) for row in rows[: problem.num_devices]]}
    data = {"plain": True, "microbatches": result.schedule.num_microbatches, "what": _what(problem),
            "devices": [{"name": printable(name), "capacity": limit} for name, limit in
                        zip(problem.device_names, problem.device_memory, strict=True)],
            "program": program, "timelines": [timeline]}
    if result.period is not None:
        phases = np.asarray([[_PARTS.index(name) for name in names] for names in result.phases()], dtype=np.int64)
        data["parts"], program["part"] = list(_PARTS), phases[tasks, microbatches].tolist()
        timeline["steady"] = [None if row.steady is None else _whole(np.asarray(row.steady), unit).tolist()
                              for row in rows[: problem.num_devices]]
    if steady is not None:
        data["period"] = {"from": steady.period_start, "to": steady.period_end, "text": f"one {period_text(steady)}"}
    return data


def _columns(problem: ScheduleProblem, rows: Sequence[Row]) -> tuple[I64, I64, list[int]]:
    """Return tasks and micro-batches by device, the transfers that it sends after its blocks, and where each begins."""
    tasks, microbatches, bounds = [], [], [0]
    sender = np.asarray([problem.blocks[item.source].devices[0] for item in problem.linked], dtype=np.int64)
    links = rows[problem.num_devices:]
    for device, row in enumerate(rows[: problem.num_devices]):
        for part in (row, *links):
            kept = sender[part.tasks - problem.num_blocks] == device if part.is_link else slice(None)
            tasks.append(part.tasks[kept])
            microbatches.append(part.microbatches[kept])
        bounds.append(sum(map(len, tasks)))
    return np.concatenate(tasks), np.concatenate(microbatches), bounds


def _what(problem: ScheduleProblem) -> list[dict[str, Any]]:
    shades, names = block_shades(problem), problem.resource_names
    items = []
    for task, shade in enumerate(shades):
        is_block, resources = task < problem.num_blocks, problem.task_resources[task]
        where = short_list(printable(names[resource]) for resource in resources)
        items.append({"label": printable(problem.task_names[task]), "op": "compute" if is_block else "send",
                      "phase": _LETTERS[shade] if is_block else "", "backward": shade != "forward", "bytes": None,
                      "joint": len(resources) > 1, "where": where if len(resources) > 1 or not is_block else ""})
    return items


def _memory_data(result: ScheduleResult, row: Row, unit: float) -> dict[str, Any]:
    times, amounts = memory_curve(result.schedule, row)
    return {"at": _whole(times, unit).tolist(), "bytes": [float(f"{value:.9g}") for value in amounts.tolist()]}


def _whole(values: F64, unit: float) -> I64:
    return np.round(values / unit).astype(np.int64)
