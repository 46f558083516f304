"""Simple strategies to plan with and to compare against: one device, data parallel, pipelines cut evenly or by cost.

Each strategy is a function from a problem and a number of micro-batches to a plan; ``STRATEGIES`` names them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.errors import NoFeasiblePlan
from weft.model.graph import F64, I64, TensorRole
from weft.plan.memory import optimizer_bytes
from weft.plan.orders import Order, forward_only, gpipe, one_f_one_b
from weft.plan.plan import Plan, split_samples
from weft.search.problem import Problem, StageSpec, block_of, make_plan
from weft.units import format_bytes

Strategy = Callable[[Problem, int], Plan]


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
    return memory is None or _state_bytes(problem).sum() <= memory


def data_parallel(problem: Problem, microbatches: int) -> Plan:
    """Return the plan that copies the model to every device and divides each micro-batch evenly."""
    return _replicated(problem, microbatches, [1.0] * len(problem.devices), by="data-parallel")


def data_parallel_by_speed(problem: Problem, microbatches: int) -> Plan:
    """Return the same with shares in proportion to each device's speed, in whole samples."""
    size = problem.options.batch / microbatches
    speeds = [1.0 / max(problem.op_seconds(device, size / len(problem.devices)).sum(), 1e-12)
              for device in problem.devices]
    return _replicated(problem, microbatches, speeds, by="data-parallel-by-speed")


def _replicated(problem: Problem, microbatches: int, weights: Sequence[float], *, by: str) -> Plan:
    size = problem.options.batch // microbatches
    counts = split_samples(size, tuple(weights))
    used = [(device, count) for device, count in zip(problem.devices, counts, strict=True) if count]
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
    """Return 1F1B over stages cut so that the slowest stage or transfer is as fast as possible and memory fits."""
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


def balanced_cuts(problem: Problem, microbatches: int) -> list[int]:
    """Return cuts into contiguous stages, at most one per device in order, with the smallest possible bottleneck.

    The bottleneck is the largest time of a stage (forward and backward of a micro-batch) or of the transfers at a cut.
    For a trial value each stage is extended as far as time, memory (1F1B keeps ``p - i`` micro-batches on stage ``i``)
    and the cut's transfers allow, and a device may stay without one; bisection finds the smallest value that reaches
    the end. Extending greedily is optimal, because loads only grow with the number of operators.
    """
    size = problem.options.batch / microbatches
    times = [_prefix(problem.op_seconds(device, size)) for device in problem.devices]
    cut_times = _cut_seconds(problem, size)
    limits = _MemoryLimits(problem, size, microbatches)
    lowest, highest = 0.0, max(float(time[-1]) for time in times) + float(cut_times.max(initial=0.0))
    best = _greedy_cuts(times, cut_times, limits, highest)
    if best is None:
        raise limits.error()
    for _ in range(60):
        middle = (lowest + highest) / 2
        cuts = _greedy_cuts(times, cut_times, limits, middle)
        lowest, highest = (lowest, middle) if cuts is not None else (middle, highest)
        best = best if cuts is None else cuts
        if highest - lowest <= 1e-9 * highest:
            break
    return best


def _greedy_cuts(times: Sequence[F64], cut_times: F64, limits: _MemoryLimits, bottleneck: float) -> list[int] | None:
    num_ops = len(cut_times) - 1
    cuts = [0]
    slack = bottleneck * (1 + 1e-12)
    for stage, time in enumerate(times):
        first = cuts[-1]
        if first == num_ops:
            break
        last = int(np.searchsorted(time, time[first] + slack, side="right")) - 1
        last = min(last, limits.furthest(stage, first))
        while last > first and cut_times[last] > slack:
            last -= 1
        cuts.append(max(first, last))
    return cuts if cuts[-1] == num_ops else None


class _MemoryLimits:
    """How far a stage may reach before its device is full, by prefix sums."""

    def __init__(self, problem: Problem, size: float, microbatches: int) -> None:
        self.problem = problem
        graph = problem.graph
        scale = size / graph.batch
        saved = np.zeros(graph.num_ops)
        if problem.is_training:
            kept = np.flatnonzero(graph.is_saved & (graph.tensor_producer >= 0) & (graph.tensor_base < 0))
            np.add.at(saved, graph.tensor_producer[kept], graph.tensor_bytes[kept] * scale)
        self.state, self.saved = _prefix(_state_bytes(problem)), _prefix(saved)
        num_stages = len(problem.devices)
        self.in_flight = [min(microbatches, num_stages - stage) for stage in range(num_stages)]

    def furthest(self, stage: int, first: int) -> int:
        """Return the largest end of a stage that begins at ``first``."""
        capacity = self.problem.cluster.devices[self.problem.devices[stage]].memory_bytes
        if capacity is None:
            return len(self.state) - 1
        used = self.state - self.state[first] + (self.saved - self.saved[first]) * self.in_flight[stage]
        return int(np.searchsorted(used, capacity, side="right")) - 1

    def error(self) -> NoFeasiblePlan:
        """Return what is missing for the whole model."""
        devices = self.problem.cluster.devices
        total = sum(device.memory_bytes or 0 for device in devices)
        need = float(self.state[-1] + self.saved[-1])
        missing = f"{format_bytes(need - total)} too little" if need > total else "too little for whole operators"
        state = format_bytes(self.state[-1])
        return NoFeasiblePlan(
            f"the model needs {format_bytes(need)} (parameters, gradients and optimizer state {state}, activations of "
            f"one micro-batch {format_bytes(self.saved[-1])}), the {len(devices)} devices have {format_bytes(total)} "
            f"in all: {missing}. Try more micro-batches, recomputation, or more devices.",
            missing_bytes=max(0, int(need - total)))


def _prefix(values: F64) -> F64:
    return np.concatenate(([0.0], np.cumsum(values)))


def _state_bytes(problem: Problem) -> F64:
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


def _cut_seconds(problem: Problem, size: float) -> F64:
    """Return, for a cut before each operator, the time of its transfers in one direction, on the slowest neighbours."""
    graph = problem.graph
    crossing = np.zeros(graph.num_ops + 1)
    if len(graph.edges):
        last = _last_reader(problem)
        moved = np.flatnonzero((graph.tensor_producer >= 0) & (last > graph.tensor_producer))
        moved = moved[~graph.is_constant[graph.tensor_producer[moved]]]
        np.add.at(crossing, graph.tensor_producer[moved] + 1, graph.tensor_bytes[moved])
        np.add.at(crossing, last[moved] + 1, -graph.tensor_bytes[moved])
    num_bytes = np.cumsum(crossing)[: graph.num_ops + 1] * (size / graph.batch)
    pairs = list(zip(problem.devices, problem.devices[1:], strict=False))
    if not pairs:
        return np.zeros(graph.num_ops + 1)
    routes = [problem.cluster.route(source, target) for source, target in pairs]
    latency, rate = max(route.latency_s for route in routes), min(route.bytes_per_s for route in routes)
    seconds = np.where(num_bytes > 0, latency + num_bytes / rate, 0.0)
    seconds[[0, -1]] = 0.0
    return np.asarray(seconds, dtype=np.float64)


def _last_reader(problem: Problem) -> I64:
    graph = problem.graph
    last = np.full(graph.num_tensors, -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs, graph.consumer_op)
    return last


STRATEGIES: Final[dict[str, Strategy]] = {
    "single": single_device,
    "data-parallel": data_parallel,
    "data-parallel-by-speed": data_parallel_by_speed,
    "gpipe": gpipe_equal,
    "1f1b": one_f_one_b_equal,
    "1f1b-balanced": one_f_one_b_balanced,
}
"""Strategies by name, in the order of the comparison."""
