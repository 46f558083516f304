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
from functools import cached_property, partial
from typing import Final, Literal

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.plan.lower import lower
from weft.plan.memory import account_memory, optimizer_bytes
from weft.plan.op_bytes import state_by_op
from weft.plan.plan import Plan, split_samples
from weft.planning.replan import best_joint
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.problem import Problem, StageSpec, divisors, fair_samples, one_stage
from weft.search.deploy.splits import NO_SPLITS, Splits, Team, teams_by_degree
from weft.search.joint.baselines import STRATEGIES, PipelineCutter, Room, pipeline
from weft.search.joint.chain import Chain
from weft.search.joint.layouts import teams_of
from weft.search.shard.tensor_costs import TensorCosts
from weft.simulate.exchange_time import reduce_seconds

Name = Literal["single", "data-parallel", "data-parallel-by-speed", "tensor", "pipeline", "1f1b-balanced", "joint"]
Counts = Sequence[tuple[Team, int]]
"""Teams of devices, each with the whole model, and the samples that they take of each micro-batch."""
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
    largest: str = ""
    """The category that takes most, where that is known."""

    @property
    def used(self) -> float:
        """Return the part of the capacity that is taken; 0 where there is no limit."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

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
    # What runs comes first, then what is faster.
    best = recommended = min(fitting, key=lambda item: (item.setting.sharded, item.rough_s))
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


def plan_of(problem: Problem, setting: Setting, splits: Splits = NO_SPLITS) -> Plan:
    """Return the plan that a setting means."""
    changed = problem_with(problem, setting)
    if setting.strategy in STRATEGIES:
        return STRATEGIES[setting.strategy](changed, setting.microbatches)
    if setting.strategy == "pipeline":
        return pipeline(changed, setting.microbatches, setting.cuts, by="fit")
    size = problem.options.batch // setting.microbatches
    counts = [(team, count) for team, count in _team_counts(problem, setting.degree, size) if count]
    return one_stage(changed, Reduced(changed, splits).stage(counts), setting.microbatches, by="fit")


def _team_counts(problem: Problem, degree: int, size: int) -> Counts:
    """Return all teams of so many devices with their samples of a micro-batch of this size."""
    teams = [team for group in problem.cluster.groups_by_host_and_kind() for team in teams_of(group, degree)]
    return list(zip(teams, split_samples(size, (1.0,) * len(teams)), strict=True))


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
        self.devices, self.batch = problem.cluster.devices, problem.options.batch
        given = problem.options.microbatches
        self.choices = divisors(self.batch) if given is None else [given]
        self.splits: dict[tuple[int, int], TensorCosts] = {}
        self.reduced = {again: Reduced(replace(problem, options=replace(problem.options, recompute=again)), self.splits)
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

    def joint(self, budget: Budget) -> Iterator[FitCandidate]:
        """Yield the best plan of the joint search, if it finds one."""
        for degree, _ in teams_by_degree(self.problem.cluster.groups_by_host_and_kind()):
            self.splits |= self.split(degree)
        best = best_joint(self.problem, self.splits, budget)
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
            found = self._of_pipeline(setting, plan_of(self.problem, setting))
        except NoFeasiblePlan:
            return candidate
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
        problem, memory = self.problem, [device.memory_bytes for device in self.devices]
        by_speed = sorted(problem.devices, key=lambda device: (problem.device_seconds(device, self.batch), device))

        def counts(size: int) -> Counts:
            peak = self.reduced[False].peak([(by_speed[0],)], size, self.batch // size)
            fitting = (device for device in by_speed if (limit := memory[device]) is None or peak <= limit)
            best = next(fitting, None)
            return [((max(by_speed, key=lambda device: memory[device] or 0) if best is None else best,), size)]

        return self._one_stage(Setting(strategy="single", microbatches=1), counts, self.choices)

    def _replicated(self, name: Name, *, sharded: bool) -> FitCandidate | None:
        """Return data parallelism with the largest micro-batches that fit; None if there is nothing to divide."""
        if sharded and not (self.problem.is_training and self.problem.options.optimizer.kind in ("adam", "adamw")):
            return None
        choices = self._choices_for(len(self.devices)) or self._choices_for(2)

        def counts(size: int) -> Counts:
            if name == "data-parallel":
                return _team_counts(self.problem, 1, size)
            return [((device,), count) for device, count in zip(self.problem.devices, fair_samples(
                size, len(self.devices), self.problem.device_seconds), strict=True)]

        setting = Setting(strategy=name, microbatches=1, sharded=sharded)
        return self._one_stage(setting, counts, choices) if choices else None

    def _tensor(self) -> Iterator[FitCandidate]:
        """Yield the smallest teams that fit, else the nearest to it; nothing where operators cannot be divided."""
        found: list[FitCandidate] = []
        groups = self.problem.cluster.groups_by_host_and_kind()
        smallest = min((device.memory_bytes for device in self.devices if device.memory_bytes is not None), default=0)
        optimizer = self.problem.options.optimizer if self.problem.is_training else None
        for degree, members in teams_by_degree(groups):
            choices = self._choices_for(len(self.devices) // degree)
            if any(len(group) % degree for group in groups) or not choices:
                continue
            if state_by_op(self.problem.graph, optimizer).sum() > degree * smallest > 0:
                continue  # even its parts would be too large
            self.splits |= self.split(degree)
            if all((group, degree) in self.splits for group in members):
                setting = Setting(strategy="tensor", microbatches=1, degree=degree)
                found.append(self._one_stage(setting, partial(_team_counts, self.problem, degree), choices))
                if found[-1].fits:
                    break
        yield from sorted(found, key=lambda item: -item.fullest.margin_bytes)[:1]

    def _choices_for(self, samples: int) -> list[int]:
        """Return the numbers of micro-batches which have so many samples or more."""
        return [number for number in self.choices if self.batch // number >= samples]

    def _one_stage(self, setting: Setting, counts: Callable[[int], Counts], choices: Sequence[int]) -> FitCandidate:
        """Return the strategy with the largest micro-batches that fit; ``counts`` divides one of so many samples."""
        reduced = self.reduced[False]

        def used(size: int) -> Counts:
            return [(team, count) for team, count in counts(size) if count]

        def uses(microbatches: int) -> tuple[Use, ...]:
            shares, peaks = used(self.batch // microbatches), [0] * len(self.devices)
            teams = [team for team, _ in shares]
            peak_of = {count: reduced.peak(teams, count, microbatches, sharded=setting.sharded)
                       for count in {count for _, count in shares}}
            for team, count in shares:
                for device in team:
                    peaks[device] = peak_of[count]
            return self._uses(peaks)

        chosen, found = self._first_that_fits(uses, choices)
        shares = used(self.batch // chosen)
        step_s = chosen * max(sum(float(table[-1]) for table in reduced.chain.passes(*share)) for share in shares)
        if self.problem.is_training and len(shares) > 1:
            step_s += reduce_seconds(self.problem.costs, self.problem.graph.parameter_bytes,
                                     [team[0] for team, _ in shares]) / setting.degree
        return FitCandidate(setting=replace(setting, microbatches=chosen), uses=found, rough_s=step_s)

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

    def _pipelines(self) -> Iterator[FitCandidate]:
        """Yield a pipeline that keeps everything, and one that recomputes if it is needed."""
        for again in self.reduced:
            found = self._pipeline(again=again)
            yield found
            if found.fits:
                return

    def _pipeline(self, *, again: bool) -> FitCandidate:
        """Return the pipeline cut by memory, with the fewest micro-batches that keep the bubble small and fit."""
        enough = [number for number in self.choices if number <= MICROBATCHES_PER_STAGE * len(self.devices)]
        for number in dict.fromkeys((enough or self.choices)[-1:] + self.choices[-1:]):
            cuts = self.reduced[again].memory_cuts(self.batch // number, number)
            setting = Setting(strategy="pipeline", microbatches=number, recompute=again, cuts=cuts)
            found = self._of_pipeline(setting, self.reduced[again].pipeline(cuts, self.batch // number, number))
            if found.fits:
                break
        return found

    def _of_pipeline(self, setting: Setting, plan: Plan) -> FitCandidate:
        """Return what a pipeline comes to, by a plan with its peaks; the slowest stage makes its time."""
        slowest = max(sum(stage.replicas[0].times.get(phase, 0.0) for phase in ("F", "B")) for stage in plan.stages)
        return FitCandidate(setting=setting, uses=self._uses_of(plan),
                            rough_s=(setting.microbatches + len(plan.stages) - 1) * slowest)


MORE = 4
"""Micro-batches more than stages, after which the memory of a pipeline is what it was before."""
MORE_FORWARD = 16
"""The same without backwards: stages that are faster than the next ones run further and further ahead of them."""


class Reduced:
    """Smaller plans with the peaks of one problem's; results are kept."""

    def __init__(self, problem: Problem, splits: Splits = NO_SPLITS) -> None:
        self.problem, self.splits = problem, splits
        self._peaks: dict[tuple[int, ...], int] = {}

    @cached_property
    def chain(self) -> Chain:
        """Return the figures of the model."""
        return Chain(self.problem, self.splits, num_stages=len(self.problem.devices))

    def _of_size(self, size: int, microbatches: int) -> Problem:
        options = replace(self.problem.options, batch=size * microbatches, microbatches=microbatches)
        return replace(self.problem, options=options)

    def stage(self, counts: Counts) -> StageSpec:
        """Return the whole model as one stage."""
        return self.chain.stage(np.arange(self.problem.graph.num_ops), counts,
                                recompute=self.problem.options.recompute)

    def peak(self, teams: Sequence[Team], num_samples: int, microbatches: int, *, sharded: bool = False) -> int:
        """Return the peak of a device of these teams with the whole model, for so many samples of each micro-batch."""
        some, number = teams[:2], min(microbatches, 2)
        key = len(some), len(some[0]), num_samples, number
        if key not in self._peaks:
            spec = self.stage([(team, num_samples) for team in some])
            plan = one_stage(self._of_size(num_samples * len(some), number), spec, number, by="fit")
            account = account_memory(lower(plan, self.problem.graph))
            self._peaks[key] = max(account.peak_bytes(rank) for rank in range(len(self.problem.devices)))
        saved = sum(state - math.ceil(state / len(teams)) for state in self._states) if sharded else 0
        return self._peaks[key] - saved

    @cached_property
    def _states(self) -> list[int]:
        """Return the bytes of the optimizer's state of each parameter that is read."""
        graph, optimizer = self.problem.graph, self.problem.options.optimizer
        return [optimizer_bytes(graph, int(tensor), optimizer)
                for tensor in np.intersect1d(graph.inputs, graph.parameters)]

    def pipeline(self, cuts: Sequence[int], size: int, microbatches: int) -> Plan:
        """Return a pipeline with these cuts, for micro-batches of this size, as many as make a difference."""
        number = min(microbatches, len(cuts) - 1 + (MORE if self.problem.is_training else MORE_FORWARD))
        return pipeline(self._of_size(size, number), number, cuts, by="fit")

    def memory_cuts(self, size: int, microbatches: int) -> tuple[int, ...]:
        """Return the cuts of the pipeline whose fullest device, by its own memory, is about as empty as possible."""
        num_stages = min(len(self.problem.devices), self.chain.num_places - 1)
        sizes = [device.memory_bytes for device in self.problem.cluster.devices]
        most = 2 * max((size for size in sizes if size is not None), default=2**40)  # where there is no limit
        room = Room(devices=self.problem.devices[:num_stages],
                    memory=tuple(float(most if size is None else size) for size in sizes[:num_stages]))
        cutter = PipelineCutter(self.chain, microbatches, room, size=size)
        return tuple(self.chain.places[cutter.emptiest()].tolist())
