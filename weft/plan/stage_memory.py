"""What one stage takes for one micro-batch: kept from forward to backward, live inside each, and handed over.

A tensor and its views share one *storage*, known by the tensor that is not a view. Storages that a stage reads from
other stages are not counted inside its forward: they are held as received or handed-over tensors until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from weft.model.graph import F64, I64, NO_BATCH_DIM, Bool, Graph, TensorRole
from weft.plan.layout import stage_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage for some number of samples."""

    saved: int
    """Kept from forward to backward."""
    saved_for_weights: int
    """What gradients of weights need after the gradients of inputs: operands and incoming gradients."""
    inputs: int
    """Tensors from other stages."""
    outputs: int
    """Tensors that other stages read."""
    saved_outputs: int
    """The part of ``outputs`` that is also in ``saved``."""
    input_gradients: int
    """Gradients of ``inputs`` that the backward hands to other stages."""
    forward_peak: int
    """Largest amount live inside the forward, saved tensors included, inputs not."""
    backward_work: int
    """Largest amount of gradients live inside the backward."""


def stage_memory(graph: Graph, ops: I64, *, num_samples: int, training: bool, crossing: I64,
                 parts: Mapping[int, float] = MappingProxyType({})) -> StageMemory:
    """Return the memory figures of the stage with these operators; ``crossing`` are the tensors between stages.

    ``parts`` are the parts of sharded tensors that one device of the stage holds.
    """
    view = _StageView(graph, ops, num_samples, parts)
    saved, for_weights = view.saved(training=training)
    outputs = np.unique(view.root[crossing[view.is_made[crossing]]])
    kept = np.zeros(graph.num_tensors, dtype=bool)
    kept[saved] = True
    inside = view.saved_inside(ops) * num_samples / graph.batch if training else 0.0
    own_saved = saved[~view.is_from_outside[saved]]
    gradients = view.inputs[graph.needs_gradient[view.inputs]] if training else view.inputs[:0]
    return StageMemory(
        saved=_whole(view.size[saved].sum() + inside), saved_for_weights=_whole(for_weights),
        inputs=_whole(view.sizes[view.inputs].sum()), outputs=_whole(view.size[outputs].sum()),
        saved_outputs=_whole(view.size[outputs[kept[outputs]]].sum()),
        input_gradients=_whole(view.sizes[gradients].sum()),
        forward_peak=_whole(view.forward_peak(kept) + view.size[own_saved].sum() + inside),
        backward_work=_whole(view.backward_work()) if training else 0)


def _whole(num_bytes: float) -> int:
    return round(float(num_bytes))


class _StageView:
    """The graph as one stage sees it."""

    def __init__(self, graph: Graph, ops: I64, num_samples: int, parts: Mapping[int, float]) -> None:
        self.graph, self.root, self.parts = graph, graph.memory_root, parts
        is_batched = graph.tensor_batch_dim != NO_BATCH_DIM
        self.sizes: F64 = graph.tensor_bytes.astype(np.float64) * np.where(is_batched, num_samples / graph.batch, 1.0)
        for tensor, part in parts.items():
            self.sizes[tensor] *= part
        self.ops = [(graph.op_inputs(op).tolist(), graph.op_outputs(op).tolist()) for op in ops.tolist()]
        """(tensors read, tensors written) of each operator."""
        self.is_made = self._mask([tensor for _, written in self.ops for tensor in written])
        self.is_touched = self.is_made | self._mask([tensor for read, _ in self.ops for tensor in read])
        self.inputs = stage_inputs(graph, ops)
        outside = self.inputs[~self.is_made[self.root[self.inputs]]]
        self.is_from_outside = self._mask(self.root[outside])
        self.size = np.where((graph.tensor_role == TensorRole.ACTIVATION) & ~self.is_from_outside, self.sizes, 0.0)
        """By storage; zero for parameters, buffers and inputs of the model. What comes from outside is there once
        for each tensor that comes, not as the storage it was cut from."""
        np.add.at(self.size, self.root[outside], self.sizes[outside])

    def _mask(self, tensors: list[int] | I64) -> Bool:
        mask: Bool = np.zeros(self.graph.num_tensors, dtype=bool)
        mask[tensors] = True
        return mask

    def saved_inside(self, ops: I64) -> float:
        """Return what operators keep inside for their backward, of the sharded ones the part of what they read."""
        part = [min((self.parts.get(tensor, 1.0) for tensor in read), default=1.0) for read, _ in self.ops]
        return float((self.graph.saved_inside_bytes[ops] * part).sum())

    def saved(self, *, training: bool) -> tuple[I64, float]:
        """Return the storages that are kept for the backward, and the bytes that the gradients of weights need."""
        if not training:
            return np.zeros(0, dtype=np.int64), 0.0
        role = self.graph.tensor_role
        with_weights = [(read, written) for read, written in self.ops
                        if any(role[tensor] == TensorRole.PARAMETER for tensor in read)]
        operands = self._saved_storages(self._mask([tensor for read, _ in with_weights for tensor in read]))
        gradients = [tensor for _, written in with_weights for tensor in written]
        return (self._saved_storages(self.is_touched),
                float(self.size[operands].sum() + self.sizes[gradients].sum()))

    def _saved_storages(self, chosen: Bool) -> I64:
        storages = np.unique(self.root[chosen])
        return np.asarray(storages[self.graph.is_saved[storages]], dtype=np.int64)

    def forward_peak(self, kept: Bool) -> float:
        """Return the most that is live at once inside the forward beyond what is saved in the end."""
        return self._peak(self.ops, self.is_made & ~kept)

    def backward_work(self) -> float:
        """Return the most that gradients of activations take at once, from the last operator to the first."""
        wanted = self._mask(self.root[self.graph.needs_gradient & self.is_touched])
        return self._peak(self.ops[::-1], wanted)

    def _peak(self, ops: list[tuple[list[int], list[int]]], counted: Bool) -> float:
        """Return the largest total of the storages that are live: from the first operator that has it to the last."""
        steps = [np.unique(self.root[read + written]) for read, written in ops]
        steps = [step[counted[step]] for step in steps]
        last = {storage: position for position, step in enumerate(steps) for storage in step.tolist()}
        live, peak = 0.0, 0.0
        held: set[int] = set()
        for position, step in enumerate(steps):
            live += sum(self.size[storage] for storage in step.tolist() if storage not in held)
            held.update(step.tolist())
            peak = max(peak, live)
            live -= sum(self.size[storage] for storage in step.tolist() if last[storage] == position)
        return peak
