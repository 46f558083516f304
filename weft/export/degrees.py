"""Plans as *degrees* of parallelism, as torchtitan and vLLM are told them.

Such tools number their ranks along a grid, pipeline x replicas x devices of a replica, the same everywhere, the
pipeline outermost and the devices of a replica innermost. ``device_grid`` finds it, or says which stage does not fit
in. ``axis_roles`` says what the axes of a sharded stage are for; the matrix products of layers decide. On a *tensor*
axis each is split by column or row (``n`` or ``k``), as Megatron does; on a *data* axis each takes a part of the
samples (``b0``, or ``m`` where samples and positions are one dimension) and its matrix is whole (replicated) or
stored in pieces that are gathered for use (fully sharded).

They give whole layers to devices, so ``find_layers`` says where a plan cuts the list of a model's layers:

    transformer.wte | transformer.h.0 ... transformer.h.11 | transformer.ln_f, lm_head
    before          | layers                               | after

The layers are the numbered modules of the model's one list. *Before* and *after* are the modules with parameters
outside it, by whether they run before the first layer. Operators without parameters outside the list (positions, masks)
cost next to nothing and every tool has its own, so they do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.plan.plan import Plan, Stage
from weft.plan.sharding import parse_layout
from weft.plan.units import storage_text

Group = tuple[tuple[str, ...], ...]
"""The devices of each replica of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrid:
    """Devices in the order in which tools with degrees of parallelism number their ranks."""

    groups: tuple[Group, ...]
    """By pipeline rank: the devices of each replica."""
    rank_of_stage: tuple[int, ...]
    """The pipeline rank of each stage of the plan."""

    @property
    def num_replicas(self) -> int:
        """Return how many replicas every stage has."""
        return len(self.groups[0])

    @property
    def width(self) -> int:
        """Return how many devices every replica has."""
        return len(self.groups[0][0])

    @property
    def ranks(self) -> tuple[str, ...]:
        """Return the device of each rank: by pipeline rank, then replica, then place in the replica."""
        return tuple(device for group in self.groups for replica in group for device in replica)


def device_grid(plan: Plan, *, tool: str) -> DeviceGrid:
    """Return the plan's grid; raise ``InputError`` with the stage that does not fit in. ``tool`` is for messages."""
    groups: list[Group] = []
    ranks = []
    for stage in plan.stages:
        if stage.storage:
            raise InputError(f"stage {stage.name!r} keeps {stage.storage.pieces} in pieces "
                             f"({storage_text(stage.storage)}): the export to {tool} cannot say that yet. Export a "
                             f"plan without, and let {tool} divide them itself")
        group = tuple(replica.devices for replica in stage.replicas)
        _check_replicas(stage, group, plan, tool)
        if group not in groups:
            _check_apart(stage, group, groups, tool)
            groups.append(group)
        ranks.append(groups.index(group))
    return DeviceGrid(groups=tuple(groups), rank_of_stage=tuple(ranks))


def _check_replicas(stage: Stage, group: Group, plan: Plan, tool: str) -> None:
    shares = {round(replica.share, 9) for replica in stage.replicas}
    if len(shares) > 1:
        parts = ", ".join(f"{replica.share:.4g}" for replica in stage.replicas[:6])
        raise InputError(f"the replicas of stage {stage.name!r} have unequal shares of the batch ({parts}): {tool} "
                         "gives all the same. Try a plan with equal shares (weft plan --strategy data-parallel)")
    if stage.microbatches is not None and len(stage.microbatches) < plan.microbatches:
        raise InputError(f"stage {stage.name!r} handles {len(stage.microbatches)} of {plan.microbatches} "
                         f"micro-batches: in {tool} every stage handles all. Export a plan of one pipeline")
    first = plan.stages[0]
    shape = [len(devices) for devices in group]
    wanted = [len(first.replicas[0].devices)] * len(first.replicas)
    if shape != wanted or any(replica.mesh != first.replicas[0].mesh for replica in stage.replicas):
        raise InputError(f"stage {stage.name!r} has {_shape(stage)}, but stage {first.name!r} has {_shape(first)}: "
                         f"{tool} has one degree of each kind of parallelism for all stages")


def _shape(stage: Stage) -> str:
    sizes = ["x".join(map(str, replica.mesh.values())) or str(len(replica.devices)) for replica in stage.replicas]
    what = "replica" if len(sizes) == 1 else "replicas"
    return f"{len(sizes)} {what} of {' and '.join(dict.fromkeys(sizes))} devices"


def _check_apart(stage: Stage, group: Group, groups: Sequence[Group], tool: str) -> None:
    taken = {device for other in groups for replica in other for device in replica}
    both = [device for replica in group for device in replica if device in taken]
    if both:
        raise InputError(f"stage {stage.name!r} shares {both[0]!r} with another stage, but not all of its devices: in "
                         f"{tool} stages have the same devices, in the same order, or none in common")


def numbers_on_host(cluster: Cluster) -> dict[str, int]:
    """Return the number of each GPU on its host, as CUDA counts them in the cluster's order."""
    number: dict[str, int] = {}
    seen: dict[str, int] = {}
    for device in cluster.devices:
        if cluster.kinds[device.kind].type != "cpu":
            number[device.name] = seen.get(device.host, 0)
            seen[device.host] = number[device.name] + 1
    return number


def gpu_numbers(cluster: Cluster, devices: Sequence[str], *, tool: str) -> tuple[int, ...] | None:
    """Return the number of each GPU on its host, as CUDA counts them in the cluster's order; None on several hosts.

    Raise ``InputError`` if one of the devices is a CPU.
    """
    number = numbers_on_host(cluster)
    for name in devices:
        if name not in number:
            raise InputError(f"the plan uses {name!r}, which is a CPU: {tool} puts layers on GPUs only. Plan for the "
                             "GPUs of the cluster")
    hosts = {cluster.devices[cluster.device_index[name]].host for name in devices}
    return tuple(number[name] for name in devices) if len(hosts) <= 1 else None


_WORDS: Final = {"n": "tensor", "k": "tensor", "b0": "data", "m": "data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """One axis of the mesh of all replicas."""

    name: str
    size: int
    kind: Literal["tensor", "data"]
    is_stored_whole: bool = True
    """Of a data axis: every device holds whole parameters, not pieces of them."""


def axis_roles(plan: Plan, graph: Graph, *, tool: str) -> tuple[AxisRole, ...]:
    """Return what each axis of the replicas' mesh is for; raise ``InputError`` with the operator that is in the way.

    The plan is a ``device_grid``: all replicas have the same mesh. Axes of size 1 are left out.
    """
    mesh = plan.stages[0].replicas[0].mesh
    return tuple(_role(plan, graph, number, name, size, tool)
                 for number, (name, size) in enumerate(mesh.items()) if size > 1)


def _role(plan: Plan, graph: Graph, axis: int, name: str, size: int, tool: str) -> AxisRole:
    found: dict[str, str] = {}
    stored: dict[bool, str] = {}
    for stage in plan.stages:
        for op, weight in products(graph, map(graph.op_index.__getitem__, stage.ops)):
            if not any(part.isdecimal() for part in graph.op_modules[op].split(".")):
                continue  # it is in no layer
            words = stage.sharding.ops.get(graph.op_names[op], ())
            word = words[axis].partition("/")[0].partition("x")[0] if words else ""
            kind = None if words and words[axis].endswith("z") else _WORDS.get(word)  # rows in zig-zag are no samples
            if kind is None:
                what = "is done whole by every device" if not word else f"is split by {word!r}"
                raise InputError(
                    f"operator {graph.op_names[op]!r} of stage {stage.name!r} {what} on the axis {name!r} of {size} "
                    f"devices, which is neither tensor nor data parallel: {tool} cannot say that. Try weft shard with "
                    "another --mesh, or a plan without sharded stages")
            found.setdefault(kind, graph.op_names[op])
            layout = stage.sharding.tensors.get(graph.tensor_names[weight])
            is_whole = layout is None or not parse_layout(layout).value[axis].is_split
            stored.setdefault(is_whole, graph.tensor_names[weight])
    if not found:
        raise InputError(f"no matrix product of a layer runs on the axis {name!r} of {size} devices: {tool} has no "
                         "word for it")
    if len(found) > 1:
        raise InputError(f"on the axis {name!r} operator {found['tensor']!r} is split by width and {found['data']!r} "
                         f"by samples: {tool} has one kind of parallelism for an axis. Try weft shard with another "
                         "--mesh")
    if "data" in found and len(stored) > 1:
        raise InputError(f"on the axis {name!r} {stored[True]!r} is whole and {stored[False]!r} is in pieces: {tool} "
                         "stores all matrices alike")
    return AxisRole(name=name, size=size, kind="tensor" if "tensor" in found else "data",
                    is_stored_whole="tensor" in found or True in stored)


PRODUCTS: Final = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")
"""Kinds of operators that multiply by a matrix of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """The layers of a model and the stage of each."""

    path: str
    """Of the list: ``transformer.h``."""
    stages: tuple[int, ...]
    """By layer: index into ``Plan.stages``."""
    before: Mapping[str, int]
    """Modules with parameters that run before the layers, with their stages."""
    after: Mapping[str, int]
    """Those that run after them."""
    notes: tuple[str, ...] = ()
    """Layers and modules that are cut in the plan, and where they are now."""

    def counts(self, num_stages: int) -> tuple[int, ...]:
        """Return how many layers each stage has."""
        return tuple(self.stages.count(stage) for stage in range(num_stages))

    def in_order(self) -> Iterator[tuple[str, int]]:
        """Yield (module, stage) in the order in which they run."""
        yield from self.before.items()
        yield from ((f"{self.path}.{index}", stage) for index, stage in enumerate(self.stages))
        yield from self.after.items()


def find_layers(plan: Plan, graph: Graph, *, tool: str, nearest: bool = False) -> LayerList:
    """Return the model's layers with their stages; raise ``InputError`` if there is no one list, or a layer is cut.

    With ``nearest`` a layer that is cut goes to the stage that has most of its work. ``tool`` is the tool's name, for
    messages. The stages must come in the order in which data flows.
    """
    blocks = [_block(path) for path in graph.op_modules]
    path, layers = _the_list(blocks, graph, tool)
    parts = _parts(plan, graph, blocks, tool)
    notes: list[str] = []
    found = {unit: _resolve(plan, graph, unit, ops, tool, notes if nearest else None) for unit, ops in parts.items()}
    begin = min(op for layer in layers for ops in parts[layer].values() for op in ops)
    ahead = {unit for unit, ops in parts.items() if unit not in layers and min(map(min, ops.values())) < begin}
    result = LayerList(
        path=path, stages=tuple(found[layer] for layer in layers), notes=tuple(notes),
        before={unit: stage for unit, stage in found.items() if unit in ahead},
        after={unit: stage for unit, stage in found.items() if unit not in ahead and unit not in layers})
    _check_flow(result, plan, tool)
    return result


def _parts(plan: Plan, graph: Graph, blocks: list[str], tool: str) -> dict[str, dict[int, list[int]]]:
    """Return for each layer, and for each module with parameters outside of layers, its operators by stage."""
    is_parameter = np.zeros(graph.num_tensors, dtype=bool)
    is_parameter[graph.parameters] = True
    parts: dict[str, dict[int, list[int]]] = {}
    for op, stage in enumerate(_stage_of_ops(plan, graph, tool)):
        if stage >= 0 and (blocks[op] or is_parameter[graph.op_inputs(op)].any()):
            parts.setdefault(blocks[op] or graph.op_modules[op], {}).setdefault(stage, []).append(op)
    return parts


def _resolve(plan: Plan, graph: Graph, unit: str, ops: Mapping[int, list[int]], tool: str,
             notes: list[str] | None) -> int:
    """Return the stage of a layer or module; one that is cut is an error, or noted and given to the larger part."""
    if len(ops) == 1:
        return next(iter(ops))
    one, other = list(ops)[:2]
    if notes is None:
        raise InputError(
            f"{unit!r} is cut: operator {graph.op_names[ops[one][0]]!r} is in stage {plan.stages[one].name!r} and "
            f"{graph.op_names[ops[other][0]]!r} in stage {plan.stages[other].name!r}, but {tool} gives whole layers to "
            "devices. Try a plan that cuts between layers (weft plan --strategy gpipe or 1f1b), or --nearest to give "
            "it to the stage with the larger part")
    work = {stage: float(graph.flops[members].sum()) for stage, members in ops.items()}
    best = max(work, key=lambda stage: (work[stage], len(ops[stage]), -stage))
    part = work[best] / (sum(work.values()) or 1.0)
    notes.append(f"{unit!r} is cut in the plan: all of it goes to stage {plan.stages[best].name!r}, which has "
                 f"{100 * part:.0f} % of its work")
    return best


def _block(path: str) -> str:
    """Return the path up to its first number: the layer of a list that a module is in, or ``""``."""
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: number + 1])


def _the_list(blocks: list[str], graph: Graph, tool: str) -> tuple[str, list[str]]:
    """Return the path of the model's list of layers, and the layers in order."""
    lists: dict[str, set[int]] = {}
    for block in blocks:
        if block:
            path, _, number = block.rpartition(".")
            lists.setdefault(path, set()).add(int(number))
    if len(lists) != 1:
        what = "no list of layers" if not lists else f"{len(lists)} lists of layers ({', '.join(sorted(lists)[:4])})"
        raise InputError(f"model {graph.name!r} has {what}, but {tool} divides one: it is for models such as decoders, "
                         "whose layers are all in one list")
    path, numbers = next(iter(lists.items()))
    if numbers != set(range(len(numbers))):
        raise InputError(f"the layers of {path!r} in model {graph.name!r} are numbered {sorted(numbers)[:8]}: {tool} "
                         "counts them from 0, without gaps")
    return path, [f"{path}.{number}" for number in range(len(numbers))]


def _stage_of_ops(plan: Plan, graph: Graph, tool: str) -> list[int]:
    """Return the stage of every operator; -1 for constants, which any stage computes for itself."""
    found = [-1] * graph.num_ops
    for index, stage in enumerate(plan.stages):
        for name in stage.ops:
            op = graph.op_index[name]
            if graph.is_constant[op]:
                continue
            if found[op] >= 0:
                raise InputError(f"operator {name!r} is in the stages {plan.stages[found[op]].name!r} and "
                                 f"{stage.name!r}, for different micro-batches: {tool} cannot say that. Export a plan "
                                 "of one pipeline")
            found[op] = index
    return found


def _check_flow(layers: LayerList, plan: Plan, tool: str) -> None:
    """Raise ``InputError`` unless the stages follow each other along the model, with something in each."""
    last, before = 0, ""
    for module, stage in layers.in_order():
        if stage not in (last, last + 1) or (not before and stage):
            where = f"{module!r} is in stage {plan.stages[stage].name!r} (stages[{stage}])"
            behind = f", behind {before!r} in {plan.stages[last].name!r} (stages[{last}])" if before else ""
            raise InputError(f"{where}{behind}: {tool} needs stages that follow each other along the model, listed in "
                             "this order")
        last, before = stage, module
    if last != len(plan.stages) - 1:
        raise InputError(f"stage {plan.stages[last + 1].name!r} (stages[{last + 1}]) has no layer and no module with "
                         f"parameters: {tool} has nothing to put there. Try fewer stages")


def products(graph: Graph, ops: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield those of the operators that multiply by a matrix of parameters (or a view of one), each with its matrix."""
    parameters = set(graph.parameters.tolist())
    for op in ops:
        inputs = graph.op_inputs(op).tolist() if graph.op_kinds[op].startswith(PRODUCTS) else []
        owners = (tensor if tensor in parameters else int(graph.tensor_base[tensor]) for tensor in inputs)
        found = (owner for owner in owners if owner in parameters and len(graph.tensor_shapes[owner]) == 2)
        yield from ((op, owner) for owner in itertools.islice(found, 1))
