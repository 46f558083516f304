"""A time and where it comes from: measured, given, fitted or derived from peak rates.

Every cost that Weft shows carries its source. A sum is only as good as its weakest part: adding a ``roofline`` figure
to a ``measured`` one gives a ``roofline`` figure. Figures of zero seconds do not weaken a sum.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Source(enum.Enum):
    """Where a figure comes from, weakest first."""

    ROOFLINE = "roofline"
    """From peak rates and an efficiency of the operator's class."""
    FITTED = "fitted"
    """From a formula whose parameters were fitted to measurements."""
    MEASURED = "measured"
    """Timed on the device."""
    GIVEN = "given"
    """Written in the graph file; as good as measured."""

    @property
    def code(self) -> int:
        """Return the number that arrays hold for this source: the weaker, the smaller."""
        return _CODES[self]


SOURCES: tuple[Source, ...] = tuple(Source)
"""All sources by code."""
_CODES = {source: code for code, source in enumerate(SOURCES)}


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds and their source."""

    seconds: float
    source: Source

    def __add__(self, other: Figure) -> Figure:
        return combine((self, other))


ZERO = Figure(0.0, Source.GIVEN)
"""Nothing to do takes no time, whatever one measures."""


def combine(figures: Iterable[Figure]) -> Figure:
    """Return the sum of ``figures`` with the weakest source among those that are not zero."""
    seconds, code = 0.0, ZERO.source.code
    for figure in figures:
        seconds += figure.seconds
        if figure.seconds > 0:
            code = min(code, figure.source.code)
    return Figure(seconds, SOURCES[code])
