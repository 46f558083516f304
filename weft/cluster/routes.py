"""Routes between devices: a search from each source when it is first asked for, and no table of all pairs.

The best route is, in this order: one that no other device has to forward (a GPU does not relay for others by itself),
the one with the fewest links, the widest one, the one with the least latency, the one whose links come first. One
breadth-first search finds the best routes to all nodes: within a layer all hop counts are equal, and the width of a
route is the smaller of its prefix's and its last link's, so the best prefix is part of a best route.

A device with a single link, to a switch, has the switch's routes behind that link. So a cluster of 128 hosts with
8 devices each needs at most 128 searches, each linear in the number of links.
"""

from __future__ import annotations

from collections.abc import Sequence

_NONE = -1


class RouteTable:
    """Answers ``path`` by searches that run when first needed and are kept."""

    def __init__(self, *, num_devices: int, num_nodes: int, ends: Sequence[tuple[int, int]],
                 rates: Sequence[tuple[float, float]]) -> None:
        """Nodes below ``num_devices`` are devices; ``ends`` and ``rates`` are (from, to) and (bytes/s, s) per link."""
        self._num_devices = num_devices
        self._ends = ends
        self._rates = rates
        self._out: list[list[int]] = [[] for _ in range(num_nodes)]
        for link, (source, _target) in enumerate(ends):
            self._out[source].append(link)
        self._trees: dict[tuple[int, bool], list[int]] = {}

    def path(self, source: int, target: int) -> tuple[int, ...] | None:
        """Return the links of the best route between two devices, or None where there is no way."""
        if source == target:
            return ()
        first: tuple[int, ...] = ()
        root = source
        if len(self._out[source]) == 1:
            neighbour = self._ends[self._out[source][0]][1]
            if neighbour == target:
                return (self._out[source][0],)
            if neighbour >= self._num_devices:
                first, root = (self._out[source][0],), neighbour
        for relay in (False, True):
            rest = self._walk_back(self._tree(root, relay), root, target)
            if rest is not None:
                return first + rest
        return None

    def _walk_back(self, tree: list[int], root: int, target: int) -> tuple[int, ...] | None:
        links = []
        node = target
        while node != root:
            link = tree[node]
            if link == _NONE:
                return None
            links.append(link)
            node = self._ends[link][0]
        return tuple(reversed(links))

    def _tree(self, root: int, relay: bool) -> list[int]:
        tree = self._trees.get((root, relay))
        if tree is None:
            tree = self._trees[root, relay] = self._search(root, relay)
        return tree

    def _search(self, root: int, relay: bool) -> list[int]:
        """Return, for each node, the last link of the best route from ``root``."""
        tree = [_NONE] * len(self._out)
        reached = {root: (float("inf"), 0.0)}
        layer = {root: reached[root]}
        while layer:
            following: dict[int, tuple[float, float]] = {}
            for node, (width, negative_latency) in layer.items():
                if node < self._num_devices and node != root and not relay:
                    continue
                for link in self._out[node]:
                    target = self._ends[link][1]
                    if target in reached:
                        continue
                    bytes_per_s, latency_s = self._rates[link]
                    quality = (min(width, bytes_per_s), negative_latency - latency_s)
                    if target not in following or quality > following[target]:
                        following[target] = quality
                        tree[target] = link
            reached.update(following)
            layer = following
        return tree
