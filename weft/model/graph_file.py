"""Graph files (``weft.graph`` version 1): a model as operators and edges in JSON, with or without a model behind it.

    {"format": "weft.graph", "version": 1,
     "ops": [{"name": "conv1", "kind": "conv2d", "times": {"gpu": 0.8, "cpu": 9.1}, "memory": 1048576}],
     "edges": [{"from": "conv1", "to": "relu1", "bytes": 401408, "tensor": "conv1:0"}]}

An operator gives ``times`` (seconds by device kind or name) or ``flops``, ``bytes_read`` and ``bytes_written``;
``memory``, ``on`` and ``colocate`` are optional. An edge gives ``bytes``, or ``times`` by ordered device pair. Edges of
one operator that name the same ``tensor`` carry one tensor; an edge without a name carries its own.

A graph that was traced is saved with more: ``tensors`` (shape, dtype, role, ...), and per operator what it reads and
its backward costs. Such a file loads as an equal graph; its ``edges`` only repeat the wiring for other readers.

Everything is checked; every problem is a ``ModelError`` with the path of the field (``ops[2].times.gpu``).
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import ModelError
from weft.base.files import load_json, write_atomic
from weft.model.collector import collector_paused
from weft.model.graph import F64, UNKNOWN_BATCH_DIM, GivenCosts, Graph, TensorRole, check_graph
from weft.model.graph_records import (
    FORMAT,
    OP_NUMBERS,
    ROLES,
    VERSION,
    EdgeRecord,
    GraphRecord,
    OpRecord,
    TensorRecord,
    raise_if,
    read_records,
)


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph in the file ``path`` (``.json`` or ``.json.gz``)."""
    name = Path(path).name.removesuffix(".gz").removesuffix(".json").removesuffix(".graph")
    return parse_graph(load_json(path, error=ModelError), where=str(path), name=name)


def parse_graph(value: Any, *, where: str = "the graph", name: str = "graph") -> Graph:
    """Return the graph that the JSON value ``value`` describes; ``where`` is for messages, ``name`` for people."""
    with collector_paused():
        record = read_records(value, where)
        graph = (_plain_graph if record.tensors is None else _full_graph)(record, where, record.name or name)
        check_graph(graph)
        return graph


# ---- a graph of operators and edges -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Wire:
    """One tensor of a plain graph file."""

    name: str
    source: int
    num_bytes: float | None
    times: Mapping[str, float] | None
    edge: int
    readers: list[int] = field(default_factory=list)


def _plain_graph(record: GraphRecord, where: str, name: str) -> Graph:
    position = {op.name: index for index, op in enumerate(record.ops)}
    pairs = [(position[edge.from_], position[edge.to]) for edge in record.edges]
    order = _topological(len(record.ops), pairs, [op.name for op in record.ops], where)
    rank = {index: new for new, index in enumerate(order)}
    ops = [record.ops[index] for index in order]
    wires = _wires(record.edges, [(rank[source], rank[target]) for source, target in pairs], where)
    reads: list[list[int]] = [[] for _ in ops]
    for tensor, wire in enumerate(wires):
        for reader in dict.fromkeys(wire.readers):
            reads[reader].append(tensor)
    sizes = np.array([math.ceil(wire.num_bytes or 0) for wire in wires], dtype=np.int64)
    given = GivenCosts(
        times=tuple(op.times for op in ops), memory_bytes=tuple(math.ceil(op.memory) for op in ops),
        allowed_kinds=tuple(op.on for op in ops), colocate=tuple(op.colocate for op in ops),
        transfer_times=tuple(wire.times for wire in wires))
    return Graph(
        name=name, **_op_columns(ops), given=given, batch=record.batch, outputs=(),
        input_start=np.cumsum([0] + [len(items) for items in reads]).astype(np.int64),
        inputs=np.array([tensor for items in reads for tensor in items], dtype=np.int64),
        tensor_names=tuple(wire.name for wire in wires), tensor_shapes=((),) * len(wires),
        tensor_dtypes=("",) * len(wires), tensor_role=np.full(len(wires), TensorRole.ACTIVATION, dtype=np.int64),
        tensor_producer=np.array([wire.source for wire in wires], dtype=np.int64), tensor_bytes=sizes,
        tensor_base=np.full(len(wires), -1, dtype=np.int64), is_saved=np.zeros(len(wires), dtype=np.bool_),
        tensor_batch_dim=np.full(len(wires), UNKNOWN_BATCH_DIM, dtype=np.int64), warnings=record.warnings)


def _wires(edges: Sequence[EdgeRecord], ends: Sequence[tuple[int, int]], where: str) -> list[_Wire]:
    """Return the tensors that the edges carry: one per operator and tensor name, and one per edge without a name."""
    wires: dict[Any, _Wire] = {}
    problems: list[str] = []
    labels: set[str] = set()
    for index, (edge, (source, target)) in enumerate(zip(edges, ends, strict=True)):
        key = (source, edge.tensor) if edge.tensor is not None else index
        wire = wires.get(key)
        if wire is None:
            label = unique = edge.tensor if edge.tensor is not None else f"{edge.from_}>{edge.to}"
            while unique in labels:
                unique = f"{label}#{len(labels)}"
                label += "#"
            labels.add(unique)
            wire = wires[key] = _Wire(name=unique, source=source, num_bytes=edge.bytes, times=edge.times, edge=index)
        elif (wire.num_bytes, wire.times) != (edge.bytes, edge.times):
            problems.append(f"edges[{index}]: tensor {edge.tensor!r} of {edge.from_!r} has other bytes or times "
                            f"than in edges[{wire.edge}]")
        wire.readers.append(target)
    raise_if(problems, where)
    return sorted(wires.values(), key=lambda wire: (wire.source, min(wire.readers), wire.name))


def _op_columns(ops: Sequence[OpRecord]) -> dict[str, Any]:
    def column(key: str) -> F64:
        return np.array([getattr(op, key) or 0.0 for op in ops], dtype=np.float64)

    return {
        "op_names": tuple(op.name for op in ops), "op_kinds": tuple(op.kind for op in ops),
        "op_modules": tuple(op.module for op in ops),
        **{key: column(key) for key in OP_NUMBERS if key != "memory"},
        "is_constant": np.array([op.constant for op in ops], dtype=np.bool_),
        "sources": tuple(op.source for op in ops) if any(op.source for op in ops) else (),
    }


# ---- a traced graph -----------------------------------------------------------------------------------------------


def _full_graph(record: GraphRecord, where: str, name: str) -> Graph:
    tensors = record.tensors or ()
    position = {op.name: index for index, op in enumerate(record.ops)}
    ids = {tensor.name: index for index, tensor in enumerate(tensors)}
    producer = [-1 if tensor.op is None else position[tensor.op] for tensor in tensors]
    reads = [[ids[tensor] for tensor in op.inputs or ()] for op in record.ops]
    pairs = [(producer[tensor], index) for index, items in enumerate(reads) for tensor in items
             if producer[tensor] >= 0]
    order = _topological(len(record.ops), pairs, [op.name for op in record.ops], where)
    if order != list(range(len(order))):
        raise ModelError(f"{where}: ops must be in an order in which every operator comes after those it reads from")
    _check_edges(record, tensors, producer, reads, where)
    given = None
    if any(op.times or op.memory or op.on or op.colocate for op in record.ops):
        given = GivenCosts(
            times=tuple(op.times for op in record.ops), colocate=tuple(op.colocate for op in record.ops),
            memory_bytes=tuple(math.ceil(op.memory) for op in record.ops),
            allowed_kinds=tuple(op.on for op in record.ops), transfer_times=(None,) * len(tensors))
    return Graph(
        name=name, **_op_columns(record.ops), given=given, batch=record.batch, tied=record.tied,
        outputs=tuple(ids[output] for output in record.outputs), warnings=record.warnings,
        has_backward=record.backward != "none", backward_source=record.backward,
        input_start=np.cumsum([0] + [len(items) for items in reads]).astype(np.int64),
        inputs=np.array([tensor for items in reads for tensor in items], dtype=np.int64),
        tensor_names=tuple(tensor.name for tensor in tensors),
        tensor_shapes=tuple(tensor.shape for tensor in tensors),
        tensor_dtypes=tuple(tensor.dtype for tensor in tensors),
        tensor_role=np.array([ROLES[tensor.role] for tensor in tensors], dtype=np.int64),
        tensor_producer=np.array(producer, dtype=np.int64),
        tensor_bytes=np.array([tensor.bytes for tensor in tensors], dtype=np.int64),
        tensor_base=np.array([-1 if tensor.view_of is None else ids[tensor.view_of] for tensor in tensors],
                             dtype=np.int64),
        is_saved=np.array([tensor.saved for tensor in tensors], dtype=np.bool_),
        is_scattered=np.array([tensor.scattered for tensor in tensors] if any(
            tensor.scattered for tensor in tensors) else [], dtype=np.bool_),
        tensor_batch_dim=np.array([tensor.batch_dim for tensor in tensors], dtype=np.int64))


def _check_edges(record: GraphRecord, tensors: Sequence[TensorRecord], producer: Sequence[int],
                 reads: Sequence[Sequence[int]], where: str) -> None:
    expected = {(tensors[tensor].op, op.name, tensors[tensor].name)
                for op, items in zip(record.ops, reads, strict=True) for tensor in items if producer[tensor] >= 0}
    written = {(edge.from_, edge.to, edge.tensor) for edge in record.edges}
    if record.edges and expected != written:
        source, target, tensor = sorted(expected ^ written, key=str)[0]
        raise ModelError(f"{where}: edges do not repeat what ops[].inputs say: see {tensor!r} from {source!r} to "
                         f"{target!r}")


# ---- order ------------------------------------------------------------------------------------------------------


def _topological(num_ops: int, edges: Sequence[tuple[int, int]], names: Sequence[str], where: str) -> list[int]:
    """Return the operators in an order in which all edges point forward, the file's own order where it does."""
    readers: list[list[int]] = [[] for _ in range(num_ops)]
    missing = [0] * num_ops
    for source, target in edges:
        readers[source].append(target)
        missing[target] += 1
    if all(source < target for source, target in edges):
        return list(range(num_ops))
    ready = [index for index in range(num_ops) if missing[index] == 0]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < num_ops:
        cycle = _cycle(readers, {index for index in range(num_ops) if missing[index] > 0})
        shown = [names[index] for index in (cycle if len(cycle) <= 12 else [*cycle[:6], *cycle[-6:]])]
        raise ModelError(f"{where}: edges: the operators {' -> '.join(map(repr, [*shown, shown[0]]))} form a cycle; "
                         "a graph must have none")
    return order


def _cycle(readers: list[list[int]], left: set[int]) -> list[int]:
    """Return one cycle among the operators ``left`` that could not be ordered."""
    writers: dict[int, int] = {}
    for index in sorted(left):
        for reader in readers[index]:
            if reader in left:
                writers.setdefault(reader, index)
    path, seen = [min(left)], {min(left): 0}
    while True:
        before = writers[path[-1]]
        if before in seen:
            return path[seen[before] :][::-1]
        seen[before] = len(path)
        path.append(before)


# ---- writing ------------------------------------------------------------------------------------------------------


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write ``graph`` to ``path``, compressed if the name ends in ``.gz``."""
    text = json.dumps(graph_to_json(graph), separators=(",", ":"), sort_keys=False, allow_nan=False)
    write_atomic(path, text + "\n")


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return ``graph`` as the JSON value of a graph file."""
    names = graph.tensor_names
    header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": graph.name}
    if graph.batch != 1:
        header["batch"] = graph.batch
    if graph.warnings:
        header["warnings"] = list(graph.warnings)
    content = {"ops": [_op_to_json(graph, op) for op in range(graph.num_ops)],
               "edges": [_edge_to_json(graph, *map(int, row)) for row in graph.edges]}
    if _is_plain(graph):
        return {**header, **content}
    header |= {"backward": graph.backward_source, "outputs": [names[tensor] for tensor in graph.outputs],
               "tied": [list(group) for group in graph.tied]}
    for op, record in enumerate(content["ops"]):
        record["inputs"] = [names[tensor] for tensor in graph.op_inputs(op)]
    return {**header, **content, "tensors": [_tensor_to_json(graph, tensor) for tensor in range(graph.num_tensors)]}


def _is_plain(graph: Graph) -> bool:
    """Return whether operators and edges say it all."""
    return graph.given is not None and not graph.outputs and not graph.has_backward and bool(
        np.all(graph.tensor_role == TensorRole.ACTIVATION))


def _op_to_json(graph: Graph, op: int) -> dict[str, Any]:
    result: dict[str, Any] = {"name": graph.op_names[op], "kind": graph.op_kinds[op]}
    numbers = {key: float(getattr(graph, key)[op]) for key in OP_NUMBERS if key != "memory"}
    given = graph.given
    if given is not None:
        optional = {"times": given.times[op], "memory": given.memory_bytes[op], "on": given.allowed_kinds[op],
                    "colocate": given.colocate[op]}
        result |= {key: dict(value) if isinstance(value, Mapping) else value
                   for key, value in optional.items() if value is not None and value != 0}
    if "times" not in result:
        result["flops"] = numbers["flops"]
    result |= {key: value for key, value in numbers.items() if value}
    if graph.op_modules[op]:
        result["module"] = graph.op_modules[op]
    if graph.is_constant[op]:
        result["constant"] = True
    if graph.sources and graph.sources[op]:
        result["source"] = graph.sources[op]
    return result


def _edge_to_json(graph: Graph, source: int, target: int, tensor: int) -> dict[str, Any]:
    result: dict[str, Any] = {"from": graph.op_names[source], "to": graph.op_names[target]}
    times = graph.given.transfer_times[tensor] if graph.given is not None else None
    if times is not None:
        result["times"] = dict(times)
    if times is None or graph.tensor_bytes[tensor]:
        result["bytes"] = int(graph.tensor_bytes[tensor])
    result["tensor"] = graph.tensor_names[tensor]
    return result


def _tensor_to_json(graph: Graph, tensor: int) -> dict[str, Any]:
    producer, base = int(graph.tensor_producer[tensor]), int(graph.tensor_base[tensor])
    result: dict[str, Any] = {"name": graph.tensor_names[tensor], "bytes": int(graph.tensor_bytes[tensor]),
                              "shape": list(graph.tensor_shapes[tensor]), "dtype": graph.tensor_dtypes[tensor]}
    if producer >= 0:
        result["op"] = graph.op_names[producer]
    else:
        result["role"] = TensorRole(int(graph.tensor_role[tensor])).name.lower()
    if base >= 0:
        result["view_of"] = graph.tensor_names[base]
    if graph.is_saved[tensor]:
        result["saved"] = True
    if len(graph.is_scattered) and graph.is_scattered[tensor]:
        result["scattered"] = True
    if graph.tensor_batch_dim[tensor] != UNKNOWN_BATCH_DIM:
        result["batch_dim"] = int(graph.tensor_batch_dim[tensor])
    return result
