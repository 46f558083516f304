"""Transformers in plain PyTorch, with much to compute for each parameter: long samples, few layers.

    python -m benchmarks.bench_mps

``GptLike``: causal attention, layer norm, GELU, an output matrix of its own. ``T5Like``: encoder and decoder with
attention to the encoder's result, root mean square norm, ReLU, no biases, one embedding for both sides; positions are
added as vectors instead of biases of attention. Parameters are on the meta device: who runs the model gives them values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 4096

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    """Attention of one sequence to another or to itself."""

    def __init__(self, width: int, heads: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        """Return what ``x`` [batch, length, width] finds in ``read``."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2)
                   for part in (self.query(x), self.key(read), self.value(read)))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True, bias=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        y = self.norm_1(x)
        x = x + self.attention(y, y)
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GptLike(nn.Module):
    """A language model; with ``rounds`` the same layers are gone through several times."""

    def __init__(self, *, width: int, heads: int, layers: int, length: int, rounds: int = 1) -> None:
        super().__init__()
        self.rounds = rounds
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return _loss(self.head(self.norm(x)), labels)


class RmsNorm(nn.Module):
    """Divides by the root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled values."""
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class T5Block(nn.Module):
    """Attention, attention to the encoder's result in a decoder, and a feed-forward part."""

    def __init__(self, width: int, heads: int, *, decodes: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RmsNorm(width), RmsNorm(width)
        self.attention = Attention(width, heads, causal=decodes, bias=False)
        if decodes:
            self.norm_cross, self.cross = RmsNorm(width), Attention(width, heads, causal=False, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Return the block's result."""
        y = self.norm_1(x)
        x = x + self.attention(y, y)
        if encoded is not None:
            x = x + self.cross(self.norm_cross(x), encoded)
        return x + self.down(functional.relu(self.up(self.norm_2(x))))


class T5Like(nn.Module):
    """A translator with as many layers in the encoder as in the decoder."""

    def __init__(self, *, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.encoder = nn.ModuleList(T5Block(width, heads, decodes=False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Block(width, heads, decodes=True) for _ in range(layers))
        self.norm_encoder, self.norm_decoder = RmsNorm(width), RmsNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of predicting the labels, each from those before it."""
        places = self.place(torch.arange(tokens.shape[1], device=tokens.device))
        encoded = self.embed(tokens) + places
        for block in self.encoder:
            encoded = block(encoded)
        encoded = self.norm_encoder(encoded)
        x = self.embed(functional.pad(labels[:, :-1], (1, 0))) + places
        for block in self.decoder:
            x = block(x, encoded)
        return _loss(self.head(self.norm_decoder(x)), labels)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return cross entropy in its two steps, each of which is then an operator of the graph with tensors of its own."""
    return functional.nll_loss(functional.log_softmax(logits.flatten(0, 1), dim=-1), labels.flatten())


def _made(build: Callable[[], nn.Module], batch: int, length: int, seed: int) -> Made:
    with torch.device("meta"):
        module = build()
    return module, token_pairs(batch, length, seed)


def token_pairs(batch: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and labels."""
    made = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCABULARY, (batch, length), generator=made) for _ in range(2))
    return tokens, labels


def wide_gpt(batch: int = 8, seed: int = 0) -> Made:
    """Return two layers of width 2048 (117 million parameters) with samples of 1024 tokens."""
    return _made(lambda: GptLike(width=2048, heads=16, layers=2, length=1024), batch, 1024, seed)


def looped_gpt(batch: int = 8, seed: int = 0) -> Made:
    """Return one layer of width 2048, gone through four times (67 million parameters), with samples of 512 tokens."""
    return _made(lambda: GptLike(width=2048, heads=16, layers=1, length=512, rounds=4), batch, 512, seed)


def gpt_like(batch: int = 8, seed: int = 0) -> Made:
    """Return eight layers of width 768 (64 million parameters) with samples of 1024 tokens."""
    return _made(lambda: GptLike(width=768, heads=12, layers=8, length=1024), batch, 1024, seed)


def t5_like(batch: int = 8, seed: int = 0) -> Made:
    """Return four and four layers of width 768 (72 million parameters) with samples of 512 + 512 tokens."""
    return _made(lambda: T5Like(width=768, heads=12, layers=4, length=512), batch, 512, seed)


def small_gpt(batch: int = 8, seed: int = 0) -> Made:
    """Return the smallest language model, for tests without a GPU."""
    return _made(lambda: GptLike(width=32, heads=2, layers=4, length=16), batch, 16, seed)


def small_t5(batch: int = 8, seed: int = 0) -> Made:
    """Return the smallest translator, for tests without a GPU."""
    return _made(lambda: T5Like(width=32, heads=2, layers=2, length=16), batch, 16, seed)
