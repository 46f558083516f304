"""A schedule as a Gantt chart in text: one row per device and per link direction, time from left to right.

    d0 |01...aaa2bbb3ccc4ddd5eee.fff|   86 %
    d1 |.0aaa1bbb2ccc3ddd4eee5fff...|   86 %
             --------[==]-------
        0            14           28

Digits are forward blocks, small letters backward, capitals weight gradients, as in ``weft.show.gantt``. Below the rows,
``[==]`` is one period of the steady part and ``-`` the rest of it. Of a schedule so long that blocks would be narrower
than a character, whole periods are left out at ``~``.
"""

from __future__ import annotations

from typing import IO, Final

from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import ScheduleResult
from weft.show.drawing import (
    IDLE,
    ChartLine,
    Shade,
    cell_mark,
    cell_style,
    fill_cells,
    marks_legend,
    number,
    print_chart,
    row_line,
    text_axis,
    wrapped,
)
from weft.show.names import printable, shorten
from weft.show.schedule_facts import Row, Steady, View, block_shades, make_view

GAP: Final = "~"
MAX_ROWS: Final = 40
"""Rows beyond so many are counted instead of drawn."""


def format_schedule(result: ScheduleResult, *, width: int = 100, max_rows: int = MAX_ROWS) -> str:
    """Return the chart as plain text, no line longer than ``width`` (30 at least)."""
    return "\n".join(line.text for line in _lines(result, width, max_rows))


def print_schedule_gantt(result: ScheduleResult, *, width: int | None = None, max_rows: int = MAX_ROWS,
                         file: IO[str] | None = None) -> None:
    """Draw the chart on ``file`` (stdout), as wide as the terminal or ``width``, in colour on a terminal."""
    print_chart(lambda wide: _lines(result, wide, max_rows), width=width, file=file)


def _lines(result: ScheduleResult, width: int, max_rows: int) -> list[ChartLine]:
    width = max(30, width)
    problem = result.schedule.problem
    names = [printable(name) for name in problem.resource_names]
    num_shown = len(names) if len(names) <= max_rows else max(1, max_rows - 1)
    margin = min(max((len(name) for name in names[:num_shown]), default=0), max(6, width // 5))
    num_cells, shades = width - margin - 10, block_shades(problem)
    shortest = min((block.time for block in problem.blocks if block.time > 0), default=0.0)
    view = make_view(result, max_span=shortest * num_cells)
    lines = [_row_line(problem, view, row, f"{shorten(name, margin):<{margin}}", num_cells, shades)
             for name, row in zip(names[:num_shown], view.rows, strict=False)]
    space = " " * (margin + 2)
    if num_shown < len(names):
        lines.append(ChartLine(text=f"{space}... {len(names) - num_shown} more"))
    if view.steady is not None:
        lines.append(ChartLine(text=f"{space}{phase_ruler(view.steady, view.span, num_cells)}".rstrip()))
    lines.append(ChartLine(text=f"{space}{_axis(view, result.makespan, num_cells)}"))
    legend = f"{marks_legend(set(shades), result.schedule.num_microbatches)}; {IDLE} idle{_period_note(view)}"
    return [*lines, *(ChartLine(text=text) for text in wrapped(legend, width))]


def _row_line(problem: ScheduleProblem, view: View, row: Row, name: str, num_cells: int,
              shades: tuple[Shade, ...]) -> ChartLine:
    """Return the line of a device or link; cells of blocks with several devices are underlined."""
    marks, styles = [IDLE] * num_cells, ["dim"] * num_cells
    for cell, index in enumerate(fill_cells(row.starts, row.ends, view.span, num_cells).tolist()):
        if index >= 0:
            task, microbatch = int(row.tasks[index]), int(row.microbatches[index])
            marks[cell] = cell_mark(microbatch, shades[task])
            is_joint = len(problem.task_resources[task]) > 1
            styles[cell] = cell_style(microbatch, shades[task]) + (" bold underline" if is_joint else "")
    if view.gap is not None:
        cell = min(num_cells - 1, round(view.gap * num_cells / view.span))
        marks[cell], styles[cell] = GAP, "dim"
    return row_line(name, marks, styles, row.busy)


def _axis(view: View, makespan: float, num_cells: int) -> str:
    if view.gap is None:
        return text_axis(makespan, num_cells, number)
    return "0" + number(makespan).rjust(num_cells - 1)


def phase_ruler(steady: Steady, makespan: float, num_cells: int) -> str:
    """Return a line that marks the steady part and, in brackets, one period of it.

    >>> phase_ruler(Steady(start=10, end=30, period_start=15, period_end=20, num_microbatches=1), 40, 40)
    'warm-up   -----[===]---------- cool-down'
    """
    scale = num_cells / makespan
    start, end = round(steady.start * scale), round(steady.end * scale)
    left = min(round(steady.period_start * scale), num_cells - 2)
    right = max(left + 2, round(steady.period_end * scale))
    cells = ["-" if start <= cell < end else " " for cell in range(num_cells)]
    cells[left:right] = ["[", *"=" * (right - left - 2), "]"]
    start, end = min(start, left), max(end, right)
    for word, at, room in (("warm-up", 0, start - 1), ("cool-down", end + 1, num_cells - end - 1)):
        if len(word) <= room:
            cells[at: at + len(word)] = word
    return "".join(cells)


def _period_note(view: View) -> str:
    steady = view.steady
    if steady is None:
        return ""
    of = "1 micro-batch" if steady.num_microbatches == 1 else f"{steady.num_microbatches} micro-batches"
    length = number(steady.period_end - steady.period_start)
    text = f"; [=] one period, {length} for {of}, - the rest of the steady part"
    more = "1 more period" if view.num_periods == 1 else f"{view.num_periods} more periods"
    return text if view.gap is None else f"{text}; {GAP} {more}, not shown"
