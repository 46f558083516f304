"""``weft place``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.base.errors import InputError
from weft.base.files import write_atomic
from weft.base.units import format_time
from weft.cli import common, late
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.plan.plan import Plan, SearchInfo, save_plan
from weft.search.common.budget import ctrl_c_not_lost

OBJECTIVES = ("latency", "throughput")
FORMATS = ("weft", "dnn-partitioning")
LEAST_S = 0.01
"""Seconds that a search has at least, however long reading took."""
FUSIONS = ("none", "rules", "inductor", "onnxruntime")
NUM_REQUESTS = 8
"""A plan for throughput runs so many requests, one after the other through the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """What the command line asks of the search and of its output."""

    objective: str
    method: str
    contiguous: bool
    time_limit: float | None
    begin: float
    """When the time limit began to run, on ``time.monotonic``'s clock."""
    seed: int
    compare: bool
    out: Path | None
    html: Path | None
    svg: Path | None
    width: int | None
    as_json: bool
    report: Callable[[str], None]

    def search(self) -> dict[str, Any]:
        """Return the arguments of every search; the time limit is what is left of it."""
        return {"objective": self.objective, "contiguous": self.contiguous, "time_limit": self.seconds_left,
                "seed": self.seed, "progress": self.report}

    @property
    def seconds_left(self) -> float | None:
        """Return what is left of the time limit."""
        return None if self.time_limit is None else max(LEAST_S, self.begin + self.time_limit - time.monotonic())


def place(
    graph: Annotated[str, typer.Argument(
        metavar="GRAPH", help="A graph file, an .onnx file, a name from `weft models` or path/to/file.py:function.")],
    cluster: Annotated[str | None, typer.Argument(
        metavar="CLUSTER", help="A cluster file, or a text such as '2 x A100-80GB, 2 x RTX3090'.")] = None,
    objective: Annotated[str, typer.Option(
        help="latency: of one request; throughput: time per request of a full pipeline.")] = "latency",
    method: Annotated[str, typer.Option(help="auto searches; or one method by name (see --compare).")] = "auto",
    contiguous: Annotated[bool, typer.Option(
        "--contiguous", help="Throughput: each device gets one part of the graph without a way out and back.")] = False,
    time_limit: common.TimeLimitOption = None,
    seed: common.SeedOption = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Compare all methods.")] = False,
    fusion: Annotated[str | None, typer.Option(
        help="What the backend fuses is placed as one: none, rules, inductor or onnxruntime; by default none for graph "
        "files and rules for models.")] = None,
    profile: common.ProfileOption = None,
    batch: Annotated[int | None, typer.Option(help="Samples of one request; the model's default if absent.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bfloat16 or float16.")] = None,
    format_: Annotated[str, typer.Option("--format", help="weft, or dnn-partitioning: GRAPH is a problem of that "
                                         "benchmark, which has its own devices and objectives.")] = FORMATS[0],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result (JSON) here.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Write a plan for `weft run` here.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained page with a chart here.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture here.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the chart; the terminal's if absent.")] = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Find the device for each operator of a model: for the lowest latency, or the highest throughput."""
    common.choice("--format", format_, FORMATS)
    options = PlaceOptions(
        objective=common.choice("--objective", objective, OBJECTIVES), method=method, contiguous=contiguous,
        time_limit=time_limit, begin=time.monotonic(), seed=seed, compare=compare, out=out, html=html, svg=svg,
        width=width, as_json=as_json, report=common.reporter(quiet))
    _check_options(options, plan, (graph.partition(":")[0], cluster, profile))
    if format_ == "dnn-partitioning":
        common.refuse_given({"CLUSTER": cluster, "--fusion": fusion, "--profile": profile, "--batch": batch,
                             "--dtype": dtype, "--plan": plan, "--compare": compare or None, "--html": html,
                             "--svg": svg, "--method": None if method == "auto" else method},
                            f"--format {format_} takes no {{}}: the file has its own devices and times, and the "
                            "benchmark's objectives have no timetable")
        _place_partition(graph, options)
        return
    if cluster is None:
        raise InputError("CLUSTER is missing: give a cluster file or a text such as '2 x A100-80GB' after GRAPH "
                         "(only --format dnn-partitioning brings its own devices)")
    _place_graph(graph, cluster, options, fusion=fusion, profile=profile, batch=batch, dtype=dtype, plan=plan)


def _check_options(options: PlaceOptions, plan: Path | None, inputs: Sequence[str | Path | None]) -> None:
    """Refuse before the search what could only fail after it."""
    if options.contiguous and options.objective == "latency":
        raise InputError("--contiguous is for --objective throughput: the lowest latency needs no contiguous parts")
    common.check_time_limit(options.time_limit)
    common.check_width(options.width)
    if options.method != "auto":
        common.choice("--method", options.method, ("auto", *late.PLACE_METHODS))
    common.check_outputs({"--out": options.out, "--html": options.html, "--svg": options.svg, "--plan": plan}, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The graph to place, and what it was before fusion."""

    fine: late.Graph
    coarse: late.Coarse | None
    fusion: str

    @property
    def graph(self) -> late.Graph:
        """Return the graph whose operators get devices."""
        return self.fine if self.coarse is None else self.coarse.graph


# ---- a graph on a cluster -------------------------------------------------------------------------------------------


def _place_graph(spec: str, cluster: str, options: PlaceOptions, *, fusion: str | None, profile: Path | None,
                 batch: int | None, dtype: str | None, plan: Path | None) -> None:
    imports = time.perf_counter()
    late.import_seconds("search_placement", "load_costs", "PlaceView")
    if options.time_limit is not None:  # what searches would import later is not to count against it
        late.load_compiled()
    times, begin = _not_counted(options, time.perf_counter() - imports), time.monotonic()
    target = read_cluster(cluster)
    with ctrl_c_not_lost():
        loaded = _load(spec, fusion=fusion, batch=batch, dtype=dtype, report=options.report)
    if not _is_graph_file(spec):
        times["tracing_seconds"] = time.monotonic() - begin
    options = replace(options, begin=begin + times.get("tracing_seconds", 0.0))
    costs = late.load_costs(loaded.graph, target, profile, dtype)
    for note in (*loaded.fine.warnings, *costs.notes):
        options.report(f"note: {note}")
    problem = late.problem_from_graph(loaded.graph, target, costs)
    result, methods = _search(problem, options)
    if plan is not None:
        fine_costs = costs if loaded.coarse is None else late.load_costs(loaded.fine, target, profile, dtype)
        found = _write_plan(plan, loaded, target, result, options, costs=fine_costs, dtype=dtype)
        options.report(f"plan written to {plan}: {_plan_text(found)}")
    more: dict[str, Any] = {}
    if (coarse := loaded.coarse) is not None:  # the operators of every group of several, by its own name
        more["groups"] = {coarse.graph.op_names[group]: [coarse.fine.op_names[op] for op in ops]
                          for group, ops in enumerate(coarse.groups.members()) if len(ops) > 1}
    _present(late.PlaceView(result=result, title=f"{loaded.fine.name} on {target.name}", fusion=loaded.fusion,
                            num_ops_before=loaded.fine.num_ops, methods=methods,
                            kinds={device.name: device.kind for device in target.devices},
                            batch=None if _is_graph_file(spec) else loaded.fine.batch), options, more, times)


def _not_counted(options: PlaceOptions, import_s: float) -> dict[str, float]:
    """Return what the JSON says of imports: something where a time limit does not count them."""
    return {} if options.time_limit is None else {"import_seconds": import_s}


def _load(spec: str, *, fusion: str | None, batch: int | None, dtype: str | None,
          report: Callable[[str], None]) -> Loaded:
    """Return the graph, traced for inference, with what the backend fuses as one operator."""
    usual = "none" if _is_graph_file(spec) else "rules"
    how = common.choice("--fusion", usual if fusion is None else fusion, FUSIONS)
    source = _load_source(spec, batch=batch, dtype=dtype, report=report)
    fine: late.Graph = source if not hasattr(source, "graph") else source.graph
    if how == "none" and not fine.is_constant.any():
        return Loaded(fine=fine, coarse=None, fusion=how)
    coarse = late.coarsen(source, how, path=spec if spec.lower().endswith(".onnx") else None)
    report(f"fusion ({how}): {fine.num_ops:,} operators, {coarse.graph.num_ops:,} after it")
    return Loaded(fine=fine, coarse=coarse, fusion=how)


def _is_graph_file(spec: str) -> bool:
    return spec.lower().endswith((".json", ".json.gz"))


def _load_source(spec: str, *, batch: int | None, dtype: str | None,
                 report: Callable[[str], None]) -> late.Graph | late.TracedModel:
    common.dtype_choice(dtype)
    if _is_graph_file(spec) and batch is not None:
        raise InputError(f"--batch is for models; the graph file {spec!r} has its own sizes")
    if _is_graph_file(spec) or spec.lower().endswith(".onnx"):
        return late.load_graph_for(spec, mode="inference", batch=batch)
    report(f"tracing {spec}")
    return late.trace_model(spec, mode="inference", batch=batch, dtype=dtype)


def _search(problem: late.PlaceProblem,
            options: PlaceOptions) -> tuple[late.PlaceResult, tuple[late.MethodResult, ...]]:
    """Return the result of the method asked for (of the best for ``auto``), and all methods if they are compared."""
    if not options.compare:
        return late.search_placement(problem, method=options.method, **options.search()), ()
    rows = late.compare_placements(problem, **options.search())
    facts = late.sorted_methods(rows)
    found = [row.result for row in rows if row.result is not None and options.method in ("auto", row.method)]
    if not found:  # asked alone, the method says why
        return late.search_placement(problem, method=options.method, **options.search()), facts
    best = min(reversed(found), key=lambda result: result.value)  # of equals the last: auto
    is_interrupted = any(row.result is not None and row.result.is_interrupted for row in rows)
    return replace(best, is_interrupted=is_interrupted), facts


def _plan_text(plan: Plan) -> str:
    step_time = plan.search.step_time
    assert step_time is not None
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    requests = "one request" if plan.microbatches == 1 else f"{plan.microbatches} requests"
    return f"{stages}, {requests} in {format_time(step_time)} by the costs of single operators"


def _present(view: late.PlaceView, options: PlaceOptions, more: Mapping[str, Any], times: Mapping[str, float]) -> None:
    """Write what was asked for, then print the result; ``more`` is added to its JSON, ``times`` where it is printed."""
    value = {**view.result.to_json(), **more}
    if view.methods:
        value["methods"] = [{"method": row.method, "value": row.value, "reason": row.reason} for row in view.methods]
    common.write_result(options.out, value, options.report)
    if options.html is not None:
        write_atomic(options.html, late.render_placement_report(view))
        options.report(f"page written to {options.html}")
    if options.svg is not None:
        write_atomic(options.svg, late.render_svg(view.chart()))
        options.report(f"picture written to {options.svg}")
    common.print_result(options.as_json, lambda: {**value, **times},
                        lambda: late.print_placement(view, width=options.width))
    common.end_if_interrupted(view.result.is_interrupted)


# ---- the plan ------------------------------------------------------------------------------------------------------


def _write_plan(path: Path, loaded: Loaded, cluster: Cluster, result: late.PlaceResult, options: PlaceOptions, *,
                costs: late.Costs, dtype: str | None) -> Plan:
    """Write the plan of a placement, and return it: checked, and within memory by the plan's own account.

    Where that account has more than a device holds, another placement is searched. ``costs`` are of the model's own
    operators.
    """
    import numpy as np


    dtypes = [loaded.fine.tensor_dtypes[tensor] for tensor in loaded.fine.parameters.tolist()]
    own_dtype = next((name for name in dtypes if name.startswith(("float", "bfloat"))), "float32")
    num_requests = 1 if result.objective == "latency" else NUM_REQUESTS
    problem = late.Problem(graph=loaded.fine, cluster=cluster, costs=costs, options=late.PlanOptions(
        batch=loaded.fine.batch * num_requests, microbatches=num_requests, mode="inference",
        dtype=dtype or own_dtype, seed=options.seed))

    def placed(reserve: Mapping[str, int]) -> late.OpPlacement:
        if not any(reserve.values()):
            return _op_placement(loaded, result.timetable)
        kept = np.array([reserve.get(name, 0) for name in result.problem.device_names], dtype=np.float64)
        less = replace(result.problem, capacity=np.maximum(0.0, result.problem.capacity - kept))
        return _op_placement(loaded, _search(less, replace(options, compare=False))[0].timetable)

    plan = late.plan_within_memory(problem, placed, microbatches=num_requests)
    step_time = late.simulate(late.check_plan(plan, loaded.fine, cluster), costs, cluster).step_time_s
    plan = replace(plan, search=SearchInfo(by="place", status="heuristic", step_time=step_time, seed=options.seed))
    save_plan(plan, path)
    return plan


def _op_placement(loaded: Loaded, timetable: late.Timetable) -> late.OpPlacement:
    """Return where every operator of the model runs, and in which order."""
    if loaded.coarse is None:
        return late.OpPlacement(device=timetable.device, order=timetable.order)
    return late.placement_of_groups(loaded.coarse, timetable.device, timetable.order)


# ---- a problem of the dnn-partitioning benchmark -------------------------------------------------------------------


def _place_partition(path: str, options: PlaceOptions) -> None:
    imports = time.perf_counter()
    late.compile_searches(common.choice("--objective", options.objective, OBJECTIVES))
    times = _not_counted(options, time.perf_counter() - imports)
    options = replace(options, begin=time.monotonic())
    result = late.solve_partition(late.load_partition(path), **options.search())
    value = result.to_json()
    common.write_result(options.out, value, options.report)
    common.print_result(options.as_json, lambda: {**value, **times},
                        lambda: late.print_partition(result, width=options.width))
    common.end_if_interrupted(result.is_interrupted)
