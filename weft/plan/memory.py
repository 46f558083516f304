"""How many bytes each rank holds while each instruction runs, by category. It depends on the order alone, not on times.

Static for a rank: parameters and buffers, the optimizer's state, gradients that are exchanged, and room for exchanges
(its own factors, or what a parameter server receives). The factors of all ranks lie there from their exchange to the
products, at the optimizer's step. Gradients that are not exchanged appear in a step's first backward of their stage. A
forward takes the tensors that its backward will need (``Graph.is_saved``); a whole backward lets go of them on its way,
a split one of all but what the weight gradients need, which stays until ``W``; with recomputation the forward keeps the
stage's inputs alone, and runs once more, keeping the rest, when the backward begins; where a stage names what it keeps
(``weft.plan.saving``), the rest is made again bundle by bundle, while the backward runs. While a compute runs it also
needs room for what is live inside it, a parameter's gradient until it is added to the sum over micro-batches included.
What arrives lies in a buffer from its receive until the last compute of the stages that read it; outputs and gradients
that a stage hands over, until the last instruction on the rank that reads them or that waits for their way out: the
backward for what its forward has sent, a later send of the same channel for the rest (``SEND_WINDOW``).

Of stages with storage (``weft.plan.units``) a rank has only its pieces all the time: of the optimizer's states, of
gradients, of parameters, as far as they are in pieces; and room for what others add to its largest piece. Gathered
parameters are with the buffers, whole gradients with the gradients, while they are there (``weft.plan.unit_flow``).

Sizes are the graph's, for an instance's samples. Not counted: the allocator's rounding, library workspaces, and the
inputs and outputs of the model. A tensor that two stages on one rank both keep counts twice. A rank of a stage on
several devices is charged for its parts of the tensors that the plan names (``weft.plan.local_tensors``), and for all
others whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from weft.model.graph import I64, Bool, Graph, TensorRole
from weft.plan.factors import block_size, bucket_rows, factor_widths
from weft.plan.holders import parameter_parts
from weft.plan.layout import bytes_of, stage_inputs
from weft.plan.local_tensors import local_tensors
from weft.plan.plan import Optimizer
from weft.plan.program import Bucket, Channel, Instance, Op, Phase, Program, inside_backward
from weft.plan.saving import kept_storages, repeated_in
from weft.plan.stage_memory import StageMemory, stage_memory
from weft.plan.unit_flow import unit_flows
from weft.plan.units import row_length

CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""``buffers`` are tensors that wait between stages, received, or to be read or sent on their own rank; and gathered
parameters."""

MOST_BYTES: Final = 1 << 60
"""No account says more: a file may, and sums of its numbers are beyond 64 bits."""
SEND_WINDOW: Final = 2
"""Of a channel's messages that no compute waits for, so many may be under way: the next one waits for the oldest."""

_SCATTERING: Final = frozenset(f"aten.{name}" for name in (
    "transpose", "permute", "t", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind",
    "scaled_dot_product_attention", "conj", "_conj"))
"""Operators whose results do not lie in one piece, as a rule."""

_STATE_BYTES: Final = {"none": 0, "sgd": 0, "adam": 2, "adamw": 2}
"""Optimizer states per parameter element, each in the parameter's precision but at least 4 bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryAccount:
    """Bytes by rank and instruction."""

    static: I64
    """[rank, category]: held all the time."""
    gradients: I64
    """Per instruction: bytes of parameters' gradients, besides those in ``static``, there while it runs."""
    activations: I64
    """Per instruction: bytes of activations held while it runs."""
    buffers: I64
    """Per instruction: bytes of tensors between stages held while it runs."""
    rank_start: I64

    def held(self, rank: int) -> I64:
        """Return the total bytes that the rank holds during each of its instructions."""
        part = slice(int(self.rank_start[rank]), int(self.rank_start[rank + 1]))
        moving = self.gradients[part] + self.activations[part] + self.buffers[part]
        return np.asarray(moving + self.static[rank].sum(), dtype=np.int64)

    def peak(self, rank: int) -> dict[str, int]:
        """Return the bytes by category at the instruction where the rank's total is largest."""
        result = {name: int(self.static[rank, index]) for index, name in enumerate(CATEGORIES)}
        if self.rank_start[rank + 1] > self.rank_start[rank]:
            at = int(self.rank_start[rank]) + int(np.argmax(self.held(rank)))
            result["gradients"] += int(self.gradients[at])
            result["activations"] += int(self.activations[at])
            result["buffers"] += int(self.buffers[at])
        return result

    def peak_bytes(self, rank: int) -> int:
        """Return the largest total of the rank."""
        return sum(self.peak(rank).values())


def account_memory(program: Program) -> MemoryAccount:
    """Return what every rank holds during every instruction of the program."""
    places = _Places(program)
    memories = instance_memories(program)
    fresh = _FreshGradients(program, places)
    static = static_bytes(program)
    gathered, always = _gathered_bytes(program)
    static[:, CATEGORIES.index("gradients")] -= fresh.by_rank
    static[:, CATEGORIES.index("buffers")] -= always
    unit_gradients, unit_buffers = _unit_bytes(program)
    return MemoryAccount(
        static=static, gradients=fresh.held + _made_at_once(program, fresh) + unit_gradients,
        activations=_activation_bytes(program, memories, fresh),
        buffers=_received_bytes(program, places) + _handed_over_bytes(program, places, memories) + gathered
        + unit_buffers, rank_start=program.rank_start)


class _Places:
    """Where the computes of each instance stand on each of its ranks; a *slot* is an instance on one rank."""

    def __init__(self, program: Program) -> None:
        pairs = sorted((rank, index) for index, instance in enumerate(program.instances) for rank in instance.ranks)
        self.slots = {pair: slot for slot, pair in enumerate(pairs)}
        self.instance = np.asarray([index for _, index in pairs], dtype=np.int64)
        num_instances = max(1, len(program.instances))
        computes = np.flatnonzero(program.op == Op.COMPUTE)
        keys = program.rank_of()[computes] * num_instances + program.instance[computes]
        slot = np.searchsorted(np.asarray([rank * num_instances + index for rank, index in pairs]), keys)
        self.position: I64 = np.full((len(pairs), len(Phase), program.plan.microbatches), -1, dtype=np.int64)
        """[slot, phase, microbatch] -> instruction, or -1."""
        self.position[slot, program.phase[computes], program.microbatch[computes]] = computes
        self.backward = np.maximum(self.position[:, Phase.B], self.position[:, Phase.I])
        """[slot, microbatch] -> the B or I instruction."""
        self.last = self.position.max(axis=1)
        """[slot, microbatch] -> the last compute."""


class _FreshGradients:
    """Gradients that no exchange holds room for: they are there from the first backward of a step that gives them."""

    def __init__(self, program: Program, places: _Places) -> None:
        self.by_rank = np.zeros(program.num_ranks, dtype=np.int64)
        self.appear = np.zeros(program.num_instructions, dtype=np.int64)
        """Bytes that appear in each instruction."""
        if program.plan.model.mode == "training":
            self._find(program, places)
        total = np.cumsum(self.appear)
        before = np.concatenate(([0], total))[program.rank_start[:-1]]
        self.held: I64 = total - before[program.rank_of()] if len(total) else total

    def _find(self, program: Program, places: _Places) -> None:
        rank_of = {device: rank for rank, device in enumerate(program.plan.cluster.devices)}
        parts, absent = parameter_parts(program.plan, program.graph), _Fresh(program)
        found: dict[tuple[int, int], int] = {}
        for (rank, index), slot in places.slots.items():
            done = np.maximum(places.position[slot, Phase.B], places.position[slot, Phase.W])
            for tensor in sorted(absent.on_rank(index, rank)) if (done >= 0).any() else ():
                first = int(done[done >= 0].min())
                found[rank, tensor] = min(first, found.get((rank, tensor), first))
        for tensor, held in parts.items():
            for device, part in held.items():
                first = found.get((rank_of[device], tensor), -1)
                if first >= 0:
                    num_bytes = math.ceil(part * int(program.graph.tensor_bytes[tensor]))
                    self.by_rank[rank_of[device]] += num_bytes
                    self.appear[first] += num_bytes


def _made_at_once(program: Program, fresh: _FreshGradients) -> I64:
    """Return per instruction the gradients that a compiled backward makes before it adds any of them to what is there.

    Operator by operator one parameter's gradient is added before the next is made; a compiled graph gives them all.
    """
    made = np.zeros(program.num_instructions, dtype=np.int64)
    if not program.plan.compiled or program.plan.model.mode != "training":
        return made
    graph, held = program.graph, _Fresh(program).held
    parts = parameter_parts(program.plan, graph)
    rows = np.flatnonzero((program.op == Op.COMPUTE) & np.isin(program.phase, (Phase.B, Phase.W)))
    known: dict[tuple[int, int], int] = {}
    for row, rank in zip(rows.tolist(), program.rank_of()[rows].tolist(), strict=True):
        key, device = (int(program.instance[row]), rank), program.plan.cluster.devices[rank]
        if key not in known:
            known[key] = sum(math.ceil(parts[tensor].get(device, 0.0) * int(graph.tensor_bytes[tensor]))
                             for tensor in held[program.instances[key[0]].stage])
        made[row] = max(0, known[key] - int(fresh.appear[row]))
    return made


class _Fresh:
    """The parameters of instances whose gradients are not exchanged, and so absent when a step begins."""

    def __init__(self, program: Program) -> None:
        buckets: list[list[int]] = [[] for _ in range(program.num_ranks)]
        for index, bucket in enumerate(program.buckets):
            for rank in bucket.ranks:
                buckets[rank].append(index)
        self._program, self._buckets = program, [tuple(items) for items in buckets]
        self.held = [frozenset(tensor for tensor in _stage_tensors(program.graph, ops, TensorRole.PARAMETER)
                               if program.graph.needs_gradient[tensor]) for ops in program.stage_ops]
        """The trained parameters of each stage."""
        self._known: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}

    def on_rank(self, instance: int, rank: int) -> frozenset[int]:
        """Return those of an instance on one of its ranks."""
        key = self._program.instances[instance].stage, self._buckets[rank]
        if key not in self._known:
            exchanged = (self._program.buckets[index].parameters for index in key[1])
            self._known[key] = self.held[key[0]].difference(*exchanged)
        return self._known[key]

    def anywhere(self, instance: int) -> frozenset[int]:
        """Return those of an instance on any of its ranks."""
        sets = {self.on_rank(instance, rank) for rank in self._program.instances[instance].ranks}
        return frozenset().union(*sets)


def instance_memories(program: Program) -> list[StageMemory]:
    """Return what each instance takes on one of its ranks for one micro-batch."""
    inputs = [stage_inputs(program.graph, ops) for ops in program.stage_ops]
    crossing = np.unique(np.concatenate(inputs)) if inputs else np.zeros(0, dtype=np.int64)
    training, absent = program.plan.model.mode == "training", _Fresh(program)
    known: dict[tuple[Any, ...], StageMemory] = {}
    result = []
    for index, item in enumerate(program.instances):
        stage, ops = program.plan.stages[item.stage], program.stage_ops[item.stage]
        replica, fresh = stage.replicas[item.replica], absent.anywhere(index)
        arriving, handed = _single_gradients(program, index, inputs)
        again = repeated_in(program.graph, ops, stage) if training and not stage.keeps_only_inputs else ops[:0]
        key = item.stage, item.num_samples, tuple(sorted(replica.mesh.items())), fresh, arriving, handed
        if key not in known:
            known[key] = stage_memory(
                program.graph, ops, num_samples=item.num_samples, training=training, crossing=crossing, fresh=fresh,
                arriving=arriving, handed=handed, local=local_tensors(program.graph, stage, replica, ops, crossing),
                again=again)
        result.append(known[key])
    return result


def _single_gradients(program: Program, index: int,
                      inputs: Sequence[I64]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tensors of an instance whose gradient is what one message brings, or one stage on its rank has made.

    Those of others are sums, or put together of pieces; and what comes for a tensor that is made of nothing but
    parameters is copied, because it may become a parameter's gradient as it is.
    """
    item, graph = program.instances[index], program.graph
    messages, near = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for channel in (program.channels[channel] for channel in item.gradient_channels):
        messages.update({(channel.target, tensor): 1 if channel.whole else 2 for tensor in channel.tensors})
    for other in item.consumers:
        reader = program.instances[other]
        for rank in set(reader.ranks) & set(item.ranks):
            near.update({(rank, tensor): 1 if reader.samples == item.samples else 2
                         for tensor in inputs[reader.stage].tolist()})
    total = messages + near
    single = {tensor for _, tensor in total} - {tensor for (_, tensor), count in total.items() if count > 1}
    arriving = single & {tensor for _, tensor in messages}
    return (frozenset(tensor for tensor in arriving if graph.depends_on_inputs[tensor]),
            frozenset(single & {tensor for _, tensor in near} - arriving))


def _activation_bytes(program: Program, memories: list[StageMemory], fresh: _FreshGradients) -> I64:
    """Return per instruction what forwards have left for their backwards, and what is live inside it."""
    training = program.plan.model.mode == "training"
    change = np.zeros((max(1, len(memories)), len(Phase)))  # a file may say more bytes than an integer of 64 bits holds
    extra, first = np.zeros((2, *change.shape))
    for index, (instance, memory) in enumerate(zip(program.instances, memories, strict=True)):
        recompute = program.plan.stages[instance.stage].keeps_only_inputs
        if training:
            rest = assembled_bytes(program, instance, memory)
            kept = (memory.inputs if recompute else memory.saved) + rest
            for_weights = memory.saved_for_weights + rest + waiting_inputs(program, instance, memory)
            change[index] = (kept, -kept, for_weights - kept, -for_weights)
        rises = memory.rises(recompute=recompute)
        extra[index] = rises[:4]
        extra[index, Phase.F] += memory.inputs if is_assembled(program, instance) else 0
        first[index, Phase.B] = rises.first - rises.backward
    is_compute = program.op == Op.COMPUTE
    chosen = program.instance[is_compute], program.phase[is_compute]
    lasting, during = np.zeros((2, program.num_instructions))
    lasting[is_compute], during[is_compute] = change[chosen], extra[chosen]
    begins = np.flatnonzero(fresh.appear)  # the first backwards of a step
    during[begins] += first[program.instance[begins], program.phase[begins]]
    whole = begins[program.phase[begins] == Phase.B]
    during[whole] -= fresh.appear[whole]
    held = np.cumsum(lasting) - lasting + during
    return np.asarray(np.clip(held, 0, MOST_BYTES), dtype=np.int64)  # parts are rounded


def _received_bytes(program: Program, places: _Places) -> I64:
    """Return the bytes of received tensors held during each instruction, besides those that count as kept.

    They lie in buffers until the last compute that may need them. What of it a backward needs counts there as kept.
    """
    rows = np.flatnonzero(program.op == Op.RECV)
    if len(rows) == 0:
        return np.zeros(program.num_instructions, dtype=np.int64)
    channels, microbatches = program.channel[rows], program.microbatch[rows]
    is_gradient = np.asarray([channel.kind == "gradient" for channel in program.channels])[channels]
    until, forward = rows.copy(), rows.copy()
    for depth in range(max(len(channel.consumers) for channel in program.channels)):
        slot = np.asarray([places.slots[channel.target, channel.consumers[min(depth, len(channel.consumers) - 1)]]
                           for channel in program.channels])[channels]
        forward = np.maximum(forward, places.position[slot, Phase.F, microbatches])
        until = np.maximum(until, places.last[slot, microbatches])
    sizes = np.asarray([channel.num_bytes for channel in program.channels], dtype=np.int64)[channels]
    passing = np.asarray([passing_bytes(program, channel) for channel in program.channels], dtype=np.int64)[channels]
    first = np.where(is_gradient, until, forward)
    return _held(program, rows, first, sizes) + _held(program, first + 1, np.maximum(until, first), passing)


def passing_bytes(program: Program, channel: Channel) -> int:
    """Return what of a channel's message nobody keeps for a backward, though its buffer stays until then.

    Pieces are put together in another buffer when the forward begins: nobody needs them any more when it ends.
    """
    if channel.kind == "gradient" or program.plan.model.mode != "training" or not channel.whole:
        return 0
    if any(program.plan.stages[program.instances[item].stage].keeps_only_inputs for item in channel.consumers):
        return 0
    graph, tensors = program.graph, np.asarray(channel.tensors, dtype=np.int64)
    sizes = graph.tensor_bytes[tensors]
    kept = np.logical_or.reduce([_kept(program, program.instances[item].stage) for item in channel.consumers])[
        graph.memory_root[tensors]]
    return round(channel.num_bytes * float(sizes[~kept].sum()) / max(1, int(sizes.sum())))


def _kept(program: Program, stage: int) -> Bool:
    return kept_storages(program.graph, program.stage_ops[stage], program.plan.stages[stage])


def is_assembled(program: Program, instance: Instance) -> bool:
    """Return whether what an instance reads arrives in pieces."""
    return any(not program.channels[channel].whole for channel in instance.forward_channels)


def assembled_bytes(program: Program, instance: Instance, memory: StageMemory) -> int:
    """Return what no backward needs of the inputs that pieces are put together to; they stay until the backward."""
    if program.plan.stages[instance.stage].keeps_only_inputs or not is_assembled(program, instance):
        return 0
    return max(0, memory.inputs - memory.saved_inputs)


def waiting_inputs(program: Program, instance: Instance, memory: StageMemory) -> int:
    """Return what stays in the buffers it came in, where a stage recomputes, until weights have their gradients."""
    is_kept = program.plan.stages[instance.stage].keeps_only_inputs and bool(instance.forward_channels)
    return max(0, memory.inputs - memory.saved_inputs) if is_kept else 0


def _handed_over_bytes(program: Program, places: _Places, memories: list[StageMemory]) -> I64:
    """Return the bytes of outputs, and of gradients of inputs, that wait to be sent or read on their own rank."""
    forward, backward = places.position[:, Phase.F], places.backward
    output_until, gradient_until = forward.copy(), backward.copy()
    for (rank, index), slot in places.slots.items():
        for producer in program.instances[index].producers:
            source = places.slots.get((rank, producer))
            if source is not None:
                np.maximum(output_until[source], forward[slot], out=output_until[source])
                if index in program.instances[producer].consumers:
                    np.maximum(gradient_until[slot], backward[source], out=gradient_until[slot])
    read_until = output_until.copy()
    sender = np.asarray([places.slots[item.source, item.producer] for item in program.channels], dtype=np.int64)
    is_gradient = np.asarray([item.kind == "gradient" for item in program.channels], dtype=bool)
    sends = np.flatnonzero(program.op == Op.SEND)
    for until, waits, rows in ((output_until, backward, sends[~is_gradient[program.channel[sends]]]),
                               (gradient_until, np.full_like(backward, -1),
                                sends[is_gradient[program.channel[sends]]])):
        which = sender[program.channel[rows]], program.microbatch[rows]
        np.maximum.at(until, which, _sent_until(program, rows, waits[which]))
        if until is output_until:
            np.maximum.at(read_until, which, rows)
    leaves, leaf_until = _leaf_bytes(program, places)
    left = _left_bytes(program)
    outputs = handed_outputs(program, memories) - left
    gradients = np.asarray([memory.input_gradients for memory in memories], dtype=np.int64)
    total = np.zeros(program.num_instructions, dtype=np.int64)
    for start, until, sizes in ((forward, output_until, outputs[places.instance]), (output_until, leaf_until, leaves),
                                (forward, read_until, left[places.instance]),
                                (backward, gradient_until, gradients[places.instance])):
        slots, microbatches = np.nonzero(until > start)
        total += _held(program, start[slots, microbatches] + 1, until[slots, microbatches], sizes[slots])
    return total


def _leaf_bytes(program: Program, places: _Places) -> tuple[I64, I64]:
    """Return the bytes of each slot's outputs that readers on its rank hold until their backward, and until when.

    Autograd holds what a gradient is wanted of, though no operator needs it any more. What is saved counts as that, and
    a stage that recomputes keeps its inputs anyway.
    """
    graph, found = program.graph, dict[int, set[int]]()
    until = np.full_like(places.backward, -1)
    inputs = [stage_inputs(graph, ops) for ops in program.stage_ops]
    for (rank, index), slot in places.slots.items():
        item = program.instances[index]
        if program.plan.model.mode != "training" or program.plan.stages[item.stage].keeps_only_inputs:
            continue
        for producer in item.producers:
            source = places.slots.get((rank, producer))
            if source is not None and program.instances[producer].samples == item.samples:
                made = inputs[item.stage][np.isin(graph.tensor_producer[inputs[item.stage]],
                                                  program.stage_ops[program.instances[producer].stage])]
                held = graph.needs_gradient & ~_kept(program, item.stage)[graph.memory_root]
                found.setdefault(source, set()).update(graph.memory_root[made[held[made]]].tolist())
                if held[made].any():
                    np.maximum(until[source], places.backward[slot], out=until[source])
    sizes = np.zeros(len(places.slots), dtype=np.int64)
    for source, tensors in found.items():
        sizes[source] = bytes_of(graph, tensors, program.instances[places.instance[source]].num_samples)
    return sizes, until


def _copied_to_send(program: Program) -> I64:
    """Return for each instance the bytes of outputs that are copied to be sent.

    Messages want them in one piece.
    """
    graph = program.graph
    copied: dict[tuple[int, int], float] = {}
    for channel in program.channels:
        for tensor in channel.tensors if channel.kind == "activation" else ():
            if _is_sent_copied(graph, channel, tensor):
                part = graph.tensor_bytes[tensor] / graph.tensor_bytes[list(channel.tensors)].sum()
                copied[channel.producer, tensor] = channel.num_bytes * part
    result = np.zeros(len(program.instances))
    for (index, _), num_bytes in copied.items():
        result[index] += num_bytes
    return np.asarray(result.round(), dtype=np.int64)


def _left_bytes(program: Program) -> I64:
    """Return for each instance the bytes of outputs that nobody needs when they have been copied to be sent."""
    graph, copied = program.graph, dict[tuple[int, int], bool]()
    for channel in program.channels:
        for tensor in channel.tensors if channel.kind == "activation" else ():
            key = channel.producer, int(graph.memory_root[tensor])
            copied[key] = copied.get(key, True) and _is_sent_copied(graph, channel, tensor)
    near = {producer for reader in program.instances for producer in reader.producers
            if set(reader.ranks) & set(program.instances[producer].ranks)}
    result: I64 = np.zeros(len(program.instances), dtype=np.int64)
    for (index, root), is_copied in copied.items():
        item = program.instances[index]
        is_kept = bool(_kept(program, item.stage)[root]) and program.plan.model.mode == "training" and (
            not program.plan.stages[item.stage].keeps_only_inputs)
        is_made = graph.tensor_producer[root] in program.stage_ops[item.stage]
        if is_copied and is_made and not is_kept and index not in near:
            result[index] += bytes_of(graph, [root], item.num_samples)
    return result


def _is_sent_copied(graph: Graph, channel: Channel, tensor: int) -> bool:
    return _is_scattered(graph, tensor) or (not channel.whole and _is_turned(graph, tensor))


def _is_scattered(graph: Graph, tensor: int) -> bool:
    """Return whether the tensor does not lie in one piece: as traced, else by what makes it or what it is a view of."""
    return bool(graph.is_scattered[tensor]) if len(graph.is_scattered) else _is_turned(graph, tensor)


def _is_turned(graph: Graph, tensor: int) -> bool:
    """Return whether the dimensions of a tensor may lie in another order, or not in one piece, by what makes it."""
    while graph.tensor_producer[tensor] >= 0:
        op = int(graph.tensor_producer[tensor])
        if graph.op_kinds[op] in _SCATTERING:
            return True
        if graph.tensor_base[tensor] < 0:
            return False
        tensor = int(graph.op_inputs(op)[0])
    return False


def scattered_tensors(graph: Graph) -> Bool:
    """Return which tensors do not lie in one piece, so that they are copied to be sent."""
    return np.asarray([_is_scattered(graph, tensor) for tensor in range(graph.num_tensors)], dtype=np.bool_)


def _sent_until(program: Program, sends: I64, waits: I64) -> I64:
    """Return the last instruction during which each send is held.

    The one in ``waits`` begins by waiting for it; else a later send of its channel does so, when it is issued itself,
    and for the last ones of a channel the end of the step.
    """
    if len(sends) == 0:
        return sends
    ends: I64 = program.rank_start[1:] - 1
    until: I64 = (ends - (program.op[ends] == Op.STEP))[program.rank_of()[sends]]
    order = np.lexsort((sends, program.channel[sends]))
    later = order[SEND_WINDOW:]
    same = program.channel[sends[order[:-SEND_WINDOW]]] == program.channel[sends[later]]
    until[order[:-SEND_WINDOW][same]] = sends[later[same]]
    return np.maximum(np.where(waits >= 0, waits - 1, until), sends)


def handed_outputs(program: Program, memories: list[StageMemory]) -> I64:
    """Return for each instance the bytes that other stages read and that its own backward does not keep.

    Copies that messages need of what lies scattered count, too.
    """
    training = program.plan.model.mode == "training"
    result = _copied_to_send(program)
    for index, (item, memory) in enumerate(zip(program.instances, memories, strict=True)):
        keeps_all = training and not program.plan.stages[item.stage].keeps_only_inputs
        result[index] += memory.outputs - memory.saved_outputs if keeps_all else memory.outputs
    return result


def _held(program: Program, first: I64, last: I64, sizes: I64) -> I64:
    """Return the total per instruction of sizes that are held from ``first`` to ``last``, both included."""
    change = np.zeros(program.num_instructions + 1, dtype=np.int64)
    np.add.at(change, first, sizes)
    np.add.at(change, last + 1, -sizes)
    return np.cumsum(change)[:-1]


def static_bytes(program: Program) -> I64:
    """Return [rank, category]: parameters, gradients and optimizer state that each rank holds throughout."""
    graph, plan = program.graph, program.plan
    training = plan.model.mode == "training"
    result = np.zeros((program.num_ranks, len(CATEGORIES)), dtype=np.int64)
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    exchanged = {tensor for bucket in program.buckets for tensor in bucket.parameters if not bucket.is_of_unit}
    units = _unit_parts(program)
    for tensor, parts in parameter_parts(plan, graph).items():
        size = int(graph.tensor_bytes[tensor])
        has_gradient = training and (bool(graph.needs_gradient[tensor]) or tensor in exchanged)
        state = optimizer_bytes(graph, tensor, plan.optimizer)
        for device, part in parts.items():
            kept = units.get((tensor, rank_of[device]))
            if kept is not None:
                result[rank_of[device], :3] += np.ceil([kept.parameters * size, kept.gradients * size * has_gradient,
                                                        kept.states * state * has_gradient]).astype(np.int64)
                continue
            result[rank_of[device], 0] += math.ceil(part * size)
            if has_gradient:
                result[rank_of[device], 1] += math.ceil(part * size)
                own = min(part, 1 / len(parts)) if plan.optimizer.sharded else part
                result[rank_of[device], 2] += math.ceil(own * state)
    buffers: list[set[int]] = [set() for _ in range(program.num_ranks)]
    for instance in program.instances:
        for rank in instance.ranks:
            buffers[rank].update(_stage_tensors(graph, program.stage_ops[instance.stage], TensorRole.BUFFER))
    result[:, 0] += [int(graph.tensor_bytes[sorted(tensors)].sum()) for tensors in buffers]
    result[:, 4] += _exchange_bytes(program)
    return result


class _Kept(NamedTuple):
    """The parts of a parameter, of its gradient and its states that a rank has all the time."""

    parameters: float
    gradients: float
    states: float


def _unit_parts(program: Program) -> dict[tuple[int, int], _Kept]:
    """Return by (parameter, rank) what is kept of the parameters of units."""
    found, graph = dict[tuple[int, int], _Kept](), program.graph
    for unit in program.units:
        for rank in unit.ranks:
            rows = unit.rows(rank)
            for tensor, shape in zip(unit.parameters, unit.shapes, strict=True):
                first, last = rows.get(tensor, (0, 0))
                entries = max(1, math.prod(graph.tensor_shapes[tensor]))
                whole, piece = math.prod(shape) / entries, (last - first) * row_length(shape) / entries
                pieces = unit.storage.pieces
                found[tensor, rank] = _Kept(piece if pieces == "parameters" else whole,
                                            whole if unit.storage.scatters_once else piece, piece)
    return found


def _unit_bytes(program: Program) -> tuple[I64, I64]:
    """Return by instruction whole gradients of units that come and go, and gathered parameters."""
    gradients, buffers = np.zeros((2, program.num_instructions), dtype=np.int64)
    for flow in unit_flows(program) if program.units else ():
        for spans, total in ((flow.gathered, buffers), (flow.gradients, gradients)):
            for span in spans:
                total[span.first : span.last + 1] += program.units[span.unit].num_bytes
    return gradients, buffers


def _exchange_bytes(program: Program) -> I64:
    """Return what exchanges take on each rank: factors, as made and gathered, room for the largest sum and product."""
    kept, sums, products = np.zeros((3, program.num_ranks), dtype=np.int64)
    for bucket in program.buckets:
        if bucket.server is not None:
            sums[bucket.server] = max(sums[bucket.server], (len(bucket.ranks) - 1) * bucket.num_bytes)
        elif bucket.factors.uses:
            room, ranks = _factor_bytes(program, bucket), list(bucket.ranks)
            kept[ranks] += room.block + room.gathered
            products[ranks] = np.maximum(products[ranks], room.product)
    rooms = [max((unit.piece_bytes(rank) for unit in program.units if rank in unit.ranks and unit.reduce >= 0),
                 default=0) for rank in range(program.num_ranks)]
    return kept + sums + products + np.asarray(rooms, dtype=np.int64)


class _FactorBytes(NamedTuple):
    """What the exchange of a bucket by factors takes on each of its ranks."""

    block: int
    """A rank's own, all the time."""
    gathered: int
    """The blocks of all ranks, from the exchange to the products."""
    product: int
    """The rows of all ranks that are put together for the gradient of one parameter."""


def _factor_bytes(program: Program, bucket: Bucket) -> _FactorBytes:
    graph, rows = program.graph, bucket_rows(program, bucket)
    width = _dtype_bytes(graph.tensor_dtypes[bucket.parameters[0]])
    block = max(block_size(graph, bucket.factors, item) for item in rows.values()) * width
    together = Counter[int]()
    for place, use in enumerate(bucket.factors.uses):
        together[use.weight] += sum(item[place] for item in rows.values()) * sum(factor_widths(graph, use)) * width
    return _FactorBytes(block, len(rows) * block, max(together.values()))


def _gathered_bytes(program: Program) -> tuple[I64, I64]:
    """Return gathered factors, and room for their products, by instruction, and the same if they were there always."""
    passing, always = np.zeros(program.num_instructions, dtype=np.int64), np.zeros(program.num_ranks, dtype=np.int64)
    rank_of, backwards, products = program.rank_of(), inside_backward(program), np.zeros_like(always)
    for index, bucket in enumerate(program.buckets):
        if bucket.factors.uses:
            room = _factor_bytes(program, bucket)
            rows = np.flatnonzero((program.op == Op.COLLECTIVE) & (program.bucket == index))
            first = np.where(backwards[rows] >= 0, backwards[rows], rows)
            last = program.rank_start[rank_of[rows] + 1] - 1
            passing += _held(program, first, last, np.full(len(rows), room.gathered))
            always[list(bucket.ranks)] += room.gathered
            products[list(bucket.ranks)] = np.maximum(products[list(bucket.ranks)], room.product)
    steps = np.flatnonzero(program.op == Op.STEP)
    passing[steps] += products[rank_of[steps]]
    return passing, always + products


def optimizer_bytes(graph: Graph, tensor: int, optimizer: Optimizer) -> int:
    """Return the optimizer's state for one parameter; half precision adds a float32 master copy. None if frozen."""
    if not graph.needs_gradient[tensor]:
        return 0
    states = _STATE_BYTES[optimizer.kind]
    width = _dtype_bytes(graph.tensor_dtypes[tensor])
    elements = int(graph.tensor_bytes[tensor]) // width
    master = 1 if width < 4 and optimizer.kind != "none" else 0
    return elements * max(4, width) * (states + master)


def _dtype_bytes(dtype: str) -> int:
    return {"float64": 8, "float16": 2, "bfloat16": 2}.get(dtype, 4)


def _stage_tensors(graph: Graph, ops: I64, role: TensorRole) -> list[int]:
    read = np.unique(np.concatenate([graph.op_inputs(int(op)) for op in ops]))
    return [int(tensor) for tensor in read[graph.tensor_role[read] == role]]
