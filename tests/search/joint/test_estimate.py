"""Estimates of settings: against the simulation, within memory, and what saves memory only where it is needed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.search.joint.worlds import (
    equal_problem,
    estimates_of,
    mixed_problem,
    replicated,
    staged,
    tensor_world,
    with_memory,
    with_optimizer,
)
from weft.base.errors import NoFeasiblePlan
from weft.cost.costs import estimate_costs
from weft.plan.check import excess_bytes
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimator
from weft.search.joint.search import build_plan

NUM_SIMULATED = 12
CASES = {"equal": lambda: (equal_problem(), {}), "mixed": lambda: (mixed_problem(), {}),
         "large activations": lambda: (equal_problem(activation_bytes=400_000), {}),
         "large parameters": lambda: (equal_problem(parameter_bytes=400_000), {}), "tensor": tensor_world}


@pytest.mark.parametrize("case", CASES)
def test_estimates_are_about_what_the_simulator_says(case):
    """Where messages take little of the time; all settings are, and the first in the ranking are simulated."""
    problem, splits = CASES[case]()
    estimator, ranked = estimates_of(problem, splits)
    assert len(ranked) >= 10
    for estimate in ranked[:NUM_SIMULATED]:
        simulated_s = evaluate(build_plan(estimator, estimate), problem).step_time_s
        assert estimate.step_time_s == pytest.approx(simulated_s, rel=0.1), estimate.setting.describe()


@pytest.mark.parametrize("network", ["100MB/s", "10MB/s"])
def test_the_longest_path_is_right_with_slow_messages_too(network):
    problem = mixed_problem(network=network)
    estimator, ranked = estimates_of(problem)
    plain = [item for item in ranked if item.setting.chunks == 1 and len(item.setting.layout) > 1][:NUM_SIMULATED]
    for estimate in plain:
        simulated_s = evaluate(build_plan(estimator, estimate), problem).step_time_s
        assert estimator.by_path(estimate).step_time_s == pytest.approx(simulated_s, rel=0.1)


def test_no_cuts_beat_the_bound():
    estimator, ranked = estimates_of(mixed_problem())
    assert all(item.step_time_s >= 0.999 * estimator.bound(item.setting) for item in ranked)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_stages_fit_the_memory_that_is_left(chunks, recompute):
    problem = with_memory(equal_problem(activation_bytes=80_000), 700_000)
    estimator = Estimator(Chain(problem))
    setting = staged(problem, chunks=chunks, recompute=recompute)
    estimate = estimator(setting)
    assert estimate.cuts[0] == 0
    assert estimate.cuts[-1] == estimator.chain.num_places - 1
    for stage, (first, last) in enumerate(itertools.pairwise(estimate.cuts)):
        assert last > first
        tp_group = setting.layout[stage % 4].tp_groups[0]
        used = estimator.stage_bytes(setting, stage, tp_group, 4, first, last)
        assert used * chunks <= 700_000


@pytest.mark.parametrize("setting", [{"chunks": 2, "microbatches": 12}, {"chunks": 2, "microbatches": 4},
                                     {"microbatches": 1, "recompute": True}])
def test_what_is_estimated_to_fit_fits(setting):
    """Also where the stages of a device are unlike: the first keep four times as much, for more micro-batches."""
    problem = equal_problem(num_ops=40, activation_bytes=80_000, parameter_bytes=100_000, batch=48)
    sizes = problem.graph.tensor_bytes.copy()
    sizes[problem.graph.tensor_producer >= 20] //= 4
    graph = replace(problem.graph, tensor_bytes=sizes)
    problem = replace(problem, graph=graph, costs=estimate_costs(graph, problem.cluster))
    num_fitting = 0
    for memory in range(500_000, 8_000_000, 100_000):
        tight = with_memory(problem, memory)
        estimator = Estimator(Chain(tight))
        try:
            estimate = estimator(staged(tight, **setting))
        except NoFeasiblePlan:
            continue
        num_fitting += 1
        assert not excess_bytes(build_plan(estimator, estimate), graph, tight.cluster), memory
    assert num_fitting


def test_segments_are_those_of_the_setting_whatever_was_asked_before():
    """Divided states leave more room than whole ones, so fewer segments will do."""
    differs = 0
    for memory in range(8_000_000, 80_000_000, 2_000_000):
        problem = with_optimizer(with_memory(equal_problem(
            num_ops=40, activation_bytes=80_000, parameter_bytes=100_000, batch=64), memory), "adamw")
        estimator, alone = Estimator(Chain(problem)), Estimator(Chain(problem))
        whole = replace(replicated(problem), recompute=True)
        divided = replace(whole, zero=1)
        last = estimator.chain.num_places - 1
        before = estimator.segments(whole, 0, 0, last)
        assert estimator.segments(divided, 0, 0, last) == alone.segments(divided, 0, 0, last)
        differs += before != alone.segments(divided, 0, 0, last)
    assert differs


def test_more_memory_never_makes_an_estimate_worse():
    times = []
    for memory in (120_000, 200_000, 260_000, 320_000, 10**9):
        problem = with_memory(equal_problem(activation_bytes=80_000), memory)
        try:
            times.append(Estimator(Chain(problem, {}))(staged(problem)).step_time_s)
        except NoFeasiblePlan:
            times.append(float("inf"))
    assert times == sorted(times, reverse=True)
    assert times[-1] < float("inf")


def test_nothing_is_recomputed_or_divided_where_memory_is_ample():
    _, ranked = estimates_of(with_optimizer(mixed_problem(), "adamw"))
    assert not any(item.setting.recompute or item.setting.zero for item in ranked)


def test_recomputation_in_segments_makes_large_activations_fit():
    problem = with_memory(equal_problem(1, num_ops=48, activation_bytes=160_000), 4_500_000)
    plain, again = (replicated(problem, recompute=recompute) for recompute in (False, True))
    estimator, ranked = estimates_of(problem)
    with pytest.raises(NoFeasiblePlan, match=r"the stages need .* and have .* too little in all"):
        estimator(plain)
    estimate = estimator(again)
    plan = build_plan(estimator, estimate)
    assert len(plan.stages) > 1, "one segment would keep everything at once"
    assert all(stage.recompute for stage in plan.stages)
    assert evaluate(plan, problem).step_time_s == pytest.approx(estimate.step_time_s, rel=0.1)
    assert all(item.setting.recompute for item in ranked if item.setting.microbatches == 1)
    assert any(not item.setting.recompute for item in ranked if item.setting.microbatches > 4), "smaller ones fit as is"


def test_divided_states_make_large_parameters_fit():
    problem = with_memory(with_optimizer(equal_problem(parameter_bytes=1_000_000), "adamw"), 35_000_000)
    plain, divided = (replicated(problem, zero=int(sharded)) for sharded in (False, True))
    estimator, ranked = estimates_of(problem)
    with pytest.raises(NoFeasiblePlan, match="too little in all"):
        estimator(plain)
    plan = build_plan(estimator, estimator(divided))
    assert plan.optimizer.sharded
    evaluate(plan, problem)
    for item in ranked:
        width = len(item.setting.layout[0].tp_groups)
        assert item.setting.zero == (len(item.setting.layout) == 1 and width == 4), item.setting.describe()
        assert not item.setting.recompute


def test_too_many_stages_and_too_few_samples_are_said():
    problem = equal_problem(num_ops=3)
    estimator = Estimator(Chain(problem, {}))
    with pytest.raises(NoFeasiblePlan, match="the model has 3 pieces, too few for 4 stages"):
        estimator(staged(problem))
    with pytest.raises(NoFeasiblePlan, match="a micro-batch of 1 has too few samples for all replicas"):
        estimator(replicated(problem, microbatches=16))
    assert estimator.bound(replicated(problem, microbatches=16)) == float("inf")


def test_figures_of_a_stage_are_differences_of_sums():
    problem, splits = tensor_world()
    chain = Chain(problem, splits)
    alone, pair = chain.pieces((0,)), chain.pieces((0, 1))
    whole = problem.graph.tensor_bytes[problem.graph.parameters].sum()
    assert alone.lasting.parameters[0, -1] == whole
    assert 0.5 * whole <= pair.lasting.parameters[0, -1] < 0.6 * whole
    assert pair.passing(2.0).saved[0, -1] < alone.passing(2.0).saved[0, -1]
    assert chain.split_of((0,)) is None
    assert chain.passes((2,), 2.0)[0][-1] < chain.passes((0,), 2.0)[0][-1], "the second host is faster"
    assert chain.figures_key((0, 1)) != chain.figures_key((2, 3))
