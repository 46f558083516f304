"""Models whose parameters lie in fully connected layers, so that with few samples gradients are most of what moves.

    python -m benchmarks.lab run CLUSTER PLAN benchmarks/models/fully_connected.py:perceptron
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 100
IMAGE = 64


class Perceptron(nn.Module):
    """Linear layers with ReLU between them, and the loss."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return functional.cross_entropy(self.layers[-1](x), labels)


class VggLike(nn.Module):
    """Groups of 3x3 convolutions as in VGG, narrow ones, and its three linear layers, which hold 97 % of it."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), hidden: int = 2048) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in itertools.pairwise((3, *widths)):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
                       nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        flat = widths[-1] * (IMAGE >> len(widths)) ** 2
        self.classifier = Perceptron((flat, hidden, hidden, CLASSES))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        return self.classifier(self.features(images).flatten(1), labels)


def perceptron(batch: int = 4, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a perceptron with 9.0 million parameters, and inputs of ``batch`` samples."""
    made = torch.Generator().manual_seed(seed)
    inputs = (torch.randn(batch, 1024, generator=made), torch.randint(CLASSES, (batch,), generator=made))
    return Perceptron((1024, 2048, 2048, 1024, 512, CLASSES)), inputs


def vgg_like(batch: int = 4, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a network like VGG with 8.9 million parameters, and inputs of ``batch`` samples."""
    made = torch.Generator().manual_seed(seed)
    inputs = (torch.randn(batch, 3, IMAGE, IMAGE, generator=made), torch.randint(CLASSES, (batch,), generator=made))
    return VggLike(), inputs


def small(batch: int = 4, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a perceptron for tests."""
    made = torch.Generator().manual_seed(seed)
    inputs = (torch.randn(batch, 32, generator=made), torch.randint(10, (batch,), generator=made))
    return Perceptron((32, 64, 10)), inputs
