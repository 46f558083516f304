"""When, inside a backward, the gradients of parameters are final.

Autograd runs operators from the last to the first. A parameter's gradient is final when the first operator of the stage
that reads it has had its turn, so that a parameter which several operators read (tied weights) waits for the earliest:

    forward    embed(w0)   linear(w1)   linear(w2)   head(w0)
    backward   head, linear -> w2 final, linear -> w1 final, embed -> w0 final
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.cost.costs import Costs
from weft.model.graph import F64, I64, Graph


def final_times(graph: Graph, costs: Costs, ops: I64, devices: Sequence[int], parameters: Sequence[Sequence[int]], *,
                fraction: float, recompute: bool, factored: I64 | None = None) -> F64:
    """Return when each set of parameters is final, and last the backward's end, in seconds on the slowest device.

    ``ops`` are those of the stage, ascending, for this share of the traced batch. What the stage does not read is final
    from the begin. A stage that recomputes has its forward first. Operators in ``factored`` leave out the gradients of
    weights.
    """
    backward, forward = costs.op_seconds("B", fraction)[ops], costs.op_seconds("F", fraction)[ops]
    if factored is not None and len(factored):
        backward = np.where(np.isin(ops, factored)[:, None], costs.op_seconds("I", fraction)[ops], backward)
    columns = sorted({costs.column_of_device[device] for device in devices})
    totals = (backward + forward if recompute else backward)[:, columns].sum(axis=0)
    column = columns[int(np.argmax(totals))]
    before = float(forward[:, column].sum()) if recompute else 0.0
    done = before + np.cumsum(backward[::-1, column])[::-1]
    first = first_readers(graph, ops)
    times = [max((float(done[first[tensor]]) for tensor in tensors if tensor in first), default=0.0)
             for tensors in parameters]
    return np.asarray([*times, float(done[0]) if len(ops) else 0.0], dtype=np.float64)


def first_readers(graph: Graph, ops: I64) -> dict[int, int]:
    """Return for each tensor that the operators read the place in ``ops``, which ascend, of the first that does."""
    is_inside = np.zeros(graph.num_ops, dtype=np.bool_)
    is_inside[ops] = True
    entries = np.flatnonzero(is_inside[graph.consumer_op])
    tensors, first = np.unique(graph.inputs[entries], return_index=True)
    places = np.searchsorted(ops, graph.consumer_op[entries[first]])
    return dict(zip(tensors.tolist(), places.tolist(), strict=True))
