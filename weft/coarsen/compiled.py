"""Costs of compiled stages: what a compiler fuses moves less, and is launched once.

A compiler leaves products, convolutions and attention to libraries and makes one kernel of each chain of elementwise
operators, norms, softmaxes, copies and gathers (``COMPILER_STEPS``, a part of the table of ``weft.coarsen.rules``). For
each group the seconds of its operators, measured or not, are scaled by what the roofline says of the group:

    forward    one launch + max(all computing, all moving x border bytes / bytes of its operators)
    backward   the same with what is read at the border twice: values that were kept, and gradients that are written

So the figures stay those of operators, and a stage that has a whole group has the time of its kernel.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from weft.cluster.cluster import Cluster
from weft.coarsen.coarsen import contract
from weft.coarsen.rules import STEPS, Role, fuse_by_rules
from weft.cost.costs import Costs, load_costs
from weft.cost.roofline import Terms
from weft.model.graph import F64, I64, Graph

_BY_LIBRARIES: Final = frozenset((Role.CONV, Role.MATMUL, Role.ATTENTION))
COMPILER_STEPS: Final = tuple(kept for step in STEPS if (kept := tuple(
    rule for rule in step if not _BY_LIBRARIES & {*rule.chain, rule.gives})))
"""The fusions without products, convolutions and attention."""


def planned_costs(graph: Graph, cluster: Cluster, profile: Path | None, dtype: str | None, *,
                  compiled: bool = False) -> Costs:
    """Return the costs of the graph, of compiled stages or operator by operator; see ``weft.cost.load_costs``."""
    costs = load_costs(graph, cluster, profile, dtype)
    return compiled_costs(graph, costs) if compiled else costs


def compiled_costs(graph: Graph, costs: Costs) -> Costs:
    """Return the costs with every group of fused operators scaled to the time of one kernel."""
    groups = fuse_by_rules(graph, COMPILER_STEPS)
    coarse = contract(graph, groups).graph
    fused = [(group, np.asarray(ops)) for group, ops in enumerate(groups.members()) if len(ops) > 1]
    moved, border = graph.bytes_read + graph.bytes_written, coarse.bytes_read + coarse.bytes_written
    forward_s, backward_s = costs.forward_s.copy(), costs.input_grad_s.copy()
    for column, terms in enumerate(costs.terms):
        if terms is None:
            continue
        for group, ops in fused:
            forward_s[ops, column] *= _scale(terms["forward"], ops, moved, border[group])
            backward_s[ops, column] *= _scale(terms["input_grad"], ops, graph.input_grad_bytes,
                                              border[group] + coarse.bytes_read[group])
    return replace(costs, forward_s=forward_s, input_grad_s=backward_s)


def _scale(terms: Terms, ops: I64, moved: F64, border: float) -> float:
    """Return the time of a group as one kernel over that of its operators one by one; never more than 1."""
    single_s = float(terms.at(1.0)[ops].sum())
    if single_s <= 0:
        return 1.0
    moving_s = float((terms.fixed_s + terms.moved_s)[ops].sum()) * min(1.0, border / max(1.0, float(moved[ops].sum())))
    kernel_s = float(terms.overhead_s[ops].max()) + max(float(terms.compute_s[ops].sum()), moving_s)
    return min(1.0, (kernel_s + float(terms.sum_s[ops].sum())) / single_s)

