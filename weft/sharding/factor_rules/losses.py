"""Factors of losses: rows (all dimensions but the classes) and classes.

    cross entropy, likelihood  (rows... classes, rows..., classes) -> () or (rows...)
    squared error              (d..., d...) -> () or (d...)

Rows of a mean are special: it is the sum over a device's rows divided by the number (or weight) of all rows that count,
so that the devices' results add up to the mean however many rows each has. Classes are special: the sum of exponentials
is taken over all devices, and the loss of a row comes from the device that has its true class.
"""

from __future__ import annotations

import math
from enum import IntEnum

from weft.sharding.factor_rules.common import Call, is_float, rule, shape_of
from weft.sharding.factors import OpFactors


class Reduction(IntEnum):
    """How ATen numbers what a loss does with its rows."""

    NONE = 0
    MEAN = 1
    SUM = 2


@rule("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default")
def cross_entropy(call: Call) -> OpFactors | None:
    """Return the factors of a cross entropy or of a likelihood of given classes."""
    scores, target, weight = (call.args[name] for name in ("self", "target", "weight"))
    shape = shape_of(scores)
    class_dim = 0 if len(shape) == 1 else 1
    has_indices = not is_float(target)
    is_mean = call.args["reduction"] == Reduction.MEAN
    is_linear = "nll" in call.operator
    number = float(max(scores.meta["val"].dtype.itemsize, 4))
    by_row = number * math.prod(shape) / shape[class_dim]
    rows = [() if dim == class_dim else call.factor(f"rows{dim}", size, special=is_mean, forward_sums=(
        (number,) if is_mean and has_indices else ())) for dim, size in enumerate(shape)]  # how much all rows count
    classes = call.factor("classes", shape[class_dim], special=True,  # the maximum, and the sum of exponentials
                          forward_sums=() if is_linear else (by_row, by_row)) if has_indices else ()
    dims = [classes if dim == class_dim else rows[dim] for dim in range(len(shape))]
    row_dims = [row for dim, row in enumerate(rows) if dim != class_dim]
    inputs = [(scores, dims), (target, row_dims if has_indices else dims)]
    if weight is not None:
        inputs.append((weight, [classes]))
    return call.done(inputs, [row_dims if call.args["reduction"] == Reduction.NONE else []],
                     linear=[[scores]] if is_linear else [])


@rule("aten.mse_loss.default", "aten.l1_loss.default")
def distance(call: Call) -> OpFactors | None:
    """Return the factors of a squared or absolute error."""
    left, right = call.args["self"], call.args["target"]
    if shape_of(left) != shape_of(right):
        return None
    is_mean = call.args["reduction"] == Reduction.MEAN
    dims = [call.factor(f"d{dim}", size, special=is_mean) for dim, size in enumerate(shape_of(left))]
    return call.done([(left, dims), (right, dims)], [dims if call.args["reduction"] == Reduction.NONE else []])
