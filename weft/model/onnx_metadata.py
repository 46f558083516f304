"""Facts about operators, such as the device each runs on, written into the metadata of an ONNX file's nodes.

A node is found by the tensors it makes, whose names a ``Graph`` keeps; nodes themselves often have no names. Nothing
else in the file changes: order, names, initialisers, opsets. Weights in files beside it are neither read nor copied, so
the new file must lie in the same folder as the old one to find them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.files import write_atomic
from weft.model.graph import Graph
from weft.model.onnx import read_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """What was written."""

    num_nodes: int
    num_annotated: int
    """Nodes that have properties now; those that make constants have none."""


def annotate_onnx(path: str | os.PathLike[str], out: str | os.PathLike[str], graph: Graph,
                  properties: Sequence[Mapping[str, str]]) -> Annotated:
    """Write the ONNX file ``path`` to ``out`` with ``properties[op]`` in the metadata of each operator's node.

    ``graph`` is that of the file (``load_onnx``). A property that a node has already is replaced. Raise ``InputError``
    if an operator's node is not in the file, or if ``out`` would not find the file's external weights.
    """
    model = read_model(path)
    outside = sorted(set(_external_files(model.graph)))
    if outside and Path(out).resolve().parent != Path(path).resolve().parent:
        raise InputError(f"{str(path)!r} keeps weights in {outside[0]!r} beside it, which {str(out)!r} would not find: "
                         f"write the new file into {str(Path(path).parent)!r}")
    found: set[int] = set()
    for node in model.graph.node:
        op = _op_of(node, graph)
        if op is not None and properties[op]:
            _set_properties(node, properties[op])
            found.add(op)
    missing = [op for op in range(graph.num_ops) if properties[op] and op not in found]
    if missing:
        raise InputError(f"{str(path)!r} has no node that makes the outputs of operator "
                         f"{graph.op_names[missing[0]]!r}: it is another file than the one that was planned")
    write_atomic(out, model.SerializeToString(deterministic=True))
    return Annotated(num_nodes=len(model.graph.node), num_annotated=len(found))


def _op_of(node: Any, graph: Graph) -> int | None:
    """Return the operator of the graph that makes the node's outputs; None for a constant."""
    for name in node.output:
        tensor = graph.tensor_index.get(name) if name else None
        if tensor is not None and graph.tensor_producer[tensor] >= 0:
            return int(graph.tensor_producer[tensor])
    return None


def _set_properties(node: Any, properties: Mapping[str, str]) -> None:
    kept = [(item.key, item.value) for item in node.metadata_props if item.key not in properties]
    del node.metadata_props[:]
    for key, value in (*kept, *properties.items()):
        node.metadata_props.add(key=key, value=value)


def _external_files(graph: Any) -> Iterator[str]:
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value
