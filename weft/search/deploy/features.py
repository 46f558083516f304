"""What the network is told about a state of the search: facts, decisions so far, and how they ran in the simulator.

A state is a choice for every group, of which the first ``num_decided`` in the order of weight are decided. The columns
that come from the simulation are *feedback*; they are the last of each array.

Facts (``find_facts``) are what can be said of a model on a cluster before anything is decided, free of units. Times are
divided by the mean time of an operator group in a step, bytes by what the fastest link carries in that time,
bandwidths by that of the fastest link, memory by what devices have. So neither a clock that counts in other units nor
a model and links that are larger by the same factor change anything. What is left spans decades, so its logarithm is
taken. The estimates of actions are rough: they need no simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64, Bool
from weft.search.deploy.actions import Action, Kind
from weft.search.deploy.deployer import Deployer, Evaluation
from weft.simulate.exchange_time import reduce_line

F32 = npt.NDArray[np.float32]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
_LARGEST: Final = 1e6


def log_scale(values: F64) -> F64:
    """Return ``values`` of zero and more, of which one is usual, with their decades drawn together."""
    return np.asarray(np.log1p(16.0 * np.clip(np.nan_to_num(values, nan=0.0, posinf=_LARGEST), 0.0, _LARGEST)) / 3.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Columns:
    """What facts and features both have; those of features have further columns."""

    ops: F32
    """[groups, features]"""
    devices: F32
    """[device groups, features]"""
    flow: F32
    """[groups, groups, features] of what the first sends to the second; all zero where they have nothing in common."""
    links: F32
    """[device groups, device groups, features]"""
    place: F32
    """[groups, device groups, features]"""
    actions: F32
    """[groups, actions, features], in a state [actions, features]"""
    members: F32
    """[actions, device groups] whether the action uses devices of the group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts(_Columns):
    """Features of a deployer that no decision changes, and what features of decisions are computed from."""

    kinds: F64
    """[actions, kinds + 2] the kind, shares by speed, the part of all devices."""
    load_s: F64
    """[groups, actions, devices] seconds of a step, by estimate."""
    exchange_s: F64
    """[groups, actions]"""
    memory: F64
    """[groups, actions, devices] bytes."""
    traffic: F64
    """[groups, groups] what they send each other both ways, as a part of all that each has to do with others."""
    work: F64
    """[groups] part of the whole."""
    device_group: I64
    """[devices]"""
    pair_start: I64
    """Links between the device groups ``i`` and ``j`` begin at ``pair_start[i * groups + j]`` of ``pair_resources``."""
    pair_resources: I64
    rank: I64
    """[groups] place in the order of decisions."""
    baseline_s: float
    """Data parallel."""


def find_facts(deployer: Deployer) -> Facts:
    """Return what can be said about a deployer before anything is decided."""
    scale = _Scale(deployer)
    uses = [_use(deployer, action) for action in deployer.actions]
    samples, part = (np.stack([use[side] for use in uses]) for side in (0, 1))
    rows = np.where(samples > 0, scale.base_s[:, None] + scale.slope_s[:, None] * samples, 0.0)
    load_s = rows * part * deployer.microbatches
    lines = np.asarray([_exchange_line(deployer, action) for action in deployer.actions])
    exchange_s = deployer.exchanges.group_bytes[:, None] * lines[:, 1] * float(deployer.problem.is_training)
    static = deployer.exchanges.static_bytes[:, None, None]
    memory = part * (samples > 0) * (static + deployer.world.saved_per_sample[:, None, None] * samples)
    kinds, power = _action_kinds(deployer)
    in_bytes, out_bytes, flow, traffic = _flows(deployer, scale)
    pair_start, pair_resources = _pairs(deployer)
    rank = np.empty(scale.num_groups, dtype=np.int64)
    rank[list(deployer.by_weight)] = np.arange(scale.num_groups)
    members = np.zeros((len(uses), len(deployer.device_groups)), dtype=np.float32)
    for index, action in enumerate(deployer.actions):
        members[index, list(action.device_groups)] = 1.0
    return Facts(
        ops=_op_features(deployer, scale, in_bytes, out_bytes, rank), devices=_device_features(deployer),
        flow=flow, links=_link_features(deployer, scale), place=_place_features(deployer, scale),
        actions=_action_features(scale, kinds, power, lines, load_s, rows.max(axis=2), exchange_s, memory),
        members=members, kinds=kinds, load_s=load_s, exchange_s=exchange_s, memory=memory, traffic=traffic,
        work=scale.seconds.mean(axis=1) / max(scale.seconds.mean(axis=1).sum(), 1e-300),
        device_group=np.asarray([deployer.group_of[device] for device in deployer.problem.devices], dtype=np.int64),
        pair_start=pair_start, pair_resources=pair_resources, rank=rank,
        baseline_s=deployer.evaluate((0,) * scale.num_groups).seconds)


class _Scale:
    """Times of groups on devices, and the units in which features are counted."""

    def __init__(self, deployer: Deployer) -> None:
        size, few = deployer.size, max(1, deployer.size // 4)
        self.num_groups = deployer.groups.num_groups
        self.seconds = self._group_seconds(deployer, size)
        """[groups, devices] of a micro-batch."""
        self.slope_s = (self.seconds - self._group_seconds(deployer, few)) / (size - few) if size > few else (
            self.seconds / size)
        self.base_s = np.maximum(self.seconds - self.slope_s * size, 0.0)
        """Of no samples; ``slope_s`` for each."""
        self.unit_s = float(self.seconds.mean()) * deployer.microbatches or 1.0
        """The mean group in a step."""
        rate = deployer.world.s_per_byte
        usable = rate[np.isfinite(rate) & (rate > 0)]
        self.fastest_s_per_byte = float(usable.min()) if len(usable) else 0.0
        capacity = deployer.world.capacity
        self.memory = float(capacity[np.isfinite(capacity)].min(initial=np.inf))

    @staticmethod
    def _group_seconds(deployer: Deployer, samples: int) -> F64:
        problem, start = deployer.problem, deployer.groups.start[:-1]
        return np.stack([np.add.reduceat(problem.op_seconds(device, samples), start) for device in problem.devices],
                        axis=1)

    def time(self, seconds: F64) -> F64:
        """Return seconds of a step as a feature."""
        return log_scale(seconds / self.unit_s)

    def moved(self, num_bytes: F64) -> F64:
        """Return bytes of a step as a feature."""
        return log_scale(num_bytes * self.fastest_s_per_byte / self.unit_s)


def _use(deployer: Deployer, action: Action) -> tuple[F64, F64]:
    """Return, by device, the samples that it takes at once, and the part of a group that it does on average."""
    samples, part = np.zeros(len(deployer.speeds)), np.zeros(len(deployer.speeds))
    speeds, stages = np.asarray(deployer.speeds), deployer.stages(action)
    places = ([deployer.device_groups[group] for group in action.device_groups] if action.kind == "pipeline groups"
              else [stage.devices for stage in stages])
    power = [speeds[list(place)].sum() for place in places]
    for stage, own in zip(stages, power, strict=True):
        for tp_group, count in stage.replicas:
            samples[list(tp_group)] = count
            share = own / speeds[list(action.devices)].sum() if len(stages) > 1 else 1.0
            part[list(tp_group)] = share / len(tp_group)
    return samples, part


def _exchange_line(deployer: Deployer, action: Action) -> tuple[float, float]:
    """Return latency and seconds per byte of all-reducing the gradients of a group with this action, about."""
    match action.kind:
        case "replicate":
            return _line(deployer, action.devices)
        case "tensor":
            tp_groups = action.tp_groups(deployer.device_groups)
            latency_s, s_per_byte = _line(deployer, tuple(tp_group[0] for tp_group in tp_groups))
            return latency_s, s_per_byte / action.degree
        case "pipeline groups":
            lines = [_line(deployer, deployer.device_groups[group]) for group in action.device_groups]
            return max(line[0] for line in lines), max(line[1] for line in lines)
    return 0.0, 0.0


def _line(deployer: Deployer, devices: Sequence[DeviceId]) -> tuple[float, float]:
    if len(devices) < 2:
        return 0.0, 0.0
    whole = max(float(deployer.exchanges.group_bytes.sum()), 1.0)
    line = reduce_line(deployer.problem.costs, whole, devices)
    return line.latency_s, line.s_per_byte


def _action_kinds(deployer: Deployer) -> tuple[F64, F64]:
    """Return [actions, kinds + 2] and the part of all speed that each action has."""
    speeds = np.asarray(deployer.speeds)
    rows = [[float(action.kind == kind) for kind in KINDS] + [float(action.by_speed), len(action.devices) / len(speeds)]
            for action in deployer.actions]
    power = [speeds[list(action.devices)].sum() / speeds.sum() for action in deployer.actions]
    return np.asarray(rows), np.asarray(power)


def _flows(deployer: Deployer, scale: _Scale) -> tuple[F64, F64, F32, F64]:
    """Return bytes that each group gets and sends in a step, features of pairs, and how pairs share the traffic."""
    num = scale.num_groups
    sent = np.zeros((2, num, num))
    for bundle in deployer.groups.bundles:
        amounts = deployer.microbatches * np.asarray([
            bundle.bytes_per_sample * deployer.size + bundle.fixed_bytes,
            bundle.gradient_bytes_per_sample * deployer.size + bundle.gradient_fixed_bytes])
        sent[:, bundle.producer, list(bundle.consumers)] += amounts[:, None]
    flow = np.zeros((num, num, 3), dtype=np.float32)
    flow[:, :, 0], flow[:, :, 1] = scale.moved(sent[0]), scale.moved(sent[1])
    flow[np.arange(num - 1), np.arange(1, num), 2] = 1.0  # Neighbours in the order are laid out together.
    both = sent.sum(axis=0)
    both = both + both.T
    return sent[0].sum(axis=0), sent[0].sum(axis=1), flow, both / np.maximum(both.sum(axis=1, keepdims=True), 1e-300)


def _op_features(deployer: Deployer, scale: _Scale, in_bytes: F64, out_bytes: F64, rank: I64) -> F32:
    seconds, num = scale.seconds * deployer.microbatches, scale.num_groups
    saved = deployer.world.saved_per_sample * deployer.size
    columns = [
        scale.time(seconds.mean(axis=1)), scale.time(seconds.min(axis=1)), scale.time(seconds.max(axis=1)),
        scale.base_s.sum(axis=1) / np.maximum(scale.seconds.sum(axis=1), 1e-300),
        scale.moved(deployer.exchanges.group_bytes), scale.moved(in_bytes), scale.moved(out_bytes),
        log_scale(saved * num / scale.memory), log_scale(deployer.exchanges.static_bytes * num / scale.memory),
        np.arange(num) / num, rank / num]
    return np.stack(columns, axis=1).astype(np.float32)


def _device_features(deployer: Deployer) -> F32:
    speeds, capacity = np.asarray(deployer.speeds), deployer.world.capacity
    static = float(deployer.exchanges.static_bytes.sum())
    rows = []
    for members in deployer.device_groups:
        own = list(members)
        rows.append([np.log2(len(own)) / 3, len(own) / len(speeds), speeds[own].sum() / speeds.sum(),
                     speeds[own].mean() / speeds.max(), float(log_scale(static / capacity[own].min())),
                     float(np.isinf(capacity[own]).all())])
    return np.asarray(rows, dtype=np.float32)


def _device_pairs(deployer: Deployer) -> list[list[tuple[DeviceId, DeviceId]]]:
    """Return the pairs of different devices between each two device groups."""
    return [[(a, b) for a in senders for b in receivers if a != b]
            for senders in deployer.device_groups for receivers in deployer.device_groups]


def _link_features(deployer: Deployer, scale: _Scale) -> F32:
    num, world = len(deployer.device_groups), deployer.world
    links = np.zeros((num * num, 3), dtype=np.float32)
    for number, pairs in enumerate(_device_pairs(deployer)):
        if pairs:
            rate = min(world.s_per_byte[pair] for pair in pairs) / (scale.fastest_s_per_byte or 1.0)
            latency = min(world.latency_s[pair] for pair in pairs) / scale.unit_s
            links[number] = 1.0, log_scale(np.asarray(rate)), log_scale(np.asarray(latency))
    return links.reshape(num, num, 3)


def _place_features(deployer: Deployer, scale: _Scale) -> F32:
    columns = []
    for members in deployer.device_groups:
        own = list(members)
        seconds = scale.seconds[:, own].mean(axis=1) * deployer.microbatches
        share = deployer.size / len(own)
        shared = (scale.base_s + scale.slope_s * share)[:, own].mean(axis=1) * deployer.microbatches
        ratio = scale.seconds.min(axis=1) / np.maximum(scale.seconds[:, own].mean(axis=1), 1e-300)
        columns.append(np.stack([scale.time(seconds), scale.time(shared), ratio], axis=1))
    return np.stack(columns, axis=1).astype(np.float32)


def _action_features(scale: _Scale, kinds: F64, power: F64, lines: F64, load_s: F64, stage_s: F64, exchange_s: F64,
                     memory: F64) -> F32:
    """Return [groups, actions, features]; ``stage_s`` is the time of a micro-batch on the slowest device."""
    num_groups, num_actions = exchange_s.shape
    most = load_s.max(axis=2)
    fastest_line = scale.fastest_s_per_byte or 1.0
    same = np.concatenate([kinds, power[:, None], log_scale(lines[:, :1] / scale.unit_s),
                           log_scale(lines[:, 1:] / fastest_line)], axis=1)
    columns = [scale.time(most), np.log(_positive(most) / _positive(most.min(axis=1, keepdims=True))) / 3.0,
               scale.time(stage_s), scale.time(exchange_s), scale.time(exchange_s + most),
               log_scale(memory.max(axis=2) * num_groups / scale.memory)]
    own = np.stack(columns, axis=2)
    every = np.broadcast_to(same, (num_groups, num_actions, same.shape[1]))
    return np.concatenate([every, own], axis=2).astype(np.float32)


def _positive(values: F64) -> F64:
    return np.maximum(values, 1e-300)


def _pairs(deployer: Deployer) -> tuple[I64, I64]:
    """Return (start, resources): what transfers between each two device groups hold."""
    world, num = deployer.world, len(deployer.speeds)
    found = [sorted({resource for a, b in pairs for resource in world.resources[
        world.resource_start[a * num + b] : world.resource_start[a * num + b + 1]].tolist()})
        for pairs in _device_pairs(deployer)]
    return (np.cumsum([0, *map(len, found)]).astype(np.int64),
            np.asarray(list(itertools.chain.from_iterable(found)), dtype=np.int64))


_NUM_KINDS: Final = len(KINDS) + 2
WIDTHS: Final = {"ops": 11 + _NUM_KINDS + 4 + 2, "devices": 6 + 5, "flow": 3, "links": 3 + 1, "place": 3 + 1,
                 "actions": _NUM_KINDS + 3 + 6 + 5 + 5, "world": 5 + 2}
"""Columns of each kind of feature."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Features(_Columns):
    """One state as arrays."""

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
