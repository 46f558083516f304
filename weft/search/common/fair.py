"""How many samples each of several unequal devices takes, so that all of them end at about the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from weft.plan.plan import split_samples

ROUNDS: Final = 3
"""Of shares by the speeds that devices have with the shares before."""
MOVES: Final = 4
"""Single samples that are moved then, for each device."""


def fair_samples(size: int, num_members: int, seconds: Callable[[int, float], float]) -> tuple[int, ...]:
    """Return the samples of each member, together ``size``; ``seconds(member, samples)`` is what it takes for so many.

    Speeds depend on the number of samples, so shares by speed are only the beginning. Samples are then moved one by one
    from the slowest to whoever would still be quicker with one more.

    >>> fair_samples(10, 2, lambda member, samples: samples * (1, 4)[member])
    (8, 2)
    """
    even = max(1.0, size / num_members)
    counts = split_samples(size, tuple(1.0 / max(seconds(member, even), 1e-12) for member in range(num_members)))
    best = counts, _times(counts, seconds)
    for _ in range(ROUNDS):
        if not all(counts):
            break
        counts = split_samples(size, tuple(count / max(time_s, 1e-12) for count, time_s in zip(
            counts, _times(counts, seconds), strict=True)))
        if counts == best[0]:
            break
        best = min(best, (counts, _times(counts, seconds)), key=lambda item: max(item[1]))
    found, times = list(best[0]), list(best[1])
    for _ in range(MOVES * num_members):
        slowest = max(range(num_members), key=lambda member: times[member])
        if found[slowest] <= 1:
            break
        longer = {member: seconds(member, found[member] + 1) for member in range(num_members) if member != slowest}
        target = min(longer, key=lambda member: longer[member], default=slowest)
        if target == slowest or longer[target] >= times[slowest]:
            break
        found[slowest] -= 1
        found[target] += 1
        times[slowest], times[target] = seconds(slowest, found[slowest]), longer[target]
    return tuple(found)


def _times(counts: tuple[int, ...], seconds: Callable[[int, float], float]) -> tuple[float, ...]:
    return tuple(seconds(member, count) if count else 0.0 for member, count in enumerate(counts))
