"""The memory account of stages on several devices against what the allocator of a rank sees, with pretended others.

One rank runs a step alone: its collectives return tensors of the right shapes, made as the transport makes them, since
the values do not matter here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_shard_run import slow_cluster
from benchmarks.mps_measure import model_spec
from weft.cluster.cluster_file import parse_cluster
from weft.model.folded import trace_folded
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.plan import Optimizer, Plan, Sharding
from weft.run.executor import Executor
from weft.run.prepare import Prepared, Tracer, lower_to_run, prepare_rank
from weft.run.status import StatusLine
from weft.search.shard.plan_search import search_plan

BATCH = 4
GPT, T5, ZOO = model_spec("small_gpt"), model_spec("small_t5"), "gpt2-tiny:seq=64"


class _Done:
    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


class PretendedTransport:
    """What a rank needs of a transport, without other ranks."""

    synchronize = None
    copies_to_host = False

    def __init__(self, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.device = 0, num_ranks, torch.device("cpu")

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> _Done:
        return _Done()

    def lane_group(self, ranks: tuple[int, ...]) -> None:
        return None

    def reduced(self, tensor: Tensor, ranks: tuple[int, ...], how: str = "sum") -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def gathered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        result = tensor.new_empty((len(ranks), *tensor.shape))
        result[:] = tensor
        return result

    def sum_scattered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return tensor[0].clone()

    def all_to_all(self, flat: Tensor, ranks: tuple[int, ...], *, sent: list[int], received: list[int]) -> Tensor:
        return flat.new_zeros(sum(received))


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


def prepared(model: str, plan: Plan) -> tuple[Prepared, Executor]:
    """Return what the first rank executes, with the model's inputs."""
    tracer, transport = tracer_of(model), PretendedTransport(len(plan.cluster.devices))
    program = lower_to_run(plan, tracer)
    ready = prepare_rank(program, tracer, transport, seed=0)
    executor = Executor(program, stages=ready.stages, parameters=ready.parameters, transport=transport,
                        status=StatusLine(None, 0), factors=ready.factors)
    inputs = tracer.source.inputs(plan.model.batch, 0)
    executor.load(dict(zip(ready.input_names, inputs, strict=True)))
    return ready, executor


def measured(model: str, plan: Plan) -> int:
    """Return the most that the first rank holds in its second step."""
    ready, executor = prepared(model, plan)
    executor.step()
    ready.parameters.clear_gradients()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.step()
    held = sum(item.numel() * item.element_size() for item in ready.parameters.tensors.values())
    held += sum(flat.numel() * flat.element_size() for flats in ready.parameters.flat for flat in flats)
    return held + _peak(profile)


def _peak(profile: Any) -> int:
    events = [(item.start_ns(), item.nbytes()) for item in profile.profiler.kineto_results.events()
              if item.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(events, key=lambda item: item[0]):
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(("model", "num_devices", "name"), [
    (GPT, 2, "megatron"), (GPT, 4, "megatron"), (GPT, 4, None), (T5, 2, None), (T5, 4, "megatron"), (ZOO, 2, "megatron")])
def test_the_account_of_split_operators_is_what_a_rank_takes(model: str, num_devices: int, name: str | None) -> None:
    plan = plan_of(model, num_devices, name)
    assert accounted(model, plan) == pytest.approx(measured(model, plan), rel=0.05)


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
    first, second = (prepared(T5, item)[0].stages[0].module.module.graph for item in (plan, other))
    assert [(node.op, node.name) for node in first.nodes] == [(node.op, node.name) for node in second.nodes]
