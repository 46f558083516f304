"""Tree search over deployments: decide the heaviest groups first, and look deeper where it pays (PUCT).

A node of the tree has decided the actions of the first groups in the order of weight; groups that are not decided
follow the heaviest decided one, or, in a restart from a good deployment, stay as they are there. So every node is a
whole deployment, and its value is that of a simulation. Each step goes down from the root by

    argmax over actions  Q + explore * P * sqrt(visits of the node) / (1 + visits of the action)

to a node that has not been simulated, simulates it, and takes its value up. ``P`` is the policy's prior. ``Q`` lies
between the mean and the best of the values below, scaled to 0..1 by what has been seen. The first decision, above all
groups, is the number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.model.graph import F64, I64
from weft.search.deploy.deployer import Deployer, Evaluation, Found
from weft.search.deploy.policy import Policy
from weft.search.deploy.tuning import TUNING


@dataclass(slots=True, eq=False)
class _Node:
    deployer: Deployer
    choice: tuple[int, ...]
    num_decided: int
    evaluation: Evaluation
    value: float
    visits: I64
    total: F64
    best: F64
    prior: F64 | None = None
    """Asked for when an action is first chosen here: most nodes are never come back to."""
    children: dict[int, _Node] = field(default_factory=dict)


class TreeSearch:
    """Searches deployments for several numbers of micro-batches; ``start`` makes it a restart from a deployment."""

    def __init__(self, deployers: Sequence[Deployer], policy: Policy, *, start: Found | None = None) -> None:
        self.policy, self.start = policy, start
        self.deployers = tuple(deployers) if start is None else (start.deployer,)
        self.best: Found | None = None
        self._low, self._high = math.inf, -math.inf
        self._scale_s: float | None = None
        self._roots: list[_Node] = []
        self._visits = np.zeros(len(self.deployers), dtype=np.int64)

    def step(self) -> Found:
        """Simulate one more deployment and return it."""
        if len(self._roots) < len(self.deployers):
            return self._plant()
        root = self._roots[self._choose_root()]
        path: list[tuple[_Node, int]] = []
        node = root
        while True:
            action = self._choose(node)
            path.append((node, action))
            if action not in node.children:
                break
            node = node.children[action]
            if node.num_decided == len(node.choice):
                break
        found = None
        if action not in path[-1][0].children:
            child, found = self._expand(path[-1][0], action)
            path[-1][0].children[action] = child
            node = child
        for above, taken in path:
            above.visits[taken] += 1
            above.total[taken] += node.value
            above.best[taken] = max(above.best[taken], node.value)
        if found is None:
            found = self._found(node.deployer, node.choice)
        return found

    def _plant(self) -> Found:
        """Simulate the root for the next number of micro-batches."""
        deployer = self.deployers[len(self._roots)]
        choice = (0,) * deployer.groups.num_groups if self.start is None else self.start.choice
        found = self._found(deployer, choice)
        self._roots.append(self._node(found, 0))
        return found

    def _choose_root(self) -> int:
        if len(self._roots) == 1:
            return 0
        worth = [self._scaled(float(node.best.max())) if node.visits.any() else self._scaled(node.value)
                 for node in self._roots]
        explore = math.sqrt(self._visits.sum() + 1) / (1 + self._visits) / len(self._roots)
        chosen = int(np.argmax(np.asarray(worth) + TUNING.explore * explore))
        self._visits[chosen] += 1
        return chosen

    def _choose(self, node: _Node) -> int:
        if node.prior is None:
            node.prior = self.policy.prior(node.deployer, node.choice, node.num_decided, node.evaluation)
        visited = node.visits > 0
        mean = np.where(visited, node.total / np.maximum(node.visits, 1), node.value)
        best = np.where(visited, node.best, node.value)
        worth = self._scaled(TUNING.best_part * best + (1 - TUNING.best_part) * mean)
        explore = TUNING.explore * node.prior * math.sqrt(node.visits.sum() + 1) / (1 + node.visits)
        return int(np.argmax(worth + explore))

    def _scaled(self, value: F64 | float) -> F64:
        span = self._high - self._low
        return np.asarray((value - self._low) / span if span > 0 else np.zeros_like(value), dtype=np.float64)

    def _expand(self, node: _Node, action: int) -> tuple[_Node, Found]:
        order, decided = node.deployer.by_weight, node.num_decided
        choice = list(node.choice)
        choice[order[decided]] = action
        if self.start is None and decided == 0:
            choice = [action] * len(choice)
        found = self._found(node.deployer, tuple(choice))
        return self._node(found, decided + 1), found

    def _node(self, found: Found, decided: int) -> _Node:
        num_actions = len(found.deployer.actions)
        return _Node(found.deployer, found.choice, decided, found.evaluation, self._value(found),
                     np.zeros(num_actions, dtype=np.int64), np.zeros(num_actions), np.full(num_actions, -math.inf))

    def _found(self, deployer: Deployer, choice: tuple[int, ...]) -> Found:
        found = deployer.find(choice)
        if self.best is None or found.key < self.best.key:
            self.best = found
        return found

    def _value(self, found: Found) -> float:
        """Return how good a deployment is: speed against the first one; less than anything seen if it does not fit."""
        evaluation = found.evaluation
        if self._scale_s is None:
            self._scale_s = evaluation.seconds
        value = math.log(self._scale_s / evaluation.seconds) if math.isfinite(evaluation.seconds) else -10.0
        if not evaluation.fits:
            value = min(value, 0.0) - 1.0
        else:
            self._low, self._high = min(self._low, value), max(self._high, value)
        if self._low == math.inf:
            self._low, self._high = value, value
        return value
