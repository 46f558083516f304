"""A cluster as tables for people: its devices, and the effective bandwidth between them. The command line draws them.

Up to ``MAX_ROWS`` devices are shown one by one; more are shown by groups of one host and kind, where a group's figures
are those of its first devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weft.base.units import format_bytes, format_count, format_rate
from weft.cluster.cluster import Cluster, DeviceId

MAX_ROWS: Final = 16
"""Larger clusters are shown by groups, and at most this many groups in the matrix."""
UNKNOWN: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of text, to be drawn."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Bandwidth and latency of the route between each two devices, or groups of devices."""

    labels: tuple[str, ...]
    bytes_per_s: tuple[tuple[float | None, ...], ...]
    """By sender and receiver; None where there is no route to speak of."""
    latency_s: tuple[tuple[float | None, ...], ...]
    num_left_out: int
    """Groups beyond ``MAX_ROWS``, which are not shown."""


def summarize(cluster: Cluster) -> str:
    """Return one line: how many devices, hosts and links, what transfers occupy, and the digest."""
    num_hosts = len({device.host for device in cluster.devices})
    parts = [_count(cluster.num_devices, "device"), _count(num_hosts, "host"), _count(len(cluster.links), "link")]
    return f"{cluster.name}: {', '.join(parts)}, contention {cluster.contention.value}, digest {cluster.digest}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def device_rows(cluster: Cluster) -> Table:
    """Return a row per device (or per group): name, kind, host, memory and its bandwidth, peak rates by dtype."""
    used = [cluster.kinds[name] for name in dict.fromkeys(device.kind for device in cluster.devices)]
    dtypes = tuple(dict.fromkeys(dtype for kind in used for dtype in kind.flop_per_s))
    rows = []
    for group in _shown_groups(cluster):
        device = cluster.devices[group[0]]
        kind = cluster.kinds[device.kind]
        rates = [kind.flop_per_s.get(dtype) for dtype in dtypes]
        rows.append((
            _label(cluster, group),
            device.kind,
            device.host,
            UNKNOWN if device.memory_bytes is None else format_bytes(device.memory_bytes),
            UNKNOWN if kind.memory_bytes_per_s is None else format_rate(kind.memory_bytes_per_s),
            *(UNKNOWN if rate is None else f"{format_count(rate)}FLOP/s" for rate in rates),
        ))
    header = ("device", "kind", "host", "memory", "memory bandwidth", *dtypes)
    return Table(title=summarize(cluster), header=header, rows=tuple(rows))


def effective_bandwidths(cluster: Cluster) -> Bandwidths:
    """Return what one transfer alone gets between each two devices (or groups) by its route."""
    groups = _shown_groups(cluster)
    shown = groups[:MAX_ROWS]
    bandwidths, latencies = [], []
    for row, group in enumerate(shown):
        routes = [_pair(group, other, is_same=row == column) for column, other in enumerate(shown)]
        found = [cluster.route(*pair) if pair is not None and cluster.links else None for pair in routes]
        bandwidths.append(tuple(None if route is None else route.bytes_per_s for route in found))
        latencies.append(tuple(None if route is None else route.latency_s for route in found))
    return Bandwidths(
        labels=tuple(_label(cluster, group) for group in shown),
        bytes_per_s=tuple(bandwidths),
        latency_s=tuple(latencies),
        num_left_out=len(groups) - len(shown),
    )


def bandwidth_matrix(cluster: Cluster) -> Table:
    """Return ``effective_bandwidths`` as text: senders down, receivers across."""
    found = effective_bandwidths(cluster)
    rows = [
        (label, *(UNKNOWN if value is None else format_rate(value) for value in values))
        for label, values in zip(found.labels, found.bytes_per_s, strict=True)
    ]
    title = "effective bandwidth from row to column"
    if found.num_left_out:
        title += f" (first {len(rows)} groups, {found.num_left_out} more not shown)"
    return Table(title=title, header=("", *found.labels), rows=tuple(rows))


def _shown_groups(cluster: Cluster) -> tuple[tuple[DeviceId, ...], ...]:
    if cluster.num_devices > MAX_ROWS:
        return cluster.groups_by_host_and_kind()
    return tuple((DeviceId(index),) for index in range(cluster.num_devices))


def _pair(group: Sequence[DeviceId], other: Sequence[DeviceId], *, is_same: bool) -> tuple[DeviceId, DeviceId] | None:
    if not is_same:
        return group[0], other[0]
    return (group[0], group[1]) if len(group) > 1 else None


def _label(cluster: Cluster, group: Sequence[DeviceId]) -> str:
    first, last = cluster.devices[group[0]].name, cluster.devices[group[-1]].name
    return first if len(group) == 1 else f"{first}..{last} ({len(group)})"
