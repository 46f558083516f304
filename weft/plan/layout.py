"""Who runs what, and what crosses between them: the instances, channels and buckets that a plan means.

For every pair of stages in which one reads what the other writes, each pair of replicas with samples in common gets a
channel from the producer's rank to the consumer's, or nothing where both are on one rank. Tensors that several stages
on one rank read are sent there once. In training, gradients go the opposite way, one channel for each consumer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import I64, NO_BATCH_DIM, Bool, Graph
from weft.plan.factors import NO_FACTORS, Factors, find_factors, share_inputs
from weft.plan.holders import parameter_parts
from weft.plan.plan import Plan, split_samples
from weft.plan.program import Bucket, Channel, Instance, UnitMethod
from weft.plan.structure import stage_microbatches
from weft.plan.units import Unit, find_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tables of a program, without its instructions."""

    stage_ops: tuple[I64, ...]
    instances: tuple[Instance, ...]
    channels: tuple[Channel, ...]
    buckets: tuple[Bucket, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class _Flow:
    """One tensor that one instance needs from another, for some samples and micro-batches."""

    producer: int
    consumer: int
    tensor: int
    samples: tuple[int, int]
    whole: bool
    microbatches: tuple[int, ...]


def build_layout(plan: Plan, graph: Graph) -> Layout:
    """Return the instances, channels and gradient buckets of a plan whose structure has been checked."""
    stage_ops = tuple(np.sort(np.asarray([graph.op_index[op] for op in stage.ops], dtype=np.int64))
                      for stage in plan.stages)
    instances = _build_instances(plan)
    flows = list(_find_flows(plan, graph, stage_ops, instances))
    training = plan.model.mode == "training"
    needs_gradient = graph.needs_gradient if training else np.zeros(graph.num_tensors, dtype=bool)
    channels = [*_channels(graph, instances, flows, "activation")]
    if training:
        channels += _channels(graph, instances, [flow for flow in flows if needs_gradient[flow.tensor]], "gradient")
    buckets = list(_build_buckets(plan, graph))
    units = _add_unit_buckets(plan, graph, buckets)
    return Layout(stage_ops=stage_ops, instances=_link_instances(instances, flows, channels, needs_gradient),
                  channels=tuple(channels), buckets=tuple(buckets), units=units)


def _build_instances(plan: Plan) -> list[Instance]:
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    instances = []
    for index, stage in enumerate(plan.stages):
        counts = split_samples(plan.microbatch_size, tuple(item.share for item in stage.replicas))
        first = 0
        for number, (item, count) in enumerate(zip(stage.replicas, counts, strict=True)):
            instances.append(Instance(
                stage=index, replica=number, ranks=tuple(rank_of[device] for device in item.devices),
                samples=(first, first + count), microbatches=stage_microbatches(plan, stage)))
            first += count
    return instances


def stage_inputs(graph: Graph, ops: I64) -> I64:
    """Return the tensors that a stage reads from other stages; constants are computed by each stage itself."""
    inside = np.zeros(graph.num_ops, dtype=bool)
    inside[ops] = True
    read = np.unique(np.concatenate([graph.op_inputs(int(op)) for op in ops])) if len(ops) else ops
    producer = graph.tensor_producer[read]
    outside = (producer >= 0) & ~inside[producer] & ~graph.is_constant[producer]
    return read[outside]


def _find_flows(plan: Plan, graph: Graph, stage_ops: tuple[I64, ...], instances: list[Instance]) -> Iterator[_Flow]:
    stages_of_op: dict[int, list[int]] = {}
    for index, ops in enumerate(stage_ops):
        for op in ops.tolist():
            stages_of_op.setdefault(op, []).append(index)
    by_stage: dict[int, list[int]] = {}
    for index, instance in enumerate(instances):
        by_stage.setdefault(instance.stage, []).append(index)
    for consumer_stage, ops in enumerate(stage_ops):
        for tensor in stage_inputs(graph, ops).tolist():
            for producer_stage in stages_of_op[int(graph.tensor_producer[tensor])]:
                for consumer in by_stage[consumer_stage]:
                    yield from _pair_flows(graph, instances, by_stage[producer_stage], consumer, tensor)


def _pair_flows(graph: Graph, instances: list[Instance], producers: list[int], consumer: int,
                tensor: int) -> Iterator[_Flow]:
    target = instances[consumer]
    source = instances[producers[0]]
    handled = set(source.microbatches)
    microbatches = tuple(item for item in target.microbatches if item in handled)
    if not microbatches:
        return
    for producer in producers:
        source = instances[producer]
        if source.samples == target.samples:
            yield _Flow(producer, consumer, tensor, target.samples, True, microbatches)
            return
    if graph.tensor_batch_dim[tensor] == NO_BATCH_DIM:
        if _mixes_samples(graph, tensor):
            raise _unequal_shares(graph, tensor, "it mixes the samples of a batch, so each replica has another value")
        owner = next(item for item in producers
                     if instances[item].samples[0] <= target.samples[0] < instances[item].samples[1])
        yield _Flow(owner, consumer, tensor, instances[owner].samples, True, microbatches)
        return
    if graph.tensor_batch_dim[tensor] != 0:
        raise _unequal_shares(graph, tensor, "its first dimension is not known to be the batch "
                              "(trace the model with batch dimensions to find out)")
    for producer in producers:
        source = instances[producer]
        low, high = max(source.samples[0], target.samples[0]), min(source.samples[1], target.samples[1])
        if low < high:
            yield _Flow(producer, consumer, tensor, (low, high), False, microbatches)


def _unequal_shares(graph: Graph, tensor: int, reason: str) -> PlanError:
    return PlanError(f"tensor {graph.tensor_names[tensor]!r} goes between stages whose replicas divide the samples "
                     f"differently, but {reason}. Give both stages the same replica shares")


def _mixes_samples(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor without a batch dimension is computed from some that have one (a mean, a loss)."""
    seen, stack = {tensor}, [tensor]
    while stack:
        producer = int(graph.tensor_producer[stack.pop()])
        for source in graph.op_inputs(producer).tolist() if producer >= 0 else ():
            if graph.tensor_batch_dim[source] != NO_BATCH_DIM:
                return True
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def bytes_of(graph: Graph, tensors: Iterable[int], num_samples: int) -> int:
    """Return the bytes of tensors for so many samples."""
    sizes = ((int(graph.tensor_bytes[tensor]), graph.tensor_batch_dim[tensor] != NO_BATCH_DIM) for tensor in tensors)
    return sum(size * num_samples // graph.batch if is_batched else size for size, is_batched in sizes)


def _channels(graph: Graph, instances: list[Instance], flows: list[_Flow],
              kind: Literal["activation", "gradient"]) -> Iterator[Channel]:
    """Yield the channels of the flows, or of the gradients that go the opposite way.

    Activations that several consumers on a rank read go there once; gradients go to each producer by itself.
    """
    is_forward = kind == "activation"
    needed: dict[tuple[int, int | None, int, int, tuple[int, int], bool, tuple[int, ...]], dict[int, set[int]]] = {}
    for flow in flows:
        start, end = (flow.producer, flow.consumer) if is_forward else (flow.consumer, flow.producer)
        source_ranks = instances[start].ranks
        for position, target in enumerate(instances[end].ranks):
            if target not in source_ranks:
                source = source_ranks[position % len(source_ranks)]
                key = (start, None if is_forward else end, source, target, flow.samples, flow.whole, flow.microbatches)
                needed.setdefault(key, {}).setdefault(flow.tensor, set()).add(end)
    for (start, _, source, target, samples, whole, microbatches), ends_of in needed.items():
        grouped: dict[tuple[int, ...], list[int]] = {}
        for tensor, ends in ends_of.items():
            grouped.setdefault(tuple(sorted(ends)), []).append(tensor)
        for consumers, members in grouped.items():
            tensors = tuple(sorted(members))
            yield Channel(kind=kind, producer=start, consumers=consumers, source=source, target=target, tensors=tensors,
                          samples=samples, whole=whole, microbatches=microbatches,
                          num_bytes=bytes_of(graph, tensors, samples[1] - samples[0]))


def _link_instances(instances: list[Instance], flows: list[_Flow], channels: list[Channel],
                    needs_gradient: Bool) -> tuple[Instance, ...]:
    forward: list[list[int]] = [[] for _ in instances]
    gradient: list[list[int]] = [[] for _ in instances]
    for index, channel in enumerate(channels):
        for consumer in channel.consumers:
            (forward if channel.kind == "activation" else gradient)[consumer].append(index)
    producers: list[set[int]] = [set() for _ in instances]
    consumers: list[set[int]] = [set() for _ in instances]
    for flow in flows:
        producers[flow.consumer].add(flow.producer)
        if needs_gradient[flow.tensor]:
            consumers[flow.producer].add(flow.consumer)
    return tuple(
        replace(instance, forward_channels=tuple(forward[index]), gradient_channels=tuple(gradient[index]),
                producers=tuple(sorted(producers[index])), consumers=tuple(sorted(consumers[index])))
        for index, instance in enumerate(instances))


def _build_buckets(plan: Plan, graph: Graph) -> tuple[Bucket, ...]:
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    parts = parameter_parts(plan, graph) if any(stage.sharding for stage in plan.stages) else {}
    buckets = []
    for exchange in plan.gradients:
        if len(exchange.devices) < 2:
            continue
        tensors = tuple(graph.tensor_index[name] for name in exchange.parameters)
        held = [parts[tensor][exchange.devices[0]] if parts else 1 for tensor in tensors]
        buckets.append(Bucket(
            parameters=tensors, method=exchange.method, ranks=tuple(sorted(rank_of[name] for name in exchange.devices)),
            num_bytes=math.ceil((graph.tensor_bytes[list(tensors)] * held).sum()),
            groups=tuple(tuple(rank_of[name] for name in group) for group in exchange.groups),
            server=None if exchange.server is None else rank_of[exchange.server],
            factors=_find_factors(plan, graph, tensors) if exchange.method == "sufficient_factors" else NO_FACTORS))
    return tuple(buckets)


def _add_unit_buckets(plan: Plan, graph: Graph, buckets: list[Bucket]) -> tuple[Unit, ...]:
    """Add the buckets of the plan's units, and return the units with these."""
    units: list[Unit] = []
    shared: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def add(unit: Unit, method: UnitMethod, ranks: tuple[int, ...], num_bytes: int) -> int:
        buckets.append(Bucket(parameters=unit.parameters, method=method, ranks=ranks, num_bytes=num_bytes,
                              units=(len(units),)))
        return len(buckets) - 1

    for unit in find_units(plan, graph):
        gather = reduce = -1
        sums: list[int] = []
        if unit.storage.pieces == "parameters":
            gather = add(unit, "all_gather", unit.ranks, unit.num_bytes)
        if unit.is_trained and plan.model.mode == "training":
            reduce = add(unit, "reduce_scatter", unit.ranks, unit.num_bytes)
            for rank, ranks in zip(unit.ranks, unit.across, strict=True):
                key = unit.parameters, ranks
                if len(ranks) > 1 and key not in shared:
                    shared[key] = add(unit, "sum_pieces", ranks, unit.piece_bytes(rank))
                elif len(ranks) > 1:
                    known = buckets[shared[key]]
                    buckets[shared[key]] = replace(known, units=(*known.units, len(units)))
                sums += [shared[key]] if len(ranks) > 1 else []
        units.append(replace(unit, gather=gather, reduce=reduce, sums=tuple(sums)))
    return tuple(units)


def _find_factors(plan: Plan, graph: Graph, parameters: tuple[int, ...]) -> Factors:
    stages = [{graph.op_index[op] for op in stage.ops} for stage in plan.stages]
    return share_inputs(find_factors(graph, parameters), stages)
