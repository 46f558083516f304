"""The model as data: operators and tensors in columns, immutable, in topological order.

A graph has ``num_ops`` operators and ``num_tensors`` tensors. A tensor is produced by one operator, or by none if it
is an input of the model, a parameter or a buffer. Every column is one array (or tuple) over all operators or tensors,
so that 100,000 operators stay cheap to hold, copy and compute with:

    op 0  aten.linear  reads tensors 0 (input), 1 (weight)   writes tensor 2
    op 1  aten.relu    reads tensor  2                        writes tensor 3

Graphs come from ``weft.model.trace`` (PyTorch), ``weft.model.onnx`` and ``weft.model.graph_file``; they are always
functionalised: no operator changes a tensor in place. Costs in seconds are not here: ``weft.cost`` derives them.
"""

from __future__ import annotations

import enum
import gc
import hashlib
import heapq
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import ModelError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

UNKNOWN_BATCH_DIM = -2
"""In ``Graph.tensor_batch_dim``: the tracer did not look."""
NO_BATCH_DIM = -1
"""In ``Graph.tensor_batch_dim``: the tensor's shape does not depend on the batch size."""
DETACH = "aten.detach"
"""The operator that hands a tensor on and its gradient not back."""
OPTIONAL_MARKS = ("is_scattered", "is_frozen", "has_turned_gradient")
"""Columns of tensors that are empty where no tensor is marked."""
_OPTIONAL_COLUMNS = ("saved_inside_bytes", "forward_room_bytes", "backward_room_bytes")
"""Columns of operators that are zero where an importer does not know them."""
OP_NUMBERS = ("flops", "bytes_read", "bytes_written", "input_grad_flops", "input_grad_bytes", "weight_grad_flops",
              "weight_grad_bytes", *_OPTIONAL_COLUMNS)
"""Columns of operators that are zero or more."""


class TensorRole(enum.IntEnum):
    """Where a tensor comes from."""

    ACTIVATION = 0
    INPUT = 1
    PARAMETER = 2
    BUFFER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """What a graph file says about costs and placement itself, one entry per operator (or tensor)."""

    times: tuple[Mapping[str, float] | None, ...]
    """Seconds by device kind or device name, per operator."""
    memory_bytes: tuple[int, ...]
    """Bytes that an operator keeps resident on its device."""
    allowed_kinds: tuple[tuple[str, ...] | None, ...]
    """Device kinds (or names) that may run an operator; None means all."""
    colocate: tuple[str | None, ...]
    """Operators with the same text share a device."""
    transfer_times: tuple[Mapping[str, float] | None, ...]
    """Seconds by ordered device pair (``"d0>d1"``), per tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A model's operators and tensors as immutable columns; see the module's docstring."""

    name: str
    """The model's name, for people."""
    op_names: tuple[str, ...]
    """Unique names, in topological order."""
    op_kinds: tuple[str, ...]
    """What the operator is, such as ``aten.addmm`` or ``Conv``."""
    op_modules: tuple[str, ...]
    """Path of the module that owns the operator, or ``""``."""
    flops: F64
    """Floating-point operations of the forward pass."""
    bytes_read: F64
    """Bytes read by the forward pass, parameters included; zero for views."""
    bytes_written: F64
    """Bytes written by the forward pass; zero for views."""
    input_grad_flops: F64
    """Operations of the backward pass that the gradient of the inputs needs; zero where there is no backward."""
    input_grad_bytes: F64
    """Bytes read and written by that part."""
    weight_grad_flops: F64
    """Operations of the backward pass that only the gradients of parameters need."""
    weight_grad_bytes: F64
    """Bytes read and written by that part."""
    is_constant: Bool
    """The operator depends on neither inputs nor parameters: any stage may compute it for itself."""
    input_start: I64
    """Operator ``i`` reads ``inputs[input_start[i]:input_start[i + 1]]``."""
    inputs: I64
    """Tensor ids, by operator."""
    tensor_names: tuple[str, ...]
    """Unique names; parameters and buffers by their path in the module."""
    tensor_shapes: tuple[tuple[int, ...], ...]
    """Shapes; ``()`` where unknown."""
    tensor_dtypes: tuple[str, ...]
    """Such as ``float32``; ``""`` where unknown."""
    tensor_role: I64
    """``TensorRole`` values."""
    tensor_producer: I64
    """The operator that writes the tensor, or -1."""
    tensor_bytes: I64
    """Size in bytes."""
    tensor_base: I64
    """The tensor whose memory this one is a view of (never itself a view), or -1."""
    is_saved: Bool
    """The tensor is kept from the forward to the backward pass. A view is never marked: the tensor it is of is."""
    tensor_batch_dim: I64
    """The dimension that grows with the batch, ``NO_BATCH_DIM`` or ``UNKNOWN_BATCH_DIM``."""
    outputs: tuple[int, ...]
    """Tensor ids that the model returns; for training the first is the scalar loss."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names that share one parameter; the first of each group is the name in ``tensor_names``."""
    batch: int = 1
    """Number of samples that all sizes and costs are for."""
    has_backward: bool = False
    """Backward costs are there (from the joint graph or by rule, see ``backward_source``)."""
    backward_source: str = "none"
    """``joint``: traced, forward and backward together; ``rule``: by the documented rule; ``none``: inference only."""
    given: GivenCosts | None = None
    """Costs written in a graph file, or None."""
    warnings: tuple[str, ...] = ()
    """What the importer wants the user to know."""
    asks_recompute: bool = False
    """The model asks for gradient checkpointing: plans should recompute."""
    sources: tuple[str, ...] = field(default=(), repr=False)
    """Source line of each operator (``file.py:12``), or empty."""
    saved_inside_bytes: F64 = field(default_factory=lambda: np.zeros(0), repr=False)
    """Bytes that an operator keeps for its backward pass beyond the tensors marked in ``is_saved``."""
    forward_room_bytes: F64 = field(default_factory=lambda: np.zeros(0), repr=False)
    """Bytes that an operator takes while it runs, beyond what it reads, gives and keeps."""
    backward_room_bytes: F64 = field(default_factory=lambda: np.zeros(0), repr=False)
    """The same for its backward: beyond what was kept, and the gradients it is given and gives."""
    is_scattered: Bool = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    """By tensor: it does not lie in one piece and in order; empty where nobody has looked."""
    is_frozen: Bool = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    """By tensor: a parameter that is not trained (``requires_grad`` is off); empty where all are."""
    has_turned_gradient: Bool = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    """By tensor: its gradient may lie in another order than it, and is copied to be handed on; empty where nobody has
    looked."""

    def __post_init__(self) -> None:
        for column in _OPTIONAL_COLUMNS:
            if len(getattr(self, column)) == 0:
                object.__setattr__(self, column, np.zeros(len(self.op_names)))

    @property
    def num_ops(self) -> int:
        """Return the number of operators."""
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        """Return the number of tensors."""
        return len(self.tensor_names)

    def op_inputs(self, op: int) -> I64:
        """Return the ids of the tensors that ``op`` reads."""
        return self.inputs[self.input_start[op] : self.input_start[op + 1]]

    def op_outputs(self, op: int) -> I64:
        """Return the ids of the tensors that ``op`` writes."""
        start, tensors = self.outputs_by_op
        return tensors[start[op] : start[op + 1]]

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        """Return each operator's id by name."""
        return {name: index for index, name in enumerate(self.op_names)}

    @cached_property
    def tensor_index(self) -> Mapping[str, int]:
        """Return each tensor's id by name."""
        return {name: index for index, name in enumerate(self.tensor_names)}

    @cached_property
    def outputs_by_op(self) -> tuple[I64, I64]:
        """Return (start, tensors): operator ``i`` writes ``tensors[start[i]:start[i + 1]]``."""
        produced = np.flatnonzero(self.tensor_producer >= 0)
        order = produced[np.argsort(self.tensor_producer[produced], kind="stable")]
        counts = np.bincount(self.tensor_producer[produced], minlength=self.num_ops)
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int64), order.astype(np.int64)

    @cached_property
    def consumer_op(self) -> I64:
        """Return, for each entry of ``inputs``, the operator that reads it."""
        return np.repeat(np.arange(self.num_ops, dtype=np.int64), np.diff(self.input_start))

    @cached_property
    def edges(self) -> I64:
        """Return all (producer op, consumer op, tensor) rows, in consumer order."""
        producer = self.tensor_producer[self.inputs]
        keep = producer >= 0
        return np.stack([producer[keep], self.consumer_op[keep], self.inputs[keep]], axis=1)

    @cached_property
    def parameters(self) -> I64:
        """Return the ids of the parameter tensors."""
        return np.flatnonzero(self.tensor_role == TensorRole.PARAMETER).astype(np.int64)

    @cached_property
    def needs_gradient(self) -> Bool:
        """Return which tensors need a gradient in training: floating-point ones that depend on a parameter.

        What is detached does not.
        """
        is_float = np.asarray([dtype == "" or dtype.startswith(("float", "bfloat", "complex"))
                               for dtype in self.tensor_dtypes], dtype=bool)
        needs: Bool = (self.tensor_role == TensorRole.PARAMETER) & is_float
        if len(self.is_frozen):
            needs &= ~self.is_frozen
        for op in range(self.num_ops):
            if self.op_kinds[op] != DETACH and needs[self.op_inputs(op)].any():
                produced = self.op_outputs(op)
                needs[produced] = is_float[produced]
        return needs

    @cached_property
    def memory_root(self) -> I64:
        """Return for each tensor the one whose memory it lives in: itself, or what it is a view of."""
        root: I64 = np.arange(self.num_tensors, dtype=np.int64)
        for tensor in np.flatnonzero(self.tensor_base >= 0):
            root[tensor] = root[self.tensor_base[tensor]]
        return root

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all parameters, shared ones counted once."""
        return int(self.tensor_bytes[self.parameters].sum())

    @property
    def parameter_dtype(self) -> str:
        """Return the floating-point type that most parameters have; float32 where there are none."""
        sizes: dict[str, int] = {}
        for tensor in self.parameters.tolist():
            name = self.tensor_dtypes[tensor]
            if name.startswith(("float", "bfloat")):
                sizes[name] = sizes.get(name, 0) + int(self.tensor_bytes[tensor])
        return max(sizes, key=lambda name: sizes[name], default="float32")

    @cached_property
    def parameter_texts(self) -> Mapping[str, str]:
        """Return dtype and shape of each parameter by name: ``float32 64x32``."""
        return {self.tensor_names[item]: _text(self.tensor_dtypes[item], self.tensor_shapes[item])
                for item in self.parameters.tolist()}

    @cached_property
    def input_texts(self) -> Mapping[str, str]:
        """Return the same of each input of the model, without the first dimension if that is the samples."""
        found = {}
        for item in np.flatnonzero(self.tensor_role == TensorRole.INPUT).tolist():
            shape = self.tensor_shapes[item]
            found[self.tensor_names[item]] = _text(self.tensor_dtypes[item], shape[int(shape[:1] == (self.batch,)):])
        return found

    @cached_property
    def depends_on_inputs(self) -> Bool:
        """Return which tensors depend on the model's inputs."""
        depends: Bool = self.tensor_role == TensorRole.INPUT
        for op in range(self.num_ops):
            if depends[self.op_inputs(op)].any():
                depends[self.op_outputs(op)] = True
        return depends

    @cached_property
    def on_path_to_loss(self) -> Bool:
        """Return the operators through which the loss sends gradients: others leave none, nor does a detach."""
        wanted, found = np.zeros(self.num_tensors, dtype=bool), np.zeros(self.num_ops, dtype=bool)
        wanted[list(self.outputs[:1])] = True
        for op in range(self.num_ops - 1, -1, -1):
            outputs = self.op_outputs(op)
            if (wanted[outputs] & self.needs_gradient[outputs]).any():
                wanted[self.op_inputs(op)] = found[op] = True
        return found

    @cached_property
    def sample_work(self) -> tuple[F64, F64]:
        """Return, by operator, the operations and the bytes written for one sample, of those that depend on an input.

        So they are the same for every batch size. Floating-point numbers count as 4 bytes, whatever they are.
        """
        depends, works, written = self.depends_on_inputs, np.zeros(self.num_ops, dtype=bool), np.zeros(self.num_ops)
        works[self.consumer_op[depends[self.inputs]]] = True
        for tensor in np.flatnonzero(depends & (self.tensor_producer >= 0) & (self.tensor_base < 0)).tolist():
            size = 4 if self.tensor_dtypes[tensor].startswith(("float", "bfloat")) else 1
            written[self.tensor_producer[tensor]] += size * math.prod(self.tensor_shapes[tensor])
        return np.where(works, self.flops, 0.0) / self.batch, written / self.batch

    @cached_property
    def digest(self) -> str:
        """Return what identifies the model: names, kinds and wiring of operators, and the parameters' shapes.

        It does not depend on the batch size or on sequence lengths, so that a plan stays valid for both.
        """
        parameters = [(self.tensor_names[t], self.tensor_shapes[t], self.tensor_dtypes[t]) for t in self.parameters]
        given: Any = None
        if self.given is not None:
            given = [[_plain(item) for item in column] for column in
                     (self.given.times, self.given.memory_bytes, self.given.allowed_kinds, self.given.colocate,
                      self.given.transfer_times)]
        content = [self.op_names, self.op_kinds, parameters, self.tied, given, self.outputs,
                   self.tensor_names, self.inputs.tolist(), self.input_start.tolist()]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {'x'.join(map(str, shape)) or 'number'}"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


# ---- from rows to columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One operator, as importers find it."""

    name: str
    kind: str
    module: str = ""
    source: str = ""
    inputs: Sequence[int] = ()
    """Tensor ids."""
    is_constant: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By the names of ``OP_NUMBERS``; the others are zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor, as importers find it."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    role: TensorRole = TensorRole.ACTIVATION
    producer: int = -1
    num_bytes: int = 0
    base: int = -1
    is_saved: bool = False
    is_scattered: bool = False
    is_frozen: bool = False
    has_turned_gradient: bool = False
    batch_dim: int = UNKNOWN_BATCH_DIM


def make_graph(ops: Sequence[OpRow], tensors: Sequence[TensorRow], **more: Any) -> Graph:
    """Return the graph of these rows; ``more`` are the fields of ``Graph`` that are not columns."""
    def whole(key: str) -> I64:
        return np.array([getattr(tensor, key) for tensor in tensors], dtype=np.int64)

    numbers: dict[str, Any] = {key: np.array([op.numbers.get(key, 0.0) for op in ops], dtype=np.float64)
                               for key in OP_NUMBERS}
    marks: dict[str, Any] = {key: np.array([getattr(tensor, key) for tensor in tensors], dtype=np.bool_)
                             for key in OPTIONAL_MARKS}
    return Graph(
        op_names=tuple(op.name for op in ops), op_kinds=tuple(op.kind for op in ops),
        op_modules=tuple(op.module for op in ops),
        sources=tuple(op.source for op in ops) if any(op.source for op in ops) else (),
        is_constant=np.array([op.is_constant for op in ops], dtype=np.bool_),
        input_start=np.cumsum([0] + [len(op.inputs) for op in ops]).astype(np.int64),
        inputs=np.array([tensor for op in ops for tensor in op.inputs], dtype=np.int64),
        tensor_names=tuple(tensor.name for tensor in tensors), tensor_shapes=tuple(tensor.shape for tensor in tensors),
        tensor_dtypes=tuple(tensor.dtype for tensor in tensors), tensor_role=whole("role"),
        tensor_producer=whole("producer"), tensor_bytes=whole("num_bytes"), tensor_base=whole("base"),
        is_saved=np.array([tensor.is_saved for tensor in tensors], dtype=np.bool_),
        tensor_batch_dim=whole("batch_dim"), **{key: mark if mark.any() else mark[:0] for key, mark in marks.items()},
        **numbers, **more)


def flops_per_element(kinds: str) -> dict[str, float]:
    """Return by operator the operations per element of its largest tensor, for ``aten`` or ``onnx``; others take 1."""
    table = tomllib.loads(Path(__file__).with_name("flops.toml").read_text(encoding="utf-8"))[kinds]
    return {name: float(count) for count, names in table.items() for name in names.split()}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let Python's garbage collector not run in the body: making 100,000 small objects takes twice as long with it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def topological(follow: Sequence[Iterable[int]], key: Sequence[Any]) -> list[int]:
    """Return the items in an order in which each is before those that follow it, the smallest key first.

    Items in a circle, and those after one, are left out.
    """
    waits = [0] * len(follow)
    for items in follow:
        for item in items:
            waits[item] += 1
    ready = [(key[item], item) for item, wait in enumerate(waits) if not wait]
    heapq.heapify(ready)
    order = []
    while ready:
        _, first = heapq.heappop(ready)
        order.append(first)
        for item in follow[first]:
            waits[item] -= 1
            if not waits[item]:
                heapq.heappush(ready, (key[item], item))
    return order


def find_cycle(edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the nodes of one cycle among (source, target) pairs, from the least of them; nothing if there is none.

    >>> find_cycle([(0, 1), (2, 3), (3, 1), (1, 2)])
    [1, 2, 3]
    """
    sources: dict[int, list[int]] = {}
    for source, target in edges:
        sources.setdefault(target, []).append(source)
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as problem:
        cycle = problem.args[1][:-1]
        first = cycle.index(min(cycle))
        return [*cycle[first:], *cycle[:first]]
    return []


def check_graph(graph: Graph) -> None:
    """Raise ``ModelError`` with every problem found: column lengths, references, order, unique names, sizes."""
    problems = [*_length_problems(graph)] or [*_reference_problems(graph), *_value_problems(graph)]
    if problems:
        shown = "; ".join(problems[:20])
        raise ModelError(f"graph {graph.name!r}: {shown}")


_OP_COLUMNS = ("op_kinds", "op_modules", "is_constant", *OP_NUMBERS)
_TENSOR_COLUMNS = ("tensor_shapes", "tensor_dtypes", "tensor_role", "tensor_producer", "tensor_bytes", "tensor_base",
                   "is_saved", "tensor_batch_dim")


def _length_problems(graph: Graph) -> list[str]:
    problems = []
    for columns, length in ((_OP_COLUMNS, graph.num_ops), (_TENSOR_COLUMNS, graph.num_tensors)):
        for column in columns:
            actual = len(getattr(graph, column))
            if actual != length:
                problems.append(f"column {column} has {actual} entries, not {length}")
    for column in OPTIONAL_MARKS:
        if len(getattr(graph, column)) not in (0, graph.num_tensors):
            problems.append(f"column {column} has {len(getattr(graph, column))} entries, not {graph.num_tensors}")
    if len(graph.input_start) != graph.num_ops + 1 or graph.input_start[0] != 0 or (
            graph.input_start[-1] != len(graph.inputs)) or np.any(np.diff(graph.input_start) < 0):
        problems.append("input_start does not divide inputs among the operators")
    return problems


def _reference_problems(graph: Graph) -> list[str]:
    problems = []
    for what, names in (("operator", graph.op_names), ("tensor", graph.tensor_names)):
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            problems.append(f"two {what}s are named {double!r}")
    for what, ids in (("inputs", graph.inputs), ("outputs", np.asarray(graph.outputs, dtype=np.int64))):
        if len(ids) and (ids.min() < 0 or ids.max() >= graph.num_tensors):
            problems.append(f"{what} names a tensor that does not exist")
    producer = graph.tensor_producer
    if len(producer) and (producer.max() >= graph.num_ops or producer.min() < -1):
        problems.append("tensor_producer names an operator that does not exist")
    if problems:
        return problems
    backward = graph.edges[graph.edges[:, 0] >= graph.edges[:, 1]] if len(graph.edges) else graph.edges
    for source, target, _tensor in backward[:5]:
        problems.append(f"operator {graph.op_names[target]!r} reads from {graph.op_names[source]!r}, which is not "
                        "before it: operators must be in topological order")
    return problems


def _value_problems(graph: Graph) -> list[str]:
    problems = []
    for column in (*OP_NUMBERS, "tensor_bytes"):
        values = getattr(graph, column)
        bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
        names = graph.tensor_names if column == "tensor_bytes" else graph.op_names
        for index in bad[:3]:
            problems.append(f"{column} of {names[index]!r} is {values[index]}: it must be zero or more and finite")
    return problems
