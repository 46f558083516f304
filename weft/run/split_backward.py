"""The backward pass in two parts: ``I``, gradients of inputs at once, and ``W``, gradients of weights later.

``split_weight_gradients`` rewrites a stage so that its parameterised operators go through autograd functions that
return the gradient of their input and *queue* the rest:

    I:  y.backward(grad)         -> gradient of x is there, queue = [MatmulGradient(weight, grad, x), ...]
    W:  for item in queue.take(): item.accumulate()     # weight.grad += grad^T x

Rules exist for ``linear``, ``addmm``, ``mm`` and ``matmul`` with a parameter on the right (also behind ``t``,
``transpose`` or ``permute`` of two dimensions), convolutions, ``embedding`` and ``layer_norm``.
Every other use of a parameter (an elementwise scale, a weight behind a cast or a reshape) takes the ordinary way, and
its gradient is there after ``I``.
The values are the same as those of a whole backward up to the order of summation.

A queue item keeps the factors of a gradient apart, which is where an exchange of factors instead of sums attaches
(``weft.run.exchange``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

aten = torch.ops.aten


class Deferred(Protocol):
    """A gradient of parameters that is still to be computed."""

    def accumulate(self) -> None:
        """Add the gradient to ``.grad`` of the parameters."""


class WeightGradients:
    """The gradients of weights that a backward has left for later, in the order they came up."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[Deferred] = []

    def take(self) -> list[Deferred]:
        """Return what is pending, and start anew."""
        pending, self.pending = self.pending, []
        return pending


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to ``parameter.grad``, in place where there is one."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


@dataclass(slots=True)
class MatmulGradient:
    """``weight.grad += grad^T x`` (``transposed``) or ``x^T grad``, and ``bias.grad += sum of rows of grad``.

    All the factors of a linear layer, as autograd has them: what is not in one piece is copied when it is multiplied.
    """

    weight: Tensor
    bias: Tensor | None
    x: Tensor | None
    """None where the weight is frozen."""
    grad: Tensor
    transposed: bool

    def factors(self) -> list[Tensor]:
        """Return gradient and input with one row for each sample and position; no input where the weight is frozen."""
        return [item.reshape(-1, item.shape[-1]) for item in (self.grad, self.x) if item is not None]

    def accumulate(self) -> None:
        """Add the gradients of weight and bias."""
        grad_NO, *rest = self.factors()
        for x_NI in rest:
            left, right = (grad_NO, x_NI) if self.transposed else (x_NI, grad_NO)
            if self.weight.grad is None:
                self.weight.grad = torch.mm(left.t(), right)
            else:
                self.weight.grad.addmm_(left.t(), right)
        if self.bias is not None and self.bias.requires_grad:
            add_gradient(self.bias, grad_NO.sum(0).reshape(self.bias.shape))


@dataclass(slots=True)
class CallGradient:
    """Gradients that one call computes for several parameters, ``None`` where there is no parameter."""

    parameters: tuple[Tensor | None, ...]
    compute: Callable[[], Sequence[Tensor | None]]

    def accumulate(self) -> None:
        """Add the gradients that the call returns."""
        for parameter, gradient in zip(self.parameters, self.compute(), strict=True):
            if parameter is not None and gradient is not None and parameter.requires_grad:
                add_gradient(parameter, gradient)


def _alone(ctx: Any) -> tuple[Any, ...]:
    """Return what was kept, operands without the graph behind them, which would hold the inputs of the stage."""
    return tuple(item if item is None or item.is_leaf else item.detach() for item in ctx.saved_tensors)


class _Matmul(torch.autograd.Function):
    """``x W^T + b`` if ``transposed`` (as ``linear``), else ``x W + b`` (as ``addmm``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool,
                queue: WeightGradients) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.rest = (weight, bias, transposed, queue)  # the parameter itself, which gets the gradient
        if transposed:
            return functional.linear(x, weight, bias)
        if bias is not None and x.dim() == 2:
            return torch.addmm(bias, x, weight)
        return torch.matmul(x, weight) if bias is None else torch.matmul(x, weight) + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = _alone(ctx)
        weight, bias, transposed, queue = ctx.rest
        queue.pending.append(MatmulGradient(weight, bias, x, grad, transposed))
        needed = ctx.needs_input_grad[0]
        return (torch.matmul(grad, weight if transposed else weight.t()) if needed else None), None, None, None, None


class _Deferring(torch.autograd.Function):
    """A call whose backward gives the gradient of its input and queues those of its weight and bias.

    ``forward`` takes input, weight, bias, options and queue, and leaves in ``ctx.rest`` what gives the three gradients,
    as its mask asks, from that of the result and what was saved.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, (weight, bias, queue, gradients) = _alone(ctx), ctx.rest
        queue.pending.append(CallGradient((weight, bias), lambda: gradients(
            [False, True, bias is not None], grad, *saved)[1:]))
        own = gradients([True, False, False], grad, *saved)[0] if ctx.needs_input_grad[0] else None
        return own, None, None, None, None


class _Convolution(_Deferring):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...],
                queue: WeightGradients) -> Tensor:
        sizes = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        ctx.rest = (weight, bias, queue, lambda mask, grad, x, weight: aten.convolution_backward(
            grad, x, weight, sizes, *options, mask))
        return torch.convolution(x, weight, bias, *options)


class _Embedding(_Deferring):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, bias: None, options: tuple[int, bool],
                queue: WeightGradients) -> Tensor:
        num_rows = weight.shape[0]
        ctx.save_for_backward(indices)
        ctx.rest = (weight, bias, queue, lambda _, grad, indices: (
            None, aten.embedding_dense_backward(grad, indices, num_rows, *options), None))
        return aten.embedding(weight, indices, *options, False)


class _LayerNorm(_Deferring):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Sequence[int], float],
                queue: WeightGradients) -> Tensor:
        shape, eps = options
        result, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.rest = (weight, bias, queue, lambda mask, grad, x, weight, mean, rstd: aten.native_layer_norm_backward(
            grad, x, shape, mean, rstd, weight, bias, mask))
        return result


def split_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, queue: WeightGradients) -> Tensor:
    """Return ``x W^T + b`` (``transposed``) or ``x W + b``; the backward queues the gradients of weight and bias."""
    return _Matmul.apply(x, weight, bias, transposed, queue)


def split_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...],
                      queue: WeightGradients) -> Tensor:
    """Return ``torch.convolution``; the backward queues the gradients of weight and bias."""
    return _Convolution.apply(x, weight, bias, options, queue)


def split_embedding(indices: Tensor, weight: Tensor, bias: None, options: tuple[int, bool],
                    queue: WeightGradients) -> Tensor:
    """Return the rows of ``weight``; the backward queues its gradient."""
    return _Embedding.apply(indices, weight, bias, options, queue)


def split_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Sequence[int], float],
                     queue: WeightGradients) -> Tensor:
    """Return the layer norm; the backward queues the gradients of weight and bias."""
    return _LayerNorm.apply(x, weight, bias, options, queue)


def split_weight_gradients(module: GraphModule, queue: WeightGradients) -> GraphModule:
    """Return the stage with its rules applied; it shares parameters and buffers with ``module``."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    holder = attributes_of(module)
    for node in list(graph.nodes):
        call = _call_of(node, holder)
        read = [holder.get(str(item.target)) for item in (call[1] if call else ()) if isinstance(item, Node)]
        if call is not None and any(getattr(item, "requires_grad", False) for item in read):
            _replace(graph, node, *call)
    graph.eliminate_dead_code()
    return GraphModule({**holder, _QUEUE: queue}, graph, class_name="SplitStage")


def attributes_of(module: GraphModule) -> dict[str, Any]:
    """Return what the nodes of a stage read from it, by name: parameters, buffers and queues."""
    return {str(node.target): getattr(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"}


def linear_call(node: Node, attributes: dict[str, Any]) -> tuple[Any, Node, Node | None, bool] | None:
    """Return (x, weight, bias, transposed) if the node is a linear operator for which there is a rule."""
    call = _call_of(node, attributes)
    return (call[1][0], call[1][1], call[1][2], call[1][3]) if call is not None and call[0] is split_matmul else None


def _call_of(node: Node, attributes: dict[str, Any]) -> _Call | None:
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    return rule(_Arguments(node, attributes)) if rule is not None else None


_QUEUE = "weight_gradients"


def _replace(graph: Graph, node: Node, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        queue = graph.create_node("get_attr", _QUEUE)
        new = graph.call_function(function, (*arguments, queue))
    new.meta = node.meta
    node.replace_all_uses_with(new)
    graph.erase_node(node)


class _Arguments:
    """The arguments of a call by position, completed from its schema, and which of them are parameters."""

    def __init__(self, node: Node, parameters: dict[str, Any]) -> None:
        schema = node.target._schema.arguments
        given = dict(zip((item.name for item in schema), node.args, strict=False)) | node.kwargs
        self.values: list[Any] = [given.get(item.name, item.default_value) for item in schema]
        self._parameters = parameters

    def is_parameter(self, value: Any) -> bool:
        return (isinstance(value, Node) and value.op == "get_attr"
                and isinstance(self._parameters.get(str(value.target)), torch.nn.Parameter))

    def size(self, parameter: Node) -> int:
        """Return the number of elements of a parameter."""
        return int(self._parameters[str(parameter.target)].numel())

    def is_optional_parameter(self, value: Any) -> bool:
        return value is None or self.is_parameter(value)

    def matrix(self, value: Any) -> tuple[Node, bool] | None:
        """Return the parameter behind a two-dimensional factor, and whether the factor is its transpose."""
        if self.is_parameter(value):
            return (value, False) if len(self._parameters[str(value.target)].shape) == 2 else None
        if not isinstance(value, Node) or value.target not in _TRANSPOSES or not self.is_parameter(value.args[0]):
            return None
        parameter = value.args[0]
        swaps = value.target is aten.t.default or _dims(value) == [1, 0]
        if len(self._parameters[str(parameter.target)].shape) != 2:
            return None
        return parameter, swaps


_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def _dims(node: Node) -> list[int]:
    given = node.args[1] if node.target is aten.permute.default else node.args[1:3]
    dims = [int(dim) % 2 for dim in given]
    return sorted(dims, reverse=True) if node.target is aten.transpose.int else dims


_Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


def _linear(call: _Arguments) -> _Call | None:
    x, weight, bias = call.values
    if not call.is_parameter(weight) or not call.is_optional_parameter(bias) or call.matrix(weight) is None:
        return None
    return split_matmul, (x, weight, bias, True)


def _matmul(call: _Arguments) -> _Call | None:
    x, factor = call.values
    found = call.matrix(factor)
    if found is None or not isinstance(x, Node) or len(_shape(x)) < 2:
        return None
    return split_matmul, (x, found[0], None, found[1])


def _addmm(call: _Arguments) -> _Call | None:
    bias, x, factor, beta, alpha = call.values
    found = call.matrix(factor)
    if found is None or not call.is_parameter(bias) or beta != 1 or alpha != 1:
        return None
    if call.size(bias) != call.size(found[0]) // _shape(x)[-1]:
        return None  # a bias that is broadcast along the columns
    return split_matmul, (x, found[0], bias, found[1])


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if value is not None else ()


def _convolution(call: _Arguments) -> _Call | None:
    x, weight, bias, *options = call.values
    if not call.is_parameter(weight) or not call.is_optional_parameter(bias):
        return None
    if len(options) == 4:
        stride, padding, dilation, groups = options
        num_dims = len(_shape(x)) - 2
        if num_dims < 1 or len(_shape(x)) != len(_shape(weight)):
            return None  # an unbatched input
        spread = [list(item) * (num_dims // len(item)) for item in (stride, padding, dilation)]
        options = [*spread, False, [0] * num_dims, groups]
    return split_convolution, (x, weight, bias, tuple(options))


def _embedding(call: _Arguments) -> _Call | None:
    weight, indices, padding, by_frequency, sparse = call.values
    if not call.is_parameter(weight) or sparse:
        return None
    return split_embedding, (indices, weight, None, (padding, by_frequency))


def _layer_norm(call: _Arguments) -> _Call | None:
    x, shape, weight, bias, eps, _ = call.values
    if not call.is_parameter(weight) or not call.is_optional_parameter(bias):
        return None
    return split_layer_norm, (x, weight, bias, (shape, eps))


_RULES: dict[Any, Callable[[_Arguments], _Call | None]] = {
    aten.linear.default: _linear,
    aten.mm.default: _matmul,
    aten.matmul.default: _matmul,
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv3d.default: _convolution,
    aten.embedding.default: _embedding,
    aten.layer_norm.default: _layer_norm,
}
