"""Does a model fit on a cluster, how, and with which margin: a quick answer, without searching for a fast plan.

For each strategy the largest micro-batches that fit are found:

    single          everything on one device
    data-parallel   the whole model on every device; also with the optimizer's state divided among them
    pipeline        one stage on each device, cut so that the fullest is as empty as possible
    tensor          tp groups of 2, 4, ... devices of a host divide every operator

Where none of these fits, the joint search looks for a plan (``weft.search.joint``), for a few seconds.

Each way is the plan that `weft plan` would make, judged by its account of memory (``weft.plan.memory``) instead of its
time. Micro-batches that are not there at the same time do not count: a plan with few of them has the same peaks, which
tests compare. Of one stage two are enough (gradients are there in the second), of a pipeline a few more than there are
stages: from then on everything comes again.

Times are rough: all devices busy, nothing waits for messages but gradients at the end. They only say which of several
to recommend.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.op_bytes import state_by_op
from weft.plan.plan import Plan, split_samples
from weft.planning.replan import find_joint
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.problem import Problem, divisors, one_stage
from weft.search.deploy.splits import NO_SPLITS, Splits, TpGroupTimes, tp_groups_by_degree
from weft.search.joint.baselines import STRATEGIES, PipelineCutter, Room, pipeline
from weft.search.joint.chain import Chain
from weft.search.joint.layouts import tp_groups_of
from weft.search.shard.tensor_costs import TensorCosts
from weft.simulate.exchange_time import reduce_seconds

Name = Literal["single", "data-parallel", "data-parallel-by-speed", "tensor", "pipeline", "1f1b-balanced", "joint"]
Split = Callable[[int], Splits]
"""Returns how tp groups of so many devices divide operators; nothing where they cannot."""
PIPELINES: Final = ("pipeline", "1f1b-balanced")
MANY_OPS: Final = 3000
"""The account of tp groups takes long for models with more operators: pipelines come first."""
MANY_DEVICES: Final = 16
"""The account of pipelines takes long on more devices."""
MICROBATCHES_PER_STAGE: Final = 4
"""So many micro-batches for each stage keep the bubble of a pipeline small."""
MORE: Final = 4
"""Micro-batches more than stages, after which the memory of a pipeline is what it was before."""
MORE_FORWARD: Final = 16
"""The same without backwards: stages that are faster than the next ones run further and further ahead of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to plan with."""

    strategy: Name
    microbatches: int
    recompute: bool = False
    sharded: bool = False
    """Each device keeps a part of the optimizer's state. They gather what each has updated."""
    degree: int = 1
    """Devices of a tp group that divides operators."""
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
    problem: NoFeasiblePlan | None = None
    """Why the joint search found nothing, where it was asked."""

    @property
    def nearest(self) -> FitCandidate:
        """Return the candidate with the largest margin on its fullest device: the nearest miss, where nothing fits."""
        return max(self.candidates, key=lambda item: item.fullest.margin_bytes)

    def miss(self) -> NoFeasiblePlan:
        """Return the error that says by how much the nearest candidate does not fit."""
        if not self.candidates:
            return self.problem or NoFeasiblePlan("there was no time to try anything: give more (--time-limit)")
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
    """Return which strategies fit, and which of them to take; ``split`` says how tp groups of a size divide operators.

    What is not known by the budget's deadline is left out, but for the first strategy. Ctrl-C marks the budget.
    """
    fitter, budget = _Fitter(problem, split), budget or time_budget(None)
    candidates: list[FitCandidate] = []
    is_complete = _try_all(fitter, candidates, budget)
    fitting = [item for item in candidates if item.fits]
    if not fitting:
        return Fit(candidates=tuple(candidates), recommended=None, is_complete=is_complete, problem=fitter.miss)
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
    changed, size = problem_with(problem, setting), problem.options.batch // setting.microbatches
    if setting.strategy in STRATEGIES:
        return STRATEGIES[setting.strategy](changed, setting.microbatches)
    if setting.strategy == "pipeline":
        return pipeline(changed, setting.microbatches, setting.cuts, by="fit")
    groups = problem.cluster.groups_by_host_and_kind()
    tp_groups = [tp_group for group in groups for tp_group in tp_groups_of(group, setting.degree)]
    shares = zip(tp_groups, split_samples(size, (1.0,) * len(tp_groups)), strict=True)
    stage = TpGroupTimes(changed, splits).stage(
        np.arange(problem.graph.num_ops), [item for item in shares if item[1]], recompute=setting.recompute)
    return one_stage(changed, stage, setting.microbatches, by="fit")


def problem_with(problem: Problem, setting: Setting) -> Problem:
    """Return the problem with the options of a setting."""
    options = problem.options
    return replace(problem, options=replace(
        options, microbatches=setting.microbatches, recompute=setting.recompute,
        optimizer=replace(options.optimizer, sharded=setting.sharded)))


class _Fitter:
    """Finds the candidates."""

    def __init__(self, problem: Problem, split: Split) -> None:
        self.problem, self.split = problem, split
        self.devices, self.batch = problem.cluster.devices, problem.options.batch
        given = problem.options.microbatches
        self.choices = divisors(self.batch) if given is None else [given]
        self.splits: dict[tuple[int, int], TensorCosts] = {}
        self.judge = cache(self._judge)
        self.miss: NoFeasiblePlan | None = None
        """Why the joint search found nothing."""

    def candidates(self) -> Iterator[FitCandidate]:
        """Yield each strategy as it is, and what makes it fit if it does not: recomputation, or a divided state.

        Recomputation spares nothing where all is one stage: there is one micro-batch at a time. Pipelines and tp groups
        are tried where copies of the whole model do not fit; where one of the two takes long, only if the other does
        not fit.
        """
        degrees, count = self.problem.options.degrees, len(self.devices)
        if degrees and count > 1:
            return  # the joint search follows them
        yield self._largest(Setting(strategy="single", microbatches=1, recompute=degrees.recompute == "full"),
                            self.choices)
        if len(self.devices) < 2:
            return
        fits, has_many_ops = False, self.problem.graph.num_ops > MANY_OPS
        names: list[Name] = ["data-parallel", "data-parallel-by-speed"]
        for name in names[: len({device.kind for device in self.devices})]:
            copies = [*self._copies(name)]
            fits = fits or (bool(copies) and copies[0].fits)
            yield from copies[:1] if fits else copies
        for search in (self._pipelines, self._tensor) if has_many_ops else (self._tensor, self._pipelines):
            several = [] if fits else [*search()]
            yield from several
            fits = fits or ((has_many_ops or len(self.devices) > MANY_DEVICES) and any(item.fits for item in several))

    def joint(self, budget: Budget) -> Iterator[FitCandidate]:
        """Yield the best plan of the joint search, if it finds one."""
        for degree, _ in tp_groups_by_degree(self.problem.cluster.groups_by_host_and_kind()):
            if self.problem.options.degrees.admit(tp=degree):
                self.splits |= self.split(degree)
        try:
            best = find_joint(self.problem, self.splits, budget)
        except NoFeasiblePlan as miss:
            self.miss = miss
            return
        assert best.plan is not None, "the search raises otherwise"
        setting = Setting(strategy="joint", microbatches=best.plan.microbatches, sharded=best.plan.optimizer.sharded,
                          recompute=any(stage.recompute for stage in best.plan.stages))
        yield FitCandidate(setting=setting, rough_s=best.step_time_s, plan=best.plan, uses=self._uses_of(best.plan))

    def as_planned(self, candidate: FitCandidate) -> FitCandidate:
        """Return a pipeline as `weft plan` cuts it, if that fits; all else as it is."""
        if candidate.setting.strategy != "pipeline":
            return candidate
        try:
            found = self.judge(replace(candidate.setting, strategy="1f1b-balanced", cuts=()))
        except NoFeasiblePlan:
            return candidate
        return found if found.fits else candidate

    def _judge(self, setting: Setting) -> FitCandidate:
        """Return what a setting comes to, by its plan with no more micro-batches than make a difference."""
        more = MORE if self.problem.is_training else MORE_FORWARD
        most = len(self.devices) + more if setting.strategy in PIPELINES else 2
        few, options = replace(setting, microbatches=min(setting.microbatches, most)), self.problem.options
        batch = self.batch // setting.microbatches * few.microbatches
        narrow = replace(self.problem, options=replace(options, batch=batch, microbatches=None))
        plan = plan_of(narrow, few, self.splits)
        slowest = max(sum(replica.times.get(phase, 0.0) for phase in ("F", "B"))
                      for stage in plan.stages for replica in stage.replicas)
        firsts = [self.problem.cluster.device_index[replica.devices[0]] for replica in plan.stages[0].replicas]
        rough_s = (setting.microbatches + len(plan.stages) - 1) * slowest
        if self.problem.is_training and len(firsts) > 1:
            rough_s += reduce_seconds(self.problem.costs, self.problem.graph.parameter_bytes, firsts) / setting.degree
        return FitCandidate(setting=setting, uses=self._uses_of(plan), rough_s=rough_s)

    def _uses_of(self, plan: Plan) -> tuple[Use, ...]:
        """Return what each device holds by the account of a plan; those with nothing are left out."""
        account = account_memory(lower(plan, self.problem.graph))
        return tuple(Use(device=device.name, peak_bytes=peak, capacity_bytes=device.memory_bytes)
                     for rank, device in enumerate(self.devices) if (peak := account.peak_bytes(rank)))

    def _largest(self, setting: Setting, choices: Sequence[int]) -> FitCandidate:
        """Return the setting with the largest micro-batches that fit, else the smallest."""
        def fits(number: int) -> bool:
            return self.judge(replace(setting, microbatches=number)).fits

        place = 0 if fits(choices[0]) else min(bisect_left(choices, True, key=fits), len(choices) - 1)
        return self.judge(replace(setting, microbatches=choices[place]))

    def _choices_for(self, samples: int) -> list[int]:
        """Return the numbers of micro-batches which have so many samples or more."""
        return [number for number in self.choices if self.batch // number >= samples]

    def _copies(self, name: Name) -> Iterator[FitCandidate]:
        """Yield data parallelism, and with a divided state; nothing where there are no samples to divide."""
        choices = self._choices_for(len(self.devices)) or self._choices_for(2)
        has_states = self.problem.is_training and self.problem.options.optimizer.kind in ("adam", "adamw")
        for sharded in (False, True) if has_states else (False,):
            if choices:
                yield self._largest(Setting(strategy=name, microbatches=1, sharded=sharded), choices)

    def _tensor(self) -> Iterator[FitCandidate]:
        """Yield the smallest tp groups that fit, else the nearest to it; nothing where operators cannot be divided."""
        found: list[FitCandidate] = []
        groups = self.problem.cluster.groups_by_host_and_kind()
        smallest = min((device.memory_bytes for device in self.devices if device.memory_bytes is not None), default=0)
        optimizer = self.problem.options.optimizer if self.problem.is_training else None
        for degree, members in tp_groups_by_degree(groups):
            choices = self._choices_for(len(self.devices) // degree)
            if any(len(group) % degree for group in groups) or not choices:
                continue
            if state_by_op(self.problem.graph, optimizer).sum() > degree * smallest > 0:
                continue  # even its parts would be too large
            self.splits |= self.split(degree)
            if all((group, degree) in self.splits for group in members):
                found.append(self._largest(Setting(strategy="tensor", microbatches=1, degree=degree), choices))
                if found[-1].fits:
                    break
        yield from sorted(found, key=lambda item: -item.fullest.margin_bytes)[:1]

    def _pipelines(self) -> Iterator[FitCandidate]:
        """Yield a pipeline that keeps everything, and one that recomputes if it is needed.

        Each has the fewest micro-batches that keep the bubble small and fit.
        """
        enough = [number for number in self.choices if number <= MICROBATCHES_PER_STAGE * len(self.devices)]
        for again in (False, True) if self.problem.is_training else (False,):
            for number in dict.fromkeys((enough or self.choices)[-1:] + self.choices[-1:]):
                setting = Setting(strategy="pipeline", microbatches=number, recompute=again)
                found = self.judge(replace(setting, cuts=memory_cuts(problem_with(self.problem, setting))))
                if found.fits:
                    break
            yield found
            if found.fits:
                return


def memory_cuts(problem: Problem) -> tuple[int, ...]:
    """Return the cuts of the pipeline whose fullest device, by its own memory, is about as empty as possible."""
    assert problem.options.microbatches is not None, "it is set"
    chain = Chain(problem, num_stages=len(problem.devices))
    sizes = [device.memory_bytes for device in problem.cluster.devices][:chain.num_places - 1]
    most = 2 * max((size for size in sizes if size is not None), default=2**40)  # where there is no limit
    room = Room(devices=problem.devices[:len(sizes)],
                memory=tuple(float(most if size is None else size) for size in sizes))
    return tuple(chain.places[PipelineCutter(chain, problem.options.microbatches, room).emptiest()].tolist())
