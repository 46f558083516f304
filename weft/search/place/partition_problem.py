"""Problems of the public dnn-partitioning benchmark (msr-fiddle/dnn-partitioning, NeurIPS 2020), read as they are.

A node takes ``cpu_s`` on a CPU and ``fpga_s`` on an accelerator (the benchmark says FPGA for any accelerator). What it
writes is ``cost_s`` away from any accelerator: from there to the host's memory, or from the host's memory to there.
Nodes of one colour class share a device. Memory limits accelerators only.

*Throughput*: the largest load is to be least. An accelerator's load is the time of its nodes, plus the cost of every
outside node that feeds it, plus the cost of every node inside that feeds something outside; a CPU's is its nodes' time.

*Latency*: CPUs are unlimited in number, and every accelerator runs one set of nodes, which starts when all it needs
is there and whose nodes all end together, after the set's load. The end of the last node is to be least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from weft.base.errors import InputError
from weft.base.files import MAX_PROBLEMS, decode, load_json
from weft.model.graph import F64, I64

Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

MAX_NODES: Final = 100_000
MAX_EDGES: Final = 1_000_000
MAX_DEVICES: Final = 1_024
LARGEST: Final = 1e30
"""Numbers above are refused: sums of them would overflow."""
SAME_COST: Final = 1e-6
"""Costs of one node's edges may differ by so much, as in the benchmark's own programs; the first counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionProblem:
    """See the module's docstring. ``n`` nodes in the file's order."""

    name: str
    node_ids: tuple[int, ...]
    num_accelerators: int
    num_cpus: int
    capacity: float
    """Bytes of one accelerator."""
    cpu_s: F64
    """[n]"""
    fpga_s: F64
    """[n]"""
    size: F64
    """[n] bytes on an accelerator."""
    is_supported: Bools
    """[n] may run on an accelerator."""
    is_backward: Bools
    """[n]"""
    cost_s: F64
    """[n] of the node's output; 0 where nothing reads it."""
    edges: I64
    """[e, 2] (source, target), each once, by index."""
    unit_of_node: I64
    """[n] nodes with the same number (0 and up, all used) share a device."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.node_ids)

    @property
    def num_units(self) -> int:
        """Return the number of sets of nodes that share a device."""
        return int(self.unit_of_node.max(initial=-1)) + 1

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return ``fpga0``, ``fpga1``, ... and ``cpu0``, ..."""
        return (*(f"fpga{index}" for index in range(self.num_accelerators)),
                *(f"cpu{index}" for index in range(self.num_cpus)))

    @cached_property
    def order(self) -> I64:
        """Return the nodes so that sources come before targets; raise ``InputError`` where they are in a circle."""
        return topological_order(self.num_nodes, self.edges, self.node_ids)


def topological_order(count: int, edges: I64, ids: tuple[int, ...]) -> I64:
    """Return the nodes so that sources come before targets, as near to the given order as possible."""
    import heapq

    targets: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for source, target in edges.tolist():
        targets[source].append(target)
        waits[target] += 1
    ready = [node for node in range(count) if not waits[node]]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in targets[node]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, target)
    if len(order) < count:
        stuck = [ids[node] for node in range(count) if waits[node]]
        raise InputError(f"edges go in a circle through some of the nodes {_some(stuck)}: only the throughput "
                         "objective without --contiguous can do with that")
    return np.array(order, dtype=np.int64)


def _some(ids: Iterable[int], limit: int = 10) -> str:
    listed = [str(item) for item in ids]
    return ", ".join([*listed[:limit], *(["..."] if len(listed) > limit else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: int
    supportedOnFpga: bool | int  # noqa: N815 - the file's spelling
    cpuLatency: float  # noqa: N815
    fpgaLatency: float  # noqa: N815
    isBackwardNode: bool | int = 0  # noqa: N815
    colorClass: int | None = None  # noqa: N815
    size: float = 0.0
    name: Any = None
    layerId: Any = None  # noqa: N815


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    sourceId: int  # noqa: N815
    destId: int  # noqa: N815
    cost: float
    size: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    maxSizePerFPGA: float  # noqa: N815
    maxFPGAs: int  # noqa: N815
    maxCPUs: int  # noqa: N815
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]
    name: Any = None


def load_partition(path: str | PathLike[str]) -> PartitionProblem:
    """Return the problem in the file (``.json`` or ``.json.gz``)."""
    name = Path(path).name.removesuffix(".gz").removesuffix(".json")
    return parse_partition(load_json(path), name=name, where=str(path))


def parse_partition(value: Any, *, name: str = "problem", where: str = "problem") -> PartitionProblem:
    """Return the problem in the plain JSON value; raise ``InputError`` that lists everything wrong with it."""
    for key, limit in (("nodes", MAX_NODES), ("edges", MAX_EDGES)):
        items = value.get(key) if isinstance(value, dict) else None
        if isinstance(items, list) and len(items) > limit:
            raise InputError(f"{where}: {key} has {len(items)} items, more than {limit}")
    file = decode(_File, value, where=where)
    problems = [*_top_problems(file), *_node_problems(file), *_edge_problems(file)]
    if problems:
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise InputError(f"{where}: " + "; ".join([*problems[:MAX_PROBLEMS], *more]))
    return _resolve(file, name)


def _top_problems(file: _File) -> list[str]:
    problems = _size_problems("maxSizePerFPGA", file.maxSizePerFPGA)
    for key, count in (("maxFPGAs", file.maxFPGAs), ("maxCPUs", file.maxCPUs)):
        if not 0 <= count <= MAX_DEVICES:
            problems.append(f"{key} must be between 0 and {MAX_DEVICES}, not {count}")
    if file.maxFPGAs == file.maxCPUs == 0:
        problems.append("maxFPGAs and maxCPUs are both 0: there is no device")
    return problems


def _node_problems(file: _File) -> list[str]:
    problems = [] if file.nodes else ["nodes is empty: give at least one node"]
    seen: set[int] = set()
    for index, node in enumerate(file.nodes):
        where = f"nodes[{index}]"
        if node.id in seen:
            problems.append(f"{where}.id is there twice: {node.id}")
        seen.add(node.id)
        for key in ("supportedOnFpga", "isBackwardNode"):
            if getattr(node, key) not in (0, 1):
                problems.append(f"{where}.{key} must be true, false, 0 or 1, not {getattr(node, key)}")
        for key in ("cpuLatency", "fpgaLatency", "size"):
            problems += _size_problems(f"{where}.{key}", getattr(node, key))
    return problems


def _edge_problems(file: _File) -> list[str]:
    problems = []
    known = {node.id for node in file.nodes}
    costs: dict[int, float] = {}
    for index, edge in enumerate(file.edges):
        where = f"edges[{index}]"
        problems += [f"{where}.{key} names no node: {item}" for key, item in
                     (("sourceId", edge.sourceId), ("destId", edge.destId)) if item not in known]
        problems += _size_problems(f"{where}.cost", edge.cost)
        if edge.sourceId == edge.destId:
            problems.append(f"{where} goes from node {edge.sourceId} to itself")
        first = costs.setdefault(edge.sourceId, edge.cost)
        if abs(first - edge.cost) > SAME_COST:
            problems.append(f"{where}.cost is {edge.cost}, but an earlier edge of node {edge.sourceId} has {first}: "
                            "all edges out of a node cost the same")
    return problems


def _size_problems(where: str, value: float) -> list[str]:
    return [] if 0 <= value <= LARGEST else [f"{where} must be between 0 and {LARGEST:g}, not {value}"]


def _resolve(file: _File, name: str) -> PartitionProblem:
    index = {node.id: position for position, node in enumerate(file.nodes)}
    cost_s = np.zeros(len(index))
    edges: dict[tuple[int, int], None] = {}
    for edge in reversed(file.edges):
        cost_s[index[edge.sourceId]] = edge.cost
    for edge in file.edges:
        edges[index[edge.sourceId], index[edge.destId]] = None
    units: dict[tuple[str, int], int] = {}
    unit_of_node = [units.setdefault(("node", position) if node.colorClass is None else ("class", node.colorClass),
                                     len(units)) for position, node in enumerate(file.nodes)]
    return PartitionProblem(
        name=name, node_ids=tuple(index), num_accelerators=file.maxFPGAs, num_cpus=file.maxCPUs,
        capacity=file.maxSizePerFPGA, cpu_s=np.array([node.cpuLatency for node in file.nodes], dtype=np.float64),
        fpga_s=np.array([node.fpgaLatency for node in file.nodes], dtype=np.float64),
        size=np.array([node.size for node in file.nodes], dtype=np.float64),
        is_supported=np.array([bool(node.supportedOnFpga) for node in file.nodes], dtype=np.bool_),
        is_backward=np.array([bool(node.isBackwardNode) for node in file.nodes], dtype=np.bool_),
        cost_s=cost_s, edges=np.array(list(edges), dtype=np.int64).reshape(-1, 2),
        unit_of_node=np.array(unit_of_node, dtype=np.int64))
