"""Operators into a few groups: consecutive in the model's order, balanced in work, cut where few bytes cross.

The operators are in topological order, so any cut of that order into pieces gives groups that do not wait for each
other in a circle. Which cuts: with ``w`` the work of an operator (its part of all time plus its part of all parameter
bytes) and ``c(p)`` the bytes that cross place ``p`` as a part of all bytes that operators write,

    minimise   sum over cuts of (c(p) + price)  +  overweight * sum over groups of max(0, work / cap - 1)

which a dynamic program over places (``_cut``) solves exactly; the price of a cut rises until there are few enough. A
place is no cut where a tensor crosses that replicas could not divide (``_cannot_be_divided``): one that mixes the
samples of a batch (a loss), or whose samples do not lie along its first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.model.graph import F64, I64, NO_BATCH_DIM, Bool, Graph, TensorRole
from weft.plan.op_bytes import crossing_bytes, crossing_tensors, parameters_by_op
from weft.search.deploy.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors that one group writes and the same other groups read; they travel together."""

    producer: int
    consumers: tuple[int, ...]
    bytes_per_sample: float
    fixed_bytes: float
    """Of tensors that do not grow with the batch."""
    gradient_bytes_per_sample: float
    gradient_fixed_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class OpGroups:
    """Consecutive operators as groups, and what flows between them."""

    graph: Graph
    start: I64
    """Group ``g`` has the operators ``start[g]`` up to ``start[g + 1]``."""

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return len(self.start) - 1

    def ops(self, group: int) -> I64:
        """Return the operators of a group."""
        return np.arange(self.start[group], self.start[group + 1])

    @cached_property
    def of_op(self) -> I64:
        """Return each operator's group."""
        return np.repeat(np.arange(self.num_groups), np.diff(self.start))

    @cached_property
    def home_of_parameter(self) -> dict[int, tuple[int, ...]]:
        """Return, for each parameter, the groups that read it, in order."""
        graph = self.graph
        is_parameter = graph.tensor_role[graph.inputs] == TensorRole.PARAMETER
        pairs = np.unique(np.stack([graph.inputs[is_parameter], self.of_op[graph.consumer_op[is_parameter]]], axis=1),
                          axis=0)
        homes: dict[int, list[int]] = {}
        for tensor, group in pairs.tolist():
            homes.setdefault(tensor, []).append(group)
        return {tensor: tuple(groups) for tensor, groups in homes.items()}

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """Return what flows between groups; constants do not, each group computes them for itself."""
        graph = self.graph
        producer, consumer, tensors = graph.edges.T
        source, target = self.of_op[producer], self.of_op[consumer]
        crosses = (source != target) & ~graph.is_constant[producer]
        readers: dict[int, set[int]] = {}
        for tensor, group in zip(tensors[crosses].tolist(), target[crosses].tolist(), strict=True):
            readers.setdefault(tensor, set()).add(group)
        totals: dict[tuple[int, tuple[int, ...]], F64] = {}
        for tensor, groups in sorted(readers.items()):
            size = float(graph.tensor_bytes[tensor])
            fixed = graph.tensor_batch_dim[tensor] == NO_BATCH_DIM
            amounts = np.array([0.0, size]) if fixed else np.array([size / graph.batch, 0.0])
            key = int(self.of_op[graph.tensor_producer[tensor]]), tuple(sorted(groups))
            totals[key] = totals.get(key, np.zeros(4)) + np.array(
                [*amounts, *(amounts * float(graph.needs_gradient[tensor]))])
        return tuple(Bundle(producer, groups, *row.tolist())
                     for (producer, groups), row in sorted(totals.items()))

def group_operators(graph: Graph, seconds: F64, *, max_groups: int = TUNING.max_groups) -> OpGroups:
    """Return at most ``max_groups`` groups of operators, which take ``seconds``; see the module's docstring."""
    parameter_bytes = parameters_by_op(graph)
    work = seconds / max(float(seconds.sum()), 1e-300) + parameter_bytes / max(float(parameter_bytes.sum()), 1.0)
    crossing, can_cut = crossing_bytes(graph, np.arange(graph.num_ops)), _cuttable(graph)
    written = max(float(graph.tensor_bytes[graph.tensor_producer >= 0].sum()), 1.0)
    places = np.flatnonzero(can_cut)
    prefix = np.concatenate(([0.0], np.cumsum(work)))[places]
    cost = crossing[places] / written
    cap = 1.5 * float(work.sum()) / max_groups
    price = 1e-6
    while True:
        chosen = _cut(prefix, cost + price, cap)
        if len(chosen) - 1 <= max_groups:
            return OpGroups(graph=graph, start=places[chosen].astype(np.int64))
        price *= 4


def _cut(prefix: F64, cost: F64, cap: float) -> list[int]:
    """Return the places to cut at, first and last included, for the least total."""
    num_places = len(prefix)
    best = np.full(num_places, np.inf)
    best[0] = 0.0
    before = np.zeros(num_places, dtype=np.int64)
    for place in range(1, num_places):
        first = max(0, int(np.searchsorted(prefix, prefix[place] - 4 * cap)) - 1)
        excess = np.maximum(0.0, (prefix[place] - prefix[first:place]) / cap - 1.0)
        total = best[first:place] + TUNING.overweight * excess
        where = int(np.argmin(total))
        best[place], before[place] = total[where] + (cost[place] if place < num_places - 1 else 0.0), first + where
    chosen = [num_places - 1]
    while chosen[-1]:
        chosen.append(int(before[chosen[-1]]))
    return chosen[::-1]


def _cuttable(graph: Graph) -> Bool:
    """Return before which operators, and at the end, the model may be cut: no tensor crosses that cannot be divided."""
    tensors, made, last = crossing_tensors(graph, np.arange(graph.num_ops))
    fixed = _cannot_be_divided(graph)[tensors]
    change = np.zeros(graph.num_ops + 2)
    np.add.at(change, made[fixed] + 1, 1)
    np.add.at(change, last[fixed] + 1, -1)
    can_cut = np.cumsum(change)[: graph.num_ops + 1] < 0.5
    can_cut[[0, graph.num_ops]] = True
    return np.asarray(can_cut, dtype=np.bool_)


def _cannot_be_divided(graph: Graph) -> Bool:
    """Return the tensors that replicas with other shares could not take over: see ``weft.plan.layout``."""
    from_samples = graph.tensor_role == TensorRole.INPUT
    from_samples = from_samples | (graph.tensor_batch_dim != NO_BATCH_DIM)
    for op in range(graph.num_ops):
        if from_samples[graph.op_inputs(op)].any():
            from_samples[graph.op_outputs(op)] = True
    mixes = from_samples & (graph.tensor_batch_dim == NO_BATCH_DIM)
    return np.asarray((mixes | (graph.tensor_batch_dim > 0)) & (graph.tensor_role != TensorRole.INPUT), dtype=np.bool_)
