"""Memory of plans too large to be made only for that: the same account of a smaller plan with the same peaks.

A device's peak does not depend on how many other devices do the same as it does, nor on micro-batches that are not
there at the same time:

    data parallel    two replicas instead of all, two micro-batches (gradients are there in the second) instead of all;
                     the optimizer's state, if it is divided, is counted apart
    teams            two teams instead of all, likewise
    pipeline         two micro-batches more than there are stages: from then on everything comes again

Tests compare the peaks with those of the whole plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64
from weft.plan.lower import lower
from weft.plan.memory import account_memory, optimizer_bytes
from weft.plan.orders import forward_only, one_f_one_b
from weft.plan.plan import Plan, split_samples
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.deploy.splits import Splits
from weft.search.joint.baselines import PipelineCutter, Room
from weft.search.joint.chain import Chain

Team = tuple[DeviceId, ...]
MORE = 4
"""Micro-batches more than stages, after which the memory of a pipeline is what it was before."""
MORE_FORWARD = 16
"""The same without backwards: stages that are faster than the next ones run further and further ahead of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A pipeline of consecutive operators, one stage on each device from the first on."""

    cuts: tuple[int, ...]
    peaks: tuple[int, ...]


class Reduced:
    """Plans of one problem and their peaks; results are kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._peaks: dict[object, int] = {}

    # ---- the whole model on each device -----------------------------------------------------------------------------

    def whole_peak(self, num_samples: int, *, microbatches: int, num_holders: int, sharded: bool = False) -> int:
        """Return the peak of a device with the whole model, which takes so many samples of each micro-batch."""
        num_replicas = min(num_holders, 2)
        key = "whole", num_samples, min(microbatches, 2), num_replicas
        if key not in self._peaks:
            teams = [(device,) for device in self.problem.devices[:num_replicas]]
            spec = StageSpec(ops=self._all_ops, replicas=tuple((team, 1 / num_replicas) for team in teams))
            self._peaks[key] = self._peak(spec, num_samples, microbatches)
        return self._peaks[key] - (self._saved_by_sharding(num_holders) if sharded else 0)

    @cached_property
    def _all_ops(self) -> I64:
        return np.arange(self.problem.graph.num_ops)

    def _saved_by_sharding(self, num_holders: int) -> int:
        return sum(state - math.ceil(state / num_holders) for state in self._states)

    @cached_property
    def _states(self) -> list[int]:
        """Return the bytes of the optimizer's state of each parameter that is read."""
        graph, optimizer = self.problem.graph, self.problem.options.optimizer
        used = np.intersect1d(graph.inputs, graph.parameters)
        return [optimizer_bytes(graph, int(tensor), optimizer) for tensor in used]

    def _peak(self, spec: StageSpec, num_samples: int, microbatches: int) -> int:
        """Return the largest peak of a stage whose replicas take so many samples of each micro-batch."""
        number = min(microbatches, 2)
        batch = num_samples * len(spec.replicas) * number
        problem = replace(self.problem, options=replace(self.problem.options, batch=batch, microbatches=number))
        account = account_memory(lower(_one_stage(problem, spec, number), problem.graph))
        return max(account.peak_bytes(rank) for rank in range(len(problem.devices)))

    # ---- teams ------------------------------------------------------------------------------------------------------

    def _teams(self, degree: int) -> list[Team]:
        return [group[first : first + degree] for group in self.problem.cluster.groups_by_host_and_kind()
                for first in range(0, len(group), degree)]

    def team_peaks(self, splits: Splits, degree: int, microbatches: int) -> list[int]:
        """Return the peak of every device where teams divide operators and share so many micro-batches."""
        size = self.problem.options.batch // microbatches
        teams = self._teams(degree)
        counts = split_samples(size, (1.0,) * len(teams))
        peaks = [0] * len(self.problem.devices)
        for team, count in zip(teams, counts, strict=True):
            for device in team:
                peaks[device] = self._team_peak(splits, degree, count, microbatches)
        return peaks

    def _team_peak(self, splits: Splits, degree: int, num_samples: int, microbatches: int) -> int:
        key = "team", degree, num_samples, min(microbatches, 2)
        if key not in self._peaks and num_samples:
            teams = self._teams(degree)[:2]
            spec = self._team_spec(splits, teams, [num_samples] * len(teams))
            self._peaks[key] = self._peak(spec, num_samples, microbatches)
        return self._peaks.get(key, 0)

    def _team_spec(self, splits: Splits, teams: Sequence[Team], counts: Sequence[int]) -> StageSpec:
        graph, degree = self.problem.graph, len(teams[0])
        words = splits[0, degree].words(graph.op_names, graph.tensor_names)
        times = tuple(self._team_times(splits, team, count) for team, count in zip(teams, counts, strict=True))
        return StageSpec(ops=self._all_ops, sharding=words, times=times,
                         replicas=tuple((team, count / sum(counts)) for team, count in zip(teams, counts, strict=True)))

    def _team_times(self, splits: Splits, team: Team, count: int) -> dict[str, float]:
        """Return the seconds of a team by phase for so many samples."""
        costs, group = self.problem.costs, self._group_of(team[0])
        table = splits[group, len(team)]
        column = costs.column_of_device[team[0]]
        seconds: dict[str, float] = {}
        for which, phase in enumerate(("F", "B")[: 1 + self.problem.is_training]):
            whole: F64 = costs.op_seconds("F" if which == 0 else "B", count / self.problem.graph.batch)[:, column]
            seconds[phase] = float(table.seconds(which, whole, count).sum())
        if self.problem.is_training and self.problem.options.recompute:
            seconds["B"] += seconds["F"]
        return seconds

    def _group_of(self, device: DeviceId) -> int:
        groups = self.problem.cluster.groups_by_host_and_kind()
        return next(index for index, group in enumerate(groups) if device in group)

    def team_seconds(self, splits: Splits, degree: int, size: int) -> float:
        """Return the time of one micro-batch on the slowest team, forward and backward."""
        teams = self._teams(degree)
        counts = split_samples(size, (1.0,) * len(teams))
        return max(sum(self._team_times(splits, team, count).values())
                   for team, count in zip(teams, counts, strict=True) if count)

    def team_plan(self, splits: Splits, degree: int, microbatches: int) -> Plan:
        """Return the whole plan of teams that share each micro-batch."""
        teams = self._teams(degree)
        counts = split_samples(self.problem.options.batch // microbatches, (1.0,) * len(teams))
        used = [(team, count) for team, count in zip(teams, counts, strict=True) if count]
        spec = self._team_spec(splits, [team for team, _ in used], [count for _, count in used])
        return _one_stage(self.problem, spec, microbatches, by="fit")

    # ---- pipelines --------------------------------------------------------------------------------------------------

    def pipeline_plan(self, cuts: Sequence[int], microbatches: int) -> Plan:
        """Return the whole 1F1B plan with stages from cut to cut, on devices from the first on."""
        return _pipeline(self.problem, cuts, microbatches)

    def pipeline_peaks(self, cuts: Sequence[int], size: int, microbatches: int) -> tuple[int, ...]:
        """Return the peak of each stage with so many micro-batches of this size."""
        number = min(microbatches, len(cuts) - 1 + (MORE if self.problem.is_training else MORE_FORWARD))
        problem = replace(self.problem, options=replace(self.problem.options, batch=size * number, microbatches=number))
        account = account_memory(lower(_pipeline(problem, cuts, number), problem.graph))
        return tuple(account.peak_bytes(stage) for stage in range(len(cuts) - 1))

    def memory_cuts(self, size: int, microbatches: int) -> Cut:
        """Return the pipeline whose fullest device, by its own memory, is about as empty as possible."""
        num_stages = min(len(self.problem.devices), self._chain.num_places - 1)
        room = Room(devices=self.problem.devices[:num_stages], memory=tuple(self._capacities[:num_stages]))
        cutter = PipelineCutter(self._chain, microbatches, room, size=size)
        cuts = tuple(self._chain.places[cutter.emptiest()].tolist())
        return Cut(cuts=cuts, peaks=self.pipeline_peaks(cuts, size, microbatches))

    @cached_property
    def _chain(self) -> Chain:
        return Chain(self.problem, num_stages=len(self.problem.devices))

    @cached_property
    def _capacities(self) -> list[float]:
        """Return each device's memory; where there is no limit, more than everything."""
        sizes = [device.memory_bytes for device in self.problem.cluster.devices]
        most = 2.0 * max((size for size in sizes if size is not None), default=2**40)
        return [most if size is None else float(size) for size in sizes]


def _one_stage(problem: Problem, spec: StageSpec, microbatches: int, *, by: str = "reduced") -> Plan:
    order = (one_f_one_b if problem.is_training else forward_only)(1, microbatches)
    devices = [device for team, _ in spec.replicas for device in team]
    return make_plan(problem, [spec], order * len(devices), microbatches=microbatches, by=by, order_devices=devices)


def _pipeline(problem: Problem, cuts: Sequence[int], microbatches: int) -> Plan:
    specs = [StageSpec(ops=np.arange(first, last), replicas=(((problem.devices[device],), 1.0),))
             for device, (first, last) in enumerate(itertools.pairwise(cuts))]
    order = (one_f_one_b if problem.is_training else forward_only)(len(specs), microbatches)
    return make_plan(problem, specs, order, microbatches=microbatches, by="fit",
                     order_devices=problem.devices[: len(specs)])
