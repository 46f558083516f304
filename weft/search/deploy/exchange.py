"""How the gradients of a deployment are exchanged: in buckets, each by the method that costs least.

Groups of one block share a bucket, from the last group to the first, until it is so large that its latency no longer
matters. Weights of linear layers whose factors are faster to gather (``sufficient``) are a bucket of their own beside
it. A parameter that several groups read (tied embeddings) is exchanged by itself among all devices that hold it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.cost.collectives import Collective
from weft.cost.op_classes import op_classes
from weft.model.graph import F64, I64
from weft.plan.memory import optimizer_bytes
from weft.plan.plan import GradientMethod
from weft.search.common.problem import Problem
from weft.search.deploy.actions import Layout
from weft.search.deploy.blocks import Buckets
from weft.search.deploy.op_groups import OpGroups
from weft.search.deploy.sufficient import Decision, decide_on_cluster, linear_layers, padding
from weft.search.deploy.tuning import TUNING
from weft.simulate.exchange_time import exchange_together, reduce_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are exchanged together."""

    parameters: tuple[int, ...]
    groups: tuple[int, ...]
    devices: tuple[DeviceId, ...]
    method: GradientMethod
    seconds: float
    is_divided: bool = False
    """Devices hold parts of these parameters: there is an exchange for each part, all at once."""
    resources: tuple[int, ...] = ()
    """The cluster's, on which this exchange and others hold each other up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketList:
    """The exchanges of a deployment, as records and as columns."""

    items: tuple[Bucket, ...]
    columns: Buckets


@dataclass(frozen=True, slots=True)
class _Factors:
    gathered_bytes: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is exchanged for one group: gradients that are added up, and factors that are gathered."""

    reduced: tuple[int, ...]
    reduced_bytes: float
    gathered: tuple[int, ...]
    gathered_bytes: float
    compute_s: float


def _chosen_factors(decision: Decision, padded: float) -> Iterator[tuple[int, _Factors]]:
    """Yield each parameter with its factors; an input that several layers read counts for the first of them."""
    inputs: set[int] = set()
    for term in decision.terms:
        if term.uses_factors:
            layer = term.layer
            width = layer.num_out + (0 if layer.input in inputs else layer.num_in)
            inputs.add(layer.input)
            yield layer.weight, _Factors(padded * term.num_rows * width * layer.element_bytes, term.compute_s)
            if layer.bias is not None:
                yield layer.bias, _Factors(0.0, 0.0)


class Exchanges:
    """Finds the exchanges of deployments of one model."""

    def __init__(self, problem: Problem, groups: OpGroups, *, use_factors: bool = True,
                 held_part: Callable[[Sequence[DeviceId]], F64 | None] = lambda team: None) -> None:
        """``held_part`` says which part of each tensor a device holds, of several that divide operators."""
        self.problem, self.groups, self.use_factors, self.held_part = problem, groups, use_factors, held_part
        graph, homes = problem.graph, groups.home_of_parameter
        trained = [tensor for tensor in homes if graph.needs_gradient[tensor] and problem.is_training]
        self.tied = tuple(tensor for tensor in trained if len(homes[tensor]) > 1)
        self.of_group: list[list[int]] = [[] for _ in range(groups.num_groups)]
        for tensor in trained:
            if len(homes[tensor]) == 1:
                self.of_group[homes[tensor][0]].append(tensor)
        self.sizes = dict(zip(homes, graph.tensor_bytes[list(homes)].tolist(), strict=True))
        self.group_bytes = np.zeros(groups.num_groups)
        """Parameter bytes of each group; of parameters of several groups at the first."""
        self.static_bytes = np.zeros(groups.num_groups)
        """The same with gradients and optimizer states."""
        self.static_of = {tensor: float(size) for tensor, size in self.sizes.items()}
        """Bytes of each parameter with gradient and optimizer states."""
        for tensor in trained:
            self.static_of[tensor] += self.sizes[tensor] + optimizer_bytes(graph, tensor, problem.options.optimizer)
        for tensor, places in homes.items():
            self.group_bytes[places[0]] += self.sizes[tensor]
            self.static_bytes[places[0]] += self.static_of[tensor]
        self.step_s_per_byte = self._step_rates()
        self._line = cache(lambda devices: reduce_line(problem.costs, 1e9, devices))
        """The time of a large all-reduce among devices."""
        self._layers = tuple(layer for layer in linear_layers(problem.graph) if len(homes[layer.weight]) == 1)
        self._parts = cache(self._find_parts)
        self._blocks: dict[tuple[int, int, int], tuple[Bucket, ...]] = {}

    def held_bytes(self, part: F64) -> F64:
        """Return ``static_bytes`` of devices that hold such a part of each tensor."""
        held = np.zeros(self.groups.num_groups)
        for tensor, places in self.groups.home_of_parameter.items():
            held[places[0]] += self.static_of[tensor] * part[tensor]
        return held

    def _step_rates(self) -> list[float]:
        """Return the seconds per byte of parameters, gradients and states in an optimizer's step on each device."""
        total, moved = float(self.static_bytes.sum()), 0.0
        graph = self.problem.graph
        for tensor in self.groups.home_of_parameter:
            size = int(graph.tensor_bytes[tensor])
            moved += 3 * size + 2 * optimizer_bytes(graph, tensor, self.problem.options.optimizer)
        rates = []
        for device in self.problem.devices:
            kind = self.problem.cluster.kind_of(device)
            rate = (kind.memory_bytes_per_s or np.inf) * op_classes()["elementwise"].on(kind.type).memory
            rates.append(moved / max(total, 1.0) / rate if self.problem.options.optimizer.kind != "none" else 0.0)
        return rates

    def buckets(self, layout_of: Sequence[int], layouts: Sequence[Layout]) -> BucketList:
        """Return the exchanges of the deployment in which group ``g`` has the layout ``layouts[layout_of[g]]``."""
        items: list[Bucket] = []
        last = len(layout_of)
        for first in range(last - 1, -1, -1):
            if first == 0 or layout_of[first - 1] != layout_of[first]:
                items += self._of_block(layout_of[first], layouts[layout_of[first]], first, last)
                last = first
        for tensor in self.tied:
            homes = self.groups.home_of_parameter[tensor]
            own = {layouts[layout_of[group]] for group in homes}
            devices = tuple(sorted({device for layout in own for device in layout.devices}))
            if len(devices) > 1:
                items.append(self._bucket((tensor,), homes, devices, float(self.sizes[tensor]),
                                          is_divided=any(layout.is_divided for layout in own)))
        return BucketList(items=tuple(items), columns=_columns(items, self.problem.cluster.num_devices))

    def _of_block(self, number: int, layout: Layout, first: int, last: int) -> tuple[Bucket, ...]:
        """Return the exchanges of the groups from ``first`` up to ``last``, which have one layout, last ones first."""
        if len(layout.replicas) < 2:
            return ()
        known = self._blocks.get((number, first, last))
        if known is None:
            known = self._blocks[number, first, last] = tuple(self._make_block(layout, first, last))
        return known

    def _make_block(self, layout: Layout, first: int, last: int) -> Iterator[Bucket]:
        devices, first_ones = layout.devices, tuple(team[0] for team, _ in layout.replicas)
        parts, full, size = self._parts(layout), self._full(first_ones), 0.0
        groups: list[int] = []
        for group in range(last - 1, first - 1, -1):
            part = parts[group]
            if part is not None:
                groups.append(group)
                size += part.reduced_bytes + part.gathered_bytes
            if groups and (size >= full or group == first):
                items = [item for index in groups if (item := parts[index]) is not None]
                reduced = tuple(itertools.chain.from_iterable(item.reduced for item in items))
                if reduced:
                    yield self._bucket(reduced, tuple(groups), devices, sum(item.reduced_bytes for item in items),
                                       among=_positions(layout), is_divided=layout.is_divided)
                gathered = tuple(itertools.chain.from_iterable(item.gathered for item in items))
                if gathered:
                    size = sum(item.gathered_bytes for item in items)
                    seconds, resources = exchange_together(self.problem.costs, size, (devices,), Collective.ALL_GATHER)
                    yield Bucket(parameters=gathered, groups=tuple(groups), devices=devices,
                                 method="sufficient_factors", resources=resources,
                                 seconds=seconds + sum(item.compute_s for item in items))
                groups, size = [], 0.0

    def _find_parts(self, layout: Layout) -> list[_Part | None]:
        """Return what devices with this layout exchange for each group; None where there is nothing."""
        factors, held = self._factors(layout), self.held_part(layout.replicas[0][0])
        return [self._part(tensors, factors, held) for tensors in self.of_group]

    def _part(self, tensors: Sequence[int], factors: Mapping[int, _Factors], held: F64 | None) -> _Part | None:
        reduced = tuple(tensor for tensor in tensors if tensor not in factors)
        gathered = tuple(tensor for tensor in tensors if tensor in factors)
        size = sum(self.sizes[tensor] * (1.0 if held is None else held[tensor]) for tensor in reduced)
        return _Part(reduced=reduced, reduced_bytes=float(size),
                     gathered=gathered, gathered_bytes=sum(factors[tensor].gathered_bytes for tensor in gathered),
                     compute_s=sum(factors[tensor].compute_s for tensor in gathered)) if tensors else None

    def _factors(self, layout: Layout) -> dict[int, _Factors]:
        """Return the parameters whose factors are gathered instead, with what that takes."""
        if not self.use_factors or layout.is_divided:
            return {}
        shares = [samples / layout.num_samples for _, samples in layout.replicas]
        decision = decide_on_cluster(self._layers, self.problem.costs, layout.devices, shares=shares,
                                     num_samples=self.problem.options.batch)
        return dict(_chosen_factors(decision, padding(shares)))

    def group_seconds(self, devices: tuple[DeviceId, ...]) -> F64:
        """Return the seconds that an all-reduce of each group's gradients takes among devices, latency apart."""
        return self.group_bytes * self._line(devices).s_per_byte

    def _full(self, devices: tuple[DeviceId, ...]) -> float:
        """Return how many bytes make a bucket large enough."""
        line = self._line(devices)
        return TUNING.full_bucket * line.latency_s / line.s_per_byte if line.s_per_byte > 0 else np.inf

    def _bucket(self, tensors: tuple[int, ...], groups: tuple[int, ...], devices: tuple[DeviceId, ...],
                num_bytes: float, *, among: Sequence[tuple[DeviceId, ...]] = (), is_divided: bool = False) -> Bucket:
        """Return the all-reduces of so many bytes ``among`` each of some groups of devices; by default all of them."""
        seconds, resources = exchange_together(self.problem.costs, num_bytes, among or (devices,))
        return Bucket(parameters=tensors, groups=groups, devices=devices, method="all_reduce", is_divided=is_divided,
                      resources=resources, seconds=seconds)


def _positions(layout: Layout) -> list[tuple[DeviceId, ...]]:
    """Return, for each place in a team, the devices of all teams that have this place."""
    return [tuple(team[place % len(team)] for team, _ in layout.replicas)
            for place in range(max(len(team) for team, _ in layout.replicas))]


def _columns(items: Sequence[Bucket], num_devices: int) -> Buckets:
    held = [[*item.devices, *(num_devices + resource for resource in item.resources)] for item in items]
    members = list(itertools.chain.from_iterable(held))
    start = np.concatenate(([0], np.cumsum([len(item) for item in held]))).astype(np.int64)
    pairs: I64 = np.asarray([(index, group) for index, item in enumerate(items) for group in item.groups],
                            dtype=np.int64).reshape(-1, 2)
    seconds: F64 = np.asarray([item.seconds for item in items], dtype=np.float64)
    return Buckets(seconds, start, np.asarray(members, dtype=np.int64), pairs)
