"""Rows sorted by the expert that they fall on: which tensors have them, and where an expert's rows end.

A layer of experts sorts its (token, expert) pairs by expert, counts them, multiplies each run of rows with the matrix
of its expert, and puts the results back in the order of tokens:

    ids -> sort -> values -> histogram -> running sum = ends of the experts' rows
                -> places -> x[places] -> grouped product -> ... -> grouped product -> y[inverse places]

Where devices divide the experts (the factor ``experts`` of grouped products), each has the rows of its experts. Their
number depends on values, so a dimension of such rows is cut where experts end, not in equal parts; ``find_rows`` says
which tensors of a graph have such a dimension. Everything that works row by row is then done with them as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weft.sharding.tensor_layout import local_ranges

if TYPE_CHECKING:
    from torch import fx

    from weft.sharding.factors import OpFactors

GROUPED_KINDS: Final = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Operators that multiply rows, sorted by expert, with the matrix of their expert."""
EXPERTS: Final = "experts"
"""The factor of such operators that gives each device some experts with their rows."""
_CASTS: Final = ("aten.to.dtype", "aten._to_copy.default", "aten.to.device", "aten.to.dtype_layout")
_PLACES: Final = ("aten.floor_divide.default", "aten.floor_divide.Scalar", "aten.index_put.default",
                  "aten.div.Tensor_mode", "aten.div.Scalar_mode")
_SORTS: Final = ("aten.sort.default", "aten.sort.stable")
Ends = Sequence[int]
"""0, and for each expert how many rows there are up to its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A dimension of rows sorted by expert."""

    sort: fx.Node
    """The sort that they come from."""
    num_experts: int
    dim: int = 0


def sorted_ids(node: Any) -> fx.Node | None:
    """Return the sort whose values a node is, perhaps in another type; None if it is something else."""
    while str(getattr(node, "target", "")) in _CASTS:
        node = node.args[0]
    source, place = node.args if "getitem" in str(getattr(node, "target", "")) else (None, None)
    if source is None or place != 0 or str(source.target) not in _SORTS or _is_backwards(source):
        return None
    sort: fx.Node = source
    return sort if len(source.args[0].meta["val"].shape) == 1 else None


def _is_backwards(sort: Any) -> bool:
    place = 1 if str(sort.target).endswith("default") else 2
    return bool(sort.kwargs.get("descending", sort.args[place + 1] if len(sort.args) > place + 1 else False))


def experts_sort(node: Any) -> fx.Node | None:
    """Return the sort by expert behind a grouped product, or behind a look-up of something of every row's expert.

    None for other operators, and where it is not to be seen.
    """
    if str(node.target).rpartition(".")[0] in GROUPED_KINDS:
        ends = node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None)
        return _sort_of_ends(ends, int(node.args[1].meta["val"].shape[0]))
    if str(node.target) != "aten.index.Tensor" or len(node.args[1]) != 1:
        return None
    sort = sorted_ids(node.args[1][0])
    num_experts = int(node.args[0].meta["val"].shape[0])
    return sort if sort is not None and any(_is_count(user, num_experts) for user in _users_of_ids(sort)) else None


def numbers_rows(node: Any) -> bool:
    """Return whether a node numbers tokens in the order of experts, or rows of experts in the order of tokens."""
    while str(getattr(node, "target", "")) in (*_CASTS, *_PLACES):
        node = node.args[1][0] if "index_put" in str(node.target) else node.args[0]
    source, place = node.args if "getitem" in str(getattr(node, "target", "")) else (None, None)
    return source is not None and place == 1 and str(source.target) in _SORTS and any(
        str(user.target) == "aten.histc.default" for user in _users_of_ids(source))


def _users_of_ids(sort: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads the sorted numbers of experts, in any type."""
    ready = [user for user in sort.users if user.args[1] == 0]
    while ready:
        for user in ready.pop().users:
            yield user
            if str(user.target) in _CASTS:
                ready.append(user)


def _is_count(node: fx.Node, num_experts: int) -> bool:
    named = dict(zip(("self", "bins", "min", "max"), node.args, strict=False)) | node.kwargs
    return (str(node.target) == "aten.histc.default"
            and (named.get("bins"), named.get("min"), named.get("max")) == (num_experts, 0, num_experts - 1))


def _sort_of_ends(node: Any, num_experts: int) -> fx.Node | None:
    """Return the sort by expert of which a node counts where the experts' rows end; None if it is something else."""
    if str(getattr(node, "target", "")) != "aten.cumsum.default":
        return None
    node = node.args[0]
    while str(getattr(node, "target", "")) in _CASTS:
        node = node.args[0]
    return sorted_ids(node.args[0]) if _is_count(node, num_experts) else None


def find_rows(nodes: Iterable[fx.Node], is_divided: Callable[[fx.Node], bool],
              factors_of: Callable[[fx.Node], OpFactors | None]) -> dict[fx.Node, Rows]:
    """Return the tensors with rows of experts that devices divide, in a graph whose operators come in order.

    ``is_divided`` says of an operator whether its experts are divided.
    """
    order = list(nodes)
    sorts: dict[fx.Node, int] = {}
    for node in order:
        if node.op == "call_function" and is_divided(node) and (sort := experts_sort(node)) is not None:
            table = node.args[0] if "index" in str(node.target) else node.args[1]
            sorts[sort] = int(table.meta["val"].shape[0])
    found = {node: Rows(sort=node.args[0], num_experts=sorts[node.args[0]])
             for node in order if _is_result(node) and node.args[0] in sorts}
    is_new = bool(found)
    while is_new:  # a tensor that is joined with such rows, entry by entry, has them too
        before = len(found)
        for node in order:
            if node.op == "call_function" and not _is_result(node):
                _share_rows(node, found, factors_of)
        is_new = len(found) > before
    return found


def _is_result(node: fx.Node) -> bool:
    return "getitem" in str(node.target)


def _share_rows(node: fx.Node, found: dict[fx.Node, Rows], factors_of: Callable[[fx.Node], OpFactors | None]) -> None:
    """Note for all tensors of a call that they have the rows that one of them has, by their common factor."""
    results = {user: int(user.args[1]) for user in node.users if _is_result(user)} or {node: 0}
    given = [item for item in (*node.all_input_nodes, *results) if item in found]
    op = factors_of(node) if given else None
    if op is None:
        return
    dims = dict(zip(node.all_input_nodes, op.inputs, strict=True)) | {
        item: op.outputs[place] for item, place in results.items() if place < len(op.outputs)}
    for item in given:
        own = dims[item][found[item].dim]
        for other, others in dims.items():
            if other.op == "call_function" and other not in found and len(own) == 1 and own in others:
                found[other] = Rows(sort=found[item].sort, num_experts=found[item].num_experts, dim=others.index(own))


def row_range(ends: Ends, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (start, stop) of a device's rows; ``cuts`` as in ``tensor_layout.local_ranges``."""
    first, last = local_ranges(len(ends) - 1, cuts)[0]
    return ends[first], ends[last]
