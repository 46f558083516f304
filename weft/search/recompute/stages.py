"""What a stage makes again, by the user's word: only attention, or what a budget of bytes asks for."""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64, Graph
from weft.plan.saving import repeated_ops, saved_names
from weft.search.recompute.choose import Choice, Chooser
from weft.search.recompute.pieces import PlacedPiece, pieces_of

AT_ONCE: Final = (1, 2, 4, 8)
"""So many repeated modules may be made again together: fewer tensors between them are kept then."""
_ATTENTION: Final = "scaled_dot_product_attention"
_SOFTMAX: Final = frozenset({"aten.softmax", "aten._softmax"})
_PRODUCTS: Final = frozenset({"aten.matmul", "aten.bmm", "aten.baddbmm", "aten.einsum"})
_MAX_CHAIN: Final = 12
"""Operators between a product and the softmax of what it gives."""

SELECTIVE: Final = "selective"


def chosen_again(graph: Graph, ops: I64, how: str | int, *, seconds: F64, fraction: float) -> I64:
    """Return the operators of a stage that run again: attention if ``how`` is selective, else to keep so many bytes.

    The bytes are those of one micro-batch, ``fraction`` of the traced batch; ``seconds`` are the forwards'.
    """
    if isinstance(how, str):
        return attention_ops(graph, ops)
    choice, placed = choose_within(graph, ops, how, seconds=seconds, fraction=fraction)
    return again_of(choice, placed)


def choose_within(graph: Graph, ops: I64, budget: float, *, seconds: F64,
                  fraction: float) -> tuple[Choice, list[PlacedPiece]]:
    """Return the best choice within a budget, and the pieces it is for; raise ``NoFeasiblePlan`` if there is none."""
    best: tuple[Choice, list[PlacedPiece]] | None = None
    misses: list[NoFeasiblePlan] = []
    for at_once in AT_ONCE:
        placed = pieces_of(graph, ops, seconds=seconds, fraction=fraction, at_once=at_once)
        try:
            choice = Chooser([item.piece for item in placed])(budget)
        except NoFeasiblePlan as miss:
            misses.append(miss)
            continue
        if best is None or choice.extra_s < best[0].extra_s * (1 - 1e-9):
            best = choice, placed
        if best[0].extra_s <= choice.bound_s or at_once > 1:
            break
    if best is None:
        raise min(misses, key=lambda miss: miss.missing_bytes or 0)
    return best


def again_of(choice: Choice, placed: list[PlacedPiece]) -> I64:
    """Return the operators that run again with a choice for these pieces."""
    return np.asarray(sorted(op for option, item in zip(choice.options, placed, strict=True)
                             for op, flag in zip(item.ops, option.again, strict=True) if flag), dtype=np.int64)


def attention_ops(graph: Graph, ops: I64) -> I64:
    """Return the operators of attention in a stage: between the projections to queries, keys, values and from there."""
    inside = frozenset(ops.tolist())
    found = {op for op in inside if _ATTENTION in graph.op_kinds[op]}
    for op in inside:
        if graph.op_kinds[op] in _SOFTMAX:
            found |= _between_products(graph, op, inside)
    seeds = np.asarray(sorted(found), dtype=np.int64)
    if not len(seeds):
        return seeds
    names = saved_names(graph, ops, seeds)
    return repeated_ops(graph, ops, [graph.tensor_index[name] for name in names]) if names else seeds


def _between_products(graph: Graph, softmax: int, inside: frozenset[int]) -> set[int]:
    """Return a softmax with what leads from one product to it and on to the next; none without such products."""
    up = _walk(graph, softmax, inside, upward=True)
    down = _walk(graph, softmax, inside, upward=False)
    return up | down if up and down else set()


def _walk(graph: Graph, softmax: int, inside: frozenset[int], *, upward: bool) -> set[int]:
    found, stack, ends = {softmax}, [softmax], False
    while stack and len(found) <= _MAX_CHAIN:
        op = stack.pop()
        if upward:
            around = [int(graph.tensor_producer[tensor]) for tensor in graph.op_inputs(op).tolist()]
        else:
            made = graph.op_outputs(op)
            around = graph.consumer_op[np.isin(graph.inputs, made)].tolist()
        for other in around:
            if other in inside and other not in found and not graph.is_constant[other]:
                found.add(other)
                if graph.op_kinds[other] in _PRODUCTS:
                    ends = True
                else:
                    stack.append(other)
    return found if ends and len(found) <= _MAX_CHAIN else set()
