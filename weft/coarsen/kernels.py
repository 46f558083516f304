"""One kernel for each operator, where a backend says in which of its kernels an operator occurs: none, one or more."""

from __future__ import annotations

from collections.abc import Sequence

from weft.coarsen.groups import group_edges, is_free, loose_constants
from weft.model.graph import Graph


def choose_kernels(graph: Graph, known: Sequence[Sequence[int]]) -> list[int]:
    """Return the kernel of each operator; kernels are numbered in the order in which they run.

    ``known`` are the kernels in which an operator occurs, best first. The operator belongs to the first of them that
    is not before any kernel whose results it needs, so groups are convex. One that occurs in none (the backend did away
    with it), and every view, belongs to the kernel that reads what it makes; if there are several, to the last that it
    reads from.
    """
    producers: list[list[int]] = [[] for _ in known]
    readers: list[list[int]] = [[] for _ in known]
    for source, target in group_edges(graph).tolist():
        producers[target].append(source)
        readers[source].append(target)
    has_none = (loose_constants(graph) | is_free(graph)).tolist()
    earliest = [0] * graph.num_ops
    chosen: list[int | None] = [None] * graph.num_ops
    for op in range(graph.num_ops):
        earliest[op] = max((earliest[producer] for producer in producers[op]), default=0)
        if not has_none[op]:
            chosen[op] = next((kernel for kernel in known[op] if kernel >= earliest[op]), None)
        earliest[op] = max(earliest[op], chosen[op] or 0)
    result = [0] * graph.num_ops
    for op in reversed(range(graph.num_ops)):
        kernel = chosen[op]
        after = {result[reader] for reader in readers[op]}
        is_late = len(after) == 1 or (after and not producers[op])
        result[op] = kernel if kernel is not None else min(after) if is_late else earliest[op]
    return result
