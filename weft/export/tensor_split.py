"""An inference plan as options of llama.cpp: which layers are on GPUs, and how many on each.

    llama-server -m MODEL.gguf --gpu-layers 9 --split-mode layer --tensor-split 4,5

llama.cpp counts the model's layers and, as one more, the output (last norm and head). The last ``--gpu-layers`` of
these go to GPUs, the ones before stay on the CPU; GPU after GPU gets its part by ``--tensor-split``. The parts are
proportions: written as numbers of layers they mean just these, since layer ``i`` of ``n`` goes where ``i / n`` lies
between the sums of the parts divided by their total. The embedding of tokens always stays on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.export.device_grid import gpu_numbers
from weft.export.layer_list import LayerList, find_layers
from weft.export.server_options import ServerOptions, visible_gpus
from weft.plan.plan import Plan
from weft.plan.program import Program

TOOL: Final = "llama.cpp"


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
    layers = find_layers(plan, program.graph, tool=TOOL, nearest=nearest)
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
    numbers = gpu_numbers(cluster, tuple(parts), tool=TOOL)
    hosts = {cluster.devices[cluster.device_index[name]].host for name in devices}
    if numbers is None or len(hosts) > 1:
        raise InputError(f"the plan uses devices on the hosts {', '.join(sorted(hosts))}: llama.cpp splits layers over "
                         "the devices of one machine. Plan for the devices of one host")
    arguments = ["--gpu-layers", str(len(gpus))]
    if gpus:
        arguments += ["--split-mode", "layer", "--tensor-split", ",".join(map(str, parts.values()))]
    return ServerOptions(environment=visible_gpus(numbers), arguments=tuple(arguments), devices=tuple(parts),
                         notes=(*layers.notes, *_notes(plan, layers, is_cpu, is_mixed=bool(gpus and on_cpu))))


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
    parts: dict[str, int] = {}
    last = ""
    for index, name in enumerate(gpus):
        if name in parts and name != last:
            raise InputError(f"{name!r} has layers on both sides of those of {last!r}: llama.cpp gives each GPU layers "
                             "that follow each other. Try a plan with one stage for each device")
        parts[name] = parts.get(name, 0) + 1
        last = gpus[index]
    return parts


def _notes(plan: Plan, layers: LayerList, is_cpu: dict[str, bool], *, is_mixed: bool) -> Iterator[str]:
    ahead = [module for module, stage in layers.before.items()
             if not is_cpu[plan.stages[stage].replicas[0].devices[0]]]
    if ahead:
        yield f"{', '.join(map(repr, ahead))} will be on the CPU: llama.cpp always keeps the embedding there"
    if is_mixed:
        yield ("with layers on the CPU, older versions of llama.cpp keep the output there too, and have one more "
               "layer on GPUs instead")
    if plan.microbatches > 1:
        yield (f"the plan's {plan.microbatches} micro-batches are not said: llama.cpp divides prompts by "
               "--ubatch-size, in tokens")
