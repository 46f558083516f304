"""An inference plan as options of vLLM: how many layers each pipeline rank has, and degrees of parallelism.

    VLLM_PP_LAYER_PARTITION=5,7 vllm serve MODEL --tensor-parallel-size 2 --pipeline-parallel-size 2

vLLM keeps the embedding on the first pipeline rank and the last norm and the head on the last one, numbers its ranks
along data parallelism, pipeline and tensor parallelism (the last fastest), and shards layers as Megatron does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.export.axis_roles import axis_roles
from weft.export.device_grid import device_grid, gpu_numbers
from weft.export.layer_list import LayerList, find_layers
from weft.export.server_options import ServerOptions, visible_gpus
from weft.plan.plan import Plan
from weft.plan.program import Program

TOOL: Final = "vLLM"
VARIABLE: Final = "VLLM_PP_LAYER_PARTITION"


def to_layer_partition(program: Program, cluster: Cluster, *, nearest: bool = False) -> ServerOptions:
    """Return the options of vLLM for a checked plan; raise ``InputError`` for what they cannot say.

    With ``nearest`` layers that are cut go to one of their stages, and what vLLM has at the ends goes there.
    """
    plan = program.plan
    if plan.model.mode != "inference":
        raise InputError(f"the plan is for {plan.model.mode}, and vLLM infers: plan with --mode inference")
    grid = device_grid(plan, tool=TOOL)
    layers = find_layers(plan, program.graph, tool=TOOL, nearest=nearest)
    if list(grid.rank_of_stage) != list(range(len(grid.groups))):
        raise InputError(f"the {len(plan.stages)} stages are on the pipeline ranks {list(grid.rank_of_stage)[:16]}: in "
                         "vLLM each has one stage. Try a plan with one stage for each device")
    counts = layers.counts(len(plan.stages))
    notes = [*layers.notes, *_moved_to_ends(plan, layers)]
    if notes and not nearest:
        raise InputError(f"{notes[0]}. Try --nearest, or a plan that has it there")
    roles = axis_roles(plan, program.graph, tool=TOOL) if grid.width > 1 else ()
    for role in roles:
        if role.kind != "tensor" or len(roles) > 1:
            raise InputError(f"the mesh of a replica has the axes {', '.join(item.name for item in roles)}, of which "
                             f"{role.name!r} is {role.kind} parallel: vLLM divides a stage by tensor parallelism "
                             "alone. Try weft shard with a mesh of one axis")
    arguments = ["--tensor-parallel-size", str(grid.width), "--pipeline-parallel-size", str(len(grid.groups))]
    if grid.num_replicas > 1:
        arguments += ["--data-parallel-size", str(grid.num_replicas)]
    ranks = tuple(device for replica in range(grid.num_replicas) for group in grid.groups for device in group[replica])
    numbers = gpu_numbers(cluster, ranks, tool=TOOL)
    environment = {VARIABLE: ",".join(map(str, counts))} if len(grid.groups) > 1 else {}
    if numbers is not None:
        environment |= visible_gpus(numbers)
    return ServerOptions(environment=environment, arguments=tuple(arguments), devices=ranks,
                         notes=(*notes, *_notes(plan, ranks, counts, is_one_host=numbers is not None)))


def _moved_to_ends(plan: Plan, layers: LayerList) -> Iterator[str]:
    """Yield what the plan has elsewhere than vLLM: the embedding and what comes after the layers."""
    last = len(plan.stages) - 1
    for modules, wanted, place in ((layers.before, 0, "first"), (layers.after, last, "last")):
        for module, stage in modules.items():
            if stage != wanted:
                yield (f"{module!r} is in stage {plan.stages[stage].name!r}, but vLLM has it on the {place} pipeline "
                       f"rank, that of stage {plan.stages[wanted].name!r}")


def _notes(plan: Plan, ranks: tuple[str, ...], counts: tuple[int, ...], *, is_one_host: bool) -> Iterator[str]:
    for stage, count in zip(plan.stages, counts, strict=True):
        if not count:
            yield (f"stage {stage.name!r} has no layer of its own: whether vLLM runs a pipeline rank without layers "
                   "was not tried")
    if not is_one_host:
        yield f"the devices are on several hosts; ranks must be, in this order: {', '.join(ranks)}"
    if plan.microbatches > 1:
        yield (f"the plan's {plan.microbatches} micro-batches are not said: vLLM forms batches from the requests that "
               "it has")
