"""Deployments in which devices divide operators, as the sharding search says, for tests."""

from __future__ import annotations

from functools import cache

from tests.run.plans import source_of, traced
from tests.search.deploy.worlds import cluster_of, host
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.plan.plan import Optimizer
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.find_splits import find_splits
from weft.search.deploy.search import DeployOptions, make_deployers


@cache
def tensor_deployer(model: str, microbatches: int) -> Deployer:
    """Return the deployer of a model on two hosts, ``a0, a1`` and ``b0, b1``; the second is twice as fast."""
    graph = traced(model, batch_dims=True).graph
    cluster = cluster_of(host("a", 2), host("b", 2, rate="2GFLOP/s"), inside="10GB/s", network="1GB/s")
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(
        batch=2 * graph.batch, microbatches=microbatches, dtype="float64", optimizer=Optimizer(kind="none")))
    splits = find_splits(problem, trace_folded(source_of(model), batch=graph.batch, backward="rule"), lambda folded: estimate_costs(folded, cluster))
    return make_deployers(problem, DeployOptions(), splits)[0]


def action(deployer: Deployer, kind: str, *groups: int) -> int:
    """Return the number of the action of this kind on these device groups."""
    return next(index for index, item in enumerate(deployer.actions)
                if item.kind == kind and item.device_groups == groups)


def two_parts(deployer: Deployer, first: int, second: int) -> tuple[int, ...]:
    """Return the choice of one action for the first half of the groups, and another for the rest."""
    num_groups = deployer.groups.num_groups
    return (first,) * (num_groups // 2) + (second,) * (num_groups - num_groups // 2)
