"""Parameters in pieces in the searches: the strategy, the joint search, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.joint.worlds import equal_problem, with_memory, with_optimizer
from weft.base.errors import NoFeasiblePlan
from weft.plan.plan import Storage
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem, evaluate_plan
from weft.search.joint.baselines import STRATEGIES
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimator
from weft.search.joint.pieces import layer_starts, storage_for, unit_ops
from weft.search.joint.search import build_plan, evaluate, joint_search, rank_settings, zero_choices


def layered(problem: Problem, num_layers: int = 8) -> Problem:
    """Return the problem with its operators in so many layers."""
    graph = problem.graph
    modules = tuple(f"layers.{op * num_layers // graph.num_ops}" for op in range(graph.num_ops))
    return replace(problem, graph=replace(graph, op_modules=modules))


def large_parameters(memory: int) -> Problem:
    return layered(with_memory(with_optimizer(equal_problem(num_ops=16, parameter_bytes=1_000_000), "adamw"), memory))


def test_units_begin_with_layers():
    problem = large_parameters(10**9)
    starts = layer_starts(problem.graph)
    assert list(starts) == [2, 4, 6, 8, 10, 12, 14]
    parts = unit_ops(problem, np.arange(16), starts)
    assert [len(part) for part in parts] == [2] * 8
    assert np.array_equal(np.concatenate(parts), np.arange(16))


def test_groups_on_hosts_must_be_of_one_size_above_one():
    problem = large_parameters(10**9)
    replicas = [(device,) for device in problem.devices]
    assert storage_for(problem, replicas, "parameters", "all").pieces == "parameters"
    assert storage_for(problem, replicas[:1], "parameters", "all") == Storage()


def test_the_strategy_fits_where_copies_do_not():
    problem = large_parameters(40_000_000)
    for name in ("single", "data-parallel"):
        with pytest.raises(NoFeasiblePlan):
            evaluate_plan(STRATEGIES[name](problem, 1), problem)
    plan = STRATEGIES["fsdp"](problem, 1)
    assert evaluate_plan(plan, problem).step_time_s > 0
    assert all(stage.storage.pieces == "parameters" for stage in plan.stages)
    assert [stage.storage.keeps for stage in plan.stages].count(True) == 1
    with pytest.raises(NoFeasiblePlan, match=r"fsdp with recomputation .* too little\. Try more micro-batches"):
        STRATEGIES["fsdp"](with_memory(problem, 1_000_000), 1)


def test_nothing_is_in_pieces_where_memory_is_ample():
    estimator = Estimator(Chain(large_parameters(10**12)))
    ranked, _ = rank_settings(estimator, budget=Budget(effort=float("inf")), progress=lambda text: None)
    assert all(item.setting.zero == 0 for item in ranked)


@pytest.mark.parametrize("memory", [30_000_000, 40_000_000])
def test_estimates_are_near_simulations_and_fit(memory):
    problem = large_parameters(memory)
    estimator = Estimator(Chain(problem))
    ranked, _ = rank_settings(estimator, budget=Budget(effort=float("inf")), progress=lambda text: None)
    chosen = [item for item in ranked if item.setting.in_units]
    assert chosen
    for item in chosen[:6]:
        found = evaluate(estimator, item)
        assert found.step_time_s == pytest.approx(item.step_time_s, rel=0.25)
        assert {stage.storage.pieces for stage in build_plan(estimator, item).stages} & {"gradients", "parameters"}


def test_the_joint_search_is_not_slower_than_the_strategy():
    problem = large_parameters(40_000_000)
    times = []
    for microbatches in (1, 2, 4):
        try:
            times.append(evaluate_plan(STRATEGIES["fsdp"](problem, microbatches), problem).step_time_s)
        except NoFeasiblePlan:
            continue
    assert joint_search(problem).step_time_s <= min(times) * 1.001


def test_choices_of_one_host():
    estimator = Estimator(Chain(large_parameters(40_000_000)))
    ranked, _ = rank_settings(estimator, budget=Budget(effort=float("inf")), progress=lambda text: None)
    assert set(zero_choices(estimator, ranked[0].setting)) == {(2, "all"), (3, "all")}
