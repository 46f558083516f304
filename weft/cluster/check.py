"""The checker of clusters: every way in which a ``Cluster`` can be unusable, collected and raised once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from weft.base.errors import ClusterError
from weft.cluster.cluster import Cluster, Link

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
        for what, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                yield f"kind {kind.name!r}: the {what} is {rate}, it must be more than zero and finite"
        if not (math.isfinite(kind.overhead_s) and kind.overhead_s >= 0):
            yield f"kind {kind.name!r}: the overhead is {kind.overhead_s}, it must be zero or more and finite"
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
        if not (math.isfinite(link.bytes_per_s) and link.bytes_per_s > 0):
            yield f"link {link.name!r}: the bandwidth is {link.bytes_per_s}, it must be more than zero and finite"
        if not (math.isfinite(link.latency_s) and link.latency_s >= 0):
            yield f"link {link.name!r}: the latency is {link.latency_s}, it must be zero or more and finite"
    for name in cluster.switches:
        problem = name_problem(name)
        if problem:
            yield f"the switch name {name!r} {problem}"


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
    neighbours: dict[str, list[str]] = {}
    for link in links:
        source, target = (link.target, link.source) if backward else (link.source, link.target)
        neighbours.setdefault(source, []).append(target)
    reached = {start}
    pending = [start]
    while pending:
        for node in neighbours.get(pending.pop(), ()):
            if node not in reached:
                reached.add(node)
                pending.append(node)
    return reached
