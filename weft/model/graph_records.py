"""The records of a graph file: what may stand in it, how it is read, and what is wrong with it.

``read_records`` decodes a file's JSON value and checks everything that one record or one reference can get wrong;
``weft.model.graph_file`` then builds the ``Graph``. Problems are collected and raised once, each with its field's path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weft.base.errors import ModelError
from weft.base.files import check_header, decode
from weft.model.graph import NO_BATCH_DIM, UNKNOWN_BATCH_DIM, TensorRole

FORMAT: Final = "weft.graph"
VERSION: Final = 1
MAX_BYTES: Final = 1 << 60
"""No size may be larger (it must fit in 64 bits, and sums of sizes as well)."""


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


def read_records(value: Any, where: str) -> GraphRecord:
    """Return the records in the JSON value of a graph file, checked one by one."""
    content = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=ModelError)
    record = _read_quickly(content) or decode(GraphRecord, content, where=where, error=ModelError)
    raise_if([*_op_problems(record), *_edge_problems(record), *_tensor_problems(record)], where)
    return record


def raise_if(problems: Sequence[str], where: str) -> None:
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


OP_NUMBERS: Final = ("memory", "flops", "bytes_read", "bytes_written", "input_grad_flops", "input_grad_bytes",
                      "weight_grad_flops", "weight_grad_bytes", "saved_inside_bytes", "forward_room_bytes",
                      "backward_room_bytes")


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
        for key in OP_NUMBERS:
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
        if not 0 <= tensor.bytes <= MAX_BYTES or any(not 0 <= size <= MAX_BYTES for size in tensor.shape):
            problems.append(f"{path}: bytes and shape must be from 0 to {MAX_BYTES}")
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
