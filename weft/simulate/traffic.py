"""How many bytes cross each link of the cluster in one step: tensors between stages, and exchanges of gradients.

A transfer crosses every link of its route. A collective is the rounds of transfers that its cheapest algorithm has
(``weft.cost.collectives``), the one whose time the simulator takes; other ways to exchange gradients are made of
transfers and collectives as ``weft.simulate.exchange_time`` says. Links of one shared medium count together. What the
devices of a replica exchange inside a sharded stage is not part of a program, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.costs import Costs
from weft.plan.program import Program
from weft.simulate.exchange_time import exchange_transfers
from weft.simulate.timing import rank_devices


def link_bytes(program: Program, costs: Costs, cluster: Cluster) -> dict[str, int]:
    """Return the bytes of one step over each link that carries some, by the link's name (``a0>h0/fabric``).

    Links are in the order of the cluster; a shared medium has its own name. Where the cluster has no links, each
    ordered pair of devices counts as one.
    """
    devices = rank_devices(program, cluster)
    by_pair: dict[tuple[DeviceId, DeviceId], float] = {}
    for source, target, num_bytes in _transfers(program, costs, devices):
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


def _transfers(program: Program, costs: Costs,
               devices: Sequence[DeviceId]) -> Iterator[tuple[DeviceId, DeviceId, float]]:
    """Yield (sender, receiver, bytes) of everything that is sent in a step."""
    for channel in program.channels:
        yield devices[channel.source], devices[channel.target], channel.num_bytes * len(channel.microbatches)
    for bucket in program.buckets:
        yield from exchange_transfers(program, costs, devices, bucket)
