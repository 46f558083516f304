"""From a placement to a plan: each device's operators, cut into stages that the runtime executes.

A placement gives every operator a device, and an order in which operators are taken. On each device, the operators in
that order are cut into *segments*, the plan's stages: a segment ends after what another device reads, so that it is
sent at once, and a new one begins before what reads a tensor that has not been on the device before, so that nothing
waits for it that need not. A device may have any number of segments, anywhere in the model.

    order     a b c d e      device 0: a b e, device 1: c d; c reads a, e reads d
    segments  d0: [a] [b] [e]    d1: [c d]

*The stages have no cycle.* Let ``first(S)`` be the position of a segment's first operator in the order. If T reads a
tensor of S on the same device, S is before T there, so first(S) < first(T). If they are on different devices, the
tensor was new on T's device at T's first operator or at that of an earlier segment T' there: its writer is in the order
before that operator, so first(S) <= writer < first(T') <= first(T). So ``first`` grows along every edge; in the order
of ``first`` all segments can be run, and none can block another.

Operators of one *group* (what the backend fuses) are never cut apart: a group counts as one operator, at the position
of its first member. Constants are computed by every segment that reads them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.base.errors import InputError, NoFeasiblePlan
from weft.cluster.cluster import DeviceId
from weft.coarsen.coarsen import Coarse, expand
from weft.model.graph import I64, Graph
from weft.plan.check import excess_bytes
from weft.plan.orders import Action, Order
from weft.plan.plan import Plan
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.simulate.timing import stage_figure

MAX_ATTEMPTS: Final = 4
"""So often is a placement searched again with less memory, until its plan fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPlacement:
    """Where every operator of a graph runs, and in which order; entries of constants count not."""

    device: I64
    """[operators] index of the device."""
    order: I64
    """[operators] all operators, each after those it reads from."""
    group: I64 | None = None
    """[operators] operators with the same number stay together, on one device; None: each for itself."""


def placement_of_groups(coarse: Coarse, device: I64, order: I64) -> OpPlacement:
    """Return the placement of operators that a placement of their groups means: ``device`` and ``order`` of groups."""
    of_op = coarse.groups.of_op
    rank = np.full(coarse.groups.num_groups + 1, -1, dtype=np.int64)  # the last is for constants: NO_GROUP is -1
    rank[order] = np.arange(len(order))
    ops = np.arange(len(of_op), dtype=np.int64)
    return OpPlacement(device=expand(coarse, device), order=np.lexsort((ops, rank[of_op])).astype(np.int64),
                       group=np.where(of_op >= 0, of_op, len(of_op) + ops))


def placed_plan(problem: Problem, placement: OpPlacement, *, microbatches: int = 1, in_flight: int | None = None,
                by: str = "place") -> Plan:
    """Return the inference plan of the placement, with ``microbatches`` requests that follow each other.

    One request runs in the placement's order. Several are pipelined: a device that is free runs the oldest request that
    is ready, and at most ``in_flight`` are begun and not ended (all of them, if None). A plan orders the actions of
    each device by itself, so this holds back only devices that also run late segments: one with the first segments
    alone sends as fast as it can.
    """
    if problem.is_training:
        raise InputError("an operator placement is for inference; training plans are made by `weft plan`")
    segments = cut_segments(problem.graph, placement)
    devices = [int(placement.device[ops[0]]) for ops in segments]
    specs = [StageSpec(ops=ops, replicas=(((DeviceId(device),), 1.0),))
             for ops, device in zip(with_constants(problem.graph, segments), devices, strict=True)]
    order: Order = [[] for _ in problem.devices]
    if microbatches == 1:
        for stage, device in enumerate(devices):
            order[device].append((stage, "F", 0))
    else:
        order = _pipelined(problem, specs, devices, microbatches, in_flight or microbatches)
    return make_plan(problem, specs, order, microbatches=microbatches, by=by)


def plan_within_memory(problem: Problem, search: Callable[[Mapping[str, int]], OpPlacement], *, microbatches: int = 1,
                       by: str = "place") -> Plan:
    """Return a plan that fits, of the placements that ``search`` gives when told how much to keep free by device.

    The plan's account of memory has more than a placement's (tensors that wait between stages, work inside them), so
    the first search keeps nothing free and each later one what the last plan lacked. Of several requests at once,
    fewer are let in before memory is taken from the search. Raise ``NoFeasiblePlan`` if it does not fit in the end.
    """
    reserve: dict[str, int] = {}
    for _ in range(MAX_ATTEMPTS):
        placement = search(reserve)
        in_flight = microbatches
        while True:
            plan = placed_plan(problem, placement, microbatches=microbatches, in_flight=in_flight, by=by)
            over = excess_bytes(plan, problem.graph, problem.cluster)
            if not over:
                return plan
            if in_flight == 1:
                break
            in_flight //= 2
        for name, num_bytes in over.items():
            reserve[name] = reserve.get(name, 0) + num_bytes
    name, missing = max(over.items(), key=lambda item: item[1])
    raise NoFeasiblePlan(f"the best placement needs {missing} bytes more than {name!r} has, after {MAX_ATTEMPTS} "
                         "searches that kept ever more memory free. Try smaller requests or more devices.",
                         missing_bytes=missing, device=name)


# ---- segments -------------------------------------------------------------------------------------------------------


def cut_segments(graph: Graph, placement: OpPlacement) -> list[I64]:
    """Return the segments, each as its operators in ascending order, in the order of their first operators.

    Constants are in none. Raise ``InputError`` if the order is not one of all operators in which each comes after what
    it reads, or if a group is on two devices.
    """
    items = _items(graph, placement)
    position = np.full(graph.num_ops, -1, dtype=np.int64)
    for index, ops in enumerate(items):
        position[ops] = index
    _check_order(graph, position)
    sends = _sends(graph, placement.device, position)
    current: dict[int, int] = {}
    there: set[tuple[int, int]] = set()
    last: dict[int, int] = {}
    segments: list[list[int]] = []
    for index, ops in enumerate(items):
        device = int(placement.device[ops[0]])
        new = _new_tensors(graph, placement.device, ops, there)
        there |= new
        if new or device not in last or last[device] in sends:
            current[device] = len(segments)
            segments.append([])
        segments[current[device]].extend(ops)
        last[device] = index
    return [np.sort(np.asarray(ops, dtype=np.int64)) for ops in segments]


def _items(graph: Graph, placement: OpPlacement) -> list[list[int]]:
    """Return the groups of operators in order, without constants."""
    if sorted(placement.order.tolist()) != list(range(graph.num_ops)):
        raise InputError(f"the order of the placement must name each of the {graph.num_ops} operators once")
    items: dict[int, list[int]] = {}
    for op in placement.order.tolist():
        if not graph.is_constant[op]:
            items.setdefault(op if placement.group is None else int(placement.group[op]), []).append(op)
    for ops in items.values():
        for op in ops:
            if placement.device[op] != placement.device[ops[0]]:
                raise InputError(f"operators {graph.op_names[ops[0]]!r} and {graph.op_names[op]!r} are in one group "
                                 "but on two devices")
    return list(items.values())


def _check_order(graph: Graph, position: I64) -> None:
    source, reader = graph.edges[:, 0], graph.edges[:, 1]
    late = np.flatnonzero((position[source] > position[reader]) & (position[reader] >= 0))
    if len(late):
        raise InputError(f"the placement takes {graph.op_names[reader[late[0]]]!r} before "
                         f"{graph.op_names[source[late[0]]]!r}, which it reads from")


def _sends(graph: Graph, device: I64, position: I64) -> set[int]:
    """Return the items that write what another device reads."""
    source, reader = graph.edges[:, 0], graph.edges[:, 1]
    is_sent = (position[source] >= 0) & (position[reader] >= 0) & (device[source] != device[reader])
    return set(position[source[is_sent]].tolist())


def _new_tensors(graph: Graph, device: I64, ops: list[int], there: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return (tensor, device) for what the operators read from other devices and nothing there has read before."""
    here = int(device[ops[0]])
    new = set()
    for op in ops:
        for tensor in graph.op_inputs(op).tolist():
            source = int(graph.tensor_producer[tensor])
            if source >= 0 and not graph.is_constant[source] and device[source] != here:
                new.add((tensor, here))
    return new - there


def with_constants(graph: Graph, segments: list[I64]) -> list[I64]:
    """Return the segments with the constants that each needs; a constant that the model returns is in one only."""
    needed: dict[int, frozenset[int]] = {}
    for op in range(graph.num_ops):
        sources = {int(graph.tensor_producer[tensor]) for tensor in graph.op_inputs(op).tolist()}
        own = {source for source in sources if source >= 0 and graph.is_constant[source]}
        needed[op] = frozenset(own.union(*(needed[source] for source in own)))
    returned = {op for tensor in graph.outputs if (op := int(graph.tensor_producer[tensor])) >= 0
                and graph.is_constant[op]}
    result = []
    for index, ops in enumerate(segments):
        constants = frozenset[int]().union(*(needed[op] for op in ops.tolist())) - returned
        result.append(np.asarray(sorted({*ops.tolist(), *constants, *(returned if index == 0 else ())}),
                                 dtype=np.int64))
    return result


# ---- several requests ----------------------------------------------------------------------------------------------


def _pipelined(problem: Problem, specs: list[StageSpec], devices: list[int], microbatches: int,
               in_flight: int) -> Order:
    """Return the order in which devices run the oldest ready request first, by costs, with transfers as delays.

    A device that has work for all requests in flight is never idle, so in the long run a request takes as long as the
    busiest device needs for it, as far as ``in_flight`` and links allow.
    """
    fraction = problem.options.batch / microbatches / problem.graph.batch
    seconds = [stage_figure(problem.costs, spec.ops, spec.replicas[0][0], "F", fraction=fraction, again=spec.ops[:0],
                            sharded=False).seconds for spec in specs]
    return _play(seconds, devices, _stage_edges(problem, specs, devices, fraction), len(problem.devices),
                 num_requests=microbatches, in_flight=in_flight)


def _stage_edges(problem: Problem, specs: list[StageSpec], devices: list[int],
                 fraction: float) -> list[dict[int, float]]:
    """Return for each stage the stages that read from it, with the seconds until the tensors are there."""
    graph = problem.graph
    stage_of = np.full(graph.num_ops, -1, dtype=np.int64)
    for stage, spec in enumerate(specs):
        stage_of[spec.ops[~graph.is_constant[spec.ops]]] = stage
    edges: list[dict[int, float]] = [{} for _ in specs]
    for source, reader, tensor in graph.edges.tolist():
        a, b = int(stage_of[source]), int(stage_of[reader])
        if a >= 0 and b >= 0 and a != b:
            delay = 0.0
            if devices[a] != devices[b]:
                delay = fraction * problem.costs.tensor_transfer(tensor, devices[a], devices[b]).seconds
            edges[a][b] = max(delay, edges[a].get(b, 0.0))
    return edges


def _play(seconds: list[float], devices: list[int], edges: list[dict[int, float]], num_devices: int, *,
          num_requests: int, in_flight: int) -> Order:
    """Play several requests through the stages, each device running the oldest that is ready; return the actions."""
    stages = range(len(seconds))
    num_inputs = [sum(stage in readers for readers in edges) for stage in stages]
    first_stages = [stage for stage in stages if not num_inputs[stage]]
    missing = [list(num_inputs) for _ in range(num_requests)]
    ready_at = [[0.0] * len(seconds) for _ in range(num_requests)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(num_devices)]  # heaps of (request, stage) by device
    is_busy, left = [False] * num_devices, [len(seconds)] * num_requests
    order: list[list[Action]] = [[] for _ in range(num_devices)]
    num_begun = min(in_flight, num_requests)
    # Heap of (time, 0 for an end and 1 for an arrival, request, stage).
    events = [(0.0, 1, request, stage) for request in range(num_begun) for stage in first_stages]
    while events:
        now, changed = events[0][0], set()
        while events and events[0][0] <= now:
            _, is_arrival, request, stage = heapq.heappop(events)
            changed.add(devices[stage])
            if is_arrival:
                heapq.heappush(ready[devices[stage]], (request, stage))
                continue
            is_busy[devices[stage]] = False
            for reader, delay in edges[stage].items():
                missing[request][reader] -= 1
                ready_at[request][reader] = max(ready_at[request][reader], now + delay)
                if not missing[request][reader]:
                    heapq.heappush(events, (ready_at[request][reader], 1, request, reader))
            left[request] -= 1
            if not left[request] and num_begun < num_requests:
                for first in first_stages:
                    heapq.heappush(events, (now, 1, num_begun, first))
                num_begun += 1
        for device in sorted(changed):
            if ready[device] and not is_busy[device]:
                request, stage = heapq.heappop(ready[device])
                order[device].append((stage, "F", request))
                is_busy[device] = True
                heapq.heappush(events, (now + seconds[stage], 0, request, stage))
    return order
