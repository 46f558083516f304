"""Grouped products in float64: PyTorch's own know only narrower numbers, so a plain module cannot be run in float64.

A traced model has another operator there, which knows all numbers. So that a run in float64 can be compared with the
plain module, ``torch._grouped_mm`` of float64 is computed here group by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GroupedProducts(TorchFunctionMode):
    """Computes grouped products of float64 rows; everything else is as it is."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func is torch._grouped_mm and args[0].dtype is torch.float64 and (args[0].ndim, args[1].ndim) == (2, 3):
            return _product(args[0], args[1], args[2] if len(args) > 2 else given["offs"])
        return func(*args, **given)


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return each row times the matrix of its group; rows behind the last group give zeros."""
    bounds = [0, *ends.tolist()]
    pieces = [rows[first:last] @ matrix for first, last, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat([*pieces, rows.new_zeros(len(rows) - bounds[-1], matrices.shape[-1])])
