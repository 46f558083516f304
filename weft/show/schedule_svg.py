"""A schedule as a static SVG picture, for documents: one row per device, a thin one per link direction.

Each micro-batch has its own hue, backward is darker than forward, a block on several devices has an outline in each of
its rows. Behind the boxes the warm-up and the cool-down of each device are tinted, and one period is framed. Of a
schedule whose boxes would be too narrow, whole periods are left out. The size is bounded by width and number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from os import PathLike
from typing import Final

from weft.base.files import write_atomic
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import ScheduleResult
from weft.show.drawing import (
    MEANING,
    Shade,
    box_colour,
    find_ticks,
    number,
    svg_head,
    svg_swatch,
    svg_tick,
    text_colour,
    visible_boxes,
)
from weft.show.names import printable, shorten
from weft.show.schedule_facts import Row, Steady, View, block_shades, make_view

_MARGIN: Final = 96
_TOP: Final = 50
_DEVICE: Final = 24
_LINK: Final = 9
_GAP: Final = 8
_LEGEND: Final = 30
_MIN_BOX: Final = 8.0
"""Pixels of the shortest block below which periods are left out."""
_TITLED: Final = 3.0
"""Boxes narrower than so many pixels have no text of their own to show."""
WARM_UP: Final = "#f7edd2"
STEADY: Final = "#edf0f0"
COOL_DOWN: Final = "#e6e4f4"
PERIOD: Final = "#0b6e6e"


def write_schedule_svg(path: str | PathLike[str], result: ScheduleResult, *, title: str = "Schedule",
                       width: int = 1080, max_rows: int = 64) -> None:
    """Write the picture to the file, whole or not at all."""
    write_atomic(path, render_schedule_svg(result, title=title, width=width, max_rows=max_rows))


def render_schedule_svg(result: ScheduleResult, *, title: str = "Schedule", width: int = 1080,
                        max_rows: int = 64) -> str:
    """Return the picture's text; of more than ``max_rows`` rows the last are left out, and their number is said."""
    problem = result.schedule.problem
    shortest = min((block.time for block in problem.blocks if block.time > 0), default=0.0)
    view = make_view(result, max_span=shortest * (width - _MARGIN - 12) / _MIN_BOX)
    rows = view.rows if len(view.rows) <= max_rows else view.rows[: max(1, max_rows - 1)]
    bottom = _TOP + sum(_height(row) + _GAP for row in rows) + (20 if len(rows) < len(view.rows) else 0)
    picture = _Picture(result, view, (width - _MARGIN - 12) / view.span if view.span > 0 else 0.0, bottom)
    text = f"{printable(title)}: {result.schedule.num_microbatches} micro-batches in {number(result.makespan)}"
    height = bottom + _LEGEND
    parts, y = [*svg_head(text, width, height), *picture.axis()], _TOP
    for row in rows:
        parts += picture.row(row, y)
        y += _height(row) + _GAP
    if len(rows) < len(view.rows):
        parts.append(f"<text x='8' y='{bottom - 6}' fill='#5c6670'>... {len(view.rows) - len(rows)} more</text>")
    return "\n".join([*parts, *picture.marks(), *picture.legend(), "</svg>", ""])


def _height(row: Row) -> int:
    return _LINK if row.is_link else _DEVICE


class _Picture:
    """The parts of the picture of one result."""

    def __init__(self, result: ScheduleResult, view: View, scale: float, bottom: int) -> None:
        self.schedule, self.view, self.scale, self.bottom = result.schedule, view, scale, bottom
        self.problem: ScheduleProblem = result.schedule.problem
        self.phases = result.phases()
        self.has_phases = result.period is not None
        self.shades: tuple[Shade, ...] = block_shades(self.problem)

    def x(self, time: float) -> float:
        """Return where a time of the picture is."""
        return _MARGIN + time * self.scale

    def axis(self) -> Iterator[str]:
        """Return ticks; behind a gap they show the times of the schedule."""
        left_out = self.schedule.makespan - self.view.span
        for time in find_ticks(self.view.span):
            is_behind = self.view.gap is not None and time > self.view.gap
            yield svg_tick(self.x(time), number(time + left_out if is_behind else time), self.bottom - 4)

    def row(self, row: Row, y: int) -> Iterator[str]:
        """Return a device or a link: name, tints, boxes."""
        height = _height(row)
        size = "10" if row.is_link else "12"
        yield (f"<text x='8' y='{y + height / 2 + 4:.0f}' font-size='{size}' fill='#1d2126'>"
               f"{escape(shorten(printable(row.name), 13))}</text>")
        start, end = row.steady or (0.0, self.view.span)
        for name, tint, low, high in (("warm-up", WARM_UP, 0.0, start), ("steady", STEADY, start, end),
                                      ("cool-down", COOL_DOWN, end, self.view.span)):
            if high > low:
                yield (f"<rect class='{name}' x='{self.x(low):.1f}' y='{y}' width='{(high - low) * self.scale:.1f}' "
                       f"height='{height}' fill='{tint}'/>")
        for index in visible_boxes(row.starts, row.ends, self.scale):
            yield self._box(row, index, y)

    def _box(self, row: Row, index: int, y: int) -> str:
        task, microbatch = int(row.tasks[index]), int(row.microbatches[index])
        left, width = self.x(float(row.starts[index])), float(row.ends[index] - row.starts[index]) * self.scale
        shade, height = self.shades[task], _height(row)
        is_joint = len(self.problem.task_resources[task]) > 1
        fill = box_colour(microbatch, self.schedule.num_microbatches, shade)
        outline = " stroke='#1d2126'" if is_joint else ""
        box = (f"<rect class='box' x='{left:.1f}' y='{y}' width='{max(0.5, width - (1 if width > 4 else 0)):.1f}' "
               f"height='{height}' fill='{fill}'{outline}")
        if width < _TITLED:
            return box + "/>"
        text = f"{box}><title>{escape(self._label(task, microbatch))}</title></rect>"
        if not row.is_link and width >= 7 * len(str(microbatch)) + 4:
            text += (f"<text x='{left + width / 2:.1f}' y='{y + 16}' text-anchor='middle' font-size='11' "
                     f"font-weight='600' fill='{text_colour(shade)}' pointer-events='none'>{microbatch}</text>")
        return text

    def _label(self, task: int, microbatch: int) -> str:
        start = float(self.schedule.starts[task, microbatch])
        times = f"{number(start)} to {number(start + self.problem.task_times[task])}"
        phase = f", {self.phases[task][microbatch]}" if self.has_phases else ""
        return f"{printable(self.problem.task_names[task])} of micro-batch {microbatch}: {times}{phase}"

    def marks(self) -> Iterator[str]:
        """Return the frame around one period, and the place where periods are left out."""
        steady = self.view.steady
        if steady is not None:
            left, width = self.x(steady.period_start), (steady.period_end - steady.period_start) * self.scale
            yield (f"<rect class='period' x='{left:.1f}' y='{_TOP - 6}' width='{width:.1f}' "
                   f"height='{self.bottom - _TOP + 4}' fill='{PERIOD}' fill-opacity='0.08' stroke='{PERIOD}' "
                   f"stroke-width='1.5' stroke-dasharray='5 3' pointer-events='none'/>")
            yield (f"<text x='{left + width / 2:.1f}' y='{_TOP - 12}' text-anchor='middle' font-weight='600' "
                   f"fill='{PERIOD}'>{period_text(steady)}</text>")
        if self.view.gap is not None:
            x = self.x(self.view.gap)
            text = "1 more period" if self.view.num_periods == 1 else f"{self.view.num_periods} more periods"
            yield (f"<rect class='gap' x='{x - 2:.1f}' y='{_TOP - 4}' width='4' height='{self.bottom - _TOP}' "
                   f"fill='#ffffff' stroke='#5c6670' stroke-dasharray='2 3'/>"
                   f"<text x='{x:.1f}' y='{self.bottom + 10}' text-anchor='middle' font-size='11' fill='#5c6670'>"
                   f"{text}</text>")

    def legend(self) -> Iterator[str]:
        """Return what colours and outlines mean."""
        items = [(box_colour(0, self.schedule.num_microbatches, shade), "none", text)
                 for shade, text in MEANING.items() if shade in self.shades]
        if any(len(block.devices) > 1 for block in self.problem.blocks):
            items.append(("#ffffff", "#1d2126", "on several devices"))
        if any(row.steady for row in self.view.rows):
            items += [(WARM_UP, "none", "warm-up"), (STEADY, "none", "steady"), (COOL_DOWN, "none", "cool-down")]
        else:
            items.append((STEADY, "none", "idle"))
        x, y = _MARGIN, self.bottom + 16
        for fill, stroke, text in items:
            yield svg_swatch(x, y, fill, text, stroke)
            x += 36 + 6 * len(text)


def period_text(steady: Steady) -> str:
    """Return what the marked period is."""
    of = "" if steady.num_microbatches == 1 else f" for {steady.num_microbatches} micro-batches"
    return f"period: {number(steady.period_end - steady.period_start)}{of}"
