"""A Gantt chart as a static SVG picture, for documents: one row per device, computes above, communication below.

Each micro-batch has its own hue; backward is darker than forward. Instructions narrower than half a pixel are left out
where another one lies within the same pixel, so that the picture's size is bounded by its width and number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from os import PathLike
from typing import Final

import numpy as np

from weft.base.files import write_atomic
from weft.base.units import format_time
from weft.model.graph import I64
from weft.plan.program import Op, Phase, Program
from weft.show.drawing import box_colour, find_ticks, svg_head, svg_tick, text_colour, visible_boxes
from weft.show.gantt import SHADES
from weft.show.names import printable, shorten
from weft.simulate.timeline import Timeline

_MARGIN: Final = 96
_COMPUTE: Final = 24
_COMMUNICATION: Final = 8
_ROW: Final = 44
_TOP: Final = 30


def write_svg(path: str | PathLike[str], timeline: Timeline, program: Program, *, width: int = 960,
              max_rows: int = 16) -> None:
    """Write the picture to the file, whole or not at all."""
    write_atomic(path, render_svg(timeline, program, width=width, max_rows=max_rows))


def render_svg(timeline: Timeline, program: Program, *, width: int = 960, max_rows: int = 16) -> str:
    """Return the picture's text; of more than ``max_rows`` devices the last are left out, and their number is said."""
    num_rows = timeline.num_ranks if timeline.num_ranks <= max_rows else max(1, max_rows - 1)
    left_out = timeline.num_ranks - num_rows
    height = _TOP + num_rows * _ROW + (24 if left_out else 0)
    scale = (width - _MARGIN - 12) / timeline.step_time_s if timeline.step_time_s > 0 else 0.0
    title = f"{printable(program.plan.model.name)}: {timeline.kind} step of {format_time(timeline.step_time_s)}"
    parts = [*svg_head(title, width, height), *_axis(timeline.step_time_s, scale, height)]
    for rank in range(num_rows):
        parts += _row(timeline, program, rank, scale, _TOP + rank * _ROW)
    if left_out:
        parts.append(f"<text x='8' y='{height - 8}' fill='#5c6670'>... {left_out} more</text>")
    return "\n".join([*parts, "</svg>", ""])


def _axis(step_time_s: float, scale: float, height: int) -> Iterator[str]:
    for time_s in find_ticks(step_time_s):
        yield svg_tick(_MARGIN + time_s * scale, format_time(time_s) if time_s else "0", height - 6)


def _row(timeline: Timeline, program: Program, rank: int, scale: float, y: int) -> Iterator[str]:
    name = escape(shorten(printable(timeline.devices[rank]), 13))
    yield f"<text x='8' y='{y + 17}' font-weight='600' fill='#1d2126'>{name}</text>"
    right = timeline.step_time_s * scale
    yield f"<rect x='{_MARGIN}' y='{y}' width='{right:.1f}' height='{_COMPUTE}' fill='#f1f2f2'/>"
    instructions = np.arange(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1]))
    runs = timeline.runs[instructions]
    for index in _visible(timeline, instructions[~runs], scale):
        yield _box(timeline, program, index, scale, y + _COMPUTE + 2, _COMMUNICATION)
    for index in _visible(timeline, instructions[runs], scale):
        yield _box(timeline, program, index, scale, y, _COMPUTE)
        width = (timeline.end_s[index] - timeline.start_s[index]) * scale
        if program.op[index] == Op.COMPUTE and width >= 7 * len(str(int(program.microbatch[index]))) + 4:
            middle = _MARGIN + (timeline.start_s[index] + timeline.end_s[index]) / 2 * scale
            ink = text_colour(SHADES[Phase(int(program.phase[index]))])
            yield (f"<text x='{middle:.1f}' y='{y + 16}' text-anchor='middle' font-size='11' font-weight='600' "
                   f"fill='{ink}'>{int(program.microbatch[index])}</text>")


def _visible(timeline: Timeline, instructions: I64, scale: float) -> list[int]:
    """Return the instructions to draw, by start: of those narrower than half a pixel one for each pixel."""
    shown: list[int] = instructions[
        visible_boxes(timeline.start_s[instructions], timeline.end_s[instructions], scale)].tolist()
    return shown


def _box(timeline: Timeline, program: Program, index: int, scale: float, y: int, height: int) -> str:
    x = _MARGIN + timeline.start_s[index] * scale
    width = max(0.5, (timeline.end_s[index] - timeline.start_s[index]) * scale - 0.5)
    return (f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{height}' fill='{_colour(program, index)}'>"
            f"<title>{escape(printable(program.label(index)))}</title></rect>")


def _colour(program: Program, index: int) -> str:
    """Return the micro-batch's hue, darker for backward and darkest for weight gradients; grey for the rest."""
    shade = SHADES[Phase(int(program.phase[index]))]
    if program.op[index] in (Op.SEND, Op.RECV):
        shade = "backward" if program.channels[int(program.channel[index])].kind == "gradient" else "forward"
    return box_colour(int(program.microbatch[index]), program.plan.microbatches, shade)
