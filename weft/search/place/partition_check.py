"""What a split of a dnn-partitioning problem is worth, by the benchmark's definitions, and whether it is allowed.

Plain and separate from the searches: every result goes through it. Devices are numbered as in
``PartitionProblem.device_names``; for latency the first CPU's number stands for all CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import F64, I64
from weft.search.place.partition_problem import PartitionProblem

SLACK = 1e-12
"""Relative: memory sums may be off by so much."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """The figures of a split."""

    value: float
    """The largest load, or when the last node ends."""
    loads: F64
    """[accelerators, then CPUs]"""
    used: F64
    """[accelerators] bytes."""
    start_s: F64
    """[nodes] for latency; all nodes of a set start with it. Empty for throughput."""
    end_s: F64
    """[nodes] for latency."""


def check_throughput(problem: PartitionProblem, device: I64, *, contiguous: bool = False) -> Split:
    """Return the figures of the split for throughput; raise ``PlanError`` where it is not allowed."""
    used = _check_devices(problem, device)
    loads = _loads(problem, device)
    if contiguous:
        for index, name in enumerate(problem.device_names):
            if not _is_contiguous(problem, device == index):
                raise PlanError(f"split of {problem.name!r}: the forward nodes on {name!r} are not contiguous")
    none = np.zeros(0)
    return Split(value=float(loads.max(initial=0.0)), loads=loads, used=used, start_s=none, end_s=none)


def check_latency(problem: PartitionProblem, device: I64) -> Split:
    """Return the figures of the split for latency; raise ``PlanError`` where it is not allowed."""
    used = _check_devices(problem, device)
    loads = _loads(problem, device)
    count = problem.num_accelerators
    sources: dict[int, set[int]] = {}
    tasks = [int(device[node]) if device[node] < count else count + node for node in range(problem.num_nodes)]
    for task in tasks:
        sources.setdefault(task, set())
    for source, target in problem.edges.tolist():
        if tasks[source] != tasks[target]:
            sources[tasks[target]].add(tasks[source])
    end: dict[int, float] = {}
    waiting = sorted(sources)
    while waiting:
        ready = [task for task in waiting if all(source in end for source in sources[task])]
        if not ready:
            raise PlanError(f"split of {problem.name!r}: sets wait for each other, so none can start")
        for task in ready:
            begin = max((end[source] for source in sources[task]), default=0.0)
            end[task] = begin + float(loads[task] if task < count else problem.cpu_s[task - count])
        waiting = [task for task in waiting if task not in end]
    end_s = np.array([end[task] for task in tasks])
    took = np.array([loads[task] if task < count else problem.cpu_s[task - count] for task in tasks])
    return Split(value=float(end_s.max(initial=0.0)), loads=loads, used=used, start_s=end_s - took, end_s=end_s)


def _check_devices(problem: PartitionProblem, device: I64) -> F64:
    """Return the bytes on every accelerator, after checking devices, colour classes and memory."""
    names = problem.device_names
    first: dict[int, int] = {}
    for node, unit in enumerate(problem.unit_of_node.tolist()):
        other = first.setdefault(unit, node)
        if device[node] != device[other]:
            raise PlanError(f"split of {problem.name!r}: nodes {problem.node_ids[other]} and {problem.node_ids[node]} "
                            "are of one colour class but on different devices")
    on_accelerator = device < problem.num_accelerators
    bad = np.flatnonzero(on_accelerator & ~problem.is_supported)
    if len(bad):
        raise PlanError(f"split of {problem.name!r}: node {problem.node_ids[bad[0]]} cannot run on an accelerator")
    used = np.bincount(device[on_accelerator], weights=problem.size[on_accelerator],
                       minlength=problem.num_accelerators).astype(np.float64)
    for index in np.flatnonzero(used > problem.capacity * (1 + SLACK)):
        raise PlanError(f"split of {problem.name!r}: {names[index]!r} holds {used[index]:.0f} bytes but has "
                        f"{problem.capacity:.0f}")
    return used


def _loads(problem: PartitionProblem, device: I64) -> F64:
    count = max(problem.num_accelerators + problem.num_cpus, int(device.max(initial=0)) + 1)
    is_cpu = device >= problem.num_accelerators
    loads = np.bincount(device, weights=np.where(is_cpu, problem.cpu_s, problem.fpga_s), minlength=count)
    paid = set()
    for source, target in problem.edges.tolist():
        if device[source] != device[target]:
            paid |= {(source, int(device[source])), (source, int(device[target]))}
    for node, where in sorted(paid):
        if where < problem.num_accelerators:
            loads[where] += problem.cost_s[node]
    return np.asarray(loads, dtype=np.float64)


def _is_contiguous(problem: PartitionProblem, inside: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> bool:
    """Return whether no path of forward nodes leaves the set and comes back."""
    sources: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    for source, target in problem.edges.tolist():
        if not problem.is_backward[source] and not problem.is_backward[target]:
            sources[target].append(source)
    left = np.zeros(problem.num_nodes, dtype=np.bool_)
    for node in problem.order.tolist():
        if inside[node] and left[sources[node]].any():
            return False
        left[node] = not inside[node] and (left[sources[node]].any() or inside[sources[node]].any())
    return True
