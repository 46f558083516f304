"""Simple strategies to plan with and to compare against: one device, data parallel, pipelines cut evenly or by cost.

Each strategy is a function from a problem and a number of micro-batches to a plan; ``STRATEGIES`` names them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, Bool
from weft.plan.check import excess_bytes
from weft.plan.op_bytes import state_by_op
from weft.plan.orders import gpipe
from weft.plan.plan import Plan, split_samples
from weft.search.common.degrees import Degrees
from weft.search.common.problem import (
    Problem,
    StageSpec,
    block_of,
    fair_samples,
    make_plan,
    one_stage,
    pipeline_order,
)
from weft.search.joint.chain import Chain, Load
from weft.search.joint.cut import emptiest_fullest, shortest_period
from weft.search.joint.pieces import fsdp

Strategy = Callable[[Problem, int], Plan]

def single_device(problem: Problem, microbatches: int) -> Plan:
    """Return the plan that runs everything on the fastest device with enough memory, else that with most of it."""
    size, devices = problem.options.batch / microbatches, problem.cluster.devices
    by_speed = sorted(problem.devices, key=lambda device: (problem.device_seconds(device, size), device))
    largest = max(by_speed, key=lambda device: devices[device].memory_bytes or math.inf)
    alike = {(devices[device].kind, devices[device].memory_bytes): device for device in reversed(by_speed)}
    for device in sorted(alike.values(), key=by_speed.index):
        spec = StageSpec(ops=np.arange(problem.graph.num_ops), replicas=(((device,), 1.0),))
        plan = one_stage(problem, spec, microbatches, by="single")
        if device == largest or not excess_bytes(plan, problem.graph, problem.cluster):
            break
    return plan


def data_parallel(problem: Problem, microbatches: int) -> Plan:
    """Return the plan that copies the model to every device and divides each micro-batch evenly."""
    even = split_samples(problem.options.batch // microbatches, (1.0,) * len(problem.devices))
    return _replicated(problem, microbatches, even, by="data-parallel")


def data_parallel_by_speed(problem: Problem, microbatches: int) -> Plan:
    """Return the same with shares by speed, in whole samples, so that all devices end at about the same time."""
    counts = fair_samples(problem.options.batch // microbatches, len(problem.devices), problem.device_seconds)
    return _replicated(problem, microbatches, counts, by="data-parallel-by-speed")


def _replicated(problem: Problem, microbatches: int, counts: Sequence[int], *, by: str) -> Plan:
    size = problem.options.batch // microbatches
    used = [(device, count) for device, count in zip(problem.devices, counts, strict=True) if count]
    if len(problem.devices) < 2:
        raise NoFeasiblePlan("data parallelism needs 2 or more devices; the cluster has 1")
    if len(used) < 2:
        raise NoFeasiblePlan(f"data parallelism needs 2 or more samples in each micro-batch, not {size}: "
                             "use a larger batch or fewer micro-batches")
    spec = StageSpec(ops=np.arange(problem.graph.num_ops),
                     replicas=tuple(((device,), count / size) for device, count in used))
    return one_stage(problem, spec, microbatches, by=by)


def gpipe_equal(problem: Problem, microbatches: int) -> Plan:
    """Return GPipe over stages with equal numbers of layers."""
    return pipeline(problem, microbatches, equal_cuts(problem), by="gpipe")


def one_f_one_b_equal(problem: Problem, microbatches: int) -> Plan:
    """Return 1F1B over stages with equal numbers of layers."""
    return pipeline(problem, microbatches, equal_cuts(problem), by="1f1b")


def one_f_one_b_balanced(problem: Problem, microbatches: int) -> Plan:
    """Return 1F1B over stages cut so that its period is as short as possible and memory fits."""
    return pipeline(problem, microbatches, balanced_cuts(problem, microbatches), by="1f1b-balanced")


def pipeline(problem: Problem, microbatches: int, cuts: Sequence[int], *, by: str) -> Plan:
    """Return the pipeline with operators ``cuts[i] .. cuts[i + 1] - 1`` on device ``i``; empty stages are left out."""
    used = [(device, first, last) for device, (first, last) in enumerate(itertools.pairwise(cuts)) if last > first]
    if len(problem.devices) < 2 or not used:
        raise NoFeasiblePlan(f"a pipeline needs 2 or more devices; the cluster has {len(problem.devices)}")
    devices = [problem.devices[device] for device, _, _ in used]
    specs = [StageSpec(ops=np.arange(first, last), replicas=(((problem.devices[device],), 1.0),))
             for device, first, last in used]
    order = gpipe(len(specs), microbatches) if by == "gpipe" and problem.is_training else pipeline_order(
        len(specs), 1, microbatches, training=problem.is_training)
    return make_plan(problem, specs, order, microbatches=microbatches, by=by, order_devices=devices)


def equal_cuts(problem: Problem) -> list[int]:
    """Return cuts that give each stage the same number of repeated layers, or of operators where nothing repeats.

    What comes before the first layer goes to the first stage, what comes after the last to the last.
    """
    graph, num_stages = problem.graph, min(len(problem.devices), problem.graph.num_ops)
    blocks = [block_of(module) for module in graph.op_modules]
    starts: dict[str, int] = {}
    for op, block in enumerate(blocks):
        if block.rpartition(".")[2].isdigit():
            starts.setdefault(block, op)
    firsts = sorted(starts.values())
    if len(firsts) < num_stages:
        return [round(index * graph.num_ops / num_stages) for index in range(num_stages + 1)]
    cuts = [firsts[round(index * len(firsts) / num_stages)] for index in range(1, num_stages)]
    return [0, *cuts, graph.num_ops]


def balanced_cuts(problem: Problem, microbatches: int) -> list[int]:
    """Return cuts of the model into stages on all devices in order, with the smallest possible period of 1F1B."""
    room = Room(devices=problem.devices, memory=tuple(device.memory_bytes for device in problem.cluster.devices))
    chain = Chain(problem, num_stages=len(room.devices))
    return [int(place) for place in chain.places[PipelineCutter(chain, microbatches, room).balanced()]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where stages go: a device for each, in order, and what the stages on it may take."""

    devices: tuple[DeviceId, ...]
    """A device may be there more than once."""
    memory: tuple[float | None, ...]
    """Of each stage; None for no limit."""

    @property
    def memory_of_device(self) -> dict[DeviceId, float]:
        """Return what the stages of each device may take together, infinite for no limit."""
        result = dict.fromkeys(self.devices, 0.0)
        for device, memory in zip(self.devices, self.memory, strict=True):
            result[device] += math.inf if memory is None else memory
        return result


class PipelineCutter:
    """Cuts a chain into a pipeline with one stage for each device of ``room``."""

    def __init__(self, chain: Chain, microbatches: int, room: Room) -> None:
        self.chain, self.room, self.num_stages, self.microbatches = chain, room, len(room.devices), microbatches
        self.size = chain.problem.options.batch / microbatches
        self.in_flight = [min(microbatches, self.num_stages - stage) for stage in range(self.num_stages)]

    def need(self, stage: int, begin: int) -> F64:
        """Return what a stage takes from a place to each place from there on."""
        load = Load(num_samples=self.size, in_flight=self.in_flight[stage], microbatches=self.microbatches,
                    is_alone=True, recompute=self.chain.problem.options.recompute)
        return self.chain.stage_bytes((self.room.devices[stage],), begin, load)

    def balanced(self) -> list[int]:
        """Return the operators at which stages begin, and the end, for the smallest possible period of 1F1B.

        At most one stage for each device in order. A device may stay without one.
        """
        times = [self.chain.step_seconds(device, self.size) for device in self.room.devices]
        cuts = shortest_period(times, self.chain.crossing_seconds(self.size, self.room.devices),
                               [self._may(stage) for stage in range(self.num_stages)], self.in_flight)
        if cuts is None:
            raise self._error()
        return cuts

    def emptiest(self) -> list[int]:
        """Return the cuts that leave most free on the fullest device, with a stage on each."""
        capacity = np.asarray([math.inf if memory is None else memory for memory in self.room.memory])
        return emptiest_fullest(self.need, capacity, self.chain.num_places)

    def _may(self, stage: int) -> Bool:
        """Return by place where the stage begins and place where it ends whether it fits."""
        capacity, count = self.room.memory[stage], self.chain.num_places
        may = np.triu(np.ones((count, count), dtype=np.bool_), 1)
        if capacity is not None:
            for begin in range(count):
                may[begin, begin + 1:] = self.need(stage, begin)[1:] <= capacity
        return may

    def _error(self) -> NoFeasiblePlan:
        """Return what is missing for the whole model."""
        problem, capacities = self.chain.problem, self.room.memory_of_device
        state = float(state_by_op(problem.graph, problem.options.optimizer if problem.is_training else None)[
            self.chain.ops].sum())
        need, total = float(self.need(self.num_stages - 1, 0)[-1]), sum(capacities.values())
        missing = f"{format_bytes(need - total)} too little" if need > total else "too little for whole operators"
        advice = "" if problem.options.recompute or not problem.is_training else ", recomputation"
        return NoFeasiblePlan(
            f"the model needs {format_bytes(need)} (parameters, gradients and optimizer state {format_bytes(state)},"
            f" the rest for one micro-batch), the {len(capacities)} devices have {format_bytes(total)} in all: "
            f"{missing}. Try more micro-batches{advice}, or more devices.", missing_bytes=max(0, int(need - total)))


def admits(degrees: Degrees, name: str, num_devices: int) -> bool:
    """Return whether the strategy's plans for so many devices have the degrees."""
    is_replicated = name in ("data-parallel", "data-parallel-by-speed", "fsdp")
    dp, pp = num_devices if is_replicated else 1, 1 if is_replicated or name == "single" else num_devices
    is_size_known = degrees.microbatch_size is None or degrees.dp is not None
    if name == "fsdp":
        return is_size_known and degrees.admit(tp=1, cp=1, pp=pp, dp=dp, interleave=1, zero=3, zero_group="all")
    return is_size_known and (degrees.zero or 0) < 2 and degrees.admit(tp=1, cp=1, pp=pp, dp=dp, interleave=1)


STRATEGIES: Final[dict[str, Strategy]] = {
    "single": single_device,
    "data-parallel": data_parallel,
    "data-parallel-by-speed": data_parallel_by_speed,
    "fsdp": fsdp,
    "gpipe": gpipe_equal,
    "1f1b": one_f_one_b_equal,
    "1f1b-balanced": one_f_one_b_balanced,
}
"""Strategies by name, in the order of the comparison."""
