"""A mesh of devices, and the time of moving a tensor from one layout to another on it.

The devices of a group lie on the mesh in row-major order: on a mesh of 2 x 4 the first axis joins devices 0 and 4, the
second 0 to 3. A change of layout is done axis by axis: what makes local tensors smaller comes first.

    P -> R  all-reduce       P -> S  reduce-scatter       S -> R  all-gather       S -> S'  all-to-all
    R -> S  and everything to P: nothing is sent

Sums over several axes are scattered along the fastest, taken along the others, and gathered. Where several axes split
one dimension, the earlier ones cut first: a later axis must be gathered before an earlier one changes
(``_entangled_steps``), as it must to cut a dimension in other blocks or units.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Final

import numpy as np

from weft.cluster.cluster import Cluster
from weft.cost.collectives import Collective, CollectiveModel
from weft.errors import InputError
from weft.model.graph import F64, I64
from weft.model.tensor_layout import SUM, WHOLE, Layout, Placement

KINDS: Final = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = range(4)
_RANK: Final = {REDUCE_SCATTER: 0, ALL_TO_ALL: 1, ALL_REDUCE: 2, ALL_GATHER: 3}
"""In which order axes are dealt with: what makes local tensors smaller first."""


class Mesh:
    """Devices of a cluster on a grid, and what collectives along its axes take."""

    def __init__(self, cluster: Cluster, devices: Sequence[int], shape: Sequence[int]) -> None:
        if math.prod(shape) != len(devices) or any(size < 1 for size in shape):
            raise InputError(f"a mesh of {'x'.join(map(str, shape))} has {math.prod(shape)} places, but the group has "
                             f"{len(devices)} devices: choose sizes whose product is {len(devices)}")
        self.cluster = cluster
        self.devices = tuple(devices)
        self.shape = tuple(shape)

    @property
    def name(self) -> str:
        """Return the mesh as people write it: ``2x4``."""
        return "x".join(map(str, self.shape))

    def groups(self, axis: int) -> list[tuple[int, ...]]:
        """Return the groups of devices along an axis."""
        grid = np.array(self.devices).reshape(self.shape)
        return [tuple(row) for row in np.moveaxis(grid, axis, -1).reshape(-1, self.shape[axis]).tolist()]

    @cached_property
    def lines(self) -> list[list[tuple[F64, F64]]]:
        """Return [axis][collective] (latency, seconds by byte) of every algorithm, all groups of an axis at once."""
        model = CollectiveModel(self.cluster)
        result = []
        for axis, size in enumerate(self.shape):
            row = []
            for kind in KINDS:
                found = model.lines_together(kind, self.groups(axis)) if size > 1 else ()
                row.append((np.array([line.latency_s for line in found] or [0.0]),
                            np.array([line.s_per_byte for line in found] or [0.0])))
            result.append(row)
        return result

    def rate(self, axis: int) -> float:
        """Return the seconds that gathering a byte takes along an axis."""
        return float(self.lines[axis][ALL_GATHER][1].min())

    def seconds(self, axis: int, kind: int, num_bytes: F64) -> F64:
        """Return the time of a collective along an axis on so many bytes each; nothing for no bytes."""
        latency, rate = self.lines[axis][kind]
        times: F64 = (latency[:, None] + rate[:, None] * num_bytes[None, :]).min(axis=0)
        return np.where(num_bytes > 0, times, 0.0)


class Resharding:
    """Times of changes of layout on one mesh, for layouts that are known by number."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._number: dict[Layout, int] = {}
        self.layouts: list[Layout] = []
        self._steps: dict[tuple[int, int], tuple[float, ...]] = {}
        self._entangled: dict[tuple[Layout, Layout], tuple[float, ...]] = {}
        self._times: dict[tuple[int, int, float], float] = {}

    def number(self, layout: Layout) -> int:
        """Return the layout's number."""
        if layout not in self._number:
            self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self._number[layout]

    def matrix(self, sources: I64, targets: I64, num_bytes: float) -> F64:
        """Return [sources, targets] the time to bring a tensor of so many bytes from one layout to the other."""
        rows, row_of = np.unique(sources, return_inverse=True)
        columns, column_of = np.unique(targets, return_inverse=True)
        table = np.empty((len(rows), len(columns)))
        missing = []
        for i, j in product(range(len(rows)), range(len(columns))):
            known = self._times.get((int(rows[i]), int(columns[j]), num_bytes))
            if known is None:
                missing.append((i, j))
            else:
                table[i, j] = known
        if missing:
            steps = np.array([self.steps(int(rows[i]), int(columns[j])) for i, j in missing])
            for (i, j), seconds in zip(missing, self._seconds(steps, num_bytes).tolist(), strict=True):
                table[i, j] = seconds
                self._times[int(rows[i]), int(columns[j]), num_bytes] = seconds
        return table[np.ix_(row_of, column_of)]

    def _seconds(self, steps: F64, num_bytes: float) -> F64:
        total = np.zeros(len(steps))
        for axis in range(len(self.mesh.shape)):
            for kind in range(len(KINDS)):
                part = steps[:, axis * len(KINDS) + kind]
                if part.any():
                    total += self.mesh.seconds(axis, kind, part * num_bytes)
        return total

    def steps(self, source: int, target: int) -> tuple[float, ...]:
        """Return, for each axis and kind of collective, the part of the whole tensor that it works on; 0 for none."""
        known = self._steps.get((source, target))
        if known is None:
            known = self._steps[source, target] = self._find_steps(self.layouts[source], self.layouts[target])
        return known

    def _find_steps(self, source: Layout, target: Layout) -> tuple[float, ...]:
        if _is_entangled(source, target):
            pair = _same_form(source, target)
            if pair not in self._entangled:
                self._entangled[pair] = self._entangled_steps(*pair)
            return self._entangled[pair]
        shape = self.mesh.shape
        steps = [0.0] * (len(shape) * len(KINDS))
        todo = []
        held = 1.0
        for axis, (old, new) in enumerate(zip(source, target, strict=True)):
            kind = _kind(old, new)
            if kind is not None:
                todo.append((_RANK[kind], axis, kind))
            if old.is_split or (old == WHOLE and new.is_split):  # a slice is taken at once
                held /= shape[axis]
        sums = [axis for _, axis, kind in todo if kind == ALL_REDUCE]
        if len(sums) > 1:  # scatter along the fastest axis, sum the pieces along the others, gather
            fast = min(sums, key=self.mesh.rate)
            todo = [item for item in todo if item[1] != fast]
            todo += [(_RANK[REDUCE_SCATTER], fast, REDUCE_SCATTER), (_RANK[ALL_GATHER], fast, ALL_GATHER)]
        todo.sort(key=lambda item: (item[0], self.mesh.rate(item[1]) * (-1 if item[2] == ALL_GATHER else 1)))
        for _, axis, kind in todo:  # the fastest axis scatters first and gathers last
            if kind == ALL_GATHER:
                held *= shape[axis]
            steps[axis * len(KINDS) + kind] = held
            if kind == REDUCE_SCATTER:
                held /= shape[axis]
        return tuple(steps)

    def _entangled_steps(self, source: Layout, target: Layout) -> tuple[float, ...]:
        """Return the steps of the fastest way for large tensors, one axis at a time, innermost cuts first."""
        none = (0.0,) * (len(source) * len(KINDS))
        heap: list[tuple[float, int, Layout, tuple[float, ...]]] = [(0.0, 0, source, none)]
        done: set[Layout] = set()
        while True:
            seconds, count, state, steps = heapq.heappop(heap)
            if state == target:
                return steps
            if state in done:
                continue
            done.add(state)
            held = 1 / math.prod(size for size, item in zip(self.mesh.shape, state, strict=True) if item.is_split)
            for axis, after in _changes(state, target):
                kind = _kind(state[axis], after)
                part = 0.0 if kind is None else held * (self.mesh.shape[axis] if kind == ALL_GATHER else 1)
                more = 0.0 if kind is None else part * float(self.mesh.lines[axis][kind][1].min())
                place = axis * len(KINDS) + (kind or 0)
                heapq.heappush(heap, (seconds + more, count + 1, (*state[:axis], after, *state[axis + 1:]),
                                      (*steps[:place], steps[place] + part, *steps[place + 1:])))


def _is_entangled(source: Layout, target: Layout) -> bool:
    """Return whether an axis changes a dimension that a later one splits too, or cuts it in other blocks or units."""
    for axis, (old, new) in enumerate(zip(source, target, strict=True)):
        if old != new:
            dims = {item.dim for item in (old, new) if item.is_split}
            if (old.is_split and old.dim == new.dim) or any(
                    item.dim in dims for item in (*source[axis + 1:], *target[axis + 1:])):
                return True
    return False


def _same_form(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Return layouts with other dimensions between which the steps are the same."""
    dims: dict[int, int] = {}
    kinds: dict[Placement, int] = {}
    form = tuple(item if not item.is_split else Placement(
        dims.setdefault(item.dim, len(dims)), kinds.setdefault(item, len(kinds)) + 1) for item in (*source, *target))
    return form[:len(source)], form[len(source):]


def _changes(state: Layout, target: Layout) -> Iterator[tuple[int, Placement]]:
    """Yield the axes that may change next, and to what: on the way to the target, or to be whole."""
    for axis, now in enumerate(state):
        for after in dict.fromkeys((target[axis], WHOLE)):
            is_other_cut = now.is_split and after.dim == now.dim
            if after != now and not is_other_cut and _is_innermost(state, axis, now) and _is_innermost(
                    state, axis, after):
                yield axis, after


def _is_innermost(state: Layout, axis: int, item: Placement) -> bool:
    """Return whether no later axis splits the dimension, and earlier ones split it in the same way."""
    return not item.is_split or (all(other.dim != item.dim for other in state[axis + 1:]) and all(
        other == item for other in state[:axis] if other.dim == item.dim))


def _kind(old: object, new: object) -> int | None:
    """Return the collective that brings a placement to another one; None if nothing is sent."""
    if old in (new, WHOLE) or new == SUM:
        return None
    if old == SUM:
        return ALL_REDUCE if new == WHOLE else REDUCE_SCATTER
    return ALL_GATHER if new == WHOLE else ALL_TO_ALL


def mesh_shapes(num_devices: int, *, max_axes: int = 3) -> list[tuple[int, ...]]:
    """Return the shapes of meshes of so many devices, with up to ``max_axes`` axes of 2 or more each."""
    shapes: set[tuple[int, ...]] = {(num_devices,)}
    if max_axes > 1:
        for first in range(2, num_devices // 2 + 1):
            if num_devices % first == 0:
                shapes |= {(first, *rest) for rest in mesh_shapes(num_devices // first, max_axes=max_axes - 1)}
    return sorted(shapes, key=lambda shape: (len(shape), shape))
