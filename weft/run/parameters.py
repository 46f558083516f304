"""The parameters that one rank holds, and their gradients.

A parameter that several stages of the rank use is one tensor. The gradients of a bucket lie side by side in one flat
tensor per dtype, and each ``parameter.grad`` is a view of it, so the exchange needs no copy. Gradients are sums over
micro-batches and ranks, because every loss was weighted by its share of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Parameters:
    """Parameters by tensor name; see the module's docstring."""

    def __init__(self, tensors: Mapping[str, torch.nn.Parameter], buckets: Sequence[Sequence[str]]) -> None:
        self.tensors = dict(tensors)
        self.flat: tuple[tuple[Tensor, ...], ...] = tuple(self._flatten(names) for names in buckets)
        bucketed = {name for names in buckets for name in names}
        self._loose = [tensor for name, tensor in self.tensors.items() if name not in bucketed]

    def _flatten(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for name in names:
            by_dtype.setdefault(self.tensors[name].dtype, []).append(self.tensors[name])
        result = []
        for dtype, members in by_dtype.items():
            flat = torch.zeros(sum(item.numel() for item in members), dtype=dtype, device=members[0].device)
            start = 0
            for item in members:
                item.grad = flat[start : start + item.numel()].view(item.shape)
                start += item.numel()
            result.append(flat)
        return tuple(result)

    def clear_gradients(self) -> None:
        """Forget all gradients: those in buckets become zero, the others absent."""
        for tensors in self.flat:
            for flat in tensors:
                flat.zero_()
        for parameter in self._loose:
            parameter.grad = None

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a parameter; zero where the loss does not depend on it."""
        parameter = self.tensors[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
