"""How long exchanges take, and what they are made of: by each method, with ``n`` devices and ``b`` bytes.

The simulator asks for the exchange of a program's bucket (``exchange_figure``), accounts of traffic for the transfers
that it consists of (``exchange_transfers``), searchers for groups of devices without a program (``exchange_together``,
``collective_line``, ``reduce_seconds``): nothing else asks ``Costs`` how long a collective takes.

- ``all_reduce``: the collective of that name.
- ``hierarchical``: the slowest group's sum at its first device, the all-reduce among the first devices, the slowest
  group's broadcast. A sum at one device takes as long as an all-reduce: backends scatter the sums and collect them.
- ``parameter_server``: all send to the server at once, then it sends to all at once. Each way takes ``b`` over the rate
  of the slowest route, or the time in which what several transfers share (the server's link, or its port) has carried
  ``(n - 1) b``.
- ``all_gather`` and ``reduce_scatter`` of a unit: the collectives of these names; ``sum_pieces``: an all-reduce.
- ``sufficient_factors``: an all-gather of as many bytes as if all had the largest block, and an all-reduce of
  parameters that something else reads too. Then each device forms the products of all rows, which takes as long as the
  weight gradients of these operators for the whole batch. It does so where it waits for the exchange: that is part of
  its optimizer step, or of the exchange if there is none. Backwards no longer take that time for their part.

With rows R in total, weights of I x O and equal links the first takes ``2 (n-1)/n I O / B``, the last ``(n-1)/n R (I +
O) / B`` and the products: without these and latencies they are equal at ``R = 2 I O / (I + O)``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.cluster.cluster import Contention, DeviceId
from weft.cost.collectives import Algorithm, Collective, CollectiveModel, Line
from weft.cost.costs import Costs
from weft.cost.figure import ZERO, Figure, combine
from weft.model.graph import I64
from weft.plan.factors import block_size, bucket_rows, num_rows
from weft.plan.holders import in_pieces, parameter_copies, parameter_parts
from weft.plan.program import Bucket, Phase, Program

MAX_EXCHANGE: Final = 64
"""The cost of an exchange of more devices is taken from so many of them, with the steps that a ring of all has."""
TYPICAL_BYTES: Final = 1e8

@dataclass(frozen=True, slots=True)
class Step:
    """What groups of devices do at once: a collective in each, or transfers from the first to the second of each."""

    kind: Collective
    num_bytes: float
    groups: tuple[tuple[DeviceId, ...], ...]


def exchange_steps(program: Program, devices: Sequence[DeviceId], bucket: Bucket) -> tuple[Step, ...]:
    """Return what a bucket's exchange consists of, one step after the other; ``devices`` are the ranks'."""
    size, members = bucket.num_bytes, tuple(devices[rank] for rank in bucket.ranks)
    match bucket.method:
        case "all_reduce" | "sum_pieces":
            return (Step(Collective.ALL_REDUCE, size, (members,)),)
        case "all_gather":
            return (Step(Collective.ALL_GATHER, size, (members,)),)
        case "reduce_scatter":
            return (Step(Collective.REDUCE_SCATTER, size, (members,)),)
        case "hierarchical":
            groups = tuple(tuple(devices[rank] for rank in group) for group in bucket.groups)
            return (Step(Collective.ALL_REDUCE, size, groups),
                    Step(Collective.ALL_REDUCE, size, (tuple(group[0] for group in groups),)),
                    Step(Collective.BROADCAST, size, groups))
        case "parameter_server":
            assert bucket.server is not None, "the plan was checked"
            server = devices[bucket.server]
            others = [device for device in members if device != server]
            return (Step(Collective.P2P, size, tuple((other, server) for other in others)),
                    Step(Collective.P2P, size, tuple((server, other) for other in others)))
        case "sufficient_factors":
            graph, factors = program.graph, bucket.factors
            weight = factors.uses[0].weight
            width = int(graph.tensor_bytes[weight]) / math.prod(graph.tensor_shapes[weight])
            largest = max(block_size(graph, factors, counts) for counts in bucket_rows(program, bucket).values())
            gather = Step(Collective.ALL_GATHER, len(members) * largest * width, (members,))
            shared = float(graph.tensor_bytes[list(factors.shared)].sum())
            return (gather, Step(Collective.ALL_REDUCE, shared, (members,))) if factors.shared else (gather,)


def exchange_figure(program: Program, costs: Costs, devices: Sequence[DeviceId], bucket: Bucket) -> Figure:
    """Return the time of the bucket's exchange from when all members have issued it; ``devices`` are the ranks'."""
    figures = [_step_figure(costs, step) for step in exchange_steps(program, devices, bucket)]
    if bucket.method == "sufficient_factors" and program.plan.optimizer.kind == "none":
        members = dict.fromkeys(devices[rank] for rank in bucket.ranks)
        figures.append(_slowest(_products_figure(program, costs, device, bucket) for device in members))
    return combine(figures)


def exchange_transfers(program: Program, costs: Costs, devices: Sequence[DeviceId],
                       bucket: Bucket) -> Iterator[tuple[DeviceId, DeviceId, float]]:
    """Yield (sender, receiver, bytes) of all that is sent in a bucket's exchange, by each collective's algorithm."""
    model = CollectiveModel(costs.cluster)
    for step in exchange_steps(program, devices, bucket):
        for group in step.groups:
            if step.kind is Collective.P2P:
                yield group[0], group[1], step.num_bytes
            elif len(group) > 1:
                algorithm = Algorithm(costs.collective(step.kind, step.num_bytes, group).algorithm)
                for entry in model.rounds(step.kind, algorithm, group):
                    for sender, receiver in entry.pairs:
                        yield group[sender], group[receiver], entry.share * step.num_bytes


def exchange_resources(program: Program, costs: Costs, devices: Sequence[DeviceId], bucket: Bucket) -> tuple[int, ...]:
    """Return the cluster's resources on which the bucket's exchange and others hold each other up.

    They are those that are busy most of the time of what it does between hosts or with its server.
    """
    steps = exchange_steps(program, devices, bucket)
    if bucket.method == "parameter_server":
        counts = Counter(resource for step in steps for source, target in step.groups
                         for resource in costs.cluster.transfer_resources(source, target))
        return tuple(sorted(item for item, count in counts.items() if count == max(counts.values())))
    step = steps[1] if bucket.method == "hierarchical" else steps[0]
    return exchange_limits(costs, bucket.num_bytes, step.groups[0], step.kind)


# ---- without a program, for searches --------------------------------------------------------------------------------


def reduce_seconds(costs: Costs, num_bytes: float, devices: Sequence[int]) -> float:
    """Return the time of an all-reduce of gradients."""
    return costs.collective(Collective.ALL_REDUCE, num_bytes, devices).seconds


def exchange_limits(costs: Costs, num_bytes: float, devices: Sequence[int],
           kind: Collective = Collective.ALL_REDUCE) -> tuple[int, ...]:
    """Return the cluster's resources on which such an exchange and others hold each other up."""
    return costs.collective_limits(kind, num_bytes, devices)


def exchange_together(costs: Costs, num_bytes: float, groups: Sequence[Sequence[int]],
             kind: Collective = Collective.ALL_REDUCE) -> tuple[float, tuple[int, ...]]:
    """Return the time in which groups do the same, each on so many bytes, and the resources that limit them.

    Groups that need the same link for most of the time come one after the other.
    """
    meet = Counter(resource for group in groups for resource in exchange_limits(costs, num_bytes, group, kind))
    seconds = max(costs.collective(kind, num_bytes, group).seconds for group in groups)
    return seconds * max(meet.values(), default=1), tuple(sorted(meet))


def collective_line(costs: Costs, kind: Collective, num_bytes: float, devices: Sequence[int]) -> Line:
    """Return the collective's time as a line: that of the algorithm which is best for ``num_bytes``, or of a fit."""
    size = max(num_bytes, 1)
    cost = costs.collective(kind, size, devices)
    return Line(cost.latency_s, cost.bandwidth_s / size)


def reduce_line(costs: Costs, num_bytes: float, devices: Sequence[int]) -> Line:
    """Return an all-reduce's time as the line through those of nothing and of ``num_bytes``, of which each is best."""
    small, large = (reduce_seconds(costs, size, devices) for size in (0.0, num_bytes))
    return Line(small, (large - small) / num_bytes)


def large_reduce_line(costs: Costs, devices: Sequence[int]) -> Line:
    """Return an all-reduce's time as a line; of many devices it is taken from some, with the steps of a ring of all."""
    some = devices[:MAX_EXCHANGE]
    line = collective_line(costs, Collective.ALL_REDUCE, TYPICAL_BYTES, some)
    more = (len(devices) - 1) / (len(some) - 1)
    return Line(line.latency_s * more, line.s_per_byte * more * len(some) / len(devices))


# ---- steps ----------------------------------------------------------------------------------------------------------


def _step_figure(costs: Costs, step: Step) -> Figure:
    if step.kind is Collective.P2P:
        return _transfers_figure(costs, step.num_bytes, step.groups)
    return _slowest(_collective(costs, step.kind, step.num_bytes, group) for group in step.groups)


def _collective(costs: Costs, kind: Collective, num_bytes: float, devices: Sequence[DeviceId]) -> Figure:
    if len(devices) < 2:
        return ZERO
    cost = costs.collective(kind, num_bytes, devices)
    return Figure(cost.seconds, cost.source)


def _slowest(figures: Iterable[Figure]) -> Figure:
    return max(figures, key=lambda figure: figure.seconds)


def _transfers_figure(costs: Costs, num_bytes: float, pairs: Sequence[Sequence[DeviceId]]) -> Figure:
    """Return the time until transfers that start together are done, each of so many bytes."""
    cluster = costs.cluster
    alone = [costs.collective(Collective.P2P, num_bytes, pair) for pair in pairs]
    load: defaultdict[int, float] = defaultdict(float)
    for pair, cost in zip(pairs, alone, strict=True):
        if cluster.contention is Contention.LINK and cluster.links:
            route = cluster.route(*pair)
            rates = {cluster.link_resources[link]: cluster.links[link].bytes_per_s for link in route.links}
            for resource, bytes_per_s in rates.items():
                load[resource] += cost.bandwidth_s * route.bytes_per_s / bytes_per_s
        else:
            for resource in cluster.transfer_resources(*pair):
                load[resource] += cost.bandwidth_s
    whole = max(cost.latency_s for cost in alone) + max(load.values(), default=0.0)
    source = combine(Figure(cost.seconds, cost.source) for cost in alone).source
    return Figure(max(whole, *(cost.seconds for cost in alone)), source)


def share_figure(program: Program, costs: Costs, devices: Sequence[DeviceId], rank: int) -> Figure:
    """Return the time in which ranks that divide the optimizer's states bring each other what they have changed."""
    gathered = combine(_collective(costs, Collective.ALL_GATHER, unit.num_bytes, [devices[item] for item in unit.ranks])
                       for unit in program.units if rank in unit.ranks and unit.reduce >= 0 and unit.gather < 0)
    if not program.plan.optimizer.sharded:
        return gathered
    name, graph = program.rank_names[rank], program.graph
    rank_of = {device: index for index, device in enumerate(program.rank_names)}
    parts, others = parameter_parts(program.plan, graph), in_pieces(program.plan, graph)
    total: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for tensor, copies in parameter_copies(program.plan, graph).items():
        for item in copies:
            if name in item.devices and len(item.devices) > 1 and tensor not in others:
                total[item.devices] += parts[tensor][name] * float(graph.tensor_bytes[tensor])
    return combine([gathered, *(_collective(costs, Collective.ALL_GATHER, num_bytes,
                                            [devices[rank_of[item]] for item in group])
                                for group, num_bytes in total.items())])


def products_figure(program: Program, costs: Costs, device: DeviceId, rank: int) -> Figure:
    """Return the time that a rank's products of gathered factors take, before its optimizer step."""
    return combine(_products_figure(program, costs, device, bucket) for bucket in program.buckets
                   if bucket.factors.uses and rank in bucket.ranks)


def _products_figure(program: Program, costs: Costs, device: DeviceId, bucket: Bucket) -> Figure:
    """Return the time to multiply all rows on a device: weight gradients, for that share of the traced batch.

    They are formed once for all micro-batches, so that nothing is added up.
    """
    graph, rows = program.graph, bucket_rows(program, bucket)
    by_fraction: defaultdict[float, list[int]] = defaultdict(list)
    for use, counts in zip(bucket.factors.uses, zip(*rows.values(), strict=True), strict=True):
        by_fraction[sum(counts) / num_rows(graph, use.op, graph.batch)].append(use.op)
    return combine(costs.product_figure(np.asarray(ops, dtype=np.int64), device, fraction)
                   for fraction, ops in by_fraction.items())


def without_products(program: Program, costs: Costs, devices: Sequence[DeviceId], instance: int, phase: int,
                     figure: Figure) -> Figure:
    """Return the time of a compute less that of the weight gradients which an exchange of factors forms."""
    if phase not in (Phase.B, Phase.W) or not any(bucket.factors.uses for bucket in program.buckets):
        return figure
    item = program.instances[instance]
    ops = factored_ops(program, item.stage, item.ranks)
    saved = costs.stage_figure(ops, devices[item.ranks[0]], "W", item.num_samples / program.graph.batch)
    return Figure(max(0.0, figure.seconds - saved.seconds), figure.source)


def factored_ops(program: Program, stage: int, ranks: Sequence[int]) -> I64:
    """Return the operators of a stage whose weight gradients an exchange of factors forms."""
    chosen = [use.op for bucket in program.buckets if not set(ranks).isdisjoint(bucket.ranks)
              for use in bucket.factors.uses]
    return np.intersect1d(np.asarray(chosen, dtype=np.int64), program.stage_ops[stage])
