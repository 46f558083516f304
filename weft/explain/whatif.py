"""What would help: the same step planned again with one device more, twice the bandwidth, or more memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import WeftError
from weft.base.units import format_bytes
from weft.cluster.cluster import Cluster, DeviceId, Link, check_cluster
from weft.explain.path import link_times
from weft.planning.compare import Candidate, Comparison
from weft.planning.replan import Request, replan
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.simulate.timeline import Timeline
from weft.simulate.timing import simulate

EXTRA_BYTES: Final = 10 * 2**30
PLAIN: Final = ("single", "data-parallel-by-speed", "1f1b-balanced")
"""Plain strategies that are planned again, besides the searches: the others are hardly ever better."""
FULL: Final = 0.5
"""From this part of its memory on, a device might be the reason for a slower plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the cluster, and what planning again came to."""

    name: str
    """Such as ``one more A100-80GB on host a``."""
    step_time_s: float | None = None
    """Of the best plan found; never more than before, since the old plan still runs."""
    strategy: str = ""
    """Of that plan; empty if none better than the one before was found, which may be faster there itself."""
    gain: float | None = None
    """The part of the step that is saved."""
    before_s: float | None = None
    """The best step known without the change, once this was planned."""
    note: str = ""
    """Why it was not planned, or not to the end."""


Trial = tuple[str, Callable[[], Cluster] | str]
"""The name of a change, and what makes the cluster with it, or why it is not planned for."""


def what_would_help(request: Request, cluster: Cluster, timeline: Timeline, comparison: Comparison | None,
                    budget: Budget) -> Iterator[Change]:
    """Yield each change as it is planned; ``budget`` is for all of them.

    ``timeline`` is the plan's. ``comparison`` is what planning again for the same cluster came to: gains are against
    the faster of both.
    """
    known = _Known(request, cluster, timeline, comparison)
    device = cluster.device_index[timeline.devices[int(timeline.busy_s.argmax())]]
    busiest = cluster.devices[device]
    trials: list[Trial] = [
        (f"one more {busiest.kind} on host {busiest.host}", lambda: with_more_devices(cluster, device)),
        *_bandwidths(request, cluster, timeline), _more_memory(cluster, timeline, comparison)]
    for number, (name, make) in enumerate(trials):
        if isinstance(make, str):
            yield Change(name=name, note=make)
        elif budget.is_late:
            yield Change(name=name, note="not tried: the time limit was reached")
        else:
            try:
                with cut_short(budget.deadline):
                    change = _try(name, make(), request, known, budget.part(1 / (len(trials) - number)))
            except OutOfTime:
                change = Change(name=name, note="the time limit ended the search before anything was known")
            yield change


def settled(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes with gains against the best that is known without any of them.

    A plan found for another cluster may be the best for this one too: then it is the search that gains, not the change.
    """
    before_s = min((item.before_s for item in changes if item.before_s is not None), default=0.0)
    return tuple(item if item.step_time_s is None else replace(
        item, before_s=before_s, step_time_s=min(item.step_time_s, before_s),
        gain=max(0.0, 1 - item.step_time_s / before_s),
        strategy=item.strategy if item.step_time_s < before_s else "") for item in changes)


class _Known:
    """The plans for the cluster as it is, to be timed on others."""

    def __init__(self, request: Request, cluster: Cluster, timeline: Timeline, comparison: Comparison | None) -> None:
        self.request, self.cluster, self.before_s = request, cluster, timeline.step_time_s
        self.timelines = [timeline]
        if comparison is not None:
            self.before_s = min(self.before_s, comparison.best.step_time_s)
            best = comparison.best.timeline
            if best is not None and best.step_time_s == comparison.best.step_time_s:
                self.timelines.append(best)

    def seconds_on(self, cluster: Cluster) -> float:
        """Return what the best of the plans takes on another cluster; never more than before, as changes do no harm."""
        if len(cluster.devices) != len(self.cluster.devices):
            return self.before_s
        return min([self.before_s, *(self._timed(item, cluster) for item in self.timelines)])

    def add(self, found: Candidate, planned_for: Cluster) -> None:
        """Note what a plan for another cluster takes on this one, where it runs here as well."""
        timeline, same = found.timeline, len(planned_for.devices) == len(self.cluster.devices)
        if (same and self.has_memory_of(planned_for) and timeline is not None
                and timeline.step_time_s == found.step_time_s and not _has_times(timeline)):
            self.before_s = min(self.before_s, self._timed(timeline, self.cluster))

    def has_memory_of(self, cluster: Cluster) -> bool:
        """Return whether the devices have as much memory as those of another cluster."""
        return all(one.memory_bytes == other.memory_bytes
                   for one, other in zip(self.cluster.devices, cluster.devices, strict=False))

    def _timed(self, timeline: Timeline, cluster: Cluster) -> float:
        assert timeline.program is not None
        costs = self.request.costs_of(self.request.graph, cluster)
        return simulate(timeline.program, costs, cluster).step_time_s


def _has_times(timeline: Timeline) -> bool:
    """Return whether the plan has times of tp groups, which are those of the cluster it was made for."""
    assert timeline.program is not None
    return any(replica.times and len(replica.devices) > 1 for stage in timeline.program.plan.stages
               for replica in stage.replicas)


def _try(name: str, cluster: Cluster, request: Request, known: _Known, budget: Budget) -> Change:
    """Return what planning for the changed cluster comes to, within the budget; with more memory, nothing recomputed.
    """
    budget.report(f"planning with {name}")
    keeping = replace(request, options=replace(request.options, recompute=False))
    requests = [keeping, request] if request.options.recompute and not known.has_memory_of(cluster) else [request]
    candidates, note, is_complete = list[Candidate](), "", True
    for number, item in enumerate(requests):
        try:
            comparison = replan(item.problem(cluster), item, strategies=PLAIN,
                                budget=budget.part(1 / (len(requests) - number)))
        except WeftError as miss:
            note = f"no other plan was found: {str(miss).splitlines()[-1]}"
            continue
        if comparison.is_interrupted:
            raise KeyboardInterrupt
        candidates.append(comparison.best)
        is_complete &= comparison.is_complete
    kept_s = known.seconds_on(cluster)
    found = min(candidates, key=lambda candidate: candidate.step_time_s, default=None)
    if found is not None:
        known.add(found, cluster)
        note = "" if is_complete else "the time limit ended the search: more time may find more"
    step_time_s = min(kept_s, float("inf") if found is None else found.step_time_s)
    return Change(name=name, step_time_s=step_time_s, gain=max(0.0, 1 - step_time_s / known.before_s), note=note,
                  strategy=found.strategy if found is not None and found.step_time_s < kept_s else "",
                  before_s=known.before_s)


def _bandwidths(request: Request, cluster: Cluster, timeline: Timeline) -> Iterator[Trial]:
    """Yield the busiest link of twice the bandwidth, and all links like it; if nothing is sent, the slowest links."""
    assert timeline.program is not None
    if cluster.num_devices < 2 or not cluster.links:
        yield "twice the bandwidth", "the cluster has no links"
        return
    costs = request.costs_of(request.graph, cluster)
    if costs.comm_fits:
        yield "twice the bandwidth", "collectives are timed by a fit of measurements, not by links"
        return
    times = link_times(timeline.program, costs, cluster)
    if times:
        name = max(times, key=lambda link: times[link])
        links = both_ways(cluster, name)
        yield f"twice the bandwidth of {name}", lambda: with_bandwidth(cluster, links, 2.0)
    else:
        slowest = min(range(len(cluster.links)), key=lambda index: cluster.links[index].bytes_per_s)
        links, name = frozenset((slowest,)), cluster.links[slowest].name
    tier = tier_of(cluster, links)
    if not times or tier != links:
        yield f"twice the bandwidth of all {len(tier)} links like {name}", lambda: with_bandwidth(cluster, tier, 2.0)


def _more_memory(cluster: Cluster, timeline: Timeline, comparison: Comparison | None) -> Trial:
    name = f"{format_bytes(EXTRA_BYTES)} more memory on every device"
    if all(device.memory_bytes is None for device in cluster.devices):
        return name, "no device has a limit"
    if not memory_binds(cluster, timeline, comparison):
        return name, ("memory does not bind: no strategy was refused for it, nothing is recomputed, and every device "
                      "has half of it free")
    return name, lambda: with_memory(cluster, EXTRA_BYTES)


def memory_binds(cluster: Cluster, timeline: Timeline, comparison: Comparison | None) -> bool:
    """Return whether more memory could allow another plan."""
    assert timeline.program is not None
    if any(stage.recompute for stage in timeline.program.plan.stages):
        return True
    if comparison is not None and any(item.problem is not None and item.problem.missing_bytes is not None
                                      for item in comparison.candidates):
        return True
    return any(capacity is not None and item.peak_bytes > FULL * capacity
               for item in timeline.summary()
               if (capacity := cluster.devices[cluster.device_index[item.device]].memory_bytes) is not None)


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
