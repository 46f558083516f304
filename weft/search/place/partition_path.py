"""Bounds on the latency of dnn-partitioning problems from paths, and the sets that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.partition_latency_kernel import Graph
from weft.search.place.partition_path_kernel import best_cover, spans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cover:
    """What the intervals of one path tell."""

    bound: float
    """No sets have a smaller latency."""
    where: I64
    """[units] Sets by the path's best intervals; they may break a rule, since the path does not know all of them."""


def cover(g: Graph, path: I64) -> Cover:
    """Return the best intervals of the path."""
    bound, ends = best_cover(g, path)
    _, after, before = spans(g, path)
    where = np.zeros(len(g.can_set), dtype=np.int64)
    for index, begin in enumerate(np.flatnonzero(ends >= 0).tolist()):
        where[g.unit[(after >= begin) & (before <= ends[begin])]] = index + 1
    return Cover(bound=bound, where=where)


def cover_s(g: Graph) -> float:
    """Return about how many CPU seconds one cover takes."""
    nodes = len(g.cpu_s)
    return 1e-5 + 2e-8 * nodes * (nodes + len(g.targets)) + 2e-9 * nodes * nodes * g.num_sets


def weights_for_paths(g: Graph) -> Iterator[F64]:
    """Yield weights of nodes by which a path may tell much."""
    yield np.minimum(g.cpu_s, g.fpga_s)
    yield g.cpu_s
    yield g.cost_s
    yield g.size
    yield np.ones(len(g.cpu_s))


def times_in_sets(g: Graph, where: I64) -> F64:
    """Return what every node takes where it is: the longest path by these is nearly critical."""
    return np.asarray(np.where(where[g.unit] > 0, g.fpga_s, g.cpu_s), dtype=np.float64)
