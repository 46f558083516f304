"""``weft plan``, and what looks at plans: ``simulate``, ``show``, ``view``, ``check`` and ``diff``."""

from __future__ import annotations

import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from weft.base.files import encode, write_atomic
from weft.cli import common, late
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.plan.plan import Mode, Plan, load_plan, plan_to_json

SAME: Final = 0
DIFFERENT: Final = 1
"""Exit codes of ``diff``."""
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
    model: common.ModelArgument,
    cluster: common.ClusterArgument,
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
    dtype: Annotated[str, typer.Option(
        "--precision", "--dtype", help="fp64, fp32, bf16, fp16, or bf16-mixed: fp32 parameters, autocast.",
    )] = "float32",
    optimizer: Annotated[str, typer.Option(help="none, sgd, adam or adamw.")] = "adamw",
    compiled: Annotated[bool, typer.Option(
        "--compile/--eager", help="Stages run as compiled graphs, or operator by operator.")] = False,
    recompute: Annotated[str, typer.Option(
        metavar="none|full|selective|BYTES", help="What is computed again for the backward: nothing, all but the "
        "inputs of stages, attention, or what a stage cannot keep of a micro-batch within so many bytes (2GiB) on each "
        "device; auto: what memory asks for.")] = "auto",
    profile: common.ProfileOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the best plan here.")] = None,
    tried: TriedOption = False,
    html: HtmlOption = None,
    trace: TraceOption = None,
    seed: Annotated[int, typer.Option(min=0, max=common.MAX_SEED, help="Seed of all searches.")] = 0,
    time_limit: common.TimeLimitOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Find the fastest way to run a model on a cluster, and compare the strategies."""
    report, import_s = common.reporter(quiet), late.import_seconds("search_plans", "print_comparison")
    common.check_time_limit(time_limit)
    common.check_outputs({"--out": out, "--html": html, "--trace": trace}, (model.partition(":")[0], cluster, profile))
    asked = late.request_for(common.choice("--objective", objective, get_args(late.Objective)), batch=batch,
                             microbatches=microbatches,
                             mode=None if mode is None else common.choice("--mode", mode, get_args(Mode)))
    options = late.PlanOptions(batch=asked.batch, microbatches=asked.microbatches, mode=asked.mode,
                               dtype=common.dtype_choice(dtype), recompute=recompute == "full", seed=seed,
                               saving=common.saving_choice(recompute), compiled=compiled,
                               optimizer=common.optimizer_choice(optimizer))
    search = late.SearchOptions(strategies=strategy or None, placements=tuple(placement or ()), deploy=deploy,
                                joint=joint, time_limit_s=time_limit, target=target, headroom=headroom, profile=profile)
    found = late.search_plans(model, read_cluster(cluster), options, search, report=report)
    comparison, best = found.comparison, found.comparison.best
    assert best.plan is not None, "the search raises otherwise"
    assert best.timeline is not None
    common.write_plan(out, best.plan, report)
    _write_pictures([best.timeline], comparison, html=html, trace=trace)
    if as_json:
        reached = {} if found.devices is None else {"target": target, "devices": list(found.devices)}
        common.print_json({**comparison_json(comparison), "objective": objective, "notes": list(found.notes), **reached,
                           "import_seconds": import_s, "tracing_seconds": found.tracing_s})
    else:
        late.print_comparison(late.strategy_facts(comparison))
        if found.devices is not None:
            print(f"{target} is reached with {len(found.devices)} of {found.num_devices} devices: "
                  f"{', '.join(found.devices)}\n")
        if tried:
            late.print_tried(late.strategy_facts(comparison))
    if comparison.is_interrupted:
        written = "is the result" if out is None else f"is written to {out}"
        common.end_interrupted(f"interrupted during the search of {comparison.interrupted_in}; the best so far, "
                               f"{best.strategy} with {best.step_time_s:.6g} s, {written}")


def simulate(
    plan: common.PlanArgument,
    model: common.ModelOption = None,
    cluster: common.ClusterOption = None,
    profile: common.ProfileOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the timeline (JSON) here.")] = None,
    trace: TraceOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Predict how a plan runs: step time, and where each device's time and memory go."""
    common.check_outputs({"--out": out, "--trace": trace}, (plan, cluster, profile))
    (timeline,) = _timelines(plan, model, cluster, profile, None)
    if out is not None:
        late.save_timeline(timeline, out)
    _write_pictures([timeline], None, trace=trace)
    common.print_result(
        as_json, lambda: {"kind": timeline.kind, "step_time": timeline.step_time_s, "bubble": timeline.bubble,
                          "devices": [encode(item) for item in timeline.summary()]},
        lambda: late.print_timeline(timeline))


def show(
    plan: common.PlanArgument,
    model: common.ModelOption = None,
    cluster: common.ClusterOption = None,
    profile: common.ProfileOption = None,
    timeline: TimelineOption = None,
    html: HtmlOption = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture of the predicted step here.")] = None,
    trace: Annotated[Path | None, typer.Option(
        "--trace", help="Write a Perfetto trace (.json.gz) here, with the prediction and all timelines side by "
        "side.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the Gantt chart; the terminal's if absent.")] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Print a plan as tables and a Gantt chart, or write it as a page or a trace."""
    common.check_width(width)
    common.check_outputs({"--html": html, "--svg": svg, "--trace": trace}, (plan, cluster, profile, *(timeline or ())))
    if as_json:
        common.print_json(plan_to_json(load_plan(plan)))
        if html is None and svg is None and trace is None:
            return
    timelines = _timelines(plan, model, cluster, profile, timeline)
    if not as_json:
        assert timelines[0].program is not None
        late.print_plan(timelines[0].program.plan, timelines, width=width)
    _write_pictures(timelines, None, html=html, svg=svg, trace=trace)


def check(
    plan: common.PlanArgument, model: common.ModelOption = None, cluster: common.ClusterOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Check that a plan is sound: complete, free of deadlock, within memory, and made for this model and cluster."""
    item = load_plan(plan)
    program = late.check_plan(item, common.graph_of_plan(item, model), common.cluster_of_plan(item, cluster))
    print_checked(program, plan, as_json=as_json)


def print_checked(program: late.Program, path: Path, *, as_json: bool) -> None:
    """Print that a plan, in this file, is sound."""
    common.print_result(
        as_json, lambda: {"status": "ok", "ranks": program.num_ranks, "instructions": program.num_instructions},
        lambda: print(f"{path}: ok, {program.num_ranks} ranks, {program.num_instructions} instructions"))


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another plan file.")],
    model: Annotated[str | None, typer.Option(
        "--model", help="The model of both plans, where it is not from `weft models`.")] = None,
    cluster: Annotated[str | None, typer.Option(
        "--cluster", help="The cluster of both plans, instead of the one that each describes.")] = None,
    profile: common.ProfileOption = None,
    as_json: common.JsonOption = False,
) -> int:
    """Say what differs between two plans: stages, placement, sharding, order, exchanges, and what is predicted.

    Exit codes: 0 the plans are the same, 1 they differ, 2 bad input.
    """
    plans = [load_plan(a), load_plan(b)]
    keys = [(plan.model.name, plan.model.mode, plan.microbatch_size, plan.model.conversion,
             common.has_unaligned_replicas(plan)) for plan in plans]
    graphs = [common.graph_of_plan(plans[0], model)]
    graphs.append(graphs[0] if keys[0] == keys[1] else common.graph_of_plan(plans[1], model))
    checked = [_checked(plan, graph, cluster, profile) for plan, graph in zip(plans, graphs, strict=True)]
    predicted = [late.Predicted(plan=item[0].plan, timeline=late.simulate(*item), link_bytes=late.link_bytes(*item))
                 for item in checked]
    found = late.diff_plans(predicted[0].plan, predicted[1].plan, *graphs)
    common.print_result(as_json, lambda: late.diff_json(found, *predicted), lambda: late.print_diff(found, *predicted))
    return SAME if found.is_same else DIFFERENT


def view(
    plan: common.PlanArgument,
    model: common.ModelOption = None,
    cluster: common.ClusterOption = None,
    profile: common.ProfileOption = None,
    timeline: TimelineOption = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Show a plan's report in the browser, on this machine only, until Ctrl-C."""
    page = late.render_report(_timelines(plan, model, cluster, profile, timeline),
                              cluster=None if cluster is None else read_cluster(cluster))
    with late.PageServer(page, port=port) as server:
        print(server.address, flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        if open_browser:  # beside the server, since some browsers keep the caller waiting
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)


def _timelines(path: Path, model: str | None, cluster: str | None, profile: Path | None,
               others: list[Path] | None) -> list[late.Timeline]:
    """Return the simulated timeline of a plan that passes all checks, and others of the same plan from files."""
    plan = load_plan(path)
    predicted = late.simulate(*_checked(plan, common.graph_of_plan(plan, model), cluster, profile))
    return [predicted, *(late.load_timeline(other, program=predicted.program) for other in others or ())]


def _checked(plan: Plan, graph: late.Graph, cluster: str | None,
             profile: Path | None) -> tuple[late.Program, late.Costs, Cluster]:
    """Return what the simulator needs of a plan that passes all checks."""
    target = common.cluster_of_plan(plan, cluster)
    costs = late.planned_costs(graph, target, profile, plan.model.dtype, compiled=plan.compiled)
    return late.check_plan(plan, graph, target), costs, target


def _write_pictures(timelines: list[late.Timeline], comparison: late.Comparison | None, *, html: Path | None = None,
                    svg: Path | None = None, trace: Path | None = None) -> None:
    if html is not None:
        late.write_report(html, timelines, plan=comparison.best.plan if comparison else None,
                          comparison=late.strategy_facts(comparison) if comparison else None)
    if svg is not None:
        chart = late.timeline_chart(timelines[0], steady=late.find_period(timelines[0]))
        write_atomic(svg, late.render_svg(chart))
    if trace is not None:
        late.write_trace(timelines, trace)


def comparison_json(comparison: late.Comparison) -> dict[str, Any]:
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
            "tried": [{"strategy": item.strategy, "setting": entry.setting.describe(), "estimate": entry.estimate_s,
                       "step_time": entry.step_time_s, "reason": entry.reason}
                      for item in comparison.candidates for entry in item.tried]}
