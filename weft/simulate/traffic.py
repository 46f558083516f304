"""How many bytes cross each link of the cluster in one step: tensors between stages, and exchanges of gradients.

A transfer crosses every link of its route. A collective is the rounds of transfers that its cheapest algorithm has
(``weft.cost.collectives``), the one whose time the simulator takes; other ways to exchange gradients are made of
transfers and collectives as ``weft.simulate.exchange_time`` says. Links of one shared medium count together. What the
devices of a replica exchange inside a sharded stage is not part of a program, and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.collectives import Algorithm, Collective, CollectiveModel
from weft.cost.costs import Costs
from weft.plan.factors import block_size, bucket_rows
from weft.plan.program import Bucket, Program
from weft.simulate.timing import rank_devices

_Exchange = tuple[Collective, float, list[DeviceId]]


def link_bytes(program: Program, costs: Costs, cluster: Cluster) -> dict[str, int]:
    """Return the bytes of one step over each link that carries some, by the link's name (``a0>h0/fabric``).

    Links are in the order of the cluster; a shared medium has its own name. Where the cluster has no links, each
    ordered pair of devices counts as one.
    """
    devices = rank_devices(program, cluster)
    by_pair: dict[tuple[DeviceId, DeviceId], float] = {}
    for source, target, num_bytes in _transfers(program, costs, cluster, devices):
        by_pair[source, target] = by_pair.get((source, target), 0.0) + num_bytes
    if not cluster.links:
        names = {pair: ">".join(cluster.devices[device].name for device in pair) for pair in sorted(by_pair)}
        return {name: round(by_pair[pair]) for pair, name in names.items()}
    amounts: dict[int, float] = {}
    for pair, num_bytes in by_pair.items():
        for resource in dict.fromkeys(cluster.link_resources[link] for link in cluster.route(*pair).links):
            amounts[resource] = amounts.get(resource, 0.0) + num_bytes
    titles: dict[int, str] = {}
    for link, resource in zip(cluster.links, cluster.link_resources, strict=True):
        titles.setdefault(resource, link.shared if link.shared is not None else f"{link.source}>{link.target}")
    return {titles[resource]: round(amounts[resource]) for resource in titles if amounts.get(resource)}


def _transfers(program: Program, costs: Costs, cluster: Cluster,
               devices: Sequence[DeviceId]) -> Iterator[tuple[DeviceId, DeviceId, float]]:
    """Yield (sender, receiver, bytes) of everything that is sent in a step."""
    for channel in program.channels:
        yield devices[channel.source], devices[channel.target], channel.num_bytes * len(channel.microbatches)
    model = CollectiveModel(cluster)
    for bucket in program.buckets:
        if bucket.method == "parameter_server":
            assert bucket.server is not None, "the plan was checked"
            for rank in bucket.ranks:
                if rank != bucket.server:
                    yield devices[rank], devices[bucket.server], bucket.num_bytes
                    yield devices[bucket.server], devices[rank], bucket.num_bytes
            continue
        for kind, num_bytes, group in _collectives(program, bucket, devices):
            if len(group) < 2:
                continue
            algorithm = Algorithm(costs.collective(kind, num_bytes, group).algorithm)
            for entry in model.rounds(kind, algorithm, tuple(group)):
                for sender, receiver in entry.pairs:
                    yield group[sender], group[receiver], entry.share * num_bytes


def _collectives(program: Program, bucket: Bucket, devices: Sequence[DeviceId]) -> Iterator[_Exchange]:
    """Yield the collectives (kind, bytes, group) that an exchange is made of."""
    members = [devices[rank] for rank in bucket.ranks]
    match bucket.method:
        case "hierarchical":
            groups = [[devices[rank] for rank in group] for group in bucket.groups]
            yield from ((Collective.ALL_REDUCE, bucket.num_bytes, group) for group in groups)
            yield Collective.ALL_REDUCE, bucket.num_bytes, [group[0] for group in groups]
            yield from ((Collective.BROADCAST, bucket.num_bytes, group) for group in groups)
        case "sufficient_factors":
            graph, factors = program.graph, bucket.factors
            weight = factors.uses[0].weight
            width = int(graph.tensor_bytes[weight]) / math.prod(graph.tensor_shapes[weight])
            largest = max(block_size(graph, factors, counts) for counts in bucket_rows(program, bucket).values())
            yield Collective.ALL_GATHER, len(members) * largest * width, members
            if factors.shared:
                yield Collective.ALL_REDUCE, float(graph.tensor_bytes[list(factors.shared)].sum()), members
        case _:
            yield Collective.ALL_REDUCE, bucket.num_bytes, members
