"""Models whose placements need more than a chain: two results, made far apart, and tensors that many read."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Towers(nn.Module):
    """Three towers that read each other's early layers; returns the joined result, and that of the first tower."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.towers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(3)) for _ in range(3))
        self.head = nn.Linear(3 * width, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = functional.gelu(self.shared(x)) + torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        first = [functional.relu(tower[0](start)) for tower in self.towers]
        second = [tower[1](a + b.flip(1)) for tower, a, b in zip(self.towers, first, reversed(first), strict=True)]
        third = [tower[2](a) * self.shared(b) for tower, a, b in zip(self.towers, second, first, strict=True)]
        return self.head(torch.cat([*third[1:], start], dim=1)), third[0].transpose(0, 1).contiguous().t()


def towers(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = Towers()
    torch.manual_seed(seed)
    return model, (torch.randn(batch, 8),)
