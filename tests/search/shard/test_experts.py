"""Experts in searches: divided where it pays or where it is asked for, and dearer where they are unevenly loaded."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from weft.base.errors import InputError
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.folded import FoldedModel, trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.planning.make import SearchOptions, search_plans
from weft.search.common.degrees import Degrees
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.find_splits import find_splits
from weft.search.shard.tensor_costs import TensorCosts

BIG = "qwen3-30b-a3b:layers=4,seq=256"
CLUSTER = "4 x H200"


@cache
def world() -> tuple[Problem, FoldedModel]:
    source = resolve_model(BIG, dtype="bfloat16", batch=4)
    assert isinstance(source, ModelSource)
    graph, cluster = trace(source).graph, read_cluster(CLUSTER)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(batch=16, dtype="bfloat16")), trace_folded(source)


def split(degree: int, **options: object) -> TensorCosts:
    problem, folded = world()
    problem = Problem(graph=problem.graph, cluster=problem.cluster, costs=problem.costs, options=PlanOptions(
        batch=16, dtype="bfloat16", **options))
    return find_splits(problem, folded, lambda graph: estimate_costs(graph, problem.cluster), degree=degree)[0, degree]


def grouped(costs: TensorCosts) -> set[tuple[str, ...]]:
    return {words for name, words in costs.sharding.ops.items() if "grouped_mm" in name}


@pytest.mark.parametrize("degree", [2, 4])
def test_devices_divide_experts_of_their_own_accord(degree: int) -> None:
    found = split(degree)
    assert grouped(found) == {("experts",)}
    assert found.sharding.tensors["model.layers.2.mlp.experts.gate_up_proj"] == ("S0",)


def test_a_degree_that_is_asked_for_divides_experts_and_nothing_else() -> None:
    assert grouped(split(4, degrees=Degrees(ep=4))) == {("experts",)}


def test_an_uneven_load_is_dearer_by_the_share_of_the_fullest_device() -> None:
    even, uneven = split(4), split(4, expert_load="power:1")
    graph = world()[0].graph
    ops = [op for op, name in enumerate(graph.op_names) if "grouped_mm" in name]
    share = sum(1 / place for place in range(1, 33)) / sum(1 / place for place in range(1, 129))
    assert np.allclose(uneven.part[0, ops] / even.part[0, ops], 4 * share)
    assert np.array_equal(uneven.part[0, :20], even.part[0, :20])
    same = split(4, expert_load=",".join(["1"] * 128))
    assert np.allclose(same.part, even.part)


def test_a_plan_with_a_degree_has_tp_groups_of_that_size_and_says_what_it_assumes() -> None:
    model = "mixtral-8x:layers=4,hidden=64,heads=4,kv_heads=2,ffn=64,vocab=128,seq=16"
    options = PlanOptions(batch=8, dtype="bfloat16", degrees=Degrees(ep=2, tp=2))
    found = search_plans(model, read_cluster(CLUSTER), options, SearchOptions())
    plan = found.comparison.best.plan
    assert plan is not None
    assert {len(replica.devices) for stage in plan.stages for replica in stage.replicas} == {2}
    words = {word for stage in plan.stages for name, word in stage.sharding.ops.items() if "grouped_mm" in name}
    assert words == {("experts",)}
    assert any("experts are assumed to be chosen equally often" in note for note in found.notes)
    with pytest.raises(InputError, match="--ep 2 divides experts over devices, but gpt2-tiny has none"):
        search_plans("gpt2-tiny", read_cluster(CLUSTER), options, SearchOptions())
