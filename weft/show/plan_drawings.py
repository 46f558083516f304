"""The drawings of a plan's page beside the chart: the cluster with what runs where, and memory over time.

The cluster has a card for each host, a box for each device, a line to the network. A switch that touches the devices of
one host only belongs to that host; other switches join hosts. Hosts that are alike in devices, links and stages are one
record, and so are alike devices of a large host. Of memory there is a small drawing for each device: what it holds, by
category, under its capacity; devices that hold the same at the same times share one.

Colours and fonts are the page's (``report.css``), so that drawings follow its light and dark scheme; the colour of a
device's edge is its kind's, which is written on it, too. Every text is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

import numpy as np

from weft.base.units import format_bytes, format_rate
from weft.cluster.cluster import Cluster
from weft.model.graph import I64
from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.show.names import grouped, printable, short_list
from weft.simulate.timeline import Timeline

MAX_HOSTS: Final = 12
"""Of more hosts, those with equal hardware are drawn as one, whatever runs there."""
MIN_ALIKE: Final = 3
"""So many hosts that are alike in everything are drawn as one."""
MAX_DEVICES: Final = 32
"""Of more devices, those of a host that are alike in everything are drawn as one."""
MAX_CHIPS: Final = 16
"""Of more different devices in a host, those of a kind are drawn as one, whatever runs there."""
NUM_COLOURS: Final = 8
MAX_PANELS: Final = 24
"""Of more different devices, those that are fullest are drawn."""
COLUMNS: Final = 120
_HEIGHT: Final = 72
_MARGIN: Final = 1.06
_FAR: Final = 4
"""A capacity that is more than so many times the peak is not drawn."""


# ---- the cluster


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

    kinds: Mapping[str, int]
    """How many devices there are of each kind."""
    hosts: tuple[HostFacts, ...]
    switches: tuple[str, ...]
    """Those that join hosts."""
    direct: tuple[tuple[str, str, float], ...]
    """Links from host to host without a switch: names and rate."""


def cluster_facts(cluster: Cluster, plan: Plan) -> ClusterFacts:
    """Return what is drawn of the cluster and of the plan on it."""
    host_of, work = _nodes_by_host(cluster), _work(plan)
    inside: dict[str, set[float]] = {}
    outside: dict[str, dict[str, float]] = {}
    direct: dict[tuple[str, str], float] = {}
    for link in cluster.links:
        source, target = host_of.get(link.source), host_of.get(link.target)
        if source is not None and target is None:
            rates = outside.setdefault(source, {})
            rates[link.target] = max(link.bytes_per_s, rates.get(link.target, 0.0))
        elif source is not None and source == target:
            inside.setdefault(source, set()).add(link.bytes_per_s)
        elif source is not None and (link.target, link.source) not in direct:
            direct[link.source, link.target] = link.bytes_per_s
    hosts = []
    for devices in grouped(cluster.devices, lambda device: device.host):
        name = devices[0].host
        chips = [ChipFacts(names=(device.name,), kind=device.kind, memory_bytes=device.memory_bytes,
                           work=tuple(work.get(device.name, ()))) for device in devices]
        hosts.append(HostFacts(
            names=(name,), chips=tuple(chips if cluster.num_devices <= MAX_DEVICES else _fold_chips(chips)),
            inside=tuple(sorted(inside.get(name, ()), reverse=True)), outside=outside.get(name, {})))
    return ClusterFacts(kinds=Counter(device.kind for device in cluster.devices), hosts=_fold_hosts(hosts),
                        switches=tuple(name for name in cluster.switches if name not in host_of),
                        direct=tuple((*ends, rate) for ends, rate in direct.items()))


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


def _fold_chips(chips: Sequence[ChipFacts]) -> list[ChipFacts]:
    """Return alike devices together; where too many kinds of work are left, those of a kind with all its work."""
    groups = grouped(chips, lambda chip: (chip.kind, chip.memory_bytes, chip.work))
    if len(groups) > MAX_CHIPS:
        groups = grouped(chips, lambda chip: (chip.kind, chip.memory_bytes))
    return [_join_chips(group) for group in groups]


def _join_chips(chips: Sequence[ChipFacts]) -> ChipFacts:
    return replace(chips[0], names=tuple(name for chip in chips for name in chip.names),
                   work=tuple(dict.fromkeys(item for chip in chips for item in chip.work)))


def _fold_hosts(hosts: Sequence[HostFacts]) -> tuple[HostFacts, ...]:
    """Return alike hosts together where there are several; where many are left, all with equal hardware."""
    exact = grouped(hosts, lambda host: (_hardware(host), tuple(chip.work for chip in host.chips)))
    drawn = [group for members in exact
             for group in ([members] if len(members) >= MIN_ALIKE else [[host] for host in members])]
    return tuple(replace(alike[0], names=tuple(name for host in alike for name in host.names),
                         chips=tuple(map(_join_chips, zip(*(host.chips for host in alike), strict=True))))
                 for alike in (drawn if len(drawn) <= MAX_HOSTS else grouped(hosts, _hardware)))


def _hardware(host: HostFacts) -> object:
    chips = tuple((chip.kind, chip.memory_bytes, len(chip.names)) for chip in host.chips)
    return chips, host.inside, tuple(host.outside.items())


def chip_title(chip: ChipFacts, num_hosts: int) -> str:
    """Return the names of a chip: ``a0``, ``a0 - a7`` for alike ones, ``a0 ...`` for one in each of alike hosts."""
    if len(chip.names) == 1:
        return chip.names[0]
    return f"{chip.names[0]} ..." if num_hosts == len(chip.names) > 1 else short_list(chip.names, limit=2)


def cluster_html(facts: ClusterFacts) -> str:
    """Return the drawing as elements that the page's style lays out."""
    kinds = {name: index % NUM_COLOURS for index, name in enumerate(facts.kinds)}
    hosts = "".join(_host(host, kinds, facts.switches) for host in facts.hosts)
    bars = "".join(f'<p class="switch">{escape(printable(name))}</p>' for name in facts.switches)
    return f'<div class="cluster"><div class="hosts">{hosts}</div>{bars}</div>'


def _host(host: HostFacts, kinds: Mapping[str, int], switches: Sequence[str]) -> str:
    """Return a card: the host's name and rates inside, its devices, and its rate to each switch below it."""
    title = f"Host {short_list(map(printable, host.names), limit=2)}" + _times(len(host.names))
    rates = ", ".join(format_rate(rate) for rate in host.inside[:2])
    wires = (f"{format_rate(host.outside[name])} to {printable(name)}" for name in switches if name in host.outside)
    return (f'<div class="host"><div class="card"><p><b>{escape(title)}</b><span>{escape(rates)}</span></p>'
            f'<ul>{"".join(_chip(chip, len(host.names), kinds[chip.kind]) for chip in host.chips)}</ul></div>'
            + "".join(f'<p class="wire">{escape(wire)}</p>' for wire in wires) + "</div>")


def _chip(chip: ChipFacts, num_hosts: int, colour: int) -> str:
    memory = "" if chip.memory_bytes is None else f", {format_bytes(chip.memory_bytes)}"
    title = printable(chip_title(chip, num_hosts)) + _times(len(chip.names) // num_hosts)
    full = f"{short_list(map(printable, chip.names))}: {printable(chip.kind)}{memory}; " + (
        short_list(map(printable, chip.work), limit=12) or "no work")
    work = short_list(map(printable, chip.work), limit=2) or "idle"
    return (f'<li class="kind-{colour}{"" if chip.work else " idle"}" title="{escape(full)}"><b>{escape(title)}</b>'
            f"<span>{escape(work)}</span><small>{escape(printable(chip.kind))}</small></li>")


def _times(count: int) -> str:
    return f" \u00d7 {count}" if count > 1 else ""


# ---- memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPanel:
    """What some devices hold over the step."""

    devices: tuple[str, ...]
    capacity_bytes: int | None
    num_bytes: I64
    """[column, category], in the order of ``CATEGORIES``."""

    @property
    def peak_bytes(self) -> int:
        """Return the largest total."""
        return int(self.num_bytes.sum(axis=1).max())

    @property
    def shows_capacity(self) -> bool:
        """Return whether the capacity is near enough to be drawn."""
        return self.capacity_bytes is not None and self.capacity_bytes <= _FAR * self.peak_bytes


def memory_panels(timeline: Timeline, capacities: Mapping[str, int | None]) -> tuple[MemoryPanel, ...]:
    """Return what the devices hold, alike ones together, in the order of the first of each; idle ones are left out."""
    held = [(device, _columns(timeline, rank)) for rank, device in enumerate(timeline.devices)]
    groups = grouped((item for item in held if item[1].any()),
                     lambda item: (capacities.get(item[0]), item[1].tobytes()))
    return tuple(MemoryPanel(devices=tuple(device for device, _ in alike), capacity_bytes=capacities.get(alike[0][0]),
                             num_bytes=alike[0][1]) for alike in groups)


def fullest(panels: Sequence[MemoryPanel]) -> tuple[MemoryPanel, ...]:
    """Return the panels to draw, in their order: all, or those that are fullest."""
    by_use = sorted(range(len(panels)), key=lambda index: -panels[index].peak_bytes / (
        panels[index].capacity_bytes or 1))
    return tuple(panels[index] for index in sorted(by_use[:MAX_PANELS]))


def _columns(timeline: Timeline, rank: int) -> I64:
    """Return for each column of the drawing the row of the memory curve that is largest within it."""
    curve = timeline.memory_curve(rank)
    edges = np.linspace(0.0, timeline.step_time_s, COLUMNS + 1)
    first = np.maximum(np.searchsorted(curve.time_s, edges[:-1], side="right") - 1, 0)
    last = np.maximum(np.searchsorted(curve.time_s, edges[1:], side="left"), first + 1)
    total = curve.num_bytes.sum(axis=1)
    rows = [low + int(np.argmax(total[low:high])) for low, high in zip(first.tolist(), last.tolist(), strict=True)]
    result: I64 = curve.num_bytes[rows]
    return result


def scale_of(panels: Sequence[MemoryPanel]) -> int:
    """Return the peak that drawings without a capacity share as their scale."""
    return max((panel.peak_bytes for panel in panels if not panel.shows_capacity), default=1)


def panel_svg(panel: MemoryPanel, shared_peak: int) -> str:
    """Return the drawing as an ``svg`` element that fills the width it is given."""
    top = _MARGIN * max(panel.peak_bytes, (panel.capacity_bytes or 0) if panel.shows_capacity else shared_peak, 1)
    below = np.concatenate([np.zeros((COLUMNS, 1), dtype=np.int64), np.cumsum(panel.num_bytes, axis=1)], axis=1)
    parts = [f'<path class="{name}" d="{"".join(_area(below[:, index], below[:, index + 1], top))}"/>'
             for index, name in enumerate(CATEGORIES) if panel.num_bytes[:, index].any()]
    if panel.shows_capacity and panel.capacity_bytes is not None:
        y = _HEIGHT * (1 - panel.capacity_bytes / top)
        parts.append(f'<line class="limit" x1="0" x2="{COLUMNS}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return (f'<svg class="memory" viewBox="0 0 {COLUMNS} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
            f'{"".join(parts)}</svg>')


def _area(low: I64, high: I64, top: float) -> Iterator[str]:
    """Yield the path of an area between two lines of steps."""
    forth, back = _steps(high, top), _steps(low[::-1], top)
    yield f"M0 {forth[0][1]}"
    yield from (f"V{y}H{x}" for x, y in forth)
    yield from (f"V{y}H{COLUMNS - x}" for x, y in back)
    yield "Z"


def _steps(values: I64, top: float) -> list[tuple[int, str]]:
    """Return (end, height) of each run of equal heights, as numbers of the drawing."""
    heights = [f"{_HEIGHT * (1 - value / top):.1f}".removesuffix(".0") for value in values.tolist()]
    ends = [index for index in range(1, len(heights)) if heights[index] != heights[index - 1]]
    return [(end, heights[end - 1]) for end in (*ends, len(heights))]
