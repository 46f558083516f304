"""The cluster as data: devices, links between nodes, and the route that a transfer takes.

A *node* is a device or a switch. A *link* joins two nodes in one direction with a bandwidth and a latency; a route
from device to device is a tuple of links, its bandwidth the smallest and its latency the sum of theirs. A short-form
host ``a`` with four devices and a network becomes

    a0 --+                       each line is two directed links:
    a1 --+                       device > fabric (intra), fabric > network (the host's network card),
    a2 --+-- a/fabric -- network and back
    a3 --+

so two transfers that leave the same host share its network card, and transfers inside a host do not.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NewType

from weft.base.errors import ClusterError
from weft.cluster.routes import RouteTable

DeviceId = NewType("DeviceId", int)
LinkId = NewType("LinkId", int)


class Contention(enum.Enum):
    """What a transfer occupies while it runs."""

    LINK = "link"
    """Each directed link on its route carries one transfer at a time."""
    PORT = "port"
    """Each device sends one and receives one at a time."""
    NONE = "none"
    """Nothing: a pure delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What devices of one kind can do. Rates are peaks; ``weft.cost`` applies efficiencies."""

    name: str
    """Such as ``A100-80GB``."""
    flop_per_s: Mapping[str, float] = field(default_factory=dict)
    """Peak rate by dtype (``float32``, ``bfloat16``, ...); empty where graph files give all times."""
    memory_bytes: int | None = None
    """Memory of one device; None is unlimited or unknown."""
    memory_bytes_per_s: float | None = None
    """Peak memory bandwidth."""
    overhead_s: float = 0.0
    """Fixed time to start one operator."""
    type: str = "gpu"
    """``gpu`` or ``cpu``."""
    source: str = ""
    """Where the figures are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or CPU that runs one rank."""

    name: str
    kind: str
    """A key of ``Cluster.kinds``."""
    host: str
    """Devices of one host share its network card."""
    memory_bytes: int | None
    """Capacity; None is unlimited."""
    unit: str | None = None
    """Devices with the same text share one processing unit, such as a core: they compute one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection between two nodes."""

    source: str
    """A device name or a switch name."""
    target: str
    bytes_per_s: float
    latency_s: float
    shared: str | None = None
    """Links with the same text are one medium: all of them together carry one transfer at a time."""
    origin: str = ""
    """Where the figures are from, such as ``measured``; for people."""

    @property
    def name(self) -> str:
        """Return ``source>target``."""
        return f"{self.source}>{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one device to another."""

    links: tuple[LinkId, ...]
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and links; devices are numbered in the order given, and rank ``i`` of a run is a device's number."""

    name: str
    kinds: Mapping[str, DeviceKind]
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    contention: Contention = Contention.LINK

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.devices)

    @cached_property
    def device_index(self) -> Mapping[str, DeviceId]:
        """Return each device's number by name."""
        return {device.name: DeviceId(index) for index, device in enumerate(self.devices)}

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """Return the nodes that are not devices, in the order in which links name them."""
        ends = (end for link in self.links for end in (link.source, link.target))
        return tuple(dict.fromkeys(end for end in ends if end not in self.device_index))

    def kind_of(self, device: DeviceId) -> DeviceKind:
        """Return what the device's kind can do."""
        return self.kinds[self.devices[device].kind]

    def links_from(self, name: str) -> tuple[Link, ...]:
        """Return the links that begin at a device or switch."""
        return self._links_by_source.get(name, ())

    @cached_property
    def _links_by_source(self) -> dict[str, tuple[Link, ...]]:
        found: dict[str, list[Link]] = {}
        for link in self.links:
            found.setdefault(link.source, []).append(link)
        return {name: tuple(links) for name, links in found.items()}

    def route(self, source: DeviceId, target: DeviceId) -> Route:
        """Return the best route: without relaying by other devices if possible, then fewest hops, then widest.

        A device's route to itself has no links, no latency and infinite bandwidth. Raise ``ClusterError`` where there
        is no way. Found routes are kept; searches run once per device, or once for all devices behind one switch.
        """
        known = self._routes.get((source, target))
        if known is None:
            known = self._routes[source, target] = self._find_route(source, target)
        return known

    def _find_route(self, source: DeviceId, target: DeviceId) -> Route:
        ids = self._route_table.path(source, target)
        if ids is None:
            sender, receiver = self.devices[source].name, self.devices[target].name
            has = "has no links" if not self.links else "has no way for it"
            raise ClusterError(
                f"nothing can be sent from {sender!r} to {receiver!r}: cluster {self.name!r} {has}. Add 'network:', a "
                "host's 'intra:' or 'links:' to the cluster file, or give the transfer times in the graph file"
            )
        links = [self.links[index] for index in ids]
        return Route(
            links=tuple(LinkId(index) for index in ids),
            bytes_per_s=min((link.bytes_per_s for link in links), default=float("inf")),
            latency_s=sum(link.latency_s for link in links),
        )

    @cached_property
    def _routes(self) -> dict[tuple[int, int], Route]:
        return {}

    @cached_property
    def _route_table(self) -> RouteTable:
        index: dict[str, int] = dict(self.device_index)
        for name in self.switches:
            index[name] = len(index)
        ends = [(index[link.source], index[link.target]) for link in self.links]
        rates = [(link.bytes_per_s, link.latency_s) for link in self.links]
        return RouteTable(num_devices=self.num_devices, num_nodes=len(index), ends=ends, rates=rates)

    def transfer_resources(self, source: DeviceId, target: DeviceId) -> tuple[int, ...]:
        """Return the ids, each below ``num_resources``, of what a transfer occupies under ``contention``.

        ``LINK``: the links of the route, those of one shared medium as one; where the cluster has no links at all,
        each ordered pair of devices counts as a link. ``PORT``: the sender's out-port and the receiver's in-port.
        """
        if source == target or self.contention is Contention.NONE:
            return ()
        if self.contention is Contention.PORT:
            return (source, self.num_devices + target)
        if not self.links:
            return (source * self.num_devices + target,)
        resources = self.link_resources
        return tuple(dict.fromkeys(resources[link] for link in self.route(source, target).links))

    @cached_property
    def link_resources(self) -> tuple[int, ...]:
        """Return each link's resource id; links of one shared medium have the same one."""
        ids: dict[tuple[str, str | int], int] = {}
        keys = (("shared", link.shared) if link.shared is not None else ("link", index)
                for index, link in enumerate(self.links))
        return tuple(ids.setdefault(key, len(ids)) for key in keys)

    @cached_property
    def num_resources(self) -> int:
        """Return how many things there are that transfers can occupy."""
        match self.contention:
            case Contention.NONE:
                return 0
            case Contention.PORT:
                return 2 * self.num_devices
            case Contention.LINK:
                return max(self.link_resources) + 1 if self.links else self.num_devices**2

    def groups_by_host_and_kind(self) -> tuple[tuple[DeviceId, ...], ...]:
        """Return the devices of each host and kind together, groups in the order of their first devices."""
        groups: dict[tuple[str, str], list[DeviceId]] = {}
        for index, device in enumerate(self.devices):
            groups.setdefault((device.host, device.kind), []).append(DeviceId(index))
        return tuple(tuple(group) for group in groups.values())

    @cached_property
    def digest(self) -> str:
        """Return what identifies the cluster: its devices, their kinds, links and contention.

        The cluster's own name and the notes on where figures are from do not count.
        """
        used = sorted({device.kind for device in self.devices})
        content = [
            [_kind_content(self.kinds[name]) for name in used],
            [[device.name, device.kind, device.host, device.memory_bytes, device.unit] for device in self.devices],
            [[link.source, link.target, link.bytes_per_s, link.latency_s, link.shared] for link in self.links],
            self.contention.value,
        ]
        text = json.dumps(content, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind_content(kind: DeviceKind) -> list[Any]:
    return [kind.name, sorted(kind.flop_per_s.items()), kind.memory_bytes, kind.memory_bytes_per_s, kind.overhead_s,
            kind.type]
