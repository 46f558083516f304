"""What each device of a timeline waits for: fill, other devices' work, messages on their way, the end of the step.

For every compute (or optimizer step) the gap before it divides into *exposed communication*, while something it needs
is on its way, and the rest, in which whoever sends it last is not done yet. The gap before a device's first compute is
its *fill*, the time after its last one its *drain*. As in ``Timeline``, busy + exposed + bubble is the step; the bubble
is fill + waiting for others + drain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64, I64
from weft.plan.program import Op, Program
from weft.simulate.timeline import Timeline, union_lengths

GRADIENTS = "gradients"
"""The partner of a device that waits for an exchange of gradients."""
UNIT = "itself"
"""The partner where a device waits for nothing that is sent: a processing unit that it shares, or its own team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWaits:
    """Where the time of one device goes, and whom it waits for."""

    device: str
    busy_s: float
    fill_s: float
    """Before its first compute, less what is on its way then."""
    drain_s: float
    """After its last compute."""
    for_others_s: dict[str, float]
    """By partner: its work is not done. The longest first."""
    exposed_s: dict[str, float]
    """By partner: what it sent is on its way. The longest first."""

    @property
    def longest(self) -> tuple[str, float]:
        """Return what is waited for most, in words, and for how long."""
        reasons = {"its first work": self.fill_s, "the end of the step": self.drain_s}
        for partner, seconds in self.for_others_s.items():
            reasons[f"computing on {partner}" if partner not in (GRADIENTS, UNIT) else
                    {GRADIENTS: "others before gradients", UNIT: "its processing unit"}[partner]] = seconds
        for partner, seconds in self.exposed_s.items():
            reasons["the exchange of gradients" if partner == GRADIENTS else f"messages from {partner}"] = seconds
        what = max(reasons, key=lambda reason: reasons[reason])
        return what, reasons[what]


def device_waits(timeline: Timeline) -> tuple[DeviceWaits, ...]:
    """Return what each device waits for; the timeline must know its program."""
    assert timeline.program is not None
    return tuple(_Waits(timeline, timeline.program).of(rank) for rank in range(timeline.num_ranks))


class _Waits:
    def __init__(self, timeline: Timeline, program: Program) -> None:
        self.timeline, self.program = timeline, program
        waiting, arriving = timeline.needs[:, 0], timeline.needs[:, 1]
        low = np.maximum(timeline.issue_s[waiting], timeline.start_s[arriving])
        high = np.minimum(timeline.start_s[waiting], timeline.end_s[arriving])
        kept = high > low
        self.exposed: F64 = np.zeros(len(waiting))
        self.exposed[kept] = union_lengths(waiting[kept], low[kept], high[kept])
        self.row_start: I64 = np.searchsorted(waiting, np.arange(timeline.num_instructions + 1))

    def of(self, rank: int) -> DeviceWaits:
        """Return what one rank waits for."""
        timeline = self.timeline
        first, last = int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1])
        runs = first + np.flatnonzero(timeline.runs[first:last])
        exposed: dict[str, float] = {}
        others: dict[str, float] = {}
        fill_s = 0.0
        for number, item in enumerate(runs.tolist()):
            rows = slice(int(self.row_start[item]), int(self.row_start[item + 1]))
            for arriving, part in zip(timeline.needs[rows, 1].tolist(), self.exposed[rows].tolist(), strict=True):
                _add(exposed, self._partner(arriving), part)
            rest = float(timeline.start_s[item] - timeline.issue_s[item] - self.exposed[rows].sum())
            if number == 0:
                fill_s = max(rest, 0.0)
            else:
                _add(others, self._last_partner(rows), rest)
        end_s = float(timeline.end_s[runs].max()) if len(runs) else 0.0
        return DeviceWaits(device=timeline.devices[rank], busy_s=float(timeline.busy_s[rank]), fill_s=fill_s,
                           drain_s=timeline.step_time_s - end_s, for_others_s=_longest_first(others),
                           exposed_s=_longest_first(exposed))

    def _partner(self, arriving: int) -> str:
        """Return who sends what a receive or collective brings."""
        if self.timeline.op[arriving] != Op.RECV:
            return GRADIENTS
        channel = self.program.channels[int(self.program.channel[arriving])]
        return self.timeline.devices[channel.source]

    def _last_partner(self, rows: slice) -> str:
        """Return who sends what arrives last among some needs."""
        arriving = self.timeline.needs[rows, 1]
        return self._partner(int(arriving[np.argmax(self.timeline.end_s[arriving])])) if len(arriving) else UNIT


def _add(totals: dict[str, float], name: str, seconds: float) -> None:
    if seconds > 0:
        totals[name] = totals.get(name, 0.0) + seconds


def _longest_first(totals: dict[str, float]) -> dict[str, float]:
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
