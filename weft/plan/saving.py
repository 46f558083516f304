"""What a stage keeps for its backward by name, and which operators it runs again then.

A stage with ``saved`` tensors keeps those, as far as something needs them, and makes everything else again that its
backward needs: ``repeated_ops`` says with which operators. An operator of which a result is named is not run again, so
what it keeps inside (a mask, statistics) stays as well. Operators that run again and read one another are a *bundle*:
all of it runs once, just before the first backward that needs some of it, and what it gives goes with the last.

    saved:      x             q, k, v                   y
    forward:    x -> linear -> q, k, v -> attention -> a -> linear -> y
    backward:                            [attention]   needs a        (a bundle of one operator)

This rule is the one place for the account of memory, the times and the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.model.graph import I64, Bool, Graph, TensorRole
from weft.plan.plan import Stage


def made_storages(graph: Graph, op: int) -> list[int]:
    """Return the tensors of an operator that are no views."""
    return [tensor for tensor in graph.op_outputs(op).tolist() if graph.tensor_base[tensor] < 0]


def repeated_ops(graph: Graph, ops: I64, saved: Sequence[int]) -> I64:
    """Return the operators of a stage that run again before its backward where it keeps the tensors ``saved``."""
    kept, inside = frozenset(graph.memory_root[list(saved)].tolist()), np.zeros(graph.num_ops, dtype=bool)
    inside[ops] = True
    again: set[int] = set()
    stack = [op for op in ops.tolist() if kept.isdisjoint(roots := made_storages(graph, op)) and (
        graph.saved_inside_bytes[op] > 0 or graph.is_saved[roots].any())]
    while stack:
        op = stack.pop()
        if op not in again:
            again.add(op)
            stack += [int(graph.tensor_producer[tensor]) for tensor in graph.op_inputs(op).tolist()
                      if _is_made_again(graph, tensor, inside, kept)]
    views = (op for op in ops.tolist() if not made_storages(graph, op))
    again.update(op for op in views if any(
        int(graph.tensor_producer[graph.memory_root[tensor]]) in again for tensor in graph.op_outputs(op).tolist()))
    return np.asarray(sorted(again), dtype=np.int64)


def _is_made_again(graph: Graph, tensor: int, inside: Bool, kept: frozenset[int]) -> bool:
    """Return whether a tensor that is read by what runs again must be made again as well."""
    root = int(graph.memory_root[tensor])
    maker = int(graph.tensor_producer[root])
    return maker >= 0 and bool(inside[maker]) and root not in kept and graph.tensor_role[root] == TensorRole.ACTIVATION


def repeated_in(graph: Graph, ops: I64, stage: Stage) -> I64:
    """Return the operators that a stage of a plan, with these operators, runs again before or in its backward."""
    if not stage.recompute:
        return np.zeros(0, dtype=np.int64)
    if stage.keeps_only_inputs:
        return ops
    return repeated_ops(graph, ops, [graph.tensor_index[name] for name in stage.saved])


def kept_storages(graph: Graph, ops: I64, stage: Stage) -> Bool:
    """Return which storages a stage keeps for its backward, if it has them: inputs count as well."""
    if not stage.recompute or stage.keeps_only_inputs:
        return graph.is_saved
    return changed_by(graph, repeated_in(graph, ops, stage))


def changed_by(graph: Graph, again: I64) -> Bool:
    """Return ``graph.is_saved`` without what the operators ``again`` make, and with what they read."""
    kept = graph.is_saved.copy()
    for op in again.tolist():
        kept[graph.memory_root[graph.op_inputs(op)]] = True
    for op in again.tolist():
        kept[graph.op_outputs(op)] = False
    return kept


def saved_names(graph: Graph, ops: I64, again: I64) -> tuple[str, ...]:
    """Return the tensors to name so that exactly the operators ``again`` of a stage run again.

    Of each other operator that has something for the backward, or for those, one result is enough.
    """
    repeated = frozenset(again.tolist())
    read = {int(graph.memory_root[tensor]) for op in repeated for tensor in graph.op_inputs(op).tolist()}
    return tuple(graph.tensor_names[roots[0]] for op in ops.tolist()
                 if op not in repeated and (roots := made_storages(graph, op)) and (
                     graph.saved_inside_bytes[op] > 0 or graph.is_saved[roots].any() or not read.isdisjoint(roots)))


def bundles(graph: Graph, again: I64) -> list[list[int]]:
    """Return the operators that are run again in bundles: those that read one another, in the order of the model."""
    group = {op: op for op in again.tolist()}

    def find(op: int) -> int:
        while group[op] != op:
            group[op] = group[group[op]]
            op = group[op]
        return op

    for op in group:
        for tensor in graph.op_inputs(op).tolist():
            maker = int(graph.tensor_producer[tensor])
            if maker in group:
                group[find(op)] = find(maker)
    found: dict[int, list[int]] = {}
    for op in group:
        found.setdefault(find(op), []).append(op)
    return sorted(found.values())


def saving_problems(graph: Graph, ops: I64, stage: Stage, where: str) -> Iterator[str]:
    """Yield what is wrong with the tensors that a stage says it keeps."""
    if not stage.saved:
        return
    if not stage.recompute:
        yield (f"{where}.saved names tensors, but {where}.recompute is false: the stage keeps everything. Set "
               "recompute to true, or remove saved")
        return
    inside = frozenset(ops.tolist())
    for name in sorted({name for name in stage.saved if stage.saved.count(name) > 1}) if len(
            set(stage.saved)) < len(stage.saved) else ():
        yield f"{where}.saved names {name!r} more than once"
    for name in stage.saved:
        tensor = graph.tensor_index.get(name)
        if tensor is None:
            yield f"{where}.saved names {name!r}, which is not a tensor of the model"
        elif int(graph.tensor_producer[int(graph.memory_root[tensor])]) not in inside:
            yield (f"{where}.saved names {name!r}, which no operator of the stage makes: only what a stage makes can "
                   "be kept or made again (its inputs and parameters are there anyway)")
