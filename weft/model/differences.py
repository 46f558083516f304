"""How far results are from those expected: the one measure of checks before a run, verification, and comparisons.

The error of a tensor is the largest absolute difference over its elements, divided by the largest absolute value that
is expected. For gradients the divisor is at least ``FLOOR`` times the largest value over all gradients of the model,
since some are zero up to rounding (the bias of attention keys).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

FLOOR: Final = 1e-2
"""Gradients smaller than this part of the model's largest are compared on that scale."""


def least_divisor(gradients: Iterable[Tensor]) -> float:
    """Return what errors of these gradients are divided by at least."""
    return FLOOR * max((float(item.abs().max()) for item in gradients if item.numel()), default=0.0)


def relative_error(value: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return the largest absolute difference over the largest absolute expected value (at least ``floor``).

    It is infinite where one of the values is, or is not a number: whether such values are right cannot be told.
    """
    if expected.numel() == 0:
        return 0.0
    value, expected = precise(value), precise(expected)
    difference = float((value - expected).abs().max())
    if not math.isfinite(difference):  # over an infinite divisor it would be no number, which passes for any
        return math.inf
    return difference / max(float(expected.abs().max()), floor, 1e-300)


def precise(tensor: Tensor) -> Tensor:
    """Return the tensor in double precision in the host's memory; complex numbers stay complex."""
    return tensor.to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)
