"""Solving strategy graphs: reductions, a rising bound and walks beside each other, and an exact solver for the rest.

    choose      x[i], a strategy for every node
    minimise    sum of costs[i][x[i]] + sum over edges of edge_costs[e][x[a], x[b]]      (``strategy_graph.evaluate``)
    subject to  usage of the nodes alive <= limit, at every time                         (``usage.add_usage``)
    bounds      of the dual: costs moved between nodes and edges, usage at prices        (``dual.Dual``)
                of the linear relaxation, of small cores                                 (``integer.solve_integer``)

    reduce     exact reductions (units, usage, shrink); many problems are solved by these
    rounds     one core raises the bound (dual), one walks (walk); after every round they exchange what they found
    fix        strategies whose bound is above the best choice are removed, and the rest is reduced again
    finish     what is small enough goes to a mixed integer program

A round is a fixed amount of work, and what is exchanged does not depend on which core is faster: without a time limit
the same problem and seed give the same choice.

A first choice of strategies in one pass over the nodes, for when there is little time.

At first every node is taken to use its least: what that leaves free at each time is there for dearer habits. Then, node
by node, the strategy that costs least beside the neighbours chosen before it, among those for which there is room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c
from weft.search.strategies.search import Search
from weft.search.strategies.strategy_graph import FORBIDDEN, StrategyGraph, check_graph, evaluate
from weft.search.strategies.tuning import TUNING

DEFAULT_ROUNDS: Final = 300
"""Without a time limit the search ends after so many rounds, about as many tenths of a second on large problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSolution:
    """The best choice of strategies found."""

    status: Literal["optimal", "feasible"]
    """``optimal`` only with a proof; costs that are not whole numbers count as equal within 1e-9 of them."""
    cost: int | float
    bound: int | float
    """No choice costs less."""
    usage_peak: int | float
    choice: tuple[int, ...]
    """The strategy of every node."""
    seconds: float
    """Wall time."""
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""

    @property
    def gap(self) -> float:
        """Return how much less the best choice of all could cost, as a share of this one's cost."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(abs(self.cost), 1e-300)

    def to_json(self) -> dict[str, Any]:
        """Return the result object of ``weft shard --json``."""
        return {"status": self.status, "cost": self.cost, "bound": self.bound, "usage_peak": self.usage_peak,
                "choice": list(self.choice), "seconds": self.seconds}


def solve(graph: StrategyGraph, *, time_limit: float | None = None, seed: int = 0,
          progress: Callable[[str], None] = lambda text: None) -> ShardSolution:
    """Return the best choice of strategies found; raise ``NoFeasiblePlan`` if none exists, or none was found.

    ``time_limit`` is wall time in seconds, counted from this call. Ctrl-C ends the search with the best so far.
    """
    begin = time.monotonic()
    deadline = None if time_limit is None else begin + time_limit - min(TUNING.reserve_s, 0.02 * time_limit)
    budget = Budget(effort=DEFAULT_ROUNDS if time_limit is None else math.inf, report=progress, deadline=deadline)
    check_graph(graph)
    search = Search(graph, budget=budget, seed=seed)
    first = None if deadline is None else first_choice(graph, budget)
    is_whole = _run(search, budget, has_choice=first is not None)
    best = search.best
    found = [(evaluate(graph, choice), choice) for choice in (best.answer, first) if choice is not None]
    if not found:
        raise NoFeasiblePlan(search.why_none(is_proven=False))
    judged, choice = min(found, key=lambda item: item[0].cost)
    assert judged.is_feasible(graph.usage_limit), "the search returned a choice that the judge refuses"
    if best.bound == -math.inf:
        best.raise_bound(lowest_cost(graph))
    bound = judged.cost if _is_proof(best.is_proven, judged.cost) else _rounded(best.bound, judged.cost)
    solution = ShardSolution(status="optimal" if bound >= judged.cost else "feasible", cost=judged.cost, bound=bound,
                             usage_peak=judged.usage_peak, choice=tuple(choice), seconds=time.monotonic() - begin,
                             is_interrupted=budget.is_interrupted)
    if not is_whole:
        best.offer(judged.cost, choice)
        best.tell("time limit")
    return solution


def _run(search: Search, budget: Budget, *, has_choice: bool) -> bool:
    """Search until the deadline, a little longer where there is no choice yet; return whether it ended by itself."""
    end = None if budget.deadline is None else budget.deadline + (0.0 if has_choice else TUNING.grace_s)
    try:
        with ended_by_ctrl_c(budget), cut_short(end):
            search.run()
    except OutOfTime:
        return False
    return True


def _is_proof(is_proven: bool, cost: int | float) -> bool:
    """Return whether a proof by floating-point numbers is one: it cannot tell whole numbers beyond 2^52 apart."""
    return is_proven and not (isinstance(cost, int) and abs(cost) >= 2**52)


def _rounded(bound: float, cost: int | float) -> int | float:
    """Return the bound less rounding errors; the next whole number if costs are such."""
    safe = bound - 1e-12 * max(abs(cost), abs(bound))
    return min(cost, math.ceil(safe)) if isinstance(cost, int) else min(cost, safe)


# ---- a first choice --------------------------------------------------------------------------------------------------




def first_choice(graph: StrategyGraph, budget: Budget) -> list[int] | None:
    """Return a choice that the judge accepts, or None; once the time is up, nodes take what uses least."""
    least = [int(np.where(cost < FORBIDDEN, usage, np.inf).argmin())
             for cost, usage in zip(graph.costs, graph.usages, strict=True)]
    choice, room = list(least), _Room(graph, least)
    before: list[list[tuple[int, int, bool]]] = [[] for _ in range(graph.num_nodes)]
    for edge, (a, b) in enumerate(graph.edges.tolist()):
        before[max(a, b)].append((edge, min(a, b), a < b))
    for node in range(graph.num_nodes):
        if node % TUNING.checked == 0 and budget.is_spent:
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
