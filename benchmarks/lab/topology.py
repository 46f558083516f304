"""What a cluster file means as hosts, switches and cables, and the commands that build it; nothing is executed here.

A host's network port is a *cable* to a switch, and switches may be joined by further cables, without a circle:

    a --+            hosts and switches are network namespaces, a cable is a pair of virtual Ethernet interfaces, and
    b --+-- network  each of its ends lets through what the cluster file says for its direction (``tc qdisc tbf``)
    c --+

Devices of one host are processes in one namespace: what they send to each other never leaves it and is not limited.
Latency is not imposed either (kernels may lack the queue that delays): it is what the namespaces have by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import ClusterError
from weft.base.units import format_rate
from weft.cluster.cluster import Cluster, Contention, Link

PORT: Final = "eth0"
"""The interface of every host."""
BRIDGE: Final = "bridge"
FRAME_BYTES: Final = 9000
"""Jumbo frames: all hosts share a few cores, and small frames would cost them time that a network card takes over."""
BURST_BYTES: Final = 10_000
BURST_S: Final = 2e-4
"""What may pass at once after a pause, in bytes or in seconds of the link's rate, whichever is more: the least that
works with such frames and with the kernel's timers, so that small messages are slow too."""
QUEUE_BYTES: Final = 16 << 20
"""More than senders have in flight: nothing is dropped where several send to one."""
_SUBNET: Final = "10.77.0"
MAX_HOSTS: Final = 64

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace in which ranks run."""

    name: str
    """As in the cluster file."""
    devices: tuple[str, ...]
    """Names of its devices, in order."""
    cores: tuple[int, ...]
    """Positions, among the cores that may be used, of those that its processes run on."""
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A connection of two places with a rate for each direction."""

    ends: tuple[str, str]
    """Names of hosts or switches; a host comes first."""
    bytes_per_s: tuple[float, float]
    """From the first end to the second, and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts, switches and cables; the cables form a tree."""

    hosts: tuple[Host, ...]
    switches: tuple[str, ...]
    cables: tuple[Cable, ...]

    def host_of(self, device: str) -> Host:
        """Return the host with that device."""
        return next(host for host in self.hosts if device in host.devices)


def on_cores(cluster: Cluster, num_cores: int) -> Cluster:
    """Return the cluster with what its devices share here: ``unit`` is a core where devices are more than cores.

    A file that says which devices share a unit keeps that. Raise ``ClusterError`` if it names more units than cores.
    """
    units = {device.unit for device in cluster.devices if device.unit is not None}
    alone = sum(device.unit is None for device in cluster.devices)
    if units and len(units) + alone > num_cores:
        raise ClusterError(f"the devices of cluster {cluster.name!r} compute on {len(units) + alone} units at once, "
                           f"but there are {num_cores} cores here: name fewer units, or none")
    if units or cluster.num_devices <= num_cores:
        return cluster
    devices = tuple(replace(device, unit=f"core{index % num_cores}") for index, device in enumerate(cluster.devices))
    return replace(cluster, devices=devices)


def read_topology(cluster: Cluster, num_cores: int) -> Topology:
    """Return the hosts and cables of a cluster; raise ``ClusterError`` where they cannot be built.

    What can: hosts with one network port each, on one switch or on several switches that form a tree.
    """
    if cluster.contention is not Contention.LINK:
        raise ClusterError(f"contention is {cluster.contention.value!r}, but cables carry what their rate allows: only "
                           "'link' can be built")
    cables = tuple(_cables(cluster))
    names = tuple(dict.fromkeys(device.host for device in cluster.devices))
    if not 2 <= len(names) <= MAX_HOSTS:
        raise ClusterError(f"cluster {cluster.name!r} has {len(names)} host(s): a laboratory has 2 to {MAX_HOSTS}")
    switches = tuple(dict.fromkeys(end for cable in cables for end in cable.ends if end not in names))
    _check_tree(names, switches, cables)
    cores = _cores(on_cores(cluster, num_cores), num_cores)
    hosts = tuple(_host(cluster, name, number, cores) for number, name in enumerate(names, start=1))
    return Topology(hosts=hosts, switches=switches, cables=cables)


def _host(cluster: Cluster, name: str, number: int, cores: Mapping[str, int]) -> Host:
    devices = tuple(device.name for device in cluster.devices if device.host == name)
    return Host(name=name, devices=devices, address=f"{_SUBNET}.{number}",
                cores=tuple(sorted({cores[device] for device in devices})))


def _cores(cluster: Cluster, num_cores: int) -> dict[str, int]:
    """Return each device's core: those of one unit have the same, others one of their own."""
    units = {name: index for index, name in enumerate(dict.fromkeys(
        device.unit or device.name for device in cluster.devices))}
    return {device.name: units[device.unit or device.name] % num_cores for device in cluster.devices}


def _cables(cluster: Cluster) -> Iterator[Cable]:
    """Yield the connections between places, both directions together."""
    hosts = {device.name: device.host for device in cluster.devices}
    hosts |= {f"{device.host}/fabric": device.host for device in cluster.devices}
    ways: dict[tuple[str, str], list[Link]] = {}
    for link in cluster.links:
        ends = hosts.get(link.source, link.source), hosts.get(link.target, link.target)
        if ends[0] != ends[1]:
            ways.setdefault(ends, []).append(link)
    _check_media(ways)
    names = {device.host for device in cluster.devices}
    for (source, target), links in ways.items():
        back = ways.get((target, source))
        if back is None:
            raise ClusterError(f"there is a way from {source!r} to {target!r} but none back: a cable has both")
        if source in names and target in names:
            raise ClusterError(f"hosts {source!r} and {target!r} are linked directly: a host has one network port, to "
                               "a switch. Write 'network:' or 'switches:' and links from each device to a switch")
        if source in names or (target not in names and source < target):
            yield Cable(ends=(source, target), bytes_per_s=(links[0].bytes_per_s, back[0].bytes_per_s))


def _check_media(ways: Mapping[tuple[str, str], Sequence[Link]]) -> None:
    """Raise where several links are more than one cable, or one medium is more than one way of one cable."""
    media: dict[str, set[tuple[str, str]]] = {}
    for ends, links in ways.items():
        if len(links) > 1 and (links[0].shared is None or len({link.shared for link in links}) > 1):
            raise ClusterError(f"there are {len(links)} links from {ends[0]!r} to {ends[1]!r}: a host has one network "
                               "port. Give the host 'intra:', or leave out 'per: device'")
        for link in links:
            if link.shared is not None:
                media.setdefault(link.shared, set()).add(ends)
    for name, used in media.items():
        if len(used) > 1:
            raise ClusterError(f"the medium {name!r} is shared by {len(used)} ways: cables carry both directions at "
                               "full rate. Leave out 'shared'")


def _check_tree(hosts: Sequence[str], switches: Sequence[str], cables: Sequence[Cable]) -> None:
    """Raise unless every host has one cable and there is exactly one way between any two places."""
    for name in hosts:
        count = sum(name in cable.ends for cable in cables)
        if count != 1:
            raise ClusterError(f"host {name!r} has {count} network ports: it must have one, to a switch")
    reached, frontier = {hosts[0]}, [hosts[0]]
    while frontier:
        here = frontier.pop()
        for cable in cables:
            if here in cable.ends:
                other = cable.ends[1 - cable.ends.index(here)]
                if other not in reached:
                    reached.add(other)
                    frontier.append(other)
    missing = [name for name in (*hosts, *switches) if name not in reached]
    if missing:
        raise ClusterError(f"there is no way from {hosts[0]!r} to {missing[0]!r}: link their switches")
    if len(cables) != len(hosts) + len(switches) - 1:
        raise ClusterError(f"{len(switches)} switches are linked in a circle: there must be one way between any two")


# ---- commands -----------------------------------------------------------------------------------------------------


def namespaces(topology: Topology, prefix: str) -> dict[str, str]:
    """Return the name of the namespace of each host and switch."""
    return {**{host.name: f"{prefix}h{index}" for index, host in enumerate(topology.hosts)},
            **{name: f"{prefix}s{index}" for index, name in enumerate(topology.switches)}}


def build_commands(topology: Topology, prefix: str, cpus: Sequence[int]) -> list[Command]:
    """Return the commands that make namespaces, cables and rates, in order; ``cpus`` are the numbers of the cores."""
    spaces = namespaces(topology, prefix)
    commands: list[Command] = []
    for name, space in spaces.items():
        commands += [("ip", "netns", "add", space), ("ip", "-n", space, "link", "set", "lo", "up")]
        if name in topology.switches:
            commands += [("ip", "-n", space, "link", "add", BRIDGE, "mtu", str(FRAME_BYTES), "type", "bridge"),
                         ("ip", "-n", space, "link", "set", BRIDGE, "addrgenmode", "none", "up")]
    ends = _interfaces(topology)
    cores = {host.name: cpus[host.cores[0]] for host in topology.hosts}
    for index, cable in enumerate(topology.cables):
        commands += _cable_commands(cable, spaces, (ends[index, 0], ends[index, 1]), topology)
        commands += [_keep_order(spaces[end], ends[index, side], cores.get(cable.ends[0], cpus[0]))
                     for side, end in enumerate(cable.ends)]
    for host in topology.hosts:
        commands.append(("ip", "-n", spaces[host.name], "addr", "add", f"{host.address}/24", "dev", PORT))
    return commands


def _keep_order(space: str, interface: str, cpu: int) -> Command:
    """Return the command that lets one core take in all frames of an interface.

    Else each core takes what a timer on it happened to send: frames overtake each other, TCP takes that for loss, and
    an all-reduce takes up to three times as long. Kernels without such a setting are left as they are.
    """
    mask = ",".join([f"{1 << cpu % 32:x}", *["00000000"] * (cpu // 32)])
    files = f"/sys/class/net/{interface}/queues/rx-*/rps_cpus"
    return ("ip", "netns", "exec", space, "sh", "-c", f'for f in {files}; do [ ! -w "$f" ] || echo {mask} > "$f"; done')


def _interfaces(topology: Topology) -> dict[tuple[int, int], str]:
    """Return the interface at each end of each cable: the host's only one, or a numbered port of a switch."""
    names = {host.name for host in topology.hosts}
    return {(index, side): PORT if end in names else f"port{index}"
            for index, cable in enumerate(topology.cables) for side, end in enumerate(cable.ends)}


def _cable_commands(cable: Cable, spaces: Mapping[str, str], interfaces: tuple[str, str],
                    topology: Topology) -> list[Command]:
    first, second = (spaces[end] for end in cable.ends)
    commands: list[Command] = [
        ("ip", "-n", first, "link", "add", interfaces[0], "mtu", str(FRAME_BYTES), "type", "veth", "peer", "name",
         interfaces[1], "mtu", str(FRAME_BYTES), "netns", second)]
    for side, end in enumerate(cable.ends):
        space, interface = spaces[end], interfaces[side]
        bridge = ("master", BRIDGE) if end in topology.switches else ()
        rate = cable.bytes_per_s[side]
        commands += [("ip", "-n", space, "link", "set", interface, *bridge, "addrgenmode", "none", "up"),
                     ("tc", "-n", space, "qdisc", "add", "dev", interface, "root", "tbf",
                      "rate", f"{round(rate * 8)}bit", "burst", str(max(BURST_BYTES, round(BURST_S * rate))),
                      "limit", str(QUEUE_BYTES))]
    return commands


def describe(topology: Topology) -> list[str]:
    """Return a line for each cable."""
    hosts = {host.name: host for host in topology.hosts}
    lines = []
    for cable in topology.cables:
        there, back = (format_rate(rate) for rate in cable.bytes_per_s)
        host = hosts.get(cable.ends[0])
        about = f" ({', '.join(host.devices)}; core {', '.join(map(str, host.cores))})" if host else ""
        lines.append(f"{cable.ends[0]} - {cable.ends[1]}: {there if there == back else f'{there} / {back}'}{about}")
    return lines
