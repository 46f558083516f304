"""The throughput objective of dnn-partitioning problems: the least largest load."""

from __future__ import annotations

import numpy as np

from weft.base.errors import InputError
from weft.model.graph import I64
from weft.search.place.partition_problem import PartitionProblem
from weft.search.place.throughput_model import LoadProblem, Loads, csr, with_tensors


def load_problem(problem: PartitionProblem, *, contiguous: bool = False) -> LoadProblem:
    """Return the problem as loads: accelerators first, then CPUs; a unit for each colour class."""
    num_accelerators, num_cpus = problem.num_accelerators, problem.num_cpus
    count = num_accelerators + num_cpus
    is_cpu = np.arange(count) >= num_accelerators
    node_s = np.where(is_cpu[None, :], problem.cpu_s[:, None],
                      np.where(problem.is_supported, problem.fpga_s, np.inf)[:, None])
    unit = problem.unit_of_node
    time_s = np.zeros((problem.num_units, count))
    np.add.at(time_s, unit, node_s)
    size = np.bincount(unit, weights=problem.size, minlength=problem.num_units).astype(np.float64)
    targets: list[set[int]] = [set() for _ in range(problem.num_nodes)]
    for source, target in problem.edges.tolist():
        targets[source].add(int(unit[target]))
    kept = [node for node in range(problem.num_nodes) if targets[node] - {int(unit[node])} and problem.cost_s[node] > 0]
    node_unit, source_start, sources = _forward(problem, contiguous=contiguous)
    units = np.arange(problem.num_units, dtype=np.int64)
    empty = np.zeros(0, dtype=np.int64)
    arrays = Loads(
        time_s=time_s, core=np.arange(count, dtype=np.int64), num_cores=count, owner=empty, reader_start=empty,
        readers=empty, touch_s=np.where(is_cpu[None, :], 0.0, problem.cost_s[kept][:, None]), own_start=empty,
        owned=empty, read_start=empty, reads=empty, latency_s=np.zeros((count, count)),
        s_per_byte=np.zeros((count, count)), tensor_bytes=np.zeros(len(kept)),
        given_row=np.full(len(kept), -1, dtype=np.int64), given_s=np.zeros((0, count, count)),
        resource_start=np.zeros(count * count + 1, dtype=np.int64), resources=empty, num_resources=0,
        item_start=np.arange(problem.num_units + 1, dtype=np.int64), items=units, item_bytes=size,
        capacity=np.where(is_cpu, np.inf, problem.capacity), node_unit=node_unit, source_start=source_start,
        sources=sources)
    arrays = with_tensors(arrays, unit[kept], [sorted(targets[node] - {int(unit[node])}) for node in kept])
    first = {int(group): problem.node_ids[node] for node, group in reversed(list(enumerate(unit)))}
    return LoadProblem(arrays=arrays, unit_names=tuple(str(first[index]) for index in range(problem.num_units)),
                       device_names=problem.device_names, class_of_device=is_cpu.astype(np.int64),
                       contiguous=contiguous)


def _forward(problem: PartitionProblem, *, contiguous: bool) -> tuple[I64, I64, I64]:
    """Return the units and sources of the forward nodes, in topological order.

    Edges in a circle are an error only where contiguity is asked for; else the file's order does.
    """
    try:
        order = [node for node in problem.order.tolist() if not problem.is_backward[node]]
    except InputError:
        if contiguous:
            raise
        return problem.unit_of_node, np.zeros(problem.num_nodes + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    position = {node: index for index, node in enumerate(order)}
    sources: list[list[int]] = [[] for _ in order]
    for source, target in problem.edges.tolist():
        if source in position and target in position:
            sources[position[target]].append(position[source])
    start, items = csr(sources)
    return problem.unit_of_node[order].astype(np.int64), start, items
