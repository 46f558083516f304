"""The experts of a model: how many a layer has, how many rows fall on them, and over how many devices they divide.

What falls on each expert depends on values, so planning assumes it (``parse_load``), and says so (``weft.plan.notes``):

    even            every expert is chosen equally often
    power:1.2       the i-th expert is chosen in proportion to i ** -1.2: the first device has the most to do
    0.5,0.3,0.1,0.1 these shares, one for each expert
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.sharding.expert_rows import GROUPED_KINDS

EVEN: Final = "even"


def parse_load(text: str, num_experts: int) -> tuple[float, ...]:
    """Return the share of the rows that falls on each expert; raise ``InputError`` for what cannot be read."""
    kind, _, value = text.partition(":")
    try:
        if kind == EVEN and not value:
            weights = [1.0] * num_experts
        elif kind == "power":
            weights = [(place + 1) ** -float(value) for place in range(num_experts)]
        else:
            weights = [float(item) for item in text.split(",")]
    except (ValueError, OverflowError):
        weights = []
    if len(weights) != num_experts or not sum(weights) or not all(0 <= item < math.inf for item in weights):
        raise InputError(f"the load of experts {text!r} is not even, power:1.2, or {num_experts} shares with commas "
                         "between")
    return tuple(item / sum(weights) for item in weights)


def largest_share(shares: Sequence[float], num_devices: int) -> float:
    """Return the part of the rows on the device with the most, where each has equally many experts, in order.

    >>> largest_share((0.5, 0.25, 0.125, 0.125), 2)
    0.75
    """
    each = len(shares) // num_devices
    return max(sum(shares[first : first + each]) for first in range(0, each * num_devices, each))


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
