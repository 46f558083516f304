"""Bytes by operator: what each keeps for the backward, brings along in parameters, and what crosses a cut before it.

One place for the columns that searchers sum up over runs of operators. What a whole piece takes is
``weft.plan.piece_memory``'s, what a plan takes ``weft.plan.memory``'s.
"""

from __future__ import annotations

import numpy as np

from weft.model.graph import F64, I64, Graph, TensorRole
from weft.plan.memory import optimizer_bytes
from weft.plan.plan import Optimizer


def kept_by_op(graph: Graph) -> F64:
    """Return the bytes that are kept for the backward of what each operator makes, for the batch traced."""
    kept = np.flatnonzero(graph.is_saved & (graph.tensor_producer >= 0) & (graph.tensor_base < 0))
    made = np.bincount(graph.tensor_producer[kept], weights=graph.tensor_bytes[kept], minlength=graph.num_ops)
    return np.asarray(made + graph.saved_inside_bytes, dtype=np.float64)


def first_readers(graph: Graph) -> tuple[I64, I64]:
    """Return the parameters that are read, and the first operator that reads each."""
    is_parameter = graph.tensor_role[graph.inputs] == TensorRole.PARAMETER
    tensors, first = np.unique(graph.inputs[is_parameter], return_index=True)
    return tensors.astype(np.int64), graph.consumer_op[is_parameter][first]


def parameters_by_op(graph: Graph) -> F64:
    """Return the bytes of parameters, each at the first operator that reads it."""
    tensors, ops = first_readers(graph)
    return np.bincount(ops, weights=graph.tensor_bytes[tensors], minlength=graph.num_ops).astype(np.float64)


def state_by_op(graph: Graph, optimizer: Optimizer | None) -> F64:
    """Return the bytes of parameters with gradients and optimizer states; without an optimizer nothing is trained."""
    tensors, ops = first_readers(graph)
    sizes = graph.tensor_bytes[tensors].astype(np.float64)
    if optimizer is not None:
        sizes += sizes * graph.needs_gradient[tensors] + np.asarray(
            [optimizer_bytes(graph, int(tensor), optimizer) for tensor in tensors])
    return np.bincount(ops, weights=sizes, minlength=graph.num_ops).astype(np.float64)


def crossing_tensors(graph: Graph, ops: I64) -> tuple[I64, I64, I64]:
    """Return (tensor, made, last) of all that operators after its maker read, as positions in ``ops``.

    Constants do not cross: every stage computes them for itself.
    """
    position = np.full(graph.num_ops + 1, -1, dtype=np.int64)
    position[ops] = np.arange(len(ops))
    last = np.full(graph.num_tensors, -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs, position[graph.consumer_op])
    made = np.where(graph.tensor_producer >= 0, position[graph.tensor_producer], -1)
    tensors = np.flatnonzero((made >= 0) & (last > made))
    tensors = tensors[~graph.is_constant[graph.tensor_producer[tensors]]]
    return tensors, made[tensors], last[tensors]


def crossing_bytes(graph: Graph, ops: I64) -> F64:
    """Return, for a cut before each of the operators and after the last, the bytes made before and read behind it."""
    tensors, made, last = crossing_tensors(graph, ops)
    crossing = np.zeros(len(ops) + 1)
    np.add.at(crossing, made + 1, graph.tensor_bytes[tensors])
    np.add.at(crossing, last + 1, -graph.tensor_bytes[tensors])
    return np.asarray(np.cumsum(crossing), dtype=np.float64)


def prefix_sums(values: F64) -> F64:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0.0], np.cumsum(values)))
