"""A plain way to spread operators over the devices of a replica: split large parameters, and follow what is split.

It looks at one operator after another, once. Where an operand is split, the operator is split likewise, if it can be;
where none is, an operator with a large matrix is split along the matrix's longest dimension, and all others are not.
Sums are taken where they come up, except that views of them are sums as well.
For transformers this gives what Megatron-LM does: the first matrix of a pair by columns, the second by rows, attention
by heads, and embedding, head and loss by the vocabulary. It weighs no costs: ``weft.search.shard`` does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from weft.plan.plan import Sharding
from weft.plan.sharding import SplitOp, TensorLayout, format_layout, parse_strategy
from weft.sharding.factors import (
    NOT_SPLIT,
    OpFactors,
    Strategy,
    input_layout,
    is_valid,
    linear_choice,
    output_layout,
    work_part,
)
from weft.sharding.named_ops import NamedOp
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement


def spread(ops: Mapping[str, NamedOp], shapes: Mapping[str, Sequence[int]], num_devices: int, *,
           stored: Mapping[str, Layout] | None = None, leaving: Set[str] = frozenset()) -> Sharding:
    """Return how a stage of these operators, in order, is spread over one axis of so many devices.

    ``shapes`` are those of the model's parameters. ``stored`` are parameters that another stage on the same devices
    holds already, which decides how they are stored here. ``leaving`` are tensors that others read, too: whole.
    """
    mesh = (num_devices,)
    chosen: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, Placement] = {name: layout[0] for name, layout in (stored or {}).items()}
    read: dict[str, set[Placement]] = {tensor: {WHOLE} for tensor in leaving}
    num_readers = Counter(tensor for op in ops.values() for tensor in op.inputs)
    for name, op in ops.items():
        takes_sums = len(op.inputs) == 1 and num_readers[op.inputs[0]] == 1
        strategy = _choose(op, layouts, shapes, num_devices, takes_sums=takes_sums)
        if op.factors is None or strategy == (NOT_SPLIT,):
            for tensor in op.inputs:
                read.setdefault(tensor, set()).add(WHOLE)
            continue
        chosen[name] = (_word(op.factors, strategy[0]),)
        for position, tensor in enumerate(op.inputs):
            place = input_layout(op.factors, strategy, mesh, position)[0]
            read.setdefault(tensor, set()).add(place)
            if tensor in shapes:
                layouts.setdefault(tensor, place)
        for position, tensor in enumerate(op.outputs[: len(op.factors.outputs)]):
            layouts[tensor] = output_layout(op.factors, strategy, mesh, position)[0]
    sharding = with_stored_parameters(chosen, ops, shapes, mesh, stored=stored)
    tensors, made = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    for tensor, place in layouts.items():
        if tensor in shapes:
            continue
        found = read.get(tensor, set())
        wanted = next(iter(found)) if len(found) == 1 else WHOLE
        if place.is_split and place in found:
            tensors[tensor] = str(place),
        elif place.is_split or wanted.is_split:
            made[tensor] = str(place),
            if wanted.is_split:
                tensors[tensor] = str(wanted),
    return Sharding(ops=sharding.ops, tensors={**tensors, **sharding.tensors}, made=made)


def _word(op: OpFactors, choice: int) -> str:
    return op.factors[choice].name if choice >= 0 else f"+{-2 - choice}"


def _choose(op: NamedOp, layouts: Mapping[str, Placement], shapes: Mapping[str, Sequence[int]],
            count: int, *, takes_sums: bool) -> Strategy:
    """Return the strategy that fits most of the split operands, else splits the largest matrix, with least work."""
    if op.factors is None:
        return (NOT_SPLIT,)
    held = [(position, layouts[name]) for position, name in enumerate(op.inputs)
            if name in layouts and (layouts[name].is_split or (layouts[name] == SUM and takes_sums))]
    best = (0, 0, -1.0)
    found: Strategy = (NOT_SPLIT,)
    for strategy in _strategies(op.factors, count):
        fits = sum(input_layout(op.factors, strategy, (count,), position)[0] == place for position, place in held)
        matrix = max((math.prod(shapes[name]) for position, name in enumerate(op.inputs)
                      if _cuts_longest(op.factors, strategy, count, position, shapes.get(name, ()))), default=0)
        key = (fits, matrix, -work_part(op.factors, strategy, (count,)))
        if key > best and (fits or (matrix and not held)):
            best, found = key, strategy
    return found


def _strategies(op: OpFactors, count: int) -> Iterator[Strategy]:
    choices = [*range(len(op.factors)), *(linear_choice(index) for index in range(len(op.linear)))]
    yield from ((choice,) for choice in choices if is_valid(op, (choice,), (count,)))


def _cuts_longest(op: OpFactors, strategy: Strategy, count: int, position: int, shape: Sequence[int]) -> bool:
    """Return whether a matrix is split along its longest dimension."""
    is_matrix = sum(size > 1 for size in shape) > 1
    place = input_layout(op, strategy, (count,), position)[0] if is_matrix else WHOLE
    return place.is_split and shape[place.dim] == max(shape)


def with_stored_parameters(words: Mapping[str, Sequence[str]], ops: Mapping[str, NamedOp],
                           shapes: Mapping[str, Sequence[int]], mesh: Sequence[int], *,
                           stored: Mapping[str, Layout] | None = None) -> Sharding:
    """Return the sharding with these strategies in which parameters are stored as they are used.

    A parameter whose readers want different parts of it is whole; on axes where its gradient comes out as parts or
    sums it is summed at the end of the step.
    """
    readers: dict[str, list[tuple[SplitOp | None, int]]] = {}
    for name, op in ops.items():
        split = parse_strategy(op.factors, words[name], mesh, name=name) if any(words.get(name, ())) else None
        for position, tensor in enumerate(op.inputs):
            if tensor in shapes:
                readers.setdefault(tensor, []).append((split, position))
    tensors = {}
    for tensor, items in readers.items():
        given = None if stored is None else stored.get(tensor)
        layout = TensorLayout(*zip(*(_stored(items, axis, given) for axis in range(len(mesh))), strict=True))
        if any(item != WHOLE for item in (*layout.value, *layout.gradient)):
            tensors[tensor] = format_layout(layout)
    return Sharding(ops={name: tuple(items) for name, items in words.items() if any(items)}, tensors=tensors)


def _stored(readers: Sequence[tuple[SplitOp | None, int]], axis: int,
            given: Layout | None) -> tuple[Placement, Placement]:
    """Return how a parameter and its gradient lie on one axis."""
    wanted = {WHOLE if split is None else split.wanted(position).value[axis] for split, position in readers}
    place = given[axis] if given is not None else wanted.pop() if len(wanted) == 1 else WHOLE
    if place.is_split:
        return place, place
    come_out = {WHOLE if split is None else split.wanted(position).gradient[axis] for split, position in readers}
    return WHOLE, WHOLE if come_out == {WHOLE} else SUM
