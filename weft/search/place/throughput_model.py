"""Loads of a placement as arrays: what throughput means for Weft's graphs and for dnn-partitioning problems alike.

Units (operators that share a device) run on devices. A placement's loads are those of the *cores* (devices that share a
processing unit count together) and of the *resources* that transfers occupy:

    load of a core     = times of its units + touch_s[t, d] of every tensor t that leaves or enters one of its devices d
    load of a resource = times of the transfers over it; a tensor is sent once to each device that reads it

The value is the largest load. Weft's graphs have no touch times; dnn-partitioning problems have nothing else.
A placement fits if the items that units keep (each once per device) are within the devices' memory; it is contiguous if
no path between two nodes of a device leaves the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.model.graph import F64, I64


class Loads(NamedTuple):
    """What compiled code needs of a load problem; ``n`` units, ``m`` devices, ``t`` tensors."""

    time_s: F64
    """[n, m] infinite where the unit may not run."""
    core: I64
    """[m]"""
    num_cores: int
    owner: I64
    """[t] the unit that writes the tensor."""
    reader_start: I64
    """[t + 1]"""
    readers: I64
    """Units other than the owner, each once per tensor; no tensor is without."""
    touch_s: F64
    """[t, m]"""
    own_start: I64
    """[n + 1]"""
    owned: I64
    """Tensors by owner."""
    read_start: I64
    """[n + 1]"""
    reads: I64
    """Tensors by reader."""
    latency_s: F64
    """[m, m]"""
    s_per_byte: F64
    """[m, m]"""
    tensor_bytes: F64
    """[t]"""
    given_row: I64
    """[t]"""
    given_s: F64
    """[rows, m, m]"""
    resource_start: I64
    """[m * m + 1]"""
    resources: I64
    num_resources: int
    item_start: I64
    """[n + 1]"""
    items: I64
    item_bytes: F64
    capacity: F64
    """[m]"""
    node_unit: I64
    """[nodes] the unit of each node that must lie contiguously, sources before targets."""
    source_start: I64
    """[nodes + 1]"""
    sources: I64
    """Nodes that a node reads from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadProblem:
    """Arrays of the problem, and what the devices have in common."""

    arrays: Loads
    unit_names: tuple[str, ...]
    device_names: tuple[str, ...]
    class_of_device: I64
    """[m] devices of one class may be exchanged for one another in any placement."""
    contiguous: bool

    @property
    def num_units(self) -> int:
        """Return the number of units."""
        return len(self.unit_names)

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.device_names)

    @cached_property
    def unit_bytes(self) -> F64:
        """Return [n] what each unit keeps."""
        a = self.arrays
        owner = np.repeat(np.arange(self.num_units), np.diff(a.item_start))
        return np.bincount(owner, weights=a.item_bytes[a.items], minlength=self.num_units).astype(np.float64)

    @cached_property
    def is_memory_free(self) -> bool:
        """Return whether any placement fits, since one device could hold everything."""
        return bool(self.arrays.item_bytes.sum() <= self.arrays.capacity.min(initial=np.inf))

    def loads(self, device: I64) -> F64:
        """Return the loads of all cores, then of all resources; infinite resources where there is no way."""
        from weft.search.place.throughput_kernel import State, fill

        state = State.empty(self.arrays, device)
        fill(self.arrays, state)
        return np.asarray(state.load[:-1] if state.load[-1] == 0 else np.full(len(state.load) - 1, np.inf))

    def value(self, device: I64) -> float:
        """Return the largest load; infinite where the placement is not allowed."""
        from weft.search.place.throughput_kernel import is_valid

        if not is_valid(self.arrays, np.asarray(device, dtype=np.int64), self.contiguous):
            return float("inf")
        return float(self.loads(device).max(initial=0.0))


def csr(lists: Sequence[Sequence[int]]) -> tuple[I64, I64]:
    """Return (start, items) of the lists, one after another."""
    start = np.cumsum([0] + [len(items) for items in lists]).astype(np.int64)
    return start, np.array([item for items in lists for item in items], dtype=np.int64)


def inverse(start: I64, items: I64, count: int) -> tuple[I64, I64]:
    """Return the lists of those that list each of ``count`` items."""
    owner = np.repeat(np.arange(len(start) - 1, dtype=np.int64), np.diff(start))
    order = np.argsort(items, kind="stable")
    counts = np.bincount(items, minlength=count) if len(items) else np.zeros(count, dtype=np.int64)
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64), owner[order].astype(np.int64)


def with_tensors(arrays: Loads, owner: I64, reader_lists: Sequence[Sequence[int]]) -> Loads:
    """Return the arrays with these tensors' owners and readers, and all that follows from them."""
    reader_start, readers = csr(reader_lists)
    count = len(arrays.time_s)
    read_start, reads = inverse(reader_start, readers, count)
    own_start, owned = inverse(np.arange(len(owner) + 1, dtype=np.int64), owner, count)
    return arrays._replace(owner=owner, reader_start=reader_start, readers=readers, own_start=own_start, owned=owned,
                           read_start=read_start, reads=reads)


def merge(problem: LoadProblem, group: I64) -> LoadProblem:
    """Return the problem in which the units of each group (0 and up, all used) are one."""
    a, count = problem.arrays, int(group.max(initial=-1)) + 1
    time_s = np.zeros((count, problem.num_devices))
    np.add.at(time_s, group, a.time_s)
    item_lists: list[dict[int, None]] = [{} for _ in range(count)]
    names: list[str] = [""] * count
    for unit in reversed(range(problem.num_units)):
        names[group[unit]] = problem.unit_names[unit]
    for unit in range(problem.num_units):
        item_lists[group[unit]].update(dict.fromkeys(a.items[a.item_start[unit] : a.item_start[unit + 1]].tolist()))
    item_start, items = csr([list(entry) for entry in item_lists])
    kept, owners, readers = _merged_tensors(a, group)
    touch_s = np.array([sum(a.touch_s[tensor] for tensor in tensors) for tensors in kept],
                       dtype=np.float64).reshape(len(kept), problem.num_devices)
    first = np.array([tensors[0] for tensors in kept], dtype=np.int64)
    arrays = with_tensors(
        a._replace(time_s=time_s, item_start=item_start, items=items, touch_s=touch_s, node_unit=group[a.node_unit],
                   tensor_bytes=a.tensor_bytes[first], given_row=a.given_row[first]),
        np.array(owners, dtype=np.int64), readers)
    return LoadProblem(arrays=arrays, unit_names=tuple(names), device_names=problem.device_names,
                       class_of_device=problem.class_of_device, contiguous=problem.contiguous)


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
        others = sorted(set(group[a.readers[a.reader_start[tensor] : a.reader_start[tensor + 1]]].tolist()) - {owner})
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
