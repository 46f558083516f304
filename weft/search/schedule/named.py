"""Named schedules: what the library of orders (``weft.plan.orders``) makes of a schedule problem.

A named schedule looks at what the blocks are (``roles``), orders them on every device by its own rule, and is played as
early as possible with the problem's own times and transfers (``replay``), so unequal stages are fine. Some apply to a
problem and some do not:

    gpipe, 1f1b          pipelines that train, also with several stages on a device; whole or split backward
    1f1b+                ... with blocks that span the devices of others (shapes M, NN, K)
    interleaved          stages that go round the devices several times
    zb-h1, zb-h2         split backward, one stage on each device
    zbv, v-half, v-min   split backward, stages that go over the devices and back
    dualpipev            the same, whole or split backward
    chimera, dualpipe    two opposite pipelines (shape X)
    forward-only         no backward blocks (none that are recognised), or no memory: inference

Orders by pattern and by slots leave open where weight gradients go: these can wait, but hold memory while they do.
``fill_weights`` plays the fixed orders of forwards and input gradients with the problem's times and, whenever a device
would stand idle, runs its oldest weight gradient there, unless that would delay the next fixed block too much:

    fixed order of a device    F4 I1    F5 I2 ...
    played, gaps filled        F4 I1 W0 F5 I2 W1 ...

It also runs them before a block that would hold more than the schedule's own limit or than the device's memory.
Transfers count with their times; who waits for whom on a link is left to ``replay``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import F64
from weft.plan.orders import HELD, PLACES, Position, by_pattern, by_place
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Pipeline, Roles, Stage, find_roles, forward_roles
from weft.search.schedule.schedule import TOLERANCE, Instance, Schedule, find_problems, replay
from weft.search.schedule.tuning import TUNING

DeviceOrders = list[list[Instance]]
"""The blocks of each device, in order."""
Place = tuple[int, ...]
"""Devices that run a stage together."""
_HOPEFUL: Final = frozenset(("1f1b", "1f1b+", "interleaved", "forward-only"))
"""Good, and within most memories."""


class NotApplicable(PlanError):  # noqa: N818 - it is an answer rather than a fault
    """The named schedule is not defined for the problem; the message says why."""


@dataclass(frozen=True, kw_only=True)
class NamedRow:
    """What one named schedule makes of a problem."""

    name: str
    schedule: Schedule | None
    """None where the schedule does not apply."""
    reason: str
    """Why it cannot be used: what does not apply, or which device holds too much; empty if it can."""

    @property
    def is_usable(self) -> bool:
        """Return whether the schedule applies and fits the memory."""
        return not self.reason


def named_schedule(name: str, problem: ScheduleProblem, num_microbatches: int) -> Schedule:
    """Return the named schedule, whether or not it fits the memory.

    Raises ``NotApplicable`` where it is not defined for the problem.
    """
    return _make(name, problem, find_roles(problem), num_microbatches)


def compare_named(problem: ScheduleProblem, num_microbatches: int) -> list[NamedRow]:
    """Return a row for every named schedule: usable ones, those that hold too much, and those that do not apply."""
    return list(named_rows(problem, num_microbatches))


def named_rows(problem: ScheduleProblem, num_microbatches: int, *, hopeful_first: bool = False) -> Iterator[NamedRow]:
    """Yield the same one after the other; ``hopeful_first`` is the order for little time."""
    roles = find_roles(problem)
    for name in sorted(NAMED, key=lambda name: name not in _HOPEFUL) if hopeful_first else NAMED:
        try:
            schedule = _make(name, problem, roles, num_microbatches)
        except NotApplicable as error:
            yield NamedRow(name=name, schedule=None, reason=str(error))
        else:
            yield NamedRow(name=name, schedule=schedule, reason="; ".join(find_problems(schedule)))


def named_schedules(problem: ScheduleProblem, num_microbatches: int) -> dict[str, Schedule]:
    """Return by name the schedules that apply, fit the memory and pass ``check_schedule``."""
    return {row.name: row.schedule for row in named_rows(problem, num_microbatches)
            if row.schedule is not None and row.is_usable}


def _make(name: str, problem: ScheduleProblem, roles: Roles | None, num_microbatches: int) -> Schedule:
    reason = "its blocks are no pipelines that are known here"
    if roles is not None:
        reason = next((text for holds, text in _CONDITIONS[name] if not holds(roles)), "").format(roles.longest)
        if name == "forward-only" and roles.is_training:
            reason = "it trains: its backward blocks release memory" if any(
                block.memory for block in problem.blocks) else ""
            roles = forward_roles(problem)
    if reason or roles is None:
        raise NotApplicable(f"{name} does not apply: {reason}")
    orders = _order_by_place if name in PLACES else _order_by_pattern
    return replay(problem, num_microbatches, orders(name, problem, roles, num_microbatches))


# ---- when a named schedule applies: what must hold, and what is said if it does not ---------------------------------


def _goes_round(pipeline: Pipeline) -> bool:
    """Return whether the stages go round the devices at least twice."""
    places, width = pipeline.places, pipeline.width
    is_round = all(place == places[index % width] for index, place in enumerate(places))
    return (is_round and pipeline.is_chain and not pipeline.has_shared and width < len(places)
            and len(places) % width == 0)


def _over_and_back(pipeline: Pipeline) -> bool:
    """Return whether the stages go over the devices once and back."""
    return pipeline.places == pipeline.places[::-1] and 2 * pipeline.width == len(pipeline.places)


Condition = tuple[Callable[[Roles], bool], str]

_TRAINS: Final[Condition] = (lambda roles: roles.is_training, "it trains nothing")
_APART: Final[Condition] = (lambda roles: roles.are_apart, "its pipelines share devices")
_NOT_SHARED: Final[Condition] = (lambda roles: not roles.has_shared,
                                 "some blocks span the devices of others (see 1f1b+)")
_ONE_EACH: Final[Condition] = (lambda roles: all(item.width == len(item.places) for item in roles.pipelines),
                               "it has several stages on a device")
_OVER_AND_BACK: Final[Condition] = (lambda roles: all(map(_over_and_back, roles.pipelines)),
                                    "its stages do not go over the devices once and back")
_OPPOSITE: Final[tuple[Condition, ...]] = (
    (lambda roles: roles.is_training and len(roles.pipelines) == 2, "it is not two pipelines that train"),
    (lambda roles: roles.are_plain_chains and _ONE_EACH[0](roles) and roles.are_places_apart,
     "its pipelines are not chains with one stage on every device"),
    (lambda roles: roles.pipelines[0].places == roles.pipelines[1].places[::-1],
     "its pipelines do not run over the same devices in opposite order"))
_SPLIT_CHAINS: Final[tuple[Condition, ...]] = (
    (lambda roles: roles.is_training and roles.is_split, "no backward is split into input and weight gradient"),
    _APART, (lambda roles: roles.are_plain_chains, "it has blocks that span the devices of others, or branches"),
    (lambda roles: roles.are_places_apart, "its stages share devices in part"))
_CONDITIONS: Final[dict[str, tuple[Condition, ...]]] = {
    "gpipe": (_TRAINS,),
    "1f1b": (_NOT_SHARED, _TRAINS, _APART),
    "1f1b+": ((lambda roles: roles.has_shared, "no block spans the devices of others (see 1f1b)"), _TRAINS, _APART),
    "interleaved": ((lambda roles: roles.is_training and roles.are_apart,
                     "it is not a pipeline that trains on devices of its own"),
                    (lambda roles: roles.are_places_apart and all(map(_goes_round, roles.pipelines)),
                     "its stages do not go round the devices several times in the same order")),
    "chimera": _OPPOSITE, "zb-h1": (*_SPLIT_CHAINS, _ONE_EACH), "zb-h2": (*_SPLIT_CHAINS, _ONE_EACH),
    **dict.fromkeys(("zbv", "v-half", "v-min"), (*_SPLIT_CHAINS, _OVER_AND_BACK)),
    "dualpipev": (_TRAINS, *_SPLIT_CHAINS[1:], _OVER_AND_BACK),
    "dualpipe": (*_OPPOSITE, (lambda roles: not roles.longest % 2, "it needs an even number of stages, not {}")),
    "forward-only": ()}

NAMED: Final[dict[str, Callable[[ScheduleProblem, int], Schedule]]] = {
    name: partial(named_schedule, name) for name in _CONDITIONS}
"""Every named schedule, as a function of the problem and the number of micro-batches."""


# ---- orders on the devices ------------------------------------------------------------------------------------------


def _order_by_place(name: str, problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders:
    """Return the blocks of each device by place; of equal places what others depend on is first."""
    numbers = np.arange(num_microbatches, dtype=np.float64)
    highest = max(max(pipeline.heights()) for pipeline in roles.pipelines)
    place_of: dict[int, F64] = {}
    for pipeline in roles.pipelines:
        heights = pipeline.heights()
        for stage, height in zip(pipeline.stages, heights, strict=True):
            forward, backward = PLACES[name](
                Position(height=height, num_stages=max(heights), highest=highest, width=pipeline.width,
                         half=0.5 if stage.is_shared else 0.0), numbers)
            place_of[stage.forward] = forward
            place_of.update({block: backward for block in (stage.backward, stage.weight) if block is not None})
    rank = {task: number for number, task in enumerate(problem.topological)}
    result: DeviceOrders = []
    for tasks in problem.resource_tasks[: problem.num_devices]:
        blocks = sorted(tasks, key=rank.__getitem__)
        rows = by_place([place_of[block] for block in blocks]) if blocks else []
        result.append([(blocks[row], number) for row, number in rows])
    return result


def _order_by_pattern(name: str, problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders:
    """Return forwards and input gradients by pattern, with weight gradients in the gaps."""
    orders = {}
    for stages, device, width in _devices(name, roles):
        blocks = {f"{letter}{which}": block for which, stage in enumerate(stages)
                  for letter, block in (("F", stage.forward), ("I", stage.backward)) if block is not None}
        orders[stages[0].devices] = [(blocks[kind], number)
                                     for kind, number in by_pattern(name, device, width, num_microbatches)]
    width = max(pipeline.width for pipeline in roles.pipelines)
    return fill_weights(problem, roles, num_microbatches, orders, limit=HELD[name](width))


def _devices(name: str, roles: Roles) -> Iterator[tuple[tuple[Stage, ...], int, int]]:
    """Yield for each device its stages, its number (for DualPipe from the nearer end), and how many there are."""
    if name == "dualpipe":
        down, up = roles.pipelines
        width = len(down.stages)
        for device, pair in enumerate(zip(down.stages, up.stages[::-1], strict=True)):
            yield pair if device < width // 2 else pair[::-1], min(device, width - 1 - device), width
        return
    for pipeline in roles.pipelines:
        for device, stage in enumerate(pipeline.stages[: pipeline.width]):
            own = (stage,) if pipeline.width == len(pipeline.stages) else (stage, pipeline.stages[-1 - device])
            yield own, device, pipeline.width


# ---- weight gradients in the gaps -----------------------------------------------------------------------------------


def fill_weights(problem: ScheduleProblem, roles: Roles, num_microbatches: int,
                 orders: Mapping[Place, Sequence[Instance]], *, limit: int) -> DeviceOrders:
    """Return the fixed orders of forwards and input gradients with weight gradients in their gaps.

    ``limit`` is how many forwards a device may hold without their weight gradient (or backward, where it has none), as
    far as the fixed orders allow it.
    """
    overhangs = TUNING.overhangs if roles.is_split else TUNING.overhangs[:1]
    players = [_Filler(problem, roles, num_microbatches, orders, limit, overhang) for overhang in overhangs]
    best = min(players, key=lambda player: player.play())
    result: DeviceOrders = [[] for _ in problem.device_names]
    for place, order in zip(orders, best.orders, strict=True):
        for device in place:
            result[device] = order
    return result


class _Filler:
    """Plays fixed orders as early as possible and fills gaps as they are found; a line is a place that runs blocks."""

    def __init__(self, problem: ScheduleProblem, roles: Roles, num_microbatches: int,
                 orders: Mapping[Place, Sequence[Instance]], limit: int, overhang: float) -> None:
        self.fixed, self.limit, self.overhang = list(orders.values()), limit, overhang
        self.times, self.memory = problem.task_times, [block.memory for block in problem.blocks]
        stages = [stage for pipeline in roles.pipelines for stage in pipeline.stages]
        self.weight_of = {stage.backward: stage.weight for stage in stages if stage.weight is not None}
        self.holds = {stage.forward: 1 for stage in stages}
        self.holds.update({stage.backward if stage.weight is None else stage.weight: -1 for stage in stages
                           if stage.backward is not None})
        self.before = problem.unlinked.predecessors  # a link counts as if it were free
        self.wakes: list[list[int]] = [[] for _ in problem.blocks]
        """By block: the other lines that may wait for it."""
        lines = {place: line for line, place in enumerate(orders)}
        for source, target, _ in problem.unlinked.edges:
            if problem.blocks[source].devices != problem.blocks[target].devices:
                self.wakes[source].append(lines[problem.blocks[target].devices])
        self.room = [min((room * (1 + TOLERANCE) for device in place
                          if (room := problem.device_memory[device]) is not None), default=float("inf"))
                     for place in orders]
        self.ends: list[list[float]] = [[-1.0] * num_microbatches for _ in problem.blocks]
        self.orders: list[list[Instance]] = [[] for _ in orders]
        self.waiting: list[deque[Instance]] = [deque() for _ in orders]
        self.heads, self.held, self.asleep = [0] * len(orders), [0] * len(orders), [False] * len(orders)
        self.free_at, self.level = [0.0] * len(orders), [0.0] * len(orders)
        self.queue: list[tuple[float, int]] = [(0.0, line) for line in range(len(orders))]

    def play(self) -> float:
        """Return when the last block ends."""
        while self.queue:
            now, line = heapq.heappop(self.queue)
            if self.free_at[line] <= now:
                self._decide(now, line)
        return max(self.free_at)

    def _decide(self, now: float, line: int) -> None:
        """Start what the device should run now, or say when to look again."""
        self.asleep[line] = False
        waiting = self.waiting[line]
        if self.heads[line] == len(self.fixed[line]):
            if waiting:
                self._start(now, line, *waiting.popleft())
            return
        block, number = self.fixed[line][self.heads[line]]
        if waiting and self._is_full(line, block):
            self._start(now, line, *waiting.popleft())
            return
        ready = self._ready(block, number)
        if ready <= now:
            self.heads[line] += 1
            self._start(now, line, block, number)
        elif waiting and now + self.times[waiting[0][0]] * (1 - self.overhang) <= ready * (1 + TOLERANCE):
            self._start(now, line, *waiting.popleft())
        elif ready < float("inf"):
            heapq.heappush(self.queue, (ready, line))
        else:
            self.asleep[line] = True

    def _is_full(self, line: int, block: int) -> bool:
        """Return whether the block would hold more than is allowed."""
        return ((self.held[line] >= self.limit and self.holds.get(block, 0) > 0)
                or (self.memory[block] > 0 and self.level[line] + self.memory[block] > self.room[line]))

    def _ready(self, block: int, number: int) -> float:
        """Return when the block can start; infinity if it needs something that has not started yet."""
        ready = 0.0
        for source, _, delay in self.before[block]:
            end = self.ends[source][number]
            if end < 0:
                return float("inf")
            ready = max(ready, end + delay)
        return ready

    def _start(self, now: float, line: int, block: int, number: int) -> None:
        end = now + self.times[block]
        self.ends[block][number] = end
        self.free_at[line] = end
        self.orders[line].append((block, number))
        self.level[line] += self.memory[block]
        self.held[line] += self.holds.get(block, 0)
        if block in self.weight_of:
            self.waiting[line].append((self.weight_of[block], number))
        heapq.heappush(self.queue, (end, line))
        for other in self.wakes[block]:
            if self.asleep[other]:
                self.asleep[other] = False
                heapq.heappush(self.queue, (now, other))
