"""What a device does for losses whose rows or classes are split: its part of a sum that is the whole loss.

The loss of a row is ``log(sum_c exp(s_c)) - s_true``, times the weight of the true class; with label smoothing a part
of it is spread over all classes. Over split classes only the first term needs the other devices: the maximum and the
sum of exponentials, two all-reduces of a number per row. The device that has the true class returns the row's loss,
others return zero; but the gradient of the first term, ``softmax``, is known to every device for its own classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.sharding.factor_rules.common import arguments
from weft.sharding.factor_rules.losses import Reduction
from weft.sharding.local_ops import Group, LocalCall, local, wide


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


@local("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default")
def _cross_entropy(call: LocalCall) -> Tensor:
    """Return the device's part of the loss over its rows and classes."""
    args = arguments(call.target, call.args, call.kwargs)
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


@local("aten.mse_loss.default", "aten.l1_loss.default")
def _distance(call: LocalCall) -> Any:
    """Return the sum over the device's entries divided by the number of all entries."""
    args = arguments(call.target, call.args, call.kwargs)
    num_entries = math.prod(factor.size for factor in call.op.factors)
    return call.target(args["self"], args["target"], int(Reduction.SUM)) / num_entries
