"""Deployments to begin with: all groups alike, in two parts, HEFT's; and which actions are worth trying after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.model.graph import F64
from weft.search.deploy.actions import Action
from weft.search.deploy.deployer import Deployer, Found
from weft.search.deploy.local import Taste
from weft.search.deploy.tuning import TUNING

Choice = tuple[int, ...]


def data_parallel_choices(deployers: Sequence[Deployer]) -> Iterator[tuple[Deployer, Choice]]:
    """Yield data parallelism, even and, where devices differ, by speed, for all numbers of micro-batches."""
    whole = deployers[0].actions[0].device_groups
    for deployer in deployers:
        for index, action in enumerate(deployer.actions):
            if action.kind == "replicate" and action.device_groups == whole:
                yield deployer, (index,) * deployer.groups.num_groups


def heft_choices(deployers: Sequence[Deployer]) -> Iterator[tuple[Deployer, Choice]]:
    """Yield HEFT's deployment for all numbers of micro-batches, where devices have actions of their own."""
    if any(action.kind == "single" for action in deployers[0].actions):
        for deployer in deployers:
            yield deployer, earliest_finish(deployer)


def uniform_choices(deployers: Sequence[Deployer]) -> list[tuple[Deployer, Choice]]:
    """Return the deployments in which all groups take the same action, those with the least bound first."""
    every = [(deployer, (action,) * deployer.groups.num_groups)
             for deployer in deployers for action in range(len(deployer.actions))]
    return sorted(every, key=lambda item: item[0].bound(item[1]))


def two_part_choices(alike: Sequence[Found]) -> Iterator[tuple[Deployer, Choice]]:
    """Yield deployments in two parts: up to a place one of the best actions for all, then another one."""
    best = sorted(alike, key=lambda found: found.key)[:TUNING.num_parts]
    for first in best:
        deployer, num_groups = first.deployer, first.deployer.groups.num_groups
        places = sorted({round(num_groups * part / TUNING.num_places)
                         for part in range(1, TUNING.num_places)} - {0, num_groups})
        for second in best:
            if second.deployer is deployer and second is not first:
                for place in places:
                    yield deployer, first.choice[:place] + second.choice[place:]


def find_taste(deployers: Sequence[Deployer], alike: Sequence[Found]) -> Taste:
    """Return which actions moves try: more often those that make good use of the devices they take.

    What counts is the device time of the best deployment in which all groups take the action: seconds times the power
    of the devices, as a multiple of the least. ``alike`` are those that were simulated; for others the bound has to do.
    """
    used = np.asarray([[deployer.bound((action,) * deployer.groups.num_groups) for action in range(
        len(deployer.actions))] for deployer in deployers])
    place = {id(deployer): index for index, deployer in enumerate(deployers)}
    for found in alike:
        used[place[id(found.deployer)], found.choice[0]] = found.evaluation.seconds
    power = [[sum(deployer.speeds[device] for device in action.devices) for action in deployer.actions]
             for deployer in deployers]
    least = (used * np.asarray(power)).min(axis=0)
    weights = np.square(least.min() / least)
    likely: F64 = TUNING.flat / len(weights) + (1 - TUNING.flat) * weights / weights.sum()
    actions = deployers[0].actions
    near = tuple(tuple(index for index, other in enumerate(actions) if _is_near(action, other)) for action in actions)
    return Taste(likely=likely, near=near)


def _is_near(action: Action, other: Action) -> bool:
    """Return whether actions differ in how they use the same device groups, or in one device group."""
    if action == other:
        return False
    if action.device_groups == other.device_groups:
        return True
    return action.kind == other.kind and len(set(action.device_groups) ^ set(other.device_groups)) == 1


def earliest_finish(deployer: Deployer) -> tuple[int, ...]:
    """Return the choice of HEFT: each group, in the order of its way to the end, on the device where it ends first."""
    groups, world = deployer.groups, deployer.world
    single = {action.devices[0]: index for index, action in enumerate(deployer.actions) if action.kind == "single"}
    devices = sorted(single)
    seconds = deployer.group_seconds[:, devices]
    latency, rate = world.latency_s[np.ix_(devices, devices)], world.s_per_byte[np.ix_(devices, devices)]
    rank = np.zeros(groups.num_groups)
    mean_latency, mean_rate = latency.mean(), rate.mean()
    for group in reversed(range(groups.num_groups)):
        after = [mean_latency + mean_rate * item.bytes_per_sample * deployer.size + rank[consumer]
                 for item in groups.bundles if item.producer == group for consumer in item.consumers]
        rank[group] = seconds[group].mean() + max(after, default=0.0)
    free, end = np.zeros(len(devices)), np.zeros(groups.num_groups)
    chosen = np.zeros(groups.num_groups, dtype=np.int64)
    for group in np.argsort(-rank, kind="stable").tolist():
        ready = np.zeros(len(devices))
        for item in groups.bundles:
            if group in item.consumers:
                source = chosen[item.producer]
                moved = latency[source] + rate[source] * (item.bytes_per_sample * deployer.size + item.fixed_bytes)
                moved[source] = 0.0
                ready = np.maximum(ready, end[item.producer] + moved)
        finish = np.maximum(ready, free) + seconds[group]
        chosen[group] = int(np.argmin(finish))
        end[group] = free[chosen[group]] = finish[chosen[group]]
    return tuple(single[devices[device]] for device in chosen)
