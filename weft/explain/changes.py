"""Other clusters, to plan for: one device more, links of twice the bandwidth, more memory."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from weft.cluster.cluster import Cluster, DeviceId, Link, check_cluster


def with_more_devices(cluster: Cluster, like: DeviceId, count: int = 1) -> Cluster:
    """Return the cluster with so many more devices of the same kind, on the same host and linked in the same way.

    Where devices are linked with each other, not through a switch, the new one is linked with the old one as well, as
    fast as the old one's fastest such link.
    """
    for _ in range(count):
        cluster = _with_device(cluster, like)
    check_cluster(cluster)
    return cluster


def _with_device(cluster: Cluster, like: DeviceId) -> Cluster:
    old = cluster.devices[like]
    name = _free_name(cluster, old.name)
    unit = None if old.unit is None else f"{old.unit} of {name}"
    links = [replace(link, source=name) for link in cluster.links if link.source == old.name]
    links += [replace(link, target=name) for link in cluster.links if link.target == old.name]
    direct = [link for link in cluster.links if link.source == old.name and link.target in cluster.device_index]
    if direct:
        best = max(direct, key=lambda link: link.bytes_per_s)
        links += [Link(source=one, target=other, bytes_per_s=best.bytes_per_s, latency_s=best.latency_s)
                  for one, other in ((old.name, name), (name, old.name))]
    return replace(cluster, devices=(*cluster.devices, replace(old, name=name, unit=unit)),
                   links=(*cluster.links, *links))


def _free_name(cluster: Cluster, name: str) -> str:
    """Return ``a4`` for ``a3``, or the next number that no device or switch has."""
    stem, digits = re.fullmatch(r"(.*?)([0-9]*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    number = int(digits or 0) + 1
    taken = {*cluster.device_index, *cluster.switches}
    while f"{stem}{number}" in taken:
        number += 1
    return f"{stem}{number}"


def with_bandwidth(cluster: Cluster, links: Collection[int], factor: float) -> Cluster:
    """Return the cluster with the bandwidth of these links (by number) multiplied."""
    return replace(cluster, links=tuple(
        replace(link, bytes_per_s=link.bytes_per_s * factor) if index in links else link
        for index, link in enumerate(cluster.links)))


def with_memory(cluster: Cluster, extra_bytes: int) -> Cluster:
    """Return the cluster with so much more memory on every device that has a limit."""
    return replace(cluster, devices=tuple(
        device if device.memory_bytes is None else replace(device, memory_bytes=device.memory_bytes + extra_bytes)
        for device in cluster.devices))


def both_ways(cluster: Cluster, name: str) -> frozenset[int]:
    """Return the links that are called so in ``link_bytes``, with those of the other direction."""
    ends = {(link.source, link.target) for link in cluster.links if name in (link.shared, link.name)}
    ends |= {(target, source) for source, target in ends}
    return frozenset(index for index, link in enumerate(cluster.links) if (link.source, link.target) in ends)


def tier_of(cluster: Cluster, links: Collection[int]) -> frozenset[int]:
    """Return all links of the same sort: of the same rate and latency, between the same sorts of nodes."""
    sorts = {_sort(cluster, cluster.links[index]) for index in links}
    return frozenset(index for index, link in enumerate(cluster.links) if _sort(cluster, link) in sorts)


def _sort(cluster: Cluster, link: Link) -> tuple[float, float, frozenset[bool]]:
    ends = frozenset(end in cluster.device_index for end in (link.source, link.target))
    return link.bytes_per_s, link.latency_s, ends
