"""A model with four towers of different kinds (text, image, table, sound) that meet in a head.

    weft place benchmarks/models/towers.py:towers CLUSTER
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

WIDTH = 256
CLASSES = 100
VOCABULARY = 8000


class TextTower(nn.Module):
    """A transformer encoder over tokens."""

    def __init__(self, layers: int = 12, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width, heads=8) for _ in range(layers))
        self.out = nn.Linear(width, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, WIDTH]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(dim=1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class ConvTower(nn.Module):
    """Convolutions with residual connections, over images (2 dimensions) or sound (1 dimension)."""

    def __init__(self, dims: int, channels: int, widths: tuple[int, ...], stride: int = 2) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv1d, nn.BatchNorm1d)
        sizes = (channels, *widths)
        self.down = nn.ModuleList(nn.Sequential(conv(a, b, 3, stride=stride, padding=1), norm(b), nn.ReLU())
                                  for a, b in itertools.pairwise(sizes))
        self.same = nn.ModuleList(nn.Sequential(conv(b, b, 3, padding=1), norm(b), nn.ReLU(),
                                                conv(b, b, 3, padding=1), norm(b)) for b in widths)
        self.dims = tuple(range(2, 2 + dims))
        self.out = nn.Linear(widths[-1], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, WIDTH]."""
        for down, same in zip(self.down, self.same, strict=True):
            x = down(x)
            x = nn.functional.relu(x + same(x))
        return self.out(x.mean(dim=self.dims))


class TableTower(nn.Module):
    """A perceptron over the columns of a table."""

    def __init__(self, columns: int = 512, width: int = 2048, layers: int = 3) -> None:
        super().__init__()
        sizes = [columns, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, WIDTH]."""
        for layer in self.layers:
            x = nn.functional.relu(layer(x))
        return self.out(x)


class Towers(nn.Module):
    """Four towers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextTower()
        self.image = ConvTower(2, 3, (64, 128, 256, 512))
        self.table = TableTower()
        self.sound = ConvTower(1, 1, (64, 128, 256, 512, 512), stride=4)
        self.head = nn.Sequential(nn.Linear(4 * WIDTH, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))

    def forward(self, tokens: Tensor, image: Tensor, table: Tensor, sound: Tensor) -> Tensor:
        """Return [batch, CLASSES]."""
        parts = [self.text(tokens), self.image(image), self.table(table), self.sound(sound)]
        return self.head(torch.cat(parts, dim=1))


def towers(batch: int = 8, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model, and inputs of ``batch`` samples."""
    made = torch.Generator().manual_seed(seed)
    inputs = (torch.randint(VOCABULARY, (batch, 128), generator=made),
              torch.randn(batch, 3, 224, 224, generator=made), torch.randn(batch, 512, generator=made),
              torch.randn(batch, 1, 65536, generator=made))
    return Towers().eval(), inputs
