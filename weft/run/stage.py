"""From the traced model and a set of operators to the stage that a rank runs for them.

``build_stage`` copies the operators of one stage out of the model's fx graph:

- parameters and buffers are sunk into the stage (``get_attr``), never arguments;
- constant operators (masks, position ids) are copied into every stage that reads them;
- ``getitem`` stays with the operator that makes the tuple;
- what other stages make becomes an argument, what they need becomes an output, any number of each.

An output that would share memory with an argument is copied, because arguments lie in buffers that are used again.
Tensors have the names of ``Graph.tensor_names``, so that stages, channels and buckets speak of the same things.

``Stage`` makes a module ready to run: one plain function call per forward, for whole and for split backward passes.
``GraphModule.__call__`` and attribute look-up through ``nn.Module`` cost as much as a small operator, so the generated
``forward`` is called directly with an object that has the parameters as plain attributes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Interpreter, Node

from weft.base.errors import ModelError
from weft.model.probe import is_random
from weft.model.trace import TracedModel, retarget
from weft.run.again import Repeating
from weft.run.compiled import CompiledStage, Compiler, Request, compile_stage
from weft.run.mesh import ReplicaMesh
from weft.run.random_state import RankRandom
from weft.run.split_backward import WeightGradients, attributes_of, split_weight_gradients
from weft.run.wire import memory_order


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelGraph:
    """A whole model as an fx graph whose placeholders are inputs, parameters and buffers."""

    graph: FxGraph
    tensor_names: Mapping[Node, str]
    """The name of every tensor: placeholders, operators, and ``getitem`` of operators with several results."""
    op_names: Mapping[Node, str]
    """The name of every operator; ``getitem`` nodes are part of the operator they read."""
    parameters: frozenset[str]
    """Tensor names that are parameters."""
    buffers: frozenset[str]
    """Tensor names that are buffers or lifted constants."""
    constants: frozenset[str]
    """Names of operators that depend on neither inputs nor parameters."""
    buffer_updates: Mapping[str, Node]
    """The new value of each buffer that the forward changes."""

    @cached_property
    def nodes_of_op(self) -> Mapping[str, list[tuple[int, Node]]]:
        """Return the nodes of every operator, ``getitem`` nodes included, with their positions in the graph."""
        found: dict[str, list[tuple[int, Node]]] = {}
        for position, node in enumerate(self.graph.nodes):
            if node.op == "call_function" and (name := self.op_names.get(_owner(node))) is not None:
                found.setdefault(name, []).append((position, node))
        return found


def model_graph(traced: TracedModel) -> ModelGraph:
    """Return a traced model with its nodes under the names of its ``Graph``."""
    program, graph = traced.program, traced.graph
    tensor_names = dict(program.names_of_nodes)
    op_names: dict[Node, str] = {}
    for op, (first, *items) in program.op_nodes.items():
        op_names[program.nodes[first]] = op
        for item in items:
            node = program.nodes[item]
            tensor_names.setdefault(node, f"{op}:{node.args[1]}")
    constants = {name for name, is_constant in zip(graph.op_names, graph.is_constant, strict=True) if is_constant}
    return ModelGraph(
        graph=program.fx_graph, tensor_names=tensor_names, op_names=op_names, constants=frozenset(constants),
        parameters=frozenset(program.parameters.values()),
        buffers=frozenset(program.buffers.values()) | program.constants.keys(),
        buffer_updates={path: program.nodes[program.tensor_nodes[name]]
                        for path, name in program.buffer_updates.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class StageModule:
    """One stage: ``module(*inputs)`` returns the tuple of its outputs."""

    module: GraphModule
    inputs: tuple[str, ...]
    """Names of the arguments: inputs of the model and tensors of other stages, in order of first use."""
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    """Names of its parameters; ``attribute_name`` gives the attribute of the module that holds one."""
    values: Mapping[str, Tensor]
    """Arguments and outputs as traced, without data: their shape, dtype and layout."""
    updated_buffers: tuple[str, ...]
    """Buffers that the forward changes: their new values follow the outputs."""
    uses_random: bool
    """Some operator draws random numbers (a recomputation must draw the same again)."""
    op_names: Mapping[Node, str]
    """The operators of the model by their nodes in the module's graph."""
    tensor_names: Mapping[Node, str]
    """The tensors of the model by their nodes in the module's graph."""


def attribute_name(name: str) -> str:
    """Return a Python identifier for a tensor's name, different for different names."""
    return "t_" + "".join(char if char.isascii() and char.isalnum() else f"_{ord(char):x}_" for char in name)


def build_stage(model: ModelGraph, ops: Sequence[str], outputs: Sequence[str], *, values: Callable[[str], Tensor],
                device: torch.device, lets_go: bool = False) -> StageModule:
    """Return the stage of the operators ``ops`` that returns the tensors ``outputs``.

    ``values`` gives its parameters and buffers by tensor name; constants are made on ``device``. If it ``lets_go`` of
    its parameters, outputs that share their memory are copied. Raise ``ModelError`` if an output is not computed by
    these operators.
    """
    builder = _Builder(model, frozenset(ops))
    builder.copy_all()
    by_name = {model.tensor_names[node]: node for node in builder.copied if node in model.tensor_names}
    for name in outputs:
        if name not in by_name:
            raise ModelError(f"tensor {name!r} is not computed by the stage that should send it")
    updated = tuple(name for name, node in model.buffer_updates.items()
                    if node in builder.copied and name in builder.buffers)
    results = [*(by_name[name] for name in outputs), *(model.buffer_updates[name] for name in updated)]
    builder.graph.output(tuple(builder.copied[node] for node in results))
    attributes = {attribute_name(name): values(name) for name in (*builder.parameters, *builder.buffers)}
    _retarget(builder.graph, torch.device("meta"))
    _copy_shared_outputs(builder.graph, lets_go=lets_go)
    _retarget(builder.graph, device)
    return StageModule(
        module=GraphModule(attributes, builder.graph, class_name="Stage"), inputs=tuple(builder.inputs),
        outputs=tuple(outputs), parameters=tuple(builder.parameters),
        values={name: node.meta["val"] for name, node in builder.inputs.items()}
        | {name: by_name[name].meta["val"] for name in outputs},
        updated_buffers=updated, uses_random=builder.uses_random,
        op_names={new: model.op_names[node] for node, new in builder.copied.items() if node in model.op_names},
        tensor_names={new: model.tensor_names[node] for node, new in builder.copied.items()
                      if node in model.tensor_names})


class _Builder:
    """Copies nodes into a new graph, and notes what had to become an argument or an attribute."""

    def __init__(self, model: ModelGraph, ops: frozenset[str]) -> None:
        self.model, self.ops = model, ops
        self.graph = FxGraph()
        self.copied: dict[Node, Node] = {}
        self.inputs: dict[str, Node] = {}
        self.parameters: dict[str, Node] = {}
        self.buffers: dict[str, Node] = {}
        self.uses_random = False
        self._last_input: Node | None = None

    def copy_all(self) -> None:
        """Copy every operator of the stage, in the order of the model."""
        nodes = [item for op in self.ops for item in self.model.nodes_of_op.get(op, ())]
        for _, node in sorted(nodes, key=lambda item: item[0]):
            self._copy(node)

    def _value(self, node: Node) -> Node:
        """Return the copy of ``node``, made on demand: operator, argument, attribute or constant."""
        if node in self.copied:
            return self.copied[node]
        if node.op == "placeholder":
            return self._copy_placeholder(node)
        op = self.model.op_names.get(_owner(node))
        if op in self.ops or op in self.model.constants:
            return self._copy(node)
        return self._argument(node)

    def _copy(self, node: Node) -> Node:
        if node not in self.copied:
            for needed in node.all_input_nodes:
                self._value(needed)
            new = self.graph.node_copy(node, lambda item: self.copied[item])
            self.copied[node] = new
            self.uses_random |= is_random(node)
        return self.copied[node]

    def _copy_placeholder(self, node: Node) -> Node:
        name = self.model.tensor_names[node]
        for names, table in ((self.model.parameters, self.parameters), (self.model.buffers, self.buffers)):
            if name in names:
                new = self.graph.create_node("get_attr", attribute_name(name), name=attribute_name(name))
                new.meta = node.meta
                table[name] = self.copied[node] = new
                return new
        return self._argument(node)

    def _argument(self, node: Node) -> Node:
        name = self.model.tensor_names.get(node)
        if name is None:
            raise ModelError(f"{node.name!r} crosses between stages but is not a tensor: keep its readers with it")
        last = self._last_input  # placeholders lead the list
        with self.graph.inserting_before() if last is None else self.graph.inserting_after(last):
            new = self._last_input = self.graph.placeholder(f"a{len(self.inputs)}")
        new.meta = node.meta
        self.inputs[name] = self.copied[node] = new
        return new


def _owner(node: Node) -> Node:
    """Return the operator that makes the tuple ``node`` is taken from, or ``node`` itself."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]
    return node


def _retarget(graph: FxGraph, device: torch.device) -> None:
    """Let all operators that make tensors from nothing make them on ``device``, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            node.args, node.kwargs = retarget(node.args, device), retarget(node.kwargs, device)
            if "device" not in node.kwargs and _makes_tensor(node):
                node.kwargs = {**node.kwargs, "device": device}


def _makes_tensor(node: Node) -> bool:
    """Return whether the operator has a device but no tensor to take it from."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not node.all_input_nodes and any(item.name == "device" for item in schema.arguments)


def _copy_shared_outputs(graph: FxGraph, *, lets_go: bool) -> None:
    """Clone the outputs that share memory with an argument, or a parameter that goes, as runs on meta tensors show.

    Arguments are laid out as traced if the same rank has made them, and in one piece if they came in a message, in the
    order of what was sent or, put together of several, as they are counted: then ``contiguous`` and its like may make
    no copy.
    """
    end = next(iter(reversed(graph.nodes)))
    results = list(end.args[0])
    lays: tuple[Callable[[Tensor], Tensor], ...] = (Tensor.detach, torch.empty_like, Tensor.contiguous)
    shared = set[int]().union(*(_shared_outputs(graph, lay, lets_go=lets_go) for lay in lays))
    with graph.inserting_before(end):
        for position in sorted(shared):
            results[position] = graph.call_function(torch.ops.aten.clone.default, (results[position],))
    end.args = (tuple(results),)


def _shared_outputs(graph: FxGraph, lay: Callable[[Tensor], Tensor], *, lets_go: bool) -> set[int]:
    arguments = [lay(_meta_like(node)) for node in graph.nodes if node.op == "placeholder"]
    run = _MetaRun(torch.nn.Module(), graph=graph)
    with torch.no_grad():
        outputs = run.run(*arguments, enable_io_processing=False)
    storages = {item.untyped_storage()._cdata for item in (*arguments, *(run.attributes if lets_go else ()))}
    return {position for position, output in enumerate(outputs) if output.untyped_storage()._cdata in storages}


class _MetaRun(Interpreter):
    """Runs a stage without data; views share their (empty) storage as they will when it runs for real."""

    def __init__(self, module: torch.nn.Module, *, graph: FxGraph) -> None:
        super().__init__(module, graph=graph)
        self.attributes: list[Tensor] = []
        """Parameters and buffers."""

    def run_node(self, n: Node) -> Any:
        if n.op != "get_attr":
            return super().run_node(n)
        self.attributes.append(_meta_like(n))
        return self.attributes[-1]


def _meta_like(node: Node) -> Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


_NORMS: Final = frozenset(getattr(torch.ops.aten, name).default for name in (
    "batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"))


def _lay_norms_as_traced(module: GraphModule) -> None:
    """Let batch norms give results that lie as their input does, which is how they were traced, in place.

    On CPUs PyTorch's own lie in one piece, so that all that reads them lies otherwise, too, and is copied: to be sent,
    and for gradients.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in _NORMS:
            node.args, node.target = (node.target, *node.args), _as_it_lies
    module.recompile()


def _as_it_lies(norm: Callable[..., Any], x: Tensor, *rest: Any, **named: Any) -> Any:
    """Return a batch norm of ``x`` whose first result lies in memory as ``x``.

    It takes all dimensions but the channels alike, so those that lie before them are taken as one, and those behind.
    """
    order = memory_order(x)
    lying, at = x.permute(order), order.index(1)
    if x.device.type != "cpu" or order == tuple(range(x.dim())) or not lying.is_contiguous():
        return norm(x, *rest, **named)
    found = norm(lying.reshape(math.prod(lying.shape[:at]), x.shape[1], -1), *rest, **named)
    first, *others = found if isinstance(found, tuple) else (found,)
    first = first.reshape(lying.shape).permute([order.index(dim) for dim in range(x.dim())])
    return (first, *others) if others else first


Forward = Callable[..., tuple[Tensor, ...]]


class Stage:
    """The callables of one stage: ``forward`` for ``B``, ``split_forward`` for ``I`` and ``W``."""

    def __init__(self, module: StageModule, *, split: bool, random: RankRandom, mesh: ReplicaMesh | None = None,
                 compilation: Compilation | None = None, again: bool = False) -> None:
        """``compilation`` says how the stage is compiled; without it, operators run one by one.

        Some nodes are marked to run ``again`` in the backward.
        """
        self.module, self.mesh, self.random = module, mesh, random
        """The mesh is that of a stage on several devices, with the number of its collectives."""
        self.updates = [(len(module.outputs) + number, self.buffer(name))
                        for number, name in enumerate(module.updated_buffers)]
        self.num_uses: Mapping[int, int] = {}
        """How many events there are until a parameter's gradient is complete, by its identity; 1 where not named."""
        self.queue = WeightGradients()
        self.split_forward: Forward | None = None
        if compilation is None:
            _lay_norms_as_traced(module.module)
            self.forward = self._with_stream(self._call(module.module, again))
            if split:
                self.split_forward = self._with_stream(
                    self._call(split_weight_gradients(module.module, self.queue), again))
            return
        updates = dict(self.updates) if compilation.writes_updates else {}
        compiled = compilation.compile(module, updates, None)
        self.num_uses = compiled.num_uses
        self.forward = self._with_stream(_direct_call(compiled.module))
        if split:
            cut = compilation.compile(module, {place: updates[place] for place in compiled.written}, self.queue)
            self.split_forward = self._with_stream(_direct_call(split_weight_gradients(cut.module, self.queue)))
        self.updates = [item for item in self.updates if item[0] not in compiled.written]

    def _call(self, module: GraphModule, again: bool) -> Forward:
        """Return the module's forward; if ``again``, one that keeps only what is not made again."""
        if not again:
            return _direct_call(module)
        repeating = Repeating(module, self.random, draws=self.module.uses_random and self.mesh is not None)
        return repeating.forward(_direct_call(repeating.module))

    def _with_stream(self, forward: Forward) -> Forward:
        """Return the forward with random numbers of the rank's own; on several devices its operators see to that."""
        if not self.module.uses_random or self.mesh is not None:
            return forward
        return self.random.drawing(forward, self.random.own)

    def buffer(self, name: str) -> Tensor:
        """Return a buffer by its name in the model."""
        tensor: Tensor = getattr(self.module.module, attribute_name(name))
        return tensor


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How one stage is compiled."""

    compiler: Compiler
    name: str
    device: torch.device
    differentiable: frozenset[str]
    """The tensors among its inputs that have gradients."""
    borders: frozenset[str] = frozenset()
    """Operators that begin a new piece."""
    writes_updates: bool
    """Its forward runs once for each micro-batch, so it may write buffers itself."""

    def compile(self, module: StageModule, updates: Mapping[int, Tensor],
                queue: WeightGradients | None) -> CompiledStage:
        """Return the compiled stage; ``queue`` takes what is left for ``W`` if its backward is split."""
        arguments = [node.name for node in module.module.graph.nodes if node.op == "placeholder"]
        borders = frozenset(node.name for node, op in module.op_names.items() if op in self.borders)
        request = Request(name=self.name, device=self.device, updates=updates, queue=queue, borders=borders,
                          differentiable=frozenset(argument for argument, name in zip(
                              arguments, module.inputs, strict=True) if name in self.differentiable))
        return compile_stage(module.module, request, self.compiler)


def _direct_call(module: GraphModule) -> Forward:
    """Return the module's forward as a function of its arguments alone."""
    forward: Forward = type(module).forward.__get__(SimpleNamespace(**attributes_of(module)))
    return forward
