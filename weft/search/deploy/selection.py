"""Project selection: which projects pay, if each needs some tools and a tool is bought once for all who use it.

    maximise   sum of profit[p] over the chosen p  -  sum of cost[t] over the tools that a chosen project needs

This is a minimum cut (Picard 1976): an arc of ``profit`` from the source to each project, one of ``cost`` from each
tool to the sink, and from a project to its tools arcs that it does not pay to cut. Projects still reached from the
source when no more can flow are the answer, the smallest one among the best. This is the adapter to OR-Tools' maximum
flow, which counts in whole numbers of 63 bits: one unit is that part of the largest profit or cost of which all profits
together still have room. With a thousand projects that is 2^-52 of the largest, as exact as the numbers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.graph.python import max_flow


def select_projects(profits: Sequence[float], costs: Sequence[float],
                    needs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the projects to choose, in order; ``needs[p]`` are the tools of project ``p``. Profits may be negative."""
    largest = max((*profits, *costs), default=0.0)
    if largest <= 0.0:
        return ()
    shift = 62 - math.frexp(largest)[1] - (len(profits) + len(costs)).bit_length()
    gains, prices = ([int(math.ldexp(max(value, 0.0), shift)) for value in values] for values in (profits, costs))
    source, sink = len(gains) + len(prices), len(gains) + len(prices) + 1
    flow = max_flow.SimpleMaxFlow()
    for project, gain in enumerate(gains):
        if gain > 0:
            flow.add_arc_with_capacity(source, project, gain)
            for tool in needs[project]:
                flow.add_arc_with_capacity(project, len(gains) + tool, gain)
    for tool, price in enumerate(prices):
        flow.add_arc_with_capacity(len(gains) + tool, sink, price)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, "the sum of all capacities is within the range"
    return tuple(sorted(node for node in flow.get_source_side_min_cut() if node < len(gains)))
