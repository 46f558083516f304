"""A placement as a Gantt chart in text: one row per device and per link in use, time from left to right.

    gpu     |AAABBBBCCC......ffGGGG|   77 %
    cpu     |....ddddEEEEEE........|   45 %
    gpu>cpu |..........CC..........|    9 %
            0        12 ms     24 ms

A letter says where in the graph an operator is: ``a`` to ``z`` from the first to the last operator, or the operator
itself where there are no more than 26. Capitals are on the critical path. A transfer has the letter of its writer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import IO, Final

import numpy as np

from weft.base.units import format_time
from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import PlaceResult, Timetable
from weft.show.drawing import IDLE, ChartLine, fill_cells, part_style, print_chart, row_line, text_axis, wrapped
from weft.show.names import printable, shorten
from weft.show.place_facts import Row, critical_items, device_rows, find_waits, link_rows

LETTERS: Final = 26
MAX_ROWS: Final = 40
"""Rows beyond so many are counted instead of drawn."""
MAX_NAMES: Final = 160
"""The legend has the operators' names if they are no longer in all."""


def graph_parts(timetable: Timetable) -> F64:
    """Return for every item where in the graph it is, from 0 to 1; a transfer is where its writer is."""
    problem = timetable.problem
    part = np.arange(problem.num_ops) / max(1, problem.num_ops - 1)
    return np.concatenate((part, [part[problem.producer[sent.tensor]] for sent in timetable.transfers]))


def item_letters(timetable: Timetable) -> I64:
    """Return for every item its letter's number, 0 to 25."""
    problem = timetable.problem
    letters = np.arange(problem.num_ops)
    if problem.num_ops > LETTERS:
        letters = letters * LETTERS // problem.num_ops
    sent = [letters[problem.producer[item.tensor]] for item in timetable.transfers]
    return np.concatenate((letters, sent)).astype(np.int64)


def format_placement(result: PlaceResult, *, width: int = 100, max_rows: int = MAX_ROWS,
                     to_text: Callable[[float], str] = format_time) -> str:
    """Return the chart as plain text, no line longer than ``width`` (30 at least)."""
    return "\n".join(line.text for line in _lines(result.timetable, width, max_rows, to_text))


def print_placement_gantt(result: PlaceResult, *, width: int | None = None, max_rows: int = MAX_ROWS,
                          to_text: Callable[[float], str] = format_time, file: IO[str] | None = None) -> None:
    """Draw the chart on ``file`` (stdout), as wide as the terminal or ``width``, in colour on a terminal."""
    print_chart(lambda wide: _lines(result.timetable, wide, max_rows, to_text), width=width, file=file)


def _lines(timetable: Timetable, width: int, max_rows: int, to_text: Callable[[float], str]) -> list[ChartLine]:
    width, problem = max(30, width), timetable.problem
    rows = [*device_rows(timetable), *link_rows(timetable)]
    shown = rows if len(rows) <= max_rows else rows[: max(1, max_rows - 1)]
    names = [printable(row.name) for row in shown]
    margin = min(max(map(len, names), default=0), max(6, width // 5))
    num_cells, span = width - margin - 10, timetable.latency_s
    critical = set(critical_items(find_waits(timetable), problem.num_ops))
    letters, parts = item_letters(timetable), graph_parts(timetable)
    lines = [_row_line(f"{shorten(name, margin):<{margin}}", row, span, num_cells, letters, parts, critical)
             for name, row in zip(names, shown, strict=True)]
    if len(shown) < len(rows):
        lines.append(ChartLine(text=f"{'':<{margin}}  ... {len(rows) - len(shown)} more"))
    lines.append(ChartLine(text=f"{'':<{margin}}  {text_axis(span, num_cells, to_text)}"))
    return [*lines, *(ChartLine(text=text) for text in wrapped(_legend(problem), width))]


def _row_line(name: str, row: Row, span: float, num_cells: int, letters: I64, parts: F64,
              critical: Collection[int]) -> ChartLine:
    marks, styles = [IDLE] * num_cells, ["dim"] * num_cells
    for cell, index in enumerate(fill_cells(row.starts, row.ends, span, num_cells).tolist()):
        if index >= 0:
            item = int(row.items[index])
            is_critical = item in critical
            marks[cell] = chr(ord("A" if is_critical else "a") + int(letters[item]))
            styles[cell] = part_style(float(parts[item]), is_strong=is_critical)
    return row_line(name, marks, styles, row.busy_s / span if span > 0 else 0.0)


def _legend(problem: PlaceProblem) -> str:
    rest = f"capitals: on the critical path; {IDLE} idle"
    names = ", ".join(f"{chr(ord('a') + op)} {printable(name)}" for op, name in enumerate(problem.op_names[:LETTERS]))
    if problem.num_ops <= LETTERS and len(names) <= MAX_NAMES:
        return f"{names}; {rest}"
    last = chr(ord("a") + min(problem.num_ops, LETTERS) - 1)
    return f"a-{last} operators from the first to the last of the graph, transfers by what they carry; {rest}"
