"""Tensors as the backends can take them, in the same memory.

gloo and nccl do not know complex numbers in all of their calls, and neither knows every narrow dtype. What is only
moved may be seen as anything of the same bytes; what is added up may be seen as real numbers if it is complex.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from weft.base.errors import RunError

_REAL: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_KNOWN: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                           torch.int8, torch.uint8, torch.bool})
"""Dtypes that all backends move; they add up all of them but truth values."""


def settled(tensor: Tensor) -> Tensor:
    """Return the tensor, or one copy of it where it is not contiguous or a conjugate, a mark on another's values."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def to_move(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as one of a dtype that backends move: itself, or a flat view of it."""
    if tensor.dtype in _KNOWN:
        return tensor
    return tensor.view(-1).view(_REAL.get(tensor.dtype, torch.uint8))


def to_add(tensor: Tensor, how: str = "sum") -> Tensor:
    """Return a contiguous tensor as one that backends add up: itself, or a flat view of it; else raise."""
    if tensor.dtype in _REAL and how == "sum":
        return tensor.view(-1).view(_REAL[tensor.dtype])
    if tensor.dtype not in _KNOWN or tensor.dtype == torch.bool:
        verb = "added up" if how == "sum" else "compared"
        raise RunError(f"tensors of {str(tensor.dtype).removeprefix('torch.')} cannot be {verb} over ranks: use a plan "
                       "that does not split what makes them, or another dtype")
    return tensor


def moved_per_entry(dtype: torch.dtype) -> int:
    """Return how many entries ``to_move`` makes of one."""
    if dtype in _KNOWN:
        return 1
    return 2 if dtype in _REAL else int(dtype.itemsize)
