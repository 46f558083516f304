"""Random placements: tasks on devices, with a transfer for every edge that crosses between two of them."""

from __future__ import annotations

import numpy as np

from weft.simulate.tasks import TaskGraph, make_task_graph


def random_placement(rng: np.random.Generator, *, num_tasks: int, num_edges: int, num_devices: int,
                     window: int | None = None, zero_share: float = 0.0) -> TaskGraph:
    """Return ``num_tasks`` tasks on random devices with ``num_edges`` distinct edges, and their transfers.

    An edge between two devices is a task on the link from the one to the other, which carries one transfer at a time.
    With ``window`` an edge spans at most that many tasks. Ids are in topological order: a task, then its transfers.
    """
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < num_edges:
        second = int(rng.integers(1, num_tasks))
        first = int(rng.integers(max(0, second - window) if window else 0, second))
        pairs.add((first, second))
    device = rng.integers(0, num_devices, num_tasks)
    source, target = np.array(sorted(pairs)).T
    crosses = device[source] != device[target]
    # Where each task lies when its transfers follow it.
    before = np.cumsum(np.bincount(source[crosses], minlength=num_tasks))
    new_id = np.arange(num_tasks) + np.concatenate(([0], before[:-1]))
    inside = np.arange(crosses.sum()) - np.repeat(before - np.bincount(source[crosses], minlength=num_tasks),
                                                  np.bincount(source[crosses], minlength=num_tasks))
    transfer = new_id[source[crosses]] + 1 + inside
    link = num_devices + device[source[crosses]] * num_devices + device[target[crosses]]
    total = num_tasks + len(transfer)
    durations = rng.random(total)
    durations[rng.random(total) < zero_share] = 0.0
    edges = np.concatenate([
        np.stack([new_id[source[~crosses]], new_id[target[~crosses]]], axis=1),
        np.stack([new_id[source[crosses]], transfer], axis=1), np.stack([transfer, new_id[target[crosses]]], axis=1)])
    holds = np.concatenate([np.stack([new_id, device], axis=1), np.stack([transfer, link], axis=1)])
    return make_task_graph(durations, edges=edges, holds=holds, num_resources=num_devices + num_devices**2)
