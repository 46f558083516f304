"""Random dnn-partitioning problems, and their best values by trying everything, written plainly."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from weft.search.place.partition.problem import PartitionProblem, parse_partition


def random_value(rng: np.random.Generator, num_nodes: int, *, accelerators: int = 2, cpus: int = 1, classes: bool = True,
                 backward: bool = False, tight: bool = False) -> dict[str, Any]:
    """Return the value of a problem file; with ``tight``, memory holds about two thirds of the nodes."""
    nodes: list[dict[str, Any]] = []
    for index in range(num_nodes):
        fast = float(rng.integers(0, 8)) + float(rng.random()) * (rng.random() < 0.5)
        nodes.append({
            "id": 10 * index + 3, "name": f"n{index}", "supportedOnFpga": int(rng.random() < 0.9) if cpus else 1,
            "cpuLatency": fast * float(rng.choice([1.5, 3.0, 10.0])), "fpgaLatency": fast,
            "isBackwardNode": bool(backward and index >= num_nodes // 2), "size": float(rng.integers(0, 10))})
        if classes and rng.random() < 0.4:
            nodes[-1]["colorClass"] = int(rng.integers(3))
    costs = rng.integers(0, 5, size=num_nodes).astype(float)
    edges = [{"sourceId": nodes[source]["id"], "destId": nodes[target]["id"], "cost": costs[source], "size": 1.0}
             for source, target in itertools.combinations(range(num_nodes), 2) if rng.random() < 2.2 / num_nodes]
    total = sum(node["size"] for node in nodes)
    return {"maxSizePerFPGA": float(np.ceil(total / 3)) if tight else total, "maxFPGAs": accelerators, "maxCPUs": cpus,
            "nodes": nodes, "edges": edges}


def random_partition(rng: np.random.Generator, num_nodes: int, **options: Any) -> PartitionProblem:
    return parse_partition(random_value(rng, num_nodes, **options))


def plain_loads(problem: PartitionProblem, device: list[int]) -> list[float]:
    """Return the loads by the words of the definition."""
    loads = []
    edges = problem.edges.tolist()
    for index in range(problem.num_accelerators + max(1, problem.num_cpus)):
        inside = {node for node in range(problem.num_nodes) if device[node] == index}
        if index >= problem.num_accelerators:
            loads.append(sum(problem.cpu_s[node] for node in inside))
            continue
        feeding = {source for source, target in edges if source not in inside and target in inside}
        fed = {source for source, target in edges if source in inside and target not in inside}
        loads.append(sum(problem.fpga_s[node] for node in inside) + sum(problem.cost_s[node] for node in feeding | fed))
    return [float(load) for load in loads]


def is_allowed(problem: PartitionProblem, device: list[int]) -> bool:
    sizes = [0.0] * problem.num_accelerators
    for node, index in enumerate(device):
        if index < problem.num_accelerators:
            if not problem.is_supported[node]:
                return False
            sizes[index] += problem.size[node]
    return all(size <= problem.capacity for size in sizes)


def reachable(problem: PartitionProblem, *, forward_only: bool) -> list[set[int]]:
    """Return what can be reached from each node by one edge or more."""
    keep = [not (forward_only and problem.is_backward[node]) for node in range(problem.num_nodes)]
    found: list[set[int]] = [set() for _ in range(problem.num_nodes)]
    for source in reversed(problem.order.tolist()):
        for one, target in problem.edges.tolist():
            if one == source and keep[one] and keep[target]:
                found[source] |= {target} | found[target]
    return found


def is_convex(problem: PartitionProblem, device: list[int]) -> bool:
    below = reachable(problem, forward_only=True)
    return all(device[middle] == device[first] for first in range(problem.num_nodes) for last in below[first]
               if device[first] == device[last] for middle in below[first] if last in below[middle])


def plain_latency(problem: PartitionProblem, device: list[int]) -> float:
    """Return the latency, infinite where sets wait for each other, by relaxing until nothing changes."""
    count = problem.num_accelerators
    loads = plain_loads(problem, device)
    end = [0.0] * problem.num_nodes
    for _ in range(problem.num_nodes + 2):
        before = list(end)
        for node in range(problem.num_nodes):
            mates = [node] if device[node] >= count else [other for other in range(problem.num_nodes)
                                                          if device[other] == device[node]]
            ready = max((end[source] for source, target in problem.edges.tolist()
                         if target in mates and source not in mates), default=0.0)
            end[node] = ready + (problem.cpu_s[node] if device[node] >= count else loads[device[node]])
        if end == before:
            return float(max(end))
    return float("inf")


def has_circle(problem: PartitionProblem, device: list[int]) -> bool:
    count = problem.num_accelerators
    task = [device[node] if device[node] < count else count + node for node in range(problem.num_nodes)]
    follow = {(task[source], task[target]) for source, target in problem.edges.tolist() if task[source] != task[target]}
    left = set(task)
    while left:
        free = {item for item in left if not any(target == item and source in left for source, target in follow)}
        if not free:
            return True
        left -= free
    return False


def best_throughput(problem: PartitionProblem, *, contiguous: bool) -> float:
    best = float("inf")
    for choice in itertools.product(range(problem.num_accelerators + problem.num_cpus), repeat=problem.num_units):
        device = [choice[unit] for unit in problem.unit_of_node]
        if is_allowed(problem, device):
            value = max(plain_loads(problem, device))
            if value < best and (not contiguous or is_convex(problem, device)):
                best = value
    return best


def best_latency(problem: PartitionProblem) -> float:
    best = float("inf")
    for choice in itertools.product(range(problem.num_accelerators + 1), repeat=problem.num_units):
        device = [choice[unit] for unit in problem.unit_of_node]
        if is_allowed(problem, device) and not has_circle(problem, device):
            best = min(best, plain_latency(problem, device))
    return best
