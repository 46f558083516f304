"""Random small models that combine what real ones do: each is a chain of pieces, drawn with their features from a seed.

All pieces take and give a tensor of samples, places and channels, [batch, length, width], and treat samples apart,
batch norm excepted. The loss is a mean over samples. All is in double precision, complex tensors in complex128. Models
of one seed and unlike scales are the same but for the numbers of places, channels and words, which grow with the scale.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.model.source import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the tensors of a model are, but for the number of samples."""

    length: int
    width: int
    words: int


def size_of(scale: int) -> Size:
    """Return the size of a scale: the smallest, times the scale."""
    return Size(length=4 * scale, width=8 * scale, words=11 * scale)


class Linear(nn.Module):
    """A linear layer and a nonlinearity."""

    def __init__(self, size: Size, act: str) -> None:
        super().__init__()
        width = size.width
        self.linear, self.act = nn.Linear(width, width), act

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return getattr(functional, self.act)(self.linear(x)) + x


class LayerNorm(nn.Module):
    """Normalizes channels, then doubles their number and halves it again."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class GroupNorm(nn.Module):
    """Normalizes groups of channels."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, size.width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class BatchNorm(nn.Module):
    """Normalizes over samples, and so mixes them; keeps running statistics."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size.width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.norm(x.transpose(1, 2)).transpose(1, 2) + x


class Attention(nn.Module):
    """Attention of two heads, by one operator or by its parts."""

    def __init__(self, size: Size, fused: bool) -> None:
        super().__init__()
        width = size.width
        self.fused, self.qkv, self.out = fused, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(size.length, size.length, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, float("-inf"))
            mixed = functional.softmax(scores, -1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Convolution(nn.Module):
    """A convolution over places."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2)) + x


class Pieces(nn.Module):
    """Cuts the channels in unequal parts, treats them apart and puts them together another way round."""

    def __init__(self, size: Size, how: str) -> None:
        super().__init__()
        width = size.width
        self.how, self.first, self.second = how, nn.Linear(width // 2, width // 2), nn.Linear(width // 2, width // 2)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.how == "chunk":
            a, b = x.chunk(2, dim=-1)
        elif self.how == "split":
            half = x.shape[-1] // 2
            a, c, d = x.split([half, 1, half - 1], dim=-1)
            b = torch.cat([d, c], dim=-1)
        else:
            a, b = x.reshape(*x.shape[:2], -1, 2).unbind(-1)
        return torch.cat([self.second(b), torch.sigmoid(self.first(a))], dim=-1)


class InPlace(nn.Module):
    """Changes tensors where they lie: activations, and parts of them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.linear(x)
        y = y.relu_() * self.scale
        y[:, 0].add_(x[:, 1])
        y[:, 1:3] = torch.tanh(y[:, 1:3])
        return y.add_(x)


class Views(nn.Module):
    """Parameters and activations behind views of several kinds."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.mix, self.flat = nn.Parameter(torch.randn(width, width) / 3), nn.Parameter(torch.randn(2 * width) / 3)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = (x.flip(1) @ self.mix.t()).permute(1, 0, 2).contiguous().transpose(0, 1)
        y = y * self.flat.view(2, -1)[0] + self.flat[x.shape[-1]:].expand(x.shape[1:])
        return x + y.narrow(1, 0, 1).expand_as(x) + y.unsqueeze(2).squeeze(2)


class Rotary(nn.Module):
    """Turns pairs of channels as complex numbers, by constants or by a complex parameter."""

    def __init__(self, size: Size, trained: bool) -> None:
        super().__init__()
        width = size.width
        angles = torch.arange(size.length * width // 2, dtype=torch.float64).view(size.length, width // 2) / 5
        turn = torch.polar(torch.ones_like(angles), angles)
        self.linear = nn.Linear(width, width)
        if trained:
            self.turn = nn.Parameter(turn)
        else:
            self.register_buffer("turn", turn)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        pairs = torch.view_as_complex(self.linear(x).reshape(*x.shape[:2], -1, 2))
        return x + torch.view_as_real(pairs * self.turn).flatten(2)


class Fourier(nn.Module):
    """Multiplies frequencies by complex weights: a chain of complex operators that a cut may fall into."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size.length // 2 + 1, size.width, dtype=torch.complex128) / 3)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        spectrum = torch.fft.rfft(x, dim=1)
        spectrum = spectrum * self.weight
        spectrum = spectrum + spectrum.conj() * 0.5
        return x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1)


class Counter(nn.Module):
    """Counts its calls in a buffer, and reads a constant one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.linspace(-1, 1, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        self.calls.add_(1)
        return torch.tanh(self.linear(x) + self.shift) + 0.5 * x


class Dropout(nn.Module):
    """Dropout that is switched off."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.drop(self.linear(x)) + x


class Scalars(nn.Module):
    """A parameter of one number, constants made in the forward, and a choice by comparison."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.bias = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.zeros(1, 1, size.width))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        length = x.shape[1]
        places = torch.arange(length, dtype=x.dtype, device=x.device).view(1, length, 1) / length
        return torch.where(x > 0, x * self.gate, x * 0.1) + places * self.gate.exp() + self.bias + x


PIECES: Final[dict[str, Callable[[random.Random, Size], nn.Module]]] = {
    "linear": lambda rng, size: Linear(size, rng.choice(["relu", "gelu", "tanh", "silu", "softplus"])),
    "layer norm": lambda rng, size: LayerNorm(size),
    "group norm": lambda rng, size: GroupNorm(size),
    "batch norm": lambda rng, size: BatchNorm(size),
    "attention": lambda rng, size: Attention(size, rng.random() < 0.5),
    "convolution": lambda rng, size: Convolution(size),
    "chunk/cat": lambda rng, size: Pieces(size, rng.choice(["chunk", "split", "unbind"])),
    "in-place": lambda rng, size: InPlace(size),
    "views": lambda rng, size: Views(size),
    "complex": lambda rng, size: Rotary(size, trained=False),
    "complex parameter": lambda rng, size: Rotary(size, trained=True) if rng.random() < 0.5 else Fourier(size),
    "counting buffer": lambda rng, size: Counter(size),
    "dropout off": lambda rng, size: Dropout(size),
    "scalars": lambda rng, size: Scalars(size)}

WHOLE: Final = ("tied", "frozen", "unused parameter", "several outputs", "several inputs", "shared twice", "skip",
                "used in two stages")
"""Features of a model as a whole."""
FEATURES: Final = (*PIECES, *WHOLE)


class RandomNet(nn.Module):
    """A chain of pieces with some features of the whole; see ``draw_model``."""

    def __init__(self, rng: random.Random, pieces: tuple[str, ...], features: frozenset[str], size: Size) -> None:
        super().__init__()
        width, self.features = size.width, features
        self.start = nn.Linear(width, width)
        self.pieces = nn.ModuleList(PIECES[name](rng, size) for name in pieces)
        self.words = nn.Embedding(size.words, width) if "several inputs" in features or "tied" in features else None
        self.head = nn.Linear(width, size.words, bias=False)
        if "tied" in features:
            self.head.weight = self.words.weight
        self.twice = nn.Linear(width, width) if "shared twice" in features else None
        self.both = nn.Parameter(torch.ones(width)) if "used in two stages" in features else None
        self.unused = nn.Linear(width, 3) if "unused parameter" in features else None
        self.second_head = nn.Linear(width, 2) if "several outputs" in features else None
        if "frozen" in features:
            frozen = rng.sample(list(self.parameters()), k=max(1, len(list(self.parameters())) // 4))
            for parameter in frozen:
                parameter.requires_grad_(parameter is self.start.weight)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, ...]:  # noqa: D102
        given = list(rest)
        y = self.start(x)
        if "several inputs" in self.features:
            y = y + self.words(given.pop(0))
        if self.both is not None:
            y = y * self.both
        if self.twice is not None:
            y = torch.tanh(self.twice(y))
        early = y
        for number, piece in enumerate(self.pieces):
            y = piece(y)
            if "skip" in self.features and number == len(self.pieces) // 2:
                y = y + early
        if self.twice is not None:
            y = torch.tanh(self.twice(y))
        if self.both is not None:
            y = y + self.both
        logits = self.head(y)
        second = () if self.second_head is None else (self.second_head(y), y.mean(-1))
        if not given:
            return (logits, *second) if second else logits
        loss = functional.cross_entropy(logits.flatten(0, 1), given[0].flatten())
        if second:
            loss = loss + second[0].square().mean()
        return (loss, *second) if second else loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnModel:
    """A random model, and what is in it."""

    seed: int
    features: tuple[str, ...]
    source: ModelSource

    @property
    def name(self) -> str:
        """Return how to find it again."""
        return f"model {self.seed} ({', '.join(self.features)})"


def draw_model(seed: int, mode: str = "training", scale: int = 1) -> DrawnModel:
    """Return the model of a seed: two to five pieces and up to four features of the whole, batch norm in one of six."""
    rng, size = random.Random(seed), size_of(scale)
    names = [name for name in PIECES if name != "batch norm"]
    pieces = rng.sample(names, k=rng.randint(2, 5)) + ["batch norm"] * (rng.random() < 1 / 6)
    rng.shuffle(pieces)
    features = frozenset(rng.sample(WHOLE, k=rng.randint(0, 4)))

    def build(mode: str) -> nn.Module:
        torch.manual_seed(seed)
        module = RandomNet(random.Random(seed + 1), tuple(pieces), features, size)
        return module.double()

    def sample(mode: str, batch: int, data_seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1000 * seed + data_seed)
        x = torch.randn(batch, size.length, size.width, generator=generator, dtype=torch.float64)
        words = (torch.randint(size.words, (batch, size.length), generator=generator) for _ in range(2))
        wanted = (next(words),) if "several inputs" in features else ()
        return (x, *wanted, *((next(words),) if mode == "training" else ()))

    source = ModelSource(name=f"random-{seed}", spec="", batch=2, mode=mode, builder=build, sampler=sample)
    return DrawnModel(seed=seed, features=tuple(name for name in FEATURES if name in {*pieces, *features}),
                      source=source)
