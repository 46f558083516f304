"""Which models give the same loss and gradients for a batch as for its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.run.models import TinyGPT
from weft.model.parts import Verdict, Work, check_parts

HALVES = [(0, 4), (4, 8)]
LITTLE = Work(flop=1e3, saved_bytes=1e3)


class Net(nn.Module):
    """A linear layer, something in the middle, and a loss of what comes out."""

    def __init__(self, middle, loss=lambda out: out.pow(2).mean()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last, self.loss = nn.Linear(6, 6), middle, nn.Linear(6, 6), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.last(self.middle(self.first(x))))


class Recurrent(nn.Module):
    """Keeps its weights in a second list, so it cannot be run with others."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(6, 6, num_layers=2, batch_first=True, dropout=dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x.unsqueeze(1).expand(-1, 3, -1))[0].pow(2).mean()


def contrastive(out: torch.Tensor) -> torch.Tensor:
    unit = functional.normalize(out, dim=-1)
    return functional.cross_entropy(unit @ unit.T * 3, torch.arange(len(out)))


def checked(module: nn.Module, *inputs: torch.Tensor, parts=HALVES, work: Work = LITTLE) -> Verdict:
    return check_parts(module, inputs, parts, batch=8, work=work)


def rows(batch: int = 8) -> torch.Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("module", [
    Net(nn.ReLU()), Net(nn.Dropout(0.5)), Net(nn.LayerNorm(6)), Net(lambda x: functional.dropout(x, 0.5)), Recurrent(),
    Net(lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]),
    Net(nn.BatchNorm1d(6).eval()), Net(lambda x: x.float().tanh().to(x.dtype)),
    Net(nn.ReLU(), lambda out: functional.cross_entropy(out, torch.ones(len(out), dtype=torch.long)))])
def test_sound_models_pass(module):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for dtype in (torch.float32, torch.float64):
        state = torch.get_rng_state()
        assert checked(module.to(dtype), rows().to(dtype), parts=[(0, 6), (6, 8)]) == Verdict()
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value.to(before[name].dtype), before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(("loss", "whole"), [
    (lambda out: out.pow(2).mean(1).sum(), "is not a mean"), (contrastive, "mixes them"),
    (lambda out: (out.pow(2) * out.sigmoid()).sum() / out.sigmoid().sum(), "the gradient of"),
    (lambda out: out.pow(2).mean().sqrt(), "the mean over its parts of 4 and 4"),
    (lambda out: (out - out.mean(0)).pow(2).mean(), "microbatches 1")])
def test_losses_that_are_no_mean_over_samples_are_found_in_any_dtype_and_with_one_sample_repeated(loss, whole):
    for module, inputs in ((Net(nn.ReLU(), loss), rows()), (Net(nn.ReLU(), loss).double(), rows().double()),
                           (Net(nn.ReLU(), loss), rows(1).expand(8, -1))):
        verdict = checked(module, inputs)
        assert whole in verdict.problem
        assert not verdict.note


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_does_not_hide_anything(reentrant):
    def middle(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=reentrant)

    assert checked(Net(middle), rows()) == Verdict()
    assert checked(Net(middle, lambda out: out.pow(2).sum()), rows()).problem


def test_a_model_that_asks_for_float32_is_checked_in_float32():
    assert checked(Net(lambda x: x.float().tanh()), rows()) == Verdict()
    assert checked(Net(lambda x: x.float().tanh(), lambda out: out.pow(2).sum()), rows()).problem


def test_padding_in_unequal_numbers_is_found():
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (8, 9))
    labels = tokens[:, 1:].clone()
    assert checked(TinyGPT(), tokens[:, :-1], labels) == Verdict()
    labels[0, :3] = -100
    assert "not a mean over samples" in checked(TinyGPT(), tokens[:, :-1], labels).problem


def test_batch_norm_is_a_note_unless_something_else_mixes_too():
    module = Net(nn.BatchNorm1d(6))
    verdict = checked(module, rows())
    assert not verdict.problem
    assert "batch norm takes its statistics over 4 samples where one device would take them over 8" in verdict.note
    assert module.middle.num_batches_tracked == 0
    assert "is not a mean" in checked(Net(nn.BatchNorm1d(6), lambda out: out.pow(2).sum()), rows()).problem


@pytest.mark.parametrize(("module", "inputs", "work", "reason"), [
    (Net(nn.ReLU()).to("meta"), rows(), LITTLE, "its parameters have no values yet"),
    (Net(nn.ReLU()), rows(), Work(flop=1e15, saved_bytes=0), "it would take 1.6e+16 operations"),
    (Net(nn.ReLU()), rows(), Work(flop=1, saved_bytes=1e15), "it would need"),
    (Net(lambda x: x + torch.randn_like(x)), rows(), LITTLE, "its forward draws random numbers"),
    (Recurrent(dropout=0.5), rows(), LITTLE, "its forward draws random numbers"),
    (Net(lambda x: x.bfloat16().to(x.dtype)), rows(), LITTLE, "it can only be run in half precision"),
    (Net(nn.ReLU(), lambda out: (out - out).log().sum()), rows(), LITTLE, "its loss on the example is -inf"),
    (Net(nn.ReLU()), torch.randn(8, 5), LITTLE, "RuntimeError: mat1 and mat2 shapes")])
def test_what_cannot_be_checked_is_said(module, inputs, work, reason):
    verdict = checked(module, inputs, work=work)
    assert not verdict.problem
    assert verdict.note.startswith("it was not checked that the loss is a mean over samples")
    assert reason in verdict.note


def test_a_batch_that_is_not_cut_is_not_looked_at():
    assert checked(Net(nn.ReLU(), lambda out: out.sum()), rows(), parts=[(0, 8)]) == Verdict()


def test_gradients_that_are_no_numbers_are_said_and_blame_nothing():
    verdict = checked(Net(nn.Identity(), lambda out: (out - out).sqrt().mean() + out.pow(2).mean()), torch.randn(8, 6))
    assert not verdict.problem
    assert "the gradient of 'first.weight' on the example is not finite" in verdict.note
