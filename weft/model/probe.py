"""What each operator costs, forward and backward, found by running it once on tensors without memory.

For every distinct (operator, shapes, strides, dtypes, settings) the operator is called on ``meta`` tensors and its
autograd graph is run backwards, while a dispatch mode counts the elementary operators inside. So the backward costs are
those of the very operators that the runtime's autograd will run, the tensors kept for the backward pass are those that
autograd really keeps, and a model of 5,000 operators, 60 of them distinct, is costed in well under a second.

* bytes: each elementary operator reads its inputs and writes its outputs once; views move nothing, and a dimension that
  a tensor is merely expanded along counts once.
* ``input_grad`` is what the gradients of activations take; ``weight_grad`` is what is added when the gradients of
  parameters are wanted as well.
* attention is costed by formula as the fused kernel that every device has: scores are neither written nor kept, the
  backward pass computes them again.
* the grouped products of experts are costed by formula, since their loop over experts needs values: each row meets one
  expert's matrix, and each matrix that some row meets is read once. Rows are taken to fall on all experts alike
  (``weft.plan.notes`` says so): of 8 experts, 2 rows meet 1.9, and 4,096 rows meet all.

Operations. Matrix products, convolutions and attention are counted as ``torch.utils.flop_counter`` counts them: a
multiply-add is two operations, and a causal mask does not halve attention. Everything else costs a fixed number of
operations per element of its largest tensor (``flops.toml``): 0 for moving data, 1 for simple arithmetic and
reductions (the default), more for functions such as ``exp`` and for normalisations. Pooling costs one operation per
element of the window. These small counts only matter next to bytes moved, which dominate the time of such operators.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.model.graph import flops_per_element
from weft.model.live_storages import LiveStorages
from weft.sharding.expert_rows import GROUPED_KINDS

FLOPS_PER_ELEMENT: Final = flops_per_element("aten")
_POOLS: Final = {"max_pool2d_with_indices": 1, "avg_pool2d": 1, "avg_pool2d_backward": 2,
                 "max_pool2d_with_indices_backward": 2}
"""Position of the window's size among the arguments."""
_ATTENTION: Final = torch.ops.aten.scaled_dot_product_attention.default


class GradClass(enum.IntEnum):
    """Whether and why the gradient of a tensor is wanted."""

    NONE = 0
    ACTIVATION = 1
    WEIGHT = 2
    """A parameter, or something made of parameters and constants only."""


Order: TypeAlias = tuple[int, ...] | None
"""The strides of a gradient; None for the usual ones, those of its tensor in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenGradients:
    """What the backward of one operator makes of gradients that lie in some order."""

    room: float = 0.0
    """Bytes that it takes beyond the gradients it is given and gives; copies of those that it would else hand on."""
    orders: tuple[Order, ...] = ()
    """Of the gradient of each distinct tensor argument; empty where a formula does not say."""
    handed_on: tuple[int, ...] = ()
    """Bytes of each of these gradients that lie in the memory of a given one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """The costs of one operator; tensor positions refer to its distinct tensor arguments, in order."""

    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    input_grad_flops: float = 0.0
    input_grad_bytes: float = 0.0
    weight_grad_flops: float = 0.0
    weight_grad_bytes: float = 0.0
    view_of: tuple[int, ...] = ()
    """Per output: the argument whose memory it shares, or -1."""
    needs_grad: tuple[bool, ...] = ()
    """Per output: autograd would give it a gradient."""
    saved_inputs: tuple[int, ...] = ()
    """Arguments that autograd keeps for the backward pass."""
    saved_outputs: tuple[int, ...] = ()
    """Outputs that autograd keeps."""
    saved_inside_bytes: float = 0.0
    """Bytes that autograd keeps beyond those."""
    forward_room_bytes: float = 0.0
    """Bytes that it takes while it runs, beyond what it reads, gives and keeps."""
    backward_room_bytes: float = 0.0
    """The same for its backward: beyond what was kept, and the gradients it is given and gives."""
    given: GivenGradients = GivenGradients()
    """What its backward makes of gradients in the usual order."""
    problem: str = ""
    """Why the operator could not be run, where it could not."""


Spec: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype of a tensor."""


@dataclass(slots=True)
class Probe:
    """Costs operators, each distinct one once."""

    backward: bool
    """Also cost the backward pass."""
    _known: dict[Any, OpCost] = field(default_factory=dict)
    _keys: dict[fx.Node, Any] = field(default_factory=dict)
    _given: dict[Any, GivenGradients] = field(default_factory=dict)

    def cost(self, node: fx.Node, grads: Sequence[GradClass]) -> OpCost:
        """Return the cost of ``node``, whose distinct tensor arguments want gradients as ``grads`` says."""
        inputs = node.all_input_nodes
        position = {argument: index for index, argument in enumerate(inputs)}
        values = [argument.meta["val"] for argument in inputs]
        specs = tuple((tuple(value.shape), tuple(value.stride()), value.dtype) for value in values)
        wanted = tuple(grads) if self.backward else (GradClass.NONE,) * len(specs)
        settings = fx.node.map_arg((node.args, node.kwargs), lambda argument: f"<{position[argument]}>")
        key = self._keys[node] = (node.target, repr(settings), specs, wanted)
        if key not in self._known:
            self._known[key] = _measure(node, specs, wanted, position)
        return self._known[key]

    def given(self, node: fx.Node, orders: tuple[Order, ...]) -> GivenGradients:
        """Return what the backward of ``node``, whose cost is known, makes of gradients of its results in these orders.
        """
        cost = self._known[self._keys[node]]
        if node.target is _ATTENTION or not any(orders) or not cost.given.orders:
            return cost.given
        key, (*_, specs, grads) = (self._keys[node], orders), self._keys[node]
        if key not in self._given:
            self._given[key] = _given(node, specs, grads, orders, cost.given)
        return self._given[key]


def _measure(node: fx.Node, specs: tuple[Spec, ...], grads: tuple[GradClass, ...],
             position: dict[fx.Node, int]) -> OpCost:
    if node.target is _ATTENTION:
        return _attention_cost(node, specs, grads, position)
    is_grouped = str(getattr(node.target, "overloadpacket", "")) in GROUPED_KINDS
    if is_grouped and [len(spec[0]) for spec in specs[:2]] == [2, 3]:
        return _grouped_cost(specs, grads)
    try:
        call, tensors = _on_meta(node, specs, grads, position)
        return _run(call, tensors, grads)
    except Exception as problem:  # any operator may lack a meta kernel, each in its own way
        return _by_rule(node, specs, grads, f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}")


def _on_meta(node: fx.Node, specs: tuple[Spec, ...], grads: tuple[GradClass, ...],
             position: dict[fx.Node, int]) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """Return a call of an operator on tensors without memory, and these."""
    tensors = [torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=grad is not GradClass.NONE
                                   and (dtype.is_floating_point or dtype.is_complex))
               for (shape, stride, dtype), grad in zip(specs, grads, strict=True)]
    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda item: (
        tensors[position[item]] if isinstance(item, fx.Node) else
        torch.device("meta") if isinstance(item, torch.device) else item))
    target: Any = node.target
    return lambda: target(*args, **kwargs), tensors


def _given(node: fx.Node, specs: tuple[Spec, ...], grads: tuple[GradClass, ...], orders: tuple[Order, ...],
           usual: GivenGradients) -> GivenGradients:
    """Return what the backward makes of gradients in these orders; what it is no longer handed on is copied."""
    call, tensors = _on_meta(node, specs, grads, {item: index for index, item in enumerate(node.all_input_nodes)})
    try:
        with torch.enable_grad():
            outputs = _flat(call())
        both, inputs_only = _backward(outputs, tensors, grads, orders)
    except Exception:  # kernels on meta may refuse an order that others take
        return usual
    copied = sum(max(0, before - now) for before, now in zip(usual.handed_on, both.given.handed_on, strict=True))
    return replace(both.given, room=float(max(both.room, inputs_only.room)) + copied)


# ---- running on meta ----------------------------------------------------------------------------------------------


class _Meter(TorchDispatchMode):
    """Counts the operations and bytes of every elementary operator that runs under it, and what is live."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes_read = self.bytes_written = 0.0
        self.live = LiveStorages(device="meta")
        self.room = 0
        """Bytes that a backward takes beyond the gradients that it gives."""
        self.given = GivenGradients()
        """Of the gradients that a backward gives, but for its room."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live.made(result, (args, kwargs))
        inputs, outputs = _flat((args, kwargs)), _flat(result)
        owners = {_storage(tensor) for tensor in inputs}
        if func._schema.is_mutable or not outputs or any(_storage(tensor) not in owners for tensor in outputs):
            self.flops += count_flops(func, args, kwargs or {}, result)
            self.bytes_read += sum(touched_bytes(tensor) for tensor in _distinct(inputs))
            self.bytes_written += sum(touched_bytes(tensor) for tensor in _distinct(outputs))
        return result

    def note_given(self, tensors: list[torch.Tensor], wanted: list[torch.Tensor],
                   given: Sequence[torch.Tensor | None], gradients: list[torch.Tensor]) -> None:
        """Note in which order the gradients of ``wanted`` ones among the tensors lie, and whose memory it is."""
        found, owners = dict(zip(map(id, wanted), given, strict=True)), {_storage(tensor) for tensor in gradients}
        of_all = [found.get(id(tensor)) for tensor in tensors]
        self.given = GivenGradients(
            orders=tuple(map(_order, of_all, tensors)),
            handed_on=tuple(0 if item is None or _storage(item) not in owners else item.nbytes for item in of_all))


def _order(gradient: torch.Tensor | None, tensor: torch.Tensor) -> Order:
    if gradient is None:
        return None
    order, usual = gradient.stride(), torch.empty_like(tensor).stride()
    is_usual = all(one == other or size == 1 for one, other, size in zip(order, usual, tensor.shape, strict=True))
    return None if is_usual else tuple(order)


def _run(call: Callable[[], Any], tensors: list[torch.Tensor], grads: tuple[GradClass, ...]) -> OpCost:
    kept: list[torch.Tensor] = []
    keeping = torch.autograd.graph.saved_tensors_hooks(_keeper(kept), lambda tensor: tensor)
    with torch.enable_grad(), keeping, _Meter() as forward:
        result = call()
    outputs = _flat(result)
    owners = {_storage(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    view_of = tuple(owners.get(_storage(tensor), -1) for tensor in outputs)
    inside, saved_inputs, saved_outputs = _sort_kept(kept, tensors, outputs)
    room = forward.live.peak() - forward.live.now()  # outputs and what is kept are there still
    both, inputs_only = _backward(outputs, tensors, grads)
    return OpCost(
        flops=forward.flops, bytes_read=forward.bytes_read, bytes_written=forward.bytes_written,
        input_grad_flops=inputs_only.flops, input_grad_bytes=inputs_only.bytes_read + inputs_only.bytes_written,
        weight_grad_flops=max(0.0, both.flops - inputs_only.flops),
        weight_grad_bytes=max(0.0, both.bytes_read + both.bytes_written
                              - inputs_only.bytes_read - inputs_only.bytes_written),
        view_of=view_of, needs_grad=tuple(tensor.requires_grad for tensor in outputs),
        saved_inputs=saved_inputs, saved_outputs=saved_outputs, saved_inside_bytes=inside,
        forward_room_bytes=float(room), backward_room_bytes=float(max(both.room, inputs_only.room)),
        given=replace(both.given, room=float(max(both.room, inputs_only.room))))


def _keeper(kept: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor
    return keep


def _sort_kept(kept: list[torch.Tensor], tensors: list[torch.Tensor],
               outputs: list[torch.Tensor]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Return the bytes kept inside the operator, and the positions of the arguments and outputs that are kept."""
    places = {_storage(tensor): ("out", index) for index, tensor in enumerate(outputs)}
    places |= {_storage(tensor): ("in", index) for index, tensor in enumerate(tensors)}
    inside = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in kept if _storage(tensor) not in places}
    found = {places[_storage(tensor)] for tensor in kept if _storage(tensor) in places}
    return (float(sum(inside.values())), tuple(sorted(index for kind, index in found if kind == "in")),
            tuple(sorted(index for kind, index in found if kind == "out")))


def _backward(outputs: list[torch.Tensor], tensors: list[torch.Tensor], grads: tuple[GradClass, ...],
              orders: tuple[Order, ...] = ()) -> tuple[_Meter, _Meter]:
    """Return the costs of all gradients, and of those of activations alone; results' gradients lie in ``orders``."""
    known = dict(zip(map(id, outputs), orders, strict=False))
    sources = [tensor for tensor in outputs if tensor.requires_grad]
    gradients = [torch.empty_like(tensor) if order is None else
                 torch.empty_strided(tensor.shape, order, dtype=tensor.dtype, device="meta")
                 for tensor in sources for order in (known.get(id(tensor)),)]
    meters = []
    for unwanted in (GradClass.NONE, GradClass.WEIGHT):
        wanted = [tensor for tensor, grad in zip(tensors, grads, strict=True)
                  if tensor.requires_grad and grad is not unwanted]
        with _Meter() as meter:
            if sources and wanted:
                given = torch.autograd.grad(sources, wanted, gradients, retain_graph=True, allow_unused=True)
                unused = _unused_bytes([item for item in given if item is not None], gradients)
                meter.room = meter.live.peak() - meter.live.now() + unused
        if sources and wanted:
            meter.note_given(tensors, wanted, given, gradients)
            del given
        meters.append(meter)
    return meters[0], meters[1]


def _unused_bytes(given: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    """Return what storages hold besides the gradients that lie in them: the real part of complex numbers, say."""
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in given}
    for tensor in given:
        sizes[_storage(tensor)] -= tensor.nbytes
    return sum(max(0, sizes[storage]) for storage in sizes.keys() - {_storage(tensor) for tensor in others})


def _flat(value: Any) -> list[torch.Tensor]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor`` that exist: a dimension of stride 0 counts once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0]
    result: int = math.prod(sizes) * tensor.element_size()
    return result


# ---- by formula ---------------------------------------------------------------------------------------------------


def _attention_cost(node: fx.Node, specs: tuple[Spec, ...], grads: tuple[GradClass, ...],
                    position: dict[fx.Node, int]) -> OpCost:
    named = [position[argument] for argument in node.args[:3] if isinstance(argument, fx.Node)]
    query, key, value = (specs[index][0] for index in named)
    result: torch.Tensor = node.meta["val"]
    sizes = {index: math.prod(shape) * dtype.itemsize for index, (shape, _, dtype) in enumerate(specs)}
    read, written = float(sum(sizes.values())), float(touched_bytes(result))
    has_grad = any(grads[index] is not GradClass.NONE for index in named)
    return OpCost(
        flops=attention_flops(query, key, value), bytes_read=read, bytes_written=written, view_of=(-1,),
        input_grad_flops=attention_backward_flops(query, key, value) if has_grad else 0.0,
        input_grad_bytes=read + 2 * written + sum(sizes[index] for index in named) if has_grad else 0.0,
        needs_grad=(has_grad,), saved_inputs=tuple(sorted(set(position.values()))) if has_grad else (),
        saved_outputs=(0,) if has_grad else (),
        saved_inside_bytes=4.0 * math.prod(query[:-1]) if has_grad else 0.0,  # log-sum-exp of each row, float32
        given=GivenGradients(orders=tuple(_heads_inside(shape) if len(shape) == 4 else None for shape, *_ in specs)))


def _heads_inside(shape: tuple[int, ...]) -> Order:
    """Return how the gradients of fused attention lie: [batch, place, head, channel]."""
    _, heads, length, width = shape
    return length * heads * width, width, heads * width, 1


def _grouped_cost(specs: tuple[Spec, ...], grads: tuple[GradClass, ...]) -> OpCost:
    """Return the cost of rows, sorted by group, times one matrix for each group; the third argument has no gradient."""
    (num_rows, inner), (*_, outer) = specs[0][0], specs[1][0]
    itemsize = specs[0][2].itemsize
    rows, weights, result = (size * itemsize for size in (num_rows * inner, math.prod(specs[1][0]), num_rows * outer))
    read = weights * part_met(num_rows, specs[1][0][0])
    flops = 2.0 * num_rows * inner * outer
    gradients = [(grads[0], flops, result + read + rows), (grads[1], flops, result + rows + weights)]
    of_inputs = [item for item in gradients if item[0] is GradClass.ACTIVATION]
    of_weights = [item for item in gradients if item[0] is GradClass.WEIGHT]
    has_grad = bool(of_inputs or of_weights)
    return OpCost(
        flops=flops, bytes_read=float(rows + read), bytes_written=float(result), view_of=(-1,),
        input_grad_flops=sum(item[1] for item in of_inputs), weight_grad_flops=sum(item[1] for item in of_weights),
        input_grad_bytes=float(sum(item[2] for item in of_inputs)),
        weight_grad_bytes=float(sum(item[2] for item in of_weights)),
        needs_grad=(has_grad,), saved_inputs=(0, 1) if has_grad else ())


def part_met(num_rows: int, num_experts: int) -> float:
    """Return the part of the experts that so many rows meet, if each row is as likely to fall on any of them.

    >>> part_met(2, 8), part_met(4096, 8)
    (0.234375, 1.0)
    """
    return -math.expm1(num_rows * math.log1p(-1 / num_experts)) if num_experts > 1 else 1.0


def _by_rule(node: fx.Node, specs: tuple[Spec, ...], grads: tuple[GradClass, ...], problem: str) -> OpCost:
    """Return a cost from sizes alone: one operation per element, and as much backward as forward."""
    outputs = _flat(node.meta["val"])
    read = float(sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in specs))
    written = float(sum(touched_bytes(tensor) for tensor in outputs))
    flops = float(max((math.prod(shape) for shape, *_ in specs), default=0))
    has_grad = any(grads)
    float_outputs = tuple((tensor.is_floating_point() or tensor.is_complex()) and has_grad for tensor in outputs)
    return backward_like_forward(grads=grads, cost=OpCost(
        flops=flops, bytes_read=read, bytes_written=written, view_of=(-1,) * len(outputs), needs_grad=float_outputs,
        saved_inputs=tuple(range(len(specs))) if has_grad else (), problem=problem))


def backward_like_forward(cost: OpCost, grads: Collection[GradClass]) -> OpCost:
    """Return a cost with as much for the gradients of activations and for those of weights as its forward takes."""
    num_bytes, has_input, has_weight = (
        cost.bytes_read + cost.bytes_written, GradClass.ACTIVATION in grads, GradClass.WEIGHT in grads)
    return replace(cost, input_grad_flops=cost.flops * has_input, input_grad_bytes=num_bytes * has_input,
                   weight_grad_flops=cost.flops * has_weight, weight_grad_bytes=num_bytes * has_weight)


# ---- operators ----------------------------------------------------------------------------------------------------


def operator_name(target: Any) -> str:
    """Return the bare name of an operator: ``"mul"`` for ``aten.mul.Tensor``."""
    packet = str(getattr(target, "overloadpacket", None) or getattr(target, "__name__", target))
    return packet.rsplit(".", 1)[-1]


def count_flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return the operations of one operator, no view, that ran on ``args`` and gave ``result``."""
    formula = flop_registry.get(getattr(target, "overloadpacket", target))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    name = operator_name(target)
    if name == "_grouped_mm":  # each row (each column, if only the left has groups) meets the matrix of one group
        left, right = args[:2]
        groups = left.shape[0] if left.ndim > right.ndim else 1
        return float(2 * left.numel() * right.shape[-1] / groups)
    if name in _POOLS:
        window = args[_POOLS[name]]
        return float(min(tensor.numel() for tensor in _flat((args[0], result))) * math.prod(window))
    largest = max((tensor.numel() for tensor in _flat((args, kwargs, result))), default=0)
    return FLOPS_PER_ELEMENT.get(name, 1.0) * largest


def attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> float:
    """Return the operations of scaled dot-product attention, whose two products are counted in full.

    >>> attention_flops((2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 128, 64)) == 2 * (2 * 2 * 4 * 128 * 128 * 64)
    True
    """
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> float:
    """Return the operations of its backward pass: four products, and the scores once more (they are not kept)."""
    scores, mixed = query[-1], value[-1]
    return 2.0 * math.prod(query[:-1]) * key[-2] * (3 * scores + 2 * mixed)


def is_random(node: fx.Node) -> bool:
    """Return whether the operator draws random numbers: dropout that is on, not attention without it."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    settings = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    probability = next((settings[key] for key in ("dropout_p", "dropout", "p") if key in settings), None)
    switched_off = settings.get("train") is False
    takes_probability = any(key in names for key in ("dropout_p", "dropout"))
    return not (switched_off or probability == 0 or (probability is None and takes_probability))
