"""The placement problem as arrays: operators with times on each device, tensors with transfer times, memory.

*Latency* (one request): every operator runs on one device, one at a time per device; a tensor that is read on another
device is sent there once, in its transfer time, and occupies what the cluster's contention says (links, ports or
nothing) for as long. An operator starts when all it reads is there. The value is when the last operator ends.

*Throughput* (a stream of requests): the value is the largest load, of any device (its operators' times) or of anything
that transfers occupy (the times of the transfers over it): the time per sample of a full pipeline.

Both: an operator may only run where its time is finite; operators of one *unit* share a device; what operators keep
resident (``weights``, each counted once per device) fits the device's memory, with the tensors alive there at the same
time where the graph gives lifetimes (``has_lifetimes``).

``problem_from_graph`` makes the problem from a graph, a cluster and costs. All compiled code works on these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from weft.base.errors import ClusterError, InputError, ModelError
from weft.cluster.cluster import Cluster, Contention, DeviceId
from weft.cost.costs import Costs
from weft.cost.pair_times import PairTimes, check_pairs
from weft.model.graph import F64, I64, Graph, TensorRole

Objective = Literal["latency", "throughput"]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_PROBE_BYTES = 1e9
"""Transfer times are affine in the bytes; they are found from the times of none and of so many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlaceProblem:
    """See the module's docstring. ``n`` operators in topological order, ``m`` devices, ``t`` tensors."""

    name: str
    op_names: tuple[str, ...]
    device_names: tuple[str, ...]
    time_s: F64
    """[n, m] seconds of an operator on a device, infinite where it may not run."""
    unit_of_op: I64
    """[n] operators with the same number (0 and up, all used) share a device."""
    capacity: F64
    """[m] bytes of memory, infinite where unlimited."""
    weight_start: I64
    """[n + 1] operator ``i`` keeps ``weights[weight_start[i]:weight_start[i + 1]]`` resident."""
    weights: I64
    weight_bytes: F64
    """[weights] counted once on each device that has an operator with it."""
    producer: I64
    """[t] the operator that writes the tensor."""
    input_start: I64
    """[n + 1] operator ``i`` reads the tensors ``inputs[input_start[i]:input_start[i + 1]]``, each once."""
    inputs: I64
    tensor_bytes: F64
    """[t] size, for memory and transfers."""
    latency_s: F64
    """[m, m] seconds to send nothing; infinite where there is no way."""
    s_per_byte: F64
    """[m, m] seconds per byte on top."""
    given_row: I64
    """[t] row of ``given_s`` with the tensor's transfer times, or -1: by its bytes."""
    given_s: F64
    """[rows, m, m]"""
    resource_start: I64
    """[m * m + 1] with ``p = i * m + j``, a transfer from ``i`` to ``j`` occupies ``resources`` from
    ``resource_start[p]`` up to ``resource_start[p + 1]``."""
    resources: I64
    resource_names: tuple[str, ...]
    core_of_device: I64
    """[m] devices with the same number share a processing unit: one operator at a time for all of them."""
    has_lifetimes: bool = False
    """Tensors take memory from when they are written or received until their last reader or transfer there ends."""
    op_modules: tuple[str, ...] = ()
    """Path of the module that owns the operator, for rules that place whole layers; empty if unknown."""

    @property
    def num_ops(self) -> int:
        """Return the number of operators."""
        return len(self.op_names)

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.device_names)

    @property
    def num_tensors(self) -> int:
        """Return the number of tensors."""
        return len(self.producer)

    @property
    def num_units(self) -> int:
        """Return the number of sets of operators that share a device."""
        return int(self.unit_of_op.max(initial=-1)) + 1

    @property
    def num_resources(self) -> int:
        """Return the number of things that transfers occupy."""
        return len(self.resource_names)

    def transfer_s(self, tensor: int, source: int, target: int) -> float:
        """Return the seconds to send a tensor; zero from a device to itself."""
        if source == target:
            return 0.0
        row = self.given_row[tensor]
        if row >= 0:
            return float(self.given_s[row, source, target])
        return float(self.latency_s[source, target] + self.s_per_byte[source, target] * self.tensor_bytes[tensor])

    def transfers_of(self, tensor: int) -> F64:
        """Return [m, m] the transfer times of one tensor, zero on the diagonal."""
        row = self.given_row[tensor]
        table = self.given_s[row].copy() if row >= 0 else self.latency_s + self.s_per_byte * self.tensor_bytes[tensor]
        np.fill_diagonal(table, 0.0)
        return np.asarray(table, dtype=np.float64)

    @cached_property
    def transfer_table(self) -> F64:
        """Return all transfer times, [t, m, m]. For small problems: it is large."""
        tables = [self.transfers_of(tensor) for tensor in range(self.num_tensors)]
        return np.array(tables).reshape(-1, self.num_devices, self.num_devices)

    def inputs_of(self, op: int) -> I64:
        """Return the tensors that the operator reads."""
        return self.inputs[self.input_start[op] : self.input_start[op + 1]]

    def weights_of(self, op: int) -> I64:
        """Return what the operator keeps resident."""
        return self.weights[self.weight_start[op] : self.weight_start[op + 1]]

    def ways(self, source: int, target: int) -> I64:
        """Return the resources that a transfer between the devices occupies."""
        pair = source * self.num_devices + target
        return self.resources[self.resource_start[pair] : self.resource_start[pair + 1]]

    @cached_property
    def readers(self) -> tuple[I64, I64]:
        """Return (start, ops): tensor ``t`` is read by ``ops[start[t]:start[t + 1]]``, in ascending order."""
        return inverse(self.input_start, self.inputs, self.num_tensors)

    def readers_of(self, tensor: int) -> list[int]:
        """Return the operators that read the tensor, in ascending order."""
        start, ops = self.readers
        found: list[int] = ops[start[tensor] : start[tensor + 1]].tolist()
        return found

    @cached_property
    def edges(self) -> I64:
        """Return all (producer, reader, tensor) rows in the readers' order."""
        owner = np.repeat(np.arange(self.num_ops, dtype=np.int64), np.diff(self.input_start))
        return np.stack([self.producer[self.inputs], owner, self.inputs], axis=1).astype(np.int64)

    @cached_property
    def is_allowed(self) -> Bools:
        """Return [units, m]: all operators of the unit may run on the device."""
        allowed = np.ones((self.num_units, self.num_devices), dtype=np.bool_)
        np.logical_and.at(allowed, self.unit_of_op, np.isfinite(self.time_s))
        return allowed

    @cached_property
    def first_op(self) -> I64:
        """Return [units] the first operator of each unit."""
        return np.unique(self.unit_of_op, return_index=True)[1].astype(np.int64)

    @cached_property
    def unit_weights(self) -> list[list[int]]:
        """Return what each unit keeps resident, in ascending order."""
        lists: list[set[int]] = [set() for _ in range(self.num_units)]
        for op, unit in enumerate(self.unit_of_op.tolist()):
            lists[unit].update(self.weights_of(op).tolist())
        return [sorted(items) for items in lists]

    @cached_property
    def weight_users(self) -> list[list[int]]:
        """Return the units that keep each weight, in ascending order."""
        users: list[list[int]] = [[] for _ in self.weight_bytes]
        for unit, items in enumerate(self.unit_weights):
            for weight in items:
                users[weight].append(unit)
        return users

    @property
    def is_tight(self) -> bool:
        """Return whether there may be placements that do not fit."""
        held = float(self.weight_bytes.sum()) + (float(self.tensor_bytes.sum()) if self.has_lifetimes else 0.0)
        return bool((self.capacity < held).any())

    def work_bound(self) -> float:
        """Return what neither latency nor the largest load can beat: all devices busy, nothing sent."""
        return float(self.time_s.min(axis=1, initial=np.inf).sum()) / max(1, self.num_devices)

    def resident_bytes(self, device: I64) -> F64:
        """Return [m] the bytes that a placement (device of each operator) keeps resident on every device."""
        owner = np.repeat(device, np.diff(self.weight_start))
        held = np.zeros((self.num_devices, len(self.weight_bytes)), dtype=np.bool_)
        held[owner, self.weights] = True
        return np.asarray(held @ self.weight_bytes, dtype=np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best that a search found, with a bound."""

    objective: Objective
    value: float
    """The latency, or the largest load."""
    bound: float
    """No other has a smaller value."""
    status: Literal["optimal", "feasible"]
    seconds: float
    """CPU seconds of the search."""
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""

    @property
    def gap(self) -> float:
        """Return how far the value may be above the best, as a part of the value."""
        return 0.0 if self.value <= 0 else max(0.0, (self.value - self.bound) / self.value)


def csr(lists: Sequence[Sequence[int]]) -> tuple[I64, I64]:
    """Return (start, items) of the lists, one after another: list ``i`` is ``items[start[i]:start[i + 1]]``."""
    start = np.cumsum([0] + [len(items) for items in lists]).astype(np.int64)
    return start, np.array([item for items in lists for item in items], dtype=np.int64)


def inverse(start: I64, items: I64, count: int) -> tuple[I64, I64]:
    """Return (start, lists) of those lists in which each of ``count`` items stands, in ascending order."""
    owner = np.repeat(np.arange(len(start) - 1, dtype=np.int64), np.diff(start))
    order = np.argsort(items, kind="stable")
    return starts_of(items, count), owner[order].astype(np.int64)


def starts_of(group: I64, count: int) -> I64:
    """Return [count + 1] where each group begins, when items are sorted by their groups."""
    return np.concatenate(([0], np.cumsum(np.bincount(group, minlength=count)))).astype(np.int64)


class Rows:
    """The inequalities ``A v <= b`` of a linear program, row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = []

    def add(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        """Add a row: (variable, factor) for each of its terms."""
        for column, value in terms:
            self.rows.append(len(self.limits))
            self.columns.append(column)
            self.values.append(value)
        self.limits.append(limit)

    def matrix(self, num_variables: int) -> Any:
        """Return A as a sparse matrix."""
        from scipy.sparse import csr_array

        return csr_array((self.values, (self.rows, self.columns)), shape=(len(self.limits), num_variables))


def problem_from_graph(graph: Graph, cluster: Cluster, costs: Costs) -> PlaceProblem:
    """Return the placement problem of the graph on the cluster; raise an input error where it cannot be stated.

    Constants that any device can compute for itself (``Graph.is_constant``) stay operators of the problem: coarsening
    removes them.
    """
    check_pairs(cluster, "placement", "place on a part of them, or use `weft plan`")
    time_s = costs.op_seconds("F")[:, list(costs.column_of_device)].copy()
    _forbid(graph, cluster, time_s)
    keep = np.flatnonzero(graph.tensor_producer >= 0)
    new_id = np.full(graph.num_tensors, -1, dtype=np.int64)
    new_id[keep] = np.arange(len(keep))
    reads = [list(dict.fromkeys(int(new_id[tensor]) for tensor in graph.op_inputs(op) if new_id[tensor] >= 0))
             for op in range(graph.num_ops)]
    given_row, given_s = _given_transfers(graph, cluster, costs, keep)
    input_start, inputs = csr(reads)
    latency_s, s_per_byte = _pair_costs(cluster, costs, is_needed=bool((given_row[inputs] < 0).any()))
    resource_start, resources = _resources(cluster, latency_s)
    weight_start, weights, weight_bytes = _weights(graph)
    cores: dict[str, int] = {}
    return PlaceProblem(
        name=graph.name, op_names=graph.op_names, device_names=tuple(device.name for device in cluster.devices),
        time_s=time_s, unit_of_op=_units(graph),
        capacity=np.array([np.inf if device.memory_bytes is None else device.memory_bytes
                           for device in cluster.devices], dtype=np.float64),
        weight_start=weight_start, weights=weights, weight_bytes=weight_bytes,
        producer=graph.tensor_producer[keep].astype(np.int64),
        input_start=input_start, inputs=inputs, tensor_bytes=graph.tensor_bytes[keep].astype(np.float64),
        latency_s=latency_s, s_per_byte=s_per_byte, given_row=given_row, given_s=given_s,
        resource_start=resource_start, resources=resources, resource_names=_resource_names(cluster),
        core_of_device=np.array([cores.setdefault(device.unit if device.unit is not None else f"/{index}", len(cores))
                                 for index, device in enumerate(cluster.devices)], dtype=np.int64),
        has_lifetimes=graph.given is None, op_modules=graph.op_modules)


def _forbid(graph: Graph, cluster: Cluster, time_s: F64) -> None:
    """Set times to infinite where the graph file's ``on`` does not allow the device's kind or name."""
    allowed = graph.given.allowed_kinds if graph.given is not None else (None,) * graph.num_ops
    for op, kinds in enumerate(allowed):
        if kinds is not None:
            for index, device in enumerate(cluster.devices):
                if device.kind not in kinds and device.name not in kinds:
                    time_s[op, index] = np.inf
        if not np.isfinite(time_s[op]).any():
            raise ModelError(f"operator {graph.op_names[op]!r} can run on no device of cluster {cluster.name!r}: it "
                             f"allows {', '.join(kinds or ()) or 'none'}, and the devices are of the kinds "
                             f"{', '.join(sorted({device.kind for device in cluster.devices}))}")


def _units(graph: Graph) -> I64:
    """Return the number of the set of operators that each operator shares a device with."""
    colocate = graph.given.colocate if graph.given is not None else (None,) * graph.num_ops
    ids: dict[tuple[str, str | int], int] = {}
    return np.array([ids.setdefault(("text", text) if text is not None else ("op", op), len(ids))
                     for op, text in enumerate(colocate)], dtype=np.int64)


def _weights(graph: Graph) -> tuple[I64, I64, F64]:
    """Return what operators keep resident: given amounts one per operator, else parameters and buffers."""
    if graph.given is not None and not len(graph.parameters):
        count = graph.num_ops
        return (np.arange(count + 1, dtype=np.int64), np.arange(count, dtype=np.int64),
                np.array(graph.given.memory_bytes, dtype=np.float64))
    is_kept = np.isin(graph.tensor_role, (TensorRole.PARAMETER, TensorRole.BUFFER))
    root = graph.memory_root
    lists = [sorted({int(root[tensor]) for tensor in graph.op_inputs(op) if is_kept[root[tensor]]})
             for op in range(graph.num_ops)]
    start, kept = csr(lists)
    used, weights = np.unique(kept, return_inverse=True)
    return start, weights.astype(np.int64), graph.tensor_bytes[used].astype(np.float64)


def _given_transfers(graph: Graph, cluster: Cluster, costs: Costs, keep: I64) -> tuple[I64, F64]:
    """Return each tensor's row (or -1) and the rows of given transfer times; equal rows are stored once."""
    num_devices = cluster.num_devices
    row_of = np.full(len(keep), -1, dtype=np.int64)
    rows: dict[bytes, int] = {}
    tables: list[F64] = []
    for index, tensor in enumerate(keep):
        if graph.given is None or graph.given.transfer_times[tensor] is None:
            continue
        table = _seconds_table(partial(_tensor_seconds, costs, int(tensor)), num_devices)
        row_of[index] = rows.setdefault(table.tobytes(), len(rows))
        if len(rows) > len(tables):
            tables.append(table)
    return row_of, np.array(tables, dtype=np.float64).reshape(len(tables), num_devices, num_devices)


def _tensor_seconds(costs: Costs, tensor: int, source: int, target: int) -> float:
    return costs.tensor_transfer(tensor, source, target).seconds


def _seconds_table(seconds: Callable[[int, int], float], count: int) -> F64:
    """Return the seconds of a transfer between every pair of devices; infinite where there is no way."""
    table = np.zeros((count, count))
    for source in range(count):
        for target in range(count):
            if source != target:
                try:
                    table[source, target] = seconds(source, target)
                except ClusterError:
                    table[source, target] = np.inf
    return table


def _pair_costs(cluster: Cluster, costs: Costs, *, is_needed: bool) -> tuple[F64, F64]:
    """Return latency and seconds per byte of every pair of devices; infinite where there is no way."""
    count = cluster.num_devices
    times = PairTimes(costs, (0.0, _PROBE_BYTES))
    latency_s = _seconds_table(lambda source, target: times.seconds(source, target)[0], count)
    many_s = _seconds_table(lambda source, target: times.seconds(source, target)[1], count)
    has_way = np.isfinite(latency_s)
    if is_needed and count > 1 and not has_way[~np.eye(count, dtype=np.bool_)].any():
        costs.transfer(0.0, count - 1, count - 2)  # raises what there is to say
    return latency_s, np.subtract(many_s, latency_s, out=np.zeros_like(many_s), where=has_way) / _PROBE_BYTES


def _resources(cluster: Cluster, latency_s: F64) -> tuple[I64, I64]:
    """Return what a transfer of each ordered pair of devices occupies: starts and items."""
    devices = [DeviceId(index) for index in range(cluster.num_devices)]
    return csr([cluster.transfer_resources(source, target)
                if not cluster.links or np.isfinite(latency_s[source, target]) else ()
                for source in devices for target in devices])


def _resource_names(cluster: Cluster) -> tuple[str, ...]:
    names = [device.name for device in cluster.devices]
    match cluster.contention:
        case Contention.NONE:
            return ()
        case Contention.PORT:
            return (*(f"{name} out" for name in names), *(f"{name} in" for name in names))
        case Contention.LINK if not cluster.links:
            return tuple(f"{source}>{target}" for source in names for target in names)
        case Contention.LINK:
            texts = [""] * cluster.num_resources
            for link, resource in zip(cluster.links, cluster.link_resources, strict=True):
                texts[resource] = texts[resource] or (link.shared if link.shared is not None else link.name)
            return tuple(texts)


def check_placement(problem: PlaceProblem, device: I64) -> None:
    """Raise ``InputError`` if operators run where they may not, or units are torn apart. Memory is not looked at."""
    times = problem.time_s[np.arange(problem.num_ops), device]
    bad = np.flatnonzero(~np.isfinite(times))
    if len(bad):
        raise InputError(f"operator {problem.op_names[bad[0]]!r} may not run on "
                         f"{problem.device_names[device[bad[0]]]!r}")
    first = problem.first_op[problem.unit_of_op]
    torn = np.flatnonzero(device != device[first])
    if len(torn):
        raise InputError(f"operators {problem.op_names[first[torn[0]]]!r} and {problem.op_names[torn[0]]!r} must share "
                         "a device")
