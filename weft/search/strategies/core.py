"""The reduced problem in flat arrays, as the compiled searches need it, and the way back to nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.model.graph import F64, I64
from weft.search.strategies.shrink import left
from weft.search.strategies.units import Units


class Core(NamedTuple):
    """``n`` units, ``v`` strategies of all, ``a`` arcs (both directions of every edge), ``s`` spans, ``t`` times."""

    first: I64
    """[n + 1] the unit's strategies are at first[i] to first[i + 1] of ``cost``."""
    cost: F64
    """[v]"""
    arc: I64
    """[n + 1] the unit's arcs, by neighbour."""
    head: I64
    """[a] the neighbour."""
    matrix: I64
    """[a] where the costs begin in ``matrices``: by own strategy, then the neighbour's."""
    back: I64
    """[a] the same edge's arc from the neighbour."""
    message: I64
    """[a + 1] where the arc's values, one per own strategy, are in an array of messages."""
    matrices: F64
    span: I64
    """[n + 1] the unit's spans."""
    begin: I64
    """[s]"""
    end: I64
    """[s]"""
    amount: I64
    """[s] where the usage begins in ``amounts``, by strategy; the least is 0."""
    amounts: F64
    base: F64
    """[t] used in any case."""
    limit: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Compact:
    """A core and the units it was made of."""

    core: Core
    unit: tuple[int, ...]
    """[n]"""
    kept: tuple[I64, ...]
    """[n] the number of each strategy in its unit."""
    constant: float
    """What the units cost beside the core."""
    times: I64
    """[t] the number that each time had at first."""
    penalty: float
    """A pair that is ruled out costs this much, more than any choice without one."""

    @property
    def num_units(self) -> int:
        """Return the number of units."""
        return len(self.unit)

    def strategies(self, x: I64) -> dict[int, int]:
        """Return the strategy of every unit, as ``Units.choice_of`` takes it."""
        return {unit: int(kept[chosen]) for unit, kept, chosen in zip(self.unit, self.kept, x.tolist(), strict=True)}

    def positions(self, strategy: dict[int, int]) -> I64:
        """Return the strategies of a choice by position; -1 for one that is not left."""
        result = np.full(len(self.unit), -1, dtype=np.int64)
        for index, (unit, kept) in enumerate(zip(self.unit, self.kept, strict=True)):
            place = int(np.searchsorted(kept, strategy[unit]))
            if place < len(kept) and kept[place] == strategy[unit]:
                result[index] = place
        return result


def make_core(units: Units) -> Compact:
    """Return what is left of the units in flat arrays."""
    unit = left(units)
    number = {old: new for new, old in enumerate(unit)}
    most = sum(float(np.abs(units.cost[old]).max()) for old in unit)
    most += sum(float(np.abs(matrix[np.isfinite(matrix)]).max(initial=0.0)) for old in unit
                for other, matrix in units.edges[old].items() if other > old)
    penalty = 2.0 * most + 1.0
    head, back, matrices, arc = _arcs(units, unit, number, penalty)
    sizes = np.array([len(units.cost[old]) for old in unit], dtype=np.int64)
    owner = np.repeat(np.arange(len(unit)), np.diff(arc))
    spans = np.concatenate([np.zeros((0, 2), dtype=np.int64), *(units.spans[old] for old in unit)])
    amounts = [row for old in unit for row in units.amounts[old]]
    core = Core(
        first=_offsets(sizes), cost=_flat([units.cost[old] for old in unit]), arc=arc, head=head,
        matrix=_offsets(np.array([matrix.size for matrix in matrices], dtype=np.int64))[:-1], back=back,
        message=_offsets(sizes[owner]), matrices=_flat([matrix.ravel() for matrix in matrices]),
        span=_offsets(np.array([len(units.spans[old]) for old in unit], dtype=np.int64)),
        begin=np.ascontiguousarray(spans[:, 0]), end=np.ascontiguousarray(spans[:, 1]),
        amount=_offsets(np.array([len(row) for row in amounts], dtype=np.int64))[:-1], amounts=_flat(amounts),
        base=units.base.copy(), limit=units.limit)
    return Compact(core=core, unit=tuple(unit), kept=tuple(units.kept[old] for old in unit), constant=units.constant,
                   times=units.times.copy(), penalty=penalty)


def _arcs(units: Units, unit: list[int], number: dict[int, int], penalty: float) -> tuple[I64, I64, list[F64], I64]:
    place: dict[tuple[int, int], int] = {}
    head: list[int] = []
    matrices: list[F64] = []
    counts = []
    for old in unit:
        for other in sorted(units.edges[old]):
            place[old, other] = len(head)
            head.append(number[other])
            matrix = np.ascontiguousarray(units.edges[old][other])
            matrices.append(np.where(np.isfinite(matrix), matrix, penalty))
        counts.append(len(units.edges[old]))
    back = [place[other, old] for old, other in place]
    return (np.array(head, dtype=np.int64), np.array(back, dtype=np.int64), matrices,
            _offsets(np.array(counts, dtype=np.int64)))


def _offsets(counts: I64) -> I64:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def _flat(arrays: list[F64]) -> F64:
    return np.concatenate([np.zeros(0), *arrays])
