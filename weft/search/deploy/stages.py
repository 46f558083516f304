"""Pipelines of replicated stages as seeds: the best cuts of the model for sets of device groups, by dynamic program.

With ``n`` micro-batches, a stage of the groups ``i .. j`` on a set ``S`` of device groups takes, for each micro-batch,

    t(i, j, S) = sum of the groups' forward and backward on S's slowest device + exchange of their gradients / n
    c(i, S)    = bytes that cross at ``i``, there and back, at the slowest rate into S

and a pipeline is as fast as its slowest part. ``best[D, j]``, the least bottleneck of the first ``j`` groups on the
device groups ``D``, follows from all last stages:

    best[D, j] = min over S in D, i < j of max(best[D - S, i], t(i, j, S), c(i, S))

The simulation then judges the best pipeline for each ``D``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from weft.model.graph import F64
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.tree import Found

MAX_DEVICE_GROUPS: Final = 5
"""With more, sets of device groups are too many; other seeds have to do."""


def staged_choices(deployer: Deployer) -> Iterator[Found]:
    """Yield the pipeline with the least bottleneck for each set of device groups."""
    num_device_groups = len(deployer.device_groups)
    if not 1 < num_device_groups <= MAX_DEVICE_GROUPS:
        return
    stages = _Stages(deployer)
    for mask in range(1, 2**num_device_groups):
        choice = stages.choice(mask)
        if choice is not None:
            yield Found(deployer=deployer, choice=choice, evaluation=deployer.evaluate(choice))


class _Stages:
    def __init__(self, deployer: Deployer) -> None:
        self.deployer, self.num_groups = deployer, deployer.groups.num_groups
        self.actions = _replicating(deployer)
        self.best: dict[int, F64] = {0: np.where(np.arange(self.num_groups + 1) == 0, 0.0, np.inf)}
        self.last: dict[int, list[tuple[int, int] | None]] = {}
        self.times = {mask: self._times(action) for mask, action in self.actions.items()}
        for mask in range(1, 2 ** len(deployer.device_groups)):
            self._fill(mask)

    def _times(self, action: int) -> F64:
        """Return [i, j]: the bottleneck of a stage of the groups ``i .. j``; infinite where there is none."""
        deployer = self.deployer
        number = int(deployer.layouts_of([action] * self.num_groups)[0])
        layout, tables = deployer.layouts[number], deployer.tables
        seconds = (tables.forward_s[number] + tables.backward_s[number]).max(axis=1)
        if len(layout.replicas) > 1:
            seconds = seconds + deployer.exchanges.group_seconds(layout.devices) / deployer.microbatches
        work = np.concatenate(([0.0], np.cumsum(seconds)))
        inside = set(layout.devices)
        outside = [device for device in deployer.problem.devices if device not in inside]
        rate = deployer.world.s_per_byte[np.ix_(outside, layout.devices)].max() if outside else 0.0
        crossing = deployer.crossing_bytes * deployer.size * 2 * rate
        crossing[0] = 0.0
        times = np.maximum(work[None, :] - work[:, None], crossing[:, None])
        index = np.arange(self.num_groups + 1)
        return np.where(index[:, None] < index[None, :], times, np.inf)

    def _fill(self, mask: int) -> None:
        best = np.full(self.num_groups + 1, np.inf)
        last: list[tuple[int, int] | None] = [None] * (self.num_groups + 1)
        part = mask
        while part:
            if part in self.actions:
                total = np.maximum(self.best[mask & ~part][:, None], self.times[part])
                first = np.argmin(total, axis=0)
                value = total[first, np.arange(self.num_groups + 1)]
                for stop in np.flatnonzero(value < best).tolist():
                    best[stop], last[stop] = value[stop], (part, int(first[stop]))
            part = (part - 1) & mask
        self.best[mask], self.last[mask] = best, last

    def choice(self, mask: int) -> tuple[int, ...] | None:
        """Return the actions of the best pipeline on exactly these device groups."""
        stop, left = self.num_groups, mask
        runs: list[tuple[int, int]] = []
        while left:
            entry = self.last[left][stop]
            if entry is None:
                return None
            part, first = entry
            runs.append((self.actions[part], stop - first))
            stop, left = first, left & ~part
        return tuple(action for action, length in reversed(runs) for _ in range(length)) if stop == 0 else None


def _replicating(deployer: Deployer) -> dict[int, int]:
    """Return, by set of device groups as bits, the action that has all its devices side by side, by speed if it may."""
    found: dict[int, int] = {}
    for index, action in enumerate(deployer.actions):
        mask = sum(1 << group for group in action.device_groups)
        alone = action.kind == "single" and len(deployer.device_groups[action.device_groups[0]]) == 1
        if alone or (action.kind == "replicate" and (action.by_speed or mask not in found)):
            found[mask] = index
    return found
