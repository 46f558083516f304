"""Parameters fitted to measurements: link latency and bandwidth, and efficiencies of operator classes.

Links. With ``a`` and ``b`` how often a collective's algorithm pays latency and bytes (``step_counts``; 1 and 1 for a
transfer), the model is

    seconds = a * latency + b * bytes * s_per_byte      latency >= 0, s_per_byte >= 0

and the fit minimises the sum of squared *relative* errors, so that 1 KiB counts as much as 1 GiB. Points that fit badly
lose weight (a few rounds of reweighting by the median error), so that single outliers do not move the line.

Operators. With ``c`` and ``m`` the compute and memory times at peak rates, the roofline is

    seconds = overhead + max(c / compute, m / memory)

The pair (compute, memory) that minimises the sum of |log(fitted / measured)| over the class's profiled operators is
searched among the shares that the operators themselves show, c / (seconds - overhead) and m / (seconds - overhead).
That is robust: half of the operators may be odd. Where a side never binds, it keeps the table's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from weft.base.errors import InputError
from weft.cluster.cluster import DeviceKind
from weft.cost.collectives import Algorithm, Collective, step_counts
from weft.cost.op_classes import Efficiency, op_classes
from weft.cost.profile import ClassFit, CommFit, OpKey, ProfileStore, op_signature
from weft.cost.roofline import Work, describe_work, op_dtypes, roofline_terms
from weft.model.graph import F64, Graph

MIN_SECONDS: Final = 1e-12
_ROUNDS: Final = 10
_OUTLIER: Final = 3.0
"""A point whose error is more than this many median errors loses weight."""
_CANDIDATES: Final = 60
"""Shares tried per side and class."""
_MIN_WORK: Final = 2.0
"""Operators shorter than this many overheads say nothing about efficiencies."""


def fit_transfer(points: Sequence[tuple[float, float]], *, scope: str) -> CommFit:
    """Return the latency and bandwidth of a link from measured (bytes, seconds) of transfers over it."""
    return fit_collective(Collective.P2P, points, num_devices=2, scope=scope)


def fit_collective(collective: Collective, points: Sequence[tuple[float, float]], *, num_devices: int, scope: str,
                   algorithm: Algorithm = Algorithm.RING) -> CommFit:
    """Return latency and bandwidth per link from measured (bytes, seconds) of a collective on ``num_devices``."""
    sizes, seconds = _checked_points(points)
    if num_devices < 2 or algorithm is Algorithm.HIERARCHICAL:
        raise InputError(f"cannot fit a {algorithm.value} {collective.value} on {num_devices} devices: give two or "
                         "more devices and 'ring' or 'tree'")
    counts = step_counts(collective, algorithm, num_devices)
    columns = np.stack([np.full_like(sizes, counts.latency_s), counts.s_per_byte * sizes], axis=1)
    latency_s, s_per_byte = _robust_fit(columns, seconds)
    errors = np.abs(columns @ np.array([latency_s, s_per_byte]) / seconds - 1)
    return CommFit(collective=collective.value, scope=scope, algorithm=algorithm.value, latency_s=latency_s,
                   s_per_byte=s_per_byte, num_points=len(sizes), error=float(np.median(errors)))


def _checked_points(points: Sequence[tuple[float, float]]) -> tuple[F64, F64]:
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    sizes, seconds = table[:, 0], table[:, 1]
    if not np.all(np.isfinite(table)) or np.any(sizes < 0) or np.any(seconds < MIN_SECONDS):
        raise InputError("measured points must be (bytes, seconds), finite, bytes zero or more and seconds above zero")
    if len(np.unique(sizes)) < 2:
        raise InputError(f"latency and bandwidth need points of at least two sizes, not {len(np.unique(sizes))}")
    return sizes, seconds


def _robust_fit(columns: F64, seconds: F64) -> tuple[float, float]:
    """Return the two non-negative coefficients with the least relative errors, outliers down-weighted."""
    relative = columns / seconds[:, None]
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        solution = _non_negative(relative, weights)
        errors = np.abs(relative @ solution - 1)
        limit = max(_OUTLIER * float(np.median(errors)), 1e-12)
        weights = np.minimum(1.0, limit / np.maximum(errors, 1e-300)) ** 2
    return float(solution[0]), float(solution[1])


def _non_negative(columns: F64, weights: F64) -> F64:
    """Return the x >= 0 (two of them) with the least weighted squares of ``columns @ x - 1``."""
    from scipy.optimize import nnls

    root = np.sqrt(weights)
    left = columns * root[:, None]
    norms = np.maximum(np.linalg.norm(left, axis=0), 1e-300)
    return np.asarray(nnls(left / norms, root)[0] / norms, dtype=np.float64)


def fit_efficiencies(graphs: Iterable[Graph], kind: DeviceKind, store: ProfileStore) -> tuple[ClassFit, ...]:
    """Return fitted efficiencies of every class that ``graphs`` have measured operators of on ``kind``.

    Only forward times count. ``store.put_class_fits`` makes them the default for operators that were not measured.
    """
    timings = store.timings(kind.name)
    samples: dict[str, list[tuple[float, float, float]]] = {}
    for graph in graphs:
        work = describe_work(graph)
        compute_s, memory_s = _peak_times(work, kind)
        for op, dtype in enumerate(op_dtypes(graph)):
            timing = timings.get(OpKey(kind.name, graph.op_kinds[op], op_signature(graph, op, dtype), dtype))
            seconds = 0.0 if timing is None else timing.forward_s - kind.overhead_s
            if not work.is_view[op] and seconds > _MIN_WORK * kind.overhead_s and compute_s[op] + memory_s[op] > 0:
                samples.setdefault(work.classes[op], []).append((float(compute_s[op]), float(memory_s[op]), seconds))
    return tuple(_fit_class(name, kind, np.array(rows)) for name, rows in sorted(samples.items()))


def _peak_times(work: Work, kind: DeviceKind) -> tuple[F64, F64]:
    """Return every operator's compute and memory time at full peak rates."""
    full = dict.fromkeys(op_classes(), Efficiency(compute=1.0, memory=1.0))
    terms = roofline_terms(work, kind, "forward", full)
    return terms.compute_s, terms.fixed_s + terms.moved_s


def _fit_class(name: str, kind: DeviceKind, rows: F64) -> ClassFit:
    compute_s, memory_s, seconds = rows.T
    start = op_classes()[name].on(kind.type)
    best, shares = np.inf, (start.compute, start.memory)
    for compute in _candidates(start.compute, compute_s / seconds):
        for memory in _candidates(start.memory, memory_s / seconds):
            error = float(np.abs(np.log(np.maximum(compute_s / compute, memory_s / memory) / seconds)).sum())
            if error < best * (1 - 1e-9):
                best, shares = error, (compute, memory)
    fitted_s = np.maximum(compute_s / shares[0], memory_s / shares[1])
    return ClassFit(device_kind=kind.name, op_class=name, compute=shares[0], memory=shares[1],
                    num_points=len(seconds), error=float(np.median(np.abs(fitted_s / seconds - 1))))


def _candidates(start: float, shares: F64) -> list[float]:
    """Return shares to try: the table's first, then those that the operators show, thinned to a few dozen."""
    positive = np.unique(shares[shares > 0])
    keep = np.unique(np.linspace(0, len(positive) - 1, min(len(positive), _CANDIDATES)).astype(int))
    return [start, *positive[keep].tolist()]
