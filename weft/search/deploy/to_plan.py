"""From a deployment to the plan that it means: one stage for each block, orders as simulated, exchanges by bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64
from weft.plan.orders import Action
from weft.plan.plan import GradientExchange, Plan
from weft.search.common.problem import StageSpec, make_plan
from weft.search.deploy.actions import Layout
from weft.search.deploy.blocks import find_blocks
from weft.search.deploy.deployer import PASSES, Deployer, Evaluation
from weft.search.deploy.exchange import Bucket


def deployment_plan(deployer: Deployer, found: Evaluation, *, by: str) -> Plan:
    """Return the plan of an evaluated deployment."""
    problem, layouts = deployer.problem, [deployer.layouts[index] for index in found.layout_of]
    block_of = find_blocks(found.layout_of)
    specs = []
    for block in range(int(block_of[-1]) + 1):
        groups = np.flatnonzero(block_of == block)
        specs.append(_stage(deployer, np.concatenate([deployer.groups.ops(int(group)) for group in groups]),
                            layouts[groups[0]]))
    orders = _orders(deployer, found, specs)
    devices = tuple(orders)
    plan = make_plan(problem, specs, [orders[device] for device in devices], microbatches=deployer.microbatches, by=by,
                     order_devices=devices)
    if not problem.is_training:
        return plan
    buckets = deployer.exchanges.buckets(found.layout_of.tolist(), deployer.layouts).items
    return replace(plan, gradients=tuple(_exchanges(deployer, plan, _by_readiness(buckets, found.outcome.group_end_s))))


def _stage(deployer: Deployer, ops: I64, layout: Layout) -> StageSpec:
    """Return the stage of these operators, with its words and times where devices divide it."""
    replicas = tuple((team, samples / deployer.size) for team, samples in layout.replicas)
    split = deployer.split_of(layout.replicas[0][0])
    if split is None:
        return StageSpec(ops=ops, replicas=replicas)
    graph, problem = deployer.problem.graph, deployer.problem
    touched = dict.fromkeys(tensor for op in ops.tolist() for tensor in (*graph.op_inputs(op), *graph.op_outputs(op)))
    words = split.words([graph.op_names[op] for op in ops], [graph.tensor_names[tensor] for tensor in touched])
    times: list[dict[str, float]] = []
    for team, samples in layout.replicas:
        own: dict[str, float] = {phase: float(deployer.op_times(phase, samples, team)[ops].sum())
                                 for phase in PASSES[: 1 + problem.is_training]}
        times.append({**own, "B": own["F"] + own["B"]} if problem.options.recompute and problem.is_training else own)
    return StageSpec(ops=ops, replicas=replicas, sharding=words, times=tuple(times))


def _exchanges(deployer: Deployer, plan: Plan, buckets: Sequence[Bucket]) -> Iterator[GradientExchange]:
    """Yield the plan's exchanges: as the buckets are, but part by part where devices hold parts of parameters."""
    problem = deployer.problem
    names, tensor_names = [device.name for device in problem.cluster.devices], problem.graph.tensor_names
    for bucket in buckets:
        parameters = tuple(tensor_names[tensor] for tensor in bucket.parameters)
        if not bucket.is_divided:
            yield GradientExchange(parameters=parameters, method=bucket.method,
                                   devices=tuple(names[device] for device in bucket.devices))
            continue
        chosen, parts = set(parameters), defaultdict[tuple[str, ...], list[str]](list)
        for item in plan.gradients:
            parts[item.devices] += [name for name in item.parameters if name in chosen]
        for devices, own in parts.items():
            if own:
                yield GradientExchange(parameters=tuple(own), devices=devices)


def _by_readiness(buckets: Sequence[Bucket], group_end_s: F64) -> list[Bucket]:
    """Return the exchanges in the order in which their gradients are there: a plan's are done in the order given."""
    return sorted(buckets, key=lambda bucket: (max(group_end_s[group] for group in bucket.groups), -min(bucket.groups)))


def _orders(deployer: Deployer, found: Evaluation, specs: list[StageSpec]) -> dict[DeviceId, list[Action]]:
    """Return what each device that is used does, in the order in which it, or the first of its team, began."""
    items: dict[tuple[DeviceId, ...], list[tuple[float, int, Action]]] = {}
    slot, microbatches = 0, deployer.microbatches
    for stage, spec in enumerate(specs):
        for team, _ in spec.replicas:
            for row, start in enumerate(found.outcome.starts[:, slot].tolist()):
                action: Action = (stage, "F" if row < microbatches else "B", row % microbatches)
                # Of two that begin together one takes no time: forwards run up the stages, backwards down.
                rank = row * len(specs) + (stage if row < microbatches else len(specs) - stage)
                items.setdefault(team, []).append((start, rank, action))
            slot += len(team)
    orders = {team: [action for _, _, action in sorted(entries)] for team, entries in items.items()}
    return dict(sorted((device, order) for team, order in orders.items() for device in team))
