"""Where the time of a simulated step goes: its critical path, and what each device waits for.

A task starts when the last task that it waits for has ended, or when what it occupies (a link, a shared processing
unit) is free. So from any task there is one before it that ends when it starts, back to the begin of the step:

    a0  F0 F1 ------ B0 B1 step      the path here: F0 on a0, its transfer, F0 and B0 on a1, the way back, B0 ...
    a1     F0 B0 F1 B1 step

The path's seconds add up to the step. A transfer or exchange divides into what its busiest link needs for the bytes
(``wire``), and the rest: latency of the rounds, or of waiting inside it.

On a device (``device_waits``) the gap before every compute or optimizer step divides into *exposed communication*,
while something that it needs is on its way, and the rest, in which whoever sends it last is not done yet. The gap
before a device's first compute is its *fill*, the time after its last one its *drain*. As in ``Timeline``, busy +
exposed + bubble is the step; the bubble is fill + waiting for others + drain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal, get_args

import numpy as np

from weft.cluster.cluster import Cluster
from weft.cost.costs import Costs
from weft.model.graph import F64, I64
from weft.plan.program import Op, Program
from weft.simulate.engine import Simulator
from weft.simulate.tasks import U32, TaskGraph
from weft.simulate.timeline import Timeline
from weft.simulate.timing import link_bytes, time_program

Kind = Literal["compute", "optimizer", "transfer", "exchange", "latency"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """What one kind of work at one place takes of the critical path."""

    kind: Kind
    """``transfer``: tensors between stages; ``exchange``: gradients; ``latency``: of both, beyond their bytes."""
    where: str
    """Devices for computing, a link for what is sent."""
    seconds: float
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The tasks that make the step as long as it is, by kind and place."""

    step_time_s: float
    shares: tuple[PathShare, ...]
    """The longest first; together the whole step."""

    def seconds_of(self, kind: Kind) -> float:
        """Return what this kind takes of the path."""
        return sum(share.seconds for share in self.shares if share.kind == kind)

    @property
    def binding(self) -> Kind:
        """Return the kind that takes most."""
        return max(KINDS, key=self.seconds_of)


def critical_path(program: Program, costs: Costs, cluster: Cluster) -> CriticalPath:
    """Return what the simulated step of the program is made of."""
    timed = time_program(program, costs, cluster)
    simulator = Simulator(timed.graph)
    step_time_s = simulator.run()
    tasks = walk_back(timed.graph, simulator.starts, simulator.ends)
    places = _Places(program, costs, cluster)
    totals = defaultdict[tuple[Kind, str], list[float]](list)
    for task in tasks:
        seconds = float(simulator.ends[task] - simulator.starts[task])
        for kind, where, part in places.divide(int(timed.wiring.leader[task]), seconds):
            totals[kind, where].append(part)
    shares = [PathShare(kind=kind, where=where, seconds=sum(parts), num_tasks=len(parts))
              for (kind, where), parts in totals.items()]
    shares.sort(key=lambda share: (-share.seconds, share.kind, share.where))
    return CriticalPath(step_time_s=step_time_s, shares=tuple(share for share in shares if share.seconds > 0))


def walk_back(graph: TaskGraph, starts: F64, ends: F64) -> tuple[int, ...]:
    """Return the tasks of a critical path, from the first to the last; each starts when the one before it ends.

    Among several that end at the same time the one with the lowest number is taken.

    >>> from weft.simulate.tasks import make_task_graph
    >>> graph = make_task_graph([2.0, 1.0, 5.0], edges=[(0, 2), (1, 2)], holds=[], num_resources=0)
    >>> walk_back(graph, np.array([0.0, 0.0, 2.0]), np.array([2.0, 1.0, 7.0]))
    (0, 2)
    """
    if graph.num_tasks == 0:
        return ()
    owner = np.repeat(np.arange(graph.num_tasks), graph.num_held())
    sources, source_start = _grouped(graph.successors, graph.edge_sources(), graph.num_tasks)
    users, user_start = _grouped(graph.resources, owner, graph.num_resources)
    path = [int(np.argmax(ends))]
    seen = set(path)
    while True:
        task = path[-1]
        found = _latest(sources[source_start[task] : source_start[task + 1]].tolist(), ends, seen)
        if found is None or ends[found] < starts[task]:
            held = graph.resources[graph.resource_start[task] : graph.resource_start[task + 1]].tolist()
            before = np.concatenate([sources[:0], *(users[user_start[item] : user_start[item + 1]] for item in held)])
            found = _latest(before[ends[before] <= starts[task]].tolist(), ends, seen) if starts[task] > 0 else None
        if found is None:
            return tuple(reversed(path))
        path.append(found)
        seen.add(found)


def _latest(tasks: Sequence[int], ends: F64, seen: set[int]) -> int | None:
    """Return the task that ends last, of equal ones the first; None if there is none that is not ``seen``."""
    return max((task for task in tasks if task not in seen), key=lambda task: (ends[task], -task), default=None)


def _grouped(keys: U32, values: I64, count: int) -> tuple[I64, I64]:
    """Return the values in the order of their keys, and where those of each of ``count`` keys begin."""
    order = np.argsort(keys, kind="stable")
    return values[order], np.searchsorted(keys[order], np.arange(count + 1))


class _Places:
    """Says for an instruction what kind of work it is, and where."""

    def __init__(self, program: Program, costs: Costs, cluster: Cluster) -> None:
        self.program, self.costs, self.cluster = program, costs, cluster
        self.busiest = cache(self._busiest)

    def divide(self, instruction: int, seconds: float) -> Iterator[tuple[Kind, str, float]]:
        """Yield (kind, place, seconds) of the parts of a task that lasts so long."""
        item, names = self.program.instruction(instruction), self.program.rank_names
        if item.op == Op.COMPUTE:
            yield "compute", " + ".join(names[rank] for rank in self.program.instances[item.instance].ranks), seconds
        elif item.op == Op.STEP:
            rank = int(np.searchsorted(self.program.rank_start, instruction, side="right")) - 1
            yield "optimizer", names[rank], seconds
        else:
            kind: Kind = "exchange" if item.op == Op.COLLECTIVE else "transfer"
            where, wire_s = self.busiest(kind, item.bucket if kind == "exchange" else item.channel)
            yield kind, where, min(wire_s, seconds)
            if seconds > wire_s:
                yield "latency", where, seconds - wire_s

    def _busiest(self, kind: Kind, index: int) -> tuple[str, float]:
        """Return the link on which one message or exchange takes longest, and its seconds for the bytes alone."""
        program = self.program
        if kind == "transfer":
            channel = program.channels[index]
            ranks: Sequence[int] = (channel.source, channel.target)
            alone = replace(program, channels=(replace(channel, microbatches=channel.microbatches[:1]),), buckets=())
        else:
            ranks = program.buckets[index].ranks
            alone = replace(program, channels=(), buckets=(program.buckets[index],))
        times = link_times(alone, self.costs, self.cluster, once=True)
        if not times:
            return ">".join(program.rank_names[rank] for rank in ranks), float("inf")
        where = max(times, key=lambda name: times[name])
        return where, times[where]


def link_times(program: Program, costs: Costs, cluster: Cluster, *, once: bool = False) -> dict[str, float]:
    """Return how long each link is busy with the bytes of a step, where its rate is known; see ``link_bytes``."""
    rates: dict[str, float] = {}
    for link in cluster.links:
        rates.setdefault(link.shared if link.shared is not None else link.name, link.bytes_per_s)
    amounts = link_bytes(program, costs, cluster, once=once)
    return {name: amount / rates[name] for name, amount in amounts.items() if name in rates}


GRADIENTS = "gradients"
"""The partner of a device that waits for an exchange of gradients."""
UNIT = "itself"
"""The partner where a device waits for nothing that is sent: a processing unit that it shares, or its own tp group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWaits:
    """Where the time of one device goes, and whom it waits for."""

    device: str
    busy_s: float
    fill_s: float
    """Before its first compute, less what is on its way then."""
    drain_s: float
    """After its last compute."""
    for_others_s: dict[str, float]
    """By partner: its work is not done. The longest first."""
    exposed_s: dict[str, float]
    """By partner: what it sent is on its way. The longest first."""

    @property
    def longest(self) -> tuple[str, float]:
        """Return what is waited for most, in words, and for how long."""
        special = {GRADIENTS: "others before gradients", UNIT: "its processing unit"}
        reasons = {"its first work": self.fill_s, "the end of the step": self.drain_s}
        reasons |= {special.get(name, f"computing on {name}"): seconds for name, seconds in self.for_others_s.items()}
        reasons |= {"the exchange of gradients" if name == GRADIENTS else f"messages from {name}": seconds
                    for name, seconds in self.exposed_s.items()}
        what = max(reasons, key=lambda reason: reasons[reason])
        return what, reasons[what]


def device_waits(timeline: Timeline) -> tuple[DeviceWaits, ...]:
    """Return what each device waits for; the timeline must know its program."""
    assert timeline.program is not None
    waits_from = np.searchsorted(timeline.needs[:, 0], np.arange(timeline.num_instructions + 1))
    return tuple(_waits_of(timeline, timeline.program, rank, waits_from) for rank in range(timeline.num_ranks))


def _waits_of(timeline: Timeline, program: Program, rank: int, waits_from: I64) -> DeviceWaits:
    """Return what one rank waits for; the needs of instruction ``i`` begin at ``waits_from[i]``."""
    first, last = int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1])
    runs = first + np.flatnonzero(timeline.runs[first:last])
    exposed, others = defaultdict[str, float](float), defaultdict[str, float](float)
    fill_s = 0.0

    def partner(arriving: int) -> str:
        """Return who sends what a receive or collective brings."""
        if timeline.op[arriving] != Op.RECV:
            return GRADIENTS
        return timeline.devices[program.channels[int(program.channel[arriving])].source]

    for number, item in enumerate(runs.tolist()):
        rows = slice(int(waits_from[item]), int(waits_from[item + 1]))
        arriving, parts = timeline.needs[rows, 1], timeline.exposed_by_need[rows]
        for need, part in zip(arriving.tolist(), parts.tolist(), strict=True):
            exposed[partner(need)] += part
        rest = max(float(timeline.start_s[item] - timeline.issue_s[item] - parts.sum()), 0.0)
        if number == 0:
            fill_s = rest
        else:
            others[partner(int(arriving[np.argmax(timeline.end_s[arriving])])) if len(arriving) else UNIT] += rest
    end_s = float(timeline.end_s[runs].max()) if len(runs) else 0.0
    return DeviceWaits(device=timeline.devices[rank], busy_s=float(timeline.busy_s[rank]), fill_s=fill_s,
                       drain_s=timeline.step_time_s - end_s, for_others_s=_longest_first(others),
                       exposed_s=_longest_first(exposed))


def _longest_first(totals: dict[str, float]) -> dict[str, float]:
    return {name: totals[name] for name in sorted(totals, key=lambda name: (-totals[name], name)) if totals[name] > 0}
