"""Random placements: tasks on devices, with a transfer for every edge that crosses between two of them."""

from __future__ import annotations

import numpy as np

from weft.simulate.tasks import TaskGraph, make_task_graph


def random_placement(rng: np.random.Generator, *, num_tasks: int, num_edges: int, num_devices: int,
                     window: int | None = None, zero_share: float = 0.0, ports: bool = False) -> TaskGraph:
    """Return ``num_tasks`` tasks on random devices with ``num_edges`` distinct edges, and their transfers.

    An edge between two devices is a task on the link from the one to the other, which carries one transfer at a time.
    With ``ports`` it occupies the sender's way out and the receiver's way in instead. With ``window`` an edge spans at
    most that many tasks. Ids are in topological order: a task, then its transfers.
    """
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < num_edges:
        second = int(rng.integers(1, num_tasks))
        first = int(rng.integers(max(0, second - window) if window else 0, second))
        pairs.add((first, second))
    device = rng.integers(0, num_devices, num_tasks)
    source, target = np.array(sorted(pairs)).T
    crosses = device[source] != device[target]
    source_x, target_x = source[crosses], target[crosses]
    # Each task is followed by its transfers.
    num_sent = np.bincount(source_x, minlength=num_tasks)
    new_id = np.arange(num_tasks) + np.cumsum(num_sent) - num_sent
    transfer = np.setdiff1d(np.arange(num_tasks + len(source_x)), new_id)
    if ports:
        held = [num_devices + device[source_x], 2 * num_devices + device[target_x]]
    else:
        held = [num_devices + device[source_x] * num_devices + device[target_x]]
    durations = rng.random(num_tasks + len(transfer))
    durations[rng.random(len(durations)) < zero_share] = 0.0
    edges = [(new_id[source[~crosses]], new_id[target[~crosses]]), (new_id[source_x], transfer),
             (transfer, new_id[target_x])]
    holds = [(new_id, device), *((transfer, resource) for resource in held)]
    num_resources = num_devices * (num_devices + 3)
    return make_task_graph(durations, edges=_rows(edges), holds=_rows(holds), num_resources=num_resources)


def _rows(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    return np.concatenate([np.stack(pair, axis=1) for pair in pairs])
