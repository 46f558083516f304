"""``weft shard``."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from weft.base.errors import InputError, ModelError
from weft.base.files import write_atomic
from weft.base.units import parse_bytes
from weft.cli import common, late
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.model.zoo import Mode
from weft.plan.plan import Optimizer, save_plan
from weft.search.common.budget import Budget, ended_by_ctrl_c, time_budget

EXPORTS: Final = ("parallelize-module", "torchtitan")
MAX_AXES: Final = 3
LEAST_PLAN_S: Final = 1.5
"""Seconds that the search for a plan that can be run has at least, whatever is left of a time limit."""


def shard(
    problem: Annotated[str, typer.Argument(
        metavar="MODEL", help="A name from `weft models` or path/to/file.py:function; without CLUSTER a strategy graph "
        "(contest format).")],
    cluster: Annotated[str | None, typer.Argument(
        metavar="CLUSTER", help="A cluster file, or a text such as '8 x H100-80GB'.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Shape of the mesh, such as 2x4; the best one if absent.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in one step; the model's default if absent.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bf16 or fp16; the model's if absent.")] = None,
    mode: Annotated[str | None, typer.Option(help="training (default) or inference.")] = None,
    memory: Annotated[str | None, typer.Option(
        help="What a device may hold, such as 40GiB, or none; the smallest device's if absent.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="none, sgd, adam or adamw (default).")] = None,
    compare: Annotated[bool, typer.Option(
        "--compare", help="Compare with data parallel, ZeRO, Megatron and others.")] = False,
    export: Annotated[str | None, typer.Option(
        help="Print (or write to --out) settings for another tool instead: parallelize-module or torchtitan.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result (JSON) here.")] = None,
    plan: Annotated[Path | None, typer.Option(
        help="Write a plan of one sharded stage here, for `weft run`.")] = None,
    time_limit: common.TimeLimitOption = None,
    seed: Annotated[int, typer.Option(min=0, max=common.MAX_SEED, help="Seed of the search of a strategy graph.")] = 0,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Split a model's tensors over devices for the fastest step; or solve a strategy graph of the contest's kind."""
    common.check_time_limit(time_limit)
    common.check_outputs({"--out": out, "--plan": plan}, (problem, cluster))
    if cluster is not None:
        _shard_model(problem, cluster, mesh=mesh, batch=batch, dtype=dtype, mode=mode, memory=memory,
                     optimizer=optimizer, compare=compare, export=export, out=out, plan=plan, time_limit=time_limit,
                     as_json=as_json, report=common.reporter(quiet))
        return
    common.refuse_given({"--mesh": mesh, "--batch": batch, "--dtype": dtype, "--mode": mode, "--memory": memory,
                         "--optimizer": optimizer, "--compare": compare or None, "--export": export, "--out": out,
                         "--plan": plan},
                        "a strategy graph takes no {}: that is for a model, which needs a CLUSTER after it")
    common.refuse_model(problem)
    _shard_graph(Path(problem), time_limit=time_limit, seed=seed, as_json=as_json, report=common.reporter(quiet))


def _shard_graph(path: Path, *, time_limit: float | None, seed: int, as_json: bool,
                 report: Callable[[str], None]) -> None:
    """Solve a strategy graph; reading it counts against the time limit, imports do not."""
    import_s = late.import_seconds("solve_strategies", "print_strategies")
    begin = time.monotonic()
    graph = late.load_strategy_graph(path)
    report(f"{graph.num_nodes} nodes, {len(graph.edges)} edges, "
           + ("no usage limit" if graph.usage_limit is None else f"usage limit {graph.usage_limit}"))
    left = None if time_limit is None else max(time_limit - (time.monotonic() - begin), 0.0)
    solution = late.solve_strategies(graph, time_limit=left, seed=seed, progress=report)
    times = {} if time_limit is None else {"import_seconds": import_s}
    common.print_result(as_json, lambda: {**solution.to_json(), **times},
                        lambda: late.print_strategies(graph, solution))
    common.end_if_interrupted(solution.is_interrupted)


def _shard_model(spec: str, cluster_text: str, *, mesh: str | None, batch: int | None, dtype: str | None,
                 mode: str | None, memory: str | None, optimizer: str | None, compare: bool, export: str | None,
                 out: Path | None, plan: Path | None, time_limit: float | None, as_json: bool,
                 report: Callable[[str], None]) -> None:
    """Search the sharding of a model, then print, write or export it."""
    import_s = late.import_seconds("compare_meshes", "print_sharding")
    budget = time_budget(time_limit, report)
    if export is not None:
        common.choice("--export", export, EXPORTS)
    cluster = read_cluster(cluster_text)
    shapes = None if mesh is None else [_parse_mesh(mesh, cluster.num_devices)]
    limit = _memory_limit(memory, cluster)
    with budget.paused():
        folded = _trace(spec, mode, batch, dtype, report)
    updated_by = common.optimizer_choice(optimizer or "adamw")
    with ended_by_ctrl_c(budget):
        found = late.compare_meshes(folded, cluster, late.estimate_costs(folded.traced.graph, cluster),
                                    shapes=shapes or late.sensible_shapes(cluster, range(cluster.num_devices)),
                                    names=late.SHARDING_NAMES if compare else (), optimizer=updated_by,
                                    limit_bytes=limit, budget=budget, progress=report)
    facts = late.sharding_facts(found.best, folded)
    value = late.sharding_json(facts, found.named)
    if export is not None:
        value = late.parallelize_plan(facts, folded) if export == EXPORTS[0] else late.titan_settings(facts)
        for difference in value["differences"]:
            report(f"note: not expressed: {difference}")
    if out is not None:
        write_atomic(out, json.dumps(value, indent=1, allow_nan=False) + "\n")
        report(f"written to {out}")
    elif export is not None:
        common.print_json(value)
    if export is None:
        if plan is not None:
            _write_plan(plan, folded, cluster, found.best.mesh.shape, limit, updated_by, budget, report)
        times = {"import_seconds": import_s, "tracing_seconds": budget.paused_s}
        common.print_result(as_json, lambda: {**value, **times}, lambda: late.print_sharding(facts, found.named))
    common.end_if_interrupted(budget.is_interrupted)


def _parse_mesh(text: str, num_devices: int) -> tuple[int, ...]:
    """Return the sizes of ``2x4``; they must multiply to the number of devices."""
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", text):
        raise InputError(f"--mesh {text!r} is not a mesh: write the sizes of its axes, such as 8, 2x4 or 2x2x2")
    shape = tuple(map(int, text.split("x")))
    if len(shape) > MAX_AXES:
        raise InputError(f"--mesh {text} has {len(shape)} axes: at most {MAX_AXES} are searched")
    if math.prod(shape) != num_devices:
        raise InputError(f"a mesh of {text} has {math.prod(shape)} places, but the group has {num_devices} devices: "
                         f"choose sizes whose product is {num_devices}")
    return shape


def _memory_limit(text: str | None, cluster: Cluster) -> float | None:
    """Return the bytes that a device may hold: as given (``none``: no limit), else the memory of the smallest one."""
    if text == "none":
        return None
    if text is not None:
        limit = parse_bytes(text)
        if limit < 1:
            raise InputError(f"--memory must be more than nothing, not {text}")
        return float(limit)
    return min((float(device.memory_bytes) for device in cluster.devices if device.memory_bytes is not None),
               default=None)


def _trace(spec: str, mode: str | None, batch: int | None, dtype: str | None,
           report: Callable[[str], None]) -> late.FoldedModel:
    """Return the model, traced with a few copies of each run of equal layers."""
    wanted: Mode = common.choice("--mode", mode or "training", get_args(Mode))
    report(f"tracing {spec}")
    source = late.resolve_model(spec, mode=wanted, batch=batch, dtype=common.dtype_choice(dtype))
    if isinstance(source, late.Graph):
        raise ModelError(f"{spec!r} has no PyTorch module behind it, so it is not known how its operators can be "
                         "split: give a name from `weft models` or path/to/file.py:function")
    folded = late.trace_folded(source, batch=batch)
    cut = [path for run in folded.runs for position in range(run.num_copies) if position not in run.kept
           for path in run.layers(position)]
    for warning in folded.traced.graph.warnings:
        if not any(f"{path}." in warning for path in cut):  # layers that were left out on purpose
            report(f"note: {warning}")
    return folded


def _write_plan(path: Path, folded: late.FoldedModel, cluster: Cluster, shape: tuple[int, ...], limit: float | None,
                optimizer: Optimizer, budget: Budget, report: Callable[[str], None]) -> None:
    """Write the best plan on the mesh that the runtime can execute."""
    left = budget.seconds_left
    report("tracing every layer for the plan")
    plan = late.search_plan(folded, cluster, shape=shape, limit_bytes=limit, optimizer=optimizer,
                            budget=time_budget(None if left is None else max(LEAST_PLAN_S, left)))
    save_plan(plan, path)
    report(f"plan of {plan.search.step_time:.6g} s a step, with optimizer states whole where parameters are, written "
           f"to {path}")
