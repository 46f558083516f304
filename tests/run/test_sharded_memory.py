"""The memory account of stages on several devices against what the allocator of a rank sees, with pretended others."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_shard_run import slow_cluster
from benchmarks.mps_measure import model_spec
from tests.run.pretended import measured, prepared
from weft.cluster.cluster import DeviceId
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.plan import Optimizer, Plan, Sharding
from weft.run.prepare import Tracer
from weft.search.common.problem import PlanOptions, Problem, StageSpec, one_stage
from weft.search.shard import op_choices
from weft.search.shard.compare import search_plan

BATCH = 4
GPT, T5, ZOO = model_spec("small_gpt"), model_spec("small_t5"), "gpt2-tiny:seq=64"
LLAMA, GPT_LONG = "llama-tiny:layers=2,seq=256", "gpt2-tiny:layers=2,seq=256"


@cache
def tracer_of(model: str) -> Tracer:
    return Tracer(resolve_model(model, mode="training", batch=BATCH).with_dtype("float32"))


@cache
def plan_of(model: str, num_devices: int, name: str | None) -> Plan:
    folded = trace_folded(resolve_model(model, mode="training", batch=BATCH), batch=BATCH)
    return search_plan(folded, parse_cluster(slow_cluster(num_devices)), shape=(num_devices,), name=name,
                       optimizer=Optimizer(kind="sgd"))


def accounted(model: str, plan: Plan) -> int:
    graph = trace(resolve_model(model, mode="training", batch=BATCH), batch=BATCH, batch_dims=True).graph
    return account_memory(lower(plan, graph)).peak_bytes(0)


@pytest.mark.parametrize(("model", "num_devices", "name"), [
    (GPT, 2, "megatron"), (GPT, 4, "megatron"), (GPT, 4, None), (T5, 2, None), (T5, 4, "megatron"), (ZOO, 2, "megatron")])
def test_the_account_of_split_operators_is_what_a_rank_takes(model: str, num_devices: int, name: str | None) -> None:
    plan = plan_of(model, num_devices, name)
    assert accounted(model, plan) == pytest.approx(measured(tracer_of(model), plan), rel=0.05)


def test_without_the_words_about_activations_the_account_would_be_far_off() -> None:
    """A control: what the test above compares depends on what the plan says about activations."""
    plan = plan_of(GPT, 4, None)
    (stage,) = plan.stages
    graph = tracer_of(GPT).trace(BATCH).graph
    known = {graph.tensor_names[tensor] for tensor in graph.parameters}
    parameters = {tensor: words for tensor, words in stage.sharding.tensors.items() if tensor in known}
    other = replace(plan, stages=(replace(stage, sharding=Sharding(ops=stage.sharding.ops, tensors=parameters)),))
    assert abs(accounted(GPT, other) / accounted(GPT, plan) - 1) > 0.1


def test_words_about_what_one_operator_reads_change_nothing_for_the_runtime() -> None:
    plan = plan_of(T5, 4, "megatron")
    (stage,) = plan.stages
    graph = tracer_of(T5).trace(BATCH).graph
    readers = {graph.tensor_names[tensor]: (graph.inputs == tensor).sum() for tensor in range(graph.num_tensors)
               if graph.tensor_producer[tensor] >= 0}
    left = {tensor: words for tensor, words in stage.sharding.tensors.items() if readers.get(tensor, 2) > 1}
    assert len(left) < len(stage.sharding.tensors) - 20
    other = replace(plan, stages=(replace(stage, sharding=Sharding(ops=stage.sharding.ops, tensors=left)),))
    first, second = (prepared(tracer_of(T5), item)[0].stages[0].module.module.graph for item in (plan, other))
    assert [(node.op, node.name) for node in first.nodes] == [(node.op, node.name) for node in second.nodes]


@pytest.mark.parametrize(("model", "shape", "passing"), [
    (LLAMA, (2,), "gather"), (LLAMA, (4,), "ring"), (LLAMA, (2, 2), "ring"), (GPT_LONG, (2,), "gather"),
    (GPT_LONG, (4,), "ring")])
def test_the_account_of_a_split_sequence_is_what_a_rank_takes(
        model: str, shape: tuple[int, ...], passing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = op_choices._context_ways

    def chosen(*args: Any) -> list[Any]:
        found = ways(*args)
        is_round = [way for way in found if way[2][0].endswith("@ring")]
        return is_round if is_round and passing == "ring" else [way for way in found if way not in is_round]

    monkeypatch.setattr(op_choices, "_context_ways", chosen)
    plan = context_plan(model, shape)
    words = {words[0] for name, words in plan.stages[0].sharding.ops.items() if name.endswith("attention")}
    assert words == {"rows/2z@ring" if passing == "ring" else "rows/2z"}
    graph = trace(resolve_model(model, mode="training", batch=1), batch=1, batch_dims=True).graph
    held = account_memory(lower(plan, graph)).peak_bytes(0)
    tracer = Tracer(resolve_model(model, mode="training", batch=1).with_dtype("float32"))
    found = measured(tracer, plan)
    assert held == pytest.approx(found, rel=0.05)
    whole = sharded_whole(model)
    assert held < (0.75 if math.prod(shape) == 2 else 0.6) * whole, "a control: devices hold parts"


def context_plan(model: str, shape: tuple[int, ...]) -> Plan:
    folded = trace_folded(resolve_model(model, mode="training", batch=1), batch=1)
    return search_plan(folded, parse_cluster(slow_cluster(math.prod(shape))), shape=shape, has_context=True,
                       optimizer=Optimizer(kind="sgd"))


@cache
def sharded_whole(model: str) -> int:
    """Return what one device alone holds."""
    graph = trace(resolve_model(model, mode="training", batch=1), batch=1, batch_dims=True).graph
    problem = Problem(graph=graph, cluster=parse_cluster(slow_cluster(2)), costs=estimate_costs(
        graph, parse_cluster(slow_cluster(2))), options=PlanOptions(batch=1, optimizer=Optimizer(kind="sgd")))
    spec = StageSpec(ops=np.arange(graph.num_ops), replicas=(((DeviceId(0),), 1.0),))
    return account_memory(lower(one_stage(problem, spec, 1, by="test"), graph)).peak_bytes(0)
