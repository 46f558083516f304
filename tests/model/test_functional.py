"""Mutation made functional: the traced graph, run node by node in any order of stages, equals the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model.helpers import assert_equals_eager, source_of, state_of
from weft.base.errors import ModelError
from weft.model import capture as capture_module
from weft.model.functional import changes_memory
from weft.model.trace import run_program, trace


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(6))


class ThroughView(Base):
    def forward(self, x):
        y = self.layer(x)
        y[:, :3].sub_(1.5)
        return (y * self.layer(y)).mean()


class InPlaceChain(Base):
    def forward(self, x):
        y = self.layer(x).clone()
        y.mul_(2)
        z = y.add_(1)
        z += x
        torch.relu_(y)
        return (y * z).square().mean()


class ViewReadAfter(Base):
    def forward(self, x):
        y = self.layer(x).clone()
        view = y.t()
        y.mul_(3)
        return (view @ y).mean()


class ViewReadBefore(Base):
    def forward(self, x):
        y = self.layer(x).clone()
        total = y.t().sum(dim=0).sum()
        y.mul_(3)
        return total + y.mean()


class InPlaceOnParts(Base):
    def forward(self, x):
        y = self.layer(x).clone()
        left, right = y[:, :3], y[:, 3:]
        left.mul_(2)
        return (left.sum(dim=1) + right.sum(dim=1) + y[:, 0]).square().mean()


class CountsCalls(Base):
    def forward(self, x):
        self.count.add_(1)
        return (self.layer(x) * self.count).mean()


class Promotes(Base):
    def forward(self, x):
        y = torch.zeros(x.shape, dtype=torch.float32)
        y += self.layer(x)  # stays float32, where y + ... would be float64
        return y.double().mean()


class WithoutGradient(Base):
    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            scale = y.abs().max(dim=0).values
        return (y * scale + (y * y).detach()).mean()


class NormalisedByStatistics(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(torch.relu_(self.layer(self.norm(x)))).square().mean()


class CopiesRows(Base):
    def forward(self, x):
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = self.layer(x)[:, :-1].clone()
        shifted[:, 0] = 5.0
        return (shifted * x).mean()


class Widens(Base):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x).square().mean()


class Narrows(Base):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x.float()).float().square().mean()


MODELS = [ThroughView, InPlaceChain, ViewReadAfter, ViewReadBefore, InPlaceOnParts, CountsCalls, Promotes,
          WithoutGradient, NormalisedByStatistics, CopiesRows, Widens]


@pytest.mark.parametrize("make", MODELS)
def test_traced_graph_is_functional_and_equals_the_module(make):
    traced = trace(source_of(make, (6,), batch=4))
    assert not [node for node in traced.program.fx_graph.nodes if changes_memory(node)]
    assert_equals_eager(traced)


def test_autocast_becomes_casts():
    source = source_of(Narrows, (6,), batch=4).with_dtype("float32")
    traced = trace(source)
    assert "bfloat16" in traced.graph.tensor_dtypes
    assert torch.equal(run_program(traced.program, state_of(source.build()), source.inputs())[0], source.build()(*source.inputs()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_that_is_on_while_tracing_is_part_of_the_model(dtype):
    source = source_of(Normal, (6,), batch=4).with_dtype("float32")
    module = source.build()
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        traced, expected = trace(source), module(*source.inputs())
        assert "forward" not in module.__dict__
    expected.backward()
    other = source.build()
    found = run_program(traced.program, state_of(other), source.inputs())[0]
    found.backward()
    assert torch.equal(found, expected)
    assert not torch.equal(found, source.build()(*source.inputs()))
    for name, parameter in module.named_parameters():
        assert torch.equal(other.get_parameter(name).grad, parameter.grad), name


class Normal(Base):
    def forward(self, x):
        return torch.softmax(self.layer(nn.functional.layer_norm(self.layer(x), (6,))), 1)[:, 0].mean()


def test_autocast_for_a_gpu_is_refused_around_a_trace_and_noted_inside(monkeypatch):
    graph = torch.fx.Graph()  # what a machine with a GPU gives: elsewhere PyTorch switches such a block off
    graph.call_function(capture_module.functional.AUTOCAST, ("cuda", torch.bfloat16, True, None, None))
    graph.output(())
    note, = capture_module._autocast_notes(torch.fx.GraphModule({}, graph))
    assert "switches autocast on for cuda, which is left out" in note
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with pytest.raises(ModelError, match=r"torch.autocast is on for cuda float16, and its casts cannot be traced"):
        trace(source_of(Normal, (6,), batch=4))


class Mixes(Base):
    def forward(self, x):
        return self.layer(x.float()).square().mean()


def test_products_of_two_precisions_are_refused_with_the_line():
    with pytest.raises(ModelError, match=r"aten.linear.default \(.*test_functional.py:\d+\) multiplies float32 and float64"):
        trace(source_of(Mixes, (6,), batch=4))


@pytest.mark.parametrize("make", [InPlaceChain, ViewReadBefore, CountsCalls, NormalisedByStatistics])
def test_simple_changes_need_no_second_trace(make, monkeypatch):
    def refuse(self, table=None):
        raise AssertionError("traced again")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
    trace(source_of(make, (6,), batch=4))


def test_a_change_seen_through_an_older_view_is_left_to_pytorch(monkeypatch):
    calls = []
    real = torch.export.ExportedProgram.run_decompositions

    def count(self, table=None):
        calls.append(1)
        return real(self, table)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", count)
    for make in (ThroughView, ViewReadAfter, InPlaceOnParts, Promotes):
        calls.clear()
        trace(source_of(make, (6,), batch=4))
        assert calls, make.__name__


def test_a_wrong_rewrite_would_be_caught(monkeypatch):
    """The comparison with the module can fail: without functionalisation the view's change is lost between stages."""
    monkeypatch.setattr(capture_module.functional, "make_functional", lambda graph, buffers: _drop_changes(graph))
    with pytest.raises(AssertionError):
        assert_equals_eager(trace(source_of(InPlaceChain, (6,), batch=4)))


def _drop_changes(graph):
    for node in list(graph.nodes):
        if changes_memory(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return {}


def test_a_change_in_a_no_grad_block_of_what_needs_a_gradient_is_refused():
    class Clamped(Base):
        def forward(self, x):
            y = self.layer(x).clone()
            with torch.no_grad():
                y.clamp_(0, 1)
            return y.square().mean()

    with pytest.raises(ModelError, match=r"clamp_.*no_grad block.*test_functional\.py:\d+"):
        trace(source_of(Clamped, (6,)))


def test_buffer_updates_are_the_new_values():
    traced = trace(source_of(CountsCalls, (6,), batch=4))
    assert traced.program.buffer_updates.keys() == {"count"}
    graph = traced.graph
    name = traced.program.buffer_updates["count"]
    assert graph.op_kinds[graph.tensor_producer[graph.tensor_index[name]]] == "aten.add"
    assert not graph.is_constant[graph.tensor_producer[graph.tensor_index[name]]]
