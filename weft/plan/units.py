"""Units: parameters of which each of some ranks keeps a piece, gathered and scattered together.

A stage with ``storage`` keeps its parameters, their gradients or the optimizer's states in pieces over its replicas.
Those that the same stages of a rank read lie one after the other in one flat tensor, and each rank of the group has a
piece of that, cut between rows, so that a piece of a parameter is some of its rows:

    flat     norm (4)  |  weight (3 rows of 4)                       3 ranks, 16 entries
    pieces   [norm]   [row 0   row 1]   [row 2]                      cut at 4 and 12: 16/3 and 32/3, at the nearest row

One collective brings all of it (``gather``), one takes all gradients (``reduce``). Where several groups keep a whole
each (hybrid storage, or stages on other ranks that share the parameter), those that have the same piece add their
gradients up once in a step (``sums``). On devices of a tp group it is the device's part of each parameter that is
divided, with the devices at the same place in the other replicas.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.model.graph import Graph
from weft.plan.holders import parameter_copies, parameter_holdings
from weft.plan.plan import Plan, Stage, Storage
from weft.plan.sharding import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """See the module's docstring."""

    parameters: tuple[int, ...]
    """Tensor ids in the graph, in the order in which they lie."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the ranks' part of each parameter."""
    stages: tuple[int, ...]
    """Those of these ranks that read them."""
    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    """The piece of ``ranks[i]`` is ``bounds[i] .. bounds[i + 1]`` of the flat tensor."""
    num_bytes: int
    storage: Storage
    is_trained: bool
    across: tuple[tuple[int, ...], ...]
    """For each member the ranks that have the same piece, itself included."""
    is_first: bool
    """It has the first device that holds these parts of the parameters: it gives what several groups have."""
    gather: int = -1
    """The bucket of the collective that brings the parameters; -1 where all ranks keep them."""
    reduce: int = -1
    """Of that which adds up the gradients and scatters them; -1 without training."""
    sums: tuple[int, ...] = ()
    """For each member the bucket that adds its piece of the gradients to those of other groups; empty for one group."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Return where in the flat tensor each parameter begins, and the end."""
        return (0, *itertools.accumulate(map(math.prod, self.shapes)))

    def piece_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's piece."""
        place = self.ranks.index(rank)
        return self.num_bytes * (self.bounds[place + 1] - self.bounds[place]) // max(1, self.bounds[-1])

    def rows(self, rank: int) -> dict[int, tuple[int, int]]:
        """Return which rows of its parameters lie in a rank's piece, of those that have some there."""
        place, found = self.ranks.index(rank), {}
        low, high = self.bounds[place : place + 2]
        for tensor, shape, start in zip(self.parameters, self.shapes, self.starts, strict=False):
            length = row_length(shape)
            first, last = max(low - start, 0), min(high - start, math.prod(shape))
            if first < last:
                found[tensor] = first // length, last // length
        return found


def row_length(shape: Sequence[int]) -> int:
    """Return the entries of a row; a number is a row by itself."""
    return math.prod(shape[1:]) if shape else 1


def find_units(plan: Plan, graph: Graph) -> tuple[Unit, ...]:
    """Return the units of a plan, without their buckets. The result is kept for the next call."""
    for stages, devices, known_graph, units in _recent:
        if stages is plan.stages and devices == plan.cluster.devices and known_graph is graph:
            return units
    units = tuple(_units(plan, graph)) if any(stage.storage for stage in plan.stages) else ()
    _recent.append((plan.stages, plan.cluster.devices, graph, units))
    return units


_recent: deque[tuple[tuple[Stage, ...], tuple[str, ...], Graph, tuple[Unit, ...]]] = deque(maxlen=2)


@dataclass(frozen=True, slots=True)
class _Key:
    """What parameters of one unit have in common."""

    devices: tuple[str, ...]
    stages: tuple[int, ...]
    exchange_set: tuple[str, ...]
    dtype: str
    is_trained: bool


def piece_groups(stage: Stage, rank_of: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    """Yield the devices that have a whole of the stage's parameters, or of their parts of these, together.

    In the order of their ranks, each with its share.
    """
    for group in stage.storage.groups or (tuple(range(len(stage.replicas))),):
        shares = stage.storage.shares or (1.0,) * len(group)
        for devices in zip(*(stage.replicas[member].devices for member in group), strict=True):
            pairs = sorted(zip(devices, shares, strict=True), key=lambda pair: rank_of[pair[0]])
            yield tuple(device for device, _ in pairs), tuple(share for _, share in pairs)


def _units(plan: Plan, graph: Graph) -> Iterator[Unit]:
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    is_parameter = np.zeros(graph.num_tensors, dtype=bool)
    is_parameter[graph.parameters] = True
    readers: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    shares: dict[tuple[str, ...], tuple[float, ...]] = {}
    for index, stage in enumerate(plan.stages):
        if stage.storage:
            read = np.unique(np.concatenate([graph.op_inputs(graph.op_index[name]) for name in stage.ops]))
            for devices, weights in piece_groups(stage, rank_of):
                shares[devices] = weights
                for tensor in read[is_parameter[read]].tolist():
                    readers.setdefault((tensor, devices), []).append(index)
    sets_of = {tensor: {device: members for item in copies for members in item.exchange_sets for device in members}
               for tensor, copies in parameter_copies(plan, graph).items()}
    members: dict[_Key, list[int]] = {}
    for (tensor, devices), stages in sorted(readers.items(), key=lambda item: item[0][0]):
        key = _Key(devices, tuple(stages), sets_of[tensor][devices[0]], graph.tensor_dtypes[tensor],
                   bool(graph.needs_gradient[tensor]))
        members.setdefault(key, []).append(tensor)
    same: dict[tuple[tuple[int, ...], tuple[str, ...]], list[tuple[str, ...]]] = {}
    for key, tensors in members.items():
        same.setdefault((tuple(tensors), key.exchange_set), []).append(key.devices)
    for key, tensors in members.items():
        groups = same[tuple(tensors), key.exchange_set]
        storages, holdings = [plan.stages[stage].storage for stage in key.stages], parameter_holdings(plan, graph)
        storage = replace(storages[0], keeps=all(item.keeps for item in storages))
        shapes = tuple(_local_shape(graph.tensor_shapes[tensor], holdings[tensor][key.devices[0]][0].region)
                       for tensor in tensors)
        width = int(graph.tensor_bytes[tensors[0]]) // max(1, math.prod(graph.tensor_shapes[tensors[0]]))
        bounds = _bounds(shapes, shares[key.devices])
        yield Unit(
            parameters=tuple(tensors), shapes=shapes, stages=key.stages, storage=storage, bounds=bounds,
            ranks=tuple(rank_of[device] for device in key.devices), num_bytes=bounds[-1] * width,
            is_trained=key.is_trained, is_first=_first_holder(plan, graph, tensors[0], key.devices) in key.devices,
            across=tuple(tuple(sorted(rank_of[group[place]] for group in groups))
                         for place in range(len(key.devices))))


def _first_holder(plan: Plan, graph: Graph, tensor: int, devices: tuple[str, ...]) -> str:
    """Return the first of the devices that hold the same part of a parameter as these do."""
    return next(item.devices[0] for item in parameter_copies(plan, graph)[tensor] if devices[0] in item.devices)


def _local_shape(shape: tuple[int, ...], region: Region) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in ranges) for ranges in region) if region else shape


def _bounds(shapes: Sequence[tuple[int, ...]], shares: Sequence[float]) -> tuple[int, ...]:
    """Return where the pieces begin and end, each between two rows.

    >>> _bounds([(4,), (3, 4)], [1, 1, 1])
    (0, 4, 12, 16)
    """
    starts = [0, *itertools.accumulate(map(math.prod, shapes))]
    bounds, total = [0], sum(shares)
    for part in itertools.accumulate(shares[:-1]):
        wanted = starts[-1] * part / total
        place = max(0, min(np.searchsorted(starts, wanted, side="right").item() - 1, len(shapes) - 1))
        length = row_length(shapes[place])
        bounds.append(max(bounds[-1], starts[place] + length * round((wanted - starts[place]) / length)))
    return (*bounds, starts[-1])


def rows_of_region(region: Region, shape: tuple[int, ...], rows: tuple[int, int]) -> Region:
    """Return the part of a region with these of its rows; an empty region is the whole of the shape.

    >>> rows_of_region((((0, 2), (6, 8)), ((0, 3),)), (8, 3), (1, 3))
    (((1, 2), (6, 7)), ((0, 3),))
    """
    if not shape:
        return ()
    whole = region or tuple(((0, size),) for size in shape)
    place, ranges = 0, []
    for begin, end in whole[0]:
        first, last = max(rows[0] - place, 0), min(rows[1] - place, end - begin)
        if first < last:
            ranges.append((begin + first, begin + last))
        place += end - begin
    return (tuple(ranges), *whole[1:])


def storage_text(storage: Storage) -> str:
    """Return what is kept in pieces in a few words; nothing for nothing."""
    if not storage:
        return ""
    words = [{"states": "zero-1", "gradients": "zero-2", "parameters": "fsdp"}[storage.pieces]]
    words += [f"{len(storage.groups)} groups of {len(storage.groups[0])}"] if storage.groups else []
    words += ["pieces " + ":".join(f"{share:g}" for share in storage.shares)] if storage.shares else []
    return ", ".join([*words, *["kept"] * storage.keeps, *["scattered once"] * storage.accumulates])


# ---- what is wrong with them ----------------------------------------------------------------------------------------


def storage_problems(stage: Stage, path: str) -> Iterator[str]:
    """Yield what is wrong with a stage's storage by itself."""
    storage, count, here = stage.storage, len(stage.replicas), f"{path}.storage"
    if not storage:
        if storage != Storage():
            yield f"{here}: with pieces 'none' nothing else may be said: leave it out"
        return
    groups = storage.groups or (tuple(range(count)),)
    if sorted(member for group in groups for member in group) != list(range(count)):
        yield f"{here}.groups {groups} must name each of the {count} replicas once, by its place from 0 on"
        return
    if len({len(group) for group in groups}) > 1 or len(groups[0]) < 2:
        yield (f"{here}: pieces are divided among the replicas of a group, all groups of the same size, 2 or more; "
               f"here they have {', '.join(str(len(group)) for group in groups)}")
        return
    if storage.shares and (len(storage.shares) != len(groups[0]) or not all(0 < item < math.inf
                                                                           for item in storage.shares)):
        yield f"{here}.shares must be {len(groups[0])} numbers above zero, one for each member of a group"
    if len({tuple(replica.mesh.items()) for replica in stage.replicas}) > 1 or len(
            {len(replica.devices) for replica in stage.replicas}) > 1:
        yield f"{here}: replicas that keep pieces of one whole need the same axes of the same sizes"
    if storage.keeps and storage.pieces != "parameters":
        yield f"{here}.keeps is for gathered parameters, but pieces is {storage.pieces!r}: leave it out"
    if storage.accumulates and storage.pieces == "states":
        yield f"{here}.accumulates: gradients are whole with pieces 'states' anyway: leave it out"


def unit_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    """Yield where stages disagree on what is kept in pieces, or replicas on the order in which they need it."""
    units, names = find_units(plan, graph), graph.tensor_names
    devices = plan.cluster.devices
    rank_of = {device: rank for rank, device in enumerate(devices)}
    held: dict[tuple[int, int], Unit] = {}
    for unit in units:
        if len({replace(plan.stages[stage].storage, keeps=False) for stage in unit.stages}) > 1:
            stages = ", ".join(repr(plan.stages[stage].name) for stage in unit.stages)
            yield f"stages: {stages} share parameter {names[unit.parameters[0]]!r} on one device: give them one storage"
        for tensor, rank in itertools.product(unit.parameters, unit.ranks):
            if (tensor, rank) in held:
                yield (f"stages: {devices[rank]!r} keeps parameter {names[tensor]!r} in pieces with two groups: give "
                       "the stages that share it the same replicas and storage")
            held[tensor, rank] = unit
    for tensor, copies in parameter_copies(plan, graph).items():
        for members in (item for part in copies for item in part.exchange_sets):
            found = [held.get((tensor, rank_of[device])) for device in members]
            kinds = {None if unit is None else (unit.bounds, unit.parameters, unit.storage.pieces,
                                                unit.storage.scatters_once) for unit in found}
            if len(kinds) > 1:
                yield (f"stages: parameter {names[tensor]!r} is held by {', '.join(members[:6])}, not all in the same "
                       "pieces: give all stages that hold it storage with the same pieces and sizes of groups")
    yield from _order_problems(plan, units)


def _order_problems(plan: Plan, units: Sequence[Unit]) -> Iterator[str]:
    stages: dict[tuple[int, ...], set[str]] = {}
    for unit in units:
        stages.setdefault(unit.ranks, set()).update(plan.stages[stage].name for stage in unit.stages)
    for ranks, names in stages.items():
        first, *others = [[token for token in plan.order.get(plan.cluster.devices[rank], ())
                           if token.partition(":")[0] in names] for rank in ranks]
        for rank, tokens in zip(ranks[1:], others, strict=True):
            if tokens != first:
                at = next((place for place, (one, other) in enumerate(zip(first, tokens, strict=False))
                           if one != other), min(len(first), len(tokens)))
                mine, other = (row[at] if at < len(row) else "nothing" for row in (tokens, first))
                yield (f"order.{plan.cluster.devices[rank]}: {mine!r} comes where "
                       f"{plan.cluster.devices[ranks[0]]!r} has {other!r}: devices that keep pieces of one whole "
                       "gather it together, so they need its stages in the same order")
                break
