"""What the joint search decides: which devices form a stage and how, and the settings of the whole plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weft.cluster.cluster import DeviceId

Team = tuple[DeviceId, ...]
"""Devices that divide the operators of a stage among them; one device for none."""

KEEP: Final = "keep"
SEGMENTS: Final = "segments"


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
