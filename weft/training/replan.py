"""Plans made on the way into a run: for a cluster, or for the devices that are left of one.

Of the modules that a training script loads this is the only one that reaches for the planner: ``parallelize`` imports
it when it must plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.base.errors import ClusterError, InputError
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.model.source import ModelSource
from weft.plan.plan import Plan
from weft.planning.make import SearchOptions, search_plans
from weft.search.common.problem import PlanOptions


def plan_for(source: ModelSource, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the best plan that the planner finds for the model on the cluster."""
    best = search_plans(source, cluster, options, SearchOptions(try_example=False)).comparison.best
    assert best.plan is not None, "the search raises otherwise"
    return best.plan


def plan_again(plan: Plan, source: ModelSource, devices: Sequence[str], *, whole_parameters: bool = False) -> Plan:
    """Return a new plan for the same step on those devices of the old plan's cluster that are left.

    What only saves memory, states in pieces and recomputation, is done again where it is needed.
    """
    options = PlanOptions(batch=plan.model.batch, mode=plan.model.mode, dtype=plan.model.dtype, seed=plan.search.seed,
                          own_dtypes=source.dtype is None,
                          optimizer=replace(plan.optimizer, sharded=False), whole_parameters=whole_parameters)
    return plan_for(source, devices_left(cluster_of(plan), devices), options)


def cluster_of(plan: Plan) -> Cluster:
    """Return the cluster that a plan describes."""
    if plan.cluster.description is None:
        raise InputError("the plan does not describe its cluster, so it cannot be planned again: make it with "
                         "`weft plan`, or give a cluster")
    return parse_cluster(plan.cluster.description, where="the plan's cluster.description")


def devices_left(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return the cluster with only the devices named, in its own order, and the links among them and switches."""
    unknown = [name for name in names if name not in cluster.device_index]
    if unknown or not names:
        known = ", ".join(device.name for device in cluster.devices[:8])
        raise ClusterError(f"cluster {cluster.name!r} has no device {unknown[0]!r}: it has {known}" if unknown else
                           f"no devices are left: name some of {known}")
    devices = tuple(device for device in cluster.devices if device.name in names)
    gone = {device.name for device in cluster.devices} - set(names)
    links = tuple(link for link in cluster.links if not gone & {link.source, link.target})
    return replace(cluster, devices=devices, links=links)
