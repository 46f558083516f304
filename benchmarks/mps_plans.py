"""The plans of ``bench_mps``: data parallel, pipelines, schedules, mixtures, what Weft finds, and split operators."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.mps_measure import PAIR, SHARES, Case
from weft.cluster.cluster import DeviceId
from weft.cost.mesh import Mesh
from weft.model.folded import trace_folded
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Plan
from weft.search.common.budget import Budget
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.deploy.policy import load_policy
from weft.search.deploy.search import DeployOptions, deploy
from weft.search.joint.baselines import (
    data_parallel,
    data_parallel_by_speed,
    equal_cuts,
    one_f_one_b_balanced,
    one_f_one_b_equal,
)
from weft.search.joint.scheduled import find_schedule, schedule_search
from weft.search.joint.search import joint_search
from weft.search.schedule.from_plan import problem_of_plan, with_schedule
from weft.search.schedule.named import named_schedule
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.named import find_roles, named
from weft.search.shard.tensor_costs import stage_times
from weft.search.shard.to_plan import sharded_plan

HAS_SOLVER: Final = importlib.util.find_spec("ortools") is not None
SCHEDULE_S: Final = 10.0
"""Time limit of a search for a schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A plan and what it is."""

    name: str
    plan: Plan
    is_uniform: bool = False
    """It takes all devices for equal."""
    is_searched: bool = False
    is_whole_step: bool = True
    """It does the same step as the others, so that its time may be compared with theirs."""


def plan_makers(case: Case, batch: int, microbatches: int, pair_batch: int, *, search_s: float
                ) -> Iterator[Callable[[], Named]]:
    """Yield what makes the plans of one model, one by one."""
    problem = case.problem(batch)
    yield lambda: Named(name="data parallel, even shares", plan=data_parallel(problem, 1), is_uniform=True)
    yield lambda: Named(name="data parallel, shares by speed", plan=data_parallel_by_speed(problem, 1))
    yield lambda: Named(name="1F1B, equal stages", plan=one_f_one_b_equal(problem, microbatches), is_uniform=True)
    yield lambda: Named(name="1F1B, balanced stages", plan=one_f_one_b_balanced(problem, microbatches))
    yield lambda: _scheduled(problem, one_f_one_b_balanced(problem, microbatches))
    yield lambda: Named(name="pipeline of one and three parts", plan=mixed(problem, microbatches, ((0,), (1, 2, 3))))
    yield lambda: Named(name="two pipelines side by side", plan=mixed(problem, microbatches, ((0, 2), (1, 3))))
    yield lambda: Named(name="weft deploy", is_searched=True, plan=deploy(
        problem, DeployOptions(cpu_seconds=search_s), policy=load_policy()).plan)
    if HAS_SOLVER:  # orders are searched for its best plans
        yield lambda: Named(name="joint search", is_searched=True, plan=joint_search(problem).plan)
    yield lambda: split_operators(case, pair_batch)


def _scheduled(problem: Problem, placed: Plan) -> Named:
    """Return the placement with a searched schedule, or where there is no solver with that of ZB-H1."""
    if HAS_SOLVER:
        found = find_schedule(placed, problem, schedule_search(time_limit=SCHEDULE_S), split_backward=True)
        return Named(name="searched schedule, balanced stages", plan=found.plan)
    asked = problem_of_plan(placed, problem.graph, problem.costs, problem.cluster, split_backward=True)
    schedule = named_schedule("zb-h1", asked.problem, asked.num_microbatches)
    return Named(name="ZB-H1, balanced stages", plan=with_schedule(placed, asked, schedule))


def mixed(problem: Problem, microbatches: int, groups: Sequence[Sequence[int]]) -> Plan:
    """Return 1F1B over two groups of devices, each of which shares the samples by speed, cut between layers."""
    size = problem.options.batch // microbatches
    seconds = [problem.op_seconds(device, size) for device in problem.devices]
    speeds = [1.0 / float(column.sum()) for column in seconds]
    shares = [[speeds[device] / sum(speeds[member] for member in group) for device in group] for group in groups]

    def slowest(cut: int) -> float:
        parts = (slice(0, cut), slice(cut, None))
        return max(share * float(seconds[device][part].sum()) for part, group, row in zip(parts, groups, shares, strict=True)
                   for device, share in zip(group, row, strict=True))

    cut = min(_layer_starts(problem), key=slowest)
    specs = [StageSpec(ops=ops, replicas=tuple(((DeviceId(device),), share) for device, share in zip(group, row, strict=True)))
             for ops, group, row in zip((np.arange(cut), np.arange(cut, problem.graph.num_ops)), groups, shares,
                                        strict=True)]
    order = one_f_one_b(len(specs), microbatches)
    stage_of = {device: stage for stage, group in enumerate(groups) for device in group}
    return make_plan(problem, specs, [order[stage_of[device]] for device in sorted(stage_of)],
                     microbatches=microbatches, by="mixed", order_devices=[DeviceId(item) for item in sorted(stage_of)])


def _layer_starts(problem: Problem) -> list[int]:
    """Return the operators with which layers begin."""
    modules = problem.graph.op_modules
    layers = [module.partition(".")[0] + "." + module.split(".")[1] if module.count(".") else module for module in modules]
    return [op for op in range(1, len(layers)) if layers[op] != layers[op - 1] and layers[op].rpartition(".")[2].isdigit()
            ] or equal_cuts(problem)[1:2]


def split_operators(case: Case, batch: int) -> Named:
    """Return operators split between two equal devices as Megatron-LM does, the others idle.

    The plan has the times of its stage: operators as slow as one busy part beside makes them, and measured collectives.
    """
    problem = case.problem(batch)
    folded = trace_folded(case.traced.source, batch=batch)
    others = [sum(SHARES[other] for other in range(len(SHARES)) if other != device) for device in range(len(SHARES))]
    both = sum(SHARES[device] for device in PAIR)
    weights = [(both - SHARES[device]) / others[device] if device in PAIR else 1.0 for device in range(len(SHARES))]
    costs = case.costs(weights, folded.traced.graph)
    mesh = Mesh(case.cluster, PAIR, (len(PAIR),), comm_fits=costs.comm_fits)
    search = MeshSearch(folded, costs, mesh, optimizer=problem.options.optimizer, limit_bytes=None,
                        budget=Budget(effort=float("inf")), splits_states=False)
    found = search.run(named("megatron", find_roles(search.parts, folded), 1))
    plan = sharded_plan(problem, found, folded, stage_times(found, folded, problem.graph, costs))
    return Named(name=f"operators split between two parts, {batch} samples", plan=plan, is_whole_step=False)
