"""Stages in compiled pieces: the same graph, with runs of operators replaced by one call each.

``compile_stage`` cuts a stage's graph where an operator is not PyTorch's own (a change of layout, a collective, random
numbers of a stream, factors that are collected): those stay as they are, in their order, and what lies between two of
them becomes a *piece*. A stage without such operators is one piece. Equal pieces are compiled once in a process, and
inductor's cache outlives it.

A piece is one node for autograd, so whatever the runtime does around it (edges, recomputation, hooks of exchanges)
stays as it is. Where the exchange of a bucket may begin inside the backward, a piece ends where its last gradient is
made (``Request.borders``). Its parameters are no arguments of that node: the backward adds their gradients itself, in
few kernels, or leaves them to ``W``. Results that are views stay outside, made again from what they are views of.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.base.errors import RunError
from weft.run.compiled_graphs import Gradients, Graphs, Primal, viewed
from weft.run.split_backward import WeightGradients, attributes_of
from weft.run.wire import memory_order, strides_in

LEAST_OPS: Final = 3
"""Fewer operators than that, views not counted, are left as they are: a call costs as much as they do."""


@dataclass(kw_only=True)
class Compiler:
    """What the pieces of a rank share."""

    say: Callable[[str], None] = lambda text: None
    """Told what is being compiled."""
    added: Callable[[Sequence[Tensor]], None] | None = None
    """Told which parameters have got a gradient."""
    graphs: dict[object, Graphs] = field(default_factory=dict)
    """By what the piece computes."""
    fallbacks: list[str] = field(default_factory=list)
    """Why pieces were left as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a stage is to be compiled."""

    name: str
    device: torch.device
    differentiable: frozenset[str]
    """The nodes of its arguments that have gradients."""
    queue: WeightGradients | None = None
    """Takes what is left for ``W`` if the backward is split."""
    borders: frozenset[str] = frozenset()
    """Nodes that begin a new piece."""
    updates: Mapping[int, Tensor] = field(default_factory=dict)
    """Results that are new values of these buffers: where one piece makes such a value and alone reads the buffer, it
    writes it there itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage:
    """A stage with its runs of operators compiled."""

    module: GraphModule
    """Its results are those of the stage; those in ``written`` are the buffers themselves."""
    written: frozenset[int]
    num_uses: Mapping[int, int]
    """How many pieces, and other operators together, give a gradient to each parameter, by its identity."""


def compile_stage(module: GraphModule, request: Request, compiler: Compiler) -> CompiledStage:
    """Return the stage with its runs of operators compiled."""
    cut = _Cut(module, request)
    builder = _Builder(cut, request, compiler)
    builder.build()
    num_uses = Counter(id(item) for _, values in builder.made for item in values if item.requires_grad)
    for node in builder.graph.nodes:
        if node.op == "get_attr" and node.users:
            num_uses[id(cut.attributes[str(node.target)])] += 1
    return CompiledStage(module=GraphModule(cut.attributes, builder.graph, class_name="CompiledStage"),
                         written=frozenset(cut.written.values()), num_uses=num_uses)


def _is_compilable(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    values = [node.meta.get("val"), *(item.meta.get("val") for item in node.all_input_nodes)]
    return not any(isinstance(item, Tensor) and item.is_complex() for item in values)


class _Cut:
    """Which nodes make which piece, and which values have gradients."""

    def __init__(self, module: GraphModule, request: Request) -> None:
        self.attributes, self.nodes = attributes_of(module), list(module.graph.nodes)
        self.needs_gradient: set[Node] = set()
        self.pieces: list[list[Node]] = [[]]
        self.piece_of: dict[Node, int] = {}
        for node in self.nodes:
            if self._has_gradient(node, request.differentiable):
                self.needs_gradient.add(node)
            if node.op == "call_function" and node.target is operator.getitem:
                if node.args[0] in self.piece_of:
                    self._join(node, self.piece_of[node.args[0]])
            elif _is_compilable(node):
                if node.name in request.borders:
                    self.pieces.append([])
                self._join(node, len(self.pieces) - 1)
            elif node.op == "call_function":
                self.pieces.append([])
        for number, nodes in enumerate(self.pieces):
            if sum(viewed(node) is None and node.target is not operator.getitem for node in nodes) < LEAST_OPS:
                for node in nodes:
                    del self.piece_of[node]
                self.pieces[number] = []
        self.written = self._written(request.updates)
        """The nodes whose values their pieces write to buffers, with their places in the results."""

    def _join(self, node: Node, number: int) -> None:
        self.piece_of[node] = number
        self.pieces[number].append(node)

    def _has_gradient(self, node: Node, differentiable: frozenset[str]) -> bool:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            return False
        if node.op == "get_attr":
            return bool(getattr(self.attributes[str(node.target)], "requires_grad", False))
        if node.op == "placeholder":
            return node.name in differentiable
        return any(item in self.needs_gradient for item in node.all_input_nodes)

    def buffer_node(self, buffer: Tensor) -> Node | None:
        """Return the node that reads a buffer."""
        return next((node for node in self.nodes if node.op == "get_attr"
                     and self.attributes[str(node.target)] is buffer), None)

    def _written(self, updates: Mapping[int, Tensor]) -> dict[Node, int]:
        results, found = self.nodes[-1].args[0], {}
        for place, buffer in updates.items():
            node, source = results[place], self.buffer_node(buffer)
            number = self.piece_of.get(node)
            users = [] if source is None else [self.piece_of.get(user) for user in source.users]
            if number is not None and users and all(item == number for item in users) and viewed(node) is None:
                found[node] = place
        return found


class _Builder:
    """Writes the graph in which pieces are single calls."""

    def __init__(self, cut: _Cut, request: Request, compiler: Compiler) -> None:
        self.cut, self.request, self.compiler, self.graph = cut, request, compiler, Graph()
        self.new: dict[Node, Node] = {}
        self.made: list[tuple[int, list[Tensor]]] = []
        """The pieces that were compiled, and what they read of the stage."""

    def build(self) -> None:
        """Write it."""
        begun: set[int] = set()
        for node in self.cut.nodes[:-1]:
            number = self.cut.piece_of.get(node)
            if number is None and node.op != "get_attr":
                self._value(node)
            elif number is not None and number not in begun:
                begun.add(number)
                self._piece(number)
        results = list(self.cut.nodes[-1].args[0])
        for node, place in self.cut.written.items():
            if self.new.get(node) is None:
                results[place] = self.cut.buffer_node(self.request.updates[place])
        self.graph.output(tuple(self._value(item) for item in results))

    def _value(self, node: Node) -> Node:
        """Return the node's value outside of pieces; what is a view of a piece's result is made there."""
        if node not in self.new:
            self.new[node] = self.graph.node_copy(node, self._value)
        return self.new[node]

    def _piece(self, number: int) -> None:
        nodes = self.cut.pieces[number]
        inside, results = set(nodes), self.cut.nodes[-1].args[0]
        kept = {item for place, item in enumerate(results) if self.cut.written.get(item) != place}
        needed = [_made_from(node) for node in nodes if node in kept or any(
            user not in inside and user.op != "output" for user in node.users)]
        outside = list(dict.fromkeys(item for node in nodes for item in node.all_input_nodes if item not in inside))
        plan = PiecePlan(
            nodes=nodes, attributes=[node for node in outside if node.op == "get_attr"],
            activations=[node for node in outside if node.op != "get_attr"],
            results=[node for node in dict.fromkeys(needed) if node in inside],
            written={node: self.cut.buffer_node(self.request.updates[place])
                     for node, place in self.cut.written.items() if node in inside})
        run = make_piece(plan, self.cut, self.request, self.compiler, name=f"{self.request.name}, piece {number}")
        if run is None:
            for node in nodes:
                self._value(node)
                self.cut.written.pop(node, None)
            return
        self.made.append((number, [self.cut.attributes[str(node.target)] for node in plan.attributes]))
        call = self.graph.call_function(run, tuple(self._value(item) for item in plan.activations))
        for place, node in enumerate(plan.results):
            self.new[node] = self.graph.call_function(operator.getitem, (call, place))
            self.new[node].meta = node.meta


def _made_from(node: Node) -> Node:
    """Return what a value is a view of: it has memory of its own, or is made outside of the piece."""
    while (source := viewed(node)) is not None:
        node = source
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecePlan:
    """The nodes of a piece, what it reads and what it gives."""

    nodes: Sequence[Node]
    attributes: Sequence[Node]
    activations: Sequence[Node]
    results: Sequence[Node]
    written: Mapping[Node, Node | None]
    """Values that it writes to buffers."""


def make_piece(plan: PiecePlan, cut: _Cut, request: Request, compiler: Compiler, *,
               name: str) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return the function that runs a piece on its activations; None, with the reason noted, if it is not compiled."""
    read = [*plan.attributes, *plan.activations]
    values = [cut.attributes[str(node.target)] for node in plan.attributes]
    given = [*values, *(None for _ in plan.activations)]
    primals = [_primal(node, cut, value, request.device) for node, value in zip(read, given, strict=True)]
    made = [*plan.results, *plan.written]
    updates = {len(plan.results) + place: read.index(buffer)
               for place, buffer in enumerate(plan.written.values()) if buffer is not None}

    def function(*arguments: Any) -> list[Any]:
        known = dict(zip(read, arguments, strict=True))
        for node in plan.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), lambda item: known[item])
            known[node] = node.target(*args, **kwargs)
        return [known[node] for node in made]

    key = _key(plan, read, primals, is_split=request.queue is not None)
    if key not in compiler.graphs:
        from weft.run.inductor import compile_graphs  # seconds to import, and only plans with compiled stages need it

        compiler.say(f"compiling {name}: {len(plan.nodes)} operators")
        try:
            compiler.graphs[key] = compile_graphs(function, primals, num_outputs=len(plan.results), updates=updates,
                                                  split=request.queue is not None)
        except Exception as problem:  # the compiler raises anything
            reason = (str(problem).strip().splitlines() or [""])[0]
            compiler.fallbacks.append(f"{name} is not compiled: {type(problem).__name__}: {reason}")
            return None
    piece = _Piece(compiler.graphs[key], values, primals, request.queue, compiler)

    def run_piece(*activations: Tensor) -> tuple[Tensor, ...]:
        return piece.run(activations)

    return run_piece


def _primal(node: Node, cut: _Cut, value: Tensor | None, device: torch.device) -> Primal:
    traced: Tensor = node.meta["val"] if value is None else value
    stride = strides_in(tuple(traced.shape), memory_order(traced)) if value is None else tuple(traced.stride())
    return Primal(shape=tuple(traced.shape), stride=stride, dtype=traced.dtype, device=device,
                  needs_gradient=node in cut.needs_gradient, is_parameter=value is not None)


def _key(plan: PiecePlan, read: Sequence[Node], primals: Sequence[Primal], *, is_split: bool) -> object:
    """Return what is equal for pieces that compute the same."""
    number = {node: place for place, node in enumerate([*read, *plan.nodes])}
    body = tuple(repr((str(node.target), map_arg((node.args, node.kwargs), lambda item: f"%{number[item]}")))
                 for node in plan.nodes)
    written = tuple((number[node], number[buffer]) for node, buffer in plan.written.items() if buffer is not None)
    return body, tuple(primals), tuple(number[node] for node in plan.results), written, is_split


class _Piece:
    """A compiled piece with the parameters and buffers of one place in the model."""

    def __init__(self, graphs: Graphs, values: Sequence[Tensor], primals: Sequence[Primal],
                 queue: WeightGradients | None, compiler: Compiler) -> None:
        self.graphs, self.values, self.queue, self.compiler = graphs, list(values), queue, compiler
        self.arguments = primals[len(values):]
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes the piece a part of autograd's graph even where no activation is."""

    def run(self, activations: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the piece's results."""
        if self.graphs.backward is not None and torch.is_grad_enabled():
            results: tuple[Tensor, ...] = _Run.apply(self, self.anchor, *activations)
            return results
        return tuple(self.forward(activations)[: self.graphs.num_outputs])

    def forward(self, activations: Sequence[Tensor]) -> Sequence[Any]:
        """Return the results, and behind them what the backward wants."""
        given = [laid_out(value.detach(), wanted) for value, wanted in zip(activations, self.arguments, strict=True)]
        return self.graphs.forward([*self.values, *given])

    def backward(self, given: list[Any]) -> list[Tensor | None]:
        """Return the gradients of the activations; add those of the parameters, or leave them to ``W``.

        ``given`` is what the forward saved and the gradients of its outputs. It is emptied, and must be the only list
        that holds them: so each is freed after its last use, not at the end of the backward.
        """
        assert self.graphs.backward is not None, "it has a gradient"
        results = self.graphs.backward(given)
        gradients = self.graphs.gradients
        if self.graphs.weights is not None and self.queue is not None:
            self.queue.pending.append(_Later(self, list(results[len(gradients.places):])))
        self.add(results, gradients)
        found: list[Tensor | None] = [None] * len(self.arguments)
        for primal, place in gradients.places:
            if primal >= len(self.values):
                found[primal - len(self.values)] = results[place]
        return found

    def add(self, results: Sequence[Any], gradients: Gradients) -> None:
        """Add the gradients of parameters among these results."""
        parameters, new = [], []
        for primal, place in gradients.places:
            if primal < len(self.values):
                parameters.append(self.values[primal])
                new.append(results[place].clone() if primal in gradients.shared else results[place])
        add_gradients(parameters, new)
        if self.compiler.added is not None:
            self.compiler.added(parameters)


class _Later:
    """The gradients of a piece's parameters that are still to be computed."""

    def __init__(self, piece: _Piece, kept: list[Any]) -> None:
        self.piece, self.kept = piece, kept

    def accumulate(self) -> None:
        """Compute and add them."""
        graphs = self.piece.graphs
        assert graphs.weights is not None, "it is only made where some are left"
        self.piece.add(graphs.weights(self.kept), graphs.weight_gradients)  # which empties the list


class _Run(torch.autograd.Function):
    """A piece as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, piece: _Piece, anchor: Tensor, *activations: Tensor) -> tuple[Tensor, ...]:
        graphs = piece.graphs
        results = piece.forward(activations)
        made = tuple(results[: graphs.num_outputs])
        ctx.piece, ctx.saved = piece, [
            item.detach() if any(item is other for other in made) else item  # a result would keep itself alive
            for item in results[graphs.num_outputs:]]
        ctx.like = [(made[place].shape, made[place].dtype, made[place].device) for place in graphs.with_tangent]
        ctx.mark_non_differentiable(*(item for place, item in enumerate(made) if place not in graphs.with_tangent))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        piece, taken = ctx.piece, ctx.saved
        ctx.saved = None
        for place, stride, (shape, dtype, device) in zip(piece.graphs.with_tangent, piece.graphs.tangent_strides,
                                                         ctx.like, strict=True):
            given = gradients[place]
            if given is None:
                taken.append(torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_())
            else:
                taken.append(given if given.stride() == stride else _copied(given, stride))
        return (None, None, *piece.backward(taken))


def laid_out(value: Tensor, wanted: Primal) -> Tensor:
    """Return the value as a compiled graph reads it: itself, or a copy of other strides."""
    if value.dtype is not wanted.dtype or value.shape != wanted.shape:
        raise RunError(f"a tensor is {value.dtype} of {tuple(value.shape)}, but {wanted.dtype} of {wanted.shape} was "
                       "compiled: autocast, the default dtype or a hook has changed since the model was traced")
    return value if value.stride() == wanted.stride else _copied(value, wanted.stride)


def _copied(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients, which nobody else has, to those of parameters, all in few kernels."""
    totals, parts = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not None:
            totals.append(parameter.grad)
            parts.append(gradient)
        elif gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
    if totals:
        torch._foreach_add_(totals, parts)
