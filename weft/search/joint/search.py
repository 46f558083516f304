"""The joint search: settings by estimate, and plans of the best of them by simulation.

    layouts x micro-batches x chunks x (recompute, sharded states only where memory needs them)
        -> bound -> estimate -> ranking -> plan, check, simulation of the finalists, and of the best with sharded states

Everything that was tried is in the result with what it came to, or why it lost.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from weft.errors import NoFeasiblePlan, PlanError
from weft.plan.check import check_memory, check_plan, check_program
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES, account_memory
from weft.plan.plan import Plan
from weft.plan.structure import require_structure
from weft.search.budget import Budget
from weft.search.deploy.deployer import NO_SPLITS, Splits
from weft.search.joint.build import build_plan
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.layouts import degrees, layouts
from weft.search.joint.setting import Layout, Setting, StageMesh
from weft.search.problem import Problem, divisors
from weft.simulate.predict import simulate
from weft.simulate.timeline import Timeline

MAX_STAGES: Final = 64
CHUNKS: Final = (1, 2, 4)
MAX_MICROBATCHES_PER_STAGE: Final = 16
FINALISTS: Final = 6
"""So many plans are simulated."""
ATTEMPTS: Final = 14
"""So many plans are made at most, where some do not pass the check."""
WORSE: Final = 1.15
"""Settings whose bound is this much above the best estimate are not looked at."""
LARGE: Final = 128
"""On more devices than this not all of them are simulated, where a stage's replicas are alike."""
MAX_ACTIONS: Final = 60_000
"""Finalists with so many forwards in all are enough, if there is a plan."""
RESERVES: Final = (0.0, 0.1, 0.25)
"""Parts of the memory that estimates leave free, the next one where none of the finalists fits."""


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


def joint_search(problem: Problem, splits: Splits = NO_SPLITS, *, budget: Budget | None = None,
                 progress: Callable[[str], None] = lambda text: None) -> JointResult:
    """Return the best plan over data, tensor and pipeline parallelism; raise ``NoFeasiblePlan`` if none fits."""
    budget = budget or Budget(effort=float("inf"))
    chain = Chain(problem, splits)
    miss: NoFeasiblePlan | None = None
    for reserve in RESERVES:
        estimator = Estimator(chain, reserve=reserve)
        ranked, tried = rank_settings(estimator, budget=budget, progress=progress)
        try:
            return _simulate_best(estimator, ranked, tried, budget, progress)
        except NoFeasiblePlan as problem_found:
            if miss is None or (problem_found.missing_bytes or 0) < (miss.missing_bytes or 0):
                miss = problem_found
            if not ranked:
                break
    assert miss is not None, "there is one reserve at least"
    raise miss


def rank_settings(estimator: Estimator, *, budget: Budget,
                  progress: Callable[[str], None]) -> tuple[list[Estimate], list[Tried]]:
    """Return estimates, best first, and what was tried without one."""
    found: list[Estimate] = []
    failed: list[Tried] = []
    best = float("inf")
    begin = time.monotonic()
    candidates = sorted(((estimator.bound(setting), number, setting)
                         for number, setting in enumerate(_candidates(estimator))), key=lambda item: item[:2])
    for number, (bound, _, setting) in enumerate(candidates):
        if found and budget.is_spent:
            progress(f"joint: out of time after {number} settings")
            break
        if bound > WORSE * best:
            failed += [Tried(setting=item, reason=f"cannot be faster than {least:.6g} s")
                       for least, _, item in candidates[number:] if least < float("inf")]
            break
        estimate = _estimate_cheapest(estimator, setting, best, failed)
        if estimate is not None:
            found.append(estimate)
            if estimate.step_time_s < best:
                best = estimate.step_time_s
                progress(f"joint: {estimate.setting.describe()}: about {best:.6g} s "
                         f"({time.monotonic() - begin:.1f} s, {number + 1} of {len(candidates)} settings)")
    return sorted(found, key=lambda item: item.step_time_s), failed


def _candidates(estimator: Estimator) -> Iterator[Setting]:
    """Yield the settings to estimate, without what only saves memory."""
    problem, chain = estimator.problem, estimator.chain
    speed = [chain.speed(device) for device in problem.devices]
    max_stages = min(MAX_STAGES, chain.num_places - 1)
    for degree in degrees(problem.cluster, (degree for _, degree in chain.splits)):
        for layout in layouts(problem.cluster, degree, speed, max_stages=max_stages):
            for microbatches, chunks in _microbatches(problem, layout):
                yield Setting(layout=layout, microbatches=microbatches, chunks=chunks)


def _microbatches(problem: Problem, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield numbers of micro-batches and chunks that suit the layout."""
    num_stages, width = len(layout), max(len(mesh.teams) for mesh in layout)
    given = problem.options.microbatches
    for count in [given] if given is not None else divisors(problem.options.batch):
        if problem.options.batch // count < width:
            break
        if count > MAX_MICROBATCHES_PER_STAGE * num_stages and given is None and num_stages > 1:
            break
        for chunks in CHUNKS:
            same = len({len(mesh.devices) for mesh in layout}) == 1
            if chunks == 1 or (problem.is_training and num_stages > 1 and same and count % num_stages == 0):
                yield count, chunks


def _estimate_cheapest(estimator: Estimator, plain: Setting, best: float, failed: list[Tried]) -> Estimate | None:
    """Return the estimate with the least done to save memory that fits, or None where it cannot be good or fit."""
    replicated = any(len(mesh.teams) > 1 for mesh in plain.layout)
    training, asked = estimator.problem.is_training, estimator.problem.options
    reason, setting = "", plain
    for recompute, sharded in itertools.product((False, True) if training else (False,),
                                                (False, True) if training and replicated else (False,)):
        if (asked.recompute and not recompute and training) or (asked.optimizer.sharded and replicated and not sharded):
            continue
        setting = replace(plain, recompute=recompute, sharded_states=sharded)
        bound = estimator.bound(setting)
        if bound > WORSE * best:
            reason = f"cannot be faster than {bound:.6g} s"
            break
        try:
            return estimator(setting)
        except NoFeasiblePlan as miss:
            reason = str(miss)
    failed.append(Tried(setting=setting, reason=reason))
    return None


def _simulate_best(estimator: Estimator, ranked: list[Estimate], tried: list[Tried], budget: Budget,
                   progress: Callable[[str], None]) -> JointResult:
    """Return the best of the finalists, simulated, or by their longest paths where there are too many devices."""
    best: JointResult | None = None
    chosen: Estimate | None = None
    misses: list[NoFeasiblePlan] = []
    results: dict[Setting, Tried] = {}
    actions = 0
    for estimate in _finalists(estimator, ranked):
        setting = estimate.setting
        enough = len(results) - len(misses) >= FINALISTS or len(results) >= ATTEMPTS or actions > MAX_ACTIONS
        if best is not None and (enough or budget.is_spent):
            break
        actions += _num_actions(estimate)
        try:
            found = _evaluate(estimator, estimate)
        except (NoFeasiblePlan, PlanError) as problem:
            miss = problem if isinstance(problem, NoFeasiblePlan) else NoFeasiblePlan(str(problem))
            misses.append(miss)
            results[setting] = Tried(setting=setting, estimate_s=estimate.step_time_s, reason=str(miss))
            if len(misses) > ATTEMPTS:
                break
            continue
        results[setting] = Tried(setting=setting, estimate_s=estimate.step_time_s, step_time_s=found.step_time_s)
        if best is None or found.step_time_s < best.step_time_s:
            best, chosen = found, estimate
            progress(f"joint: {setting.describe()}: {best.step_time_s:.6g} s simulated")
    if best is None or chosen is None:
        reasons = misses or [NoFeasiblePlan(item.reason) for item in tried[:1]] or [
            NoFeasiblePlan("no layout suits this batch: use a larger one")]
        raise min(reasons, key=lambda miss: miss.missing_bytes or 0)
    divided = None if budget.is_spent else _with_divided_states(estimator, chosen)
    if divided is not None and divided.step_time_s < best.step_time_s:
        best = divided
        progress(f"joint: {best.setting.describe()}: {best.step_time_s:.6g} s simulated")
        results[best.setting] = Tried(setting=best.setting, step_time_s=best.step_time_s)
        ranked = [replace(chosen, setting=best.setting), *ranked]
    rest = [results.get(item.setting) or Tried(setting=item.setting, estimate_s=item.step_time_s) for item in ranked]
    return replace(best, tried=(*rest, *tried))


def _with_divided_states(estimator: Estimator, estimate: Estimate) -> JointResult | None:
    """Return the same with the optimizer's states divided among replicas, though memory does not need it.

    Each updates less then, which may save more than gathering what was updated takes. None where that is not possible.
    """
    setting, problem = estimate.setting, estimator.problem
    replicated = any(len(mesh.teams) > 1 for mesh in setting.layout)
    if setting.sharded_states or not replicated or not problem.is_training or problem.cluster.num_devices > LARGE:
        return None
    try:
        return _evaluate(estimator, replace(estimate, setting=replace(setting, sharded_states=True)))
    except (NoFeasiblePlan, PlanError):
        return None


def _finalists(estimator: Estimator, ranked: list[Estimate]) -> list[Estimate]:
    """Return the best estimates; those of large clusters by their longest paths, which are not simulated after."""
    first = ranked[: 2 * ATTEMPTS]
    if estimator.problem.cluster.num_devices <= LARGE:
        return first
    return sorted((estimator.by_path(item) for item in first[:ATTEMPTS]), key=lambda item: item.step_time_s)


def _num_actions(estimate: Estimate) -> int:
    return estimate.setting.num_devices * estimate.setting.microbatches * estimate.setting.chunks


def _evaluate(estimator: Estimator, estimate: Estimate) -> JointResult:
    """Return the plan with its predicted time; raise ``NoFeasiblePlan`` if it does not fit."""
    problem, setting = estimator.problem, estimate.setting
    replicas = _equal_replicas(estimator, setting)
    if problem.cluster.num_devices > LARGE and replicas is not None:
        timeline = _one_replica(estimator, estimate, replicas)
        return JointResult(plan=build_plan(estimator, estimate), setting=setting, step_time_s=estimate.step_time_s,
                           timeline=timeline)
    plan = build_plan(estimator, estimate)
    timeline = simulate(check_plan(plan, problem.graph, problem.cluster), problem.costs, problem.cluster)
    return JointResult(plan=plan, setting=setting, step_time_s=timeline.step_time_s, timeline=timeline)


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
