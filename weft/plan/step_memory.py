"""What is held while each operator of a model runs, if all of it is one stage: the account that pieces are cut from.

The same walk as that of a stage (``weft.plan.stage_memory``), with figures by operator instead of the largest ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64, I64, Graph
from weft.plan.local_tensors import LocalTensor
from weft.plan.stage_memory import StageView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMemory:
    """Bytes by position among the operators, for one micro-batch."""

    kept: F64
    """What of it is made there is kept for the backward."""
    forward: F64
    """Held while the forward runs there, what has been kept so far included."""
    backward: F64
    """Held while the backward runs there: what is still kept, gradients, and room for those of parameters."""
    first_backward: F64
    """The same in a step's only backward, where gradients of parameters are new: those up to there count, too."""
    new_gradients: F64
    """[position and end] gradients of parameters that are there when the backward comes to this position."""
    released_before: F64
    """[position and end] kept of what is made before it and that only backwards from it on need."""


def step_memory(graph: Graph, ops: I64, *, num_samples: int, training: bool,
                local: Mapping[int, LocalTensor]) -> StepMemory:
    """Return the figures of every operator of a stage that has all of them, in this order."""
    view = StageView(graph, ops, num_samples, local)
    at = _positions(view, len(ops))
    count = len(ops)
    saved = view.saved(training=training)
    own = saved[~view.is_from_outside[saved]]
    kept, forward, backward, first_backward = np.zeros((4, count))
    early, new = np.zeros((2, count + 1))
    np.maximum.at(forward, at, view.forward_live(own, training=training))
    if training:
        made, _, storages = view.spans(view.steps, view.mask(own))
        np.add.at(kept, at[made], view.size[storages])
        np.add.at(kept, at, [step.inside for step in view.steps])
        live = view.gradients_live(view.begins(np.zeros(0, dtype=np.int64), frozenset()))
        held = float(view.size[own].sum()) + view.inside() + live.above(view.released(own))
        np.maximum.at(backward, at[::-1], held + view.weights_room(between=False))  # a piece may have one reader
        there = view.fresh(frozenset(graph.parameters.tolist()))
        np.maximum.at(first_backward, at[::-1], held + there)
        np.maximum.at(new, at[::-1], there)
        last, storages = view.needed_until(own)
        needed = dict(zip(storages.tolist(), at[len(at) - 1 - last].tolist(), strict=True))
        first = dict(zip(storages.tolist(), at[made].tolist(), strict=True))
        for storage, place in needed.items():
            early[first[storage] + 1] += view.size[storage]
            early[place + 1] -= view.size[storage]
    return StepMemory(kept=kept, forward=forward, backward=backward, first_backward=first_backward, new_gradients=new,
                      released_before=np.cumsum(early))


def _positions(view: StageView, num_ops: int) -> I64:
    """Return the operator of each step; moves of tensors to other layouts belong to the one that reads them."""
    is_op = np.array([bool(step.kind) for step in view.steps])
    return np.asarray(np.minimum(np.cumsum(is_op) - is_op, num_ops - 1), dtype=np.int64)
