"""Searches over dnn-partitioning problems, by either of the benchmark's objectives.

    from weft.search.place.partition import load_partition, solve_partition
    result = solve_partition(load_partition("bert24_inference.json"), objective="throughput")
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from weft.base.errors import InputError, NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import I64
from weft.search.common.budget import Budget, ended_by_ctrl_c
from weft.search.place.partition_check import check_latency, check_throughput
from weft.search.place.partition_problem import PartitionProblem, load_partition, parse_partition
from weft.search.place.partition_result import PartitionResult
from weft.search.place.problem import Objective

__all__ = ["load_partition", "solve_partition"]

PROVEN = 1e-6
"""Relative: a bound so close to the value is a proof; whole numbers are no finer."""
DEFAULT_EFFORT = 38.0
"""CPU seconds of a search, about, unless told otherwise."""


def solve_partition(problem: PartitionProblem, *, objective: Objective, contiguous: bool = False,
                    time_limit: float | None = None, seed: int = 0,
                    progress: Callable[[str], None] = lambda line: None) -> PartitionResult:
    """Return the best split found in about ``time_limit`` CPU seconds, checked, with a bound.

    ``contiguous`` is for throughput (each device's forward nodes are a convex set); sets are always so for latency.
    Raises ``NoFeasiblePlan`` where no split fits the memory.
    """
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"the time limit must be more than 0 seconds, not {time_limit}")
    begin = time.process_time()
    compile_searches(objective)
    budget = Budget(effort=DEFAULT_EFFORT if time_limit is None else time_limit, report=progress,
                    deadline=None if time_limit is None else time.monotonic() + time_limit)
    with ended_by_ctrl_c(budget):
        if objective == "throughput":
            device, bound = _throughput(problem, contiguous=contiguous, budget=budget, seed=seed)
            figures = check_throughput(problem, device, contiguous=contiguous)
        else:
            from weft.search.place.partition_latency_search import minimise_latency

            found = minimise_latency(problem, budget=budget, seed=seed)
            device, bound = _latency_devices(problem, found.where), found.bound
            figures = check_latency(problem, device)
    is_optimal = bound >= figures.value * (1 - PROVEN)
    return PartitionResult(problem=problem, objective=objective, device=device, figures=figures,
                           bound=min(bound, figures.value), status="optimal" if is_optimal else "feasible",
                           seconds=time.process_time() - begin, contiguous=contiguous,
                           is_interrupted=budget.is_interrupted)


def compile_searches(objective: Objective) -> None:
    """Compile what the search needs, or read it from the disk: that is not to count against its time."""
    value = {"maxSizePerFPGA": 1, "maxFPGAs": 1, "maxCPUs": 1, "edges": [{"sourceId": 0, "destId": 1, "cost": 1}],
             "nodes": [{"id": node, "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1} for node in range(2)]}
    tiny = parse_partition(value)
    if objective == "throughput":
        from weft.search.place.partition_throughput import load_problem
        from weft.search.place.throughput_search import warm_up

        warm_up(load_problem(tiny))
    else:
        from weft.search.place.partition_latency import block_orders, interval_sets, latency_graph
        from weft.search.place.partition_latency_kernel import Scratch
        from weft.search.place.partition_latency_kernel import anneal as anneal_sets
        from weft.search.place.partition_latency_search import minimise_latency
        from weft.search.place.partition_path import cover
        from weft.search.place.partition_path_kernel import longest_path
        from weft.search.place.partition_polish_kernel import polish

        minimise_latency(tiny, budget=Budget(effort=0.001), seed=0)
        graph = latency_graph(tiny)
        anneal_sets(graph, interval_sets(graph, block_orders(graph)[0]), 1, 1.0, 1.0, 0)
        polish(graph, cover(graph, longest_path(graph, graph.cpu_s)).where, Scratch.of(graph), 10)


def _throughput(problem: PartitionProblem, *, contiguous: bool, budget: Budget, seed: int) -> tuple[I64, float]:
    from weft.search.place.partition_throughput import load_problem
    from weft.search.place.throughput_search import NothingFits, minimise

    _check_possible(problem)
    found = minimise(load_problem(problem, contiguous=contiguous), budget=budget, seed=seed)
    if isinstance(found, NothingFits):
        raise _no_split(problem, contiguous=contiguous, is_proven=found.is_proven)
    return np.asarray(found.device[problem.unit_of_node]), found.bound


def _latency_devices(problem: PartitionProblem, where: I64) -> I64:
    """Return the device of each node from the set of each unit; sets are given to accelerators in order."""
    sets = where[problem.unit_of_node]
    order = [item for item in dict.fromkeys(sets[problem.order].tolist()) if item > 0]
    used = {item: index for index, item in enumerate(order)}
    return np.array([used.get(int(item), problem.num_accelerators) for item in sets], dtype=np.int64)


def _unit_nodes(problem: PartitionProblem, unit: int) -> str:
    ids = [str(problem.node_ids[node]) for node in np.flatnonzero(problem.unit_of_node == unit).tolist()]
    return ", ".join([*ids[:8], *(["..."] if len(ids) > 8 else [])])


def _check_possible(problem: PartitionProblem) -> None:
    """Raise ``NoFeasiblePlan`` where a class of nodes has no device at all."""
    if problem.num_cpus:
        return
    sizes = np.bincount(problem.unit_of_node, weights=problem.size, minlength=problem.num_units)
    for unit, size in enumerate(sizes.tolist()):
        nodes = np.flatnonzero(problem.unit_of_node == unit)
        if not problem.is_supported[nodes].all():
            raise NoFeasiblePlan(f"{problem.name}: node {_unit_nodes(problem, unit)} cannot run on an accelerator, and "
                                 "there is no CPU (maxCPUs is 0). Allow at least one CPU.")
        if size > problem.capacity * (1 + 1e-12):
            missing = int(np.ceil(size - problem.capacity))
            raise NoFeasiblePlan(
                f"{problem.name}: node {_unit_nodes(problem, unit)} needs {format_bytes(size)} on one accelerator, "
                f"which has {format_bytes(problem.capacity)}: {missing} bytes are missing, and there is no CPU "
                "(maxCPUs is 0). Try larger accelerators or a CPU.", missing_bytes=missing, device="fpga0")


def _no_split(problem: PartitionProblem, *, contiguous: bool, is_proven: bool) -> NoFeasiblePlan:
    """Return the error for memory that holds every class of nodes but not all of them."""
    sizes = np.bincount(problem.unit_of_node, weights=problem.size, minlength=problem.num_units)
    free = np.full(problem.num_accelerators, problem.capacity)
    left = []
    for unit in np.argsort(-sizes, kind="stable").tolist():
        index = int(np.argmax(free))
        if sizes[unit] <= free[index]:
            free[index] -= sizes[unit]
        else:
            left.append(unit)
    short = float(sum(sizes[unit] for unit in left))
    total = max(0.0, float(sizes.sum()) - problem.capacity * problem.num_accelerators)
    missing = int(np.ceil(total if total > 0 else max(short, 1.0)))
    which = "; ".join(_unit_nodes(problem, unit) for unit in left[:5])
    for_what = f", and there is no room for node {which}" if which else ""
    return NoFeasiblePlan(
        f"{problem.name}: the nodes need {format_bytes(float(sizes.sum()))}, and {problem.num_accelerators} "
        f"accelerators of {format_bytes(problem.capacity)} {'cannot' if is_proven else 'seem not to'} hold them"
        f"{' contiguously' if contiguous else ''}: {missing} bytes are missing{for_what}. Try more "
        "or larger accelerators, or a CPU.", missing_bytes=missing)
