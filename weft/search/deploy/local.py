"""Local improvement of deployments: annealing over the actions of groups and of stretches of groups.

Moves: one group takes another action; a stretch of consecutive groups takes one action; a whole run of groups with the
same action takes another; the border between two runs moves; the number of micro-batches changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.tree import Found

HOT: Final = 0.05
COLD: Final = 0.001
"""Temperatures, as parts of the step time."""


SAME: Final = 0.2
"""Part of the moves that take an action which some group has already."""
FLAT: Final = 0.3
"""Part of the moves whose action may be any."""
NUM_PARTS: Final = 10
NUM_PLACES: Final = 12
"""So many actions, and places between them, make deployments in two parts."""


class Annealer:
    """Anneals from a deployment; deterministic for a seed."""

    def __init__(self, deployers: Sequence[Deployer], start: Found, *, seed: int, likely: F64 | None = None,
                 clock: Callable[[], tuple[int, float]] = lambda: (0, 0.0)) -> None:
        """``likely`` are the probabilities of actions in moves, None for all the same.

        ``clock`` gives the simulations and the CPU seconds so far.
        """
        self.deployers, self.rng = tuple(deployers), np.random.default_rng(seed)
        self.current = self.best = start
        self.likely, self.clock = likely, clock
        self.progress: list[tuple[int, float, Found]] = []
        """When it got better, in the last run."""

    def run(self, num_steps: int, *, hot: float = HOT, cold: float = COLD) -> Found:
        """Take so many steps, from hot to cold, and return the best so far."""
        self.progress = []
        for step in range(num_steps):
            temperature = hot * (cold / hot) ** (step / max(1, num_steps - 1))
            found = self._neighbour(self.current)
            if self._accepts(found, temperature):
                self.current = found
                if found.key < self.best.key:
                    self.best = found
                    self.progress.append((*self.clock(), found))
        self.current = self.best
        return self.best

    def _accepts(self, found: Found, temperature: float) -> bool:
        now, new = self.current.key, found.key
        if new <= now:
            return True
        if new[0] > now[0]:
            return False
        worse = math.log(new[1] / now[1]) if math.isfinite(new[1]) and now[1] > 0 else math.inf
        return bool(self.rng.random() < math.exp(-worse / temperature)) if worse < math.inf else False

    def _neighbour(self, found: Found) -> Found:
        rng, deployer = self.rng, found.deployer
        choice = np.asarray(found.choice)
        kind = rng.random()
        borders = np.flatnonzero(np.diff(choice))
        if kind < 0.05 and len(self.deployers) > 1:
            deployer = self.deployers[int(rng.integers(len(self.deployers)))]
        elif kind < 0.35 and len(borders):
            border, reach = int(rng.choice(borders)), int(rng.integers(1, 4))
            if rng.random() < 0.5:
                choice[max(0, border + 1 - reach) : border + 1] = choice[border + 1]
            else:
                choice[border + 1 : border + 1 + reach] = choice[border]
        elif kind < 0.55:
            ends = [0, *(borders + 1).tolist(), len(choice)]
            run = int(rng.integers(len(ends) - 1))
            choice[ends[run] : ends[run + 1]] = self._action(choice)
        elif kind < 0.75:
            first, last = sorted(rng.integers(0, len(choice) + 1, size=2).tolist())
            choice[first : max(last, first + 1)] = self._action(choice)
        else:
            choice[rng.integers(len(choice))] = self._action(choice)
        return _evaluated(deployer, tuple(choice.tolist()))

    def _action(self, choice: I64) -> int:
        """Return an action for a move: often one that other groups have."""
        num_actions = len(self.deployers[0].actions)
        if self.likely is None:
            return int(self.rng.integers(num_actions))
        if self.rng.random() < SAME:
            return int(self.rng.choice(choice))
        return int(self.rng.choice(num_actions, p=self.likely))


def _evaluated(deployer: Deployer, choice: tuple[int, ...]) -> Found:
    return Found(deployer=deployer, choice=choice, evaluation=deployer.evaluate(choice))


def uniform_choices(deployers: Sequence[Deployer]) -> list[Found]:
    """Return the deployments in which all groups take the same action, for all numbers of micro-batches."""
    return [_evaluated(deployer, (action,) * deployer.groups.num_groups)
            for deployer in deployers for action in range(len(deployer.actions))]


def likely_actions(alike: Sequence[Found]) -> F64:
    """Return the probability of each action in moves: more for those that make good use of the devices they take.

    ``alike`` are the deployments in which all groups take the same action. What counts is the device time of the best
    of them: seconds times the power of the devices, as a multiple of the least.
    """
    used = np.full(len(alike[0].deployer.actions), np.inf)
    for found in alike:
        deployer, action = found.deployer, found.choice[0]
        power = sum(deployer.speeds[device] for device in deployer.actions[action].devices)
        used[action] = min(used[action], found.evaluation.seconds * power)
    weights = np.square(used.min() / used)
    return np.asarray(FLAT / len(weights) + (1 - FLAT) * weights / weights.sum(), dtype=np.float64)


def two_part_choices(alike: Sequence[Found]) -> Iterator[Found]:
    """Yield deployments in two parts: up to a place one of the best actions for all, then another one."""
    best = sorted(alike, key=lambda found: found.key)[:NUM_PARTS]
    for first in best:
        deployer, num_groups = first.deployer, first.deployer.groups.num_groups
        places = sorted({round(num_groups * part / NUM_PLACES) for part in range(1, NUM_PLACES)} - {0, num_groups})
        for second in best:
            if second.deployer is deployer and second is not first:
                for place in places:
                    yield _evaluated(deployer, first.choice[:place] + second.choice[place:])


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
