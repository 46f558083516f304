"""A traced model as parts that each choose a layout: operators, tensors that several read, and parameters.

A *part* has choices; a choice gives its values some layout and needs their gradients in another, takes time, and keeps
bytes. An *edge* is a tensor that one part gives and another reads:

    cost of an edge = value from the giver's layout to the reader's + gradient from the reader's layout to the giver's

- an operator chooses a strategy (``op_choices``);
- a tensor with several readers chooses a common layout: it is brought there once, and gradients are added up there;
- a parameter chooses how it is stored: as it is used, or in more pieces, which are gathered for use; its optimizer
  state may be in pieces of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from weft.cost.costs import Costs
from weft.cost.roofline import PARTS
from weft.model.graph import F64, I64, Graph
from weft.model.trace import TracedModel
from weft.plan.memory import optimizer_bytes
from weft.plan.plan import Optimizer
from weft.search.shard import op_choices
from weft.search.shard.mesh import Resharding
from weft.search.shard.op_choices import BACKWARD, FORWARD, InContext, OpChoices
from weft.sharding.factor_rules import factors_of, has_rule
from weft.sharding.factors import OpFactors
from weft.sharding.named_ops import named_ops
from weft.sharding.sequence import ModelSequence, find_sequence
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, largest_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One way to store a parameter."""

    layout: Layout
    gradient: Layout
    """The layout in which its gradient is needed by the optimizer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelPart:
    """Something that chooses; ``s`` choices."""

    name: str
    """Of the operator or tensor."""
    kind: str
    """``op``, ``tensor`` or ``parameter``."""
    seconds: F64
    """[s]"""
    held_bytes: F64
    """[s] kept on the device with the most."""
    values: tuple[I64, ...]
    """[outputs][s] number of the layout in which it gives a value."""
    gradients: tuple[I64, ...]
    """[outputs][s] number of the layout in which it needs the value's gradient."""
    choices: OpChoices | None = None
    """Of an operator."""
    stored: tuple[Stored, ...] = ()
    """Of a parameter."""
    tensor: int = -1
    """Of a tensor or parameter: its id in the graph."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """A tensor between two parts."""

    giver: int
    output: int
    reader: int
    num_bytes: float
    reads: I64
    """[reader's s] number of the layout in which it is read."""
    returns: I64 | None
    """[reader's s] number of the layout in which its gradient comes back; None if it has none."""
    is_parameter: bool
    tensor: int


class Result(NamedTuple):
    """A tensor that the model gives."""

    tensor: int
    giver: int
    """The part that makes it."""
    output: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParts:
    """All parts and edges of a traced model on a mesh."""

    traced: TracedModel
    resharding: Resharding
    parts: tuple[ModelPart, ...]
    edges: tuple[Edge, ...]
    part_of_op: dict[str, int]
    without_rule: dict[str, str]
    """Operators that no rule describes, by kind: where one of them is in the source."""
    results: tuple[Result, ...] = ()
    """What the model gives, which all devices are to have whole."""
    has_context: bool = False

    def result_seconds(self, result: Result, num_bytes: float) -> F64:
        """Return by strategy of its giver the time to bring a result of so many bytes whole to all devices."""
        values = self.parts[result.giver].values[result.output]
        whole = np.array([self.resharding.number((WHOLE,) * len(self.resharding.mesh.shape))])
        shape = self.traced.graph.tensor_shapes[result.tensor]
        return np.asarray(self.resharding.matrix(values, whole, num_bytes, shape)[:, 0], dtype=np.float64)

    def shape_of(self, edge: Edge) -> tuple[int, ...]:
        """Return the shape of an edge's tensor."""
        return self.traced.graph.tensor_shapes[edge.tensor]

    def matrix(self, edge: Edge) -> F64:
        """Return [giver's s, reader's s] the seconds of an edge in one step."""
        giver, shape = self.parts[edge.giver], self.shape_of(edge)
        forward = self.resharding.matrix(giver.values[edge.output], edge.reads, edge.num_bytes, shape)
        if edge.returns is None:
            return forward
        back = self.resharding.matrix(edge.returns, giver.gradients[edge.output], edge.num_bytes, shape).T
        return forward * (2 if edge.is_parameter else 1) + back  # a gathered parameter is gathered again going back


@dataclass(kw_only=True)
class _Reading:
    part: int
    position: int
    reads: I64
    returns: I64
    input_part: F64


@dataclass(kw_only=True)
class PartBuilder:
    """Makes the parts of a model."""

    traced: TracedModel
    costs: Costs
    devices: Sequence[int]
    resharding: Resharding
    optimizer: Optimizer
    splits_states: bool = True
    """Optimizer states and stored parameters may be in more pieces than are used."""
    pause: Callable[[], None] = lambda: None
    """Called between parts; may raise to end."""
    has_context: bool = False
    """The first axis of the mesh splits the sequence, and nothing else."""
    parts: list[ModelPart] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    part_of_op: dict[str, int] = field(default_factory=dict)
    without_rule: dict[str, str] = field(default_factory=dict)
    _choices: dict[Any, OpChoices] = field(default_factory=dict)
    _seconds: dict[Any, F64] = field(default_factory=dict)

    def build(self) -> ModelParts:
        """Return all parts and edges."""
        graph, program = self.traced.graph, self.traced.program
        self.graph: Graph = graph
        self.tensor_of = {node: graph.tensor_index[name] for name, node in program.tensor_nodes.items()}
        for placeholder, path in (*program.parameters.items(), *program.buffers.items()):
            if path in graph.tensor_index:
                self.tensor_of.setdefault(placeholder, graph.tensor_index[path])
        self.needs_gradient = graph.needs_gradient & graph.has_backward
        self._parameters = frozenset(graph.parameters.tolist())
        self.columns = sorted({self.costs.column_of_device[device] for device in self.devices})
        readings: dict[int, list[_Reading]] = {}
        givers: dict[int, tuple[int, int]] = {}
        ops = [(op, name) for op, name in enumerate(graph.op_names) if not graph.is_constant[op]]
        self._find_factors(ops)
        self._sequence = self._find_sequence() if self.has_context else None
        for op, name in ops:
            self.pause()
            self._add_op(op, name, readings, givers)
        for tensor, items in readings.items():
            self.pause()
            self._connect(tensor, items, givers)
        results = tuple(Result(tensor, *givers[tensor]) for tensor in graph.outputs if tensor in givers)
        found = ModelParts(traced=self.traced, resharding=self.resharding, parts=tuple(self.parts), results=results,
                           has_context=self.has_context, edges=tuple(self.edges), part_of_op=self.part_of_op,
                           without_rule=self.without_rule)
        for result in results:
            extra = found.result_seconds(result, float(graph.tensor_bytes[result.tensor]))
            giver = self.parts[result.giver]
            self.parts[result.giver] = replace(giver, seconds=giver.seconds + extra)
        return replace(found, parts=tuple(self.parts))

    # ---- operators --------------------------------------------------------------------------------------------------

    def _add_op(self, op: int, name: str, readings: dict[int, list[_Reading]],
                givers: dict[int, tuple[int, int]]) -> None:
        node, *items = [self.traced.program.nodes[item] for item in self.traced.program.op_nodes[name]]
        inputs = tuple(node.all_input_nodes)
        shapes = tuple(_shape(item) for item in inputs)
        results = _results(node)
        factors, blocks = self._factors[op]
        context = None if self._sequence is None else InContext(self._sequence.places.get(name),
                                                                self._sequence.is_causal)
        key = (factors, shapes, results, blocks, context)
        if key not in self._choices:
            self._choices[key] = op_choices.op_choices(factors, shapes, results, self.resharding, blocks, context)
        choices = self._choices[key]
        part = len(self.parts)
        held = np.full(len(choices.strategies), 0.0)
        held += self.graph.saved_inside_bytes[op] * choices.work
        self.part_of_op[name] = part
        self.parts.append(ModelPart(name=name, kind="op", seconds=self._op_seconds(op, choices), held_bytes=held,
                                    values=choices.output_value, gradients=choices.output_gradient, choices=choices))
        for position, item in enumerate(inputs):
            tensor = self.tensor_of.get(item.name)
            if tensor is not None:
                readings.setdefault(tensor, []).append(_Reading(
                    part=part, position=position, reads=choices.input_value[position],
                    returns=choices.input_gradient[position], input_part=choices.input_part[position]))
        outputs = {0: node} if not items else {int(item.args[1]): item for item in items}
        for position, item in outputs.items():
            tensor = self.tensor_of.get(item.name)
            if tensor is not None:
                givers[tensor] = (part, position)

    def _find_factors(self, ops: Sequence[tuple[int, str]]) -> None:
        """Note each operator's factors, and which of them readers want in blocks; readers come first."""
        wanted: dict[str, set[tuple[int, int]]] = {}
        self._factors: dict[int, tuple[OpFactors | None, tuple[tuple[int, int], ...]]] = {}
        for op, name in reversed(ops):
            node, *items = [self.traced.program.nodes[item] for item in self.traced.program.op_nodes[name]]
            factors = factors_of(node)
            blocks: list[tuple[int, int]] = []
            if factors is None:
                if not has_rule(node.target):
                    where = self.graph.sources[op] if self.graph.sources else ""
                    self.without_rule[str(node.target)] = where or name
            else:
                outputs = {0: node} if not items else {int(item.args[1]): item for item in items}
                results = [wanted.get(outputs[position].name, set()) if position in outputs else set()
                           for position in range(len(factors.outputs))]
                blocks, needs = op_choices.wanted_blocks(factors, results)
                for source, need in zip(node.all_input_nodes, needs, strict=True):
                    wanted.setdefault(source.name, set()).update(need)
            self._factors[op] = factors, tuple(blocks)

    def _find_sequence(self) -> ModelSequence:
        """Return where the sequence is, which the first axis splits; raise ``InputError`` if it cannot."""
        found = find_sequence(named_ops(self.traced))
        found.check(self.resharding.mesh.shape[0], what=self.graph.name)
        return found

    def _op_seconds(self, op: int, choices: OpChoices) -> F64:
        """Return the seconds of all strategies on the slowest device."""
        costs = self.costs
        inside = self._inside_seconds(op, choices)
        slowest = np.zeros(len(choices.strategies))
        for column in self.columns:
            whole = op_choices.whole_seconds(costs, op, column)
            terms = costs.terms[column]
            key = (id(choices), column, *whole.values(), *(() if terms is None else (
                float(values[op]) for part in PARTS for values in (
                    terms[part].compute_s, terms[part].fixed_s, terms[part].moved_s, terms[part].overhead_s,
                    terms[part].sum_s))))
            if key not in self._seconds:
                self._seconds[key] = op_choices.op_seconds(choices, whole, terms, op)
            slowest = np.maximum(slowest, self._seconds[key])
        return slowest + inside

    def _inside_seconds(self, op: int, choices: OpChoices) -> F64:
        """Return the time of what devices exchange inside an operator where a factor is split that needs it."""
        mesh, factors = self.resharding.mesh, choices.op.factors
        seconds = np.zeros(len(choices.strategies))
        if not choices.op.keys and not any(factor.forward_sums or factor.backward_sums or factor.exchanged
                                           for factor in factors):
            return seconds
        work = [op_choices.pass_seconds(self.costs, op, self.columns[0], choices, which)
                for which in (FORWARD, BACKWARD)]
        for place in range(len(choices.strategies)):
            found = op_choices.inside_seconds(choices, place, mesh, [float(item[place]) for item in work])
            seconds[place] = sum(found[: 2 if self.graph.has_backward else 1])
        return seconds

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def _connect(self, tensor: int, readings: list[_Reading], givers: dict[int, tuple[int, int]]) -> None:
        graph = self.graph
        needs = bool(self.needs_gradient[tensor])
        is_parameter = tensor in self._parameters
        is_saved = bool(graph.is_saved[tensor]) and graph.has_backward
        num_bytes = float(graph.tensor_bytes[tensor])
        if not is_parameter and tensor not in givers:
            return  # an input of the model, a buffer or a constant: whole everywhere
        if is_parameter:
            giver, output = self._add_parameter(tensor, readings), 0
        else:
            giver, output = givers[tensor]
            if len(readings) > 1:
                giver, output = self._add_tensor(tensor, giver, output, readings, needs, is_saved), 0
            elif is_saved:
                only = readings[0]
                item = self.parts[only.part]
                self.parts[only.part] = replace(item, held_bytes=item.held_bytes + num_bytes * only.input_part)
        for reading in readings:
            self.edges.append(Edge(giver=giver, output=output, reader=reading.part, num_bytes=num_bytes,
                                   reads=reading.reads, returns=reading.returns if needs else None,
                                   is_parameter=is_parameter, tensor=tensor))

    def _add_tensor(self, tensor: int, giver: int, output: int, readings: list[_Reading], needs: bool,
                    is_saved: bool) -> int:
        """Add a part for a tensor with several readers, and the edge to it; return the part."""
        source = self.parts[giver]
        pairs = dict.fromkeys(zip(source.values[output].tolist(), source.gradients[output].tolist(), strict=True))
        for reading in readings:
            pairs |= dict.fromkeys(zip(reading.reads.tolist(), reading.returns.tolist(), strict=True))
        values = np.array([pair[0] for pair in pairs], dtype=np.int64)
        gradients = np.array([pair[1] for pair in pairs], dtype=np.int64)
        num_bytes = float(self.graph.tensor_bytes[tensor])
        shape = self.graph.tensor_shapes[tensor]
        layouts, mesh = self.resharding.layouts, self.resharding.mesh.shape
        held = np.array([largest_part(shape, layouts[value], mesh) for value in values.tolist()]) * num_bytes * is_saved
        part = len(self.parts)
        self.parts.append(ModelPart(name=self.graph.tensor_names[tensor], kind="tensor", seconds=np.zeros(len(values)),
                                    held_bytes=held, values=(values,), gradients=(gradients,), tensor=tensor))
        self.edges.append(Edge(giver=giver, output=output, reader=part, num_bytes=num_bytes, reads=values,
                               returns=gradients if needs else None, is_parameter=False, tensor=tensor))
        return part

    # ---- parameters -------------------------------------------------------------------------------------------------

    def _add_parameter(self, tensor: int, readings: list[_Reading]) -> int:
        layouts = self.resharding.layouts
        used = dict.fromkeys(layouts[number] for reading in readings for number in reading.reads.tolist())
        shape = self.graph.tensor_shapes[tensor]
        ways: dict[tuple[Layout, Layout], None] = {}
        for layout in used:
            if SUM in layout:
                continue
            ways[layout, layout] = None
            if self.splits_states and self.needs_gradient[tensor]:
                for finer in _finer(layout, shape, self.resharding.mesh.shape):
                    ways[layout, finer] = None  # the states alone are split: gradients are scattered, values gathered
                    ways[finer, finer] = None
        stored = tuple(Stored(layout=value, gradient=gradient) for value, gradient in ways)
        number = self.resharding.number
        part = len(self.parts)
        self.parts.append(ModelPart(
            name=self.graph.tensor_names[tensor], kind="parameter", tensor=tensor, stored=stored,
            seconds=np.array([self._update_seconds(tensor, item) for item in stored]),
            held_bytes=np.array([self._parameter_bytes(tensor, item) for item in stored]),
            values=(np.array([number(item.layout) for item in stored], dtype=np.int64),),
            gradients=(np.array([number(item.gradient) for item in stored], dtype=np.int64),)))
        return part

    def _update_seconds(self, tensor: int, stored: Stored) -> float:
        """Return the time to gather a parameter whose states are split finer than itself, after the update."""
        number = self.resharding.number
        source, target = (np.array([number(layout)]) for layout in (stored.gradient, stored.layout))
        return float(self.resharding.matrix(source, target, float(self.graph.tensor_bytes[tensor]),
                                            self.graph.tensor_shapes[tensor])[0, 0])

    def _parameter_bytes(self, tensor: int, stored: Stored) -> float:
        shape, mesh = self.graph.tensor_shapes[tensor], self.resharding.mesh.shape
        num_bytes = float(self.graph.tensor_bytes[tensor])
        value = largest_part(shape, stored.layout, mesh) * num_bytes
        if not self.needs_gradient[tensor]:
            return value
        finer = largest_part(shape, stored.gradient, mesh)
        return value + finer * (num_bytes + optimizer_bytes(self.graph, tensor, self.optimizer))


def _finer(layout: Layout, shape: Sequence[int], mesh: Sequence[int]) -> list[Layout]:
    """Return layouts with one or more whole axes of ``layout`` split, each along a dimension that divides evenly.

    Axes get dimensions of their own where there are such: what is scattered along two of them need not cross the
    slower one whole.
    """
    axes = [axis for axis, placement in enumerate(layout) if placement == WHOLE and mesh[axis] > 1]
    found = []
    for chosen in product((False, True), repeat=len(axes)):
        finer = list(layout)
        for axis in (axis for axis, is_chosen in zip(axes, chosen, strict=True) if is_chosen):
            dim = _free_dim(finer, shape, mesh, axis)
            if dim is None:
                break
            finer[axis] = Placement(dim)
        else:
            if any(chosen):
                found.append(tuple(finer))
    return found


def _free_dim(layout: Sequence[Placement], shape: Sequence[int], mesh: Sequence[int], axis: int) -> int | None:
    """Return the dimension that an axis may split evenly: one that no axis splits, else one split plainly."""
    best = None
    for dim, size in enumerate(shape):
        others = [index for index, placement in enumerate(layout) if placement.dim == dim]
        count = int(np.prod([mesh[index] for index in others], dtype=np.int64)) * mesh[axis]
        if size and size % count == 0:
            if not others:
                return dim
            if best is None and all(layout[index] == Placement(dim) for index in others):
                best = dim
    return best


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if hasattr(value, "shape") else ()


def _results(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors that a call returns."""
    value = node.meta["val"]
    if isinstance(value, tuple | list):
        return tuple(tuple(item.shape) if hasattr(item, "shape") else () for item in value)
    return (tuple(value.shape),)


