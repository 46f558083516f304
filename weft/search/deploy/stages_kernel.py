"""Compiled dynamic programs of ``weft.search.deploy.stages``.

A state says how many devices of each device group are in use, as a number with the digits of ``digits``: the first
device group counts least. ``taken`` is [places, device groups], what a stage there takes; ``work`` is [places,
groups + 1], the work of the groups before each; ``crossing`` is [places, groups + 1].
"""

from __future__ import annotations

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64


@compiled
def _before(digits: I64, taken: I64, state: int) -> int:
    """Return the state before a stage that takes so much was added; -1 if there is none."""
    weight, rest, before = 1, state, state
    for group in range(len(digits)):
        if rest % digits[group] < taken[group]:
            return -1
        before -= taken[group] * weight
        rest //= digits[group]
        weight *= digits[group]
    return before


@compiled
def _num_states(digits: I64) -> int:
    number = 1
    for digit in digits:
        number *= digit
    return number


@compiled
def least_limit(digits: I64, taken: I64, work: F64, crossing: F64) -> float:
    """Return the least bottleneck of a pipeline of all groups: the time of its slowest stage or crossing."""
    num_states, num_groups = _num_states(digits), work.shape[1] - 1
    best = np.full((num_states, num_groups + 1), np.inf)
    best[:, 0] = 0.0
    for state in range(1, num_states):
        for place in range(len(taken)):
            before = _before(digits, taken[place], state)
            if before < 0:
                continue
            for stop in range(1, num_groups + 1):
                for first in range(stop):
                    value = max(best[before, first], work[place, stop] - work[place, first], crossing[place, first])
                    best[state, stop] = min(best[state, stop], value)
    return float(best[:, num_groups].min())


@compiled
def least_sums(digits: I64, taken: I64, work: F64, crossing: F64, limit: float) -> tuple[F64, I64]:
    """Return the least sum of stages and crossings within the limit, by state, and [states, groups + 1, 2] last stages.

    A last stage is (place, first group). States whose devices are not all needed have the sum infinity.
    """
    num_states, num_groups = _num_states(digits), work.shape[1] - 1
    best = np.full((num_states, num_groups + 1), np.inf)
    last = np.zeros((num_states, num_groups + 1, 2), dtype=np.int64)
    best[0, 0] = 0.0
    for state in range(1, num_states):
        for place in range(len(taken)):
            before = _before(digits, taken[place], state)
            if before < 0:
                continue
            for first in range(num_groups):
                if best[before, first] == np.inf or crossing[place, first] > limit:
                    continue
                for stop in range(first + 1, num_groups + 1):
                    seconds = work[place, stop] - work[place, first]
                    if seconds > limit:
                        break
                    value = best[before, first] + seconds + crossing[place, first]
                    if value < best[state, stop]:
                        best[state, stop] = value
                        last[state, stop, 0], last[state, stop, 1] = place, first
    return best[:, num_groups].copy(), last
