"""What may be done with a group of operators: on which device groups, and how their devices divide the work.

- ``replicate``: every device of the chosen device groups has the parameters and takes a share of the samples, even or
  by speed; gradients are exchanged (how, is decided for each exchange by its cost).
- ``pipeline``: consecutive operator groups with the same choice are laid over the devices, one after the other, as
  much on each as suits its speed. With one micro-batch this is plain model parallelism.
- ``pipeline groups``: the same over whole device groups; the devices of a group share the samples.
- ``tensor``: devices of a device group divide the operators, ``degree`` of them together; these tp groups share the
  samples by their speed.
- ``single``: one device does it all.

A ``Layout`` is what that comes to for one group: which devices run it, on how many samples of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.cluster.cluster import DeviceId
from weft.search.deploy.tuning import TUNING

Kind = Literal["replicate", "pipeline", "pipeline groups", "tensor", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One choice for one operator group."""

    kind: Kind
    devices: tuple[DeviceId, ...]
    device_groups: tuple[int, ...]
    by_speed: bool = False
    """Shares in proportion to speed; else all the same."""
    degree: int = 1
    """Devices that divide operators among them."""

    def tp_groups(self, groups: Sequence[Sequence[DeviceId]]) -> list[tuple[DeviceId, ...]]:
        """Return the tp groups of devices that divide operators among them; ``groups`` are all device groups."""
        return [tuple(groups[group][first : first + self.degree]) for group in self.device_groups
                for first in range(0, len(groups[group]), self.degree)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which devices run a group, and how many samples of a micro-batch each replica takes."""

    replicas: tuple[tuple[tuple[DeviceId, ...], int], ...]
    """(devices, samples)"""

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Return all devices."""
        return tuple(device for devices, _ in self.replicas for device in devices)

    @property
    def is_divided(self) -> bool:
        """Return whether devices divide operators among them."""
        return len(self.replicas[0][0]) > 1

    @property
    def num_samples(self) -> int:
        """Return the samples of a micro-batch."""
        return sum(samples for _, samples in self.replicas)


def list_actions(groups: Sequence[Sequence[DeviceId]], speeds: Sequence[float], *,
                 tp_groups: Collection[tuple[int, int]] = ()) -> tuple[Action, ...]:
    """Return all actions for these device groups; ``speeds`` are those of the devices. The first is data parallel.

    ``tp_groups`` are (device group, degree) for all that may divide operators.
    """
    degrees = sorted({degree for _, degree in tp_groups})
    actions: list[Action] = []
    for subset in device_subsets(groups, speeds):
        devices = tuple(device for group in subset for device in groups[group])

        def add(kind: Kind, *, by_speed: bool = False, degree: int = 1, devices: tuple[DeviceId, ...] = devices,
                subset: tuple[int, ...] = subset) -> None:
            actions.append(Action(kind=kind, devices=devices, device_groups=subset, by_speed=by_speed, degree=degree))

        if len(devices) > 1:
            add("replicate")
            if len({speeds[device] for device in devices}) > 1:
                add("replicate", by_speed=True)
            add("pipeline")
        if len(subset) > 1 and any(len(groups[group]) > 1 for group in subset):
            add("pipeline groups")
        for degree in degrees:
            if all((group, degree) in tp_groups and len(groups[group]) % degree == 0 for group in subset):
                add("tensor", degree=degree)
    for index, group in enumerate(groups):
        few = sum(len(group) for group in groups) <= TUNING.max_single
        for device in group if few else group[:1]:
            actions.append(Action(kind="single", devices=(device,), device_groups=(index,)))
    return tuple(actions)


def device_subsets(groups: Sequence[Sequence[DeviceId]], speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of device groups to consider, all of them first, then larger before smaller ones.

    Where there are too many, those that leave out the slowest groups, single groups, and pairs are taken.
    """
    every = range(len(groups))
    if 2 ** len(groups) - 1 <= TUNING.max_subsets:
        return tuple(subset for size in reversed(range(1, len(groups) + 1))
                     for subset in itertools.combinations(every, size))
    power = [sum(speeds[device] for device in group) for group in groups]
    by_power = sorted(every, key=lambda group: (-power[group], group))
    subsets = [tuple(sorted(by_power[:size])) for size in reversed(range(1, len(groups) + 1))]
    subsets += [(group,) for group in every]
    subsets += [tuple(sorted(pair)) for pair in itertools.combinations(by_power, 2)]
    return tuple(dict.fromkeys(subsets))[:TUNING.max_subsets]
