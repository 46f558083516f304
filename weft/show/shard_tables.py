"""What ``weft shard PROBLEM`` prints: the choice's cost, bound and usage, and what costs most."""

from __future__ import annotations

from typing import IO, Final

from weft.search.strategies.solve import ShardSolution
from weft.search.strategies.strategy_graph import StrategyGraph, evaluate
from weft.show.tables import TextTable, percent, print_text_table

MOST_SHOWN: Final = 8
"""Rows of the table of what costs most."""


def print_strategies(graph: StrategyGraph, solution: ShardSolution, *, width: int | None = None,
                     file: IO[str] | None = None) -> None:
    """Print the solution of a strategy graph."""
    print_text_table(summary_table(graph, solution), file, width)
    print_text_table(costs_table(graph, solution), file, width)


def summary_table(graph: StrategyGraph, solution: ShardSolution) -> TextTable:
    """Return the solution as rows of (what, value)."""
    peak = evaluate(graph, solution.choice)
    limit = graph.usage_limit
    part = "no limit" if limit is None else f"limit {figure(limit)}" + (
        f", {percent(solution.usage_peak / limit)} used" if limit else "")
    return TextTable(header=("strategies", graph.name), rows=(
        ("cost", f"{figure(solution.cost)} (bound {figure(solution.bound)}, gap {100.0 * solution.gap:.3g} %)"),
        ("status", solution.status),
        ("usage", f"{figure(solution.usage_peak)} at time {peak.peak_time} ({part})"),
        ("graph", f"{graph.num_nodes} nodes, {len(graph.edges)} edges"),
        ("search", f"{solution.seconds:.3g} seconds")))


def costs_table(graph: StrategyGraph, solution: ShardSolution) -> TextTable:
    """Return the nodes and edges of the choice that cost most."""
    choice = solution.choice
    parts = [(cost[chosen].item(), f"node {node}", str(chosen))
             for node, (cost, chosen) in enumerate(zip(graph.costs, choice, strict=True))]
    parts += [(matrix[choice[a], choice[b]].item(), f"edge {a} - {b}", f"{choice[a]}, {choice[b]}")
              for (a, b), matrix in zip(graph.edges.tolist(), graph.edge_costs, strict=True)]
    parts.sort(key=lambda part: -part[0])
    total = solution.cost or 1
    rows = tuple((what, chosen, figure(cost), percent(cost / total)) for cost, what, chosen in parts[:MOST_SHOWN])
    return TextTable(title="What costs most", header=("what", "strategy", "cost", "of all"), rows=rows)


def figure(value: float) -> str:
    """Return a number as it is if it is whole, else with nine digits."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"
