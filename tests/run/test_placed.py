"""Operator placements are executed: on 2 to 4 processes, many segments on each, outputs equal those of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.run.plans import traced
from tests.run.pool import Pool
from tests.worlds import plain_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.plan.check import check_plan
from weft.plan.plan import Plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.place.placed_plan import OpPlacement, placed_plan

TOLERANCE = 1e-10
TOWERS = f"{Path(__file__).with_name('placed_models.py')}:towers"
MODELS = {
    "towers": TOWERS,
    "gpt2": "gpt2-tiny:layers=2",
    "inception": "inception-v3:width=4,image=75,classes=10",
    "flava": "flava:layers=1,joint_layers=1,hidden=32,heads=2,ffn=64,vocab=64,seq=8,image=32,classes=10",
    "t5": "t5-base:layers=1,hidden=32,heads=2,vocab=64,seq=8,ffn=64",
    "moe": "mixtral-8x:layers=1,hidden=32,heads=2,vocab=64,seq=8,kv_heads=2,ffn=32,experts=4",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=tuple(MODELS.values()), mode="inference") as running:
        yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pool]:
    models = (MODELS["towers"], MODELS["flava"])
    with Pool(2, tmp_path_factory.mktemp("pair"), models=models, mode="inference") as running:
        yield running


def scattered(graph: Graph, num_devices: int, *, restless: float, seed: int, requests: int = 1) -> Plan:
    """Return the plan of a placement whose device changes along the graph with this probability at each operator."""
    rng = random.Random(seed)
    device = [0]
    for _ in range(graph.num_ops - 1):
        device.append(rng.randrange(num_devices) if rng.random() < restless else device[-1])
    cluster = plain_cluster(num_devices)
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster, dtype="float32"),
                      options=PlanOptions(batch=2 * requests, mode="inference"))
    placement = OpPlacement(device=np.asarray(device), order=np.arange(graph.num_ops))
    plan = placed_plan(problem, placement, microbatches=requests)
    check_plan(plan, graph, cluster)
    return plan


def segments_per_device(plan: Plan) -> list[int]:
    return [len(plan.order[device]) // plan.microbatches for device in plan.cluster.devices]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", MODELS)
def test_every_operator_on_a_random_device_gives_the_outputs_of_one_process(pool, model):
    graph = traced(MODELS[model], mode="inference").graph
    plan = scattered(graph, 4, restless=1.0, seed=1)
    assert min(segments_per_device(plan)) >= (3 if model == "towers" else 10)
    check = pool.run(plan, MODELS[model], steps=2)["verification"]
    assert check["loss_error"] <= TOLERANCE, check


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["towers", "inception"])
@pytest.mark.parametrize("restless", [0.3, 0.6])
def test_a_stream_of_requests_through_non_contiguous_segments(pool, model, restless):
    graph = traced(MODELS[model], mode="inference").graph
    plan = scattered(graph, 4, restless=restless, seed=3, requests=3)
    assert sum(segments_per_device(plan)) > 4
    check = pool.run(plan, MODELS[model])["verification"]
    assert check["loss_error"] <= TOLERANCE, check


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["towers", "flava"])
def test_two_processes(pair, model):
    graph = traced(MODELS[model], mode="inference").graph
    plan = scattered(graph, 2, restless=0.5, seed=5)
    assert min(segments_per_device(plan)) >= 5
    assert pair.run(plan, MODELS[model])["verification"]["loss_error"] <= TOLERANCE


@pytest.mark.timeout(120)
def test_a_changed_weight_is_seen(pair):
    """The control: one parameter of rank 1 off by 1e-5 fails the comparison that the tests above pass."""
    graph = traced(TOWERS, mode="inference").graph
    plan = scattered(graph, 2, restless=0.5, seed=5)
    check = pair.run(plan, TOWERS, damage="changed_weight")["verification"]
    assert not check["passed"]
    assert check["loss_error"] > 1e3 * TOLERANCE


@pytest.mark.timeout(120)
def test_inputs_of_other_requests_are_seen(pool):
    """The control for requests: two of them with each other's inputs fail."""
    plan = scattered(traced(TOWERS, mode="inference").graph, 4, restless=0.3, seed=3, requests=3)
    assert not pool.run(plan, TOWERS, damage="swapped_inputs")["verification"]["passed"]
