"""Operator times from peak rates: the roofline.

For one operator on one device, with the efficiencies of its class (``op_classes``) and the share ``f`` of the traced
batch:

    time(f) = overhead + max(f * compute, fixed + f * moved) + sum

    compute = flops / (peak flop/s of the dtype * compute efficiency)
    fixed   = bytes that do not depend on the batch (parameters) / (memory bandwidth * memory efficiency)
    moved   = all other bytes / (memory bandwidth * memory efficiency)
    sum     = of the gradient of parameters only: to add it to the sum over micro-batches, in a kernel of its own

Views move nothing and cost nothing, not even overhead (their backward may: that of a split is a concatenation). An
operator that does not depend on the batch has ``f = 1`` always. A gather reads what it writes, not its whole table.
``Terms`` holds these terms of all operators on one device kind for one part: forward, gradient of the inputs,
gradient of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from weft.base.errors import ClusterError
from weft.cluster.cluster import DeviceKind
from weft.cost.op_classes import EMBEDDING, VIEW, Efficiency, op_class, op_classes
from weft.model.graph import F64, NO_BATCH_DIM, UNKNOWN_BATCH_DIM, Bool, Graph, TensorRole

Part = Literal["forward", "input_grad", "weight_grad"]
_READ_READ_WRITE: Final = 3
"""A sum in place reads both terms and writes one."""
PARTS: Final[tuple[Part, ...]] = ("forward", "input_grad", "weight_grad")

_FALLBACK: Final = {
    "bfloat16": ("float16", "float32"), "float16": ("bfloat16", "float32"), "tf32": ("float32",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32"), "float8_e5m2": ("float16", "bfloat16", "float32"),
    "float64": ("float32",), "complex64": ("float32",), "complex128": ("float64", "float32"),
}
_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
                 "fp64": "float64", "double": "float64"}
_ITEM_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "tf32": 4, "complex64": 8,
                      "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}


def dtype_name(text: str) -> str:
    """Return the full name of a dtype: ``bf16`` is ``bfloat16``; a ``torch.`` prefix is dropped."""
    plain = text.removeprefix("torch.")
    return _SHORT.get(plain, plain)


def is_float(dtype: str) -> bool:
    """Return whether ``dtype`` is a floating-point or complex type."""
    return dtype in _ITEM_BYTES


def item_bytes(dtype: str) -> int:
    """Return the size of one element of a floating-point type."""
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A peak compute rate and the note to show if it belongs to another dtype."""

    flop_per_s: float
    note: str | None = None


def peak_rate(kind: DeviceKind, dtype: str) -> Peak:
    """Return the kind's peak rate for ``dtype``; a missing dtype takes the nearest one's, with a note.

    bfloat16 falls back to float16, then float32; float16 to bfloat16, then float32; float64 to half of float32;
    integers count as float32.
    """
    rates = kind.flop_per_s
    if dtype in rates:
        return Peak(flop_per_s=rates[dtype])
    for other in (*_FALLBACK.get(dtype, ("float32",)), *sorted(rates)):
        if other in rates:
            rate = rates[other] / 2 if dtype == "float64" else rates[other]
            shown = f"half of its {other} rate" if dtype == "float64" else f"its {other} rate"
            note = f"{kind.name} gives no {dtype} rate: {shown} is used" if is_float(dtype) else None
            return Peak(flop_per_s=rate, note=note)
    raise ClusterError(f"device kind {kind.name!r} gives no compute rate: add 'flops' by dtype to the cluster file, "
                       "choose a preset, profile the model there, or give all times in the graph file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The roofline's terms for all operators on one device kind, for one part of the work."""

    compute_s: F64
    fixed_s: F64
    moved_s: F64
    overhead_s: F64
    sum_s: F64
    """To add new gradients of parameters to their sums over micro-batches."""
    scales: Bool
    """The operator's work grows with the batch."""

    def at(self, fraction: float) -> F64:
        """Return the seconds of every operator for this share of the traced batch."""
        share = np.where(self.scales, fraction, 1.0)
        work_s = np.maximum(share * self.compute_s, self.fixed_s + share * self.moved_s)
        time_s: F64 = self.overhead_s + work_s + self.sum_s
        return time_s

    def ratio(self, fraction: float) -> F64:
        """Return time(fraction) / time(1); where there are no figures, the share itself."""
        result = np.where(self.scales, fraction, 1.0)
        np.divide(self.at(fraction), self.at(1.0), out=result, where=self.compute_s + self.fixed_s + self.moved_s > 0)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What of a graph the roofline needs, derived once for all device kinds."""

    dtypes: tuple[str, ...]
    """The dtype that each operator computes in."""
    classes: tuple[str, ...]
    flops: Mapping[Part, F64]
    fixed_bytes: Mapping[Part, F64]
    moved_bytes: Mapping[Part, F64]
    gradient_bytes: F64
    """Gradients of the trained parameters that each operator is the first to read."""
    scales: Bool
    is_view: Bool


def describe_work(graph: Graph, dtype: str | None = None) -> Work:
    """Return the operators' work; ``dtype`` (if given) replaces every operator's floating-point type."""
    traced = op_dtypes(graph)
    wanted = None if dtype is None else dtype_name(dtype)
    dtypes = tuple(wanted if wanted is not None and is_float(own) else own for own in traced)
    resize = np.array([item_bytes(new) / item_bytes(old) if is_float(old) else 1.0
                       for new, old in zip(dtypes, traced, strict=True)])
    classes = tuple(map(op_class, graph.op_kinds))
    total = {"forward": graph.bytes_read + graph.bytes_written, "input_grad": graph.input_grad_bytes,
             "weight_grad": graph.weight_grad_bytes}
    scales = _scales_with_batch(graph)
    unscaled = parameter_bytes(graph)
    is_gather = np.array([name == EMBEDDING for name in classes], dtype=bool)
    unscaled[is_gather] = 0.0
    total["forward"] = np.where(is_gather, np.minimum(total["forward"], 2 * graph.bytes_written), total["forward"])
    fixed = {part: np.where(scales, np.minimum(unscaled, total[part]), 0.0) for part in PARTS}
    tensors, places = np.unique(graph.inputs, return_index=True)
    trained = (graph.tensor_role[tensors] == TensorRole.PARAMETER) & graph.needs_gradient[tensors]
    gradient_bytes = np.bincount(graph.consumer_op[places[trained]], weights=graph.tensor_bytes[tensors[trained]],
                                 minlength=graph.num_ops)  # of each parameter, with the first operator that reads it
    return Work(
        dtypes=dtypes, classes=classes, scales=scales,
        flops={"forward": graph.flops, "input_grad": graph.input_grad_flops, "weight_grad": graph.weight_grad_flops},
        fixed_bytes={part: fixed[part] * resize for part in PARTS},
        moved_bytes={part: (total[part] - fixed[part]) * resize for part in PARTS},
        gradient_bytes=gradient_bytes * resize,
        is_view=np.array([name == VIEW for name in classes], dtype=bool))


def op_dtypes(graph: Graph) -> tuple[str, ...]:
    """Return the dtype that each operator computes in: its first floating-point output, else input, else ``float32``.

    An operator without floating-point tensors has the dtype of its first output.
    """
    result = []
    for op in range(graph.num_ops):
        tensors = [*graph.op_outputs(op), *graph.op_inputs(op)]
        names = [name for name in (graph.tensor_dtypes[tensor] for tensor in tensors) if name]
        floats = (name for name in names if is_float(name))
        result.append(next(floats, names[0] if names else "float32"))
    return tuple(result)


def parameter_bytes(graph: Graph) -> F64:
    """Return the bytes of parameters and buffers (and views of them) that each operator reads."""
    role = graph.tensor_role[graph.memory_root]
    is_parameter = (role == TensorRole.PARAMETER) | (role == TensorRole.BUFFER)
    counted = np.where(is_parameter, graph.tensor_bytes, 0)[graph.inputs]
    return np.bincount(graph.consumer_op, weights=counted, minlength=graph.num_ops).astype(np.float64)


def _scales_with_batch(graph: Graph) -> Bool:
    """Return whether each operator's work grows with the batch; True where the tracer does not say."""
    batch_dim = graph.tensor_batch_dim
    depends = (batch_dim != NO_BATCH_DIM) & ((graph.tensor_role == TensorRole.ACTIVATION)
                                             | (graph.tensor_role == TensorRole.INPUT)
                                             | (batch_dim != UNKNOWN_BATCH_DIM))
    result = np.zeros(graph.num_ops, dtype=bool)
    result[graph.consumer_op[depends[graph.inputs]]] = True
    produced = (graph.tensor_producer >= 0) & depends
    result[graph.tensor_producer[produced]] = True
    no_tensors = np.ones(graph.num_ops, dtype=bool)
    no_tensors[graph.consumer_op] = False
    no_tensors[graph.tensor_producer[graph.tensor_producer >= 0]] = False
    return (result | no_tensors) & ~graph.is_constant


def roofline_terms(work: Work, kind: DeviceKind, part: Part,
                   fitted: Mapping[str, Efficiency]) -> Terms:
    """Return the terms of all operators on ``kind``; classes in ``fitted`` take their efficiencies from there."""
    compute_rate, memory_rate = _rates(work, kind, fitted)
    is_empty = (work.flops[part] == 0) & (work.fixed_bytes[part] + work.moved_bytes[part] == 0)
    is_free = is_empty & (work.is_view if part == "forward" else True)
    return Terms(
        compute_s=work.flops[part] / compute_rate, fixed_s=work.fixed_bytes[part] / memory_rate,
        moved_s=work.moved_bytes[part] / memory_rate,
        overhead_s=np.where(is_free, 0.0, kind.overhead_s),
        sum_s=(_READ_READ_WRITE * work.gradient_bytes / (pointwise_rate(kind) or math.inf) if part == "weight_grad" else
               np.zeros(len(work.dtypes))),
        scales=work.scales & ~(work.is_view & is_empty))


def pointwise_rate(kind: DeviceKind) -> float | None:
    """Return the bytes that pointwise operators, such as an optimizer's step, move in a second; None if not known."""
    rate = kind.memory_bytes_per_s
    return None if rate is None else rate * op_classes()["elementwise"].on(kind.type).memory


def _rates(work: Work, kind: DeviceKind, fitted: Mapping[str, Efficiency]) -> tuple[F64, F64]:
    """Return the compute and memory rates that each operator reaches on ``kind``."""
    if kind.memory_bytes_per_s is None:
        raise ClusterError(f"device kind {kind.name!r} gives no memory bandwidth: add 'memory_bandwidth' to the "
                           "cluster file, choose a preset, or give all times in the graph file")
    known: dict[tuple[str, str], tuple[float, float]] = {}
    pairs = list(zip(work.classes, work.dtypes, strict=True))
    for name, dtype in dict.fromkeys(pairs):
        entry = op_classes()[name]
        share = fitted.get(name, entry.on(kind.type))
        uses_tf32 = entry.tf32 and dtype == "float32" and kind.type != "cpu" and "tf32" in kind.flop_per_s
        peak = peak_rate(kind, "tf32" if uses_tf32 else dtype).flop_per_s
        if entry.unit == "vector":
            peak = min(peak, peak_rate(kind, "float32").flop_per_s)
        known[name, dtype] = (peak * share.compute, kind.memory_bytes_per_s * share.memory)
    table = np.array([known[pair] for pair in pairs], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def peak_notes(work: Work, kinds: Sequence[DeviceKind]) -> tuple[str, ...]:
    """Return the notes about dtypes that a kind has no rate for, each once."""
    notes: dict[str, None] = {}
    for kind in kinds:
        for dtype in sorted(set(work.dtypes)):
            note = peak_rate(kind, dtype).note if kind.flop_per_s else None
            if note is not None:
                notes[note] = None
    return tuple(notes)
