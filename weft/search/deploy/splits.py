"""TP groups of devices that divide operators, and stages that they run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64
from weft.search.common.problem import Problem, StageSpec, mesh_axes

if TYPE_CHECKING:
    from weft.search.shard.tensor_costs import TensorCosts

TpGroup = tuple[DeviceId, ...]
"""Devices that divide the operators of a stage among them; one device for none."""
Splits = Mapping[tuple[int, int], "TensorCosts"]
"""How devices divide operators, by device group and number of devices."""
NO_SPLITS: Final[Splits] = MappingProxyType({})


class SplitsWithContexts(dict[tuple[int, int], "TensorCosts"]):
    """Splits, and those in which devices divide the sequence of a sample as well: by how many do."""

    def __init__(self, splits: Splits, contexts: Mapping[int, Splits]) -> None:
        super().__init__(splits)
        self.contexts = contexts


def contexts_of(splits: Splits) -> Mapping[int, Splits]:
    """Return the splits by how many devices divide the sequence; one for those that do not."""
    return {1: splits, **(splits.contexts if isinstance(splits, SplitsWithContexts) else {})}


MAX_DEGREE: Final = 16
"""No more devices divide operators together: hosts rarely have more."""

class TpGroupTimes:
    """What operators take on tp groups of devices, and the stages that tp groups run."""

    def __init__(self, problem: Problem, splits: Splits = NO_SPLITS) -> None:
        self.problem, self.splits = problem, splits
        self.device_groups = problem.cluster.groups_by_host_and_kind()
        self.group_of = {device: index for index, group in enumerate(self.device_groups) for device in group}

    def split_of(self, tp_group: Sequence[DeviceId]) -> TensorCosts | None:
        """Return how the tp group divides operators; None for a single device."""
        return None if len(tp_group) == 1 else self.splits[self.group_of[tp_group[0]], len(tp_group)]

    def figures_key(self, tp_group: TpGroup) -> tuple[int, int]:
        """Return what tp groups with equal figures have in common: their kind of device and their split."""
        split = self.split_of(tp_group)
        return self.problem.costs.column_of_device[tp_group[0]], 0 if split is None else id(split)

    def op_passes(self, tp_group: Sequence[DeviceId], num_samples: float) -> tuple[F64, F64]:
        """Return the seconds of every operator's forward and backward on the tp group."""
        problem, split = self.problem, self.split_of(tp_group)
        column, fraction = problem.costs.column_of_device[tp_group[0]], num_samples / problem.graph.batch
        forward = problem.costs.op_seconds("F", fraction)[:, column]
        backward = (problem.costs.op_seconds("B", fraction)[:, column] if problem.is_training
                    else np.zeros(problem.graph.num_ops))
        if split is None:
            return forward, backward
        backward = split.seconds(1, backward, num_samples) if problem.is_training else backward
        return split.seconds(0, forward, num_samples), backward

    def stage(self, ops: I64, counts: Sequence[tuple[TpGroup, int]], *, recompute: bool) -> StageSpec:
        """Return the stage of these operators, with its words and times where tp groups of devices divide it.

        ``counts`` are the tp groups with their samples of a micro-batch.
        """
        size, graph, split = sum(count for _, count in counts), self.problem.graph, self.split_of(counts[0][0])
        replicas = tuple((tp_group, count / size) for tp_group, count in counts)
        if split is None:
            return StageSpec(ops=ops, replicas=replicas)
        touched = dict.fromkeys(
            tensor for op in ops.tolist() for tensor in (*graph.op_inputs(op), *graph.op_outputs(op)))
        words = split.words([graph.op_names[op] for op in ops], [graph.tensor_names[tensor] for tensor in touched])
        times: dict[tuple[Hashable, int], dict[str, float]] = {}
        keys = [(self.figures_key(tp_group), count) for tp_group, count in counts]
        for key, (tp_group, count) in dict(zip(keys, counts, strict=True)).items():
            forward, backward = (float(seconds[ops].sum()) for seconds in self.op_passes(tp_group, count))
            again = forward if recompute else 0.0
            times[key] = {"F": forward, "B": backward + again} if self.problem.is_training else {"F": forward}
        return StageSpec(ops=ops, replicas=replicas, sharding=words, mesh=mesh_axes(len(counts[0][0]), split.cp),
                         times=tuple(times[key] for key in keys))


def tp_groups_by_degree(groups: Sequence[Sequence[DeviceId]]) -> Iterator[tuple[int, list[int]]]:
    """Yield each degree with the device groups that have a tp group of so many."""
    degree = 2
    while degree <= MAX_DEGREE:
        members = [index for index, group in enumerate(groups) if len(group) >= degree]
        if members:
            yield degree, members
        degree *= 2
