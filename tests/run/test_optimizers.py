"""The plan's own optimizer: masters of half-precision parameters, and what checkpoints keep of them."""

from __future__ import annotations

import copy

import pytest
import torch

from weft.plan.memory import optimizer_bytes
from weft.plan.plan import Optimizer
from weft.run import optimizers
from weft.run.optimizers import MasterWeights, make_optimizer


def parameters(dtype: torch.dtype, *, seed: int = 0) -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in ((6, 4), (4,), (3, 5))]


def set_gradients(tensors: list[torch.nn.Parameter], *, seed: int, scale: float = 1.0) -> None:
    made = torch.Generator().manual_seed(seed)
    for item in tensors:
        item.grad = (scale * torch.randn(item.shape, generator=made)).to(item.dtype)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_plans_optimizer_is_torchs(kind, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = make_optimizer(ours, Optimizer(kind=kind, lr=0.01))
    plain = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](theirs, lr=0.01)
    for step in range(3):
        for tensors, item in ((ours, optimizer), (theirs, plain)):
            set_gradients(tensors, seed=step)
            item.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if dtype is torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_masters_take_the_steps_of_float32(chunk, monkeypatch):
    monkeypatch.setattr(optimizers, "CHUNK_BYTES", chunk)
    half = parameters(torch.bfloat16)
    whole = [torch.nn.Parameter(item.detach().float()) for item in half]
    optimizer, plain = make_optimizer(half, Optimizer(kind="adamw", lr=1e-3)), torch.optim.AdamW(whole, lr=1e-3)
    for step in range(5):
        set_gradients(half, seed=step)
        for item, other in zip(half, whole, strict=True):
            other.grad = item.grad.float()
        optimizer.step()
        plain.step()
    for item, other in zip(half, whole, strict=True):
        torch.testing.assert_close(optimizer.state[item]["master"], other.detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(item, optimizer.state[item]["master"].bfloat16())


def test_steps_too_small_for_half_precision_add_up():
    half = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = make_optimizer(half, Optimizer(kind="sgd", lr=1.0))
    for _ in range(40):
        half[0].grad = torch.full((4,), 2.0**-10, dtype=torch.bfloat16)
        optimizer.step()
    assert torch.allclose(half[0].float(), torch.full((4,), 1 - 40 * 2.0**-10), atol=2.0**-8)


def test_parameters_in_float32_beside_half_ones_are_their_own_masters():
    mixed = [*parameters(torch.bfloat16)[:1], *parameters(torch.float32)[1:]]
    optimizer = make_optimizer(mixed, Optimizer(kind="adamw"))
    set_gradients(mixed, seed=1)
    optimizer.step()
    assert ["master" in optimizer.state[item] for item in mixed] == [True, False, False]
    assert all(item.grad is not None for item in mixed)


def test_the_state_is_what_the_account_counts():
    from dataclasses import replace

    from tests.worlds import chain_graph

    half = [torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))]
    optimizer = make_optimizer(half, Optimizer(kind="adamw"))
    set_gradients(half, seed=0)
    optimizer.step()
    held = sum(value.numel() * value.element_size() for key, value in optimizer.state[half[0]].items() if key != "step")
    graph = replace(chain_graph(1, parameter_bytes=200), tensor_dtypes=("bfloat16",) * 3)
    assert held == optimizer_bytes(graph, graph.tensor_index["w0"], Optimizer(kind="adamw"))


def test_saved_state_goes_on_where_it_was():
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, other = (make_optimizer(item, Optimizer(kind="adamw", lr=1e-2)) for item in (first, second))
    for step in range(3):
        set_gradients(first, seed=step)
        one.step()
    for item, target in zip(first, second, strict=True):
        target.data.copy_(item.data)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for step in range(3, 6):
        for tensors, optimizer in ((first, one), (second, other)):
            set_gradients(tensors, seed=step)
            optimizer.step()
    for item, target in zip(first, second, strict=True):
        assert torch.equal(one.state[item]["master"], other.state[target]["master"])
        assert one.state[item]["exp_avg"].dtype is torch.float32


def test_masters_follow_parameters_that_were_loaded():
    half = parameters(torch.bfloat16)
    optimizer = make_optimizer(half, Optimizer(kind="sgd", lr=0.0))
    assert isinstance(optimizer, MasterWeights)
    with torch.no_grad():
        for item in half:
            item.fill_(3.0)
    optimizer.refresh()
    set_gradients(half, seed=0)
    optimizer.step()
    assert all((item == 3.0).all() for item in half)


def test_the_learning_rate_of_the_group_counts():
    half = [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    optimizer = make_optimizer(half, Optimizer(kind="sgd", lr=1.0))
    optimizer.param_groups[0]["lr"] = 0.5
    half[0].grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    assert half[0].tolist() == [-0.5, -0.5]
