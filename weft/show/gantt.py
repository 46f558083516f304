"""A Gantt chart in text: one row per device, time from left to right, one character per cell.

    d0 |000111222aaaaaa333bbbbbb|  100 %
    d1 |...000aaaaaa111bbbbbb...|   75 %
       0 s                 24 s

A cell shows the instruction that fills most of it: a digit for the forward of a micro-batch, a small letter for its
backward, a capital for its weight gradients; of more than ten micro-batches the last digit counts. A cell that is idle
for more than half of its time is a dot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Final

import numpy as np

from weft.base.units import format_time
from weft.model.graph import I64
from weft.plan.program import Op, Phase, Program
from weft.show.drawing import (
    IDLE,
    ChartLine,
    Shade,
    cell_mark,
    cell_style,
    fill_cells,
    marks_legend,
    print_chart,
    row_line,
    text_axis,
    wrapped,
)
from weft.show.names import printable, shorten
from weft.simulate.timeline import Timeline

STEP: Final = "+"
SHADES: Final[dict[Phase, Shade]] = {
    Phase.F: "forward", Phase.B: "backward", Phase.I: "backward", Phase.W: "weight"}


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
    shown = fill_cells(timeline.start_s[part], timeline.end_s[part], timeline.step_time_s, num_cells)
    return np.where(shown >= 0, part[shown], -1) if len(part) else shown


def _character(program: Program, index: int) -> str:
    if index < 0:
        return IDLE
    if program.op[index] == Op.STEP:
        return STEP
    return cell_mark(int(program.microbatch[index]), SHADES[Phase(int(program.phase[index]))])


def _legend(timeline: Timeline, program: Program) -> str:
    phases = set(program.phase[program.op == Op.COMPUTE].tolist())
    text = marks_legend({SHADES[Phase(phase)] for phase in phases}, program.plan.microbatches)
    if (timeline.end_s > timeline.start_s)[program.op == Op.STEP].any():
        text += f"; {STEP} optimizer"
    return f"{text}; {IDLE} idle"


def format_gantt(timeline: Timeline, program: Program, *, width: int = 100, max_rows: int = 16) -> str:
    """Return the chart as plain text, no line longer than ``width`` (30 at least)."""
    return "\n".join(line.text for line in _lines(timeline, program, width, max_rows))


def _lines(timeline: Timeline, program: Program, width: int, max_rows: int) -> list[ChartLine]:
    width = max(30, width)
    names = [printable(name) for name in timeline.devices[:max_rows]]
    margin = min(max((len(name) for name in names), default=0), max(6, width // 5))
    num_cells = width - margin - 10
    gantt = draw_gantt(timeline, program, num_cells=num_cells, max_rows=max_rows)
    lines = [row_line(f"{shorten(name, margin):<{margin}}", row.cells, _styles(program, row), row.busy)
             for name, row in zip(names, gantt.rows, strict=False)]
    if gantt.num_left_out:
        lines.append(ChartLine(text=f"{'':<{margin}}  ... {gantt.num_left_out} more"))
    lines.append(ChartLine(text=f"{'':<{margin}}  {text_axis(gantt.step_time_s, num_cells, format_time)}"))
    return [*lines, *(ChartLine(text=line) for line in wrapped(gantt.legend, width))]


def print_gantt(timeline: Timeline, program: Program, *, width: int | None = None, max_rows: int = 16,
                file: IO[str] | None = None) -> None:
    """Draw the chart on ``file`` (stdout), as wide as the terminal or ``width``, in colour on a terminal."""
    print_chart(lambda wide: _lines(timeline, program, wide, max_rows), width=width, file=file)


def _styles(program: Program, row: GanttRow) -> list[str]:
    """Return the style of each cell: the micro-batch's colour, light for forward and dark for backward."""
    styles = []
    for index in row.instructions.tolist():
        if index < 0:
            styles.append("dim")
        elif program.op[index] == Op.STEP:
            styles.append("reverse")
        else:
            styles.append(cell_style(int(program.microbatch[index]), SHADES[Phase(int(program.phase[index]))]))
    return styles
