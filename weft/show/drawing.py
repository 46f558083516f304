"""A chart as text and as a static SVG picture.

    d0 |01...aaa2bbb3ccc4ddd5eee.fff|   86 %
    d1 |.0aaa1bbb2ccc3ddd4eee5fff...|   86 %
             --------[==]-------
        0            14           28

A cell of the text shows what fills most of it, or a dot where more than half of it is idle; of two boxes that run at
once, cells show one and the other in turn, and the picture has each in one half of the row. Below the rows, ``[==]`` is
one period of the steady part and ``-`` the rest of it. Of a chart so long that boxes would be narrower than a
character, whole periods are left out at ``~``.

In the picture boxes narrower than half a pixel are left out where another one lies within the same pixel, so that its
size is bounded by its width and number of rows. Every text in it is escaped.
"""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from weft.model.graph import F64
from weft.show.chart import DARK, Chart, Key, Row, Steady, counted, period_text, shortened
from weft.show.names import printable, shorten
from weft.show.tables import make_console

IDLE: Final = "."
GAP: Final = "~"
TEXT_ROWS: Final = 40
PICTURE_ROWS: Final = 64
"""Rows beyond so many are counted instead of drawn."""


def _cut(rows: Sequence[Row], max_rows: int) -> Sequence[Row]:
    return rows if len(rows) <= max_rows else rows[: max(1, max_rows - 1)]


# ---- text


class _Line(NamedTuple):
    """A line of a text chart; one of a row has a style for each cell, from column ``first`` on."""

    text: str
    first: int = 0
    styles: Sequence[str] = ()


def format_chart(chart: Chart, *, width: int = 100, max_rows: int = TEXT_ROWS) -> str:
    """Return the chart as plain text, no line longer than ``width`` (30 at least)."""
    return "\n".join(line.text for line in _lines(chart, width, max_rows))


def print_chart(chart: Chart, *, width: int | None = None, max_rows: int = TEXT_ROWS) -> None:
    """Draw the chart on stdout, as wide as the terminal or ``width``, in colour on a terminal."""
    from rich.text import Text

    wide = width or (shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100)
    console = make_console(max(30, wide))
    for line in _lines(chart, wide, max_rows):
        text, first = Text(line.text, no_wrap=True), line.first
        for style, run in groupby(line.styles):
            last = first + len(list(run))
            text.stylize(style, first, last)
            first = last
        console.print(text)
    console.print()


def _lines(chart: Chart, width: int, max_rows: int) -> Iterator[_Line]:
    width, shown = max(30, width), _cut(chart.rows, max_rows)
    names = [printable(row.name) for row in shown]
    margin = min(max(map(len, names), default=0), max(6, width // 5))
    num_cells, space = width - margin - 10, " " * (margin + 2)
    chart = shortened(chart, chart.shortest * num_cells)
    for name, row in zip(names, chart.rows, strict=False):
        yield _row_line(chart, row, f"{shorten(name, margin):<{margin}}", num_cells)
    if len(shown) < len(chart.rows):
        yield _Line(f"{space}... {len(chart.rows) - len(shown)} more")
    if chart.steady is not None:
        yield _Line(f"{space}{phase_ruler(chart.steady, chart.span, num_cells)}".rstrip())
    yield _Line(f"{space}{_text_axis(chart, num_cells)}")
    legend = f"{chart.legend}; {IDLE} idle{_period_note(chart)}"
    yield from (_Line(text) for text in textwrap.wrap(legend, width, break_on_hyphens=False))


def _row_line(chart: Chart, row: Row, name: str, num_cells: int) -> _Line:
    """Return a row of cells between its name and the part of the time in which it is busy."""
    cells = row_cells(row, chart.span, num_cells)
    known = {item: chart.look(item) if item >= 0 else None for item in dict.fromkeys(cells)}
    looks = [known[item] for item in cells]
    marks, styles = [look.mark if look else IDLE for look in looks], [look.style if look else "dim" for look in looks]
    if chart.gap is not None:
        cell = min(num_cells - 1, round(chart.gap * num_cells / chart.span))
        marks[cell], styles[cell] = GAP, "dim"
    return _Line(f"{name} |{''.join(marks)}| {100 * row.share(chart.whole):4.0f} %", len(name) + 2, styles)


def row_cells(row: Row, span: float, num_cells: int) -> list[int]:
    """Return the item that fills most of each cell, or -1 where over half of it is idle."""
    boxes, scale = row if row.is_message is None else row.only(~row.is_message), num_cells / span if span > 0 else 0.0
    shown, most, busy = [-1] * num_cells, [0.0] * num_cells, [0.0] * num_cells
    halves = [0] * len(boxes.items) if boxes.half is None else boxes.half.tolist()
    for item, half, low, high in zip(boxes.items.tolist(), halves, (boxes.starts * scale).tolist(),
                                     (boxes.ends * scale).tolist(), strict=True):
        first = int(low + 1e-9)
        for cell in range(first, min(num_cells, math.ceil(high - 1e-9))):
            covered = min(high, cell + 1) - max(low, cell)
            busy[cell] += covered if half < 2 else 0.0
            is_turn = half == 2 and (cell - first) % 2 == 1 and covered >= most[cell] - 1e-9
            if covered > most[cell] + 1e-9 or is_turn:
                most[cell], shown[cell] = covered, item
    return [item if part >= 0.5 - 1e-9 else -1 for item, part in zip(shown, busy, strict=True)]


def phase_ruler(steady: Steady, span: float, num_cells: int) -> str:
    """Return a line that marks the steady part and, in brackets, one period of it.

    >>> phase_ruler(Steady(start=10, end=30, period_start=15, period_end=20, num_microbatches=1), 40, 40)
    'warm-up   -----[===]---------- cool-down'
    """
    scale = num_cells / span
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


def _text_axis(chart: Chart, num_cells: int) -> str:
    """Return the times at the left end, the right end and, if there is room and no gap, the middle."""
    end, middle = chart.to_text(chart.whole), chart.to_text(chart.whole / 2)
    text = "0".ljust(num_cells - len(end)) + end
    at = num_cells // 2 - len(middle) // 2
    if chart.gap is None and at > 2 and at + len(middle) + 2 < num_cells - len(end):
        text = text[:at] + middle + text[at + len(middle):]
    return text


def _period_note(chart: Chart) -> str:
    steady = chart.steady
    text = "" if steady is None else (
        f"; [=] one period, {chart.to_text(steady.length)} for {counted(steady.num_microbatches, 'micro-batch')}, "
        "- the rest of the steady part")
    return text if chart.gap is None else f"{text}; {GAP} {counted(chart.num_periods, 'more period')}, not shown"


# ---- SVG

WARM_UP: Final = "#f7edd2"
STEADY: Final = "#edf0f0"
COOL_DOWN: Final = "#e6e4f4"
PERIOD: Final = "#0b6e6e"
LEFT: Final = 112
RIGHT: Final = 12
_TOP: Final = 34
_DEVICE: Final = 24
_LINK: Final = 10
_SPACE: Final = 8
_LEGEND: Final = 30
_MIN_BOX: Final = 8.0
"""Pixels of the shortest box below which periods are left out."""
_TITLED: Final = 3.0
"""Boxes narrower than so many pixels have no words of their own to show."""
_NAMED: Final = 30.0
"""In boxes narrower than so many pixels a name is not cut but left out."""
_SOFT: Final = "#5c6670"
_FONT: Final = "font-family='system-ui, -apple-system, Segoe UI, Liberation Sans, sans-serif'"


def render_svg(chart: Chart, *, width: int = 1080, max_rows: int = PICTURE_ROWS) -> str:
    """Return the picture's text; of more than ``max_rows`` rows the last are left out, and their number is given."""
    return "\n".join(_Picture(shortened(chart, chart.shortest * (width - LEFT - RIGHT) / _MIN_BOX), width,
                              max_rows).lines())


class _Picture:
    """The parts of a chart's picture: a white ground, the axis, rows, the period's frame and the legend."""

    def __init__(self, chart: Chart, width: int, max_rows: int) -> None:
        self.chart, self.width, self.rows = chart, width, _cut(chart.rows, max_rows)
        self.scale = (width - LEFT - RIGHT) / chart.span if chart.span > 0 else 0.0
        self.num_left_out = len(chart.rows) - len(self.rows)
        self.top = _TOP + (16 if chart.steady else 0)
        self.bottom = self.top + sum(_height(row) + _SPACE for row in self.rows) + (20 if self.num_left_out else 0)

    def lines(self) -> Iterator[str]:
        """Return the picture line by line."""
        height = self.bottom + _LEGEND
        yield (f"<svg xmlns='http://www.w3.org/2000/svg' width='{self.width}' height='{height}' "
               f"viewBox='0 0 {self.width} {height}' role='img' {_FONT} font-size='12'>")
        yield f"<title>{escape(printable(self.chart.title))}</title><rect width='100%' height='100%' fill='#ffffff'/>"
        yield from self._axis()
        y = self.top
        for row in self.rows:
            yield from self._row(row, y)
            y += _height(row) + _SPACE
        if self.num_left_out:
            yield f"<text x='8' y='{self.bottom - 6}' fill='{_SOFT}'>... {self.num_left_out} more</text>"
        yield from (*self._marks(), *self._legend(), "</svg>", "")

    def _x(self, time: float) -> float:
        return LEFT + time * self.scale

    def _axis(self) -> Iterator[str]:
        """Yield the ticks; behind a gap they show the times of the whole."""
        chart = self.chart
        for time in find_ticks(chart.span):
            x, is_behind = self._x(time), chart.gap is not None and time > chart.gap
            text = chart.to_text(time + chart.left_out if is_behind else time) if time else "0"
            yield f"<line x1='{x:.1f}' x2='{x:.1f}' y1='22' y2='{self.bottom - 4}' stroke='#e3e5e6'/>"
            yield f"<text x='{x:.1f}' y='15' text-anchor='middle' fill='{_SOFT}'>{text}</text>"

    def _row(self, row: Row, y: int) -> Iterator[str]:
        """Yield a device or a link: name, tints, boxes, and the device's messages below them."""
        height, size, room = (_LINK, "10", 16) if row.is_link else (_DEVICE, "12", 14)
        name = escape(shorten(printable(row.name), room))
        yield f"<text x='8' y='{y + height / 2 + 4:.0f}' font-size='{size}' fill='{DARK}'>{name}</text>"
        start, end = row.steady or (0.0, self.chart.span)
        for phase, tint, low, high in (("warm-up", WARM_UP, 0.0, start), ("steady", STEADY, start, end),
                                       ("cool-down", COOL_DOWN, end, self.chart.span)):
            if high > low:
                yield (f"<rect class='{phase}' x='{self._x(low):.1f}' y='{y}' "
                       f"width='{(high - low) * self.scale:.1f}' height='{height}' fill='{tint}'/>")
        if row.is_message is None:
            yield from self._boxes(row, y, height, has_text=not row.is_link)
        else:
            yield from self._boxes(row.only(row.is_message), y + height + 2, _LINK - 2, has_text=False)
            yield from self._boxes(row.only(~row.is_message), y, height, has_text=True)

    def _boxes(self, row: Row, y: int, height: int, *, has_text: bool) -> Iterator[str]:
        if row.half is not None and row.half.any():
            for half, top, tall in ((0, y, height), (1, y, height // 2), (2, y + height // 2, height // 2)):
                yield from self._boxes(replace(row.only(row.half == half), half=None), top, tall, has_text=has_text)
            return
        for index in _visible(row.starts, row.ends, self.scale):
            look = self.chart.look(int(row.items[index]))
            left, width = self._x(float(row.starts[index])), float(row.ends[index] - row.starts[index]) * self.scale
            outline = f" stroke='{DARK}'" if look.is_joint else ""
            box = (f"<rect class='box{' critical' if look.is_strong else ''}' x='{left:.1f}' y='{y}' "
                   f"width='{max(0.5, width - (1 if width > 4 else 0)):.1f}' height='{height}' fill='{look.fill}'"
                   f"{outline}")
            yield box + ("/>" if width < _TITLED else f"><title>{escape(printable(look.tip))}</title></rect>")
            if has_text and look.text and width >= min(_NAMED, 7 * len(look.text) + 4):
                text = escape(shorten(printable(look.text), len(look.text) if width < _NAMED else int(width / 6.5)))
                yield (f"<text x='{left + width / 2:.1f}' y='{y + height // 2 + 4}' text-anchor='middle' "
                       f"font-size='11' font-weight='600' fill='{look.ink}' pointer-events='none'>{text}</text>")

    def _marks(self) -> Iterator[str]:
        """Yield the frame around one period, and the place where periods are left out."""
        chart, height = self.chart, self.bottom - self.top
        if chart.steady is not None:
            left, width = self._x(chart.steady.period_start), chart.steady.length * self.scale
            yield (f"<rect class='period' x='{left:.1f}' y='{self.top - 6}' width='{width:.1f}' height='{height + 4}' "
                   f"fill='{PERIOD}' fill-opacity='0.08' stroke='{PERIOD}' stroke-width='1.5' stroke-dasharray='5 3' "
                   "pointer-events='none'/>")
            yield (f"<text x='{left + width / 2:.1f}' y='{self.top - 12}' text-anchor='middle' font-weight='600' "
                   f"fill='{PERIOD}'>{period_text(chart.steady, chart.to_text)}</text>")
        if chart.gap is not None:
            x = self._x(chart.gap)
            yield (f"<rect class='gap' x='{x - 2:.1f}' y='{self.top - 4}' width='4' height='{height}' "
                   f"fill='#ffffff' stroke='{_SOFT}' stroke-dasharray='2 3'/>")
            yield (f"<text x='{x:.1f}' y='{self.bottom + 10}' text-anchor='middle' font-size='11' fill='{_SOFT}'>"
                   f"{counted(chart.num_periods, 'more period')}</text>")

    def _legend(self) -> Iterator[str]:
        """Yield what colours and outlines mean."""
        phases = (Key((WARM_UP,), "warm-up"), Key((STEADY,), "steady"), Key((COOL_DOWN,), "cool-down"))
        x, y = LEFT, self.bottom + 16
        for key in (*self.chart.keys, *(phases if any(row.steady for row in self.rows) else (Key((STEADY,), "idle"),))):
            for fill in key.fills:
                yield f"<rect x='{x}' y='{y}' width='11' height='10' fill='{fill}' stroke='{key.stroke}'/>"
                x += 11
            yield f"<text x='{x + 5}' y='{y + 9}' font-size='11' fill='{_SOFT}'>{key.text}</text>"
            x += 25 + 6 * len(key.text)


def _height(row: Row) -> int:
    return _LINK if row.is_link else _DEVICE + (_LINK if row.is_message is not None else 0)


def _visible(starts: F64, ends: F64, scale: float) -> list[int]:
    """Return the boxes to draw, by start: of those narrower than half a pixel one for each pixel."""
    order = np.argsort(starts, kind="stable")
    is_wide = (ends[order] - starts[order]) * scale >= 0.5
    is_new = np.diff(np.floor(starts[order] * scale), prepend=-1.0) > 0
    shown: list[int] = order[is_wide | is_new].tolist()
    return shown


def find_ticks(span: float) -> list[float]:
    """Return round times from 0 to ``span``, eight or so."""
    rough = span / 8 or 1.0
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [count * step for count in range(int(span / step + 1e-9) + 1)]
