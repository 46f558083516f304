"""Placements with stages on all devices together, and other pipelines with such stages, executed and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.run.plans import cut, make_plan, traced
from tests.run.pool import Pool
from tests.run.sharded_plans import ops_of, parameter_shapes
from tests.search.deploy.tensor_plans import action, tensor_deployer, two_parts
from tests.search.joint.test_baselines import mixed_cluster
from tests.search.schedule.greedy import greedy_search
from tests.worlds import with_gradients
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan, Replica, Stage
from weft.plan.structure import structure_problems
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.deployer import deployment_plan
from weft.search.joint.placements import PLACEMENTS, spread
from weft.search.joint.scheduled import Search, find_schedule, schedule_search

TOLERANCE = 1e-10
MICROBATCHES = 4
GPT = "gpt2-tiny:vocab=2048,layers=4"
MODELS = {
    "m": GPT,
    "nn": "t5-base:layers=2,hidden=64,heads=4,ffn=128,vocab=4096,seq=16",
    "k": "flava:layers=2,joint_layers=1,hidden=64,heads=4,ffn=128,vocab=512,seq=8,image=32,classes=10"}
SEARCHES: dict[str, Search] = {"search": schedule_search(time_limit=0.5), "greedy": greedy_search}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=tuple(MODELS.values())) as running:
        yield running


def placed(shape: str, search: Search, *, split_backward: bool) -> Plan:
    model = MODELS[shape]
    graph, cluster = traced(model).graph, mixed_cluster([1e9, 2e9, 1e9, 1.5e9])
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster, dtype="float32"),
                      options=PlanOptions(batch=2 * MICROBATCHES, optimizer=Optimizer(kind="none")), ops=ops_of(model))
    plan = find_schedule(PLACEMENTS[shape](problem, MICROBATCHES), problem, search, split_backward=split_backward).plan
    check_plan(plan, graph, cluster)
    return plan


def check_equal(pool: Pool, plan: Plan, model: str) -> None:
    check = pool.run(plan, model)["verification"]
    assert check["num_gradients"] >= len(parameter_shapes(model))
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("split_backward", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("shape", MODELS)
def test_placements_that_spread_stages_over_all_devices(pool, shape, search, split_backward):
    plan = placed(shape, SEARCHES[search], split_backward=split_backward)
    joint = [stage for stage in plan.stages if len(stage.replicas[0].devices) == 4]
    assert len(joint) == {"m": 2, "nn": 3, "k": 1}[shape]
    assert all(stage.sharding.ops for stage in joint)
    check_equal(pool, plan, MODELS[shape])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("shape", "damage"), [
    ("m", "lost all_reduce 1"), ("m", "lost all_reduce 4"), ("nn", "lost all_reduce 2"), ("k", "lost all_reduce 3")])
def test_a_lost_exchange_is_seen(pool, shape, damage):
    plan = placed(shape, greedy_search, split_backward=False)
    assert not pool.run(plan, MODELS[shape], damage=damage)["verification"]["passed"]


def mixed_pipeline(groups: list[tuple[tuple[int, ...], ...]]) -> Plan:
    """Return stages in a chain, each with replicas on these groups of devices, in GPipe order."""
    graph, names = traced(GPT, batch_dims=True).graph, ops_of(GPT)
    parts = cut(graph, len(groups))
    stages = []
    for index, (part, replicas) in enumerate(zip(parts, groups, strict=True)):
        count = len(replicas[0])
        sharding = spread({op: names[op] for op in part}, parameter_shapes(GPT), count) if count > 1 else None
        members = tuple(Replica(devices=tuple(f"d{device}" for device in devices), share=1 / len(replicas),
                                mesh={"tensor": count} if count > 1 else {}) for devices in replicas)
        stage = Stage(name=f"s{index}", ops=tuple(part), replicas=members)
        stages.append(stage if sharding is None else replace(stage, sharding=sharding))
    order = {f"d{device}": tuple(
        f"s{index}:{phase}:{mb}" for phase in "FB" for mb in range(2)
        for index in (range(len(groups)) if phase == "F" else reversed(range(len(groups))))
        if any(device in members for members in groups[index])) for device in range(4)}
    return make_plan(graph, stages, order, microbatches=2, batch=8, num_devices=4)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("groups", [
    [((0, 1),), ((2, 3),)],
    [((0, 1, 2),), ((3,),), ((0, 2),)],
    [((0,),), ((3, 1),), ((2,),), ((1, 0, 2, 3),)],
    [((0, 1), (2, 3)), ((0, 2), (3, 1))],
    [((0, 1), (2, 3)), ((1,), (2,))],
], ids=["two pairs", "three, one, two", "some in any order", "pairs twice", "replicas of pairs"])
def test_pipelines_with_stages_on_several_devices(pool, groups):
    """The tied embedding is in the first and the last stage, which hold different parts of it unless it stays whole."""
    plan = whole_where_shared(mixed_pipeline(groups))
    assert structure_problems(plan, traced(GPT, batch_dims=True).graph) == []
    check_equal(pool, plan, GPT)
    assert not pool.run(plan, GPT, damage="lost_weight_gradient")["verification"]["passed"]


def whole_where_shared(plan: Plan) -> Plan:
    """Return the plan with the tied embedding stored whole; it is cut where operators want parts."""
    stages = []
    for stage in plan.stages:
        tensors = {name: (("R:P",) if name == "transformer.wte.weight" else words)
                   for name, words in stage.sharding.tensors.items()}
        stages.append(replace(stage, sharding=replace(stage.sharding, tensors=tensors)))
    graph = traced(GPT, batch_dims=True).graph
    return with_gradients(replace(plan, stages=tuple(stages), gradients=()), graph)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("first", "second"), [(("tensor", 0, 1), ("tensor", 0, 1)), (("tensor", 1), ("tensor", 0))],
                         ids=["all", "pipeline"])
def test_deployments_with_divided_operators_equal_one_process(pool, first, second):
    deployer = tensor_deployer(GPT, 4)
    choice = two_parts(deployer, action(deployer, *first), action(deployer, *second))
    plan = deployment_plan(deployer, deployer.evaluate(choice), by="test")
    check_equal(pool, plan, GPT)
