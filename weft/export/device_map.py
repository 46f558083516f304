"""A plan as the ``device_map`` of accelerate: for each part of the module tree, the device that holds and runs it.

    {"transformer.wte": 0, "transformer.h.0": 0, "transformer.h.1": "cpu", "transformer.ln_f": "cpu", "lm_head": "cpu"}

The coarsest modules whose operators are all on one device become the keys. A device map cannot say everything that a
plan can, and what it cannot say is refused: a leaf module on two devices (or called on two), stages with replicas, and
operators of a split module itself that would meet tensors of two devices, which eager PyTorch refuses to compute with.

Two things to know about accelerate. It runs what the map puts on ``"cpu"`` on the first GPU, with weights copied there
for each call, unless ``dispatch_model`` is given ``main_device="cpu"``. And it runs operators of a split module where
their inputs are, whatever the plan says; where that differs, ``notes`` tells.

``op_properties`` says the same operator by operator, as text for other formats (the metadata of ONNX nodes).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.export.degrees import numbers_on_host
from weft.model.graph import Graph, TensorRole
from weft.plan.plan import Plan

DeviceName = int | str
"""As PyTorch has it: the number of a GPU, or ``"cpu"``."""
DEVICE: Final = "weft.device"
"""The device, or devices joined by a comma where several run the operator."""
STAGE: Final = "weft.stage"
"""The plan's stage, or stages likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """What ``accelerate.dispatch_model`` takes as ``device_map``, and what the user should know about it."""

    entries: dict[str, DeviceName]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Module:
    """One path of the module tree, with what lies below."""

    devices: set[str] = field(default_factory=set)
    children: dict[str, None] = field(default_factory=dict)
    """Paths one step down."""
    tensors: dict[str, set[str]] = field(default_factory=dict)
    """Parameters and buffers of the module itself, with the plan's devices that hold them."""
    ops: list[int] = field(default_factory=list)
    """Operators of the module itself."""


def to_device_map(plan: Plan, graph: Graph, cluster: Cluster, *, state: Iterable[str] = ()) -> DeviceMap:
    """Return the device map of the plan; raise ``InputError`` where the placement is not by module.

    ``state`` are the names in the module's ``state_dict``: tensors that no operator reads get a device as well.
    """
    device_of_op = _device_of_ops(plan, graph)
    tree = _build_tree(graph, device_of_op, state)
    names = _device_names(cluster, sorted({device for device in device_of_op if device}))
    placed = dict(_entries(graph, tree, "", device_of_op))
    covered = {key: device for key, device in placed.items() if device is not None}
    last = next(reversed(covered.values()))
    entries = {key: names[device or last] for key, device in placed.items()}
    locations = _locations(graph, tree, device_of_op)
    return DeviceMap(entries=entries, notes=tuple(_notes(graph, locations, device_of_op, names)))


def _device_of_ops(plan: Plan, graph: Graph) -> list[str]:
    """Return the device of every operator; "" for constants, which any device computes for itself."""
    found = [""] * graph.num_ops
    for stage in plan.stages:
        if len(stage.replicas) > 1 or len(stage.replicas[0].devices) > 1:
            raise InputError(f"stage {stage.name!r} runs on several devices: a device map puts every module on one. "
                             "Export a plan whose stages have one replica of one device")
        device = stage.replicas[0].devices[0]
        for name in stage.ops:
            op = graph.op_index[name]
            if not graph.is_constant[op]:
                if found[op] not in ("", device):
                    raise InputError(f"operator {name!r} runs on {found[op]!r} and on {device!r}, for different "
                                     "micro-batches: a device map puts every module on one device")
                found[op] = device
    return found


def _device_names(cluster: Cluster, used: list[str]) -> dict[str, DeviceName]:
    """Return PyTorch's names of the devices: GPUs are counted in the order of the cluster."""
    hosts = {cluster.devices[cluster.device_index[name]].host for name in used}
    if len(hosts) > 1:
        raise InputError(f"the plan uses devices on the hosts {', '.join(sorted(hosts))}: a device map is for one "
                         "machine. Plan for the devices of one host, or run the plan with Weft")
    numbers = numbers_on_host(cluster)
    return {device.name: numbers.get(device.name, "cpu") for device in cluster.devices if device.host in hosts}


def _build_tree(graph: Graph, device_of_op: list[str], state: Iterable[str]) -> dict[str, _Module]:
    tree: dict[str, _Module] = defaultdict(_Module)

    def add(path: str, devices: Iterable[str]) -> _Module:
        tree[path].devices.update(devices)
        if path:
            parent = path.rpartition(".")[0]
            tree[parent].children[path] = None
            add(parent, devices)
        return tree[path]

    for op, device in enumerate(device_of_op):
        if device:
            add(graph.op_modules[op], [device]).ops.append(op)
    is_stored = (graph.tensor_role == TensorRole.PARAMETER) | (graph.tensor_role == TensorRole.BUFFER)
    holders: dict[int, set[str]] = {}
    for op, tensor in zip(graph.consumer_op.tolist(), graph.inputs.tolist(), strict=True):
        if is_stored[tensor] and device_of_op[op]:
            holders.setdefault(tensor, set()).add(device_of_op[op])
    for name in state:
        tensor = graph.tensor_index.get(name, -1)
        add(name.rpartition(".")[0], ()).tensors[name] = holders.get(tensor, set())
    return tree


def _entries(graph: Graph, tree: dict[str, _Module], path: str,
             device_of_op: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (module or tensor, device) for what is below the path; no device where nothing says one."""
    module = tree[path]
    if len(module.devices) <= 1:
        yield path, next(iter(module.devices), None)
        return
    if not any(tree[child].devices for child in module.children):
        first = module.ops[0]
        second = next(op for op in module.ops if device_of_op[op] != device_of_op[first])
        where = ", ".join(f"{graph.op_names[op]!r} on {device_of_op[op]!r}" for op in (first, second))
        raise InputError(f"module {path!r} is on {_list(module.devices)} (operator {where}): a device map puts a "
                         "leaf module on one device. Give its operators one device (a placement of whole layers, such "
                         "as accelerate's own rules make), or run the plan with Weft")
    for name, devices in module.tensors.items():
        if len(devices) > 1:
            raise InputError(f"{name!r} of the split module {path!r} is held by {_list(devices)}: a device map keeps "
                             "a tensor on one device")
        yield name, next(iter(devices), None)
    for child in module.children:
        yield from _entries(graph, tree, child, device_of_op)


def _locations(graph: Graph, tree: dict[str, _Module], device_of_op: list[str]) -> list[str]:
    """Return where accelerate runs every operator: those of a split module itself run where their inputs are.

    Raise ``InputError`` if such an operator reads what different devices make.
    """
    found = list(device_of_op)
    for op, path in enumerate(graph.op_modules):
        if not found[op] or len(tree[path].devices) == 1:
            continue
        producers = graph.tensor_producer[graph.op_inputs(op)].tolist()
        devices = {found[source] for source in producers if source >= 0 and found[source]}
        if len(devices) > 1:
            raise InputError(f"module {path!r} is split over {_list(tree[path].devices)}, and its own operator "
                             f"{graph.op_names[op]!r} reads tensors of {_list(devices)}: accelerate moves tensors only "
                             f"at the border of a module. Keep {path!r} on one device, or run the plan with Weft")
        found[op] = next(iter(devices), found[op])
    return found


def _notes(graph: Graph, locations: list[str], device_of_op: list[str], names: dict[str, DeviceName]) -> Iterator[str]:
    used = {device for device in device_of_op if device}
    cpus = [device for device in used if names[device] == "cpu"]
    if cpus and len(cpus) < len(used):
        yield ("accelerate runs modules on 'cpu' on the first GPU, with weights copied there for each call; give "
               "dispatch_model main_device='cpu' to run them on the CPU, as the plan does")
    if len(cpus) > 1:
        yield f"{_list(cpus)} are all 'cpu' in the device map"
    moved = [op for op in range(graph.num_ops) if locations[op] != device_of_op[op]]
    if moved:
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        yield (f"operator {graph.op_names[moved[0]]!r}{more}, of modules that are split, will run where the inputs are "
               f"({locations[moved[0]]!r}), not on {device_of_op[moved[0]]!r}")


def _list(devices: Iterable[str]) -> str:
    return " and ".join(repr(device) for device in sorted(devices))


def op_properties(plan: Plan, graph: Graph) -> list[dict[str, str]]:
    """Return ``{"weft.device": ..., "weft.stage": ...}`` of each operator; nothing for one that is in no stage.

    Only constants are in no stage: every stage that needs one computes it.
    """
    devices: list[dict[str, None]] = [{} for _ in range(graph.num_ops)]
    stages: list[dict[str, None]] = [{} for _ in range(graph.num_ops)]
    for stage in plan.stages:
        for name in stage.ops:
            op = graph.op_index[name]
            stages[op][stage.name] = None
            devices[op].update(dict.fromkeys(device for replica in stage.replicas for device in replica.devices))
    return [{DEVICE: ",".join(own), STAGE: ",".join(names)} if names else {}
            for own, names in zip(devices, stages, strict=True)]
