"""From a model and a cluster to the best plans: what ``weft plan``, ``make_plan`` and ``weft.parallelize`` share.

    model, cluster -> graph, costs -> how the devices of a host may divide operators -> comparison of plans

    found = weft.make_plan("gpt2", "4 x A100-80GB", batch=64)
    weft.save_plan(found.best.plan, "plan.json")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from weft.base.errors import ModelError
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import read_cluster
from weft.coarsen.compiled import planned_costs
from weft.cost.costs import Costs
from weft.model.graph import Graph
from weft.model.load import has_module, load_graph_for, trace_model
from weft.plan.expert_load import check_degree, parse_load, rows_by_experts
from weft.plan.notes import NOTE, plan_notes
from weft.plan.plan import Mode, Optimizer, OptimizerKind, Plan
from weft.plan.step_rates import StepRates, step_rates
from weft.planning.compare import Comparison, compare_all
from weft.planning.degrees import check_model_degrees, check_searches, samples_on_replica, settle_degrees
from weft.planning.objectives import bind_to_cluster, fewest_devices, parse_target, with_headroom
from weft.search.common.budget import time_budget
from weft.search.common.degrees import Degrees, DegreeWords
from weft.search.common.problem import PlanOptions, Problem
from weft.sharding.named_ops import named_ops

if TYPE_CHECKING:
    from weft.model.parts import Verdict
    from weft.model.source import ModelSource
    from weft.model.trace import TracedModel

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
    """For all of it but tracing; with a target there are several plannings."""
    target: str | None = None
    headroom: str | None = None
    profile: Path | None = None
    try_example: bool = True
    """Run the model on its example to see whether the traced graph computes what it does, and whether the best plan may
    cut the batch as it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search came to."""

    comparison: Comparison
    rates: StepRates
    """Of the best plan."""
    num_devices: int
    devices: tuple[str, ...] | None = None
    """The fewest that reach the target, where there is one."""
    notes: tuple[str, ...] = ()
    """What the user should know about the model when it runs on many devices."""
    tracing_s: float = 0.0
    """Seconds that tracing the model took, which the time limit does not count."""


def make_plan(model: str | ModelSource, cluster: str | Cluster, *, batch: int = 32, microbatches: int | None = None,
              mode: Mode = "training", dtype: str = "float32", optimizer: OptimizerKind = "adamw", seed: int = 0,
              time_limit_s: float | None = None, report: Report = lambda text: None,
              **degrees: Unpack[DegreeWords]) -> Comparison:
    """Return the best plan for a step of ``batch`` samples, and all others that were tried, as ``weft plan`` finds it.

    ``model`` and ``cluster`` are what the command line takes, or a model's source and a cluster. ``degrees`` (``tp``,
    ``pp``, ``dp``, ``zero``, ``recompute`` ...) fix what is known: see ``weft.search.common.degrees``. Raise
    ``InputError`` where they cannot be, ``NoFeasiblePlan`` if nothing fits.
    """
    is_own = not isinstance(model, str) and model.dtype is None
    options = PlanOptions(batch=batch, microbatches=microbatches, mode=mode, dtype=dtype, seed=seed,
                          own_dtypes=is_own, optimizer=Optimizer(kind=optimizer), degrees=Degrees(**degrees))
    target = read_cluster(cluster) if isinstance(cluster, str) else cluster
    return search_plans(model, target, options, SearchOptions(time_limit_s=time_limit_s), report=report).comparison


def search_plans(model: str | ModelSource, cluster: Cluster, options: PlanOptions, search: SearchOptions, *,
                 report: Report = lambda text: None) -> Found:
    """Return the best plans for the cluster; raise ``NoFeasiblePlan`` if none fits, or the target is not reached.

    A model that asks for gradient checkpointing gets plans that recompute. Raise ``ModelError`` if the trace of a model
    with data computes something else than the model, or if the best plan cuts its batch and its loss is not a mean over
    samples.
    """
    report = noted = _Noted(report)
    wanted = None if search.target is None else parse_target(search.target, batch=options.batch)
    narrow = cluster if search.headroom is None else with_headroom(cluster, search.headroom)
    options = settle_degrees(options, cluster, on_all=search.target is None)
    check_searches(options, cluster, strategies=search.strategies, placements=search.placements, deploy=search.deploy)
    search, budget = _settled(search, options, cluster.num_devices), time_budget(search.time_limit_s, report)
    report(f"tracing {model if isinstance(model, str) else model.name}")
    with budget.paused():
        graph, traced = _load(model, options, batch_dims=bool(search.deploy or search.joint))
        ops = named_ops(traced) if search.placements and traced is not None else None
    report(f"traced in {budget.paused_s:.1f} s")
    if search.try_example and traced is not None and _has_values(model):
        with budget.paused():
            from weft.model.fidelity import check_trace

            _judge(check_trace(traced, traced.source.build(), traced.source.inputs()), report)
    check_model_degrees(options, graph)
    if (options.degrees.ep or 1) > 1:
        check_degree(graph, narrow, options.degrees.ep or 1)
    for num_experts in rows_by_experts(graph):
        parse_load(options.expert_load, num_experts)
    options = replace(options, recompute=options.recompute or (graph.asks_recompute and options.saving == "auto"))
    for note in graph.warnings:
        report(f"{NOTE}{note}")

    def costs_of(graph: Graph, cluster: Cluster) -> Costs:
        return planned_costs(graph, cluster, search.profile, options.dtype, compiled=options.compiled)

    whole = Problem(graph=graph, cluster=cluster, costs=costs_of(graph, cluster), options=options, ops=ops)
    problem = whole if narrow is cluster else replace(whole, cluster=narrow, costs=costs_of(graph, narrow))
    from weft.search.deploy.find_splits import load_splits

    splits = load_splits(model, problem, lambda graph: costs_of(graph, narrow), report=report, progress=report,
                         degree=options.degrees.tp, budget=budget) if (
                             search.deploy or search.joint) and not options.whole_parameters else {}
    compare = partial(compare_all, strategies=search.strategies, placements=search.placements, joint=search.joint,
                      deploy=search.deploy)
    devices: tuple[str, ...] | None = None
    if wanted is None:
        comparison = compare(problem, splits, budget)
    else:
        reached = fewest_devices(problem, wanted, lambda part, found: compare(part, found, budget.part(0.5)),
                                 splits=splits, costs_of=costs_of, progress=report, is_late=lambda: budget.is_late)
        comparison, devices = reached.comparison, reached.devices
    if narrow is not cluster:
        comparison = bind_to_cluster(comparison, whole)
    assert comparison.best.plan is not None, "the search raises otherwise"
    for note in plan_notes(graph, comparison.best.plan, load=options.expert_load):
        report(f"{NOTE}{note}")
    if search.try_example and _has_values(model):
        with budget.paused():
            _check_cut(model, comparison.best.plan, graph, options, report)
    return Found(comparison=comparison, num_devices=cluster.num_devices, devices=devices, notes=tuple(noted.notes),
                 tracing_s=budget.paused_s, rates=step_rates(
                     comparison.best.plan, graph, cluster, step_time_s=comparison.best.step_time_s))


class _Noted:
    """Reports, and keeps what is a note."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.notes: list[str] = []

    def __call__(self, text: str) -> None:
        if text.startswith(NOTE):
            self.notes.append(text.removeprefix(NOTE))
        self._report(text)


def _has_values(model: str | ModelSource) -> bool:
    """Return whether the model may have values to run it with; those of the zoo have none, and are known to be sound.
    """
    return not isinstance(model, str) or ".py:" in model


def _check_cut(model: str | ModelSource, plan: Plan, graph: Graph, options: PlanOptions, report: Report) -> None:
    """Raise ``ModelError`` if the plan must not cut the model's batch."""
    from weft.model.source import ModelSource, resolve_model
    from weft.plan.cut import check_cut, finest_parts

    if len(finest_parts(plan)) < 2 or options.mode != "training":
        return
    source = model if not isinstance(model, str) else resolve_model(model, mode=options.mode, dtype=options.dtype)
    assert isinstance(source, ModelSource), "it has a module"
    _judge(check_cut(plan, graph, source.build(), source.inputs(options.batch)), report)


def _judge(verdict: Verdict, report: Report) -> None:
    """Raise ``ModelError`` for a problem, report a note."""
    if verdict.problem:
        raise ModelError(verdict.problem)
    if verdict.note:
        report(f"{NOTE}{verdict.note}")


def _settled(search: SearchOptions, options: PlanOptions, num_devices: int) -> SearchOptions:
    """Return the options with what is left open decided."""
    several = not search.strategies and num_devices > 1
    deploys = several and options.mode == "training" and not options.degrees.fixes_layout
    return replace(search, joint=several if search.joint is None else search.joint,
                   deploy=deploys if search.deploy is None else search.deploy)


def _load(model: str | ModelSource, options: PlanOptions, *, batch_dims: bool) -> tuple[Graph, TracedModel | None]:
    """Return the model's graph and, where it has a module, what it was traced to."""
    batch = samples_on_replica(options)
    if not has_module(model):
        return load_graph_for(model, mode=options.mode, batch=batch, dtype=options.dtype), None
    traced = trace_model(model, mode=options.mode, batch=batch, dtype=options.dtype, batch_dims=batch_dims)
    return traced.graph, traced
