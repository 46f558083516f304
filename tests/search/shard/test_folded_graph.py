"""The folded graph stands for the full one: any choice costs and holds the same, and so the best one does."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from tests.search.shard.worlds import assembler_of, cluster_of, source_of, whole, zoo
from weft.model.folded import trace_folded
from weft.search.shard.folded_graph import MIDDLE, Assembler, usage_of
from weft.search.strategies.search import solve
from weft.search.strategies.strategy_graph import evaluate

SMALL = "hidden=32,heads=4,vocab=96,seq=16"
FAMILIES = {
    "gpt2": "gpt2-tiny:layers=5",
    "llama": "llama-tiny:layers=6",
    "bert": f"bert-large:layers=4,ffn=64,{SMALL}",
    "t5": f"t5-large:layers=5,ffn=64,{SMALL}",
    "vit": "vit-base:layers=5,hidden=32,heads=4,ffn=64,image=32,classes=8",
    "mixtral": f"mixtral-8x:layers=4,kv_heads=2,ffn=32,experts=4,{SMALL}",
}
FAST = cluster_of((4,), flop_per_s=1e9, memory_bytes_per_s=1e9, link=(1e9, 1e-7))
MIDDLING = cluster_of((4,), flop_per_s=1e10, memory_bytes_per_s=1e10, link=(2e8, 1e-6))
HOSTS = cluster_of((2, 2), flop_per_s=1e9, memory_bytes_per_s=1e10, link=(3e8, 1e-7), network=(1e8, 1e-6))
MESHES = (((2,), FAST), ((4,), MIDDLING), ((2, 2), HOSTS))


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x, memory):
        y = self.down(torch.relu(self.up(x)))
        if self.kind == "residual":
            y = x + y
        return y if self.kind == "chain" else y * memory


class OneOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.nothing = nn.Linear(16, 16, bias=False), nn.Identity()

    def forward(self, x, memory):
        return self.nothing(self.up(x))


class HandsOn(nn.Module):
    """Gives a second result, which nobody reads after the last layer: that one has other operators."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x, memory):
        y = self.down(torch.tanh(self.up(x * memory)))
        return y, torch.sigmoid(y)


class Stack(nn.Module):
    def __init__(self, make, count, *, hands_on=False):
        super().__init__()
        self.hands_on = hands_on
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.layers = nn.ModuleList([make() for _ in range(count)])

    def forward(self, x):
        x = self.first(x)
        memory = torch.sigmoid(x)
        for layer in self.layers:
            if self.hands_on:
                x, memory = layer(x, memory)
            else:
                x = layer(x, memory)
        return self.last(x).square().mean()


STACKS = {
    "chain": lambda: Stack(lambda: Layer("chain"), 6),
    "residual and a shared tensor": lambda: Stack(lambda: Layer("residual"), 5),
    "one operator": lambda: Stack(OneOperator, 6),
    "two kept copies": lambda: Stack(HandsOn, 6, hands_on=True),
    "three copies": lambda: Stack(lambda: Layer("residual"), 3),
}


@cache
def both(name, batch=4):
    """Return a model folded and with all of its layers."""
    source = zoo(FAMILIES[name], batch=batch) if name in FAMILIES else source_of(STACKS[name], (16,), batch=batch)
    return trace_folded(source), whole(source)


def full_choice(folded: Assembler, graph, choice, full: Assembler):
    """Return a choice of the folded graph (one variant for each run) as one of the full model, by names."""
    of_name = {}
    for node, part in enumerate(graph.node_part):
        item, place = folded.parts.parts[part], folded.places[part]
        run = None if place is None else folded.folded.runs[place.run]
        positions = [None]
        if run is not None:
            positions = [run.kept[place.copy]] if place.copy != MIDDLE else [
                position for position in range(run.num_copies) if position not in (run.kept[0], *run.kept[2:])]
        for position in positions:
            name = item.name if run is None else folded.folded.full_name(run, place.copy, item.name, position)
            assert (item.kind, name) not in of_name
            of_name[item.kind, name] = choice[node]
    return [of_name.pop((part.kind, part.name)) for part in full.parts.parts], of_name


@pytest.mark.parametrize("name", [*FAMILIES, *STACKS])
def test_any_choice_costs_and_holds_in_the_full_model_what_it_does_folded(name):
    reduced, everything = both(name)
    assert reduced.runs
    folded, full = (assembler_of(model, HOSTS, (2, 2)) for model in (reduced, everything))
    graph, plain = folded.assemble(), full.assemble()
    generator = np.random.default_rng(0)
    for _ in range(3):
        choice = [int(generator.integers(len(costs))) for costs in graph.problem.costs]
        expanded, left = full_choice(folded, graph, choice, full)
        assert not left
        assert evaluate(graph.problem, choice).cost == pytest.approx(evaluate(plain.problem, expanded).cost, rel=1e-12)
        assert usage_of(graph, choice) == pytest.approx(usage_of(plain, expanded), rel=1e-12)


@pytest.mark.parametrize("name", [*FAMILIES, *STACKS])
def test_the_best_choice_costs_the_same(name):
    folded, full = both(name)
    for shape, cluster in MESHES if name in ("gpt2", *STACKS) else MESHES[1:2]:
        found, best = (solve(assembler_of(model, cluster, shape).assemble().problem) for model in (folded, full))
        assert found.status == best.status == "optimal"
        assert found.cost == pytest.approx(best.cost, rel=1e-9)


@pytest.mark.parametrize("batch", [1, 16])
def test_the_best_choice_costs_the_same_for_few_and_many_samples(batch):
    folded, full = both("residual and a shared tensor", batch)
    found, best = (solve(assembler_of(model, MIDDLING, (2, 2)).assemble().problem) for model in (folded, full))
    assert found.cost == pytest.approx(best.cost, rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "t5", *STACKS])
def test_variants_that_choose_the_same_cost_what_one_does(name):
    assembler = assembler_of(both(name)[0], HOSTS, (2, 2))
    plain = assembler.assemble()
    generator = np.random.default_rng(1)
    chosen = {key: int(generator.integers(len(costs)))
              for key, costs in zip(plain.node_part, plain.problem.costs, strict=True)}
    want = evaluate(plain.problem, [chosen[part] for part in plain.node_part]).cost
    held = usage_of(plain, [chosen[part] for part in plain.node_part])
    runs = range(len(assembler.folded.runs))
    middle = [assembler.num_middle(run) for run in runs]
    ways = [({run: (1,) * middle[run] for run in runs}, False), (assembler.woven(), True)]
    if max(middle) > 1:
        ways.append(({run: (1, middle[run] - 1) for run in runs if middle[run] > 1}, False))
    for counts, is_woven in ways:
        graph = assembler.assemble(counts, is_woven=is_woven)
        choice = [chosen[part] for part in graph.node_part]
        assert evaluate(graph.problem, choice).cost == pytest.approx(want, rel=1e-12)
        assert usage_of(graph, choice) == pytest.approx(held, rel=1e-12)


@pytest.mark.parametrize("name", ["chain", "residual and a shared tensor", "one operator", "two kept copies"])
def test_variants_that_choose_differently_cost_what_the_full_model_does(name):
    """Every middle copy its own variant, against the full trace."""
    reduced, everything = both(name)
    folded, full = assembler_of(reduced, MIDDLING, (2,)), assembler_of(everything, MIDDLING, (2,))
    run = reduced.runs[0]
    count = folded.num_middle(0)
    for counts, is_woven in (({0: (1,) * count}, False), ({0: (1, count - 1)}, False), (folded.woven(), True)):
        graph, plain = folded.assemble(counts, is_woven=is_woven), full.assemble()
        generator = np.random.default_rng(2)
        choice = [int(generator.integers(len(costs))) for costs in graph.problem.costs]
        variant_of = ([index % 2 for index in range(count)] if is_woven else
                      [variant for variant, share in enumerate(counts[0]) for _ in range(share)])
        of_name = {}
        for node, (part, variant) in enumerate(zip(graph.node_part, graph.node_variant, strict=True)):
            item, place = folded.parts.parts[part], folded.places[part]
            positions = [None] if place is None else [run.kept[place.copy]] if variant < 0 else [
                1 + index for index in range(count) if variant_of[index] == variant]
            for position in positions:
                name = item.name if place is None else reduced.full_name(run, place.copy, item.name, position)
                of_name[item.kind, name] = choice[node]
        expanded = [of_name[part.kind, part.name] for part in full.parts.parts]
        assert evaluate(graph.problem, choice).cost == pytest.approx(evaluate(plain.problem, expanded).cost, rel=1e-12)


def test_runs_are_those_that_the_tests_are_about():
    assert [run.kept for run in both("two kept copies")[0].runs] == [(0, 1)]
    assert [run.kept for run in both("one operator")[0].runs] == [(0, 1, 5)]
    assert [len(run.copies[0]) for run in both("one operator")[0].runs] == [1]
    assert [run.kept for run in both("three copies")[0].runs] == [(0, 1, 2)]
