"""The prediction: from a program, costs and a cluster to the task graph that the event engine runs, and its timeline.

Following the semantics in ``weft.plan.program``:

- The computes of a rank, and its optimizer step, form a chain. An instance with several ranks is one task in the chain
  of each of them, and lasts as long as its slowest device (see ``stage_figure`` for sharded ones).
- Devices that share a processing unit compute one at a time, in the order in which their computes are ready.
- A send and its receive are one transfer. It is ready when the compute before it is done on both sides, and occupies
  what the cluster says. The computes that need it wait for it.
- A collective is ready when the compute before it is done on all members; those of a rank follow each other in order,
  and so do those that need the same link for most of their time (a host's network card), as they become ready.
  The optimizer step waits for the collectives before it.
- A collective that is issued inside a backward is ready when the part of it is done that makes its gradients final:
  the operators from the last to the first that reads one of its parameters, in this order. Where devices share a
  processing unit a backward is one task, and its collectives come after it.

A backward of a stage that recomputes takes its forward again. ``weft.simulate.exchange_time`` says how long collectives
take. An optimizer step reads and writes parameters and state and reads gradients, at the memory rate of pointwise
operators.

How many bytes cross each link of the cluster in one step: tensors between stages, and exchanges of gradients.

A transfer crosses every link of its route. A collective is the rounds of transfers that its cheapest algorithm has
(``weft.cost.collectives``), the one whose time the simulator takes; other ways to exchange gradients are made of
transfers and collectives as ``weft.simulate.exchange_time`` says. Links of one shared medium count together. What the
devices of a replica exchange inside a sharded stage is not part of a program, and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from weft.base.errors import PlanError
from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.costs import Costs
from weft.cost.costs import Phase as CostPhase
from weft.cost.figure import ZERO, Figure, Source, combine
from weft.cost.roofline import pointwise_rate
from weft.model.graph import F64, I64, Graph
from weft.plan.memory import static_bytes
from weft.plan.program import U8, Channel, Op, Phase, Program, last_before
from weft.plan.saving import bundles, repeated_in
from weft.simulate import exchange_time
from weft.simulate.tasks import TaskGraph, make_task_graph
from weft.simulate.timeline import Timeline, make_timeline
from weft.simulate.wiring import Wiring, expand, wire

_COST_PHASE: Final[tuple[CostPhase, ...]] = ("F", "B", "I", "W")
"""What costs call each ``Phase``."""
_HALVES: Final[tuple[CostPhase, ...]] = ("I", "W")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedProgram:
    """A program's task graph, and how it maps to the program."""

    graph: TaskGraph
    wiring: Wiring
    source: U8
    """Code of the ``Source`` of each task's duration."""


def simulate(program: Program, costs: Costs, cluster: Cluster) -> Timeline:
    """Return when each instruction of the program would run on the cluster.

    Raises ``PlanError`` if instructions wait for each other, with their places.
    """
    from weft.simulate.engine import Simulator  # compiled code, which only a simulation needs

    timed = time_program(program, costs, cluster)
    wiring = timed.wiring
    simulator = Simulator(timed.graph, describe=lambda task: program.place(int(wiring.leader[task])))
    simulator.run()
    return make_timeline(program, start_s=simulator.starts[wiring.first], end_s=simulator.ends[wiring.task],
                         kind="predicted", source=timed.source[wiring.task], wiring=wiring)


def time_program(program: Program, costs: Costs, cluster: Cluster) -> TimedProgram:
    """Return the program as tasks with durations, resources and edges."""
    devices = rank_devices(program, cluster)
    shared = any(cluster.devices[device].unit is not None for device in devices)
    wiring = wire(program, inside=np.full(program.num_instructions, -1, dtype=np.int64) if shared else None)
    seconds, source = _durations(program, costs, devices, wiring.leader)
    _cut_backwards(program, costs, devices, wiring, seconds)
    resources = np.concatenate([_transfer_resources(program, cluster, devices, wiring.leader),
                                _exchange_resources(program, costs, devices, wiring.leader),
                                _unit_resources(program, cluster, devices, wiring)])
    names, held = np.unique(resources[:, 1], return_inverse=True)
    graph = make_task_graph(
        seconds, edges=_edges(program, wiring), holds=np.stack([resources[:, 0], held.reshape(-1)], axis=1),
        num_resources=len(names))
    return TimedProgram(graph=graph, wiring=wiring, source=source)


def rank_devices(program: Program, cluster: Cluster) -> tuple[DeviceId, ...]:
    """Return the device of each rank; raise ``PlanError`` if the cluster does not have it."""
    for name in program.rank_names:
        if name not in cluster.device_index:
            raise PlanError(f"the plan uses device {name!r}, which cluster {cluster.name!r} does not have: "
                            "it was made for another cluster; plan again")
    return tuple(cluster.device_index[name] for name in program.rank_names)


def _edges(program: Program, wiring: Wiring) -> I64:
    """Return rows (task, task that waits for it)."""
    task, first = wiring.task, wiring.first
    in_stream = (program.op == Op.COLLECTIVE) | (program.op == Op.STEP)
    collective_before = np.where(in_stream, last_before(program.rank_start, program.op == Op.COLLECTIVE), -1)
    rows = [np.stack([before[before >= 0], first[before >= 0]], axis=1)
            for before in (wiring.after, np.where(collective_before >= 0, task[collective_before], -1))]
    received = wiring.needs[program.op[wiring.needs[:, 0]] != Op.STEP]
    parts = np.flatnonzero(np.diff(wiring.leader) == 0)
    return np.concatenate([*rows, np.stack([task[received[:, 1]], first[received[:, 0]]], axis=1),
                           np.stack([parts, parts + 1], axis=1)])


def _durations(
    program: Program, costs: Costs, devices: tuple[DeviceId, ...], leader: I64
) -> tuple[F64, U8]:
    """Return the seconds of each task and the code of their source, from one figure for each kind of task."""
    seconds = np.zeros(len(leader))
    source = np.full(len(leader), Source.GIVEN.code, dtype=np.uint8)
    op = program.op[leader]

    def fill(kind: Op, keys: I64, figure: Callable[[int], Figure]) -> None:
        tasks = np.flatnonzero(op == kind)
        used, which = np.unique(keys[leader[tasks]], return_inverse=True)
        figures = [figure(int(key)) for key in used]
        seconds[tasks] = np.asarray([item.seconds for item in figures], dtype=np.float64)[which]
        source[tasks] = np.asarray([item.source.code for item in figures], dtype=np.uint8)[which]

    fill(Op.COMPUTE, program.instance.astype(np.int64) * len(Phase) + program.phase,
         lambda key: _compute_figure(program, costs, devices, *divmod(key, len(Phase))))
    fill(Op.SEND, program.channel.astype(np.int64),
         lambda key: transfer_figure(program, costs, devices, program.channels[key]))
    fill(Op.COLLECTIVE, program.bucket.astype(np.int64),
         lambda key: exchange_time.exchange_figure(program, costs, devices, program.buckets[key]))
    if (op == Op.STEP).any():
        static = static_bytes(program)
        fill(Op.STEP, program.rank_of(),
             lambda rank: combine([exchange_time.products_figure(program, costs, devices[rank], rank),
                                   _step_figure(costs.cluster, devices[rank], static[rank]),
                                   exchange_time.share_figure(program, costs, devices, rank)]))
    return seconds, source


def _compute_figure(
    program: Program, costs: Costs, devices: tuple[DeviceId, ...], instance: int, phase: int
) -> Figure:
    item = program.instances[instance]
    stage, ops = program.plan.stages[item.stage], program.stage_ops[item.stage]
    figure = stage_figure(costs, ops, [devices[rank] for rank in item.ranks], _COST_PHASE[phase],
                          fraction=item.num_samples / program.graph.batch, again=repeated_in(program.graph, ops, stage),
                          sharded=bool(stage.sharding), times=stage.replicas[item.replica].times)
    if not math.isfinite(figure.seconds):
        names = ", ".join(program.rank_names[rank] for rank in item.ranks)
        raise PlanError(f"stage {stage.name!r} holds an operator that may not run on {names!r}: "
                        "the graph file gives it no time there; move it to another device")
    return exchange_time.without_products(program, costs, devices, instance, phase, figure)


def _cut_backwards(program: Program, costs: Costs, devices: tuple[DeviceId, ...], wiring: Wiring, seconds: F64) -> None:
    """Divide the seconds of backwards among their parts."""
    starts = np.flatnonzero(np.diff(wiring.leader, prepend=-1))
    counts = np.diff(np.append(starts, wiring.num_tasks))
    known: dict[tuple[int, tuple[int, ...]], F64] = {}
    for task, count in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        place = int(wiring.leader[task])
        instance, buckets = int(program.instance[place]), tuple(program.bucket[place + 1 : place + count].tolist())
        if (instance, buckets) not in known:
            known[instance, buckets] = _part_shares(program, costs, devices, instance, buckets)
        seconds[task : task + count] *= known[instance, buckets]


def _part_shares(program: Program, costs: Costs, devices: tuple[DeviceId, ...], instance: int,
                 buckets: tuple[int, ...]) -> F64:
    """Return the shares of a backward's parts: up to where each bucket's gradients are final, and from the last on."""
    item = program.instances[instance]
    stage, ops = program.plan.stages[item.stage], program.stage_ops[item.stage]
    times = final_times(
        program.graph, costs, ops, [devices[rank] for rank in item.ranks],
        [program.buckets[index].parameters for index in buckets], fraction=item.num_samples / program.graph.batch,
        again=repeated_in(program.graph, ops, stage), at_once=stage.keeps_only_inputs,
        factored=exchange_time.factored_ops(program, item.stage, item.ranks))
    ends = np.maximum.accumulate(times / (times[-1] or 1.0))
    return np.diff(ends, prepend=0.0)


def stage_figure(costs: Costs, ops: I64, devices: Sequence[DeviceId], phase: CostPhase, *, fraction: float,
                 again: I64, sharded: bool, times: Mapping[str, float] = MappingProxyType({})) -> Figure:
    """Return the time of a stage on all its devices together, for this share of the traced batch.

    It is the slowest device's time for the whole stage; a backward takes the forward of the operators in ``again`` as
    well. Where the stage shards tensors it is in ``times``, which the
    search for the sharding gave, collectives inside included; else an estimate without these: the slowest device's time
    divided by the number of devices.
    """
    figures = []
    for device in devices:
        figure = costs.stage_figure(ops, device, phase, fraction)
        if len(again) and phase in ("B", "I"):
            figure += costs.stage_figure(again, device, "F", fraction)
        figures.append(figure)
    slowest = max(figures, key=lambda figure: figure.seconds)
    if not sharded:
        return slowest
    if phase in times or (phase in _HALVES and "B" in times):
        return Figure(_sharded_seconds(costs, ops, devices[0], phase, fraction, times), slowest.source)
    return Figure(slowest.seconds / len(devices), slowest.source)


def _sharded_seconds(costs: Costs, ops: I64, device: DeviceId, phase: CostPhase, fraction: float,
                     times: Mapping[str, float]) -> float:
    """Return the seconds in ``times``; of one half of a backward its part, as it is without sharding."""
    seconds = times.get(phase)
    if seconds is None:
        halves = {half: costs.stage_figure(ops, device, half, fraction).seconds for half in _HALVES}
        seconds = times["B"] * halves[phase] / (sum(halves.values()) or 1.0)
    return seconds


def transfer_figure(program: Program, costs: Costs, devices: tuple[DeviceId, ...], channel: Channel) -> Figure:
    """Return the time of one message of the channel; ``devices`` are those of the ranks."""
    ends = devices[channel.source], devices[channel.target]
    given = program.graph.given
    if given is None or all(given.transfer_times[tensor] is None for tensor in channel.tensors):
        return costs.transfer(channel.num_bytes, *ends)
    whole = combine(costs.tensor_transfer(tensor, *ends) for tensor in channel.tensors)
    return Figure(whole.seconds * (channel.samples[1] - channel.samples[0]) / program.graph.batch, whole.source)


def _step_figure(cluster: Cluster, device: DeviceId, static: I64) -> Figure:
    """Return the time to update what a rank holds; ``static`` is its bytes by category."""
    rate = pointwise_rate(cluster.kind_of(device))
    _, gradients, state = (int(amount) for amount in static[:3])  # what is trained is as large as its gradients
    return ZERO if rate is None else Figure((3 * gradients + 2 * state) / rate, Source.ROOFLINE)


def _transfer_resources(program: Program, cluster: Cluster, devices: tuple[DeviceId, ...], leader: I64) -> I64:
    """Return rows (task, resource of the cluster)."""
    lists = [cluster.transfer_resources(devices[channel.source], devices[channel.target])
             for channel in program.channels]
    start = np.concatenate(([0], np.cumsum([len(item) for item in lists]))).astype(np.int64)
    resources = np.asarray([resource for item in lists for resource in item], dtype=np.int64)
    transfers = np.flatnonzero(program.op[leader] == Op.SEND)
    channels = program.channel[leader[transfers]]
    position, owner = expand(start[channels], start[channels + 1])
    return np.stack([transfers[owner], resources[position]], axis=1)


def _exchange_resources(program: Program, costs: Costs, devices: tuple[DeviceId, ...], leader: I64) -> I64:
    """Return rows (task, resource) for exchanges of gradients; what they occupy is counted apart from transfers."""
    first = costs.cluster.num_resources
    limits: dict[int, tuple[int, ...]] = {}
    rows: list[tuple[int, int]] = []
    for task in np.flatnonzero(program.op[leader] == Op.COLLECTIVE).tolist():
        bucket = int(program.bucket[leader[task]])
        if bucket not in limits:
            limits[bucket] = exchange_time.exchange_resources(program, costs, devices, program.buckets[bucket])
        rows += [(task, first + resource) for resource in limits[bucket]]
    return np.asarray(rows, dtype=np.int64).reshape(-1, 2)


def _unit_resources(program: Program, cluster: Cluster, devices: tuple[DeviceId, ...], wiring: Wiring) -> I64:
    """Return rows (task, resource) for computes and steps on devices that share a processing unit."""
    units = [cluster.devices[device].unit for device in devices]
    known = {unit: index for index, unit in enumerate(dict.fromkeys(unit for unit in units if unit is not None))}
    if not known:
        return np.zeros((0, 2), dtype=np.int64)
    first = 2 * cluster.num_resources
    resource = np.asarray([-1 if unit is None else first + known[unit] for unit in units], dtype=np.int64)
    computes = np.flatnonzero(np.isin(program.op, (Op.COMPUTE, Op.STEP)))  # each one task: see ``time_program``
    rows = np.stack([wiring.task[computes], resource[program.rank_of()[computes]]], axis=1)
    return np.unique(rows[rows[:, 1] >= 0], axis=0)


# ---- when gradients are final, inside a backward --------------------------------------------------------------------
#
# Autograd runs operators from the last to the first. A gradient is final when the first operator of the stage that
# reads its parameter has had its turn, so that one which several read (tied weights) waits for the earliest:
#
#     forward    embed(w0)   linear(w1)   linear(w2)   head(w0)
#     backward   head, linear -> w2 final, linear -> w1 final, embed -> w0 final


def final_times(graph: Graph, costs: Costs, ops: I64, devices: Sequence[int], parameters: Sequence[Sequence[int]], *,
                fraction: float, again: I64, at_once: bool, factored: I64 | None = None) -> F64:
    """Return when each set of parameters is final, and last the backward's end, in seconds on the slowest device.

    ``ops`` are those of the stage, ascending, for this share of the traced batch. What the stage does not read is final
    from the begin. Operators in ``again`` run forward once more: first, if all ``at_once``, else when the backward
    comes to the last of their bundle. Operators in ``factored`` leave out the gradients of weights.
    """
    backward, forward = costs.op_seconds("B", fraction)[ops], costs.op_seconds("F", fraction)[ops]
    if factored is not None and len(factored):
        backward = np.where(np.isin(ops, factored)[:, None], costs.op_seconds("I", fraction)[ops], backward)
    columns = sorted({costs.column_of_device[device] for device in devices})
    for bundle in [again.tolist()] if at_once and len(again) else bundles(graph, again):
        places = np.searchsorted(ops, bundle)
        backward[-1 if at_once else places[-1]] += forward[places].sum(axis=0)
    column = columns[int(np.argmax(backward[:, columns].sum(axis=0)))]
    done = np.cumsum(backward[::-1, column])[::-1]
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


# ---- bytes by link ---------------------------------------------------------------------------------------------------


def link_bytes(program: Program, costs: Costs, cluster: Cluster, *, once: bool = False) -> dict[str, int]:
    """Return the bytes of one step over each link that carries some, by the link's name (``a0>h0/fabric``).

    Or of each exchange ``once``, where a unit's collectives come again.

    Links are in the order of the cluster; a shared medium has its own name. Where the cluster has no links, each
    ordered pair of devices counts as one.
    """
    devices = rank_devices(program, cluster)
    by_pair: dict[tuple[DeviceId, DeviceId], float] = {}
    for source, target, num_bytes in _transfers(program, costs, devices, once=once):
        by_pair[source, target] = by_pair.get((source, target), 0.0) + num_bytes
    if not cluster.links:
        names = {pair: ">".join(cluster.devices[device].name for device in pair) for pair in sorted(by_pair)}
        return {name: round(by_pair[pair]) for pair, name in names.items()}
    amounts: dict[int, float] = {}
    for pair, num_bytes in by_pair.items():
        for resource in dict.fromkeys(cluster.link_resources[link] for link in cluster.route(*pair).links):
            amounts[resource] = amounts.get(resource, 0.0) + num_bytes
    titles: dict[int, str] = {}
    for link, resource in zip(cluster.links, cluster.link_resources, strict=True):
        titles.setdefault(resource, link.shared if link.shared is not None else f"{link.source}>{link.target}")
    return {titles[resource]: round(amounts[resource]) for resource in titles if amounts.get(resource)}


def _transfers(program: Program, costs: Costs, devices: Sequence[DeviceId], *,
               once: bool) -> Iterator[tuple[DeviceId, DeviceId, float]]:
    """Yield (sender, receiver, bytes) of everything that is sent in a step."""
    for channel in program.channels:
        yield devices[channel.source], devices[channel.target], channel.num_bytes * len(channel.microbatches)
    times = np.bincount(program.bucket[program.op == Op.COLLECTIVE], minlength=len(program.buckets)).tolist()
    for bucket, count in zip(program.buckets, times, strict=False):
        number = 1 if once or not bucket.is_of_unit else count // len(bucket.ranks)
        for sender, receiver, num_bytes in exchange_time.exchange_transfers(program, costs, devices, bucket):
            yield sender, receiver, num_bytes * number
