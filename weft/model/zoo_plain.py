"""The zoo's models that are written in plain PyTorch: VGG-19, a network like Inception v3, and an LSTM.

All three are written here from the papers' tables (Simonyan and Zisserman 2014; Szegedy et al. 2015, figures 5 to 7 and
table 1). Their forward returns the mean loss if labels are given, else the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.model.zoo import Mode

Sizes = Mapping[str, int]


def _result(logits: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return logits
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class Vgg19(nn.Module):
    """Sixteen 3x3 convolutions in five groups, then three linear layers."""

    def __init__(self, width: int, image: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for group, depth in enumerate((2, 2, 4, 4, 4)):
            out = width * min(2**group, 8)
            for _ in range(depth):
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden = 64 * width
        self.classifier = nn.Sequential(
            nn.Linear(channels * (image // 32) ** 2, hidden), nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        return _result(self.classifier(self.features(pixel_values).flatten(1)), labels)


class ConvUnit(nn.Module):
    """A convolution, batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1,
                 padding: int | tuple[int, int] = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        return functional.relu(self.norm(self.conv(x)))


class Branches(nn.Module):
    """Several chains that read the same input; their results are joined along the channels."""

    def __init__(self, *chains: nn.Module) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chains)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined results."""
        return torch.cat([chain(x) for chain in self.chains], dim=1)


def _square_block(inputs: int, w: int, pool: int) -> Branches:
    """Return the block of figure 5: 3x3 convolutions at 35x35."""
    return Branches(
        ConvUnit(inputs, 2 * w, 1),
        nn.Sequential(ConvUnit(inputs, 3 * w // 2, 1), ConvUnit(3 * w // 2, 2 * w, 5, padding=2)),
        nn.Sequential(ConvUnit(inputs, 2 * w, 1), ConvUnit(2 * w, 3 * w, 3, padding=1),
                      ConvUnit(3 * w, 3 * w, 3, padding=1)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, pool, 1)))


def _long_block(inputs: int, w: int, inner: int) -> Branches:
    """Return the block of figure 6: 7x7 split into 1x7 and 7x1 at 17x17."""
    def row(outputs: int) -> ConvUnit:
        return ConvUnit(inner, outputs, (1, 7), padding=(0, 3))

    def column(outputs: int) -> ConvUnit:
        return ConvUnit(inner, outputs, (7, 1), padding=(3, 0))

    return Branches(
        ConvUnit(inputs, 6 * w, 1),
        nn.Sequential(ConvUnit(inputs, inner, 1), row(inner), column(6 * w)),
        nn.Sequential(ConvUnit(inputs, inner, 1), column(inner), row(inner), column(inner), row(6 * w)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, 6 * w, 1)))


def _wide_block(inputs: int, w: int) -> Branches:
    """Return the block of figure 7: outputs widened by parallel 1x3 and 3x1 at 8x8."""
    def fork() -> Branches:
        return Branches(ConvUnit(12 * w, 12 * w, (1, 3), padding=(0, 1)),
                        ConvUnit(12 * w, 12 * w, (3, 1), padding=(1, 0)))

    return Branches(
        ConvUnit(inputs, 10 * w, 1),
        nn.Sequential(ConvUnit(inputs, 12 * w, 1), fork()),
        nn.Sequential(ConvUnit(inputs, 14 * w, 1), ConvUnit(14 * w, 12 * w, 3, padding=1), fork()),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, 6 * w, 1)))


class Inception(nn.Module):
    """A stem, then blocks of branches at three resolutions with reductions between them."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            ConvUnit(3, w, 3, 2), ConvUnit(w, w, 3), ConvUnit(w, 2 * w, 3, padding=1), nn.MaxPool2d(3, 2),
            ConvUnit(2 * w, 5 * w // 2, 1), ConvUnit(5 * w // 2, 6 * w, 3), nn.MaxPool2d(3, 2))
        self.square = nn.Sequential(_square_block(6 * w, w, w), _square_block(8 * w, w, 2 * w),
                                    _square_block(9 * w, w, 2 * w))
        self.reduce = Branches(
            ConvUnit(9 * w, 12 * w, 3, 2),
            nn.Sequential(ConvUnit(9 * w, 2 * w, 1), ConvUnit(2 * w, 3 * w, 3, padding=1),
                          ConvUnit(3 * w, 3 * w, 3, 2)),
            nn.MaxPool2d(3, 2))
        self.long = nn.Sequential(*(_long_block(24 * w, w, inner) for inner in (4 * w, 5 * w, 5 * w, 6 * w)))
        self.reduce_again = Branches(
            nn.Sequential(ConvUnit(24 * w, 6 * w, 1), ConvUnit(6 * w, 10 * w, 3, 2)),
            nn.Sequential(ConvUnit(24 * w, 6 * w, 1), ConvUnit(6 * w, 6 * w, (1, 7), padding=(0, 3)),
                          ConvUnit(6 * w, 6 * w, (7, 1), padding=(3, 0)), ConvUnit(6 * w, 6 * w, 3, 2)),
            nn.MaxPool2d(3, 2))
        self.wide = nn.Sequential(_wide_block(40 * w, w), _wide_block(64 * w, w))
        self.classifier = nn.Linear(64 * w, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        x = self.long(self.reduce(self.square(self.stem(pixel_values))))
        x = self.wide(self.reduce_again(x))
        return _result(self.classifier(x.mean((2, 3))), labels)


class LstmModel(nn.Module):
    """An embedding, stacked LSTM layers and a linear layer over the vocabulary."""

    def __init__(self, layers: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        states, _ = self.lstm(self.embedding(input_ids))
        return _result(self.head(states), labels)


BUILDERS: Final[Mapping[str, Callable[[Sizes, Mode], nn.Module]]] = {
    "vgg": lambda sizes, mode: Vgg19(sizes["width"], sizes["image"], sizes["classes"]),
    "inception": lambda sizes, mode: Inception(sizes["width"], sizes["classes"]),
    "lstm": lambda sizes, mode: LstmModel(sizes["layers"], sizes["hidden"], sizes["vocab"]),
}
