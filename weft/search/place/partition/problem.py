"""Problems of the public dnn-partitioning benchmark (msr-fiddle/dnn-partitioning, NeurIPS 2020), read as they are.

A node takes ``cpu_s`` on a CPU and ``fpga_s`` on an accelerator (the benchmark says FPGA for any accelerator). What it
writes is ``cost_s`` away from any accelerator: from there to the host's memory, or from the host's memory to there.
Nodes of one colour class share a device. Memory limits accelerators only.

*Throughput*: the largest load is to be least. An accelerator's load is the time of its nodes, plus the cost of every
outside node that feeds it, plus the cost of every node inside that feeds something outside; a CPU's is its nodes' time.

*Latency*: CPUs are unlimited in number, and every accelerator runs one set of nodes, which starts when all it needs
is there and whose nodes all end together, after the set's load. The end of the last node is to be least.

``check_throughput`` and ``check_latency`` say what a split is worth by these definitions, and whether it is allowed.
They are plain and separate from the searches: every result goes through them. Devices are numbered as in
``PartitionProblem.device_names``; for latency the first CPU's number stands for all CPUs. A search returns a
``PartitionResult``: a checked split and how good it is known to be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from weft.base.errors import InputError, PlanError
from weft.base.files import MAX_PROBLEMS, decode, load_json
from weft.model.graph import F64, I64, topological
from weft.search.place.problem import Bools, Found

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
    def unit_size(self) -> F64:
        """Return [units] the bytes on an accelerator."""
        return np.bincount(self.unit_of_node, weights=self.size, minlength=self.num_units).astype(np.float64)

    @cached_property
    def order(self) -> I64:
        """Return the nodes so that sources come before targets; raise ``InputError`` where they are in a circle."""
        targets: list[list[int]] = [[] for _ in self.node_ids]
        for source, target in self.edges.tolist():
            targets[source].append(target)
        order = topological(targets, range(self.num_nodes))
        if len(order) < self.num_nodes:
            stuck = [self.node_ids[node] for node in sorted(set(range(self.num_nodes)) - set(order))]
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


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionResult(Found):
    """The best split found."""

    problem: PartitionProblem
    device: I64
    """[nodes] as in ``problem.device_names``; for latency the number after the accelerators stands for all CPUs."""
    figures: Split
    contiguous: bool = False

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the names of the devices; latency has one name for all CPUs."""
        if self.objective == "throughput":
            return self.problem.device_names
        return (*self.problem.device_names[: self.problem.num_accelerators], "cpu")

    def split(self) -> dict[str, Any]:
        """Return the split in the benchmark's own format."""
        problem, figures = self.problem, self.figures
        machines = []
        for index, _ in enumerate(self.device_names):
            nodes = [problem.node_ids[node] for node in range(problem.num_nodes) if self.device[node] == index]
            is_timed = self.objective == "throughput" or index < problem.num_accelerators
            machines.append({**({"load": float(figures.loads[index])} if is_timed else {}), "nodes": nodes})
        return {"maxLoad" if self.objective == "throughput" else "totalLatency": self.value,
                "fpgas": machines[: problem.num_accelerators], "cpus": machines[problem.num_accelerators :]}

    def to_json(self) -> dict[str, Any]:
        """Return the result object that ``weft place --format dnn-partitioning --json`` prints.

        ``starts`` and ``transfers`` say when things run in one request, so ``starts`` is empty for throughput;
        ``transfers`` is always empty, since the benchmark counts them among the loads.
        """
        problem, figures, names = self.problem, self.figures, self.device_names
        starts = {str(problem.node_ids[node]): [names[self.device[node]], float(figures.start_s[node]),
                                                float(figures.end_s[node])] for node in range(len(figures.start_s))}
        return {
            "status": self.status, "objective": self.objective, "value": self.value, "bound": self.bound,
            "placement": {str(problem.node_ids[node]): names[self.device[node]] for node in range(problem.num_nodes)},
            "starts": starts, "transfers": [],
            "peak_memory": {names[index]: float(used) for index, used in enumerate(figures.used)},
            "seconds": self.seconds, "split": self.split()}
