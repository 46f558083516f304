"""What the axes of a sharded stage are for, as tools with degrees of parallelism know them: tensor or data parallel.

The matrix products of layers decide. On a *tensor* axis each is split by column or row (``n`` or ``k``), as Megatron
does; on a *data* axis each takes a part of the samples (``b0``, or ``m`` where samples and positions are one dimension)
and its matrix is whole (replicated) or stored in pieces that are gathered for use (fully sharded).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from weft.base.errors import InputError
from weft.export.layer_list import PRODUCTS
from weft.model.graph import Graph
from weft.plan.plan import Plan, Stage
from weft.plan.sharding import parse_layout

_WORDS: Final = {"n": "tensor", "k": "tensor", "b0": "data", "m": "data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """One axis of the mesh of all replicas."""

    name: str
    size: int
    kind: Literal["tensor", "data"]
    is_stored_whole: bool = True
    """Of a data axis: every device holds whole parameters, not pieces of them."""


def axis_roles(plan: Plan, graph: Graph, *, tool: str) -> tuple[AxisRole, ...]:
    """Return what each axis of the replicas' mesh is for; raise ``InputError`` with the operator that is in the way.

    The plan is a ``device_grid``: all replicas have the same mesh. Axes of size 1 are left out.
    """
    mesh = plan.stages[0].replicas[0].mesh
    return tuple(_role(plan, graph, number, name, size, tool)
                 for number, (name, size) in enumerate(mesh.items()) if size > 1)


def _role(plan: Plan, graph: Graph, axis: int, name: str, size: int, tool: str) -> AxisRole:
    found: dict[str, str] = {}
    stored: dict[bool, str] = {}
    for stage in plan.stages:
        for op, weight in _products(stage, graph):
            words = stage.sharding.ops.get(graph.op_names[op], ())
            word = words[axis].partition("/")[0].partition("x")[0] if words else ""
            kind = _WORDS.get(word)
            if kind is None:
                what = "is done whole by every device" if not word else f"is split by {word!r}"
                raise InputError(
                    f"operator {graph.op_names[op]!r} of stage {stage.name!r} {what} on the axis {name!r} of {size} "
                    f"devices, which is neither tensor nor data parallel: {tool} cannot say that. Try weft shard with "
                    "another --mesh, or a plan without sharded stages")
            found.setdefault(kind, graph.op_names[op])
            stored.setdefault(_is_whole(stage, graph.tensor_names[weight], axis), graph.tensor_names[weight])
    if not found:
        raise InputError(f"no matrix product of a layer runs on the axis {name!r} of {size} devices: {tool} has no "
                         "word for it")
    if len(found) > 1:
        raise InputError(f"on the axis {name!r} operator {found['tensor']!r} is split by width and {found['data']!r} "
                         f"by samples: {tool} has one kind of parallelism for an axis. Try weft shard with another "
                         "--mesh")
    if "data" in found and len(stored) > 1:
        raise InputError(f"on the axis {name!r} {stored[True]!r} is whole and {stored[False]!r} is in pieces: {tool} "
                         "stores all matrices alike")
    return AxisRole(name=name, size=size, kind="tensor" if "tensor" in found else "data",
                    is_stored_whole="tensor" in found or True in stored)


def _products(stage: Stage, graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the matrix products of layers in a stage, each with its matrix of parameters."""
    parameters = set(graph.parameters.tolist())
    for name in stage.ops:
        op = graph.op_index[name]
        if not graph.op_kinds[op].startswith(PRODUCTS) or not _is_numbered(graph.op_modules[op]):
            continue
        for tensor in graph.op_inputs(op).tolist():
            owner = tensor if tensor in parameters else int(graph.tensor_base[tensor])
            if owner in parameters and len(graph.tensor_shapes[owner]) == 2:
                yield op, owner
                break


def _is_numbered(path: str) -> bool:
    return any(part.isdecimal() for part in path.split("."))


def _is_whole(stage: Stage, tensor: str, axis: int) -> bool:
    words: Sequence[str] | None = stage.sharding.tensors.get(tensor)
    return words is None or not parse_layout(words).value[axis].is_split
