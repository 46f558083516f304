"""Ways to lay a pipeline's stages over the devices of a cluster.

Two families, for each tensor degree ``t`` (tp groups of ``t`` devices of one host and kind):

- *even*: all tp groups in order, divided into ``p`` equal runs, one for each stage; and the same for fewer tp groups,
  where their number suits the batch better;
- *grouped*, where devices differ: device groups (one host, one kind) in one of a few orders; each stage takes a run of
  groups, or a group is divided into several stages. Slow groups may be left out.

Devices that make up no whole tp group stay idle.

What the joint search decides: which devices form a stage and how, and the settings of the whole plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.cluster.cluster import Cluster, DeviceId
from weft.search.common.degrees import NONE_FIXED, Degrees
from weft.search.common.problem import divisors
from weft.search.deploy.splits import TpGroup
from weft.search.joint.pieces import PieceGroup
from weft.search.joint.tuning import TUNING


@dataclass(frozen=True, slots=True, eq=False)
class StageMesh:
    """The tp groups that share the samples of a stage. It may have thousands, so meshes are compared by identity."""

    tp_groups: tuple[TpGroup, ...]

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Return all devices, tp group by tp group."""
        return tuple(device for tp_group in self.tp_groups for device in tp_group)


Layout = tuple[StageMesh, ...]
"""The meshes of a pipeline, from its first stage to its last; one for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a model: everything but where its operators are cut into stages."""

    layout: Layout
    microbatches: int
    chunks: int = 1
    """Stages on each mesh: with more than one, the pipeline goes over all meshes again and again."""
    is_v: bool = False
    """With two of them it goes over all meshes and back, in an order that holds less than 1F1B."""
    is_tight: bool = False
    """No more than one micro-batch has to fit: the order is what the search finds in the memory there is."""
    recompute: bool = False
    """Of every segment of a stage only the inputs are kept; its forward runs again before its backward."""
    zero: int = 0
    """What the tp groups of a stage keep in pieces, as ``--zero`` says it: 1 the optimizer's states, 2 gradients, too,
    3 parameters, too (fsdp)."""
    zero_group: PieceGroup = "all"
    """Who has a whole together: all tp groups of a stage, or those on one host (hybrid)."""
    cp: int = 1
    """So many of the devices of each tp group divide the sequence of its samples; the rest operators."""
    searched_order: bool = False
    """What each device does in which order was searched for this placement; else it is 1F1B, interleaved for chunks."""

    @property
    def in_units(self) -> bool:
        """Return whether a stage is divided into units, which are gathered or scattered one by one."""
        return self.zero >= 2

    @property
    def mesh_of(self) -> list[int]:
        """Return the mesh of each stage."""
        meshes = range(len(self.layout))
        return [*meshes, *reversed(meshes)] if self.is_v else [*meshes] * self.chunks

    @property
    def num_devices(self) -> int:
        """Return how many devices are used."""
        return sum(len(mesh.devices) for mesh in self.layout)

    def copies(self, mesh: StageMesh) -> int:
        """Return how many devices of a mesh hold the same part of a parameter, and add up its gradients."""
        return len(mesh.tp_groups) * self.cp

    def describe(self) -> str:
        """Return it in a few words: replicas x tensor degree of each stage, and what else is set."""
        context = f"x{self.cp}" if self.cp > 1 else ""
        widths = [f"{len(mesh.tp_groups)}{context}x{len(mesh.tp_groups[0]) // self.cp}" for mesh in self.layout]
        same = f"{len(widths)} of {widths[0]}" if len(widths) > 1 and len(set(widths)) == 1 else " | ".join(widths)
        chunks = ", over and back" if self.is_v else f", {self.chunks} chunks" if self.chunks > 1 else ""
        return "".join((
            f"stages {same} (replicas x {'context x ' * (self.cp > 1)}tensor)", chunks,
            f", {self.microbatches} micro-batches", ", recompute" if self.recompute else "",
            ("", ", sharded states", ", zero-2", ", fsdp")[self.zero],
            " inside hosts" if self.zero_group == "host" else "", ", in tight memory" if self.is_tight else "",
            ", searched order" if self.searched_order else ""))


# ---- layouts of a cluster --------------------------------------------------------------------------------------------


Speed = Callable[[TpGroup], float]
"""Samples per second of the whole model on a tp group."""


def layouts(cluster: Cluster, degree: int, speed: Speed, *, batch: int, max_stages: int,
            tp_groups: Collection[tuple[int, int]] | None = None, wanted: Degrees = NONE_FIXED) -> Iterator[Layout]:
    """Yield layouts with tp groups of ``degree`` devices, each once, if they have the stages and replicas wanted.

    ``tp_groups`` are (device group, degree) for all groups that may divide operators; None for all.
    """
    max_stages = wanted.pp or max_stages
    groups = [tp_groups_of(group, degree) for index, group in enumerate(cluster.groups_by_host_and_kind())
              if len(group) >= degree and (degree == 1 or tp_groups is None or (index, degree) in tp_groups)]
    seen: set[tuple[frozenset[TpGroup], ...]] = set()
    for layout in itertools.chain(even(groups, max_stages), _fewer(groups, speed, batch, max_stages),
                                  _grouped(groups, speed, max_stages)):
        if not all(wanted.admit(pp=len(layout), dp=len(mesh.tp_groups)) for mesh in layout):
            continue
        key = tuple(frozenset(mesh.tp_groups) for mesh in layout)
        if key not in seen:
            seen.add(key)
            yield layout


def tp_groups_of(devices: Sequence[DeviceId], degree: int) -> tuple[TpGroup, ...]:
    """Return consecutive devices in tp groups, as many as there are whole ones."""
    return tuple(tuple(devices[first : first + degree]) for first in range(0, len(devices) - degree + 1, degree))


def even(groups: Sequence[Sequence[TpGroup]], max_stages: int) -> Iterator[Layout]:
    """Yield all tp groups in equal stages, for each number of these that divides them."""
    tp_groups = [tp_group for group in groups for tp_group in group]
    for stages in divisors(len(tp_groups)) if tp_groups else ():
        if stages <= max_stages:
            yield _meshes(tp_groups, stages)


def _meshes(tp_groups: Sequence[TpGroup], count: int) -> Layout:
    """Return the tp groups divided into equal meshes."""
    width = len(tp_groups) // count
    return tuple(StageMesh(tuple(tp_groups[first : first + width])) for first in range(0, len(tp_groups), width))


def _fewer(groups: Sequence[Sequence[TpGroup]], speed: Speed, batch: int, max_stages: int) -> Iterator[Layout]:
    """Yield even layouts of the fastest tp groups, as many as are a power of two or share the batch evenly."""
    total = sum(map(len, groups))
    if not 1 < total <= TUNING.max_fewer:
        return
    counts = {1 << (total.bit_length() - 1), max(count for count in range(1, total + 1) if batch % count == 0)}
    ordered = sorted(groups, key=lambda group: -speed(group[0]))
    for count in sorted(counts - {total}, reverse=True):
        yield from even([[tp_group for group in ordered for tp_group in group][:count]], max_stages)


def _grouped(groups: Sequence[Sequence[TpGroup]], speed: Speed, max_stages: int) -> Iterator[Layout]:
    """Yield runs of groups as stages, for the groups that remain when the slowest are left out."""
    few = len(groups) <= TUNING.max_groups
    if len(groups) < 2 or not (few or sum(map(len, groups)) <= TUNING.max_fewer):
        return
    by_group = sorted(groups, key=lambda group: -speed(group[0]) * len(group))
    by_tp_group = sorted(groups, key=lambda group: -speed(group[0]))
    counts = range(len(groups), 0, -1) if few else [1 << power for power in range(len(groups).bit_length())][::-1]
    for count in counts:
        for order in (groups if count == len(groups) else by_tp_group[:count], by_tp_group[:count], by_group[:count],
                      by_tp_group[:count][::-1]):
            cuts = itertools.product((False, True), repeat=count - 1) if few else (
                (False,) * (count - 1), (True,) * (count - 1))
            for cut in cuts:
                yield from _divided(_runs(order, cut), max_stages)


def _runs(order: Sequence[Sequence[TpGroup]], cut: Sequence[bool]) -> list[Sequence[Sequence[TpGroup]]]:
    places = [0, *itertools.compress(range(1, len(order)), cut), len(order)]
    return [order[first:last] for first, last in itertools.pairwise(places)]


def _divided(runs: Sequence[Sequence[Sequence[TpGroup]]], max_stages: int) -> Iterator[Layout]:
    """Yield the runs as stages: one for each, or those of a single group divided into equal parts, all or none."""
    whole = tuple(StageMesh(tuple(tp_group for group in run for tp_group in group)) for run in runs)
    if len(whole) <= max_stages:
        yield whole
    for parts in range(2, TUNING.max_stages_in_group + 1):
        counts = [min(parts, len(mesh.tp_groups)) for mesh in whole]
        pieces = [piece for run, mesh, count in zip(runs, whole, counts, strict=True) for piece in (
            (mesh,) if len(run) > 1 or len(mesh.tp_groups) % count else _meshes(mesh.tp_groups, count))]
        if len(pieces) > len(whole) and len(pieces) <= max_stages:
            yield tuple(pieces)
