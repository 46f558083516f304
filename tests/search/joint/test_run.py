"""Joint plans executed: tensor, data and pipeline parallelism, recomputed or reordered, equal one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.run.plans import source_of, traced
from tests.run.pool import Pool
from tests.search.deploy.worlds import cluster_of, host
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan
from weft.planning.degrees import settle_degrees
from weft.search.common.budget import Budget
from weft.search.common.degrees import Degrees
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.find_splits import find_splits
from weft.search.deploy.splits import Splits
from weft.search.joint import estimate
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimator
from weft.search.joint.layouts import Setting, StageMesh
from weft.search.joint.scheduled import reschedule
from weft.search.joint.search import build_plan, evaluate, joint_search

MODEL = "llama-tiny:layers=2"


def plan_by_hand(problem: Problem, splits: Splits) -> Plan:
    """Return the plan of a layout that is fixed in all: three stages of two chunks, each divided by two devices."""
    degrees = Degrees(tp=2, pp=3, dp=1, interleave=2, microbatch_size=1, recompute="none")
    options = settle_degrees(replace(problem.options, batch=6, degrees=degrees), problem.cluster)
    plan = joint_search(replace(problem, options=options), splits).plan
    assert plan.microbatches == 6
    assert len(plan.stages) == 6
    assert not any(stage.recompute for stage in plan.stages)
    assert [len(stage.replicas[0].devices) for stage in plan.stages] == [2] * 6
    assert len({stage.replicas[0].devices for stage in plan.stages}) == 3
    return plan


@pytest.mark.timeout(300)
def test_tp_groups_that_share_samples_before_a_tp_group_that_takes_all(tmp_path, monkeypatch):
    """Once recomputed in segments, once with a searched order of split backwards; and degrees by hand."""
    monkeypatch.setattr(estimate, "TUNING", replace(estimate.TUNING, room=0.0, segment_counts=(1, 2)))
    graph = traced(MODEL, batch_dims=True).graph
    cluster = cluster_of(host("a", 4), host("b", 2), inside="10GB/s", network="1GB/s", latency="10us")
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(
        batch=4, dtype="float64", optimizer=Optimizer(kind="none")))
    folded = trace_folded(source_of(MODEL), batch=graph.batch, backward="rule")
    splits = find_splits(problem, folded, lambda folded_graph: estimate_costs(folded_graph, cluster))
    estimator = Estimator(Chain(problem, splits))
    layout = StageMesh(((0, 1), (2, 3))), StageMesh(((4, 5),))
    plan = build_plan(estimator, estimator(Setting(layout=layout, microbatches=2, recompute=True)))
    check_plan(plan, graph, cluster)
    assert len(plan.stages) > 2, "stages are recomputed in segments"
    assert {len(stage.replicas) for stage in plan.stages} == {1, 2}
    assert all(stage.sharding and stage.recompute for stage in plan.stages)
    kept = Setting(layout=layout, microbatches=2)
    before = evaluate(estimator, estimator(kept))
    found = reschedule(before.plan, before.timeline, problem, below_s=1.1 * before.step_time_s,
                       budget=Budget(effort=float("inf")))
    assert found is not None
    searched = found[0]
    assert any(":W:" in action for actions in searched.order.values() for action in actions), "backwards are split"
    given = plan_by_hand(problem, splits)
    with Pool(6, tmp_path, models=()) as pool:
        checks = [pool.run(item, MODEL, dtype="float64")["verification"] for item in (plan, searched, given)]
    for check in checks:
        assert check["passed"], check
        assert check["tolerance"] == 1e-10
        assert check["num_gradients"] > 20
