"""``weft explain`` and ``weft fit``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from weft.base.errors import NoFeasiblePlan
from weft.cli import common, late
from weft.cli.degree_options import with_degrees
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.plan.plan import Mode, load_plan
from weft.search.common.budget import Budget, time_budget
from weft.search.common.degrees import Degrees, option

TIME_LIMIT_S: Final = 60.0
_DEFAULTS: Final = {"mode": "training", "dtype": "float32", "optimizer": "adamw"}
BatchOption = Annotated[int | None, typer.Option(help="Samples in one step; 32 if absent.")]
MicrobatchesOption = Annotated[int | None, typer.Option(help="Parts of the batch; chosen if absent.")]
ModeOption = Annotated[str | None, typer.Option(help="training (default) or inference.")]
DtypeOption = Annotated[str | None, typer.Option(
    "--precision", "--dtype", help="float64, float32 (default), bfloat16 or float16.")]
OptimizerOption = Annotated[str | None, typer.Option(help="none, sgd, adam or adamw (default).")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is asked of a plan on the command line; None where it is not given."""

    batch: int | None
    microbatches: int | None
    mode: str | None
    dtype: str | None
    optimizer: str | None
    degrees: Degrees

    def options(self) -> late.PlanOptions:
        """Return the options, with defaults where none are given."""
        return late.PlanOptions(batch=32 if self.batch is None else self.batch, microbatches=self.microbatches,
                                mode=common.choice("--mode", self.mode or _DEFAULTS["mode"], get_args(Mode)),
                                dtype=common.dtype_choice(self.dtype or _DEFAULTS["dtype"]), degrees=self.degrees,
                                optimizer=common.optimizer_choice(self.optimizer or _DEFAULTS["optimizer"]))

    def flags(self) -> list[str]:
        """Return what was said, in the words of the command line."""
        result = [f"--batch {32 if self.batch is None else self.batch}"]
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            result += [f"--{name} {value}"] if value is not None and value != default else []
        return result + self.degrees.flags()


@with_degrees
def explain(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file; or a model, with CLUSTER after it.")],
    on: Annotated[str | None, typer.Argument(
        metavar="CLUSTER", help="With a model: a cluster file, or a text such as '4 x A100-80GB'.")] = None,
    *,
    degrees: Degrees,
    model: common.ModelOption = None,
    cluster: common.ClusterOption = None,
    batch: BatchOption = None,
    microbatches: MicrobatchesOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = None,
    profile: common.ProfileOption = None,
    replan: Annotated[bool, typer.Option(help="Plan again: the second best, and what would help.")] = True,
    time_limit: Annotated[float, typer.Option(
        help="Seconds for all of it but imports and tracing; what is not reached is listed.")] = TIME_LIMIT_S,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Say what bounds a plan's step, what devices wait for, the second best, and what would help.

    With a MODEL and a CLUSTER: plan first. If nothing fits, find the smallest changes that make it possible.
    """
    common.check_time_limit(time_limit)
    asked = _Asked(batch=batch, microbatches=microbatches, mode=mode, dtype=dtype, optimizer=optimizer,
                   degrees=degrees)
    report = common.reporter(quiet)
    if on is None:
        common.refuse_given({"--batch": batch, "--microbatches": microbatches, "--mode": mode, "--dtype": dtype,
                             "--optimizer": optimizer, **{option(name): size for name, size in degrees.given.items()}},
                            "{} is for a model with a CLUSTER after it", joined=" and ")
        common.refuse_model(plan)
        _explain_plan(Path(plan), model, cluster, profile, replans=replan, time_limit=time_limit, as_json=as_json,
                      report=report)
        return
    common.refuse_given({"--model": model, "--cluster": cluster}, "{} is for a plan file", joined=" and ")
    _explain_request(plan, on, asked, profile, replans=replan, time_limit=time_limit, as_json=as_json, report=report)


def _explain_plan(path: Path, model: str | None, cluster: str | None, profile: Path | None, *, replans: bool,
                  time_limit: float, as_json: bool, report: Callable[[str], None]) -> None:
    import_s = late.import_seconds("explain_plan", "load_graph_for")
    budget = time_budget(time_limit, report)
    item = load_plan(path)
    target, spec = common.cluster_of_plan(item, cluster), model or item.model.name
    report(f"tracing {spec}")
    with budget.paused():
        graph = common.graph_of_plan(item, model, batch_dims=replans)
    # It seems to be for the time of one request: then others are to have one micro-batch too.
    is_of_latency = item.model.mode == "inference" and item.microbatches == 1
    options = late.PlanOptions(batch=item.model.batch, mode=item.model.mode, dtype=item.model.dtype,
                               own_dtypes=item.model.own_dtypes, optimizer=item.optimizer, compiled=item.compiled,
                               recompute=any(stage.keeps_only_inputs for stage in item.stages), seed=item.search.seed,
                               microbatches=1 if is_of_latency else None)
    request = late.Request(model=spec, graph=graph, options=options,
                           costs_of=lambda graph, on: late.planned_costs(graph, on, profile, options.dtype,
                                                                         compiled=options.compiled))
    program = late.check_plan(item, graph, target)
    timeline = late.simulate(program, request.costs_of(graph, target), target)
    _show(late.explain_plan(program.plan, request, target, timeline, replans=replans, budget=budget),
          budget, import_s, as_json=as_json)


def _show(found: late.Explanation, budget: Budget, import_s: float, *, as_json: bool) -> None:
    common.print_result(as_json, lambda: {
        **late.explanation_json(found), "import_seconds": import_s, "tracing_seconds": budget.paused_s},
        lambda: late.print_explanation(found))
    common.end_if_interrupted(found.is_interrupted)


def _explain_request(model: str, on: str, asked: _Asked, profile: Path | None, *, replans: bool, time_limit: float,
                     as_json: bool, report: Callable[[str], None]) -> None:
    """Plan, and explain the best plan; or say what would make a plan possible."""
    import_s = late.import_seconds("explain_plan", "replan", "load_graph_for")
    budget = time_budget(time_limit, report)
    target = read_cluster(on)
    with budget.paused():
        request = _request(model, asked, profile, report, target)
    problem = request.problem(target)
    try:
        comparison = late.replan(problem, request, budget=budget.part(1 / 3))
    except NoFeasiblePlan as miss:
        _relax(miss, problem, request, budget, import_s, as_json=as_json)
        return
    best = comparison.best
    assert best.plan is not None, "replan raises otherwise"
    assert best.timeline is not None
    if best.timeline.step_time_s != best.step_time_s:
        report(f"note: on so many devices one replica stands for all; the whole step is {best.step_time_s:.6g} s")
    found = late.explain_plan(best.plan, request, target, best.timeline, comparison=comparison, problem=problem,
                              replans=replans and not comparison.is_interrupted, budget=budget)
    _show(replace(found, is_interrupted=found.is_interrupted or comparison.is_interrupted), budget, import_s,
          as_json=as_json)


def _relax(miss: NoFeasiblePlan, problem: late.Problem, request: late.Request, budget: Budget, import_s: float, *,
           as_json: bool) -> None:
    """Print the smallest changes that help; raise ``miss`` if there are none."""
    budget.report("nothing fits: searching the smallest changes that help")
    found = late.smallest_relaxation(problem, request, budget=budget)
    if not found:
        raise miss
    common.print_result(as_json, lambda: {
        **late.relaxations_json(str(miss), found), "import_seconds": import_s, "tracing_seconds": budget.paused_s},
        lambda: late.print_relaxations(str(miss), found))
    common.end_if_interrupted(budget.is_interrupted)


def _request(model: str, asked: _Asked, profile: Path | None, report: Callable[[str], None],
             cluster: Cluster) -> late.Request:
    options = late.settle_degrees(asked.options(), cluster)
    batch = late.samples_on_replica(options)

    def load(dtype: str) -> late.Graph:
        return late.load_graph_for(model, mode=options.mode, batch=batch, dtype=dtype, batch_dims=True)

    report(f"tracing {model}")
    graph = load(options.dtype)
    late.check_model_degrees(options, graph)
    for warning in graph.warnings:
        report(f"note: {warning}")
    return late.Request(model=model, graph=graph, options=options, load=load if late.has_module(model) else None,
                        costs_of=lambda graph, on: late.load_costs(graph, on, profile, None))


@with_degrees
def fit(
    model: common.ModelArgument,
    cluster: common.ClusterArgument,
    *,
    degrees: Degrees,
    batch: BatchOption = None,
    microbatches: MicrobatchesOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan that is recommended here.")] = None,
    time_limit: Annotated[float | None, typer.Option(
        help="Seconds for all of it but imports and tracing; strategies that are not reached are left out.")] = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Say whether a model fits on a cluster, how, with which margin on each device, and what to plan with.

    Exit codes: 0 it fits, 3 it does not.
    """
    asked = _Asked(batch=batch, microbatches=microbatches, mode=mode, dtype=dtype, optimizer=optimizer, degrees=degrees)
    report, import_s = common.reporter(quiet), late.import_seconds("find_fit", "find_splits", "load_graph_for")
    common.check_time_limit(time_limit)
    common.check_outputs({"--out": out}, (model.partition(":")[0], cluster))
    budget = time_budget(time_limit, report)
    target = read_cluster(cluster)
    with budget.paused():
        request = _request(model, asked, None, report, target)
    problem = request.problem(target)
    split = cache(lambda degree: late.find_splits(problem, request, degree=degree, budget=budget))
    found = late.find_fit(problem, split=split, budget=budget)
    command = None if found.recommended is None else _command(model, cluster, asked, found.recommended.setting)
    if out is not None and found.recommended is not None:
        _write(out, problem, found, split, report)
    common.print_result(as_json, lambda: {
        **late.fit_json(found, command), "complete": found.is_complete, "import_seconds": import_s,
        "tracing_seconds": budget.paused_s}, lambda: late.print_fit(found, command or ""))
    common.end_if_interrupted(budget.is_interrupted)
    if found.recommended is None:
        raise found.miss()


def _command(model: str, cluster: str, asked: _Asked, setting: late.Setting) -> str:
    """Return the command that makes a plan with the setting: `weft plan` where it has the options for it."""
    words = [shlex.quote(model), shlex.quote(cluster), *asked.flags()]
    if setting.strategy == "joint":
        words += [f"--microbatches {asked.microbatches}"] if asked.microbatches is not None else []
        return " ".join(["weft plan", *words, "--out plan.json"])
    if setting.strategy not in late.STRATEGIES or setting.sharded:
        if asked.microbatches is not None:
            words.append(f"--microbatches {asked.microbatches}")
        return " ".join(["weft fit", *words, "--out plan.json"])
    words += [f"--strategy {setting.strategy}", f"--microbatches {setting.microbatches}"]
    return " ".join(["weft plan", *words, *["--recompute full"] * setting.recompute, "--out plan.json"])


def _write(out: Path, problem: late.Problem, found: late.Fit, split: late.Split, report: Callable[[str], None]) -> None:
    """Write the plan that is recommended, after all checks."""
    assert found.recommended is not None
    setting = found.recommended.setting
    plan = found.recommended.plan or late.plan_of(problem, setting, split(setting.degree) if setting.degree > 1 else {})
    late.check_plan(plan, problem.graph, problem.cluster)
    common.write_plan(out, plan, report)
