"""Time and memory of a measured plan, predicted from layer profiles and link fits by Weft's event engine.

Time. Each replica of a stage is one lane that runs its forwards and backwards in 1F1B order; the times are sums over
the profile's layers (a tensor group's collectives are part of its profile). The boundary tensor crosses the link
between two stages in slices of the sender's tensor ranks. In the runtime that was measured (DeepSpeed's pipeline
engine) sends and receives are in the compute stream of both sides, so a transfer holds both lanes: neither computes
meanwhile. After the last backward all ranks meet; then gradients go around a ring of the stage's replicas, one ring for
each tensor rank, and each stage updates its parameters:

    time = 1F1B with blocking transfers + max over stages (2 (D-1)/D gradient bytes / slowest link of the ring + update)

Memory of the fullest GPU, as ``nvidia-smi`` shows it:

    4 x parameters (values, gradients, Adam's two moments)
    + micro-batches in flight x what their forwards keep
    + WORKING_COPIES x what the largest layer keeps, for one micro-batch
    + two copies of each boundary tensor (sent and received)
    + CUDA context + NCCL's buffers for each communicator

Micro-batch ``j`` is handled by replica ``j mod D`` of a stage with ``D`` replicas. Replicas fill nodes of their kind in
the order of the file, stage after stage.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.measured_file import LinkFit, MeasuredFile, Replica, Row, link_rate
from weft.plan.orders import one_f_one_b
from weft.simulate.engine import Simulator
from weft.simulate.tasks import make_task_graph

STATIC_COPIES: Final = 4
"""Parameters, gradients and Adam's two moments, all of the parameters' type (fp32)."""
WORKING_COPIES: Final = 2
"""While a layer's backward runs, gradients of what it keeps are alive beside it, and PyTorch's caching allocator rounds up
and holds blocks of other sizes. Playing its rules on the tensors of a transformer block and a head gave about 2 in most
cases (1.5 to 2.9); with one micro-batch of one sample on the whole model more (4 to 6.5)."""
BOUNDARY_COPIES: Final = 2
"""A boundary tensor is there as it is computed with and as it is sent or received."""
CONTEXT_BYTES: Final = 512 * 2**20
"""A process's CUDA context, loaded kernels and library handles: about half a GiB with PyTorch on current GPUs."""
CONNECTION_BYTES: Final = 10 * 2**20
"""NCCL's receive buffers of one connection: 0.5 (LL) + 4.69 (LL128) + 4 MiB (simple) by its defaults, allocated as
10 MiB (NVIDIA/nccl issue 1685)."""
CONNECTIONS_PER_CHANNEL: Final = 3
"""From the ring's neighbour and from two neighbours in the tree."""
CHANNEL_BYTES_PER_S: Final = 10e9
"""What one NCCL channel carries: 24 channels reach about 240 GB/s on four A100 with NVLink. They take 688 MB for each
communicator there (NVIDIA/nccl issue 964), against 24 x 3 x 10 MiB = 720 MiB by these three figures."""
MIN_CHANNELS: Final = 2
MAX_CHANNELS: Final = 32
"""NCCL's limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One replica of one stage: what runs there one after the other."""

    stage: int
    replica: Replica
    node: int
    forward_s: float
    backward_s: float
    update_s: float
    param_bytes: float
    kept_bytes: float
    """By the forward of one micro-batch."""
    largest_kept_bytes: float
    """The same of the layer that keeps most."""
    output_bytes: float
    """To the next stage, for one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted for a row."""

    pipeline_s: float
    """Until the last backward."""
    gradients_s: float
    """Exchange of gradients, of the stage that ends last."""
    update_s: float
    peak_bytes: float

    @property
    def seconds(self) -> float:
        """Return the time of an iteration."""
        return self.pipeline_s + self.gradients_s + self.update_s


def predict(file: MeasuredFile, row: Row) -> Prediction:
    """Return the predicted time of an iteration and the memory of the fullest GPU."""
    lanes = make_lanes(file, row)
    windows = in_flight(row)
    ends = [(gradient_seconds(file, stage), max(lane.update_s for lane in stage)) for stage in lanes]
    exchange_s, update_s = max(ends, key=sum)
    return Prediction(
        pipeline_s=pipeline_seconds(file, row, lanes, windows), gradients_s=exchange_s, update_s=update_s,
        peak_bytes=max(lane_bytes(file, lanes, lane, min(window, math.ceil(row.num_microbatches / len(stage))))
                       for stage, window in zip(lanes, windows, strict=True) for lane in stage))


def make_lanes(file: MeasuredFile, row: Row) -> list[list[Lane]]:
    """Return the lanes of each stage."""
    nodes = _nodes(file, row)
    lanes: list[list[Lane]] = []
    for index, stage in enumerate(row.stages):
        lanes.append([])
        for replica in stage.replicas:
            times = [file.layer_times(replica, row.micro_batch, layer) for layer in stage.layers]
            sizes = [file.layer_sizes(replica, layer) for layer in stage.layers]
            forward_s, backward_s, update_s = (math.fsum(column) for column in zip(*times, strict=True))
            kept = [row.micro_batch * size.act_mem_bytes for size in sizes]
            lanes[-1].append(Lane(
                stage=index, replica=replica, node=next(nodes), forward_s=forward_s, backward_s=backward_s,
                update_s=update_s, param_bytes=sum(size.params_bytes for size in sizes), kept_bytes=sum(kept),
                largest_kept_bytes=max(kept), output_bytes=row.micro_batch * sizes[-1].act_output_bytes))
    return lanes


def _nodes(file: MeasuredFile, row: Row) -> Iterator[int]:
    """Yield the node of each replica, stage after stage; a tensor group is never divided."""
    open_nodes: dict[str, tuple[int, int]] = {}
    num_nodes = 0
    for stage in row.stages:
        for replica in stage.replicas:
            node, free = open_nodes.get(replica.gpu, (0, 0))
            if free < replica.tensor:
                node, free = num_nodes, file.gpus[replica.gpu].per_node
                num_nodes += 1
            open_nodes[replica.gpu] = node, free - replica.tensor
            yield node


def in_flight(row: Row) -> list[int]:
    """Return how many micro-batches a replica of each stage holds if there are enough of them.

    That is its distance from the end; with other numbers of replicas in the next stage, enough to keep those supplied.
    """
    windows = [1]
    for stage, after in zip(row.stages[-2::-1], row.stages[:0:-1], strict=True):
        windows.append(math.ceil(windows[-1] * len(after.replicas) / len(stage.replicas)) + 1)
    return windows[::-1]


def pipeline_seconds(file: MeasuredFile, row: Row, lanes: Sequence[Sequence[Lane]], windows: Sequence[int]) -> float:
    """Return the time of all forwards and backwards in 1F1B order, with transfers that hold both sides.

    Each micro-batch is a chain of tasks: through all stages and back, with a transfer between two stages.
    """
    flat = [lane for stage in lanes for lane in stage]
    first = [sum(map(len, lanes[:stage])) for stage in range(len(lanes))]
    chain = 2 * (2 * len(lanes) - 1)
    durations: list[float] = []
    holds: list[tuple[int, int]] = []
    edges: list[tuple[int, int]] = []

    @functools.cache
    def transfer(sender: int, receiver: int) -> float:
        return transfer_seconds(file, flat[sender], flat[receiver])

    for index in range(row.num_microbatches):
        path = [start + index % len(stage) for start, stage in zip(first, lanes, strict=True)]
        for way, forward in ((path, True), (path[::-1], False)):
            for before, number in zip([None, *way], way, strict=False):
                if before is not None:
                    holds += [(len(durations), before), (len(durations), number)]
                    durations.append(transfer(before, number))
                holds.append((len(durations), number))
                durations.append(flat[number].forward_s if forward else flat[number].backward_s)
        edges += itertools.pairwise(range(index * chain, (index + 1) * chain))
    in_order = len({len(stage) for stage in lanes}) == 1
    for stage, window in enumerate(windows):
        for replica in range(len(lanes[stage])):
            own = range(replica, row.num_microbatches, len(lanes[stage]))
            computes = [own[item] * chain + (2 * stage if phase == "F" else chain - 1 - 2 * stage)
                        for _, phase, item in one_f_one_b(min(window, len(own) + 1), len(own))[0]]
            lane_order = _with_transfers(computes, chain, with_receives=in_order, is_full=len(own) >= window)
            edges += itertools.pairwise(lane_order)
    return Simulator(make_task_graph(durations, edges=edges, holds=holds, num_resources=len(flat))).run()


def _with_transfers(computes: Sequence[int], chain: int, *, with_receives: bool, is_full: bool) -> list[int]:
    """Return a lane's computes and transfers in DeepSpeed's order: a send comes before the next compute.

    A receive comes right before the compute that needs it, after the send. But between a forward and a backward the
    gradient is received before the output is sent, if the pipeline ``is_full`` then: has enough micro-batches to fill
    it. Between stages with other numbers of replicas there is no such agreed order: there a receive takes place
    whenever the lane is free.
    """
    result: list[int] = []
    sent: int | None = None
    for task in computes:
        position = task % chain
        is_forward = position < chain // 2
        transfers = [] if sent is None else [sent]
        if with_receives and position not in (0, chain // 2):
            sent_forward = sent is not None and sent % chain < chain // 2
            transfers.insert(0 if is_full and sent_forward and not is_forward else len(transfers), task - 1)
        result += [*transfers, task]
        sent = None if position in (chain // 2 - 1, chain - 1) else task + 1
    return result if sent is None else [*result, sent]


def transfer_seconds(file: MeasuredFile, sender: Lane, receiver: Lane) -> float:
    """Return the time of a boundary tensor, or its gradient, between two stages."""
    num_bytes = sender.output_bytes if sender.stage < receiver.stage else receiver.output_bytes
    return num_bytes / link_rate(_fit(file, sender, receiver, 2), num_bytes / sender.replica.tensor)


def gradient_seconds(file: MeasuredFile, stage: Sequence[Lane]) -> float:
    """Return the time of the ring all-reduce of a stage's gradients."""
    count = len(stage)
    if count == 1:
        return 0.0
    num_bytes = max(lane.param_bytes for lane in stage)
    in_node = Counter(lane.node for lane in stage)
    slowest = min(link_rate(_fit(file, one, other, in_node[one.node]), num_bytes / count)
                  for one, other in zip(stage, [*stage[1:], stage[0]], strict=True))
    return 2 * (count - 1) / count * num_bytes / slowest


def _fit(file: MeasuredFile, one: Lane, other: Lane, num_gpus: int) -> LinkFit:
    """Return the fit of the link between two lanes; ``num_gpus`` communicate if they are in one node.

    Where nothing was measured inside nodes, the link between nodes stands for it.
    """
    if one.node != other.node:
        return file.inter_fit(one.replica.gpu, other.replica.gpu)
    return file.intra_fit(one.replica.gpu, num_gpus) or file.inter_fit(one.replica.gpu, one.replica.gpu)


def lane_bytes(file: MeasuredFile, lanes: Sequence[Sequence[Lane]], lane: Lane, window: int) -> float:
    """Return the memory of a lane's GPUs when they hold most; see the module's docstring."""
    boundaries = [lane.output_bytes] if lane.stage < len(lanes) - 1 else []
    if lane.stage:
        boundaries.append(lanes[lane.stage - 1][0].output_bytes)
    return (STATIC_COPIES * lane.param_bytes + window * lane.kept_bytes + WORKING_COPIES * lane.largest_kept_bytes
            + BOUNDARY_COPIES * sum(boundaries) + CONTEXT_BYTES + communicator_bytes(file, lanes, lane))


def communicator_bytes(file: MeasuredFile, lanes: Sequence[Sequence[Lane]], lane: Lane) -> float:
    """Return NCCL's buffers on a GPU of the lane.

    Groups of Megatron-DeepSpeed, each with a communicator: the world; the model's GPUs, once in either library; the
    tensor group, once in either; the data-parallel replicas; the pipeline. A group with another GPU of the same node
    has as many channels as reach the rate inside the node; one that only leaves the node has NCCL's fewest.
    """
    everyone = [other for stage in lanes for other in stage]
    own = next(index for index, other in enumerate(lanes[lane.stage]) if other is lane)
    pipeline = [stage[own % len(stage)] for stage in lanes]
    tensor = lane.replica.tensor
    num_gpus = sum(other.replica.tensor for other in everyone if other.node == lane.node)
    fit = file.intra_fit(lane.replica.gpu, num_gpus)
    near = MIN_CHANNELS if fit is None else min(max(round(fit[1] / CHANNEL_BYTES_PER_S), MIN_CHANNELS), MAX_CHANNELS)

    def channels(group: Sequence[Lane], gpus_of_lane: int) -> int:
        if len(group) * gpus_of_lane == 1:
            return 0
        has_near = gpus_of_lane > 1 or any(other is not lane and other.node == lane.node for other in group)
        return near if has_near else MIN_CHANNELS

    total = (channels(everyone, tensor) + 2 * channels(pipeline, tensor) + 2 * channels([lane], tensor)
             + channels(lanes[lane.stage], 1) + channels(pipeline, 1))
    return total * CONNECTIONS_PER_CHANNEL * CONNECTION_BYTES
