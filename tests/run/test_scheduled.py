"""Found schedules are executed: on 4 processes, gradients equal those of one, for every placement that can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.schedule_run import tight_plan
from tests.run.plans import greedy_order, pipeline_plan, traced
from tests.run.pool import Pool
from tests.search.joint.test_baselines import mixed_cluster
from tests.search.schedule.greedy import greedy_search
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.placements import PLACEMENTS
from weft.search.joint.scheduled import Search, find_schedule, schedule_search
from weft.search.schedule.from_plan import problem_of_plan, with_schedule
from weft.search.schedule.named import named_schedule

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
@pytest.mark.parametrize("name", ["zbv", "dualpipev", "v-half", "v-min", "dualpipe"])
def test_named_orders_of_two_stages_on_each_device_equal_one_process(pool, problem, name):
    if name == "dualpipe":
        plan = PLACEMENTS["x"](problem, MICROBATCHES)
    else:
        devices = [0, 1, 2, 3, 3, 2, 1, 0]
        plan = pipeline_plan(problem.graph, devices, greedy_order(devices, MICROBATCHES), microbatches=MICROBATCHES)
    asked = problem_of_plan(plan, problem.graph, problem.costs, problem.cluster, split_backward=True)
    plan = with_schedule(plan, asked, named_schedule(name, asked.problem, asked.num_microbatches))
    check = pool.run(plan, "tiny_gpt")["verification"]
    assert max(check["loss_error"], check["gradient_error"]) <= TOLERANCE, check["worst"]


def within(measured: dict[str, Any], promised: dict[str, Any]) -> bool:
    """Return whether no rank of a run has held more than the account of another one's plan says, but for 1 %."""
    return all(held <= 1.01 * account for (_, held), (account, _) in zip(measured["memory"], promised["memory"],
                                                                         strict=True))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shape", ["v", "vv"])
def test_schedules_at_little_memory_hold_what_their_account_says(pool, problem, shape):
    """The control is the run with all of 1F1B's memory, which half of it must not be enough for."""
    runs = {}
    for share in (1.0, 1 / 2, 1 / 3):
        plan = tight_plan(problem, shape, MICROBATCHES, share, SEARCHES["search"], split_backward=True)
        runs[share] = pool.run(plan, "tiny_gpt", memory=True)
        check = runs[share]["verification"]
        assert max(check["loss_error"], check["gradient_error"]) <= TOLERANCE, check["worst"]
        assert within(runs[share], runs[share])
        assert max(held / account for account, held in runs[share]["memory"]) >= 0.99
    assert not within(runs[1.0], runs[1 / 2])
    assert max(held for _, held in runs[1 / 3]["memory"]) < max(held for _, held in runs[1.0]["memory"])


@pytest.mark.timeout(120)
def test_a_lost_gradient_is_seen(pool, problem):
    plan = scheduled(problem, "v", greedy_search, split_backward=True)
    assert not pool.run(plan, "tiny_gpt", damage="lost_weight_gradient")["verification"]["passed"]


@pytest.mark.timeout(120)
def test_opposite_pipelines_need_their_exchange(pool, problem):
    plan = scheduled(problem, "x", greedy_search, split_backward=False)
    assert not pool.run(plan, "tiny_gpt", damage="no_all_reduce")["verification"]["passed"]
