"""The joint search as part of the planner: a candidate among the others, alone on large clusters, with what it tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.search.joint.worlds import equal_problem, mixed_problem, tensor_world, with_memory
from weft.base.errors import NoFeasiblePlan
from weft.cli.plan_commands import comparison_json
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.load import load_graph_for
from weft.plan.check import check_plan
from weft.planning import compare as planner
from weft.planning.compare import compare_strategies
from weft.search.common.problem import PlanOptions, Problem, evaluate_plan
from weft.search.joint import search
from weft.search.joint.baselines import STRATEGIES


def test_it_is_the_last_of_the_strategies_and_never_behind_even_data_parallelism():
    problem = mixed_problem()
    comparison = compare_strategies(problem, joint=True)
    assert [item.strategy for item in comparison.candidates] == [*STRATEGIES, "joint"]
    by_name = {item.strategy: item for item in comparison.candidates}
    joint = by_name["joint"]
    assert joint.step_time_s <= by_name["data-parallel"].step_time_s
    assert comparison.bound_s <= joint.step_time_s == joint.plan.search.step_time
    assert joint.timeline.program.plan == joint.plan
    assert joint.tried
    check_plan(joint.plan, problem.graph, problem.cluster)


def test_tp_groups_are_used_where_there_are_splits():
    problem, splits = tensor_world(batch=2, microbatches=2)
    comparison = compare_strategies(problem, ["single"], joint=True, splits=splits)
    settings = [item.setting for item in comparison.candidates[-1].tried]
    assert {len(mesh.tp_groups[0]) for setting in settings for mesh in setting.layout} == {1, 2}


def test_on_a_large_cluster_it_is_alone(monkeypatch):
    for module in (planner, search):
        monkeypatch.setattr(module, "TUNING", replace(module.TUNING, large=4))
    problem = equal_problem(8, num_ops=16, batch=32)
    comparison = compare_strategies(problem, joint=True)
    assert [item.strategy for item in comparison.candidates] == ["joint"]
    best = comparison.best
    assert best.step_time_s == best.predicted_s == best.plan.search.step_time
    whole = evaluate_plan(best.plan, problem)
    assert best.step_time_s == pytest.approx(whole.step_time_s, rel=0.05)


def test_what_was_tried_is_in_the_json():
    comparison = compare_strategies(mixed_problem(), joint=True)
    rows = comparison_json(comparison)["tried"]
    assert len(rows) == len(comparison.candidates[-1].tried)
    assert {"strategy", "setting", "estimate", "step_time", "reason"} == set(rows[0])
    assert any(row["step_time"] is not None for row in rows)


def test_nothing_fits_is_said_for_it_too():
    problem = with_memory(equal_problem(activation_bytes=800_000, microbatches=1), 60_000)
    with pytest.raises(NoFeasiblePlan, match=r"(?s)no strategy gives a plan .*- joint: "):
        compare_strategies(problem, joint=True)


def test_a_time_limit_of_nothing_leaves_it_out():
    lines = []
    comparison = compare_strategies(mixed_problem(), joint=True, time_limit_s=0.0, progress=lines.append)
    assert [item.strategy for item in comparison.candidates] == ["single"]
    assert lines[-1].startswith("time limit: ")


def test_less_memory_never_gives_a_faster_plan():
    """Plans that fit by the estimate and not by the account once hid those that fit: none with 3 MB, one with 2 MB."""
    graph = load_graph_for("gpt2-tiny", batch_dims=True)
    cluster = read_cluster("4 x A100-80GB")
    times = []
    for size in (4_000_000, 3_000_000, 2_500_000, 2_000_000):
        devices = tuple(replace(device, memory_bytes=size) for device in cluster.devices)
        small = replace(cluster, devices=devices)
        problem = Problem(graph=graph, cluster=small, costs=estimate_costs(graph, small), options=PlanOptions(batch=16))
        times.append(search.joint_search(problem).step_time_s)
    assert times == sorted(times)
