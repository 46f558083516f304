"""Plans from estimated settings: stages with their replicas and shardings, and the order of the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.model.graph import I64
from weft.plan.orders import Action, Order
from weft.plan.plan import Plan
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import SEGMENT_COUNTS, Estimate, Estimator
from weft.search.joint.path import pipeline_order
from weft.search.joint.setting import Setting, StageMesh, Team

BY = "joint"


def build_plan(estimator: Estimator, estimate: Estimate) -> Plan:
    """Return the plan of the estimated setting with its cuts."""
    setting, chain = estimate.setting, estimator.chain
    problem = _with_choices(chain.problem, setting)
    specs: list[StageSpec] = []
    parts: list[list[int]] = []
    for stage, mesh in enumerate(setting.layout * setting.chunks):
        pieces = _segments(estimator, estimate, stage)
        parts.append(list(range(len(specs), len(specs) + len(pieces))))
        specs += [_stage(estimator, setting, mesh, ops) for ops in pieces]
    by_mesh = [_expand(actions, parts) for actions in pipeline_order(
        len(setting.layout), setting.chunks, setting.microbatches, training=problem.is_training)]
    devices: list[DeviceId] = []
    order: Order = []
    for mesh, actions in zip(setting.layout, by_mesh, strict=True):
        devices += mesh.devices
        order += [actions] * len(mesh.devices)
    return make_plan(problem, specs, order, microbatches=setting.microbatches, by=BY, order_devices=devices)


def _with_choices(problem: Problem, setting: Setting) -> Problem:
    optimizer = replace(problem.options.optimizer, sharded=setting.sharded_states)
    return replace(problem, options=replace(problem.options, recompute=setting.recompute, optimizer=optimizer,
                                            microbatches=setting.microbatches))


def _segments(estimator: Estimator, estimate: Estimate, stage: int) -> list[I64]:
    """Return the operators of a stage, where it recomputes in segments of about equal time, that need least memory."""
    chain, setting = estimator.chain, estimate.setting
    first, last = estimate.cuts[stage], estimate.cuts[stage + 1]
    places = chain.places
    if not setting.recompute:
        return [np.arange(places[first], places[last])]
    mesh = setting.layout[stage % len(setting.layout)]
    flight = estimator.in_flight(setting, stage)
    choices = [_ends(chain, mesh.teams[0], first, last, count) for count in SEGMENT_COUNTS if count <= last - first]
    saved = chain.held(mesh.teams[0]).saved
    ends = min(choices, key=lambda ends: float(np.diff(saved[ends]).max()
                                               + flight * chain.crossing[ends[1:-1]].sum()))
    return [np.arange(places[begin], places[end]) for begin, end in itertools.pairwise(ends)]


def _ends(chain: Chain, team: Team, first: int, last: int, count: int) -> list[int]:
    """Return where segments of about equal time begin and end: up to half a segment away, where least is to be kept."""
    forward = chain.passes(team, 1.0)[0]
    length = (forward[last] - forward[first]) / count
    ends = [first]
    for number in range(1, count):
        target = forward[first] + number * length
        low, high = np.searchsorted(forward, (target - length / 2, target + length / 2))
        low, high = max(int(low), ends[-1] + 1), min(int(high), last - 1)
        if low <= high:
            near = np.abs(forward[low : high + 1] - target)
            ends.append(low + int(np.lexsort((near, chain.crossing[low : high + 1]))[0]))
    return [*ends, last]


def _stage(estimator: Estimator, setting: Setting, mesh: StageMesh, ops: I64) -> StageSpec:
    """Return the stage of these operators, with its words and times where teams divide it."""
    chain, problem = estimator.chain, estimator.problem
    size = problem.options.batch // setting.microbatches
    counts = estimator.counts(mesh, size)
    assert counts is not None, "it was estimated"
    replicas = tuple((team, count / size) for team, count in zip(mesh.teams, counts, strict=True))
    split = chain.split_of(mesh.teams[0])
    if split is None:
        return StageSpec(ops=ops, replicas=replicas)
    graph = problem.graph
    touched = dict.fromkeys(tensor for op in ops.tolist() for tensor in (*graph.op_inputs(op), *graph.op_outputs(op)))
    words = split.words([graph.op_names[op] for op in ops], [graph.tensor_names[tensor] for tensor in touched])
    known: dict[tuple[int, int, int], dict[str, float]] = {}
    times = []
    for team, count in zip(mesh.teams, counts, strict=True):
        key = (*chain.figures_key(team), count)
        if key not in known:
            forward, backward = (float(table[ops].sum()) for table in chain.op_passes(team, count))
            known[key] = {"F": forward}
            if problem.is_training:
                known[key]["B"] = backward + (forward if setting.recompute else 0.0)
        times.append(known[key])
    return StageSpec(ops=ops, replicas=replicas, sharding=words, times=tuple(times))


def _expand(actions: Sequence[Action], parts: Sequence[Sequence[int]]) -> list[Action]:
    """Return the actions with a stage's forward as that of its segments in turn, its backward as the reverse."""
    return [(part, phase, index) for stage, phase, index in actions
            for part in (parts[stage] if phase == "F" else reversed(parts[stage]))]
