"""What all Gantt charts share: colours and marks of micro-batches, cells of a text chart, ticks, boxes worth drawing.

Each micro-batch has its own hue, the same in every row; backward is darker than forward, weight gradients are darkest.
In text a digit is the forward of a micro-batch, a small letter its backward, a capital its weight gradients.
"""

from __future__ import annotations

import colorsys
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import IO, Final, Literal

import numpy as np

from weft.model.graph import F64, I64

Shade = Literal["forward", "backward", "weight"]

IDLE: Final = "."
NEUTRAL: Final = "#76808a"
"""For what belongs to no micro-batch."""
FONT: Final = "font-family='system-ui, -apple-system, Segoe UI, Liberation Sans, sans-serif'"
MEANING: Final[dict[Shade, str]] = {"forward": "forward", "backward": "backward", "weight": "weight gradients"}
_FIRST: Final[dict[Shade, str]] = {"forward": "0", "backward": "a", "weight": "A"}
_LIGHTNESS: Final[dict[Shade, float]] = {"forward": 0.74, "backward": 0.45, "weight": 0.34}
_LIGHT: Final = (75, 179, 214, 140, 80, 210, 114, 222, 146, 109)
"""Of the 256-colour palette, by the last digit of the micro-batch; backward is drawn on a darker one."""
_DARK: Final = (25, 65, 130, 54, 30, 88, 28, 94, 60, 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A line of a text chart; one of a row has a style for each cell, from column ``first`` on."""

    text: str
    first: int = 0
    styles: tuple[str, ...] = ()


def number(value: float) -> str:
    """Return a time or an amount of a problem, which have no units."""
    return f"{value:.6g}"


def row_line(name: str, marks: Sequence[str], styles: Sequence[str], busy: float) -> ChartLine:
    """Return a row of cells between its name and the part of the time in which it is busy."""
    return ChartLine(text=f"{name} |{''.join(marks)}| {100 * busy:4.0f} %", first=len(name) + 2, styles=tuple(styles))


def print_chart(lines: Callable[[int], Sequence[ChartLine]], *, width: int | None = None,
                file: IO[str] | None = None) -> None:
    """Draw the lines that a width means on ``file`` (stdout): ``width`` or the terminal's, in colour on a terminal."""
    from rich.text import Text

    from weft.show.tables import make_console

    stream = sys.stdout if file is None else file
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    wide = width or (shutil.get_terminal_size((100, 24)).columns if is_terminal else 100)
    console = make_console(stream, max(30, wide))
    for line in lines(wide):
        text, first = Text(line.text, no_wrap=True), line.first
        for style, run in groupby(line.styles):
            last = first + len(list(run))
            text.stylize(style, first, last)
            first = last
        console.print(text)
    console.print()


def box_colour(microbatch: int, num_microbatches: int, shade: Shade) -> str:
    """Return the colour ``#rrggbb`` of a micro-batch's box."""
    if microbatch < 0:
        return NEUTRAL
    step = 1 / num_microbatches if num_microbatches <= 10 else 0.382
    red, green, blue = colorsys.hls_to_rgb((0.52 + microbatch * step) % 1, _LIGHTNESS[shade], 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def part_colour(part: float, *, is_strong: bool = False) -> str:
    """Return the colour ``#rrggbb`` of what is at ``part`` (0 to 1) of a graph: from blue over green and yellow to red.

    What is strong has a full colour, the rest a pale one.
    """
    lightness, saturation = (0.40, 0.62) if is_strong else (0.80, 0.50)
    red, green, blue = colorsys.hls_to_rgb(0.62 * (1 - part), lightness, saturation)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def part_style(part: float, *, is_strong: bool = False) -> str:
    """Return the terminal style of a cell with that colour."""
    return f"{'bold #ffffff' if is_strong else '#16202a'} on {part_colour(part, is_strong=is_strong)}"


def text_colour(shade: Shade) -> str:
    """Return the colour of a number on a box."""
    return "#16202a" if shade == "forward" else "#ffffff"


def cell_mark(microbatch: int, shade: Shade) -> str:
    """Return the character for a micro-batch; of more than ten the last digit counts."""
    return chr(ord(_FIRST[shade]) + microbatch % 10)


def cell_style(microbatch: int, shade: Shade) -> str:
    """Return the terminal style of a micro-batch's cell."""
    ink, paper = (16, _LIGHT[microbatch % 10]) if shade == "forward" else (231, _DARK[microbatch % 10])
    return f"color({ink}) on color({paper})"


def marks_legend(shades: Collection[Shade], num_microbatches: int) -> str:
    """Return what the characters of the shades in use mean, or nothing where none is in use."""
    last = min(num_microbatches, 10) - 1
    parts = [(f"{first}-{chr(ord(first) + last)}" if last else first) + f" {MEANING[shade]}"
             for shade, first in _FIRST.items() if shade in shades]
    note = " of the micro-batch" + ("" if num_microbatches <= 10 else " (its last digit)")
    return ", ".join(parts) + note if parts else ""


def fill_cells(starts: F64, ends: F64, span: float, num_cells: int) -> I64:
    """Return which box fills most of each cell of the time from 0 to ``span``, or -1 where over half of it is idle."""
    shown = np.full(num_cells, -1, dtype=np.int64)
    if span <= 0:
        return shown
    most, busy = np.zeros(num_cells), np.zeros(num_cells)
    scale = num_cells / span
    for index, (low, high) in enumerate(zip((starts * scale).tolist(), (ends * scale).tolist(), strict=True)):
        for cell in range(int(low + 1e-9), min(num_cells, int(np.ceil(high - 1e-9)))):
            covered = min(high, cell + 1) - max(low, cell)
            busy[cell] += covered
            if covered > most[cell] + 1e-9:
                most[cell], shown[cell] = covered, index
    shown[busy < 0.5 - 1e-9] = -1
    return shown


def visible_boxes(starts: F64, ends: F64, scale: float) -> list[int]:
    """Return the boxes to draw, by start: of those narrower than half a pixel one for each pixel."""
    order = np.argsort(starts, kind="stable")
    is_wide = (ends[order] - starts[order]) * scale >= 0.5
    pixel = np.floor(starts[order] * scale)
    is_new = np.concatenate(([True], np.diff(pixel) > 0)) if len(order) else is_wide
    shown: list[int] = order[is_wide | is_new].tolist()
    return shown


def find_ticks(span: float) -> list[float]:
    """Return round times from 0 to ``span``, eight or so."""
    rough = span / 8 or 1.0
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(span / step + 1e-9) + 1)]


def svg_head(title: str, width: int, height: int) -> list[str]:
    """Return the first lines of a picture: its size, its title and a white ground. ``</svg>`` ends it."""
    return [f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' role='img' {FONT} font-size='12'>",
            f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='#ffffff'/>"]


def svg_tick(x: float, text: str, bottom: int) -> str:
    """Return one line of a picture's time axis, from the text down to ``bottom``."""
    return (f"<line x1='{x:.1f}' x2='{x:.1f}' y1='22' y2='{bottom}' stroke='#e3e5e6'/>\n"
            f"<text x='{x:.1f}' y='15' text-anchor='middle' fill='#5c6670'>{text}</text>")


def svg_swatch(x: float, y: float, fill: str, text: str, stroke: str = "none") -> str:
    """Return one entry of a picture's legend."""
    return (f"<rect x='{x:.0f}' y='{y:.0f}' width='11' height='10' fill='{fill}' stroke='{stroke}'/>\n"
            f"<text x='{x + 16:.0f}' y='{y + 9:.0f}' font-size='11' fill='#5c6670'>{text}</text>")


def text_axis(span: float, num_cells: int, to_text: Callable[[float], str]) -> str:
    """Return the times at the left end, the middle and the right end, as far as there is room."""
    end, middle = to_text(span), to_text(span / 2)
    text = "0".ljust(num_cells - len(end)) + end
    at = num_cells // 2 - len(middle) // 2
    if at > 2 and at + len(middle) + 2 < num_cells - len(end):
        text = text[:at] + middle + text[at + len(middle):]
    return text


def wrapped(text: str, width: int) -> list[str]:
    """Return the text in lines of at most ``width`` characters."""
    return textwrap.wrap(text, width, break_on_hyphens=False)
