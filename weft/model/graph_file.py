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

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from weft.base.errors import ModelError
from weft.base.files import check_header, decode, encode, load_json, write_atomic
from weft.model.graph import (
    NO_BATCH_DIM,
    OP_NUMBERS,
    UNKNOWN_BATCH_DIM,
    GivenCosts,
    Graph,
    OpRow,
    TensorRole,
    TensorRow,
    check_graph,
    collector_paused,
    find_cycle,
    make_graph,
    topological,
)

FORMAT: Final = "weft.graph"
VERSION: Final = 1
MAX_BYTES: Final = 1 << 60
"""No size may be larger (it must fit in 64 bits, and sums of sizes as well)."""
MAX_DIMS: Final = 64
"""Of a tensor, as in PyTorch."""


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Return the graph in the file ``path`` (``.json`` or ``.json.gz``)."""
    name = Path(path).name.removesuffix(".gz").removesuffix(".json").removesuffix(".graph")
    return parse_graph(load_json(path, error=ModelError), where=str(path), name=name)


def parse_graph(value: Any, *, where: str = "the graph", name: str = "graph") -> Graph:
    """Return the graph that the JSON value ``value`` describes; ``where`` is for messages, ``name`` for people."""
    with collector_paused():
        record = _read_records(value, where)
        graph = (_plain_graph if record.tensors is None else _full_graph)(record, where, record.name or name)
        check_graph(graph)
        return graph


# ---- records ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One operator."""

    name: str
    kind: str = "op"
    times: Mapping[str, float] | None = None
    memory: float = 0.0
    on: tuple[str, ...] | None = None
    colocate: str | None = None
    flops: float | None = None
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    # the rest is written for traced graphs only
    module: str = ""
    inputs: tuple[str, ...] | None = None
    input_grad_flops: float = 0.0
    input_grad_bytes: float = 0.0
    weight_grad_flops: float = 0.0
    weight_grad_bytes: float = 0.0
    saved_inside_bytes: float = 0.0
    forward_room_bytes: float = 0.0
    backward_room_bytes: float = 0.0
    constant: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRecord:
    """One edge."""

    from_: str
    to: str
    bytes: float | None = None
    times: Mapping[str, float] | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor of a traced graph."""

    name: str
    bytes: int
    op: str | None = None
    role: str = "activation"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    view_of: str | None = None
    saved: bool = False
    scattered: bool = False
    frozen: bool = False
    turned: bool = False
    batch_dim: int = UNKNOWN_BATCH_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """A whole file."""

    ops: tuple[OpRecord, ...]
    edges: tuple[EdgeRecord, ...] = ()
    name: str | None = None
    tensors: tuple[TensorRecord, ...] | None = None
    outputs: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    batch: int = 1
    backward: str = "none"
    warnings: tuple[str, ...] = ()


def _read_records(value: Any, where: str) -> GraphRecord:
    """Return the records in the JSON value of a graph file, checked one by one."""
    content = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=ModelError)
    record = _read_quickly(content) or decode(GraphRecord, content, where=where, error=ModelError)
    _raise_if([*_op_problems(record), *_edge_problems(record), *_tensor_problems(record)], where)
    return record


def _raise_if(problems: Sequence[str], where: str) -> None:
    """Raise one ``ModelError`` with all ``problems``, if there are any."""
    if problems:
        more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ModelError(f"{where}: " + "; ".join([*problems[:20], *more]))


# ---- reading many records quickly ---------------------------------------------------------------------------------


class _Unusual(Exception):  # noqa: N818 - it only leads to the thorough reader
    """A value is not as it mostly is."""


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Unusual
    return value


def _number(value: Any) -> float:
    if type(value) not in (float, int) or not -(2**53) < value < 1e300:
        raise _Unusual
    return float(value)


def _times(value: Any) -> dict[str, float]:
    if type(value) is not dict:
        raise _Unusual
    return {_text(key): _number(seconds) for key, seconds in value.items()}


_QUICK_OP: Final[Mapping[str, Callable[[Any], Any]]] = {
    "name": _text, "kind": _text, "times": _times, "memory": _number, "flops": _number, "bytes_read": _number,
    "bytes_written": _number, "colocate": _text}
_QUICK_EDGE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "from": _text, "to": _text, "bytes": _number, "times": _times, "tensor": _text}


def _read_quickly(content: Mapping[str, Any]) -> GraphRecord | None:
    """Return a plain graph's records, five times faster than ``decode`` does, or None if anything is unusual.

    It accepts less than ``decode`` and leaves every complaint to it.
    """
    if content.keys() != {"ops", "edges"} or type(content["ops"]) is not list or type(content["edges"]) is not list:
        return None
    try:
        ops = tuple(OpRecord(**{key: _QUICK_OP[key](value) for key, value in op.items()}) for op in content["ops"])
        edges = tuple(EdgeRecord(**{"from_" if key == "from" else key: _QUICK_EDGE[key](value)
                                     for key, value in edge.items()}) for edge in content["edges"])
    except (_Unusual, KeyError, TypeError, AttributeError):
        return None
    return GraphRecord(ops=ops, edges=edges)


# ---- checks -------------------------------------------------------------------------------------------------------


def _op_problems(record: GraphRecord) -> list[str]:
    problems: list[str] = []
    if not record.ops:
        problems.append("ops is empty: a graph has at least one operator")
    seen: dict[str, int] = {}
    for index, op in enumerate(record.ops):
        path = f"ops[{index}]"
        if not op.name:
            problems.append(f"{path}.name is empty")
        elif seen.setdefault(op.name, index) != index:
            problems.append(f"{path}.name: {op.name!r} is the name of ops[{seen[op.name]}] already")
        for key in ("memory", *OP_NUMBERS):
            number = getattr(op, key)
            if number is not None and not 0 <= number <= MAX_BYTES * (1 << 40):
                problems.append(f"{path}.{key} must be zero or more, not {number!r}")
        if op.memory > MAX_BYTES:
            problems.append(f"{path}.memory is too large: {op.memory!r}")
        problems += _times_problems(op.times, f"{path}.times", pairs=False)
        if op.times is None and op.flops is None:
            problems.append(f"{path} ({op.name!r}) needs times, or flops, bytes_read and bytes_written")
        if op.on is not None and (not op.on or not all(op.on)):
            problems.append(f"{path}.on must name at least one device kind, and none may be empty")
    return problems


def _times_problems(times: Mapping[str, float] | None, path: str, *, pairs: bool) -> list[str]:
    if times is None:
        return []
    problems = [] if times else [f"{path} is empty"]
    for key, seconds in times.items():
        if seconds < 0:
            problems.append(f"{path}.{key} must be zero or more, not {seconds!r}")
        ends = key.split(">")
        if (pairs and (len(ends) != 2 or not all(ends))) or not key:
            wanted = "an ordered device pair such as 'd0>d1'" if pairs else "a device kind or name"
            problems.append(f"{path}: the key {key!r} must be {wanted}")
    return problems


def _edge_problems(record: GraphRecord) -> list[str]:
    problems: list[str] = []
    names = {op.name for op in record.ops}
    for index, edge in enumerate(record.edges):
        path = f"edges[{index}]"
        for key, name in (("from", edge.from_), ("to", edge.to)):
            if name not in names:
                problems.append(f"{path}.{key}: there is no operator {name!r}")
        if edge.bytes is None and edge.times is None:
            problems.append(f"{path} ({edge.from_!r} to {edge.to!r}) needs bytes or times")
        if edge.bytes is not None and not 0 <= edge.bytes <= MAX_BYTES:
            problems.append(f"{path}.bytes must be from 0 to {MAX_BYTES}, not {edge.bytes!r}")
        if edge.tensor == "":
            problems.append(f"{path}.tensor is empty")
        problems += _times_problems(edge.times, f"{path}.times", pairs=True)
    return problems


ROLES: Final = {role.name.lower(): role for role in TensorRole}


def _tensor_problems(record: GraphRecord) -> list[str]:
    tensors = record.tensors
    if tensors is None:
        return []
    problems: list[str] = []
    ops = {op.name for op in record.ops}
    seen: dict[str, int] = {}
    for index, tensor in enumerate(tensors):
        path = f"tensors[{index}]"
        if not tensor.name or seen.setdefault(tensor.name, index) != index:
            problems.append(f"{path}.name: {tensor.name!r} is empty or there already")
        if tensor.op is not None and tensor.op not in ops:
            problems.append(f"{path}.op: there is no operator {tensor.op!r}")
        if tensor.role not in ROLES or (tensor.role == "activation") != (tensor.op is not None):
            problems.append(f"{path}.role {tensor.role!r}: activations have an op, and {', '.join(list(ROLES)[1:])} "
                            "have none")
        if len(tensor.shape) > MAX_DIMS:
            problems.append(f"{path}.shape has {len(tensor.shape)} dimensions, at most {MAX_DIMS} are possible")
        elif any(not 0 <= size <= MAX_BYTES for size in (tensor.bytes, *tensor.shape, math.prod(tensor.shape))):
            problems.append(f"{path}: bytes, sizes and the number of elements must be from 0 to {MAX_BYTES}")
        if not UNKNOWN_BATCH_DIM <= tensor.batch_dim < max(len(tensor.shape), 1):
            problems.append(f"{path}.batch_dim must be a dimension, {NO_BATCH_DIM} or {UNKNOWN_BATCH_DIM}, "
                            f"not {tensor.batch_dim}")
    used = [(f"ops[{index}].inputs", item) for index, op in enumerate(record.ops) for item in op.inputs or ()]
    used += [(f"tensors[{index}].view_of", item.view_of) for index, item in enumerate(tensors) if item.view_of]
    used += [(f"outputs[{index}]", item) for index, item in enumerate(record.outputs)]
    problems += [f"{path}: there is no tensor {item!r}" for path, item in used if item not in seen]
    views = {item.name for item in tensors if item.view_of is not None}
    problems += [f"tensors[{index}].view_of: {item.view_of!r} is a view itself; name the tensor that owns the memory"
                 for index, item in enumerate(tensors) if item.view_of in views]
    if record.backward not in ("joint", "rule", "none"):
        problems.append(f"backward must be joint, rule or none, not {record.backward!r}")
    if record.batch < 1:
        problems.append(f"batch must be 1 or more, not {record.batch}")
    return problems


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
    rows = [TensorRow(name=wire.name, producer=wire.source, num_bytes=math.ceil(wire.num_bytes or 0))
            for wire in wires]
    return make_graph(
        [_op_row(op, items) for op, items in zip(ops, reads, strict=True)], rows, name=name, batch=record.batch,
        outputs=(), warnings=record.warnings, given=_given(ops, tuple(wire.times for wire in wires)))


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
    _raise_if(problems, where)
    return sorted(wires.values(), key=lambda wire: (wire.source, min(wire.readers), wire.name))


def _op_row(op: OpRecord, inputs: Sequence[int]) -> OpRow:
    return OpRow(name=op.name, kind=op.kind, module=op.module, source=op.source, inputs=inputs, is_constant=op.constant,
                 numbers={key: getattr(op, key) or 0.0 for key in OP_NUMBERS})


def _given(ops: Sequence[OpRecord], transfer_times: tuple[Mapping[str, float] | None, ...]) -> GivenCosts:
    return GivenCosts(
        times=tuple(op.times for op in ops), memory_bytes=tuple(math.ceil(op.memory) for op in ops),
        allowed_kinds=tuple(op.on for op in ops), colocate=tuple(op.colocate for op in ops),
        transfer_times=transfer_times)


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
    is_given = any(op.times or op.memory or op.on or op.colocate for op in record.ops)
    rows = [TensorRow(
        name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, role=ROLES[tensor.role], producer=source,
        num_bytes=tensor.bytes, base=-1 if tensor.view_of is None else ids[tensor.view_of], is_saved=tensor.saved,
        is_scattered=tensor.scattered, is_frozen=tensor.frozen, has_turned_gradient=tensor.turned,
        batch_dim=tensor.batch_dim)
        for tensor, source in zip(tensors, producer, strict=True)]
    return make_graph(
        [_op_row(op, items) for op, items in zip(record.ops, reads, strict=True)], rows, name=name, batch=record.batch,
        tied=record.tied, outputs=tuple(ids[output] for output in record.outputs), warnings=record.warnings,
        has_backward=record.backward != "none", backward_source=record.backward,
        given=_given(record.ops, (None,) * len(tensors)) if is_given else None)


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
    if all(source < target for source, target in edges):
        return list(range(num_ops))
    readers: list[list[int]] = [[] for _ in range(num_ops)]
    for source, target in edges:
        readers[source].append(target)
    order = topological(readers, range(num_ops))
    if len(order) < num_ops:
        cycle = find_cycle(edges)
        shown = [names[index] for index in (cycle if len(cycle) <= 12 else [*cycle[:6], *cycle[-6:]])]
        raise ModelError(f"{where}: edges: the operators {' -> '.join(map(repr, [*shown, shown[0]]))} form a cycle; "
                         "a graph must have none")
    return order


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
    is_plain = _is_plain(graph)
    reads = [None if is_plain else tuple(names[tensor] for tensor in graph.op_inputs(op))
             for op in range(graph.num_ops)]
    content = {"ops": [_written(_op_record(graph, op, inputs), "kind") for op, inputs in enumerate(reads)],
               "edges": [_written(_edge_record(graph, *map(int, row))) for row in graph.edges]}
    if is_plain:
        return {**header, **content}
    header |= {"backward": graph.backward_source, "outputs": [names[tensor] for tensor in graph.outputs],
               "tied": [list(group) for group in graph.tied]}
    return {**header, **content, "tensors": [_written(_tensor_record(graph, tensor), "shape", "dtype")
                                             for tensor in range(graph.num_tensors)]}


def _is_plain(graph: Graph) -> bool:
    """Return whether operators and edges say it all."""
    return graph.given is not None and not graph.outputs and not graph.has_backward and bool(
        np.all(graph.tensor_role == TensorRole.ACTIVATION))


def _written(record: OpRecord | EdgeRecord | TensorRecord, *always: str) -> dict[str, Any]:
    """Return the record as JSON, without fields that have their default, but for those that are ``always`` there."""
    return {item.name.removesuffix("_"): encode(value) for item in fields(record)
            if (value := getattr(record, item.name)) != item.default or item.name in always}


def _op_record(graph: Graph, op: int, inputs: tuple[str, ...] | None) -> OpRecord:
    numbers: dict[str, Any] = {key: float(getattr(graph, key)[op]) for key in OP_NUMBERS}
    given: dict[str, Any] = {}
    if graph.given is not None:
        given = {"times": graph.given.times[op], "memory": graph.given.memory_bytes[op],
                 "on": graph.given.allowed_kinds[op], "colocate": graph.given.colocate[op]}
        numbers["flops"] = numbers["flops"] or (None if given["times"] else 0.0)
    return OpRecord(name=graph.op_names[op], kind=graph.op_kinds[op], module=graph.op_modules[op], inputs=inputs,
                    constant=bool(graph.is_constant[op]), source=graph.sources[op] if graph.sources else "",
                    **numbers, **given)


def _edge_record(graph: Graph, source: int, target: int, tensor: int) -> EdgeRecord:
    times = graph.given.transfer_times[tensor] if graph.given is not None else None
    num_bytes = int(graph.tensor_bytes[tensor])
    return EdgeRecord(from_=graph.op_names[source], to=graph.op_names[target], times=times,
                      bytes=num_bytes if num_bytes or times is None else None, tensor=graph.tensor_names[tensor])


def _tensor_record(graph: Graph, tensor: int) -> TensorRecord:
    producer, base = int(graph.tensor_producer[tensor]), int(graph.tensor_base[tensor])
    return TensorRecord(
        name=graph.tensor_names[tensor], bytes=int(graph.tensor_bytes[tensor]), shape=graph.tensor_shapes[tensor],
        dtype=graph.tensor_dtypes[tensor], op=graph.op_names[producer] if producer >= 0 else None,
        role="activation" if producer >= 0 else TensorRole(int(graph.tensor_role[tensor])).name.lower(),
        view_of=graph.tensor_names[base] if base >= 0 else None, saved=bool(graph.is_saved[tensor]),
        scattered=bool(len(graph.is_scattered) and graph.is_scattered[tensor]),
        frozen=bool(len(graph.is_frozen) and graph.is_frozen[tensor]),
        turned=bool(len(graph.has_turned_gradient) and graph.has_turned_gradient[tensor]),
        batch_dim=int(graph.tensor_batch_dim[tensor]))
