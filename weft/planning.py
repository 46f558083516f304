"""From a model and a cluster to the best plans: what ``weft plan``, ``make_plan`` and ``weft.parallelize`` share.

    model, cluster -> graph, costs -> how the devices of a host may divide operators -> comparison of plans

    found = weft.make_plan("gpt2", "4 x A100-80GB", batch=64)
    weft.save_plan(found.best.plan, "plan.json")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import read_cluster
from weft.cost.costs import Costs, load_costs
from weft.model.graph import Graph
from weft.model.load import has_module, load_graph_for, trace_model
from weft.model.named_ops import NamedOp, named_ops
from weft.objectives import bind_to_cluster, fewest_devices, parse_target, with_headroom
from weft.plan.plan import Mode, Optimizer, OptimizerKind
from weft.planner import Comparison, compare_strategies
from weft.search.deploy.deployer import Splits
from weft.search.deploy.search import DeployOptions
from weft.search.deploy.splits import load_splits
from weft.search.problem import PlanOptions, Problem

if TYPE_CHECKING:
    from weft.model.source import ModelSource

DEPLOY_SIMULATIONS: Final = 3000
"""Deployments that a search for one may look at here; `weft deploy` has no such limit."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search, and for which devices."""

    strategies: Sequence[str] | None = None
    """None for all."""
    placements: tuple[str, ...] = ()
    deploy: bool | None = None
    """None: where several devices train and no strategy is given."""
    joint: bool | None = None
    """None: where there are several devices and no strategy is given."""
    time_limit_s: float | None = None
    """Of each planning; with a target there are several."""
    target: str | None = None
    headroom: str | None = None
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search came to."""

    comparison: Comparison
    num_devices: int
    devices: tuple[str, ...] | None = None
    """The fewest that reach the target, where there is one."""


def make_plan(model: str | ModelSource, cluster: str | Cluster, *, batch: int = 32, microbatches: int | None = None,
              mode: Mode = "training", dtype: str = "float32", optimizer: OptimizerKind = "adamw", seed: int = 0,
              time_limit_s: float | None = None, report: Report = lambda text: None) -> Comparison:
    """Return the best plan for a step of ``batch`` samples, and all others that were tried, as ``weft plan`` finds it.

    ``model`` and ``cluster`` are what the command line takes, or a model's source and a cluster. Raise
    ``NoFeasiblePlan`` if nothing fits.
    """
    options = PlanOptions(batch=batch, microbatches=microbatches, mode=mode, dtype=dtype, seed=seed,
                          optimizer=Optimizer(kind=optimizer))
    target = read_cluster(cluster) if isinstance(cluster, str) else cluster
    return search_plans(model, target, options, SearchOptions(time_limit_s=time_limit_s), report=report).comparison


def search_plans(model: str | ModelSource, cluster: Cluster, options: PlanOptions, search: SearchOptions, *,
                 report: Report = lambda text: None) -> Found:
    """Return the best plans for the cluster; raise ``NoFeasiblePlan`` if none fits, or the target is not reached."""
    wanted = None if search.target is None else parse_target(search.target, batch=options.batch)
    narrow = cluster if search.headroom is None else with_headroom(cluster, search.headroom)
    search = _settled(search, options, cluster.num_devices)
    report(f"tracing {model if isinstance(model, str) else model.name}")
    graph, ops = _load_operators(model, options, with_factors=bool(search.placements),
                                 batch_dims=bool(search.deploy or search.joint))
    for warning in graph.warnings:
        report(f"note: {warning}")

    def costs_of(graph: Graph, cluster: Cluster) -> Costs:
        return load_costs(graph, cluster, search.profile, options.dtype)

    whole = Problem(graph=graph, cluster=cluster, costs=costs_of(graph, cluster), options=options, ops=ops)
    problem = whole if narrow is cluster else replace(whole, cluster=narrow, costs=costs_of(graph, narrow))
    splits = load_splits(model, problem, lambda graph: costs_of(graph, narrow), report=report,
                         time_limit_s=search.time_limit_s
                         ) if (search.deploy or search.joint) and not options.whole_parameters else {}
    devices: tuple[str, ...] | None = None
    if wanted is None:
        comparison = _compare(search, report, problem, splits)
    else:
        reached = fewest_devices(problem, wanted, partial(_compare, search, report), splits=splits, costs_of=costs_of,
                                 progress=report)
        comparison, devices = reached.comparison, reached.devices
    if narrow is not cluster:
        comparison = bind_to_cluster(comparison, whole)
    return Found(comparison=comparison, num_devices=cluster.num_devices, devices=devices)


def _settled(search: SearchOptions, options: PlanOptions, num_devices: int) -> SearchOptions:
    """Return the options with what is left open decided."""
    several = not search.strategies and num_devices > 1
    return replace(search, joint=several if search.joint is None else search.joint,
                   deploy=several and options.mode == "training" if search.deploy is None else search.deploy)


def _compare(search: SearchOptions, report: Report, problem: Problem, splits: Splits) -> Comparison:
    several = problem.cluster.num_devices > 1 or bool(search.strategies)
    deployments = DeployOptions(max_simulations=DEPLOY_SIMULATIONS, seed=problem.options.seed)
    return compare_strategies(problem, search.strategies, placements=search.placements, splits=splits,
                              joint=bool(search.joint) and several, time_limit_s=search.time_limit_s,
                              deployments=deployments if search.deploy and several else None, progress=report)


def _load_operators(model: str | ModelSource, options: PlanOptions, *, with_factors: bool,
                    batch_dims: bool) -> tuple[Graph, Mapping[str, NamedOp] | None]:
    """Return the model's graph and, where they are wanted and it has a module, its operators with their factors."""
    batch = options.batch // options.microbatches if options.microbatches else None
    if not with_factors or not has_module(model):
        return load_graph_for(model, mode=options.mode, batch=batch, dtype=options.dtype, batch_dims=batch_dims), None
    traced = trace_model(model, mode=options.mode, batch=batch, dtype=options.dtype, batch_dims=batch_dims)
    return traced.graph, named_ops(traced)
