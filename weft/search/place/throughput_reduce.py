"""Exact reductions of a load problem: what placements of at most some value must do, or lose nothing by.

- A unit cannot run where its own time is above the limit (``forbid``).
- Two units share a device if every way to part them is above the limit (``_inseparable``).
- With contiguity, whatever lies on a path between two nodes of a unit is on that unit's device (``_between``).
- A unit without time that shares tensors with one other unit only goes where that one is, if memory allows it, and so
  does one with a single tensor where tensors cost the same wherever they go (``_free_riders``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.throughput_model import LoadProblem, Loads, merge

MARGIN = 1e-9
"""Relative: times so close to the limit count as within it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """A smaller problem, and what its units stand for."""

    problem: LoadProblem
    group: I64
    """[units of the given problem] the unit of the smaller one."""

    def expand(self, device: I64) -> I64:
        """Return the placement of the given problem that a placement of the smaller one means."""
        return np.asarray(device[self.group])


def reduce_problem(problem: LoadProblem, limit: float) -> Reduced:
    """Return a problem with the same best value, if that is at most the limit; with fewer placements."""
    group = np.arange(problem.num_units, dtype=np.int64)
    now = _forbid(problem, limit)
    while True:
        parent = np.arange(now.num_units, dtype=np.int64)
        _inseparable(now, limit, parent)
        _free_riders(now, parent)
        if now.contiguous:
            _between(now, parent)
        labels = _labels(parent)
        if labels.max(initial=-1) + 1 == now.num_units:
            return Reduced(problem=now, group=group)
        group = labels[group]
        now = _forbid(merge(now, labels), limit)


def _find(parent: I64, unit: int) -> int:
    while parent[unit] != unit:
        parent[unit] = parent[parent[unit]]
        unit = int(parent[unit])
    return unit


def _union(parent: I64, one: int, other: int) -> None:
    one, other = _find(parent, one), _find(parent, other)
    parent[max(one, other)] = min(one, other)


def _labels(parent: I64) -> I64:
    roots = np.array([_find(parent, unit) for unit in range(len(parent))], dtype=np.int64)
    return np.asarray(np.unique(roots, return_inverse=True)[1], dtype=np.int64).reshape(-1)


def _forbid(problem: LoadProblem, limit: float) -> LoadProblem:
    a = problem.arrays
    time_s = np.where(a.time_s > limit * (1 + MARGIN), np.inf, a.time_s)
    return LoadProblem(arrays=a._replace(time_s=time_s), unit_names=problem.unit_names,
                       device_names=problem.device_names, class_of_device=problem.class_of_device,
                       contiguous=problem.contiguous)


def _pair_seconds(a: Loads, tensor: int) -> F64:
    """Return [m, m] what sending the tensor loads a resource with; 0 where it occupies nothing."""
    row = a.given_row[tensor]
    seconds = a.given_s[row] if row >= 0 else a.latency_s + a.s_per_byte * a.tensor_bytes[tensor]
    occupies = (np.diff(a.resource_start) > 0).reshape(seconds.shape)
    return np.where(occupies | np.isinf(seconds), seconds, 0.0)


def _inseparable(problem: LoadProblem, limit: float, parent: I64) -> None:
    """Join the owner and a reader of a tensor where all pairs of different devices are above the limit."""
    a = problem.arrays
    most = limit * (1 + MARGIN)
    apart = ~np.eye(problem.num_devices, dtype=np.bool_)
    for tensor, owner in enumerate(a.owner.tolist()):
        pair_s = _pair_seconds(a, tensor)
        if not a.touch_s[tensor].any() and not pair_s.any():
            continue
        leaves = a.time_s[owner] + a.touch_s[tensor] <= most
        for reader in a.readers[a.reader_start[tensor] : a.reader_start[tensor + 1]].tolist():
            enters = a.time_s[reader] + a.touch_s[tensor] <= most
            if not (leaves[:, None] & enters[None, :] & (pair_s <= most) & apart).any():
                _union(parent, owner, reader)


def _free_riders(problem: LoadProblem, parent: I64) -> None:
    """Join units without time with one they share a tensor with; none of them hosts or rides twice in one round."""
    a = problem.arrays
    only_touch = len(a.resources) == 0 and not np.isinf(a.latency_s).any() and not np.isinf(a.given_s).any()
    is_taken = np.zeros(problem.num_units, dtype=np.bool_)
    for unit in range(problem.num_units):
        tensors = [*a.owned[a.own_start[unit] : a.own_start[unit + 1]].tolist(),
                   *a.reads[a.read_start[unit] : a.read_start[unit + 1]].tolist()]
        pins = {int(pin) for tensor in tensors for pin in
                (a.owner[tensor], *a.readers[a.reader_start[tensor] : a.reader_start[tensor + 1]])} - {unit}
        is_single = len(tensors) == 1 and only_touch and not problem.contiguous
        if is_taken[unit] or not pins or (len(pins) > 1 and not is_single):
            continue
        host = min(pins)
        has_room = problem.is_memory_free or problem.unit_bytes[unit] == 0
        is_free = (a.time_s[unit][np.isfinite(a.time_s[host])] == 0).all()
        if has_room and is_free and not is_taken[host]:
            is_taken[[*pins, unit]] = True
            _union(parent, unit, host)


def _between(problem: LoadProblem, parent: I64) -> None:
    """Join each unit with the units of the nodes on paths between its own nodes."""
    a = problem.arrays
    count = len(a.node_unit)
    targets: list[list[int]] = [[] for _ in range(count)]
    sources = [a.sources[a.source_start[node] : a.source_start[node + 1]].tolist() for node in range(count)]
    for node in range(count):
        for source in sources[node]:
            targets[source].append(node)
    for unit in range(problem.num_units):
        own = np.flatnonzero(a.node_unit == unit).tolist()
        if len(own) < 2:
            continue
        below = np.zeros(count, dtype=np.bool_)
        above = np.zeros(count, dtype=np.bool_)
        below[own] = above[own] = True
        for node in range(own[0], own[-1] + 1):
            below[node] |= any(below[source] for source in sources[node])
        for node in range(own[-1], own[0] - 1, -1):
            above[node] |= any(above[target] for target in targets[node])
        for node in np.flatnonzero(below & above).tolist():
            _union(parent, unit, int(a.node_unit[node]))
