"""Sufficient factors: which operators' weight gradients are products of two thin matrices, and how thin they are.

The gradient of a linear operator's weight is ``left^T right``: one matrix holds the rows of its input, the other those
of its output's gradient, one row for each sample and position. Devices that exchange these rows instead of the product
form the whole gradient themselves; that of a bias is the sum of the rows of the output's gradient. An operator counts
as linear if its kind is in ``LINEAR_KINDS`` and the parameter, or its transpose, is the matrix on the right.

A parameter that something else reads too (an embedding that is also the head) has a second part of its gradient, which
is computed as usual and summed over the devices as it is: such parameters are ``shared``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from weft.model.graph import NO_BATCH_DIM, Graph, TensorRole

if TYPE_CHECKING:
    from weft.plan.program import Bucket, Program

LINEAR_KINDS: Final = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")
_TRANSPOSES: Final = ("aten.t", "aten.transpose", "aten.permute")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearUse:
    """A linear operator as the user of its parameters."""

    op: int
    weight: int
    """Tensor id of the parameter, also where the operator reads its transpose."""
    bias: int | None
    transpose: int | None
    """The operator that transposes the parameter for this one."""
    gradient_left: bool
    """The rows of the output's gradient are ``left`` (``x W^T``), else they are ``right`` (``x W``)."""
    input: int
    """Tensor id of what is multiplied by the weight."""
    takes_input_of: int | None = None
    """An earlier use of the exchange, by its place, with the same input: its rows are gathered once for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What an exchange of factors gathers."""

    uses: tuple[LinearUse, ...]
    """The linear operators that read a weight of the exchange, in the graph's order; ``bias`` only if it takes part."""
    shared: tuple[int, ...]
    """Parameters of the exchange that other operators read too."""


NO_FACTORS: Final = Factors(uses=(), shared=())


def find_factors(graph: Graph, parameters: Collection[int]) -> Factors:
    """Return the linear operators whose factors give the gradients of ``parameters`` (tensor ids)."""
    chosen = frozenset(parameters)
    readers = _readers(graph, chosen)
    uses = [use for weight in sorted(chosen) for use in _linear_uses(graph, weight, readers)]
    kept = sorted((replace(use, bias=use.bias if use.bias in chosen else None) for use in uses),
                  key=lambda use: use.op)
    explained: dict[int, set[int]] = {tensor: set() for tensor in chosen}
    for use in kept:
        explained[use.weight].add(use.op if use.transpose is None else use.transpose)
        if use.bias is not None:
            explained[use.bias].add(use.op)
    shared = tuple(tensor for tensor in sorted(chosen) if set(readers[tensor]) - explained[tensor])
    return Factors(uses=tuple(kept), shared=shared)


def _readers(graph: Graph, tensors: Collection[int]) -> dict[int, list[int]]:
    """Return the operators that read each of the tensors, and each of their transposes."""
    readers: dict[int, list[int]] = {}
    wanted = list(tensors)
    for _ in range(2):  # the parameters, then what transposes make of them
        places = np.flatnonzero(np.isin(graph.inputs, wanted))
        for tensor, op in zip(graph.inputs[places].tolist(), graph.consumer_op[places].tolist(), strict=True):
            readers.setdefault(tensor, []).append(op)
        wanted = [int(output) for tensor in wanted for op in readers.setdefault(tensor, [])
                  if graph.op_kinds[op] in _TRANSPOSES for output in graph.op_outputs(op)]
    return readers


def _linear_uses(graph: Graph, weight: int, readers: Mapping[int, list[int]]) -> Iterator[LinearUse]:
    if len(graph.tensor_shapes[weight]) != 2:
        return
    for op in readers[weight]:
        if graph.op_kinds[op] not in _TRANSPOSES:
            yield from _linear_use(graph, op, weight, weight, None)
            continue
        transposed = int(graph.op_outputs(op)[0])
        linear = [use for reader in readers[transposed] for use in _linear_use(graph, reader, transposed, weight, op)]
        if len(linear) == len(readers[transposed]):  # else its gradient is not a product of rows alone
            yield from linear


def _linear_use(graph: Graph, op: int, factor: int, weight: int, transpose: int | None) -> Iterator[LinearUse]:
    """Yield the operator if ``factor``, the weight or its transpose, is the matrix on its right and nothing else."""
    read = graph.op_inputs(op).tolist()
    kind, count = graph.op_kinds[op], len(read)
    bias: int | None = None
    if kind == "aten.linear" and transpose is None and count in (2, 3):
        x, right = read[:2]
        bias = read[2] if count == 3 else None
    elif kind == "aten.addmm" and count == 3:
        bias, x, right = read
    elif kind in ("aten.mm", "aten.matmul") and count == 2 and len(graph.tensor_shapes[read[0]]) >= 2:
        x, right = read
    else:
        return
    if right == factor and x not in (factor, weight) and _is_plain_bias(graph, bias, op) and bias != weight:
        yield LinearUse(op=op, weight=weight, bias=bias, transpose=transpose,
                        gradient_left=kind == "aten.linear" or transpose is not None, input=x)


def _is_plain_bias(graph: Graph, bias: int | None, op: int) -> bool:
    """Return whether there is no bias, or one parameter for each column of the output."""
    if bias is None:
        return True
    width = graph.tensor_shapes[int(graph.op_outputs(op)[0])][-1:]
    return graph.tensor_role[bias] == TensorRole.PARAMETER and math.prod(graph.tensor_shapes[bias]) == math.prod(width)


def share_inputs(factors: Factors, stages: Sequence[Collection[int]]) -> Factors:
    """Return the factors with inputs that several uses have in common gathered once.

    ``stages`` are the operators of each. Rows come in the order in which stages run, so only uses that are always in
    the same stages can share them.
    """
    homes = [tuple(index for index, ops in enumerate(stages) if use.op in ops) for use in factors.uses]
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    uses = []
    for place, (use, home) in enumerate(zip(factors.uses, homes, strict=True)):
        owner = first.setdefault((use.input, home), place)
        uses.append(replace(use, takes_input_of=None if owner == place else owner))
    return replace(factors, uses=tuple(uses))


def factor_widths(graph: Graph, use: LinearUse) -> tuple[int, int]:
    """Return the length of a row of the input and of a row of the output's gradient."""
    left, right = graph.tensor_shapes[use.weight]
    return (right, left) if use.gradient_left else (left, right)


def num_rows(graph: Graph, op: int, num_samples: int) -> int:
    """Return how many rows the factors of a linear operator have for so many samples."""
    output = int(graph.op_outputs(op)[0])
    rows = math.prod(graph.tensor_shapes[output][:-1])
    is_batched = graph.tensor_batch_dim[output] != NO_BATCH_DIM
    return rows * num_samples // graph.batch if is_batched else rows


def bucket_rows(program: Program, bucket: Bucket) -> dict[int, tuple[int, ...]]:
    """Return, for each rank of the bucket, the rows that it has for each use over all micro-batches of a step."""
    rows = {rank: [0] * len(bucket.factors.uses) for rank in bucket.ranks}
    inside = [frozenset(ops.tolist()) for ops in program.stage_ops]
    for item in program.instances:
        for number, use in enumerate(bucket.factors.uses):
            if use.op in inside[item.stage] and item.ranks[0] in rows:
                count = num_rows(program.graph, use.op, item.num_samples) * len(item.microbatches)
                rows[item.ranks[0]][number] += count
    return {rank: tuple(counts) for rank, counts in rows.items()}


def block_size(graph: Graph, factors: Factors, rows: Sequence[int]) -> int:
    """Return how many elements the factors of all uses have together, with these numbers of rows."""
    total = 0
    for use, count in zip(factors.uses, rows, strict=True):
        inputs, gradients = factor_widths(graph, use)
        total += count * (gradients + (inputs if use.takes_input_of is None else 0))
    return total
