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
from weft.search.baselines import cut_places, equal_cuts, prefix_sums, state_bytes, whole_model
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.deploy.splits import Splits

Team = tuple[DeviceId, ...]
MORE = 2
"""Micro-batches more than stages, after which the memory of a pipeline is what it was before."""


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
        number = min(microbatches, len(cuts) - 1 + MORE)
        problem = replace(self.problem, options=replace(self.problem.options, batch=size * number, microbatches=number))
        account = account_memory(lower(_pipeline(problem, cuts, number), problem.graph))
        return tuple(account.peak_bytes(stage) for stage in range(len(cuts) - 1))

    def could_fit(self, size: int, microbatches: int) -> bool:
        """Return whether what lasts fits on some pipeline's devices, without what is live inside stages."""
        problem = self.problem
        num_stages = min(len(problem.devices), problem.graph.num_ops)
        loads, capacity = self._loads(size, microbatches, num_stages), self._capacities[:num_stages]
        return _greedy_cuts(loads, capacity)[-1] == problem.graph.num_ops

    def memory_cuts(self, size: int, microbatches: int) -> Cut:
        """Return the pipeline whose fullest device, by its own memory, is about as empty as possible.

        It is cut twice: first without what is live inside stages, then with what that was for one micro-batch. Where
        that does not fit, equal numbers of layers are tried as well.
        """
        problem = self.problem
        places = cut_places(problem, whole_model(problem))
        num_stages = min(len(problem.devices), len(places) - 1)
        capacity = self._capacities[:num_stages]
        once, loads = (self._loads(size, number, num_stages)[:, places] for number in (1, microbatches))
        first = _even_cuts(loads, np.zeros(num_stages), capacity)
        peaks = np.array(self.pipeline_peaks([int(places[index]) for index in first], size, 1))
        stages = np.arange(num_stages)
        working = peaks - (once[stages, first[1:]] - once[stages, first[:-1]])
        cuts = tuple(int(places[index]) for index in _even_cuts(loads, working, capacity))
        found = Cut(cuts=cuts, peaks=self.pipeline_peaks(cuts, size, microbatches))
        if (np.array(found.peaks) <= capacity).all():
            return found
        equal = tuple(equal_cuts(problem))
        other = Cut(cuts=equal, peaks=self.pipeline_peaks(equal, size, microbatches))
        return min(found, other, key=lambda cut: float((cut.peaks / self._capacities[: len(cut.peaks)]).max()))

    @cached_property
    def _capacities(self) -> F64:
        """Return each device's memory; where there is no limit, more than everything."""
        sizes = [device.memory_bytes for device in self.problem.cluster.devices]
        most = 2 * max((size for size in sizes if size is not None), default=2**40)
        return np.asarray([most if size is None else size for size in sizes], dtype=np.float64)

    def _loads(self, size: int, microbatches: int, num_stages: int) -> F64:
        """Return [stage, operator]: what a stage there holds of all operators before this one."""
        graph, problem = self.problem.graph, self.problem
        state, saved = prefix_sums(state_bytes(problem)), np.zeros(graph.num_ops)
        if problem.is_training and not problem.options.recompute:
            kept = np.flatnonzero(graph.is_saved & (graph.tensor_producer >= 0) & (graph.tensor_base < 0))
            np.add.at(saved, graph.tensor_producer[kept], graph.tensor_bytes[kept] * size / graph.batch)
        in_flight = np.minimum(microbatches, num_stages - np.arange(num_stages))
        return np.asarray(state[None, :] + in_flight[:, None] * prefix_sums(saved)[None, :], dtype=np.float64)


def _even_cuts(loads: F64, working: F64, capacity: F64) -> list[int]:
    """Return places that cut into one stage for each row, the largest part of a device's capacity being smallest.

    For a trial part each stage in turn takes as much as keeps to it; bisection finds the smallest that gets to the end.
    """
    low, high = 0.0, 2 * float(((loads[:, -1] + working) / capacity).max()) + 1.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        cuts = _greedy_cuts(loads, middle * capacity - working)
        low, high = (low, middle) if cuts[-1] == loads.shape[1] - 1 else (middle, high)
    return _greedy_cuts(loads, high * capacity - working)


def _greedy_cuts(loads: F64, room: F64) -> list[int]:
    """Return where stages end that take as much as they have room for, at least one place, and leave one for each."""
    num_stages, num_places = loads.shape
    cuts = [0]
    for stage in range(num_stages):
        begin, last = cuts[-1], num_places - num_stages + stage
        reach = int(np.searchsorted(loads[stage], loads[stage, begin] + room[stage], side="right")) - 1
        cuts.append(max(begin + 1, min(reach, last)))
    return cuts


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
