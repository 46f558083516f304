"""A model of the operators that other people's models have and the zoo's have not: two towers and a table of bags."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mixed(nn.Module):
    """Bags of tokens beside an image that is sampled, cut into windows and transformed; a loss of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(24, 16, mode=mode) for mode in ("sum", "mean"))
        self.rotation = nn.Parameter(torch.randn(8, 2))
        self.mixing = nn.Parameter(torch.randn(4, 8, 8) / 4)
        with warnings.catch_warnings():  # the old form, whose operator this is for
            warnings.simplefilter("ignore")
            self.windows = nn.utils.weight_norm(nn.Linear(16, 16))
        self.places = nn.Parameter(torch.randn(1, 4, 4, 2) / 2)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        text = sum(bag(tokens) for bag in self.bags).reshape(-1, 8, 2)
        turned = torch.view_as_real(torch.view_as_complex(text) * torch.view_as_complex(self.rotation))
        text = torch.einsum("bic,kij->bkjc", turned, self.mixing).sum(1).flatten(1)
        sampled = functional.grid_sample(image, self.places.expand(len(image), -1, -1, -1).tanh(), align_corners=False)
        columns = self.windows(functional.unfold(sampled, 2, stride=2).transpose(1, 2))
        waves = torch.fft.rfft(columns, dim=-1).real[..., :8]
        scores, wanted = torch.broadcast_tensors(self.head(text + columns.mean(1)), labels)
        counted = torch.histc(tokens.double(), 24, 0, 23).to(scores.dtype).square().mean()
        loss = functional.binary_cross_entropy_with_logits(scores, wanted)
        return loss + functional.smooth_l1_loss(waves.mean(), counted * waves.mean())


def mixed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model and its inputs."""
    torch.manual_seed(0)
    return Mixed(), (torch.randint(0, 24, (4, 6)), torch.randn(4, 4, 6, 6), torch.rand(4, 4))
