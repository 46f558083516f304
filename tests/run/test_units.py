"""Parameters, gradients and states in pieces: equal to one process in float64, with controls that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.run.plans import source_of, traced
from tests.run.pool import Pool
from tests.run.unit_plans import FSDP, unit_plan
from weft.plan.lower import lower
from weft.plan.orders import gpipe
from weft.plan.plan import Plan, Storage
from weft.plan.program import Op

TOLERANCE = 1e-10
CONTROL = 1e-7
EVEN = [(device, 0.25) for device in range(4)]
HALVES = [[(0, 0.5), (1, 0.5)], [(2, 0.5), (3, 0.5)]]
HYBRID = Storage(pieces="parameters", groups=((0, 1), (2, 3)))


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=("tiny_gpt", "tied_gpt")) as running:
        yield running


def split_backward(graph) -> Plan:
    """Return data parallelism with backwards in two parts, the second ones late."""
    order = [[(0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "I", 1), (0, "W", 0), (0, "W", 1)]]
    return unit_plan(graph, [EVEN], order=order)


CASES = {
    "zero-1": ("tiny_gpt", lambda graph: unit_plan(graph, [EVEN], Storage(pieces="states")), "lost_piece"),
    "zero-2": ("tiny_gpt", lambda graph: unit_plan(graph, [EVEN], Storage(pieces="gradients")), "lost_piece"),
    "zero-3": ("tiny_gpt", lambda graph: unit_plan(graph, [EVEN], num_units=4), "stale_piece"),
    "kept from forward to backward": ("tiny_gpt", lambda graph: unit_plan(
        graph, [EVEN], replace(FSDP, keeps=True)), "lost_piece"),
    "scattered once": ("tiny_gpt", lambda graph: unit_plan(
        graph, [EVEN], replace(FSDP, accumulates=True)), "lost_piece"),
    "hybrid 2x2": ("tiny_gpt", lambda graph: unit_plan(graph, [EVEN], HYBRID), "lost_group_sum"),
    "hybrid zero-2 across": ("tiny_gpt", lambda graph: unit_plan(
        graph, [EVEN], replace(HYBRID, pieces="gradients", groups=((0, 2), (3, 1)))), "lost_group_sum"),
    "in a pipeline of two stages": ("tiny_gpt", lambda graph: unit_plan(
        graph, HALVES, microbatches=4, batch=16), "stale_piece"),
    "GPipe, units kept": ("tiny_gpt", lambda graph: unit_plan(
        graph, HALVES, replace(FSDP, keeps=True), order=gpipe(2, 2)), "lost_piece"),
    "shares 3:1": ("tiny_gpt", lambda graph: unit_plan(graph, [[(0, 0.75), (1, 0.25)]]), "even_weights"),
    "pieces 3:1": ("tiny_gpt", lambda graph: unit_plan(
        graph, [[(0, 0.75), (1, 0.25)]], replace(FSDP, shares=(0.25, 0.75)), num_units=3), "lost_piece"),
    "tied embeddings on the same ranks": ("tied_gpt", lambda graph: unit_plan(
        graph, [EVEN], num_units=4), "stale_piece"),
    "tied embeddings in a pipeline": ("tied_gpt", lambda graph: unit_plan(
        graph, HALVES, microbatches=4, batch=16), "lost_group_sum"),
    "backwards in two parts": ("tiny_gpt", split_backward, "lost_piece"),
    "recomputation": ("tiny_gpt", lambda graph: unit_plan(graph, [EVEN], recompute=True), "stale_piece"),
    "beside stages that are whole": ("tiny_gpt", lambda graph: unit_plan(
        graph, [EVEN], [FSDP, Storage(), Storage(pieces="gradients")], num_units=3), "no_all_reduce"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(pool, case):
    model, make, damage = CASES[case]
    plan = make(traced(model).graph)
    result = pool.run(replace(plan, optimizer=replace(plan.optimizer, kind="adamw")), model, memory=True)
    check = result["verification"]
    assert check["num_gradients"] > 0
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]
    for account, measured in result["memory"]:
        assert abs(measured - account) <= 0.05 * account, result["memory"]
    control = pool.run(plan, model, damage=damage)["verification"]
    assert not control["passed"]
    assert max(control["gradient_error"], control["loss_error"]) > CONTROL


@pytest.mark.timeout(120)
@pytest.mark.parametrize("storage", [Storage(pieces="states"), Storage(pieces="gradients"), FSDP, HYBRID],
                         ids=["zero-1", "zero-2", "zero-3", "hybrid"])
def test_steps_change_parameters_as_one_process_does(pool, storage):
    plan = unit_plan(traced("tiny_gpt").graph, [EVEN], storage, num_units=3, optimizer="adamw")
    found = pool.run(plan, "tiny_gpt", steps=2, warmup=1)["losses"]
    source = source_of("tiny_gpt")
    module, inputs, expected = source.build(), source.inputs(8, 0), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert abs(expected[2] - expected[0]) > CONTROL


@pytest.mark.timeout(120)
def test_inference_gathers_what_it_needs(tmp_path):
    graph = traced("tiny_gpt", mode="inference").graph
    plan = unit_plan(graph, [EVEN], num_units=3, mode="inference")
    with Pool(4, tmp_path, mode="inference") as pool:
        assert pool.run(plan, "tiny_gpt")["verification"]["passed"]
        assert not pool.run(plan, "tiny_gpt", damage="stale_piece")["verification"]["passed"]


@pytest.mark.parametrize(("storage", "gathers", "scatterings"), [
    (FSDP, 2, 1), (replace(FSDP, keeps=True), 1, 1), (replace(FSDP, accumulates=True), 2, 0),
    (Storage(pieces="gradients"), 0, 1), (Storage(pieces="states"), 0, 0)])
def test_collectives_of_a_layer(storage, gathers, scatterings):
    """By micro-batch: a gather for the forward, one for the backward unless it is kept; one scattering, or by step."""
    microbatches = 3
    plan = unit_plan(traced("tiny_gpt").graph, [EVEN], storage, num_units=4, microbatches=microbatches, batch=12)
    program = lower(plan, traced("tiny_gpt").graph)
    for rank in range(4):
        counts = Counter((program.buckets[item.bucket].method, program.units[program.buckets[item.bucket].units[0]].stages[0])
                         for item in program.instructions(rank) if item.op == Op.COLLECTIVE)
        for layer in (1, 2):  # the last is needed again at once, and the first stays from a backward to the next forward
            assert counts["all_gather", layer] == gathers * microbatches
            assert counts["reduce_scatter", layer] == (scatterings * microbatches or 1)
    assert not any(bucket.method == "all_reduce" for bucket in program.buckets)


def test_a_unit_is_gathered_one_compute_ahead():
    program = lower(unit_plan(traced("tiny_gpt").graph, [EVEN], num_units=4), traced("tiny_gpt").graph)
    labels = [program.label(item.index).partition(" (")[0] for item in program.instructions(0)]
    for unit in (1, 2, 3):
        at = labels.index(f"all_gather s{unit} mb 0")
        assert labels[at + 1] == f"F s{unit - 1}.0 mb 0"
    backward = labels[labels.index("B s3.0 mb 0") - 1 :]
    assert backward[:6] == ["all_gather s2 mb 0", "B s3.0 mb 0", "all_gather s1 mb 0", "reduce_scatter s3 mb 0",
                            "B s2.0 mb 0", "all_gather s0 mb 0"]


@pytest.mark.timeout(120)
def test_a_plan_without_pieces_holds_more(pool):
    """The control of the memory test: peaks of all four kinds differ as pieces do."""
    graph = traced("tiny_gpt").graph
    peaks = []
    for storage in (Storage(), Storage(pieces="states"), Storage(pieces="gradients"), FSDP):
        plan = unit_plan(graph, [EVEN], storage, num_units=4, optimizer="adamw", microbatches=1, batch=4)
        peaks.append(pool.run(plan, "tiny_gpt", memory=True)["memory"][0][1])
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[3] < 0.7 * peaks[0]
