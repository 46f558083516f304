"""The schedule problem: blocks on devices, their times, memory and order, and what moves between them.

One micro-batch is one copy of every block. For search, a problem is a set of *tasks* that need *resources* one at a
time: every block is a task on its devices, and every transfer that occupies a link is a task on one direction of that
link. Transfers without a link are delays on edges. So ``tasks`` = blocks, then linked transfers; ``resources`` =
devices, then directions of links:

    f0 (d0) --transfer on link d0-d1--> f1 (d1)        tasks: f0, f1, f0>f1      edges: f0 -> f0>f1 -> f1
    f0 (d0) --transfer, a delay of 0.1--> f1 (d1)      tasks: f0, f1             edges: f0 -0.1-> f1

Memory is a matter of order alone: a block changes only the memory of devices that it holds, so what a device holds when
a block starts is the sum over the blocks before it on that device, for both conventions of ``free_at``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

FreeAt = Literal["start", "end"]

MAX_BLOCKS: Final = 100_000
"""More blocks in one micro-batch are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of one micro-batch's work; it starts on all its devices at once and holds them until it ends."""

    name: str
    devices: tuple[int, ...]
    """Indices into ``ScheduleProblem.device_names``."""
    time: float
    memory: float = 0.0
    """Added to what each of its devices holds: taken at the start if positive, else released (see ``free_at``)."""
    after: tuple[int, ...] = ()
    """Indices of the blocks of the same micro-batch that must end before this one starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What moves from one block to a later one of the same micro-batch."""

    source: int
    target: int
    time: float
    link: str | None = None
    """The link that it occupies, one transfer at a time in each direction; None for a pure delay."""
    sign: Literal["+", "-"] | None = None
    """The direction on the link; None: ``+`` if it goes to a device of the same or a higher index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """``target`` starts no earlier than ``delay`` after ``source`` has ended; both are tasks of one micro-batch."""

    source: int
    target: int
    delay: float


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """Blocks, devices and transfers of one micro-batch; build from a file with ``load_problem``."""

    device_names: tuple[str, ...]
    device_memory: tuple[float | None, ...]
    """What each device can hold; None for no limit."""
    blocks: tuple[Block, ...]
    transfers: tuple[Transfer, ...] = ()
    free_at: FreeAt = "end"

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.device_names)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of one micro-batch."""
        return len(self.blocks)

    @cached_property
    def linked(self) -> tuple[Transfer, ...]:
        """Return the transfers that occupy a link; task ``num_blocks + i`` is ``linked[i]``."""
        return tuple(transfer for transfer in self.transfers if transfer.link is not None)

    @property
    def num_tasks(self) -> int:
        """Return the number of blocks and linked transfers."""
        return self.num_blocks + len(self.linked)

    @cached_property
    def task_names(self) -> tuple[str, ...]:
        """Return block names, then ``from>to`` for linked transfers."""
        return (*(block.name for block in self.blocks),
                *(f"{self.blocks[item.source].name}>{self.blocks[item.target].name}" for item in self.linked))

    @cached_property
    def task_times(self) -> tuple[float, ...]:
        """Return the duration of each task."""
        return (*(block.time for block in self.blocks), *(transfer.time for transfer in self.linked))

    @cached_property
    def task_resources(self) -> tuple[tuple[int, ...], ...]:
        """Return the resources that each task holds."""
        index = {key: self.num_devices + number for number, key in enumerate(self._directions)}
        return (*(block.devices for block in self.blocks), *((index[self._direction(item)],) for item in self.linked))

    @cached_property
    def resource_names(self) -> tuple[str, ...]:
        """Return device names, then ``link+`` (towards higher device indices) and ``link-`` for directions in use."""
        return (*self.device_names, *(f"{link}{sign}" for link, sign in self._directions))

    @cached_property
    def resource_tasks(self) -> tuple[tuple[int, ...], ...]:
        """Return the tasks of each resource, in ascending order."""
        result: list[list[int]] = [[] for _ in self.resource_names]
        for task, resources in enumerate(self.task_resources):
            for resource in resources:
                result[resource].append(task)
        return tuple(map(tuple, result))

    @cached_property
    def _directions(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({self._direction(transfer) for transfer in self.linked}))

    def _direction(self, transfer: Transfer) -> tuple[str, str]:
        """Return (link, sign) of a linked transfer."""
        return str(transfer.link), transfer.sign or self.sign_of(transfer)

    def sign_of(self, transfer: Transfer) -> Literal["+", "-"]:
        """Return ``+`` if the transfer goes to a device of the same or a higher index, else ``-``."""
        upward = min(self.blocks[transfer.target].devices) >= min(self.blocks[transfer.source].devices)
        return "+" if upward else "-"

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Return what must end before what, between tasks; parallel edges are merged to the longest delay."""
        delays: dict[tuple[int, int], float] = {}
        for index, block in enumerate(self.blocks):
            for before in block.after:
                delays.setdefault((before, index), 0.0)
        for transfer in self.transfers:
            if transfer.link is None:
                key = (transfer.source, transfer.target)
                delays[key] = max(delays.get(key, 0.0), transfer.time)
        for number, transfer in enumerate(self.linked):
            task = self.num_blocks + number
            delays[transfer.source, task] = 0.0
            delays[task, transfer.target] = 0.0
        return tuple(Edge(source=source, target=target, delay=delay)
                     for (source, target), delay in sorted(delays.items()))

    @cached_property
    def predecessors(self) -> tuple[tuple[Edge, ...], ...]:
        """Return the edges into each task."""
        result: list[list[Edge]] = [[] for _ in range(self.num_tasks)]
        for edge in self.edges:
            result[edge.target].append(edge)
        return tuple(map(tuple, result))

    @cached_property
    def successors(self) -> tuple[tuple[Edge, ...], ...]:
        """Return the edges out of each task."""
        result: list[list[Edge]] = [[] for _ in range(self.num_tasks)]
        for edge in self.edges:
            result[edge.source].append(edge)
        return tuple(map(tuple, result))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """Return the tasks in an order that respects all edges (the smallest index first among the ready).

        A problem with a cycle gives fewer tasks than it has; ``check_problem`` refuses such problems.
        """
        import heapq

        missing = [len(edges) for edges in self.predecessors]
        ready = [task for task, number in enumerate(missing) if number == 0]
        result: list[int] = []
        while ready:
            task = heapq.heappop(ready)
            result.append(task)
            for edge in self.successors[task]:
                missing[edge.target] -= 1
                if missing[edge.target] == 0:
                    heapq.heappush(ready, edge.target)
        return tuple(result)

    def memory_of(self, task: int) -> float:
        """Return what the task adds to each of its devices; 0 for transfers."""
        return self.blocks[task].memory if task < self.num_blocks else 0.0

    @cached_property
    def device_work(self) -> tuple[float, ...]:
        """Return the busy time of each resource for one micro-batch."""
        return tuple(sum(self.task_times[task] for task in tasks) for tasks in self.resource_tasks)

    def longest_paths(self) -> list[float]:
        """Return for each task the earliest start in one micro-batch alone, from dependencies."""
        result = [0.0] * self.num_tasks
        for task in self.topological:
            for edge in self.predecessors[task]:
                result[task] = max(result[task], result[edge.source] + self.task_times[edge.source] + edge.delay)
        return result


def with_memory(problem: ScheduleProblem, memory: Mapping[str, float | None]) -> ScheduleProblem:
    """Return the problem with other memory limits for the devices named."""
    limits = tuple(memory.get(name, limit)
                   for name, limit in zip(problem.device_names, problem.device_memory, strict=True))
    return replace(problem, device_memory=limits)


def turned_round(problem: ScheduleProblem) -> ScheduleProblem:
    """Return the problem backwards in time, with the same tasks and resources: what was taken is released."""
    after: list[list[int]] = [[] for _ in problem.blocks]
    for index, block in enumerate(problem.blocks):
        for before in block.after:
            after[before].append(index)
    blocks = tuple(replace(block, memory=-block.memory, after=tuple(later))
                   for block, later in zip(problem.blocks, after, strict=True))
    transfers = tuple(replace(item, source=item.target, target=item.source, sign=item.sign or problem.sign_of(item))
                      for item in problem.transfers)
    return replace(problem, blocks=blocks, transfers=transfers)
