"""What the laboratory's links really do: messages between every two hosts, and collectives of all.

``measure_links`` gives the rates of all pairs beside the file's, the cluster with its links corrected by that, and,
where all ports are alike, fits of collectives (``weft.cost.fit``) for a profile store. Predictions use both.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.lab.lab import Lab
from benchmarks.lab.topology import Host
from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.collectives import Algorithm, Collective, scope_of, step_counts
from weft.cost.fit import fit_collective, fit_transfer
from weft.cost.profile import CommFit

REPEATS: Final = 5
SMALL_BYTES: Final = 1 << 17
"""The smallest size beside one byte: far more than the links let through at once after a pause."""
MESSAGE_S: Final = (0.05, 0.1)
"""Messages of about this long, beside small ones."""
COLLECTIVE_S: Final = (0.05, 0.1, 0.3)
"""Collectives likewise."""
MAX_PAIRS_OF: Final = 4
"""All pairs of so many hosts are measured; of more, neighbours only."""
COLLECTIVES: Final = (Collective.ALL_REDUCE, Collective.ALL_GATHER)
TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRate:
    """What one direction between two hosts does, and what the file says."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float
    nominal_bytes_per_s: float

    @property
    def share(self) -> float:
        """Return the measured rate as a share of the file's."""
        return self.bytes_per_s / self.nominal_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """What was measured."""

    pairs: tuple[PairRate, ...]
    fits: tuple[CommFit, ...]
    """Of collectives over all hosts; the rate in them is that of one port."""
    uniform: bool
    """All ports have one rate, so that the fits hold for every group of hosts."""
    cluster: Cluster
    """The laboratory's cluster with measured links."""

    @property
    def fits_to_use(self) -> tuple[CommFit, ...]:
        """Return the fits that a profile store may hold: none where groups of hosts differ."""
        return self.fits if self.uniform else ()


def measure_links(lab: Lab) -> LinkReport:
    """Return the rates of the laboratory's links, measured with one process on each host."""
    hosts = lab.topology.hosts
    ordered = list(itertools.permutations(range(len(hosts)), 2)) if len(hosts) <= MAX_PAIRS_OF else [
        (index, (index + step) % len(hosts)) for index in range(len(hosts)) for step in (1, -1)]
    devices = [lab.cluster.device_index[host.devices[0]] for host in hosts]
    nominal = {pair: _nominal(lab.cluster, devices, pair) for pair in ordered}
    slowest = min(nominal.values())
    found = _measure(lab, {
        "pairs": [(*pair, _sizes(nominal[pair], MESSAGE_S)) for pair in ordered],
        "collectives": {
            kind.value: _sizes(slowest / step_counts(kind, Algorithm.RING, len(hosts)).s_per_byte, COLLECTIVE_S)[1:]
            for kind in COLLECTIVES},
        "repeats": REPEATS, "seconds": TIMEOUT_S})
    pairs = tuple(_pair_rate(hosts, pair, nominal[pair], found["messages"], found["waits"]) for pair in ordered)
    scope = scope_of(lab.cluster, devices)
    fits = tuple(fit_collective(Collective(name), points, num_devices=len(hosts), scope=scope)
                 for name, points in found["collectives"].items())
    rates = {rate for cable in lab.topology.cables for rate in cable.bytes_per_s}
    return LinkReport(pairs=pairs, fits=fits, uniform=len(rates) == 1, cluster=measured_cluster(lab.cluster, pairs))


def _sizes(bytes_per_s: float, times_s: Sequence[float]) -> list[int]:
    return [1, SMALL_BYTES, *(int(time_s * bytes_per_s) for time_s in times_s)]


def _nominal(cluster: Cluster, devices: Sequence[DeviceId], pair: tuple[int, int]) -> float:
    return cluster.route(devices[pair[0]], devices[pair[1]]).bytes_per_s


def _measure(lab: Lab, spec: Mapping[str, Any]) -> Any:
    names = [host.name for host in lab.topology.hosts]
    store = lab.new_path("store")

    def command(host: Host) -> list[str]:
        return [sys.executable, "-m", "benchmarks.lab.link_worker", str(names.index(host.name)), str(len(names)),
                str(store), json.dumps(spec)]

    return json.loads(lab.run(command, timeout_s=TIMEOUT_S)[names[0]].splitlines()[-1])


def _pair_rate(hosts: Sequence[Host], pair: tuple[int, int], nominal: float,
               messages: Sequence[tuple[int, int, int, float]], waits: Sequence[tuple[int, int, float]]) -> PairRate:
    """Return the fitted rate of one direction; half a round trip of one byte is the answer's part of every time.

    The latency is what a message of one byte takes while other hosts compute.
    """
    own = [(size, seconds) for source, target, size, seconds in messages if (source, target) == pair]
    answer_s = min(seconds for size, seconds in own if size == 1) / 2
    fit = fit_transfer([(size, max(seconds - answer_s, 1e-9)) for size, seconds in own], scope="pair")
    wait_s = next(seconds for source, target, seconds in waits if (source, target) == pair) / 2
    return PairRate(source=hosts[pair[0]].name, target=hosts[pair[1]].name, latency_s=max(fit.latency_s, wait_s),
                    bytes_per_s=1 / fit.s_per_byte, nominal_bytes_per_s=nominal)


def measured_cluster(cluster: Cluster, pairs: Sequence[PairRate]) -> Cluster:
    """Return the cluster with every link at the share of its rate that pairs limited by such a rate reach.

    A link that limits no pair gets the median share. Latency is the median over pairs, divided over the two ports.
    """
    shares: dict[float, list[float]] = {}
    for pair in pairs:
        shares.setdefault(pair.nominal_bytes_per_s, []).append(pair.share)
    typical = statistics.median(pair.share for pair in pairs)
    latency_s = statistics.median(pair.latency_s for pair in pairs)
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s * statistics.median(shares.get(link.bytes_per_s, [typical])),
                latency_s=latency_s / 2, origin="measured in the laboratory")
        for link in cluster.links)
    return replace(cluster, links=links)
