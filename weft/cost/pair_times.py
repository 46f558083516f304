"""Times of transfers between all pairs of devices, for searches that keep tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weft.base.errors import ClusterError
from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.costs import Costs

MAX_DEVICES: Final = 1024
"""With as many as this, tables of all pairs take ten seconds and half a gigabyte."""


class PairTimes:
    """``costs.transfer`` for pairs of devices; without measured fits, what has equal routes is timed once."""

    def __init__(self, costs: Costs, sizes: Sequence[float]) -> None:
        """``sizes`` are the bytes of the transfers to be timed."""
        self._costs, self._sizes = costs, tuple(sizes)
        self._known: dict[tuple[float, float], tuple[float, ...]] = {}

    def seconds(self, source: int, target: int) -> tuple[float, ...]:
        """Return the seconds for each size; raise ``ClusterError`` where there is no way."""
        if source == target or self._costs.comm_fits:
            return self._timed(source, target)
        route = self._costs.cluster.route(DeviceId(source), DeviceId(target))
        key = route.latency_s, route.bytes_per_s
        if key not in self._known:
            self._known[key] = self._timed(source, target)
        return self._known[key]

    def _timed(self, source: int, target: int) -> tuple[float, ...]:
        return tuple(self._costs.transfer(size, source, target).seconds for size in self._sizes)


def check_pairs(cluster: Cluster, what: str, instead: str) -> None:
    """Raise ``ClusterError`` if the cluster has too many devices for tables of all pairs."""
    if cluster.num_devices > MAX_DEVICES:
        raise ClusterError(f"cluster {cluster.name!r} has {cluster.num_devices:,} devices, and {what}, which knows "
                           f"every pair of them, takes at most {MAX_DEVICES:,}: {instead}")
