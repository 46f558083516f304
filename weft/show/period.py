"""The part of a step that repeats: ``find_period(timeline)``.

In the steady state of a pipeline everything starts again after the same time: each stage's forward, backward and so on,
for the next ``K`` micro-batches. For each kind of compute (an instance's phase) the starts in order of time are

    s[0], s[1], s[2], ...        repeating where s[j + K] - s[j] = T

and the longest stretch of them that does is a span of time. Where the spans of all kinds overlap for a whole period,
the step repeats; one period in the middle is cut where the fewest computes are under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.model.graph import F64, Bool
from weft.plan.program import Op, Phase, Program
from weft.simulate.timeline import Timeline

MAX_MICROBATCHES: Final = 4
"""Periods of more micro-batches are not looked for."""
TOLERANCE: Final = 0.004
"""Relative to the period: starts that differ by less are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Where a step repeats, in seconds, and the one period that is marked."""

    start_s: float
    end_s: float
    period_start_s: float
    period_end_s: float
    num_microbatches: int
    """Micro-batches in one period."""

    @property
    def length_s(self) -> float:
        """Return how long one period takes."""
        return self.period_end_s - self.period_start_s


def find_period(timeline: Timeline) -> Period | None:
    """Return what repeats in the timeline, with the fewest micro-batches in a period; None where nothing does."""
    program = timeline.program
    if program is None:
        return None
    series = list(_series(program, timeline))
    for count in range(1, MAX_MICROBATCHES + 1):
        found = _repeating(series, count)
        if found is not None:
            (start_s, end_s), length_s = found
            first_s = _quietest(timeline, start_s, end_s, length_s)
            return Period(start_s=start_s, end_s=end_s, period_start_s=first_s, period_end_s=first_s + length_s,
                          num_microbatches=count)
    return None


def _series(program: Program, timeline: Timeline) -> Iterator[F64]:
    """Yield the starts of each kind of compute; where an instance has several devices, on one of them."""
    is_led = np.zeros(program.num_instructions, dtype=bool)
    ranks = program.rank_of()
    leaders = np.asarray([instance.ranks[0] for instance in program.instances], dtype=np.int64)
    computes = np.flatnonzero(program.op == Op.COMPUTE)
    is_led[computes] = leaders[program.instance[computes]] == ranks[computes]
    led = np.flatnonzero(is_led)
    keys = program.instance[led].astype(np.int64) * len(Phase) + program.phase[led]
    order = np.lexsort((timeline.start_s[led], keys))
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    yield from (timeline.start_s[led[part]] for part in np.split(order, bounds) if len(part))


def _repeating(series: list[F64], count: int) -> tuple[tuple[float, float], float] | None:
    """Return the span in which all starts come again after ``count`` micro-batches, and after which time."""
    if not series or min(map(len, series)) <= count:
        return None
    length_s = float(np.median(np.concatenate([starts[count:] - starts[:-count] for starts in series])))
    spans = [_longest_span(starts, count, length_s) for starts in series]
    known = [span for span in spans if span is not None]
    if length_s <= 0 or len(known) < len(spans):
        return None
    start_s, end_s = max(low for low, _ in known), min(high for _, high in known)
    return ((start_s, end_s), length_s) if end_s - start_s >= length_s * (1 - TOLERANCE) else None


def _longest_span(starts: F64, count: int, length_s: float) -> tuple[float, float] | None:
    """Return from when to when the starts repeat for the longest time."""
    fits: Bool = np.abs(starts[count:] - starts[:-count] - length_s) <= TOLERANCE * length_s
    edges = np.flatnonzero(np.diff(np.concatenate(([False], fits, [False])).astype(np.int8)))
    spans = [(float(starts[first]), float(starts[last - 1 + count])) for first, last in zip(
        edges[::2], edges[1::2], strict=True)]
    return max(spans, key=lambda span: span[1] - span[0], default=None)


def _quietest(timeline: Timeline, start_s: float, end_s: float, length_s: float) -> float:
    """Return where to cut a period out of the middle of the span: at the start before which the fewest computes run."""
    runs = np.flatnonzero(timeline.runs)
    starts, ends = np.sort(timeline.start_s[runs]), np.sort(timeline.end_s[runs])
    middle_s = (start_s + end_s - length_s) / 2
    low, high = max(start_s, middle_s - length_s / 2), min(end_s - length_s, middle_s + length_s / 2)
    slack = 1e-9 * length_s
    cuts = np.unique(starts[(starts >= low - slack) & (starts <= high + slack)])
    if not len(cuts):
        return max(start_s, middle_s)
    under_way = np.searchsorted(starts, cuts - slack) - np.searchsorted(ends, cuts + slack, side="right")
    return float(cuts[int(np.argmin(under_way))])
