"""From a sharding to a plan: names of the full model, words that the plan's checker and lowering accept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bench_shard_run import slow_cluster
from weft.base.errors import PlanError
from weft.cluster.cluster_file import parse_cluster, parse_cluster_text
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import FoldedModel, trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.plan import Optimizer
from weft.run.mesh import axis_weights
from weft.search.common.budget import Budget
from weft.search.shard.compare import search_plan
from weft.search.shard.folded_graph import usage_of
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.to_plan import plan_words
from weft.search.strategies.search import solve
from weft.search.strategies.strategy_graph import evaluate

CLUSTER = parse_cluster(slow_cluster())


def folded(spec: str, batch: int) -> FoldedModel:
    source = resolve_model(spec, mode="training", batch=batch, dtype="float64")
    assert isinstance(source, ModelSource)
    return trace_folded(source, batch=batch)


def search(model: FoldedModel, shape: tuple[int, ...], *, splits: bool = False) -> MeshSearch:
    costs = estimate_costs(model.traced.graph, CLUSTER)
    return MeshSearch(model, costs, Mesh(CLUSTER, range(4), shape), optimizer=Optimizer(), limit_bytes=None,
                      budget=Budget(effort=float("inf")), splits_states=splits)


@pytest.mark.parametrize(("spec", "shape"), [("gpt2-tiny:layers=6", (4,)), ("llama-tiny:layers=5", (2, 2))])
def test_the_plan_passes_all_checks_and_names_every_layer(spec, shape):
    model = folded(spec, 4)
    plan = search_plan(model, CLUSTER, shape=shape)
    words = plan.stages[0].sharding
    full = trace(model.traced.source, batch=4).graph
    assert set(words.ops) <= set(full.op_names)
    assert set(words.tensors) <= set(full.tensor_names)
    assert all(len(item) == len(shape) for item in (*words.ops.values(), *words.tensors.values()))
    layers = {name.split(".")[2] for name in words.ops if name.count(".") > 2}
    assert len(layers) == int(spec[-1])  # equal layers are all there, not only those that were traced
    assert plan.search.status == "optimal"


def test_layers_of_two_kinds_each_get_their_own_words():
    model = folded("gpt2-tiny:layers=6", 4)
    found = search(model, (4,))
    alike = found.run()
    graph = found.assembler.assemble({0: (1, found.assembler.num_middle(0) - 1)})
    choice = [0] * graph.problem.num_nodes
    by_node = dict(zip(zip(alike.graph.node_part, alike.graph.node_variant, strict=True), alike.choice, strict=True))
    whole = {part: item.choices.words.index(("",)) for part, item in enumerate(found.parts.parts) if item.choices}
    for node, (part, variant) in enumerate(zip(graph.node_part, graph.node_variant, strict=True)):
        is_op = part in whole
        choice[node] = whole[part] if variant == 0 and is_op else by_node[part, min(variant, 0)]
    words = plan_words(replace(alike, graph=graph, choice=tuple(choice)), model)
    second = [name for name in words.ops if name.startswith("transformer.h.1.")]
    third = [name for name in words.ops if name.startswith("transformer.h.2.")]
    assert not second
    assert third


def test_states_in_smaller_pieces_are_refused_with_the_name():
    model = folded("gpt2-tiny", 4)
    found = search(model, (4,), splits=True).run()
    assert any(item.layout != item.gradient for part, strategy in zip(found.graph.node_part, found.choice, strict=True)
               for item in found.parts.parts[part].stored[strategy : strategy + 1])
    with pytest.raises(PlanError, match="is whole but its optimizer states are not"):
        plan_words(found, model)


def test_with_little_memory_layers_are_mixed_and_that_is_better_than_all_alike():
    source = resolve_model("llama-7b:layers=28,seq=2048", mode="training", batch=16, dtype="bfloat16")
    assert isinstance(source, ModelSource)
    model, cluster, limit = trace_folded(source, batch=16), parse_cluster_text("8 x H100-80GB"), 32.2 * 2**30
    found = MeshSearch(model, estimate_costs(model.traced.graph, cluster), Mesh(cluster, range(8), (8,)),
                       optimizer=Optimizer(), limit_bytes=limit, budget=Budget(effort=float("inf")))
    mixed = found.run()
    assert mixed.held_bytes <= limit
    assert mixed.bound <= mixed.seconds
    graph = found.assembler.assemble(limit=limit)
    alike = solve(graph.problem, time_limit=20)
    assert alike.status == "optimal"
    assert usage_of(graph, alike.choice) <= limit * (1 + 1e-9)
    assert float(evaluate(graph.problem, alike.choice).cost) > mixed.seconds * (1 + 1e-4)
    assert len(mixed.graph.counts[0]) == 2


def test_a_run_weighs_the_axes_of_a_mesh_as_the_search_did():
    """Both find the same steps for every change of layout: the plan describes the cluster that the search counted on."""
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "network": {"bandwidth": "100Gbit/s", "latency": "10us"},
        "hosts": [{"name": "a", "count": 2, "devices": "2 x H100-80GB", "intra": "nvlink4"}]})
    plan = search_plan(folded("gpt2-tiny:layers=4", 4), cluster, shape=(2, 2))
    weights = axis_weights(plan, plan.stages[0].replicas[0])
    assert weights == Mesh(cluster, range(4), (2, 2)).weights
    assert weights[0] > 8 * weights[1] == 8
    bare = replace(plan, cluster=replace(plan.cluster, description=None))
    assert axis_weights(bare, plan.stages[0].replicas[0]) == ()
