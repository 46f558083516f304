"""Tables for the terminal. Functions named ``*_table`` return plain text cells; ``print_*`` draw them through rich.

Names come from files, so cells are shown as they are: markup and control characters in them have no effect. Colour is
off where the output is not a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Final

from weft.base.units import format_bytes, format_time
from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.show.facts import (
    DeviceFacts,
    ExchangeFacts,
    PlanFacts,
    StageFacts,
    StrategyFacts,
    device_facts,
    exchange_facts,
    pick,
    plan_capacities,
    plan_facts,
    program_of,
    stage_facts,
)
from weft.show.names import printable, short_list
from weft.simulate.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN: Final = "-"
MAX_DEVICE_ROWS: Final = 32
"""Longer device tables are cut in the terminal."""
PLAIN_WIDTH: Final = 160
"""Columns for output that is not a terminal."""
NARROW: Final = 100
"""Below this width the comparison of strategies leaves columns out."""
WIDE: Final = 130
"""From this width on, a device's time and memory are in one table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Cells of text, to be drawn."""

    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    """Columns that are aligned to the right."""
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    notes: tuple[str, ...] = ()
    """Lines below the table."""


def seconds(value: float | None) -> str:
    """Return the time for people, or ``-``."""
    return UNKNOWN if value is None else format_time(value)


def percent(value: float | None, *, signed: bool = False) -> str:
    """Return the fraction as a percentage, or ``-``."""
    if value is None:
        return UNKNOWN
    digits = 0 if abs(value) >= 1 else 1
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %"


def per_second(value: float | None) -> str:
    """Return samples per second for people, or ``-``."""
    return UNKNOWN if value is None else f"{value:,.0f}/s" if value >= 1e4 else f"{value:.4g}/s"


def plan_table(facts: PlanFacts) -> TextTable:
    """Return the plan as rows of (what, value)."""
    devices = str(facts.num_devices)
    if facts.num_devices != facts.num_cluster_devices:
        devices = f"{facts.num_devices} of {facts.num_cluster_devices}"
    rows = [
        ("model", f"{facts.model} ({facts.mode}, {facts.dtype})"),
        ("batch", batch_text(facts)),
        ("devices", devices),
        ("stages", str(facts.num_stages)),
        ("strategy", facts.strategy),
        ("predicted step", f"{seconds(facts.step_time_s)}, {per_second(facts.samples_per_s)} samples"
         if facts.step_time_s is not None else UNKNOWN),
        ("bound", bound_text(facts)),
        ("status", facts.status),
    ]
    if facts.bubble is not None:
        rows.insert(-1, ("bubble", percent(facts.bubble)))
    if facts.measured_s is not None:
        rows.insert(6, ("measured step", f"{seconds(facts.measured_s)}, "
                                         f"{percent(facts.measured_difference, signed=True)} against the prediction"))
    return TextTable(header=("plan", ""), rows=tuple(rows))


def batch_text(facts: PlanFacts) -> str:
    """Return the batch and its division in words."""
    parts = "1 micro-batch" if facts.microbatches == 1 else f"{facts.microbatches} micro-batches"
    return f"{facts.batch} in {parts} of {facts.batch // facts.microbatches}"


def bound_text(facts: PlanFacts) -> str:
    """Return the bound and the gap to it in words."""
    if facts.bound_s is None:
        return "none known"
    return f"{seconds(facts.bound_s)} (gap {percent(facts.gap)})"


def stages_table(rows: Sequence[StageFacts]) -> TextTable:
    """Return the stages, one row for replicas that are alike."""
    cells = tuple(
        (row.name, stage_modules(row), str(row.num_ops), stage_devices(row), share_text(row),
         format_bytes(row.parameter_bytes), seconds(row.forward_s), seconds(row.backward_s)) for row in rows)
    return TextTable(title="Stages", header=("stage", "modules", "ops", "devices", "share", "parameters", "F", "B"),
                     rows=cells, numeric=frozenset({2, 4, 5, 6, 7}))


def stage_modules(row: StageFacts) -> str:
    """Return a stage's modules, with what is special about the stage."""
    notes = ["recomputed"] if row.recompute else []
    if row.microbatches is not None:
        notes.append("micro-batches " + short_list(map(str, row.microbatches)))
    return (row.modules or UNKNOWN) + (f" ({', '.join(notes)})" if notes else "")


def stage_devices(row: StageFacts) -> str:
    """Return the devices of a row's replicas: ``a0``, ``a0 + a1`` for a joint replica, ``a0 - a7`` for many alike."""
    if all(len(devices) == 1 for devices in row.replicas):
        return short_list(devices[0] for devices in row.replicas)
    shown = [" + ".join(devices) if len(devices) <= 4 else short_list(devices) for devices in row.replicas]
    mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items())
    text = ", ".join(shown[:4]) + (f", {len(shown) - 4} more" if len(shown) > 4 else "")
    return f"{text} ({mesh})" if mesh else text


def share_text(row: StageFacts) -> str:
    """Return the batch share of each of the row's replicas."""
    share = percent(row.share).replace(".0 %", " %")
    return share if len(row.replicas) == 1 else f"{len(row.replicas)} x {share}"


def exchanges_table(rows: Sequence[ExchangeFacts]) -> TextTable:
    """Return the gradient exchanges."""
    cells = tuple((row.how, f"{len(row.parameters)}: {short_list(row.parameters, limit=3)}",
                   format_bytes(row.num_bytes), short_list(row.devices), seconds(row.time_s)) for row in rows)
    return TextTable(title="Gradient exchanges", header=("method", "parameters", "bytes", "devices", "time"),
                     rows=cells, numeric=frozenset({2, 4}))


def devices_table(rows: Sequence[DeviceFacts], *, title: str = "Devices", limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return where each device's time and memory go; memory is at the device's peak. Rows beyond ``limit`` are cut."""
    time, memory = times_table(rows, limit=limit), memory_table(rows, limit=limit)
    return TextTable(title=title, header=time.header + memory.header[1:],
                     rows=tuple(left + right[1:] for left, right in zip(time.rows, memory.rows, strict=True)),
                     numeric=frozenset(range(1, len(time.header) + len(memory.header) - 1)))


def times_table(rows: Sequence[DeviceFacts], *, title: str = "Time", limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return where each device's time goes."""
    cells = [(row.device, *(_part(value, row.step_time_s) for value in (row.busy_s, row.exposed_s, row.bubble_s)),
              seconds(row.idle_s)) for row in rows]
    return cut_table(title, ("device", "busy", "exposed comm", "bubble", "idle"), cells, limit)


def memory_table(rows: Sequence[DeviceFacts], *, title: str = "Memory", limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return what each device holds at its peak, by category, against its capacity."""
    categories = [name for name in CATEGORIES if any(row.peak_memory.get(name) for row in rows)]
    cells = [(row.device, *(format_bytes(row.peak_memory.get(name, 0)) for name in categories),
              format_bytes(row.peak_bytes), percent(row.capacity_used),
              UNKNOWN if row.capacity_bytes is None else format_bytes(row.capacity_bytes)) for row in rows]
    return cut_table(title, ("device", *categories, "peak", "used", "capacity"), cells, limit)


def cut_table(title: str, header: tuple[str, ...], cells: Sequence[tuple[str, ...]], limit: int) -> TextTable:
    """Return a table of numbers by name; the rows beyond ``limit`` are counted in the last one."""
    if len(cells) > limit:
        left_out = len(cells) - limit + 1
        cells = [*cells[: limit - 1], (f"... {left_out} more", *[""] * (len(header) - 1))]
    return TextTable(title=title, header=header, rows=tuple(cells), numeric=frozenset(range(1, len(header))))


def _part(value: float, whole: float) -> str:
    return percent(value / whole if whole else 0.0)


def strategies_table(rows: Sequence[StrategyFacts]) -> TextTable:
    """Return the comparison of strategies: the chosen one is marked, reasons why there is no plan are notes."""
    cells = tuple(
        (("* " if row.is_chosen else "  ") + row.strategy, seconds(row.step_time_s), per_second(row.samples_per_s),
         UNKNOWN if row.microbatches is None else str(row.microbatches), peak_text(row), percent(row.bubble),
         seconds(row.bound_s), row.status) for row in rows)
    return TextTable(
        title="Strategies", rows=cells, numeric=frozenset({1, 2, 3, 5, 6}),
        header=("strategy", "step", "samples", "mb", "peak per device", "bubble", "bound", "status"),
        marked=frozenset(index for index, row in enumerate(rows) if row.is_chosen),
        notes=tuple(f"{row.strategy}: {row.reason}" for row in rows if row.reason))


def _without(table: TextTable, columns: set[str]) -> TextTable:
    """Return the table without some columns."""
    kept = [index for index, name in enumerate(table.header) if name not in columns]
    return replace(table, header=tuple(table.header[index] for index in kept),
                   rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
                   numeric=frozenset(kept.index(index) for index in table.numeric if index in kept))


def peak_text(row: StrategyFacts) -> str:
    """Return the range of the peaks of all devices that hold something: ``2.016 - 2.297 GiB``."""
    peaks = sorted(value for value in (row.peak_bytes or {}).values() if value > 0)
    if not peaks:
        return UNKNOWN
    low, high = format_bytes(peaks[0]), format_bytes(peaks[-1])
    if low == high:
        return high
    return f"{low.removesuffix(high[high.index(' '):])} - {high}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "",
                numeric: frozenset[int] = frozenset(), marked: frozenset[int] = frozenset(),
                file: IO[str] | None = None, width: int | None = None) -> None:
    """Draw one table on ``file`` (stdout), ``width`` columns wide (the terminal's)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console = make_console(file, width)
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    table = Table(title=Text(printable(title), "bold") if title else None, title_justify="left", box=SIMPLE_HEAD,
                  pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, (name, wide) in enumerate(zip(cells[0], column_widths(cells, console.width), strict=True)):
        table.add_column(Text(name), justify="right" if index in numeric else "left", width=wide, overflow="fold")
    for index, row in enumerate(cells[1:]):
        table.add_row(*map(Text, row), style="bold" if index in marked else None)
    console.print(table)


def column_widths(cells: Sequence[Sequence[str]], available: int, *, gap: int = 2) -> list[int]:
    """Return a width for each column so that the table fits if it can, the widest shrinking first, words kept whole.

    >>> column_widths([["ab", "a longer text"]], 12)
    [2, 8]
    """
    from rich.cells import cell_len

    columns = list(zip(*cells, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    least = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    least[0] = widths[0]
    for floor in (least, [4] * len(widths)):
        while sum(widths) + gap * (len(widths) - 1) > available:
            shrinkable = [(width, index) for index, width in enumerate(widths) if width > floor[index]]
            if not shrinkable:
                break
            widths[max(shrinkable)[1]] -= 1
    return widths


def make_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """Return a rich console for the stream; one that is no terminal gets no colour and a fixed width."""
    from rich.console import Console

    stream = sys.stdout if file is None else file
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    return Console(file=stream, width=width or (None if is_terminal else PLAIN_WIDTH), highlight=False, markup=False,
                   emoji=False, no_color=None if is_terminal else True)


def print_text_table(table: TextTable, file: IO[str] | None = None, width: int | None = None) -> None:
    """Draw the table and its notes on ``file`` (stdout), then an empty line."""
    print_table(table.header, table.rows, title=table.title, numeric=table.numeric, marked=table.marked, file=file,
                width=width)
    for note in table.notes:
        make_console(file, width).print(printable(note), soft_wrap=False)
    print(file=file)


def print_comparison(rows: Sequence[StrategyFacts], *, file: IO[str] | None = None, width: int | None = None) -> None:
    """Draw the comparison of strategies; on a narrow terminal the bounds are below it."""
    table = strategies_table(rows)
    if make_console(file, width).width < NARROW:
        bounds = dict.fromkeys(seconds(row.bound_s) for row in rows if row.bound_s is not None)
        note = f"bound: {', '.join(bounds) or UNKNOWN}"
        table = replace(_without(table, {"mb", "bound"}), notes=(*table.notes, note))
    print_text_table(table, file, width)


def print_timeline(timeline: Timeline, *, capacities: Mapping[str, int | None] | None = None,
                   file: IO[str] | None = None, width: int | None = None) -> None:
    """Draw where each device's time and memory go."""
    known = capacities
    if known is None and timeline.program is not None:
        known = plan_capacities(timeline.program.plan)
    title = f"{timeline.kind.capitalize()} step: {seconds(timeline.step_time_s)}, bubble {percent(timeline.bubble)}"
    rows = device_facts(timeline, known)
    if make_console(file, width).width >= WIDE:
        print_text_table(devices_table(rows, title=title), file, width)
        return
    print_text_table(times_table(rows, title=title), file, width)
    print_text_table(memory_table(rows, title="Memory at each device's peak"), file, width)


def print_plan(plan: Plan, timelines: Sequence[Timeline], *, width: int | None = None,
               file: IO[str] | None = None) -> None:
    """Draw the whole plan: summary, stages, gradient exchanges, and for each timeline its devices and Gantt chart."""
    from weft.show.gantt import print_gantt

    program = program_of(timelines)
    shown = pick(timelines, "predicted") or timelines[0]
    print_text_table(plan_table(plan_facts(plan, timelines)), file, width)
    print_text_table(stages_table(stage_facts(program, shown)), file, width)
    exchanges = exchange_facts(program, shown)
    if exchanges:
        print_text_table(exchanges_table(exchanges), file, width)
    for timeline in timelines:
        print_timeline(timeline, capacities=plan_capacities(plan), file=file, width=width)
        print_gantt(timeline, program, width=width, file=file)
