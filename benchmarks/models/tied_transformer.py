"""A small transformer whose output matrix is its embedding, for training runs of seconds.

    python -m benchmarks.bench_resume
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, WIDTH, HEADS = 48, 8, 32, 4


class Layer(nn.Module):
    """Causal attention and two linear layers, both after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width]."""
        normed = self.norm1(x)
        q, k, v = (item(normed).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for item in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TiedTransformer(nn.Module):
    """The mean loss of the next word."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.words(words) + self.places
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def tied_transformer(batch: int = 8, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model, always the same, and a batch."""
    torch.manual_seed(1)
    model = TiedTransformer()
    torch.manual_seed(seed)
    words = torch.randint(0, WORDS, (batch, LENGTH + 1))
    return model, (words[:, :-1].clone(), words[:, 1:].clone())
