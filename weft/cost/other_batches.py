"""Operators that were measured for other numbers of samples than the graph was traced with.

Twice the samples rarely take twice the time: kernels start at a fixed cost, and fill a device better when they are
larger. Where a profile store has an operator at several sizes, its time for the sizes between them is interpolated, and
beyond them follows the roofline from the nearest one. The sizes are found by themselves: the shapes that the graph's
tensors would have (``Graph.tensor_batch_dim``) are looked up in the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weft.cost.entries import Column, Entries, Profile, fill_column
from weft.cost.figure import Source
from weft.cost.profile import OpKey, op_signature
from weft.cost.roofline import PARTS, Part, describe_work, op_dtypes
from weft.model.graph import F64, NO_BATCH_DIM, UNKNOWN_BATCH_DIM, Graph

LARGEST: Final = 1024
"""Numbers of samples that are looked for."""
NUM_LOOKED_UP: Final = 4
"""Operators, those with the most to compute, by which it is seen whether a store has a size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAt:
    """Times at another number of samples."""

    fraction: float
    """Of the traced batch."""
    seconds: Mapping[Part, F64]
    """[operators, columns]; nan where an operator was not measured so."""


def at_batch(graph: Graph, batch: int) -> Graph | None:
    """Return the graph with the tensors it would have for so many samples; None where that is not known.

    Its figures of work stay those of the traced batch.
    """
    dims = graph.tensor_batch_dim
    if (dims == UNKNOWN_BATCH_DIM).any() or graph.given is not None:
        return None
    shapes = []
    for shape, dim in zip(graph.tensor_shapes, dims.tolist(), strict=True):
        if dim == NO_BATCH_DIM:
            shapes.append(shape)
            continue
        size, rest = divmod(shape[dim] * batch, graph.batch)
        if rest:
            return None
        shapes.append((*shape[:dim], size, *shape[dim + 1:]))
    grown = np.where(dims == NO_BATCH_DIM, graph.tensor_bytes, graph.tensor_bytes * batch // graph.batch)
    return replace(graph, batch=batch, tensor_shapes=tuple(shapes), tensor_bytes=grown)


def other_batches(graph: Graph, columns: Sequence[Column], profiles: Mapping[str, Profile],
                  dtype: str | None) -> tuple[MeasuredAt, ...]:
    """Return what the profiles have for other numbers of samples, smallest first."""
    if not any(profile.timings for profile in profiles.values()) or at_batch(graph, graph.batch) is None:
        return ()
    dtypes = describe_work(graph, dtype).dtypes
    heavy = np.argsort(-graph.flops, kind="stable")[:NUM_LOOKED_UP].tolist()
    traced = op_dtypes(graph)
    found = []
    for batch in range(1, LARGEST + 1):
        if batch == graph.batch or not _has_some(graph, batch, heavy, traced, dtypes, profiles):
            continue
        other = at_batch(graph, batch)
        if other is not None:
            work = describe_work(other, dtype)
            filled = [_measured(fill_column(other, work, column, profiles[column.kind.name])) for column in columns]
            seconds = {part: np.stack([entries[part] for entries in filled], axis=1) for part in PARTS}
            found.append(MeasuredAt(fraction=batch / graph.batch, seconds=seconds))
    return tuple(found)


def _has_some(graph: Graph, batch: int, ops: Sequence[int], traced: Sequence[str], dtypes: Sequence[str],
              profiles: Mapping[str, Profile]) -> bool:
    """Return whether some profile has one of the operators for so many samples."""
    keys = [(graph.op_kinds[op], op_signature(graph, op, traced[op], batch), dtypes[op]) for op in ops]
    return any(OpKey(kind, *key) in profile.timings for key in keys for kind, profile in profiles.items())


def _measured(entries: Entries) -> dict[Part, F64]:
    """Return the times that were measured, nan elsewhere."""
    forward, backward = entries.source == Source.MEASURED.code, entries.backward_source == Source.MEASURED.code
    return {part: np.where(forward if part == "forward" else backward, entries.seconds[part], np.nan) for part in PARTS}


def interpolated(fraction: float, points: Sequence[tuple[float, F64]], ratio_at: Mapping[float, F64]) -> F64:
    """Return times at a fraction of the batch from those at others, which are in ascending order.

    ``ratio_at`` has what the roofline says, relative to the whole batch, for the fraction and for the points.
    """
    fractions = [at for at, _ in points]
    if not fractions[0] <= fraction <= fractions[-1]:
        at, values = points[0] if fraction < fractions[0] else points[-1]
        known = ratio_at[at]
        ratio = np.divide(ratio_at[fraction], known, out=np.ones_like(known), where=known > 0)
        return np.asarray(values * ratio, dtype=np.float64)
    last = next(index for index, at in enumerate(fractions) if at >= fraction)
    if fractions[last] == fraction:
        return points[last][1]
    (low, before), (high, after) = points[last - 1], points[last]
    return np.asarray(before + (after - before) * ((fraction - low) / (high - low)), dtype=np.float64)


def fill_from_others(entries: Entries, others: Sequence[MeasuredAt], column: int) -> None:
    """Replace estimates of operators that were measured, but for other numbers of samples only."""
    if not others or entries.terms is None:
        return
    nearest = sorted(others, key=lambda item: abs(math.log(item.fraction)))
    for part in PARTS:
        source = entries.source if part == "forward" else entries.backward_source
        is_open = source != Source.MEASURED.code
        for item in nearest:
            seconds, ratio = item.seconds[part][:, column], entries.terms[part].ratio(item.fraction)
            chosen = is_open & ~np.isnan(seconds) & (ratio > 0)
            entries.seconds[part][chosen] = seconds[chosen] / ratio[chosen]
            if part != "input_grad":  # both backward parts share a source, and the last of them sets it
                source[chosen] = Source.FITTED.code
            is_open &= ~chosen
