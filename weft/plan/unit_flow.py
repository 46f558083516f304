"""When what a unit gathers and adds up is there, and who waits for its collectives: for the account, the simulator and
the runtime alike.

On a rank, in the order of its instructions:

- gathered parameters are there from their gather to the last compute before the unit's next gather that needs them:
  forwards, backwards, and both parts of split ones (gradients of a norm's weights need these);
- where gradients are scattered after each backward, whole gradients are there from the first backward since the last
  scattering to when the next is done. That is known when the rank comes to its next scattering of any unit, to the next
  backward of this unit, or to the end of its computes, because there it is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.program import Instruction, Op, Phase, Program
from weft.plan.units import Unit


@dataclass(frozen=True, slots=True)
class Span:
    """Something of a unit that a rank has from one instruction to another, both included."""

    unit: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlow:
    """The units of one rank; instructions are known by their places in the program's columns."""

    gathered: tuple[Span, ...]
    gradients: tuple[Span, ...]
    """Whole gradients that come and go."""
    waits: tuple[tuple[int, int], ...]
    """(instruction, collective that is waited for when it begins)."""


def unit_flows(program: Program) -> list[RankFlow]:
    """Return what each rank has of its units, and when; ranks with like lists have the same, at other places."""
    known: dict[tuple[object, ...], tuple[int, RankFlow]] = {}
    stage_of = np.asarray([item.stage for item in program.instances], dtype=np.int32)
    result = []
    for rank in range(program.num_ranks) if program.units else ():
        part = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
        is_compute = program.op[part] == Op.COMPUTE
        columns = (program.op[part], program.phase[part], np.where(is_compute, stage_of[program.instance[part]], -1),
                   np.where(is_compute, 0, program.bucket[part]))
        units = tuple(index for index, unit in enumerate(program.units) if rank in unit.ranks)
        key = units, *(column.tobytes() for column in columns)
        if key not in known:
            known[key] = part.start, unit_flow(program, rank)
        start, flow = known[key]
        result.append(flow if start == part.start else _moved(flow, part.start - start))
    return result or [RankFlow(gathered=(), gradients=(), waits=())] * program.num_ranks


def _moved(flow: RankFlow, by: int) -> RankFlow:
    gathered, gradients = (tuple(Span(item.unit, item.first + by, item.last + by) for item in spans)
                           for spans in (flow.gathered, flow.gradients))
    return RankFlow(gathered=gathered, gradients=gradients, waits=tuple((at + by, to + by) for at, to in flow.waits))


def unit_flow(program: Program, rank: int) -> RankFlow:
    """Return what a rank has of its units, and when."""
    walk = _Walk(program, rank)
    if walk.units:
        for item in program.instructions(rank):
            walk.take(item)
        walk.finish()
    return RankFlow(gathered=tuple(walk.gathered), gradients=tuple(walk.gradients),
                    waits=tuple(walk.waits))


class _Walk:
    """Where a walk through a rank's instructions is."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.units: list[tuple[int, Unit]] = [(index, unit) for index, unit in enumerate(program.units)
                                              if rank in unit.ranks]
        self.of_stage: dict[int, list[tuple[int, Unit]]] = {}
        for index, unit in self.units:
            for stage in unit.stages:
                self.of_stage.setdefault(stage, []).append((index, unit))
        self.gathered: list[Span] = []
        self.gradients: list[Span] = []
        self.waits: list[tuple[int, int]] = []
        self._gather: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        """By unit the first backward since its last scattering."""
        self._scattering: tuple[int, int, int] | None = None
        """(unit, first backward, scattering) of the one under way."""
        self._end = int(program.rank_start[rank])

    def take(self, item: Instruction) -> None:
        """Go on by one instruction."""
        if item.op == Op.COMPUTE:
            self._compute(item)
        elif item.op == Op.COLLECTIVE:
            bucket = self.program.buckets[item.bucket]
            if bucket.method == "all_gather":
                self._let_go(bucket.units[0])
                self._gather[bucket.units[0]] = item.index
            elif bucket.method == "reduce_scatter":
                self._done(item.index)
                unit = bucket.units[0]
                self._scattering = unit, self._begun.pop(unit, item.index), item.index
        if item.op != Op.STEP:
            self._end = item.index

    def finish(self) -> None:
        """Come to the end, where all is waited for."""
        self._done(self._end + 1, waits=False)
        for index, _ in self.units:
            self._let_go(index)

    def _compute(self, item: Instruction) -> None:
        for index, unit in self.of_stage.get(self.program.instances[item.instance].stage, ()):
            if index in self._gather:
                self.waits.append((item.index, self._gather[index]))
                self._last_use[index] = item.index
            if unit.reduce >= 0 and item.phase != Phase.F and not unit.storage.scatters_once:
                if self._scattering is not None and self._scattering[0] == index:
                    self._done(item.index)
                self._begun.setdefault(index, item.index)

    def _let_go(self, index: int) -> None:
        if index in self._gather:
            first = self._gather.pop(index)
            self.gathered.append(Span(index, first, self._last_use.pop(index, first)))

    def _done(self, at: int, *, waits: bool = True) -> None:
        """Note that an instruction waits for the scattering under way."""
        if self._scattering is None:
            return
        index, begun, scattering = self._scattering
        if waits:
            self.waits.append((at, scattering))
        if not self.program.units[index].storage.scatters_once:
            self.gradients.append(Span(index, begun, at - 1))
        self._scattering = None
