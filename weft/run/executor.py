"""Executes one rank's part of a program, step after step, and measures it.

A step is the rank's list of closures (``weft.run.bind``), called in order; before each one the rank notes where it is,
so that a failure can be named. Times are taken around every instruction: computes begin when what they need has
arrived; a message or collective ends when the rank sees that it has ended, which may be late, so ``measured_timeline``
takes the earliest that any side saw. On a GPU the rank queues its instructions and goes on; times are those of the
device (``weft.run.clock``). It waits where a value is read, and where a message comes by way of the host's memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.base.errors import RunError
from weft.model.graph import F64
from weft.model.source import ModelSource
from weft.plan.program import Op, Program
from weft.run.bind import Binder
from weft.run.clock import Clock
from weft.run.optimizers import make_optimizer
from weft.run.parameters import StateShares
from weft.run.prepare import Prepared
from weft.run.status import Labels, Milestone
from weft.run.transport import Transport
from weft.run.wiring import Given
from weft.simulate.timeline import Timeline, make_timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When the instructions of one rank ran in one step, in seconds of rank 0's clock."""

    start_s: F64
    end_s: F64

    @property
    def span_s(self) -> tuple[float, float]:
        """Return the first start and the last end; an empty span where the rank has no instruction."""
        return (float(self.start_s.min()), float(self.end_s.max())) if len(self.start_s) else (math.inf, -math.inf)


class Executor:
    """The steps of one rank."""

    def __init__(self, prepared: Prepared, transport: Transport) -> None:
        program = prepared.program
        self.program, self.transport, self.parameters = program, transport, prepared.parameters
        ranges = list(itertools.pairwise(program.rank_start.tolist()))
        num_own = ranges[transport.rank][1] - ranges[transport.rank][0]
        self.clock = Clock(transport.device)
        self._starts, self._ends = self.clock.moments(num_own), self.clock.moments(num_own)
        self.shares = StateShares(program, prepared.parameters, transport)
        graph = program.graph  # without gradients from the loss, parameters never change, as on one device
        reached = {graph.tensor_names[item] for item in graph.inputs[graph.on_path_to_loss[graph.consumer_op]].tolist()}
        self.trained = [item for name, item in self.shares.tensors.items() if item.requires_grad and name in reached]
        """What an optimizer changes on this rank."""
        self.optimizer = make_optimizer(self.trained, program.plan.optimizer)
        self.binder = Binder(prepared, transport, optimizer=self.optimizer, shares=self.shares, clock=self.clock,
                             starts=self._starts, ends=self._ends)
        self._training = program.plan.model.mode == "training"
        self._names: Labels = lambda rank: [program.label(index) for index in range(*ranges[rank])]
        transport.status.name_instructions(self._names)

    def load(self, inputs: Mapping[str, Tensor]) -> None:
        """Take the inputs of the whole batch; each forward gets its samples of them."""
        for place in self.binder.given:
            place.arguments[place.place] = samples_of(
                inputs[place.name], place, batch=self.program.plan.model.batch).to(self.transport.device)

    def step(self, number: int = 0) -> None:
        """Execute the rank's instructions once."""
        status = self.transport.status
        cell, status.labels = status.cell, self._names
        cell[1] = number
        cell[3] += 1
        if self._training:
            self.parameters.clear_gradients()
            self._run(cell)
        else:
            with torch.inference_mode():
                self._run(cell)
        cell[0] = Milestone.WAITING

    def _run(self, cell: memoryview[int]) -> None:
        starts, ends, now = self._starts, self._ends, self.clock.now
        self.clock.begin()
        moment = now()
        for position, action in enumerate(self.binder.actions):
            cell[0] = position
            starts[position] = moment
            action()
            moment = ends[position] = now()
        self.binder.finish()

    def take_loss(self) -> float:
        """Return the rank's part of the batch's loss since the last call; the parts of all ranks add up to it."""
        losses = self.binder.losses
        total = sum((float(loss.double()) * weight for loss, weight in losses), 0.0)
        losses.clear()
        return total

    def take_results(self) -> list[tuple[int, int, dict[str, Tensor]]]:
        """Return (instance, micro-batch, outputs of the model by tensor) of an inference step, and forget them."""
        results = list(self.binder.results)
        self.binder.results.clear()
        return results

    def step_times(self, clock_offset_s: float) -> StepTimes:
        """Return when the instructions of the last step ran."""
        start_ns, end_ns = self.clock.read(self._starts, self._ends)
        return StepTimes(start_s=start_ns * 1e-9 + clock_offset_s, end_s=end_ns * 1e-9 + clock_offset_s)


def loaded_executor(prepared: Prepared, source: ModelSource, transport: Transport, *, seed: int = 0,
                    adjust: Callable[[Executor], None] | None = None) -> Executor:
    """Return the executor of a rank with the model's inputs; ``adjust`` may change it, for tests."""
    executor = Executor(prepared, transport)
    inputs = source.inputs(prepared.program.plan.model.batch, seed)
    executor.load(dict(zip(prepared.input_names, inputs, strict=True)))
    if adjust is not None:
        adjust(executor)
    return executor


def samples_of(value: Tensor, place: Given, *, batch: int) -> Tensor:
    """Return the samples that a forward takes of an input of the whole batch; all of it where none is the batch."""
    if tuple(value.shape) == place.shape:
        return value
    for dim, (size, wanted) in enumerate(zip(value.shape, place.shape, strict=False)):
        if size != wanted:
            per_sample, rest = divmod(wanted, place.num_samples)
            if rest or per_sample * batch != size or len(value.shape) != len(place.shape):
                break
            return value.narrow(dim, place.first_sample * per_sample, wanted)
    raise RunError(f"input {place.name!r} has the shape {tuple(value.shape)} for {batch} samples but "
                   f"{place.shape} for {place.num_samples}: no dimension is the batch")


def measured_timeline(program: Program, times: Sequence[StepTimes]) -> Timeline:
    """Return the timeline of a step from what every rank has measured.

    A message is under way from when both sides have issued it until the first of them sees that it is done, a
    collective likewise over its members.
    """
    start = np.concatenate([item.start_s for item in times])
    end = np.concatenate([item.end_s for item in times])
    origin = start.min() if len(start) else 0.0
    start, end = start - origin, end - origin
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in np.flatnonzero((program.op != Op.COMPUTE) & (program.op != Op.STEP)).tolist():
        key = (program.bucket[index],) if program.op[index] == Op.COLLECTIVE else (
            program.channel[index], program.microbatch[index])
        groups.setdefault(key, []).append(index)
    for members in groups.values():
        start[members] = start[members].max()
        end[members] = max(float(end[members].min()), float(start[members[0]]))
    return make_timeline(program, start_s=start, end_s=end, kind="measured")
