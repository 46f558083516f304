"""The cluster as it is drawn: hosts with their devices and what runs there, links inside and between hosts.

A switch that touches the devices of one host only belongs to that host; other switches join hosts. Hosts that are alike
in devices, links and stages are one record, and so are alike devices of a large host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weft.cluster.cluster import Cluster, Link
from weft.plan.plan import Plan
from weft.show.names import short_list

MAX_HOSTS: Final = 12
"""Of more hosts, those with equal hardware are drawn as one, whatever runs there."""
MIN_ALIKE: Final = 3
"""So many hosts that are alike in everything are drawn as one."""
MAX_DEVICES: Final = 32
"""Of more devices, those of a host that are alike in everything are drawn as one."""
MAX_CHIPS: Final = 16
"""Of more different devices in a host, those of a kind are drawn as one, whatever runs there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipFacts:
    """A device, or alike ones of a host."""

    names: tuple[str, ...]
    kind: str
    memory_bytes: int | None
    work: tuple[str, ...]
    """The stages, each with its part of the batch where there are several replicas; empty for an idle device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host, or alike ones."""

    names: tuple[str, ...]
    chips: tuple[ChipFacts, ...]
    """Of alike hosts those of the first; stages are those of all of them."""
    inside: tuple[float, ...]
    """Rates of the links inside, the fastest first, in bytes per second."""
    outside: Mapping[str, float]
    """The rate to each switch that joins hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All that is drawn."""

    name: str
    kinds: Mapping[str, int]
    """How many devices there are of each kind."""
    hosts: tuple[HostFacts, ...]
    switches: tuple[str, ...]
    """Those that join hosts."""
    direct: tuple[tuple[str, str, float], ...]
    """Links from host to host without a switch: names and rate."""


def cluster_facts(cluster: Cluster, plan: Plan) -> ClusterFacts:
    """Return what is drawn of the cluster and of the plan on it."""
    host_of = _nodes_by_host(cluster)
    outside = tuple(name for name in cluster.switches if name not in host_of)
    work = _work(plan)
    kinds: dict[str, int] = {}
    members: dict[str, list[ChipFacts]] = {}
    for device in cluster.devices:
        kinds[device.kind] = kinds.get(device.kind, 0) + 1
        members.setdefault(device.host, []).append(ChipFacts(
            names=(device.name,), kind=device.kind, memory_bytes=device.memory_bytes,
            work=tuple(work.get(device.name, ()))))
    links = _links_by_host(cluster.links, host_of)
    if cluster.num_devices > MAX_DEVICES:
        members = {name: _fold_chips(chips) for name, chips in members.items()}
    hosts = [_host(name, chips, links.get(name, ()), host_of) for name, chips in members.items()]
    return ClusterFacts(name=cluster.name, kinds=kinds, hosts=_fold_hosts(hosts), switches=outside,
                        direct=_direct(cluster.links, host_of))


def _nodes_by_host(cluster: Cluster) -> dict[str, str]:
    """Return the host of every device, and of every switch that touches devices of one host only."""
    host_of = {device.name: device.host for device in cluster.devices}
    touched: dict[str, set[str]] = {}
    for link in cluster.links:
        for switch, other in ((link.source, link.target), (link.target, link.source)):
            if switch not in cluster.device_index and other in cluster.device_index:
                touched.setdefault(switch, set()).add(host_of[other])
    return host_of | {switch: next(iter(hosts)) for switch, hosts in touched.items() if len(hosts) == 1}


def _work(plan: Plan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            share = f" {100 * replica.share:.3g} %" if len(stage.replicas) > 1 else ""
            for device in replica.devices:
                found.setdefault(device, []).append(stage.name + share)
    return found


def _links_by_host(links: Iterable[Link], host_of: Mapping[str, str]) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in links:
        for host in dict.fromkeys(host_of[end] for end in (link.source, link.target) if end in host_of):
            found.setdefault(host, []).append(link)
    return found


def _host(name: str, chips: Sequence[ChipFacts], links: Iterable[Link], host_of: Mapping[str, str]) -> HostFacts:
    inside: set[float] = set()
    outside: dict[str, float] = {}
    for link in links:
        ends = [host_of.get(link.source), host_of.get(link.target)]
        if ends == [name, name]:
            inside.add(link.bytes_per_s)
        elif ends[1] is None:
            outside[link.target] = max(link.bytes_per_s, outside.get(link.target, 0.0))
    return HostFacts(names=(name,), chips=tuple(chips), inside=tuple(sorted(inside, reverse=True)), outside=outside)


def _fold_chips(chips: Sequence[ChipFacts]) -> list[ChipFacts]:
    """Return alike devices together; where too many kinds of work are left, those of a kind with all its work."""
    exact: dict[object, list[ChipFacts]] = {}
    rough: dict[object, list[ChipFacts]] = {}
    for chip in chips:
        exact.setdefault((chip.kind, chip.memory_bytes, chip.work), []).append(chip)
        rough.setdefault((chip.kind, chip.memory_bytes), []).append(chip)
    groups = exact if len(exact) <= MAX_CHIPS else rough
    return [_join_chips(group) for group in groups.values()]


def _join_chips(chips: Sequence[ChipFacts]) -> ChipFacts:
    first = chips[0]
    return ChipFacts(names=tuple(name for chip in chips for name in chip.names), kind=first.kind,
                     memory_bytes=first.memory_bytes,
                     work=tuple(dict.fromkeys(item for chip in chips for item in chip.work)))


def _fold_hosts(hosts: Sequence[HostFacts]) -> tuple[HostFacts, ...]:
    """Return alike hosts together where there are several; where many are left, all with equal hardware."""
    exact: dict[object, list[HostFacts]] = {}
    for host in hosts:
        work = tuple(chip.work for chip in host.chips)
        exact.setdefault((_hardware(host), work), []).append(host)
    drawn = [group for members in exact.values()
             for group in ([members] if len(members) >= MIN_ALIKE else [[host] for host in members])]
    if len(drawn) > MAX_HOSTS:
        rough: dict[object, list[HostFacts]] = {}
        for host in hosts:
            rough.setdefault(_hardware(host), []).append(host)
        drawn = list(rough.values())
    return tuple(_join_hosts(group) for group in drawn)


def _hardware(host: HostFacts) -> object:
    chips = tuple((chip.kind, chip.memory_bytes, len(chip.names)) for chip in host.chips)
    return chips, host.inside, tuple(host.outside.items())


def _join_hosts(hosts: Sequence[HostFacts]) -> HostFacts:
    first = hosts[0]
    if len(hosts) == 1:
        return first
    chips = tuple(_join_chips(column) for column in zip(*(host.chips for host in hosts), strict=True))
    return HostFacts(names=tuple(name for host in hosts for name in host.names), chips=chips, inside=first.inside,
                     outside=first.outside)


def _direct(links: Iterable[Link], host_of: Mapping[str, str]) -> tuple[tuple[str, str, float], ...]:
    found: dict[tuple[str, str], float] = {}
    for link in links:
        hosts = {host_of.get(link.source), host_of.get(link.target)}
        if len(hosts) == 2 and None not in hosts and (link.target, link.source) not in found:
            found[link.source, link.target] = link.bytes_per_s
    return tuple((source, target, rate) for (source, target), rate in found.items())


def chip_title(chip: ChipFacts, num_hosts: int) -> str:
    """Return the names of a chip: ``a0``, ``a0 - a7`` for alike ones, ``a0 ...`` for one in each of alike hosts."""
    if len(chip.names) == 1:
        return chip.names[0]
    return f"{chip.names[0]} ..." if num_hosts == len(chip.names) > 1 else short_list(chip.names, limit=2)
