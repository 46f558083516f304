"""The schedule problem: blocks on devices, their times, memory and order, and what moves between them.

One micro-batch is one copy of every block. For search, a problem is a set of *tasks* that need *resources* one at a
time: every block is a task on its devices, and every transfer that occupies a link is a task on one direction of that
link. Transfers without a link are delays on edges. So ``tasks`` = blocks, then linked transfers; ``resources`` =
devices, then directions of links:

    f0 (d0) --transfer on link d0-d1--> f1 (d1)        tasks: f0, f1, f0>f1      edges: f0 -> f0>f1 -> f1
    f0 (d0) --transfer, a delay of 0.1--> f1 (d1)      tasks: f0, f1             edges: f0 -0.1-> f1

Memory is a matter of order alone: a block changes only the memory of devices that it holds, so what a device holds when
a block starts is the sum over the blocks before it on that device, for both conventions of ``free_at``.

Two things are a schedule's free choice, and no tasks: two blocks of an *overlap* may run as a pair, at once, which
takes less than one after the other; and what a block of a *copy* takes may leave its devices for the host, and come
back before it is given back (``match_memory`` says by which blocks). Only then time matters for memory.

Problem files (``weft.schedule-problem``) are read strictly: ``parse_problem`` lists everything wrong with one.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, TypeVar

from weft.base.errors import InputError
from weft.base.files import MAX_PROBLEMS, check_header, decode, load_json, write_atomic

FreeAt = Literal["start", "end"]

INSTANT_PARTS: Final = 64
"""What takes no time, and must not be an instant, takes this part of the least time there is."""
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
class Overlap:
    """Two blocks of the same devices that may run at once: started together, both end ``time`` later."""

    blocks: tuple[int, int]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What a block takes may leave for the host and come back, each in ``time`` on the copy streams of its devices."""

    block: int
    time: float


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
    overlaps: tuple[Overlap, ...] = ()
    copies: tuple[Copy, ...] = ()
    host_memory: float | None = None
    """What the host can keep for all devices together; None for no limit."""

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
    def joint(self) -> dict[tuple[int, int], float]:
        """Return how long two blocks take at once, by the blocks in either order."""
        return {key: item.time for item in self.overlaps for key in (item.blocks, item.blocks[::-1])}

    @cached_property
    def returns(self) -> tuple[tuple[int, ...], ...]:
        """Return for each copy the blocks that give back what its block takes: it must be back before any starts."""
        matched: dict[int, set[int]] = {item.block: set() for item in self.copies}
        for device in sorted({device for item in self.copies for device in self.blocks[item.block].devices}):
            for take, release, _ in match_memory(self, device):
                if take in matched and release is not None:
                    matched[take].add(release)
        return tuple(tuple(sorted(matched[item.block])) for item in self.copies)

    @cached_property
    def copied(self) -> frozenset[int]:
        """Return the devices from which memory can leave."""
        return frozenset(device for item in self.copies for device in self.blocks[item.block].devices)

    @property
    def releases_late(self) -> bool:
        """Return whether memory that a block gives back is taken by nothing else before that block ends."""
        return self.free_at == "end" or not (self.overlaps or self.copies)

    @cached_property
    def instants(self) -> frozenset[int]:
        """Return the copies whose memory may be back for an instant: they take no time, nor need what gives it back."""
        return frozenset(copy for copy, tasks in enumerate(self.returns) if not self.copies[copy].time and not (
            self.releases_late and all(self.task_times[task] for task in tasks)))

    def host_amount(self, copy: int) -> float:
        """Return what the host keeps while that copy's memory is away: the block's, from all its devices."""
        block = self.blocks[self.copies[copy].block]
        return block.memory * len(block.devices)

    @cached_property
    def device_work(self) -> tuple[float, ...]:
        """Return the busy time of each resource for one micro-batch, if no two blocks run at once."""
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


def find_ancestors(problem: ScheduleProblem) -> list[int]:
    """Return for each task the set of tasks that must end before it, as a bit mask."""
    masks = [0] * problem.num_tasks
    for task in problem.topological:
        for edge in problem.predecessors[task]:
            masks[task] |= masks[edge.source] | 1 << edge.source
    return masks


def match_memory(problem: ScheduleProblem, device: int,
                 ancestors: Sequence[int] | None = None) -> list[tuple[int | None, int | None, float]]:
    """Return (take, release, amount): which block gives back what which other took on the device, like brackets.

    Blocks that release come in order of how many takes they depend on, each giving back what the latest of these has
    left. None as a take: nobody took it; None as a release: nobody gives it back.
    """
    ancestors = find_ancestors(problem) if ancestors is None else ancestors
    amounts = {task: problem.memory_of(task) for task in problem.resource_tasks[device]}
    takes = {task: amount for task, amount in amounts.items() if amount > 0}
    releases = {task: -amount for task, amount in amounts.items() if amount < 0}
    smallest = ROUNDING * max([1e-300, *takes.values(), *releases.values()])
    # The latest possible take first, and releases with the fewest candidates first: short holds, few left over.
    order = {task: place for place, task in enumerate(problem.topological)}
    mask = sum(1 << task for task in takes)
    open_takes = sorted(takes, key=lambda task: -order[task])
    holds: list[tuple[int | None, int | None, float]] = []
    for release in sorted(releases, key=lambda task: ((ancestors[task] & mask).bit_count(), order[task])):
        for take in [task for task in open_takes if ancestors[release] >> task & 1]:
            amount = min(takes[take], releases[release])
            if amount <= smallest:
                break
            holds.append((take, release, amount))
            takes[take] -= amount
            releases[release] -= amount
            if takes[take] <= smallest:
                open_takes.remove(take)
    holds += [(task, None, left) for task, left in takes.items() if left > smallest]
    return [*holds, *((None, task, left) for task, left in releases.items() if left > smallest)]


def with_memory(problem: ScheduleProblem, memory: Mapping[str, float | None]) -> ScheduleProblem:
    """Return the problem with other memory limits for the devices named."""
    limits = tuple(memory.get(name, limit)
                   for name, limit in zip(problem.device_names, problem.device_memory, strict=True))
    return replace(problem, device_memory=limits)


def simplified(problem: ScheduleProblem, factor: float | None = 1.0) -> ScheduleProblem:
    """Return the problem without pairs and copies, with so many times the memory where memory could leave.

    None: with any amount of memory there.
    """
    limits = tuple(limit if limit is None or device not in problem.copied else
                   None if factor is None else factor * limit for device, limit in enumerate(problem.device_memory))
    return replace(problem, device_memory=limits, overlaps=(), copies=(), host_memory=None)


def without_instants(problem: ScheduleProblem) -> ScheduleProblem:
    """Return the problem in which no memory is back for an instant only: such copies take a little time."""
    times = [*problem.task_times, *(item.time for item in problem.overlaps), *(item.time for item in problem.copies),
             *(item.time for item in problem.transfers)]
    least = min((time for time in times if time), default=1.0) / INSTANT_PARTS
    return replace(problem, copies=tuple(replace(item, time=least) if copy in problem.instants else item
                                         for copy, item in enumerate(problem.copies)))


def turned_round(problem: ScheduleProblem) -> ScheduleProblem:
    """Return the problem backwards in time, with the same tasks and resources: what was taken is released.

    Without copies: nothing leaves the devices.
    """
    after: list[list[int]] = [[] for _ in problem.blocks]
    for index, block in enumerate(problem.blocks):
        for before in block.after:
            after[before].append(index)
    blocks = tuple(replace(block, memory=-block.memory, after=tuple(later))
                   for block, later in zip(problem.blocks, after, strict=True))
    transfers = tuple(replace(item, source=item.target, target=item.source, sign=item.sign or problem.sign_of(item))
                      for item in problem.transfers)
    return replace(problem, blocks=blocks, transfers=transfers, copies=())


FORMAT: Final = "weft.schedule-problem"
VERSION: Final = 1
ROUNDING: Final = 1e-9
"""Of the largest amount on a device: less than this is rounding."""
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
class _Overlap:
    blocks: tuple[str, ...]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    block: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    devices: tuple[_Device, ...]
    blocks: tuple[_Block, ...]
    free_at: FreeAt = "end"
    transfers: tuple[_Transfer, ...] = ()
    overlaps: tuple[_Overlap, ...] = ()
    copies: tuple[_Copy, ...] = ()
    host_memory: float | None = None


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
        problems = find_cycle(problem) or _never_given_back(problem)
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
    return [*problems, *_overlap_problems(file), *_copy_problems(file)]


def _overlap_problems(file: _File) -> Iterator[str]:
    blocks, seen = {block.name: block for block in file.blocks}, set()
    for index, item in enumerate(file.overlaps):
        where = f"overlaps[{index}]"
        if len(item.blocks) != 2 or item.blocks[0] == item.blocks[1]:
            yield f"{where}.blocks must be the names of two different blocks, not {list(item.blocks)}"
            continue
        unknown = [name for name in item.blocks if name not in blocks]
        if unknown:
            yield f"{where}.blocks names no block: {unknown[0]!r}"
            continue
        one, other = (blocks[name] for name in item.blocks)
        if set(one.devices) != set(other.devices):
            yield (f"{where}: {one.name!r} is on {', '.join(one.devices)} and {other.name!r} on "
                   f"{', '.join(other.devices)}: only blocks of the same devices can overlap")
        if frozenset(item.blocks) in seen:
            yield f"{where}: {one.name!r} and {other.name!r} are there twice"
        seen.add(frozenset(item.blocks))
        low, high = max(one.time, other.time), one.time + other.time
        if not low * (1 - ROUNDING) <= item.time <= high * (1 + ROUNDING):
            yield (f"{where}.time must be between {low:.12g}, the longer of {one.name!r} and {other.name!r}, and "
                   f"{high:.12g}, one after the other; not {item.time}")


def _copy_problems(file: _File) -> Iterator[str]:
    blocks, seen = {block.name: block for block in file.blocks}, set()
    for index, item in enumerate(file.copies):
        where = f"copies[{index}]"
        if item.block not in blocks:
            yield f"{where}.block names no block: {item.block!r}"
        elif not blocks[item.block].memory > 0:
            yield f"{where}: {item.block!r} takes no memory that could leave the device"
        if item.block in seen:
            yield f"{where}.block is there twice: {item.block!r}"
        seen.add(item.block)
        yield from _size_problems(f"{where}.time", item.time)
    if file.host_memory is not None:
        yield from _size_problems("host_memory", file.host_memory)


def _never_given_back(problem: ScheduleProblem) -> list[str]:
    return [f"copies[{index}]: no block gives back what {problem.blocks[item.block].name!r} takes, so it need not come "
            "back: leave the copy out, or give a block that depends on it a negative memory"
            for index, (item, back) in enumerate(zip(problem.copies, problem.returns, strict=True)) if not back]


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
                        for item in file.transfers),
        overlaps=tuple(Overlap(blocks=(blocks[item.blocks[0]], blocks[item.blocks[1]]), time=item.time)
                       for item in file.overlaps),
        copies=tuple(Copy(block=blocks[item.block], time=item.time) for item in file.copies),
        host_memory=file.host_memory)


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
        **({"transfers": transfers} if transfers else {}),
        **({"overlaps": [{"blocks": [names[block] for block in item.blocks], "time": item.time}
                         for item in problem.overlaps]} if problem.overlaps else {}),
        **({"copies": [{"block": names[item.block], "time": item.time} for item in problem.copies]}
           if problem.copies else {}),
        **({} if problem.host_memory is None else {"host_memory": problem.host_memory})}


def save_problem(problem: ScheduleProblem, path: str | PathLike[str]) -> None:
    """Write the problem to the file, whole or not at all."""
    write_atomic(path, json.dumps(problem_to_json(problem), indent=1, allow_nan=False) + "\n")
