"""What counts as equal to one device."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.run.plans import pipeline_plan
from weft.model.parts import FLOOR, relative_error
from weft.model.trace import trace
from weft.plan.orders import one_f_one_b
from weft.run.prepare import Tracer, lower_to_run
from weft.run.result import RunOptions
from weft.run.verify import Reference, reference_run, verify_training
from weft.run.worker import _with_reason
from weft.training.parallelize import source_of_module


def reference(**gradients: list[float]) -> Reference:
    return Reference(outputs=(torch.tensor(2.0),),
                     gradients={name: torch.tensor(value, dtype=torch.float64) for name, value in gradients.items()})


def verified(expected: Reference, loss: float = 2.0, **found: list[float]):
    gradients = [(name, 1, torch.tensor(value, dtype=torch.float64)) for name, value in found.items()]
    return verify_training(expected, loss=loss, gradients=gradients, dtype=torch.float64)


def test_equal_within_the_tolerance_of_the_dtype():
    check = verified(reference(a=[1.0, -4.0]), a=[1.0, -4.0 + 2e-10])
    assert check.passed
    assert check.gradient_error == pytest.approx(5e-11)
    assert check.worst == "a (rank 1)"
    assert not verified(reference(a=[1.0, -4.0]), a=[1.0, -4.0 + 2e-9]).passed


def test_the_loss_counts_too():
    assert not verified(reference(a=[1.0]), loss=2.0 + 1e-8, a=[1.0]).passed


def test_gradients_that_are_zero_up_to_rounding_are_compared_on_the_scale_of_the_model():
    check = verified(reference(a=[1.0], noise=[1e-17]), a=[1.0], noise=[3e-17])
    assert check.passed
    assert check.gradient_error == pytest.approx(2e-17 / FLOOR)
    assert not verified(reference(a=[1.0], noise=[1e-17]), a=[1.0], noise=[1e-8]).passed


def test_a_gradient_that_no_rank_has_is_not_equal():
    check = verified(reference(a=[1.0], b=[0.5]), a=[1.0])
    assert not check.passed
    assert check.worst == "b (on no rank)"


def test_not_a_number_is_never_equal():
    assert relative_error(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert not verified(reference(a=[1.0]), a=[math.nan]).passed
    assert not verified(reference(a=[1.0]), loss=math.nan, a=[1.0]).passed


def test_reference_in_parts_is_the_weighted_sum():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    x = torch.randn(8, 3, dtype=torch.float64)
    found = reference_run(Loss(), [x], training=True, batch=8, parts=[(0, 6), (6, 8)])
    module.zero_grad()
    (0.75 * Loss()(x[:6]) + 0.25 * Loss()(x[6:])).backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(found.gradients[f"inner.{name}"], value.grad, rtol=1e-12, atol=1e-15)
    whole = reference_run(Loss(), [x], training=True, batch=8)
    assert float(whole.outputs[0]) != pytest.approx(float(found.outputs[0]), rel=1e-6)


class Normed(nn.Module):
    """Statistics, so that one process is given the plan's parts, and a sum, which that would hide."""

    def __init__(self, *, total: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.total = nn.Linear(3, 3), nn.BatchNorm1d(3), total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.first(x)).tanh().pow(2)
        return out.sum() if self.total else out.mean()


@pytest.mark.parametrize("total", [False, True])
def test_a_sum_is_not_hidden_by_statistics(total):
    source = source_of_module(Normed(total=total), torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    graph = trace(source, batch=4, backward="rule").graph
    plan = pipeline_plan(graph, [0], one_f_one_b(1, 2), microbatches=2, batch=8)
    tracer = Tracer(source)
    prepared = SimpleNamespace(program=lower_to_run(plan, tracer), takes_statistics=True)
    check = _with_reason(verified(reference(a=[1.0]), a=[1.0]), prepared, tracer, RunOptions(verify=True))
    assert check.passed is not total
    assert ("the model's loss is not a mean over samples" in check.reason) is total


class Otherwise(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if torch.compiler.is_exporting() else x).pow(2).mean()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_run_that_differs_because_of_its_trace_says_so(is_wrong):
    source = source_of_module(Otherwise(3, 3) if is_wrong else Normed(total=False), torch.randn(8, 3))
    tracer = Tracer(source)
    plan = pipeline_plan(trace(source, backward="rule").graph, [0], one_f_one_b(1, 1), microbatches=1, batch=8)
    prepared = SimpleNamespace(program=lower_to_run(plan, tracer), takes_statistics=False)
    check = _with_reason(verified(reference(a=[1.0]), a=[2.0]), prepared, tracer, RunOptions(verify=True))
    assert not check.passed
    assert ("the traced graph computes something else than the module" in check.reason) is is_wrong


def test_an_infinite_gradient_of_one_device_hides_nothing():
    assert relative_error(torch.tensor([1.0]), torch.tensor([math.inf])) == math.inf
    check = verified(reference(a=[math.inf, 1.0], b=[1.0]), a=[5.0, 1.0], b=[1.0])
    assert not check.passed
    assert check.worst == "a (rank 1)"


def test_what_one_process_has_not_finite_is_no_difference_of_the_plan():
    check = verified(reference(a=[math.nan], b=[1.0]), a=[math.nan], b=[1.0])
    assert not check.passed
    assert check.reason == "the gradient of 'a' is not finite in one process as well, and what is not finite cannot be compared"
    lost = Reference(outputs=(torch.tensor(math.nan),), gradients={})
    assert verified(lost, loss=math.nan).reason.startswith("the loss is nan in one process as well")
