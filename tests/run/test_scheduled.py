"""Found schedules are executed: on 4 processes, gradients equal those of one, for every placement that can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.run.plans import traced
from tests.run.pool import Pool
from tests.search.joint.test_baselines import mixed_cluster
from tests.search.schedule.greedy import greedy_search
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.placements import PLACEMENTS
from weft.search.joint.scheduled import Search, find_schedule, schedule_search

TOLERANCE = 1e-10
MICROBATCHES = 8


SEARCHES: dict[str, Search] = {"search": schedule_search(time_limit=0.5), "greedy": greedy_search}
"""Weft's search, and a list schedule, which runs micro-batches in another order."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture(scope="module")
def problem() -> Problem:
    graph = traced("tiny_gpt").graph
    cluster = mixed_cluster([1e9, 2e9, 1e9, 1.5e9])
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster, dtype="float32"),
                   options=PlanOptions(batch=2 * MICROBATCHES, optimizer=Optimizer(kind="none")))


def scheduled(problem: Problem, shape: str, search: Search, *, split_backward: bool) -> Plan:
    plan = find_schedule(PLACEMENTS[shape](problem, MICROBATCHES), problem, search, split_backward=split_backward).plan
    check_plan(plan, problem.graph, problem.cluster)
    return plan


@pytest.mark.timeout(120)
@pytest.mark.parametrize("split_backward", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("shape", ["v", "x", "interleaved", "vv"])
@pytest.mark.parametrize("search", SEARCHES)
def test_gradients_equal_those_of_one_process(pool, problem, shape, split_backward, search):
    plan = scheduled(problem, shape, SEARCHES[search], split_backward=split_backward)
    assert len(plan.stages) >= (4 if shape == "v" else 6)
    assert {token.split(":")[1] for tokens in plan.order.values() for token in tokens} == (
        {"F", "I", "W"} if split_backward else {"F", "B"})
    check = pool.run(plan, "tiny_gpt")["verification"]
    assert check["num_gradients"] > 0
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]


@pytest.mark.timeout(120)
def test_a_lost_gradient_is_seen(pool, problem):
    plan = scheduled(problem, "v", greedy_search, split_backward=True)
    assert not pool.run(plan, "tiny_gpt", damage="lost_weight_gradient")["verification"]["passed"]


@pytest.mark.timeout(120)
def test_opposite_pipelines_need_their_exchange(pool, problem):
    plan = scheduled(problem, "x", greedy_search, split_backward=False)
    assert not pool.run(plan, "tiny_gpt", damage="no_all_reduce")["verification"]["passed"]
