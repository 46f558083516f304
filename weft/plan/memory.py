"""How many bytes each rank holds while each instruction runs, by category. It depends on the order alone, not on times.

Static for a rank: parameters and buffers, their gradients, and the optimizer's state. Dynamic: a forward takes the
tensors that its backward will need (``Graph.is_saved``) and keeps them until that backward ends; with a split backward,
what the weight gradients need stays until ``W``; with recomputation only the stage's inputs stay, and the rest is taken
again for the backward. While a compute runs it also needs room for what is live inside it. Received tensors are held
from the receive until the compute that reads them ends.

Sizes are the graph's, scaled by an instance's samples. Not counted: the allocator's rounding, and library workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.model.graph import F64, I64, Bool, Graph, TensorRole
from weft.plan.layout import stage_inputs
from weft.plan.plan import Optimizer
from weft.plan.program import Op, Phase, Program
from weft.plan.structure import parameter_holders

CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""``buffers`` are received tensors that wait for their consumer."""

_STATE_BYTES: Final = {"none": 0, "sgd": 0, "adam": 2, "adamw": 2}
"""Optimizer states per parameter element, each in the parameter's precision but at least 4 bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryAccount:
    """Bytes by rank and instruction."""

    static: I64
    """[rank, category]: held all the time."""
    activations: I64
    """Per instruction: bytes of activations held while it runs."""
    buffers: I64
    """Per instruction: bytes of received tensors held while it runs."""
    rank_start: I64

    def held(self, rank: int) -> I64:
        """Return the total bytes that the rank holds during each of its instructions."""
        part = slice(int(self.rank_start[rank]), int(self.rank_start[rank + 1]))
        return np.asarray(self.activations[part] + self.buffers[part] + self.static[rank].sum(), dtype=np.int64)

    def peak(self, rank: int) -> dict[str, int]:
        """Return the bytes by category at the instruction where the rank's total is largest."""
        result = {name: int(self.static[rank, index]) for index, name in enumerate(CATEGORIES)}
        if self.rank_start[rank + 1] > self.rank_start[rank]:
            at = int(self.rank_start[rank]) + int(np.argmax(self.held(rank)))
            result["activations"] += int(self.activations[at])
            result["buffers"] += int(self.buffers[at])
        return result

    def peak_bytes(self, rank: int) -> int:
        """Return the largest total of the rank."""
        return sum(self.peak(rank).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage for the traced batch."""

    saved: float
    """Kept from forward to backward."""
    saved_for_weights: float
    """What gradients of weights need after the gradients of inputs: operands and incoming gradients."""
    inputs: float
    """Tensors received from other stages."""
    forward_peak: float
    """Largest amount live inside the forward, saved tensors included."""
    backward_work: float
    """Largest amount of gradients live inside the backward."""


def account_memory(program: Program) -> MemoryAccount:
    """Return what every rank holds during every instruction of the program."""
    held, during = _activation_changes(program)
    activations = np.zeros(program.num_instructions, dtype=np.int64)
    buffers = _buffer_bytes(program)
    for rank in range(program.num_ranks):
        part = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
        before = np.concatenate(([0.0], np.cumsum(held[part])[:-1])) if part.stop > part.start else held[part]
        activations[part] = np.round(before + during[part]).astype(np.int64)
    return MemoryAccount(static=static_bytes(program), activations=activations, buffers=buffers,
                         rank_start=program.rank_start)


def _activation_changes(program: Program) -> tuple[F64, F64]:
    """Return per instruction the lasting change of held bytes after it, and the extra bytes while it runs."""
    training = program.plan.model.mode == "training"
    change = np.zeros((max(1, len(program.instances)), len(Phase)))
    extra = np.zeros_like(change)
    memories = [stage_memory(program.graph, ops, training=training) for ops in program.stage_ops]
    for index, instance in enumerate(program.instances):
        memory = memories[instance.stage]
        scale = instance.num_samples / program.graph.batch
        recompute = program.plan.stages[instance.stage].recompute
        kept = memory.inputs if recompute else memory.saved
        again = memory.forward_peak if recompute else 0.0
        change[index] = np.asarray([kept, -kept, -(kept - memory.saved_for_weights), -memory.saved_for_weights]) * scale
        if not training:
            change[index] = 0.0
        extra[index] = np.asarray([memory.forward_peak, again + memory.backward_work, again + memory.backward_work,
                                   0.0]) * scale
    is_compute = program.op == Op.COMPUTE
    instance_ids, phases = program.instance[is_compute], program.phase[is_compute]
    lasting, during = np.zeros(program.num_instructions), np.zeros(program.num_instructions)
    lasting[is_compute] = change[instance_ids, phases]
    during[is_compute] = extra[instance_ids, phases]
    return lasting, during


def _buffer_bytes(program: Program) -> I64:
    """Return the bytes of received tensors held during each instruction."""
    change = np.zeros(program.num_instructions + 1, dtype=np.int64)
    received = np.flatnonzero(program.op == Op.RECV)
    if len(received) == 0:
        return change[:-1]
    position = compute_positions(program)
    sizes = np.asarray([channel.num_bytes for channel in program.channels], dtype=np.int64)
    until = np.full(len(received), -1, dtype=np.int64)
    channel_ids, microbatches = program.channel[received].astype(np.int64), program.microbatch[received]
    for consumer, phases, mask in _consumers(program, channel_ids):
        for phase in phases:
            found = position[consumer[mask], phase, microbatches[mask]]
            until[mask] = np.maximum(until[mask], found)
    ends = np.searchsorted(program.rank_start, received, side="right")
    until = np.where(until < received, program.rank_start[ends] - 1, until)
    np.add.at(change, received, sizes[channel_ids])
    np.add.at(change, until + 1, -sizes[channel_ids])
    return np.cumsum(change)[:-1]


def _consumers(program: Program, channel_ids: I64) -> list[tuple[I64, tuple[Phase, ...], Bool]]:
    """Return (consumer instance, phases, which receives) for the first, second, ... consumer of each receive."""
    depth = max(len(channel.consumers) for channel in program.channels)
    gradient = np.asarray([channel.kind == "gradient" for channel in program.channels])[channel_ids]
    rows: list[tuple[I64, tuple[Phase, ...], Bool]] = []
    for index in range(depth):
        table = np.asarray([channel.consumers[index] if index < len(channel.consumers) else -1
                            for channel in program.channels], dtype=np.int64)
        consumer = table[channel_ids]
        rows.append((consumer, (Phase.F,), (consumer >= 0) & ~gradient))
        rows.append((consumer, (Phase.B, Phase.I), (consumer >= 0) & gradient))
    return rows


def compute_positions(program: Program) -> I64:
    """Return [instance, phase, microbatch] -> instruction index, or -1; ranks of a joint instance: the last one."""
    position = np.full((max(1, len(program.instances)), len(Phase), program.plan.microbatches), -1, dtype=np.int64)
    computes = np.flatnonzero(program.op == Op.COMPUTE)
    position[program.instance[computes], program.phase[computes], program.microbatch[computes]] = computes
    return position


def static_bytes(program: Program) -> I64:
    """Return [rank, category]: parameters, gradients and optimizer state that each rank holds throughout."""
    graph, plan = program.graph, program.plan
    training = plan.model.mode == "training"
    result = np.zeros((program.num_ranks, len(CATEGORIES)), dtype=np.int64)
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    for tensor, devices in parameter_holders(plan, graph).items():
        size = int(graph.tensor_bytes[tensor])
        state = optimizer_bytes(graph, tensor, plan.optimizer)
        for device in devices:
            result[rank_of[device], 0] += size
            if training:
                result[rank_of[device], 1] += size
                result[rank_of[device], 2] += -(-state // len(devices)) if plan.optimizer.sharded else state
    for instance in program.instances:
        size = _stage_buffers(graph, program.stage_ops[instance.stage])
        for rank in instance.ranks:
            result[rank, 0] += size
    return result


def optimizer_bytes(graph: Graph, tensor: int, optimizer: Optimizer) -> int:
    """Return the optimizer's state for one parameter; half precision adds a float32 master copy."""
    states = _STATE_BYTES[optimizer.kind]
    width = _dtype_bytes(graph.tensor_dtypes[tensor])
    elements = int(graph.tensor_bytes[tensor]) // width
    master = 1 if width < 4 and optimizer.kind != "none" else 0
    return elements * max(4, width) * (states + master)


def _dtype_bytes(dtype: str) -> int:
    return {"float64": 8, "float16": 2, "bfloat16": 2}.get(dtype, 4)


def _stage_buffers(graph: Graph, ops: I64) -> int:
    read = np.unique(np.concatenate([graph.op_inputs(int(op)) for op in ops]))
    return int(graph.tensor_bytes[read[graph.tensor_role[read] == TensorRole.BUFFER]].sum())


def stage_memory(graph: Graph, ops: I64, *, training: bool) -> StageMemory:
    """Return the memory figures of the stage with these operators, for the traced batch."""
    root = graph.memory_root
    counted = np.isin(graph.tensor_role, (TensorRole.ACTIVATION,))
    inputs = np.unique(root[stage_inputs(graph, ops)])
    inside = np.zeros(graph.num_tensors, dtype=bool)
    reads_parameter = np.zeros(graph.num_tensors, dtype=bool)
    waiting_gradients = 0.0
    for op in ops:
        tensors = graph.op_inputs(int(op))
        inside[tensors] = True
        inside[graph.op_outputs(int(op))] = True
        if (graph.tensor_role[tensors] == TensorRole.PARAMETER).any():
            reads_parameter[tensors] = True
            waiting_gradients += float(graph.tensor_bytes[graph.op_outputs(int(op))].sum())
    inside &= counted
    saved = np.unique(root[inside & graph.is_saved]) if training else np.zeros(0, dtype=np.int64)
    saved = saved[counted[saved]]
    weights = np.unique(root[inside & graph.is_saved & reads_parameter]) if training else saved
    weights = weights[counted[weights]]
    sizes = graph.tensor_bytes.astype(np.float64)
    kept = np.zeros(graph.num_tensors, dtype=bool)
    kept[saved] = True
    return StageMemory(
        saved=float(sizes[saved].sum()),
        saved_for_weights=float(sizes[weights].sum()) + waiting_gradients if training else 0.0,
        inputs=float(sizes[inputs].sum()), forward_peak=_forward_peak(graph, ops, root, kept, sizes * counted),
        backward_work=_backward_work(graph, ops, root, sizes * counted) if training else 0.0)


def _forward_peak(graph: Graph, ops: I64, root: I64, kept: Bool, sizes: F64) -> float:
    """Return the most that is live at once inside the forward beyond what is saved in the end."""
    last: dict[int, int] = {}
    for op in ops.tolist():
        for tensor in (*graph.op_inputs(op).tolist(), *graph.op_outputs(op).tolist()):
            last[int(root[tensor])] = op
    live, peak = 0.0, 0.0
    held: set[int] = set()
    by_last: dict[int, list[int]] = {}
    for tensor, op in last.items():
        by_last.setdefault(op, []).append(tensor)
    for op in ops.tolist():
        for tensor in graph.op_outputs(op).tolist():
            base = int(root[tensor])
            if base not in held and not kept[base]:
                held.add(base)
                live += sizes[base]
        peak = max(peak, live)
        for base in by_last.get(op, ()):
            if base in held:
                live -= sizes[base]
    saved_total = float(sum(sizes[base] for base in last if kept[base]))
    return peak + saved_total


def _backward_work(graph: Graph, ops: I64, root: I64, sizes: F64) -> float:
    """Return the most that gradients of activations take at once, from the last operator to the first."""
    needed = graph.needs_gradient
    first: dict[int, int] = {}
    for op in ops.tolist():
        for tensor in (*graph.op_outputs(op).tolist(), *graph.op_inputs(op).tolist()):
            first.setdefault(int(root[tensor]), op)
    live, peak = 0.0, 0.0
    held: set[int] = set()
    by_first: dict[int, list[int]] = {}
    for tensor, op in first.items():
        by_first.setdefault(op, []).append(tensor)
    for op in reversed(ops.tolist()):
        for tensor in (*graph.op_outputs(op).tolist(), *graph.op_inputs(op).tolist()):
            base = int(root[tensor])
            if needed[tensor] and base not in held:
                held.add(base)
                live += sizes[base]
        peak = max(peak, live)
        for base in by_first.get(op, ()):
            if base in held:
                live -= sizes[base]
    return peak
