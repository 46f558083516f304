"""What the network learns from: states of small cases, and how good each action turned out to be there.

The expert has time: it tries every action for all groups alike and the best pipelines, follows the policy so far, where
there is one, and anneals from the best of those. Then it goes through states on the way to good deployments, some of
them with decisions that are not so good, and tries every action for the group to decide. What is still to be decided is
completed in several ways: as in good deployments, and with the action taken by the groups next to it or by all. The
best of those is what the action is worth. States are as the tree search meets them: undecided groups follow the
heaviest one, or stay as they are in a good deployment.

The examples of a case are one file: a compressed archive of arrays in half precision, without code.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.policy_training.cases import training_case
from weft.base.array_files import read_arrays
from weft.base.errors import InputError
from weft.base.files import write_atomic
from weft.model.graph import F64
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.features import WIDTHS, Features, Featurizer
from weft.search.deploy.local import Annealer
from weft.search.deploy.op_groups import group_operators
from weft.search.deploy.policy import NetworkPolicy
from weft.search.deploy.search import TreeSearch, microbatch_numbers
from weft.search.deploy.seeds import staged_choices

Choice = tuple[int, ...]
MAX_GAP: Final = 10.0
_NOT_FITTING: Final = 3.0
"""What a deployment that does not fit loses at least: logarithm of time."""
_STARTS: Final = 6
_ANNEALINGS: Final = 3
"""From so many of the best starts."""
_CLOSE: Final = 16
"""So many of the best actions are completed in further ways."""
_MAX_GROUPS: Final = (20, 36, 60)
_WRONG: Final = 0.1
"""Part of the decisions that are not those of a good deployment."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """A state, what each action loses there against the best, and the best."""

    features: Features
    gaps: F64
    """[actions] logarithm of time against the best action's, at most ``MAX_GAP``."""
    value: float
    """Logarithm of the best time against that of data parallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long the expert looks at a case."""

    anneal_steps: int = 400
    """Of each annealing."""
    tree_steps: int = 200
    """With the policy, where there is one."""
    num_states: int = 12


def make_examples(seed: int, policy: NetworkPolicy | None, effort: Effort) -> list[Example]:
    """Return examples of the training case of a seed; none where nothing that fits was found."""
    rng = np.random.default_rng([seed, 66])
    problem = training_case(seed)
    seconds = np.mean([problem.op_seconds(device, problem.graph.batch) for device in problem.devices], axis=0)
    groups = group_operators(problem.graph, seconds, max_groups=int(rng.choice(_MAX_GROUPS)))
    expert = _Expert(Deployer(problem, groups, int(rng.choice(microbatch_numbers(problem)))), rng, effort)
    expert.search(policy)
    return expert.examples() if expert.has_answer else []


class _Expert:
    def __init__(self, deployer: Deployer, rng: np.random.Generator, effort: Effort) -> None:
        self.deployer, self.rng, self.effort = deployer, rng, effort
        self.featurizer = Featurizer()
        self.good: list[Choice] = []
        self.visited: list[Choice] = []
        """Deployments on whose way the policy came past."""
        self.num_groups, self.num_actions = deployer.groups.num_groups, len(deployer.actions)
        self._losses: dict[Choice, float] = {}
        self.baseline_s = deployer.evaluate((0,) * self.num_groups).seconds

    def loss(self, choice: Choice) -> float:
        """Return the logarithm of a deployment's time against data parallel, with a penalty if it does not fit."""
        known = self._losses.get(choice)
        if known is None:
            found = self.deployer.evaluate(choice)
            missing = found.missing_bytes / max(float(self.deployer.exchanges.static_bytes.sum()), 1.0)
            penalty = 0.0 if found.fits else _NOT_FITTING + math.log1p(missing)
            ratio = max(found.seconds, 1e-300) / max(self.baseline_s, 1e-300)
            known = self._losses[choice] = math.log(ratio) + penalty if math.isfinite(ratio) else 2 * MAX_GAP
        return known

    @property
    def has_answer(self) -> bool:
        """Return whether anything that was found fits, and there is something to decide."""
        return self.num_actions > 1 and self.deployer.evaluate(self.good[0]).fits

    def search(self, policy: NetworkPolicy | None) -> None:
        """Collect good deployments, the best first."""
        alike = [(action,) * self.num_groups for action in range(self.num_actions)]
        self.good = sorted([*alike, *staged_choices(self.deployer)], key=self.loss)[:_STARTS]
        if policy is not None:
            self._follow(policy)
        for index, choice in enumerate(sorted(dict.fromkeys(self.good), key=self.loss)[:_ANNEALINGS]):
            self._anneal(choice, seed=index)
        self._sort()

    def _sort(self) -> None:
        self.good = sorted(dict.fromkeys(self.good), key=self.loss)[:40]

    def _anneal(self, choice: Choice, *, seed: int) -> None:
        annealer = Annealer([self.deployer], self.deployer.find(choice), seed=seed)
        for hot in (0.05, 0.02, 0.01, 0.004):
            annealer.run(self.effort.anneal_steps // 4, hot=hot, cold=hot / 4)
            self.good.append(annealer.best.choice)

    def _follow(self, policy: NetworkPolicy) -> None:
        """Search the tree with the policy, and follow it twice: always its best action, and by its probabilities."""
        tree = TreeSearch([self.deployer], policy)
        for _ in range(self.effort.tree_steps):
            tree.step()
        assert tree.best is not None
        self.good.append(tree.best.choice)
        for greedy in (True, False):
            choice = [0] * self.num_groups
            for decided, group in enumerate(self.deployer.by_weight):
                prior = policy.prior(self.deployer, choice, decided, self.deployer.evaluate(choice))
                action = int(np.argmax(prior) if greedy else self.rng.choice(len(prior), p=prior / prior.sum()))
                choice[group] = action
                if decided == 0:
                    choice = [action] * self.num_groups
            self.visited.append(tuple(choice))
        self.good += self.visited

    # ---- states -----------------------------------------------------------------------------------------------------

    def examples(self) -> list[Example]:
        """Return examples of states on the way to good deployments."""
        result = []
        for decided in self._depths():
            choice = self._state(decided)
            result.append(self._example(choice, decided))
            self._sort()
        return result

    def _depths(self) -> list[int]:
        """Return how much is decided in the states: most of them early, where it matters."""
        most = self.num_groups - 1
        depths = [0, min(1, most), *(int(most * self.rng.random() ** 2) for _ in range(self.effort.num_states - 2))]
        return sorted(depths[: self.effort.num_states])

    def _state(self, decided: int) -> Choice:
        """Return a choice as the tree search might meet it."""
        order, rng = self.deployer.by_weight, self.rng
        way = self.good[int(len(self.good) * rng.random() ** 3)]
        if self.visited and rng.random() < 0.4:
            way = self.visited[int(rng.integers(len(self.visited)))]
        stays = rng.random() < 0.4
        if stays:
            choice = list(self.good[int(len(self.good) * rng.random() ** 2)])
        else:
            choice = [way[order[0]] if decided else 0] * self.num_groups
        for group in order[:decided]:
            choice[group] = int(rng.integers(self.num_actions)) if rng.random() < _WRONG and (
                group != order[0] or stays) else way[group]
        return tuple(choice)

    def _example(self, choice: Choice, decided: int) -> Example:
        losses = self._action_losses(choice, decided)
        features = self.featurizer.features(self.deployer, choice, decided, self.deployer.evaluate(choice))
        return Example(features=features, gaps=np.minimum(losses - losses.min(), MAX_GAP),
                       value=float(np.clip(losses.min(), -MAX_GAP, MAX_GAP)))

    def _action_losses(self, choice: Choice, decided: int) -> F64:
        """Return the best that was found with each action."""
        order = self.deployer.by_weight
        is_open = np.ones(self.num_groups, dtype=bool)
        is_open[list(order[: decided + 1])] = False
        group = order[decided]
        near = _stretch(is_open, group)
        others = [self.good[int(index)] for index in self.rng.integers(len(self.good), size=2)]
        best, losses = self.good[0], np.full(self.num_actions, np.inf)

        def attempt(action: int, rest: Choice, taken: Sequence[int]) -> None:
            new = np.where(is_open, rest, choice)
            new[group] = action
            new[list(taken)] = action
            candidate = tuple(new.tolist())
            loss = self.loss(candidate)
            losses[action] = min(losses[action], loss)
            if loss < self.loss(self.good[0]):
                self.good.insert(0, candidate)

        for action in range(self.num_actions):
            attempt(action, best, ())
            attempt(action, best, near)
            if decided < 2:
                attempt(action, choice, np.flatnonzero(is_open).tolist())
        for action in np.argsort(losses, kind="stable")[:_CLOSE].tolist():
            for rest in (choice, *others):
                attempt(action, rest, ())
                attempt(action, rest, near)
        return losses


def _stretch(is_open: F64, group: int) -> list[int]:
    """Return the open groups next to a group, up to the first that is decided on either side."""
    result = []
    for step in (-1, 1):
        other = group + step
        while 0 <= other < len(is_open) and is_open[other]:
            result.append(other)
            other += step
    return result


# ---- files ----------------------------------------------------------------------------------------------------------

MAX_BYTES: Final = 256 << 20
"""Unpacked; a case has a thousandth of that."""
_SHARED: Final = ("flow", "members")
"""Features that all states of a case have in common."""
_OWN: Final = tuple(field.name for field in fields(Features) if field.name not in (*_SHARED, "group"))


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write the examples of one case; there may be none."""
    arrays: dict[str, Any] = {"count": np.asarray(len(examples))}
    if examples:
        states = [example.features for example in examples]
        arrays |= {name: getattr(states[0], name).astype(np.float16) for name in _SHARED}
        arrays |= {name: np.stack([getattr(state, name) for state in states]).astype(np.float16) for name in _OWN}
        arrays["group"] = np.asarray([state.group for state in states], dtype=np.int64)
        arrays["gaps"] = np.stack([example.gaps for example in examples]).astype(np.float16)
        arrays["value"] = np.asarray([example.value for example in examples], dtype=np.float32)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def read_examples(path: Path) -> list[Example]:
    """Return the examples of one case."""
    try:
        arrays = read_arrays(path, max_bytes=MAX_BYTES)
        return [_example(arrays, row) for row in range(_count(arrays))]
    except (InputError, KeyError, ValueError, IndexError, TypeError, OverflowError) as problem:
        raise InputError(f"the examples in {str(path)!r} are damaged ({problem}): delete the file, and it is made "
                         "again") from problem


def _count(arrays: Mapping[str, np.ndarray]) -> int:
    """Return how many examples there are, after checking that all arrays fit together and are finite."""
    count = int(arrays["count"])
    if count == 0:
        return 0
    own = (*_OWN, "group", "gaps", "value")
    groups, devices, actions = (arrays[name].shape[axis] for name, axis in (("ops", 1), ("devices", 1), ("actions", 1)))
    sizes = {"ops": (groups,), "devices": (devices,), "flow": (groups, groups), "links": (devices, devices),
             "place": (groups, devices), "actions": (actions,), "members": (actions,), "world": (), "group": None,
             "gaps": None, "value": None}
    for name, size in sizes.items():
        rows = (count,) if name in own else ()
        wanted = (*rows, *size, WIDTHS.get(name, devices)) if size is not None else (
            (count, actions) if name == "gaps" else (count,))
        if arrays[name].shape != wanted:
            raise ValueError(f"{name} has the shape {list(arrays[name].shape)}, not {list(wanted)}")
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name} has numbers that are not finite")
    if arrays["group"].dtype.kind != "i" or arrays["group"].min() < 0 or arrays["group"].max() >= groups:
        raise ValueError(f"group must be one of {groups}")
    return count


def _example(arrays: Mapping[str, np.ndarray], row: int) -> Example:
    own = {name: arrays[name][row] for name in _OWN}
    shared = {name: arrays[name] for name in _SHARED}
    return Example(features=Features(**own, **shared, group=int(arrays["group"][row])), gaps=arrays["gaps"][row],
                   value=float(arrays["value"][row]))
