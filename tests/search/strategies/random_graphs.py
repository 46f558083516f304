"""Random strategy graphs of all kinds, small enough to try every choice, and the answer by trying."""

from __future__ import annotations

import itertools

import numpy as np

from weft.search.strategies.strategy_graph import FORBIDDEN, StrategyGraph, evaluate


def random_graph(rng: np.random.Generator, *, nodes: int = 6, most: int = 4, density: float = 0.5,
                 forbidden: float | None = None, is_float: bool | None = None, limit: str | None = None) -> StrategyGraph:
    """Return a graph; what is not given is drawn."""
    count = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, most + 1, count)
    if rng.random() < 0.4:
        sizes[:] = sizes[0]
    ruled_out = forbidden if forbidden is not None else float(rng.choice([0.0, 0.1, 0.4]))
    as_float = bool(rng.random() < 0.3) if is_float is None else is_float
    largest = int(rng.choice([3, 30, 10**6]))
    begin = rng.integers(0, 6, count)
    intervals = np.stack([begin, begin + rng.integers(0, 6, count)], axis=1)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and rng.random() < density / 2]
    pairs += [pair for pair in pairs if rng.random() < 0.1]
    costs = [_costs(rng, (size,), largest, ruled_out / 4, as_float) for size in sizes]
    edges = [_edge(rng, (sizes[a], sizes[b]), largest, ruled_out, as_float) for a, b in pairs]
    usages = [rng.integers(0, 10, size) for size in sizes]
    kind = limit or str(rng.choice(["none", "tight", "loose"]))
    return StrategyGraph(
        intervals=intervals.astype(np.int64), costs=tuple(costs), usages=tuple(usages),
        edges=np.array(pairs, dtype=np.int64).reshape(-1, 2), edge_costs=tuple(edges),
        usage_limit={"none": None, "tight": int(rng.integers(0, 8 + 3 * count)), "loose": 10 * count}[kind])


def _costs(rng: np.random.Generator, shape: tuple[int, ...], largest: int, ruled_out: float, as_float: bool) -> np.ndarray:
    values = rng.integers(0, largest, shape)
    values[rng.random(shape) < ruled_out] = FORBIDDEN
    if not as_float:
        return values
    return np.where(values >= FORBIDDEN, np.inf, values + rng.random(shape))


def _edge(rng: np.random.Generator, shape: tuple[int, int], largest: int, ruled_out: float, as_float: bool) -> np.ndarray:
    values = _costs(rng, shape, largest, ruled_out, as_float)
    if ruled_out and shape[0] == shape[1] and rng.random() < 0.4:  # The two choose alike.
        alike = np.full(shape, FORBIDDEN, dtype=values.dtype)
        alike[np.arange(shape[0]), rng.permutation(shape[0])] = 0 if rng.random() < 0.7 else 5
        return alike
    return values


def all_choices(graph: StrategyGraph) -> list[tuple[float, tuple[int, ...]]]:
    """Return every feasible choice with its cost."""
    found = []
    for choice in itertools.product(*(range(len(cost)) for cost in graph.costs)):
        result = evaluate(graph, choice)
        if result.is_feasible(graph.usage_limit):
            found.append((result.cost, choice))
    return found


def best_cost(graph: StrategyGraph) -> float | None:
    """Return the least cost of all choices; None if there is none."""
    return min((cost for cost, _ in all_choices(graph)), default=None)
