"""From a model to a plan of one sharded stage that runs: what ``weft shard --plan`` does."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cluster.cluster import Cluster
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import FoldedModel
from weft.model.trace import trace
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan
from weft.search.common.budget import Budget
from weft.search.common.problem import PlanOptions, Problem
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.named import named
from weft.search.shard.roles import find_roles
from weft.search.shard.tensor_costs import stage_times
from weft.search.shard.to_plan import sharded_plan


def search_plan(folded: FoldedModel, cluster: Cluster, *, shape: Sequence[int], limit_bytes: float | None = None,
                optimizer: Optimizer | None = None, name: str | None = None, budget: Budget | None = None) -> Plan:
    """Return the best sharding on a mesh of this shape as a checked plan (of those with ``name``, if given).

    Optimizer states and parameters are in no smaller pieces than they are used in: the runtime has no others yet.
    """
    optimizer = optimizer or Optimizer()
    source = folded.traced.source
    costs = estimate_costs(folded.traced.graph, cluster)
    mesh = Mesh(cluster, range(cluster.num_devices), shape, comm_fits=costs.comm_fits)
    search = MeshSearch(folded, costs, mesh, optimizer=optimizer, limit_bytes=limit_bytes,
                        budget=budget or Budget(effort=float("inf")), splits_states=False)
    restriction = None if name is None else named(name, find_roles(search.parts, folded), len(shape))
    found = search.run(restriction)
    full = trace(source, batch_dims=True).graph
    problem = Problem(graph=full, cluster=cluster, costs=estimate_costs(full, cluster),
                      options=PlanOptions(batch=source.batch, mode=source.mode, optimizer=optimizer,
                                          dtype=source.dtype or full.parameter_dtype,
                                          own_dtypes=source.dtype is None))
    plan = sharded_plan(problem, found, folded, stage_times(found, folded, full, costs))
    check_plan(plan, full, cluster)
    return plan
