"""What the factor rules share: a call with its arguments by name, and the factors that a rule gives it.

A rule gets the call and reads like the einsum it stands for:

    rows, inner = call.factor("m", 8), call.factor("k", 4)
    return call.done([(left, (rows, inner)), (right, (inner,))], [(rows,)])

``Call.factor`` returns a tuple of one index, or none for a size of 1, so that tuples add up to a dimension.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from weft.sharding.factors import Dims, Factor, OpFactors

Shape = tuple[int, ...]
Items = list[tuple[int, ...]]
"""For each dimension its factors, as ``Call`` makes them."""


def arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by the names in the operator's schema, defaults included."""
    found = dict(_defaults(target))
    found.update(zip(_defaults(target), args, strict=False))
    found.update(kwargs)
    return found


@cache
def _defaults(target: Any) -> Mapping[str, Any]:
    """Return the names of an operator's arguments, in order, with their defaults."""
    return {item.name: item.default_value for item in target._schema.arguments}


def shape_of(node: Any) -> Shape:
    """Return the shape of a node's tensor."""
    return tuple(int(size) for size in node.meta["val"].shape)


def is_float(node: Any) -> bool:
    """Return whether a node's tensor has a floating-point type."""
    return bool(node.meta["val"].dtype.is_floating_point)


def nonnegative(dim: int, rank: int) -> int:
    """Return a dimension counted from the front."""
    return dim + max(rank, 1) if dim < 0 else dim


def dims_in(dims: Any, rank: int) -> list[int]:
    """Return the dimensions (one, a list, or None or empty for all) counted from the front."""
    if dims is None or dims == [] or dims == ():
        return list(range(rank))
    return [nonnegative(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)]


def whole(shape: Sequence[int]) -> Dims:
    """Return the description of a tensor that is never split."""
    return ((),) * len(shape)


def aligned(shape: Sequence[int], items: Items) -> Items:
    """Return the factors of a tensor that is broadcast to dimensions with these factors."""
    here = items[len(items) - len(shape):]
    return [() if size == 1 else item for size, item in zip(shape, here, strict=True)]


class Call:
    """A call whose factors are being written down."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.operator = str(node.target)
        self.args = arguments(node.target, node.args, node.kwargs)
        value = node.meta["val"]
        values = value if isinstance(value, list | tuple) else [value]
        self.outputs: tuple[Shape, ...] = tuple(tuple(int(size) for size in item.shape) for item in values)
        self._float_results = all(item.dtype.is_floating_point for item in values)
        self._factors: list[Factor] = []

    @property
    def output(self) -> Shape:
        """Return the shape of the first result."""
        return self.outputs[0]

    @property
    def shape(self) -> Shape:
        """Return the shape of the first tensor that the call reads."""
        return shape_of(self.node.all_input_nodes[0])

    def dim(self, rank: int | None = None) -> int:
        """Return the argument ``dim`` counted from the front, of a tensor of that rank (default: the first read)."""
        return nonnegative(self.args["dim"], len(self.shape) if rank is None else rank)

    @property
    def tensors(self) -> list[Any]:
        """Return the nodes of the tensors that the call reads, each once."""
        return list(self.node.all_input_nodes)

    def factor(self, name: str, size: int, *, special: bool = False, fixed: bool = False, grows: bool = False,
               divides: float = 1.0, even: bool = False, ragged: bool = False, forward_sums: tuple[float, ...] = (),
               backward_sums: tuple[float, ...] = ()) -> tuple[int, ...]:
        """Return the index of a new factor, as a tuple; an empty one for sizes that cannot be split."""
        if size <= 1:
            return ()
        self._factors.append(Factor(name=name, size=size, special=special, fixed=fixed, grows=grows, divides=divides,
                                    even=even, ragged=ragged, forward_sums=forward_sums, backward_sums=backward_sums))
        return (len(self._factors) - 1,)

    def joint_factor(self, name: str, joins: tuple[int, ...], *, exchanged: float) -> None:
        """Add a factor that is others together; to split it devices exchange so many bytes."""
        size = min(self._factors[index].size for index in joins)
        self._factors.append(Factor(name=name, size=size, special=True, joins=joins, exchanged=exchanged))

    def plain(self, shape: Sequence[int], *, but: Iterable[int] = ()) -> list[tuple[int, ...]]:
        """Return a new factor ``d0``, ``d1`` ... for each dimension, none for those in ``but``."""
        without = set(but)
        return [() if dim in without else self.factor(f"d{dim}", size) for dim, size in enumerate(shape)]

    def shape_arg(self, name: str) -> tuple[int, ...] | None:
        """Return the position of an argument, for ``OpFactors.shape_args``; None if it was given by name."""
        place = list(_defaults(self.node.target)).index(name)
        return (place,) if place < len(self.node.args) else None

    def done(self, inputs: Iterable[tuple[Any, Sequence[tuple[int, ...]]]],
             outputs: Sequence[Sequence[tuple[int, ...]]], *, linear: Iterable[Iterable[Any]] = (),
             shape_args: tuple[int, ...] | None = ()) -> OpFactors | None:
        """Return the factors of the call; tensors that are not in ``inputs`` are never split.

        None where one tensor has two parts in the call that do not agree. ``linear`` are sets of nodes, or of other
        arguments that mean there is none; sums are only made of floating-point numbers.
        """
        described: dict[Any, Dims] = {}
        for node, dims in inputs:
            if described.setdefault(node, tuple(dims)) != tuple(dims):
                return None
        if shape_args is None:
            return None
        nodes = self.tensors
        return OpFactors(
            factors=tuple(self._factors), shape_args=shape_args, outputs=tuple(tuple(dims) for dims in outputs),
            inputs=tuple(described[node] if node in described else whole(shape_of(node)) for node in nodes),
            linear=tuple(dict.fromkeys(tuple(sorted({nodes.index(node) for node in group}))
                                       for group in map(tuple, linear) if self._is_summable(group))))

    def _is_summable(self, group: tuple[Any, ...]) -> bool:
        return self._float_results and all(node in self.node.all_input_nodes and is_float(node) for node in group)


Rule = Callable[[Call], OpFactors | None]
"""From a call to its factors; None where this call (its arguments) cannot be split."""

RULES: dict[str, Rule] = {}
Entered = TypeVar("Entered", bound=Callable[..., Any])


@cache
def _operators() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads((files("weft.sharding") / "operators.toml").read_text(encoding="utf-8"))


def entered_in(table: dict[str, Entered]) -> Callable[[Entered], Entered]:
    """Return a decorator that enters a function in the table for the operators that ``operators.toml`` gives it."""
    def enter(function: Entered) -> Entered:
        for text in _operators()[function.__module__.rpartition(".")[2]][function.__name__.lstrip("_")].split():
            name, _, overloads = text.partition(":")
            for overload in (overloads or "default").split(","):
                target = f"{name if '.' in name else f'aten.{name}'}.{overload}"
                assert target not in table, f"{target} is entered twice"
                table[target] = function
        return function

    return enter


rule = entered_in(RULES)
