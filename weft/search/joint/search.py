"""The joint search: settings by estimate, and plans of the best of them by simulation.

    choose      a layout: meshes in a row, each of some tp groups of devices (``layouts.layouts``)
                m, v: micro-batches, and stages on each mesh (``_microbatches``)
                whether stages recompute, and tp groups divide the optimizer's states (``_estimates``)
                cuts 0 = k_0 < .. < k_(pv) = P between stages (``cut.shortest_longest``)
    minimise    T = m max(D, C) + (sum(D) - max(D)) / v + transfers + exchanges, by estimate (``Estimator.__call__``),
                of the best few by simulation (``finalists.evaluate``)
    subject to  what each device of a stage holds at most <= its memory / v (``Estimator.stage_bytes``), and of a plan
                exactly (``weft.plan.check.check_plan``)
                a tp group has a sample of every micro-batch (``Estimator.members``)
    bounds      T >= that of an even pipeline that sends nothing (``Estimator.bound``): settings that cannot be within
                ``worse`` of the best are left out

    layouts x micro-batches x chunks x (recompute, sharded states only where memory needs them)
        -> bound -> estimate -> ranking -> plan, check, simulation of the finalists -> refinement (``finalists``)

Nothing is proven: cuts are the best for the longest stage, by estimate. A setting that is estimated to fit is cut once:
its stages were found with tables of the account that the check uses (``Chain.stage_bytes``). Where a plan misses by
what these cannot say (what waits between stages in its order), the next best setting is tried.

Everything that was tried is in the result with what it came to, or why it lost.

Finalists of the joint search: their plans, checked and simulated, and what the best of them may still gain.

    estimate -> plan, check, simulation
    simulated -> a searched order for the best and those whose devices have the least to do -> sharded states

The order of a pipeline is 1F1B at first. Then it is searched for this placement (``weft.search.joint.scheduled``),
with split backwards where memory allows, also for finalists that were not the best.

Plans from estimated settings: stages with their replicas and shardings, and the order of the schedule.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from weft.base.errors import NoFeasiblePlan, PlanError
from weft.cluster.cluster import DeviceId
from weft.model.graph import I64
from weft.plan.check import check_memory, check_program
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES, MemoryAccount, account_memory
from weft.plan.orders import HELD, Order, one_after_another
from weft.plan.plan import Plan
from weft.plan.structure import require_structure
from weft.search.common.budget import Budget, OutOfTime
from weft.search.common.problem import Problem, StageSpec, divisors, evaluate_plan, make_plan, pipeline_order
from weft.search.deploy.splits import NO_SPLITS, Splits, TpGroup, contexts_of
from weft.search.joint.budgets import with_budgets
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.layouts import Layout, Setting, StageMesh, layouts
from weft.search.joint.pieces import PIECES, PieceGroup, expand, storage_for, unit_ops
from weft.search.joint.scheduled import reschedule, with_tight_order
from weft.search.joint.tuning import TUNING
from weft.simulate.timeline import Timeline
from weft.simulate.timing import simulate


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
    if setting.is_v or setting.is_tight:
        plan = with_tight_order(plan, problem)
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
    alike = {(len(mesh.tp_groups), *estimator.chain.figures_key(members[0][0]), members[0][1])
             for mesh, members in zip(setting.layout, sorts, strict=True)}
    return len(setting.layout[0].tp_groups) if len(alike) == 1 and all(len(members) == 1 for members in sorts) else None


def _one_replica(estimator: Estimator, estimate: Estimate, num_replicas: int) -> Timeline:
    """Return the simulated timeline of the first replica alone, checked, with as many micro-batches as fill it."""
    setting = estimate.setting
    count = min(setting.microbatches, 2 * len(setting.layout))
    layout = tuple(StageMesh(mesh.tp_groups[:1]) for mesh in setting.layout)
    narrow = replace(setting, layout=layout, microbatches=count)
    size = estimator.problem.options.batch // setting.microbatches // num_replicas
    alone = estimator.for_batch(size * count)
    plan = build_plan(alone, replace(estimate, setting=narrow))
    problem = alone.problem
    require_structure(plan, problem.graph, problem.cluster)
    program = lower(plan, problem.graph)
    check_program(program)
    account = account_memory(program)
    if setting.zero:  # alone, the replica has all of them
        account = _divided(alone, setting, account, narrow)
    check_memory(program, problem.cluster, account)
    return replace(simulate(program, problem.costs, problem.cluster), stored_memory=account)


def _divided(estimator: Estimator, setting: Setting, account: MemoryAccount, narrow: Setting) -> MemoryAccount:
    """Return the account of one replica alone with what replicas keep in pieces as one of several has it."""
    static = account.static.copy()
    by_rank = {device: mesh for mesh, one in zip(setting.layout, narrow.layout, strict=True) for device in one.devices}
    for device, mesh in by_rank.items():
        count = estimator.group_size(setting, mesh) // setting.cp  # a context axis is inside the replica
        for name, level in (("parameters", 3), ("gradients", 2), ("optimizer", 1)):
            if setting.zero >= level:
                static[device, CATEGORIES.index(name)] //= count
        if setting.in_units:
            unit = round(estimator.chain.largest_unit(mesh.tp_groups[0]))
            static[device, CATEGORIES.index("buffers")] += (4 if setting.zero == 3 else 2) * unit + unit // count
    return replace(account, static=static)


def refine(problem: Problem, simulated: Sequence[JointResult], budget: Budget,
           progress: Callable[[str], None]) -> tuple[JointResult, list[Tried]]:
    """Return the best of the plans after what can be made of them, and what was tried for that, the best first."""
    best = min(simulated, key=lambda item: item.step_time_s)
    tried: list[Tried] = []
    if problem.cluster.num_devices > TUNING.large:
        return best, tried
    straight = [item for item in simulated if not item.setting.is_v and not item.setting.in_units]
    first = min(straight, key=lambda item: item.step_time_s, default=best)
    others = sorted((item for item in straight if item is not first),
                    key=lambda item: float(item.timeline.busy_s.max()))
    chosen = [first, *others][:TUNING.rescheduled]
    for item in chosen if best is first else [best, *chosen]:
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


def _with_budgets(found: JointResult, problem: Problem, budget: Budget) -> JointResult:
    """Return the same with what memory is left for kept instead of made again, where that is faster."""
    program = found.timeline.program
    setting = found.setting
    if (not setting.recompute or setting.in_units or setting.cp > 1 or problem.options.recompute or program is None
            or program.plan is not found.plan):
        return found
    better = with_budgets(found.plan, problem, program, found.step_time_s, budget)
    return found if better is None else replace(
        found, plan=better[0], timeline=better[1], step_time_s=better[1].step_time_s)


def _note(found: JointResult, before: JointResult, tried: list[Tried], progress: Callable[[str], None]) -> None:
    tried.insert(0, Tried(setting=found.setting, estimate_s=before.step_time_s, step_time_s=found.step_time_s))
    progress(f"joint: {found.setting.describe()}: {found.step_time_s:.6g} s simulated")


def _with_divided_states(found: JointResult, problem: Problem) -> JointResult | None:
    """Return the same with the optimizer's states divided among replicas, though memory does not need it.

    Each updates less then, which may save more than gathering what was updated takes. None where that is not possible.
    """
    setting, optimizer = found.setting, found.plan.optimizer
    if setting.zero or not any(sharded for _, sharded in _savings(problem, setting)):
        return None
    plan = replace(found.plan, optimizer=replace(optimizer, sharded=True))
    try:
        timeline = evaluate_plan(plan, problem)
    except (NoFeasiblePlan, PlanError):
        return None
    return JointResult(plan=plan, setting=replace(setting, zero=1), step_time_s=timeline.step_time_s,
                       timeline=timeline)


# ---- plans of settings -----------------------------------------------------------------------------------------------


BY = "joint"


def build_plan(estimator: Estimator, estimate: Estimate) -> Plan:
    """Return the plan of the estimated setting with its cuts."""
    setting, chain = estimate.setting, estimator.chain
    problem, size = _with_choices(chain.problem, setting), chain.problem.options.batch // setting.microbatches
    specs: list[StageSpec] = []
    parts: list[list[int]] = []
    for stage, mesh in enumerate(setting.layout[number] for number in setting.mesh_of):
        first, last = estimate.cuts[stage : stage + 2]
        ends = estimator.segments(setting, stage, first, last) if setting.recompute else [first, last]
        counts = estimator.counts(mesh, size)
        assert counts is not None, "it was estimated"
        shares = list(zip(mesh.tp_groups, counts, strict=True))
        if setting.in_units:
            made = _units(chain, problem, setting, chain.ops[chain.places[first] : chain.places[last]], shares)
        else:
            made = [chain.stage(chain.ops[chain.places[begin] : chain.places[end]], shares, recompute=setting.recompute)
                    for begin, end in itertools.pairwise(ends)]
        parts.append(list(range(len(specs), len(specs) + len(made))))
        specs += made
    is_tight = setting.is_v or setting.is_tight
    plain = one_after_another(setting.mesh_of, setting.microbatches) if is_tight else pipeline_order(
        len(setting.layout), setting.chunks, setting.microbatches, training=problem.is_training)
    by_mesh = [expand(actions, parts) for actions in plain]
    devices: list[DeviceId] = []
    order: Order = []
    for mesh, actions in zip(setting.layout, by_mesh, strict=True):
        devices += mesh.devices
        order += [actions] * len(mesh.devices)
    return make_plan(problem, specs, order, microbatches=setting.microbatches, by=BY, order_devices=devices)


def _with_choices(problem: Problem, setting: Setting) -> Problem:
    optimizer = replace(problem.options.optimizer, sharded=setting.zero == 1)
    return replace(problem, options=replace(problem.options, recompute=setting.recompute, optimizer=optimizer,
                                            microbatches=setting.microbatches))


def _units(chain: Chain, problem: Problem, setting: Setting, ops: I64,
           shares: list[tuple[TpGroup, int]]) -> list[StageSpec]:
    """Return the units of a stage that keeps something in pieces."""
    units, last = unit_ops(problem, ops, chain.unit_starts), int(ops[-1]) == int(chain.ops[-1])
    specs = [chain.stage(part, shares, recompute=setting.recompute) for part in units]
    groups = [tp_group for tp_group, _ in shares]
    return [replace(spec, storage=storage_for(
        problem, groups, PIECES[setting.zero], setting.zero_group,
        keeps=last and setting.zero == 3 and problem.is_training and place == len(specs) - 1))
        for place, spec in enumerate(specs)]


# ---- finalists -------------------------------------------------------------------------------------------------------


def joint_search(problem: Problem, splits: Splits = NO_SPLITS, *, budget: Budget | None = None,
                 progress: Callable[[str], None] = lambda text: None) -> JointResult:
    """Return the best plan over data, tensor and pipeline parallelism; raise ``NoFeasiblePlan`` if none fits."""
    budget = budget or Budget(effort=float("inf"))
    estimator = Estimator(Chain(problem, splits), {cp: Estimator(Chain(problem, found))
                                                   for cp, found in contexts_of(splits).items() if cp > 1})
    ranked, tried = rank_settings(estimator, budget=budget, progress=progress)
    return _simulate_best(estimator, ranked, tried, budget, progress)


def rank_settings(estimator: Estimator, *, budget: Budget,
                  progress: Callable[[str], None]) -> tuple[list[Estimate], list[Tried]]:
    """Return estimates, best first, and what was tried without one."""
    found: list[Estimate] = []
    failed: list[Tried] = []
    best = float("inf")
    begin, slowest_s = time.monotonic(), 0.0
    candidates = sorted(((estimator.of(setting).bound(setting), number, setting)
                         for number, setting in enumerate(_candidates(estimator))), key=lambda item: item[:2])
    last = time.monotonic()
    for number, (bound, _, setting) in enumerate(candidates):
        now = time.monotonic()
        slowest_s, last = max(slowest_s, now - last), now
        if found and not budget.has_s(slowest_s):
            progress(f"joint: out of time after {number} settings")
            break
        if bound > TUNING.worse * best:
            failed += [Tried(setting=item, reason=f"cannot be faster than {least:.6g} s")
                       for least, _, item in candidates[number:] if least < float("inf")]
            break
        for estimate in _estimates(estimator.of(setting), setting, best, failed):
            found.append(estimate)
            if estimate.step_time_s < best:
                best = estimate.step_time_s
                progress(f"joint: {estimate.setting.describe()}: about {best:.6g} s "
                         f"({time.monotonic() - begin:.1f} s, {number + 1} of {len(candidates)} settings)")
    return sorted(found, key=lambda item: item.step_time_s), failed


def _tightest(estimator: Estimator, budget: Budget) -> Iterator[Estimate]:
    """Yield estimates of pipelines in which no more than one micro-batch has to fit."""
    training, is_large = estimator.problem.is_training, estimator.problem.cluster.num_devices > TUNING.large
    for plain in _candidates(estimator) if training and not is_large else ():
        if plain.chunks > 1 or len(plain.layout) < 2 or len(plain.layout) * plain.microbatches > TUNING.max_blocks:
            continue
        most_divided = dict(_savings(estimator.problem, plain))
        for recompute, sharded in most_divided.items():
            if budget.is_spent:
                return
            with suppress(NoFeasiblePlan):
                yield estimator.of(plain)(replace(plain, recompute=recompute, is_tight=True, zero=int(sharded)))
                break


def _candidates(estimator: Estimator) -> Iterator[Setting]:
    """Yield the settings to estimate, without what only saves memory."""
    yield from _candidates_of(estimator.chain, 1)
    for cp, other in estimator.contexts.items():
        yield from _candidates_of(other.chain, cp)


def _candidates_of(chain: Chain, cp: int) -> Iterator[Setting]:
    """Yield those in which so many devices divide the sequence; its words are for one sample at a time."""
    problem, wanted = chain.problem, chain.problem.options.degrees
    max_stages = min(TUNING.max_stages, chain.num_places - 1)
    for degree in sorted({*((1,) if cp == 1 else ()), *(degree for _, degree in chain.splits)}):
        for layout in layouts(problem.cluster, degree, chain.speed, batch=problem.options.batch, max_stages=max_stages,
                              tp_groups=chain.splits, wanted=wanted) if wanted.admit(tp=degree // cp, cp=cp) else ():
            for microbatches, chunks in _microbatches(problem, layout):
                size = problem.options.batch // microbatches
                if cp == 1 or all(len(mesh.tp_groups) == size for mesh in layout):
                    yield Setting(layout=layout, microbatches=microbatches, chunks=chunks, cp=cp)


def _microbatches(problem: Problem, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield numbers of micro-batches and chunks that suit the layout."""
    num_stages, width = len(layout), max(len(mesh.tp_groups) for mesh in layout)
    given, wanted = problem.options.microbatches, problem.options.degrees
    if given is None and wanted.microbatch_size is not None:
        given, rest = divmod(problem.options.batch, wanted.microbatch_size * width)
        if rest:
            return
    for count in [given] if given is not None else divisors(problem.options.batch):
        if problem.options.batch // count < width * (wanted.microbatch_size or 1):
            break
        if count > TUNING.max_microbatches_per_stage * num_stages and given is None and num_stages > 1:
            break
        for chunks in TUNING.chunks if wanted.interleave is None else (wanted.interleave,):
            same = len({len(mesh.devices) for mesh in layout}) == 1
            if chunks == 1 or (problem.is_training and num_stages > 1 and same and count % num_stages == 0):
                yield count, chunks


def _estimates(estimator: Estimator, plain: Setting, best: float, failed: list[Tried]) -> Iterator[Estimate]:
    """Yield the estimate with the least done to save memory that fits, none where it cannot be good or fit.

    Where it does not fit, or only with uneven stages, the pipeline is also laid over its meshes and back: that needs
    fewer micro-batches in flight for the same period, and as many on every device.
    """
    reason, setting = "no layout of its replicas has the pieces asked for, or none of them fits", plain
    plain_one: Estimate | None = None
    for recompute, sharded in _savings(estimator.problem, plain):
        setting = replace(plain, recompute=recompute, zero=int(sharded))
        bound = estimator.bound(setting)
        if bound > TUNING.worse * best:
            reason = f"cannot be faster than {bound:.6g} s"
            break
        plain_one = None
        try:
            plain_one = estimator(setting)
            yield plain_one
        except NoFeasiblePlan as miss:
            reason = str(miss)
        is_uneven = plain_one is None or plain_one.pipeline_s > TUNING.uneven * bound
        if is_uneven and _may_turn(estimator, plain):
            with suppress(NoFeasiblePlan):
                yield estimator(replace(setting, chunks=2, is_v=True))
        if plain_one is not None:
            if recompute == estimator.problem.options.recompute or not _may_be_in_units(estimator.problem, plain):
                return
            break
    in_units = list(_in_units(estimator, plain, best))
    yield from in_units
    if plain_one is None and not in_units:
        failed.append(Tried(setting=setting, reason=reason))


def _in_units(estimator: Estimator, plain: Setting, best: float) -> Iterator[Estimate]:
    """Yield estimates with gradients, or parameters, too, in pieces: where memory has no room for whole ones."""
    asked = estimator.problem.options
    if not _may_be_in_units(estimator.problem, plain):
        return
    ways = (True,) if asked.recompute else (False, True) if asked.may_recompute else (False,)
    for zero, group in zero_choices(estimator, plain):
        for recompute in ways:
            setting = replace(plain, recompute=recompute, zero=zero, zero_group=group)
            if estimator.bound(setting) > TUNING.worse * best:
                break
            with suppress(NoFeasiblePlan):
                yield estimator(setting)
                break


def zero_choices(estimator: Estimator, setting: Setting) -> Iterator[tuple[int, PieceGroup]]:
    """Yield what of gradients and parameters may be kept in pieces, and by whom, as it was asked for."""
    groups: tuple[PieceGroup, ...] = ("host", "all") if estimator.has_host_groups(setting.layout) else ("all",)
    wanted = estimator.problem.options.degrees
    for zero in (2, 3):
        for group in groups:
            if wanted.zero in (None, zero) and wanted.zero_group in (None, group):
                yield zero, group


def _may_be_in_units(problem: Problem, setting: Setting) -> bool:
    """Return whether replicas may divide gradients, or parameters, too."""
    return (problem.is_training and not problem.options.whole_parameters and problem.options.degrees.zero not in (0, 1)
            and setting.chunks == setting.cp == 1 and any(len(mesh.tp_groups) > 1 for mesh in setting.layout))


def _savings(problem: Problem, setting: Setting) -> Iterator[tuple[bool, bool]]:
    """Yield whether to recompute, and to divide states, as it was asked for: what does least to save memory first."""
    asked, training = problem.options, problem.is_training
    if (asked.degrees.zero or 0) > 1:
        return
    replicated = any(setting.copies(mesh) > 1 for mesh in setting.layout)
    for recompute in (False, True) if training and (asked.recompute or asked.may_recompute) else (False,):
        for sharded in (False, True) if replicated and _may_divide(problem) else (False,):
            if (recompute or not (asked.recompute and training)) and (
                    sharded or not (asked.optimizer.sharded and replicated)):
                yield recompute, sharded


def _may_divide(problem: Problem) -> bool:
    """Return whether replicas may divide the optimizer's states."""
    return problem.is_training and not problem.options.whole_parameters and problem.options.degrees.zero != 0


def _may_turn(estimator: Estimator, setting: Setting) -> bool:
    """Return whether the pipeline may go over its meshes and back, and holds less so."""
    num_meshes, problem = len(setting.layout), estimator.problem
    return (problem.is_training and setting.chunks == 1 and problem.options.degrees.interleave is None
            and problem.cluster.num_devices <= TUNING.large
            and HELD["v-min"](num_meshes) / 2 < min(num_meshes, setting.microbatches)
            and 2 * num_meshes * setting.microbatches <= TUNING.max_blocks)


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
        if not simulated:
            last = sorted(_tightest(estimator, budget), key=lambda item: item.step_time_s)
            ranked = [*ranked, *last]
            _simulate(estimator, last, budget, progress, simulated, [], results)
        if simulated:
            best, refined = refine(estimator.problem, simulated, budget, progress)
    except (KeyboardInterrupt, OutOfTime) as ended:
        if not simulated:
            raise
        budget.is_interrupted |= isinstance(ended, KeyboardInterrupt)
        best = min(simulated, key=lambda item: item.step_time_s)
    if not simulated:
        reasons = misses or [NoFeasiblePlan(item.reason) for item in tried[:1]] or [
            _no_layout(estimator)]
        raise min(reasons, key=lambda miss: miss.missing_bytes or 0)
    rest = [results.get(item.setting) or Tried(setting=item.setting, estimate_s=item.step_time_s) for item in ranked]
    return replace(best, tried=(*refined, *rest, *tried))


def _no_layout(estimator: Estimator) -> NoFeasiblePlan:
    """Return why there is nothing to estimate."""
    wanted = estimator.problem.options.degrees
    if wanted.tp not in (None, 1, *(degree for _, degree in estimator.chain.splits)):
        return NoFeasiblePlan(f"it is not known how {wanted.tp} devices divide the operators of "
                              f"{estimator.problem.graph.name!r}: try more time (--time-limit), or --tp 1")
    if wanted:
        return NoFeasiblePlan(f"no layout of these devices has {wanted.describe()} for a batch of "
                              f"{estimator.problem.options.batch}: leave out one of them")
    return NoFeasiblePlan("no layout suits this batch: use a larger one")


def _simulate(estimator: Estimator, ranked: list[Estimate], budget: Budget, progress: Callable[[str], None],
              simulated: list[JointResult], misses: list[NoFeasiblePlan], results: dict[Setting, Tried]) -> None:
    """Add what the finalists come to: to ``simulated`` or ``misses``, and all to ``results``."""
    actions = 0
    for estimate in _finalists(estimator, ranked, budget):
        setting = estimate.setting
        num_straight = sum(not item.setting.is_v for item in simulated)
        enough = (num_straight >= TUNING.finalists or len(results) >= TUNING.attempts
                  or (actions > TUNING.max_actions and len(simulated) >= TUNING.few_finalists))
        if simulated and (enough or budget.is_spent):
            break
        units = len(estimator.chain.unit_places) if setting.in_units else 1
        actions += setting.num_devices * setting.microbatches * setting.chunks * max(1, units // len(setting.layout))
        try:
            found = _with_budgets(evaluate(estimator.of(setting), estimate), estimator.problem, budget)
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
    turned = [item for item in ranked if item.setting.is_v][:TUNING.turned]
    first = [item for item in ranked if not item.setting.is_v or item in turned][: 2 * TUNING.attempts]
    if estimator.problem.cluster.num_devices <= TUNING.large:
        return first
    timed = [estimator.of(item.setting).by_path(item) for number, item in enumerate(first[:TUNING.attempts])
             if number == 0 or not budget.is_spent]
    return sorted(timed, key=lambda item: item.step_time_s)
