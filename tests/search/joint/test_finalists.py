"""What the best plans of the joint search gain after their simulation: a searched order, and divided states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.search.joint.worlds import equal_problem, mixed_problem, replicated, staged, with_optimizer
from weft.plan.check import check_plan
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimator
from weft.search.joint.scheduled import reschedule
from weft.search.joint.search import JointResult, evaluate, refine
from weft.simulate.timing import simulate


def pipeline(problem: Problem, **options) -> JointResult:
    """Return the pipeline with a stage on each device, as the search makes it at first."""
    estimator = Estimator(Chain(problem, {}))
    return evaluate(estimator, estimator(staged(problem, **options)))


def unlimited() -> Budget:
    return Budget(effort=float("inf"))


def test_a_searched_order_shortens_an_uneven_pipeline_and_is_checked():
    problem = with_optimizer(mixed_problem(num_ops=9), "none")
    before = pipeline(problem, microbatches=6)
    best, tried = refine(problem, [before], unlimited(), lambda text: None)
    assert best.step_time_s < 0.97 * before.step_time_s  # split backwards fill what 1F1B leaves idle
    assert best.setting.searched_order
    assert "searched order" in best.setting.describe()
    assert tried[0].step_time_s == best.step_time_s
    again = simulate(check_plan(best.plan, problem.graph, problem.cluster), problem.costs, problem.cluster)
    assert again.step_time_s == best.step_time_s >= float(before.timeline.busy_s.max()) * (1 - 1e-9)


def test_the_same_search_gives_the_same_order():
    problem = mixed_problem(num_ops=9)
    plans = {refine(problem, [pipeline(problem, microbatches=6)], unlimited(), lambda text: None)[0].plan.order["a0"]
             for _ in range(2)}
    assert len(plans) == 1


@pytest.mark.parametrize("what", ["too much work", "one micro-batch", "no time", "inference"])
def test_nothing_is_searched_where_nothing_can_be_gained(what):
    problem = mixed_problem(num_ops=9)
    found = pipeline(problem, microbatches=1 if what == "one micro-batch" else 6)
    below_s = float(found.timeline.busy_s.max()) if what == "too much work" else found.step_time_s
    budget = replace(unlimited(), effort=0.0) if what == "no time" else unlimited()
    if what == "inference":
        problem = replace(problem, options=replace(problem.options, mode="inference"))
    assert reschedule(found.plan, found.timeline, problem, below_s=below_s, budget=budget) is None


def test_states_are_divided_where_that_is_faster_though_all_would_fit():
    problem = with_optimizer(equal_problem(parameter_bytes=1 << 22, memory="100GB"), "adamw")
    estimator = Estimator(Chain(problem, {}))
    before = evaluate(estimator, estimator(replicated(problem)))
    best, _ = refine(problem, [before], unlimited(), lambda text: None)
    divided = replace(before.plan, optimizer=replace(before.plan.optimizer, sharded=True))
    other_s = simulate(check_plan(divided, problem.graph, problem.cluster), problem.costs, problem.cluster).step_time_s
    assert best.step_time_s == min(before.step_time_s, other_s)
    assert best.plan.optimizer.sharded is (other_s < before.step_time_s)
