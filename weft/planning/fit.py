"""Does a model fit on a cluster, how, and with which margin: a quick answer, without searching for a fast plan.

For each strategy the largest micro-batches that fit are found:

    single          everything on one device
    data-parallel   the whole model on every device; also with the optimizer's state divided among them
    pipeline        one stage on each device, cut so that the fullest is as empty as possible
    tensor          teams of 2, 4, ... devices of a host divide every operator

Where none of these fits, the joint search looks for a plan (``weft.search.joint``), for a few seconds.

Memory is that of ``weft.plan.memory``, of smaller plans with the same peaks (``Reduced``): a device's peak does not
depend on how many other devices do the same as it does, nor on micro-batches that are not there at the same time.

    data parallel    two replicas instead of all, two micro-batches (gradients are there in the second) instead of all;
                     the optimizer's state, if it is divided, is counted apart
    teams            two teams instead of all, likewise
    pipeline         a few micro-batches more than there are stages: from then on everything comes again

Tests compare these peaks with those of the whole plans. Times are rough: all devices busy, nothing waits for messages
but gradients at the end. They only say which of several to recommend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final, Literal

import numpy as np

from weft.base.errors import ModelError, NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import DeviceId
from weft.cost.costs import Costs
from weft.model.folded import FoldedModel
from weft.model.graph import F64, Graph
from weft.plan.lower import lower
from weft.plan.memory import account_memory, optimizer_bytes
from weft.plan.op_bytes import state_by_op
from weft.plan.orders import forward_only, one_f_one_b
from weft.plan.plan import Plan, split_samples
from weft.planning.replan import best_joint
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.problem import Problem, StageSpec, divisors, fair_samples, make_plan
from weft.search.deploy.splits import NO_SPLITS, Splits, teams_by_degree
from weft.search.joint.baselines import STRATEGIES, PipelineCutter, Room
from weft.search.joint.chain import Chain
from weft.search.shard.tensor_costs import split_operators
from weft.simulate.exchange_time import reduce_seconds

Name = Literal["single", "data-parallel", "data-parallel-by-speed", "tensor", "pipeline", "1f1b-balanced", "joint"]
Split = Callable[[int], Splits]
"""Returns how teams of so many devices divide operators; nothing where they cannot."""
MANY_OPS: Final = 3000
"""The account of teams takes long for models with more operators: pipelines come first."""
MANY_DEVICES: Final = 16
"""The account of pipelines takes long on more devices."""
MICROBATCHES_PER_STAGE: Final = 4
"""So many micro-batches for each stage keep the bubble of a pipeline small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to plan with."""

    strategy: Name
    microbatches: int
    recompute: bool = False
    sharded: bool = False
    """Each device keeps a part of the optimizer's state. They gather what each has updated."""
    degree: int = 1
    """Devices of a team that divides operators."""
    cuts: tuple[int, ...] = ()
    """Of a pipeline: the operators at which stages begin, and the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a device would hold at its peak."""

    device: str
    peak_bytes: int
    capacity_bytes: int | None
    """None is unlimited."""

    @property
    def margin_bytes(self) -> float:
        """Return what is left; negative if it is too little."""
        return float("inf") if self.capacity_bytes is None else self.capacity_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCandidate:
    """A strategy with the largest micro-batches that fit, or those that are nearest to it."""

    setting: Setting
    uses: tuple[Use, ...]
    """Of the devices that have work, in their order."""
    rough_s: float
    """The step, roughly."""
    plan: Plan | None = None
    """Where it was made for this."""

    @property
    def fullest(self) -> Use:
        """Return the device with the least part of its memory left."""
        return min(self.uses, key=lambda use: use.margin_bytes / (use.capacity_bytes or 1))

    @property
    def fits(self) -> bool:
        """Return whether every device has enough memory."""
        return self.fullest.margin_bytes >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """All candidates, and the one to take."""

    candidates: tuple[FitCandidate, ...]
    recommended: FitCandidate | None
    """None if nothing fits."""
    is_complete: bool = True
    """No strategy was left out because of the time limit or Ctrl-C."""

    @property
    def nearest(self) -> FitCandidate:
        """Return the candidate with the largest margin on its fullest device: the nearest miss, where nothing fits."""
        return max(self.candidates, key=lambda item: item.fullest.margin_bytes)

    def miss(self) -> NoFeasiblePlan:
        """Return the error that says by how much the nearest candidate does not fit."""
        use, setting = self.nearest.fullest, self.nearest.setting
        assert use.capacity_bytes is not None, "it does not fit"
        missing = use.peak_bytes - use.capacity_bytes
        cut = "" if self.is_complete else " of what there was time to try"
        return NoFeasiblePlan(
            f"nothing{cut} fits; the nearest is {describe(setting)}: {use.device!r} needs "
            f"{format_bytes(use.peak_bytes)} but has {format_bytes(use.capacity_bytes)}, {format_bytes(missing)} too "
            "little. Try a smaller batch, lower precision or more devices; `weft explain MODEL CLUSTER` finds the "
            "smallest change that helps",
            missing_bytes=missing, device=use.device)


def describe(setting: Setting) -> str:
    """Return the setting in words."""
    words = [setting.strategy if setting.strategy != "tensor" else f"tensor x {setting.degree}"]
    words.append(f"{setting.microbatches} micro-batch{'es' if setting.microbatches > 1 else ''}")
    words += ["recomputation"] * setting.recompute + ["sharded optimizer state"] * setting.sharded
    return ", ".join(words)


def fit(problem: Problem, *, split: Split = lambda degree: NO_SPLITS, budget: Budget | None = None) -> Fit:
    """Return which strategies fit, and which of them to take; ``split`` says how teams of a size divide operators.

    What is not known by the budget's deadline is left out, but for the first strategy. Ctrl-C marks the budget.
    """
    fitter, budget = _Fitter(problem, split), budget or time_budget(None)
    candidates: list[FitCandidate] = []
    is_complete = _try_all(fitter, candidates, budget)
    fitting = [item for item in candidates if item.fits]
    if not fitting:
        return Fit(candidates=tuple(candidates), recommended=None, is_complete=is_complete)
    best = recommended = min(fitting, key=_preference)
    try:
        with cut_short(budget):
            recommended = fitter.as_planned(best)
    except (KeyboardInterrupt, OutOfTime) as ended:
        budget.is_interrupted |= isinstance(ended, KeyboardInterrupt)
        is_complete = False
    return Fit(candidates=tuple(recommended if item is best else item for item in candidates), recommended=recommended,
               is_complete=is_complete)


def _try_all(fitter: _Fitter, candidates: list[FitCandidate], budget: Budget) -> bool:
    """Add what strategies come to, and the joint search where none fits; return whether the time was enough."""
    found = fitter.candidates()
    candidates += itertools.islice(found, 1)
    try:
        with cut_short(budget):
            for item in found:
                candidates.append(item)
            if not any(item.fits for item in candidates):
                candidates += fitter.joint(budget)
    except OutOfTime:
        budget.report("time limit: strategies that were not reached are left out")
        return False
    except KeyboardInterrupt:
        budget.is_interrupted = True
        budget.report("interrupted: strategies that were not reached are left out")
        return False
    return True


def splitter(problem: Problem, fold: Callable[[], FoldedModel], costs_of: Callable[[Graph], Costs]) -> Split:
    """Return what finds how teams divide a model; ``fold`` traces it folded, ``costs_of`` gives the costs of that."""
    cluster = problem.cluster

    def alike(team: Sequence[DeviceId]) -> object:
        routes = [cluster.route(one, other) for one in team for other in team if one != other]
        return cluster.devices[team[0]].kind, tuple((route.bytes_per_s, route.latency_s) for route in routes)

    @cache
    def split(degree: int) -> Splits:
        firsts = {index: group[:degree] for index, group in enumerate(cluster.groups_by_host_and_kind())
                  if len(group) >= degree}
        teams = {alike(team): team for team in reversed(firsts.values())}
        try:
            folded = fold()
            tables = split_operators(folded, problem.graph, costs_of(folded.traced.graph), list(teams.values()),
                                     optimizer=problem.options.optimizer)
        except (NoFeasiblePlan, ModelError):
            return NO_SPLITS
        known = dict(zip(teams, tables, strict=True))
        return {(index, degree): known[alike(team)] for index, team in firsts.items()}

    return split


def _preference(item: FitCandidate) -> tuple[bool, float]:
    """Return what to sort by: what runs comes first, then what is faster."""
    return item.setting.sharded, item.rough_s


def plan_of(problem: Problem, setting: Setting, splits: Splits = NO_SPLITS) -> Plan:
    """Return the plan that a setting means."""
    changed = problem_with(problem, setting)
    if setting.strategy in STRATEGIES:
        return STRATEGIES[setting.strategy](changed, setting.microbatches)
    reduced = Reduced(changed)
    if setting.strategy == "pipeline":
        return _pipeline(changed, setting.cuts, setting.microbatches)
    return reduced.team_plan(splits, setting.degree, setting.microbatches)


def problem_with(problem: Problem, setting: Setting) -> Problem:
    """Return the problem with the options of a setting."""
    options = problem.options
    return replace(problem, options=replace(
        options, microbatches=setting.microbatches, recompute=setting.recompute,
        optimizer=replace(options.optimizer, sharded=setting.sharded)))


def _margin(uses: Sequence[Use]) -> float:
    """Return what is left on the fullest device; where no device has a limit, more than any has."""
    return min(min(use.margin_bytes for use in uses), 2.0**60)


class _Fitter:
    """Finds the candidates."""

    def __init__(self, problem: Problem, split: Split) -> None:
        self.problem, self.split = problem, split
        self.devices = problem.cluster.devices
        given = problem.options.microbatches
        self.choices = divisors(problem.options.batch) if given is None else [given]
        self.reduced = {again: Reduced(replace(problem, options=replace(problem.options, recompute=again)))
                        for again in ((False, True) if problem.is_training else (False,))}

    def candidates(self) -> Iterator[FitCandidate]:
        """Yield each strategy as it is, and what makes it fit if it does not: recomputation, or a divided state.

        Recomputation spares nothing where all is one stage: there is one micro-batch at a time. Pipelines and teams are
        tried where copies of the whole model do not fit; where one of the two takes long, only if the other does not
        fit.
        """
        yield self._single()
        if len(self.devices) < 2:
            return
        fits, has_many_ops = False, self.problem.graph.num_ops > MANY_OPS
        names: list[Name] = ["data-parallel", "data-parallel-by-speed"]
        for name in names[: len({device.kind for device in self.devices})]:
            copies = [item for sharded in (False, True) if (item := self._replicated(name, sharded=sharded))]
            fits = fits or (bool(copies) and copies[0].fits)
            yield from copies[:1] if fits else copies
        for search in (self._pipelines, self._tensor) if has_many_ops else (self._tensor, self._pipelines):
            several = [] if fits else [*search()]
            yield from several
            fits = fits or ((has_many_ops or len(self.devices) > MANY_DEVICES) and any(item.fits for item in several))

    def _pipelines(self) -> Iterator[FitCandidate]:
        """Yield a pipeline that keeps everything, and one that recomputes if it is needed."""
        plain = self._pipeline(again=False)
        yield plain
        if self.problem.is_training and not plain.fits:
            yield self._pipeline(again=True)

    def joint(self, budget: Budget) -> Iterator[FitCandidate]:
        """Yield the best plan of the joint search, if it finds one."""
        groups = self.problem.cluster.groups_by_host_and_kind()
        splits = {key: value for degree, _ in teams_by_degree(groups) for key, value in self.split(degree).items()}
        best = best_joint(self.problem, splits, deadline=budget.deadline, budget=budget)
        if best is None or best.plan is None:
            return
        setting = Setting(strategy="joint", microbatches=best.plan.microbatches, sharded=best.plan.optimizer.sharded,
                          recompute=any(stage.recompute for stage in best.plan.stages))
        yield FitCandidate(setting=setting, rough_s=best.step_time_s, plan=best.plan, uses=self._uses_of(best.plan))

    def as_planned(self, candidate: FitCandidate) -> FitCandidate:
        """Return a pipeline as `weft plan` cuts it, if that fits; all else as it is."""
        if candidate.setting.strategy != "pipeline":
            return candidate
        setting = replace(candidate.setting, strategy="1f1b-balanced", cuts=())
        try:
            plan = plan_of(self.problem, setting)
            uses = self._uses_of(plan)
        except NoFeasiblePlan:
            return candidate
        device, op = self.problem.cluster.device_index, self.problem.graph.op_index
        stages = [(device[stage.replicas[0].devices[0]], [op[name] for name in stage.ops]) for stage in plan.stages]
        found = replace(candidate, setting=setting, uses=uses, rough_s=self._pipeline_s(stages, setting))
        return found if found.fits else candidate

    def _uses_of(self, plan: Plan) -> tuple[Use, ...]:
        """Return what each device holds by the account of a plan."""
        account = account_memory(lower(plan, self.problem.graph))
        return self._uses([account.peak_bytes(rank) for rank in range(len(self.devices))])

    def _uses(self, peaks: Sequence[int]) -> tuple[Use, ...]:
        """Return what each device holds; those with nothing are left out."""
        return tuple(Use(device=device.name, peak_bytes=peak, capacity_bytes=device.memory_bytes)
                     for device, peak in zip(self.devices, peaks, strict=True) if peak)

    # ---- one stage --------------------------------------------------------------------------------------------------

    def _single(self) -> FitCandidate:
        """Return the fastest device that has enough memory, or the one with most of it."""
        def uses(microbatches: int) -> tuple[Use, ...]:
            peak = self.reduced[False].whole_peak(self.problem.options.batch // microbatches,
                                                  microbatches=microbatches, num_holders=1)
            fitting = [device for device in self._by_speed
                       if (memory := self.devices[device].memory_bytes) is None or peak <= memory]
            best = fitting[0] if fitting else max(
                self._by_speed, key=lambda device: self.devices[device].memory_bytes or 0)
            return self._uses([peak if device == best else 0 for device in range(len(self.devices))])

        chosen, found = self._first_that_fits(uses, self.choices)
        device = self.problem.cluster.device_index[found[0].device]
        return FitCandidate(setting=Setting(strategy="single", microbatches=chosen), uses=found,
                            rough_s=self._step_s([(device, self.problem.options.batch)], chosen))

    @cached_property
    def _by_speed(self) -> list[DeviceId]:
        batch = self.problem.options.batch
        return sorted(self.problem.devices, key=lambda device: (self.problem.op_seconds(device, batch).sum(), device))

    def _replicated(self, name: Name, *, sharded: bool) -> FitCandidate | None:
        """Return data parallelism with the largest micro-batches that fit; None if there is nothing to divide."""
        if sharded and not (self.problem.is_training and self.problem.options.optimizer.kind in ("adam", "adamw")):
            return None
        batch, num_devices = self.problem.options.batch, len(self.devices)
        wanted = [number for number in self.choices if batch // number >= num_devices] or [
            number for number in self.choices if batch // number >= 2]
        if not wanted:
            return None

        def uses(microbatches: int) -> tuple[Use, ...]:
            counts = self._counts(name, batch // microbatches)
            holders = sum(count > 0 for count in counts)
            peaks = {count: self.reduced[False].whole_peak(count, microbatches=microbatches, num_holders=holders,
                                                           sharded=sharded) for count in set(counts) if count}
            return self._uses([peaks.get(count, 0) for count in counts])

        chosen, found = self._first_that_fits(uses, wanted)
        counts = self._counts(name, batch // chosen)
        shares = [(DeviceId(device), count * chosen) for device, count in enumerate(counts) if count]
        return FitCandidate(setting=Setting(strategy=name, microbatches=chosen, sharded=sharded), uses=found,
                            rough_s=self._step_s(shares, chosen) + self._exchange_s(shares))

    def _counts(self, name: Name, size: int) -> tuple[int, ...]:
        """Return the samples of each device, as the strategy divides them."""
        if name == "data-parallel":
            return split_samples(size, (1.0,) * len(self.devices))
        return fair_samples(size, len(self.devices), self.problem.device_seconds)

    def _tensor(self) -> Iterator[FitCandidate]:
        """Yield the smallest teams that fit, else the nearest to it; nothing where operators cannot be divided."""
        found: list[FitCandidate] = []
        groups = self.problem.cluster.groups_by_host_and_kind()
        smallest = min((device.memory_bytes for device in self.devices if device.memory_bytes is not None), default=0)
        optimizer = self.problem.options.optimizer if self.problem.is_training else None
        for degree, members in teams_by_degree(groups):
            num_teams = len(self.devices) // degree
            if any(len(group) % degree for group in groups) or self.choices[0] * num_teams > self.problem.options.batch:
                continue
            if state_by_op(self.problem.graph, optimizer).sum() > degree * smallest > 0:
                continue  # even its parts would be too large
            splits = self.split(degree)
            if all((group, degree) in splits for group in members):
                found.append(self._teams(degree, splits))
                if found[-1].fits:
                    break
        yield from sorted(found, key=lambda item: -item.fullest.margin_bytes)[:1]

    def _teams(self, degree: int, splits: Splits) -> FitCandidate:
        """Return teams of one size, with the largest micro-batches that fit."""
        reduced, batch, num_teams = self.reduced[False], self.problem.options.batch, len(self.devices) // degree

        def uses(microbatches: int) -> tuple[Use, ...]:
            return self._uses(reduced.team_peaks(splits, degree, microbatches))

        chosen, found = self._first_that_fits(
            uses, [number for number in self.choices if batch // number >= num_teams])
        step_s = chosen * reduced.team_seconds(splits, degree, batch // chosen)
        firsts = [(DeviceId(device), 1) for device in range(0, len(self.devices), degree)]
        return FitCandidate(setting=Setting(strategy="tensor", microbatches=chosen, degree=degree), uses=found,
                            rough_s=step_s + self._exchange_s(firsts) / degree)

    def _first_that_fits(self, uses: Callable[[int], tuple[Use, ...]],
                         choices: Sequence[int]) -> tuple[int, tuple[Use, ...]]:
        """Return a small number of micro-batches that fits and what devices hold then; else the largest number.

        The margin of the fullest device is concave in the size of micro-batches, since a peak is the largest of sums
        that grow with it: between two sizes it is at least what the straight line says, which gives a safe choice.
        """
        last = uses(choices[-1])
        if len(choices) == 1 or _margin(last) < 0:
            return choices[-1], last
        first = uses(choices[0])
        if _margin(first) >= 0:
            return choices[0], first
        small, large = 1 / choices[-1], 1 / choices[0]
        room = small + (large - small) * _margin(last) / (_margin(last) - _margin(first))
        chosen = next(number for number in choices if 1 / number <= room * (1 + 1e-12) or number == choices[-1])
        return chosen, uses(chosen)

    # ---- pipelines --------------------------------------------------------------------------------------------------

    def _pipeline(self, *, again: bool) -> FitCandidate:
        """Return the pipeline cut by memory, with the fewest micro-batches that keep the bubble small and fit."""
        reduced, batch = self.reduced[again], self.problem.options.batch
        enough = [number for number in self.choices if number <= MICROBATCHES_PER_STAGE * len(self.devices)]
        for number in dict.fromkeys((enough or self.choices)[-1:] + self.choices[-1:]):
            cuts = reduced.memory_cuts(batch // number, number)
            peaks = reduced.pipeline_peaks(cuts, batch // number, number)
            setting = Setting(strategy="pipeline", microbatches=number, recompute=again, cuts=cuts)
            stages = [(DeviceId(device), slice(*ends)) for device, ends in enumerate(itertools.pairwise(cuts))]
            found = FitCandidate(setting=setting, rough_s=self._pipeline_s(stages, setting),
                                 uses=self._uses([*peaks, *[0] * (len(self.devices) - len(peaks))]))
            if found.fits:
                break
        return found

    def _pipeline_s(self, stages: Sequence[tuple[DeviceId, slice | list[int]]], setting: Setting) -> float:
        """Return the seconds of a pipeline by its slowest stage; stages are given by device and operators."""
        problem, number = self.reduced[setting.recompute].problem, setting.microbatches
        size = self.problem.options.batch / number
        return (number + len(stages) - 1) * max(
            float(problem.op_seconds(device, size)[ops].sum()) for device, ops in stages)

    # ---- rough times ------------------------------------------------------------------------------------------------

    def _step_s(self, shares: Sequence[tuple[DeviceId, int]], microbatches: int) -> float:
        """Return the seconds of the slowest of some devices, each with so many samples in all."""
        problem = self.reduced[False].problem
        return max(microbatches * float(problem.op_seconds(device, samples / microbatches).sum())
                   for device, samples in shares)

    def _exchange_s(self, shares: Sequence[tuple[DeviceId, int]]) -> float:
        if not self.problem.is_training:
            return 0.0
        return reduce_seconds(self.problem.costs, self.problem.graph.parameter_bytes, [device for device, _ in shares])


Team = tuple[DeviceId, ...]
MORE = 4
"""Micro-batches more than stages, after which the memory of a pipeline is what it was before."""
MORE_FORWARD = 16
"""The same without backwards: stages that are faster than the next ones run further and further ahead of them."""


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
            spec = StageSpec(ops=np.arange(self.problem.graph.num_ops),
                             replicas=tuple((team, 1 / num_replicas) for team in teams))
            self._peaks[key] = self._peak(spec, num_samples, microbatches)
        saved = sum(state - math.ceil(state / num_holders) for state in self._states) if sharded else 0
        return self._peaks[key] - saved

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

    def _teams(self, degree: int, size: int) -> list[tuple[Team, int]]:
        """Return the teams with their samples of a micro-batch of this size."""
        teams = [group[first : first + degree] for group in self.problem.cluster.groups_by_host_and_kind()
                 for first in range(0, len(group), degree)]
        return list(zip(teams, split_samples(size, (1.0,) * len(teams)), strict=True))

    def team_peaks(self, splits: Splits, degree: int, microbatches: int) -> list[int]:
        """Return the peak of every device where teams divide operators and share so many micro-batches."""
        peaks = [0] * len(self.problem.devices)
        for team, count in self._teams(degree, self.problem.options.batch // microbatches):
            for device in team:
                peaks[device] = self._team_peak(splits, degree, count, microbatches)
        return peaks

    def _team_peak(self, splits: Splits, degree: int, num_samples: int, microbatches: int) -> int:
        key = "team", degree, num_samples, min(microbatches, 2)
        if key not in self._peaks and num_samples:
            spec = self._team_spec(splits, [(team, num_samples) for team, _ in self._teams(degree, 0)[:2]])
            self._peaks[key] = self._peak(spec, num_samples, microbatches)
        return self._peaks.get(key, 0)

    def _team_spec(self, splits: Splits, teams: Sequence[tuple[Team, int]]) -> StageSpec:
        graph, whole = self.problem.graph, sum(count for _, count in teams)
        return StageSpec(ops=np.arange(graph.num_ops),
                         sharding=splits[0, len(teams[0][0])].words(graph.op_names, graph.tensor_names),
                         times=tuple(self._team_times(splits, team, count) for team, count in teams),
                         replicas=tuple((team, count / whole) for team, count in teams))

    def _team_times(self, splits: Splits, team: Team, count: int) -> dict[str, float]:
        """Return the seconds of a team by phase for so many samples."""
        costs, groups = self.problem.costs, self.problem.cluster.groups_by_host_and_kind()
        table = splits[next(index for index, group in enumerate(groups) if team[0] in group), len(team)]
        column = costs.column_of_device[team[0]]
        seconds: dict[str, float] = {}
        for which, phase in enumerate(("F", "B")[: 1 + self.problem.is_training]):
            whole: F64 = costs.op_seconds("F" if which == 0 else "B", count / self.problem.graph.batch)[:, column]
            seconds[phase] = float(table.seconds(which, whole, count).sum())
        if self.problem.is_training and self.problem.options.recompute:
            seconds["B"] += seconds["F"]
        return seconds

    def team_seconds(self, splits: Splits, degree: int, size: int) -> float:
        """Return the time of one micro-batch on the slowest team, forward and backward."""
        return max(sum(self._team_times(splits, team, count).values())
                   for team, count in self._teams(degree, size) if count)

    def team_plan(self, splits: Splits, degree: int, microbatches: int) -> Plan:
        """Return the whole plan of teams that share each micro-batch."""
        teams = self._teams(degree, self.problem.options.batch // microbatches)
        spec = self._team_spec(splits, [(team, count) for team, count in teams if count])
        return _one_stage(self.problem, spec, microbatches, by="fit")

    # ---- pipelines --------------------------------------------------------------------------------------------------

    def pipeline_peaks(self, cuts: Sequence[int], size: int, microbatches: int) -> tuple[int, ...]:
        """Return the peak of each stage with so many micro-batches of this size."""
        number = min(microbatches, len(cuts) - 1 + (MORE if self.problem.is_training else MORE_FORWARD))
        problem = replace(self.problem, options=replace(self.problem.options, batch=size * number, microbatches=number))
        account = account_memory(lower(_pipeline(problem, cuts, number), problem.graph))
        return tuple(account.peak_bytes(stage) for stage in range(len(cuts) - 1))

    def memory_cuts(self, size: int, microbatches: int) -> tuple[int, ...]:
        """Return the cuts of the pipeline whose fullest device, by its own memory, is about as empty as possible."""
        num_stages = min(len(self.problem.devices), self._chain.num_places - 1)
        room = Room(devices=self.problem.devices[:num_stages], memory=tuple(self._capacities[:num_stages]))
        cutter = PipelineCutter(self._chain, microbatches, room, size=size)
        return tuple(self._chain.places[cutter.emptiest()].tolist())

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
