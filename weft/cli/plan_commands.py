"""``weft plan``, ``simulate``, ``show`` and ``check``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from weft.cli.common import (
    MAX_SEED,
    ClusterArgument,
    JsonOption,
    ModelArgument,
    PlanArgument,
    ProfileOption,
    QuietOption,
    check_outputs,
    check_time_limit,
    choice,
    cluster_of_plan,
    end_interrupted,
    graph_of_plan,
    print_json,
    reporter,
)

if TYPE_CHECKING:

    from weft.plan.plan import Plan
    from weft.planning.compare import Comparison
    from weft.search.joint.finalists import Tried
    from weft.simulate.timeline import Timeline

ModelOption = Annotated[str | None, typer.Option(
    "--model", help="The plan's model, where it is not from `weft models`.")]
ClusterOption = Annotated[str | None, typer.Option(
    "--cluster", help="Another cluster than the one the plan describes.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", help="Write a Perfetto trace (.json.gz) here.")]
TimelineOption = Annotated[list[Path] | None, typer.Option(help="A timeline of this plan, such as a run's.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write a self-contained page with a Gantt chart here.")]

BatchOption = Annotated[int | None, typer.Option(
    help="Samples in one step, 32 if absent; in one request with --objective latency, 1 if absent.")]
ModeOption = Annotated[str | None, typer.Option(
    help="training or inference; if absent training, or what --objective needs.")]
ObjectiveOption = Annotated[str, typer.Option(
    help="throughput: the shortest step; latency: the time of one request, inference without micro-batches.")]
TargetOption = Annotated[str | None, typer.Option(
    help="Use the fewest devices that reach so many samples per second (500/s) or such a step (200ms).")]
TriedOption = Annotated[bool, typer.Option("--tried", help="Also print what the joint search tried, and why it lost.")]


def plan(
    model: ModelArgument,
    cluster: ClusterArgument,
    batch: BatchOption = None,
    microbatches: Annotated[int | None, typer.Option(help="Parts of the batch; chosen if absent.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Try only this strategy (may be repeated).")] = None,
    placement: Annotated[list[str] | None, typer.Option(
        help="Also search a schedule for this placement: v, x, m, nn, k, interleaved or vv (may be repeated).")] = None,
    deploy: Annotated[bool | None, typer.Option(
        help="Also search deployments of any kind, as `weft deploy` does; by default where several devices train and "
        "no strategy is given.")] = None,
    joint: Annotated[bool | None, typer.Option(
        help="Also search data, tensor and pipeline parallelism together; by default where there are several devices "
        "and no strategy is given.")] = None,
    mode: ModeOption = None,
    objective: ObjectiveOption = "throughput",
    target: TargetOption = None,
    headroom: Annotated[str | None, typer.Option(help="Memory that every device keeps free: 10% or 4GiB.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="none, sgd, adam or adamw.")] = "adamw",
    recompute: Annotated[bool, typer.Option(help="Keep only stage inputs between forward and backward.")] = False,
    profile: ProfileOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the best plan here.")] = None,
    tried: TriedOption = False,
    html: HtmlOption = None,
    trace: TraceOption = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of all searches.")] = 0,
    time_limit: Annotated[float | None, typer.Option(
        help="Seconds for all of it but imports and tracing; the best found by then is the result.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest way to run a model on a cluster, and compare the strategies."""
    begin = time.perf_counter()
    from weft.cluster import read_cluster
    from weft.model.source import DTYPES
    from weft.plan.plan import OPTIMIZERS, Mode, Optimizer, save_plan
    from weft.planning.make import SearchOptions, search_plans
    from weft.planning.objectives import Objective, request_for
    from weft.search.common.problem import PlanOptions
    from weft.show.facts import strategy_facts
    from weft.show.plan_tables import print_comparison, print_tried

    report, import_s = reporter(quiet), time.perf_counter() - begin
    check_time_limit(time_limit)
    check_outputs({"--out": out, "--html": html, "--trace": trace}, (model.partition(":")[0], cluster, profile))
    asked = request_for(choice("--objective", objective, get_args(Objective)), batch=batch, microbatches=microbatches,
                        mode=None if mode is None else choice("--mode", mode, get_args(Mode)))
    options = PlanOptions(batch=asked.batch, microbatches=asked.microbatches, mode=asked.mode,
                          dtype=choice("--dtype", dtype, tuple(DTYPES)), recompute=recompute, seed=seed,
                          optimizer=Optimizer(kind=choice("--optimizer", optimizer, OPTIMIZERS)))
    search = SearchOptions(strategies=strategy or None, placements=tuple(placement or ()), deploy=deploy, joint=joint,
                           time_limit_s=time_limit, target=target, headroom=headroom, profile=profile)
    found = search_plans(model, read_cluster(cluster), options, search, report=report)
    comparison, best = found.comparison, found.comparison.best
    assert best.plan is not None, "the search raises otherwise"
    assert best.timeline is not None
    if out is not None:
        save_plan(best.plan, out)
        report(f"plan written to {out}")
    _write_pictures([best.timeline], comparison, html=html, trace=trace)
    if as_json:
        reached = {} if found.devices is None else {"target": target, "devices": list(found.devices)}
        print_json({**comparison_json(comparison), "objective": objective, "notes": list(found.notes), **reached,
                    "import_seconds": import_s, "tracing_seconds": found.tracing_s})
    else:
        print_comparison(strategy_facts(comparison))
        if found.devices is not None:
            print(f"{target} is reached with {len(found.devices)} of {found.num_devices} devices: "
                  f"{', '.join(found.devices)}\n")
        if tried:
            print_tried(strategy_facts(comparison))
    if comparison.is_interrupted:
        written = "is the result" if out is None else f"is written to {out}"
        end_interrupted(f"interrupted during the search of {comparison.interrupted_in}; the best so far, "
                        f"{best.strategy} with {best.step_time_s:.6g} s, {written}")


def simulate(
    plan: PlanArgument,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the timeline (JSON) here.")] = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how a plan runs: step time, and where each device's time and memory go."""
    from weft.plan.plan import load_plan
    from weft.simulate.timeline_file import save_timeline

    check_outputs({"--out": out, "--trace": trace}, (plan, cluster, profile))
    timeline = predict_plan(load_plan(plan), model, cluster, profile)
    if out is not None:
        save_timeline(timeline, out)
    _write_pictures([timeline], None, trace=trace)
    if as_json:
        print_json(timeline_json(timeline))
    else:
        from weft.show.plan_tables import print_timeline

        print_timeline(timeline)


def show(
    plan: PlanArgument,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    timeline: TimelineOption = None,
    html: HtmlOption = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture of the predicted step here.")] = None,
    trace: Annotated[Path | None, typer.Option(
        "--trace", help="Write a Perfetto trace (.json.gz) here, with the prediction and all timelines side by "
        "side.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the Gantt chart; the terminal's if absent.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a plan as tables and a Gantt chart, or write it as a page or a trace."""
    from weft.plan.plan import load_plan, plan_to_json
    from weft.show.plan_tables import print_plan
    from weft.simulate.timeline_file import load_timeline

    check_outputs({"--html": html, "--svg": svg, "--trace": trace}, (plan, cluster, profile, *(timeline or ())))
    item = load_plan(plan)
    if as_json:
        print_json(plan_to_json(item))
        if html is None and svg is None and trace is None:
            return
    predicted = predict_plan(item, model, cluster, profile)
    timelines = [predicted, *(load_timeline(path, program=predicted.program) for path in timeline or ())]
    if not as_json:
        assert predicted.program is not None
        print_plan(predicted.program.plan, timelines, width=width)
    _write_pictures(timelines, None, html=html, svg=svg, trace=trace)


def check(
    plan: PlanArgument, model: ModelOption = None, cluster: ClusterOption = None, as_json: JsonOption = False
) -> None:
    """Check that a plan is sound: complete, free of deadlock, within memory, and made for this model and cluster."""
    from weft.plan.check import check_plan
    from weft.plan.plan import load_plan

    item = load_plan(plan)
    program = check_plan(item, graph_of_plan(item, model), cluster_of_plan(item, cluster))
    if as_json:
        print_json({"status": "ok", "ranks": program.num_ranks, "instructions": program.num_instructions})
    else:
        print(f"{plan}: ok, {program.num_ranks} ranks, {program.num_instructions} instructions")


def predict_plan(plan: Plan, model: str | None, cluster: str | None, profile: Path | None) -> Timeline:
    """Return the simulated timeline of a plan that passes all checks."""
    from weft.cost.costs import load_costs
    from weft.plan.check import check_plan
    from weft.simulate.predict import simulate as simulate_program

    graph, target = graph_of_plan(plan, model), cluster_of_plan(plan, cluster)
    program = check_plan(plan, graph, target)
    return simulate_program(program, load_costs(graph, target, profile, plan.model.dtype), target)


def _write_pictures(timelines: list[Timeline], comparison: Comparison | None, *, html: Path | None = None,
                    svg: Path | None = None, trace: Path | None = None) -> None:
    if html is not None:
        from weft.show.facts import strategy_facts
        from weft.show.html import write_report

        write_report(html, timelines, plan=comparison.best.plan if comparison else None,
                     comparison=strategy_facts(comparison) if comparison else None)
    if svg is not None:
        from weft.base.files import write_atomic
        from weft.show.drawing import render_svg
        from weft.show.timeline_chart import find_period, timeline_chart

        chart = timeline_chart(timelines[0], steady=find_period(timelines[0]))
        write_atomic(svg, render_svg(chart))
    if trace is not None:
        from weft.simulate.perfetto import write_trace

        write_trace(timelines, trace)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON values."""
    rows = []
    for item in comparison.candidates:
        row: dict[str, Any] = {"strategy": item.strategy, "feasible": item.plan is not None}
        if item.plan is None or item.timeline is None:
            rows.append({**row, "reason": item.reason})
            continue
        peaks = {entry.device: entry.peak_bytes for entry in item.timeline.summary()}
        rows.append({**row, "step_time": item.step_time_s, "throughput": item.plan.model.batch / item.step_time_s,
                     "microbatches": item.plan.microbatches, "bubble": item.timeline.bubble, "peak_memory": peaks})
    best = comparison.best
    assert best.plan is not None
    return {"status": best.plan.search.status, "best": best.strategy, "step_time": best.step_time_s,
            "bound": comparison.bound_s, "strategies": rows,
            "tried": [_tried_row(item.strategy, entry) for item in comparison.candidates for entry in item.tried]}


def _tried_row(strategy: str, entry: Tried) -> dict[str, Any]:
    return {"strategy": strategy, "setting": entry.setting.describe(), "estimate": entry.estimate_s,
            "step_time": entry.step_time_s, "reason": entry.reason}


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline's summary as plain JSON values."""
    from weft.base.files import encode

    return {"kind": timeline.kind, "step_time": timeline.step_time_s, "bubble": timeline.bubble,
            "devices": [encode(item) for item in timeline.summary()]}

