"""The joint search: settings by estimate, and plans of the best of them by simulation.

    choose      a layout: meshes in a row, each of some teams of devices (``layouts.layouts``)
                m, v: micro-batches, and stages on each mesh (``_microbatches``)
                whether stages recompute, and teams divide the optimizer's states (``_estimate_cheapest``)
                cuts 0 = k_0 < .. < k_(pv) = P between stages (``cut.shortest_longest``)
    minimise    T = m max(D, C) + (sum(D) - max(D)) / v + transfers + exchanges, by estimate (``Estimator.__call__``),
                of the best few by simulation (``finalists.evaluate``)
    subject to  what each device of a stage holds at most <= its memory / v (``Estimator.stage_bytes``), and of a plan
                exactly (``weft.plan.check.check_plan``)
                a team has a sample of every micro-batch (``Estimator.members``)
    bounds      T >= that of an even pipeline that sends nothing (``Estimator.bound``): settings that cannot be within
                ``worse`` of the best are left out

    layouts x micro-batches x chunks x (recompute, sharded states only where memory needs them)
        -> bound -> estimate -> ranking -> plan, check, simulation of the finalists -> refinement (``finalists``)

Nothing is proven: cuts are the best for the longest stage, by estimate. A setting that is estimated to fit is cut once:
its stages were found with tables of the account that the check uses (``Chain.stage_bytes``). Where a plan misses by
what these cannot say (what waits between stages in its order), the next best setting is tried.

Everything that was tried is in the result with what it came to, or why it lost.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.base.errors import NoFeasiblePlan, PlanError
from weft.search.common.budget import Budget, OutOfTime
from weft.search.common.problem import Problem, divisors
from weft.search.deploy.splits import NO_SPLITS, Splits
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.finalists import JointResult, Tried, evaluate, refine
from weft.search.joint.layouts import Layout, Setting, layouts
from weft.search.joint.tuning import TUNING


def joint_search(problem: Problem, splits: Splits = NO_SPLITS, *, budget: Budget | None = None,
                 progress: Callable[[str], None] = lambda text: None) -> JointResult:
    """Return the best plan over data, tensor and pipeline parallelism; raise ``NoFeasiblePlan`` if none fits."""
    budget = budget or Budget(effort=float("inf"))
    estimator = Estimator(Chain(problem, splits))
    ranked, tried = rank_settings(estimator, budget=budget, progress=progress)
    return _simulate_best(estimator, ranked, tried, budget, progress)


def rank_settings(estimator: Estimator, *, budget: Budget,
                  progress: Callable[[str], None]) -> tuple[list[Estimate], list[Tried]]:
    """Return estimates, best first, and what was tried without one."""
    found: list[Estimate] = []
    failed: list[Tried] = []
    best = float("inf")
    begin = time.monotonic()
    candidates = sorted(((estimator.bound(setting), number, setting)
                         for number, setting in enumerate(_candidates(estimator.chain))), key=lambda item: item[:2])
    for number, (bound, _, setting) in enumerate(candidates):
        if found and budget.is_spent:
            progress(f"joint: out of time after {number} settings")
            break
        if bound > TUNING.worse * best:
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


def _candidates(chain: Chain) -> Iterator[Setting]:
    """Yield the settings to estimate, without what only saves memory."""
    problem = chain.problem
    max_stages = min(TUNING.max_stages, chain.num_places - 1)
    for degree in sorted({1, *(degree for _, degree in chain.splits)}):
        for layout in layouts(problem.cluster, degree, chain.speed, batch=problem.options.batch, max_stages=max_stages,
                              teams=chain.splits):
            for microbatches, chunks in _microbatches(problem, layout):
                yield Setting(layout=layout, microbatches=microbatches, chunks=chunks)


def _microbatches(problem: Problem, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield numbers of micro-batches and chunks that suit the layout."""
    num_stages, width = len(layout), max(len(mesh.teams) for mesh in layout)
    given = problem.options.microbatches
    for count in [given] if given is not None else divisors(problem.options.batch):
        if problem.options.batch // count < width:
            break
        if count > TUNING.max_microbatches_per_stage * num_stages and given is None and num_stages > 1:
            break
        for chunks in TUNING.chunks:
            same = len({len(mesh.devices) for mesh in layout}) == 1
            if chunks == 1 or (problem.is_training and num_stages > 1 and same and count % num_stages == 0):
                yield count, chunks


def _estimate_cheapest(estimator: Estimator, plain: Setting, best: float,
                       failed: list[Tried]) -> Estimate | None:
    """Return the estimate with the least done to save memory that fits, or None where it cannot be good or fit."""
    replicated = any(len(mesh.teams) > 1 for mesh in plain.layout)
    training, asked = estimator.problem.is_training, estimator.problem.options
    may_divide = training and replicated and not asked.whole_parameters
    reason, setting = "", plain
    for recompute, sharded in itertools.product((False, True) if training else (False,),
                                                (False, True) if may_divide else (False,)):
        if (asked.recompute and not recompute and training) or (asked.optimizer.sharded and replicated and not sharded):
            continue
        setting = replace(plain, recompute=recompute, sharded_states=sharded)
        bound = estimator.bound(setting)
        if bound > TUNING.worse * best:
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
    """Return the best of the finalists, simulated, or by their longest paths where there are too many devices.

    Once one is simulated, the best of them is kept whatever ends the search.
    """
    simulated: list[JointResult] = []
    misses: list[NoFeasiblePlan] = []
    results: dict[Setting, Tried] = {}
    refined: list[Tried] = []
    try:
        _simulate(estimator, ranked, budget, progress, simulated, misses, results)
        if simulated:
            best, refined = refine(estimator.problem, simulated, budget, progress)
    except (KeyboardInterrupt, OutOfTime) as ended:
        if not simulated:
            raise
        budget.is_interrupted |= isinstance(ended, KeyboardInterrupt)
        best = min(simulated, key=lambda item: item.step_time_s)
    if not simulated:
        reasons = misses or [NoFeasiblePlan(item.reason) for item in tried[:1]] or [
            NoFeasiblePlan("no layout suits this batch: use a larger one")]
        raise min(reasons, key=lambda miss: miss.missing_bytes or 0)
    rest = [results.get(item.setting) or Tried(setting=item.setting, estimate_s=item.step_time_s) for item in ranked]
    return replace(best, tried=(*refined, *rest, *tried))


def _simulate(estimator: Estimator, ranked: list[Estimate], budget: Budget, progress: Callable[[str], None],
              simulated: list[JointResult], misses: list[NoFeasiblePlan], results: dict[Setting, Tried]) -> None:
    """Add what the finalists come to: to ``simulated`` or ``misses``, and all to ``results``."""
    actions = 0
    for estimate in _finalists(estimator, ranked, budget):
        setting = estimate.setting
        enough = (len(simulated) >= TUNING.finalists or len(results) >= TUNING.attempts
                  or (actions > TUNING.max_actions and len(simulated) >= TUNING.few_finalists))
        if simulated and (enough or budget.is_spent):
            break
        actions += setting.num_devices * setting.microbatches * setting.chunks
        try:
            found = evaluate(estimator, estimate)
        except (NoFeasiblePlan, PlanError) as problem:
            miss = problem if isinstance(problem, NoFeasiblePlan) else NoFeasiblePlan(str(problem))
            misses.append(miss)
            results[setting] = Tried(setting=setting, estimate_s=estimate.step_time_s, reason=str(miss))
            if len(misses) > TUNING.attempts:
                break
            continue
        results[setting] = Tried(setting=setting, estimate_s=estimate.step_time_s, step_time_s=found.step_time_s)
        if not simulated or found.step_time_s < min(item.step_time_s for item in simulated):
            progress(f"joint: {setting.describe()}: {found.step_time_s:.6g} s simulated")
        simulated.append(found)


def _finalists(estimator: Estimator, ranked: list[Estimate], budget: Budget) -> list[Estimate]:
    """Return the best estimates; those of large clusters by their longest paths, which are not simulated after."""
    first = ranked[: 2 * TUNING.attempts]
    if estimator.problem.cluster.num_devices <= TUNING.large:
        return first
    timed = [estimator.by_path(item) for number, item in enumerate(first[:TUNING.attempts])
             if number == 0 or not budget.is_spent]
    return sorted(timed, key=lambda item: item.step_time_s)
