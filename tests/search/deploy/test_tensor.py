"""Tensor parallelism as an action: its costs are those of the sharding search, and plans of it are what was estimated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.run.plans import source_of, traced
from tests.search.deploy.tensor_plans import action, tensor_deployer, two_parts
from tests.search.deploy.worlds import cluster_of, deployer_of, host, problem_of
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import trace_folded
from weft.model.trace import trace
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.deploy.deployer import deployment_plan
from weft.search.deploy.find_splits import find_splits
from weft.search.deploy.splits import tp_groups_by_degree
from weft.search.shard.compare import search_plan
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.named import find_roles, named
from weft.search.shard.tensor_costs import split_operators
from weft.simulate.timing import simulate

LLAMA, GPT = "llama-tiny", "gpt2-tiny"


@pytest.mark.parametrize("model", [LLAMA, "t5-base:layers=3,hidden=64,heads=4,ffn=128,vocab=512,seq=16"])
def test_operators_add_up_to_what_the_sharding_search_says_or_less(model):
    graph = traced(model, batch_dims=True).graph
    folded = trace_folded(source_of(model), batch=graph.batch, backward="rule")
    cluster = cluster_of(host("a", 2), inside="1GB/s")
    costs, whole = estimate_costs(folded.traced.graph, cluster), estimate_costs(graph, cluster)
    (split,) = split_operators(folded, graph, costs, [(0, 1)])
    total = sum(split.seconds(which, whole.op_seconds(phase, 1.0)[:, 0], graph.batch).sum()
                for which, phase in enumerate(("F", "B")))
    search = MeshSearch(folded, costs, Mesh(cluster, (0, 1), (2,)), optimizer=Optimizer(), limit_bytes=None,
                        budget=Budget(effort=float("inf")), splits_states=False)
    megatron = search.run(named("megatron", find_roles(search.parts, folded), 1))
    # what adds up the gradients of norms, once a step, is in the search's seconds but in no operator's
    assert 0.995 * search.run().seconds <= total <= 1.001 * megatron.seconds
    held = graph.tensor_bytes[graph.parameters] @ split.held_part[graph.parameters]
    assert 0.5 * graph.tensor_bytes[graph.parameters].sum() <= held < 0.6 * graph.tensor_bytes[graph.parameters].sum()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_a_plan_takes_as_long_as_its_deployment_was_estimated(model, microbatches):
    deployer = tensor_deployer(model, microbatches)
    both, first, second = (action(deployer, "tensor", *groups) for groups in ((0, 1), (0,), (1,)))
    for choice in (two_parts(deployer, both, both), two_parts(deployer, first, first),
                   two_parts(deployer, second, first)):
        found = deployer.evaluate(choice)
        plan = deployment_plan(deployer, found, by="test")
        problem = deployer.problem
        timeline = simulate(check_plan(plan, problem.graph, problem.cluster), problem.costs, problem.cluster)
        assert timeline.step_time_s == pytest.approx(found.seconds, rel=0.04)
        assert all(stage.sharding for stage in plan.stages)


def test_the_time_of_a_plan_of_divided_stages_has_the_collectives_inside():
    deployer = tensor_deployer(LLAMA, 1)
    choice = (action(deployer, "tensor", 0),) * deployer.groups.num_groups
    plan, problem = deployment_plan(deployer, deployer.evaluate(choice), by="test"), deployer.problem
    program = check_plan(plan, problem.graph, problem.cluster)
    timeline = simulate(program, problem.costs, problem.cluster)
    bare = replace(plan, stages=tuple(replace(stage, replicas=tuple(replace(item, times={}) for item in stage.replicas))
                                      for stage in plan.stages))
    without = simulate(check_plan(bare, problem.graph, problem.cluster), problem.costs, problem.cluster)
    assert timeline.step_time_s > without.step_time_s


def test_tp_groups_do_everything_together_and_tied_parameters_are_divided_alike():
    deployer = tensor_deployer(GPT, 1)
    tensor, other = action(deployer, "tensor", 0), action(deployer, "replicate", 1)
    assert not np.isfinite(deployer.evaluate(two_parts(deployer, tensor, other)).seconds), "embedding and head are tied"
    deployer = tensor_deployer(LLAMA, 1)
    tensor, other = action(deployer, "tensor", 0), action(deployer, "replicate", 1)
    assert np.isfinite(deployer.evaluate(two_parts(deployer, tensor, other)).seconds)
    alone = action(deployer, "replicate", 0)
    assert not np.isfinite(deployer.evaluate(two_parts(deployer, tensor, alone)).seconds), "a0 is in two tp groups"


def test_devices_hold_less_where_they_divide_operators():
    deployer = tensor_deployer(LLAMA, 1)
    divided, whole = (deployer.evaluate((action(deployer, kind, 0),) * deployer.groups.num_groups)
                      for kind in ("tensor", "single"))
    assert divided.outcome.used.max() < 0.7 * whole.outcome.used.max()


def test_degrees_are_powers_of_two_for_which_a_group_has_devices():
    groups = problem_of(cluster_of(host("a", 4), host("b", 2), host("c", 3), host("d", 1))).cluster
    assert list(tp_groups_by_degree(groups.groups_by_host_and_kind())) == [(2, [0, 1, 2]), (4, [0])]


def test_without_hosts_of_several_devices_nothing_is_divided():
    problem = problem_of(cluster_of(host("a", 1), host("b", 1)))
    assert not find_splits(problem, None, lambda graph: None)  # type: ignore[arg-type]
    assert all(item.kind != "tensor" for item in deployer_of(problem).actions)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_the_plan_of_a_sharding_takes_as_long_as_the_search_says(shape):
    cluster = cluster_of(host("a", 4), inside="1GB/s")
    folded = trace_folded(source_of(LLAMA), batch=8)
    plan = search_plan(folded, cluster, shape=shape, optimizer=Optimizer(kind="none"))
    graph = trace(folded.traced.source, batch_dims=True).graph
    timeline = simulate(check_plan(plan, graph, cluster), estimate_costs(graph, cluster), cluster)
    assert timeline.step_time_s == pytest.approx(plan.search.step_time, rel=0.1)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_samples_are_not_divided_so_that_one_of_them_takes_no_less_than_it_can(mode):
    """Devices that divided samples would look four times as fast with one sample, which cannot be divided."""
    source, cluster = source_of(GPT, mode=mode), cluster_of(host("a", 4), inside="1GB/s")
    seconds = {}
    for batch in (1, 8):
        graph = trace(source, batch=batch, backward="rule" if mode == "training" else "none", batch_dims=True).graph
        folded = trace_folded(source, batch=batch)
        costs, whole = estimate_costs(folded.traced.graph, cluster), estimate_costs(graph, cluster)
        (split,) = split_operators(folded, graph, costs, [(0, 1, 2, 3)], is_size_known=batch == 1)
        seconds[batch] = sum(split.seconds(which, whole.op_seconds(phase, 1 / batch)[:, 0], 1).sum()
                             for which, phase in enumerate(("F", "B") if mode == "training" else ("F",)))
    assert seconds[8] >= 0.97 * seconds[1]


def test_results_are_brought_whole_to_all_devices():
    source, cluster = source_of(GPT, mode="inference"), cluster_of(host("a", 4), inside="1GB/s")
    folded = trace_folded(source, batch=1)
    plan = search_plan(folded, cluster, shape=(4,), optimizer=Optimizer(kind="none"))
    graph = trace(folded.traced.source, batch_dims=True).graph
    timeline = simulate(check_plan(plan, graph, cluster), estimate_costs(graph, cluster), cluster)
    assert timeline.step_time_s >= 0.999 * plan.search.step_time
