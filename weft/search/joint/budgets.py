"""What a plan that recomputes may keep after all: memory that is left buys back time, tensor by tensor.

Stages that share devices decide together (``weft.search.recompute``): with ``m_s`` micro-batches in flight in stage
``s`` on a device,

    minimise    sum over stages of micro-batches * seconds of what runs again
    subject to  sum of m_s * bytes kept of a micro-batch <= what the device has left, and what the stages keep now

The account says what is left, and checks what was chosen: where it does not fit, less is given out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan, PlanError
from weft.model.graph import F64, I64
from weft.plan.memory import account_memory
from weft.plan.plan import Plan, Replica, Stage, split_samples
from weft.plan.program import Program
from weft.plan.saving import saved_names
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem, evaluate_plan
from weft.search.recompute.choose import Chooser
from weft.search.recompute.pieces import Lent, Piece, PlacedPiece, pieces_of
from weft.search.recompute.stages import AT_ONCE, again_of
from weft.simulate.timeline import Timeline
from weft.simulate.timing import stage_figure

ATTEMPTS: Final = 6
"""Budgets that are tried, from all that is left by halving."""


def with_budgets(plan: Plan, problem: Problem, program: Program, step_time_s: float,
                 budget: Budget | None = None) -> tuple[Plan, Timeline] | None:
    """Return the plan with what its devices have room for kept, simulated; None where that is not faster."""
    if not any(stage.keeps_only_inputs for stage in plan.stages) or plan.model.mode != "training" or plan.compiled:
        return None
    stages = _Stages(plan, problem, program)
    best: tuple[Plan, Timeline] | None = None
    low, share = 0.0, 1.0
    high = share
    for _ in range(ATTEMPTS):
        trial = stages.plan_of(share)
        if trial is None:
            break
        try:
            timeline = evaluate_plan(trial, problem)
        except (NoFeasiblePlan, PlanError):
            high = share
        else:
            low = share
            if timeline.step_time_s < (step_time_s if best is None else best[1].step_time_s):
                best = trial, timeline
        if low >= high or (budget is not None and budget.is_spent):
            break
        share = (low + high) / 2
    return best


class _Stages:
    """The stages of a plan in groups that share devices, with what each of them may keep."""

    def __init__(self, plan: Plan, problem: Problem, program: Program) -> None:
        self.plan, self.problem, self.graph, self.program = plan, problem, program.graph, program
        account = account_memory(program)
        self.left = {name: _capacity(problem, name) - account.peak_bytes(rank)
                     for rank, name in enumerate(plan.cluster.devices)}
        self.groups = _groups(plan)
        # Of stages that devices divide the account of a choice may say too little: they stay as they are.
        self.again = [index for index, stage in enumerate(plan.stages)
                      if stage.keeps_only_inputs and not stage.sharding]

    def pieces(self, index: int, at_once: int) -> list[PlacedPiece]:
        """Return the pieces of a stage, with bytes and seconds of all micro-batches that are in flight, of a device."""
        stage, ops = self.plan.stages[index], self.program.stage_ops[index]
        seconds, fraction, count = self._seconds(stage), self._fraction(stage), self._in_flight(stage)
        degree = max(len(replica.devices) for replica in stage.replicas)
        placed = pieces_of(self.graph, ops, seconds=seconds, fraction=fraction, at_once=at_once)
        return [replace(item, piece=_scaled(item.piece, count / degree)) for item in placed]

    def _fraction(self, stage: Stage) -> float:
        counts = split_samples(self.plan.microbatch_size, tuple(replica.share for replica in stage.replicas))
        return max(counts) / self.graph.batch

    def _seconds(self, stage: Stage) -> F64:
        """Return the forward seconds of every operator on the slowest replica of a stage."""
        costs, cluster = self.problem.costs, self.problem.cluster
        columns = {costs.column_of_device[cluster.device_index[name]] for replica in stage.replicas
                   for name in replica.devices}
        table = costs.op_seconds("F", self._fraction(stage))
        return np.asarray(max((table[:, column] for column in sorted(columns)), key=lambda item: float(item.sum())))

    def _in_flight(self, stage: Stage) -> int:
        """Return for how many micro-batches the stage keeps something at once."""
        most = now = 0
        for token in self.plan.order[stage.replicas[0].devices[0]]:
            name, phase, _ = token.split(":")
            if name == stage.name:
                now += (phase == "F") - (phase in "BI")
                most = max(most, now)
        return most

    def plan_of(self, share: float) -> Plan | None:
        """Return the plan in which this share of what is left is kept; None if nothing changes."""
        stages = list(self.plan.stages)
        for group in self.groups:
            own = [index for index in group if index in self.again]
            found = self._chosen(own, share) if own else None
            if found is not None:
                for index in own:
                    ops = self.program.stage_ops[index]
                    stages[index] = self._stage(stages[index], ops, ops[np.isin(ops, found)])
        plan = replace(self.plan, stages=tuple(stages))
        return None if plan == self.plan else plan

    def _chosen(self, own: Sequence[int], share: float) -> I64 | None:
        """Return what runs again in stages that share devices; None if there is no room for what would be kept.

        Where a stage runs again as a whole, all of it is there at once; piece by piece there is less.
        """
        devices = {name for index in own for replica in self.plan.stages[index].replicas for name in replica.devices}
        left = min(self.left[name] for name in devices)
        for at_once in AT_ONCE:
            by_stage = [self.pieces(index, at_once) for index in own]
            placed = [item for items in by_stage for item in items]
            chooser = Chooser([item.piece for item in placed])
            whole = max(sum(item.piece.total_bytes for item in items) / self._in_flight(self.plan.stages[index])
                        for index, items in zip(own, by_stage, strict=True))
            room = chooser.most_bytes if not np.isfinite(left) else share * (left + whole)
            if chooser.least_bytes <= room:
                return again_of(chooser(min(room, chooser.most_bytes), closely=False), placed)
        return None

    def _stage(self, stage: Stage, ops: I64, again: I64) -> Stage:
        """Return the stage in which these operators run again, with its times."""
        names = saved_names(self.graph, ops, again) if len(again) else ()
        changed = replace(stage, recompute=bool(len(again)), saved=names)
        if len(again) and not names:
            return stage
        counts = split_samples(self.plan.microbatch_size, tuple(replica.share for replica in stage.replicas))
        return replace(changed, replicas=tuple(
            replace(replica, times=self._times(stage, replica, ops, again, count / self.graph.batch))
            for replica, count in zip(stage.replicas, counts, strict=True)))

    def _times(self, stage: Stage, replica: Replica, ops: I64, again: I64, fraction: float) -> Mapping[str, float]:
        costs, cluster = self.problem.costs, self.problem.cluster
        devices = [cluster.device_index[name] for name in replica.devices]
        if not stage.sharding:
            return {phase: stage_figure(costs, ops, devices, phase, fraction=fraction, again=again, sharded=False
                                        ).seconds for phase in ("F", "B", "I", "W")}
        forward = costs.op_seconds("F", fraction)[:, costs.column_of_device[devices[0]]]
        saves = replica.times.get("F", 0.0) * (1 - float(forward[again].sum()) / (float(forward[ops].sum()) or 1.0))
        return {phase: max(0.0, seconds - saves) if phase in ("B", "I") else seconds
                for phase, seconds in replica.times.items()}


def _scaled(piece: Piece, factor: float) -> Piece:
    """Return the piece with all bytes so many times as large."""
    return replace(piece, freed=tuple(item * factor for item in piece.freed), lent=tuple(
        Lent(num_bytes=item.num_bytes * factor, maker=item.maker, readers=item.readers) for item in piece.lent))


def _capacity(problem: Problem, name: str) -> float:
    size = problem.cluster.devices[problem.cluster.device_index[name]].memory_bytes
    return float("inf") if size is None else float(size)


def _groups(plan: Plan) -> Sequence[Sequence[int]]:
    """Return the stages in groups that share devices."""
    group = list(range(len(plan.stages)))
    owner: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for name in (name for replica in stage.replicas for name in replica.devices):
            first = owner.setdefault(name, group[index])
            if group[first] != group[index]:
                group = [group[first] if item == group[index] else item for item in group]
    return [[index for index, item in enumerate(group) if item == number] for number in dict.fromkeys(group)]


