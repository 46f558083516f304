"""Times of collectives on a group of devices: rounds of simultaneous transfers, in the alpha-beta model.

An algorithm is a tuple of *rounds*. In a round a set of ordered device pairs sends at the same time; with ``n`` the
collective's bytes it takes

    steps * alpha + share * n / B

``alpha`` is the largest latency of the round's routes, ``B`` the rate of its slowest transfer: each link's bandwidth is
divided by the number of the round's transfers that cross it (links of one shared medium count together), so rings that
leave a host through one network card share it. A collective's time is therefore ``a + b * n`` with two numbers that
depend on group and algorithm only; ``CollectiveModel`` keeps them.

``n`` is the size of the whole tensor: what each device holds before an all-reduce, after an all-gather, before a
reduce-scatter or an all-to-all, and what the first device has before a broadcast. With ``p`` devices on equal links of
bandwidth ``B`` and latency ``alpha``, ``L = ceil(log2 p)``, ``h`` hosts of ``g`` devices, ``x`` marking the network:

| collective     | ring                              | tree                           | hierarchical              |
|----------------|-----------------------------------|--------------------------------|---------------------------|
| all_gather     | (p-1) alpha + (p-1)/p n/B         | L alpha + (p-1)/p n/B          | gather among hosts, n/g   |
| reduce_scatter | the same                          | the same                       | each, then inside them    |
| all_reduce     | twice all_gather                  | 2L (alpha + n/B)               | scatter inside, reduce    |
|                |                                   |                                | n/g among, gather inside  |
| broadcast      | (p-1) alpha + n/B (pipelined)     | L (alpha + n/B)                | among hosts, then inside  |
| all_to_all     | (p-1) alpha + (p-1)/p n/B         | L (alpha + n/2/B)              | inside, then among hosts  |
| p2p            | alpha + n/B                       |                                |                           |

Ring order is the order of the devices given. Ring forms are those of Thakur, Rabenseifner and Gropp (2005); trees are
binomial (all_reduce, broadcast), recursive doubling (all_gather, reduce_scatter) and Bruck's (all_to_all). Hierarchical
takes groups on several hosts; where hosts hold unequal numbers of devices, all_reduce and broadcast go through one
leader per host, and the others have no hierarchical form.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from weft.base.errors import ClusterError, InputError
from weft.cluster.cluster import Cluster, Contention, DeviceId
from weft.cost.figure import Source

MOSTLY: Final = 0.5
"""What is busy for more than this part of a collective's time is taken to be so all the time."""


class Collective(enum.Enum):
    """What a group of devices does together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    P2P = "p2p"


class Algorithm(enum.Enum):
    """How they do it."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCost:
    """The time of one collective, with its two parts."""

    seconds: float
    source: Source
    algorithm: str
    latency_s: float
    """The part that does not depend on the size."""
    bandwidth_s: float
    """The part that grows with the size."""


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Transfers that run at the same time, ``steps`` times over."""

    pairs: Pairs
    """(sender, receiver), as positions in the group."""
    steps: float
    """How often the latency is paid."""
    share: float
    """How much each pair sends in all steps together, as a share of the collective's bytes."""


@dataclass(frozen=True, slots=True)
class Line:
    """A time ``latency_s + bytes * s_per_byte``."""

    latency_s: float
    s_per_byte: float

    def at(self, num_bytes: float) -> float:
        """Return the seconds for ``num_bytes``."""
        return self.latency_s + num_bytes * self.s_per_byte


def _sum(parts: Sequence[Line]) -> Line:
    return Line(sum(part.latency_s for part in parts), sum(part.s_per_byte for part in parts))


def _ring(size: int) -> Pairs:
    return _shift(size, 1) if size > 1 else ()


def _shift(size: int, distance: int) -> Pairs:
    return tuple((i, (i + distance) % size) for i in range(size))


def _binomial(size: int) -> Iterator[Pairs]:
    """Yield, round by round, who sends to whom when the first device's data reaches all."""
    have = 1
    while have < size:
        yield tuple((i, i + have) for i in range(min(have, size - have)))
        have *= 2


def _reversed(pairs: Pairs) -> Pairs:
    return tuple((target, source) for source, target in pairs)


def ring_rounds(collective: Collective, size: int) -> tuple[Round, ...]:
    """Return the rounds of the ring algorithm for ``size`` devices (for all_to_all: pairwise exchange)."""
    ring, once = _ring(size), (size - 1) / size
    match collective:
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return (Round(pairs=ring, steps=size - 1, share=once),)
        case Collective.ALL_REDUCE:
            return (Round(pairs=ring, steps=2 * (size - 1), share=2 * once),)
        case Collective.BROADCAST | Collective.P2P:
            return (Round(pairs=ring[:-1], steps=size - 1, share=1.0),)
        case Collective.ALL_TO_ALL:
            return tuple(Round(pairs=_shift(size, k), steps=1, share=1 / size) for k in range(1, size))


def tree_rounds(collective: Collective, size: int) -> tuple[Round, ...]:
    """Return the rounds of the tree algorithm for ``size`` devices."""
    levels = list(_binomial(size))
    match collective:
        case Collective.BROADCAST | Collective.P2P:
            return tuple(Round(pairs=pairs, steps=1, share=1.0) for pairs in levels)
        case Collective.ALL_REDUCE:
            down = tuple(Round(pairs=pairs, steps=1, share=1.0) for pairs in levels)
            up = tuple(Round(pairs=_reversed(pairs), steps=1, share=1.0) for pairs in reversed(levels))
            return up + down
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            held = [min(2**k, size - 2**k) / size for k in range(len(levels))]
            return tuple(Round(pairs=_shift(size, 2**k), steps=1, share=share) for k, share in enumerate(held))
        case Collective.ALL_TO_ALL:
            return tuple(Round(pairs=_shift(size, 2**k), steps=1, share=0.5) for k in range(len(levels)))


def hierarchical_rounds(collective: Collective, hosts: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Return the rounds inside hosts and between them, or none; ``hosts`` lists the positions on each host."""
    width = len(hosts[0])
    if any(len(members) != width for members in hosts):
        through_leaders = collective in (Collective.ALL_REDUCE, Collective.BROADCAST)
        return _leader_rounds(collective, hosts) if through_leaders else ()
    inside = tuple(tuple(members) for members in hosts)
    across = tuple(tuple(members[k] for members in hosts) for k in range(width))

    def rounds(part: Collective, groups: Sequence[Sequence[int]], scale: float) -> tuple[Round, ...]:
        return _together(ring_rounds(part, len(groups[0])), groups, scale)

    match collective:
        case Collective.ALL_REDUCE:
            return (*rounds(Collective.REDUCE_SCATTER, inside, 1.0), *rounds(Collective.ALL_REDUCE, across, 1 / width),
                    *rounds(Collective.ALL_GATHER, inside, 1.0))
        case Collective.ALL_GATHER:
            return rounds(collective, across, 1 / width) + rounds(collective, inside, 1.0)
        case Collective.REDUCE_SCATTER:
            return rounds(collective, inside, 1.0) + rounds(collective, across, 1 / width)
        case Collective.ALL_TO_ALL:
            return rounds(collective, inside, 1.0) + rounds(collective, across, 1.0)
        case Collective.BROADCAST | Collective.P2P:
            return rounds(collective, across[:1], 1.0) + rounds(collective, inside, 1.0)


def _leader_rounds(collective: Collective, hosts: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Return the rounds where one leader per host collects (all_reduce), exchanges with leaders and spreads."""
    leaders = tuple(members[0] for members in hosts)
    between = _together(ring_rounds(collective, len(hosts)), [leaders], 1.0)
    chains = tuple(pair for members in hosts for pair in pairwise(members))
    spread = Round(pairs=chains, steps=max(map(len, hosts)) - 1, share=1.0)
    collect = Round(pairs=_reversed(chains), steps=spread.steps, share=1.0)
    return (*between, spread) if collective is Collective.BROADCAST else (collect, *between, spread)


def _together(rounds: Sequence[Round], groups: Sequence[Sequence[int]], scale: float) -> tuple[Round, ...]:
    """Return ``rounds`` run by all ``groups`` at once, each on ``scale`` of the bytes."""
    return tuple(Round(pairs=tuple((group[i], group[j]) for group in groups for i, j in entry.pairs),
                       steps=entry.steps, share=entry.share * scale) for entry in rounds)


def step_counts(collective: Collective, algorithm: Algorithm, size: int) -> Line:
    """Return how often latency and bytes count on equal links: ``time = latency_s * alpha + s_per_byte * n / B``."""
    rounds = tree_rounds(collective, size) if algorithm is Algorithm.TREE else ring_rounds(collective, size)
    return Line(sum(entry.steps for entry in rounds), sum(entry.share for entry in rounds))


def scope_of(cluster: Cluster, devices: Sequence[int]) -> str:
    """Return which fits hold for a group: ``host:KIND`` inside one host, ``network:KIND`` across, kinds joined by +."""
    kinds = "+".join(sorted({cluster.devices[device].kind for device in devices}))
    hosts = {cluster.devices[device].host for device in devices}
    return f"{'host' if len(hosts) == 1 else 'network'}:{kinds}"


class CollectiveModel:
    """Collective times on one cluster; what depends on group and algorithm only is computed once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._line = functools.cache(self._find_line)
        self._candidates = functools.cache(self._all_lines)
        self._limits = functools.cache(self._find_limits)

    def cost(self, collective: Collective, num_bytes: float, devices: Sequence[int],
             algorithm: Algorithm | None = None) -> CommCost:
        """Return the time on ``devices`` in that order; without ``algorithm`` the cheapest one's."""
        group = tuple(devices)
        candidates = self._candidates(collective, group)
        if algorithm is not None and len(group) > 1:
            line = self._line(collective, algorithm, group)
            if line is None:
                raise InputError(f"there is no {algorithm.value} {collective.value} for {self._names(group)}: "
                                 "leave the algorithm out, or choose 'ring'")
            candidates = ((line, algorithm.value),)
        best, name = min(candidates, key=lambda item: item[0].at(num_bytes))
        bandwidth_s = num_bytes * best.s_per_byte
        return CommCost(seconds=best.latency_s + bandwidth_s, source=Source.ROOFLINE, algorithm=name,
                        latency_s=best.latency_s, bandwidth_s=bandwidth_s)

    def lines_together(self, collective: Collective, groups: Sequence[Sequence[int]]) -> tuple[Line, ...]:
        """Return the time of each algorithm if groups of equal size do the same at the same time and share links."""
        for group in groups:
            self._check(collective, tuple(group))
        if len(groups[0]) == 1:
            return (Line(0.0, 0.0),)
        everyone = tuple(range(self._cluster.num_devices))
        found = []
        for algorithm in Algorithm:
            by_group = [self.rounds(collective, algorithm, tuple(group)) for group in groups]
            if not all(by_group) or len({tuple((entry.steps, entry.share) for entry in rounds)
                                         for rounds in by_group}) > 1:
                continue  # groups that lie on hosts in different ways do not go in step
            parts = [self._round_line(Round(pairs=tuple((group[i], group[j]) for group, entry in
                                                        zip(groups, entries, strict=True) for i, j in entry.pairs),
                                            steps=entries[0].steps, share=entries[0].share), everyone)
                     for entries in zip(*by_group, strict=True)]
            found.append(_sum(parts))
        return tuple(found)

    def limits(self, collective: Collective, num_bytes: float, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the cluster's resources that are busy most of the time of the collective by its cheapest algorithm.

        Others may use what is left of the rest, so that collectives hold each other up only on these.
        """
        if len(devices) < 2 or self._cluster.contention is not Contention.LINK:
            return ()
        group = tuple(devices)
        algorithm = Algorithm(self.cost(collective, num_bytes, group).algorithm)
        return self._limits(collective, algorithm, group)

    def _find_limits(self, collective: Collective, algorithm: Algorithm, group: tuple[int, ...]) -> tuple[int, ...]:
        busy: defaultdict[int, float] = defaultdict(float)
        for entry in self.rounds(collective, algorithm, group):
            for resource, s_per_byte in self._loads(entry, group).items():
                busy[resource] += entry.share * s_per_byte
        line = self._line(collective, algorithm, group)
        assert line is not None, "it is the cheapest"
        return tuple(sorted(resource for resource, s_per_byte in busy.items()
                            if s_per_byte > MOSTLY * line.s_per_byte))

    def _all_lines(self, collective: Collective, group: tuple[int, ...]) -> tuple[tuple[Line, str], ...]:
        self._check(collective, group)
        if len(group) == 1:
            return ((Line(0.0, 0.0), "none"),)
        found, problem = [], None
        for algorithm in Algorithm:
            try:
                line = self._line(collective, algorithm, group)
            except ClusterError as error:
                problem = problem or error
                continue
            if line is not None:
                found.append((line, algorithm.value))
        if not found and problem is not None:
            raise problem
        return tuple(found)

    def _check(self, collective: Collective, group: tuple[int, ...]) -> None:
        known = range(self._cluster.num_devices)
        if not group or len(set(group)) != len(group) or any(device not in known for device in group):
            raise InputError(f"{collective.value} needs a group of different devices, each 0 to {len(known) - 1}, "
                             f"not {list(group)}")
        if collective is Collective.P2P and len(group) > 2:
            raise InputError(f"p2p is between two devices, not {len(group)}: {self._names(group)}")

    def _names(self, group: tuple[int, ...]) -> str:
        names = [self._cluster.devices[device].name for device in group[:8]]
        return ", ".join(names) + (", ..." if len(group) > 8 else "")

    def _find_line(self, collective: Collective, algorithm: Algorithm, group: tuple[int, ...]) -> Line | None:
        parts = [self._round_line(entry, group) for entry in self.rounds(collective, algorithm, group)]
        return _sum(parts) if parts else None

    def rounds(self, collective: Collective, algorithm: Algorithm, group: tuple[int, ...]) -> tuple[Round, ...]:
        """Return the algorithm's rounds for ``group``, or none where it makes no sense."""
        if collective is Collective.P2P or algorithm is Algorithm.RING:
            return ring_rounds(collective, len(group)) if algorithm is Algorithm.RING else ()
        if algorithm is Algorithm.TREE:
            return tree_rounds(collective, len(group))
        hosts: dict[str, list[int]] = {}
        for position, device in enumerate(group):
            hosts.setdefault(self._cluster.devices[device].host, []).append(position)
        members = list(hosts.values())
        if len(members) < 2 or all(len(host) == 1 for host in members):
            return ()
        return hierarchical_rounds(collective, members)

    def _round_line(self, entry: Round, group: tuple[int, ...]) -> Line:
        if not entry.pairs:
            return Line(0.0, 0.0)
        cluster = self._cluster
        routes = [cluster.route(DeviceId(group[i]), DeviceId(group[j])) for i, j in entry.pairs]
        latency_s = max(route.latency_s for route in routes)
        if cluster.contention is Contention.LINK:
            s_per_byte = max(self._loads(entry, group).values(), default=0.0)
        else:
            s_per_byte = 1 / min(route.bytes_per_s for route in routes)
        return Line(entry.steps * latency_s, entry.share * s_per_byte)

    def _loads(self, entry: Round, group: tuple[int, ...]) -> dict[int, float]:
        """Return the seconds for which one byte of each pair keeps every resource of the cluster busy."""
        cluster, medium = self._cluster, self._cluster.link_resources
        loads: dict[int, float] = {}
        routes = [cluster.route(DeviceId(group[i]), DeviceId(group[j])) for i, j in entry.pairs]
        counts = Counter(resource for route in routes
                         for resource in dict.fromkeys(medium[link] for link in route.links))
        for link in dict.fromkeys(link for route in routes for link in route.links):
            resource = medium[link]
            loads[resource] = max(loads.get(resource, 0.0), counts[resource] / cluster.links[link].bytes_per_s)
        return loads
