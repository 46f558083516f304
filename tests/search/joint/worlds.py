"""Problems for tests of the joint search: chains of operators, and small models whose operators can be divided."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from tests.run.plans import source_of, traced
from tests.search.deploy.worlds import cluster_of, host, problem_of
from weft.base.errors import NoFeasiblePlan
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.common.problem import PlanOptions, Problem, divisors
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.deploy.find_splits import find_splits
from weft.search.deploy.splits import Splits
from weft.search.joint.baselines import STRATEGIES
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.layouts import Setting, StageMesh
from weft.search.joint.search import rank_settings


def equal_problem(num_devices: int = 4, *, memory: str = "1GB", **options: Any) -> Problem:
    """Return a chain on equal devices of one host with fast links."""
    options = {"num_ops": 12, "batch": 16, **options}
    return problem_of(cluster_of(host("a", num_devices, memory=memory), inside="10GB/s"), **options)


def mixed_problem(*, network: str = "1GB/s", rate: str = "3GFLOP/s", **options: Any) -> Problem:
    """Return a chain on two hosts, the second of which is faster."""
    options = {"num_ops": 12, "batch": 24, **options}
    return problem_of(cluster_of(host("a", 2), host("b", 2, rate=rate), inside="10GB/s", network=network,
                                 latency="10us"), **options)


@cache
def tensor_world(model: str = "llama-tiny", *, batch: int = 8, microbatches: int | None = None,
                 memory: str = "1GB") -> tuple[Problem, Splits]:
    """Return a small model on two hosts of two devices each, with how these may divide its operators."""
    graph = traced(model, batch_dims=True).graph
    cluster = cluster_of(host("a", 2, memory=memory), host("b", 2, rate="2GFLOP/s", memory=memory), inside="10GB/s",
                         network="1GB/s", latency="10us")
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(
        batch=batch, microbatches=microbatches, dtype="float64", optimizer=Optimizer(kind="none")))
    folded = trace_folded(source_of(model), batch=graph.batch, backward="rule")
    return problem, find_splits(problem, folded, lambda folded_graph: estimate_costs(folded_graph, cluster))


def with_memory(problem: Problem, num_bytes: int) -> Problem:
    """Return the problem on devices with so much memory each."""
    devices = tuple(replace(device, memory_bytes=num_bytes) for device in problem.cluster.devices)
    cluster = replace(problem.cluster, devices=devices)
    return replace(problem, cluster=cluster, costs=estimate_costs(problem.graph, cluster))


def with_optimizer(problem: Problem, kind: str) -> Problem:
    return replace(problem, options=replace(problem.options, optimizer=Optimizer(kind=kind)))


def estimates_of(problem: Problem, splits: Splits | None = None) -> tuple[Estimator, list[Estimate]]:
    """Return the estimates of all settings, best first."""
    estimator = Estimator(Chain(problem, splits or {}))
    ranked, _ = rank_settings(estimator, budget=Budget(effort=float("inf")), progress=lambda text: None)
    return estimator, ranked


def replicated(problem: Problem, **options: Any) -> Setting:
    """Return data parallelism over all devices."""
    return Setting(layout=(StageMesh(tuple((device,) for device in problem.devices)),), **{"microbatches": 1, **options})


def staged(problem: Problem, **options: Any) -> Setting:
    """Return a pipeline with one stage on each device."""
    return Setting(layout=tuple(StageMesh(((device,),)) for device in problem.devices), **{"microbatches": 4, **options})


def data_parallel_s(problem: Problem) -> float:
    """Return the step time of even data parallelism with the best number of micro-batches."""
    times = []
    for microbatches in divisors(problem.options.batch):
        try:
            times.append(evaluate(STRATEGIES["data-parallel"](problem, microbatches), problem).step_time_s)
        except NoFeasiblePlan:
            continue
    return min(times, default=float("inf"))
