"""A Gantt chart in text: one row per device, time from left to right, one character per cell.

    d0 |000111222aaaaaa333bbbbbb|  100 %
    d1 |...000aaaaaa111bbbbbb...|   75 %
       0 s                 24 s

A cell shows the instruction that fills most of it: a digit for the forward of a micro-batch, a small letter for its
backward, a capital for its weight gradients; of more than ten micro-batches the last digit counts. A cell that is idle
for more than half of its time is a dot.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Final

import numpy as np

from weft.model.graph import I64
from weft.plan.program import Op, Phase, Program
from weft.show.names import printable, shorten
from weft.simulate.timeline import Timeline
from weft.units import format_time

IDLE: Final = "."
STEP: Final = "+"
_FIRST: Final = {Phase.F: "0", Phase.B: "a", Phase.I: "a", Phase.W: "A"}
_MEANING: Final = {Phase.F: "forward", Phase.B: "backward", Phase.I: "backward", Phase.W: "weight gradients"}
_COLOURS: Final = (75, 179, 214, 140, 80, 210, 114, 222, 146, 109)
"""Of the 256-colour palette, by the last digit of the micro-batch; backward is drawn on a darker one."""
_DARK: Final = (25, 65, 130, 54, 30, 88, 28, 94, 60, 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class GanttRow:
    """One device."""

    device: str
    cells: str
    instructions: I64
    """The instruction that each cell shows, or -1."""
    busy: float
    """Part of the step in which the device computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """A chart in characters."""

    rows: tuple[GanttRow, ...]
    num_left_out: int
    """Devices beyond the limit, which are not shown."""
    step_time_s: float
    legend: str


def draw_gantt(timeline: Timeline, program: Program, *, num_cells: int, max_rows: int = 16) -> Gantt:
    """Return the chart with ``num_cells`` characters for the step; devices beyond ``max_rows`` lines are left out."""
    num_rows = timeline.num_ranks if timeline.num_ranks <= max_rows else max(1, max_rows - 1)
    rows = []
    for rank in range(num_rows):
        shown = _fill_cells(timeline, rank, num_cells)
        cells = "".join(_character(program, index) for index in shown.tolist())
        busy = float(timeline.busy_s[rank]) / timeline.step_time_s if timeline.step_time_s else 0.0
        rows.append(GanttRow(device=timeline.devices[rank], cells=cells, instructions=shown, busy=busy))
    return Gantt(rows=tuple(rows), num_left_out=timeline.num_ranks - num_rows, step_time_s=timeline.step_time_s,
                 legend=_legend(timeline, program))


def _fill_cells(timeline: Timeline, rank: int, num_cells: int) -> I64:
    """Return the instruction that fills most of each cell, or -1 where more than half of it is idle."""
    part = np.arange(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1]))
    part = part[timeline.runs[part] & (timeline.end_s[part] > timeline.start_s[part])]
    shown = np.full(num_cells, -1, dtype=np.int64)
    if timeline.step_time_s <= 0:
        return shown
    most, busy = np.zeros(num_cells), np.zeros(num_cells)
    scale = num_cells / timeline.step_time_s
    for index, low, high in zip(part.tolist(), (timeline.start_s[part] * scale).tolist(),
                                (timeline.end_s[part] * scale).tolist(), strict=True):
        for cell in range(int(low + 1e-9), min(num_cells, int(np.ceil(high - 1e-9)))):
            covered = min(high, cell + 1) - max(low, cell)
            busy[cell] += covered
            if covered > most[cell] + 1e-9:
                most[cell], shown[cell] = covered, index
    shown[busy < 0.5 - 1e-9] = -1
    return shown


def _character(program: Program, index: int) -> str:
    if index < 0:
        return IDLE
    if program.op[index] == Op.STEP:
        return STEP
    return chr(ord(_FIRST[Phase(int(program.phase[index]))]) + int(program.microbatch[index]) % 10)


def _legend(timeline: Timeline, program: Program) -> str:
    last = min(program.plan.microbatches, 10) - 1
    phases = sorted(set(program.phase[program.op == Op.COMPUTE].tolist()))
    parts: dict[str, str] = {}
    for phase in map(Phase, phases):
        first = _FIRST[phase]
        marks = f"{first}-{chr(ord(first) + last)}" if last else first
        parts[_MEANING[phase]] = f"{marks} {_MEANING[phase]}"
    note = " of the micro-batch" + ("" if program.plan.microbatches <= 10 else " (its last digit)")
    text = ", ".join(parts.values()) + note if parts else ""
    if (timeline.end_s > timeline.start_s)[program.op == Op.STEP].any():
        text += f"; {STEP} optimizer"
    return f"{text}; {IDLE} idle"


def format_gantt(timeline: Timeline, program: Program, *, width: int = 100, max_rows: int = 16) -> str:
    """Return the chart as plain text, no line longer than ``width`` (30 at least)."""
    return "\n".join(line for line, _ in _lines(timeline, program, width, max_rows))


def _lines(timeline: Timeline, program: Program, width: int, max_rows: int) -> list[tuple[str, GanttRow | None]]:
    """Return the lines of the chart, each with its device's row if it has one."""
    width = max(30, width)
    names = [printable(name) for name in timeline.devices[:max_rows]]
    margin = min(max((len(name) for name in names), default=0), max(6, width // 5))
    num_cells = width - margin - 10
    gantt = draw_gantt(timeline, program, num_cells=num_cells, max_rows=max_rows)
    lines: list[tuple[str, GanttRow | None]] = [
        (f"{shorten(name, margin):<{margin}} |{row.cells}| {100 * row.busy:4.0f} %", row)
        for name, row in zip(names, gantt.rows, strict=False)]
    if gantt.num_left_out:
        lines.append((f"{'':<{margin}}  ... {gantt.num_left_out} more", None))
    lines.append((f"{'':<{margin}}  {_axis(gantt.step_time_s, num_cells)}", None))
    lines += [(line, None) for line in _wrapped(gantt.legend, width)]
    return lines


def _axis(step_time_s: float, num_cells: int) -> str:
    """Return the times at the left end, the middle and the right end, as far as there is room."""
    end, middle = format_time(step_time_s), format_time(step_time_s / 2)
    text = "0".ljust(num_cells - len(end)) + end
    at = num_cells // 2 - len(middle) // 2
    if at > 2 and at + len(middle) + 2 < num_cells - len(end):
        text = text[:at] + middle + text[at + len(middle):]
    return text


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_on_hyphens=False)


def print_gantt(timeline: Timeline, program: Program, *, width: int | None = None, max_rows: int = 16,
                file: IO[str] | None = None) -> None:
    """Draw the chart on ``file`` (stdout), as wide as the terminal or ``width``, in colour on a terminal."""
    from rich.text import Text

    from weft.show.tables import make_console

    stream = sys.stdout if file is None else file
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    wide = width or (shutil.get_terminal_size((100, 24)).columns if is_terminal else 100)
    console = make_console(stream, max(30, wide))
    for line, row in _lines(timeline, program, wide, max_rows):
        text = Text(line, no_wrap=True)
        if row is not None:
            first = len(line) - len("|  100 %") - len(row.cells)
            for style, run in groupby(_styles(program, row)):
                last = first + len(list(run))
                text.stylize(style, first, last)
                first = last
        console.print(text)
    console.print()


def _styles(program: Program, row: GanttRow) -> list[str]:
    """Return the style of each cell: the micro-batch's colour, light for forward and dark for backward."""
    styles = []
    for index in row.instructions.tolist():
        if index < 0:
            styles.append("dim")
        elif program.op[index] == Op.STEP:
            styles.append("reverse")
        else:
            digit = int(program.microbatch[index]) % 10
            is_forward = program.phase[index] == Phase.F
            ink, paper = (16, _COLOURS[digit]) if is_forward else (231, _DARK[digit])
            styles.append(f"color({ink}) on color({paper})")
    return styles
