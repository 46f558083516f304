"""Which devices hold which parameters, or which parts of them, and among whom gradients have to be exchanged.

Devices that hold the same part of a parameter end a step with the same gradient. Where they are devices of one replica
and differ only along axes on which the gradient comes out whole, nothing has to be done. Along other axes (``R:P``),
between replicas, and between stages that share the parameter, each has a part of the sum: these devices are an
*exchange set*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.model.graph import Graph
from weft.plan.plan import Plan, Replica, Stage
from weft.plan.sharding import Region, axis_sizes, coordinates_of, parse_layout, part_held, region_held
from weft.sharding.tensor_layout import WHOLE


@dataclass(frozen=True, slots=True)
class Holding:
    """What one device holds of a parameter for one stage."""

    region: Region
    part: float
    equal: tuple[tuple[str, int, int], ...]
    """(axis, size, coordinate) for the axes of the replica along which gradients come out equal."""


def parameter_holdings(plan: Plan, graph: Graph) -> dict[int, dict[str, tuple[Holding, ...]]]:
    """Return what each device holds of each parameter, once for each different way; devices as in the cluster.

    The result is kept for the next call and not to be changed.
    """
    return _holders(plan, graph).holdings


class _Holders:
    """What the stages of a plan hold of a graph's parameters; found when first asked for."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.stages, self.devices, self.graph = plan.stages, plan.cluster.devices, graph

    @cached_property
    def holdings(self) -> dict[int, Held]:
        """Parameters that lie alike on the same stage share one table: a large cluster has thousands of devices."""
        graph, found = self.graph, dict[int, list[Held]]()
        is_parameter = np.zeros(graph.num_tensors, dtype=bool)
        is_parameter[graph.parameters] = True
        for stage in self.stages:
            read = np.unique(np.concatenate([graph.op_inputs(graph.op_index[name]) for name in stage.ops]))
            alike: dict[object, Held] = {}
            for tensor in read[is_parameter[read]].tolist():
                key = stage.sharding.tensors.get(graph.tensor_names[tensor]), graph.tensor_shapes[tensor]
                if key not in alike:
                    alike[key] = _stage_holdings(stage, graph, tensor)
                found.setdefault(tensor, []).append(alike[key])
        rank = {device: index for index, device in enumerate(self.devices)}
        joined: dict[tuple[int, ...], Held] = {}
        for tables in found.values():
            if (same := tuple(map(id, tables))) not in joined:
                joined[same] = dict(sorted(_joined(tables).items(), key=lambda item: rank[item[0]]))
        return {tensor: joined[tuple(map(id, tables))] for tensor, tables in sorted(found.items())}

    @cached_property
    def parts(self) -> dict[int, dict[str, float]]:
        known = {id(held): {device: max(item.part for item in items) for device, items in held.items()}
                 for held in {id(held): held for held in self.holdings.values()}.values()}
        return {tensor: known[id(held)] for tensor, held in self.holdings.items()}

    @cached_property
    def copies(self) -> dict[int, tuple[Copies, ...]]:
        known = {number: tuple(_copies(held))
                 for number, held in {id(held): held for held in self.holdings.values()}.items()}
        return {tensor: known[id(held)] for tensor, held in self.holdings.items()}


_recent: deque[_Holders] = deque(maxlen=2)
"""A plan is asked about several times in a row, also while its exchanges change."""


def _holders(plan: Plan, graph: Graph) -> _Holders:
    for known in _recent:
        if known.stages is plan.stages and known.graph is graph and known.devices == plan.cluster.devices:
            return known
    _recent.append(_Holders(plan, graph))
    return _recent[-1]


_ALL = Holding((), 1.0, ())
Held = dict[str, tuple[Holding, ...]]
"""What each device holds of one parameter."""


def _stage_holdings(stage: Stage, graph: Graph, tensor: int) -> Held:
    """Return what the stage's devices hold of a parameter; replicas with equal meshes hold the same."""
    by_mesh: dict[object, list[Holding]] = {}
    result: Held = {}
    for replica in stage.replicas:
        mesh = (len(replica.devices), *replica.mesh.items())
        if mesh not in by_mesh:
            by_mesh[mesh] = list(_replica_holdings(stage, replica, graph, tensor))
        for device, holding in zip(replica.devices, by_mesh[mesh], strict=True):
            _add(result, device, holding)
    return result


def _joined(tables: Sequence[Held]) -> Held:
    """Return what devices hold for several stages."""
    if len(tables) == 1:
        return tables[0]
    result: Held = {}
    for table in tables:
        for device, items in table.items():
            for item in items:
                _add(result, device, item)
    return result


def _add(held: Held, device: str, holding: Holding) -> None:
    before = held.get(device, ())
    if holding not in before:
        held[device] = (*before, holding)


def _replica_holdings(stage: Stage, replica: Replica, graph: Graph, tensor: int) -> Iterator[Holding]:
    """Yield what each device of a replica holds."""
    if len(replica.devices) == 1:
        yield _ALL
        return
    name, shape = graph.tensor_names[tensor], graph.tensor_shapes[tensor]
    sizes, axes = axis_sizes(replica), tuple(replica.mesh)
    layout = parse_layout(stage.sharding.tensors.get(name, ("R",) * len(sizes)))
    part = part_held(stage, replica, name, shape)
    whole = [index for index, item in enumerate(layout.gradient) if item == WHOLE]
    for position in range(len(replica.devices)):
        coordinates = coordinates_of(position, sizes)
        equal = tuple((axes[index], sizes[index], coordinates[index]) for index in whole)
        yield Holding(region_held(shape, layout.value, sizes, coordinates), part, equal)


def parameter_parts(plan: Plan, graph: Graph) -> dict[int, dict[str, float]]:
    """Return, for each parameter, the part of it that each device holds, in the order of ``cluster.devices``.

    The result is kept for the next call and not to be changed.
    """
    return _holders(plan, graph).parts


@dataclass(frozen=True, slots=True)
class Copies:
    """Devices that hold the same part of a parameter."""

    devices: tuple[str, ...]
    exchange_sets: tuple[tuple[str, ...], ...]
    """Those among whom its gradient is to be summed; together all devices."""


def parameter_copies(plan: Plan, graph: Graph) -> dict[int, tuple[Copies, ...]]:
    """Return, for each parameter, the devices that hold the same part of it."""
    return _holders(plan, graph).copies


def _copies(held: dict[str, tuple[Holding, ...]]) -> Iterator[Copies]:
    by_region: dict[Region, list[str]] = {}
    for device, items in held.items():
        by_region.setdefault(items[0].region, []).append(device)
    for devices in by_region.values():
        keys = {device: {item.equal for item in held[device]} for device in devices}
        shapes = {tuple(entry[:2] for entry in key) for several in keys.values() for key in several}
        if len(shapes) > 1 or any(len(several) > 1 for several in keys.values()):
            yield Copies(tuple(devices), (tuple(devices),))
            continue
        sets: dict[object, list[str]] = {}
        for device in devices:
            sets.setdefault(next(iter(keys[device])), []).append(device)
        yield Copies(tuple(devices), tuple(tuple(members) for members in sets.values()))


def in_pieces(plan: Plan, graph: Graph) -> frozenset[int]:
    """Return the parameters of stages with storage: of these gradients are scattered (``weft.plan.units``)."""
    read = [graph.op_inputs(graph.op_index[name]) for stage in plan.stages if stage.storage for name in stage.ops]
    return frozenset(np.intersect1d(np.concatenate(read), graph.parameters).tolist()) if read else frozenset()


def exchange_sets(plan: Plan, graph: Graph) -> dict[int, tuple[tuple[str, ...], ...]]:
    """Return the parameters whose gradients have to be exchanged, with the sets of devices that do so."""
    result, others = {}, in_pieces(plan, graph)
    for tensor, copies in parameter_copies(plan, graph).items():
        sets = tuple(members for item in copies for members in item.exchange_sets if len(members) > 1)
        if sets and graph.needs_gradient[tensor] and tensor not in others:
            result[tensor] = sets
    return result


def layout_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    """Yield the parameters of which devices hold parts that overlap without being the same."""
    known: dict[tuple[Region, ...], bool] = {}
    for tensor, held in parameter_holdings(plan, graph).items():
        name = graph.tensor_names[tensor]
        for device, items in held.items():
            if len({item.region for item in items}) > 1:
                yield f"stages: {device!r} holds parameter {name!r} in two layouts: give its stages the same"
        regions = tuple(dict.fromkeys(items[0].region for items in held.values()))
        if regions not in known:
            known[regions] = any(_overlap(one, other) for index, one in enumerate(regions) for other in regions[:index])
        if known[regions]:
            yield (f"stages: parameter {name!r} is laid out differently over the replicas or stages that hold it, so "
                   "that parts overlap: give them the same layout and the same sizes of axes")


def _overlap(one: Region, other: Region) -> bool:
    """Return whether two different parts of a parameter have entries in common."""
    if not one or not other:
        return True
    return all(any(max(a, c) < min(b, d) for a, b in first for c, d in second)
               for first, second in zip(one, other, strict=True))
