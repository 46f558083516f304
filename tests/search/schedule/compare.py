"""What the oracles say about the results of the search, as sentences; shared by the tests and the benchmark.

What must hold of a result for N micro-batches, besides the optimum's own makespan:

- ``period_bound <= OPT(N) / N`` where a micro-batch gives back at least what it takes on every limited device: an optimal
  schedule of N micro-batches, run again and again, is a steady state of N micro-batches per period ``OPT(N)``.
- ``period_bound <= P / K`` for the smallest period ``P`` that ``oracle_period`` finds with K micro-batches, for the same
  reason: it is a steady state.
- ``period / period_microbatches`` is at least the work of every resource in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from tests.search.schedule.oracle import is_feasible, min_makespan
from tests.search.schedule.oracle_joint import min_makespan_joint
from tests.search.schedule.oracle_period import can_repeat, gives_back_all, min_period, num_candidates
from tests.search.schedule.random_problems import RandomProblem
from weft.base.errors import NoFeasiblePlan
from weft.search.schedule.problem import ScheduleProblem, with_memory
from weft.search.schedule.schedule import ScheduleResult, find_problems

Search = Callable[[ScheduleProblem, int], ScheduleResult]

RESOLUTION = 1e-6
"""Relative: what the search may lose by counting time in whole steps."""
MAX_CANDIDATES = 3000
"""Steady states tried for one problem, at most."""


@dataclass
class Verdict:
    """What came out of one comparison."""

    seed: int
    kind: str
    """``optimal``, ``feasible`` or ``infeasible``."""
    complaints: list[str] = field(default_factory=list)
    gap: float = 0.0
    """How far the makespan is above the optimum, relative."""
    period_checked: bool = False
    """Whether ``oracle_period`` had a say."""


def compare(case: RandomProblem, search: Search) -> Verdict:
    """Return what is wrong with the search's answer to the problem, if anything."""
    answer = min_makespan(case.problem, case.num_microbatches)
    try:
        result = search(case.problem, case.num_microbatches)
    except NoFeasiblePlan as error:
        verdict = Verdict(case.seed, "infeasible")
        if answer is not None:
            verdict.complaints.append(f"said to be infeasible, but {float(answer.makespan):g} is possible: {error}")
        else:
            verdict.complaints += named_memory_problems(case.problem, case.num_microbatches, error, search)
        return verdict
    verdict = Verdict(case.seed, result.status)
    if answer is None:
        verdict.complaints.append("memory admits no schedule, yet one came back")
    else:
        verdict.complaints += result_problems(case, result, answer.makespan)
        verdict.complaints += _period_problems(case, result, answer.makespan, verdict)
        verdict.gap = result.makespan / float(answer.makespan) - 1 if answer.makespan else 0.0
    return verdict


def compare_joint(case: RandomProblem, search: Search, *, max_states: int = 60_000) -> Verdict:
    """Return what is wrong with the answer to a problem with pairs or copies; ``TooLargeError`` if that is not to be known."""
    try:
        result = search(case.problem, case.num_microbatches)
    except NoFeasiblePlan as error:
        verdict = Verdict(case.seed, "infeasible")
        answer = min_makespan_joint(case.problem, case.num_microbatches, max_states=max_states)
        if answer is not None:
            verdict.complaints.append(f"said to be infeasible, but {float(answer):g} is possible: {error}")
        else:
            verdict.complaints += named_memory_problems(case.problem, case.num_microbatches, error, search,
                                                        is_possible=lambda problem, number: min_makespan_joint(
                                                            problem, number, max_states=max_states) is not None)
        return verdict
    verdict = Verdict(case.seed, result.status)
    claimed = Fraction(result.makespan)
    better = min_makespan_joint(case.problem, case.num_microbatches, max_states=max_states,
                                below=claimed - Fraction(RESOLUTION) * max(1, claimed))
    optimum = claimed if better is None else better
    verdict.complaints += result_problems(case, result, optimum)
    if result.period_bound is not None and gives_back_all(case.problem):
        limits = [float(optimum) / case.num_microbatches]
        if result.period is not None and result.period_microbatches is not None:
            limits.append(result.period / result.period_microbatches)
        if result.period_bound > min(limits) + RESOLUTION * max(1.0, float(optimum)):
            verdict.complaints.append(f"period_bound {result.period_bound!r} is above {min(limits)!r}")
    verdict.gap = result.makespan / float(optimum) - 1 if optimum else 0.0
    return verdict


def result_problems(case: RandomProblem, result: ScheduleResult, optimum: Fraction) -> list[str]:
    """Return what is wrong with the makespan and its bound."""
    best, slack = float(optimum), RESOLUTION * max(1.0, float(optimum))
    complaints = find_problems(result.schedule)
    if result.schedule.problem != case.problem or result.schedule.num_microbatches != case.num_microbatches:
        complaints.append("the schedule is of another problem")
    if result.makespan < best - slack:
        complaints.append(f"makespan {result.makespan!r} is below the optimum {best!r}")
    if result.makespan_bound > best + slack:
        complaints.append(f"makespan_bound {result.makespan_bound!r} is above the optimum {best!r}")
    if result.status == "optimal" and result.makespan > best + slack:
        complaints.append(f"optimal is claimed for {result.makespan!r}, the optimum is {best!r}")
    if result.status == "optimal" and result.makespan_bound < result.makespan - slack:
        complaints.append(f"optimal is claimed for {result.makespan!r} with the bound {result.makespan_bound!r}")
    return complaints


def _period_problems(case: RandomProblem, result: ScheduleResult, optimum: Fraction, verdict: Verdict) -> list[str]:
    problem, complaints = case.problem, []
    if not can_repeat(problem):
        return [] if result.period is None else [f"period {result.period!r} for memory that is kept"]
    if result.period is None or result.period_microbatches is None or result.period_bound is None:
        return ["no period, though a micro-batch gives back all it takes"] if gives_back_all(problem) else []
    slack = RESOLUTION * max(1.0, float(optimum))
    each = result.period / result.period_microbatches
    if each < max(problem.device_work) - slack:
        complaints.append(f"period {each!r} per micro-batch is below the work {max(problem.device_work)!r}")
    limits = {"the period found": each, f"{case.num_microbatches} one after the other": float(optimum) / case.num_microbatches}
    for number in (1, 2):
        if gives_back_all(problem) and num_candidates(problem, number, 2) <= MAX_CANDIDATES:
            steady = min_period(problem, number, 2)
            if steady is not None:
                limits[f"a steady state of {number}"] = float(steady.period) / number
                verdict.period_checked = True
    complaints += [f"period_bound {result.period_bound!r} is above {value!r}, {name}" for name, value in limits.items()
                   if result.period_bound > value + slack]
    return complaints


def named_memory_problems(problem: ScheduleProblem, num_microbatches: int, error: NoFeasiblePlan,
                          search: Search, *,
                          is_possible: Callable[[ScheduleProblem, int], bool] = is_feasible) -> list[str]:
    """Return what is wrong with the memory that the error names: raised to it, device by device, a schedule must exist.

    The last amount must be the smallest that works while the other devices stay as they are then.
    """
    raised, named = problem, error
    for _ in problem.device_names:
        device, needed = named.device, getattr(named, "needed", None)
        if device not in problem.device_names or needed is None:
            return [f"the error names device {device!r} and memory {needed!r}"]
        limit = raised.device_memory[problem.device_names.index(device)]
        if limit is None or needed <= limit or device not in str(named) or f"{needed:.6g}" not in str(named):
            return [f"{device!r} has {limit!r}, {needed!r} is named by: {named}"]
        raised = with_memory(raised, {device: needed})
        try:
            search(raised, num_microbatches)
        except NoFeasiblePlan as more:
            named = more
            continue
        less = with_memory(raised, {device: needed - 0.01})
        complaints = [] if is_possible(raised, num_microbatches) else [f"{device!r} with {needed!r} does not work"]
        return complaints + ([f"{device!r} works with less than {needed!r}"] if is_possible(less, num_microbatches) else [])
    return [f"still infeasible with {raised.device_memory}: {named}"]
