"""The memory account of stages on several devices against what the allocator of a rank sees, with pretended others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.bench_shard_run import slow_cluster
from benchmarks.mps_measure import model_spec
from tests.run.pretended import measured, prepared
from weft.cluster.cluster_file import parse_cluster
from weft.model.folded import trace_folded
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.plan import Optimizer, Plan, Sharding
from weft.run.prepare import Tracer
from weft.search.shard.compare import search_plan

BATCH = 4
GPT, T5, ZOO = model_spec("small_gpt"), model_spec("small_t5"), "gpt2-tiny:seq=64"


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
