"""The experts of a model: how many a layer has, how many rows fall on them, and over how many devices they divide."""

from __future__ import annotations

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.sharding.expert_rows import GROUPED_KINDS


def rows_by_experts(graph: Graph) -> dict[int, int]:
    """Return, by the number of experts of a layer, how many rows fall on all of them together."""
    found: dict[int, int] = {}
    for op, kind in enumerate(graph.op_kinds):
        if kind in GROUPED_KINDS:
            num_experts = graph.tensor_shapes[int(graph.op_inputs(op)[1])][0]
            num_rows = graph.tensor_shapes[int(graph.op_outputs(op)[0])][0]
            found[num_experts] = max(found.get(num_experts, 0), num_rows)
    return found


def check_degree(graph: Graph, cluster: Cluster, degree: int) -> None:
    """Raise ``InputError`` where a model's experts cannot be divided over so many devices of a host."""
    counts, most = rows_by_experts(graph), max(map(len, cluster.groups_by_host_and_kind()))
    if not counts:
        raise InputError(f"--ep {degree} divides experts over devices, but {graph.name} has none: leave it out")
    fitting = [size for size in (1, 2, 4, 8, 16) if size <= most and all(count % size == 0 for count in counts)]
    if degree not in fitting:
        experts = " and ".join(map(str, counts))
        raise InputError(f"--ep {degree}: the {experts} experts of a layer cannot be divided evenly over {degree} "
                         f"equal devices of a host, which has {most} at most; try {_nearest(fitting, degree)}")


def _nearest(sizes: list[int], wanted: int) -> int:
    return min(sizes, key=lambda size: (abs(size - wanted), size))
