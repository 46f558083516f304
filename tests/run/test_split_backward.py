"""I then W gives the gradients of a whole backward, and W really is what gives those of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.model.helpers import state_of
from weft.model.source import ModelSource
from weft.model.trace import trace
from weft.run.random_state import RankRandom
from weft.run.split_backward import WeightGradients, split_matmul, split_weight_gradients
from weft.run.stage import Stage, build_stage, model_graph


class Operators(nn.Module):
    """One use of a parameter, chosen by name; the input goes through a differentiable operator first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.square, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.linear, self.plain = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
        self.norm, self.bare = nn.LayerNorm(6), nn.LayerNorm(6, bias=False)
        self.table = nn.Embedding(7, 6, padding_idx=2)
        self.conv1, self.conv2 = nn.Conv1d(4, 3, 3, stride=2, padding=1), nn.Conv1d(4, 4, 2, groups=2, bias=False)
        self.conv3 = nn.Conv2d(1, 2, (3, 2), dilation=(1, 2), padding=(1, 0))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        rows = x.flatten(0, 1)
        result = {
            "linear": lambda: self.linear(x), "linear without bias": lambda: self.plain(x),
            "addmm": lambda: torch.addmm(self.bias, rows, self.square), "mm": lambda: torch.mm(rows, self.square),
            "matmul": lambda: x @ self.square, "matmul with t": lambda: x @ self.square.t(),
            "addmm with transpose": lambda: torch.addmm(self.bias, rows, self.square.transpose(0, 1)),
            "matmul with permute": lambda: x @ self.square.permute(1, 0),
            "layer norm": lambda: self.norm(x), "layer norm without bias": lambda: self.bare(x),
            "embedding": lambda: self.table(index) * x, "conv": lambda: self.conv1(x), "grouped conv": lambda: self.conv2(x),
            "conv2d": lambda: self.conv3(x.unsqueeze(1)), "used twice": lambda: (x @ self.square) @ self.square,
            "scale": lambda: x * self.bias, "cast": lambda: x @ self.square.float().double(),
            "left": lambda: self.square @ x.transpose(1, 2), "view": lambda: functional.linear(x, self.square.view(6, 6)),
        }[self.kind]()
        return result.square().mean()


DEFERRED = {
    "linear": ["linear.weight", "linear.bias"], "linear without bias": ["plain.weight"], "addmm": ["square", "bias"],
    "mm": ["square"], "matmul": ["square"], "matmul with t": ["square"], "addmm with transpose": ["square", "bias"],
    "matmul with permute": ["square"], "layer norm": ["norm.weight", "norm.bias"],
    "layer norm without bias": ["bare.weight"], "embedding": ["table.weight"], "conv": ["conv1.weight", "conv1.bias"],
    "grouped conv": ["conv2.weight"], "conv2d": ["conv3.weight", "conv3.bias"], "used twice": ["square"],
}
AT_ONCE = {"scale": ["bias"], "cast": ["square"], "left": ["square"], "view": ["square"]}


@pytest.mark.parametrize("kind", [*DEFERRED, *AT_ONCE])
def test_two_parts_give_the_whole_backward(kind):
    torch.manual_seed(0)
    module = Operators(kind).double()
    inputs = (torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(0, 7, (3, 4)))
    source = ModelSource(name=kind, spec="", batch=3, mode="training", builder=lambda mode: module,
                         sampler=lambda mode, batch, seed: inputs)
    traced = trace(source, backward="rule")
    loss = traced.graph.tensor_names[traced.graph.outputs[0]]
    stage = Stage(build_stage(model_graph(traced), traced.graph.op_names, [loss], values=state_of(module).__getitem__,
                              device=torch.device("cpu")), split=True,
                  random=RankRandom(torch.device("cpu"), seed=0, rank=0, num_ranks=1))
    arguments = [dict(zip(traced.program.inputs, inputs, strict=True))[name] for name in stage.module.inputs]
    x = inputs[0].requires_grad_()
    module(*inputs).backward()
    expected = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
    expected_input, x.grad = x.grad, None
    module.zero_grad()
    assert stage.split_forward is not None
    for _ in range(2):  # the second time gradients are there already, and are added to
        stage.split_forward(*arguments)[0].backward()
        torch.testing.assert_close(x.grad, expected_input, rtol=1e-12, atol=1e-15)
        x.grad = None
        present = [name for name, value in module.named_parameters() if value.grad is not None]
        assert bool(stage.queue.pending) == (kind in DEFERRED)
        for item in stage.queue.take():
            item.accumulate()
    assert sorted(present) == sorted(expected)
    assert sorted(expected) == sorted((DEFERRED | AT_ONCE)[kind])
    for name, value in expected.items():
        torch.testing.assert_close(module.get_parameter(name).grad, 2 * value, rtol=1e-12, atol=1e-15)


def test_weight_gradients_wait_for_w():
    torch.manual_seed(0)
    module = Operators("linear").double()
    inputs = (torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(0, 7, (3, 4)))
    source = ModelSource(name="linear", spec="", batch=3, mode="training", builder=lambda mode: module,
                         sampler=lambda mode, batch, seed: inputs)
    traced = trace(source, backward="rule")
    loss = traced.graph.tensor_names[traced.graph.outputs[0]]
    stage = Stage(build_stage(model_graph(traced), traced.graph.op_names, [loss], values=state_of(module).__getitem__,
                              device=torch.device("cpu")), split=True,
                  random=RankRandom(torch.device("cpu"), seed=0, rank=0, num_ranks=1))
    stage.split_forward(inputs[0])[0].backward()
    assert module.linear.weight.grad is None
    assert module.linear.bias.grad is None
    (item,) = stage.queue.take()
    item.accumulate()
    assert module.linear.weight.grad is not None
    assert module.linear.bias.grad is not None


@pytest.mark.parametrize("trains_bias", [True, False])
def test_frozen_weights_keep_no_operand(trains_bias):
    """Was: a split backward kept the input of every linear layer, and queued gradients for weights that take none."""
    linear = torch.nn.Linear(6, 6).double()
    linear.weight.requires_grad_(False)
    linear.bias.requires_grad_(trains_bias)
    queue, kept = WeightGradients(), []
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    graph = torch.fx.symbolic_trace(Calls(linear)).graph
    split = split_weight_gradients(torch.fx.GraphModule({"weight": linear.weight, "bias": linear.bias}, graph), queue)
    with torch.autograd.graph.saved_tensors_hooks(lambda item: kept.append(item) or item, lambda item: item):
        y = split(x * 1)
    assert [item.data_ptr() for item in kept if item is not None and item.shape == x.shape] == []
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x) @ linear.weight)
    assert len(queue.pending) == trains_bias
    for item in queue.take():
        item.accumulate()
    assert (linear.weight.grad, linear.bias.grad is None) == (None, not trains_bias)


class Calls(torch.nn.Module):
    """A linear layer as traces have it: one operator that reads attributes."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return torch.ops.aten.linear.default(x, self.weight, self.bias)


def test_a_gradient_in_another_order_is_not_copied_to_be_kept():
    """Was: rows were copied for the gradient of the weight, and kept beside what they were copied from."""
    queue, weight = WeightGradients(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    given = torch.randn(4, 3, 5, dtype=torch.float64).transpose(0, 1)
    split_matmul(x, weight, None, True, queue).backward(given)
    (item,) = queue.take()
    assert item.grad.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    item.accumulate()
    torch.testing.assert_close(weight.grad, torch.einsum("abo,abi->oi", given, x.detach()))
