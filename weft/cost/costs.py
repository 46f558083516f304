"""Costs: how long every operator takes on every device, and how long transfers and collectives take.

``estimate_costs`` fills one row per operator and one column per device kind (per device, where the graph file gives
times by device name). For each entry the best source wins:

    given (graph file)  >  measured (profile store)  >  fitted efficiency  >  roofline with the table's efficiency

and ``source`` remembers which it was. A figure for a share ``f`` of the traced batch follows the roofline's shape: the
entry times ``time(f) / time(1)`` (see ``roofline``), so parameter reads and fixed overhead do not shrink with the
batch. Entries without a roofline (given times without flops) are proportional to ``f``.

Backward parts: measured where the profile has them; else the forward entry times the roofline's ratio of backward to
forward; given times without flops take one forward for the inputs' and one for the parameters' gradients.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.cost import entries
from weft.cost.collectives import Algorithm, Collective, CollectiveModel, CommCost, scope_of, step_counts
from weft.cost.figure import SOURCES, ZERO, Figure, Source
from weft.cost.profile import CommFit, ProfileStore
from weft.cost.roofline import Part, Terms, describe_work, dtype_name, is_float, peak_notes
from weft.model.graph import F64, Bool, Graph
from weft.model.weight_gradients import ops_that_can_wait
from weft.model.zoo import is_mixed

Phase = Literal["F", "B", "I", "W"]
"""Forward; backward, which is I and W together; its first part, with the gradients of the inputs; its second part, with
those gradients of parameters that can wait."""
Name = TypeVar("Name", bound=enum.Enum)
_ZERO_CODE: Final = ZERO.source.code
_MAX_TABLES: Final = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """Times of one graph's operators on one cluster; see the module's docstring."""

    cluster: Cluster
    columns: tuple[str, ...]
    """Names of the columns: device kinds, or devices."""
    column_of_device: tuple[int, ...]
    """Each device's column."""
    forward_s: F64
    """[operators, columns]; infinite where the graph file does not let an operator run."""
    input_grad_s: F64
    weight_grad_s: F64
    source: entries.U8
    """[operators, columns]: ``Source.code`` of the forward entries."""
    backward_source: entries.U8
    """The same for both backward parts."""
    notes: tuple[str, ...] = ()
    """What the user should know, such as rates taken from another dtype."""
    transfer_times: tuple[Mapping[str, float] | None, ...] = field(default=(), repr=False)
    """Seconds by ordered device pair, per tensor, where the graph file gives them."""
    tensor_bytes: npt.NDArray[np.int64] = field(repr=False)
    comm_fits: Mapping[tuple[str, str], CommFit] = field(default_factory=dict, repr=False)
    terms: tuple[Mapping[Part, Terms] | None, ...] = field(repr=False)
    """The roofline's terms by column; None where the kind gives no rates."""
    measured_at: tuple[entries.MeasuredAt, ...] = field(default=(), repr=False)
    """What was measured for other numbers of samples, smallest first."""
    can_wait: Bool = field(repr=False)
    """By operator: where a backward is split, the gradients of its parameters are computed in the second part."""

    def stage_figure(self, ops: npt.NDArray[np.int64], device: int, phase: Phase, fraction: float = 1.0) -> Figure:
        """Return the time of ``ops`` on ``device`` for this share of the traced batch, with the weakest source."""
        column = self.column_of_device[device]
        seconds, codes = self._phase_table(phase, fraction)
        code = int(codes[column][ops].min(initial=_ZERO_CODE))
        return Figure(float(seconds[column][ops].sum()), SOURCES[code])

    def product_figure(self, ops: npt.NDArray[np.int64], device: int, fraction: float = 1.0) -> Figure:
        """Return the time of the weight gradients of ``ops`` where they are written, not added to sums."""
        whole = self.stage_figure(ops, device, "W", fraction)
        terms = self.terms[self.column_of_device[device]]
        added_s = 0.0 if terms is None else float(terms["weight_grad"].sum_s[ops].sum())
        return Figure(max(0.0, whole.seconds - added_s), whole.source)

    def op_seconds(self, phase: Phase, fraction: float = 1.0) -> F64:
        """Return the seconds of all operators, [operators, columns], for this share of the traced batch."""
        return self._phase_table(phase, fraction)[0].T

    @cached_property
    def _phase_table(self) -> Callable[[Phase, float], tuple[F64, entries.U8]]:
        return lru_cache(_MAX_TABLES)(self._make_phase_table)

    def _make_phase_table(self, phase: Phase, fraction: float) -> tuple[F64, entries.U8]:
        """Return seconds and source codes by [column, operator]; entries of zero have the strongest code."""
        if not fraction > 0 or not math.isfinite(fraction):
            raise InputError(f"the share of the batch must be more than zero and finite, not {fraction!r}")
        if phase not in get_args(Phase):
            raise InputError(f"the phase must be one of F, B, I, W, not {phase!r}")
        seconds = np.ascontiguousarray(self._phase_seconds(phase, fraction).T)
        codes = (self.source if phase == "F" else self.backward_source).T
        return seconds, np.where(seconds > 0, codes, np.uint8(_ZERO_CODE))

    def _phase_seconds(self, phase: Phase, fraction: float) -> F64:
        if phase == "F":
            return self._part_seconds("forward", fraction)
        weights, waits = self._part_seconds("weight_grad", fraction), self.can_wait[:, None]
        if phase == "W":
            return np.where(waits, weights, 0.0)
        return self._part_seconds("input_grad", fraction) + (weights if phase == "B" else np.where(waits, 0.0, weights))

    def _part_seconds(self, part: Part, fraction: float) -> F64:
        whole: F64 = {"forward": self.forward_s, "input_grad": self.input_grad_s,
                      "weight_grad": self.weight_grad_s}[part]
        if fraction == 1.0:
            return whole
        if not self.measured_at:
            return np.asarray(whole * self._ratios(part, fraction), dtype=np.float64)
        ratio_at = {at: self._ratios(part, at) for at in (fraction, 1.0, *(item.fraction for item in self.measured_at))}
        points = [(1.0, whole)]
        for item in self.measured_at:
            estimated = whole * ratio_at[item.fraction]
            points.append((item.fraction, np.where(np.isnan(item.seconds[part]), estimated, item.seconds[part])))
        return entries.interpolated(fraction, sorted(points, key=lambda point: point[0]), ratio_at)

    def _ratios(self, part: Part, fraction: float) -> F64:
        """Return by [operator, column] what the roofline says about a fraction of the batch, relative to all of it."""
        return np.stack([np.full(len(self.forward_s), fraction) if by_part is None else by_part[part].ratio(fraction)
                         for by_part in self.terms], axis=1)

    @cached_property
    def _collectives(self) -> CollectiveModel:
        return CollectiveModel(self.cluster)

    def transfer(self, num_bytes: float, source: int, target: int) -> Figure:
        """Return the time to send ``num_bytes`` from one device to another."""
        if source == target:
            return ZERO
        cost = self.collective(Collective.P2P, num_bytes, (source, target))
        return Figure(cost.seconds, cost.source)

    def tensor_transfer(self, tensor: int, source: int, target: int) -> Figure:
        """Return the time to send one tensor of the graph: as the graph file says, else by its bytes."""
        if source == target:
            return ZERO
        given = self.transfer_times[tensor] if self.transfer_times else None
        if given is not None:
            devices = self.cluster.devices
            pair = f"{devices[source].name}>{devices[target].name}"
            kinds = f"{devices[source].kind}>{devices[target].kind}"
            seconds = given.get(pair, given.get(kinds))
            if seconds is not None:
                return Figure(seconds, Source.GIVEN)
        return self.transfer(float(self.tensor_bytes[tensor]), source, target)

    def collective(self, kind: Collective | str, num_bytes: float, devices: Sequence[int],
                   algorithm: Algorithm | str | None = None) -> CommCost:
        """Return the time of a collective on ``devices`` in that order; see ``collectives`` for what ``bytes`` means.

        Without ``algorithm`` (or with ``"auto"``) a fit for such a group decides, else the cheapest algorithm.
        """
        collective = _parse(Collective, kind, "collective")
        chosen = None if algorithm in (None, "auto") else _parse(Algorithm, algorithm, "collective algorithm", ", auto")
        if not 0 <= num_bytes < math.inf:
            raise InputError(f"{collective.value} of {num_bytes!r} bytes: the size must be zero or more and finite")
        if self.comm_fits and len(devices) > 1:
            fit = self.comm_fits.get((collective.value, scope_of(self.cluster, devices)))
            if fit is not None and (chosen is None or chosen.value == fit.algorithm):
                return _fitted(fit, collective, num_bytes, len(devices))
        return self._collectives.cost(collective, num_bytes, devices, chosen)

    def collective_limits(self, kind: Collective, num_bytes: float, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the cluster's resources on which such a collective and others hold each other up."""
        return self._collectives.limits(kind, num_bytes, devices)


def _fitted(fit: CommFit, collective: Collective, num_bytes: float, size: int) -> CommCost:
    """Return the fit's time by the closed form of its algorithm."""
    counts = step_counts(collective, Algorithm(fit.algorithm), size)
    latency_s = counts.latency_s * fit.latency_s
    bandwidth_s = counts.s_per_byte * fit.s_per_byte * num_bytes
    return CommCost(seconds=latency_s + bandwidth_s, source=Source.FITTED, algorithm=fit.algorithm,
                    latency_s=latency_s, bandwidth_s=bandwidth_s)


def _parse(names: type[Name], value: object, what: str, more: str = "") -> Name:
    try:
        return names(value)
    except ValueError as problem:
        shown = ", ".join(str(member.value) for member in names)
        raise InputError(f"there is no {what} {value!r}: choose one of {shown}{more}") from problem


def estimate_costs(graph: Graph, cluster: Cluster, *, profile: ProfileStore | None = None,
                   dtype: str | None = None) -> Costs:
    """Return the costs of ``graph`` on ``cluster``.

    ``dtype`` (``bf16``, ``float16``, ...) replaces the floating-point type that the graph was traced with: rates and
    bytes follow; a mixed one is written in the graph. Raise ``ModelError`` where a graph file gives no time for a kind,
    and ``ClusterError`` where a kind gives no rates and they are needed.
    """
    if dtype is not None and is_mixed(dtype):
        dtype = None  # the graph has the casts, so every tensor has its own
    if dtype is not None and not is_float(dtype_name(dtype)):
        raise InputError(f"dtype {dtype!r} is not a floating-point type: try 'bf16', 'float16' or 'float32'")
    work = describe_work(graph, dtype)
    columns, column_of_device = entries.choose_columns(graph, cluster)
    profiles = {name: entries.Profile(timings={}, fits={}) if profile is None else
                entries.Profile(timings=profile.timings(name), fits=profile.class_fits(name))
                for name in dict.fromkeys(column.kind.name for column in columns)}
    filled = [entries.fill_column(graph, work, column, profiles[column.kind.name]) for column in columns]
    others = entries.other_batches(graph, columns, profiles, dtype)
    for index, column in enumerate(filled):
        entries.fill_from_others(column, others, index)

    def table(part: Part) -> F64:
        return np.stack([column.seconds[part] for column in filled], axis=1)

    return Costs(
        cluster=cluster, columns=tuple(column.name for column in columns), column_of_device=column_of_device,
        forward_s=table("forward"), input_grad_s=table("input_grad"), weight_grad_s=table("weight_grad"),
        source=np.stack([column.source for column in filled], axis=1),
        backward_source=np.stack([column.backward_source for column in filled], axis=1),
        notes=peak_notes(work, [column.kind for column in columns]) + _missing_notes(profile, profiles),
        transfer_times=() if graph.given is None else graph.given.transfer_times,
        tensor_bytes=graph.tensor_bytes, comm_fits={} if profile is None else profile.comm_fits(),
        terms=tuple(column.terms for column in filled), measured_at=others, can_wait=ops_that_can_wait(graph))


def load_costs(graph: Graph, cluster: Cluster, profile: Path | None, dtype: str | None) -> Costs:
    """Return the costs of the graph on the cluster, with measured times where the profile store has them."""
    if profile is not None and not profile.exists():
        raise InputError(f"no profile store {str(profile)!r}: make one with `weft profile MODEL --store {profile}`")
    store = ProfileStore(profile) if profile is not None else None
    return estimate_costs(graph, cluster, profile=store, dtype=dtype)


def _missing_notes(store: ProfileStore | None, profiles: Mapping[str, entries.Profile]) -> tuple[str, ...]:
    """Return a note for each device kind that the profile store has nothing about."""
    missing = [name for name, profile in profiles.items() if not profile.timings and not profile.fits]
    if store is None or not missing:
        return ()
    known = ", ".join(store.device_kinds()) or "none"
    return tuple(f"the profile store has no times for device kind {name!r} (it has: {known}): costs there are estimates"
                 for name in missing)
