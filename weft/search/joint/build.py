"""Plans from estimated settings: stages with their replicas and shardings, and the order of the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from weft.cluster.cluster import DeviceId
from weft.model.graph import I64
from weft.plan.orders import Action, Order
from weft.plan.plan import Plan
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.path import pipeline_order
from weft.search.joint.setting import Setting, StageMesh

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
    """Return the operators of a stage, in segments where it recomputes."""
    chain, (first, last) = estimator.chain, estimate.cuts[stage : stage + 2]
    ends = estimator.segments(estimate.setting, stage, first, last) if estimate.setting.recompute else [first, last]
    return [chain.ops[chain.places[begin] : chain.places[end]] for begin, end in itertools.pairwise(ends)]


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
