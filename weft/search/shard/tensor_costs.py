"""What every operator of a model takes where equal devices divide it among them: tensor parallelism, as searched.

``split_operators`` finds the best way in which no gradient of a matrix is a sum over the devices (each would have all
of it; the few numbers of norms and biases are added up once in a step) and no samples are divided (that is what
replicas are for, and a step may have fewer samples than devices), and says for each operator of the full model:

    seconds for n samples = seconds of the whole operator for n samples * part + latency_s + n * s_per_sample

where ``part`` is how much shorter it is on one of the devices, and the rest is what they exchange before and after it,
and what it takes to start it, which is the same for a part as for the whole.
Collectives count for the operator that reads what they bring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from torch import fx

from weft.cost.costs import Costs, Phase
from weft.cost.mesh import Mesh
from weft.cost.roofline import PARTS, Part
from weft.model.folded import FoldedModel
from weft.model.graph import F64, I64, Graph
from weft.plan.expert_load import EVEN, largest_share, parse_load
from weft.plan.plan import Optimizer, Sharding
from weft.plan.sharding import parse_layout
from weft.search.common.budget import Budget
from weft.search.common.problem import mesh_axes
from weft.search.shard.folded_graph import Assembler
from weft.search.shard.model_search import MeshSearch, ShardedModel
from weft.search.shard.op_choices import (
    BACKWARD,
    FORWARD,
    PASSES,
    Bools,
    OpChoices,
    inside_seconds,
    op_seconds,
    pass_seconds,
    whole_seconds,
)
from weft.search.shard.parts import Edge, ModelPart, ModelParts
from weft.search.shard.to_plan import full_names, plan_words
from weft.sharding.expert_rows import Rows, experts_sort, find_rows
from weft.sharding.factor_rules import factors_of
from weft.sharding.factors import split_counts
from weft.sharding.tensor_layout import SUM, largest_part

HARDLY: Final = 1e-9
"""Bytes that take the latency only; none at all are not sent."""
_PHASES: Final[tuple[Phase, Phase]] = ("F", "B")


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorCosts:
    """How equal devices divide a model; arrays are [forward and backward, operators of the full model]."""

    part: F64
    latency_s: F64
    s_per_sample: F64
    held_part: F64
    """[tensors of the full model] part of a parameter that one device holds."""
    saved_part: F64
    """[operators] part of what an operator keeps for its backward that one device keeps."""
    sharding: Sharding
    """The same in the words of a plan, for all operators."""
    summed: frozenset[int] = frozenset()
    """Parameters of the full model of whose gradients each device that divides operators has a part of the sum."""
    cp: int = 1
    """So many of the devices divide the sequence, on an axis of its own; the rest operators."""

    def seconds(self, which: int, whole_s: F64, num_samples: float) -> F64:
        """Return each operator's seconds in a pass, from those of the whole operators for so many samples."""
        return np.asarray(whole_s * self.part[which] + self.latency_s[which] + num_samples * self.s_per_sample[which])

    def words(self, op_names: Sequence[str], tensor_names: Sequence[str]) -> Sharding:
        """Return the part of the words that is about these operators and tensors."""
        ops, tensors, made = self.sharding.ops, self.sharding.tensors, self.sharding.made
        return Sharding(ops={name: ops[name] for name in op_names if name in ops},
                        tensors={name: tensors[name] for name in tensor_names if name in tensors},
                        made={name: made[name] for name in tensor_names if name in made})


def split_operators(folded: FoldedModel, graph: Graph, costs: Costs, groups: Sequence[Sequence[int]], *,
                    optimizer: Optimizer | None = None, budget: Budget | None = None,
                    is_size_known: bool = False, cp: int = 1, divides_experts: bool = False,
                    expert_load: str = EVEN) -> list[TensorCosts]:
    """Return how the devices of each group divide the operators of ``graph``, the full model of ``folded``.

    The groups have the same size and divide the model in the same way, the best for the first of them. ``costs`` are
    those of the folded model. ``is_size_known``: steps have just as many samples as the graph, so that what is inside
    each of them may be divided where samples and positions are one dimension. ``cp`` devices divide the sequence, and
    the rest of a group operators. ``divides_experts``: grouped products are divided by nothing but their experts.
    ``expert_load``: what falls on each of these (``weft.plan.expert_load``).
    """
    shape = tuple(mesh_axes(len(groups[0]), cp).values())
    searches = [MeshSearch(folded, costs, Mesh(costs.cluster, group, shape, comm_fits=costs.comm_fits),
                           optimizer=optimizer or Optimizer(), limit_bytes=None, splits_states=False,
                           budget=budget or Budget(effort=float("inf")), has_context=cp > 1) for group in groups]
    rows = _expert_rows(folded)
    dims = _batch_dims(folded, graph, rows)

    def allowed(parts: ModelParts, index: int) -> Bools | None:
        found = _allowed(parts, index, dims, folded.traced.graph.batch if is_size_known else None)
        return found if found is None or not divides_experts else found & _by_experts(parts.parts[index])

    best = searches[0].run(allowed)
    return [_Table(replace(best, parts=search.parts), folded, graph, costs, search.assembler, expert_load, rows).make()
            for search in searches]


def _expert_rows(folded: FoldedModel) -> dict[fx.Node, Rows]:
    """Return the tensors with rows that may be divided by experts."""
    return find_rows(folded.traced.program.fx_graph.nodes, lambda node: experts_sort(node) is not None, factors_of)


def _batch_dims(folded: FoldedModel, graph: Graph, rows: Mapping[fx.Node, Rows]) -> dict[int, int]:
    """Return for tensors of the folded model the dimension that grows with the batch, where that is known.

    Rows of experts do, too, but to divide them is to divide experts, not samples.
    """
    found, names = {}, folded.traced.program.names_of_nodes
    by_experts = {names.get(node, node.name): item.dim for node, item in rows.items()}
    for tensor, name in enumerate(folded.traced.graph.tensor_names):
        dim = int(graph.tensor_batch_dim[graph.tensor_index[name]]) if name in graph.tensor_index else -1
        if dim >= 0 and by_experts.get(name) != dim:
            found[tensor] = dim
    return found


def _allowed(parts: ModelParts, index: int, dims: Mapping[int, int], batch: int | None) -> Bools | None:
    """Allow the strategies that divide no samples and add up no gradients of matrices.

    ``dims`` are batch dimensions by tensor; with a ``batch`` what is inside each sample may be divided.
    """
    part, layouts = parts.parts[index], parts.resharding.layouts
    if part.kind == "parameter":
        return None
    allowed = np.ones(len(part.seconds), dtype=np.bool_)

    def keep_whole(tensor: int, numbers: I64) -> None:
        dim = dims.get(tensor)
        if dim is not None:
            bad = [any(item.dim == dim and (batch is None or item.blocks % batch > 0) for item in layout)
                   for layout in layouts]
            allowed[:] &= ~np.array(bad, dtype=np.bool_)[numbers]

    for edge in parts.edges:
        if edge.giver == index:
            keep_whole(edge.tensor, part.values[edge.output])
        if edge.reader != index:
            continue
        keep_whole(edge.tensor, edge.reads)
        if part.kind == "op" and edge.is_parameter and edge.returns is not None and len(parts.shape_of(edge)) > 1:
            first = 1 if parts.has_context else 0  # what a context axis adds up is exchanged once a step
            allowed &= np.array([SUM not in layouts[number][first:] for number in edge.returns.tolist()])
    for result in parts.results:
        if result.giver == index:
            keep_whole(result.tensor, part.values[result.output])
    return allowed


def _by_experts(part: ModelPart) -> Bools:
    """Allow an operator that has experts to divide them, and nothing else."""
    op = None if part.choices is None else part.choices.op
    if part.choices is None or op is None or not any(factor.ragged for factor in op.factors):
        return np.ones(len(part.seconds), dtype=np.bool_)
    return np.array([all(choice >= 0 and op.factors[choice].ragged for choice in strategy)
                     for strategy in part.choices.strategies])


def stage_times(found: ShardedModel, folded: FoldedModel, graph: Graph, costs: Costs) -> dict[str, float]:
    """Return the seconds of forward and backward of the whole model on the mesh, sums of parameters' gradients apart.

    ``costs`` are those of the folded model, ``graph`` is that of the full one.
    """
    table = _Table(found, folded, graph, costs, Assembler(found.parts, folded)).make()
    column, multiple = costs.column_of_device[found.mesh.devices[0]], np.array(folded.multiplicities())
    times: dict[str, float] = {}
    for which, phase in enumerate(_PHASES[: 1 + graph.has_backward]):
        whole = costs.op_seconds(phase, 1.0)[:, column]
        part = np.array([table.part[which, graph.op_index[name]] for name in folded.traced.graph.op_names])
        exchanged = table.latency_s[which].sum() + folded.traced.graph.batch * table.s_per_sample[which].sum()
        times[phase] = float((whole * part * multiple).sum() + exchanged)
    return times


class _Table:
    """Fills the arrays, operator by operator of the folded model, for all copies in the full one."""

    def __init__(self, found: ShardedModel, folded: FoldedModel, graph: Graph, costs: Costs,
                 assembler: Assembler, expert_load: str = EVEN, rows: Mapping[fx.Node, Rows] | None = None) -> None:
        self.load, self.rows = expert_load, rows if rows is not None and expert_load != EVEN else {}
        self.found, self.folded, self.graph, self.costs = found, folded, graph, costs
        self.parts, self.assembler = found.parts, assembler
        self.batch = folded.traced.source.batch
        shape = 2, graph.num_ops
        self.part, self.latency, self.rate = np.ones(shape), np.zeros(shape), np.zeros(shape)
        self.saved = np.ones(graph.num_ops)
        places = assembler.places
        self.ops_of = [[graph.op_index[name] for name in full_names(self.parts.parts[index].name, places[index],
                                                                    found.graph, node, folded)]
                       if self.parts.parts[index].kind == "op" else []
                       for node, index in enumerate(found.graph.node_part)]
        """Operators of the full model that each node stands for."""

    def make(self) -> TensorCosts:
        for node, (index, strategy) in enumerate(zip(self.found.graph.node_part, self.found.choice, strict=True)):
            part = self.parts.parts[index]
            if part.choices is not None:
                self._add_op(node, part.name, part.choices, strategy)
        self._add_edges()
        self._add_results()
        sharding = plan_words(self.found, self.folded)
        return TensorCosts(part=self.part, latency_s=self.latency,
                           s_per_sample=self.rate, held_part=self._held(sharding), saved_part=self.saved,
                           summed=self._summed(sharding),
                           sharding=sharding, cp=self.found.mesh.shape[0] if self.parts.has_context else 1)

    def _add_op(self, node: int, name: str, choices: OpChoices, strategy: int) -> None:
        op = self.folded.traced.graph.op_index[name]
        ops = self.ops_of[node]
        column = self.costs.column_of_device[self.found.mesh.devices[0]]
        whole, terms = whole_seconds(self.costs, op, column), self.costs.terms[column]
        for which, own in enumerate(PASSES):
            wanted: dict[Part, float] = {part: whole[part] if part in own else 0.0 for part in PARTS}
            total = sum(wanted.values())
            if total > 0:
                seconds = float(op_seconds(choices, wanted, terms, op)[strategy])
                fixed_s = 0.0 if terms is None else sum(float(terms[part].overhead_s[op]) for part in own)
                fixed_s = fixed_s if fixed_s < min(total, seconds) else 0.0
                part = (seconds - fixed_s) / (total - fixed_s)
                self.part[which, ops] = part
                self.latency[which, ops] += fixed_s * (1 - part)
        uneven = self._uneven(name, choices, strategy)
        self.part[:, ops] *= uneven
        self.saved[ops] = choices.work[strategy] * uneven
        self._add_inside(op, ops, choices, strategy)

    def _uneven(self, name: str, choices: OpChoices, strategy: int) -> float:
        """Return how many times its equal part of an operator the device has to which most rows of experts fall."""
        program, chosen = self.folded.traced.program, choices.strategies[strategy]
        node = program.nodes[program.op_nodes[name][0]]
        counts = split_counts(choices.op, chosen, self.found.mesh.shape) or {}
        for place, item in enumerate(node.all_input_nodes if self.rows else ()):
            rows = self.rows.get(item)
            own = () if rows is None else choices.op.inputs[place][rows.dim]
            count = math.prod(counts.get(index, 1) for index in own)
            if rows is not None and count > 1:
                return largest_share(parse_load(self.load, rows.num_experts), count) * count
        return 1.0

    def _add_inside(self, op: int, ops: list[int], choices: OpChoices, strategy: int) -> None:
        """Add what devices exchange inside an operator where a factor is split that needs it."""
        mesh, column = self.found.mesh, self.costs.column_of_device[self.found.mesh.devices[0]]
        work = [float(pass_seconds(self.costs, op, column, choices, which)[strategy]) for which in (FORWARD, BACKWARD)]
        found, least = (inside_seconds(choices, strategy, mesh, work, size) for size in (1.0, HARDLY))
        for which in (FORWARD, BACKWARD):
            if found[which]:
                self._add(which, ops, found[which], min(least[which], found[which]))

    def _add(self, which: int, ops: Sequence[int], seconds: float, latency_s: float) -> None:
        self.latency[which, ops] += latency_s
        self.rate[which, ops] += (seconds - latency_s) / self.batch

    def _add_edges(self) -> None:
        """Add the collectives between operators; what is between copies counts for all of them alike."""
        graph = self.found.graph
        for edge in self.parts.edges:
            if edge.is_parameter:
                continue  # stored as it is used, and its gradient is no sum
            for source, target, weight in self.assembler.uses(edge, dict(graph.counts), graph.is_woven):
                giver, reader = graph.node_of[source], graph.node_of[target]
                ops = self.ops_of[reader] or self.ops_of[giver]
                if not weight or not ops:
                    continue
                for which in (FORWARD, BACKWARD):
                    seconds, latency_s = (weight / len(ops) * self._moved(which, edge, giver, reader, size)
                                          for size in (edge.num_bytes, HARDLY))
                    self._add(which, ops, seconds, latency_s)

    def _add_results(self) -> None:
        """Add what brings the model's results whole to all devices."""
        for result in self.parts.results:
            size = float(self.folded.traced.graph.tensor_bytes[result.tensor])
            for node, index in enumerate(self.found.graph.node_part):
                if index == result.giver and self.ops_of[node]:
                    seconds, latency_s = (float(self.parts.result_seconds(result, num_bytes)[self.found.choice[node]])
                                          for num_bytes in (size, HARDLY))
                    self._add(FORWARD, self.ops_of[node], seconds, latency_s)

    def _moved(self, which: int, edge: Edge, giver: int, reader: int, num_bytes: float) -> float:
        """Return the seconds to bring an edge's value to its reader, or the gradient back, if it has so many bytes."""
        part, shape = self.parts.parts[edge.giver], self.parts.shape_of(edge)
        own, other = self.found.choice[giver], self.found.choice[reader]
        if which == FORWARD:
            ends = part.values[edge.output][own], edge.reads[other]
        elif edge.returns is None:
            return 0.0
        else:
            ends = edge.returns[other], part.gradients[edge.output][own]
        source, target = (np.array([end], dtype=np.int64) for end in ends)
        return float(self.parts.resharding.matrix(source, target, num_bytes, shape)[0, 0])

    def _summed(self, sharding: Sharding) -> frozenset[int]:
        first = 1 if self.parts.has_context else 0
        return frozenset(int(tensor) for tensor in self.graph.parameters if SUM in parse_layout(
            sharding.tensors.get(self.graph.tensor_names[tensor], ())).gradient[first:])

    def _held(self, sharding: Sharding) -> F64:
        held = np.ones(self.graph.num_tensors)
        for name, words in sharding.tensors.items():
            tensor = self.graph.tensor_index.get(name)
            if tensor is not None:
                held[tensor] = largest_part(self.graph.tensor_shapes[tensor], parse_layout(words).value,
                                            self.found.mesh.shape)
        return held
