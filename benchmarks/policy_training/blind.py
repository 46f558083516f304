"""What a network knows without the simulator: features whose feedback is blank, and the policy that sees only these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from weft.search.deploy.deployer import Deployer, Evaluation
from weft.search.deploy.features import Features, Featurizer
from weft.search.deploy.policy import NetworkPolicy, UniformPolicy, load_policy

_FEEDBACK: Final = {"ops": 2, "devices": 5, "links": 1, "actions": 5, "world": 2}
"""So many columns at the end of each come from the simulation."""


class BlindFeaturizer(Featurizer):
    """Makes features without feedback."""

    def features(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> Features:
        """Return the features of a state, what the simulation said left out."""
        return without_feedback(super().features(deployer, choice, num_decided, evaluation))


def blinded(policy: NetworkPolicy | UniformPolicy) -> NetworkPolicy | UniformPolicy:
    """Return the policy, which no longer sees what the simulator says."""
    if isinstance(policy, NetworkPolicy):
        policy.featurizer = BlindFeaturizer()
    return policy


def load_blind_policy() -> NetworkPolicy | UniformPolicy:
    """Return Weft's policy without feedback."""
    return blinded(load_policy())


def without_feedback(features: Features) -> Features:
    """Return the features without what the simulation said."""
    blank = {}
    for name, count in _FEEDBACK.items():
        blank[name] = getattr(features, name).copy()
        blank[name][..., -count:] = 0.0
    return replace(features, **blank)
