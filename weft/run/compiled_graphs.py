"""What the compiler is given and gives back, and which nodes of a graph are views: without the compiler itself.

A compiled forward returns its outputs and behind them what the backward takes; see ``weft.run.inductor``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Node

Values = Sequence[Any]
Call = Callable[[list[Any]], Values]
"""A compiled graph; it empties the list of its arguments, so that each is freed after its last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Primal:
    """An argument: its shape and layout, and whether its gradient is wanted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool
    is_parameter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Where the gradients of some primals are in a graph's results, and how they lie there."""

    places: tuple[tuple[int, int], ...]
    """(primal, place in the results)."""
    shared: frozenset[int]
    """Primals whose gradient may share its memory with an argument of the graph, or with another's."""


NO_GRADIENTS: Final = Gradients(places=(), shared=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """What was compiled of one function; without gradients there is a forward alone."""

    forward: Call
    num_outputs: int
    with_tangent: tuple[int, ...] = ()
    """The outputs whose gradients the backward takes, in this order."""
    tangent_strides: tuple[tuple[int, ...], ...] = ()
    """How it wants them to lie."""
    backward: Call | None = None
    gradients: Gradients = NO_GRADIENTS
    """Those that the backward gives; what it gives behind them are the arguments of ``weights``."""
    weights: Call | None = None
    weight_gradients: Gradients = NO_GRADIENTS


def viewed(node: Node) -> Node | None:
    """Return the node that this one is a view of, or an entry of such a tuple; None if it has memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) and viewed(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], Node):
        return None
    is_view = any(item.alias_info is not None and not item.alias_info.is_write for item in schema.returns)
    return node.args[0] if is_view or node.target is torch.ops.aten._unsafe_view.default else None
