"""Plans as *degrees* of parallelism, as torchtitan and vLLM are told them.

Such tools number their ranks along a grid, pipeline x replicas x devices of a replica, the same everywhere, the
pipeline outermost and the devices of a replica innermost. ``device_grid`` finds it, or says which stage does not fit
in. ``axis_roles`` says what the axes of a sharded stage are for; the matrix products of layers decide. On a *tensor*
axis each is split by column or row (``n`` or ``k``), as Megatron does; on a *data* axis each takes a part of the
samples (``b0``, or ``m`` where samples and positions are one dimension) and its matrix is whole (replicated) or
stored in pieces that are gathered for use (fully sharded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.export.layer_list import products
from weft.model.graph import Graph
from weft.plan.plan import Plan, Stage
from weft.plan.sharding import parse_layout

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
            kind = _WORDS.get(word)
            if kind is None:
                what = "is done whole by every device" if not word else f"is split by {word!r}"
                raise InputError(
                    f"operator {graph.op_names[op]!r} of stage {stage.name!r} {what} on the axis {name!r} of {size} "
                    f"devices, which is neither tensor nor data parallel: {tool} cannot say that. Try weft shard with "
                    "another --mesh, or a plan without sharded stages")
            found.setdefault(kind, graph.op_names[op])
            stored.setdefault(_is_whole(stage, graph.tensor_names[weight], axis), graph.tensor_names[weight])
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


def _is_whole(stage: Stage, tensor: str, axis: int) -> bool:
    words: Sequence[str] | None = stage.sharding.tensors.get(tensor)
    return words is None or not parse_layout(words).value[axis].is_split
