"""From a plan to the schedule problem that its placement means, and from a found schedule back to the plan's order.

Every stage becomes a block ``F`` and, in training, a block ``B`` (or ``I`` and ``W``) on all its devices; a stage with
several replicas is one block that lasts as long as its slowest replica. Stages that serve only some micro-batches form
*lanes*: the sets of micro-batches that go through the same stages. Opposite pipelines have two lanes, and one
micro-batch of the problem is one micro-batch of each:

    plan, 4 micro-batches: s0 s1 for 0, 2; s2 s3 for 1, 3        problem: s0:F s1:F ... s2:F s3:F ..., 2 micro-batches

Memory is in bytes by the account of ``weft.plan.memory``: ``F`` takes what the stage keeps for its backward and what is
sent until that begins, ``B`` releases it, ``I`` releases what the gradients of weights do not need, ``W`` the rest. A
device's limit is its capacity less what is there all the time (parameters, gradients, optimizer state), less the most
that any of its blocks needs while it runs beyond what it keeps, less the tensors that wait between stages. How many of
those wait depends on the schedule. ``num_waiting`` says how many of each kind are provided for: with None as many as
there can be, so that every schedule within the limits passes ``check_memory``; with a number, the plan must be checked.

Transfers take the times of ``costs``. A problem's transfer occupies one link, so the busiest resource on its way is
named. Where messages on a link can never meet, because blocks of one device send them and each block is longer than
any of the messages, a transfer is a pure delay, which is the same and leaves less to search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from weft.base.errors import InputError, NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import Cluster, Contention
from weft.cost.costs import Costs
from weft.cost.costs import Phase as CostPhase
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.memory import (
    SEND_WINDOW,
    assembled_bytes,
    handed_outputs,
    instance_memories,
    is_assembled,
    passing_bytes,
    static_bytes,
    waiting_inputs,
)
from weft.plan.plan import Plan
from weft.plan.program import Channel, Program
from weft.plan.saving import repeated_in
from weft.plan.stage_memory import StageMemory
from weft.plan.structure import stage_patterns
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer
from weft.search.schedule.schedule import Schedule
from weft.simulate.timing import rank_devices, stage_figure, transfer_figure

_NO_RESERVE: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMeaning:
    """What a block of the problem is in the plan."""

    stage: int
    """Index into ``Plan.stages``."""
    phase: CostPhase
    lane: int
    """Index into ``PlanProblem.lanes``."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """The schedule problem of a plan's placement, and what its blocks and micro-batches mean in the plan."""

    problem: ScheduleProblem
    meaning: tuple[BlockMeaning, ...]
    """Of each block."""
    lanes: tuple[tuple[int, ...], ...]
    """The plan's micro-batches by lane: micro-batch ``n`` of the problem is ``lanes[k][n]`` for every lane ``k``."""
    stage_names: tuple[str, ...]

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches of the problem."""
        return len(self.lanes[0])

    @property
    def memory_binds(self) -> bool:
        """Return whether some schedule could exceed some device's limit."""
        for device, limit in enumerate(self.problem.device_memory):
            taken = sum(max(0.0, block.memory) for block in self.problem.blocks if device in block.devices)
            if limit is not None and taken * self.num_microbatches > limit:
                return True
        return False


def problem_of_plan(plan: Plan, graph: Graph, costs: Costs, cluster: Cluster, *, split_backward: bool,
                    num_waiting: int | None = None, reserve: Mapping[str, float] = _NO_RESERVE) -> PlanProblem:
    """Return the schedule problem of the plan's stages on their devices; the plan's own order does not matter.

    ``split_backward`` makes ``I`` and ``W`` of every backward. ``reserve`` is kept free on the devices named, in bytes.
    Raise ``NoFeasiblePlan`` if a device has no room for anything, ``InputError`` if lanes are of unequal length.
    """
    return _Builder(lower(plan, graph), costs, cluster, split_backward=split_backward).build(num_waiting, reserve)


def order_of_schedule(plan_problem: PlanProblem, schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return the plan's actions on each device, by start time."""
    meanings, lanes, names = plan_problem.meaning, plan_problem.lanes, plan_problem.stage_names
    tokens = [[f"{names[item.stage]}:{item.phase}:{index}" for index in lanes[item.lane]] for item in meanings]
    return {device: tuple(tokens[task][index] for task, index in instances)
            for device, instances in zip(plan_problem.problem.device_names, schedule.orders(), strict=False)}


def with_schedule(plan: Plan, plan_problem: PlanProblem, schedule: Schedule) -> Plan:
    """Return the plan with the schedule's order of actions."""
    return replace(plan, order=order_of_schedule(plan_problem, schedule))


class _Builder:
    """Makes the problem of one program."""

    def __init__(self, program: Program, costs: Costs, cluster: Cluster, *, split_backward: bool) -> None:
        self.program, self.costs, self.cluster = program, costs, cluster
        self.devices = rank_devices(program, cluster)
        self.used = sorted({rank for instance in program.instances for rank in instance.ranks})
        training = program.plan.model.mode == "training"
        self.phases: tuple[CostPhase, ...] = ("F",) if not training else ("F", "I", "W") if split_backward else (
            "F", "B")
        self.patterns = stage_patterns(program.plan)
        self.lanes = _lanes(program.plan, self.patterns)
        self.instances_of = [[index for index, item in enumerate(program.instances) if item.stage == stage]
                             for stage in range(len(program.plan.stages))]
        memories = instance_memories(program)
        handed = handed_outputs(program, memories).tolist()
        self.memory = [_StageBytes.of(program, items, memories, handed) for items in self.instances_of]
        self.static = static_bytes(program).sum(axis=1)

    def build(self, num_waiting: int | None, reserve: Mapping[str, float]) -> PlanProblem:
        """Return the problem with its transfers and limits."""
        meaning = [BlockMeaning(stage=stage, phase=phase, lane=lane)
                   for lane, stages in enumerate(self.patterns)
                   for phase in self.phases for stage in (stages if phase == "F" else reversed(stages))]
        self.index = {(item.lane, item.stage, item.phase): number for number, item in enumerate(meaning)}
        names = tuple(stage.name for stage in self.program.plan.stages)
        problem = ScheduleProblem(
            device_names=tuple(self.program.rank_names[rank] for rank in self.used),
            device_memory=tuple(self._limit(rank, num_waiting, reserve) for rank in self.used),
            blocks=tuple(map(self._block, meaning)), transfers=self._transfers(), free_at="end")
        return PlanProblem(problem=_without_idle_links(problem), meaning=tuple(meaning), lanes=self.lanes,
                           stage_names=names)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _block(self, item: BlockMeaning) -> Block:
        instances = [self.program.instances[index] for index in self.instances_of[item.stage]]
        name = f"{self.program.plan.stages[item.stage].name}:{item.phase}"
        shared = sum(item.stage in stages for stages in self.patterns) > 1
        ranks = sorted({rank for instance in instances for rank in instance.ranks})
        return Block(name=f"{name}:{item.lane}" if shared else name, time=self._seconds(item.stage, item.phase),
                     devices=tuple(self.used.index(rank) for rank in ranks),
                     memory=float(self.memory[item.stage].change[item.phase]), after=self._after(item))

    def _seconds(self, stage: int, phase: CostPhase) -> float:
        own, ops = self.program.plan.stages[stage], self.program.stage_ops[stage]
        again = repeated_in(self.program.graph, ops, own)
        return max(stage_figure(self.costs, ops, [self.devices[rank] for rank in item.ranks], phase, again=again,
                                fraction=item.num_samples / self.program.graph.batch, sharded=bool(own.sharding),
                                times=own.replicas[item.replica].times).seconds
                   for item in map(self.program.instances.__getitem__, self.instances_of[stage]))

    def _after(self, item: BlockMeaning) -> tuple[int, ...]:
        if item.phase == "W":
            return (self.index[item.lane, item.stage, "I"],)
        forward = item.phase == "F"
        needed = [] if forward else [self.index[item.lane, item.stage, "F"]]
        for index in self.instances_of[item.stage]:
            instance = self.program.instances[index]
            for other in instance.producers if forward else instance.consumers:
                key = item.lane, self.program.instances[other].stage, item.phase
                if key in self.index:
                    needed.append(self.index[key])
        return tuple(sorted(set(needed)))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _limit(self, rank: int, num_waiting: int | None, reserve: Mapping[str, float]) -> float | None:
        """Return what blocks may hold on the rank, or None for no limit."""
        room = self._room(rank)
        if room is None:
            return None
        name = self.program.rank_names[rank]
        limit = room - self._waiting_bytes(rank, num_waiting) - reserve.get(name, 0.0)
        if limit < 0:
            capacity = self.cluster.devices[self.devices[rank]].memory_bytes
            raise NoFeasiblePlan(
                f"{name!r} has {format_bytes(capacity or 0)}, which is {format_bytes(-limit)} too little for the "
                "parameters and state of its stages and for one of them at work. Try more micro-batches, "
                "recomputation, another placement, or more devices.", missing_bytes=int(-limit), device=name)
        return float(limit)

    def _room(self, rank: int) -> float | None:
        """Return the capacity less what is there all the time and what the neediest block takes while it runs."""
        capacity = self.cluster.devices[self.devices[rank]].memory_bytes
        if capacity is None:
            return None
        work = max(self.memory[stage].work(self.phases) for stage in self._stages_on(rank))
        return float(capacity - self.static[rank] - work)

    def _stages_on(self, rank: int) -> list[int]:
        return [stage for stage, items in enumerate(self.instances_of)
                if any(rank in self.program.instances[index].ranks for index in items)]

    def _waiting_bytes(self, rank: int, num_waiting: int | None) -> float:
        """Return room for tensors that wait on the rank: received, or handed over to another stage there."""
        total = 0.0
        for channel in self.program.channels:
            if channel.target == rank:
                owner = channel.producer if channel.kind == "activation" else channel.consumers[0]
                total += channel.num_bytes * self._num_waiting(self.program.instances[owner].stage, num_waiting)
            if channel.source == rank and (channel.kind == "gradient" or len(self.phases) == 1):
                total += channel.num_bytes * min(SEND_WINDOW, len(channel.microbatches))
        for stage in self._stages_on(rank):
            for index in self.instances_of[stage]:
                instance, memory = self.program.instances[index], self.memory[stage]
                near = [self.program.instances[other].stage for other in instance.producers
                        if rank in instance.ranks and rank in self.program.instances[other].ranks]
                total += sum((self.memory[other].handed_outputs + memory.input_gradients)
                             * self._num_waiting(other, num_waiting) for other in set(near))
        return total

    def _num_waiting(self, stage: int, num_waiting: int | None) -> int:
        """Return how many outputs of the stage, or gradients for it, may wait: it has begun each and not ended it."""
        most = len(self.lanes[0]) * sum(stage in stages for stages in self.patterns)
        if num_waiting is not None:
            return min(num_waiting, most)
        kept = self.memory[stage].change["F"]
        rooms = [self._room(rank) for index in self.instances_of[stage]
                 for rank in self.program.instances[index].ranks]
        known = [room for room in rooms if room is not None]
        return most if kept <= 0 or not known else min(most, max(1, int(min(known) // kept)))

    # ---- transfers --------------------------------------------------------------------------------------------------

    def _transfers(self) -> tuple[Transfer, ...]:
        """Return one transfer for each pair of blocks between which messages go."""
        messages: dict[tuple[int, int], list[Channel]] = {}
        first: dict[tuple[int, int], bool] = {}
        for channel in self.program.channels:
            phase: CostPhase = "F" if channel.kind == "activation" else self.phases[1]
            stages = [self.program.instances[index].stage for index in (channel.producer, *channel.consumers)]
            for number, stage in enumerate(stages[1:]):
                for lane in range(len(self.lanes)):
                    key = (lane, stages[0], phase), (lane, stage, phase)
                    if key[0] in self.index and key[1] in self.index and channel.microbatches:
                        pair = self.index[key[0]], self.index[key[1]]
                        messages.setdefault(pair, []).append(channel)
                        first[pair] = first.get(pair, False) or number == 0
        return tuple(self._transfer(pair, channels, named=first[pair]) for pair, channels in sorted(messages.items()))

    def _transfer(self, pair: tuple[int, int], channels: list[Channel], *, named: bool) -> Transfer:
        """Return the messages from block to block as one transfer, on the resource that carries most of them.

        A message that several stages on one rank read occupies its link once, for the first of them (``named``).
        """
        loads: dict[int, float] = {}
        longest = 0.0
        for channel in channels:
            seconds = transfer_figure(self.program, self.costs, self.devices, channel).seconds
            longest = max(longest, seconds)
            ends = self.devices[channel.source], self.devices[channel.target]
            for resource in self.cluster.transfer_resources(*ends):
                loads[resource] = loads.get(resource, 0.0) + seconds
        if not loads or not named:
            return Transfer(source=pair[0], target=pair[1], time=longest)
        busiest = max(loads, key=lambda resource: (loads[resource], -resource))
        return Transfer(source=pair[0], target=pair[1], time=loads[busiest], link=resource_name(self.cluster, busiest))


def _lanes(plan: Plan, patterns: Mapping[tuple[int, ...], list[int]]) -> tuple[tuple[int, ...], ...]:
    lanes = tuple(tuple(microbatches) for microbatches in patterns.values())
    if len({len(lane) for lane in lanes}) > 1:
        counts = ", ".join(str(len(lane)) for lane in lanes)
        raise InputError(f"the plan's {plan.microbatches} micro-batches take different stages, {counts} of each kind: "
                         "a repeating schedule needs as many of each kind; change the number of micro-batches")
    return lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageBytes:
    """What a stage takes on each of its devices for one micro-batch; of several replicas, the most."""

    change: Mapping[str, int]
    """By phase: added to what is held, when it has run."""
    rises: Mapping[str, int]
    """What the phases need while they run, beyond what was there before."""
    handed_outputs: int
    """Outputs that are not kept for the backward, until they are read on the same device."""
    input_gradients: int

    @classmethod
    def of(cls, program: Program, instances: list[int], memories: list[StageMemory], handed: list[int]) -> _StageBytes:
        """Return the largest figures of the stage's instances; ``handed`` are the outputs of each that wait."""
        stage = program.plan.stages[program.instances[instances[0]].stage]
        training = program.plan.model.mode == "training"
        own, items = [memories[index] for index in instances], [program.instances[index] for index in instances]
        arriving = [[program.channels[channel] for channel in item.forward_channels] for item in items]
        pieces = any(is_assembled(program, item) for item in items)
        outputs = max(handed[index] for index in instances)
        kept = for_weights = sent = passing = buffers = 0
        if training:
            kept = max(item.inputs if stage.keeps_only_inputs else item.saved for item in own)
            for_weights = max(memory.saved_for_weights + waiting_inputs(program, item, memory)
                              for item, memory in zip(items, own, strict=True))
            is_sent = any(item.producer in instances and item.kind == "activation" for item in program.channels)
            sent = outputs if is_sent else 0
            passing = max(sum(passing_bytes(program, channel) for channel in channels)
                          + assembled_bytes(program, item, memory)
                          for item, memory, channels in zip(items, own, arriving, strict=True))
            buffers = max(sum(program.channels[channel].num_bytes for channel in item.gradient_channels)
                          for item in items)
        rises = [item.rises(recompute=stage.keeps_only_inputs) for item in own]
        forward = max(rise.forward + (item.inputs if pieces else 0) for rise, item in zip(rises, own, strict=True))
        return cls(
            change={"F": kept + sent + passing, "B": -kept - sent - passing, "I": for_weights + buffers - kept - sent,
                    "W": -for_weights - buffers - passing},
            rises={"F": forward, "B": max(rise.backward for rise in rises), "I": max(rise.split for rise in rises),
                   "W": max(rise.weights for rise in rises)},
            handed_outputs=outputs - sent, input_gradients=max(item.input_gradients for item in own))

    def work(self, phases: tuple[CostPhase, ...]) -> int:
        """Return the most that any phase needs while it runs, beyond what the problem counts when it starts."""
        extra = [self.handed_outputs]
        for phase in phases:
            extra.append(self.rises[phase] - max(0, self.change[phase]))
            if phase in ("B", "I"):
                extra.append(self.input_gradients)
        return max(extra)


def resource_name(cluster: Cluster, resource: int) -> str:
    """Return the name of what a transfer occupies: a link, a shared medium or a device's port."""
    if cluster.contention is Contention.PORT:
        side = "out" if resource < cluster.num_devices else "in"
        return f"{cluster.devices[resource % cluster.num_devices].name}:{side}"
    if not cluster.links:
        source, target = divmod(resource, cluster.num_devices)
        return f"{cluster.devices[source].name}>{cluster.devices[target].name}"
    link = cluster.links[cluster.link_resources.index(resource)]
    return link.shared or link.name


def _without_idle_links(problem: ScheduleProblem) -> ScheduleProblem:
    """Return the problem with transfers as pure delays where those on one direction of a link can never meet."""
    users: dict[tuple[str | None, str], list[Transfer]] = {}
    for item in problem.transfers:
        users.setdefault((item.link, problem.sign_of(item)), []).append(item)
    return replace(problem, transfers=tuple(
        replace(item, link=None) if _never_meet(users[item.link, problem.sign_of(item)], problem.blocks) else item
        for item in problem.transfers))


def _never_meet(transfers: list[Transfer], blocks: tuple[Block, ...]) -> bool:
    """Return whether each ends before the next can begin: blocks of one device, longer than all of them, send them."""
    sources = {item.source for item in transfers}
    together = set.intersection(*(set(blocks[source].devices) for source in sources))
    longest = max(item.time for item in transfers)
    return len(sources) == len(transfers) and bool(together) and all(blocks[item].time >= longest for item in sources)
