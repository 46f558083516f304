"""Does a model fit on a cluster, how, and with which margin: a quick answer, without searching for a fast plan.

For each strategy the largest micro-batches that fit are found:

    single          everything on one device
    data-parallel   the whole model on every device; also with the optimizer's state divided among them
    pipeline        one stage on each device, cut so that the fullest is as empty as possible
    tensor          teams of 2, 4, ... devices of a host divide every operator

Where none of these fits, the joint search looks for a plan (``weft.search.joint``), for a few seconds.

Memory is that of ``weft.plan.memory``, of plans reduced to what decides it (``weft.planning.reduced``). Times are
rough: all devices busy, nothing waits for messages but gradients at the end. They only say which of several to
recommend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final, Literal

from weft.base.errors import ModelError, NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import DeviceId
from weft.cost.costs import Costs
from weft.model.folded import FoldedModel
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.op_bytes import state_by_op
from weft.plan.plan import Plan, Stage, split_samples
from weft.planning.reduced import Reduced
from weft.planning.replan import best_joint
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.problem import Problem, divisors, fair_samples
from weft.search.deploy.splits import NO_SPLITS, Splits, teams_by_degree
from weft.search.joint.baselines import STRATEGIES
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
        from weft.search.shard.tensor_costs import split_operators

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
        return reduced.pipeline_plan(setting.cuts, setting.microbatches)
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
        self.fits = False
        """What was tried fits well enough not to try what takes longer."""
        given = problem.options.microbatches
        self.choices = divisors(problem.options.batch) if given is None else [given]
        self.reduced = {again: Reduced(replace(problem, options=replace(problem.options, recompute=again)))
                        for again in ((False, True) if problem.is_training else (False,))}

    def candidates(self) -> Iterator[FitCandidate]:
        """Yield the best of each strategy; with recomputation where it does not fit without."""
        names: list[Name] = ["single"]
        if len(self.devices) > 1:
            names.append("data-parallel")
            if len({device.kind for device in self.devices}) > 1:
                names.append("data-parallel-by-speed")
            names += ["pipeline", "tensor"] if self.problem.graph.num_ops > MANY_OPS else ["tensor", "pipeline"]
        for name in names:
            yield from self._best_of(name)

    def _best_of(self, name: Name) -> Iterator[FitCandidate]:
        """Yield a strategy as it is, and what makes it fit if it does not: recomputation, or a divided state.

        Recomputation spares nothing where all is one stage: there is one micro-batch at a time. Pipelines and teams are
        tried where copies of the whole model do not fit; where one of the two takes long, only if the other does not
        fit.
        """
        is_long = self.problem.graph.num_ops > MANY_OPS or len(self.devices) > MANY_DEVICES
        match name:
            case "single":
                yield self._single()
            case "pipeline" | "tensor":
                several = [] if self.fits else [*(self._pipelines() if name == "pipeline" else self._tensor())]
                yield from several
                self.fits = self.fits or (is_long and any(item.fits for item in several))
            case _:
                copies = [item for sharded in (False, True) if (item := self._replicated(name, sharded=sharded))]
                self.fits = self.fits or (bool(copies) and copies[0].fits)
                yield from copies[:1] if self.fits else copies

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
        account = account_memory(lower(best.plan, self.problem.graph))
        setting = Setting(strategy="joint", microbatches=best.plan.microbatches, sharded=best.plan.optimizer.sharded,
                          recompute=any(stage.recompute for stage in best.plan.stages))
        yield FitCandidate(setting=setting, rough_s=best.step_time_s, plan=best.plan,
                           uses=self._uses([account.peak_bytes(rank) for rank in range(len(self.devices))]))

    def as_planned(self, candidate: FitCandidate) -> FitCandidate:
        """Return a pipeline as `weft plan` cuts it, if that fits; all else as it is."""
        if candidate.setting.strategy != "pipeline":
            return candidate
        setting = replace(candidate.setting, strategy="1f1b-balanced", cuts=())
        try:
            plan = plan_of(self.problem, setting)
            account = account_memory(lower(plan, self.problem.graph))
        except NoFeasiblePlan:
            return candidate
        peaks = [account.peak_bytes(rank) for rank in range(len(self.devices))]
        number = setting.microbatches
        rough_s = (number + len(plan.stages) - 1) * max(self._stage_s(plan, stage, setting) for stage in plan.stages)
        found = replace(candidate, setting=setting, uses=self._uses(peaks), rough_s=rough_s)
        return found if found.fits else candidate

    def _stage_s(self, plan: Plan, stage: Stage, setting: Setting) -> float:
        """Return the seconds of a stage on its device, for one micro-batch."""
        graph, problem = self.problem.graph, self.reduced[setting.recompute].problem
        device = problem.cluster.device_index[stage.replicas[0].devices[0]]
        seconds = problem.op_seconds(device, plan.model.batch / plan.microbatches)
        return float(seconds[[graph.op_index[name] for name in stage.ops]].sum())

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
            cut = reduced.memory_cuts(batch // number, number)
            peaks = [*cut.peaks, *[0] * (len(self.devices) - len(cut.peaks))]
            slowest_s = self._slowest_s(cut.cuts, number, again)
            found = FitCandidate(
                setting=Setting(strategy="pipeline", microbatches=number, recompute=again, cuts=cut.cuts),
                uses=self._uses(peaks), rough_s=(number + len(cut.peaks) - 1) * slowest_s)
            if found.fits:
                break
        return found

    def _slowest_s(self, cuts: Sequence[int], microbatches: int, again: bool) -> float:
        problem, size = self.reduced[again].problem, self.problem.options.batch / microbatches
        return max(float(problem.op_seconds(DeviceId(device), size)[cuts[device] : cuts[device + 1]].sum())
                   for device in range(len(cuts) - 1))

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
