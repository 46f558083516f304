"""How long the exchange of a bucket of gradients takes, by each method, with ``n`` devices and ``b`` bytes.

- ``all_reduce``: the collective of that name.
- ``hierarchical``: the slowest group's sum at its first device, the all-reduce among the first devices, the slowest
  group's broadcast. A sum at one device takes as long as an all-reduce: backends scatter the sums and collect them.
- ``parameter_server``: all send to the server at once, then it sends to all at once. Each way takes ``b`` over the rate
  of the slowest route, or the time in which what several transfers share (the server's link, or its port) has carried
  ``(n - 1) b``.
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
from collections.abc import Sequence

import numpy as np

from weft.cluster.cluster import Contention, DeviceId
from weft.cost.collectives import Collective
from weft.cost.costs import Costs
from weft.cost.figure import ZERO, Figure, combine
from weft.model.graph import I64
from weft.plan.factors import block_size, bucket_rows, num_rows
from weft.plan.holders import parameter_copies, parameter_parts
from weft.plan.program import Bucket, Phase, Program


def exchange_figure(program: Program, costs: Costs, devices: Sequence[DeviceId], bucket: Bucket) -> Figure:
    """Return the time of the bucket's exchange from when all members have issued it; ``devices`` are the ranks'."""
    members = [devices[rank] for rank in bucket.ranks]
    match bucket.method:
        case "all_reduce":
            return _collective(costs, Collective.ALL_REDUCE, bucket.num_bytes, members)
        case "hierarchical":
            groups = [[devices[rank] for rank in group] for group in bucket.groups]
            return combine([_slowest(costs, Collective.ALL_REDUCE, bucket.num_bytes, groups),
                            _collective(costs, Collective.ALL_REDUCE, bucket.num_bytes, [group[0] for group in groups]),
                            _slowest(costs, Collective.BROADCAST, bucket.num_bytes, groups)])
        case "parameter_server":
            assert bucket.server is not None, "the plan was checked"
            server = devices[bucket.server]
            others = [device for device in members if device != server]
            return combine([_together(costs, bucket.num_bytes, [(other, server) for other in others]),
                            _together(costs, bucket.num_bytes, [(server, other) for other in others])])
        case "sufficient_factors":
            return _factors_figure(program, costs, members, bucket)


def exchange_resources(costs: Costs, devices: Sequence[DeviceId], bucket: Bucket) -> tuple[int, ...]:
    """Return the cluster's resources on which the bucket's exchange and others hold each other up.

    They are those that are busy most of the time of what it does between hosts or with its server.
    """
    members = [devices[rank] for rank in bucket.ranks]
    match bucket.method:
        case "all_reduce":
            return costs.collective_limits(Collective.ALL_REDUCE, bucket.num_bytes, members)
        case "hierarchical":
            first_ones = [devices[group[0]] for group in bucket.groups]
            return costs.collective_limits(Collective.ALL_REDUCE, bucket.num_bytes, first_ones)
        case "parameter_server":
            assert bucket.server is not None, "the plan was checked"
            server = devices[bucket.server]
            pairs = [pair for other in members if other != server for pair in ((other, server), (server, other))]
            counts = Counter(resource for pair in pairs for resource in costs.cluster.transfer_resources(*pair))
            return tuple(sorted(item for item, count in counts.items() if count == max(counts.values())))
        case "sufficient_factors":
            return costs.collective_limits(Collective.ALL_GATHER, bucket.num_bytes, members)


def _collective(costs: Costs, kind: Collective, num_bytes: float, devices: Sequence[DeviceId]) -> Figure:
    if len(devices) < 2:
        return ZERO
    cost = costs.collective(kind, num_bytes, devices)
    return Figure(cost.seconds, cost.source)


def _slowest(costs: Costs, kind: Collective, num_bytes: int, groups: Sequence[Sequence[DeviceId]]) -> Figure:
    return max((_collective(costs, kind, num_bytes, group) for group in groups), key=lambda figure: figure.seconds)


def _together(costs: Costs, num_bytes: int, pairs: Sequence[tuple[DeviceId, DeviceId]]) -> Figure:
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


def _factors_figure(program: Program, costs: Costs, members: Sequence[DeviceId], bucket: Bucket) -> Figure:
    graph, factors = program.graph, bucket.factors
    rows = bucket_rows(program, bucket)
    weight = factors.uses[0].weight
    width = int(graph.tensor_bytes[weight]) / math.prod(graph.tensor_shapes[weight])
    largest = max(block_size(graph, factors, counts) for counts in rows.values())
    shared = float(graph.tensor_bytes[list(factors.shared)].sum())
    products = [ZERO]
    if program.plan.optimizer.kind == "none":
        products = [_products_figure(program, costs, device, bucket) for device in dict.fromkeys(members)]
    return combine([
        _collective(costs, Collective.ALL_GATHER, len(members) * largest * width, members),
        _collective(costs, Collective.ALL_REDUCE, shared, members) if factors.shared else ZERO,
        max(products, key=lambda figure: figure.seconds)])


def share_figure(program: Program, costs: Costs, devices: Sequence[DeviceId], rank: int) -> Figure:
    """Return the time in which ranks that divide the optimizer's states bring each other what they have changed."""
    if not program.plan.optimizer.sharded:
        return ZERO
    name, graph = program.rank_names[rank], program.graph
    rank_of = {device: index for index, device in enumerate(program.rank_names)}
    parts = parameter_parts(program.plan, graph)
    total: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for tensor, copies in parameter_copies(program.plan, graph).items():
        for item in copies:
            if name in item.devices and len(item.devices) > 1:
                total[item.devices] += parts[tensor][name] * float(graph.tensor_bytes[tensor])
    return combine(_collective(costs, Collective.ALL_GATHER, num_bytes, [devices[rank_of[item]] for item in group])
                   for group, num_bytes in total.items())


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
