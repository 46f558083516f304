"""Samples for unequal devices."""

from __future__ import annotations

import itertools
import random

import pytest

from weft.search.common.problem import fair_samples


@pytest.mark.parametrize("seed", range(30))
def test_no_division_ends_sooner(seed):
    rng = random.Random(seed)
    num_members, size = rng.randint(2, 4), rng.randint(4, 14)
    start = [rng.uniform(0, 2) for _ in range(num_members)]
    each = [rng.choice((0.2, 1.0, 3.0)) for _ in range(num_members)]

    def seconds(member: int, samples: float) -> float:
        return start[member] + each[member] * samples ** (0.8 + 0.1 * member)

    def ends(counts: tuple[int, ...]) -> float:
        return max(seconds(member, count) for member, count in enumerate(counts) if count)

    found = fair_samples(size, num_members, seconds)
    assert sum(found) == size
    others = [counts for counts in itertools.product(range(1, size + 1), repeat=num_members) if sum(counts) == size]
    best = min(map(ends, others))
    assert ends(found) <= best * (1 + 1e-9) or not all(found), (found, ends(found), best)


def test_equal_devices_among_slower_ones_all_give_a_sample_away():
    """Moving one sample does not help while another device is as slow: all of them must move."""
    found = fair_samples(24, 4, lambda member, samples: samples if member < 3 else 5 + 0.1 * samples)
    assert found == (5, 5, 5, 9)
