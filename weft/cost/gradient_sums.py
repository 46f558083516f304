"""The additions of a backward pass that belong to no operator: a tensor read twice gets two gradients, which are added.

A tensor with ``n`` readers in the backward pass takes ``n - 1`` additions. They count for the operator that makes the
tensor; for a parameter (tied weights) or an input, for each reader after the first. The backward columns of a ``Graph``
include them, but a measured operator does not, since it was measured alone: ``gradient_sums`` says what is to be added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from weft.cost.profile import OpKey
from weft.model.graph import Bool, Graph, TensorRole

SUM_KIND: Final = "weft.gradient_sum"
"""The operator kind under which a profile store has these additions."""


class GradientSum(NamedTuple):
    """One addition of two gradients of a tensor."""

    op: int
    """The operator that it counts for."""
    tensor: int
    is_weight: bool
    """It is part of the parameters' gradients, not of the activations'."""


def gradient_sums(graph: Graph) -> Iterator[GradientSum]:
    """Yield all additions of the backward pass of ``graph``."""
    if not graph.has_backward:
        return
    needs, from_data = graph.needs_gradient, _depends_on_data(graph)
    seen = np.zeros(graph.num_tensors, dtype=bool)
    for op in _on_path_to_loss(graph):
        for tensor in graph.op_inputs(op).tolist():
            if not needs[tensor]:
                continue
            if seen[tensor]:
                producer = int(graph.tensor_producer[tensor])
                yield GradientSum(producer if producer >= 0 else op, tensor, not from_data[tensor])
            seen[tensor] = True


def _on_path_to_loss(graph: Graph) -> list[int]:
    """Return the operators through which gradients flow, in order."""
    wanted = np.zeros(graph.num_tensors, dtype=bool)
    wanted[list(graph.outputs[:1])] = True
    found = []
    for op in range(graph.num_ops - 1, -1, -1):
        outputs = graph.op_outputs(op)
        if (wanted[outputs] & graph.needs_gradient[outputs]).any():
            wanted[graph.op_inputs(op)] = True
            found.append(op)
    return found[::-1]


def _depends_on_data(graph: Graph) -> Bool:
    """Return which tensors depend on the model's inputs."""
    depends: Bool = graph.tensor_role == TensorRole.INPUT
    for op in range(graph.num_ops):
        if depends[graph.op_inputs(op)].any():
            depends[graph.op_outputs(op)] = True
    return depends


def sum_key(graph: Graph, item: GradientSum, device_kind: str, dtype: str | None = None) -> OpKey:
    """Return the key of an addition; autograd adds up parameters' gradients in new memory, activations' in place."""
    shape = ",".join(map(str, graph.tensor_shapes[item.tensor]))
    signature = f"[{shape}] new" if item.is_weight else f"[{shape}]"
    return OpKey(device_kind, SUM_KIND, signature, dtype or graph.tensor_dtypes[item.tensor])
