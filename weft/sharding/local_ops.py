"""What a device does for an operator whose factors are split: mostly the operator itself, on the device's parts.

``run_local`` is the one place that knows: the lowering of stages and the tests of the rules both call it. Operators
with a shape among their arguments get the shape of the device's result (``OpFactors.shape_args``). Where a factor is
*special* (``Factor.special``: a vocabulary that is looked up, the classes of a loss, a mean), a function entered by
``_local`` does it; it may exchange tensors with the others of the axis through ``LocalCall.group``.

Each of these functions returns the device's results, with gradients that autograd finds as ever. Where devices exchange
something, autograd does not see it; an ``autograd.Function`` then says what the gradient is. In all of them a result
that lacks the split factor is the sum of what the devices return, and its gradient is the same on all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from weft.sharding.asked_rows import AskedRows
from weft.sharding.attention import Meeting, attend, can_attend, parts_of
from weft.sharding.expert_rows import EXPERTS, Ends, row_range
from weft.sharding.factor_rules.common import arguments, dims_in, entered_in
from weft.sharding.factor_rules.layers import Reduction
from weft.sharding.factors import NOT_SPLIT, ROWS, OpFactors, Strategy, is_passed_round, output_layout
from weft.sharding.tensor_layout import local_ranges, local_shape


class Group(Protocol):
    """The devices along some axes of a mesh that work on one operator together; autograd does not see its calls."""

    size: int
    rank: int

    def all_reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Return the sum (or ``max``) of the tensor over the group, a new tensor, on every device."""
        ...

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start sending to the next device; return what waits for the tensor, of the same shape, of the one before."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what every device has for this one, in these shapes; ``parts`` are what this one has for each."""
        ...


@dataclass(frozen=True, kw_only=True)
class LocalCall:
    """One device's part of a call."""

    target: Any
    args: tuple[Any, ...]
    """With the device's own tensors in place of nodes; everything else as in the whole graph."""
    kwargs: Mapping[str, Any]
    op: OpFactors
    strategy: Strategy
    mesh: tuple[int, ...]
    coordinates: tuple[int, ...]
    group: Callable[[tuple[int, ...]], Group]
    """From axes of the mesh to the group of devices along them."""
    row_ends: Mapping[int, Ends] = field(default_factory=dict)
    """Of factors that are rows sorted by expert: where the experts' rows end, in the whole."""

    def axes(self, factor: int) -> tuple[int, ...]:
        """Return the axes that split a factor."""
        return tuple(axis for axis, choice in enumerate(self.strategy)
                     if choice >= 0 and (choice == factor or factor in self.op.factors[choice].joins))

    def range_of(self, factor: int, coordinates: Sequence[int] | None = None) -> tuple[int, int]:
        """Return the (start, stop) of the device's part of a factor, or of the part at other coordinates."""
        at = coordinates or self.coordinates
        cuts = [(at[axis], self.mesh[axis]) for axis in self.axes(factor)]
        if factor in self.row_ends:
            return row_range(self.row_ends[factor], cuts)
        return local_ranges(self.op.factors[factor].size, cuts)[0]

    def ranges_of(self, name: str, *, at: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the device's part of a factor, by name, one for each block in which it is taken.

        ``at`` is the place of another device in the group along the axes that split the factor.
        """
        index, block = self.factor(name), self.factor(f"{name}/")
        cuts = [(self.coordinates[axis], self.mesh[axis]) for axis in self.axes(index)]
        if at is not None:
            places = np.unravel_index(at, [count for _, count in cuts])
            cuts = [(int(place), count) for place, (_, count) in zip(places, cuts, strict=True)]
        num_blocks = 1 if block < 0 else self.op.factors[block].size
        return local_ranges(self.op.factors[index].size * num_blocks, cuts, blocks=num_blocks,
                            zigzag=block >= 0 and self.op.factors[block].zigzag)
    def stops(self, factor: int) -> list[int]:
        """Return where the parts end that the devices along the factor's axes have, in their order."""
        choices = [range(size) if axis in self.axes(factor) else (self.coordinates[axis],)
                   for axis, size in enumerate(self.mesh)]
        return [self.range_of(factor, at)[1] for at in itertools.product(*choices)]

    def factor(self, name: str) -> int:
        """Return the index of a factor by name, -1 if there is none."""
        return next((index for index, item in enumerate(self.op.factors) if item.name == name), NOT_SPLIT)

    def is_split(self, name: str) -> bool:
        """Return whether some axis splits the factor of this name."""
        return (index := self.factor(name)) >= 0 and bool(self.axes(index))

    def part(self, name: str, whole: int) -> int:
        """Return the size of the device's part of the factor of this name; ``whole`` where it is not split."""
        return self.size_of((self.factor(name),)) if self.is_split(name) else whole

    def size_of(self, factors: Sequence[int]) -> int:
        """Return the size of the device's part of a dimension of these factors."""
        return math.prod(stop - start for start, stop in map(self.range_of, factors))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by the names in the operator's schema."""
        return arguments(self.target, self.args, self.kwargs)


Local = Callable[[LocalCall], Any]

_LOCAL: dict[str, Local] = {}
_local = entered_in(_LOCAL)

_ON_PARTS: Final = {torch.ops.aten.view.default: torch.ops.aten.reshape.default,
                    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
                    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default}
"""What takes the place of an operator that needs its whole operand's strides."""


def run_local(call: LocalCall, output_shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return what the operator returns on this device; ``output_shapes`` are those of the whole results."""
    if is_special(call.op, call.strategy):
        return _LOCAL[str(call.target)](call)
    target, args = plain_call(call, output_shapes)
    return target(*args, **call.kwargs)


def is_special(op: OpFactors, strategy: Strategy) -> bool:
    """Return whether a device does something else than the operator on its parts."""
    return any(choice >= 0 and op.factors[choice].special for choice in strategy)


def plain_call(call: LocalCall, output_shapes: Sequence[tuple[int, ...]]) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that a device calls where nothing is special, and its positional arguments."""
    args = list(call.args)
    for position, place in enumerate(call.op.shape_args):
        layout = output_layout(call.op, call.strategy, call.mesh, position)
        args[place] = list(local_shape(output_shapes[position], layout, call.mesh, call.coordinates))
        for dim, own in enumerate(call.op.outputs[position]):
            if any(factor in call.row_ends for factor in own):
                args[place][dim] = call.size_of(own)
    return _ON_PARTS.get(call.target, call.target), tuple(args)


def wide(x: Tensor) -> Tensor:
    """Return the tensor in at least single precision, in which sums over devices are taken."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _once(call: LocalCall, name: str, value: Tensor) -> Tensor:
    """Return a tensor that is to be added once to a sum over a factor: zeros but on the first device."""
    is_first = not call.is_split(name) or call.range_of(call.factor(name))[0] == 0
    return value if is_first else value * 0.0


# ---- products and convolutions --------------------------------------------------------------------------------------


@_local
def _linear(call: LocalCall) -> Tensor:
    """Add the bias on the first part of the inner dimension only."""
    args = call.arguments()
    return torch.ops.aten.linear(args["input"], args["weight"], _once(call, "k", args["bias"]))


@_local
def _addmm(call: LocalCall) -> Any:
    """Add the first argument on the first part of the inner dimension only."""
    return call.target(_once(call, "k", call.args[0]), *call.args[1:], **call.kwargs)


@_local
def _convolution(call: LocalCall) -> Any:
    """Convolve the device's groups; add the bias on the first part of the input channels only."""
    args = call.arguments()
    if args["bias"] is not None:
        args["bias"] = _once(call, "in", args["bias"])
    args["groups"] = call.part("groups", args["groups"])
    return call.target(**args)


@_local
def _grouped(call: LocalCall) -> Tensor:
    """Multiply the rows of the device's experts."""
    args = call.arguments()
    start, stop = call.range_of(call.factor(EXPERTS))
    ends = args["offs"]
    args["offs"] = ends[start:stop] - ends[start - 1] if start else ends[:stop]
    return call.target(**args)


@_local
def _embedding(call: LocalCall) -> Tensor:
    """Look up the tokens that are in the device's part of the vocabulary; zeros for the others."""
    args = call.arguments()
    start, stop = call.range_of(call.factor("vocab"))
    indices = args["indices"] - start
    is_elsewhere = (indices < 0) | (indices >= stop - start)
    padding = args["padding_idx"] - start if start <= args["padding_idx"] < stop else -1
    found = torch.ops.aten.embedding(args["weight"], indices.masked_fill(is_elsewhere, 0), padding)
    return found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)


@_local
def _embedding_bag(call: LocalCall) -> tuple[Tensor, ...]:
    """Sum the rows of each bag that are in the device's part of the vocabulary."""
    args = call.arguments()
    start, stop = call.range_of(call.factor("vocab"))
    is_here = (args["indices"] >= start) & (args["indices"] < stop)
    padding, counts_back = args.get("padding_idx"), "padding_idx" in str(call.target)
    if padding is not None and (padding >= 0 or counts_back):  # such rows are left out of their bags
        is_here &= args["indices"] != padding % call.op.factors[call.factor("vocab")].size
        args["padding_idx"] = None if counts_back else -1
    weights, given = is_here.to(args["weight"].dtype), args["per_sample_weights"]
    args["per_sample_weights"] = weights if given is None else given * weights
    args["indices"] = (args["indices"] - start).masked_fill(~is_here, 0)
    found: tuple[Tensor, ...] = call.target(**args)
    return found


# ---- normalisations -------------------------------------------------------------------------------------------------


@_local
def _group_norm(call: LocalCall) -> Any:
    """Normalise the device's groups."""
    args = call.arguments()
    args["num_groups"] = call.part("groups", args["num_groups"])
    return call.target(**args)


class _WholeBatchNorm(torch.autograd.Function):
    """Batch normalisation with statistics over the batches of all devices; returns also mean, 1/deviation, variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group,
                num_entries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean = group.all_reduce(wide(x).sum(dims)) / num_entries
        centred = wide(x) - _by_channel(mean, x)
        variance = group.all_reduce((centred * centred).sum(dims)) / num_entries
        inverse = torch.rsqrt(variance + eps)
        normal = centred * _by_channel(inverse, x)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.group, ctx.num_entries, ctx.bias_dtype = group, num_entries, None if bias is None else bias.dtype
        scaled = normal if weight is None else normal * _by_channel(weight, x)
        ctx.mark_non_differentiable(mean, inverse, variance)
        return (scaled if bias is None else scaled + _by_channel(bias, x)).to(x.dtype), mean, inverse, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        normal, inverse, weight = ctx.saved_tensors
        gradient = wide(gradients[0])
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        of_all = ctx.group.all_reduce(sums) / ctx.num_entries
        scale = inverse if weight is None else inverse * weight
        of_x = (gradient - _by_channel(of_all[0], normal) - normal * _by_channel(of_all[1], normal)) \
            * _by_channel(scale, normal)
        of_weight = None if weight is None else sums[1].to(weight.dtype)
        of_bias = sums[0].to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return of_x.to(gradients[0].dtype), of_weight, of_bias, None, None, None


@_local
def _batch_norm(call: LocalCall) -> tuple[Tensor, ...]:
    """Normalise by the statistics of the whole batch."""
    args = call.arguments()
    x, momentum = args["input"], args["momentum"]
    images = call.factor("images")
    num_entries = call.op.factors[images].size * (x.numel() // (x.shape[0] * x.shape[1]))
    y, mean, inverse, variance = _WholeBatchNorm.apply(x, args["weight"], args["bias"], args["eps"],
                                                       call.group(call.axes(images)), num_entries)
    running_mean, running_var = args["running_mean"], args["running_var"]
    unbiased = variance * (num_entries / max(num_entries - 1, 1))
    return (y, mean, inverse, (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype),
            (running_var * (1 - momentum) + unbiased * momentum).to(running_var.dtype))


def _by_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape([-1 if dim == 1 else 1 for dim in range(like.dim())])


# ---- attention ------------------------------------------------------------------------------------------------------


@_local
def _attention(call: LocalCall) -> Tensor:
    """Attend from the device's rows to the keys that it has, or that are passed round."""
    args = call.arguments()
    query, key, value = (args[name] for name in ("query", "key", "value"))
    rows, is_causal = call.ranges_of(ROWS), bool(args["is_causal"])
    if not can_attend(query, key, value):
        return _masked_attention(call, args)
    scale = query.shape[-1] ** -0.5 if args["scale"] is None else args["scale"]
    if not is_passed_round(call.op):
        parts = parts_of(rows, ((0, key.shape[-2]),), is_causal=is_causal)
        return attend(query, key, value, Meeting(rounds=(parts,), scale=scale))
    ring = call.group(call.axes(call.factor(ROWS)))
    sources = [(ring.rank - number) % ring.size for number in range(ring.size)]
    return attend(query, key, value, Meeting(scale=scale, ring=ring, rounds=tuple(
        parts_of(rows, call.ranges_of(ROWS, at=source), is_causal=is_causal) for source in sources)))


def _masked_attention(call: LocalCall, args: Mapping[str, Any]) -> Tensor:
    """Attend to all keys with a mask of what the device's rows see."""
    device = args["query"].device
    rows = torch.cat([torch.arange(start, stop, device=device) for start, stop in call.ranges_of(ROWS)])
    mask = rows.unsqueeze(-1) >= torch.arange(args["key"].shape[-2], device=device)
    return torch.ops.aten.scaled_dot_product_attention(
        args["query"], args["key"], args["value"], mask, scale=args["scale"], enable_gqa=args["enable_gqa"])


# ---- views, reductions and look-ups ---------------------------------------------------------------------------------
#
# Mostly the operator names sizes of the whole that are others for a part: of pieces, copies or dimensions. The mean of
# a part counts by its share of the whole, and a look-up in a part gives zeros for what is elsewhere.


@_local
def _reshape(call: LocalCall) -> Tensor:
    """Give the part the shape that the result has here."""
    source: Tensor = call.args[0]
    return source.reshape([call.size_of(factors) for factors in call.op.outputs[0]])


@_local
def _split(call: LocalCall) -> Any:
    """Cut the part into as many pieces as the whole has."""
    args, num_pieces = call.arguments(), len(call.op.outputs)
    size = args["self"].shape[args["dim"]] // num_pieces
    return call.target(args["self"], [size] * num_pieces if "sizes" in str(call.target) else size, args["dim"])


@_local
def _repeat(call: LocalCall) -> Tensor:
    """Copy as often as the device's part of the copies says."""
    source: Tensor = call.args[0]
    outputs = call.op.outputs[0]
    rank = len(outputs) - source.dim()
    sizes = [1] * rank + list(source.shape)
    return source.repeat([call.size_of(factors) // size for factors, size in zip(outputs, sizes, strict=True)])


@_local
def _repeat_interleave(call: LocalCall) -> Any:
    args = call.arguments()
    return call.target(args["self"], call.size_of((call.factor("copies"),)), args["dim"])


@_local
def _mean(call: LocalCall) -> Tensor:
    """Weigh the mean of the part by its share of the whole (a sum could overflow)."""
    args = call.arguments()
    dims = dims_in(args.get("dim"), args["self"].dim())
    reduced = [factor for dim in dims for factor in call.op.inputs[0][dim]]
    whole = math.prod(call.op.factors[factor].size for factor in reduced)
    mean: Tensor = call.target(*call.args, **call.kwargs)
    return mean * (call.size_of(tuple(reduced)) / whole)


@_local
def _index(call: LocalCall) -> Tensor:
    """Look up what the part has, with zeros for the rest; of experts, only those of the device are asked for."""
    args = call.arguments()
    if call.is_split(EXPERTS):
        return call.target(args["self"], [args["indices"][0] - call.range_of(call.factor(EXPERTS))[0]])
    if call.is_split("exchanged"):
        looked_up, axes = call.factor("looked_up"), call.axes(call.factor("exchanged"))
        return AskedRows.apply(args["self"], args["indices"][0], call.group(axes), call.stops(looked_up))
    place = next(dim for dim, index in enumerate(args["indices"]) if index is not None)
    index, is_elsewhere = _here(call, args["indices"][place])
    if not args["self"].shape[place]:  # no rows here: what is looked up is a row of zeros
        args["self"] = functional.pad(args["self"], (0, 0) * (args["self"].dim() - place - 1) + (0, 1))
    found: Tensor = call.target(args["self"], [*args["indices"][:place], index, *args["indices"][place + 1:]])
    inner = args["self"].dim() - place - 1
    return found.masked_fill(is_elsewhere.reshape([*is_elsewhere.shape, *[1] * inner]), 0)


@_local
def _index_select(call: LocalCall) -> Tensor:
    args = call.arguments()
    source: Tensor = args["self"]
    index, is_elsewhere = _here(call, args["index"])
    found: Tensor = call.target(source, args["dim"], index)
    inner = source.dim() - args["dim"] % source.dim() - 1
    return found.masked_fill(is_elsewhere.reshape([-1, *[1] * inner]), 0)


def _here(call: LocalCall, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in the device's part of what is looked up, and where it is in none of its entries."""
    factor = call.factor("looked_up")
    start, stop = call.range_of(factor)
    size = call.op.factors[factor].size
    index = index.remainder(size) - start  # negative ones count from the end
    is_elsewhere = (index < 0) | (index >= stop - start)
    return index.masked_fill(is_elsewhere, 0), is_elsewhere


# ---- losses ---------------------------------------------------------------------------------------------------------
#
# The loss of a row is ``log(sum_c exp(s_c)) - s_true``, times the weight of the true class; with label smoothing a part
# of it is spread over all classes. Over split classes only the first term needs the other devices: the maximum and the
# sum of exponentials, two all-reduces of a number per row. The device that has the true class returns the row's loss,
# others return zero; but the gradient of the first term, ``softmax``, is known to every device for its own classes.


class _SharedLogSumExp(torch.autograd.Function):
    """The logarithm of the sum of exponentials over the last dimension, as a sum over devices that split it.

    A row's comes from the device where ``here`` is true; the gradient is as if it came from every device.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, here: Tensor, group: Group) -> Tensor:
        highest = group.all_reduce(wide(scores.amax(-1)), "max")
        total = group.all_reduce(torch.exp(wide(scores) - highest.unsqueeze(-1)).sum(-1))
        found = highest + torch.log(total)
        ctx.save_for_backward(scores, found)
        return found * here

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        scores, found = ctx.saved_tensors
        softmax = torch.exp(wide(scores) - found.unsqueeze(-1))
        return (gradients[0].unsqueeze(-1) * softmax).to(scores.dtype), None, None


@_local
def _cross_entropy(call: LocalCall) -> Tensor:
    """Return the device's part of the loss over its rows and classes."""
    args = call.arguments()
    if args["target"].is_floating_point():
        return _soft_cross_entropy(call, args)
    if call.is_split("classes"):
        rows, weights = _rows_of_classes(call, args)
    else:
        rows = wide(call.target(**{**args, "reduction": int(Reduction.NONE)}))
        weights = _row_weights(args)
    if args["reduction"] == Reduction.NONE:
        return rows.to(args["self"].dtype)
    found = rows.sum()
    if args["reduction"] == Reduction.MEAN:
        axes, weight = _row_axes(call), weights.sum()
        found = found / (call.group(axes).all_reduce(weight) if axes else weight)
    return found.to(args["self"].dtype)


def _soft_cross_entropy(call: LocalCall, args: dict[str, Any]) -> Tensor:
    """Return the sum over the device's rows divided by the number of all rows; the true classes are probabilities."""
    num_rows = math.prod(factor.size for factor in call.op.factors if factor.name.startswith("rows"))
    return call.target(**{**args, "reduction": int(Reduction.SUM)}) / num_rows


def _row_axes(call: LocalCall) -> tuple[int, ...]:
    return tuple(axis for axis, choice in enumerate(call.strategy)
                 if choice >= 0 and call.op.factors[choice].name.startswith("rows"))


def _row_weights(args: dict[str, Any]) -> Tensor:
    """Return how much each row counts in the mean: the weight of its class, 0 if it is ignored."""
    target, weight = args["target"], args["weight"]
    counts = target != args["ignore_index"]
    if weight is None:
        return counts.to(wide(args["self"][:0]).dtype)
    return wide(weight.detach())[target.masked_fill(~counts, 0)] * counts


def _rows_of_classes(call: LocalCall, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the device's part of the loss of each row, and how much each row counts in the mean."""
    target = args["target"]
    scores = args["self"].movedim(1, -1) if args["self"].dim() > 1 else args["self"]
    weight = None if args["weight"] is None else wide(args["weight"].detach())
    classes = call.factor("classes")
    group = call.group(call.axes(classes))
    start, stop = call.range_of(classes)
    counts = target != args["ignore_index"]
    here = counts & (target >= start) & (target < stop)
    index = (target - start).masked_fill(~here, 0)
    true_scores = wide(scores.gather(-1, index.unsqueeze(-1)).squeeze(-1))
    own = here.to(true_scores.dtype) if weight is None else weight[index] * here
    weights = counts.to(true_scores.dtype) if weight is None else group.all_reduce(own)
    rows = -true_scores * own
    if "label_smoothing" not in args:
        return rows, weights  # the scores are logarithms of probabilities
    shared = _SharedLogSumExp.apply(scores, here, group)
    rows = rows + shared * weights
    smoothing = args["label_smoothing"]
    if smoothing:
        rows = rows * (1 - smoothing) + _smooth(call, scores, weight, shared) * counts * smoothing
    return rows, weights


def _smooth(call: LocalCall, scores: Tensor, weight: Tensor | None, shared: Tensor) -> Tensor:
    """Return the device's part of the mean over all classes of the loss if that class were true."""
    classes = call.factor("classes")
    num_classes = call.op.factors[classes].size
    if weight is None:
        return shared - wide(scores).sum(-1) / num_classes
    total = call.group(call.axes(classes)).all_reduce(weight.sum())
    return (shared * total - (scores * weight).sum(-1)) / num_classes


@_local
def _distance(call: LocalCall) -> Any:
    """Return the sum over the device's entries divided by the number of all entries."""
    args = call.arguments()
    num_entries = math.prod(factor.size for factor in call.op.factors)
    return call.target(**{**args, "reduction": int(Reduction.SUM)}) / num_entries
