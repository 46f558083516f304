"""Project selection: which projects pay, if each needs some tools and a tool is bought once for all who use it.

    maximise   sum of profit[p] over the chosen p  -  sum of cost[t] over the tools that a chosen project needs

This is a minimum cut (Picard 1976): an arc of ``profit`` from the source to each project, one of ``cost`` from each
tool to the sink, and from a project to its tools arcs that are never cut. Projects still reached from the source when
no more can flow are the answer, the smallest one among the best. Capacities are whole numbers, so that nothing is
rounded on the way; one unit is about 2^-60 of the largest profit or cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_BITS: Final = 60


def select_projects(profits: Sequence[float], costs: Sequence[float],
                    needs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the projects to choose, in order; ``needs[p]`` are the tools of project ``p``. Profits may be negative."""
    largest = max((*profits, *costs), default=0.0)
    if largest <= 0.0:
        return ()
    shift = _BITS - math.frexp(largest)[1]
    gains, prices = ([int(math.ldexp(value, shift)) for value in values] for values in (profits, costs))
    source, sink = len(gains) + len(prices), len(gains) + len(prices) + 1
    network = _Network(sink + 1)
    never_cut = sum(max(gain, 0) for gain in gains) + 1
    for project, gain in enumerate(gains):
        if gain > 0:
            network.connect(source, project, gain)
            for tool in needs[project]:
                network.connect(project, len(gains) + tool, never_cut)
    for tool, price in enumerate(prices):
        network.connect(len(gains) + tool, sink, price)
    level = network.fill(source, sink)
    return tuple(project for project in range(len(gains)) if level[project] >= 0)


class _Network:
    """Arcs with room for flow, each followed by its reverse; filled by Dinic's method of blocking flows."""

    def __init__(self, num_nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(num_nodes)]
        self._target: list[int] = []
        self._room: list[int] = []

    def connect(self, tail: int, head: int, room: int) -> None:
        """Add an arc from ``tail`` to ``head``."""
        for start, end, amount in ((tail, head, room), (head, tail, 0)):
            self._arcs[start].append(len(self._target))
            self._target.append(end)
            self._room.append(amount)

    def fill(self, source: int, sink: int) -> list[int]:
        """Return each node's distance from ``source`` along arcs with room when no more can flow; -1 beyond reach."""
        while (level := self._levels(source))[sink] >= 0:
            self._block(level, source, sink)
        return level

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._arcs)
        level[source] = 0
        queue = [source]
        for node in queue:  # it grows while it is read
            for arc in self._arcs[node]:
                if self._room[arc] and level[self._target[arc]] < 0:
                    level[self._target[arc]] = level[node] + 1
                    queue.append(self._target[arc])
        return level

    def _block(self, level: list[int], source: int, sink: int) -> None:
        """Send flow along shortest paths until each has a full arc."""
        next_arc, path, node = [0] * len(self._arcs), list[int](), source
        while True:
            if node == sink:
                self._send(path)
                del path[next(index for index, arc in enumerate(path) if not self._room[arc]):]
                node = self._target[path[-1]] if path else source
            arcs = self._arcs[node]
            while next_arc[node] < len(arcs) and not self._leads_on(arcs[next_arc[node]], level, node):
                next_arc[node] += 1
            if next_arc[node] < len(arcs):
                path.append(arcs[next_arc[node]])
                node = self._target[path[-1]]
            elif path:
                node = self._target[path.pop() ^ 1]
                next_arc[node] += 1
            else:
                return

    def _leads_on(self, arc: int, level: list[int], node: int) -> bool:
        return self._room[arc] > 0 and level[self._target[arc]] == level[node] + 1

    def _send(self, path: list[int]) -> None:
        amount = min(self._room[arc] for arc in path)
        for arc in path:
            self._room[arc] -= amount
            self._room[arc ^ 1] += amount
