"""What a device does for operators whose special factors are split (``weft.sharding.factors.Factor.special``).

Each function gets a ``LocalCall`` and returns the device's results, with gradients that autograd finds as ever. Where
devices exchange something, autograd does not see it; an ``autograd.Function`` then says what the gradient is. In all of
them a result that lacks the split factor is the sum of what the devices return, and its gradient is the same on all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.sharding.factor_rules.common import arguments
from weft.sharding.local_ops import Group, LocalCall, local, wide

aten = torch.ops.aten


def _arguments(call: LocalCall) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return arguments(call.target, call.args, call.kwargs)


def _is_first(call: LocalCall, name: str) -> bool:
    """Return whether the device has the first part of a factor, or all of it."""
    return not call.is_split(name) or call.range_of(call.factor(name))[0] == 0


def _once(call: LocalCall, name: str, value: Tensor) -> Tensor:
    """Return a tensor that is to be added once to a sum over a factor: zeros but on the first device."""
    return value if _is_first(call, name) else value * 0.0


def _part(call: LocalCall, name: str, whole: int) -> int:
    """Return the size of the device's part of a factor; ``whole`` where it is not split."""
    if not call.is_split(name):
        return whole
    start, stop = call.range_of(call.factor(name))
    return stop - start


# ---- products and convolutions --------------------------------------------------------------------------------------


@local("aten.linear.default")
def _linear(call: LocalCall) -> Tensor:
    """Add the bias on the first part of the inner dimension only."""
    args = _arguments(call)
    return aten.linear(args["input"], args["weight"], _once(call, "k", args["bias"]))


@local("aten.addmm.default", "aten.baddbmm.default")
def _addmm(call: LocalCall) -> Any:
    """Add the first argument on the first part of the inner dimension only."""
    return call.with_args(_once(call, "k", call.args[0]), *call.args[1:])


@local("aten.conv1d.default", "aten.conv1d.padding", "aten.conv2d.default", "aten.conv2d.padding",
       "aten.conv3d.default", "aten.conv3d.padding", "aten.conv_transpose1d.default", "aten.conv_transpose2d.input",
       "aten.conv_transpose3d.input", "aten.convolution.default")
def _convolution(call: LocalCall) -> Any:
    """Convolve the device's groups; add the bias on the first part of the input channels only."""
    args = _arguments(call)
    if args["bias"] is not None:
        args["bias"] = _once(call, "in", args["bias"])
    args["groups"] = _part(call, "groups", args["groups"])
    return call.target(**args)


@local("aten.embedding.default")
def _embedding(call: LocalCall) -> Tensor:
    """Look up the tokens that are in the device's part of the vocabulary; zeros for the others."""
    args = _arguments(call)
    start, stop = call.range_of(call.factor("vocab"))
    indices = args["indices"] - start
    is_elsewhere = (indices < 0) | (indices >= stop - start)
    padding = args["padding_idx"] - start if start <= args["padding_idx"] < stop else -1
    found = aten.embedding(args["weight"], indices.masked_fill(is_elsewhere, 0), padding)
    return found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)


# ---- normalisations -------------------------------------------------------------------------------------------------


@local("aten.group_norm.default")
def _group_norm(call: LocalCall) -> Any:
    """Normalise the device's groups."""
    args = _arguments(call)
    args["num_groups"] = _part(call, "groups", args["num_groups"])
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


@local("aten._native_batch_norm_legit_functional.default")
def _batch_norm(call: LocalCall) -> tuple[Tensor, ...]:
    """Normalise by the statistics of the whole batch."""
    args = _arguments(call)
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


@local("aten.scaled_dot_product_attention.default")
def _causal_attention(call: LocalCall) -> Tensor:
    """Attend from the device's rows, to the keys up to its last row."""
    args = _arguments(call)
    start, stop = call.range_of(call.factor("rows"))
    num_keys = min(stop, args["key"].shape[-2])
    options: dict[str, Any] = {"scale": args["scale"], "enable_gqa": args["enable_gqa"]}
    if start == 0:
        options["is_causal"] = True
    else:
        device = args["query"].device
        rows = torch.arange(start, stop, device=device)
        options["attn_mask"] = rows.unsqueeze(-1) >= torch.arange(num_keys, device=device)
    return aten.scaled_dot_product_attention(args["query"], args["key"].narrow(-2, 0, num_keys),
                                             args["value"].narrow(-2, 0, num_keys), **options)
