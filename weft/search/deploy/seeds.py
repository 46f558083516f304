"""Deployments to begin with: all groups alike, in two parts, HEFT's; and which actions are worth trying after them.

Pipelines of stages as seeds: the best cuts of the model for parts of the cluster, by dynamic program.

A stage of the groups ``i .. j`` has a *place*: one device, or all devices of some device groups side by side. With
``n`` micro-batches it takes, for each of them,

    t(i, j, S) = sum of the groups' forward and backward on S's slowest device + exchange of their gradients / n
    c(i, S)    = bytes that cross at ``i``, there and back, at the slowest rate into S

and the step about ``(n - 1) * the slowest t or c + sum of all t and c``: the pipeline has to fill and to drain. So for
several limits of the slowest, the least sum is found. Devices of one group are all alike: what counts is how many of
each group are in use. ``least[D, j]``, for the first ``j`` groups on ``D[g]`` devices of each device group, follows
from all last stages that are within the limit:

    least[D, j] = min over S in D, i < j of least[D - S, i] + t(i, j, S) + c(i, S)

Where groups share a parameter, there are pipelines in which they are in one stage, too, so that its gradients need not
be exchanged: the first of them has the work of all. The simulation then judges the best of all these.

``least_limit`` and ``least_sums`` are that program, compiled. A state ``D`` says how many devices of each device group
are in use, as a number with the digits of ``digits``: the first device group counts least. ``taken`` is [places, device
groups], what a stage there takes; ``work`` is [places, groups + 1], the work of the groups before each; ``crossing`` is
[places, groups + 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
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


# ---- pipelines of stages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a stage can be."""

    actions: tuple[int, ...]
    """The action; for one device of a group, those of all its devices."""
    taken: tuple[int, ...]
    """[device groups] devices in use."""


def staged_choices(deployer: Deployer) -> Iterator[tuple[int, ...]]:
    """Yield the best pipelines by estimate, the best first; where groups share parameters, first those together."""
    sizes = [len(group) for group in deployer.device_groups]
    places = _places(deployer)
    digits = np.asarray([size + 1 for size in sizes], dtype=np.int64)
    if np.prod(digits, dtype=np.float64) > TUNING.max_states:  # then device groups are taken as a whole
        places = [replace(place, taken=tuple(min(count, 1) for count in place.taken)) for place in places
                  if all(count in (0, size) for count, size in zip(place.taken, sizes, strict=True))]
        digits = np.full(len(sizes), 2)
    if len(places) < 2 or np.prod(digits, dtype=np.float64) > TUNING.max_states:
        return
    together = _together(deployer)
    for moved in (together, {}) if together else ({},):
        for choice in _best_pipelines(deployer, places, digits, moved):
            yield tuple(choice[moved.get(group, group)] for group in range(len(choice)))


def _together(deployer: Deployer) -> dict[int, int]:
    """Return, for groups that share a parameter with an earlier one, and those that read much from them, the first."""
    first: dict[int, int] = {}
    crossing = deployer.crossing_bytes
    for tensor in deployer.exchanges.tied:
        homes = sorted(deployer.groups.home_of_parameter[tensor])
        for home in homes[1:]:
            stop = home + 1
            while stop < deployer.groups.num_groups and crossing[stop] > TUNING.much * crossing[home]:
                stop += 1
            for group in range(home, stop):
                first.setdefault(group, first.get(homes[0], homes[0]))
    return first


def _best_pipelines(deployer: Deployer, places: Sequence[_Place], digits: I64,
                    moved: Mapping[int, int]) -> list[tuple[int, ...]]:
    taken = np.asarray([place.taken for place in places], dtype=np.int64)
    times = [_times(deployer, place, moved) for place in places]
    work, crossing = np.stack([item[0] for item in times]), np.stack([item[1] for item in times])
    limit = float(least_limit(digits, taken, work, crossing))
    found: dict[tuple[int, ...], float] = {}
    for factor in TUNING.limits:
        sums, last = least_sums(digits, taken, work, crossing, limit * factor * (1 + 1e-9))
        for state in np.argsort(sums, kind="stable")[: 4 * TUNING.num_pipelines].tolist():
            if np.isfinite(sums[state]):
                choice, slowest = _choice(places, taken, digits, last, work, crossing, state)
                seconds = float(sums[state]) + (deployer.microbatches - 1) * slowest
                found[choice] = min(found.get(choice, np.inf), seconds)
    return sorted(found, key=lambda choice: (found[choice], choice))[:TUNING.num_pipelines]


def _choice(places: Sequence[_Place], taken: I64, digits: I64, last: I64, work: F64, crossing: F64,
            state: int) -> tuple[tuple[int, ...], float]:
    """Return the actions of a pipeline and the time of its slowest stage; ``last`` are [states, groups + 1, 2]."""
    stop, slowest = work.shape[1] - 1, 0.0
    weights = np.concatenate(([1], np.cumprod(digits)[:-1]))
    used, runs = [0] * len(places), list[tuple[int, int]]()
    while stop:
        place, first = last[state, stop].tolist()
        slowest = max(slowest, float(work[place, stop] - work[place, first]), float(crossing[place, first]))
        runs.append((places[place].actions[used[place]], stop - first))
        used[place] += 1
        state, stop = state - int(taken[place] @ weights), first
    return tuple(action for action, length in reversed(runs) for _ in range(length)), slowest


def _times(deployer: Deployer, place: _Place, moved: Mapping[int, int]) -> tuple[F64, F64]:
    """Return the work of all groups before each, in a stage at this place, and the time of crossing to it there.

    The work of groups in ``moved`` is that of another one.
    """
    number = int(deployer.layouts_of([place.actions[0]] * deployer.groups.num_groups)[0])
    layout, tables = deployer.layouts[number], deployer.tables
    seconds = (tables.forward_s[number] + tables.backward_s[number]).max(axis=1)
    if len(layout.replicas) > 1:
        seconds = seconds + deployer.exchanges.group_seconds(layout.devices) / deployer.microbatches
    for group, target in moved.items():
        seconds[target] += seconds[group]
        seconds[group] = 0.0
    inside = set(layout.devices)
    outside = [device for device in deployer.problem.devices if device not in inside]
    rate = deployer.world.s_per_byte[np.ix_(outside, layout.devices)].max() if outside else 0.0
    crossing = deployer.crossing_bytes * deployer.size * 2 * rate
    crossing[0] = 0.0
    return np.concatenate(([0.0], np.cumsum(seconds))), crossing


def _places(deployer: Deployer) -> list[_Place]:
    """Return the places of one device, where all of its group have actions, and those of whole device groups."""
    result, sizes = list[_Place](), [len(group) for group in deployer.device_groups]
    for group, size in enumerate(sizes):
        actions = tuple(index for index, action in enumerate(deployer.actions)
                        if action.kind == "single" and action.device_groups == (group,))
        if len(actions) == size:
            result.append(_Place(actions=actions, taken=tuple(int(other == group) for other in range(len(sizes)))))
    replicating = {action.device_groups: index for index, action in enumerate(deployer.actions)
                   if action.kind == "replicate"}  # by speed comes later
    return result + [_Place(actions=(index,), taken=tuple(size if group in groups else 0
                                                          for group, size in enumerate(sizes)))
                     for groups, index in replicating.items()]


# ---- the dynamic program --------------------------------------------------------------------------------------------


@compiled
def _before(digits: I64, taken: I64, state: int) -> int:
    """Return the state before a stage that takes so much was added; -1 if there is none."""
    weight, rest, before = 1, state, state
    for group in range(len(digits)):
        if rest % digits[group] < taken[group]:
            return -1
        before -= taken[group] * weight
        rest //= digits[group]
        weight *= digits[group]
    return before


@compiled
def _num_states(digits: I64) -> int:
    number = 1
    for digit in digits:
        number *= digit
    return number


@compiled
def least_limit(digits: I64, taken: I64, work: F64, crossing: F64) -> float:
    """Return the least bottleneck of a pipeline of all groups: the time of its slowest stage or crossing."""
    num_states, num_groups = _num_states(digits), work.shape[1] - 1
    best = np.full((num_states, num_groups + 1), np.inf)
    best[:, 0] = 0.0
    for state in range(1, num_states):
        for place in range(len(taken)):
            before = _before(digits, taken[place], state)
            if before < 0:
                continue
            for stop in range(1, num_groups + 1):
                for first in range(stop):
                    value = max(best[before, first], work[place, stop] - work[place, first], crossing[place, first])
                    best[state, stop] = min(best[state, stop], value)
    return float(best[:, num_groups].min())


@compiled
def least_sums(digits: I64, taken: I64, work: F64, crossing: F64, limit: float) -> tuple[F64, I64]:
    """Return the least sum of stages and crossings within the limit, by state, and [states, groups + 1, 2] last stages.

    A last stage is (place, first group). States whose devices are not all needed have the sum infinity.
    """
    num_states, num_groups = _num_states(digits), work.shape[1] - 1
    best = np.full((num_states, num_groups + 1), np.inf)
    last = np.zeros((num_states, num_groups + 1, 2), dtype=np.int64)
    best[0, 0] = 0.0
    for state in range(1, num_states):
        for place in range(len(taken)):
            before = _before(digits, taken[place], state)
            if before < 0:
                continue
            for first in range(num_groups):
                if best[before, first] == np.inf or crossing[place, first] > limit:
                    continue
                for stop in range(first + 1, num_groups + 1):
                    seconds = work[place, stop] - work[place, first]
                    if seconds > limit:
                        break
                    value = best[before, first] + seconds + crossing[place, first]
                    if value < best[state, stop]:
                        best[state, stop] = value
                        last[state, stop, 0], last[state, stop, 1] = place, first
    return best[:, num_groups].copy(), last
