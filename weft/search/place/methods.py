"""Every method of placing operators, by name (``METHODS``): the classic lists, and the rules that people use today.

A method takes a problem and returns devices and an order, or raises ``NoFeasiblePlan`` where its rule finds no device
with enough memory. ``weft.search.place.search`` joins them with Weft's own search. The lists are in
``weft.search.place.lists``; the rules are here: one device, or whole layers in order by their bytes. None of them looks
at times or links.

A *block* is a layer: the operators whose module path has the same beginning up to its first number
(``weft.search.common.problem.block_of``). Operators outside any module, and those without weights in a module that only
holds other modules, belong to the block of the operator before them. Graphs without modules have a block for each unit.
Blocks that share a unit are one. Operators run in the graph's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.search.common.problem import block_of
from weft.search.place.lists import best_heft, cpop, etf, getf, heft, m_sct, peft
from weft.search.place.problem import Bools, PlaceProblem
from weft.search.place.timetable import Assignment, Method, check_room, with_room_for_tensors

_TIE_PART: Final = 0.01
"""Blocks that share weights of at least this part of the model are tied, as an embedding and an output layer are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The layers of a problem, numbered in the order of their first operators."""

    of_op: I64
    """[n]"""
    names: tuple[str, ...]
    weights: tuple[frozenset[int], ...]
    """What each keeps resident."""
    allowed: Bools
    """[blocks, m]"""
    is_layer: Bools
    """[blocks] one of several alike: its path has a number."""


def find_blocks(problem: PlaceProblem) -> Blocks:
    """Return the layers; see the module's docstring."""
    labels = _merge_units(problem, _labels(problem))
    ids = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    of_op = np.array([ids[label] for label in labels], dtype=np.int64)
    weights: list[set[int]] = [set() for _ in ids]
    for op, block in enumerate(of_op.tolist()):
        weights[block].update(problem.weights_of(op).tolist())
    allowed = np.ones((len(ids), problem.num_devices), dtype=np.bool_)
    np.logical_and.at(allowed, of_op, problem.is_allowed[problem.unit_of_op])
    return Blocks(of_op=of_op, names=tuple(ids), weights=tuple(frozenset(items) for items in weights), allowed=allowed,
                  is_layer=np.array([any(part.isdigit() for part in name.split(".")) for name in ids], dtype=np.bool_))


def _labels(problem: PlaceProblem) -> list[str]:
    """Return the name of each operator's block."""
    if not any(problem.op_modules):
        return [problem.op_names[op] for op in problem.first_op[problem.unit_of_op].tolist()]
    names = [block_of(module) for module in problem.op_modules]
    parents = {name[:index] for name in set(names) for index, letter in enumerate(name) if letter == "."}
    has_weights = [bool(problem.weight_bytes[problem.weights_of(op)].any()) for op in range(problem.num_ops)]
    own = [name if name and (name not in parents or has_weights[op]) else None for op, name in enumerate(names)]
    first = next((name for name in own if name is not None), "model")
    return [*accumulate(own, lambda label, name: label if name is None else name, initial=first)][1:]


def _merge_units(problem: PlaceProblem, labels: Sequence[str]) -> list[str]:
    """Return the labels, the same for blocks that share a unit."""
    parent = {label: label for label in labels}

    def root(label: str) -> str:
        while parent[label] != label:
            label = parent[label]
        return label

    first: dict[int, str] = {}
    for unit, label in zip(problem.unit_of_op.tolist(), labels, strict=True):
        parent[root(label)] = root(first.setdefault(unit, label))
    return [root(label) for label in labels]


def _runs_nowhere(block: str) -> NoFeasiblePlan:
    return NoFeasiblePlan(f"no device may run all operators of {block!r}, which this rule keeps together: try a method "
                          "that places operators")


def _assign(blocks: Blocks, device_of_block: Sequence[int]) -> Assignment:
    return Assignment(device=np.array(device_of_block, dtype=np.int64)[blocks.of_op],
                      order=np.arange(len(blocks.of_op), dtype=np.int64))


# ---- one device ---------------------------------------------------------------------------------------------------


def single(problem: PlaceProblem) -> Assignment:
    """Return everything on the device that runs it fastest, among those that may run it and have room."""
    total = problem.time_s.sum(axis=0)
    errors = []
    for device in np.argsort(total, kind="stable").tolist():
        if not np.isfinite(total[device]):
            break
        whole = Assignment(device=np.full(problem.num_ops, device, dtype=np.int64),
                           order=np.arange(problem.num_ops, dtype=np.int64))
        try:
            return check_room(problem, whole)
        except NoFeasiblePlan as error:
            errors.append(error)
    if not errors:
        raise NoFeasiblePlan("no device may run all operators: use a method that places them on several devices")
    raise min(errors, key=lambda error: error.missing_bytes or 0)


# ---- accelerate ---------------------------------------------------------------------------------------------------


def accelerate_sequential(problem: PlaceProblem) -> Assignment:
    """Return blocks in order, the first device filled, then the next: ``device_map="sequential"`` of accelerate.

    As there, the first device keeps room for the largest block that is still to come, and blocks that share weights
    (tied embeddings) go together. Where that leaves no room for a block, both are given up: accelerate would move
    blocks to the disk instead.
    """
    return with_room_for_tensors(problem, lambda limited: _fill(limited, limited.capacity))


def accelerate_balanced(problem: PlaceProblem) -> Assignment:
    """Return blocks in order as in ``accelerate_sequential``, each device but the last capped: ``"balanced"``.

    The cap is the model's bytes / devices + 1.25 * max(largest layer, mean of the modules that hold weights).
    """
    def place(limited: PlaceProblem) -> Assignment:
        limits = np.minimum(limited.capacity, _balanced_cap(limited))
        limits[-1] = limited.capacity[-1]
        return _fill(limited, limits)

    return with_room_for_tensors(problem, place)


def _balanced_cap(problem: PlaceProblem) -> float:
    blocks = find_blocks(problem)
    sizes = np.array([problem.weight_bytes[list(items)].sum() for items in blocks.weights])
    largest = float(sizes[blocks.is_layer].max(initial=0.0)) if any(problem.op_modules) else float(sizes.max())
    leaves: dict[str | int, set[int]] = {}
    for op, unit in enumerate(problem.unit_of_op.tolist()):
        held = problem.weights_of(op).tolist()
        if held:
            leaves.setdefault(problem.op_modules[op] if any(problem.op_modules) else unit, set()).update(held)
    leaf_sizes = np.array([problem.weight_bytes[list(items)].sum() for items in leaves.values()])
    mean_leaf = int(leaf_sizes.sum() / max(1, np.count_nonzero(leaf_sizes)))
    total = float(problem.weight_bytes[np.unique(problem.weights)].sum())
    num_devices = max(1, int((problem.capacity > 0).sum()))
    return total // num_devices + int(1.25 * max(largest, mean_leaf))


def _fill(problem: PlaceProblem, limits: F64) -> Assignment:
    blocks = find_blocks(problem)
    try:
        return _assign(blocks, _Filling(problem, blocks, limits, is_strict=True).run())
    except NoFeasiblePlan:
        return _assign(blocks, _Filling(problem, blocks, limits, is_strict=False).run())


class _Filling:
    """Devices filled one after the other with blocks in order.

    If ``is_strict``, the first device keeps room for the largest block to come, and tied blocks go together.
    """

    def __init__(self, problem: PlaceProblem, blocks: Blocks, limits: F64, *, is_strict: bool) -> None:
        self.problem = problem
        self.blocks = blocks
        self.limits = limits
        self.is_strict = is_strict
        self.held: list[set[int]] = [set() for _ in range(problem.num_devices)]
        self.used = np.zeros(problem.num_devices)
        self.device = [-1] * len(blocks.names)
        self.current = 0
        self.ties = _ties(problem, blocks) if is_strict else [[] for _ in blocks.names]
        self.waiting = sorted(range(len(blocks.names)), key=lambda block: self.size(blocks.weights[block]))

    def run(self) -> list[int]:
        """Return the device of each block."""
        for block in range(len(self.device)):
            if self.device[block] >= 0:
                continue
            group = [block, *(other for other in self.ties[block] if self.device[other] < 0)]
            device = self.find(group)
            for member in group:
                self.device[member] = device
                self.used[device] += self.size(self.blocks.weights[member] - self.held[device])
                self.held[device] |= self.blocks.weights[member]
        return self.device

    def find(self, group: list[int]) -> int:
        """Return the device for the blocks: the current one or one after it, and that becomes the current one.

        Devices that may not run the blocks are passed over for these blocks only.
        """
        allowed = np.flatnonzero(self.blocks.allowed[group].all(axis=0)).tolist()
        later = [device for device in allowed if device >= self.current]
        for device in later or allowed:
            if self.missing(group, device) <= 0:
                if self.blocks.allowed[group, self.current].all():
                    self.current = device
                return device
        raise self.error(group, later or allowed)

    def missing(self, group: list[int], device: int) -> float:
        """Return how many bytes more the device would need for the blocks."""
        new = self.weights(group) - self.held[device]
        kept = 0.0
        if self.is_strict and device == 0:
            while self.waiting and self.device[self.waiting[-1]] >= 0:
                self.waiting.pop()
            largest = (block for block in reversed(self.waiting) if self.device[block] < 0 and block not in group)
            kept = next((self.size(self.blocks.weights[block]) for block in largest), 0.0)
        return float(self.used[device] + self.size(new) + kept - self.limits[device])

    def weights(self, group: list[int]) -> frozenset[int]:
        """Return what the blocks keep resident."""
        return frozenset[int]().union(*(self.blocks.weights[member] for member in group))

    def size(self, weights: frozenset[int]) -> float:
        """Return the bytes of the weights."""
        return float(sum(self.problem.weight_bytes[weight] for weight in weights))

    def error(self, group: list[int], devices: list[int]) -> NoFeasiblePlan:
        """Return what is missing where least is missing."""
        name = self.blocks.names[group[0]]
        if not devices:
            return _runs_nowhere(name)
        best = min(devices, key=lambda device: self.missing(group, device))
        missing, where = self.missing(group, best), self.problem.device_names[best]
        size = self.size(self.weights(group))
        return NoFeasiblePlan(
            f"{name!r} keeps {format_bytes(size)} and fits on no device that is left: {format_bytes(missing)} are "
            f"missing on {where!r} beside the blocks before it. Try another method, or a device with more memory.",
            missing_bytes=int(np.ceil(missing)), device=where)


def _ties(problem: PlaceProblem, blocks: Blocks) -> list[list[int]]:
    """Return the blocks that share a large weight with each block."""
    least = _TIE_PART * float(problem.weight_bytes[np.unique(problem.weights)].sum())
    holders: dict[int, list[int]] = {}
    for block, items in enumerate(blocks.weights):
        for weight in items:
            if problem.weight_bytes[weight] >= least:
                holders.setdefault(weight, []).append(block)
    ties: list[set[int]] = [set() for _ in blocks.names]
    for members in holders.values():
        for block in members:
            ties[block].update(other for other in members if other != block)
    return [sorted(items) for items in ties]


# ---- counts of layers ---------------------------------------------------------------------------------------------


def proportional(problem: PlaceProblem) -> Assignment:
    """Return blocks in order, as many per device as its part of all memory: the rule of llama.cpp and exo.

    Largest remainders get the rest; each device gets at least one where there are enough. With unlimited memory all
    devices get the same. Whether it fits is only checked at the end.
    """
    capacity = problem.capacity
    shares = capacity / capacity.sum() if 0 < capacity.sum() < np.inf else np.full(len(capacity), 1 / len(capacity))
    exact = shares * len(find_blocks(problem).names)
    counts = np.floor(exact).astype(np.int64)
    rest = len(find_blocks(problem).names) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    if counts.sum() >= len(counts):
        while counts.min() == 0:
            counts[np.argmin(counts)] += 1
            counts[np.argmax(counts)] -= 1
    return _by_counts(problem, counts)


def even(problem: PlaceProblem) -> Assignment:
    """Return blocks in order, as many on each device: the rule of vLLM's pipeline stages.

    The rest goes one each to the devices before the last, backwards. Whether it fits is only checked at the end.
    """
    num_blocks, num_devices = len(find_blocks(problem).names), problem.num_devices
    counts = np.full(num_devices, num_blocks // num_devices, dtype=np.int64)
    counts[num_devices - 2 - np.arange(num_blocks % num_devices)] += 1
    return _by_counts(problem, counts)


def _by_counts(problem: PlaceProblem, counts: I64) -> Assignment:
    """Return so many blocks in order on each device; where a device may not run one, on the nearest that may."""
    blocks = find_blocks(problem)
    wanted = np.repeat(np.arange(problem.num_devices), counts)
    devices = []
    for block, device in enumerate(wanted.tolist()):
        allowed = np.flatnonzero(blocks.allowed[block]).tolist()
        if not allowed:
            raise _runs_nowhere(blocks.names[block])
        devices.append(min(allowed, key=lambda other: (abs(other - device), other)))
    return check_room(problem, _assign(blocks, devices))


METHODS: Final[Mapping[str, Method]] = MappingProxyType({
    "single": single,
    "heft": heft,
    "heft-subsets": best_heft,
    "peft": peft,
    "cpop": cpop,
    "etf": etf,
    "m-sct": m_sct,
    "getf": getf,
    "accelerate-sequential": accelerate_sequential,
    "accelerate-balanced": accelerate_balanced,
    "proportional": proportional,
    "even": even,
})
"""Simple ones first."""
