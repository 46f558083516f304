"""A cluster as tables for people: its devices, and the effective bandwidth between them.

Up to ``MAX_ROWS`` devices are shown one by one; more are shown by groups of one host and kind, where a group's figures
are those of its first devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weft.base.units import format_bytes, format_count, format_rate
from weft.cluster.cluster import Cluster, DeviceId
from weft.show.chart import counted
from weft.show.tables import UNKNOWN, TextTable, make_table

MAX_ROWS: Final = 16
"""Larger clusters are shown by groups, and at most this many groups in the matrix."""


def summarize(cluster: Cluster) -> str:
    """Return one line: how many devices, hosts and links, what transfers occupy, and the digest."""
    num_hosts = len({device.host for device in cluster.devices})
    parts = [counted(cluster.num_devices, "device"), counted(num_hosts, "host"), counted(len(cluster.links), "link")]
    return f"{cluster.name}: {', '.join(parts)}, contention {cluster.contention.value}, digest {cluster.digest}"


def device_rows(cluster: Cluster) -> TextTable:
    """Return a row per device (or per group): name, kind, host, memory and its bandwidth, peak rates by dtype."""
    used = [cluster.kinds[name] for name in dict.fromkeys(device.kind for device in cluster.devices)]
    dtypes = tuple(dict.fromkeys(dtype for kind in used for dtype in kind.flop_per_s))
    rows = []
    for group in _shown_groups(cluster):
        device = cluster.devices[group[0]]
        kind = cluster.kinds[device.kind]
        rates = [kind.flop_per_s.get(dtype) for dtype in dtypes]
        rows.append((
            _label(cluster, group), device.kind, device.host,
            UNKNOWN if device.memory_bytes is None else format_bytes(device.memory_bytes),
            UNKNOWN if kind.memory_bytes_per_s is None else format_rate(kind.memory_bytes_per_s),
            *(UNKNOWN if rate is None else f"{format_count(rate)}FLOP/s" for rate in rates),
        ))
    header = ("device", "kind", "host", "memory", "memory bandwidth", *dtypes)
    return make_table(summarize(cluster), header, rows)


def bandwidth_matrix(cluster: Cluster) -> TextTable:
    """Return what one transfer alone gets between each two devices (or groups): senders down, receivers across."""
    groups = _shown_groups(cluster)
    shown = groups[:MAX_ROWS]
    labels = [_label(cluster, group) for group in shown]
    title = "effective bandwidth from row to column"
    if len(groups) > MAX_ROWS:
        title += f" (first {MAX_ROWS} groups, {len(groups) - MAX_ROWS} more not shown)"
    rows = tuple((label, *(_bandwidth(cluster, group, other) for other in shown))
                 for label, group in zip(labels, shown, strict=True))
    return make_table(title, ("", *labels), rows)


def _bandwidth(cluster: Cluster, group: Sequence[DeviceId], other: Sequence[DeviceId]) -> str:
    """Return the bandwidth of the route between the first devices of two groups, or inside one."""
    ends = (group[0], other[0]) if group is not other else group[:2]
    if len(ends) < 2 or not cluster.links:
        return UNKNOWN
    return format_rate(cluster.route(ends[0], ends[1]).bytes_per_s)


def _shown_groups(cluster: Cluster) -> tuple[tuple[DeviceId, ...], ...]:
    if cluster.num_devices > MAX_ROWS:
        return cluster.groups_by_host_and_kind()
    return tuple((DeviceId(index),) for index in range(cluster.num_devices))


def _label(cluster: Cluster, group: Sequence[DeviceId]) -> str:
    first, last = cluster.devices[group[0]].name, cluster.devices[group[-1]].name
    return first if len(group) == 1 else f"{first}..{last} ({len(group)})"
