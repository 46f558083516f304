"""From a captured fx graph to Weft's ``Graph``, operators, tensors, costs and wiring in columns, and to the program.

Each ``call_function`` node becomes an operator, except ``getitem``, which only names one of an operator's outputs.
Operators are named after their module and kind (``transformer.h.0.attn.c_attn.addmm``), so that names do not depend on
the batch size or on how the graph was traced, and a plan stays readable.

Backward costs by *rule* (``backward="rule"``; also what a single operator falls back to that cannot be run on meta):
an operator on the path from a parameter to the loss takes its forward operations and bytes once more for the gradient
of its activations, if one of them needs a gradient, and once more for its parameters, if it reads one; every
activation that is neither a view nor of whole numbers is kept for the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import fx

from weft.base.errors import ModelError
from weft.model.capture import Capture
from weft.model.functional import source_line
from weft.model.graph import OP_NUMBERS, Graph, OpRow, TensorRole, TensorRow, make_graph
from weft.model.probe import GradClass, OpCost, Order, Probe, backward_like_forward, is_random, operator_name

Backward = Literal["joint", "rule", "none"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedProgram:
    """The fx graph behind a ``Graph``, and how their names meet; see ``weft.model.trace``."""

    fx_graph: fx.Graph
    op_nodes: Mapping[str, tuple[str, ...]]
    tensor_nodes: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    buffer_updates: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]

    @cached_property
    def names_of_nodes(self) -> Mapping[fx.Node, str]:
        """Return by node the name of the tensor that it makes, or the path of the parameter or buffer that it is."""
        paths = {self.nodes[node]: path for node, path in (*self.parameters.items(), *self.buffers.items())}
        return paths | {self.nodes[node]: name for name, node in self.tensor_nodes.items()}

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """Return every fx node by its name."""
        return {node.name: node for node in self.fx_graph.nodes}


@dataclass(slots=True, kw_only=True)
class _Tensor:
    name: str
    node: str
    value: torch.Tensor
    role: TensorRole
    producer: int
    grad: GradClass
    is_constant: bool
    base: int = -1
    num_readers: int = 0
    is_saved: bool = False
    is_frozen: bool = False
    has_turned_gradient: bool = False


@dataclass(slots=True, kw_only=True)
class _Op:
    name: str
    kind: str
    module: str
    source: str
    cost: OpCost
    inputs: list[int]
    nodes: list[str]
    is_constant: bool
    outputs: dict[int, int] = field(default_factory=dict)
    """Tensor id by output position."""


def make_columns(capture: Capture, *, name: str, batch: int, training: bool, backward: Backward,
                 more_reads: Mapping[tuple[str, str], int] | None = None) -> tuple[Graph, TracedProgram]:
    """Return the graph of ``capture``, with the costs of its backward pass found as ``backward`` says, and its program.

    ``more_reads`` gives, by fx nodes (operator, tensor), reads of operators that ``capture`` leaves out.
    """
    builder = _Builder(capture=capture, probe=Probe(backward=backward == "joint"), backward=backward,
                       more_reads=more_reads or {})
    for node in capture.graph.nodes:
        builder.add(node)
    outputs = tuple(builder.ids[node] for node in capture.outputs)
    if training:
        builder.check_loss(outputs)
    if backward != "none":
        builder.note_backward(outputs[0])
    return builder.finish(name, batch, outputs)


@dataclass(slots=True, kw_only=True)
class _Builder:
    """The columns while they grow, one fx node at a time."""

    capture: Capture
    probe: Probe
    backward: Backward
    more_reads: Mapping[tuple[str, str], int]
    tensors: list[_Tensor] = field(default_factory=list)
    ops: list[_Op] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    """Tensor id by fx node."""
    op_of_node: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    """Tensor id by the path of a parameter or buffer."""
    counts: dict[str, int] = field(default_factory=dict)
    """How often each name was asked for."""
    warnings: dict[str, None] = field(default_factory=dict)

    # ---- nodes ----

    def add(self, node: fx.Node) -> None:
        """Take over one fx node."""
        if node.op == "placeholder":
            self._add_placeholder(node)
        elif node.op == "call_function" and node.target is operator.getitem:
            self._add_item(node)
        elif node.op == "call_function":
            self._add_op(node)
        elif node.op != "output":
            raise ModelError(f"the model holds a sub-graph ({node.name}, such as torch.cond makes), which cannot be "
                             "planned: write the branch with torch.where")

    def _add_placeholder(self, node: fx.Node) -> None:
        capture, value = self.capture, node.meta["val"]
        if node.name in capture.inputs:
            self._add_tensor(node, self._unique(node.name), value, TensorRole.INPUT)
            return
        path = capture.parameters.get(node.name) or capture.buffers.get(node.name)
        if not node.users:
            return
        if path in self.stored:
            self.ids[node.name] = self.stored[path]
            return
        if node.name in capture.parameters:
            wanted = value.requires_grad and _has_gradient(value)
            self._add_tensor(node, capture.parameters[node.name], value, TensorRole.PARAMETER,
                             grad=GradClass.WEIGHT if wanted else GradClass.NONE)
            self.tensors[-1].is_frozen = not value.requires_grad
        else:
            self._add_tensor(node, path or self._unique(f"constant.{node.name}"), value, TensorRole.BUFFER,
                             is_constant=path not in capture.buffer_updates)
        if path:
            self.stored[path] = self.ids[node.name]
            self.counts[path] = 1

    def _add_op(self, node: fx.Node) -> None:
        inputs = [self.ids[argument.name] for argument in node.all_input_nodes]
        cost = self.probe.cost(node, [self.tensors[index].grad for index in inputs])
        kind = str(getattr(node.target, "overloadpacket", node.target))
        draws = is_random(node)
        if draws:
            self._warn(f"operator {kind} draws random numbers: a run on many devices draws others than one device does")
        if self.backward == "joint" and any(text in cost.problem for text in ("derivative", "no autograd formula")):
            raise ModelError(f"operator {kind} ({source_line(node)}) has no derivative, so the model cannot be trained "
                             "as it is: write it with other operators")
        if kind == "aten._native_batch_norm_legit_functional":
            self._warn("batch normalisation in training uses the statistics of each micro-batch and replica: a run in "
                       "parts equals one device only if that is given the same parts")
        if cost.problem:
            self._warn(f"operator {kind} cannot be run on meta tensors ({cost.problem}): costs by rule")
        module = node.meta.get("module", "")
        name = self._unique(f"{module}.{operator_name(node.target)}" if module else operator_name(node.target))
        self.op_of_node[node.name] = len(self.ops)
        self.ops.append(_Op(
            name=name, kind=kind, module=module, source=source_line(node), cost=cost, inputs=inputs,
            nodes=[node.name], is_constant=not draws and all(self.tensors[index].is_constant for index in inputs)))
        if isinstance(node.meta["val"], torch.Tensor):
            self._add_output(node, len(self.ops) - 1, 0, name)

    def _add_item(self, node: fx.Node) -> None:
        producer, position = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(position, int)
        op = self.op_of_node[producer.name]
        self.ops[op].nodes.append(node.name)
        if position in self.ops[op].outputs:
            self.ids[node.name] = self.ops[op].outputs[position]
        else:
            self._add_output(node, op, position, f"{self.ops[op].name}:{position}")

    def _add_output(self, node: fx.Node, index: int, position: int, name: str) -> None:
        op = self.ops[index]
        value: torch.Tensor = node.meta["val"]
        source = op.cost.view_of[position] if position < len(op.cost.view_of) else -1
        viewed = op.inputs[source] if source >= 0 else -1
        base = viewed if viewed < 0 or self.tensors[viewed].base < 0 else self.tensors[viewed].base
        self._add_tensor(node, name, value, TensorRole.ACTIVATION, producer=index, base=base,
                         grad=self._grad_of(op, position, value), is_constant=op.is_constant)
        op.outputs[position] = self.ids[node.name]

    def _grad_of(self, op: _Op, position: int, value: torch.Tensor) -> GradClass:
        classes = [self.tensors[index].grad for index in op.inputs]
        if self.backward == "joint":
            needed = position < len(op.cost.needs_grad) and op.cost.needs_grad[position]
        else:
            needed = _has_gradient(value) and any(classes) and op.kind != "aten.detach"
        if not needed:
            return GradClass.NONE
        from_weights = all(self.tensors[index].is_constant or self.tensors[index].grad is GradClass.WEIGHT
                           for index in op.inputs)
        return GradClass.WEIGHT if from_weights else GradClass.ACTIVATION

    def _add_tensor(self, node: fx.Node, name: str, value: torch.Tensor, role: TensorRole, *, producer: int = -1,
                    grad: GradClass = GradClass.NONE, is_constant: bool = False, base: int = -1) -> None:
        self.ids[node.name] = len(self.tensors)
        self.tensors.append(_Tensor(name=name, node=node.name, value=value, role=role, producer=producer, grad=grad,
                                    is_constant=is_constant, base=base))

    def _unique(self, name: str) -> str:
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        if count == 0:
            return name
        return self._unique(f"{name}_{count}")

    def _warn(self, text: str) -> None:
        self.warnings[text] = None

    # ---- the backward pass ----

    def check_loss(self, outputs: Sequence[int]) -> None:
        """Raise ``ModelError`` unless the first output can be differentiated."""
        first = self.tensors[outputs[0]] if outputs else None
        if first is None or first.value.numel() != 1 or not first.value.is_floating_point():
            shape = "nothing" if first is None else f"a tensor of shape {tuple(first.value.shape)}, {first.value.dtype}"
            raise ModelError(f"for training the first output must be the loss, a single number, but the model returns "
                             f"{shape}. Return the loss first, or plan for inference")
        if self.backward != "none" and first.grad is GradClass.NONE:
            raise ModelError("the loss does not depend on any parameter that needs a gradient: "
                             "nothing can be trained. Check requires_grad, or plan for inference")

    def note_backward(self, loss: int) -> None:
        """Note what is kept for the backward pass, and drop the backward costs of operators the loss does not need."""
        needed = self._needed_for(loss)
        for index, op in enumerate(self.ops):
            if index not in needed or not any(self.tensors[tensor].grad for tensor in op.outputs.values()):
                op.cost = replace(op.cost, input_grad_flops=0.0, input_grad_bytes=0.0, weight_grad_flops=0.0,
                                  weight_grad_bytes=0.0, saved_inputs=(), saved_outputs=(), saved_inside_bytes=0.0,
                                  backward_room_bytes=0.0)
                continue
            if self.backward == "rule":
                kept = tuple(position for position, index in enumerate(op.inputs)
                             if _has_gradient(self.tensors[index].value))
                op.cost = replace(backward_like_forward(op.cost, {self.tensors[index].grad for index in op.inputs}),
                                  saved_inputs=kept, saved_outputs=tuple(op.outputs))
            for tensor in op.inputs:
                self.tensors[tensor].num_readers += 1
                more = self.more_reads.get((op.nodes[0], self.tensors[tensor].node), 0)
                if self.tensors[tensor].num_readers > 1 or more:
                    self._note_sum(tensor, op, (self.tensors[tensor].num_readers > 1) + more)
            for tensor in [*(op.inputs[position] for position in op.cost.saved_inputs),
                           *(op.outputs[position] for position in op.cost.saved_outputs if position in op.outputs)]:
                self._note_saved(tensor)
        if self.backward == "joint":
            self._note_orders(needed)

    def _note_orders(self, needed: set[int]) -> None:
        """Follow the orders in which gradients may lie from the loss back, and note what backwards take for them.

        Every tensor's gradient may also lie as the tensor: a stage that begins there is given one that does. What
        several readers give is added to what the first of them gave, and any of them may be the first of its stage.
        """
        nodes, orders = {node.name: node for node in self.capture.graph.nodes}, dict[int, list[Order]]()
        for index in sorted(needed, reverse=True):
            op = self.ops[index]
            if any(self.tensors[tensor].grad for tensor in op.outputs.values()):
                usual: list[Order] = [None] * (max(op.outputs) + 1)
                given = [usual, *([*usual[:place], order, *usual[place + 1:]] for place, tensor in op.outputs.items()
                                  for order in orders.get(tensor, ()))]
                found = [self.probe.given(nodes[op.nodes[0]], tuple(item)) for item in given]
                op.cost = replace(op.cost, backward_room_bytes=max(item.room for item in found))
                for item in found:
                    for tensor, order in zip(op.inputs, item.orders, strict=False):
                        known = orders.setdefault(tensor, [])
                        if order is not None and order not in known:
                            known.append(order)
                            self.tensors[tensor].has_turned_gradient = True

    def _needed_for(self, loss: int) -> set[int]:
        needed: set[int] = set()
        waiting = [self.tensors[loss].producer]
        while waiting:
            index = waiting.pop()
            if index >= 0 and index not in needed:
                needed.add(index)
                waiting.extend(self.tensors[tensor].producer for tensor in self.ops[index].inputs)
        return needed

    def _note_sum(self, index: int, reader: _Op, count: int) -> None:
        """Cost the ``count`` additions that join the gradients of a tensor's readers."""
        tensor = self.tensors[index]
        if tensor.grad is GradClass.NONE:
            return
        flops = float(count * tensor.value.numel())
        num_bytes = 3.0 * flops * tensor.value.element_size()
        op = self.ops[tensor.producer] if tensor.producer >= 0 else reader
        cost = op.cost
        if tensor.grad is GradClass.WEIGHT:
            op.cost = replace(cost, weight_grad_flops=cost.weight_grad_flops + flops,
                              weight_grad_bytes=cost.weight_grad_bytes + num_bytes)
        else:
            op.cost = replace(cost, input_grad_flops=cost.input_grad_flops + flops,
                              input_grad_bytes=cost.input_grad_bytes + num_bytes)

    def _note_saved(self, index: int) -> None:
        base = self.tensors[index].base
        owner = self.tensors[base if base >= 0 else index]
        if owner.role in (TensorRole.ACTIVATION, TensorRole.INPUT) and not owner.is_constant:
            owner.is_saved = True

    # ---- the result ----

    def finish(self, name: str, batch: int, outputs: tuple[int, ...]) -> tuple[Graph, TracedProgram]:
        """Return all columns, and what they came from."""
        ops, tensors, found = self.ops, self.tensors, self.capture
        self._warn_unused()
        for note in found.notes:
            self._warn(note)
        graph = make_graph(
            [_op_row(op) for op in ops], [_tensor_row(tensor) for tensor in tensors], name=name, batch=batch,
            outputs=outputs, tied=found.tied, warnings=tuple(self.warnings),
            asks_recompute=found.asks_recompute and self.backward != "none",
            has_backward=self.backward != "none", backward_source=self.backward)
        names = {node: tensors[index].name for node, index in self.ids.items()}
        return graph, TracedProgram(
            fx_graph=found.graph, op_nodes={op.name: tuple(op.nodes) for op in ops},
            tensor_nodes={tensor.name: tensor.node for tensor in tensors},
            inputs=tuple(names[node] for node in found.inputs), outputs=tuple(tensors[item].name for item in outputs),
            constants={names[node]: value for node, value in found.constants.items() if node in names},
            buffer_updates={path: names[node] for path, node in found.buffer_updates.items()},
            parameters=found.parameters, buffers=found.buffers)

    def _warn_unused(self) -> None:
        unused = sorted(set(self.capture.parameters.values()) - self.stored.keys())
        if unused:
            shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
            self._warn(f"{len(unused)} parameters are never used and left out of the graph: {shown}")


def _op_row(op: _Op) -> OpRow:
    return OpRow(name=op.name, kind=op.kind, module=op.module, source=op.source, inputs=op.inputs,
                 is_constant=op.is_constant, numbers={key: getattr(op.cost, key) for key in OP_NUMBERS})


def _tensor_row(tensor: _Tensor) -> TensorRow:
    value = tensor.value
    return TensorRow(
        name=tensor.name, shape=tuple(int(size) for size in value.shape), role=tensor.role, producer=tensor.producer,
        dtype=str(value.dtype).removeprefix("torch."), num_bytes=value.numel() * value.element_size(),
        base=tensor.base, is_saved=tensor.is_saved, is_frozen=tensor.is_frozen,
        has_turned_gradient=tensor.has_turned_gradient, is_scattered=_is_scattered(value))


def _is_scattered(value: torch.Tensor) -> bool:
    """Return whether a tensor must be copied to lie in one piece, its dimensions in any order, with its own values."""
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    return not value.permute(order).is_contiguous() or value.is_conj() or value.is_neg()


def _has_gradient(value: torch.Tensor) -> bool:
    """Return whether a tensor is of a kind that can have a gradient."""
    return bool(value.is_floating_point() or value.is_complex())
