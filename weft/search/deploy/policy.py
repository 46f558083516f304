"""The prior of the tree search: which action is likely to be good for the next group.

``load_policy`` gives the network's with the weights that come with Weft. Weights that are missing or broken only cost
quality: there is one warning, and all actions are equally likely.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from weft.base.errors import InputError
from weft.model.graph import F64
from weft.search.deploy.deployer import Deployer, Evaluation
from weft.search.deploy.features import Featurizer, without_feedback
from weft.search.deploy.forward import ForwardNetwork, check_shapes
from weft.search.deploy.weights import F32, read_weights, write_weights

WEIGHTS: Final = Path(__file__).with_name("policy.safetensors")
"""The weights that come with Weft."""
FORMAT: Final = {"format": "weft.deploy-policy", "version": "1"}
"""What a weights file says of itself; the version counts changes of features and network."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assessment:
    """What a policy makes of a state."""

    prior: F64
    """Probability of each action."""
    value: float
    """Logarithm of the best step time that can still be reached, as a part of that of data parallel."""


class Policy(Protocol):
    """Says how likely each action is to be good."""

    def prior(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> F64:
        """Return the probability of each action for the group ``deployer.by_weight[num_decided]``."""


class UniformPolicy:
    """Knows nothing: all actions are equally likely."""

    def prior(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> F64:
        """Return equal probabilities."""
        return np.full(len(deployer.actions), 1.0 / len(deployer.actions))


class NetworkPolicy:
    """Asks a network; ``use_feedback=False`` hides from it what the simulator said."""

    def __init__(self, arrays: Mapping[str, F32], *, use_feedback: bool = True) -> None:
        self._network, self._featurizer, self._use_feedback = ForwardNetwork(arrays), Featurizer(), use_feedback

    def prior(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> F64:
        """Return the probability of each action for the group ``deployer.by_weight[num_decided]``."""
        return self.assess(deployer, choice, num_decided, evaluation).prior

    def assess(self, deployer: Deployer, choice: Sequence[int], num_decided: int,
               evaluation: Evaluation) -> Assessment:
        """Return what the network makes of a state: ``choice`` for every group, the first of them decided."""
        state = self._featurizer.features(deployer, choice, num_decided, evaluation)
        logits, value = self._network(state if self._use_feedback else without_feedback(state))
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return Assessment(prior=weights / weights.sum(), value=value)


def load_policy(path: Path | None = None, *, use_feedback: bool = True) -> NetworkPolicy | UniformPolicy:
    """Return the network's policy with the weights in the file, by default Weft's own.

    A file that is missing, broken or of another version gives a warning and the policy that knows nothing.
    """
    try:
        return NetworkPolicy(read_policy(path or WEIGHTS), use_feedback=use_feedback)
    except InputError as problem:
        _log.warning("deployments are searched without the network: %s", problem)
        return UniformPolicy()


def read_policy(path: Path) -> dict[str, F32]:
    """Return the network's weights in a file, by name."""
    arrays, metadata = read_weights(path)
    found = {key: metadata.get(key) for key in FORMAT}
    if found != FORMAT:
        raise InputError(f"the weights file {str(path)!r} is for {found['format']!r}, version {found['version']!r}; "
                         f"this Weft needs {FORMAT['format']!r}, version {FORMAT['version']!r}")
    check_shapes(arrays)
    return arrays


def write_policy(path: Path, arrays: Mapping[str, F32], facts: Mapping[str, str]) -> None:
    """Write a network's weights and facts about their training."""
    write_weights(path, arrays, {**facts, **FORMAT})
