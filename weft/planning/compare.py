"""The planner: tries every strategy, checks and simulates each plan, and keeps the best with the reasons why.

    candidates = [best plan of each strategy]   build -> check_plan -> simulate
    comparison = the candidates, the fastest that fits, and a bound that no plan can beat
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weft.base.errors import InputError, NoFeasiblePlan
from weft.base.units import format_bytes
from weft.plan.plan import Plan, with_search
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c, time_budget
from weft.search.common.incumbent import Incumbent
from weft.search.common.problem import Problem, divisors, evaluate_plan, with_plan
from weft.search.deploy.policy import load_policy
from weft.search.deploy.search import DeployOptions, deploy
from weft.search.deploy.splits import NO_SPLITS, Splits
from weft.search.joint.baselines import STRATEGIES, Strategy, admits
from weft.search.joint.placements import PLACEMENTS
from weft.search.joint.scheduled import reschedule, schedule_search, scheduled_plan
from weft.search.joint.search import Tried, joint_search
from weft.search.joint.tuning import TUNING
from weft.simulate.timeline import Timeline

log = logging.getLogger(__name__)

MAX_MICROBATCH_CHOICES = 5
"""So many numbers of micro-batches are tried for each strategy where the user gives none, and more if none fits."""
MIN_SCHEDULE_TIME_S = 0.1
"""So long a search for a schedule may take at least, where the time limit is divided among many."""
MANY_DEVICES = 16
"""With so many, one device alone is not worth any of a time limit."""
DEPLOY_SIMULATIONS = 3000
"""Deployments that a search for one may look at here; `weft deploy` has no such limit."""
GRACE_S = 1.0
"""So long after the time limit strategies are still tried where there is no plan at all; the first one always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The best plan of one strategy, or why there is none."""

    strategy: str
    plan: Plan | None = None
    timeline: Timeline | None = None
    problem: NoFeasiblePlan | None = None
    """Why there is no plan: the nearest miss."""
    predicted_s: float | None = None
    """The step's time where it is not the timeline's, which then shows a part of a large cluster."""
    tried: tuple[Tried, ...] = ()
    """Everything that the strategy looked at, best first, with what it came to or why it lost."""

    @property
    def reason(self) -> str:
        """Return why there is no plan, or nothing."""
        return str(self.problem) if self.problem is not None else ""

    @property
    def step_time_s(self) -> float:
        """Return the predicted step time, infinite where there is no plan."""
        if self.predicted_s is not None:
            return self.predicted_s
        return self.timeline.step_time_s if self.timeline is not None else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What every strategy came to."""

    candidates: tuple[Candidate, ...]
    bound_s: float
    """No plan for this step on this cluster can be faster, by the cost model."""
    is_complete: bool = True
    """Nothing was left out because of the time limit or Ctrl-C."""
    interrupted_in: str = ""
    """The strategy whose search Ctrl-C has ended; empty where it did not."""

    @property
    def is_interrupted(self) -> bool:
        """Return whether Ctrl-C has ended the search."""
        return bool(self.interrupted_in)

    @property
    def best(self) -> Candidate:
        """Return the fastest candidate; the first of equals."""
        return min(self.candidates, key=lambda candidate: candidate.step_time_s)


def compare_strategies(problem: Problem, strategies: Iterable[str] | None = None, *, placements: Sequence[str] = (),
                       joint: bool = False, deployments: DeployOptions | None = None, splits: Splits = NO_SPLITS,
                       time_limit_s: float | None = None,
                       progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Return the best plan of each strategy; raise ``NoFeasiblePlan`` with the nearest miss if none fits.

    For each of the ``placements`` a schedule is searched as well (``schedule-v`` and so on). With ``joint`` data,
    tensor and pipeline parallelism are searched together, with ``deployments`` a deployment of any kind (``deploy``);
    in both devices may divide operators as ``splits`` say. On a large cluster only the joint search is done. Once there
    is a plan, ``time_limit_s`` seconds or Ctrl-C end the search: what has been found until then is returned.
    """
    is_large = joint and problem.cluster.num_devices > TUNING.large
    names = (() if is_large else tuple(STRATEGIES)) if strategies is None else tuple(strategies)
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise InputError(f"there is no strategy {unknown[0]!r}; choose from {', '.join(STRATEGIES)}")
    names = tuple(name for name in names if admits(problem.options.degrees, name, problem.cluster.num_devices))
    builders = {name: STRATEGIES[name] for name in names}
    builders |= _placement_builders(problem, placements, time_limit_s, progress)
    bound_s, budget = problem.work_bound(), time_budget(time_limit_s, progress)
    searches: dict[str, Callable[[], Candidate]] = {
        name: partial(_best_of_strategy, problem, name, build, bound_s, budget) for name, build in builders.items()}
    deploys = deployments is not None and not is_large
    if joint:
        searches["joint"] = partial(_joint_candidate, problem, splits, bound_s, budget, 0.5 if deploys else 1.0)
    if deployments is not None and deploys:
        searches["deploy"] = partial(_deploy_candidate, problem, deployments, splits, bound_s, budget)
    if budget.deadline is not None:  # the joint search early, where one device is far from the best
        first = ("joint",) if problem.cluster.num_devices >= MANY_DEVICES else ("single", "joint")
        searches = {name: searches[name] for name in (*first, *searches) if name in searches}
    comparison = _search_all(searches, bound_s, budget)
    if comparison.best.plan is None:
        raise _nothing_fits(problem, comparison)
    return comparison


def compare_all(problem: Problem, splits: Splits, budget: Budget, *, strategies: Sequence[str] | None = None,
                placements: Sequence[str] = (), joint: bool | None = None,
                deploy: bool | None = None) -> Comparison:
    """Return what everything that ``weft plan`` tries comes to, in the time that the budget has left.

    Unless told, the joint search takes part where there are several devices, deployments where they train.
    """
    several = problem.cluster.num_devices > 1
    may = several or bool(strategies)
    deploys = may and not problem.options.degrees.fixes_layout and (
        several and problem.is_training if deploy is None else deploy)
    return compare_strategies(
        problem, strategies, placements=placements, splits=splits, time_limit_s=budget.seconds_left,
        joint=may and (several if joint is None else joint), progress=budget.report,
        deployments=DeployOptions(max_simulations=DEPLOY_SIMULATIONS, seed=problem.options.seed) if deploys else None)


def _search_all(searches: Mapping[str, Callable[[], Candidate]], bound_s: float, budget: Budget) -> Comparison:
    """Return what the searches come to until the budget is spent."""
    candidates: list[Candidate] = []
    best = Incumbent[Candidate](budget=budget, what="best so far", unit="s", bound=bound_s)
    interrupted_in = ""
    for name, search in searches.items():
        has_plan = best.answer is not None
        if has_plan and budget.is_spent:
            budget.report(f"time limit: {name} and what follows are not tried")
            break
        budget.report(f"trying {name}")
        try:
            with cut_short(None if budget.deadline is None or not candidates  # the first is never cut off
                           else budget.deadline + (0.0 if has_plan else GRACE_S)):
                candidates.append(search())
            best.offer(candidates[-1].step_time_s, candidates[-1], by=name)
        except OutOfTime:
            if not candidates:  # the first is never cut short here: it is for a caller, and nothing is known yet
                raise
            budget.report(f"time limit: {name} is cut short")
            break
        except KeyboardInterrupt:
            if not has_plan:
                raise
            budget.is_interrupted = True
        if budget.is_interrupted:
            budget.report(f"interrupted: what follows {name} is not tried")
            interrupted_in = name
            break
    return Comparison(candidates=tuple(candidates), bound_s=bound_s, interrupted_in=interrupted_in,
                      is_complete=len(candidates) == len(searches) and not budget.is_late)


def _nothing_fits(problem: Problem, comparison: Comparison) -> NoFeasiblePlan:
    """Return the error that explains the nearest miss in full and the others in short."""
    candidates = comparison.candidates
    cut = "" if comparison.is_complete else "\n  - the time limit ended the search: more time may find a plan"
    problems = [item.problem for item in candidates if item.problem is not None]
    nearest = min(problems, key=_missing)
    lines = []
    for item in candidates:
        missing = item.problem.missing_bytes if item.problem is not None else None
        where = f" on {item.problem.device!r}" if item.problem is not None and item.problem.device else ""
        lines.append(f"\n  - {item.strategy}: "
                     + (f"{format_bytes(missing)} too little{where}" if missing is not None else item.reason))
    return NoFeasiblePlan(f"no strategy gives a plan for {problem.graph.name!r} that fits:{''.join(lines)}{cut}\n"
                          f"The nearest: {nearest}", missing_bytes=nearest.missing_bytes, device=nearest.device)


def _missing(miss: NoFeasiblePlan) -> float:
    return float("inf") if miss.missing_bytes is None else miss.missing_bytes


def _placement_builders(problem: Problem, placements: Sequence[str], time_limit_s: float | None,
                        progress: Callable[[str], None]) -> dict[str, Strategy]:
    """Return, by name, what makes a plan with a searched schedule of each placement."""
    unknown = [name for name in placements if name not in PLACEMENTS]
    if unknown:
        raise InputError(f"there is no placement {unknown[0]!r}; choose from {', '.join(PLACEMENTS)}")
    num_searches = max(1, 2 * len(placements) * len(microbatch_choices(problem, "schedule")))
    limit_s = None if time_limit_s is None else max(MIN_SCHEDULE_TIME_S, time_limit_s / num_searches)
    search = schedule_search(time_limit=limit_s, seed=problem.options.seed, progress=progress)
    return {f"schedule-{name}": partial(scheduled_plan, placement=name, search=search) for name in placements}


def _deploy_candidate(problem: Problem, options: DeployOptions, splits: Splits, bound_s: float,
                      budget: Budget) -> Candidate:
    """Return the best deployment; the order of one that is a pipeline is searched once more."""
    def build(problem: Problem, microbatches: int) -> Plan:  # it chooses the number of micro-batches itself
        lent = budget.part(0.7)
        try:
            return deploy(problem, options, splits=splits, policy=load_policy(), budget=lent).plan
        finally:
            budget.is_interrupted |= lent.is_interrupted

    found = _best_of_strategy(problem, "deploy", build, bound_s, budget)
    if found.plan is None or found.timeline is None:
        return found
    try:
        better = reschedule(found.plan, found.timeline, problem, below_s=found.step_time_s, budget=budget.part(0.5))
    except OutOfTime:
        return found
    except KeyboardInterrupt:
        budget.is_interrupted = True
        return found
    if better is None:
        return found
    plan = with_search(better[0], step_time=better[1].step_time_s, bound=found.plan.search.bound or bound_s)
    return replace(found, plan=plan, timeline=with_plan(better[1], plan))


def _joint_candidate(problem: Problem, splits: Splits, bound_s: float, budget: Budget, share: float) -> Candidate:
    """Return the best plan of the joint search, in a share of the time that is left, with everything it tried."""
    lent = budget.part(share)
    try:
        with ended_by_ctrl_c(lent):
            found = joint_search(problem, splits, budget=lent, progress=budget.report)
    except NoFeasiblePlan as miss:
        return Candidate(strategy="joint", problem=miss)
    finally:
        budget.is_interrupted |= lent.is_interrupted
    plan = with_search(found.plan, step_time=found.step_time_s, bound=bound_s)
    timeline = found.timeline
    if timeline.step_time_s == found.step_time_s:
        timeline = with_plan(timeline, plan)
    return Candidate(strategy="joint", plan=plan, timeline=timeline, predicted_s=found.step_time_s, tried=found.tried)


def _best_of_strategy(problem: Problem, name: str, build: Strategy, bound_s: float, budget: Budget) -> Candidate:
    """Return the strategy's best plan, or its nearest miss; what is cut short returns what it has, if anything."""
    best = Candidate(strategy=name)
    misses: list[NoFeasiblePlan] = []
    for number, microbatches in enumerate(microbatch_choices(problem, name)):
        if best.plan is not None and (number >= MAX_MICROBATCH_CHOICES or budget.is_spent):
            break
        try:
            plan = build(problem, microbatches)
            timeline = evaluate_plan(plan, problem)
        except NoFeasiblePlan as miss:
            misses.append(miss)
            continue
        except (KeyboardInterrupt, OutOfTime) as ended:
            if best.plan is None:
                raise
            budget.is_interrupted |= isinstance(ended, KeyboardInterrupt)
            break
        log.debug("%s with %d micro-batches: %.6g s", name, microbatches, timeline.step_time_s)
        if timeline.step_time_s >= best.step_time_s and name in STRATEGIES:
            break  # farther from what suits the strategy it does not get better
        if timeline.step_time_s < best.step_time_s:
            plan = with_search(plan, step_time=timeline.step_time_s, bound=max(bound_s, plan.search.bound or 0.0))
            best = Candidate(strategy=name, plan=plan, timeline=with_plan(timeline, plan))
    nearest = min(misses, key=_missing, default=None)
    return best if best.plan is not None else replace(best, problem=nearest)


def microbatch_choices(problem: Problem, strategy: str) -> list[int]:
    """Return the numbers of micro-batches to try: the user's, or divisors of the batch, what suits best first.

    Pipelines want several micro-batches per stage, up to eight; plain strategies want few large ones. What follows
    saves memory, and is only of use where nothing before it fits.
    """
    if problem.options.microbatches is not None:
        return [problem.options.microbatches]
    every = divisors(problem.options.batch)
    if strategy == "deploy":
        return every[:1]
    if strategy in ("single", "fsdp") or strategy.startswith("data-parallel"):
        return every
    most = 8 * len(problem.devices)
    wanted = [number for number in every if number <= most][-MAX_MICROBATCH_CHOICES:][::-1]
    return wanted if strategy not in STRATEGIES else [*wanted, *(number for number in every if number > most)]
