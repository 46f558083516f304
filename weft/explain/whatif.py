"""What would help: the same step planned again with one device more, twice the bandwidth, or more memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from weft.cluster.cluster import Cluster
from weft.errors import WeftError
from weft.explain.changes import both_ways, tier_of, with_bandwidth, with_memory, with_more_devices
from weft.explain.path import link_rates, link_seconds
from weft.explain.replan import Report, Request, replan
from weft.planner import Candidate, Comparison
from weft.simulate.timeline import Timeline
from weft.simulate.traffic import link_bytes
from weft.units import format_bytes

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
    """Of that plan; empty if nothing better than before was found."""
    gain: float | None = None
    """The part of the step that is saved."""
    note: str = ""
    """Why it was not planned, or not to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A change to be planned for, or why not."""

    name: str
    make: Callable[[], Cluster] | None = None
    note: str = ""
    drops_recomputation: bool = False
    """Plan without recomputation as well."""


def what_would_help(request: Request, cluster: Cluster, timeline: Timeline, comparison: Comparison | None, *,
                    deadline: float | None, report: Report = lambda text: None) -> Iterator[Change]:
    """Yield each change as it is planned; ``deadline`` is on ``time.monotonic``'s clock, for all of them.

    ``timeline`` is the plan's. ``comparison`` is what planning again for the same cluster came to: gains are against
    the faster of both.
    """
    before_s = timeline.step_time_s
    if comparison is not None:
        before_s = min(before_s, comparison.best.step_time_s)
    trials = [_one_more(cluster, timeline), *_bandwidths(request, cluster, timeline),
              _more_memory(request, cluster, timeline, comparison)]
    for number, trial in enumerate(trials):
        yield _try(trial, request, before_s, deadline=deadline, num_left=len(trials) - number, report=report)


def _try(trial: _Trial, request: Request, before_s: float, *, deadline: float | None, num_left: int,
         report: Report) -> Change:
    left = None if deadline is None else deadline - time.monotonic()
    if trial.make is None:
        return Change(name=trial.name, note=trial.note)
    if left is not None and left <= 0:
        return Change(name=trial.name, note="not tried: the time limit was reached")
    report(f"planning with {trial.name}")
    requests = [without_recomputation(request), request] if trial.drops_recomputation else [request]
    limit_s = None if left is None else left / num_left / len(requests)
    candidates, misses = list[Candidate](), list[WeftError]()
    begin = time.monotonic()
    for item in requests:
        try:
            candidates.append(replan(item.problem(trial.make()), item, strategies=PLAIN, time_limit_s=limit_s,
                                     report=report).best)
        except WeftError as miss:
            misses.append(miss)
    if not candidates:
        return Change(name=trial.name, note=f"cannot be planned: {misses[-1]}")
    found = min(candidates, key=lambda candidate: candidate.step_time_s)
    step_time_s = min(found.step_time_s, before_s)
    is_cut = limit_s is not None and time.monotonic() - begin >= limit_s * len(requests)
    return Change(name=trial.name, step_time_s=step_time_s, gain=1 - step_time_s / before_s,
                  strategy=found.strategy if found.step_time_s < before_s else "",
                  note="the time limit ended the search: with more time it may gain more" if is_cut else "")


def _one_more(cluster: Cluster, timeline: Timeline) -> _Trial:
    """Return one more device like the busiest one."""
    rank = int(timeline.busy_s.argmax())
    device = cluster.device_index[timeline.devices[rank]]
    like = cluster.devices[device]
    return _Trial(name=f"one more {like.kind} on host {like.host}", make=lambda: with_more_devices(cluster, device))


def _bandwidths(request: Request, cluster: Cluster, timeline: Timeline) -> Iterator[_Trial]:
    """Yield the busiest link of twice the bandwidth, and all links like it; if nothing is sent, the slowest links."""
    assert timeline.program is not None
    if cluster.num_devices < 2 or not cluster.links:
        yield _Trial(name="twice the bandwidth", note="the cluster has no links")
        return
    costs = request.costs_of(request.graph, cluster)
    if costs.comm_fits:
        yield _Trial(name="twice the bandwidth", note="collectives are timed by a fit of measurements, not by links")
        return
    times = link_seconds(link_bytes(timeline.program, costs, cluster), link_rates(cluster))
    if times:
        name = max(times, key=lambda link: times[link])
        links = both_ways(cluster, name)
        yield _Trial(name=f"twice the bandwidth of {name}", make=lambda: with_bandwidth(cluster, links, 2.0))
    else:
        slowest = min(range(len(cluster.links)), key=lambda index: cluster.links[index].bytes_per_s)
        links, name = frozenset((slowest,)), cluster.links[slowest].name
    tier = tier_of(cluster, links)
    if not times or tier != links:
        yield _Trial(name=f"twice the bandwidth of all {len(tier)} links like {name}",
                     make=lambda: with_bandwidth(cluster, tier, 2.0))


def _more_memory(request: Request, cluster: Cluster, timeline: Timeline, comparison: Comparison | None) -> _Trial:
    name = f"{format_bytes(EXTRA_BYTES)} more memory on every device"
    if all(device.memory_bytes is None for device in cluster.devices):
        return _Trial(name=name, note="no device has a limit")
    if not memory_binds(cluster, timeline, comparison):
        return _Trial(name=name, note="memory does not bind: no strategy was refused for it, nothing is recomputed, "
                                      "and every device has half of it free")
    return _Trial(name=name, make=lambda: with_memory(cluster, EXTRA_BYTES),
                  drops_recomputation=request.options.recompute)


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


def without_recomputation(request: Request) -> Request:
    """Return the request with everything kept between forward and backward."""
    return replace(request, options=replace(request.options, recompute=False))
