"""Counts whose size a trace knows: ``torch.bincount(ids, minlength=8)`` of numbers below 8 has 8 entries.

In general its size depends on the largest number. Whoever names a least size counts classes or experts, which are
fewer; a number that is not is an error when the traced graph is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def counts_of_fixed_size() -> Iterator[None]:
    """Let ``torch.bincount`` with a least size give just that size while the body runs."""
    original, method = torch.bincount, torch.Tensor.bincount

    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:  # noqa: A002 - its name
        if not minlength:
            return original(input, weights, minlength)
        added = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
        return torch.zeros(minlength, dtype=added.dtype, device=input.device).scatter_add(0, input.long(), added)

    torch.bincount, torch.Tensor.bincount = bincount, bincount
    try:
        yield
    finally:
        torch.bincount, torch.Tensor.bincount = original, method
