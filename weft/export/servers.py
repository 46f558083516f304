"""Inference plans as options of servers of language models: vLLM and llama.cpp, which give whole layers to devices.

    VLLM_PP_LAYER_PARTITION=5,7 vllm serve MODEL --tensor-parallel-size 2 --pipeline-parallel-size 2
    llama-server -m MODEL.gguf --gpu-layers 9 --split-mode layer --tensor-split 4,5

vLLM keeps the embedding on the first pipeline rank and the last norm and the head on the last one, numbers its ranks
along data parallelism, pipeline and tensor parallelism (the last fastest), and shards layers as Megatron does.

llama.cpp counts the model's layers and, as one more, the output (last norm and head). The last ``--gpu-layers`` of
these go to GPUs, the ones before stay on the CPU; GPU after GPU gets its part by ``--tensor-split``. The parts are
proportions: written as numbers of layers they mean just these, since layer ``i`` of ``n`` goes where ``i / n`` lies
between the sums of the parts divided by their total. The embedding of tokens always stays on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.export.degrees import LayerList, axis_roles, device_grid, find_layers, gpu_numbers
from weft.plan.plan import Plan
from weft.plan.program import Program

VLLM: Final = "vLLM"
VARIABLE: Final = "VLLM_PP_LAYER_PARTITION"
LLAMA: Final = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Environment and arguments that mean a plan."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    devices: tuple[str, ...]
    """The plan's device for each rank, or for each GPU that the server sees."""
    notes: tuple[str, ...] = ()

    def command(self, *words: str) -> str:
        """Return a line for a shell that starts the program ``words`` with these options."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, *words, *self.arguments])


def visible_gpus(numbers: tuple[int, ...]) -> dict[str, str]:
    """Return the variable that shows GPUs in this order; nothing where they are the first ones, in their own order."""
    if numbers == tuple(range(len(numbers))):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


def to_layer_partition(program: Program, cluster: Cluster, *, nearest: bool = False) -> ServerOptions:
    """Return the options of vLLM for a checked plan; raise ``InputError`` for what they cannot say.

    With ``nearest`` layers that are cut go to one of their stages, and what vLLM has at the ends goes there.
    """
    plan = program.plan
    if plan.model.mode != "inference":
        raise InputError(f"the plan is for {plan.model.mode}, and vLLM infers: plan with --mode inference")
    grid = device_grid(plan, tool=VLLM)
    layers = find_layers(plan, program.graph, tool=VLLM, nearest=nearest)
    if list(grid.rank_of_stage) != list(range(len(grid.groups))):
        raise InputError(f"the {len(plan.stages)} stages are on the pipeline ranks {list(grid.rank_of_stage)[:16]}: in "
                         "vLLM each has one stage. Try a plan with one stage for each device")
    counts = layers.counts(len(plan.stages))
    notes = [*layers.notes, *_moved_to_ends(plan, layers)]
    if notes and not nearest:
        raise InputError(f"{notes[0]}. Try --nearest, or a plan that has it there")
    roles = axis_roles(plan, program.graph, tool=VLLM) if grid.width > 1 else ()
    for role in roles:
        if role.kind != "tensor" or len(roles) > 1:
            raise InputError(f"the mesh of a replica has the axes {', '.join(item.name for item in roles)}, of which "
                             f"{role.name!r} is {role.kind} parallel: vLLM divides a stage by tensor parallelism "
                             "alone. Try weft shard with a mesh of one axis")
    arguments = ["--tensor-parallel-size", str(grid.width), "--pipeline-parallel-size", str(len(grid.groups))]
    if grid.num_replicas > 1:
        arguments += ["--data-parallel-size", str(grid.num_replicas)]
    ranks = tuple(device for replica in range(grid.num_replicas) for group in grid.groups for device in group[replica])
    numbers = gpu_numbers(cluster, ranks, tool=VLLM)
    environment = {VARIABLE: ",".join(map(str, counts))} if len(grid.groups) > 1 else {}
    if numbers is not None:
        environment |= visible_gpus(numbers)
    return ServerOptions(environment=environment, arguments=tuple(arguments), devices=ranks,
                         notes=(*notes, *_vllm_notes(plan, ranks, counts, is_one_host=numbers is not None)))


def _moved_to_ends(plan: Plan, layers: LayerList) -> Iterator[str]:
    """Yield what the plan has elsewhere than vLLM: the embedding and what comes after the layers."""
    last = len(plan.stages) - 1
    for modules, wanted, place in ((layers.before, 0, "first"), (layers.after, last, "last")):
        for module, stage in modules.items():
            if stage != wanted:
                yield (f"{module!r} is in stage {plan.stages[stage].name!r}, but vLLM has it on the {place} pipeline "
                       f"rank, that of stage {plan.stages[wanted].name!r}")


def _vllm_notes(plan: Plan, ranks: tuple[str, ...], counts: tuple[int, ...], *, is_one_host: bool) -> Iterator[str]:
    for stage, count in zip(plan.stages, counts, strict=True):
        if not count:
            yield (f"stage {stage.name!r} has no layer of its own: whether vLLM runs a pipeline rank without layers "
                   "was not tried")
    if not is_one_host:
        yield f"the devices are on several hosts; ranks must be, in this order: {', '.join(ranks)}"
    if plan.microbatches > 1:
        yield (f"the plan's {plan.microbatches} micro-batches are not passed on: vLLM forms batches from the requests "
               "that it has")


def to_tensor_split(program: Program, cluster: Cluster, *, nearest: bool = False) -> ServerOptions:
    """Return the options of llama.cpp for a checked plan; raise ``InputError`` for what they cannot say.

    With ``nearest`` layers that are cut go to one of their stages.
    """
    plan = program.plan
    if plan.model.mode != "inference":
        raise InputError(f"the plan is for {plan.model.mode}, and llama.cpp infers: plan with --mode inference")
    for stage in plan.stages:
        if len(stage.replicas) > 1 or len(stage.replicas[0].devices) > 1:
            raise InputError(f"stage {stage.name!r} runs on several devices: llama.cpp, split by layers, has every "
                             "layer on one. Export a plan whose stages have one replica of one device")
    layers = find_layers(plan, program.graph, tool=LLAMA, nearest=nearest)
    devices = _device_of_slots(plan, layers)
    is_cpu = {device.name: cluster.kinds[device.kind].type == "cpu" for device in cluster.devices}
    on_cpu = [name for name in devices if is_cpu[name]]
    gpus = devices[len(on_cpu):]
    if any(is_cpu[name] for name in gpus):
        early = next(index for index, name in enumerate(devices) if not is_cpu[name])
        raise InputError(f"layer {early} of {layers.path!r} is on {devices[early]!r}, and something later is on the "
                         "CPU: llama.cpp keeps the first layers on the CPU and puts the last ones and the output on "
                         "GPUs. Place the layers of the CPU first")
    parts = _runs(gpus)
    numbers = gpu_numbers(cluster, tuple(parts), tool=LLAMA)
    hosts = {cluster.devices[cluster.device_index[name]].host for name in devices}
    if numbers is None or len(hosts) > 1:
        raise InputError(f"the plan uses devices on the hosts {', '.join(sorted(hosts))}: llama.cpp splits layers over "
                         "the devices of one machine. Plan for the devices of one host")
    arguments = ["--gpu-layers", str(len(gpus))]
    if gpus:
        arguments += ["--split-mode", "layer", "--tensor-split", ",".join(map(str, parts.values()))]
    return ServerOptions(environment=visible_gpus(numbers), arguments=tuple(arguments), devices=tuple(parts),
                         notes=(*layers.notes, *_llama_notes(plan, layers, is_cpu, is_mixed=bool(gpus and on_cpu))))


def _device_of_slots(plan: Plan, layers: LayerList) -> list[str]:
    """Return the device of each layer, and at the end that of the output."""
    device = [stage.replicas[0].devices[0] for stage in plan.stages]
    ends = {device[stage]: module for module, stage in layers.after.items()}
    if len(ends) > 1:
        raise InputError(f"{' and '.join(map(repr, ends.values()))} are on {' and '.join(map(repr, ends))}: llama.cpp "
                         "has what comes after the layers on one device")
    slots = [device[stage] for stage in layers.stages]
    return [*slots, next(iter(ends), slots[-1])]


def _runs(gpus: list[str]) -> dict[str, int]:
    """Return how many slots each GPU has; raise ``InputError`` if its layers are not next to each other."""
    parts: Counter[str] = Counter()
    last = ""
    for name in gpus:
        if name in parts and name != last:
            raise InputError(f"{name!r} has layers on both sides of those of {last!r}: llama.cpp gives each GPU layers "
                             "that follow each other. Try a plan with one stage for each device")
        parts[name] += 1
        last = name
    return parts


def _llama_notes(plan: Plan, layers: LayerList, is_cpu: dict[str, bool], *, is_mixed: bool) -> Iterator[str]:
    ahead = [module for module, stage in layers.before.items()
             if not is_cpu[plan.stages[stage].replicas[0].devices[0]]]
    if ahead:
        yield f"{', '.join(map(repr, ahead))} will be on the CPU: llama.cpp always keeps the embedding there"
    if is_mixed:
        yield ("with layers on the CPU, older versions of llama.cpp keep the output there too, and have one more "
               "layer on GPUs instead")
    if plan.microbatches > 1:
        yield (f"the plan's {plan.microbatches} micro-batches are not passed on: llama.cpp divides prompts by "
               "--ubatch-size, in tokens")
