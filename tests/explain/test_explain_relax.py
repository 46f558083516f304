"""The smallest changes that make a request possible: they are enough, and a little less is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worlds import chain_graph, plain_cluster
from weft.base.errors import NoFeasiblePlan
from weft.cost.costs import estimate_costs
from weft.explain import relax
from weft.explain.relax import FINENESS, STEP_BYTES, Relaxation, smallest_relaxation
from weft.explain.whatif import with_memory, with_more_devices
from weft.planning.compare import compare_strategies
from weft.planning.replan import Request, least_missing
from weft.search.common.budget import time_budget
from weft.search.common.problem import PlanOptions, Problem


@pytest.fixture(autouse=True)
def quick_planner(monkeypatch):
    """Plan without deployments, which take longest."""
    monkeypatch.setattr(relax, "replan", lambda problem, request, **limits: compare_strategies(problem, joint=True))


def problem_of(memory_bytes: int, *, parameter_bytes: int, activation_bytes: int, num_devices: int = 2,
               **options) -> Problem:
    graph = chain_graph(8, batch=4, parameter_bytes=parameter_bytes, activation_bytes=activation_bytes)
    cluster = plain_cluster(num_devices, memory_bytes=memory_bytes)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(**{"batch": 16, **options}))


def heavy(**options) -> Problem:
    """Return a problem whose parameters, with gradients and states 128 MB, do not fit on two devices of 60 MB."""
    return problem_of(60_000_000, parameter_bytes=4_000_000, activation_bytes=400, **options)


def wide(**options) -> Problem:
    """Return a problem of few parameters and large activations."""
    return problem_of(40_000_000, parameter_bytes=4_000, activation_bytes=16_000_000, **options)


def fits(problem: Problem) -> bool:
    try:
        return compare_strategies(problem, joint=True).best.plan is not None
    except NoFeasiblePlan:
        return False


def by_kind(problem: Problem, request: Request | None = None) -> dict[str, Relaxation]:
    assert not fits(problem)
    found = smallest_relaxation(problem, request)
    assert all(fits(item.problem) for item in found)
    assert all(item.best.plan is not None for item in found)
    return {item.kind: item for item in found}


def test_more_memory_is_enough_and_a_little_less_is_not():
    problem = heavy()
    item = by_kind(problem)["memory"]
    extra = item.problem.cluster.devices[0].memory_bytes - 60_000_000
    assert fits(replace(problem, cluster=with_memory(problem.cluster, extra)))
    less = extra - 2 * max(STEP_BYTES, extra // FINENESS)
    assert less > 0
    assert not fits(replace(problem, cluster=with_memory(problem.cluster, less)))


def test_more_devices_are_enough_and_one_less_is_not():
    problem = problem_of(21_000_000, parameter_bytes=4_000_000, activation_bytes=400)
    found = by_kind(problem)["devices"].problem
    count = found.cluster.num_devices - 2
    assert count > 1

    def on(number: int) -> bool:
        cluster = with_more_devices(problem.cluster, 0, number)
        return fits(replace(problem, cluster=cluster, costs=estimate_costs(problem.graph, cluster)))

    assert on(count)
    assert not on(count - 1)


def test_a_smaller_batch_is_enough_and_one_more_sample_is_not():
    problem = wide(batch=7, microbatches=1)
    item = by_kind(problem)["batch"]
    size = item.problem.options.batch
    assert 1 <= size < 7
    assert item.options == f"--batch {size}"
    assert not fits(replace(problem, options=replace(problem.options, batch=size + 1)))


def test_more_microbatches_than_were_asked_for():
    problem = wide(microbatches=2)
    item = by_kind(problem)["microbatches"]
    number = item.problem.options.microbatches
    assert item.options == f"--microbatches {number}"
    assert number > 2
    assert not fits(replace(problem, options=replace(problem.options, microbatches=number // 2)))


@pytest.fixture
def without_joint(monkeypatch):
    """Plan with the plain strategies only: the joint search recomputes and divides states by itself."""
    monkeypatch.setattr(relax, "best_joint", lambda problem, splits, budget: None)
    monkeypatch.setattr(relax, "replan", lambda problem, request, **limits: compare_strategies(problem))


def test_recomputation_where_activations_are_kept(without_joint):
    problem = problem_of(28_000_000, parameter_bytes=4_000, activation_bytes=8_000_000, num_devices=2, batch=16,
                         microbatches=2)
    tight = replace(problem, cluster=plain_cluster(2, memory_bytes=int(least_needed(problem, recompute=True)) + 1000))
    found = {item.kind: item for item in smallest_relaxation(tight)}
    assert found["recompute"].options == "--recompute full"


def test_states_in_pieces_where_they_are_what_is_too_much(without_joint):
    graph, cluster = chain_graph(1, batch=4, parameter_bytes=4_000_000), plain_cluster(4, memory_bytes=15_000_000)
    one_stage = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                        options=PlanOptions(batch=16, microbatches=1))
    assert {item.kind for item in smallest_relaxation(one_stage)} >= {"sharded", "memory"}


def least_needed(problem: Problem, **options: object) -> float:
    """Return the memory with which the nearest plan of a problem would just fit."""
    changed = replace(problem, options=replace(problem.options, **options))
    return least_missing(changed, enough=-1.0) + problem.cluster.devices[0].memory_bytes


def test_lower_precision_is_asked_of_the_model():
    problem = heavy()
    half = replace(problem.graph, tensor_bytes=problem.graph.tensor_bytes // 2)
    asked: list[str] = []

    def load(dtype: str):
        asked.append(dtype)
        return half

    request = Request(graph=problem.graph, options=problem.options, load=load,
                      costs_of=lambda graph, cluster: estimate_costs(graph, cluster))
    item = by_kind(problem, request)["dtype"]
    assert asked == ["bfloat16"]
    assert item.options == "--dtype bfloat16"
    assert item.problem.options.dtype == "bfloat16"


def test_settings_that_help_only_together(without_joint):
    """In two micro-batches nothing fits, in eight not either, but recomputed in eight."""
    problem = problem_of(10**9, parameter_bytes=4_000, activation_bytes=8_000_000, batch=8, microbatches=2)
    most = {again: least_needed(problem, microbatches=8, recompute=again) for again in (False, True)}
    assert most[True] < most[False]
    tight = replace(problem, cluster=plain_cluster(2, memory_bytes=int(most[True]) + 1000))
    found = {item.kind: item for item in smallest_relaxation(tight)}
    assert found["together"].options == "--microbatches 8 --recompute full"


def test_what_the_planner_refuses_is_not_reported(monkeypatch):
    def refuse(problem, request, **limits):
        raise NoFeasiblePlan("no")

    monkeypatch.setattr(relax, "replan", refuse)
    notes: list[str] = []
    assert smallest_relaxation(heavy(), budget=time_budget(None, notes.append)) == []
    assert any("is not enough for the planner: no" in note for note in notes)


def test_a_deadline_ends_the_search():
    assert len(smallest_relaxation(heavy(), budget=time_budget(0.0))) <= 1


def test_ctrl_c_keeps_what_was_found(monkeypatch):
    calls: list[int] = []

    def interrupted(problem, request, **limits):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return compare_strategies(problem, joint=True)

    monkeypatch.setattr(relax, "replan", interrupted)
    assert len(smallest_relaxation(heavy())) == 1


def test_what_is_missing_is_missing():
    problem = heavy()
    missing = least_missing(problem)
    assert missing > 0
    assert least_missing(replace(problem, cluster=with_memory(problem.cluster, int(missing)))) <= 0
