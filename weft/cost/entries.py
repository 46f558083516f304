"""One column of the cost table: the times of all operators on one device kind (or one device), with their sources.

Part of ``estimate_costs``: ``choose_columns`` says which columns there are, ``fill_column`` fills one, first by the
roofline, then over it what was measured, then over that what the graph file gives. Operators are measured alone, and
the roofline counts what they themselves move; that each new gradient of a parameter is then added to the sum over
micro-batches comes on top (``Terms.sum_s``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import ClusterError, ModelError
from weft.cluster.cluster import Cluster, DeviceKind
from weft.cost.figure import Source
from weft.cost.op_classes import Efficiency
from weft.cost.profile import ClassFit, OpKey, OpTiming, op_signature
from weft.cost.roofline import PARTS, Part, Terms, Work, describe_work, op_dtypes, parameter_bytes, roofline_terms
from weft.model.graph import F64, NO_BATCH_DIM, UNKNOWN_BATCH_DIM, Bool, Graph

U8 = npt.NDArray[np.uint8]
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Which device kind, or which single device, a column of the table is for."""

    name: str
    kind: DeviceKind
    device: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The content of one column."""

    seconds: Mapping[Part, F64]
    source: U8
    backward_source: U8
    terms: Mapping[Part, Terms] | None

    def estimate_backward(self, op: int, ratios: Mapping[Part, F64], source: Source) -> None:
        """Set the operator's backward parts from its forward time."""
        for part in PARTS[1:]:
            self.seconds[part][op] = self.seconds["forward"][op] * ratios[part][op]
        self.backward_source[op] = source.code


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the profile store knows about one device kind."""

    timings: Mapping[OpKey, OpTiming]
    fits: Mapping[str, ClassFit]


def choose_columns(graph: Graph, cluster: Cluster) -> tuple[tuple[Column, ...], tuple[int, ...]]:
    """Return the columns and each device's column: one per kind in use, or per device if the graph names devices."""
    names = set(cluster.device_index) - set(cluster.kinds)
    if graph.given is not None and names and _mentions(graph, names):
        by_device = tuple(Column(name=device.name, kind=cluster.kinds[device.kind], device=device.name)
                          for device in cluster.devices)
        return by_device, tuple(range(cluster.num_devices))
    kinds = tuple(dict.fromkeys(device.kind for device in cluster.devices))
    columns = tuple(Column(name=kind, kind=cluster.kinds[kind], device=None) for kind in kinds)
    return columns, tuple(kinds.index(device.kind) for device in cluster.devices)


def _mentions(graph: Graph, names: set[str]) -> bool:
    given = graph.given
    assert given is not None
    return any(times and not names.isdisjoint(times) for times in given.times) or any(
        allowed and not names.isdisjoint(allowed) for allowed in given.allowed_kinds)


def fill_column(graph: Graph, work: Work, column: Column, profile: Profile) -> Entries:
    """Return the column's entries; raise if an operator has no figure there."""
    fitted = {name: Efficiency(compute=fit.compute, memory=fit.memory) for name, fit in profile.fits.items()}
    has_rates = bool(column.kind.flop_per_s) and column.kind.memory_bytes_per_s is not None
    terms = {part: roofline_terms(work, column.kind, part, fitted) for part in PARTS} if has_rates else None
    unknown = np.full(graph.num_ops, np.nan)
    seconds = {part: unknown.copy() if terms is None else terms[part].at(1.0) for part in PARTS}
    codes = np.array([(Source.FITTED if name in fitted else Source.ROOFLINE).code for name in work.classes],
                     dtype=np.uint8)
    entries = Entries(seconds=seconds, source=codes, backward_source=codes.copy(), terms=terms)
    if not graph.has_backward:
        seconds["input_grad"][:] = 0.0
        seconds["weight_grad"][:] = 0.0
    _put_measured(graph, work, column, profile, entries)
    _put_given(graph, column, entries)
    _check_filled(graph, column, entries)
    return entries


def _backward_ratios(graph: Graph, terms: Mapping[Part, Terms] | None) -> Mapping[Part, F64]:
    """Return what the forward time is multiplied by for each backward part where that part has no figure of its own."""
    has_parameters = parameter_bytes(graph) > 0
    ratios: dict[Part, F64] = {"input_grad": np.ones(graph.num_ops),
                               "weight_grad": np.where(has_parameters, 1.0, 0.0)}
    if terms is not None:
        forward_s = terms["forward"].at(1.0)
        for part in ("input_grad", "weight_grad"):
            np.divide(terms[part].at(1.0), forward_s, out=ratios[part], where=(forward_s > 0) & (graph.flops > 0))
    return ratios


def _put_measured(graph: Graph, work: Work, column: Column, profile: Profile, entries: Entries) -> None:
    if not profile.timings:
        return
    ratios = _backward_ratios(graph, entries.terms)
    measured_back = np.zeros(graph.num_ops, dtype=bool)
    added_s = np.zeros(graph.num_ops) if entries.terms is None else entries.terms["weight_grad"].sum_s
    for op, traced in enumerate(op_dtypes(graph)):
        key = OpKey(column.kind.name, graph.op_kinds[op], op_signature(graph, op, traced), work.dtypes[op])
        timing = profile.timings.get(key)
        if timing is None:
            continue
        entries.seconds["forward"][op] = timing.forward_s
        entries.source[op] = Source.MEASURED.code
        if not graph.has_backward:
            continue
        if timing.input_grad_s is not None and timing.weight_grad_s is not None:
            entries.seconds["input_grad"][op] = timing.input_grad_s
            entries.seconds["weight_grad"][op] = timing.weight_grad_s + added_s[op]
            entries.backward_source[op] = Source.MEASURED.code
            measured_back[op] = True
        else:
            entries.estimate_backward(op, ratios, Source.FITTED)
    _add_gradient_sums(graph, work, column, profile, entries, measured_back)


def _add_gradient_sums(graph: Graph, work: Work, column: Column, profile: Profile, entries: Entries,
                       measured: Bool) -> None:
    """Add to the operators that were measured alone the additions that join their outputs' gradients."""
    for item in gradient_sums(graph):
        if not measured[item.op]:
            continue
        timing = profile.timings.get(sum_key(graph, item, column.kind.name, work.dtypes[item.op]))
        if timing is not None:
            part: Part = "weight_grad" if item.is_weight else "input_grad"
            entries.seconds[part][item.op] += timing.forward_s


def _put_given(graph: Graph, column: Column, entries: Entries) -> None:
    given = graph.given
    if given is None:
        return
    ratios = _backward_ratios(graph, entries.terms)
    has_figures = graph.flops + graph.bytes_read + graph.bytes_written > 0
    missing = []
    for op, (times, allowed) in enumerate(zip(given.times, given.allowed_kinds, strict=True)):
        if allowed is not None and column.kind.name not in allowed and column.device not in allowed:
            for part in PARTS:
                entries.seconds[part][op] = np.inf
            entries.source[op] = entries.backward_source[op] = Source.GIVEN.code
        elif times is not None:
            seconds = times.get(column.device or "", times.get(column.kind.name))
            if seconds is not None:
                entries.seconds["forward"][op], entries.source[op] = seconds, Source.GIVEN.code
                if graph.has_backward:
                    entries.estimate_backward(op, ratios, Source.ROOFLINE)
            elif not has_figures[op]:
                missing.append(graph.op_names[op])
    if missing:
        shown = ", ".join(map(repr, missing[:_MAX_SHOWN])) + (", ..." if len(missing) > _MAX_SHOWN else "")
        where = f"device {column.device!r} (kind {column.kind.name!r})" if column.device else (
            f"device kind {column.kind.name!r}")
        raise ModelError(f"graph {graph.name!r}: {len(missing)} operators have no time on {where}: {shown}. Add that "
                         "kind to their 'times', give 'flops' and 'bytes_read' instead, or limit them by 'on'")


def _check_filled(graph: Graph, column: Column, entries: Entries) -> None:
    empty: Bool = np.isnan(entries.seconds["forward"]) | np.isnan(entries.seconds["input_grad"])
    if not empty.any():
        return
    name = graph.op_names[int(np.flatnonzero(empty)[0])]
    raise ClusterError(
        f"device kind {column.kind.name!r} gives no compute rate or no memory bandwidth, and {int(empty.sum())} "
        f"operators ({name!r} first) have no measured or given time there. Add 'flops' and 'memory_bandwidth' to "
        "the cluster file, choose a preset, profile the model on such a device, or give all times in the graph file")


# ---- operators that were measured for other numbers of samples ------------------------------------------------------
#
# Twice the samples rarely take twice the time: kernels start at a fixed cost, and fill a device better when they are
# larger. Where a profile store has an operator at several sizes, its time for the sizes between them is interpolated,
# and beyond them follows the roofline from the nearest one. The sizes are found by themselves: the shapes that the
# graph's tensors would have (``Graph.tensor_batch_dim``) are looked up in the store.

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


# ---- additions of a backward pass that belong to no operator --------------------------------------------------------
#
# A tensor that is read twice gets two gradients, which are added: one with ``n`` readers in the backward pass takes
# ``n - 1`` additions. They count for the operator that makes the tensor; for a parameter (tied weights) or an input,
# for each reader after the first. The backward columns of a ``Graph`` include them, but a measured operator does not,
# since it was measured alone: ``gradient_sums`` says what is to be added.

SUM_KIND: Final = "weft.gradient_sum"
"""The operator kind under which a profile store has these additions."""


class GradientSum(NamedTuple):
    """One addition of two gradients of a tensor."""

    op: int
    """The operator that it counts for."""
    tensor: int
    is_weight: bool
    """It is part of the parameters' gradients, not of the activations'."""


def gradient_sums(graph: Graph) -> Iterator[GradientSum]:
    """Yield all additions of the backward pass of ``graph``."""
    if not graph.has_backward:
        return
    needs, from_data = graph.needs_gradient, graph.depends_on_inputs
    seen = np.zeros(graph.num_tensors, dtype=bool)
    for op in np.flatnonzero(graph.on_path_to_loss).tolist():
        for tensor in graph.op_inputs(op).tolist():
            if not needs[tensor]:
                continue
            if seen[tensor]:
                producer = int(graph.tensor_producer[tensor])
                yield GradientSum(producer if producer >= 0 else op, tensor, not from_data[tensor])
            seen[tensor] = True


def sum_key(graph: Graph, item: GradientSum, device_kind: str, dtype: str | None = None) -> OpKey:
    """Return the key of an addition; autograd adds up parameters' gradients in new memory, activations' in place."""
    shape = ",".join(map(str, graph.tensor_shapes[item.tensor]))
    signature = f"[{shape}] new" if item.is_weight else f"[{shape}]"
    return OpKey(device_kind, SUM_KIND, signature, dtype or graph.tensor_dtypes[item.tensor])
