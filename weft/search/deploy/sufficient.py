"""Which linear layers exchange sufficient factors instead of gradients, decided exactly.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.base.errors import InputError
from weft.cluster.cluster import DeviceKind
from weft.cost.collectives import Collective, Line
from weft.cost.costs import Costs
from weft.cost.op_classes import op_classes
from weft.cost.roofline import peak_rate
from weft.model.graph import I64, NO_BATCH_DIM, UNKNOWN_BATCH_DIM, Graph
from weft.plan.factors import LinearUse, find_factors
from weft.simulate.exchange_time import collective_line

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
