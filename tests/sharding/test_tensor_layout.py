"""Layouts: who holds which part of a tensor, and how that is written."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import InputError
from weft.sharding.tensor_layout import (
    SUM,
    WHOLE,
    Placement,
    dim_ranges,
    largest_part,
    local_ranges,
    local_shape,
    parse_placement,
    part_sizes,
)

TEXTS = {"R": WHOLE, "P": SUM, "S0": Placement(0), "S2/3": Placement(2, 3), "S1x64": Placement(1, 1, 64),
         "S10/3x8": Placement(10, 3, 8), "S1/2z": Placement(1, 2, zigzag=True), "S0/8z": Placement(0, 8, zigzag=True)}


@pytest.mark.parametrize(("text", "placement"), TEXTS.items())
def test_a_placement_is_written_and_read(text, placement):
    assert str(placement) == text
    assert parse_placement(text) == placement
    assert placement.is_split == text.startswith("S")


@pytest.mark.parametrize("text", ["", "S", "s0", "S-1", "R0", "S1/", "S1z", "S1/3z", "S1x", "S1x2/3", "S0 ", "Q", "S0\n"])
def test_what_is_no_placement_is_refused(text):
    with pytest.raises(InputError, match="is not a placement: use R, P, S0"):
        parse_placement(text)


@pytest.mark.parametrize(("size", "count", "unit", "parts"), [
    (8, 2, 1, (4, 4)), (7, 3, 1, (3, 2, 2)), (5, 4, 1, (2, 1, 1, 1)), (2, 3, 1, (1, 1, 0)),
    (192, 2, 64, (128, 64)), (320, 3, 64, (128, 128, 64)), (0, 2, 1, (0, 0)),
])
def test_parts_are_as_even_as_units_allow_the_larger_first(size, count, unit, parts):
    assert part_sizes(size, count, unit=unit) == parts


@given(units=st.integers(0, 40), count=st.integers(1, 9), unit=st.integers(1, 7))
def test_parts_make_the_whole_and_differ_by_one_unit_at_most(units, count, unit):
    parts = part_sizes(units * unit, count, unit=unit)
    assert sum(parts) == units * unit
    assert max(parts) - min(parts) in (0, unit)
    assert list(parts) == sorted(parts, reverse=True)


def test_in_zigzag_every_second_block_is_given_out_from_the_last_to_the_first():
    assert [local_ranges(8, [(rank, 2)], blocks=2, zigzag=True) for rank in (0, 1)] == [
        ((0, 2), (6, 8)), ((2, 4), (4, 6))]
    parts = [local_ranges(16, [(one, 2), (two, 2)], blocks=2, zigzag=True) for one in (0, 1) for two in (0, 1)]
    assert parts == [local_ranges(16, [(rank, 4)], blocks=2, zigzag=True) for rank in range(4)]
    held = [place for ranges in parts for start, stop in ranges for place in range(start, stop)]
    assert sorted(held) == list(range(16))


def test_a_dimension_in_blocks_gives_a_piece_of_each():
    assert local_ranges(12, [(1, 2)], blocks=3) == ((2, 4), (6, 8), (10, 12))
    assert local_ranges(12, [(0, 2)]) == ((0, 6),)


def test_of_two_axes_on_one_dimension_the_earlier_cuts_first():
    layout, mesh = (Placement(0), Placement(0)), (2, 3)
    starts = [dim_ranges((12,), layout, mesh, place)[0][0] for place in product(range(2), range(3))]
    assert starts == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]
    # of 7 rows the first half is 4, and that is cut into 2, 1 and 1
    sizes = [local_shape((7,), layout, mesh, place)[0] for place in product(range(2), range(3))]
    assert sizes == [2, 1, 1, 1, 1, 1]


def test_uneven_heads_stay_whole():
    layout = (Placement(1, 1, 4),)
    assert [local_shape((2, 12), layout, (2,), (rank,)) for rank in (0, 1)] == [(2, 8), (2, 4)]
    assert largest_part((2, 12), layout, (2,)) == pytest.approx(2 / 3)


def test_whole_and_sum_hold_everything():
    assert local_shape((3, 5), (WHOLE, SUM), (2, 4), (1, 3)) == (3, 5)
    assert largest_part((3, 5), (WHOLE, SUM), (2, 4)) == 1.0


def test_a_tensor_without_entries_counts_whole():
    assert largest_part((0, 4), (Placement(0),), (2,)) == 1.0


PLACES = [WHOLE, Placement(0), Placement(1), Placement(1, 3), Placement(2, 1, 2)]


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.integers(1, 3)), min_size=1, max_size=3))
def test_the_parts_of_all_devices_cover_a_tensor_once_for_each_whole_axis(axes):
    shape = (7, 24, 12)
    first = {}
    layout = tuple(first.setdefault(item.dim, item) for item, _ in axes)  # one kind of cut for each dimension
    mesh = tuple(count for _, count in axes)
    if any(item.blocks > 1 and 8 % math.prod(count for other, count in zip(layout, mesh, strict=True)
                                             if other == item) for item in layout):
        return  # blocks must be cut evenly
    seen = {}
    largest = 0
    for place in product(*(range(count) for count in mesh)):
        ranges = dim_ranges(shape, layout, mesh, place)
        held = list(product(*([index for start, stop in dim for index in range(start, stop)] for dim in ranges)))
        assert len(held) == math.prod(local_shape(shape, layout, mesh, place))
        largest = max(largest, len(held))
        for entry in held:
            seen[entry] = seen.get(entry, 0) + 1
    copies = math.prod(count for item, count in zip(layout, mesh, strict=True) if item == WHOLE)
    assert len(seen) == math.prod(shape)
    assert set(seen.values()) == {copies}
    assert largest / math.prod(shape) == pytest.approx(largest_part(shape, layout, mesh))
