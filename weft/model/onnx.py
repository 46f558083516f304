"""ONNX files: one as a ``Graph``, and facts about operators written into the file.

Operators are read, shapes inferred and FLOPs counted by the rules below; weights are never loaded. Initialisers of
floating-point type are parameters; whole-number ones and ``Constant`` nodes are buffers. Sizes must be fixed: a
symbolic dimension is given its size by ``dims`` (``{"batch": 8}``), else refused with its name. Counting, as for
PyTorch models (``weft.model.probe``): a multiply-add is two operations; ``Conv`` and ``MatMul`` and their kin by
formula, recurrent layers by their matrix products, pooling one per element of the window, the rest a fixed number per
element of the largest tensor.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from weft.base.errors import InputError, ModelError
from weft.base.files import read_bytes, write_atomic
from weft.model.graph import Graph, OpRow, TensorRole, TensorRow, check_graph, flops_per_element, make_graph

Shape = tuple[int, ...]

_VIEWS: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_SUBGRAPHS: Final = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_RANDOM: Final = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                            "RandomUniformLike"})
_PER_ELEMENT: Final = flops_per_element("onnx")
_SIZES: Final[Mapping[str, float]] = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8e4m3fn": 1, "float8e5m2": 1, "int8": 1, "uint8": 1,
    "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1, "complex64": 8,
    "complex128": 16, "int4": 0.5, "uint4": 0.5}
_MAX_ELEMENTS: Final = 1 << 50
"""Larger tensors are refused: no model has a petabyte in one."""
_MAX_FOLLOWED: Final = 5_000_000
"""At most so many values of shape tensors are followed, which takes a second and 700 MB."""
_MAX_INLINED: Final = 100_000
"""No more nodes may come from local functions."""
_MAX_INLINED_BYTES: Final = 256 << 20
"""Nor may these nodes be larger."""
_NAMES: Final[Mapping[str, str]] = {"float": "float32", "double": "float64"}
"""ONNX's own names of dtypes that have others here."""


def load_onnx(path: str | os.PathLike[str], *, dims: Mapping[str, int] | None = None,
              batch: int | None = None) -> Graph:
    """Return the graph of the ONNX file ``path``.

    ``dims`` gives symbolic dimensions their sizes, by name; ``batch`` that of the first input's first dimension.

    Raises ``ModelError`` if the file is corrupt, has unknown or symbolic shapes, or holds loops or branches.
    """
    model = read_model(path)
    _fix_dims(model, dict(dims or {}), batch)
    inferred = _infer(model, str(path))
    reader = _Reader(where=str(path), graph=inferred.graph)
    reader.read()
    graph = reader.finish(Path(path).stem)
    check_graph(graph)
    return graph


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as problem:
        raise ModelError("reading ONNX files needs the onnx package: pip install 'weft[onnx]'") from problem
    return onnx


def read_model(path: str | os.PathLike[str]) -> Any:
    """Return the ONNX file as a ``ModelProto`` with local functions inlined; weights outside of it are not loaded."""
    onnx = _onnx()
    data = read_bytes(path, error=ModelError)
    try:
        model = onnx.load_model_from_string(data)
        if model.functions:
            _check_functions(model, str(path))
            model = importlib.import_module("onnx.inliner").inline_local_functions(model)
    except ModelError:
        raise
    except Exception as problem:  # protobuf, onnx and C++ errors of many types
        raise ModelError(f"{str(path)!r} is not a readable ONNX file: {_first_line(problem)}") from problem
    if not model.graph.node:
        raise ModelError(f"{str(path)!r} holds no operators: the file is empty or not an ONNX model")
    if not all(isinstance(name, str) for name in _all_names(model.graph)):  # protobuf gives bytes for bad UTF-8
        raise ModelError(f"{str(path)!r} is not a readable ONNX file: it holds names that are not text")
    return model


def _check_functions(model: Any, where: str) -> None:
    """Refuse local functions that call each other so often that a small file would become a very large model."""
    functions = {(item.domain, item.name, item.overload): item for item in model.functions}
    sizes: dict[tuple[str, str, str], tuple[int, int]] = {}
    open_, begun = list(functions), set()
    while open_:
        key = open_.pop()
        if key in sizes:
            continue
        if key not in begun:
            begun.add(key)
            called = dict.fromkeys(_calls(functions[key].node, functions))
            open_ += [key, *(call for call in called if call not in sizes)]
        else:
            sizes[key] = _inlined_size(functions[key].node, sizes)  # of a cycle, which onnx refuses, only a part
    nodes, num_bytes = _inlined_size(model.graph.node, sizes)
    if nodes > _MAX_INLINED or num_bytes > _MAX_INLINED_BYTES:
        raise ModelError(f"{where}: its functions call each other so often that {nodes:,} operators of {num_bytes:,} "
                         f"bytes would come from them: at most {_MAX_INLINED:,} of {_MAX_INLINED_BYTES:,} bytes are "
                         "read")


def _calls(nodes: Any, known: Mapping[tuple[str, str, str], Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the local functions that the nodes call, also in loops and branches, as often as they do."""
    for node in nodes:
        key = (node.domain, node.op_type, node.overload)
        if key in known:
            yield key
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _calls(graph.node, known)


def _inlined_size(nodes: Any, sizes: Mapping[tuple[str, str, str], tuple[int, int]]) -> tuple[int, int]:
    """Return how many nodes come from the functions that these call, with these themselves, and their bytes."""
    called = [sizes[key] for key in _calls(nodes, sizes)]
    return (len(nodes) + sum(count for count, _ in called),
            sum(node.ByteSize() for node in nodes) + sum(num_bytes for _, num_bytes in called))


def _all_names(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)


def _first_line(problem: Exception) -> str:
    text = str(problem).strip()
    return (text.splitlines()[0] if text else type(problem).__name__)[:200]


def _fix_dims(model: Any, dims: Mapping[str, int], batch: int | None) -> None:
    initialised = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in initialised]
    for position, value in enumerate(inputs):
        if not value.type.tensor_type.HasField("shape"):
            raise ModelError(f"input {value.name!r} has no shape: export the model with fixed input sizes")
        for index, dim in enumerate(value.type.tensor_type.shape.dim):
            size = dims.get(dim.dim_param) if dim.dim_param else None
            if size is None and position == 0 and index == 0 and not dim.dim_value:
                size = batch
            if size is not None:
                dim.dim_value = size
            if dim.dim_value <= 0:
                name = dim.dim_param or "without a name"
                raise ModelError(f"input {value.name!r}: dimension {index} is symbolic ({name}). Give its size as an "
                                 f"option ({dim.dim_param or 'name'}=8), or export the model with fixed input sizes")


def _infer(model: Any, where: str) -> Any:
    """Return the model with all shapes that can be inferred.

    The values of shape tensors are followed only where shapes depend on them, and where that is little work: onnx keeps
    an object for every element of a tensor with one dimension.
    """
    for value in model.graph.output:  # the exporter's symbolic output shapes would stand in the way
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    inferred = _infer_shapes(model, where, follow_values=False)
    if _is_complete(inferred.graph) or _num_followed(inferred.graph) > _MAX_FOLLOWED:
        return inferred
    return _infer_shapes(model, where, follow_values=True)


def _infer_shapes(model: Any, where: str, *, follow_values: bool) -> Any:
    try:
        return _onnx().shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=follow_values)
    except Exception as problem:
        raise ModelError(f"{where}: shapes cannot be inferred: {_first_line(problem)}") from problem


def _is_complete(graph: Any) -> bool:
    """Return whether the shapes of all that the nodes make are known."""
    known = {value.name for value in (*graph.value_info, *graph.output) if min(_shape_of(value)[0], default=0) >= 0}
    return all(name in known for node in graph.node for name in node.output if name)


def _num_followed(graph: Any) -> int:
    """Return the most elements of one-dimensional tensors that are looked at if their values are followed.

    Where a shape is not known yet, the output is taken to be as long as the longest input, and that of ``Concat`` as
    all of them together.
    """
    length = {tensor.name: tensor.dims[0] if len(tensor.dims) == 1 else 1 for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        shape = _shape_of(value)[0]
        if min(shape, default=0) >= 0:
            length[value.name] = shape[0] if len(shape) == 1 else 1
    total = 0
    for node in graph.node:
        read = [length.get(name, 1) for name in node.input]
        longest = sum(read) if node.op_type == "Concat" else max(read, default=1)
        for name in node.output:
            total += length.setdefault(name, longest)
        total += sum(read)
        if total > _MAX_FOLLOWED:
            break
    return total


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Reader:
    """The columns while they grow."""

    where: str
    graph: Any
    tensors: list[TensorRow] = field(default_factory=list)
    is_constant: list[bool] = field(default_factory=list)
    """By tensor."""
    ops: list[OpRow] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    """Of operators, with the number that the next one of the name is tried with."""
    warnings: dict[str, None] = field(default_factory=dict)

    def read(self) -> None:
        """Take over tensors and nodes in the order of the file."""
        graph = self.graph
        for value in (*graph.value_info, *graph.input, *graph.output):
            self.shapes[value.name] = _shape_of(value)
        for tensor in graph.initializer:
            self._add_stored(tensor.name, tuple(tensor.dims), _dtype(tensor.data_type))
        for tensor in graph.sparse_initializer:
            self._add_stored(tensor.values.name, tuple(tensor.dims), _dtype(tensor.values.data_type))
        for value in graph.input:
            if value.name not in self.ids:
                shape, dtype = self.shapes[value.name]
                self._add(value.name, shape, dtype, TensorRole.INPUT)
        for node in graph.node:
            self._add_node(node)

    def _add_stored(self, name: str, shape: Shape, dtype: str) -> None:
        is_parameter = dtype.startswith(("float", "bfloat"))
        self._add(name, shape, dtype, TensorRole.PARAMETER if is_parameter else TensorRole.BUFFER,
                  is_constant=not is_parameter)

    def _add(self, name: str, shape: Shape, dtype: str, role: TensorRole, *, producer: int = -1, base: int = -1,
             is_constant: bool = False) -> None:
        if name in self.ids:
            raise ModelError(f"{self.where}: tensor {name!r} is made twice: the file is not a valid ONNX model")
        if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
            raise ModelError(f"{self.where}: tensor {name!r} has the shape {list(shape)}: sizes are zero or more, "
                             f"and there are at most {_MAX_ELEMENTS:g} elements in all")
        self.ids[name] = len(self.tensors)
        num_bytes = math.ceil(math.prod(shape) * Fraction(_SIZES.get(dtype, 4)))
        self.tensors.append(TensorRow(name=name, shape=shape, dtype=dtype, role=role, producer=producer, base=base,
                                      num_bytes=num_bytes))
        self.is_constant.append(is_constant)

    def _add_node(self, node: Any) -> None:
        kind = node.op_type
        if kind in _SUBGRAPHS:
            raise ModelError(f"{self.where}: node {node.name!r} is {kind}: loops and branches cannot be planned. "
                             "Export the model without them")
        outputs = [(name, *self._known_shape(name, node)) for name in node.output if name]
        if kind == "Constant":
            for name, shape, dtype in outputs:
                self._add(name, shape, dtype, TensorRole.BUFFER, is_constant=True)
            return
        missing = [name for name in node.input if name and name not in self.ids]
        if missing:
            raise ModelError(f"{self.where}: node {node.name!r} ({kind}) reads {missing[0]!r}, which nothing made "
                             "before it: the file is not a valid ONNX model")
        inputs = list(dict.fromkeys(self.ids[name] for name in node.input if name))
        self._add_op(node, inputs, outputs)

    def _add_op(self, node: Any, inputs: list[int], outputs: list[tuple[str, Shape, str]]) -> None:
        kind, read = node.op_type, [self.tensors[index] for index in inputs]
        is_view = kind in _VIEWS
        constant = kind not in _RANDOM and all(self.is_constant[index] for index in inputs)
        shapes = [self.tensors[self.ids[name]].shape if name else None for name in node.input]
        index = len(self.ops)
        for name, shape, dtype in outputs:
            base = inputs[0] if is_view and inputs else -1
            owner = self.tensors[base].base if base >= 0 and self.tensors[base].base >= 0 else base
            self._add(name, shape, dtype, TensorRole.ACTIVATION, producer=index, base=owner, is_constant=constant)
        written = [self.tensors[self.ids[name]].num_bytes for name, *_ in outputs]
        name = self._unique(node.name or f"{kind}_{index}")
        numbers = {} if is_view else {
            "flops": self._flops(node, shapes, [shape for _, shape, _ in outputs]),
            "bytes_read": float(sum(tensor.num_bytes for tensor in read)), "bytes_written": float(sum(written))}
        self.ops.append(OpRow(name=name, kind=kind, module=".".join(node.name.strip("/").split("/")[:-1]),
                              inputs=inputs, numbers=numbers, is_constant=constant))

    def _known_shape(self, name: str, node: Any) -> tuple[Shape, str]:
        shape, dtype = self.shapes.get(name, ((-1,), ""))
        if any(size < 0 for size in shape):
            raise ModelError(f"{self.where}: the shape of {name!r}, made by node {node.name!r} ({node.op_type}), "
                             "cannot be inferred: it depends on values. Export the model with fixed sizes")
        return shape, dtype

    def _flops(self, node: Any, inputs: list[Shape | None], outputs: list[Shape]) -> float:
        helper: Any = _onnx().helper
        settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        rule: Any = _RULES.get(node.op_type, _per_element)
        try:
            return float(rule(node.op_type, inputs, outputs, settings))
        except (IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError) as problem:
            raise ModelError(f"{self.where}: node {node.name!r} ({node.op_type}) has other inputs than the operator "
                             "takes: the file is not a valid ONNX model") from problem

    def _unique(self, name: str) -> str:
        unique, number = name, self.names.get(name, 0)
        while unique in self.names:
            number += 1
            unique = f"{name}_{number}"
        self.names[name] = number
        self.names.setdefault(unique, 0)
        return unique

    def finish(self, name: str) -> Graph:
        """Return the graph."""
        ops, tensors = self.ops, self.tensors
        unknown = [value.name for value in self.graph.output if value.name not in self.ids]
        if unknown:
            raise ModelError(f"{self.where}: nothing makes the output {unknown[0]!r}")
        random = sorted({op.kind for op in ops if op.kind in _RANDOM and op.kind != "Dropout"})
        first = next((tensor for tensor in tensors if tensor.role is TensorRole.INPUT and tensor.shape), None)
        return make_graph(
            ops, tensors, name=name, outputs=tuple(self.ids[value.name] for value in self.graph.output),
            batch=first.shape[0] if first is not None and first.shape[0] > 0 else 1,
            warnings=tuple(f"operator {kind} draws random numbers" for kind in random))


def _shape_of(value: Any) -> tuple[Shape, str]:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return (-1,), _dtype(tensor.elem_type)
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim), _dtype(
        tensor.elem_type)


def _dtype(number: int) -> str:
    try:
        name: str = _onnx().TensorProto.DataType.Name(number).lower()
    except ValueError:
        return ""
    return _NAMES.get(name, name)


# ---- counting -----------------------------------------------------------------------------------------------------


def _per_element(kind: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], settings: Any) -> float:
    largest = max((math.prod(shape) for shape in (*inputs, *outputs) if shape is not None), default=0)
    return _PER_ELEMENT.get(kind, 1.0) * largest


def _conv(kind: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], settings: Any) -> float:
    weight = inputs[3 if kind == "QLinearConv" else 1]
    assert weight is not None
    assert inputs[0] is not None
    # each output takes one product per weight of its filter; transposed, each input feeds one
    places = math.prod(inputs[0]) if kind == "ConvTranspose" else math.prod(outputs[0])
    return 2.0 * places * math.prod(weight[1:])


def _matmul(kind: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], settings: Any) -> float:
    left = inputs[0]
    assert left is not None
    inner = left[-2] if kind == "Gemm" and settings.get("transA") else left[-1]
    return 2.0 * math.prod(outputs[0]) * inner


def _recurrent(kind: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], settings: Any) -> float:
    sequence, weight, recurrence = inputs[:3]
    if sequence is None or weight is None or recurrence is None:
        raise TypeError("a recurrent layer needs its input and both weights")
    return 2.0 * sequence[0] * sequence[1] * (math.prod(weight) + math.prod(recurrence))


def _pool(kind: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], settings: Any) -> float:
    if kind.startswith("Global"):
        return _per_element(kind, inputs, outputs, settings)
    return float(math.prod(outputs[0]) * math.prod(settings["kernel_shape"]))


_RULES: Final[Mapping[str, Callable[..., float]]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "QLinearConv"), _conv),
    **dict.fromkeys(("FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "MaxPool"), _pool),
}


# ---- metadata -----------------------------------------------------------------------------------------------------
#
# Facts about operators, such as the device each runs on, written into the metadata of a file's nodes. A node is found
# by the tensors it makes, whose names a ``Graph`` keeps; nodes themselves often have no names. Nothing else in the file
# changes: order, names, initialisers, opsets. Weights in files beside it are neither read nor copied, so the new file
# must lie in the same folder as the old one to find them.


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
    outside = sorted({entry.value for tensor in model.graph.initializer for entry in tensor.external_data
                      if entry.key == "location"})
    if outside and Path(out).resolve().parent != Path(path).resolve().parent:
        raise InputError(f"{str(path)!r} keeps weights in {outside[0]!r} beside it, which {str(out)!r} would not find: "
                         f"write the new file into {str(Path(path).parent)!r}")
    found: set[int] = set()
    for node in model.graph.node:
        made = (graph.tensor_index[name] for name in node.output if name and name in graph.tensor_index)
        op = next((op for tensor in made if (op := int(graph.tensor_producer[tensor])) >= 0), None)
        if op is not None and properties[op]:
            _set_properties(node, properties[op])
            found.add(op)
    missing = [op for op in range(graph.num_ops) if properties[op] and op not in found]
    if missing:
        raise InputError(f"{str(path)!r} has no node that makes the outputs of operator "
                         f"{graph.op_names[missing[0]]!r}: it is another file than the one that was planned")
    write_atomic(out, model.SerializeToString(deterministic=True))
    return Annotated(num_nodes=len(model.graph.node), num_annotated=len(found))


def _set_properties(node: Any, properties: Mapping[str, str]) -> None:
    kept = [(item.key, item.value) for item in node.metadata_props if item.key not in properties]
    del node.metadata_props[:]
    for key, value in (*kept, *properties.items()):
        node.metadata_props.add(key=key, value=value)
