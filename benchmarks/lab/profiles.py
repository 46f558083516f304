"""Operator times that hold while all hosts of the laboratory compute: they share cores, caches and memory.

Every host profiles the model at the same time, pinned as in a run, until the last has finished. The profiler counts
the CPU time of its thread, so waiting for a core does not count (``unit`` in the cluster does that) but slower memory
and lost caches do. The times of an operator are the mean over hosts. Rates of a core, which the optimizer step and
operators without a profile are predicted from, are measured with one process on each core at once.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.lab.lab import Lab, absolute
from benchmarks.lab.topology import Host
from weft.base.errors import ClusterError
from weft.cluster.cluster import Cluster, DeviceKind
from weft.cluster.cluster_file import parse_cluster
from weft.cost.profile import OpKey, OpTiming, ProfileStore

TIMEOUT_S: Final = 300.0


def profile_together(lab: Lab, model: str, store: ProfileStore, *, batch: int) -> None:
    """Put the times of the model's operators for ``batch`` samples into the store, measured on all hosts at once."""
    kind = _only_kind(lab.cluster)
    folder = lab.new_path("profile")
    folder.mkdir()
    names = [host.name for host in lab.topology.hosts]

    def command(host: Host) -> list[str]:
        rank = names.index(host.name)
        return [sys.executable, "-m", "benchmarks.lab.profile_worker", absolute(model), str(batch), kind,
                str(folder / f"{rank}.sqlite"), str(folder), str(rank), str(len(names))]

    lab.run(command, timeout_s=TIMEOUT_S)
    store.put_timings(merge([ProfileStore(folder / f"{rank}.sqlite").timings(kind) for rank in range(len(names))]))


def merge(tables: Sequence[dict[OpKey, OpTiming]]) -> list[tuple[OpKey, OpTiming]]:
    """Return the mean over hosts of each operator's times, where all hosts have them."""
    merged = []
    for key, first in tables[0].items():
        same = [table[key] for table in tables if key in table]
        if len(same) == len(tables):
            merged.append((key, replace(
                first, forward_s=statistics.fmean(item.forward_s for item in same),
                input_grad_s=_mean([item.input_grad_s for item in same]),
                weight_grad_s=_mean([item.weight_grad_s for item in same]),
                spread=max(item.spread for item in same), repeats=sum(item.repeats for item in same))))
    return merged


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def measured_kind(lab: Lab) -> Cluster:
    """Return the laboratory's cluster with the rates of its kind as measured, one process on each core at once."""
    name = _only_kind(lab.cluster)
    first_on = {host.cores: host.name for host in reversed(lab.topology.hosts)}

    def command(host: Host) -> list[str] | None:
        return [sys.executable, "-m", "benchmarks.lab.kind_worker"] if host.name in first_on.values() else None

    words = lab.run(command, timeout_s=TIMEOUT_S)
    found = [next(iter(parse_cluster(json.loads(text.splitlines()[-1])).kinds.values())) for text in words.values()]
    return replace(lab.cluster, kinds={**lab.cluster.kinds, name: _mean_kind(lab.cluster.kinds[name], found)})


def _mean_kind(given: DeviceKind, found: Sequence[DeviceKind]) -> DeviceKind:
    return replace(
        given, type="cpu", source=f"measured in the laboratory on {len(found)} cores at once",
        flop_per_s={dtype: statistics.fmean(kind.flop_per_s[dtype] for kind in found) for dtype in found[0].flop_per_s},
        memory_bytes_per_s=_mean([kind.memory_bytes_per_s for kind in found]),
        overhead_s=statistics.fmean(kind.overhead_s for kind in found))


def _only_kind(cluster: Cluster) -> str:
    kinds = {device.kind for device in cluster.devices}
    if len(kinds) != 1:
        raise ClusterError(f"the devices are of {len(kinds)} kinds ({', '.join(sorted(kinds))}), but all hosts of a "
                           "laboratory compute on equal cores: use one kind")
    return kinds.pop()
