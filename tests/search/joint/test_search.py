"""The joint search: plans that pass the check, the same every time, within limits, and never behind data parallelism."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.search.deploy.worlds import cluster_of, host, problem_of
from tests.search.joint.worlds import (
    data_parallel_s,
    equal_problem,
    mixed_problem,
    tensor_world,
    with_memory,
    with_optimizer,
)
from weft.base.errors import NoFeasiblePlan
from weft.plan.check import check_plan
from weft.plan.memory import account_memory
from weft.plan.plan import format_plan
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem
from weft.search.joint import search
from weft.search.joint.search import joint_search
from weft.simulate.timing import simulate

PROBLEMS = {
    "equal": lambda: (equal_problem(), {}), "mixed": lambda: (mixed_problem(), {}),
    "slow network": lambda: (mixed_problem(network="1MB/s", parameter_bytes=600_000), {}),
    "tensor": tensor_world, "adamw": lambda: (with_optimizer(mixed_problem(), "adamw"), {}),
    "little memory": lambda: (with_memory(equal_problem(activation_bytes=800_000), 600_000), {}),
    "three groups": lambda: (problem_of(cluster_of(
        host("a", 2), host("b", 1, rate="4GFLOP/s"), host("c", 3, rate="2GFLOP/s"), inside="1GB/s", network="100MB/s"),
        num_ops=10, batch=12), {})}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_plan_passes_the_check_and_takes_what_it_says(name):
    problem, splits = PROBLEMS[name]()
    found = joint_search(problem, splits)
    timeline = simulate(check_plan(found.plan, problem.graph, problem.cluster), problem.costs, problem.cluster)
    assert timeline.step_time_s == found.step_time_s
    assert found.plan.microbatches == found.setting.microbatches
    assert found.plan.search.by == "joint"
    simulated = [item for item in found.tried if item.step_time_s is not None]
    assert found.step_time_s == min(item.step_time_s for item in simulated)
    assert all(item.reason for item in found.tried if item.estimate_s is None and item.step_time_s is None)


@pytest.mark.parametrize("network", ["1GB/s", "20MB/s", "1MB/s"])
@pytest.mark.parametrize("parameter_bytes", [4_000, 400_000])
def test_a_mixed_cluster_is_never_slower_than_even_data_parallelism(network, parameter_bytes):
    problem = mixed_problem(network=network, parameter_bytes=parameter_bytes)
    assert joint_search(problem).step_time_s <= data_parallel_s(problem)


@pytest.mark.parametrize("name", ["mixed", "tensor", "little memory"])
def test_same_input_same_bytes(name):
    problem, splits = PROBLEMS[name]()
    first, second = joint_search(problem, splits), joint_search(replace(problem), splits)
    assert format_plan(first.plan) == format_plan(second.plan)
    assert len(first.tried) == len(second.tried)
    for one, other in zip(first.tried, second.tried, strict=True):
        assert one.setting.describe() == other.setting.describe()
        assert [mesh.tp_groups for mesh in one.setting.layout] == [mesh.tp_groups for mesh in other.setting.layout]
        assert (one.estimate_s, one.step_time_s, one.reason) == (other.estimate_s, other.step_time_s, other.reason)


def test_a_deadline_ends_the_search_with_a_plan():
    problem, lines = mixed_problem(), []
    found = joint_search(problem, budget=Budget(effort=float("inf"), deadline=time.monotonic()), progress=lines.append)
    check_plan(found.plan, problem.graph, problem.cluster)
    assert len(found.tried) < len(joint_search(problem).tried)
    assert any(line.startswith("joint: out of time after") for line in lines)


def test_little_memory_is_met_by_recomputation_and_far_too_little_is_said():
    problem, _ = PROBLEMS["little memory"]()
    found = joint_search(problem)
    assert found.setting.recompute
    kept = replace(problem, options=replace(problem.options, microbatches=1))
    with pytest.raises(NoFeasiblePlan):
        joint_search(with_memory(kept, 60_000))


def edge(memory: int) -> Problem:
    """Return a chain of much activation on four devices with about as much memory as it needs."""
    return with_memory(equal_problem(num_ops=32, activation_bytes=400_000, parameter_bytes=50_000), memory)


def test_where_1f1b_does_not_fit_evenly_the_pipeline_goes_over_and_back(monkeypatch):
    problem = edge(1_600_000)
    found = joint_search(problem)
    assert found.setting.is_v
    assert {token.split(":")[1] for tokens in found.plan.order.values() for token in tokens} == {"F", "I", "W"}
    account = account_memory(check_plan(found.plan, problem.graph, problem.cluster))
    assert all(account.peak_bytes(rank) <= 1_600_000 for rank in range(4))
    monkeypatch.setattr(search, "_may_turn", lambda estimator, setting: False)
    assert joint_search(problem).step_time_s > 1.1 * found.step_time_s


def test_the_last_resort_is_the_memory_of_one_micro_batch(monkeypatch):
    problem = edge(1_200_000)
    found = joint_search(problem)
    assert found.setting.is_tight
    check_plan(found.plan, problem.graph, problem.cluster)
    assert format_plan(joint_search(problem).plan) == format_plan(found.plan)
    monkeypatch.setattr(search, "_tightest", lambda estimator, budget: iter(()))
    with pytest.raises(NoFeasiblePlan, match="too little in all"):
        joint_search(problem)


def test_what_the_user_asks_for_is_kept():
    problem = equal_problem(microbatches=8)
    assert joint_search(problem).plan.microbatches == 8
    asked = replace(problem, options=replace(problem.options, recompute=True))
    assert all(stage.recompute for stage in joint_search(asked).plan.stages)


@pytest.mark.parametrize("name", ["equal", "mixed", "tensor"])
def test_inference_has_forwards_only(name):
    problem, splits = PROBLEMS[name]()
    problem = replace(problem, options=replace(problem.options, mode="inference"))
    found = joint_search(problem, splits)
    assert not found.setting.recompute
    assert not found.setting.zero
    assert found.plan.gradients == ()
    assert all(":F:" in action for actions in found.plan.order.values() for action in actions)
    check_plan(found.plan, problem.graph, problem.cluster)


@pytest.mark.parametrize("microbatches", [None, 4])
def test_a_large_cluster_is_estimated_by_one_replica(monkeypatch, microbatches):
    problem = equal_problem(8, num_ops=16, batch=32, microbatches=microbatches)
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, large=4))
    found = joint_search(problem)
    whole = simulate(check_plan(found.plan, problem.graph, problem.cluster), problem.costs, problem.cluster)
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=0.05)
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, large=128))
    assert found.step_time_s == pytest.approx(joint_search(problem).step_time_s, rel=0.05)


def test_a_large_pipeline_is_estimated_by_its_longest_path(monkeypatch):
    """Too little memory for the whole model on a device; transfers are slow."""
    cluster = cluster_of(host("a", 4), host("b", 4), inside="1GB/s", network="50MB/s", latency="20us")
    problem = with_memory(problem_of(cluster, num_ops=16, batch=32, parameter_bytes=40_000), 700_000)
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, large=4))
    found = joint_search(problem)
    assert len(found.setting.layout) > 1
    whole = simulate(check_plan(found.plan, problem.graph, problem.cluster), problem.costs, problem.cluster)
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=0.1)
    assert found.timeline.step_time_s <= found.step_time_s * 1.01, "of one replica, with fewer micro-batches"
