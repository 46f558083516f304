"""Small models and sources that the tests of ``weft.model`` share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.model.source import ModelSource, resolve_model
from weft.model.trace import TracedModel, run_program
from weft.model.weights import materialize
from weft.run.verify import GroupedProducts


def source_of(make: Callable[[], nn.Module], *shapes: tuple[int, ...], batch: int = 2, mode: str = "training"):
    """Return a source for a module made on the spot, with random float inputs of ``shapes`` (batch first)."""
    def sample(_mode: str, size: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(size, *shape, generator=generator, dtype=torch.float64) for shape in shapes)

    def build(_mode: str) -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return ModelSource(name="test", spec="test", batch=batch, mode=mode, builder=build, sampler=sample)


def zoo(spec: str, **options) -> ModelSource:
    source = resolve_model(spec, **options)
    assert isinstance(source, ModelSource)
    return source


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``module`` by path, tied ones under every name."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def eager(source: ModelSource, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients of the plain module."""
    module = materialize(source.build(), 0)
    with GroupedProducts():
        result = module(*inputs)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach(), gradients(module)


def replayed(traced: TracedModel, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients of the traced graph, node by node under autograd."""
    module = materialize(traced.source.build(), 0)
    loss = run_program(traced.program, state_of(module), inputs)[0]
    loss.backward()
    return loss.detach(), gradients(module)


def assert_equals_eager(traced: TracedModel, *, seed: int = 1, tolerance: float = 1e-12) -> None:
    """Check the traced graph against the plain module on inputs it was not traced with."""
    inputs = traced.source.inputs(seed=seed)
    want_loss, want = eager(traced.source, inputs)
    got_loss, got = replayed(traced, inputs)
    assert torch.isclose(got_loss, want_loss, rtol=tolerance, atol=0)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        scale = gradient.abs().max().clamp_min(1e-300)
        assert (got[name] - gradient).abs().max() <= tolerance * scale, name
