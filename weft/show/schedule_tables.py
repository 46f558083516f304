"""What ``weft schedule`` prints: a summary, the devices' memory, the chart, the named schedules beside the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from weft.search.schedule.schedule import ScheduleResult
from weft.show.drawing import number
from weft.show.schedule_facts import ScheduleFacts, rows_of
from weft.show.schedule_gantt import print_schedule_gantt
from weft.show.tables import MAX_DEVICE_ROWS, UNKNOWN, TextTable, cut_table, percent, print_text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodTexts:
    """The steady state in words."""

    each: str
    """Time for each micro-batch."""
    note: str


def print_schedule(result: ScheduleResult, compared: Sequence[ScheduleFacts] = (), *, width: int | None = None,
                   file: IO[str] | None = None) -> None:
    """Print the result, and the comparison if there is one."""
    print_text_table(summary_table(result), file, width)
    print_text_table(memory_table(result), file, width)
    print_schedule_gantt(result, width=width, file=file)
    if compared:
        print_text_table(compare_table(compared), file, width)


def summary_table(result: ScheduleResult) -> TextTable:
    """Return the result as rows of (what, value)."""
    period, by = period_texts(result), "" if result.by == "search" else f" ({result.by}; the search found none shorter)"
    return TextTable(header=("schedule", ""), rows=(
        ("status", result.status + by),
        ("micro-batches", str(result.schedule.num_microbatches)),
        ("makespan", f"{number(result.makespan)} (bound {number(result.makespan_bound)}, gap {gap_text(result)})"),
        ("period per micro-batch", f"{period.each} ({period.note})"),
        ("bubble", f"{percent(result.bubble)} of a period" if result.bubble is not None else UNKNOWN),
        ("search", f"{result.seconds:.3g} CPU seconds")))


def gap_text(result: ScheduleResult) -> str:
    """Return how far the makespan is from its bound."""
    if result.makespan_bound <= 0:
        return percent(0.0) if result.makespan <= 0 else UNKNOWN
    return percent(max(0.0, result.makespan / result.makespan_bound - 1))


def period_texts(result: ScheduleResult) -> PeriodTexts:
    """Return the period per micro-batch, and its bound and make-up in words."""
    bound = UNKNOWN if result.period_bound is None else number(result.period_bound)
    if result.period is None or result.period_microbatches is None:
        return PeriodTexts(each=UNKNOWN, note=f"bound {bound}, no steady state known")
    each = number(result.period / result.period_microbatches)
    many = "1 micro-batch" if result.period_microbatches == 1 else f"{result.period_microbatches} micro-batches"
    return PeriodTexts(each=each, note=f"bound {bound}; {many} in a period of {number(result.period)}")


def memory_table(result: ScheduleResult, *, limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return how busy each device is, and its peak memory against what it has; rows beyond ``limit`` are cut."""
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    cells = [(row.name, percent(row.busy), number(peaks[row.name]), limit_text(memory))
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
