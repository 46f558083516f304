"""The chart model: rows of boxes over time. It is drawn as text and SVG by ``drawing``, and on a page by ``page``.

    Chart    rows, the time they span, what a box looks like, legend, and the part that repeats (``Steady``)
    Row      what one device does, or one thing that transfers occupy: boxes by start, each with the number of an item
    Look     mark, colours and words of an item

Charts are made by ``timeline_chart`` (plans and runs), ``schedule_chart`` and ``place_chart``. Times are seconds, or
plain numbers where a problem has no units. Each micro-batch has its own hue, the same in every row; backward is darker
than forward, weight gradients are darkest. In text a digit is the forward of a micro-batch, a small letter its
backward, a capital its weight gradients.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from weft.model.graph import F64, I64, Bool

Shade = Literal["forward", "backward", "weight"]

NEUTRAL: Final = "#76808a"
"""For what belongs to no micro-batch."""
DARK: Final = "#16202a"
_LIGHT: Final = (75, 179, 214, 140, 80, 210, 114, 222, 146, 109)
"""Of the 256-colour palette, by the last digit of the micro-batch; backward is drawn on a darker one."""
_DEEP: Final = (25, 65, 130, 54, 30, 88, 28, 94, 60, 23)


class Tone(NamedTuple):
    """How a shade is drawn."""

    meaning: str
    first: str
    """The mark of micro-batch 0."""
    lightness: float
    ink: str
    terminal_ink: int
    papers: tuple[int, ...]


TONES: Final[dict[Shade, Tone]] = {"forward": Tone("forward", "0", 0.74, DARK, 16, _LIGHT),
                                   "backward": Tone("backward", "a", 0.45, "#ffffff", 231, _DEEP),
                                   "weight": Tone("weight gradients", "A", 0.34, "#ffffff", 231, _DEEP)}


class Look(NamedTuple):
    """What a box looks like."""

    mark: str
    """Its character in text."""
    style: str
    """Of that character in a terminal."""
    fill: str
    """Its colour ``#rrggbb`` in a picture."""
    ink: str
    """The colour of what is written on it."""
    text: str
    """Written on it where there is room."""
    tip: str
    """Said about it."""
    is_joint: bool = False
    """It is on several devices: outlined."""
    is_strong: bool = False


class Key(NamedTuple):
    """An entry of a picture's legend."""

    fills: tuple[str, ...]
    text: str
    stroke: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The span of time in which everything repeats, and the period in it that is marked."""

    start: float
    end: float
    period_start: float
    period_end: float
    num_microbatches: int
    """Micro-batches in one period."""

    @property
    def length(self) -> float:
        """Return how long one period takes."""
        return self.period_end - self.period_start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """What one device does, or one thing that transfers occupy; by start."""

    name: str
    items: I64
    starts: F64
    ends: F64
    busy: float
    """Time in which something runs."""
    is_link: bool = False
    is_message: Bool | None = None
    """Boxes that are messages of the device, drawn thinly below the others and not in text; None: there are none."""
    half: I64 | None = None
    """Of boxes that run at once: 1 for the one in the upper half of the row, 2 for the lower; else 0. None: all 0."""
    steady: tuple[float, float] | None = None
    """From the first steady box's start to the last one's end; None where no whole period is there."""

    def share(self, whole: float) -> float:
        """Return the part of the whole time in which something runs."""
        return self.busy / whole if whole > 0 else 0.0

    def only(self, which: Bool | I64) -> Row:
        """Return the row with only some of its boxes."""
        return replace(self, items=self.items[which], starts=self.starts[which], ends=self.ends[which],
                       is_message=None if self.is_message is None else self.is_message[which],
                       half=None if self.half is None else self.half[which])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """All that is drawn."""

    title: str
    rows: tuple[Row, ...]
    span: float
    """The time that is drawn, from 0."""
    look: Callable[[int], Look]
    """What the boxes of an item look like."""
    to_text: Callable[[float], str]
    """How times are written."""
    legend: str
    """What the marks of the text mean."""
    keys: tuple[Key, ...]
    """What the colours of the picture mean."""
    steady: Steady | None = None
    shortest: float = 0.0
    """The shortest box that is to be seen: whole periods are left out until there is room for it."""
    gap: float | None = None
    """Where whole periods are left out."""
    num_periods: int = 0
    """How many are."""

    @property
    def left_out(self) -> float:
        """Return how much time is left out at the gap."""
        return self.num_periods * self.steady.length if self.steady else 0.0

    @property
    def whole(self) -> float:
        """Return the time of everything."""
        return self.span + self.left_out


def number(value: float) -> str:
    """Return a time or an amount of a problem, which have no units."""
    return f"{value:.6g}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, ``1 device`` or ``2 devices``."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def period_text(steady: Steady, to_text: Callable[[float], str]) -> str:
    """Return what the marked period is."""
    of = "" if steady.num_microbatches == 1 else f" for {steady.num_microbatches} micro-batches"
    return f"period: {to_text(steady.length)}{of}"


# ---- looks


def box_colour(microbatch: int, num_microbatches: int, shade: Shade) -> str:
    """Return the colour ``#rrggbb`` of a micro-batch's box."""
    if microbatch < 0:
        return NEUTRAL
    step = 1 / num_microbatches if num_microbatches <= 10 else 0.382
    return _hex((0.52 + microbatch * step) % 1, TONES[shade].lightness, 0.55)


def part_colour(part: float, *, is_strong: bool = False) -> str:
    """Return the colour ``#rrggbb`` of what is at ``part`` (0 to 1) of a graph: from blue over green and yellow to red.

    What is strong has a full colour, the rest a pale one.
    """
    return _hex(0.62 * (1 - part), *((0.40, 0.62) if is_strong else (0.80, 0.50)))


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * value):02x}" for value in colorsys.hls_to_rgb(hue, lightness, saturation))


def microbatch_look(microbatch: int, num_microbatches: int, shade: Shade, *, tip: str, is_joint: bool = False) -> Look:
    """Return the look of a micro-batch's box; of more than ten the last digit counts in text."""
    tone, digit = TONES[shade], microbatch % 10
    style = f"color({tone.terminal_ink}) on color({tone.papers[digit]})" + (" bold underline" if is_joint else "")
    return Look(mark=chr(ord(tone.first) + digit), style=style, fill=box_colour(microbatch, num_microbatches, shade),
                ink=tone.ink, text=str(microbatch), tip=tip, is_joint=is_joint)


def part_look(part: float, letter: int, *, text: str, tip: str, is_strong: bool) -> Look:
    """Return the look of what is at ``part`` of a graph: a letter, a capital if it is strong."""
    fill, ink = part_colour(part, is_strong=is_strong), "#ffffff" if is_strong else DARK
    return Look(mark=chr(ord("A" if is_strong else "a") + letter), fill=fill, ink=ink, text=text, tip=tip,
                style=f"{'bold ' if is_strong else ''}{ink} on {fill}", is_strong=is_strong)


def marks_legend(shades: Collection[Shade], num_microbatches: int) -> str:
    """Return what the characters of the shades in use mean, or nothing where none is in use."""
    last = min(num_microbatches, 10) - 1
    parts = [(f"{tone.first}-{chr(ord(tone.first) + last)}" if last else tone.first) + f" {tone.meaning}"
             for shade, tone in TONES.items() if shade in shades]
    note = " of the micro-batch" + ("" if num_microbatches <= 10 else " (its last digit)")
    return ", ".join(parts) + note if parts else ""


def shade_keys(shades: Collection[Shade], num_microbatches: int) -> list[Key]:
    """Return the legend of the shades in use, in the colours of the first micro-batch."""
    return [Key((box_colour(0, num_microbatches, shade),), tone.meaning) for shade, tone in TONES.items()
            if shade in shades]


# ---- the period, long charts


def quietest_cut(cuts: F64, starts: F64, ends: F64, slack: float) -> float:
    """Return the time of ``cuts`` at which the fewest of the boxes run, of equals the nearest to the middle."""
    running = np.searchsorted(np.sort(starts), cuts - slack) - np.searchsorted(np.sort(ends), cuts + slack)
    distance = np.round(np.abs(cuts - (cuts[0] + cuts[-1]) / 2) / slack) if slack > 0 else cuts
    return float(cuts[np.lexsort((distance, running))[0]])


def shortened(chart: Chart, max_span: float) -> Chart:
    """Return the chart with whole periods left out, no more than needed to fit ``max_span`` if that can be."""
    steady = chart.steady
    if steady is None or chart.span <= max_span:
        return chart
    period = steady.length
    begin = steady.period_start - period * int((steady.period_start - steady.start) / period + 1e-9)
    num_periods = min(int(np.ceil((chart.span - max_span) / period)), int((steady.end - begin) / period + 1e-9) - 2)
    if num_periods < 1:
        return chart
    gap, left_out = begin + period, num_periods * period
    return replace(chart, rows=tuple(_without_gap(row, gap, left_out) for row in chart.rows), gap=gap,
                   span=chart.span - left_out, num_periods=num_periods,
                   steady=replace(steady, end=steady.end - left_out, period_start=begin, period_end=gap))


def _without_gap(row: Row, gap: float, left_out: float) -> Row:
    """Return the row with the time from ``gap`` on, so long, taken out; boxes that the gap cuts are shortened."""
    def moved(times: F64) -> F64:
        return np.where(times <= gap, times, np.maximum(gap, times - left_out))

    starts, ends = moved(row.starts), moved(row.ends)
    steady = None if row.steady is None else moved(np.asarray(row.steady)).tolist()
    kept = (ends > starts) | (row.ends <= row.starts) & (starts != gap)
    return replace(row, starts=starts, ends=ends, steady=steady and (steady[0], steady[1])).only(kept)
