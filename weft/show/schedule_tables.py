"""What ``weft schedule`` prints and its page says: key figures, devices and their memory, the named schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from weft.search.schedule.named import NamedRow
from weft.search.schedule.schedule import TOLERANCE, Schedule, ScheduleResult
from weft.show import page
from weft.show.chart import counted, number
from weft.show.drawing import print_chart
from weft.show.names import printable
from weft.show.schedule_chart import rows_of, schedule_chart, schedule_data
from weft.show.tables import MAX_DEVICE_ROWS, UNKNOWN, TextTable, cut_table, percent, print_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """One line of the comparison of schedules."""

    name: str
    is_search: bool = False
    is_best: bool = False
    makespan: float | None = None
    idle: float | None = None
    """Part of the makespan in which the busiest device is idle."""
    peak_memory: dict[str, float] | None = None
    reason: str | None = None
    """Why there is none, or why it does not fit."""


def print_schedule(result: ScheduleResult, compared: Sequence[ScheduleFacts] = (), *, width: int | None = None,
                   file: IO[str] | None = None) -> None:
    """Print the result, and the comparison if there is one."""
    print_tables(summary_table(result), memory_table(result), file=file, width=width)
    print_chart(schedule_chart(result), width=width, file=file)
    if compared:
        print_tables(compare_table(compared), file=file, width=width)


def summary_table(result: ScheduleResult) -> TextTable:
    """Return the result as rows of (what, value)."""
    each, note = period_texts(result)
    by = "" if result.by == "search" else f" ({result.by}; the search found none shorter)"
    return TextTable(header=("schedule", ""), rows=(
        ("status", result.status + by),
        ("micro-batches", str(result.schedule.num_microbatches)),
        ("makespan", f"{number(result.makespan)} (bound {number(result.makespan_bound)}, gap {gap_text(result)})"),
        ("period per micro-batch", f"{each} ({note})"),
        ("bubble", f"{percent(result.bubble)} of a period" if result.bubble is not None else UNKNOWN),
        ("search", f"{result.seconds:.3g} CPU seconds")))


def gap_text(result: ScheduleResult) -> str:
    """Return how far the makespan is from its bound."""
    if result.makespan_bound <= 0:
        return percent(0.0) if result.makespan <= 0 else UNKNOWN
    return percent(max(0.0, result.makespan / result.makespan_bound - 1))


def period_texts(result: ScheduleResult) -> tuple[str, str]:
    """Return the period per micro-batch, and its bound and make-up in words."""
    bound = UNKNOWN if result.period_bound is None else number(result.period_bound)
    if result.period is None or result.period_microbatches is None:
        return UNKNOWN, f"bound {bound}, no steady state known"
    each = number(result.period / result.period_microbatches)
    many = counted(result.period_microbatches, "micro-batch")
    return each, f"bound {bound}; {many} in a period of {number(result.period)}"


def memory_table(result: ScheduleResult, *, limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return how busy each device is, and its peak memory against what it has; rows beyond ``limit`` are cut."""
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    cells = [(row.name, percent(row.share(result.makespan)), number(peaks[row.name]), limit_text(memory))
             for row, memory in zip(rows_of(result), problem.device_memory, strict=False)]
    return cut_table("Devices", ("device", "busy", "peak memory", "limit"), cells, limit)


def limit_text(memory: float | None) -> str:
    """Return a device's memory in words."""
    return "none" if memory is None else number(memory)


def peaks_text(row: ScheduleFacts) -> str:
    """Return the range of the devices' peaks: ``1 - 4``."""
    peaks = sorted((row.peak_memory or {}).values())
    if not peaks:
        return UNKNOWN
    low, high = number(peaks[0]), number(peaks[-1])
    return high if low == high else f"{low} - {high}"


def compare_table(rows: Sequence[ScheduleFacts]) -> TextTable:
    """Return the comparison of those that apply: the shortest that fits is marked, the others are named below."""
    shown = [row for row in rows if row.makespan is not None]
    cells = tuple((("* " if row.is_best else "  ") + row.name, number(row.makespan or 0.0), percent(row.idle),
                   peaks_text(row), fits_text(row)) for row in shown)
    notes = ["* shortest that fits; idle: part of the makespan in which the device with the most work does nothing; "
             "peak memory: least and most of any device"]
    if len(shown) < len(rows):
        notes.append("do not apply here: " + ", ".join(row.name for row in rows if row.makespan is None))
    return TextTable(title="Named schedules", rows=cells, numeric=frozenset({1, 2, 3}), notes=tuple(notes),
                     header=("schedule", "makespan", "idle", "peak memory", "fits"),
                     marked=frozenset(index for index, row in enumerate(shown) if row.is_best))


def fits_text(row: ScheduleFacts) -> str:
    """Return ``yes``, or the first reason why not."""
    if row.reason is None:
        return "yes"
    first, *others = row.reason.split("; ")
    return f"no: {first}" + (f"; and {len(others)} more" if others else "")


# ---- named schedules


def compare_facts(result: ScheduleResult, named: Sequence[NamedRow]) -> list[ScheduleFacts]:
    """Return the search's result and the named schedules; the shortest that fits is marked, the search among equals."""
    rows = [_facts(name="search", schedule=result.schedule, reason=None, is_search=True),
            *(_facts(name=item.name, schedule=item.schedule, reason=item.reason or None) for item in named)]
    fitting = [row.makespan for row in rows if row.makespan is not None and row.reason is None]
    limit = min(fitting) * (1 + TOLERANCE)
    best = next(row for row in rows if row.reason is None and row.makespan is not None and row.makespan <= limit)
    return [replace(row, is_best=row is best) for row in rows]


def _facts(*, name: str, schedule: Schedule | None, reason: str | None, is_search: bool = False) -> ScheduleFacts:
    if schedule is None:
        return ScheduleFacts(name=name, reason=reason or "it does not apply")
    return ScheduleFacts(name=name, is_search=is_search, makespan=schedule.makespan, idle=idle_part(schedule),
                         peak_memory=schedule.peak_memory(), reason=reason)


def idle_part(schedule: Schedule) -> float:
    """Return the part of the makespan in which the device with the most work is idle."""
    problem, makespan = schedule.problem, schedule.makespan
    work = max(problem.device_work[: problem.num_devices], default=0.0) * schedule.num_microbatches
    return max(0.0, 1.0 - work / makespan) if makespan > 0 else 0.0


def facts_json(row: ScheduleFacts) -> dict[str, Any]:
    """Return the line as plain JSON values."""
    return {"name": row.name, "makespan": row.makespan, "idle": row.idle, "peak_memory": row.peak_memory,
            "fits": row.makespan is not None and row.reason is None, "reason": row.reason}


# ---- the page


def render_schedule_report(result: ScheduleResult, *, title: str = "Schedule",
                           compared: Sequence[ScheduleFacts] = ()) -> str:
    """Return the page's text: key figures, an interactive chart with memory, devices; ``compared`` adds a table."""
    problem, count = result.schedule.problem, result.schedule.num_microbatches
    return page.render_page({
        "title": f"{printable(title)}: Weft schedule", "mark": "schedule", "last_column": "Phase",
        "heading": printable(title), "tiles": _tiles(result),
        "subtitle": f"{counted(count, 'micro-batch')} of {problem.num_blocks} blocks on "
                    f"{counted(problem.num_devices, 'device')}, by {printable(result.by)}",
        "sections": "\n".join([_compared(compared) if compared else "", _devices(result)]),
        "footer": "Written by Weft. Times and memory are in the units of the problem; memory is taken when a block "
                  f"starts and released when it {problem.free_at}s."}, schedule_data(result))


def _tiles(result: ScheduleResult) -> str:
    return page.tiles([("Makespan", number(result.makespan), f"status {result.status}"),
                       ("Lower bound", number(result.makespan_bound), f"gap {gap_text(result)}"),
                       ("Period per micro-batch", *period_texts(result)),
                       ("Bubble", percent(result.bubble), "of a period, on the busiest device"),
                       ("Peak memory", *_fullest(result))])


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
    body: list[tuple[str, ...]] = []
    for row in rows:
        name = page.tagged(row.name, "best" if row.is_best else "")
        if row.makespan is None:
            body.append((name, printable(row.reason or "")))
        else:
            body.append((name, number(row.makespan), percent(row.makespan / best - 1, signed=True) if best else UNKNOWN,
                         percent(row.idle), peaks_text(row), printable(fits_text(row))))
    styles = {index: "chosen" if row.is_best else "refused" for index, row in enumerate(rows)
              if row.is_best or row.reason}
    header = ("Schedule", "#Makespan", "#Against best", "#Idle", "#Peak memory per device", "~Fits")
    return page.table_section("Named schedules", header, body, styles=styles, lead=(
        "Idle is the part of the makespan in which the device with the most work does nothing."))


def _devices(result: ScheduleResult) -> str:
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    body = []
    for row, limit in zip(rows_of(result), problem.device_memory, strict=False):
        busy = row.share(result.makespan)
        peak, whole = peaks[row.name], max(peaks[row.name], limit or 0.0)
        memory = f"{number(peak)} of {limit_text(limit)}"
        body.append((printable(row.name), page.with_bar(f"busy {percent(busy)}", {"busy": busy}),
                     page.with_bar(memory, {"activations": peak / whole if whole > 0 else 0.0}) if limit else memory))
    return page.table_section("Devices", ("Device", "Time", "Memory at its peak"), body)
