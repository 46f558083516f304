"""Finalists of the joint search: their plans, checked and simulated, and what the best of them may still gain.

    estimate -> plan, check, simulation
    simulated -> a searched order for the best and those whose devices have the least to do -> sharded states

The order of a pipeline is 1F1B at first. Then it is searched for this placement (``weft.search.joint.scheduled``),
with split backwards where memory allows, also for finalists that were not the best.

Plans from estimated settings: stages with their replicas and shardings, and the order of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.base.errors import NoFeasiblePlan, PlanError
from weft.cluster.cluster import DeviceId
from weft.model.graph import I64
from weft.plan.check import check_memory, check_program
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES, account_memory
from weft.plan.orders import Action, Order
from weft.plan.plan import Plan
from weft.plan.structure import require_structure
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem, StageSpec, evaluate_plan, make_plan, pipeline_order
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.layouts import Setting, StageMesh
from weft.search.joint.scheduled import reschedule
from weft.search.joint.tuning import TUNING
from weft.simulate.predict import simulate
from weft.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A setting and what came of it."""

    setting: Setting
    estimate_s: float | None = None
    step_time_s: float | None = None
    """As simulated, of a finalist."""
    reason: str = ""
    """Why it is not the best."""


@dataclass(frozen=True, kw_only=True)
class JointResult:
    """The best plan and everything tried."""

    plan: Plan
    setting: Setting
    step_time_s: float
    timeline: Timeline
    """As simulated; of a large cluster that of one of the equal replicas, with fewer micro-batches."""
    tried: tuple[Tried, ...] = ()


def evaluate(estimator: Estimator, estimate: Estimate) -> JointResult:
    """Return the plan with its predicted time; raise ``NoFeasiblePlan`` if it does not fit."""
    problem, setting = estimator.problem, estimate.setting
    replicas = _equal_replicas(estimator, setting)
    plan = build_plan(estimator, estimate)
    if problem.cluster.num_devices > TUNING.large and replicas is not None:
        timeline, step_time_s = _one_replica(estimator, estimate, replicas), estimate.step_time_s
    else:
        timeline = evaluate_plan(plan, problem)
        step_time_s = timeline.step_time_s
    return JointResult(plan=plan, setting=setting, step_time_s=step_time_s, timeline=timeline)


def _equal_replicas(estimator: Estimator, setting: Setting) -> int | None:
    """Return how many replicas every stage has, where they are alike and have equal samples; else None."""
    size = estimator.problem.options.batch // setting.microbatches
    sorts = [estimator.members(mesh, size) for mesh in setting.layout]
    alike = {(len(mesh.teams), *estimator.chain.figures_key(members[0][0]), members[0][1])
             for mesh, members in zip(setting.layout, sorts, strict=True)}
    return len(setting.layout[0].teams) if len(alike) == 1 and all(len(members) == 1 for members in sorts) else None


def _one_replica(estimator: Estimator, estimate: Estimate, num_replicas: int) -> Timeline:
    """Return the simulated timeline of the first replica alone, checked, with as many micro-batches as fill it."""
    setting = estimate.setting
    count = min(setting.microbatches, 2 * len(setting.layout))
    narrow = replace(setting, layout=tuple(StageMesh(mesh.teams[:1]) for mesh in setting.layout), microbatches=count)
    size = estimator.problem.options.batch // setting.microbatches // num_replicas
    alone = estimator.for_batch(size * count)
    plan = build_plan(alone, replace(estimate, setting=narrow))
    problem = alone.problem
    require_structure(plan, problem.graph, problem.cluster)
    program = lower(plan, problem.graph)
    check_program(program)
    account = account_memory(program)
    if setting.sharded_states:  # alone, the replica has all of them
        static = account.static.copy()
        static[:, CATEGORIES.index("optimizer")] //= num_replicas
        account = replace(account, static=static)
    check_memory(program, problem.cluster, account)
    return simulate(program, problem.costs, problem.cluster)


def refine(problem: Problem, simulated: Sequence[JointResult], budget: Budget,
           progress: Callable[[str], None]) -> tuple[JointResult, list[Tried]]:
    """Return the best of the plans after what can be made of them, and what was tried for that, the best first."""
    best = min(simulated, key=lambda item: item.step_time_s)
    tried: list[Tried] = []
    if problem.cluster.num_devices > TUNING.large:
        return best, tried
    others = sorted((item for item in simulated if item is not best),
                    key=lambda item: float(item.timeline.busy_s.max()))
    for item in [best, *others][:TUNING.rescheduled]:
        found = reschedule(item.plan, item.timeline, problem, below_s=best.step_time_s, budget=budget)
        if found is not None:
            best = JointResult(plan=found[0], setting=replace(item.setting, searched_order=True),
                               step_time_s=found[1].step_time_s, timeline=found[1])
            _note(best, item, tried, progress)
    divided = None if budget.is_spent else _with_divided_states(best, problem)
    if divided is not None and divided.step_time_s < best.step_time_s:
        _note(divided, best, tried, progress)
        best = divided
    return best, tried


def _note(found: JointResult, before: JointResult, tried: list[Tried], progress: Callable[[str], None]) -> None:
    tried.insert(0, Tried(setting=found.setting, estimate_s=before.step_time_s, step_time_s=found.step_time_s))
    progress(f"joint: {found.setting.describe()}: {found.step_time_s:.6g} s simulated")


def _with_divided_states(found: JointResult, problem: Problem) -> JointResult | None:
    """Return the same with the optimizer's states divided among replicas, though memory does not need it.

    Each updates less then, which may save more than gathering what was updated takes. None where that is not possible.
    """
    setting, optimizer = found.setting, found.plan.optimizer
    replicated = any(len(mesh.teams) > 1 for mesh in setting.layout)
    if setting.sharded_states or not replicated or not problem.is_training or problem.options.whole_parameters:
        return None
    plan = replace(found.plan, optimizer=replace(optimizer, sharded=True))
    try:
        timeline = evaluate_plan(plan, problem)
    except (NoFeasiblePlan, PlanError):
        return None
    return JointResult(plan=plan, setting=replace(setting, sharded_states=True), step_time_s=timeline.step_time_s,
                       timeline=timeline)


# ---- plans of settings -----------------------------------------------------------------------------------------------


BY = "joint"


def build_plan(estimator: Estimator, estimate: Estimate) -> Plan:
    """Return the plan of the estimated setting with its cuts."""
    setting, chain = estimate.setting, estimator.chain
    problem, size = _with_choices(chain.problem, setting), chain.problem.options.batch // setting.microbatches
    specs: list[StageSpec] = []
    parts: list[list[int]] = []
    for stage, mesh in enumerate(setting.layout * setting.chunks):
        pieces = _segments(estimator, estimate, stage)
        parts.append(list(range(len(specs), len(specs) + len(pieces))))
        specs += [_stage(estimator, problem, mesh, size, ops) for ops in pieces]
    by_mesh = [_expand(actions, parts) for actions in pipeline_order(
        len(setting.layout), setting.chunks, setting.microbatches, training=problem.is_training)]
    devices: list[DeviceId] = []
    order: Order = []
    for mesh, actions in zip(setting.layout, by_mesh, strict=True):
        devices += mesh.devices
        order += [actions] * len(mesh.devices)
    return make_plan(problem, specs, order, microbatches=setting.microbatches, by=BY, order_devices=devices)


def _with_choices(problem: Problem, setting: Setting) -> Problem:
    optimizer = replace(problem.options.optimizer, sharded=setting.sharded_states)
    return replace(problem, options=replace(problem.options, recompute=setting.recompute, optimizer=optimizer,
                                            microbatches=setting.microbatches))


def _segments(estimator: Estimator, estimate: Estimate, stage: int) -> list[I64]:
    """Return the operators of a stage, in segments where it recomputes."""
    chain, (first, last) = estimator.chain, estimate.cuts[stage : stage + 2]
    ends = estimator.segments(estimate.setting, stage, first, last) if estimate.setting.recompute else [first, last]
    return [chain.ops[chain.places[begin] : chain.places[end]] for begin, end in itertools.pairwise(ends)]


def _stage(estimator: Estimator, problem: Problem, mesh: StageMesh, size: int, ops: I64) -> StageSpec:
    """Return the stage of these operators on a mesh."""
    chain, counts = estimator.chain, estimator.counts(mesh, size)
    assert counts is not None, "it was estimated"
    return chain.stage(ops, list(zip(mesh.teams, counts, strict=True)), recompute=problem.options.recompute)


def _expand(actions: Sequence[Action], parts: Sequence[Sequence[int]]) -> list[Action]:
    """Return the actions with a stage's forward as that of its segments in turn, its backward as the reverse."""
    return [(part, phase, index) for stage, phase, index in actions
            for part in (parts[stage] if phase == "F" else reversed(parts[stage]))]
