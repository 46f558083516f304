"""From a deployment to the plan that it means: one stage for each block, orders as simulated, exchanges by bucket."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.plan.orders import Action
from weft.plan.plan import GradientExchange, Plan
from weft.search.deploy.blocks import find_blocks
from weft.search.deploy.deployer import Deployer, Evaluation
from weft.search.problem import StageSpec, make_plan


def deployment_plan(deployer: Deployer, found: Evaluation, *, by: str) -> Plan:
    """Return the plan of an evaluated deployment."""
    problem, layouts = deployer.problem, [deployer.layouts[index] for index in found.layout_of]
    block_of = find_blocks(found.layout_of)
    specs = []
    for block in range(int(block_of[-1]) + 1):
        groups = np.flatnonzero(block_of == block)
        layout = layouts[groups[0]]
        specs.append(StageSpec(
            ops=np.concatenate([deployer.groups.ops(int(group)) for group in groups]),
            replicas=tuple((devices, samples / deployer.size) for devices, samples in layout.replicas)))
    orders = _orders(deployer, found, specs)
    devices = tuple(orders)
    plan = make_plan(problem, specs, [orders[device] for device in devices], microbatches=deployer.microbatches, by=by,
                     order_devices=devices)
    if not problem.is_training:
        return plan
    names, tensor_names = [device.name for device in problem.cluster.devices], problem.graph.tensor_names
    exchanges = tuple(
        GradientExchange(parameters=tuple(tensor_names[tensor] for tensor in bucket.parameters), method=bucket.method,
                         devices=tuple(names[device] for device in bucket.devices))
        for bucket in deployer.exchanges.buckets(found.layout_of.tolist(), deployer.layouts).items)
    return replace(plan, gradients=exchanges)


def _orders(deployer: Deployer, found: Evaluation, specs: list[StageSpec]) -> dict[DeviceId, list[Action]]:
    """Return what each device that is used does, in the order in which it began."""
    items: dict[DeviceId, list[tuple[float, int, Action]]] = {}
    slot, microbatches = 0, deployer.microbatches
    for stage, spec in enumerate(specs):
        for devices, _ in spec.replicas:
            for device in devices:
                for row, start in enumerate(found.outcome.starts[:, slot].tolist()):
                    action: Action = (stage, "F" if row < microbatches else "B", row % microbatches)
                    # Of two that begin together one takes no time: forwards run up the stages, backwards down.
                    rank = row * len(specs) + (stage if row < microbatches else len(specs) - stage)
                    items.setdefault(device, []).append((start, rank, action))
                slot += 1
    return {device: [action for _, _, action in sorted(entries)] for device, entries in sorted(items.items())}
