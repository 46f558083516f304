"""How a tensor lies over a group of devices: for each axis of the group's mesh it is whole, split or a sum to be taken.

A mesh has axes, such as ``{"data": 2, "tensor": 4}``; a device has a coordinate on each. A *layout* gives every axis a
placement:

    R        whole: equal on all coordinates of the axis
    P        a sum: the tensor is the sum of what the coordinates hold
    S1       split: dimension 1 is cut into as many parts as the axis has coordinates
    S2/3     the same in each of 3 equal blocks of dimension 2, so that a part holds a piece of every block
             (queries, keys and values in one matrix, split by heads)
    S2/2z    in zig-zag: of every second block the parts are given out from the last coordinate to the first. Of 8
             entries over 2 coordinates these hold 0, 1, 6, 7 and 2, 3, 4, 5: in causal attention as much work for each
    S1x64    parts have whole multiples of 64 entries (heads of 64 that do not divide evenly)

Where several axes split one dimension, earlier axes cut first. Parts may be uneven: of 7 entries over 3 coordinates the
parts have 3, 2 and 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weft.base.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """What an axis does to a tensor; see the module's docstring."""

    dim: int
    """The dimension that is split; ``-1`` for whole, ``-2`` for a sum."""
    blocks: int = 1
    unit: int = 1
    zigzag: bool = False
    """Every second block is given out from the last coordinate to the first."""

    @property
    def is_split(self) -> bool:
        """Return whether each coordinate holds a part."""
        return self.dim >= 0

    def __str__(self) -> str:
        if not self.is_split:
            return "R" if self.dim == -1 else "P"
        blocks = f"/{self.blocks}{'z' * self.zigzag}" if self.blocks > 1 else ""
        return f"S{self.dim}{blocks}" + (f"x{self.unit}" if self.unit > 1 else "")


WHOLE: Final = Placement(-1)
SUM: Final = Placement(-2)

Layout = tuple[Placement, ...]
"""One placement for each axis of a mesh."""


def parse_placement(text: str) -> Placement:
    """Return the placement that ``str`` wrote."""
    found = re.fullmatch(r"R|P|S(\d+)(?:/(\d+)(z?))?(?:x(\d+))?", text)
    if found is None or (found[3] and int(found[2]) % 2):
        raise InputError(f"{text!r} is not a placement: use R, P, S0, S2/3, S1/2z or S1x64")
    if found[1] is None:
        return WHOLE if text == "R" else SUM
    return Placement(int(found[1]), int(found[2] or 1), int(found[4] or 1), bool(found[3]))


def part_sizes(size: int, count: int, *, unit: int = 1) -> tuple[int, ...]:
    """Return the sizes of ``count`` parts of ``size`` entries in multiples of ``unit``, the larger ones first."""
    units = size // unit
    return tuple((units // count + (index < units % count)) * unit for index in range(count))


def local_ranges(size: int, cuts: Sequence[tuple[int, int]], *, blocks: int = 1,
                 unit: int = 1, zigzag: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) ranges of a dimension that a device holds, one for each block.

    ``cuts`` are (coordinate, axis size) of the axes that split the dimension, in the order of the mesh.
    """
    block = size // blocks
    starts, length = [0, 0], block
    for coordinate, count in cuts:
        sizes = part_sizes(length, count, unit=unit)
        starts[0] += sum(sizes[:coordinate])
        starts[1] += sum(sizes[coordinate + 1:])
        length = sizes[coordinate]
    begins = [index * block + starts[index % 2 if zigzag else 0] for index in range(blocks)]
    return tuple((begin, begin + length) for begin in begins)


def dim_ranges(shape: Sequence[int], layout: Layout, mesh: Sequence[int],
               coordinates: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each dimension, the (start, stop) ranges that the device at ``coordinates`` holds."""
    result: list[tuple[tuple[int, int], ...]] = []
    for dim, size in enumerate(shape):
        axes = [axis for axis, placement in enumerate(layout) if placement.dim == dim]
        if not axes:
            result.append(((0, size),))
            continue
        first = layout[axes[0]]
        result.append(local_ranges(size, [(coordinates[axis], mesh[axis]) for axis in axes], blocks=first.blocks,
                                   unit=first.unit, zigzag=first.zigzag))
    return tuple(result)


def local_shape(shape: Sequence[int], layout: Layout, mesh: Sequence[int],
                coordinates: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what the device at ``coordinates`` holds."""
    return tuple(sum(stop - start for start, stop in ranges)
                 for ranges in dim_ranges(shape, layout, mesh, coordinates))


def largest_part(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> float:
    """Return the part of a tensor's entries that the device with the most holds (that at the first coordinates)."""
    most = local_shape(shape, layout, mesh, [0] * len(mesh))
    return math.prod((held / size if size else 1.0 for size, held in zip(shape, most, strict=True)), start=1.0)
