"""A stage as a row of pieces, in each of which operators may run again before its backward; equal ones are one sort.

A piece ends where a module that repeats does (a layer). What crosses from piece to piece is kept if a backward needs
it, so pieces decide for themselves, and while the backward of one runs, only its own tensors are made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64, I64, Graph, TensorRole
from weft.plan.saving import made_storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """What no backward needs, but some operators read: kept where one of these runs again and its maker does not."""

    num_bytes: float
    maker: int
    """Operator of the piece; -1 for what comes from outside."""
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Operators by number, with what it takes and gives to run each again; sizes are for one micro-batch."""

    seconds: tuple[float, ...]
    """Of each operator's forward."""
    freed: tuple[float, ...]
    """Bytes that need not be kept if it runs again: of its results that a backward needs, and of what it has inside."""
    made: tuple[float, ...]
    """Bytes that are there when it has run again."""
    may_repeat: tuple[bool, ...]
    lent: tuple[Lent, ...] = ()

    @property
    def num_ops(self) -> int:
        """Return the number of operators."""
        return len(self.seconds)

    @property
    def total_bytes(self) -> float:
        """Return what is kept where nothing runs again."""
        return float(sum(self.freed))

    def extra_seconds(self, again: Sequence[bool]) -> float:
        """Return the time of these operators."""
        return float(sum(item for item, flag in zip(self.seconds, again, strict=True) if flag))

    def kept_bytes(self, again: Sequence[bool]) -> float:
        """Return what is kept where these operators run again."""
        own = sum(item for item, flag in zip(self.freed, again, strict=True) if not flag)
        return float(own + sum(item.num_bytes for item in self.lent if (item.maker < 0 or not again[item.maker])
                               and any(again[reader] for reader in item.readers)))

    def again_bytes(self, again: Sequence[bool]) -> float:
        """Return the most that is there of what is made again."""
        return float(sum(item for item, flag in zip(self.made, again, strict=True) if flag))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPiece:
    """A piece and the operators of the graph that it stands for."""

    piece: Piece
    ops: tuple[int, ...]


def pieces_of(graph: Graph, ops: I64, *, seconds: F64, fraction: float, at_once: int = 1) -> list[PlacedPiece]:
    """Return the pieces of a stage; ``at_once`` repeated modules in a row are one.

    ``seconds`` are those of each operator's forward, ``fraction`` is the share of the traced batch.
    """
    runs = _runs(graph, ops)
    groups: list[list[int]] = []
    repeated = 0
    for label, members in runs:
        starts = not groups or not label or not repeated or repeated >= at_once
        repeated = (1 if starts else repeated + 1) if label else 0
        if starts:
            groups.append([])
        groups[-1] += members
    scale = np.where(graph.tensor_batch_dim >= 0, fraction, 1.0)
    sizes: F64 = graph.tensor_bytes.astype(np.float64) * scale
    found = (_piece(graph, members, seconds, sizes, fraction) for members in groups)
    return [item for item in found if item.ops]


def _runs(graph: Graph, ops: I64) -> list[tuple[str, list[int]]]:
    """Return operators in a row that belong to the same repeated module; its path, or nothing."""
    labels = [_repeated(graph.op_modules[op]) for op in ops.tolist()]
    found: list[tuple[str, list[int]]] = []
    for label, items in itertools.groupby(zip(labels, ops.tolist(), strict=True), key=lambda item: item[0]):
        found.append((label, [op for _, op in items]))
    return found


def _repeated(module: str) -> str:
    """Return the path up to its first number."""
    parts = module.split(".")
    place = next((number for number, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[:place + 1]) if place >= 0 else ""


def _piece(graph: Graph, members: list[int], seconds: F64, sizes: F64, fraction: float) -> PlacedPiece:
    ops = [op for op in members if made_storages(graph, op)]
    place = {op: number for number, op in enumerate(ops)}
    inside = frozenset(members)
    readers: dict[int, set[int]] = {}
    for op in members:
        for tensor in graph.op_inputs(op).tolist():
            root = int(graph.memory_root[tensor])
            if graph.tensor_role[root] == TensorRole.ACTIVATION and op in place:
                readers.setdefault(root, set()).add(place[op])
    outside = _read_elsewhere(graph, inside)
    made = [made_storages(graph, op) for op in ops]
    own = [graph.saved_inside_bytes[op] * fraction for op in ops]
    lent = [Lent(num_bytes=float(sizes[root]), maker=place.get(int(graph.tensor_producer[root]), -1),
                 readers=tuple(sorted(found))) for root, found in sorted(readers.items()) if not graph.is_saved[root]]
    return PlacedPiece(ops=tuple(ops), piece=Piece(
        seconds=tuple(float(seconds[op]) for op in ops),
        freed=tuple(float(sizes[[root for root in roots if graph.is_saved[root]]].sum() + more)
                    for roots, more in zip(made, own, strict=True)),
        made=tuple(float(sizes[roots].sum() + more) for roots, more in zip(made, own, strict=True)),
        may_repeat=tuple(outside.isdisjoint(roots) for roots in made), lent=tuple(lent)))


def _read_elsewhere(graph: Graph, inside: frozenset[int]) -> set[int]:
    """Return the storages made by these operators that others read, or that the model gives."""
    found = {int(graph.memory_root[tensor]) for tensor in graph.outputs}
    for op in inside:
        for tensor in graph.op_outputs(op).tolist():
            if any(int(reader) not in inside for reader in _readers(graph, tensor)):
                found.add(int(graph.memory_root[tensor]))
    return found


def _readers(graph: Graph, tensor: int) -> I64:
    order, start = _reader_table(graph)
    return graph.consumer_op[order[start[tensor]:start[tensor + 1]]]


def _reader_table(graph: Graph) -> tuple[I64, I64]:
    if not _known or _known[0][0] is not graph:
        order = np.argsort(graph.inputs, kind="stable")
        start = np.searchsorted(graph.inputs[order], np.arange(graph.num_tensors + 1))
        _known[:] = [(graph, order, start)]
    return _known[0][1], _known[0][2]


_known: list[tuple[Graph, I64, I64]] = []
