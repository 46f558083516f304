"""The steps that bring a tensor from one layout to another: one answer, for the search and for the runtime.

A layout changes one axis of the mesh at a time:

    P -> R   all-reduce            S -> R   all-gather          R -> S   cut out the own part (nothing is sent)
    P -> S   reduce-scatter        S -> S'  all-to-all          R -> P   zero, except at the first coordinate
    S -> P   zero around the own part

Where several axes split one dimension, the earlier ones cut first, so a later axis must be gathered before an earlier
one changes. Sums over several axes may be scattered on the way, along any dimension that divides, and gathered later:
(P, P) -> (R, R) is a reduce-scatter along the fast axis, an all-reduce of the pieces along the slow one, and an
all-gather along the fast one.

``find_steps`` searches the way with the fewest bytes, those along slow axes counting more; of a small tensor that with
the fewest collectives. It depends on the layouts, the mesh and its ``weights``, and of the shape only on what divides.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement

KIND_NAMES: Final = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = range(4)

SMALL_ENTRIES: Final = 1 << 16
"""Of tensors with no more entries than these, latency is what counts."""
_FIXED_COST: Final = (1e-6, 1e6)
"""What a collective costs besides its bytes, the whole tensor being 1: of a large tensor, and of a small one."""
_LOCAL_COST: Final = 1e-9
_LATER: Final = 1e-3
"""By so much an axis counts more than the next one, where links are the same: later axes join nearer devices."""


@dataclass(frozen=True, slots=True)
class Step:
    """One axis changes."""

    axis: int
    before: Layout
    after: Placement

    @property
    def kind(self) -> int | None:
        """Return the collective, by its place in ``KIND_NAMES``; None if nothing is sent."""
        return _kind(self.before[self.axis].dim, self.after.dim)

    def part(self, mesh: Sequence[int]) -> float:
        """Return the part of the tensor that the collective works on, see ``weft.cost.collectives``."""
        held = 1 / math.prod(size for size, item in zip(mesh, self.before, strict=True) if item.is_split)
        return held * mesh[self.axis] if self.kind == ALL_GATHER else held


class Room(NamedTuple):
    """What the way depends on of a tensor's shape."""

    divisors: tuple[int, ...]
    """By dimension, the greatest number that divides both its size and the number of devices."""
    is_small: bool


def room_of(shape: Sequence[int], mesh: Sequence[int]) -> Room:
    """Return what the steps on a mesh depend on of a shape."""
    devices = math.prod(mesh)
    return Room(tuple(math.gcd(size, devices) for size in shape), math.prod(shape) <= SMALL_ENTRIES)


def find_steps(source: Layout, target: Layout, mesh: tuple[int, ...], shape: Sequence[int],
               weights: tuple[float, ...] = ()) -> tuple[Step, ...]:
    """Return the cheapest changes that lead from one layout to the other.

    ``weights`` say how long a byte takes along each axis, in relation to the others; equally long if none are given.
    """
    return steps_in(source, target, mesh, room_of(shape, mesh), weights)


@lru_cache(maxsize=1 << 15)
def steps_in(source: Layout, target: Layout, mesh: tuple[int, ...], room: Room,
             weights: tuple[float, ...] = ()) -> tuple[Step, ...]:
    """Return the steps for all tensors with this room; see ``find_steps``."""
    names: list[Placement] = []
    dims: list[int] = []

    def code(item: Placement) -> int:
        if not item.is_split:
            return item.dim
        if item not in names:
            names.append(item)
        if item.dim not in dims:
            dims.append(item.dim)
        return names.index(item)

    first, last = (tuple(code(item) for item in layout) for layout in (source, target))
    scratch: list[tuple[int, int]] = []
    if source.count(SUM) > 1:
        scratch = [(code(Placement(dim)), divisor) for dim, divisor in _scratch_dims(source, room, dims, mesh)]
    way = _way(_Form(source=first, target=last, dims=tuple(dims.index(item.dim) for item in names),
                     scratch=tuple(scratch), mesh=mesh, weights=weights or (1.0,) * len(mesh),
                     is_small=room.is_small))
    steps, state = [], source
    for axis, after in way:
        item = names[after] if after >= 0 else Placement(after)
        steps.append(Step(axis, state, item))
        state = (*state[:axis], item, *state[axis + 1:])
    return tuple(steps)


def _scratch_dims(source: Layout, room: Room, used: Sequence[int],
                  mesh: Sequence[int]) -> list[tuple[int, int]]:
    """Return the dimensions along which sums may be scattered on the way, with what divides them.

    Free ones are as good as any; where there are too few for every sum to have its own, those in use may serve too.
    """
    sums = [size for size, item in zip(mesh, source, strict=True) if item == SUM]
    free = [dim for dim, divisor in enumerate(room.divisors) if dim not in used and divisor > 1]
    good = [dim for dim in free if all(room.divisors[dim] % size == 0 for size in sums)]
    if len(good) >= len(sums):
        return [(dim, math.prod(mesh)) for dim in good[:len(sums)]]
    return [(dim, room.divisors[dim]) for dim in (*free, *used) if room.divisors[dim] > 1]


# ---- the search, on layouts whose dimensions are numbered by first use ----------------------------------------------

_WHOLE, _SUM = WHOLE.dim, SUM.dim
_State = tuple[int, ...]
"""For each axis the number of a cut, or ``_WHOLE`` or ``_SUM``."""


class _Form(NamedTuple):
    source: _State
    target: _State
    dims: tuple[int, ...]
    """The dimension of each cut."""
    scratch: tuple[tuple[int, int], ...]
    """(cut, what divides it) of cuts that sums may take on the way."""
    mesh: tuple[int, ...]
    weights: tuple[float, ...]
    is_small: bool


_Way = tuple[tuple[int, int], ...]
"""(axis, what it becomes)"""


@lru_cache(maxsize=1 << 15)
def _way(form: _Form) -> _Way:
    """Return the cheapest way."""
    prices = [weight * (1 + _LATER * (len(form.mesh) - axis))
              for axis, weight in enumerate(form.weights)]
    is_simple = form.source.count(_SUM) < 2 and not _is_entangled(form)
    return _direct_way(form, prices) if is_simple else _searched_way(form, prices)


def _is_entangled(form: _Form) -> bool:
    """Return whether an axis changes a dimension that a later one splits too, or cuts it in another way."""
    for axis, (old, new) in enumerate(zip(form.source, form.target, strict=True)):
        if old != new:
            dims = {form.dims[item] for item in (old, new) if item >= 0}
            later = (*form.source[axis + 1:], *form.target[axis + 1:])
            if (old >= 0 and new >= 0 and len(dims) == 1) or any(
                    item >= 0 and form.dims[item] in dims for item in later):
                return True
    return False


def _direct_way(form: _Form, prices: Sequence[float]) -> _Way:
    """Return the way on which every axis changes once: what makes parts smaller first, what makes them larger last.

    Of gathers those along slow axes come first.
    """
    def rank(change: tuple[int, int]) -> tuple[float, ...]:
        axis, after = change
        kind = _kind(form.source[axis], after)
        if kind is None:
            return (5, axis) if after == _SUM else (0, axis)
        return (3, -prices[axis]) if kind == ALL_GATHER else (1 if kind == REDUCE_SCATTER else 2, axis)

    return tuple(sorted(((axis, new) for axis, (old, new) in enumerate(zip(form.source, form.target, strict=True))
                         if old != new), key=rank))


def _searched_way(form: _Form, prices: Sequence[float]) -> _Way:
    """Return the cheapest way by Dijkstra's algorithm over layouts."""
    best: dict[_State, float] = {form.source: 0.0}
    heap: list[tuple[float, _State, _Way]] = [(0.0, form.source, ())]
    while True:  # every layout can become whole, and a whole one anything
        cost, state, way = heapq.heappop(heap)
        if state == form.target:
            return way
        if cost > best[state]:
            continue
        held = 1.0
        for size, item in zip(form.mesh, state, strict=True):
            held = held / size if item >= 0 else held
        for axis, after in _changes(form, state):
            total = cost + _cost(form, prices, axis, state[axis], after, held)
            new = (*state[:axis], after, *state[axis + 1:])
            if total < best.get(new, math.inf):
                best[new] = total
                heapq.heappush(heap, (total, new, (*way, (axis, after))))


def _cost(form: _Form, prices: Sequence[float], axis: int, now: int, after: int, held: float) -> float:
    kind = _kind(now, after)
    if kind is None or form.mesh[axis] == 1:
        return _LOCAL_COST
    part = held * (2 if kind == ALL_REDUCE else form.mesh[axis] if kind == ALL_GATHER else 1)
    return _FIXED_COST[form.is_small] + part * prices[axis] * (form.mesh[axis] - 1) / form.mesh[axis]


def _changes(form: _Form, state: _State) -> Iterator[tuple[int, int]]:
    """Yield the axes that may change next, and to what: on the way to the target, to be whole, or to be scattered."""
    is_scattered = state.count(_SUM) > 1
    for axis, now in enumerate(state):
        if now >= 0 and not _is_innermost(form, state, axis, now):
            continue
        for after in dict.fromkeys((form.target[axis], _WHOLE)):
            is_other_cut = now >= 0 and after >= 0 and form.dims[now] == form.dims[after]
            if after != now and not is_other_cut and (after < 0 or _is_innermost(form, state, axis, after)):
                yield axis, after
        if now == _SUM and is_scattered:
            for after, divisor in form.scratch:
                if after != form.target[axis] and _is_innermost(form, state, axis, after):
                    count = math.prod(size for size, item in zip(form.mesh, state, strict=True) if item == after)
                    if divisor % (count * form.mesh[axis]) == 0:
                        yield axis, after


def _is_innermost(form: _Form, state: _State, axis: int, cut: int) -> bool:
    """Return whether no later axis splits the cut's dimension, and earlier ones split it in the same way."""
    return not any(item >= 0 and other != axis and form.dims[item] == form.dims[cut] and (other > axis or item != cut)
                   for other, item in enumerate(state))


def _kind(now: int, after: int) -> int | None:
    """Return the collective between two placements, of which only matters whether they are whole, a sum or a cut."""
    if now in (after, _WHOLE) or after == _SUM:
        return None
    if now == _SUM:
        return ALL_REDUCE if after == _WHOLE else REDUCE_SCATTER
    return ALL_GATHER if after == _WHOLE else ALL_TO_ALL
