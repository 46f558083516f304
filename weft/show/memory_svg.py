"""Memory over time as small drawings for the page: for each device what it holds, by category, under its capacity.

Devices that hold the same at the same times share one drawing. A drawing has so many columns that no peak is lost: each
shows the largest total within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.model.graph import I64
from weft.plan.memory import CATEGORIES
from weft.simulate.timeline import Timeline

MAX_PANELS: Final = 24
"""Of more different devices, those that are fullest are drawn."""
COLUMNS: Final = 120
_HEIGHT: Final = 72
_MARGIN: Final = 1.06
_FAR: Final = 4
"""A capacity that is more than so many times the peak is not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPanel:
    """What some devices hold over the step."""

    devices: tuple[str, ...]
    capacity_bytes: int | None
    num_bytes: I64
    """[column, category], in the order of ``CATEGORIES``."""

    @property
    def peak_bytes(self) -> int:
        """Return the largest total."""
        return int(self.num_bytes.sum(axis=1).max())

    @property
    def shows_capacity(self) -> bool:
        """Return whether the capacity is near enough to be drawn."""
        return self.capacity_bytes is not None and self.capacity_bytes <= _FAR * self.peak_bytes


def memory_panels(timeline: Timeline, capacities: Mapping[str, int | None]) -> tuple[MemoryPanel, ...]:
    """Return what the devices hold, alike ones together, in the order of the first of each; idle ones are left out."""
    groups: dict[tuple[int | None, bytes], tuple[list[str], I64]] = {}
    for rank, device in enumerate(timeline.devices):
        columns = _columns(timeline, rank)
        if columns.any():
            key = (capacities.get(device), columns.tobytes())
            groups.setdefault(key, ([], columns))[0].append(device)
    return tuple(MemoryPanel(devices=tuple(devices), capacity_bytes=capacity, num_bytes=columns)
                 for (capacity, _), (devices, columns) in groups.items())


def fullest(panels: Sequence[MemoryPanel]) -> tuple[MemoryPanel, ...]:
    """Return the panels to draw, in their order: all, or those that are fullest."""
    if len(panels) <= MAX_PANELS:
        return tuple(panels)
    by_use = sorted(range(len(panels)), key=lambda index: -panels[index].peak_bytes / (
        panels[index].capacity_bytes or 1))
    return tuple(panels[index] for index in sorted(by_use[:MAX_PANELS]))


def _columns(timeline: Timeline, rank: int) -> I64:
    """Return for each column of the drawing the row of the memory curve that is largest within it."""
    curve = timeline.memory_curve(rank)
    edges = np.linspace(0.0, timeline.step_time_s, COLUMNS + 1)
    first = np.maximum(np.searchsorted(curve.time_s, edges[:-1], side="right") - 1, 0)
    last = np.maximum(np.searchsorted(curve.time_s, edges[1:], side="left"), first + 1)
    total = curve.num_bytes.sum(axis=1)
    rows = [low + int(np.argmax(total[low:high])) for low, high in zip(first.tolist(), last.tolist(), strict=True)]
    result: I64 = curve.num_bytes[rows]
    return result


def scale_of(panels: Sequence[MemoryPanel]) -> int:
    """Return the peak that drawings without a capacity share as their scale."""
    return max((panel.peak_bytes for panel in panels if not panel.shows_capacity), default=1)


def panel_svg(panel: MemoryPanel, shared_peak: int) -> str:
    """Return the drawing as an ``svg`` element that fills the width it is given."""
    top = _MARGIN * max(panel.peak_bytes, (panel.capacity_bytes or 0) if panel.shows_capacity else shared_peak, 1)
    below = np.concatenate([np.zeros((COLUMNS, 1), dtype=np.int64), np.cumsum(panel.num_bytes, axis=1)], axis=1)
    parts = [f'<path class="{name}" d="{"".join(_area(below[:, index], below[:, index + 1], top))}"/>'
             for index, name in enumerate(CATEGORIES) if panel.num_bytes[:, index].any()]
    if panel.shows_capacity and panel.capacity_bytes is not None:
        y = _HEIGHT * (1 - panel.capacity_bytes / top)
        parts.append(f'<line class="limit" x1="0" x2="{COLUMNS}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return (f'<svg class="memory" viewBox="0 0 {COLUMNS} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
            f'{"".join(parts)}</svg>')


def _area(low: I64, high: I64, top: float) -> Iterator[str]:
    """Yield the path of an area between two lines of steps."""
    forth, back = _steps(high, top), _steps(low[::-1], top)
    yield f"M0 {forth[0][1]}"
    yield from (f"V{y}H{x}" for x, y in forth)
    yield from (f"V{y}H{COLUMNS - x}" for x, y in back)
    yield "Z"


def _steps(values: I64, top: float) -> list[tuple[int, str]]:
    """Return (end, height) of each run of equal heights, as numbers of the drawing."""
    heights = [f"{_HEIGHT * (1 - value / top):.1f}".removesuffix(".0") for value in values.tolist()]
    ends = [index for index in range(1, len(heights)) if heights[index] != heights[index - 1]]
    return [(end, heights[end - 1]) for end in (*ends, len(heights))]
