"""The cluster as data: devices, links between nodes, and the route that a transfer takes.

A *node* is a device or a switch. A *link* joins two nodes in one direction with a bandwidth and a latency; a route
from device to device is a tuple of links, its bandwidth the smallest and its latency the sum of theirs. A short-form
host ``a`` with four devices and a network becomes

    a0 --+                       each line is two directed links:
    a1 --+                       device > fabric (intra), fabric > network (the host's network card),
    a2 --+-- a/fabric -- network and back
    a3 --+

so two transfers that leave the same host share its network card, and transfers inside a host do not.

``check_cluster`` collects every way in which a ``Cluster`` can be unusable and raises once.

Routes are searched from each source when first asked for; there is no table of all pairs. The best route is, in this
order: one that no other device has to forward (a GPU does not relay for others by itself), the one with the fewest
links, the widest one, the one with the least latency, the one whose links come first. One breadth-first search finds
the best routes to all nodes: within a layer all hop counts are equal, and the width of a route is the smaller of its
prefix's and its last link's, so the best prefix is part of a best route. A device with a single link, to a switch, has
the switch's routes behind that link. So a cluster of 128 hosts with 8 devices each needs at most 128 searches, each
linear in the number of links.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, NewType, cast

from weft.base.errors import ClusterError

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


def both_ways(node: str, switch: str, *, bytes_per_s: float, latency_s: float, origin: str,
              shared: str | None = None) -> list[Link]:
    """Return the links from a node to a switch and back."""
    return [Link(source=source, target=target, bytes_per_s=bytes_per_s, latency_s=latency_s, shared=shared,
                 origin=origin) for source, target in ((node, switch), (switch, node))]


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
        found: defaultdict[str, list[Link]] = defaultdict(list)
        for link in self.links:
            found[link.source].append(link)
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
                "host's 'intra:' or 'links:' to the cluster file, or give the transfer times in the graph file")
        latency_s, bytes_per_s = 0.0, float("inf")
        for index in ids:  # a large cluster has many pairs of devices
            link = self.links[index]
            latency_s += link.latency_s
            bytes_per_s = min(bytes_per_s, link.bytes_per_s)
        return Route(links=cast(tuple[LinkId, ...], ids), latency_s=latency_s, bytes_per_s=bytes_per_s)

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
        kinds = [self.kinds[name] for name in sorted({device.kind for device in self.devices})]
        content = [
            [[kind.name, sorted(kind.flop_per_s.items()), kind.memory_bytes, kind.memory_bytes_per_s, kind.overhead_s,
              kind.type] for kind in kinds],
            [[device.name, device.kind, device.host, device.memory_bytes, device.unit] for device in self.devices],
            [[link.source, link.target, link.bytes_per_s, link.latency_s, link.shared] for link in self.links],
            self.contention.value]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]


MAX_DEVICES = 65_536
"""Larger clusters are refused: they are typing errors rather than clusters."""
MAX_MEMORY_BYTES = 2**53
"""Largest memory of a device: every number of bytes up to it is exact in a JSON file."""
_MAX_SHOWN = 10


def check_cluster(cluster: Cluster) -> None:
    """Raise ``ClusterError`` with every problem found: names, kinds, rates, links, devices that cannot be reached."""
    problems = [*_device_problems(cluster), *_kind_problems(cluster), *_link_problems(cluster)]
    if not problems:
        problems.extend(_reach_problems(cluster))
    if problems:
        more = [f"... and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise ClusterError(f"cluster {cluster.name!r}: " + "; ".join(problems[:_MAX_SHOWN] + more))


def name_problem(name: str) -> str | None:
    """Return what is wrong with the name of a device, host or switch, or None."""
    if not name or len(name) > 100:
        return "must have 1 to 100 characters"
    if not name.isprintable() or " " in name or ">" in name:
        return "must have no spaces, control characters or '>'"
    return None


def _device_problems(cluster: Cluster) -> Iterator[str]:
    if not cluster.devices:
        yield "there are no devices: add 'hosts:' or 'devices:'"
    if cluster.num_devices > MAX_DEVICES:
        yield f"{cluster.num_devices} devices are more than the limit of {MAX_DEVICES}"
    for name, count in Counter(device.name for device in cluster.devices).items():
        if count > 1:
            yield f"the device name {name!r} is there {count} times"
    for device in cluster.devices:
        for what, name in (("device name", device.name), ("host name", device.host)):
            problem = name_problem(name)
            if problem:
                yield f"the {what} {name!r} {problem}"
        if device.kind not in cluster.kinds:
            yield f"device {device.name!r} is of the unknown kind {device.kind!r}"
        if device.memory_bytes is not None and not 0 < device.memory_bytes <= MAX_MEMORY_BYTES:
            yield f"device {device.name!r} has {device.memory_bytes} bytes of memory: it must be 1 to 2^53"


def _kind_problems(cluster: Cluster) -> Iterator[str]:
    for key, kind in cluster.kinds.items():
        if key != kind.name:
            yield f"the kind {kind.name!r} stands under the name {key!r}"
        rates = {f"{dtype} rate": rate for dtype, rate in kind.flop_per_s.items()}
        if kind.memory_bytes_per_s is not None:
            rates["memory bandwidth"] = kind.memory_bytes_per_s
        yield from _figure_problems(f"kind {kind.name!r}", rates, {"overhead": kind.overhead_s})
        if kind.memory_bytes is not None and not 0 < kind.memory_bytes <= MAX_MEMORY_BYTES:
            yield f"kind {kind.name!r} has {kind.memory_bytes} bytes of memory: it must be 1 to 2^53"


def _link_problems(cluster: Cluster) -> Iterator[str]:
    for name, count in Counter(link.name for link in cluster.links).items():
        if count > 1:
            yield (f"the link {name!r} is there {count} times (a link is both directions unless it says "
                   "'directed: true' or the file lists the other one; write parallel links as one with their total "
                   "bandwidth)")
    for link in cluster.links:
        if link.source == link.target:
            yield f"the link {link.name!r} joins a node with itself"
        yield from _figure_problems(f"link {link.name!r}", {"bandwidth": link.bytes_per_s}, {"latency": link.latency_s})
    for name in cluster.switches:
        problem = name_problem(name)
        if problem:
            yield f"the switch name {name!r} {problem}"


def _figure_problems(where: str, rates: Mapping[str, float], times: Mapping[str, float]) -> Iterator[str]:
    for what, rate in rates.items():
        if not (math.isfinite(rate) and rate > 0):
            yield f"{where}: the {what} is {rate}, it must be more than zero and finite"
    for what, time_s in times.items():
        if not (math.isfinite(time_s) and time_s >= 0):
            yield f"{where}: the {what} is {time_s}, it must be zero or more and finite"


def _reach_problems(cluster: Cluster) -> Iterator[str]:
    if not cluster.links or cluster.num_devices < 2:
        return
    first = cluster.devices[0].name
    forward = _reachable(first, cluster.links, backward=False)
    backward = _reachable(first, cluster.links, backward=True)
    for way, reached in ((f"cannot be reached from {first!r}", forward), (f"cannot reach {first!r}", backward)):
        lost = [device.name for device in cluster.devices if device.name not in reached]
        if lost:
            names = ", ".join(map(repr, lost[:_MAX_SHOWN])) + (f" and {len(lost) - _MAX_SHOWN} more"
                                                               if len(lost) > _MAX_SHOWN else "")
            yield f"disconnected: {names} {way}; add 'network:', a host's 'intra:' or a link"


def _reachable(start: str, links: tuple[Link, ...], *, backward: bool) -> set[str]:
    neighbours: defaultdict[str, list[str]] = defaultdict(list)
    for link in links:
        source, target = (link.target, link.source) if backward else (link.source, link.target)
        neighbours[source].append(target)
    reached, layer = set[str](), {start}
    while layer:
        reached |= layer
        layer = {target for node in layer for target in neighbours[node]} - reached
    return reached


_NONE = -1


class _Reached(NamedTuple):
    """How a switch is reached from a root."""

    depth: int
    width: float
    negative_latency: float
    order: int
    """How many were reached before it."""


class RouteTable:
    """Answers ``path`` by searches that run when first needed and are kept."""

    def __init__(self, *, num_devices: int, num_nodes: int, ends: Sequence[tuple[int, int]],
                 rates: Sequence[tuple[float, float]]) -> None:
        """Nodes below ``num_devices`` are devices; ``ends`` and ``rates`` are (from, to) and (bytes/s, s) per link."""
        self._num_devices = num_devices
        self._ends = ends
        self._rates = rates
        self._out: list[list[int]] = [[] for _ in range(num_nodes)]
        self._into: list[list[int]] = [[] for _ in range(num_nodes)]
        for link, (source, target) in enumerate(ends):
            self._out[source].append(link)
            self._into[target].append(link)
        self._to_switches = [[link for link in links if ends[link][1] >= num_devices] for links in self._out]
        self._trees: dict[int, list[int]] = {}
        self._near: dict[int, tuple[dict[int, int], dict[int, _Reached]]] = {}

    def path(self, source: int, target: int) -> tuple[int, ...] | None:
        """Return the links of the best route between two devices, or None where there is no way."""
        if source == target:
            return ()
        first: tuple[int, ...] = ()
        root = source
        if len(self._out[source]) == 1:
            neighbour = self._ends[self._out[source][0]][1]
            if neighbour == target:
                return (self._out[source][0],)
            if neighbour >= self._num_devices:
                first, root = (self._out[source][0],), neighbour
        rest = self._through_switches(root, target)
        if rest is None:
            if root not in self._trees:
                self._trees[root] = self._search(root, relay=True)
            rest = self._walk_back(self._trees[root], root, target)
        return None if rest is None else first + rest

    def _through_switches(self, root: int, target: int) -> tuple[int, ...] | None:
        """Return the best of the shortest routes on which no device passes on what is sent, or None.

        Clusters have many more devices than switches, so the search goes over these alone, and the last link is one of
        the few that lead to the target.
        """
        if root not in self._near:
            self._near[root] = self._search_switches(root)
        tree, near = self._near[root]
        links = [link for link in self._into[target] if self._ends[link][0] in near]
        if not links:
            return None
        link = links[0]
        if len(links) > 1:
            link = min((found.depth, -min(found.width, self._rates[link][0]), self._rates[link][1]
                        - found.negative_latency, found.order, link)
                       for link, found in ((link, near[self._ends[link][0]]) for link in links))[-1]
        before = self._walk_back(tree, root, self._ends[link][0])
        assert before is not None, "it was reached"
        return (*before, link)

    def _search_switches(self, root: int) -> tuple[dict[int, int], dict[int, _Reached]]:
        """Return, for each switch, the last link of the best route from ``root``, and what is known of those reached.
        """
        tree: dict[int, int] = {}
        reached = {root: _Reached(depth=0, width=float("inf"), negative_latency=0.0, order=0)}
        layer, depth = dict(reached), 0
        while layer:
            depth += 1
            following: dict[int, _Reached] = {}
            for node, known in layer.items():
                for link in self._to_switches[node]:
                    target, (bytes_per_s, latency_s) = self._ends[link][1], self._rates[link]
                    if target in reached:
                        continue
                    old = following.get(target)
                    new = _Reached(depth=depth, width=min(known.width, bytes_per_s), order=len(reached) + len(following)
                                   if old is None else old.order, negative_latency=known.negative_latency - latency_s)
                    if old is None or (new.width, new.negative_latency) > (old.width, old.negative_latency):
                        following[target] = new
                        tree[target] = link
            reached.update(following)
            layer = following
        return tree, reached

    def _walk_back(self, tree: Sequence[int] | Mapping[int, int], root: int, target: int) -> tuple[int, ...] | None:
        links = []
        node = target
        while node != root:
            link = tree[node]
            if link == _NONE:
                return None
            links.append(link)
            node = self._ends[link][0]
        return tuple(reversed(links))

    def _search(self, root: int, relay: bool) -> list[int]:
        """Return, for each node, the last link of the best route from ``root``."""
        tree = [_NONE] * len(self._out)
        reached = {root: (float("inf"), 0.0)}
        layer = {root: reached[root]}
        while layer:
            following: dict[int, tuple[float, float]] = {}
            for node, (width, negative_latency) in layer.items():
                if node < self._num_devices and node != root and not relay:
                    continue
                for link in self._out[node]:
                    target = self._ends[link][1]
                    if target in reached:
                        continue
                    bytes_per_s, latency_s = self._rates[link]
                    quality = (min(width, bytes_per_s), negative_latency - latency_s)
                    if target not in following or quality > following[target]:
                        following[target] = quality
                        tree[target] = link
            reached.update(following)
            layer = following
        return tree
