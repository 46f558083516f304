"""Ways to lay a pipeline's stages over the devices of a cluster.

Two families, for each tensor degree ``t`` (teams of ``t`` devices of one host and kind):

- *even*: all teams in order, divided into ``p`` equal runs, one for each stage;
- *grouped*, where devices differ: device groups (one host, one kind) in one of a few orders; each stage takes a run of
  groups, or a group is divided into several stages. Slow groups may be left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from weft.cluster.cluster import Cluster, DeviceId
from weft.errors import InputError
from weft.search.joint.setting import Layout, StageMesh, Team
from weft.search.problem import divisors

MAX_GROUPS: Final = 6
"""With more device groups than this, runs of groups are not enumerated."""
MAX_STAGES_IN_GROUP: Final = 8


def degrees(cluster: Cluster, known: Iterable[int]) -> list[int]:
    """Return the tensor degrees to try: 1, and those of ``known`` that divide every host's devices of a kind."""
    sizes = [len(group) for group in cluster.groups_by_host_and_kind()]
    return [1, *(degree for degree in sorted(set(known)) if all(size % degree == 0 for size in sizes))]


def layouts(cluster: Cluster, degree: int, speed: Sequence[float], *, max_stages: int) -> Iterator[Layout]:
    """Yield layouts with teams of ``degree`` devices, each once; ``speed`` is that of each device."""
    groups = cluster.groups_by_host_and_kind()
    seen: set[tuple[frozenset[Team], ...]] = set()
    for layout in itertools.chain(_even(groups, degree, max_stages), _grouped(groups, degree, speed, max_stages)):
        key = tuple(frozenset(mesh.teams) for mesh in layout)
        if key not in seen:
            seen.add(key)
            yield layout


def even_layout(cluster: Cluster, degree: int, num_stages: int) -> Layout:
    """Return all devices in teams of ``degree``, divided into equal stages; raise ``InputError`` if they cannot be."""
    found = (layout for layout in _even(cluster.groups_by_host_and_kind(), degree, num_stages)
             if len(layout) == num_stages)
    layout = next(found, None)
    if layout is None:
        raise InputError(f"{cluster.num_devices} devices cannot be divided into {num_stages} stages of teams of "
                         f"{degree}: choose degrees whose product divides their number")
    return layout


def teams_of(devices: Sequence[DeviceId], degree: int) -> tuple[Team, ...]:
    """Return consecutive devices in teams."""
    return tuple(tuple(devices[first : first + degree]) for first in range(0, len(devices), degree))


def _even(groups: Sequence[Sequence[DeviceId]], degree: int, max_stages: int) -> Iterator[Layout]:
    teams = [team for group in groups for team in teams_of(group, degree)]
    for stages in divisors(len(teams)):
        if stages <= max_stages:
            width = len(teams) // stages
            yield tuple(StageMesh(tuple(teams[first : first + width])) for first in range(0, len(teams), width))


def _grouped(groups: Sequence[Sequence[DeviceId]], degree: int, speed: Sequence[float],
             max_stages: int) -> Iterator[Layout]:
    """Yield runs of groups as stages, for the groups that remain when the slowest are left out."""
    if not 1 < len(groups) <= MAX_GROUPS:
        return
    by_speed = sorted(groups, key=lambda group: -sum(speed[device] for device in group))
    by_device = sorted(groups, key=lambda group: -speed[group[0]])
    for count in range(len(groups), 0, -1):
        for order in (groups if count == len(groups) else by_device[:count], by_device[:count], by_speed[:count],
                      by_device[:count][::-1]):
            for cut in itertools.product((False, True), repeat=count - 1):
                yield from _divided(_runs(order, cut), degree, max_stages)


def _runs(order: Sequence[Sequence[DeviceId]], cut: Sequence[bool]) -> list[list[Sequence[DeviceId]]]:
    runs = [[order[0]]]
    for group, begins in zip(order[1:], cut, strict=True):
        if begins:
            runs.append([group])
        else:
            runs[-1].append(group)
    return runs


def _divided(runs: Sequence[Sequence[Sequence[DeviceId]]], degree: int, max_stages: int) -> Iterator[Layout]:
    """Yield the runs as stages: one for each, or those of a single group divided into equal parts, all or none."""
    whole = tuple(StageMesh(tuple(team for group in run for team in teams_of(group, degree))) for run in runs)
    yield whole
    for parts in range(2, MAX_STAGES_IN_GROUP + 1):
        pieces = [piece for run, mesh in zip(runs, whole, strict=True) for piece in _pieces(run, mesh, parts)]
        if len(pieces) > len(whole) and len(pieces) <= max_stages:
            yield tuple(pieces)


def _pieces(run: Sequence[Sequence[DeviceId]], mesh: StageMesh, parts: int) -> list[StageMesh]:
    count = len(mesh.teams)
    parts = min(parts, count)
    if len(run) > 1 or count % parts:
        return [mesh]
    width = count // parts
    return [StageMesh(mesh.teams[first : first + width]) for first in range(0, count, width)]
