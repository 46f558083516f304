"""Experts divided over the devices of a tp group: rows by true counts, equal to one process; each control fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.run.expert_models import FOREIGN, HERE, by_experts
from tests.run.plans import cut, greedy_order, make_plan, traced
from tests.run.pool import Pool
from tests.run.sharded_plans import sharded_plan
from weft.base.errors import PlanError
from weft.cluster import read_cluster
from weft.cluster.cluster_file import parse_cluster
from weft.model.folded import trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.plan.orders import to_tokens
from weft.plan.plan import Optimizer, Plan, Replica, Stage
from weft.planning.make import SearchOptions, search_plans
from weft.search.common.degrees import Degrees
from weft.search.common.problem import PlanOptions
from weft.search.shard.compare import search_plan

TOLERANCE = 1e-10
MODELS = {**{name: f"{FOREIGN}:{name}" for name in ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe")},
          "skewed": f"{HERE}:skewed", "router_loss": f"{HERE}:with_router_loss"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=tuple(MODELS.values())) as running:
        yield running


LAST_SUM = "lost all_reduce 4"
"""Each layer sums the experts' counts, and then their results; the first layer's lost, devices would not agree on counts.
"""


def assert_equals_one(pool: Pool, plan: Plan, model: str, damage: str = LAST_SUM) -> None:
    check = pool.run(plan, model)["verification"]
    assert max(check["loss_error"], check["gradient_error"]) <= TOLERANCE, check["worst"]
    assert not pool.run(plan, model, damage=damage)["verification"]["passed"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MODELS)
def test_each_of_four_devices_has_an_expert(pool: Pool, name: str) -> None:
    """In the skewed one all tokens fall on the first expert, and the last device has no rows at all."""
    model = MODELS[name]
    plan = sharded_plan(model, {"expert": 4}, by_experts(model, (4,), axes=(0,)), microbatches=1)
    stored = [words for tensor, words in plan.stages[0].sharding.tensors.items() if "experts." in tensor and "S0" in words]
    assert len(stored) >= 2, plan.stages[0].sharding.tensors
    assert_equals_one(pool, plan, model, damage="lost all_reduce 2" if name == "deepseek_v3" else LAST_SUM)


@pytest.mark.timeout(120)
def test_experts_over_two_axes_and_over_one_of_two(pool: Pool) -> None:
    model = MODELS["skewed"]
    for axes in ((0, 1), (1,)):
        words = by_experts(model, (2, 2), axes=axes)
        assert_equals_one(pool, sharded_plan(model, {"a": 2, "b": 2}, words, microbatches=2), model,
                          damage="lost_weight_gradient")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["skewed", "deepseek_v3"])
def test_tokens_are_sent_to_the_devices_of_their_experts_and_back(pool: Pool, name: str) -> None:
    """All-to-alls by true counts: one for how many, one for which, one for the rows, and one back for their gradients."""
    model = MODELS[name]
    plan = sharded_plan(model, {"expert": 4}, by_experts(model, (4,), axes=(0,), asks=True), microbatches=1)
    words = [words for words in plan.stages[0].sharding.ops.values() if words == ("exchanged",)]
    counts = pool.run(plan, model)["counts"]
    assert counts["F"]["all_to_all"] == 3 * len(words)
    assert counts["B"]["all_to_all"] == len(words)
    assert_equals_one(pool, plan, model, damage="lost all_to_all 3")


FAST = {
    "format": "weft.cluster", "version": 1,
    "devices": [{"name": f"d{index}", "kind": "slow", "flops": {"float64": 1e9}, "memory": "64GiB",
                 "memory_bandwidth": "1GB/s"} for index in range(4)],
    "links": [{"from": f"d{first}", "to": f"d{last}", "bandwidth": "1TB/s", "latency": "0s"}
              for last in range(4) for first in range(last)]}
"""Slow devices on fast links: all is divided that can be."""


@pytest.mark.timeout(120)
def test_devices_with_samples_of_their_own_that_a_search_gives_experts(pool: Pool) -> None:
    """What data and expert parallelism are together: tokens go to their experts by all-to-alls, and come back so."""
    model = "mixtral-8x:layers=2,hidden=32,heads=4,kv_heads=4,ffn=48,vocab=96,seq=8"
    source = resolve_model(model, dtype="float64", batch=4)
    assert isinstance(source, ModelSource)
    plan = search_plan(trace_folded(source), parse_cluster(FAST, where="fast"), shape=(4,),
                       optimizer=Optimizer(kind="none"))
    words = {name.rpartition(".experts.")[2]: word for name, (word,) in plan.stages[0].sharding.ops.items()}
    assert (words["grouped_mm_fallback"], words["index"], words["index_2"]) == ("experts", "exchanged", "exchanged")
    counts = pool.run(plan, model)["counts"]
    last = sum(counts[phase]["all_to_all"] for phase in "FB")
    assert_equals_one(pool, plan, model, damage=f"lost all_to_all {last}")


def two_stages(model: str) -> Plan:
    """Return a pipeline of two stages, each with its experts divided over two devices."""
    graph = traced(model).graph
    parts = cut(graph, 2)
    stages = [Stage(name=f"s{index}", ops=tuple(part),
                    replicas=(Replica(devices=(f"d{2 * index}", f"d{2 * index + 1}"), mesh={"expert": 2}),),
                    sharding=by_experts(model, (2,), axes=(0,), ops=frozenset(part))) for index, part in enumerate(parts)]
    tokens = to_tokens(greedy_order([0, 1], 2), ("s0", "s1"))
    order = {f"d{2 * stage + place}": tokens[stage] for stage in (0, 1) for place in (0, 1)}
    return make_plan(graph, stages, order, microbatches=2, batch=4, num_devices=4)


@pytest.mark.timeout(120)
def test_experts_inside_a_pipeline(pool: Pool) -> None:
    assert_equals_one(pool, two_stages(MODELS["mixtral"]), MODELS["mixtral"], damage="lost_weight_gradient")


@pytest.mark.timeout(240)
def test_a_plan_that_divides_experts_as_asked_is_run_within_its_account(pool: Pool) -> None:
    model = "mixtral-8x:layers=2,hidden=128,heads=4,kv_heads=2,ffn=512,vocab=256,seq=32"
    options = PlanOptions(batch=4, microbatches=2, dtype="float64", degrees=Degrees(ep=4, tp=4))
    plan = search_plans(model, read_cluster("4 x H200"), options, SearchOptions()).comparison.best.plan
    assert plan is not None
    assert {words for name, words in plan.stages[0].sharding.ops.items() if "grouped" in name} == {("experts",)}
    found = pool.run(plan, model, memory=True)
    assert found["verification"]["passed"]
    for account, measured in found["memory"]:
        assert measured == pytest.approx(account, rel=0.1)  # rows fall where they do, the account's fall evenly


def test_degrees_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="does not fit axes of sizes"):
        by_experts(MODELS["mixtral"], (3,), axes=(0,))
