"""Plans with searched schedules: a placement, the schedule problem that it means, and the best order found for it.

    placement -> problem -> search -> order put back -> check and simulate

How many tensors wait between stages depends on the schedule, and so does a little of the memory: the first search
provides for one of each kind, and if the plan then needs more than a device has, the next search gets that much less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.base.errors import InputError, NoFeasiblePlan
from weft.plan.check import excess_bytes
from weft.plan.plan import Plan, SearchInfo
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem, evaluate_plan
from weft.search.joint.placements import PLACEMENTS
from weft.search.joint.tuning import TUNING
from weft.search.schedule.from_plan import PlanProblem, problem_of_plan, with_schedule
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import ScheduleResult
from weft.search.schedule.tuning import TUNING as RULES
from weft.simulate.timeline import Timeline

Search = Callable[[ScheduleProblem, int], ScheduleResult]
"""From a problem and a number of micro-batches to the best schedule found."""



@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A plan with a found schedule."""

    plan: Plan
    plan_problem: PlanProblem
    result: ScheduleResult


def schedule_search(*, time_limit: float | None = None, effort: float | None = None, seed: int = 0,
                    progress: Callable[[str], None] = lambda text: None) -> Search:
    """Return Weft's schedule search with these settings."""
    def search(problem: ScheduleProblem, microbatches: int) -> ScheduleResult:
        from weft.search.schedule.search import schedule

        return schedule(problem, microbatches=microbatches, time_limit=time_limit, effort=effort, seed=seed,
                        progress=progress)
    return search


def scheduled_plan(problem: Problem, microbatches: int, placement: str, search: Search) -> Plan:
    """Return the placement with the schedule found for it; in training, with whole or split backward as is faster.

    Raise ``NoFeasiblePlan`` if the placement does not suit the model, or if memory admits no schedule.
    """
    skeleton = PLACEMENTS[placement](problem, microbatches)
    best: tuple[float, Plan] | None = None
    misses: list[NoFeasiblePlan] = []
    for split_backward in (False, True) if problem.is_training else (False,):
        try:
            found = find_schedule(skeleton, problem, search, split_backward=split_backward)
            step_time = evaluate_plan(found.plan, problem).step_time_s
        except NoFeasiblePlan as miss:
            misses.append(miss)
            continue
        if best is None or step_time < best[0]:
            best = step_time, _with_info(found, step_time, seed=problem.options.seed)
    if best is None:
        raise misses[0]
    return best[1]


def reschedule(plan: Plan, timeline: Timeline, problem: Problem, *, below_s: float,
               budget: Budget) -> tuple[Plan, Timeline] | None:
    """Return the plan with a searched order of its actions, if that makes its step shorter than ``below_s``.

    No order makes a device do less than in ``timeline``, the plan's: where one does too much already, or the plan is no
    pipeline of a training step, or has too many actions, nothing is searched. Backwards are split where memory allows.
    """
    is_pipeline = len({stage.replicas[0].devices for stage in plan.stages}) > 1
    if (not problem.is_training or not is_pipeline or plan.microbatches < 2 or budget.is_spent
            or len(plan.stages) * plan.microbatches > TUNING.max_blocks or float(timeline.busy_s.max()) >= below_s):
        return None
    search = schedule_search(time_limit=budget.seconds_left, effort=TUNING.reschedule_effort, seed=problem.options.seed)
    for split_backward in (True, False):
        try:
            found = find_schedule(plan, problem, search, split_backward=split_backward)
            other = evaluate_plan(found.plan, problem)
        except (NoFeasiblePlan, InputError):
            continue
        return (found.plan, other) if other.step_time_s < below_s else None
    return None


def with_tight_order(plan: Plan, problem: Problem) -> Plan:
    """Return the plan in the best order that rules make in the memory there is, with split backwards if these fit.

    Rules are named schedules, what becomes of them with less memory, and greedy ones. Raise ``NoFeasiblePlan`` if none
    fits.
    """
    search = schedule_search(effort=RULES.rules_effort, seed=problem.options.seed)
    try:
        return find_schedule(plan, problem, search, split_backward=True).plan
    except NoFeasiblePlan:
        return find_schedule(plan, problem, search, split_backward=False).plan


def find_schedule(plan: Plan, problem: Problem, search: Search, *, split_backward: bool) -> Scheduled:
    """Return the plan with the order of the best schedule found for its placement."""
    reserve = {device.name: 0.0 for device in problem.cluster.devices}
    for attempt in range(TUNING.max_attempts + 1):
        last = attempt == TUNING.max_attempts
        plan_problem = problem_of_plan(plan, problem.graph, problem.costs, problem.cluster,
                                       split_backward=split_backward, num_waiting=None if last else 1,
                                       reserve={} if last else reserve)
        result = search(plan_problem.problem, plan_problem.num_microbatches)
        found = with_schedule(plan, plan_problem, result.schedule)
        over = excess_bytes(found, problem.graph, problem.cluster)
        if not over:
            break
        for device, num_bytes in over.items():
            reserve[device] += num_bytes
    return Scheduled(plan=found, plan_problem=plan_problem, result=result)


def _with_info(found: Scheduled, step_time: float, *, seed: int) -> Plan:
    """Return the plan with what is known about it.

    The schedule's bound holds for the step of this placement if memory cannot bind; where it does, the problem's limits
    are a little stricter than the truth. Only a step as short as the bound is optimal: the optimizer and the exchange
    of gradients are not in the problem. The seconds of the search are left out: the same input gives the same plan.
    """
    result, binds = found.result, found.plan_problem.memory_binds
    bound = None if binds else result.makespan_bound
    proven = bound is not None and step_time <= bound * (1 + 1e-9)
    return replace(found.plan, search=SearchInfo(by="schedule", status="optimal" if proven else "feasible",
                                                 bound=bound, seed=seed))
