"""Factors instead of gradients: the cut against an integer program and against trying everything, and known cases."""

from __future__ import annotations

import itertools
import time
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.deploy_factors import break_even_rows, factors_s
from tests.model.helpers import source_of
from weft.base.errors import InputError
from weft.cluster.cluster_file import parse_cluster
from weft.cost.collectives import Algorithm, Collective, Line, step_counts
from weft.cost.costs import Costs, estimate_costs
from weft.model.graph import Graph
from weft.model.load import load_graph_for
from weft.model.trace import trace
from weft.plan.factors import find_factors
from weft.search.deploy.exchange import (
    Decision,
    LinearLayer,
    decide,
    decide_on_cluster,
    linear_layers,
    product_s_per_flop,
    select_projects,
)
from weft.simulate.exchange_time import collective_line

# ---- selection: cut, integer program, brute force -------------------------------------------------------------------


def net_profit(chosen, profits, costs, needs) -> float:
    tools = {tool for project in chosen for tool in needs[project]}
    return sum(profits[project] for project in chosen) - sum(costs[tool] for tool in tools)


def by_integer_program(profits, costs, needs) -> float:
    """Return the best net profit: x[p] <= y[t] for each need, both 0 or 1."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    pairs = [(project, tool) for project, tools in enumerate(needs) for tool in tools]
    rows = np.zeros((len(pairs) + 1, len(profits) + len(costs)))
    for row, (project, tool) in enumerate(pairs):
        rows[row, project], rows[row, len(profits) + tool] = 1.0, -1.0
    objective = np.concatenate([-np.asarray(profits), np.asarray(costs)])
    found = milp(objective, integrality=np.ones(len(objective)), bounds=Bounds(0, 1),
                 constraints=LinearConstraint(rows, -np.inf, 0.0), options={"mip_rel_gap": 0.0})
    assert found.status == 0
    return -float(found.fun)


def by_trying(profits, costs, needs) -> float:
    return max(net_profit(chosen, profits, costs, needs) for size in range(len(profits) + 1)
               for chosen in itertools.combinations(range(len(profits)), size))


def random_selection(rng: np.random.Generator, most: int):
    num_projects, num_tools = int(rng.integers(1, most + 1)), int(rng.integers(1, most + 1))
    profits, costs = rng.normal(0.5, 1.0, num_projects), rng.exponential(rng.choice([0.2, 0.6, 1.5]), num_tools)
    if rng.random() < 0.4:
        profits, costs = np.round(2 * profits), np.round(2 * costs)  # ties
    needs = [tuple(np.flatnonzero(rng.random(num_tools) < rng.choice([0.1, 0.3])).tolist()) for _ in range(num_projects)]
    return profits.tolist(), costs.tolist(), needs


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_optimum_of_the_integer_program_and_of_trying_everything(seed):
    rng = np.random.default_rng(seed)
    profits, costs, needs = random_selection(rng, 10)
    got = net_profit(select_projects(profits, costs, needs), profits, costs, needs)
    assert got == pytest.approx(by_trying(profits, costs, needs), abs=1e-9)
    assert got == pytest.approx(by_integer_program(profits, costs, needs), abs=1e-6)


def test_the_cut_is_the_optimum_of_the_integer_program_for_many_projects():
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(8):
        profits, costs = rng.normal(0.8, 1.0, 80).tolist(), rng.exponential(1.0, 60).tolist()
        needs = [tuple(rng.choice(60, 3, replace=False).tolist()) for _ in range(80)]
        chosen = select_projects(profits, costs, needs)
        sizes.append(len(chosen))
        assert net_profit(chosen, profits, costs, needs) == pytest.approx(by_integer_program(profits, costs, needs), abs=1e-6)
    assert min(sizes) > 0
    assert max(sizes) < 80


def test_of_choices_that_pay_the_same_the_smallest_is_taken():
    assert select_projects([1.0, 1.0], [2.0], [(0,), (0,)]) == ()
    assert select_projects([1.0, 1.0], [1.9], [(0,), (0,)]) == (0, 1)
    assert select_projects([0.0, -1.0], [0.0], [(0,), (0,)]) == ()
    assert select_projects([], [], []) == ()


def test_profits_of_very_different_sizes_are_told_apart():
    assert select_projects([1e6, 1e-6, 1e-6], [1.0, 0.9e-6, 1.1e-6], [(0,), (1,), (2,)]) == (0, 1)


# ---- the decision against trying every set of weights ---------------------------------------------------------------


def layer(op: int, num_in: int, num_out: int, *, x: int | None = None, weight: int | None = None, bias: bool = False,
          rows: int = 1) -> LinearLayer:
    return LinearLayer(op=op, weight=1000 + op if weight is None else weight, bias=3000 + op if bias else None,
                       input=5000 + op if x is None else x, output=7000 + op, rows_per_sample=rows, num_in=num_in,
                       num_out=num_out, element_bytes=4, dtype="float32")


def parameters(decision: Decision) -> tuple[int, ...]:
    """Return the tensors whose gradients come from factors: weights and biases, in order."""
    found = (tensor for item in decision.chosen for tensor in (item.weight, item.bias) if tensor is not None)
    return tuple(sorted(set(found)))


RING = {size: tuple(step_counts(kind, Algorithm.RING, size) for kind in (Collective.ALL_GATHER, Collective.ALL_REDUCE))
        for size in range(2, 17)}


def ring(size: int, *, bytes_per_s: float = 1e9, latency_s: float = 0.0) -> dict[str, Line]:
    gather, reduce = (Line(line.latency_s * latency_s, line.s_per_byte / bytes_per_s) for line in RING[size])
    return {"gather": gather, "reduce": reduce}


def seconds_of(layers, weights, *, num_samples, num_workers, gather, reduce, s_per_flop, own_samples) -> float:
    """Return what the gradients of ``layers`` take if these weights use factors, written out once more."""
    summed, gathered, multiplied = 0, {}, 0
    for weight in {item.weight for item in layers} - set(weights):
        first = next(item for item in layers if item.weight == weight)
        summed += first.num_in * first.num_out
    for item in layers:
        if item.weight in weights:
            gathered["x", item.input] = num_samples * item.rows_per_sample * item.num_in
            gathered["g", item.output] = num_samples * item.rows_per_sample * item.num_out
            multiplied += 2 * item.num_in * item.num_out * item.rows_per_sample * (num_samples - own_samples)
        elif item.bias is not None:
            summed += item.num_out
    talk = reduce.latency_s + 4 * summed * reduce.s_per_byte
    if gathered:
        talk += gather.at(4 * sum(gathered.values()))
    return talk + multiplied * s_per_flop


def random_case(rng: np.random.Generator):
    num_workers = int(rng.integers(2, 9))
    num_samples = num_workers * int(rng.integers(1, 9))
    layers = []
    for op in range(int(rng.integers(1, 10))):
        shared = layers[int(rng.integers(len(layers)))] if layers and rng.random() < 0.5 else None
        num_in = shared.num_in if shared else int(rng.choice([16, 64, 256]))
        num_out = int(rng.choice([8, 64, 512]))
        rows = shared.rows_per_sample if shared else int(rng.choice([1, 2, 8]))
        ties = shared is not None and rng.random() < 0.3
        layers.append(layer(op, num_in, shared.num_out if ties else num_out, rows=rows, bias=bool(rng.random() < 0.5),
                            x=shared.input if shared and rng.random() < 0.7 else None,
                            weight=shared.weight if ties else None))
    lines = ring(num_workers, bytes_per_s=float(rng.choice([1e7, 1e9])), latency_s=float(rng.choice([0.0, 1e-6, 1e-5])))
    return layers, {"num_samples": num_samples, "num_workers": num_workers, **lines,
                    "s_per_flop": float(rng.choice([0.0, 1e-12, 1e-9])),
                    "own_samples": float(rng.integers(0, num_samples + 1))}


def test_the_decision_is_the_best_of_all_sets_of_weights():
    kinds = set()
    for seed in range(150):
        layers, options = random_case(np.random.default_rng(seed))
        found = decide(layers, **options)
        weights = sorted({item.weight for item in layers})
        chosen = {item.weight for item in found.chosen}
        best = min(seconds_of(layers, set(some), **options) for size in range(len(weights) + 1)
                   for some in itertools.combinations(weights, size))
        assert found.seconds == pytest.approx(best, rel=1e-9)
        assert found.seconds == pytest.approx(seconds_of(layers, chosen, **options), rel=1e-9)
        assert found.all_reduce_s == pytest.approx(seconds_of(layers, set(), **options), rel=1e-9)
        assert all((item in found.chosen) == (item.weight in chosen) for item in layers)
        kinds.add("none" if not chosen else "all" if len(chosen) == len(weights) else "some")
    assert kinds == {"none", "all", "some"}


def test_more_rows_never_add_a_layer():
    num_nested = 0
    for seed in range(40):
        layers, options = random_case(np.random.default_rng(seed))
        options["own_samples"] = None
        before = set(layers)
        for num_samples in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 10**6):
            after = set(decide(layers, **{**options, "num_samples": num_samples}).chosen)
            assert after <= before
            num_nested += bool(after) and after != before
            before = after
        assert not before
    assert num_nested > 20


def test_without_compute_and_latency_rings_turn_at_the_break_even_rows():
    for num_in, num_out in ((1024, 4096), (4096, 1000), (64, 64), (7, 900)):
        even = break_even_rows(num_in, num_out)
        for num_workers in (2, 3, 16):
            for rows in range(int(even) - 2, int(even) + 4):
                found = decide([layer(0, num_in, num_out)], num_samples=rows, num_workers=num_workers, s_per_flop=0.0,
                               **ring(num_workers))
                assert bool(found.chosen) == (rows < even)
    assert break_even_rows(1024, 4096) == pytest.approx(1638.4)


def test_an_input_that_three_layers_read_is_gathered_once():
    options = {"num_samples": 90, "num_workers": 2, "s_per_flop": 0.0, **ring(2)}
    own = [layer(op, 64, 64) for op in range(3)]  # break-even: 64 rows
    assert not decide(own, **options).chosen
    shared = [layer(op, 64, 64, x=9) for op in range(3)]  # 3 * 64 * 64 * 2 against 90 * (64 + 3 * 64)
    found = decide(shared, **options)
    assert found.chosen == tuple(shared)
    assert not decide(shared, **{**options, "num_samples": 97}).chosen
    assert decide(shared, **{**options, "num_samples": 95}).chosen == tuple(shared)


def test_a_weight_of_two_layers_is_summed_once_and_needs_the_factors_of_both():
    options = {"num_workers": 2, "s_per_flop": 0.0, **ring(2)}
    tied = [layer(0, 64, 64, weight=5), layer(1, 64, 64, weight=5)]  # turns at 32 rows, not at 64
    assert decide(tied, num_samples=31, **options).chosen == tuple(tied)
    found = decide(tied, num_samples=33, **options)
    assert not found.chosen
    assert found.all_reduce_s == pytest.approx(4 * 64 * 64 / 1e9)


def test_products_of_other_rows_count():
    options = {"num_samples": 8, "num_workers": 4, **ring(4)}
    item = layer(0, 512, 512)
    saved = decide([item], s_per_flop=0.0, **options)
    gain = saved.all_reduce_s - saved.seconds
    turn = gain / (2 * 512 * 512 * 6)
    assert decide([item], s_per_flop=0.99 * turn, **options).chosen
    assert not decide([item], s_per_flop=1.01 * turn, **options).chosen
    assert decide([item], s_per_flop=1.01 * turn, own_samples=3, **options).chosen


def test_latency_is_paid_once_for_all_layers():
    item = {"num_samples": 2, "num_workers": 2, "s_per_flop": 0.0}
    gain = (lambda found: found.all_reduce_s - found.seconds)(decide([layer(0, 64, 64)], **item, **ring(2)))
    lines = ring(2, latency_s=1.5 * gain)
    assert not decide([layer(0, 64, 64)], **item, **lines).chosen
    assert len(decide([layer(op, 64, 64) for op in range(2)], **item, **lines).chosen) == 2


def test_one_worker_has_nothing_to_exchange():
    found = decide([layer(0, 64, 64)], num_samples=4, num_workers=1, gather=Line(0, 0), reduce=Line(0, 0), s_per_flop=1e-12)
    assert (found.chosen, found.seconds, parameters(found)) == ((), 0.0, ())


def test_terms_say_what_each_way_costs():
    item = layer(0, 100, 50, bias=True, rows=2)
    found = decide([item], num_samples=8, num_workers=2, s_per_flop=1e-12, **ring(2, bytes_per_s=1e6))
    (term,) = found.terms
    assert term.num_rows == 16
    assert term.reduce_s == pytest.approx(4 * (100 * 50 + 50) / 1e6)
    assert term.input_s == pytest.approx(4 * 16 * 100 / 2 / 1e6)
    assert term.gradient_s == pytest.approx(4 * 16 * 50 / 2 / 1e6)
    assert term.compute_s == pytest.approx(2 * 100 * 50 * 8 * 1e-12)
    assert term.uses_factors
    assert found.seconds == pytest.approx(factors_s(term))
    assert parameters(found) == (1000, 3000)


@pytest.mark.parametrize(("options", "message"), [
    ({"num_samples": 0}, "one sample or more"), ({"num_workers": 0}, "one worker"),
    ({"own_samples": 9}, "9 of 8 samples"),
    ({"s_per_flop": float("inf")}, "finite"), ({"gather": Line(0.0, float("inf"))}, "link without bandwidth"),
    ({"reduce": Line(-1.0, 0.0)}, "zero or more"),
])
def test_figures_that_make_no_sense_are_refused(options, message):
    given = {"num_samples": 8, "num_workers": 2, "s_per_flop": 0.0, **ring(2)}
    with pytest.raises(InputError, match=message):
        decide([layer(0, 4, 4)], **{**given, **options})


def test_a_thousand_layers_are_decided_at_once():
    layers = [layer(op, 1024, 4096, x=9000 + op // 3) for op in range(1000)]
    begin = time.process_time()
    assert len(decide(layers, num_samples=64, num_workers=8, s_per_flop=1e-13, **ring(8)).chosen) == 1000
    assert time.process_time() - begin < 5.0


# ---- finding layers -------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """Linear layers of many kinds, and things that look like them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(12, 8))  # read by a lookup too
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(8, 16, bias=False)
        self.twice = nn.Linear(16, 16)
        self.right = nn.Parameter(torch.randn(16, 6))
        self.turned = nn.Parameter(torch.randn(5, 6))
        self.added, self.offset = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4))
        self.scaled = nn.Parameter(torch.randn(4, 4))  # also read elementwise
        self.table = nn.Linear(3, 2)  # its rows do not grow with the batch
        self.conv, self.norm = nn.Conv1d(3, 3, 1), nn.LayerNorm(8)
        self.register_buffer("positions", torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.norm(self.conv(x))
        y = self.twice(self.twice(torch.relu(self.first(x)) + self.second(x)))
        y = torch.matmul(y, self.right) @ self.turned.t()
        y = torch.addmm(self.offset, y.reshape(-1, 5), self.added)
        y = y @ self.scaled + self.scaled.sum() + self.table(self.positions).sum()
        return (y.sum() + (x @ self.embedding.t()).sum() + self.embedding[torch.tensor([0, 3])].sum()).square()


@cache
def several(batch_dims: bool) -> Graph:
    return trace(source_of(Several, (3, 8), batch=4), batch=4, batch_dims=batch_dims).graph


def test_layers_are_found_with_their_weights_and_rows():
    graph = several(True)
    found = [(graph.tensor_names[item.weight], None if item.bias is None else graph.tensor_names[item.bias], item.num_in,
              item.num_out, item.rows_per_sample) for item in linear_layers(graph)]
    assert sorted(found, key=str) == sorted([
        ("first.weight", "first.bias", 8, 16, 3), ("second.weight", None, 8, 16, 3),
        ("twice.weight", None, 16, 16, 3), ("twice.weight", None, 16, 16, 3),  # its bias has two readers
        ("right", None, 16, 6, 3), ("turned", None, 6, 5, 3), ("added", "offset", 5, 4, 3)], key=str)
    first, second, *_ = linear_layers(graph)
    assert first.input == second.input
    assert first.output != second.output
    assert first.element_bytes == 8
    assert first.parameter_bytes == (8 * 16 + 16) * 8
    for item in linear_layers(graph):
        assert graph.tensor_shapes[item.input][-1] == item.num_in
        assert graph.tensor_shapes[item.output][-1] == item.num_out


def test_the_runtime_finds_factors_for_what_was_chosen_and_nothing_beside_them():
    graph = several(False)
    layers = linear_layers(graph)
    assert len(layers) == 7
    found = decide(layers, num_samples=2, num_workers=2, s_per_flop=0.0, **ring(2))
    assert len(found.chosen) > 2
    factors = find_factors(graph, parameters(found))
    assert {use.op for use in factors.uses} == {item.op for item in found.chosen}
    assert factors.shared == ()


def test_a_model_that_is_not_trained_has_no_layers():
    graph = trace(source_of(Several, (3, 8), batch=4, mode="inference"), batch=4).graph
    assert linear_layers(graph) == ()


# ---- the decision table ---------------------------------------------------------------------------------------------


def world(num_hosts: int, devices: str = "1 x V100-16GB", network: str = "22.48Gbit/s") -> dict[str, object]:
    return {"format": "weft.cluster", "version": 1, "hosts": [{"name": "h", "count": num_hosts, "devices": devices}],
            "network": {"bandwidth": network, "latency": "12us"}}


@cache
def zoo_graph(model: str, batch: int, dtype: str | None = None) -> Graph:
    return load_graph_for(model, mode="training", batch=batch, dtype=dtype)


def costs_of(graph: Graph, cluster: dict[str, object]) -> Costs:
    return estimate_costs(graph, parse_cluster(cluster))


def shapes(layers) -> set[tuple[int, int]]:
    return {(item.num_in, item.num_out) for item in layers}


@pytest.mark.parametrize("network", ["200Mbit/s", "22.48Gbit/s"])
@pytest.mark.parametrize("num_workers", [2, 3, 4, 8, 16])
def test_vgg_19_at_batch_4_uses_factors_for_all_its_linear_layers(num_workers, network):
    graph = zoo_graph("vgg-19", 4)
    layers = linear_layers(graph)
    assert [(item.num_in, item.num_out) for item in layers] == [(25088, 4096), (4096, 4096), (4096, 1000)]
    assert not any(graph.op_kinds[item.op].startswith("aten.conv") for item in layers)
    costs = costs_of(graph, world(num_workers, network=network))
    found = decide_on_cluster(layers, costs, range(num_workers), num_samples=4 * num_workers)
    assert found.chosen == layers
    assert len(parameters(found)) == 6
    assert found.seconds < found.all_reduce_s / 5


@pytest.mark.parametrize("num_samples", [2, 4])  # 256 tokens of both workers together, and 256 each
def test_bert_large_with_256_tokens_on_two_workers_uses_factors(num_samples):
    graph = zoo_graph("bert-large:layers=2,seq=128", 2)
    layers = linear_layers(graph)
    assert graph.tensor_index["bert.embeddings.word_embeddings.weight"] not in {item.weight for item in layers}
    found = decide_on_cluster(layers, costs_of(graph, world(2)), range(2), num_samples=num_samples)
    assert {(1024, 4096), (4096, 1024)} <= shapes(found.chosen)
    assert {term.num_rows for term in found.terms} == {128 * num_samples}


def test_gpt_2_in_pre_training_uses_no_factors():
    graph = zoo_graph("gpt2:layers=2", 8, "bf16")
    layers = linear_layers(graph)
    assert shapes(layers) == {(768, 2304), (768, 768), (768, 3072), (3072, 768)}
    for num_workers in (2, 8):
        for network in ("200Mbit/s", "100Gbit/s"):
            costs = costs_of(graph, world(num_workers, network=network))
            found = decide_on_cluster(layers, costs, range(num_workers), num_samples=8 * num_workers)
            assert not found.chosen
            assert found.seconds == found.all_reduce_s


def test_a_model_of_convolutions_has_one_candidate_its_classifier():
    graph = zoo_graph("resnet-50:width=8,image=64", 2)
    assert shapes(linear_layers(graph)) == {(256, 1000)}


def test_the_worker_that_needs_longest_for_the_other_rows_decides():
    graph = zoo_graph("vgg-19", 4)
    cluster = {**world(0), "hosts": [{"name": "a", "devices": "1 x V100-16GB"}, {"name": "b", "devices": "1 x 1080Ti"}]}
    costs, layers = costs_of(graph, cluster), linear_layers(graph)
    kinds = costs.cluster.kinds
    found = decide_on_cluster(layers, costs, (0, 1), num_samples=8, shares=(0.75, 0.25))
    flops = 2 * 25088 * 4096 * 6
    assert found.terms[0].compute_s == pytest.approx(flops * product_s_per_flop(kinds["1080Ti"], "float32"))
    other = decide_on_cluster(layers, costs, (0, 1), num_samples=8, shares=(0.0, 1.0))
    assert other.terms[0].compute_s == pytest.approx(2 * 25088 * 4096 * 8 * product_s_per_flop(kinds["V100-16GB"], "float32"))
    with pytest.raises(InputError, match="one share for each worker"):
        decide_on_cluster(layers, costs, (0, 1), num_samples=8, shares=(1.0,))


def test_no_layers_and_one_device_are_no_case_for_factors():
    graph = zoo_graph("vgg-19", 4)
    costs = costs_of(graph, world(2))
    assert decide_on_cluster((), costs, (0, 1), num_samples=8).chosen == ()
    alone = decide_on_cluster(linear_layers(graph), costs, (0,), num_samples=8)
    assert (alone.chosen, alone.all_reduce_s) == ((), 0.0)


def test_a_line_is_the_collective_at_that_size():
    costs = costs_of(zoo_graph("vgg-19", 4), world(4))
    for size in (1_000, 100_000_000):
        line = collective_line(costs, Collective.ALL_REDUCE, size, range(4))
        assert line.at(size) == pytest.approx(costs.collective(Collective.ALL_REDUCE, size, range(4)).seconds)
