"""Loads of a placement as arrays: what throughput means for Weft's graphs and for dnn-partitioning problems alike.

Units (operators that share a device) run on devices. A placement's loads are those of the *cores* (devices that share a
processing unit count together) and of the *resources* that transfers occupy:

    load of a core     = times of its units + touch_s[t, d] of every tensor t that leaves or enters one of its devices d
    load of a resource = times of the transfers over it; a tensor is sent once to each device that reads it

The value is the largest load. Weft's graphs (``load_problem``) have no touch times; dnn-partitioning problems have
nothing else. A placement fits if the items that units keep (each once per device) are within the devices' memory; it is
contiguous if no path between two nodes of a device leaves the device.

*Exact reductions* (``reduce_problem``): what placements of at most some value must do, or lose nothing by.

- A unit cannot run where its own time is above the limit (``_forbid``).
- Two units share a device if every way to part them is above the limit (``_inseparable``).
- With contiguity, whatever lies on a path between two nodes of a unit is on that unit's device (``_between``).
- A unit without time that shares tensors with one other unit only goes where that one is, if memory allows it, and so
  does one with a single tensor where tensors cost the same wherever they go (``_free_riders``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem, csr, inverse, starts_of
from weft.search.place.throughput.kernel import Loads, State, are_convex, excess, fill

MARGIN: Final = 1e-9
"""Relative: times so close to the limit of a reduction count as within it."""
MOST_PINS: Final = 8
"""Tensors of more units say little about which of these belong together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadProblem:
    """Arrays of the problem, and what the devices have in common."""

    arrays: Loads
    class_of_device: I64
    """[m] devices of one class may be exchanged for one another in any placement."""
    contiguous: bool

    @property
    def num_units(self) -> int:
        """Return the number of units."""
        return len(self.arrays.time_s)

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.arrays.core)

    @cached_property
    def unit_bytes(self) -> F64:
        """Return [n] what each unit keeps."""
        a = self.arrays
        owner = np.repeat(np.arange(self.num_units), np.diff(a.item_start))
        return np.bincount(owner, weights=a.item_bytes[a.items], minlength=self.num_units).astype(np.float64)

    @cached_property
    def users(self) -> list[list[int]]:
        """Return the units that keep each item."""
        users: list[list[int]] = [[] for _ in self.arrays.item_bytes]
        for unit in range(self.num_units):
            for item in self.arrays.items_of(unit):
                users[item].append(unit)
        return users

    @cached_property
    def is_memory_free(self) -> bool:
        """Return whether any placement fits, since one device could hold everything."""
        return bool(self.arrays.item_bytes.sum() <= self.arrays.capacity.min(initial=np.inf))

    def loads(self, device: I64) -> F64:
        """Return the load of every device (of its core), then of every resource; infinite where there is no way."""
        state, a = self._state(device), self.arrays
        found = np.concatenate((state.load[a.core], state.load[a.num_cores : -1]))
        return found if state.load[-1] == 0 else np.full(len(found), np.inf)

    def value(self, device: I64) -> float:
        """Return the largest load; infinite where the placement is not allowed."""
        state = self._state(device)
        if excess(self.arrays, state) > 0 or (self.contiguous and not are_convex(self.arrays, state.device)):
            return float("inf")
        return float(state.load[:-1].max(initial=0.0))

    def fullest_first(self, device: I64) -> list[int]:
        """Return the devices by the largest load of each, of its core or of what transfers to or from it occupy."""
        a, count, loads = self.arrays, self.num_devices, self.loads(device)
        pair = np.repeat(np.arange(count * count), np.diff(a.resource_start))
        for there in (pair // count, pair % count):
            np.maximum.at(loads, there, loads[count + a.resources])
        return [int(index) for index in np.argsort(-loads[:count], kind="stable")]

    @cached_property
    def tensor_weights(self) -> F64:
        """Return [t] about how many seconds it takes to part the units of a tensor."""
        a = self.arrays
        weights = a.touch_s.max(axis=1, initial=0.0)
        for tensor in range(len(weights) if len(a.resources) else 0):
            seconds = _occupied_seconds(a, tensor)
            weights[tensor] += seconds[np.isfinite(seconds)].mean()
        return np.asarray(weights, dtype=np.float64)

    def _state(self, device: I64) -> State:
        state = State.empty(self.arrays, device)
        fill(self.arrays, state)
        return state


def with_tensors(arrays: Loads, owner: I64, reader_lists: Sequence[Sequence[int]]) -> Loads:
    """Return the arrays with these tensors' owners and readers, and all that follows from them."""
    count = len(arrays.time_s)
    reader_start, readers = csr(reader_lists)
    read_start, reads = inverse(reader_start, readers, count)
    own_start, owned = inverse(np.arange(len(owner) + 1, dtype=np.int64), owner, count)
    return arrays._replace(owner=owner, reader_start=reader_start, readers=readers, own_start=own_start, owned=owned,
                           read_start=read_start, reads=reads)


def make_loads(*, core: I64, owner: I64, reader_lists: Sequence[Sequence[int]], item_lists: Sequence[Sequence[int]],
               source_lists: Sequence[Sequence[int]], **others: Any) -> Loads:
    """Return the arrays from the readers of each tensor, the items of each unit, and what each node reads from."""
    item_start, items = csr(item_lists)
    source_start, sources = csr(source_lists)
    none = np.zeros(0, dtype=np.int64)
    return with_tensors(Loads(
        core=core, num_cores=int(core.max(initial=-1)) + 1, item_start=item_start, items=items,
        source_start=source_start, sources=sources, owner=none, reader_start=none, readers=none, own_start=none,
        owned=none, read_start=none, reads=none, **others), owner, reader_lists)


def _components(sources: I64, targets: I64, count: int, connection: str) -> tuple[int, I64]:
    """Return how many connected components there are, and the number of each item's."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph = coo_matrix((np.ones(len(sources)), (sources, targets)), shape=(count, count))
    num_components, label = connected_components(graph, connection=connection)
    return int(num_components), label.astype(np.int64)


def blocks_of(sources: I64, targets: I64, count: int) -> tuple[list[I64], list[set[int]]]:
    """Return blocks of units, and what follows each block; units that depend on each other both ways are one block."""
    num_blocks, label = _components(sources, targets, count, "strong")
    follow: list[set[int]] = [set() for _ in range(num_blocks)]
    for one, other in zip(label[sources].tolist(), label[targets].tolist(), strict=True):
        if one != other:
            follow[one].add(other)
    return np.split(np.argsort(label, kind="stable"), starts_of(label, num_blocks)[1:-1]), follow


def merge(problem: LoadProblem, group: I64) -> LoadProblem:
    """Return the problem in which the units of each group (0 and up, all used) are one."""
    a, count = problem.arrays, int(group.max(initial=-1)) + 1
    time_s = np.zeros((count, problem.num_devices))
    np.add.at(time_s, group, a.time_s)
    item_lists: list[dict[int, None]] = [{} for _ in range(count)]
    for unit in range(problem.num_units):
        item_lists[group[unit]].update(dict.fromkeys(a.items_of(unit)))
    item_start, items = csr([list(entry) for entry in item_lists])
    kept, owners, readers = _merged_tensors(a, group)
    touch_s = np.array([sum(a.touch_s[tensor] for tensor in tensors) for tensors in kept],
                       dtype=np.float64).reshape(len(kept), problem.num_devices)
    first = np.array([tensors[0] for tensors in kept], dtype=np.int64)
    arrays = with_tensors(
        a._replace(time_s=time_s, item_start=item_start, items=items, touch_s=touch_s, node_unit=group[a.node_unit],
                   tensor_bytes=a.tensor_bytes[first], given_row=a.given_row[first]),
        np.array(owners, dtype=np.int64), readers)
    return replace(problem, arrays=arrays)


def _merged_tensors(a: Loads, group: I64) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Return (tensors that became one, their owner, their readers) for each tensor between groups.

    Where transfers occupy nothing, tensors between the same groups touch the same devices, whoever owns them.
    """
    only_touch = len(a.resources) == 0 and not np.isinf(a.latency_s).any() and not np.isinf(a.given_s).any()
    found: dict[tuple[int, ...], int] = {}
    kept: list[list[int]] = []
    owners: list[int] = []
    readers: list[list[int]] = []
    for tensor, unit in enumerate(a.owner.tolist()):
        owner = int(group[unit])
        others = sorted(set(group[a.readers_of(tensor)].tolist()) - {owner})
        if not others or (only_touch and not a.touch_s[tensor].any()):
            continue
        key = tuple(sorted([owner, *others])) if only_touch else (-1, tensor)
        position = found.setdefault(key, len(kept))
        if position == len(kept):
            kept.append([])
            owners.append(owner)
            readers.append(others)
        kept[position].append(tensor)
    return kept, owners, readers


def paired(problem: LoadProblem, rng: np.random.Generator, most: float) -> I64:
    """Return a group for each unit: random pairs that share heavy tensors, none with more than this part of a device.

    The part is of a device's share of all work, and of its memory.
    """
    a, count, weight = problem.arrays, problem.num_units, problem.tensor_weights
    near: list[dict[int, float]] = [{} for _ in range(count)]
    for tensor, owner in enumerate(a.owner.tolist()):
        pins = [owner, *a.readers_of(tensor)]
        for one, other in itertools.permutations(pins if len(pins) <= MOST_PINS else (), 2):
            near[one][other] = near[one].get(other, 0.0) + weight[tensor] / (len(pins) - 1)
    time_s, can_run = a.time_s.min(axis=1), np.isfinite(a.time_s)
    sizes = np.stack([time_s / (time_s.sum() / a.num_cores + 1e-300), problem.unit_bytes / a.capacity.max()], axis=1)
    group = np.full(count, -1)
    for unit in rng.permutation(count).tolist():
        if group[unit] < 0:
            free = [other for other in near[unit] if group[other] < 0 and (can_run[unit] == can_run[other]).all()
                    and (sizes[unit] + sizes[other] <= most).all()]
            liked = np.array([near[unit][other] for other in free]) * rng.uniform(0.5, 1.5, len(free))
            group[[unit, *([free[int(np.argmax(liked))]] if free else [])]] = unit
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def load_problem(problem: PlaceProblem, *, contiguous: bool) -> LoadProblem:
    """Return the problem by units, as loads."""
    num_units, unit = problem.num_units, problem.unit_of_op
    time_s = np.zeros((num_units, problem.num_devices))
    np.add.at(time_s, unit, problem.time_s)
    sources = [np.unique(problem.producer[problem.inputs_of(op)]).tolist() for op in range(problem.num_ops)]
    read_by = [sorted(set(unit[problem.readers_of(tensor)].tolist()) - {int(unit[writer])})
               for tensor, writer in enumerate(problem.producer.tolist())]
    kept = [tensor for tensor, readers in enumerate(read_by) if readers]
    return LoadProblem(class_of_device=_classes(problem), contiguous=contiguous, arrays=make_loads(
        time_s=time_s, core=problem.core_of_device, owner=unit[problem.producer[kept]],
        reader_lists=[read_by[tensor] for tensor in kept], item_lists=problem.unit_weights,
        node_unit=unit, source_lists=sources, capacity=problem.capacity,
        item_bytes=problem.weight_bytes, touch_s=np.zeros((len(kept), problem.num_devices)),
        latency_s=problem.latency_s, s_per_byte=problem.s_per_byte, tensor_bytes=problem.tensor_bytes[kept],
        given_row=problem.given_row[kept], given_s=problem.given_s, resource_start=problem.resource_start,
        resources=problem.resources, num_resources=problem.num_resources))


def _classes(problem: PlaceProblem) -> I64:
    """Return a number for each device, the same for those that any placement may exchange.

    Two devices may if their times and memory are equal, they look alike to every third device and to each other, and
    what transfers occupy does not tell them apart: nothing, a port for each way, or a link of its own for each pair.
    """
    count = problem.num_devices
    label = np.arange(count, dtype=np.int64)
    if not _has_plain_resources(problem):
        return label
    for device in range(count):
        for other in range(device):
            if label[other] == other and _is_alike(problem, device, other):
                label[device] = other
                break
    return label


def _has_plain_resources(problem: PlaceProblem) -> bool:
    count = problem.num_devices
    lists = [tuple(problem.ways(source, target).tolist()) for source in range(count) for target in range(count)]
    ports = [() if pair // count == pair % count else (pair // count, count + pair % count)
             for pair in range(count * count)]
    own = [item for pair, item in enumerate(lists) if pair // count != pair % count]
    is_own = all(len(item) == 1 for item in own) and len(set(own)) == len(own)
    return not any(lists) or lists == ports or is_own


def _is_alike(problem: PlaceProblem, one: int, other: int) -> bool:
    swap = np.arange(problem.num_devices)
    swap[[one, other]] = other, one
    has_own_core = [int((problem.core_of_device == problem.core_of_device[index]).sum()) == 1 for index in (one, other)]
    tables = (problem.latency_s, problem.s_per_byte, *problem.given_s)
    return (all(has_own_core) and bool((problem.time_s[:, one] == problem.time_s[:, other]).all())
            and bool(problem.capacity[one] == problem.capacity[other])
            and all((table == table[np.ix_(swap, swap)]).all() for table in tables))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """A smaller problem, and what its units stand for."""

    problem: LoadProblem
    group: I64
    """[units of the given problem] the unit of the smaller one."""

    def expand(self, device: I64) -> I64:
        """Return the placement of the given problem that a placement of the smaller one means."""
        return np.asarray(device[self.group])


def part_of(problem: LoadProblem, device: I64, chosen: Sequence[int]) -> tuple[Reduced, I64]:
    """Return the problem in which only what is on the chosen devices may move, among these, and where all is in it."""
    every = np.arange(problem.num_devices)
    is_chosen, is_free = np.isin(every, chosen), np.isin(device, chosen)
    _, first, group = np.unique(np.where(is_free, len(every) + np.arange(problem.num_units), device),
                                return_index=True, return_inverse=True)
    small, home = merge(problem, group), device[first]
    may_run = np.where(is_free[first][:, None], is_chosen, every == home[:, None])
    arrays = small.arrays._replace(time_s=np.where(may_run, small.arrays.time_s, np.inf))
    labels = np.where(is_chosen, problem.class_of_device, len(every) + every)
    return Reduced(problem=replace(small, arrays=arrays, class_of_device=labels), group=group), home


def reduce_problem(problem: LoadProblem, limit: float) -> Reduced:
    """Return a problem with the same best value, if that is at most the limit; with fewer placements."""
    group = np.arange(problem.num_units, dtype=np.int64)
    now = _forbid(problem, limit)
    while True:
        pairs = [*_inseparable(now, limit), *_free_riders(now), *(_between(now) if now.contiguous else ())]
        one, other = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        num_groups, labels = _components(one, other, now.num_units, "weak")
        if num_groups == now.num_units:
            return Reduced(problem=now, group=group)
        group = labels[group]
        now = _forbid(merge(now, labels), limit)


def _forbid(problem: LoadProblem, limit: float) -> LoadProblem:
    a = problem.arrays
    time_s = np.where(a.time_s > limit * (1 + MARGIN), np.inf, a.time_s)
    return replace(problem, arrays=a._replace(time_s=time_s))


def _occupied_seconds(a: Loads, tensor: int) -> F64:
    """Return [m, m] what sending the tensor loads a resource with; 0 where it occupies nothing."""
    seconds = a.pair_seconds(tensor)
    occupies = (np.diff(a.resource_start) > 0).reshape(seconds.shape)
    return np.where(occupies | np.isinf(seconds), seconds, 0.0)


def _inseparable(problem: LoadProblem, limit: float) -> Iterator[tuple[int, int]]:
    """Yield the owner and a reader of a tensor where all pairs of different devices are above the limit."""
    a = problem.arrays
    most = limit * (1 + MARGIN)
    apart = ~np.eye(problem.num_devices, dtype=np.bool_)
    for tensor, owner in enumerate(a.owner.tolist()):
        pair_s = _occupied_seconds(a, tensor)
        if not a.touch_s[tensor].any() and not pair_s.any():
            continue
        leaves = a.time_s[owner] + a.touch_s[tensor] <= most
        for reader in a.readers_of(tensor):
            enters = a.time_s[reader] + a.touch_s[tensor] <= most
            if not (leaves[:, None] & enters[None, :] & (pair_s <= most) & apart).any():
                yield owner, reader


def _free_riders(problem: LoadProblem) -> Iterator[tuple[int, int]]:
    """Yield units without time, each with one they share a tensor with; none hosts or rides twice in one round."""
    a = problem.arrays
    only_touch = len(a.resources) == 0 and not np.isinf(a.latency_s).any() and not np.isinf(a.given_s).any()
    is_taken = np.zeros(problem.num_units, dtype=np.bool_)
    for unit in range(problem.num_units):
        tensors = [*a.owned[a.own_start[unit] : a.own_start[unit + 1]].tolist(),
                   *a.reads[a.read_start[unit] : a.read_start[unit + 1]].tolist()]
        pins = {int(pin) for tensor in tensors for pin in (a.owner[tensor], *a.readers_of(tensor))} - {unit}
        is_single = len(tensors) == 1 and only_touch and not problem.contiguous
        if is_taken[unit] or not pins or (len(pins) > 1 and not is_single):
            continue
        host = min(pins)
        has_room = problem.is_memory_free or problem.unit_bytes[unit] == 0
        is_free = (a.time_s[unit][np.isfinite(a.time_s[host])] == 0).all()
        if has_room and is_free and not is_taken[host]:
            is_taken[[*pins, unit]] = True
            yield unit, host


def _between(problem: LoadProblem) -> Iterator[tuple[int, int]]:
    """Yield each unit with the units of the nodes on paths between its own nodes."""
    a = problem.arrays
    count = len(a.node_unit)
    targets: list[list[int]] = [[] for _ in range(count)]
    sources = [a.sources_of(node) for node in range(count)]
    for node in range(count):
        for source in sources[node]:
            targets[source].append(node)
    for unit in range(problem.num_units):
        own = np.flatnonzero(a.node_unit == unit).tolist()
        if len(own) < 2:
            continue
        below = np.zeros(count, dtype=np.bool_)
        above = np.zeros(count, dtype=np.bool_)
        below[own] = above[own] = True
        for node in range(own[0], own[-1] + 1):
            below[node] |= any(below[source] for source in sources[node])
        for node in range(own[-1], own[0] - 1, -1):
            above[node] |= any(above[target] for target in targets[node])
        for node in np.flatnonzero(below & above).tolist():
            yield unit, int(a.node_unit[node])
