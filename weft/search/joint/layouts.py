"""Ways to lay a pipeline's stages over the devices of a cluster.

Two families, for each tensor degree ``t`` (teams of ``t`` devices of one host and kind):

- *even*: all teams in order, divided into ``p`` equal runs, one for each stage; and the same for fewer teams, where
  their number suits the batch better;
- *grouped*, where devices differ: device groups (one host, one kind) in one of a few orders; each stage takes a run of
  groups, or a group is divided into several stages. Slow groups may be left out.

Devices that make up no whole team stay idle.

What the joint search decides: which devices form a stage and how, and the settings of the whole plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster, DeviceId
from weft.search.common.problem import divisors
from weft.search.deploy.splits import Team
from weft.search.joint.tuning import TUNING


@dataclass(frozen=True, slots=True, eq=False)
class StageMesh:
    """The teams that share the samples of a stage. It may have thousands, so meshes are compared by identity."""

    teams: tuple[Team, ...]

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Return all devices, team by team."""
        return tuple(device for team in self.teams for device in team)


Layout = tuple[StageMesh, ...]
"""The meshes of a pipeline, from its first stage to its last; one for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a model: everything but where its operators are cut into stages."""

    layout: Layout
    microbatches: int
    chunks: int = 1
    """Stages on each mesh: with more than one, the pipeline goes over all meshes again and again."""
    recompute: bool = False
    """Of every segment of a stage only the inputs are kept; its forward runs again before its backward."""
    sharded_states: bool = False
    """Teams of a stage divide the optimizer's state among them."""
    searched_order: bool = False
    """What each device does in which order was searched for this placement; else it is 1F1B, interleaved for chunks."""

    @property
    def num_devices(self) -> int:
        """Return how many devices are used."""
        return sum(len(mesh.devices) for mesh in self.layout)

    def describe(self) -> str:
        """Return it in a few words: replicas x tensor degree of each stage, and what else is set."""
        widths = [f"{len(mesh.teams)}x{len(mesh.teams[0])}" for mesh in self.layout]
        same = f"{len(widths)} of {widths[0]}" if len(widths) > 1 and len(set(widths)) == 1 else " | ".join(widths)
        return "".join((
            f"stages {same} (replicas x tensor)", f", {self.chunks} chunks" if self.chunks > 1 else "",
            f", {self.microbatches} micro-batches", ", recompute" if self.recompute else "",
            ", sharded states" if self.sharded_states else "", ", searched order" if self.searched_order else ""))


# ---- layouts of a cluster --------------------------------------------------------------------------------------------


Speed = Callable[[Team], float]
"""Samples per second of the whole model on a team."""


def layouts(cluster: Cluster, degree: int, speed: Speed, *, batch: int, max_stages: int,
            teams: Collection[tuple[int, int]] | None = None) -> Iterator[Layout]:
    """Yield layouts with teams of ``degree`` devices, each once.

    ``teams`` are (device group, degree) for all groups that may divide operators; None for all.
    """
    groups = [teams_of(group, degree) for index, group in enumerate(cluster.groups_by_host_and_kind())
              if len(group) >= degree and (degree == 1 or teams is None or (index, degree) in teams)]
    seen: set[tuple[frozenset[Team], ...]] = set()
    for layout in itertools.chain(_even(groups, max_stages), _fewer(groups, speed, batch, max_stages),
                                  _grouped(groups, speed, max_stages)):
        key = tuple(frozenset(mesh.teams) for mesh in layout)
        if key not in seen:
            seen.add(key)
            yield layout


def even_layout(cluster: Cluster, degree: int, num_stages: int) -> Layout:
    """Return all devices in teams of ``degree``, divided into equal stages; raise ``InputError`` if they cannot be."""
    groups = cluster.groups_by_host_and_kind()
    found = (layout for layout in _even([teams_of(group, degree) for group in groups], num_stages)
             if len(layout) == num_stages)
    layout = next(found, None)
    if layout is None or any(len(group) % degree for group in groups):
        raise InputError(f"{cluster.num_devices} devices cannot be divided into {num_stages} stages of teams of "
                         f"{degree}: choose degrees whose product divides their number")
    return layout


def teams_of(devices: Sequence[DeviceId], degree: int) -> tuple[Team, ...]:
    """Return consecutive devices in teams, as many as there are whole ones."""
    return tuple(tuple(devices[first : first + degree]) for first in range(0, len(devices) - degree + 1, degree))


def _even(groups: Sequence[Sequence[Team]], max_stages: int) -> Iterator[Layout]:
    teams = [team for group in groups for team in group]
    for stages in divisors(len(teams)) if teams else ():
        if stages <= max_stages:
            yield _meshes(teams, stages)


def _meshes(teams: Sequence[Team], count: int) -> Layout:
    """Return the teams divided into equal meshes."""
    width = len(teams) // count
    return tuple(StageMesh(tuple(teams[first : first + width])) for first in range(0, len(teams), width))


def _fewer(groups: Sequence[Sequence[Team]], speed: Speed, batch: int, max_stages: int) -> Iterator[Layout]:
    """Yield even layouts of the fastest teams, as many as are a power of two or share the batch evenly."""
    total = sum(map(len, groups))
    if not 1 < total <= TUNING.max_fewer:
        return
    counts = {1 << (total.bit_length() - 1), max(count for count in range(1, total + 1) if batch % count == 0)}
    ordered = sorted(groups, key=lambda group: -speed(group[0]))
    for count in sorted(counts - {total}, reverse=True):
        yield from _even([[team for group in ordered for team in group][:count]], max_stages)


def _grouped(groups: Sequence[Sequence[Team]], speed: Speed, max_stages: int) -> Iterator[Layout]:
    """Yield runs of groups as stages, for the groups that remain when the slowest are left out."""
    few = len(groups) <= TUNING.max_groups
    if len(groups) < 2 or not (few or sum(map(len, groups)) <= TUNING.max_fewer):
        return
    by_group = sorted(groups, key=lambda group: -speed(group[0]) * len(group))
    by_team = sorted(groups, key=lambda group: -speed(group[0]))
    counts = range(len(groups), 0, -1) if few else [1 << power for power in range(len(groups).bit_length())][::-1]
    for count in counts:
        for order in (groups if count == len(groups) else by_team[:count], by_team[:count], by_group[:count],
                      by_team[:count][::-1]):
            cuts = itertools.product((False, True), repeat=count - 1) if few else (
                (False,) * (count - 1), (True,) * (count - 1))
            for cut in cuts:
                yield from _divided(_runs(order, cut), max_stages)


def _runs(order: Sequence[Sequence[Team]], cut: Sequence[bool]) -> list[Sequence[Sequence[Team]]]:
    places = [0, *itertools.compress(range(1, len(order)), cut), len(order)]
    return [order[first:last] for first, last in itertools.pairwise(places)]


def _divided(runs: Sequence[Sequence[Sequence[Team]]], max_stages: int) -> Iterator[Layout]:
    """Yield the runs as stages: one for each, or those of a single group divided into equal parts, all or none."""
    whole = tuple(StageMesh(tuple(team for group in run for team in group)) for run in runs)
    if len(whole) <= max_stages:
        yield whole
    for parts in range(2, TUNING.max_stages_in_group + 1):
        counts = [min(parts, len(mesh.teams)) for mesh in whole]
        pieces = [piece for run, mesh, count in zip(runs, whole, counts, strict=True) for piece in (
            (mesh,) if len(run) > 1 or len(mesh.teams) % count else _meshes(mesh.teams, count))]
        if len(pieces) > len(whole) and len(pieces) <= max_stages:
            yield tuple(pieces)
