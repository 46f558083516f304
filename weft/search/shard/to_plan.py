"""From a sharding that was found to a plan that runs: one stage on all devices of the mesh, in the plan's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from weft.base.errors import PlanError
from weft.cluster.cluster import DeviceId
from weft.model.folded import FoldedModel
from weft.model.graph import Graph
from weft.plan.plan import Plan, Sharding, with_search
from weft.plan.sharding import TensorLayout, format_layout, usual_gradient
from weft.search.common.problem import CONTEXT_AXIS, TENSOR_AXIS, Problem, StageSpec, one_stage
from weft.search.shard.folded_graph import MIDDLE, Assembler, FoldedGraph, Place
from weft.search.shard.model_search import ShardedModel
from weft.search.shard.parts import ModelParts
from weft.sharding.tensor_layout import SUM, WHOLE, Layout

AXES: Final = {1: ("tensor",), 2: ("data", "tensor"), 3: ("outer", "data", "tensor")}
"""Names of a mesh's axes, by their number."""


def plan_words(found: ShardedModel, folded: FoldedModel) -> Sharding:
    """Return what every operator and tensor of the full model does, in the words of a plan."""
    ops: dict[str, tuple[str, ...]] = {}
    assembler = Assembler(found.parts, folded)
    parts, layouts, places = found.parts, found.parts.resharding.layouts, assembler.places
    tensors: dict[str, tuple[str, ...]] = {}
    made: dict[str, tuple[str, ...]] = {}
    for name, layout, read in _activations(found, assembler):
        if any(item.is_split for item in read.value):
            tensors[name] = format_layout(read)
        if any(item != own and (item.is_split or (item == SUM and own.is_split))
               for item, own in zip(layout, read.value, strict=True)):
            made[name] = tuple(map(str, layout))
    returned = _returned(parts, found)
    for node, (index, strategy) in enumerate(zip(found.graph.node_part, found.choice, strict=True)):
        part = parts.parts[index]
        if part.kind == "op":
            assert part.choices is not None
            table, words = ops, part.choices.words[strategy]
        else:
            value = layouts[part.values[0][strategy]]
            gradient = layouts[part.gradients[0][strategy]]
            if part.kind == "parameter":
                if any(a != b for a, b in zip(value, gradient, strict=True)):
                    raise PlanError(f"{part.name!r} is whole but its optimizer states are not: this cannot be run yet")
                gradient = tuple(SUM if own == WHOLE and axis in returned[node] else own
                                 for axis, own in enumerate(gradient))
            table, words = tensors, format_layout(TensorLayout(value, gradient))
        if any(word not in ("", "R") for word in words):
            for name in full_names(part.name, places[index], found.graph, node, folded):
                table[name] = words
    return Sharding(ops=ops, tensors=tensors, made=made)


def _activations(found: ShardedModel, assembler: Assembler) -> Iterator[tuple[str, Layout, TensorLayout]]:
    """Yield operators' results by name, how they are made, and how they are read.

    The runtime finds the same from the factors; said in the plan, what devices hold is known without them.
    """
    parts, graph, names = found.parts, found.graph, assembler.folded.traced.graph.tensor_names
    layouts = parts.resharding.layouts
    wanted: dict[tuple[int, int, str], set[TensorLayout]] = {}
    for edge in parts.edges:
        if parts.parts[edge.giver].kind != "op":
            continue
        suffix = names[edge.tensor].removeprefix(parts.parts[edge.giver].name)  # such as ":1"
        for source, target, weight in assembler.uses(edge, graph.counts, graph.is_woven):
            if weight:
                strategy = found.choice[graph.node_of[target]]
                value = layouts[edge.reads[strategy]]
                gradient = usual_gradient(value) if edge.returns is None else layouts[edge.returns[strategy]]
                key = graph.node_of[source], edge.output, suffix
                wanted.setdefault(key, set()).add(TensorLayout(value, gradient))
    for (node, output, suffix), items in wanted.items():
        read = items.pop()
        if not items:  # else equal layers are read in unlike ways
            part = graph.node_part[node]
            made = layouts[parts.parts[part].values[output][found.choice[node]]]
            for name in full_names(parts.parts[part].name, assembler.places[part], graph, node, assembler.folded):
                yield name + suffix, made, read


def _returned(parts: ModelParts, found: ShardedModel) -> list[set[int]]:
    """Return, for each node that is a parameter, the axes over which some reader returns its gradient as a sum."""
    layouts = parts.resharding.layouts
    chosen: dict[int, list[int]] = {}
    for index, strategy in zip(found.graph.node_part, found.choice, strict=True):
        chosen.setdefault(index, []).append(strategy)
    sums: dict[int, set[int]] = {}
    for edge in parts.edges:
        if edge.is_parameter and edge.returns is not None:
            for strategy in chosen[edge.reader]:
                layout = layouts[edge.returns[strategy]]
                sums.setdefault(edge.giver, set()).update(axis for axis, own in enumerate(layout) if own == SUM)
    return [sums.get(index, set()) for index in found.graph.node_part]


def full_names(name: str, place: Place | None, graph: FoldedGraph, node: int, folded: FoldedModel) -> Iterator[str]:
    """Yield what a part of the reduced model is called in each copy of the full model that the node stands for."""
    if place is None or place.copy != MIDDLE:
        yield name
        return
    run = folded.runs[place.run]
    counts, variant = graph.counts[place.run], graph.node_variant[node]
    begin = run.kept[MIDDLE]
    if graph.is_woven and len(counts) == 2:
        positions = range(begin + variant, begin + sum(counts), 2)
    else:
        positions = range(begin + sum(counts[:variant]), begin + sum(counts[: variant + 1]))
    for position in positions:
        yield folded.full_name(run, MIDDLE, name, position)


def sharded_plan(problem: Problem, found: ShardedModel, folded: FoldedModel,
                 times: Mapping[str, float] | None = None) -> Plan:
    """Return the plan of one stage on the mesh's devices; ``problem.graph`` is the full model's.

    ``times`` are the stage's seconds by phase, collectives inside included (``tensor_costs.stage_times``).
    """
    graph: Graph = problem.graph
    words = plan_words(found, folded)
    known = set(graph.op_names)
    missing = [name for name in words.ops if name not in known]
    if missing:
        raise PlanError(f"the model has no operator {missing[0]!r}, which its folded form has")
    devices = tuple(DeviceId(device) for device in found.mesh.devices)
    names = (CONTEXT_AXIS, TENSOR_AXIS)[: len(found.mesh.shape)] if found.parts.has_context else AXES[len(
        found.mesh.shape)]
    mesh = dict(zip(names, found.mesh.shape, strict=True))
    spec = StageSpec(ops=np.arange(graph.num_ops), replicas=((devices, 1.0),), sharding=words, mesh=mesh,
                     times=() if times is None else (times,))
    plan = one_stage(problem, spec, 1, by="shard")
    return with_search(plan, status=found.status, step_time=found.seconds, bound=found.bound)
