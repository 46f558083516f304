"""A first choice of strategies in one pass over the nodes, for when there is little time.

At first every node is taken to use its least: what that leaves free at each time is there for dearer habits. Then, node
by node, the strategy that costs least beside the neighbours chosen before it, among those for which there is room.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.strategies.strategy_graph import FORBIDDEN, StrategyGraph, evaluate

CHECKED: Final = 256
"""Nodes between two looks at the clock."""


def first_choice(graph: StrategyGraph, budget: Budget) -> list[int] | None:
    """Return a choice that the judge accepts, or None; once the time is up, nodes take what uses least."""
    least = [int(np.where(cost < FORBIDDEN, usage, np.inf).argmin())
             for cost, usage in zip(graph.costs, graph.usages, strict=True)]
    choice, room = list(least), _Room(graph, least)
    before: list[list[tuple[int, int, bool]]] = [[] for _ in range(graph.num_nodes)]
    for edge, (a, b) in enumerate(graph.edges.tolist()):
        before[max(a, b)].append((edge, min(a, b), a < b))
    for node in range(graph.num_nodes):
        if node % CHECKED == 0 and budget.is_spent:
            break
        total = graph.costs[node].astype(np.float64)
        for edge, other, is_first in before[node]:
            matrix = graph.edge_costs[edge]
            total = total + (matrix[choice[other]] if is_first else matrix[:, choice[other]])
        choice[node] = room.take(node, total, least[node])
    for found in (choice, least):
        if evaluate(graph, found).is_feasible(graph.usage_limit):
            return found
    return None


def lowest_cost(graph: StrategyGraph) -> float:
    """Return what no choice can cost less than: everything at its cheapest."""
    return float(sum(array.min() for array in (*graph.costs, *graph.edge_costs)))


class _Room:
    """What is used at every time by the strategies taken so far."""

    def __init__(self, graph: StrategyGraph, least: list[int]) -> None:
        self.usages, self.limit = graph.usages, graph.usage_limit
        times = np.unique(graph.intervals)
        self.spans: I64 = np.searchsorted(times, graph.intervals)
        self.used: F64 = np.zeros(len(times) + 1)
        if self.limit is not None:
            amounts = np.array([usage[strategy] for usage, strategy in zip(self.usages, least, strict=True)],
                               dtype=np.float64)
            alive = self.spans[:, 1] > self.spans[:, 0]
            np.add.at(self.used, self.spans[alive, 0], amounts[alive])
            np.subtract.at(self.used, self.spans[alive, 1], amounts[alive])
            self.used = np.cumsum(self.used)

    def take(self, node: int, total: F64, before: int) -> int:
        """Return the cheapest strategy for which there is room, with its usage in place of that of ``before``."""
        begin, end = self.spans[node]
        if self.limit is None or end <= begin:
            return int(total.argmin())
        more = self.usages[node] - self.usages[node][before]
        fits = self.used[begin:end].max() + more <= self.limit
        fits[before] = True
        best = int(np.where(fits, total, np.inf).argmin())
        self.used[begin:end] += more[best]
        return best
