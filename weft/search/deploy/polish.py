"""The last step of a search: samples move from devices that have too much to do to others, one by one.

Shares by speed are rounded to whole samples and know nothing of links and memory; the simulation does. Each try moves
some samples of one layout, for all groups that have it, from one of its busiest devices to one of its idlest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from weft.search.deploy.deployer import Deployer, Evaluation, Layout
from weft.search.deploy.tree import Found

NUM_ENDS: Final = 3
"""So many of the busiest and of the idlest devices are tried."""
MAX_TRIES: Final = 300


def polish(found: Found) -> Found:
    """Return the deployment with the best shares that single moves lead to."""
    best, tries = found.evaluation, 0
    improved = True
    while improved and tries < MAX_TRIES:
        improved = False
        for other in _neighbours(found.deployer, best):
            tries += 1
            if (other.missing_bytes, other.seconds) < (best.missing_bytes, best.seconds * (1 - 1e-9)):
                best, improved = other, True
                break
            if tries >= MAX_TRIES:
                break
    return replace(found, evaluation=best)


def _neighbours(deployer: Deployer, evaluation: Evaluation) -> Iterator[Evaluation]:
    busy = evaluation.outcome.busy_s + evaluation.outcome.used / np.maximum(deployer.world.capacity, 1.0) * 1e-9
    for number in np.unique(evaluation.layout_of).tolist():
        layout = deployer.layouts[number]
        if len(layout.replicas) < 2:
            continue
        load = [max(float(busy[device]) for device in devices) for devices, _ in layout.replicas]
        order = sorted(range(len(load)), key=lambda index: (load[index], index))
        for source in reversed(order[-NUM_ENDS:]):
            for target in order[:NUM_ENDS]:
                if source != target:
                    moved = _with_move(layout, source, target)
                    layout_of = evaluation.layout_of.copy()
                    layout_of[layout_of == number] = deployer.layout_id(moved)
                    yield deployer.evaluate_layouts(layout_of)


def _with_move(layout: Layout, source: int, target: int) -> Layout:
    """Return the layout with one sample moved; a replica without samples is left out."""
    change = {source: -1, target: 1}
    counts = ((devices, samples + change.get(index, 0)) for index, (devices, samples) in enumerate(layout.replicas))
    return Layout(tuple((devices, samples) for devices, samples in counts if samples))
