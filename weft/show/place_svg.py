"""A placement as a static SVG picture, for documents: one row per device, a thin one per link in use.

The colour says where in the graph an operator is, from blue (first) to red (last); a transfer has its writer's. What is
on the critical path is in full colour, the rest is pale. The size is bounded by width and number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from os import PathLike
from typing import Final

from weft.base.files import write_atomic
from weft.show.drawing import find_ticks, part_colour, svg_head, svg_swatch, svg_tick, visible_boxes
from weft.show.names import printable, shorten
from weft.show.place_facts import WHY, Row, critical_items, device_rows, find_waits, item_names, link_rows
from weft.show.place_gantt import graph_parts
from weft.show.place_tables import PlaceView, value_name

_MARGIN: Final = 112
_TOP: Final = 34
_DEVICE: Final = 24
_LINK: Final = 10
_GAP: Final = 8
_LEGEND: Final = 30
_TITLED: Final = 3.0
"""Boxes narrower than so many pixels have no text of their own to show."""
_NAMED: Final = 30.0
"""Boxes narrower than so many pixels have no name in them."""


def write_placement_svg(path: str | PathLike[str], view: PlaceView, *, width: int = 1080, max_rows: int = 64) -> None:
    """Write the picture to the file, whole or not at all."""
    write_atomic(path, render_placement_svg(view, width=width, max_rows=max_rows))


def render_placement_svg(view: PlaceView, *, width: int = 1080, max_rows: int = 64) -> str:
    """Return the picture's text; of more than ``max_rows`` rows the last are left out, and their number is said."""
    rows = [*device_rows(view.result.timetable), *link_rows(view.result.timetable)]
    shown = rows if len(rows) <= max_rows else rows[: max(1, max_rows - 1)]
    bottom = _TOP + sum(_height(row) + _GAP for row in shown) + (20 if len(shown) < len(rows) else 0)
    picture = _Picture(view, width)
    text = f"{printable(view.title)}: {value_name(view.result)} {view.to_text(view.result.value)}"
    parts, y = [*svg_head(text, width, bottom + _LEGEND), *picture.axis(bottom)], _TOP
    for row in shown:
        parts += picture.row(row, y)
        y += _height(row) + _GAP
    if len(shown) < len(rows):
        parts.append(f"<text x='8' y='{bottom - 6}' fill='#5c6670'>... {len(rows) - len(shown)} more</text>")
    return "\n".join([*parts, *picture.legend(bottom), "</svg>", ""])


def _height(row: Row) -> int:
    return _LINK if row.is_link else _DEVICE


class _Picture:
    """The parts of the picture of one result."""

    def __init__(self, view: PlaceView, width: int) -> None:
        table = view.result.timetable
        self.to_text, self.span, self.names = view.to_text, table.latency_s, item_names(table)
        self.scale = (width - _MARGIN - 12) / self.span if self.span > 0 else 0.0
        self.waits = find_waits(table)
        self.critical = set(critical_items(self.waits, table.problem.num_ops))
        self.parts = graph_parts(table)

    def axis(self, bottom: int) -> Iterator[str]:
        """Return the ticks."""
        for time in find_ticks(self.span):
            yield svg_tick(_MARGIN + time * self.scale, self.to_text(time) if time else "0", bottom - 4)

    def row(self, row: Row, y: int) -> Iterator[str]:
        """Return a device or a link: name, ground, boxes."""
        height, size = _height(row), "10" if row.is_link else "12"
        name = escape(shorten(printable(row.name), 16 if row.is_link else 14))
        yield f"<text x='8' y='{y + height / 2 + 4:.0f}' font-size='{size}' fill='#1d2126'>{name}</text>"
        yield f"<rect x='{_MARGIN}' y='{y}' width='{self.span * self.scale:.1f}' height='{height}' fill='#edf0f0'/>"
        for index in visible_boxes(row.starts, row.ends, self.scale):
            yield self._box(row, index, y)

    def _box(self, row: Row, index: int, y: int) -> str:
        item = int(row.items[index])
        left, width = _MARGIN + float(row.starts[index]) * self.scale, float(row.ends[index] - row.starts[index])
        width *= self.scale
        is_critical = item in self.critical
        fill = part_colour(float(self.parts[item]), is_strong=is_critical)
        mark = "box critical" if is_critical else "box"
        box = (f"<rect class='{mark}' x='{left:.1f}' y='{y}' width='{max(0.5, width - (1 if width > 4 else 0)):.1f}' "
               f"height='{_height(row)}' fill='{fill}'")
        if width < _TITLED:
            return box + "/>"
        text = f"{box}><title>{escape(self._label(item))}</title></rect>"
        if not row.is_link and width >= _NAMED:
            ink = "#ffffff" if is_critical else "#16202a"
            text += (f"<text x='{left + width / 2:.1f}' y='{y + 16}' text-anchor='middle' font-size='11' fill='{ink}' "
                     f"pointer-events='none'>{escape(shorten(printable(self.names[item]), int(width / 6.5)))}</text>")
        return text

    def _label(self, item: int) -> str:
        start, end = float(self.waits.start_s[item]), float(self.waits.end_s[item])
        times = f"{self.to_text(start)} to {self.to_text(end)} ({self.to_text(end - start)})"
        return f"{printable(self.names[item])}: {times}, waited for {WHY[self.waits.why[item]]}"

    def legend(self, bottom: int) -> Iterator[str]:
        """Return what colours mean."""
        x, y = float(_MARGIN), bottom + 8
        for strong, text in ((True, "on the critical path"), (False, "others, from first to last operator")):
            for step in range(6):
                fill = part_colour(step / 5, is_strong=strong)
                yield f"<rect x='{x + 11 * step:.0f}' y='{y}' width='11' height='10' fill='{fill}'/>"
            yield f"<text x='{x + 72:.0f}' y='{y + 9}' font-size='11' fill='#5c6670'>{text}</text>"
            x += 96 + 6 * len(text)
        yield svg_swatch(x, y, "#edf0f0", "idle")
