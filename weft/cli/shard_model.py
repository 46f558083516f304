"""``weft shard MODEL CLUSTER``: how every tensor of a model is split over a cluster's devices."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from weft.base.errors import InputError, ModelError
from weft.cli.common import BEST_SO_FAR, choice, end_interrupted, print_json

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster
    from weft.model.folded import FoldedModel
    from weft.search.common.budget import Budget
    from weft.search.shard.compare import MeshComparison
    from weft.show.sharding_facts import ShardingFacts

EXPORTS: Final = ("parallelize-module", "torchtitan")
MAX_AXES: Final = 3
LEAST_PLAN_S: Final = 1.5
"""Seconds that the search for a plan that can be run has at least, whatever is left of a time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the command line asks for a model."""

    mesh: str | None
    batch: int | None
    dtype: str | None
    mode: str | None
    memory: str | None
    optimizer: str | None
    compare: bool
    export: str | None
    out: Path | None
    plan: Path | None
    time_limit: float | None
    as_json: bool
    report: Callable[[str], None]


def shard_model_command(spec: str, cluster_text: str, options: ModelOptions) -> None:
    """Search the sharding of a model, then print, write or export it."""
    begin = time.perf_counter()
    from weft.cluster import read_cluster
    from weft.search.common.budget import time_budget
    from weft.show.sharding_facts import sharding_facts
    from weft.show.sharding_tables import print_sharding, sharding_json

    import_s = time.perf_counter() - begin
    budget = time_budget(options.time_limit, options.report)
    if options.export is not None:
        choice("--export", options.export, EXPORTS)
    cluster = read_cluster(cluster_text)
    shapes = None if options.mesh is None else [parse_mesh(options.mesh, cluster.num_devices)]
    limit = memory_limit(options.memory, cluster)
    with budget.paused():
        folded = trace(spec, options)
    found = search(folded, cluster, shapes, limit, options, budget)
    facts = sharding_facts(found.best, folded)
    if options.export is not None:
        _export(facts, folded, options)
        _end_if_interrupted(budget)
        return
    if options.out is not None:
        _write(options.out, sharding_json(facts, found.named), options)
    if options.plan is not None:
        _write_plan(options.plan, folded, cluster, found.best.mesh.shape, limit, options, budget)
    if options.as_json:
        print_json({**sharding_json(facts, found.named), "import_seconds": import_s,
                    "tracing_seconds": budget.paused_s})
    else:
        print_sharding(facts, found.named)
    _end_if_interrupted(budget)


def _end_if_interrupted(budget: Budget) -> None:
    if budget.is_interrupted:
        end_interrupted(BEST_SO_FAR)


def parse_mesh(text: str, num_devices: int) -> tuple[int, ...]:
    """Return the sizes of ``2x4``; they must multiply to the number of devices."""
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", text):
        raise InputError(f"--mesh {text!r} is no mesh: write the sizes of its axes, such as 8, 2x4 or 2x2x2")
    shape = tuple(map(int, text.split("x")))
    product = 1
    for size in shape:
        product *= size
    if len(shape) > MAX_AXES:
        raise InputError(f"--mesh {text} has {len(shape)} axes: at most {MAX_AXES} are searched")
    if product != num_devices:
        raise InputError(f"a mesh of {text} has {product} places, but the group has {num_devices} devices: choose "
                         f"sizes whose product is {num_devices}")
    return shape


def memory_limit(text: str | None, cluster: Cluster) -> float | None:
    """Return the bytes that a device may hold: as given (``none``: no limit), else the memory of the smallest one."""
    from weft.base.units import parse_bytes

    if text == "none":
        return None
    if text is not None:
        limit = parse_bytes(text)
        if limit < 1:
            raise InputError(f"--memory must be more than nothing, not {text}")
        return float(limit)
    sizes = [device.memory_bytes for device in cluster.devices if device.memory_bytes is not None]
    return float(min(sizes)) if sizes else None


def trace(spec: str, options: ModelOptions) -> FoldedModel:
    """Return the model, traced with a few copies of each run of equal layers."""
    from weft.model.graph import Graph
    from weft.model.source import DTYPES, resolve_model
    from weft.model.zoo import Mode

    dtype = None if options.dtype is None else choice("--dtype", options.dtype, tuple(DTYPES))
    mode: Mode = choice("--mode", options.mode or "training", get_args(Mode))
    options.report(f"tracing {spec}")
    source = resolve_model(spec, mode=mode, batch=options.batch, dtype=dtype)
    if isinstance(source, Graph):
        raise ModelError(f"{spec!r} has no PyTorch module behind it, so it is not known how its operators can be "
                         "split: give a name from `weft models` or path/to/file.py:function")
    from weft.model.folded import trace_folded

    folded = trace_folded(source, batch=options.batch)
    cut = [path for run in folded.runs for position in range(run.num_copies) if position not in run.kept
           for path in run.layers(position)]
    for warning in folded.traced.graph.warnings:
        if not any(f"{path}." in warning for path in cut):  # layers that were left out on purpose
            options.report(f"note: {warning}")
    return folded


def search(folded: FoldedModel, cluster: Cluster, shapes: list[tuple[int, ...]] | None, limit: float | None,
           options: ModelOptions, budget: Budget) -> MeshComparison:
    """Return the best sharding, and the named plans if they are to be compared; Ctrl-C keeps the best so far."""
    from weft.cost.costs import estimate_costs
    from weft.plan.plan import OPTIMIZERS, Optimizer
    from weft.search.common.budget import ended_by_ctrl_c
    from weft.search.shard.compare import compare_meshes, sensible_shapes
    from weft.search.shard.named import NAMES

    kind = choice("--optimizer", options.optimizer or "adamw", OPTIMIZERS)
    tried = shapes or sensible_shapes(cluster, range(cluster.num_devices))
    with ended_by_ctrl_c(budget):
        return compare_meshes(folded, cluster, estimate_costs(folded.traced.graph, cluster), shapes=tried,
                              names=NAMES if options.compare else (), optimizer=Optimizer(kind=kind),
                              limit_bytes=limit, budget=budget, progress=options.report)


def _export(facts: ShardingFacts, folded: FoldedModel, options: ModelOptions) -> None:
    from weft.show.sharding_tables import parallelize_plan, titan_settings

    value = parallelize_plan(facts, folded) if options.export == EXPORTS[0] else titan_settings(facts)
    for difference in value["differences"]:
        options.report(f"note: not expressed: {difference}")
    if options.out is None:
        print_json(value)
    else:
        _write(options.out, value, options)


def _write(path: Path, value: dict[str, Any], options: ModelOptions) -> None:
    from weft.base.files import write_atomic

    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
    options.report(f"written to {path}")


def _write_plan(path: Path, folded: FoldedModel, cluster: Cluster, shape: tuple[int, ...], limit: float | None,
                options: ModelOptions, budget: Budget) -> None:
    """Write the best plan on the mesh that the runtime can execute."""
    from weft.plan.plan import OPTIMIZERS, Optimizer, save_plan
    from weft.search.common.budget import time_budget
    from weft.search.shard.compare import search_plan

    kind = choice("--optimizer", options.optimizer or "adamw", OPTIMIZERS)
    left = budget.seconds_left
    options.report("tracing every layer for the plan")
    plan = search_plan(folded, cluster, shape=shape, limit_bytes=limit, optimizer=Optimizer(kind=kind),
                       budget=time_budget(None if left is None else max(LEAST_PLAN_S, left)))
    save_plan(plan, path)
    options.report(f"plan of {plan.search.step_time:.6g} s a step, with optimizer states whole where parameters are, "
                   f"written to {path}")
