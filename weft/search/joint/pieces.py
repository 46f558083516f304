"""Plans that keep parameters, gradients and states in pieces: where units begin, who keeps which, the plain strategy.

A unit is a repeated layer; what comes before the first belongs to a unit of its own, and so does what comes behind the
last. The last unit keeps its parameters from forward to backward where it is the last of the model, because its
backward comes at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import DeviceId
from weft.model.graph import I64, Graph
from weft.plan.check import excess_bytes
from weft.plan.orders import Action, Order
from weft.plan.plan import Pieces, Plan, Storage
from weft.search.common.problem import Problem, StageSpec, block_of, fair_samples, make_plan, pipeline_order

PieceGroup = Literal["all", "host"]
"""Who has a whole together: all replicas, or those on one host."""
PIECES: tuple[Pieces, ...] = ("none", "states", "gradients", "parameters")
"""By what ``--zero`` calls it."""


def layer_starts(graph: Graph) -> tuple[int, ...]:
    """Return the operators at which repeated layers begin, and that at which what is behind the last one does."""
    blocks = [block_of(module) for module in graph.op_modules]
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for op, block in enumerate(blocks):
        if block.rpartition(".")[2].isdigit():
            starts.setdefault(block, op)
            ends[block] = op + 1
    found = sorted({*starts.values(), *([max(ends.values())] if ends else [])})
    return tuple(op for op in found if 0 < op < graph.num_ops)


def unit_ops(problem: Problem, ops: I64, starts: Sequence[int]) -> list[I64]:
    """Return the operators in order, cut where units begin; constant ones alone are no unit."""
    places = np.searchsorted(ops, starts)
    parts = [part for part in np.split(ops, np.unique(places)) if len(part)]
    merged: list[I64] = []
    for part in parts:
        if merged and problem.graph.is_constant[merged[-1]].all():
            merged[-1] = np.concatenate([merged[-1], part])
        else:
            merged.append(part)
    if len(merged) > 1 and problem.graph.is_constant[merged[-1]].all():
        merged[-2:] = [np.concatenate(merged[-2:])]
    return merged


def storage_for(problem: Problem, replicas: Sequence[Sequence[DeviceId]], pieces: Pieces, group: PieceGroup, *,
                keeps: bool = False) -> Storage:
    """Return the storage of a stage with these replicas; none where there are no groups of the same size above one.

    Devices with more memory keep more.
    """
    devices = problem.cluster.devices
    by_host: dict[str, list[int]] = {}
    for place, members in enumerate(replicas):
        by_host.setdefault(devices[members[0]].host if group == "host" else "", []).append(place)
    groups = tuple(tuple(places) for places in by_host.values())
    if len(groups[0]) < 2 or len({len(places) for places in groups}) > 1:
        return Storage()
    memory = {place: min((devices[device].memory_bytes or 0 for device in members), default=0)
              for place, members in enumerate(replicas)}
    shares = [tuple(memory[place] / sum(memory[other] for other in places) if memory[place] else 0.0
                    for place in places) for places in groups]
    is_even = len(set(memory.values())) == 1 or len(set(shares)) > 1 or not all(shares[0])
    return Storage(pieces=pieces, groups=groups if len(groups) > 1 else (), shares=() if is_even else shares[0],
                   keeps=keeps)


def expand(actions: Sequence[Action], parts: Sequence[Sequence[int]]) -> list[Action]:
    """Return the actions with a stage's forward as that of its parts in turn, its backward as the reverse."""
    return [(part, phase, index) for stage, phase, index in actions
            for part in (parts[stage] if phase == "F" else reversed(parts[stage]))]


def fsdp(problem: Problem, microbatches: int) -> Plan:
    """Return data parallelism with everything in pieces, in units of layers, with recomputation where it must be."""
    size, devices = problem.options.batch // microbatches, problem.devices
    if len(devices) < 2:
        raise NoFeasiblePlan("pieces need 2 or more devices to keep them; the cluster has 1")
    if size < len(devices):
        raise NoFeasiblePlan(f"fsdp needs a sample for each of the {len(devices)} devices in every micro-batch, not "
                             f"{size} in all: use a larger batch or fewer micro-batches")
    if problem.options.whole_parameters:
        raise NoFeasiblePlan("the optimizer needs whole parameters, and fsdp divides them")
    counts = fair_samples(size, len(devices), problem.device_seconds)
    replicas = tuple(((device,), count / size) for device, count in zip(devices, counts, strict=True) if count)
    for recompute in (False, True) if problem.is_training and not problem.options.recompute else (None,):
        options = problem.options if recompute is None else replace(problem.options, recompute=recompute)
        narrow = replace(options, batch=size, microbatches=None)  # more of them hold hardly more
        plan = _units(replace(problem, options=narrow), 1, replicas)
        over = excess_bytes(plan, problem.graph, problem.cluster)
        if not over:
            return _units(replace(problem, options=options), microbatches, replicas)
    device, missing = max(over.items(), key=lambda item: item[1])
    again = " with recomputation" if problem.is_training else ""
    raise NoFeasiblePlan(f"fsdp{again} and {microbatches} micro-batches: {device!r} has {format_bytes(missing)} too "
                         "little. Try more micro-batches or more devices.", missing_bytes=missing, device=device)


def _units(problem: Problem, microbatches: int, replicas: tuple[tuple[tuple[DeviceId, ...], float], ...]) -> Plan:
    parts = unit_ops(problem, np.arange(problem.graph.num_ops), layer_starts(problem.graph))
    members = [devices for devices, _ in replicas]
    specs = [StageSpec(ops=part, replicas=replicas, storage=storage_for(
        problem, members, "parameters", "all", keeps=problem.is_training and index == len(parts) - 1))
        for index, part in enumerate(parts)]
    plain = pipeline_order(1, 1, microbatches, training=problem.is_training)
    order: Order = [expand(actions, [range(len(parts))]) for actions in plain] * len(members)
    used = list(itertools.chain.from_iterable(members))
    return make_plan(problem, specs, order, microbatches=microbatches, by="fsdp", order_devices=used)
