"""Small problems for tests of deployments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.worlds import chain_graph
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.plan.plan import Optimizer, Sharding
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.op_groups import OpGroups
from weft.search.shard.tensor_costs import TensorCosts


def host(name: str, count: int, *, rate: str = "1GFLOP/s", memory: str = "1GB") -> dict[str, Any]:
    """Return a host with devices of one kind, named after their rate."""
    return {"name": name, "devices": [{"name": f"{name}{index}", "kind": f"k{rate}"} for index in range(count)],
            "rate": rate, "memory": memory}


def cluster_of(*hosts: dict[str, Any], network: str = "1MB/s", inside: str = "10MB/s", latency: str = "1ms") -> Any:
    """Return a cluster: the devices of a host are joined by ``inside``, hosts by ``network``."""
    kinds = {item["devices"][0]["kind"]: {"flops": {"float32": item["rate"]}, "memory": item["memory"],
                                          "memory_bandwidth": "1TB/s"} for item in hosts}
    devices = [{**device, "host": item["name"]} for item in hosts for device in item["devices"]]
    links = []
    for item in hosts:
        for device in item["devices"]:
            for ends in ((device["name"], f"{item['name']}/x"), (f"{item['name']}/x", device["name"])):
                links.append({"from": ends[0], "to": ends[1], "bandwidth": inside, "latency": "10us"})
        for ends in ((f"{item['name']}/x", "net"), ("net", f"{item['name']}/x")):
            links.append({"from": ends[0], "to": ends[1], "bandwidth": network, "latency": latency})
    return parse_cluster({"format": "weft.cluster", "version": 1, "kinds": kinds, "devices": devices, "links": links,
                          "switches": ["net", *(f"{item['name']}/x" for item in hosts)]})


def problem_of(cluster: Any, *, num_ops: int = 6, batch: int = 8, microbatches: int | None = None,
               parameter_bytes: int = 4000, activation_bytes: int = 8000, flops: float = 1e7,
               **graph_options: Any) -> Problem:
    """Return a chain of operators on a cluster; sizes are for the whole batch."""
    graph = chain_graph(num_ops, parameter_bytes=parameter_bytes, activation_bytes=activation_bytes, flops=flops,
                        batch=batch, **graph_options)
    loss = graph.outputs[0] if graph.outputs else graph.num_tensors - 1
    dims = graph.tensor_batch_dim.copy()
    dims[loss] = -1
    graph = replace(graph, tensor_batch_dim=dims)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(batch=batch, microbatches=microbatches, optimizer=Optimizer(kind="sgd")))


def deployer_of(problem: Problem, *, microbatches: int = 1, **options: Any) -> Deployer:
    """Return a deployer in which every operator is a group of its own."""
    groups = OpGroups(graph=problem.graph, start=np.arange(problem.graph.num_ops + 1))
    return Deployer(problem, groups, microbatches, **options)


def even_splits(problem: Problem) -> dict[tuple[int, int], TensorCosts]:
    """Return splits in which the devices of each group divide every operator evenly, and exchange nothing."""
    graph, splits = problem.graph, {}
    for index, group in enumerate(problem.cluster.groups_by_host_and_kind()):
        if len(group) > 1:
            part = 1.0 / len(group)
            splits[index, len(group)] = TensorCosts(
                part=np.full((2, graph.num_ops), part), latency_s=np.zeros((2, graph.num_ops)),
                s_per_sample=np.zeros((2, graph.num_ops)), held_part=np.full(graph.num_tensors, part),
                saved_part=np.full(graph.num_ops, part), sharding=Sharding())
    return splits
