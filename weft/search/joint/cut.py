"""The one cutter: where a chain of pieces is cut into stages, for any of three objectives.

Places ``0 .. P`` are where stages may begin and end. Which of them stage ``s`` may go to from place ``a`` is what
memory allows (``weft.plan.piece_memory``): a stage may fit that ends later, though a shorter one does not, where much
crosses the shorter one's end. With ``t_s(a, b)`` the time of a stage and ``c(a)`` that of what is sent over a place,
cuts ``0 = k_0 < k_1 < ... < k_p = P`` are sought that make as small as possible

    the longest stage      max over s of t_s(k_s, k_(s+1))                                   (shortest_longest)
    the period of 1F1B     max over s of t_s, 2 c, and of what is in flight:                 (shortest_period)
                           (t_s + 2 c_s + t_(s+1) + ...) / min(m, p - s)
    the fullest device     max over s of need_s(k_s, k_(s+1)) / capacity_s                   (emptiest_fullest)

All three are bisections over a limit: cuts that keep to it are found in one pass or there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from weft.model.graph import F64, I64, Bool
from weft.search.joint.tuning import TUNING

Cuts = list[int]
Reach = Callable[[int, int], int]
"""From the place where a stage begins, and another behind it, to the last one up to that at which the stage may end.

The begin if it may end at none of them."""

_ROUNDING: Final = 1 + 1e-12


def shortest_longest(times: Sequence[F64], reach: Sequence[Reach], crossing: F64, *, slack: float = 0.0) -> list[Cuts]:
    """Return the cuts with the shortest longest stage, and such with stages as even as may be; none if none fits.

    ``times[s]`` are seconds up to each place. Stages may be shorter by the part ``slack`` of the limit where less of
    ``crossing`` is sent then.
    """
    def within(limit: float) -> Cuts | None:
        return _as_long_as_may_be(limit, times, reach, crossing, slack)

    best, limit = _bisect(within, 0.0, max(float(table[-1]) for table in times), TUNING.precision)
    if best is None:
        return []
    even = _as_long_as_may_be(limit * (1 + slack), times, reach, crossing, slack, even=True)
    return [best] if even is None else [best, even]


def emptiest_fullest(need: Callable[[int, int], F64], capacity: F64, num_places: int) -> Cuts:
    """Return the cuts that leave most free on the fullest device; ``need(stage, begin)`` is a row over the ends."""
    def within(limit: float) -> Cuts | None:
        cuts = [0]
        for stage, room in enumerate(limit * capacity):
            begin, last = cuts[-1], num_places - len(capacity) + stage
            fits = np.flatnonzero(need(stage, begin)[: last - begin + 1] <= room)
            if len(fits) == 0 or fits[-1] == 0:
                return None
            cuts.append(begin + int(fits[-1]))
        return cuts if cuts[-1] == num_places - 1 else None

    high = 1.0
    while within(high) is None:
        high *= 2
    best, _ = _bisect(within, 0.0, high, TUNING.precision)
    assert best is not None, "the last limit tried allows cuts"
    return best


def shortest_period(times: Sequence[F64], crossing_s: F64, may: Sequence[Bool],
                    in_flight: Sequence[int]) -> Cuts | None:
    """Return the cuts with the shortest period of 1F1B, or None if none fits; a device may stay without a stage.

    ``may[s]`` says by place where the stage begins and ends whether it may. From the last stage to the first,
    ``rest[a]`` is the least time from the begin of a stage at place ``a`` to the end of the model and back. Less is
    always better for the stages before, so the least is all that has to be kept.
    """
    index = np.arange(len(crossing_s))
    loads = [table[None, :] - table[:, None] for table in times]

    def within(period: float) -> Cuts | None:
        rest = np.where(index == len(index) - 1, 0.0, np.inf)
        choices: list[I64] = []
        slack = period * _ROUNDING
        for load, fits, flight in zip(reversed(loads), reversed(may), reversed(in_flight), strict=True):
            total = load + 2 * crossing_s[None, :] + rest[None, :]
            allowed = fits & (load <= slack) & (2 * crossing_s[None, :] <= slack) & (total <= flight * slack)
            np.fill_diagonal(total, rest)  # no stage on this device
            np.fill_diagonal(allowed, True)
            total[~allowed] = np.inf
            choices.append(np.argmin(total, axis=1))
            rest = total[index, choices[-1]]
        if not np.isfinite(rest[0]):
            return None
        cuts = [0]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return cuts

    highest = max(float(table[-1]) for table in times) + 2 * float(crossing_s.sum())
    return _bisect(within, 0.0, highest, TUNING.period_precision)[0]


def _bisect(within: Callable[[float], Cuts | None], low: float, high: float,
            precision: float) -> tuple[Cuts | None, float]:
    """Return the cuts of the lowest limit that allows any, and that limit; None if ``high`` allows none."""
    best = within(high)
    while best is not None and high - low > precision * high:
        middle = (low + high) / 2
        cuts = within(middle)
        low, high = (low, middle) if cuts is not None else (middle, high)
        best = best if cuts is None else cuts
    return best, high


def _as_long_as_may_be(limit: float, times: Sequence[F64], reach: Sequence[Reach], crossing: F64, slack: float, *,
                       even: bool = False) -> Cuts | None:
    """Return cuts in which no stage takes longer than the limit, or None.

    Each stage in turn takes as much as the limit and its memory allow, which leaves least for the rest (``even``: as
    near to an even part of what is left as that), less where not so much is to be sent then.
    """
    last_place = len(times[0]) - 1
    cuts = [0]
    for stage, (table, far) in enumerate(zip(times, reach, strict=True)):
        begin = cuts[-1]
        end = int(np.searchsorted(table, table[begin] + limit * _ROUNDING, side="right")) - 1
        end = far(begin, min(end, last_place - (len(times) - 1 - stage)))
        if end <= begin:
            return None
        longest = end
        if even and stage < len(times) - 1:
            wanted = table[begin] + (table[-1] - table[begin]) / (len(times) - stage)
            near = int(np.searchsorted(table, wanted))
            near -= near > 0 and wanted - table[near - 1] < table[min(near, last_place)] - wanted
            end = max(begin + 1, min(end, near))
        if slack and end < last_place:
            first = max(begin + 1, int(np.searchsorted(table, table[end] - slack * limit)))
            window = crossing[first : end + 1]
            end = first + int(np.flatnonzero(window <= TUNING.about_least * window.min())[-1])
        if end < longest:
            shorter = far(begin, end)
            end = shorter if shorter > begin else longest
        cuts.append(end)
    return cuts if cuts[-1] == last_place else None
