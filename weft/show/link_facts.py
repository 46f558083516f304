"""What each link of the cluster carries in one step, as records; alike links are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weft.cluster.cluster import Cluster
from weft.plan.program import Program
from weft.show.names import short_list

MAX_PARTS: Final = 3
"""Longer lists of links are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """Links that are equally fast and carry equally much."""

    names: tuple[str, ...]
    """``a0>a/fabric``, or the name of a shared medium."""
    bytes_per_s: float | None
    """None where the cluster gives no rates for links."""
    latency_s: float | None
    num_bytes: int
    """Over each of them."""
    busy: float | None
    """Part of the step that the bytes take at the link's rate; the rest it is idle or waits for slower links."""


def link_facts(program: Program, cluster: Cluster, step_time_s: float) -> tuple[LinkFacts, ...]:
    """Return the links that carry something in a step of that length, the busiest first.

    Bytes are those of tensors between stages and of gradients; what the devices of one replica exchange inside a
    sharded stage is not among them.
    """
    from weft.cost.costs import estimate_costs
    from weft.simulate.traffic import link_bytes

    costs = estimate_costs(program.graph, cluster, dtype=program.plan.model.dtype)
    rates: dict[str, tuple[float, float]] = {}
    for link in cluster.links:
        name = link.shared if link.shared is not None else link.name
        rates.setdefault(name, (link.bytes_per_s, link.latency_s))
    groups: dict[tuple[tuple[float, float] | None, int], list[str]] = {}
    for name, num_bytes in link_bytes(program, costs, cluster).items():
        groups.setdefault((rates.get(name), num_bytes), []).append(name)
    rows = [_facts(tuple(names), rate, num_bytes, step_time_s) for (rate, num_bytes), names in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-(row.busy or 0.0), -row.num_bytes)))


def _facts(names: tuple[str, ...], rate: tuple[float, float] | None, num_bytes: int, step_time_s: float) -> LinkFacts:
    bytes_per_s, latency_s = rate if rate is not None else (None, None)
    busy = num_bytes / bytes_per_s / step_time_s if bytes_per_s and step_time_s > 0 else None
    return LinkFacts(names=names, bytes_per_s=bytes_per_s, latency_s=latency_s, num_bytes=num_bytes, busy=busy)


def link_title(names: Sequence[str]) -> str:
    """Return the names of alike links in short form.

    >>> link_title(["a0>a/fabric", "a/fabric>a0", "a1>a/fabric", "a/fabric>a1"])
    'a0 - a1 > a/fabric, a/fabric > a0 - a1'
    """
    pairs = [tuple(name.split(">")) for name in names if name.count(">") == 1]
    num_sources = Counter(pair[1] for pair in pairs)
    into: dict[str, list[str]] = {}
    out_of: dict[str, list[str]] = {}
    for source, target in pairs:
        if num_sources[target] > 1:
            into.setdefault(target, []).append(source)
        else:
            out_of.setdefault(source, []).append(target)
    parts = [f"{short_list(sources, limit=4)} > {target}" for target, sources in into.items()]
    parts += [f"{source} > {short_list(targets, limit=4)}" for source, targets in out_of.items()]
    parts += [name for name in names if name.count(">") != 1]
    return ", ".join(parts[:MAX_PARTS]) + (f", {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else "")
