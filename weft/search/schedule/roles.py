"""What each block of a schedule problem is: forward or backward, of which stage of which pipeline.

Names say nothing here; structure does. A training micro-batch is its own mirror image: what ran first in the forward
pass comes last in the backward pass, on the same devices. So blocks are paired from both ends, a source of the
dependencies with a sink on the same devices, until none is left:

    f0 (d0) -> f1 (d1) -> b1 (d1) -> b0 (d0)      pairs: f0-b0, then f1-b1

A weight gradient hangs off that picture: a leaf, all of whose predecessors are on its own devices; such leaves are set
aside where the whole is no mirror image with them. A pipeline without any mirror image runs forward only. Blocks that
no dependency connects belong to different pipelines. Branches (two encoders and a joint block) are pipelines as well:
stages are numbered by their depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum

from weft.search.schedule.problem import ScheduleProblem


class Role(Enum):
    """What a block does for its stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The blocks of one stage of a pipeline; the stages of a pipeline are in order of ``depth``."""

    devices: tuple[int, ...]
    forward: int
    backward: int | None
    """The whole backward, or the input gradient if ``weight`` is there; None if the pipeline runs forward only."""
    weight: int | None
    depth: int
    """Stages before it on the longest way from the start."""
    chunk: int
    """How many stages of the pipeline come before it on its devices."""
    is_shared: bool
    """Whether it spans the devices of other stages: an all-device block, a step of its own for all of them."""
    before: tuple[int, ...]
    """Positions, in the pipeline, of the stages whose forward its own forward needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Blocks that depend on each other."""

    stages: tuple[Stage, ...]

    @property
    def is_training(self) -> bool:
        """Return whether it has backward blocks."""
        return all(stage.backward is not None for stage in self.stages)

    @property
    def is_split(self) -> bool:
        """Return whether the backward of some stage is split into input and weight gradient."""
        return any(stage.weight is not None for stage in self.stages)

    @property
    def is_chain(self) -> bool:
        """Return whether every stage but the first needs the one before it."""
        return all(place == 0 or place - 1 in stage.before for place, stage in enumerate(self.stages))

    @property
    def has_shared(self) -> bool:
        """Return whether some stage spans the devices of others."""
        return any(stage.is_shared for stage in self.stages)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each stage that spans no others."""
        return tuple(stage.devices for stage in self.stages if not stage.is_shared)

    @property
    def width(self) -> int:
        """Return over how many places (sets of devices) it goes."""
        return len(set(self.places))

    @property
    def all_devices(self) -> frozenset[int]:
        """Return every device that it uses."""
        return frozenset(device for stage in self.stages for device in stage.devices)

    def heights(self) -> tuple[int, ...]:
        """Return for each stage the stages, but shared ones, on the longest way from it (included) to the end."""
        result = [0] * len(self.stages)
        for place in reversed(range(len(self.stages))):
            result[place] += 0 if self.stages[place].is_shared else 1
            for before in self.stages[place].before:
                result[before] = max(result[before], result[place])
        return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRole:
    """What one block is."""

    role: Role
    stage: int
    """Its stage's position in the pipeline."""
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The pipelines of a problem."""

    pipelines: tuple[Pipeline, ...]

    @property
    def is_training(self) -> bool:
        """Return whether every pipeline has backward blocks."""
        return all(pipeline.is_training for pipeline in self.pipelines)

    @property
    def is_split(self) -> bool:
        """Return whether some backward is split."""
        return any(pipeline.is_split for pipeline in self.pipelines)

    @property
    def has_shared(self) -> bool:
        """Return whether some stage spans the devices of others."""
        return any(pipeline.has_shared for pipeline in self.pipelines)

    @property
    def are_plain_chains(self) -> bool:
        """Return whether all pipelines are chains of stages that span no others."""
        return not self.has_shared and all(pipeline.is_chain for pipeline in self.pipelines)

    @property
    def longest(self) -> int:
        """Return how many stages the longest pipeline has."""
        return max(len(pipeline.stages) for pipeline in self.pipelines)

    @property
    def are_apart(self) -> bool:
        """Return whether no two pipelines use the same device."""
        used = [device for pipeline in self.pipelines for device in pipeline.all_devices]
        return len(used) == len(set(used))

    @property
    def are_places_apart(self) -> bool:
        """Return whether stages, but shared ones, have the same devices or none in common."""
        places = {place for pipeline in self.pipelines for place in pipeline.places}
        return len({device for place in places for device in place}) == sum(map(len, places))

    def of_blocks(self) -> dict[int, BlockRole]:
        """Return for every block what it is."""
        result = {}
        for place, stage in ((place, stage) for pipeline in self.pipelines
                             for place, stage in enumerate(pipeline.stages)):
            whole = Role.BACKWARD if stage.weight is None else Role.INPUT_GRADIENT
            for role, block in ((Role.FORWARD, stage.forward), (whole, stage.backward),
                                (Role.WEIGHT_GRADIENT, stage.weight)):
                if block is not None:
                    result[block] = BlockRole(role=role, stage=place, chunk=stage.chunk)
        return result


def find_roles(problem: ScheduleProblem) -> Roles | None:
    """Return the pipelines of the problem, in order of their first blocks; None where they are not recognised.

    Pipelines are recognised if all of them train or all of them run forward only.
    """
    graph = _Graph.of(problem)
    parts = graph.components()
    trained = [_find_training(problem, graph, part) for part in parts]
    pipelines = [pipeline for pipeline in trained if pipeline is not None]
    if not pipelines:
        return forward_roles(problem)
    return Roles(pipelines=tuple(pipelines)) if len(pipelines) == len(parts) else None


def forward_roles(problem: ScheduleProblem) -> Roles:
    """Return the pipelines of the problem with every block taken for a forward one."""
    graph = _Graph.of(problem)
    return Roles(pipelines=tuple(_pipeline(problem, graph, dict.fromkeys(part), {}) for part in graph.components()))


@dataclass(frozen=True, slots=True)
class _Graph:
    """Dependencies between blocks, those of transfers included."""

    before: tuple[frozenset[int], ...]
    after: tuple[frozenset[int], ...]
    order: tuple[int, ...]
    """Every block after those it needs."""
    shared: frozenset[tuple[int, ...]]
    """The devices of blocks that span those of others."""

    @staticmethod
    def of(problem: ScheduleProblem) -> _Graph:
        order = tuple(task for task in problem.topological if task < problem.num_blocks)
        sets = {block.devices: frozenset(block.devices) for block in problem.blocks}
        shared = frozenset(devices for devices, wide in sets.items()
                           if len(wide) > 1 and any(other < wide for other in sets.values()))
        return _Graph(tuple(frozenset(edge.source for edge in edges) for edges in problem.unlinked.predecessors),
                      tuple(frozenset(edge.target for edge in edges) for edges in problem.unlinked.successors),
                      order, shared)

    def components(self) -> list[list[int]]:
        """Return the blocks that depend on each other, each list in order of dependencies."""
        part_of: dict[int, int] = {}
        for first in range(len(self.before)):
            todo = [first] if first not in part_of else []
            while todo:
                block = todo.pop()
                if block not in part_of:
                    part_of[block] = first
                    todo += [*self.before[block], *self.after[block]]
        parts: dict[int, list[int]] = {first: [] for first in sorted(set(part_of.values()))}
        for block in self.order:
            parts[part_of[block]].append(block)
        return list(parts.values())


def _find_training(problem: ScheduleProblem, graph: _Graph, part: Sequence[int]) -> Pipeline | None:
    """Return the pipeline if its blocks are a mirror image, all of them or all but weight gradients."""
    weights = [block for block in part if not graph.after[block] and graph.before[block]
               and all(problem.blocks[source].devices == problem.blocks[block].devices
                       for source in graph.before[block])]
    for aside in (frozenset[int](), frozenset(weights)):
        backward_of = _pair(problem, graph, [block for block in part if block not in aside])
        weight_of = None if backward_of is None else _weights(graph, backward_of, sorted(aside))
        if backward_of and weight_of is not None and _releases(problem, backward_of, weight_of):
            return _pipeline(problem, graph, backward_of, weight_of)
    return None


def _pair(problem: ScheduleProblem, graph: _Graph, part: Sequence[int]) -> dict[int, int] | None:
    """Return the backward block of every forward block, from the outside in; None if there is no mirror image."""
    devices = [block.devices for block in problem.blocks]
    heads, tails = _End(devices, graph.before, graph.after, part), _End(devices, graph.after, graph.before, part[::-1])
    pairs: dict[int, int] = {}
    paired: set[int] = set()
    todo = [devices[block] for block in part]
    while todo:
        place = todo.pop()
        while heads.free[place] and tails.free[place]:
            source, sink = heads.free[place].pop(0), tails.free[place].pop(0)
            if source == sink:
                return None
            pairs[source] = sink
            paired |= {source, sink}
            todo += [devices[block] for block in (*heads.take(source, paired), *tails.take(sink, paired))]
    return pairs if len(paired) == len(part) and _is_mirrored(graph, pairs) else None


class _End:
    """One end of the blocks that are not yet paired: those that need no other of them, by devices."""

    def __init__(self, devices: Sequence[tuple[int, ...]], before: Sequence[frozenset[int]],
                 after: Sequence[frozenset[int]], part: Sequence[int]) -> None:
        self.devices, self.after = devices, after
        inside = set(part)
        self.num_before = {block: len(before[block] & inside) for block in part}
        self.free: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for block in part:
            if not self.num_before[block]:
                self.free[devices[block]].append(block)

    def take(self, block: int, paired: Set[int]) -> list[int]:
        """Return the blocks that are at this end once the given one is gone."""
        freed = []
        for target in sorted(self.after[block] & self.num_before.keys()):
            self.num_before[target] -= 1
            if not self.num_before[target] and target not in paired:
                self.free[self.devices[target]].append(target)
                freed.append(target)
        return freed


def _is_mirrored(graph: _Graph, backward_of: dict[int, int]) -> bool:
    """Return whether dependencies between backward blocks mirror those between forward blocks, and follow from them."""
    forward_of = {backward: forward for forward, backward in backward_of.items()}
    for forward, backward in backward_of.items():
        if forward in forward_of or any(source in forward_of for source in graph.before[forward]):
            return False
        mirrored = {forward_of[source] for source in graph.before[backward] if source in forward_of}
        needing = {target for target in graph.after[forward] if target in backward_of}
        if not mirrored <= needing or not (mirrored if needing else forward in graph.before[backward]):
            return False
    return True


def _weights(graph: _Graph, backward_of: dict[int, int], weights: Sequence[int]) -> dict[int, int] | None:
    """Return the weight gradient of each backward block that has one; None if they do not belong to one each."""
    backwards = set(backward_of.values())
    result: dict[int, int] = {}
    for block in weights:
        owners = graph.before[block] & backwards
        if len(owners) != 1 or not owners.isdisjoint(result):
            return None
        result[next(iter(owners))] = block
    return result


def _releases(problem: ScheduleProblem, backward_of: dict[int, int], weight_of: dict[int, int]) -> bool:
    """Return whether no forward gives memory back and no backward, with its weight gradient, takes more."""
    memory = [block.memory for block in problem.blocks]
    return all(memory[forward] >= 0 and memory[backward] + (memory[weight_of[backward]] if backward in weight_of else 0)
               <= 0 for forward, backward in backward_of.items())


def _pipeline(problem: ScheduleProblem, graph: _Graph, backward_of: dict[int, int] | dict[int, None],
              weight_of: dict[int, int]) -> Pipeline:
    """Return the pipeline of these forward blocks, by depth."""
    depth: dict[int, int] = {}
    for block in graph.order:
        if block in backward_of:
            depth[block] = max((depth[source] + 1 for source in graph.before[block] if source in depth), default=0)
    forwards = sorted(depth, key=lambda block: (depth[block], problem.blocks[block].devices, block))
    place_of = {block: place for place, block in enumerate(forwards)}
    chunks: dict[tuple[int, ...], int] = defaultdict(int)
    stages = []
    for block in forwards:
        devices = problem.blocks[block].devices
        backward = backward_of[block]
        stages.append(Stage(
            devices=devices, forward=block, backward=backward,
            weight=None if backward is None else weight_of.get(backward), depth=depth[block], chunk=chunks[devices],
            is_shared=devices in graph.shared,
            before=tuple(sorted(place_of[source] for source in graph.before[block] if source in place_of))))
        chunks[devices] += 1
    return Pipeline(stages=tuple(stages))
