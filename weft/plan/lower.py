"""From a plan to the program it means, by playing the plan once with its own predicted times of stages and messages.

Compute actions are played in each device's order; when an action ends, it is written to its rank, and right after it
each message that it produces is written to both sides at once, as a send on one rank and a receive on the other. So all
lists are cuts of one global sequence, in which a send and its receive are one event: no two ranks can wait for each
other, whatever the transport buffers and however long things really take. A receive comes before the compute that was
still running when the message was sent, so it is posted early and moves data beside that compute.

The collectives of units are actions of the queues, too, which all their members do together: a gather stands before the
compute before the one that needs it, so that one unit is gathered in advance; a scattering right behind the backward
that makes the gradients final (``weft.plan.unit_queue``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from weft.base.errors import ClusterError
from weft.cluster.cluster import Cluster, DeviceId
from weft.cluster.cluster_file import parse_cluster
from weft.model.graph import Graph
from weft.plan.binding import bind_plan
from weft.plan.layout import Layout, build_layout
from weft.plan.plan import Plan
from weft.plan.program import Op, Phase, Program
from weft.plan.structure import parse_action, raise_problems, require_structure
from weft.plan.unit_queue import collective_of, sums_pending, with_unit_actions

DEFAULT_TIMES: Final = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Used for phases that ``Replica.times`` does not give."""


def lower(plan: Plan, graph: Graph) -> Program:
    """Return the program of all ranks; raise ``PlanError`` if the plan is not sound or its orders block each other.

    The result depends on the plan and the graph alone, so what is simulated is what runs.
    """
    plan = bind_plan(plan, graph)
    require_structure(plan, graph)
    layout = build_layout(plan, graph)
    player = _Player(plan, graph, layout)
    player.play()
    return _pack(plan, graph, layout, player.lists)


class _Player:
    """Plays the compute actions in order of their end times and writes the instruction lists."""

    def __init__(self, plan: Plan, graph: Graph, layout: Layout) -> None:
        self.plan, self.layout = plan, layout
        self.lists: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in plan.cluster.devices]
        computes = _action_queues(plan, layout)
        self.queues = with_unit_actions(plan, layout, computes) if layout.units else computes
        self.head = [0] * len(self.queues)
        self.durations = _durations(plan, layout)
        self.delays = _delays(plan, layout)
        self.done: dict[tuple[int, Phase, int], float] = {}
        self.started: set[tuple[int, Phase, int]] = set()
        self.arrived: dict[tuple[int, Phase, int], set[int]] = {}
        """The ranks that have come to an action of several."""
        self.waiting: dict[tuple[int, Phase, int], list[tuple[int, Phase, int]]] = {}
        self.heap: list[tuple[float, int, tuple[int, Phase, int]]] = []
        self.outgoing = _outgoing(layout)
        self.handled = [frozenset(item.microbatches) for item in layout.instances]
        self.used = [frozenset(channel.microbatches) for channel in layout.channels]
        self.split = {(index, microbatch) for queue in computes for index, phase, microbatch in queue
                      if phase == Phase.I}
        self.pending, self.buckets_of = _bucket_counts(plan, graph, layout)
        for bucket, count in sums_pending(layout, self.queues).items():
            self.pending[bucket] = count

    def play(self) -> None:
        """Play everything, then append the optimizer step of each rank."""
        for rank in range(len(self.queues)):
            self._try_start(rank, 0.0)
        while self.heap:
            now, _, action = heapq.heappop(self.heap)
            self._finish(action, now)
            for rank in self._ranks_of(action):
                self.head[rank] += 1
            for rank in self._ranks_of(action):
                self._try_start(rank, now)
            for blocked in self.waiting.pop(action, ()):
                self._try_start(self._ranks_of(blocked)[0], now)
        if any(self.head[rank] < len(queue) for rank, queue in enumerate(self.queues)):
            raise_problems("the plan", self._blocked())
        if self.plan.model.mode == "training" and self.plan.optimizer.kind != "none":
            for items in self.lists:
                if items:
                    items.append((Op.STEP, -1, -1, 0, -1, -1))

    def _try_start(self, rank: int, now: float) -> None:
        if self.head[rank] >= len(self.queues[rank]):
            return
        action = self.queues[rank][self.head[rank]]
        ranks = self._ranks_of(action)
        if action in self.started:
            return
        if len(ranks) > 1:
            here = self.arrived.setdefault(action, set())
            here.add(rank)
            if len(here) < len(ranks):
                return
        begin = now
        for needed in self._needs(action):
            if needed not in self.done:
                self.waiting.setdefault(needed, []).append(action)
                return
            arrival = self.done[needed] + self.delays.get((needed[0], action[0], action[1] == Phase.F), 0.0)
            begin = max(begin, arrival)
        self.started.add(action)
        self.arrived.pop(action, None)
        end = begin + (self.durations[action[0]][action[1]] if action[0] >= 0 else 0.0)
        heapq.heappush(self.heap, (end, len(self.started), action))

    def _ranks_of(self, action: tuple[int, Phase, int]) -> tuple[int, ...]:
        """Return who does an action together."""
        if action[0] >= 0:
            return self.layout.instances[action[0]].ranks
        return self.layout.buckets[collective_of(self.layout, action)[0]].ranks

    def _needs(self, action: tuple[int, Phase, int]) -> Iterator[tuple[int, Phase, int]]:
        """Yield the actions that must be done before this one."""
        index, phase, microbatch = action
        if index < 0:
            return
        instance = self.layout.instances[index]
        if phase == Phase.F:
            for producer in instance.producers:
                if microbatch in self.handled[producer]:
                    yield producer, Phase.F, microbatch
        elif phase == Phase.W:
            yield index, Phase.I, microbatch
        else:
            yield index, Phase.F, microbatch
            for consumer in instance.consumers:
                if microbatch in self.handled[consumer]:
                    split = (consumer, microbatch) in self.split
                    yield consumer, Phase.I if split else Phase.B, microbatch

    def _finish(self, action: tuple[int, Phase, int], now: float) -> None:
        """Write the compute, the messages it produces, and the collectives it completes."""
        index, phase, microbatch = action
        self.done[action] = now
        if index < 0:
            self._write_collective(action)
            return
        for rank in self.layout.instances[index].ranks:
            self.lists[rank].append((Op.COMPUTE, index, microbatch, phase, -1, -1))
        if phase != Phase.W:
            for channel_id in self.outgoing[index][phase == Phase.F]:
                channel = self.layout.channels[channel_id]
                if microbatch in self.used[channel_id]:
                    self.lists[channel.source].append((Op.SEND, -1, microbatch, 0, channel_id, -1))
                    self.lists[channel.target].append((Op.RECV, -1, microbatch, 0, channel_id, -1))
        if phase in (Phase.B, Phase.W):
            for bucket in self.buckets_of.get(index, ()):
                self._count_down(bucket)

    def _count_down(self, bucket: int) -> None:
        """Write an exchange when all is there that it waits for."""
        self.pending[bucket] -= 1
        if self.pending[bucket] == 0:
            for rank in self.layout.buckets[bucket].ranks:
                self.lists[rank].append((Op.COLLECTIVE, -1, -1, 0, -1, bucket))

    def _write_collective(self, action: tuple[int, Phase, int]) -> None:
        """Write a unit's collective, and the sums over groups that it completes."""
        (index, instance), (_, phase, microbatch) = collective_of(self.layout, action), action
        bucket = self.layout.buckets[index]
        for rank in bucket.ranks:
            self.lists[rank].append((Op.COLLECTIVE, instance, microbatch, phase, -1, index))
        if bucket.method == "reduce_scatter":
            for other in self.layout.units[bucket.units[0]].sums:
                self._count_down(other)

    def _blocked(self) -> list[str]:
        """Return one line for each device that cannot go on."""
        names = [self.plan.stages[item.stage].name for item in self.layout.instances]
        problems = []
        for rank, queue in enumerate(self.queues):
            if self.head[rank] >= len(queue):
                continue
            action = queue[self.head[rank]]
            missing = [needed for needed in self._needs(action) if needed not in self.done]
            reason = ", ".join(f"{names[index]}:{phase.name}:{microbatch}" for index, phase, microbatch in missing)
            reason = reason or "the other devices of its group"
            device = self.plan.cluster.devices[rank]
            position = sum(item[0] >= 0 for item in queue[: self.head[rank]])
            bucket = self.layout.buckets[collective_of(self.layout, action)[0]] if action[0] < 0 else None
            name = names[action[0]] if bucket is None else (
                f"{bucket.method} for {self.plan.stages[self.layout.units[bucket.units[0]].stages[0]].name}")
            problems.append(f"order.{device}[{position}]: {name}:{action[1].name}:{action[2]} waits "
                            f"for {reason}, which never comes: the orders of the devices block each other")
        return problems


def _action_queues(plan: Plan, layout: Layout) -> list[list[tuple[int, Phase, int]]]:
    instance_of = {(plan.stages[item.stage].name, rank): index
                   for index, item in enumerate(layout.instances) for rank in item.ranks}
    actions = [[parse_action(token) for token in plan.order.get(device, ())] for device in plan.cluster.devices]
    return [[(instance_of[action[0], rank], Phase[action[1]], action[2]) for action in row if action is not None]
            for rank, row in enumerate(actions)]


def _durations(plan: Plan, layout: Layout) -> list[dict[Phase, float]]:
    times = [plan.stages[item.stage].replicas[item.replica].times for item in layout.instances]
    return [{phase: known.get(phase.name, DEFAULT_TIMES[phase.name]) for phase in Phase} for known in times]


def _delays(plan: Plan, layout: Layout) -> dict[tuple[int, int, bool], float]:
    """Return how long messages between two instances are under way, forward (True) and backward, on an idle network.

    It is known where the plan describes its cluster, and only moves receives to where they are due: a description that
    cannot be read, or has no way between two devices, is refused by those who need it.
    """
    description = plan.cluster.description
    try:
        if not _read_last or _read_last[0][0] is not description:
            _read_last[:] = [(description, parse_cluster(description, where="cluster.description"))]
        return _delays_on(_read_last[0][1], plan, layout)
    except ClusterError:
        return {}


_read_last: list[tuple[Any, Cluster]] = []
"""A description, which is the same object in all plans of a search, and its cluster: large ones take long to read."""


def _delays_on(cluster: Cluster, plan: Plan, layout: Layout) -> dict[tuple[int, int, bool], float]:
    rank_of = {device.name: index for index, device in enumerate(cluster.devices)}
    devices = [rank_of.get(name) for name in plan.cluster.devices]
    delays: dict[tuple[int, int, bool], float] = {}
    for channel in layout.channels:
        source, target = devices[channel.source], devices[channel.target]
        if source is None or target is None:
            continue
        route = cluster.route(DeviceId(source), DeviceId(target))
        seconds = route.latency_s + channel.num_bytes / route.bytes_per_s
        for consumer in channel.consumers:
            key = (channel.producer, consumer, channel.kind == "activation")
            delays[key] = max(delays.get(key, 0.0), seconds)
    return delays


def _outgoing(layout: Layout) -> list[tuple[list[int], list[int]]]:
    """Return, for each instance, the channels that leave after its backward and those after its forward."""
    result: list[tuple[list[int], list[int]]] = [([], []) for _ in layout.instances]
    for index, channel in enumerate(layout.channels):
        result[channel.producer][channel.kind == "activation"].append(index)
    return result


def _bucket_counts(plan: Plan, graph: Graph, layout: Layout) -> tuple[list[int], dict[int, list[int]]]:
    """Return how many backward actions each bucket waits for, and the buckets that each instance contributes to."""
    exchanged: dict[int, list[int]] = {}
    for index, bucket in enumerate(layout.buckets):
        for tensor in () if bucket.is_of_unit else bucket.parameters:
            exchanged.setdefault(tensor, []).append(index)
    pending = [0] * len(layout.buckets)
    buckets_of: dict[int, list[int]] = {}
    if not exchanged:
        return pending, buckets_of
    of_stage: list[list[int]] = []
    for ops in layout.stage_ops:
        read = {int(tensor) for op in ops for tensor in graph.op_inputs(int(op))}
        of_stage.append(sorted({index for tensor in read for index in exchanged.get(tensor, ())}))
    ranks = [frozenset(bucket.ranks) for bucket in layout.buckets]
    for index, item in enumerate(layout.instances):
        buckets_of[index] = [number for number in of_stage[item.stage] if not ranks[number].isdisjoint(item.ranks)]
        for number in buckets_of[index]:
            pending[number] += len(item.microbatches)
    return pending, buckets_of


def _pack(plan: Plan, graph: Graph, layout: Layout, lists: list[list[tuple[int, int, int, int, int, int]]]) -> Program:
    rows = np.asarray([row for items in lists for row in items], dtype=np.int32).reshape(-1, 6)
    rank_start = np.concatenate(([0], np.cumsum([len(items) for items in lists]))).astype(np.int64)
    return Program(
        plan=plan, graph=graph, stage_ops=layout.stage_ops, instances=layout.instances, channels=layout.channels,
        buckets=layout.buckets, units=layout.units, rank_start=rank_start, op=rows[:, 0].astype(np.uint8),
        instance=rows[:, 1].copy(), microbatch=rows[:, 2].copy(), phase=rows[:, 3].astype(np.uint8),
        channel=rows[:, 4].copy(), bucket=rows[:, 5].copy())
