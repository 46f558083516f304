"""What the network is told about a state of the search: facts, decisions so far, and how they ran in the simulator.

A state is a choice for every group, of which the first ``num_decided`` in the order of weight are decided. The columns
that come from the simulation are *feedback*; ``without_feedback`` blanks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np

from weft.model.graph import F64, I64, Bool
from weft.search.deploy.facts import KINDS, Facts, find_facts, log_scale
from weft.search.deploy.weights import F32

if TYPE_CHECKING:
    from weft.search.deploy.deployer import Deployer, Evaluation

_FEEDBACK: Final = {"ops": 2, "devices": 5, "links": 1, "actions": 5, "world": 2}
"""So many columns at the end of each come from the simulation."""
_NUM_KINDS: Final = len(KINDS) + 2
WIDTHS: Final = {"ops": 11 + _NUM_KINDS + 4 + 2, "devices": 6 + 5, "flow": 3, "links": 3 + 1, "place": 3 + 1,
                 "actions": _NUM_KINDS + 3 + 6 + 5 + 5, "world": 5 + 2}
"""Columns of each kind of feature."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """One state as arrays."""

    ops: F32
    """[groups, ...]"""
    devices: F32
    """[device groups, ...]"""
    flow: F32
    """[groups, groups, ...]"""
    links: F32
    """[device groups, device groups, ...]"""
    place: F32
    """[groups, device groups, ...]"""
    actions: F32
    """[actions, ...]"""
    members: F32
    """[actions, device groups]"""
    world: F32
    """[...] of the whole."""
    group: int
    """The group to decide."""


class Featurizer:
    """Makes features; facts of a deployer are found once and kept as long as it lives."""

    def __init__(self) -> None:
        self._facts: WeakKeyDictionary[Deployer, _Known] = WeakKeyDictionary()

    def features(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> Features:
        """Return the features of a state in which ``deployer.by_weight[num_decided]`` is to be decided."""
        known = self._facts.get(deployer)
        if known is None:
            known = self._facts[deployer] = _Known(find_facts(deployer))
        return known.features(deployer, np.asarray(choice, dtype=np.int64), num_decided, evaluation)


def without_feedback(features: Features) -> Features:
    """Return the features without what the simulation said."""
    blank = {}
    for name, count in _FEEDBACK.items():
        blank[name] = getattr(features, name).copy()
        blank[name][..., -count:] = 0.0
    return replace(features, **blank)


class _Known:
    """Facts of a deployer, and parts of the device groups in the layouts seen so far."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._shares: dict[int, F64] = {}

    def features(self, deployer: Deployer, choice: I64, num_decided: int, evaluation: Evaluation) -> Features:
        facts, outcome = self.facts, evaluation.outcome
        group = deployer.by_weight[num_decided]
        num_groups = len(choice)
        seconds = evaluation.seconds if np.isfinite(evaluation.seconds) and evaluation.seconds > 0 else 1e300
        decided = facts.rank < num_decided
        same_after = np.append(evaluation.layout_of[1:] == evaluation.layout_of[:-1], False)
        states = np.stack([decided, np.arange(num_groups) == group, same_after, np.roll(same_after, 1)], axis=1)
        feedback = np.stack([outcome.group_end_s / seconds, facts.exchange_s[np.arange(num_groups), choice] / seconds],
                            axis=1)
        shares = np.stack([self._share(deployer, int(layout)) for layout in evaluation.layout_of])
        links = self._link_feedback(outcome.link_busy_s / seconds, len(deployer.device_groups))
        return Features(
            ops=_join(facts.ops, facts.kinds[choice], states, np.minimum(feedback, 4.0)),
            devices=_join(facts.devices, self._device_feedback(deployer, evaluation, seconds, links)),
            flow=facts.flow, links=_join(facts.links, links[:, :, None]), place=_join(facts.place, shares[:, :, None]),
            actions=_join(facts.actions[group], self._action_state(choice, decided, group),
                          self._action_feedback(deployer, choice, group, evaluation, seconds)),
            members=facts.members, world=self._world(deployer, num_decided, evaluation), group=group)

    def _share(self, deployer: Deployer, layout: int) -> F64:
        """Return which part of the samples each device group has in a layout."""
        known = self._shares.get(layout)
        if known is None:
            known = self._shares[layout] = np.zeros(len(deployer.device_groups))
            for devices, samples in deployer.layouts[layout].replicas:
                for device in devices:
                    known[self.facts.device_group[device]] += samples / len(devices) / deployer.size
        return known

    def _link_feedback(self, busy: F64, num: int) -> F64:
        """Return how busy the busiest link between each two device groups is."""
        start = self.facts.pair_start
        result, filled = np.zeros(num * num), np.flatnonzero(np.diff(start) > 0)
        if len(filled):
            result[filled] = np.maximum.reduceat(busy[self.facts.pair_resources], start[filled])
        return np.minimum(result.reshape(num, num), 4.0)

    def _device_feedback(self, deployer: Deployer, evaluation: Evaluation, seconds: float, links: F64) -> F64:
        outcome, of_device = evaluation.outcome, self.facts.device_group
        num = len(deployer.device_groups)
        busy, used = outcome.busy_s / seconds, outcome.used / deployer.world.capacity
        most = np.zeros((3, num))
        for row, values in enumerate((busy, used, outcome.exchange_s / seconds)):
            np.maximum.at(most[row], of_device, values)
        mean = np.bincount(of_device, busy, num) / np.bincount(of_device, minlength=num)
        return np.asarray(np.minimum(np.stack([mean, *most, links.max(axis=1)], axis=1), 4.0))

    def _action_state(self, choice: I64, decided: Bool, group: int) -> F64:
        """Return what the decisions so far say about each action: who has it, and how close those are."""
        facts = self.facts
        num_actions = len(facts.kinds)
        is_same = np.zeros((3, num_actions))
        is_same[0, choice[group]] = 1.0
        for row, other in ((1, group - 1), (2, group + 1)):
            if 0 <= other < len(choice):
                is_same[row, choice[other]] = 1.0
        same_work = np.bincount(choice, facts.work * decided, num_actions)
        members = facts.members / facts.members.sum(axis=1, keepdims=True)
        near = facts.traffic[group] @ members[choice]
        return np.stack([*is_same, same_work, facts.members @ near], axis=1)

    def _action_feedback(self, deployer: Deployer, choice: I64, group: int, evaluation: Evaluation,
                         seconds: float) -> F64:
        """Return what would become of the busiest device, by estimate, if only this group took each action."""
        facts, outcome, now = self.facts, evaluation.outcome, choice[group]
        busy = outcome.busy_s + facts.load_s[group] - facts.load_s[group, now]
        exchange = np.maximum(outcome.exchange_s.max() + facts.exchange_s[group] - facts.exchange_s[group, now], 0.0)
        used = (outcome.used + facts.memory[group] - facts.memory[group, now]) / deployer.world.capacity
        most, before = busy.max(axis=1) / seconds, outcome.busy_s.max() / seconds
        columns = [log_scale(most), np.clip(4.0 * (most - before), -4.0, 4.0), log_scale(exchange / seconds),
                   np.minimum(used.max(axis=1), 4.0), used.max(axis=1) > 1.0]
        return np.stack(columns, axis=1)

    def _world(self, deployer: Deployer, num_decided: int, evaluation: Evaluation) -> F32:
        num_groups, num_devices = deployer.groups.num_groups, len(deployer.speeds)
        ratio = evaluation.seconds / max(self.facts.baseline_s, 1e-300)
        values = [np.log2(deployer.microbatches) / 4, num_decided / num_groups, num_groups / 60,
                  np.log2(num_devices) / 4, float(deployer.problem.is_training),
                  float(np.clip(np.log(ratio), -4.0, 4.0)) if np.isfinite(ratio) and ratio > 0 else 4.0,
                  float(evaluation.fits)]
        return np.asarray(values, dtype=np.float32)


def _join(*parts: F64 | F32) -> F32:
    return np.concatenate([np.asarray(part, dtype=np.float32) for part in parts], axis=-1)
