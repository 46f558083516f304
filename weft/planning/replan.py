"""Planning again, for another cluster or other options: what explanations and ``weft fit`` ask of the planner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import NoFeasiblePlan
from weft.cluster.cluster import Cluster
from weft.cost.costs import Costs
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.planning.compare import Candidate, Comparison, compare_all, compare_strategies, microbatch_choices
from weft.search.common.budget import Budget, time_budget
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.splits import Splits
from weft.search.joint.baselines import STRATEGIES, admits


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model to plan for any cluster, with what is needed to do so again."""

    model: str | None = None
    """As on the command line: how devices may divide its operators is found out. None where that is not wanted."""
    graph: Graph
    """Traced with batch dimensions, if deployments are to be searched."""
    options: PlanOptions
    costs_of: Callable[[Graph, Cluster], Costs]
    load: Callable[[str], Graph] | None = None
    """Traces the model again in another precision; None where that is not possible."""

    def problem(self, cluster: Cluster) -> Problem:
        """Return the problem of planning the model on a cluster."""
        return Problem(graph=self.graph, cluster=cluster, costs=self.costs_of(self.graph, cluster),
                       options=self.options)

    def in_dtype(self, dtype: str) -> Request | None:
        """Return the same request in another precision, or None."""
        if self.load is None:
            return None
        return replace(self, graph=self.load(dtype), options=replace(self.options, dtype=dtype))


def replan(problem: Problem, request: Request, *, strategies: Sequence[str] | None = None,
           budget: Budget | None = None) -> Comparison:
    """Return what every strategy comes to, as `weft plan` finds it; raise ``NoFeasiblePlan`` if none fits.

    Of the plain strategies only some, if ``strategies`` are given.
    """
    budget = budget or time_budget(None)
    splits = find_splits(problem, request, budget=budget)
    return compare_all(problem, splits, budget, strategies=strategies)


def find_splits(problem: Problem, request: Request, *, degree: int | None = None,
                budget: Budget | None = None) -> Splits:
    """Return how the devices of a host (so many, or any number) may divide the model's operators."""
    from weft.search.deploy.find_splits import load_splits

    return load_splits(request.model, problem, lambda graph: request.costs_of(graph, problem.cluster),
                       degree=problem.options.degrees.tp if degree is None else degree, budget=budget,
                       report=(lambda text: None) if budget is None else budget.report)


def best_joint(problem: Problem, splits: Splits, budget: Budget) -> Candidate | None:
    """Return what the search over data, tensor and pipeline parallelism finds in a few seconds, if anything.

    Ctrl-C marks the ``budget``.
    """
    with contextlib.suppress(NoFeasiblePlan):
        return find_joint(problem, splits, budget)
    return None


def find_joint(problem: Problem, splits: Splits, budget: Budget) -> Candidate:
    """Return the same; raise ``NoFeasiblePlan`` if there is nothing."""
    if problem.cluster.num_devices < 2:
        raise NoFeasiblePlan("the cluster has one device, which has nothing to share")
    left = budget.seconds_left
    found = compare_strategies(problem, (), joint=True, splits=splits,
                               time_limit_s=JOINT_S if left is None else min(JOINT_S, left))
    budget.is_interrupted |= found.is_interrupted
    return found.best


JOINT_S: Final = 4.0
"""Seconds that one question whether something fits may take, about."""
THRIFTY: Final = ("1f1b-balanced", "1f1b", "data-parallel-by-speed", "data-parallel", "gpipe", "single")
"""Strategies, those first that are most likely to fit."""


def least_missing(problem: Problem, strategies: Sequence[str] = THRIFTY, *, enough: float = 0.0) -> float:
    """Return how much memory the plan that is nearest to fitting lacks on its fullest device; at most 0 if it fits.

    Nothing is simulated. Once a plan lacks no more than ``enough``, no further one is tried.
    """
    least, options = float("inf"), problem.options
    for name in (name for name in strategies if admits(options.degrees, name, problem.cluster.num_devices)):
        for microbatches in sorted(microbatch_choices(problem, name), reverse=True):
            with contextlib.suppress(NoFeasiblePlan):
                account = account_memory(lower(STRATEGIES[name](problem, microbatches), problem.graph))
                least = min(least, max((account.peak_bytes(rank) - device.memory_bytes for rank, device in enumerate(
                    problem.cluster.devices) if device.memory_bytes is not None), default=0.0))
            if least <= enough:
                return least
    return least
