"""Local improvement of deployments: annealing over the actions of groups and of stretches of groups.

Moves: one group takes another action; a stretch of consecutive groups takes one action; a whole run of groups with the
same action takes another; the border between two runs moves; the number of micro-batches changes. With a ``Taste``
annealing is quicker: moves prefer some actions, borders move farther, two actions change places, stretches come from
other good deployments, and the limit up to which a move is accepted is drawn first, so that most simulations end early
or need not begin. It sometimes begins with pipelines spelled out: what was one action for all their stages can then be
changed stage by stage.

At the end of a search ``polish`` moves samples from devices that have too much to do to others, one by one. Shares by
speed are rounded to whole samples and know nothing of links and memory; the simulation does. Each try moves a sample
of one layout, for all groups that have it, from one of its busiest devices to one of its idlest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.model.graph import F64, I64
from weft.search.deploy.actions import Layout
from weft.search.deploy.deployer import Deployer, Evaluation, Found
from weft.search.deploy.tuning import TUNING


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taste:
    """Which actions moves try."""

    likely: F64
    """[actions] probabilities."""
    near: tuple[tuple[int, ...], ...]
    """[actions] actions that are like each."""

    def pick(self, rng: np.random.Generator, choice: I64, before: int) -> int:
        """Return an action for groups that had another ``before``, in the deployment ``choice``."""
        kind = rng.random()
        if kind < TUNING.same:
            return int(rng.choice(choice))
        if kind < TUNING.same + TUNING.near and self.near[before]:
            return self.near[before][int(rng.integers(len(self.near[before])))]
        return int(np.searchsorted(np.cumsum(self.likely), rng.random()).clip(max=len(self.likely) - 1))


class Annealer:
    """Anneals from a deployment; deterministic for a seed."""

    def __init__(self, deployers: Sequence[Deployer], start: Found, *, seed: int, taste: Taste | None = None,
                 clock: Callable[[], tuple[int, float]] = lambda: (0, 0.0)) -> None:
        """With a ``taste``, moves follow it, and simulations end when it is clear that a move is not accepted.

        ``clock`` gives the simulations and the CPU seconds so far.
        """
        self.deployers, self.rng = tuple(deployers), np.random.default_rng(seed)
        self.current = self.best = start
        self.taste, self.clock = taste, clock
        self.peers: Sequence[tuple[int, ...]] = ()
        """Other good deployments, of which moves may take stretches."""
        self.progress: list[tuple[int, float, Found]] = []
        """When it got better, in the last run."""

    def run(self, num_steps: int, *, hot: float = TUNING.hot_alone, cold: float = TUNING.cold,
            is_late: Callable[[], bool] = lambda: False) -> Found:
        """Take so many steps, from hot to cold, unless it is late before, and return the best so far."""
        self.progress = []
        if self.taste is not None and self.rng.random() < TUNING.spell:
            deployer = self.current.deployer
            self.current = replace(self.current, choice=deployer.spelled_out(self.current.choice))
        for step in range(num_steps):
            temperature = hot * (cold / hot) ** (step / max(1, num_steps - 1))
            found = self._accepted(temperature)
            if found is not None:
                self.current = found
                if found.key < self.best.key:
                    self.best = found
                    self.progress.append((*self.clock(), found))
            if step % TUNING.late_steps == TUNING.late_steps - 1 and is_late():
                break
        self.current = self.best
        return self.best

    def _accepted(self, temperature: float) -> Found | None:
        """Return a neighbour if it is accepted: it may be slower by a random part."""
        if self.taste is not None and self.current.evaluation.fits:
            limit_s = self.current.evaluation.seconds * (1.0 - self.rng.random()) ** -temperature
            deployer, choice = self._neighbour()
            evaluation = deployer.evaluate_within(choice, limit_s)
            return None if evaluation is None else Found(deployer=deployer, choice=choice, evaluation=evaluation)
        deployer, choice = self._neighbour()
        found = deployer.find(choice)
        return found if self._accepts(found, temperature) else None

    def _accepts(self, found: Found, temperature: float) -> bool:
        now, new = self.current.key, found.key
        if new <= now:
            return True
        if new[0] > now[0]:
            return False
        worse = math.log(new[1] / now[1]) if math.isfinite(new[1]) and now[1] > 0 else math.inf
        return bool(self.rng.random() < math.exp(-worse / temperature)) if worse < math.inf else False

    def _neighbour(self) -> tuple[Deployer, tuple[int, ...]]:
        rng, deployer = self.rng, self.current.deployer
        choice = np.asarray(self.current.choice)
        kind = rng.random()
        borders = np.flatnonzero(np.diff(choice))
        if kind < 0.05 and len(self.deployers) > 1:
            deployer = self.deployers[int(rng.integers(len(self.deployers)))]
        elif kind < 0.35 and len(borders):
            self._move_border(choice, borders)
        elif kind < 0.55:
            ends = [0, *(borders + 1).tolist(), len(choice)]
            run = int(rng.integers(len(ends) - 1))
            choice[ends[run] : ends[run + 1]] = self._action(choice, ends[run])
        elif kind < 0.75:
            self._change_stretch(choice)
        else:
            group = int(rng.integers(len(choice)))
            choice[group] = self._action(choice, group)
        return deployer, tuple(choice.tolist())

    def _move_border(self, choice: I64, borders: I64) -> None:
        rng = self.rng
        border, reach = int(rng.choice(borders)), int(rng.integers(1, 4))
        if self.taste is not None and rng.random() < TUNING.far:
            reach = int(rng.integers(1, 1 + max(1, len(choice) // 4)))
        if rng.random() < 0.5:
            choice[max(0, border + 1 - reach) : border + 1] = choice[border + 1]
        else:
            choice[border + 1 : border + 1 + reach] = choice[border]

    def _change_stretch(self, choice: I64) -> None:
        rng = self.rng
        first, last = sorted(rng.integers(0, len(choice) + 1, size=2).tolist())
        if self.peers and rng.random() < TUNING.peers:
            choice[first:last] = self.peers[int(rng.integers(len(self.peers)))][first:last]
        elif self.taste is not None and rng.random() < TUNING.swap:
            one, other = (int(rng.choice(choice)) for _ in range(2))
            choice[:] = np.where(choice == one, other, np.where(choice == other, one, choice))
        else:
            choice[first : max(last, first + 1)] = self._action(choice, min(first, len(choice) - 1))

    def _action(self, choice: I64, group: int) -> int:
        """Return an action for a group and others after it."""
        if self.taste is None:
            return int(self.rng.integers(len(self.deployers[0].actions)))
        return self.taste.pick(self.rng, choice, int(choice[group]))


def polish(found: Found) -> Found:
    """Return the deployment with the best shares that single moves lead to."""
    best, tries = found.evaluation, 0
    improved = True
    while improved and tries < TUNING.max_tries:
        improved = False
        for other in _neighbours(found.deployer, best):
            tries += 1
            if (other.missing_bytes, other.seconds) < (best.missing_bytes, best.seconds * (1 - 1e-9)):
                best, improved = other, True
                break
            if tries >= TUNING.max_tries:
                break
    return replace(found, evaluation=best)


def _neighbours(deployer: Deployer, evaluation: Evaluation) -> Iterator[Evaluation]:
    busy = evaluation.outcome.busy_s + evaluation.outcome.used / np.maximum(deployer.world.capacity, 1.0) * 1e-9
    for number in np.unique(evaluation.layout_of).tolist():
        layout = deployer.layouts[number]
        if len(layout.replicas) < 2:
            continue
        load = [max(float(busy[device]) for device in devices) for devices, _ in layout.replicas]
        order = sorted(range(len(load)), key=lambda index: (load[index], index))
        for source in reversed(order[-TUNING.num_ends:]):
            for target in order[:TUNING.num_ends]:
                if source != target:
                    moved = _with_move(layout, source, target)
                    layout_of = evaluation.layout_of.copy()
                    layout_of[layout_of == number] = deployer.layout_id(moved)
                    yield deployer.evaluate_layouts(layout_of)


def _with_move(layout: Layout, source: int, target: int) -> Layout:
    """Return the layout with one sample moved; a replica without samples is left out."""
    change = {source: -1, target: 1}
    counts = ((devices, samples + change.get(index, 0)) for index, (devices, samples) in enumerate(layout.replicas))
    return Layout(tuple((devices, samples) for devices, samples in counts if samples))
