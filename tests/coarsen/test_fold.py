"""Runs of equal stretches of operators: found where they are, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model.helpers import source_of, zoo
from weft.coarsen.fold import OpRun, find_runs
from weft.model.folded import call_details
from weft.model.trace import trace


class Layers(nn.Module):
    """Layers without modules: their weights are in lists, and ``step`` is what a layer does."""

    def __init__(self, widths, scales=None):
        super().__init__()
        self.ups = nn.ParameterList(torch.randn(8, width) for width in widths)
        self.downs = nn.ParameterList(torch.randn(width, 8) for width in widths)
        self.shared = nn.Parameter(torch.randn(8))
        self.scales = scales or [1.0] * len(widths)

    def step(self, x, index):
        y = torch.relu(x * self.shared @ self.ups[index]) @ self.downs[index]
        return x + torch.tanh(y * self.scales[index])

    def loop(self, x):
        for index in range(len(self.ups)):
            x = self.step(x, index)
        return x

    def forward(self, x):
        return self.loop(torch.sigmoid(x)).mean()


class Skipping(Layers):
    """Each layer also reads the one before the last: the wiring still repeats, but over two layers."""

    def loop(self, x):
        older = x
        for index in range(len(self.ups)):
            older, x = x, self.step(x, index) * older
        return x


class Taps(Layers):
    def loop(self, x):
        seen = []
        for index in range(len(self.ups)):
            x = self.step(x, index)
            seen.append(x)
        return x * seen[3]


class ReadsFirst(Layers):
    def loop(self, x):
        first = x = self.step(x, 0)
        for index in range(1, len(self.ups)):
            x = self.step(x, index) * first
        return x


class OtherWiring(Layers):
    """The operators are the same in every layer, but the fifth reads its own result where others read the input."""

    def step(self, x, index):
        y = torch.relu(x * self.shared @ self.ups[index]) @ self.downs[index]
        return torch.tanh(y) + (y if index == 4 else x)


def runs_of(module, details=False):
    traced = trace(source_of(lambda: module, (8,)))
    runs = find_runs(traced.graph, details=call_details(traced) if details else None)
    for run in runs:
        assert_equal_copies(traced.graph, run)
    return [(run.period, run.count) for run in runs]


def assert_equal_copies(graph, run):
    """Check kinds, shapes and relative wiring of neighbouring copies by a plain comparison."""
    owner = {op: number for number, copy in enumerate(run.copies) for op in copy}
    for number, (one, other) in enumerate(zip(run.copies[1:], run.copies[2:], strict=False), start=1):
        for a, b in zip(one, other, strict=True):
            assert graph.op_kinds[a] == graph.op_kinds[b]
            for s, t in zip(graph.op_inputs(a), graph.op_inputs(b), strict=True):
                assert graph.tensor_shapes[s] == graph.tensor_shapes[t]
                p, q = graph.tensor_producer[s], graph.tensor_producer[t]
                assert s == t or (p < 0 and q < 0) or (q - p == run.period and owner[p] in (number, number - 1))


def test_layers_without_modules():
    assert runs_of(Layers([16] * 7)) == [(7, 7)]
    assert runs_of(Layers([16] * 3)) == [(7, 3)]
    assert runs_of(Layers([16] * 2)) == []


def test_widths_with_equal_operator_counts_are_not_merged():
    assert runs_of(Layers([16] * 4 + [24] * 3)) == [(7, 4), (7, 3)]
    assert runs_of(Layers([24] + [16] * 4)) == [(7, 4)]
    assert runs_of(Layers([16, 24] * 4)) == [(14, 4)]


def test_arguments_count_if_they_are_known():
    model = Layers([16] * 8, scales=[1.0] * 4 + [2.0] * 4)
    assert runs_of(model) == [(7, 8)]
    assert runs_of(model, details=True) == [(7, 4), (7, 4)]


@pytest.mark.parametrize(("kind", "most"), [(Skipping, 7), (Taps, 4), (ReadsFirst, 7), (OtherWiring, 4)])
def test_wiring_counts(kind, most):
    assert all(count <= most for _, count in runs_of(kind([16] * 7)))


def test_zoo_models():
    graph = trace(zoo("llama-tiny:layers=6")).graph
    (run,) = find_runs(graph)
    assert (run.count, len(run.copies)) == (6, 6)
    names = [[graph.op_names[op].replace(f"layers.{number}.", "") for op in copy]
             for number, copy in enumerate(run.copies)]
    assert all(copy == names[0] for copy in names)


def test_runs_of_a_chain_of_equal_small_operators():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x):
            x = x * self.weight
            for _ in range(40):
                x = torch.relu(x)
            return x.mean()

    assert all(period >= 3 for period, _ in runs_of(Chain()))


def test_copies_of_a_run():
    run = OpRun(start=5, period=3, count=3)
    assert run.copies == (range(5, 8), range(8, 11), range(11, 14))


def test_many_copies():
    (run,) = runs_of(Layers([16] * 60))
    assert run == (7, 60)
