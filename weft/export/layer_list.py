"""Where a plan cuts the list of a model's layers: what tools need that give whole layers to devices.

    transformer.wte | transformer.h.0 ... transformer.h.11 | transformer.ln_f, lm_head
    before          | layers                               | after

The layers are the numbered modules of the model's one list. *Before* and *after* are the modules with parameters
outside it, by whether they run before the first layer. Operators without parameters outside the list (positions, masks)
cost next to nothing and every tool has its own, so they do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.base.errors import InputError
from weft.model.graph import Graph
from weft.plan.plan import Plan

PRODUCTS: Final = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")
"""Kinds of operators that multiply by a matrix of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """The layers of a model and the stage of each."""

    path: str
    """Of the list: ``transformer.h``."""
    stages: tuple[int, ...]
    """By layer: index into ``Plan.stages``."""
    before: Mapping[str, int]
    """Modules with parameters that run before the layers, with their stages."""
    after: Mapping[str, int]
    """Those that run after them."""
    notes: tuple[str, ...] = ()
    """Layers and modules that are cut in the plan, and where they are now."""

    def counts(self, num_stages: int) -> tuple[int, ...]:
        """Return how many layers each stage has."""
        return tuple(self.stages.count(stage) for stage in range(num_stages))

    def in_order(self) -> Iterator[tuple[str, int]]:
        """Yield (module, stage) in the order in which they run."""
        yield from self.before.items()
        yield from ((f"{self.path}.{index}", stage) for index, stage in enumerate(self.stages))
        yield from self.after.items()


def find_layers(plan: Plan, graph: Graph, *, tool: str, nearest: bool = False) -> LayerList:
    """Return the model's layers with their stages; raise ``InputError`` if there is no one list, or a layer is cut.

    With ``nearest`` a layer that is cut goes to the stage that has most of its work. ``tool`` is who wants to know, for
    messages. The stages must come in the order in which data flows.
    """
    blocks = [_block(path) for path in graph.op_modules]
    path, layers = _the_list(blocks, graph, tool)
    parts = _parts(plan, graph, blocks, tool)
    notes: list[str] = []
    found = {unit: _resolve(plan, graph, unit, ops, tool, notes if nearest else None) for unit, ops in parts.items()}
    begin = min(op for layer in layers for ops in parts[layer].values() for op in ops)
    ahead = {unit for unit, ops in parts.items() if unit not in layers and min(map(min, ops.values())) < begin}
    result = LayerList(
        path=path, stages=tuple(found[layer] for layer in layers), notes=tuple(notes),
        before={unit: stage for unit, stage in found.items() if unit in ahead},
        after={unit: stage for unit, stage in found.items() if unit not in ahead and unit not in layers})
    _check_flow(result, plan, tool)
    return result


def _parts(plan: Plan, graph: Graph, blocks: list[str], tool: str) -> dict[str, dict[int, list[int]]]:
    """Return for each layer, and for each module with parameters outside of layers, its operators by stage."""
    is_parameter = np.zeros(graph.num_tensors, dtype=bool)
    is_parameter[graph.parameters] = True
    parts: dict[str, dict[int, list[int]]] = {}
    for op, stage in enumerate(_stage_of_ops(plan, graph, tool)):
        if stage >= 0 and (blocks[op] or is_parameter[graph.op_inputs(op)].any()):
            parts.setdefault(blocks[op] or graph.op_modules[op], {}).setdefault(stage, []).append(op)
    return parts


def _resolve(plan: Plan, graph: Graph, unit: str, ops: Mapping[int, list[int]], tool: str,
             notes: list[str] | None) -> int:
    """Return the stage of a layer or module; one that is cut is an error, or noted and given to the larger part."""
    if len(ops) == 1:
        return next(iter(ops))
    one, other = list(ops)[:2]
    if notes is None:
        raise InputError(
            f"{unit!r} is cut: operator {graph.op_names[ops[one][0]]!r} is in stage {plan.stages[one].name!r} and "
            f"{graph.op_names[ops[other][0]]!r} in stage {plan.stages[other].name!r}, but {tool} gives whole layers to "
            "devices. Try a plan that cuts between layers (weft plan --strategy gpipe or 1f1b), or --nearest to give "
            "it to the stage with the larger part")
    work = {stage: float(graph.flops[members].sum()) for stage, members in ops.items()}
    best = max(work, key=lambda stage: (work[stage], len(ops[stage]), -stage))
    part = work[best] / (sum(work.values()) or 1.0)
    notes.append(f"{unit!r} is cut in the plan: all of it goes to stage {plan.stages[best].name!r}, which has "
                 f"{100 * part:.0f} % of its work")
    return best


def _block(path: str) -> str:
    """Return the path up to its first number: the layer of a list that a module is in, or ``""``."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ""


def _the_list(blocks: list[str], graph: Graph, tool: str) -> tuple[str, list[str]]:
    """Return the path of the model's list of layers, and the layers in order."""
    lists: dict[str, set[int]] = {}
    for block in blocks:
        if block:
            path, _, number = block.rpartition(".")
            lists.setdefault(path, set()).add(int(number))
    if len(lists) != 1:
        what = "no list of layers" if not lists else f"{len(lists)} lists of layers ({', '.join(sorted(lists)[:4])})"
        raise InputError(f"model {graph.name!r} has {what}, but {tool} divides one: it is for models such as decoders, "
                         "whose layers are all in one list")
    path, numbers = next(iter(lists.items()))
    if numbers != set(range(len(numbers))):
        raise InputError(f"the layers of {path!r} in model {graph.name!r} are numbered {sorted(numbers)[:8]}: {tool} "
                         "counts them from 0, without gaps")
    return path, [f"{path}.{number}" for number in range(len(numbers))]


def _stage_of_ops(plan: Plan, graph: Graph, tool: str) -> list[int]:
    """Return the stage of every operator; -1 for constants, which any stage computes for itself."""
    found = [-1] * graph.num_ops
    for index, stage in enumerate(plan.stages):
        for name in stage.ops:
            op = graph.op_index[name]
            if graph.is_constant[op]:
                continue
            if found[op] >= 0:
                raise InputError(f"operator {name!r} is in the stages {plan.stages[found[op]].name!r} and "
                                 f"{stage.name!r}, for different micro-batches: {tool} cannot say that. Export a plan "
                                 "of one pipeline")
            found[op] = index
    return found


def _check_flow(layers: LayerList, plan: Plan, tool: str) -> None:
    """Raise ``InputError`` unless the stages follow each other along the model, with something in each."""
    last, before = 0, ""
    for module, stage in layers.in_order():
        if stage not in (last, last + 1) or (not before and stage):
            where = f"{module!r} is in stage {plan.stages[stage].name!r} (stages[{stage}])"
            behind = f", behind {before!r} in {plan.stages[last].name!r} (stages[{last}])" if before else ""
            raise InputError(f"{where}{behind}: {tool} needs stages that follow each other along the model, listed in "
                             "this order")
        last, before = stage, module
    if last != len(plan.stages) - 1:
        raise InputError(f"stage {plan.stages[last + 1].name!r} (stages[{last + 1}]) has no layer and no module with "
                         f"parameters: {tool} has nothing to put there. Try fewer stages")


def products(graph: Graph, ops: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield those of the operators that multiply by a matrix of parameters (or a view of one), each with its matrix."""
    parameters = set(graph.parameters.tolist())
    for op in ops:
        inputs = graph.op_inputs(op).tolist() if graph.op_kinds[op].startswith(PRODUCTS) else []
        owners = (tensor if tensor in parameters else int(graph.tensor_base[tensor]) for tensor in inputs)
        found = (owner for owner in owners if owner in parameters and len(graph.tensor_shapes[owner]) == 2)
        yield from ((op, owner) for owner in itertools.islice(found, 1))
