"""One rank in this process: what a step leaves behind, and parts of training that no other test has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.run.plans import greedy_order, pipeline_plan, replicated_plan, source_of
from tests.worlds import with_gradients
from weft.base.errors import PlanError, RunError
from weft.model.source import ModelSource
from weft.model.trace import trace
from weft.plan.plan import Plan
from weft.run.executor import Executor, loaded_executor, samples_of
from weft.run.failures import exit_code_and_text
from weft.run.prepare import Tracer, lower_to_run, prepare_rank
from weft.run.transport import Transport
from weft.run.wiring import Given


@pytest.fixture(scope="module")
def transport() -> Iterator[Transport]:
    assert not dist.is_initialized()
    alone = Transport(rank=0, num_ranks=1, device=torch.device("cpu"), store=dist.HashStore())
    yield alone
    alone.close()


def source_from(build: Callable[[], nn.Module], sample: Callable[[int], tuple[torch.Tensor, ...]]) -> ModelSource:
    def builder(mode: str) -> nn.Module:
        torch.manual_seed(0)
        return build().double()

    def sampler(mode: str, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        return sample(batch)

    return ModelSource(name="model", spec="", batch=2, mode="training", builder=builder, sampler=sampler)


def start(source: ModelSource, plan: Plan, transport: Transport) -> Executor:
    tracer = Tracer(source)
    prepared = prepare_rank(lower_to_run(plan, tracer), tracer, transport, seed=0)
    return loaded_executor(prepared, source, transport)


def one_rank_plan(source: ModelSource, num_stages: int, *, microbatches: int = 1, split: bool = False,
                  recompute: bool = False) -> Plan:
    graph = trace(source, batch=2, backward="rule").graph
    devices = [0] * num_stages
    return pipeline_plan(graph, devices, greedy_order(devices, microbatches, split=split), microbatches=microbatches,
                         recompute=recompute)


def numbers(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 6, dtype=torch.float64),)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh()).square().mean()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.dropout(self.first(x).tanh(), 0.5)).square().mean()


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.middle.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.last(self.middle(self.first(x).tanh()).tanh())
        return y.square().mean(), y


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_is_held_after_a_step(transport, split, recompute):
    plan = one_rank_plan(source_of("tiny_gpt"), 3, microbatches=3, split=split, recompute=recompute)
    executor = start(source_of("tiny_gpt"), plan, transport)
    for _ in range(2):
        executor.step()
        for cell in executor.binder.wiring.cells.values():
            assert cell.outputs is None
            assert not any((cell.edges, cell.leaves, cell.gradients, cell.deferred, cell.arguments))
    source = source_of("tiny_gpt")
    assert executor.take_loss() / 2 == pytest.approx(source.build()(*source.inputs(6, 0)).item(), rel=1e-12)


def test_buffers_that_the_forward_changes_are_updated(transport):
    source = source_from(Normalized, numbers)
    executor = start(source, one_rank_plan(source, 2), transport)
    executor.step()
    module = source.build()
    module(*source.inputs(2, 0)).backward()
    (stage,) = (stage for stage in executor.binder.stages.values() if stage.updates)
    held = {name: stage.buffer(name) for name in stage.module.updated_buffers}
    assert sorted(held) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    for name, value in held.items():
        torch.testing.assert_close(value, module.get_buffer(name))
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(executor.parameters.gradient(name), parameter.grad, rtol=1e-10, atol=1e-14)


def test_recomputation_draws_the_same_random_numbers(transport):
    source = source_from(Dropped, numbers)
    found = []
    for recompute in (False, True):
        executor = start(source, one_rank_plan(source, 2, microbatches=2, recompute=recompute), transport)
        torch.manual_seed(5)
        executor.step()
        found.append({name: executor.parameters.gradient(name).clone() for name in executor.parameters.tensors})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-15)


def test_frozen_parameters_and_second_outputs(transport):
    source = source_from(PartlyFrozen, numbers)
    module = source.build()
    module(*source.inputs(4, 0))[0].backward()
    for split in (False, True):
        executor = start(source, one_rank_plan(source, 3, microbatches=2, split=split), transport)
        executor.step()
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                assert executor.parameters.tensors[name].grad is None
            else:
                torch.testing.assert_close(executor.parameters.gradient(name), parameter.grad, rtol=1e-10, atol=1e-14)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean() * 2


def test_a_mean_over_samples_does_not_cross_to_another_division_of_them():
    source = source_from(Doubled, numbers)
    graph = trace(source, batch=2, backward="rule", batch_dims=True).graph
    plan = replicated_plan(graph, [[(0, 0.5), (1, 0.5)], [(0, 1.0)]], microbatches=1, batch=4, num_devices=2)
    parts = (graph.op_names[:-1], graph.op_names[-1:])
    plan = with_gradients(replace(plan, gradients=(), stages=tuple(
        replace(stage, ops=ops) for stage, ops in zip(plan.stages, parts, strict=True))), graph)
    with pytest.raises(PlanError, match=r"tensor 'mean' .* mixes the samples"):
        lower_to_run(plan, Tracer(source))


def test_samples_of_an_input():
    def given(shape, first=4, count=2):
        return Given(arguments=[], place=0, name="x", shape=shape, first_sample=first, num_samples=count)

    whole = torch.arange(24).reshape(8, 3)
    assert torch.equal(samples_of(whole, given((2, 3)), batch=8), whole[4:6])
    assert torch.equal(samples_of(whole.t(), given((3, 2)), batch=8), whole.t()[:, 4:6])
    assert torch.equal(samples_of(whole, given((8, 3)), batch=8), whole)
    with pytest.raises(RunError, match="no dimension is the batch"):
        samples_of(whole, given((3, 3)), batch=8)


def test_a_late_error_of_a_gpu_says_how_to_find_its_cause():
    code, text = exit_code_and_text(RuntimeError("CUDA error: an illegal memory access was encountered\n"))
    assert code == RunError.exit_code
    assert text.startswith("RuntimeError: CUDA error: an illegal memory access was encountered. A GPU tells")
    assert "CUDA_LAUNCH_BLOCKING=1" in text
    assert exit_code_and_text(ValueError("no")) == (RunError.exit_code, "ValueError: no")
