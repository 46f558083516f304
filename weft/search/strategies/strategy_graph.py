"""Strategy graphs: one strategy is chosen for every node; nodes and pairs of nodes cost, and live nodes use memory.

    minimise    sum over nodes of costs[node][x[node]] + sum over edges (a, b) of edge_costs[edge][x[a], x[b]]
    such that   at every time, the sum of usages[node][x[node]] over the nodes alive then is at most usage_limit

A node is alive from ``intervals[node, 0]`` to just before ``intervals[node, 1]``. Edges that join the same two nodes
add up. A cost of ``FORBIDDEN`` or more rules a strategy or a pair out. This is the problem of the ASPLOS/EuroSys 2025
contest on intra-operator parallelism, whose files are read as they are (``load_strategy_graph``).

``evaluate`` is the judge of every answer: it shares nothing with the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from weft.base.errors import InputError
from weft.base.files import MAX_PROBLEMS, JsonLimits, load_json
from weft.model.graph import I64

Numbers = np.ndarray[tuple[int, ...], np.dtype[Any]]
"""int64 or float64."""

FORBIDDEN: Final = 10**18
"""Costs from here on are no costs: the strategy, or the pair of strategies, may not be chosen."""
MAX_NODES: Final = 1_000_000
MAX_EDGES: Final = 4_000_000
FILE_LIMITS: Final = JsonLimits(num_bytes=400_000_000, values=28_000_000, lists=1_500_000)
"""Four times the largest problem of the contest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyGraph:
    """See the module's docstring. ``n`` nodes, ``e`` edges; all costs are int64, or all are float64; so are usages."""

    name: str = "problem"
    intervals: I64
    """[n, 2] half open; a node whose interval is empty uses nothing."""
    costs: tuple[Numbers, ...]
    """[n][strategies of the node]"""
    usages: tuple[Numbers, ...]
    """[n][strategies of the node], not negative."""
    edges: I64
    """[e, 2] two different nodes each; several edges may join the same two."""
    edge_costs: tuple[Numbers, ...]
    """[e][strategies of the first node, strategies of the second]"""
    usage_limit: int | float | None = None
    """None for no limit."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.costs)

    @property
    def is_integral(self) -> bool:
        """Return whether all costs are whole numbers by type."""
        return all(array.dtype.kind == "i" for array in (*self.costs, *self.edge_costs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a choice of strategies costs and uses."""

    cost: int | float
    """Exact for whole numbers, however large."""
    usage_peak: int | float
    peak_time: int
    """The first time of the largest usage."""
    num_forbidden: int
    """How many strategies and pairs of the choice are ruled out."""

    def is_feasible(self, limit: int | float | None) -> bool:
        """Return whether nothing is ruled out and the usage within the limit (up to rounding, if not whole numbers)."""
        rounding = 0.0 if isinstance(self.usage_peak, int) else 1e-9
        return self.num_forbidden == 0 and (limit is None or self.usage_peak <= limit + rounding * limit)


def evaluate(graph: StrategyGraph, choice: Sequence[int]) -> Evaluation:
    """Return cost and usage of the choice, strategy by strategy; raise ``InputError`` if it is none."""
    if len(choice) != graph.num_nodes:
        raise InputError(f"a choice has one strategy per node: {graph.num_nodes}, not {len(choice)}")
    for node, strategy in enumerate(choice):
        if not 0 <= strategy < len(graph.costs[node]):
            raise InputError(f"choice[{node}] must be between 0 and {len(graph.costs[node]) - 1}, not {strategy}")
    parts = [graph.costs[node][strategy].item() for node, strategy in enumerate(choice)]
    parts += [matrix[choice[a], choice[b]].item()
              for (a, b), matrix in zip(graph.edges.tolist(), graph.edge_costs, strict=True)]
    peak, time = _peak(graph, choice)
    return Evaluation(cost=sum(parts) if graph.is_integral else math.fsum(parts), usage_peak=peak, peak_time=time,
                      num_forbidden=sum(part >= FORBIDDEN for part in parts))


def _peak(graph: StrategyGraph, choice: Sequence[int]) -> tuple[int | float, int]:
    begin, end = graph.intervals[:, 0], graph.intervals[:, 1]
    used = np.array([graph.usages[node][strategy] for node, strategy in enumerate(choice)])
    is_alive = end > begin
    if not is_alive.any():
        return 0, 0
    times = np.unique(np.concatenate([begin[is_alive], end[is_alive]]))
    change = np.zeros(len(times), dtype=used.dtype)
    np.add.at(change, np.searchsorted(times, begin[is_alive]), used[is_alive])
    np.add.at(change, np.searchsorted(times, end[is_alive]), -used[is_alive])
    usage = np.cumsum(change)
    first = int(usage.argmax())
    return usage[first].item(), int(times[first])


def check_graph(graph: StrategyGraph) -> None:
    """Raise ``InputError`` that lists what is wrong with a strategy graph built in memory."""
    problems: list[str] = []
    _count_problems(graph.intervals, graph.costs, graph.usages, graph.edges, graph.edge_costs, problems)
    _raise_all(problems or _value_problems(graph), graph.name)


def _raise_all(problems: list[str], where: str) -> None:
    if problems:
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise InputError(f"{where}: " + "; ".join([*problems[:MAX_PROBLEMS], *more]))


def _value_problems(graph: StrategyGraph) -> list[str]:
    problems = []
    for what, arrays in (("costs of node", graph.costs), ("costs of edge", graph.edge_costs)):
        problems += [f"{what} {index} have a value that is not a number, or minus infinity"
                     for index, array in enumerate(arrays)
                     if array.dtype.kind != "i" and (np.isnan(array).any() or (array == -np.inf).any())]
    problems += [f"usages of node {node} must be finite and not negative" for node, usage in enumerate(graph.usages)
                 if (usage.dtype.kind != "i" and not np.isfinite(usage).all()) or (usage < 0).any()]
    limit = graph.usage_limit
    if limit is not None and not (math.isfinite(limit) and limit >= 0):
        problems.append(f"the usage limit must be finite and not negative, not {limit}")
    return problems


# ---- files -----------------------------------------------------------------------------------------------------------


def load_strategy_graph(path: str | PathLike[str]) -> StrategyGraph:
    """Return the problem in the file (``.json`` or ``.json.gz``)."""
    return parse_strategy_graph(load_json(path, limits=FILE_LIMITS), where=str(path),
                                name=Path(path).name.removesuffix(".gz").removesuffix(".json"))


def parse_strategy_graph(value: Any, *, where: str = "problem", name: str = "problem") -> StrategyGraph:
    """Return the problem in the plain JSON value; raise ``InputError`` with the path of every field that is wrong."""
    problems: list[str] = []
    fields = _members(value, "", ("problem",), (), problems)
    problem = _members(fields.get("problem"), "problem", ("nodes",), ("name", "edges", "usage_limit"), problems)
    nodes = _members(problem.get("nodes"), "problem.nodes", ("intervals", "costs", "usages"), (), problems)
    edges = _members(problem.get("edges", {"nodes": [], "costs": []}), "problem.edges", ("nodes", "costs"), (),
                     problems)
    title, limit = problem.get("name", name), problem.get("usage_limit")
    if not isinstance(title, str):
        problems.append("problem.name must be text")
    if limit is not None and not (_is_number(limit) and 0 <= limit < FORBIDDEN):
        problems.append(f"problem.usage_limit must be a number from 0 to below 10^18 or null, not {str(limit)[:40]}")
    _raise_all(problems, where)
    intervals = _pairs(nodes["intervals"], "problem.nodes.intervals", MAX_NODES, problems)
    costs = _rows(nodes["costs"], "problem.nodes.costs", MAX_NODES, problems)
    usages = _rows(nodes["usages"], "problem.nodes.usages", MAX_NODES, problems)
    joined = _pairs(edges["nodes"], "problem.edges.nodes", MAX_EDGES, problems)
    edge_costs = _rows(edges["costs"], "problem.edges.costs", MAX_EDGES, problems)
    _raise_all(problems, where)
    _count_problems(intervals, costs, usages, joined, edge_costs, problems)
    _raise_all(problems, where)
    matrices: list[Numbers] = [row.reshape(len(costs[a]), len(costs[b]))
                               for (a, b), row in zip(joined.tolist(), edge_costs, strict=True)]
    return StrategyGraph(name=title, intervals=intervals, costs=_one_type(costs), usages=_one_type(usages),
                         edges=joined, edge_costs=_one_type(matrices), usage_limit=limit)


def _members(value: Any, path: str, needed: tuple[str, ...], optional: tuple[str, ...],
             problems: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        problems.append(f"{path or 'the file'} must be an object with {', '.join(map(repr, needed))}")
        return {}
    start = f"{path}." if path else ""
    problems += [f"{start}{key[:60]} is not a known field" for key in value if key not in (*needed, *optional)]
    missing = [f"{start}{key} is missing" for key in needed if key not in value]
    problems += missing
    return {} if missing else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pairs(value: Any, path: str, most: int, problems: list[str]) -> I64:
    rows = _list_of(value, path, most, problems)
    for index, row in enumerate(rows):
        if not (isinstance(row, list) and len(row) == 2
                and all(type(item) is int and abs(item) < 2**62 for item in row)):
            problems.append(f"{path}[{index}] must be two whole numbers")
    return np.array(rows if not problems else [], dtype=np.int64).reshape(-1, 2)


def _rows(value: Any, path: str, most: int, problems: list[str]) -> list[Numbers]:
    return [_row(row, f"{path}[{index}]", problems) for index, row in enumerate(_list_of(value, path, most, problems))]


def _list_of(value: Any, path: str, most: int, problems: list[str]) -> list[Any]:
    if not isinstance(value, list):
        problems.append(f"{path} must be a list")
        return []
    if len(value) > most:
        problems.append(f"{path} has {len(value)} items, more than {most}")
        return []
    return value


def _row(row: Any, path: str, problems: list[str]) -> Numbers:
    """Return a list of numbers from 0 up as an array; a number from 10^18 up is as good as infinite."""
    empty = np.zeros(0, dtype=np.int64)
    if not (isinstance(row, list) and row and set(map(type, row)) <= {int, float}):
        problems.append(f"{path} must be a list of numbers, at least one")
        return empty
    if min(row) < 0:
        problems.append(f"{path}[{row.index(min(row))}] must not be negative, but is {min(row)}")
        return empty
    if max(row) > FORBIDDEN:
        row = [min(item, FORBIDDEN) for item in row]
    return np.array(row, dtype=np.int64 if set(map(type, row)) == {int} else np.float64)


def _one_type(arrays: list[Numbers]) -> tuple[Numbers, ...]:
    if all(array.dtype == np.int64 for array in arrays):
        return tuple(arrays)
    return tuple(array.astype(np.float64) for array in arrays)


def _count_problems(intervals: I64, costs: Sequence[Numbers], usages: Sequence[Numbers], joined: I64,
                    edge_costs: Sequence[Numbers], problems: list[str]) -> None:
    if not len(costs) == len(usages) == len(intervals):
        problems.append(f"problem.nodes: intervals, costs and usages must be as many, not {len(intervals)}, "
                        f"{len(costs)}, {len(usages)}")
        return
    if len(joined) != len(edge_costs):
        problems.append(f"problem.edges: nodes and costs must be as many, not {len(joined)}, {len(edge_costs)}")
        return
    if not costs:
        problems.append("problem.nodes.costs is empty: give at least one node")
    for node, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        if len(cost) != len(usage):
            problems.append(f"problem.nodes.usages[{node}] has {len(usage)} items, but there are {len(cost)} costs")
        elif max(usage) >= FORBIDDEN:
            problems.append(f"problem.nodes.usages[{node}] has a usage of 10^18 or more")
    for index, ((a, b), row) in enumerate(zip(joined.tolist(), edge_costs, strict=True)):
        where = f"problem.edges.nodes[{index}]"
        if not (0 <= a < len(costs) and 0 <= b < len(costs)):
            problems.append(f"{where} names a node that is not there: [{a}, {b}], nodes are 0 to {len(costs) - 1}")
        elif a == b:
            problems.append(f"{where} joins node {a} with itself")
        elif row.size != len(costs[a]) * len(costs[b]):
            problems.append(f"problem.edges.costs[{index}] has {row.size} items, not {len(costs[a])} x {len(costs[b])} "
                            f"for the strategies of nodes {a} and {b}")
