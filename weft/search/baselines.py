"""Simple strategies to plan with and to compare against: one device, data parallel, pipelines cut evenly or by cost.

Each strategy is a function from a problem and a number of micro-batches to a plan; ``STRATEGIES`` names them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64, Graph, TensorRole
from weft.plan.memory import optimizer_bytes
from weft.plan.orders import Order, forward_only, gpipe, one_f_one_b
from weft.plan.plan import Plan, split_samples
from weft.search.common.fair import fair_samples
from weft.search.common.problem import Problem, StageSpec, block_of, make_plan

Strategy = Callable[[Problem, int], Plan]

MAX_CUT_PLACES: Final = 256
"""So many places to cut at are considered in a long model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Operators to be cut into a pipeline."""

    ops: I64
    """In topological order."""
    devices: tuple[DeviceId, ...]
    """One for each stage, in order; a device may be there more than once."""
    memory: tuple[float | None, ...]
    """What each stage may take; None for no limit."""

    @property
    def memory_of_device(self) -> dict[DeviceId, float]:
        """Return what the stages of each device may take together, 0 for no limit."""
        result = dict.fromkeys(self.devices, 0.0)
        for device, memory in zip(self.devices, self.memory, strict=True):
            result[device] += memory or 0.0
        return result


def whole_model(problem: Problem) -> Segment:
    """Return all operators, for one stage on each device."""
    return Segment(ops=np.arange(problem.graph.num_ops), devices=problem.devices,
                   memory=tuple(device.memory_bytes for device in problem.cluster.devices))


def single_device(problem: Problem, microbatches: int) -> Plan:
    """Return the plan that runs everything on the fastest device with enough memory for the parameters."""
    size = problem.options.batch / microbatches
    fits = [device for device in problem.devices if _holds_parameters(problem, device)] or list(problem.devices)
    best = min(fits, key=lambda device: (problem.op_seconds(device, size).sum(), device))
    spec = StageSpec(ops=np.arange(problem.graph.num_ops), replicas=(((best,), 1.0),))
    order = one_f_one_b(1, microbatches) if problem.is_training else forward_only(1, microbatches)
    return make_plan(problem, [spec], order, microbatches=microbatches, by="single", order_devices=[best])


def _holds_parameters(problem: Problem, device: DeviceId) -> bool:
    memory = problem.cluster.devices[device].memory_bytes
    return memory is None or state_bytes(problem).sum() <= memory


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
    order = one_f_one_b(1, microbatches) if problem.is_training else forward_only(1, microbatches)
    return make_plan(problem, [spec], order * len(used), microbatches=microbatches, by=by,
                     order_devices=[device for device, _ in used])


def gpipe_equal(problem: Problem, microbatches: int) -> Plan:
    """Return GPipe over stages with equal numbers of layers."""
    return _pipeline(problem, microbatches, equal_cuts(problem), by="gpipe")


def one_f_one_b_equal(problem: Problem, microbatches: int) -> Plan:
    """Return 1F1B over stages with equal numbers of layers."""
    return _pipeline(problem, microbatches, equal_cuts(problem), by="1f1b")


def one_f_one_b_balanced(problem: Problem, microbatches: int) -> Plan:
    """Return 1F1B over stages cut so that its period is as short as possible and memory fits."""
    return _pipeline(problem, microbatches, balanced_cuts(problem, microbatches), by="1f1b-balanced")


def _pipeline(problem: Problem, microbatches: int, cuts: Sequence[int], *, by: str) -> Plan:
    """Return the pipeline with operators ``cuts[i] .. cuts[i + 1] - 1`` on device ``i``; empty stages are left out."""
    used = [(device, first, last) for device, (first, last) in enumerate(itertools.pairwise(cuts)) if last > first]
    if len(problem.devices) < 2 or not used:
        raise NoFeasiblePlan(f"a pipeline needs 2 or more devices; the cluster has {len(problem.devices)}")
    devices = [problem.devices[device] for device, _, _ in used]
    specs = [StageSpec(ops=np.arange(first, last), replicas=(((problem.devices[device],), 1.0),))
             for device, first, last in used]
    order: Order
    if not problem.is_training:
        order = forward_only(len(specs), microbatches)
    else:
        order = (gpipe if by == "gpipe" else one_f_one_b)(len(specs), microbatches)
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


def balanced_cuts(problem: Problem, microbatches: int, segment: Segment | None = None) -> list[int]:
    """Return cuts into contiguous stages, at most one per device in order, with the smallest possible period of 1F1B.

    They are places in ``segment.ops``; without a segment, in the whole model on all devices.

    With ``t_i`` the time of stage ``i`` for one micro-batch, ``c_i`` that of the transfers at its end, and at most
    ``k_i = min(m, p - i)`` micro-batches in flight from stage ``i`` on, the period per micro-batch is no less than

        max over i of  max(t_i, 2 c_i, (t_i + 2 c_i + t_{i+1} + 2 c_{i+1} + ...) / k_i)

    For a trial period, ``_cuts_within`` finds cuts that keep to it and to each device's memory, or none; bisection
    finds the smallest. A device may stay without a stage. Long models are cut only at some places (``cut_places``).
    """
    segment = segment or whole_model(problem)
    size = problem.options.batch / microbatches
    places = cut_places(problem, segment)
    times = [prefix_sums(problem.op_seconds(device, size)[segment.ops])[places] for device in segment.devices]
    cut_times = cut_seconds(problem, size, segment)[places]
    limits = MemoryLimits(problem, size, microbatches, segment)
    reach = [limits.reach(stage, places) for stage in range(len(times))]
    lowest, highest = 0.0, max(float(time[-1]) for time in times) + 2 * float(cut_times.sum())
    best = _cuts_within(highest, times, cut_times, reach, limits.in_flight)
    if best is None:
        raise limits.error()
    while highest - lowest > 1e-6 * highest:
        middle = (lowest + highest) / 2
        cuts = _cuts_within(middle, times, cut_times, reach, limits.in_flight)
        lowest, highest = (lowest, middle) if cuts is not None else (middle, highest)
        best = best if cuts is None else cuts
    return [int(places[index]) for index in best]


def cut_places(problem: Problem, segment: Segment) -> I64:
    """Return the operators before which stages may begin: all, or of many those with least to send among neighbours."""
    graph, num_ops = problem.graph, len(segment.ops)
    wanted = max(MAX_CUT_PLACES, 2 * len(segment.devices))
    if num_ops <= wanted:
        return np.arange(num_ops + 1)
    load = prefix_sums(problem.op_seconds(segment.devices[0], graph.batch)[segment.ops])
    bucket = np.minimum((load / load[-1] * wanted).astype(np.int64), wanted - 1)
    order = np.lexsort((np.arange(num_ops + 1), cut_seconds(problem, graph.batch, segment), bucket))
    first = np.concatenate(([True], np.diff(bucket[order]) > 0))
    return np.union1d(order[first], [0, num_ops])


def _cuts_within(period: float, times: Sequence[F64], cut_times: F64, reach: Sequence[I64],
                 in_flight: Sequence[int]) -> list[int] | None:
    """Return indices of places that cut the model into one stage per device with at most this period, or None.

    From the last device to the first, ``rest[a]`` is the least time from the begin of a stage at place ``a`` to the end
    of the model and back; a stage ``a .. b`` is allowed if its own time, its transfers and its ``rest`` keep to the
    period. Less is always better for the stages before, so the least is all that has to be kept.
    """
    num_places = len(cut_times)
    index = np.arange(num_places)
    rest = np.where(index == num_places - 1, 0.0, np.inf)
    choices: list[I64] = []
    slack = period * (1 + 1e-12)
    for stage in reversed(range(len(times))):
        load = times[stage][None, :] - times[stage][:, None]
        total = load + 2 * cut_times[None, :] + rest[None, :]
        allowed = (index[None, :] > index[:, None]) & (load <= slack) & (2 * cut_times[None, :] <= slack)
        allowed &= (index[None, :] <= reach[stage][:, None]) & (total <= in_flight[stage] * slack)
        np.fill_diagonal(total, rest)  # no stage on this device
        np.fill_diagonal(allowed, True)
        total[~allowed] = np.inf
        choice = np.argmin(total, axis=1)
        choices.append(choice)
        rest = total[index, choice]
    if not np.isfinite(rest[0]):
        return None
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return cuts


class MemoryLimits:
    """How far a stage may reach before its device is full, by prefix sums."""

    def __init__(self, problem: Problem, size: float, microbatches: int, segment: Segment) -> None:
        self.segment = segment
        graph = problem.graph
        scale = size / graph.batch
        saved = np.zeros(graph.num_ops)
        if problem.is_training:
            kept = np.flatnonzero(graph.is_saved & (graph.tensor_producer >= 0) & (graph.tensor_base < 0))
            np.add.at(saved, graph.tensor_producer[kept], graph.tensor_bytes[kept] * scale)
        self.state, self.saved = prefix_sums(state_bytes(problem)[segment.ops]), prefix_sums(saved[segment.ops])
        num_stages = len(segment.devices)
        self.in_flight = [min(microbatches, num_stages - stage) for stage in range(num_stages)]

    def reach(self, stage: int, places: I64) -> I64:
        """Return, for a stage that begins at each place, the last place at which it may end."""
        capacity = self.segment.memory[stage]
        if capacity is None:
            return np.full(len(places), len(places) - 1)
        used = (self.state + self.saved * self.in_flight[stage])[places]
        return np.searchsorted(used, used + capacity, side="right") - 1

    def bytes_of(self, stage: int, first: int, last: int) -> float:
        """Return what the stage takes with the operators from ``first`` up to ``last``."""
        return float(self.state[last] - self.state[first]
                     + (self.saved[last] - self.saved[first]) * self.in_flight[stage])

    def error(self) -> NoFeasiblePlan:
        """Return what is missing for the whole model."""
        total = sum(self.segment.memory_of_device.values())
        need = float(self.state[-1] + self.saved[-1])
        missing = f"{format_bytes(need - total)} too little" if need > total else "too little for whole operators"
        state = format_bytes(self.state[-1])
        return NoFeasiblePlan(
            f"the model needs {format_bytes(need)} (parameters, gradients and optimizer state {state}, activations of "
            f"one micro-batch {format_bytes(self.saved[-1])}), the {len(self.segment.memory_of_device)} devices have "
            f"{format_bytes(total)} "
            f"in all: {missing}. Try more micro-batches, recomputation, or more devices.",
            missing_bytes=max(0, int(need - total)))


def prefix_sums(values: F64) -> F64:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def state_bytes(problem: Problem) -> F64:
    """Return parameter, gradient and optimizer bytes, each counted at the first operator that reads the parameter."""
    graph = problem.graph
    result = np.zeros(graph.num_ops)
    is_parameter = graph.tensor_role[graph.inputs] == TensorRole.PARAMETER
    tensors, first = np.unique(graph.inputs[is_parameter], return_index=True)
    ops = graph.consumer_op[is_parameter][first]
    for tensor, op in zip(tensors.tolist(), ops.tolist(), strict=True):
        size = int(graph.tensor_bytes[tensor])
        extra = size + optimizer_bytes(graph, tensor, problem.options.optimizer) if problem.is_training else 0
        result[op] += size + extra
    return result


def cut_seconds(problem: Problem, size: float, segment: Segment) -> F64:
    """Return, for a cut before each operator, the time of its transfers in one direction, on the slowest neighbours."""
    num_ops = len(segment.ops)
    num_bytes = crossing_bytes(problem.graph, segment.ops) * (size / problem.graph.batch)
    pairs = [(a, b) for a, b in itertools.pairwise(segment.devices) if a != b]
    if not pairs:
        return np.zeros(num_ops + 1)
    routes = [problem.cluster.route(source, target) for source, target in pairs]
    latency, rate = max(route.latency_s for route in routes), min(route.bytes_per_s for route in routes)
    seconds = np.where(num_bytes > 0, latency + num_bytes / rate, 0.0)
    seconds[[0, -1]] = 0.0
    return np.asarray(seconds, dtype=np.float64)


def crossing_bytes(graph: Graph, ops: I64) -> F64:
    """Return, for a cut before each of the operators and after the last, the bytes made before and read behind it."""
    num_ops = len(ops)
    place = np.full(graph.num_ops + 1, -1, dtype=np.int64)
    place[ops] = np.arange(num_ops)
    last = np.full(graph.num_tensors, -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs, place[graph.consumer_op])
    made = place[graph.tensor_producer]
    moved = np.flatnonzero((made >= 0) & (last > made))
    moved = moved[~graph.is_constant[graph.tensor_producer[moved]]]
    crossing = np.zeros(num_ops + 1)
    np.add.at(crossing, made[moved] + 1, graph.tensor_bytes[moved])
    np.add.at(crossing, last[moved] + 1, -graph.tensor_bytes[moved])
    return np.asarray(np.cumsum(crossing), dtype=np.float64)


STRATEGIES: Final[dict[str, Strategy]] = {
    "single": single_device,
    "data-parallel": data_parallel,
    "data-parallel-by-speed": data_parallel_by_speed,
    "gpipe": gpipe_equal,
    "1f1b": one_f_one_b_equal,
    "1f1b-balanced": one_f_one_b_balanced,
}
"""Strategies by name, in the order of the comparison."""
