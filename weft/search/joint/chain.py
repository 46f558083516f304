"""A model as a chain of pieces with what any run of them takes on a team: seconds, state, activations.

All figures are prefix sums at the *places* where stages may begin, so those of a stage are differences. Parameters that
several operators read count for the first. What operators keep is counted for the operator that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from weft.model.graph import F64, I64, TensorRole
from weft.plan.layout import stage_inputs
from weft.plan.local_tensors import local_tensors
from weft.plan.memory import optimizer_bytes
from weft.plan.plan import Replica, Stage
from weft.plan.stage_memory import stage_memory
from weft.search.baselines import Segment, crossing_bytes, cut_places, prefix_sums
from weft.search.common.problem import TENSOR_AXIS, Problem
from weft.search.deploy.splits import Splits
from weft.search.joint.setting import Team
from weft.search.shard.tensor_costs import TensorCosts

LEAST: Final = 0.1
"""So large a part of the places has least to be sent over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one device: prefix sums at the places, and the most of any operator between one place and the next."""

    parameters: F64
    states: F64
    saved: F64
    """For one sample."""
    most_made: F64
    """What the operator that makes most makes, for one sample: room while computing."""
    most_parameters: F64
    """The parameters of the operator that has most: room for new gradients until they are added to their sums."""


class Chain:
    """Figures of a model's pieces, computed when asked for."""

    def __init__(self, problem: Problem, splits: Splits) -> None:
        self.problem, self.splits = problem, splits
        self.segment = Segment(ops=np.arange(problem.graph.num_ops), devices=problem.devices[:1], memory=(None,))
        self.places: I64 = cut_places(problem, self.segment)
        self.group_of = {device: index for index, group in enumerate(problem.cluster.groups_by_host_and_kind())
                         for device in group}
        self._passes: dict[tuple[int, int, float], tuple[F64, F64]] = {}
        self._held: dict[tuple[int, int], Held] = {}

    @property
    def num_places(self) -> int:
        """Return at how many places, both ends included, the model may be cut."""
        return len(self.places)

    def split_of(self, team: Team) -> TensorCosts | None:
        """Return how the team divides operators; None for a single device."""
        return None if len(team) == 1 else self.splits[self.group_of[team[0]], len(team)]

    def figures_key(self, team: Team) -> tuple[int, int]:
        """Return what teams with equal figures have in common: their kind of device and their split."""
        split = self.split_of(team)
        return self.problem.costs.column_of_device[team[0]], 0 if split is None else id(split)

    def passes(self, team: Team, num_samples: float) -> tuple[F64, F64]:
        """Return the seconds of forward and backward up to each place, for so many samples at once."""
        key = (*self.figures_key(team), num_samples)
        if key not in self._passes:
            forward, backward = (prefix_sums(seconds)[self.places] for seconds in self.op_passes(team, num_samples))
            self._passes[key] = forward, backward
        return self._passes[key]

    def op_passes(self, team: Team, num_samples: float) -> tuple[F64, F64]:
        """Return the seconds of every operator's forward and backward on the team."""
        problem, split = self.problem, self.split_of(team)
        column, fraction = problem.costs.column_of_device[team[0]], num_samples / problem.graph.batch
        forward = problem.costs.op_seconds("F", fraction)[:, column]
        backward = (problem.costs.op_seconds("B", fraction)[:, column] if problem.is_training
                    else np.zeros(problem.graph.num_ops))
        if split is None:
            return forward, backward
        backward = split.seconds(1, backward, num_samples) if problem.is_training else backward
        return split.seconds(0, forward, num_samples), backward

    def held(self, team: Team) -> Held:
        """Return what one device of the team holds."""
        key = self.figures_key(team)
        if key not in self._held:
            self._held[key] = self._account(self.split_of(team))
        return self._held[key]

    def _account(self, split: TensorCosts | None) -> Held:
        graph, problem = self.problem.graph, self.problem
        part = np.ones(graph.num_tensors) if split is None else split.held_part
        first, sizes, states = self._parameters
        kept = self._saved_by_op(split)
        parameters, optimizer = (
            np.bincount(first, weights=values * part[self._parameter_ids], minlength=graph.num_ops).astype(np.float64)
            for values in (sizes, states))
        saved = kept if problem.is_training else np.zeros(graph.num_ops)
        own = (graph.tensor_producer >= 0) & (graph.tensor_base < 0)
        made: F64 = np.bincount(graph.tensor_producer[own], weights=(graph.tensor_bytes * part)[own] / graph.batch,
                                minlength=graph.num_ops).astype(np.float64)
        return Held(parameters=prefix_sums(parameters)[self.places], states=prefix_sums(optimizer)[self.places],
                    saved=prefix_sums(saved)[self.places], most_made=self._most(made),
                    most_parameters=self._most(parameters))

    def _most(self, by_op: F64) -> F64:
        """Return the largest value between each place and the next."""
        return np.asarray(np.maximum.reduceat(by_op, self.places[:-1]), dtype=np.float64)

    @cached_property
    def _parameter_ids(self) -> I64:
        graph = self.problem.graph
        read = np.unique(graph.inputs)
        return np.asarray(read[graph.tensor_role[read] == TensorRole.PARAMETER], dtype=np.int64)

    @cached_property
    def _parameters(self) -> tuple[I64, F64, F64]:
        """Return the first reader, the bytes and the optimizer's bytes of every parameter."""
        graph, problem = self.problem.graph, self.problem
        tensors, places = np.unique(graph.inputs, return_index=True)
        first = np.zeros(graph.num_tensors, dtype=np.int64)
        first[tensors] = graph.consumer_op[places]
        ids = self._parameter_ids
        states = [optimizer_bytes(graph, int(tensor), problem.options.optimizer) if problem.is_training else 0
                  for tensor in ids]
        return first[ids], graph.tensor_bytes[ids].astype(np.float64), np.asarray(states, dtype=np.float64)

    def _saved_by_op(self, split: TensorCosts | None) -> F64:
        """Return what each operator leaves for the backward on a device, for one sample.

        A tensor counts for the operator that makes it. Where devices divide operators, what they keep depends on how
        readers find it; then all is scaled to what the exact account gives for the middle of the model.
        """
        graph = self.problem.graph
        kept = np.flatnonzero(graph.is_saved & (graph.tensor_producer >= 0) & (graph.tensor_base < 0))
        made = np.bincount(graph.tensor_producer[kept], weights=graph.tensor_bytes[kept], minlength=graph.num_ops)
        saved = np.asarray((made + graph.saved_inside_bytes) / graph.batch, dtype=np.float64)
        if split is None:
            return saved
        first, last = (int(self.places[index * (self.num_places - 1) // 3]) for index in (1, 2))
        exact = self._exact_saved(split, np.arange(first, last))
        saved = saved * split.saved_part
        return np.asarray(saved * (exact / max(float(saved[first:last].sum()), 1.0)), dtype=np.float64)

    def _exact_saved(self, split: TensorCosts, ops: I64) -> float:
        """Return what one device keeps of a stage of these operators, for one sample."""
        graph = self.problem.graph
        degree = next(size for (_, size), known in self.splits.items() if known is split)
        stage = Stage(name="middle", ops=tuple(graph.op_names[op] for op in ops.tolist()), sharding=split.sharding,
                      replicas=(Replica(devices=tuple(map(str, range(degree))), mesh={TENSOR_AXIS: degree}),))
        crossing = stage_inputs(graph, ops)
        local = local_tensors(graph, stage, stage.replicas[0], ops, crossing)
        memory = stage_memory(graph, ops, num_samples=graph.batch, training=True, crossing=crossing, local=local)
        return memory.saved / graph.batch

    @cached_property
    def crossing(self) -> F64:
        """Return the bytes that go over each place, for one sample."""
        return np.asarray(crossing_bytes(self.problem.graph, self.segment.ops)[self.places] / self.problem.graph.batch)

    @cached_property
    def typical_crossing(self) -> float:
        """Return the bytes that go over a typical place, for one sample."""
        return float(np.median(self.crossing))

    @cached_property
    def least_crossing(self) -> float:
        """Return about what crosses the places where least does, as between layers: segments end there."""
        return float(np.quantile(self.crossing, LEAST))

    def capacity(self, team: Team) -> float:
        """Return the memory of the team's smallest device."""
        sizes = [self.problem.cluster.devices[device].memory_bytes for device in team]
        return min((float(size) for size in sizes if size is not None), default=float("inf"))

    def speed(self, team: Team) -> float:
        """Return samples per second of the whole model on a team."""
        return self.problem.graph.batch / max(float(sum(column[-1] for column in self.passes(
            team, float(self.problem.graph.batch)))), 1e-12)
