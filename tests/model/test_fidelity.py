"""Which traced graphs compute what their module does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.model.test_parts import Net, Recurrent, rows
from weft.model import parts
from weft.model.fidelity import check_trace
from weft.model.parts import Verdict
from weft.model.trace import trace
from weft.training.parallelize import source_of_module


def checked(module: nn.Module, *inputs: torch.Tensor, mode: str = "training", device: torch.device | None = None) -> Verdict:
    source = source_of_module(module, inputs).with_mode(mode)
    return check_trace(trace(source, backward="none"), module, source.inputs(), device=device)


class Wrong(nn.Module):
    """Multiplies its input by something else while it is traced."""

    def __init__(self, factor: float = 1.01) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if torch.compiler.is_exporting() else x


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x.float()) * self.weight).abs().pow(2).mean()


class Several(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.last(self.first(x))
        return self.loss(out), out, out.argmax(-1)


def in_place(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 0] += 1
    x[:, 1:3] = x[:, 3:5]
    return x.mul_(2)


def dropped_after_an_unused_draw(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return functional.dropout(x, 0.5)


def noisy_after_an_unused_draw(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return x + torch.randn_like(x)


def attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]


@pytest.mark.parametrize("module", [
    Net(nn.Dropout(0.5)), Net(nn.BatchNorm1d(6)), Net(in_place), Net(Counter()), Net(dropped_after_an_unused_draw),
    Net(lambda x: x + torch.randn_like(x)), Recurrent(dropout=0.5), Net(attention), Several(None), Complex(),
    Net(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)), Net(lambda x: x * x.detach().softmax(-1)),
    Net(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3)), Net(lambda x: x.double().tanh().to(x.dtype))])
def test_sound_models_pass_in_any_dtype_and_are_left_as_they_were(module):
    for dtype in (torch.float32, torch.bfloat16) if not isinstance(module, Complex) else (torch.float32,):
        module = module.to(dtype) if not isinstance(module, Complex) else module
        before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
        assert checked(module, rows().to(dtype)) == Verdict()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("others", [[], [nn.Dropout(0.5)], [nn.BatchNorm1d(6)], [nn.LayerNorm(6)]])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.float64, 1.001), (torch.float16, 1.25)])
def test_another_way_while_tracing_is_found_beside_dropout_and_norms(others, dtype, factor):
    problem = checked(Net(nn.Sequential(*others, Wrong(factor))).to(dtype), rows().to(dtype)).problem
    assert "the traced graph computes something else than the module: on the example the module's loss is" in problem
    assert "asks whether it is traced (in test_fidelity.py:" in problem
    assert "attn_implementation" in problem


def test_a_gradient_alone_that_differs_is_found():
    detached = Net(lambda x: x.detach() if torch.compiler.is_exporting() else x)
    assert "and the gradient of 'first.weight' differs by 100.0%" in checked(detached, rows()).problem


def test_outputs_of_inference_are_compared_one_by_one():
    module = Several(None, loss=lambda out: out.mean() + (1.0 if torch.compiler.is_exporting() else 0.0))
    assert "on the example output 0 differs by" in checked(module, rows(), mode="inference").problem
    assert checked(Several(None), rows(), mode="inference") == Verdict()


def test_what_changes_from_call_to_call_is_found():
    problem = checked(Net(lambda x: x * (1 + random.random())), rows()).problem
    assert "gives something else each time it is called" in problem
    assert "Python's random" in problem


def test_a_model_is_checked_on_another_device_with_copies():
    """The meta device stands for one that is not the module's own: that nothing comes of it is a note, no alarm."""
    assert "it was not checked" in checked(Recurrent(), rows(), device=torch.device("meta")).note
    assert "it was not checked" in checked(Net(nn.ReLU()), rows(), device=torch.device("meta")).note


@pytest.mark.parametrize(("module", "reason"), [
    (Net(nn.ReLU()).to("meta"), "its parameters have no values yet"),
    (Net(noisy_after_an_unused_draw), "its forward draws random numbers"),
    (Net(nn.ReLU(), lambda out: out.log().mean()), "is not finite")])
def test_what_could_not_be_checked_is_noted(module, reason):
    verdict = checked(module, rows())
    assert not verdict.problem
    assert "it was not checked that the traced graph computes what the module does" in verdict.note
    assert reason in verdict.note


def test_a_model_that_takes_too_much_work_is_not_run(monkeypatch):
    monkeypatch.setitem(parts.MAX_FLOP, "cpu", 10.0)
    assert "it would take" in checked(Net(Wrong()), rows()).note
