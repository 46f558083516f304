"""The schedule problem: blocks on devices, their times, memory and order, and what moves between them.

One micro-batch is one copy of every block. For search, a problem is a set of *tasks* that need *resources* one at a
time: every block is a task on its devices, and every transfer that occupies a link is a task on one direction of that
link. Transfers without a link are delays on edges. So ``tasks`` = blocks, then linked transfers; ``resources`` =
devices, then directions of links:

    f0 (d0) --transfer on link d0-d1--> f1 (d1)        tasks: f0, f1, f0>f1      edges: f0 -> f0>f1 -> f1
    f0 (d0) --transfer, a delay of 0.1--> f1 (d1)      tasks: f0, f1             edges: f0 -0.1-> f1

Memory is a matter of order alone: a block changes only the memory of devices that it holds, so what a device holds when
a block starts is the sum over the blocks before it on that device, for both conventions of ``free_at``.

Problem files (``weft.schedule-problem``) are read strictly: ``parse_problem`` lists everything wrong with one.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, TypeVar

from weft.base.errors import InputError
from weft.base.files import MAX_PROBLEMS, check_header, decode, load_json, write_atomic

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


class Edge(NamedTuple):
    """``target`` starts no earlier than ``delay`` after ``source`` has ended; both are tasks of one micro-batch."""

    source: int
    target: int
    delay: float


AnyEdge = TypeVar("AnyEdge", bound=tuple[int, int, float])
Number = TypeVar("Number", int, float)


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
    def unlinked(self) -> ScheduleProblem:
        """Return the problem with links that carry any number of transfers at a time: all are delays between blocks."""
        return replace(self, transfers=tuple(replace(item, link=None) for item in self.transfers))

    @cached_property
    def predecessors(self) -> tuple[tuple[Edge, ...], ...]:
        """Return the edges into each task."""
        return tuple(map(tuple, grouped(self.edges, 1, self.num_tasks)))

    @cached_property
    def successors(self) -> tuple[tuple[Edge, ...], ...]:
        """Return the edges out of each task."""
        return tuple(map(tuple, grouped(self.edges, 0, self.num_tasks)))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """Return the tasks in an order that respects all edges (the smallest index first among the ready).

        A problem with a cycle gives fewer tasks than it has; ``parse_problem`` refuses such problems.
        """
        return tuple(self.ordered(lambda task, place: ()))

    def ordered(self, key: Callable[[int, int], tuple[float, ...]]) -> list[int]:
        """Return the tasks in an order that respects all edges, of those that are ready the one of smallest key first.

        The key is of the task and of how many tasks had ended when it became ready; of equal keys the lower task is
        first.
        """
        missing = [len(edges) for edges in self.predecessors]
        ready = [(*key(task, 0), task) for task, number in enumerate(missing) if number == 0]
        heapq.heapify(ready)
        result: list[int] = []
        while ready:
            task = int(heapq.heappop(ready)[-1])
            result.append(task)
            for edge in self.successors[task]:
                missing[edge.target] -= 1
                if missing[edge.target] == 0:
                    heapq.heappush(ready, (*key(edge.target, len(result)), edge.target))
        return result

    def memory_of(self, task: int) -> float:
        """Return what the task adds to each of its devices; 0 for transfers."""
        return self.blocks[task].memory if task < self.num_blocks else 0.0

    @cached_property
    def device_work(self) -> tuple[float, ...]:
        """Return the busy time of each resource for one micro-batch."""
        return tuple(sum(self.task_times[task] for task in tasks) for tasks in self.resource_tasks)

    def longest_paths(self) -> list[float]:
        """Return for each task the earliest start in one micro-batch alone, from dependencies."""
        return follow(self.predecessors, self.topological, self.task_times, [0.0] * self.num_tasks)


def grouped(edges: Iterable[AnyEdge], end: Literal[0, 1], num_tasks: int) -> list[list[AnyEdge]]:
    """Return the edges by the task at one end: 0 for their source, 1 for their target."""
    result: list[list[AnyEdge]] = [[] for _ in range(num_tasks)]
    for edge in edges:
        result[edge[end]].append(edge)
    return result


def follow(incoming: Sequence[Iterable[tuple[int, int, Number]]], order: Iterable[int], times: Sequence[Number],
           starts: list[Number]) -> list[Number]:
    """Return the starts, each moved to the end of the longest path to it; tasks come in order of dependencies."""
    for task in order:
        for source, _, delay in incoming[task]:
            starts[task] = max(starts[task], starts[source] + times[source] + delay)
    return starts


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


FORMAT: Final = "weft.schedule-problem"
VERSION: Final = 1
SMALLEST: Final = 1e-30
LARGEST: Final = 1e30
"""Times and memory beyond these are refused: sums of them would overflow or vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    name: str
    memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    name: str
    devices: tuple[str, ...]
    time: float
    memory: float = 0.0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    from_: str
    to: str
    time: float
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    devices: tuple[_Device, ...]
    blocks: tuple[_Block, ...]
    free_at: FreeAt = "end"
    transfers: tuple[_Transfer, ...] = ()


def load_problem(path: str | PathLike[str]) -> ScheduleProblem:
    """Return the problem in the file (``.json`` or ``.json.gz``)."""
    return parse_problem(load_json(path), where=str(path))


def parse_problem(value: Any, *, where: str = "problem") -> ScheduleProblem:
    """Return the problem in the plain JSON value; raise ``InputError`` that lists everything wrong with it."""
    body = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=InputError)
    file = decode(_File, body, where=where)
    problems = _find_problems(file)
    if not problems:
        problem = _resolve(file)
        problems = find_cycle(problem)
    if problems:
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise InputError(f"{where}: " + "; ".join([*problems[:MAX_PROBLEMS], *more]))
    return problem


def _find_problems(file: _File) -> list[str]:
    problems: list[str] = []
    devices = _unique("devices", [device.name for device in file.devices], problems)
    blocks = _unique("blocks", [block.name for block in file.blocks], problems)
    if not file.blocks:
        problems.append("blocks is empty: give at least one block")
    if len(file.blocks) > MAX_BLOCKS:
        problems.append(f"blocks has {len(file.blocks)} items, more than {MAX_BLOCKS}")
    for index, device in enumerate(file.devices):
        if device.memory is not None:
            problems += _size_problems(f"devices[{index}].memory", device.memory)
    for index, block in enumerate(file.blocks):
        problems += _block_problems(f"blocks[{index}]", block, devices, blocks)
    for index, transfer in enumerate(file.transfers):
        where = f"transfers[{index}]"
        problems += [f"{where}.{key} names no block: {name!r}" for key, name in
                     (("from", transfer.from_), ("to", transfer.to)) if name not in blocks]
        problems += _size_problems(f"{where}.time", transfer.time)
        if transfer.from_ == transfer.to:
            problems.append(f"{where} goes from a block to itself")
    return problems


def _unique(where: str, names: list[str], problems: list[str]) -> set[str]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            problems.append(f"{where}[{index}].name is there twice: {name!r}")
        seen.add(name)
    return seen


def _block_problems(where: str, block: _Block, devices: set[str], blocks: set[str]) -> list[str]:
    problems = [f"{where}.devices names no device: {name!r}" for name in block.devices if name not in devices]
    problems += [f"{where}.after names no block: {name!r}" for name in block.after if name not in blocks]
    if not block.devices:
        problems.append(f"{where}.devices is empty: a block needs at least one device")
    if len(set(block.devices)) < len(block.devices):
        problems.append(f"{where}.devices names a device twice")
    if len(set(block.after)) < len(block.after):
        problems.append(f"{where}.after names a block twice")
    return [*problems, *_size_problems(f"{where}.time", block.time),
            *_size_problems(f"{where}.memory", abs(block.memory))]


def _size_problems(where: str, value: float) -> list[str]:
    if value < 0:
        return [f"{where} must not be negative, not {value}"]
    if value and not SMALLEST <= value <= LARGEST:
        return [f"{where} must be 0 or of a size between {SMALLEST:g} and {LARGEST:g}, not {value}: try other units"]
    return []


def _resolve(file: _File) -> ScheduleProblem:
    devices = {device.name: index for index, device in enumerate(file.devices)}
    blocks = {block.name: index for index, block in enumerate(file.blocks)}
    return ScheduleProblem(
        device_names=tuple(devices), device_memory=tuple(device.memory for device in file.devices),
        free_at=file.free_at,
        blocks=tuple(Block(name=block.name, devices=tuple(sorted(devices[name] for name in block.devices)),
                           time=block.time, memory=block.memory, after=tuple(blocks[name] for name in block.after))
                     for block in file.blocks),
        transfers=tuple(Transfer(source=blocks[item.from_], target=blocks[item.to], time=item.time, link=item.link)
                        for item in file.transfers))


def find_cycle(problem: ScheduleProblem) -> list[str]:
    """Return one message that names the blocks of a cycle of dependencies, or nothing."""
    order = set(problem.topological)
    if len(order) == problem.num_tasks:
        return []
    task = next(task for task in range(problem.num_tasks) if task not in order)
    seen: list[int] = []
    while task not in seen:
        seen.append(task)
        task = next(edge.source for edge in problem.predecessors[task] if edge.source not in order)
    names = [problem.task_names[item] for item in (*seen[seen.index(task):], task)]
    shown = names if len(names) <= 10 else [*names[:9], "..."]
    return [f"blocks wait for each other in a circle: {' after '.join(shown)}"]


def problem_to_json(problem: ScheduleProblem) -> dict[str, Any]:
    """Return the problem as plain JSON values, as ``parse_problem`` reads them."""
    names = [block.name for block in problem.blocks]
    transfers = [{"from": names[item.source], "to": names[item.target], "time": item.time,
                  **({} if item.link is None else {"link": item.link})} for item in problem.transfers]
    return {
        "format": FORMAT, "version": VERSION,
        "devices": [{"name": name, "memory": memory} for name, memory in
                    zip(problem.device_names, problem.device_memory, strict=True)],
        "free_at": problem.free_at,
        "blocks": [{"name": block.name, "devices": [problem.device_names[device] for device in block.devices],
                    "time": block.time, "memory": block.memory, "after": [names[index] for index in block.after]}
                   for block in problem.blocks],
        **({"transfers": transfers} if transfers else {})}


def save_problem(problem: ScheduleProblem, path: str | PathLike[str]) -> None:
    """Write the problem to the file, whole or not at all."""
    write_atomic(path, json.dumps(problem_to_json(problem), indent=1, allow_nan=False) + "\n")
