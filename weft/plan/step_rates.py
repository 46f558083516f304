"""How fast a step is in the words of the field: samples, tokens and useful operations per second.

    model FLOP of a step = 3 x (forward FLOP of matrix products, convolutions and attention)      training
                           1 x the same                                                           inference
    MFU                  = model FLOP / (step time x sum of the peak rates of the devices with work)

The backward of a matrix product is two such products. What is computed again (recomputation, and what a fused
attention does in its backward) is not counted, nor are other operators. Attention counts as whole, not as its causal
half, as in PaLM's formula and Megatron's. Peak rates are those of the plan's dtype, without sparsity.

Tokens are known where a model has integers of [samples, positions] as an input that it embeds: as many as there are
positions, for each sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weft.base.errors import ClusterError
from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.op_classes import EMBEDDING, op_class, op_classes
from weft.cost.roofline import peak_rate
from weft.model.graph import Graph, TensorRole
from weft.model.zoo import DTYPES
from weft.plan.plan import Plan

MIXED = "-mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """What a step comes to per second."""

    samples_per_s: float
    tokens_per_s: float | None
    """None where the model's inputs are no tokens."""
    tokens_per_s_per_device: float | None
    """Of the devices that have work."""
    mfu: float | None
    """None where a device's peak rate is not known."""


def step_rates(plan: Plan, graph: Graph, cluster: Cluster, *, step_time_s: float) -> StepRates:
    """Return what the plan's step comes to, if it takes so long."""
    names = {device for stage in plan.stages for replica in stage.replicas for device in replica.devices}
    used, batch = [DeviceId(cluster.device_index[name]) for name in names], plan.model.batch
    tokens = tokens_per_sample(graph)
    tokens_per_s = None if tokens is None else batch * tokens / step_time_s
    try:
        dtype = DTYPES.get(plan.model.dtype, plan.model.dtype).removesuffix(MIXED)
        peak = math.fsum(peak_rate(cluster.kind_of(device), dtype).flop_per_s for device in used)
    except ClusterError:
        peak = 0.0
    flop = model_flop(graph, training=plan.model.mode == "training") * batch
    return StepRates(samples_per_s=batch / step_time_s, tokens_per_s=tokens_per_s,
                     tokens_per_s_per_device=tokens_per_s / len(used) if tokens_per_s and used else None,
                     mfu=flop / (step_time_s * peak) if peak and flop else None)


def model_flop(graph: Graph, *, training: bool) -> float:
    """Return the model FLOP of one sample."""
    units = {name: entry.unit for name, entry in op_classes().items()}
    is_matrix = np.array([units[op_class(kind)] == "matrix" for kind in graph.op_kinds], dtype=bool)
    return (3 if training else 1) * float(graph.flops[is_matrix].sum()) / graph.batch


def tokens_per_sample(graph: Graph) -> int | None:
    """Return the positions of the first input that is embedded; None where there is none."""
    embedded = {int(graph.memory_root[tensor]) for op, kind in enumerate(graph.op_kinds) if op_class(kind) == EMBEDDING
                for tensor in graph.op_inputs(op)}
    for tensor in np.flatnonzero(graph.tensor_role == TensorRole.INPUT).tolist():
        shape = graph.tensor_shapes[tensor]
        is_integer = graph.tensor_dtypes[tensor].startswith(("int", "uint"))
        if tensor in embedded and is_integer and len(shape) == 2 and shape[0] == graph.batch:
            return int(shape[1])
    return None
