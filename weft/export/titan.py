"""A training plan as settings of torchtitan: degrees of parallelism, the modules of each stage, and the schedule.

    [parallelism]
    pipeline_parallel_degree = 2
    module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output", "lm_head"]]
    pipeline_parallel_schedule = "1F1B"

torchtitan up to 0.2 reads this as TOML; later versions take the same fields in ``ParallelismConfig``. Modules have the
names of torchtitan's own models. The head is called both ``output`` (up to 0.2) and ``lm_head`` (later): a name that a
model does not have is ignored. A schedule that torchtitan does not know by name goes into a CSV file beside it.

Ranks are numbered along pipeline, replicas, pieces and tensor parallelism, the last fastest. torchtitan gives pipeline
rank ``r`` the stages ``r``, ``r + p``, ... (*loop*), or ``r`` and ``2 p - 1 - r`` (*v*, with ``ZBVZeroBubble``). What
it cannot say is refused: replicas of different size or share, layers that are cut, other ways to lay stages on ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from weft.base.errors import InputError
from weft.export.degrees import DeviceGrid, LayerList, axis_roles, device_grid, find_layers, products
from weft.export.pipelining_csv import order_to_csv
from weft.model.graph import Graph
from weft.plan.orders import Order, gpipe, one_f_one_b, stage_order
from weft.plan.plan import Plan
from weft.plan.program import Program

TOOL: Final = "torchtitan"
HEAD: Final = ("output", "lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanSettings:
    """What torchtitan is to be told."""

    sections: Mapping[str, Mapping[str, Any]]
    """By section of its configuration."""
    ranks: tuple[str, ...]
    """The device that each rank must run on."""
    csv: str | None = None
    """The schedule, where torchtitan has no name for it; the settings name the file."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Degrees:
    """Data and tensor parallelism, in the order of torchtitan's ranks."""

    replicate: int
    shard: int = 1
    tensor: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> int:
        return self.replicate * self.shard


def to_titan(program: Program, *, csv_path: str | None = None, nearest: bool = False) -> TitanSettings:
    """Return the settings of a checked plan; raise ``InputError`` for what torchtitan cannot say.

    ``csv_path`` is where the caller will put the schedule if it has no name; without it such a plan is refused. With
    ``nearest`` layers that are cut go to one of their stages.
    """
    plan, graph = program.plan, program.graph
    if plan.model.mode != "training":
        raise InputError(f"the plan is for {plan.model.mode}, and torchtitan trains: plan with --mode training")
    grid = device_grid(plan, tool=TOOL)
    notes: list[str] = []
    degrees = _degrees(plan, graph, grid, notes)
    if plan.microbatch_size % degrees.data:
        raise InputError(f"a micro-batch of {plan.microbatch_size} samples cannot be divided evenly over "
                         f"{degrees.data} replicas, as torchtitan does: choose a batch that can")
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": degrees.replicate, "data_parallel_shard_degree": degrees.shard,
        **degrees.settings, "tensor_parallel_degree": degrees.tensor, "pipeline_parallel_degree": len(grid.groups)}
    csv = None
    if len(grid.groups) > 1:
        layers = find_layers(plan, graph, tool=TOOL, nearest=nearest)
        parallelism["module_fqns_per_model_part"] = _modules(plan, graph, layers, notes)
        schedule, csv = _schedule(plan, grid, csv_path)
        parallelism |= schedule | {"pipeline_parallel_microbatch_size": plan.microbatch_size // degrees.data}
    notes += _notes(plan, grid)
    # The batch of a rank: micro-batches are parts of it in a pipeline, else steps of accumulation.
    samples = plan.model.batch if len(grid.groups) > 1 else plan.microbatch_size
    training = {"local_batch_size": samples // degrees.data, "global_batch_size": plan.model.batch}
    recompute = {"mode": "full" if any(stage.keeps_only_inputs for stage in plan.stages) else
                 "selective" if any(stage.recompute for stage in plan.stages) else "none"}
    return TitanSettings(sections={"parallelism": parallelism, "training": training,
                                   "activation_checkpoint": recompute},
                         ranks=grid.ranks, csv=csv, notes=tuple(notes))


def _degrees(plan: Plan, graph: Graph, grid: DeviceGrid, notes: list[str]) -> _Degrees:
    found = _Degrees(replicate=grid.num_replicas)
    for role in axis_roles(plan, graph, tool=TOOL) if grid.width > 1 else ():
        if found.tensor > 1 or (role.kind == "data" and role.is_stored_whole and found.shard > 1):
            raise InputError(f"the axis {role.name!r} comes behind the axis that splits layers or stores pieces: "
                             "torchtitan numbers ranks by replicas, pieces, then tensor parallelism. Try weft shard "
                             "with fewer axes, or the tensor axis last")
        if role.kind == "tensor":
            found.tensor = role.size
        elif role.is_stored_whole:
            found.replicate *= role.size
        else:
            found.shard *= role.size
            found.settings["fsdp_reshard_after_forward"] = "always"
    if plan.optimizer.sharded and found.shard == 1 and found.replicate > 1:
        found.replicate, found.shard = 1, found.replicate
        found.settings["fsdp_reshard_after_forward"] = "never"
        notes.append("the plan divides only the optimizer's state among replicas; torchtitan divides parameters and "
                     "gradients too, and gathers them (fsdp_reshard_after_forward = never is closest)")
    return found


def _modules(plan: Plan, graph: Graph, layers: LayerList, notes: list[str]) -> list[list[str]]:
    """Return the modules of each stage, by the names of torchtitan's models."""
    parts: list[list[str]] = [[] for _ in plan.stages]
    for module, stage in layers.before.items():
        if stage != 0:
            raise InputError(f"{module!r} runs before the layers, but in stage {plan.stages[stage].name!r}: torchtitan "
                             "has the embedding in the first stage")
        parts[0] = ["tok_embeddings"]
    for index, stage in enumerate(layers.stages):
        parts[stage].append(f"layers.{index}")
    multiply = {graph.op_modules[op] for op, _ in products(graph, range(graph.num_ops))}
    names: dict[str, list[str]] = {"norm": [], "output": []}
    for module, stage in layers.after.items():
        role = "output" if module in multiply else "norm"
        names[role].append(module)
        parts[stage] += HEAD if role == "output" else (role,)
        if len(names[role]) > 1:
            raise InputError(f"{' and '.join(map(repr, names[role]))} both run after the layers: torchtitan's models "
                             "end with one norm and one output layer. Export a plan of such a model")
    said = {"tok_embeddings": ", ".join(layers.before), "layers": layers.path,
            **{role: found[0] for role, found in names.items() if found}}
    notes += layers.notes
    notes.append("names of torchtitan's models are used: " + "; ".join(f"{role} for {own}" for role, own in
                                                                       said.items() if own))
    return parts


def _schedule(plan: Plan, grid: DeviceGrid, csv_path: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the settings of the schedule, and the CSV where it has no name."""
    num_ranks, num_stages = len(grid.groups), len(plan.stages)
    order = _common_order(plan, grid)
    is_loop = all(rank == stage % num_ranks for stage, rank in enumerate(grid.rank_of_stage))
    is_v = num_stages == 2 * num_ranks and all(
        rank == min(stage, num_stages - 1 - stage) for stage, rank in enumerate(grid.rank_of_stage))
    if num_stages % num_ranks or not (is_loop or is_v):
        raise InputError(f"the stages are on the pipeline ranks {list(grid.rank_of_stage)[:16]}: torchtitan deals them "
                         f"out in turn (0, 1, ... {num_ranks - 1}, 0, 1, ...), or there and back with two stages for "
                         "each rank. Try a plan with one stage for each device")
    name = _schedule_name(order, num_stages, plan.microbatches)
    if is_loop and name is not None:
        return {"pipeline_parallel_schedule": name}, None
    if csv_path is None:
        raise InputError("the order of the plan is not one that torchtitan knows by name, so it goes into a CSV file "
                         "beside the settings: say where with --out FILE.toml")
    style = ("1F1B" if num_stages == num_ranks else "Interleaved1F1B") if is_loop else "ZBVZeroBubble"
    return ({"pipeline_parallel_schedule": style, "pipeline_parallel_schedule_csv": csv_path},
            order_to_csv(order, num_microbatches=plan.microbatches))


def _schedule_name(order: Order, num_stages: int, num_microbatches: int) -> str | None:
    """Return the name of an order that PyTorch builds just so; it refuses 1F1B with fewer micro-batches than stages."""
    if order == gpipe(num_stages, num_microbatches):
        return "GPipe"
    is_allowed = num_microbatches >= num_stages
    return "1F1B" if is_allowed and order == one_f_one_b(num_stages, num_microbatches) else None


def _common_order(plan: Plan, grid: DeviceGrid) -> Order:
    """Return the order of each pipeline rank, which all its devices must have."""
    order = stage_order(plan, [group[0][0] for group in grid.groups])
    for group, actions in zip(grid.groups, order, strict=True):
        for device in (device for replica in group for device in replica):
            if stage_order(plan, [device])[0] != actions:
                raise InputError(f"order.{device} differs from order.{group[0][0]}, although both run the same stages: "
                                 "in torchtitan all replicas of a stage have one schedule")
    return order


def _notes(plan: Plan, grid: DeviceGrid) -> Iterator[str]:
    if grid.ranks != plan.cluster.devices:
        yield f"ranks must be started in this order of devices: {', '.join(grid.ranks)}"
    ranks = {device: rank for rank, group in enumerate(grid.groups) for replica in group for device in replica}
    shared = sum(len(exchange.parameters) for exchange in plan.gradients
                 if len({ranks[device] for device in exchange.devices}) > 1)
    if shared:
        yield f"{shared} parameters are in several stages (tied), but torchtitan does not add up their gradients"
    methods = sorted({exchange.method for exchange in plan.gradients} - {"all_reduce"})
    if methods:
        yield f"the plan exchanges gradients by {' and '.join(methods)}; torchtitan uses collectives of its own"
    if len({stage.recompute for stage in plan.stages}) > 1:
        yield "only some stages recompute in the plan; torchtitan has one setting for all"
    if any(stage.saved for stage in plan.stages):
        yield ("the plan says tensor by tensor what is kept for the backward; torchtitan chooses by kinds of operators "
               "(activation_checkpoint)")


def format_toml(settings: TitanSettings) -> str:
    """Return the settings as a TOML file."""
    lines = [f"# Written by Weft. Ranks 0 to {len(settings.ranks) - 1} are {', '.join(settings.ranks)}."]
    lines += [f"# {note}" for note in settings.notes]
    for section, values in settings.sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
