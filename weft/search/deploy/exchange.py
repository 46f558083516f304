"""How the gradients of a deployment are exchanged: in buckets, each by the method that costs least.

Groups of one block share a bucket, from the last group to the first, until it is so large that its latency no longer
matters. Weights of linear layers whose factors are faster to gather (``sufficient``) are a bucket of their own beside
it. A parameter that several groups read (tied embeddings) is exchanged by itself among all devices that hold it.

Which linear layers exchange sufficient factors instead of gradients, decided exactly.

The gradient of a linear layer's weight is ``g^T x``: its output gradients times its inputs, one row for each sample and
position. With ``N`` rows in a step, over all workers and micro-batches, there are two ways to the same sum:

    all-reduce:  sum the weight's gradient over the workers       in * out elements
    factors:     gather x and g on every worker, multiply there   N * (in + out) elements, N rows multiplied

An all-reduce in rings moves its bytes twice, so factors move less if ``N < 2 in out / (in + out)``. They also take the
time to multiply the other workers' rows, ``2 in out (N - own)`` operations, and the latency of one more collective; and
an input that several layers read (query, key and value) is gathered once for all of them. So it is one question for all
layers together (``decide``):

    maximise   sum over chosen weights of (all-reduce - extra products)  -  sum over their factors of the gathering
               -  latency of the gathering, if anything is chosen

which is project selection, a minimum cut (``selection``): weights are the projects, factors the tools. A weight that
several layers read is one project with the factors of all of them. The latency is paid once, so the best choice without
it is compared with choosing nothing. The all-reduce's own latency is paid either way, for the other parameters.

TAG (TPDS 2023) may also run the operators before a layer on all rows instead of gathering what they make. That is left
out: the runtime gathers both factors.

Project selection: which projects pay, if each needs some tools and a tool is bought once for all who use it.

    maximise   sum of profit[p] over the chosen p  -  sum of cost[t] over the tools that a chosen project needs

This is a minimum cut (Picard 1976): an arc of ``profit`` from the source to each project, one of ``cost`` from each
tool to the sink, and from a project to its tools arcs that it does not pay to cut. Projects still reached from the
source when no more can flow are the answer, the smallest one among the best. This is the adapter to OR-Tools' maximum
flow, which counts in whole numbers of 63 bits: one unit is that part of the largest profit or cost of which all profits
together still have room. With a thousand projects that is 2^-52 of the largest, as exact as the numbers themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from weft.base.errors import InputError
from weft.cluster.cluster import DeviceId, DeviceKind
from weft.cost.collectives import Collective, Line
from weft.cost.costs import Costs
from weft.cost.op_classes import op_classes
from weft.cost.roofline import peak_rate
from weft.model.graph import F64, I64, NO_BATCH_DIM, UNKNOWN_BATCH_DIM, Graph
from weft.plan.factors import LinearUse, find_factors
from weft.plan.memory import optimizer_bytes
from weft.plan.plan import GradientMethod
from weft.search.common.problem import Problem
from weft.search.deploy.actions import Layout
from weft.search.deploy.blocks import Buckets
from weft.search.deploy.op_groups import OpGroups
from weft.search.deploy.tuning import TUNING
from weft.simulate.exchange_time import collective_line, exchange_together, reduce_line

# ---- layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """An operator that multiplies rows by a weight which only such operators read."""

    op: int
    """Its id; the others are ids of tensors."""
    weight: int
    bias: int | None
    """A bias that nothing else reads: its gradient is the sum of the rows of ``g``."""
    input: int
    output: int
    rows_per_sample: int
    num_in: int
    num_out: int
    element_bytes: int
    dtype: str

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of weight and bias."""
        return (self.num_in * self.num_out + (self.num_out if self.bias is not None else 0)) * self.element_bytes


def linear_layers(graph: Graph) -> tuple[LinearLayer, ...]:
    """Return the layers of a training graph whose weight gradients can be exchanged as factors, in order.

    They are the operators that ``weft.plan.factors`` finds and whose rows grow with the batch. A weight that anything
    else reads, such as an embedding tied to the output layer, would need an all-reduce beside the factors, so none of
    its layers is returned.
    """
    if not graph.has_backward:
        return ()
    factors = find_factors(graph, [tensor for tensor in graph.parameters.tolist() if graph.needs_gradient[tensor]])
    num_readers = np.bincount(graph.inputs, minlength=graph.num_tensors)
    layers = {use: _linear_layer(graph, use, num_readers) for use in factors.uses}
    unfit = {*factors.shared, *(use.weight for use, layer in layers.items() if layer is None)}
    return tuple(layer for layer in layers.values() if layer is not None and layer.weight not in unfit)


def _linear_layer(graph: Graph, use: LinearUse, num_readers: I64) -> LinearLayer | None:
    x = int(graph.op_inputs(use.op)[1 if graph.op_kinds[use.op] == "aten.addmm" else 0])
    rows = _rows_per_sample(graph, x)
    if rows is None or graph.tensor_bytes[use.weight] == 0:
        return None
    num_in = graph.tensor_shapes[x][-1]
    num_out = math.prod(graph.tensor_shapes[use.weight]) // num_in
    return LinearLayer(
        op=use.op, weight=use.weight, bias=use.bias if use.bias is not None and num_readers[use.bias] == 1 else None,
        input=x, output=int(graph.op_outputs(use.op)[0]), rows_per_sample=rows, num_in=num_in, num_out=num_out,
        element_bytes=int(graph.tensor_bytes[use.weight]) // (num_in * num_out), dtype=graph.tensor_dtypes[use.weight])


def _rows_per_sample(graph: Graph, tensor: int) -> int | None:
    """Return the rows that each sample adds to ``tensor``, or None where they are not its leading dimensions."""
    shape, batch_dim = graph.tensor_shapes[tensor], int(graph.tensor_batch_dim[tensor])
    rows = math.prod(shape[:-1])
    if len(shape) < 2 or rows == 0 or rows % graph.batch:
        return None
    is_by_rows = batch_dim == UNKNOWN_BATCH_DIM or (batch_dim != NO_BATCH_DIM and batch_dim < len(shape) - 1)
    return rows // graph.batch if is_by_rows else None


# ---- decision -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerms:
    """What both ways cost for one layer, and which was chosen."""

    layer: LinearLayer
    num_rows: int
    """In a step, of all workers."""
    reduce_s: float
    """All-reducing the gradients of weight and bias; the weight's counts for the first layer that reads it."""
    input_s: float
    """Gathering the input's rows; once for all layers that read this input."""
    gradient_s: float
    """Gathering the rows of the output's gradient."""
    compute_s: float
    """Multiplying the rows of the other workers."""
    uses_factors: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which layers use factors, and the seconds that the gradients of all layers take."""

    terms: tuple[LayerTerms, ...]
    all_reduce_s: float
    """All gradients all-reduced."""
    seconds: float
    """As chosen, products of other workers' rows included."""

    @property
    def chosen(self) -> tuple[LinearLayer, ...]:
        """Return the layers that use factors."""
        return tuple(term.layer for term in self.terms if term.uses_factors)


def decide(layers: Sequence[LinearLayer], *, num_samples: int, num_workers: int, gather: Line, reduce: Line,
           s_per_flop: float, own_samples: float | None = None) -> Decision:
    """Return the layers that should use factors, the best choice there is under these costs.

    ``num_samples`` are those of a whole step, all workers and micro-batches together. ``gather`` and ``reduce`` are the
    times of the collectives among the workers, by the size of the whole tensor as ``weft.cost.collectives`` has it.
    ``s_per_flop`` is the time of an operation of a matrix product on the worker that needs longest for the rows of the
    others, and ``own_samples`` what it has itself (default: an even share).
    """
    own = num_samples / max(num_workers, 1) if own_samples is None else own_samples
    _check(num_samples, num_workers, (gather, reduce), s_per_flop, own)
    terms = _all_terms(layers, num_samples=num_samples, own_samples=own, gather_s_per_byte=gather.s_per_byte,
                       reduce_s_per_byte=reduce.s_per_byte, s_per_flop=s_per_flop)
    all_reduce_s = reduce.latency_s + sum(term.reduce_s for term in terms)
    none = Decision(terms=terms, all_reduce_s=all_reduce_s, seconds=all_reduce_s)
    some = _with_factors(none, _pays(terms), latency_s=gather.latency_s)
    return some if some.seconds < none.seconds else none


def _check(num_samples: int, num_workers: int, lines: Sequence[Line], s_per_flop: float, own_samples: float) -> None:
    if num_samples < 1 or num_workers < 1:
        raise InputError(f"a step needs one worker and one sample or more, not {num_workers} and {num_samples}")
    if not 0 <= own_samples <= num_samples:
        raise InputError(f"the slowest worker has {own_samples} of {num_samples} samples: give 0 to {num_samples}")
    figures = [s_per_flop, *(figure for line in lines for figure in (line.latency_s, line.s_per_byte))]
    if not all(0 <= figure < math.inf for figure in figures):
        raise InputError(f"times per operation and byte must be zero or more and finite, not {figures}: look for a "
                         "link without bandwidth or a device without a compute rate")


def _all_terms(layers: Sequence[LinearLayer], *, num_samples: int, own_samples: float, gather_s_per_byte: float,
               reduce_s_per_byte: float, s_per_flop: float) -> tuple[LayerTerms, ...]:
    terms, weights = [], set[int]()
    for layer in layers:
        num_rows, row_s = num_samples * layer.rows_per_sample, layer.element_bytes * gather_s_per_byte
        num_flops = 2.0 * layer.num_in * layer.num_out * layer.rows_per_sample * (num_samples - own_samples)
        is_first = layer.weight not in weights
        weights.add(layer.weight)
        weight_bytes = layer.num_in * layer.num_out * layer.element_bytes
        terms.append(LayerTerms(
            layer=layer, num_rows=num_rows, uses_factors=False, compute_s=num_flops * s_per_flop,
            reduce_s=(layer.parameter_bytes - (0 if is_first else weight_bytes)) * reduce_s_per_byte,
            input_s=num_rows * layer.num_in * row_s, gradient_s=num_rows * layer.num_out * row_s))
    return tuple(terms)


def _pays(terms: Sequence[LayerTerms]) -> frozenset[int]:
    """Return the weights that pay for their factors, latency apart."""
    weights = {weight: index for index, weight in enumerate(dict.fromkeys(term.layer.weight for term in terms))}
    inputs = {tensor: index for index, tensor in enumerate(dict.fromkeys(term.layer.input for term in terms))}
    profits, needs = [0.0] * len(weights), [dict[int, None]() for _ in weights]
    costs = [0.0] * len(inputs)
    for term in terms:
        project, tool = weights[term.layer.weight], inputs[term.layer.input]
        # A gradient has one reader, so it is part of the project, not a tool.
        profits[project] += term.reduce_s - term.compute_s - term.gradient_s
        costs[tool] = term.input_s
        needs[project][tool] = None
    chosen = frozenset(select_projects(profits, costs, [tuple(tools) for tools in needs]))
    return frozenset(weight for weight, project in weights.items() if project in chosen)


def _with_factors(none: Decision, weights: frozenset[int], *, latency_s: float) -> Decision:
    """Return the decision that these weights use factors."""
    terms = tuple(replace(term, uses_factors=term.layer.weight in weights) for term in none.terms)
    chosen = [term for term in terms if term.uses_factors]
    inputs = {term.layer.input: term for term in chosen}
    seconds = (none.all_reduce_s + latency_s
               + sum(term.gradient_s + term.compute_s - term.reduce_s for term in chosen)
               + sum(term.input_s for term in inputs.values()))
    return replace(none, terms=terms, seconds=seconds)


# ---- rates of a cluster ---------------------------------------------------------------------------------------------


def decide_on_cluster(layers: Sequence[LinearLayer], costs: Costs, devices: Sequence[int], *, num_samples: int,
                      shares: Sequence[float] | None = None) -> Decision:
    """Return the decision for workers on ``devices``, with the collectives' times and compute rates of ``costs``.

    ``shares`` are the parts of the samples that the workers have (default: even).
    """
    parts = [1 / max(len(devices), 1)] * len(devices) if shares is None else shares
    if not devices or len(parts) != len(devices):
        raise InputError(f"{len(devices)} workers and {len(parts)} shares of the batch: give one share for each worker")
    factor_bytes = num_samples * sum(layer.rows_per_sample * (layer.num_in + layer.num_out) * layer.element_bytes
                                     for layer in layers)
    dtypes = sorted({layer.dtype for layer in layers}) or ["float32"]
    kinds = [costs.cluster.kinds[costs.cluster.devices[device].kind] for device in devices]
    worst = max(((1 - part) * product_s_per_flop(kind, dtype), product_s_per_flop(kind, dtype), part)
                for part, kind in zip(parts, kinds, strict=True) for dtype in dtypes)
    gather = collective_line(costs, Collective.ALL_GATHER, factor_bytes, devices)
    return decide(layers, num_samples=num_samples, num_workers=len(devices),
                  gather=replace(gather, s_per_byte=gather.s_per_byte * padding(parts)),
                  reduce=collective_line(costs, Collective.ALL_REDUCE, sum(layer.parameter_bytes for layer in layers),
                                         devices),
                  s_per_flop=worst[1], own_samples=worst[2] * num_samples)


def padding(shares: Sequence[float]) -> float:
    """Return how much more is gathered than there is where workers have different shares: as if all had the largest."""
    return len(shares) * max(shares)


def product_s_per_flop(kind: DeviceKind, dtype: str) -> float:
    """Return the seconds of one operation of a large matrix product.

    By the roofline it is an upper bound of what more rows cost: of few, writing the result takes longer than they do.
    """
    return 1.0 / (peak_rate(kind, dtype).flop_per_s * op_classes()["matmul"].on(kind.type).compute)


# ---- project selection -----------------------------------------------------------------------------------------------


def select_projects(profits: Sequence[float], costs: Sequence[float],
                    needs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the projects to choose, in order; ``needs[p]`` are the tools of project ``p``. Profits may be negative."""
    from ortools.graph.python import max_flow

    largest = max((*profits, *costs), default=0.0)
    if largest <= 0.0:
        return ()
    shift = 62 - math.frexp(largest)[1] - (len(profits) + len(costs)).bit_length()
    gains, prices = ([int(math.ldexp(max(value, 0.0), shift)) for value in values] for values in (profits, costs))
    source, sink = len(gains) + len(prices), len(gains) + len(prices) + 1
    flow = max_flow.SimpleMaxFlow()
    for project, gain in enumerate(gains):
        if gain > 0:
            flow.add_arc_with_capacity(source, project, gain)
            for tool in needs[project]:
                flow.add_arc_with_capacity(project, len(gains) + tool, gain)
    for tool, price in enumerate(prices):
        flow.add_arc_with_capacity(len(gains) + tool, sink, price)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, "the sum of all capacities is within the range"
    return tuple(sorted(node for node in flow.get_source_side_min_cut() if node < len(gains)))


# ---- sufficient factors ----------------------------------------------------------------------------------------------


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
                 held_part: Callable[[Sequence[DeviceId]], F64 | None] = lambda tp_group: None,
                 summed: Callable[[Sequence[DeviceId]], frozenset[int]] = lambda tp_group: frozenset()) -> None:
        """``held_part`` says which part of each tensor a device holds, of several that divide operators.

        ``summed`` are those of whose gradients each of these devices has a part of the sum.
        """
        self.problem, self.groups, self.use_factors, self.held_part = problem, groups, use_factors, held_part
        self.summed = summed
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
            size = int(graph.tensor_bytes[tensor] * graph.needs_gradient[tensor])
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
        if len(layout.replicas) < 2 and not self.summed(layout.replicas[0][0]):
            return ()
        known = self._blocks.get((number, first, last))
        if known is None:
            known = self._blocks[number, first, last] = (
                *(self._make_block(layout, first, last) if len(layout.replicas) > 1 else ()),
                *self._inside_block(layout, first, last))
        return known

    def _inside_block(self, layout: Layout, first: int, last: int) -> Iterator[Bucket]:
        """Yield the exchange of those gradients that devices which divide operators have parts of."""
        summed = self.summed(layout.replicas[0][0])
        found = [(group, tensor) for group in range(first, last) for tensor in self.of_group[group] if tensor in summed]
        if found:
            groups, tensors = zip(*found, strict=True)
            yield self._bucket(tensors, tuple(dict.fromkeys(groups)), layout.devices,
                               float(sum(self.sizes[tensor] for tensor in tensors)), is_divided=True)

    def _make_block(self, layout: Layout, first: int, last: int) -> Iterator[Bucket]:
        devices, first_ones = layout.devices, tuple(tp_group[0] for tp_group, _ in layout.replicas)
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
        summed = self.summed(layout.replicas[0][0])
        return [self._part([tensor for tensor in tensors if tensor not in summed], factors, held)
                for tensors in self.of_group]

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
    """Return, for each place in a tp group, the devices of all tp groups that have this place."""
    return [tuple(tp_group[place % len(tp_group)] for tp_group, _ in layout.replicas)
            for place in range(max(len(tp_group) for tp_group, _ in layout.replicas))]


def _columns(items: Sequence[Bucket], num_devices: int) -> Buckets:
    held = [[*item.devices, *(num_devices + resource for resource in item.resources)] for item in items]
    members = list(itertools.chain.from_iterable(held))
    start = np.concatenate(([0], np.cumsum([len(item) for item in held]))).astype(np.int64)
    pairs: I64 = np.asarray([(index, group) for index, item in enumerate(items) for group in item.groups],
                            dtype=np.int64).reshape(-1, 2)
    seconds: F64 = np.asarray([item.seconds for item in items], dtype=np.float64)
    return Buckets(seconds, start, np.asarray(members, dtype=np.int64), pairs)
