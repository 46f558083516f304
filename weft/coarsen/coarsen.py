"""Coarsening: a model in, its graph of fused groups out, by the fusions that are asked for.

    coarse = coarsen(traced)                     by the table of rules
    coarse = coarsen(traced, "inductor")         as PyTorch's compiler fuses
    costs = estimate_costs(coarse.graph, cluster)
    device_of_op = expand(coarse, device_of_group)

Groups as one operator each: ``contract(graph, groups) -> Coarse``, and a placement of groups as one of operators.

The coarse graph has one operator for each group. A group of two or more is of the kind ``fused:<label>``, so that its
cost is that of one kernel (one overhead, the class of its heaviest part, or what was measured for it), and is named
after its main operator; a group of one keeps everything.

* ``flops`` are the sum. ``bytes_read`` and ``bytes_written`` are what crosses the group's border: each tensor from
  outside is read once, of a table that is gathered from only what is taken, and memory that only the group itself uses
  is neither written nor read.
* Tensors: all parameters, buffers and inputs, and what crosses between groups or is returned by the model. A view
  counts with its own bytes where it crosses, since that is what would be sent; it stays a view of what it is of where
  that is still there.
* Constants (``groups.NO_GROUP``) are gone, and what they make is a buffer: a plan leaves it to every stage to compute
  the constants it reads (``weft.plan.layout.stage_inputs``, ``weft.run.stage``), so they are never sent, and
  backends compute them once and for all. ``expand`` names a device for them all the same, that of their first reader.
* Backward costs are summed, and what was kept for the backward pass inside a group is in ``saved_inside_bytes``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, assert_never, get_args

import numpy as np

from weft.base.errors import InputError
from weft.coarsen.backends import fuse_by_inductor, fuse_by_onnxruntime
from weft.coarsen.groups import NO_GROUP, Groups, How, check_groups, contract_given, is_free, single_groups
from weft.coarsen.rules import fuse_by_rules
from weft.cost.op_classes import EMBEDDING, FUSED_PREFIX, heaviest_class, op_class
from weft.model.graph import F64, I64, OPTIONAL_MARKS, Bool, Graph, TensorRole, check_graph

if TYPE_CHECKING:
    from weft.model.trace import TracedModel

_SUMMED: Final = ("flops", "input_grad_flops", "input_grad_bytes", "weight_grad_flops", "weight_grad_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Coarse:
    """A graph, its groups, and the graph of the groups."""

    fine: Graph
    groups: Groups
    graph: Graph
    """One operator for each group, in the groups' order."""


def contract(graph: Graph, groups: Groups) -> Coarse:
    """Return the graph with every group as one operator; see the module's docstring.

    Raise ``ModelError`` if the groups do not fit the graph, and ``InputError`` if what a graph file says about some
    operators does not let them be one.
    """
    check_groups(graph, groups)
    coarse = _Contraction(graph, groups).finish()
    check_graph(coarse)
    return Coarse(fine=graph, groups=groups, graph=coarse)


def expand(coarse: Coarse, device_of_group: I64) -> I64:
    """Return the device of each operator of the fine graph, given that of each group.

    A constant gets the device of its first reader (0 if nothing reads it); other devices that need it compute it, too.
    """
    of_op = coarse.groups.of_op
    if len(device_of_group) != coarse.groups.num_groups:
        raise InputError(f"there are {len(device_of_group)} devices for {coarse.groups.num_groups} groups")
    device: I64 = np.zeros(len(of_op), dtype=np.int64)
    device[of_op >= 0] = np.asarray(device_of_group, dtype=np.int64)[of_op[of_op >= 0]]
    edges = coarse.fine.edges
    loose = edges[of_op[edges[:, 0]] == NO_GROUP]
    for source, target, _ in loose[np.lexsort((-loose[:, 1], -loose[:, 0]))]:  # last to first, so readers are known
        device[source] = device[target]
    return device


class _Contraction:
    """The columns of the coarse graph, one step after the other."""

    def __init__(self, graph: Graph, groups: Groups) -> None:
        self.graph, self.groups = graph, groups
        self.members = groups.members()
        self.free = is_free(graph)
        producer = graph.tensor_producer
        self.owner: I64 = np.where(producer >= 0, groups.of_op[producer], NO_GROUP)
        """The group that makes each tensor; none for inputs, parameters, buffers and what constants make."""
        reader = groups.of_op[graph.consumer_op]
        is_read_outside = np.zeros(graph.num_tensors, dtype=np.bool_)
        is_read_outside[graph.inputs[(reader != NO_GROUP) & (reader != self.owner[graph.inputs])]] = True
        is_read_outside[list(graph.outputs)] = True
        self.keeps: Bool = (producer < 0) | is_read_outside
        self.reads = [list(dict.fromkeys(int(tensor) for op in ops for tensor in graph.op_inputs(op)
                                         if self.owner[tensor] != group))
                      for group, ops in enumerate(self.members)]

    def finish(self) -> Graph:
        """Return the coarse graph."""
        graph, members = self.graph, self.members
        mains = [_main_op(graph, ops) for ops in members]
        kept = np.flatnonzero(self.keeps)
        new_id = np.full(graph.num_tensors, -1, dtype=np.int64)
        new_id[kept] = np.arange(len(kept))
        base = graph.tensor_base[kept]
        role = graph.tensor_role[kept].copy()
        role[(graph.tensor_producer[kept] >= 0) & (self.owner[kept] == NO_GROUP)] = TensorRole.BUFFER
        bytes_read, bytes_written = self._border_bytes()
        marks: dict[str, Any] = {column: mark[kept] if len(mark := getattr(graph, column)) else mark
                                 for column in OPTIONAL_MARKS}
        sums: dict[str, Any] = {column: self._sum(getattr(graph, column)) for column in _SUMMED}
        return Graph(
            name=graph.name, op_names=tuple(graph.op_names[op] for op in mains), op_kinds=self._kinds(),
            op_modules=tuple(graph.op_modules[op] for op in mains),
            bytes_read=bytes_read, bytes_written=bytes_written,
            is_constant=np.array([bool(graph.is_constant[list(ops)].all()) for ops in members], dtype=np.bool_),
            input_start=np.cumsum([0, *map(len, self.reads)]).astype(np.int64),
            inputs=new_id[[tensor for tensors in self.reads for tensor in tensors]].astype(np.int64),
            tensor_names=tuple(graph.tensor_names[tensor] for tensor in kept),
            tensor_shapes=tuple(graph.tensor_shapes[tensor] for tensor in kept),
            tensor_dtypes=tuple(graph.tensor_dtypes[tensor] for tensor in kept),
            tensor_role=role, tensor_producer=self.owner[kept], tensor_bytes=graph.tensor_bytes[kept],
            tensor_base=np.where(base >= 0, new_id[base], -1), is_saved=graph.is_saved[kept],
            **marks,
            tensor_batch_dim=graph.tensor_batch_dim[kept], outputs=tuple(int(new_id[t]) for t in graph.outputs),
            tied=graph.tied, batch=graph.batch, has_backward=graph.has_backward, backward_source=graph.backward_source,
            given=contract_given(graph, members, kept.tolist(), self.free), warnings=graph.warnings,
            asks_recompute=graph.asks_recompute,
            sources=tuple(graph.sources[op] for op in mains) if graph.sources else (),
            saved_inside_bytes=self._sum(graph.saved_inside_bytes) + self._by_group(  # not tensors of the coarse graph
                self.owner, np.where(graph.is_saved & ~self.keeps, graph.tensor_bytes, 0)),
            forward_room_bytes=self._largest(graph.forward_room_bytes),
            backward_room_bytes=self._largest(graph.backward_room_bytes),
            **sums)

    def _kinds(self) -> tuple[str, ...]:
        return tuple(self.graph.op_kinds[ops[0]] if len(ops) == 1 else FUSED_PREFIX + label
                     for ops, label in zip(self.members, self.groups.labels, strict=True))

    def _sum(self, column: F64) -> F64:
        return self._by_group(self.groups.of_op, column)

    def _by_group(self, group: I64, amounts: F64 | I64) -> F64:
        inside = group >= 0
        return np.bincount(group[inside], weights=amounts[inside], minlength=self.groups.num_groups).astype(np.float64)

    def _largest(self, column: F64) -> F64:
        return np.asarray([column[list(ops)].max() for ops in self.members], dtype=np.float64)

    def _border_bytes(self) -> tuple[F64, F64]:
        read, written = np.zeros(len(self.members)), np.zeros(len(self.members))
        for group, ops in enumerate(self.members):
            if len(ops) == 1:
                read[group], written[group] = self.graph.bytes_read[ops[0]], self.graph.bytes_written[ops[0]]
            else:
                read[group], written[group] = self._bytes_in(group, ops), self._bytes_out(group, ops)
        return read, written

    def _bytes_in(self, group: int, ops: Sequence[int]) -> float:
        """Return what the group's operators read of memory from outside; a view in the group is not yet a read."""
        graph, root = self.graph, self.graph.memory_root
        parts: dict[int, dict[int, float]] = {}
        for op in ops:
            if self.free[op]:
                continue
            for tensor in graph.op_inputs(op).tolist():
                if self.owner[root[tensor]] != group:
                    taken = float(graph.tensor_bytes[tensor])
                    if op_class(graph.op_kinds[op]) == EMBEDDING:
                        taken = min(taken, float(graph.bytes_written[op]))
                    views = parts.setdefault(int(root[tensor]), {})
                    views[tensor] = max(views.get(tensor, 0.0), taken)
        return sum(min(sum(views.values()), float(graph.tensor_bytes[tensor])) for tensor, views in parts.items())

    def _bytes_out(self, group: int, ops: Sequence[int]) -> float:
        """Return the bytes of the memory that the group writes for others; a view leaves as what it is of."""
        graph, root = self.graph, self.graph.memory_root
        leaving = {int(root[tensor]) for op in ops for tensor in graph.op_outputs(op).tolist() if self.keeps[tensor]}
        return float(sum(graph.tensor_bytes[tensor] for tensor in leaving if self.owner[tensor] == group))


def _main_op(graph: Graph, ops: Sequence[int]) -> int:
    """Return the operator that a group is named after: of its heaviest class the one with the most work."""
    name = heaviest_class(graph.op_kinds[op] for op in ops)
    alike = [op for op in ops if op_class(graph.op_kinds[op]) == name] or list(ops)
    return max(alike, key=lambda op: (graph.flops[op], graph.bytes_read[op] + graph.bytes_written[op], -op))


# ---- groups as one operator each -------------------------------------------------------------------------------------


def coarsen(model: Graph | TracedModel, how: How = "rules", *, path: str | os.PathLike[str] | None = None) -> Coarse:
    """Return the model's graph with one operator for each group that ``how`` finds.

    ``inductor`` needs a traced model, ``onnxruntime`` the ``path`` of the ONNX file that the graph was read from;
    ``none`` only leaves out constants.
    """
    graph = model if isinstance(model, Graph) else model.graph
    return contract(graph, find_groups(model, how, path=path))


def find_groups(model: Graph | TracedModel, how: How = "rules", *,
                path: str | os.PathLike[str] | None = None) -> Groups:
    """Return the groups that ``how`` finds; see ``coarsen``."""
    if how not in get_args(How):
        raise InputError(f"there is no way to coarsen called {how!r}: choose one of {', '.join(get_args(How))}")
    graph = model if isinstance(model, Graph) else model.graph
    match how:
        case "none":
            return single_groups(graph)
        case "rules":
            return fuse_by_rules(graph)
        case "inductor":
            if isinstance(model, Graph):
                raise InputError(f"inductor needs a PyTorch model, and {graph.name!r} is only a graph: coarsen by "
                                 "rules")
            return fuse_by_inductor(model)
        case "onnxruntime":
            if path is None:
                raise InputError(f"ONNX Runtime needs the ONNX file of {graph.name!r}: give its path, or coarsen by "
                                 "rules")
            return fuse_by_onnxruntime(graph, path)
        case _:
            assert_never(how)
