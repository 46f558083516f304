"""A run equals one device: loss and every gradient, in fp64, for all shapes of plans; and each control fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.run.plans import (
    cut,
    greedy_order,
    opposite_plan,
    pipeline_plan,
    replicated_plan,
    source_of,
    traced,
)
from tests.run.pool import Pool
from weft.plan.orders import forward_only, gpipe, one_f_one_b
from weft.plan.plan import Plan

TOLERANCE = 1e-10
CONTROL = 1e-7
"""A control must be at least this far off."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture(scope="module")
def gpt():
    return traced("tiny_gpt").graph


def v_map(graph) -> Plan:
    devices = [0, 1, 2, 3, 3, 2, 1, 0]
    return pipeline_plan(graph, devices, greedy_order(devices, 4), microbatches=4)


def arbitrary_map(graph) -> Plan:
    devices = [0, 2, 1, 3, 3, 1, 2, 0]
    return pipeline_plan(graph, devices, greedy_order(devices, 4), microbatches=4)


def split_v_map(graph) -> Plan:
    devices = [0, 1, 2, 3, 3, 2, 1, 0]
    return pipeline_plan(graph, devices, greedy_order(devices, 4, split=True), microbatches=4)


def skip_across(graph) -> Plan:
    return pipeline_plan(graph, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4)


def mixed_split(graph) -> Plan:
    """Some micro-batches with B, some with I and W, W late."""
    order = [[(0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "B", 1), (0, "W", 0)],
             [(1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "I", 1), (1, "W", 1)],
             [], []]
    plan = pipeline_plan(graph, [0, 1], order, microbatches=2, ops=cut(graph, 2))
    return four_devices(plan)


def four_devices(plan: Plan) -> Plan:
    from dataclasses import replace

    return replace(plan, cluster=replace(plan.cluster, devices=("d0", "d1", "d2", "d3")))


CASES = {
    "1F1B": ("tiny_gpt", lambda graph: pipeline_plan(graph, [0, 1, 2, 3], one_f_one_b(4, 6), microbatches=6),
             "swapped_channel"),
    "V map": ("tiny_gpt", v_map, "lost_weight_gradient"),
    "arbitrary map": ("tiny_gpt", arbitrary_map, "changed_weight"),
    "opposite pipelines": ("tiny_gpt", lambda graph: opposite_plan(graph, 4, microbatches=4), "no_all_reduce"),
    "skip connection": ("skip_net", skip_across, "swapped_inputs"),
    "uneven shares 3:1": ("tiny_gpt", lambda graph: replicated_plan(
        graph, [[(0, 0.75), (1, 0.25)]], microbatches=2, batch=8, num_devices=4), "even_weights"),
    "uneven pipelines 3:1": ("tiny_gpt", lambda graph: replicated_plan(
        graph, [[(0, 0.75), (1, 0.25)], [(2, 0.75), (3, 0.25)]], microbatches=2, batch=8, num_devices=4),
        "no_all_reduce"),
    "tied embeddings": ("tied_gpt", lambda graph: pipeline_plan(
        graph, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4), "no_all_reduce"),
    "frozen parameters": ("frozen_gpt", lambda graph: replicated_plan(
        graph, [[(0, 0.75), (1, 0.25)], [(2, 0.75), (3, 0.25)]], microbatches=2, batch=8, num_devices=4),
        "no_all_reduce"),
    "split I and W": ("tiny_gpt", split_v_map, "lost_weight_gradient"),
    "split with skips": ("skip_net", lambda graph: pipeline_plan(
        graph, [0, 1, 2, 3], greedy_order([0, 1, 2, 3], 3, split=True), microbatches=3), "lost_weight_gradient"),
    "B beside I and W": ("tiny_gpt", mixed_split, "lost_weight_gradient"),
    "recompute": ("tiny_gpt", lambda graph: pipeline_plan(
        graph, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4, recompute=True), "lost_weight_gradient"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(pool, case):
    model, make, damage = CASES[case]
    plan = make(traced(model).graph)
    check = pool.run(plan, model)["verification"]
    assert check["num_gradients"] > 0
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]
    control = pool.run(plan, model, damage=damage)["verification"]
    assert not control["passed"]
    assert max(control["gradient_error"], control["loss_error"]) > CONTROL


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replicas", [
    [[(0, 1.0)], [(1, 0.5), (2, 0.5)], [(3, 1.0)]],
    [[(0, 0.25), (1, 0.75)], [(2, 0.5), (3, 0.5)]],
    [[(0, 0.5), (1, 0.5)], [(0, 0.25), (1, 0.75)]],
], ids=["1-2-1", "1:3 to 1:1", "on the same devices"])
def test_replicas_that_divide_samples_differently(pool, replicas):
    graph = traced("tiny_gpt", batch_dims=True).graph
    plan = replicated_plan(graph, replicas, microbatches=2, batch=8, num_devices=4)
    check = pool.run(plan, "tiny_gpt")["verification"]
    assert check["passed"], check


@pytest.mark.timeout(120)
def test_training_steps_change_parameters_as_one_device_does(pool, gpt):
    plan = pipeline_plan(gpt, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4, optimizer="sgd")
    found = pool.run(plan, "tiny_gpt", steps=2, warmup=1)["losses"]
    source = source_of("tiny_gpt")
    module, inputs, expected = source.build(), source.inputs(8, 0), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert expected[2] < expected[0]


@pytest.mark.timeout(120)
def test_inference_gives_the_outputs_of_one_device(pool):
    graph = traced("tiny_gpt", mode="inference").graph
    plan = pipeline_plan(graph, [0, 1, 2, 3], forward_only(4, 4), microbatches=4, mode="inference")
    assert pool.run(plan, "tiny_gpt")["verification"]["passed"]
    assert not pool.run(plan, "tiny_gpt", damage="swapped_inputs")["verification"]["passed"]


@pytest.mark.timeout(120)
def test_float32_run_of_a_plan_made_in_float64(pool, gpt):
    plan = pipeline_plan(gpt, [0, 1, 2, 3], gpipe(4, 2), microbatches=2)
    check = pool.run(plan, "tiny_gpt", dtype="float32")["verification"]
    assert check["tolerance"] == 1e-5
    assert check["passed"]


@pytest.mark.timeout(120)
def test_measured_timeline_keeps_the_order_of_the_program(pool, gpt):
    plan = pipeline_plan(gpt, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4)
    spans = pool.run(plan, "tiny_gpt", steps=3)["timeline"]
    by_label: dict[str, list[tuple[float, float]]] = {}
    for label, start, end in zip(spans["labels"], spans["start_s"], spans["end_s"], strict=True):
        assert 0 <= start <= end
        by_label.setdefault(label, []).append((start, end))
    for microbatch in range(4):
        for stage in range(3):
            sent = by_label[f"send s{stage}>s{stage + 1} mb {microbatch}"][0]
            received = by_label[f"recv s{stage}>s{stage + 1} mb {microbatch}"][0]
            assert sent == received
            assert by_label[f"F s{stage} mb {microbatch}"][0][1] <= sent[0]
            assert sent[1] <= by_label[f"F s{stage + 1} mb {microbatch}"][0][0]
