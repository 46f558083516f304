"""Small models for tests of the runtime, also loaded by path (``models.py:tiny_gpt``) in started processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask[:length, :length], float("-inf"))
        attended = (functional.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Learned positions from a constant ``arange``, and the mean cross-entropy of the next token (or the logits)."""

    def __init__(self, *, layers: int = 2, width: int = 32, words: int = 40, length: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SkipNet(nn.Module):
    """Convolutions with connections from early to late layers, a tuple in the middle, and parameters behind views."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.third, self.fourth = nn.Conv2d(width, width, 3, padding=1), nn.ConvTranspose2d(width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 4, 1)
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        a = functional.relu(self.first(image))
        b = functional.relu(self.second(a))
        c, d = functional.relu(self.third(b)).chunk(2, dim=1)
        e = torch.cat([d, c], dim=1) + b
        f = self.fourth(e)
        out = self.last(torch.cat([a, f], dim=1))
        out = (out @ self.mix.t()) * self.scale
        return functional.mse_loss(out, target)


def _gpt(batch: int, seed: int, mode: str, *, tied: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = TinyGPT(tied=tied)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (batch, 9))
    return model, (tokens[:, :-1].clone(), tokens[:, 1:].clone())[: 2 if mode == "training" else 1]


def tied_gpt(batch: int = 2, seed: int = 0, mode: str = "training") -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _gpt(batch, seed, mode, tied=True)


def tiny_gpt(batch: int = 2, seed: int = 0, mode: str = "training") -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _gpt(batch, seed, mode, tied=False)


def frozen_gpt(batch: int = 2, seed: int = 0, mode: str = "training") -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Embeddings and parts of both blocks stay as they are."""
    model, inputs = _gpt(batch, seed, mode, tied=False)
    for parameter in (*model.words.parameters(), *model.blocks[0].up.parameters(), model.blocks[1].norm1.weight):
        parameter.requires_grad_(False)
    return model, inputs


def skip_net(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = SkipNet()
    torch.manual_seed(seed)
    return model, (torch.randn(batch, 3, 8, 8), torch.randn(batch, 4, 8, 8))


class Products(nn.Module):
    """Every way to multiply by a parameter: twice, transposed, with shared biases, both ways round, and beside the loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.twice = nn.Linear(width, width)
        self.plain, self.turned = nn.Parameter(torch.randn(width, 7)), nn.Parameter(torch.randn(8, 7))
        self.added, self.bias = nn.Parameter(torch.randn(8, width)), nn.Parameter(torch.randn(width))
        self.coder = nn.Parameter(torch.randn(4, width))
        self.unused = nn.Linear(width, 3)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        x = self.key(x) * self.value(x)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = torch.tanh(torch.tanh(x @ self.plain) @ self.turned.t())
        batch, length, width = x.shape
        x = torch.addmm(self.bias, x.view(-1, width), self.added).view(batch, length, -1)
        x = torch.tanh(functional.linear(x, self.twice.weight, self.bias) + self.coder.sum())
        return functional.mse_loss(functional.linear(x, self.coder) @ self.coder, target), self.unused(x)


def products(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = Products()
    torch.manual_seed(seed)
    return model, (torch.randn(batch, 3, 5), torch.randn(batch, 3, 6))


class Rotary(nn.Module):
    """Complex numbers everywhere: a buffer of rotations, a parameter, activations, and a conjugate that is only a mark."""

    def __init__(self, width: int = 8, length: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 2 * width), nn.Linear(width, 3)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), 0.5 ** torch.arange(width))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.filter = nn.Parameter(torch.randn(width, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.first(x).unflatten(-1, (-1, 2))) * self.turns
        z = (z.conj() @ self.mix.conj()) * self.filter
        with torch.no_grad():
            scale = z / 3
        z = torch.tanh(z + scale).conj()
        return functional.mse_loss(self.last(z.real + 0.3 * z.imag), target)


def rotary(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = Rotary()
    torch.manual_seed(seed)
    return model, (torch.randn(batch, 4, 6), torch.randn(batch, 4, 3))


class FewValues(nn.Module):
    """A batch norm over the two samples of a micro-batch: it makes plus or minus one of them, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.last(self.norm(self.first(x))), target)


def few_values(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = FewValues()
    torch.manual_seed(seed)
    x = 1 + 0.02 * torch.randn(batch, 64)
    return model, (x, torch.randn(batch, 4))


class Stubborn(FewValues):
    """Computes its batch norm's inputs in bfloat16, whatever it is converted to."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).bfloat16().to(x.dtype)
        return functional.mse_loss(self.last(self.norm(hidden)), target)


def stubborn(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = Stubborn()
    torch.manual_seed(seed)
    return model, (1 + 0.02 * torch.randn(batch, 64), torch.randn(batch, 4))
