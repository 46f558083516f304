"""Which operators run as one: ``Groups``, and the checker that every way of finding them goes through.

A group is a set of operators that the backend runs as one kernel and that is placed as a unit. Contracting every group
to one operator must leave a graph without cycles (the groups are *convex*): groups are numbered in topological order
of that graph, so the check is that no tensor goes from a group to one with a smaller number.

Operators that depend on neither inputs nor parameters (``Graph.is_constant``) belong to no group: any device computes
them for itself, backends even do so once and for all, and they must not tie their readers together. Only a constant
that is itself a result of the model has a group, since some device must return it.

Where a backend says in which of its kernels an operator occurs (none, one or more), ``choose_kernels`` gives each
operator one. Where a graph file says something about costs and placement, ``Limits`` says what may be one group, and
``contract_given`` what then holds for it: times and memory add up; a group may run where all its operators may; it
shares a device with whatever one of them must share a device with. Operators cannot be one group if that leaves no
device kind, if they must be with different others, or if they give their times in different ways (one by device kind
and one by operations, say).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Final, Literal

import numpy as np

from weft.base.errors import InputError, ModelError
from weft.cost.op_classes import VIEW, base_name, op_class
from weft.model.graph import I64, Bool, GivenCosts, Graph

How = Literal["none", "rules", "inductor", "onnxruntime"]

NO_GROUP: Final = -1
"""In ``Groups.of_op``: a constant, which every device that needs it computes for itself."""
_MAX_SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The group of each operator; see the module's docstring."""

    of_op: I64
    """[ops] group numbers in topological order, or ``NO_GROUP``."""
    how: How
    """How they were found."""
    labels: tuple[str, ...]
    """What each group does, such as ``conv2d+batch_norm+relu``; views are left out unless there is nothing else."""

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return len(self.labels)

    def members(self) -> tuple[tuple[int, ...], ...]:
        """Return the operators of every group, in the graph's order."""
        lists: list[list[int]] = [[] for _ in self.labels]
        for op, group in enumerate(self.of_op.tolist()):
            if group != NO_GROUP:
                lists[group].append(op)
        return tuple(tuple(ops) for ops in lists)


def loose_constants(graph: Graph) -> Bool:
    """Return which operators belong to no group: constants that are not themselves results of the model."""
    is_loose = graph.is_constant.copy()
    producers = graph.tensor_producer[list(graph.outputs)]
    is_loose[producers[producers >= 0]] = False
    return is_loose


def is_free(graph: Graph) -> Bool:
    """Return which operators cost nothing: views by their class or by what they return."""
    is_view = np.array([op_class(kind) == VIEW for kind in graph.op_kinds], dtype=np.bool_)
    is_made = graph.tensor_producer >= 0
    num_made = np.bincount(graph.tensor_producer[is_made], minlength=graph.num_ops)
    num_views = np.bincount(graph.tensor_producer[is_made & (graph.tensor_base >= 0)], minlength=graph.num_ops)
    free: Bool = (graph.flops + graph.bytes_read + graph.bytes_written == 0) & (
        is_view | ((num_made > 0) & (num_made == num_views)))
    if graph.given is not None:
        free &= np.array([not times or max(times.values()) == 0 for times in graph.given.times], dtype=np.bool_)
        free &= np.array(graph.given.memory_bytes, dtype=np.int64) == 0
    return free


def group_edges(graph: Graph) -> I64:
    """Return the (producer, consumer) pairs of operators that belong to groups, each once."""
    is_loose = loose_constants(graph)
    pairs = graph.edges[:, :2]
    return np.unique(pairs[~is_loose[pairs].any(axis=1)], axis=0) if len(pairs) else pairs


def single_groups(graph: Graph) -> Groups:
    """Return every operator as a group of its own."""
    return number_groups(graph, list(range(graph.num_ops)), how="none")


def number_groups(graph: Graph, group_of: Sequence[int], *, how: How) -> Groups:
    """Return the groups that ``group_of`` (any number by operator) means, numbered in topological order and checked.

    What the numbers of constants say is ignored. Where groups feed each other in a cycle, the largest of them is taken
    apart: a backend that copies an operator into several kernels can report such groups.
    """
    is_loose = loose_constants(graph)
    edges = group_edges(graph)
    current = np.unique(np.asarray(group_of, dtype=np.int64), return_inverse=True)[1].astype(np.int64)
    while True:
        found = _topological(current, edges, is_loose)
        if isinstance(found, dict):
            break
        members = {group: np.flatnonzero((current == group) & ~is_loose) for group in found}
        worst = max(found, key=lambda group: (len(members[group]), -group))
        current[members[worst]] = current.max() + 1 + np.arange(len(members[worst]))
    of_op = np.array([NO_GROUP if loose else found[group]
                      for group, loose in zip(current.tolist(), is_loose.tolist(), strict=True)], dtype=np.int64)
    groups = Groups(of_op=of_op, how=how, labels=_labels(graph, of_op, len(found)))
    check_groups(graph, groups)
    return groups


def _topological(current: I64, edges: I64, is_loose: Bool) -> dict[int, int] | list[int]:
    """Return each group's number in topological order (first operator first), or groups that form a cycle."""
    first: dict[int, int] = {}
    for op in np.flatnonzero(~is_loose).tolist():
        first.setdefault(int(current[op]), op)
    sorter = TopologicalSorter[int](dict.fromkeys(first, ()))
    for source, target in current[edges].tolist():
        if source != target:
            sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as cycle:
        return list(cycle.args[1])
    ready: list[tuple[int, int]] = []
    number: dict[int, int] = {}
    while sorter.is_active():
        for group in sorter.get_ready():
            heapq.heappush(ready, (first[group], group))
        _, group = heapq.heappop(ready)
        number[group] = len(number)
        sorter.done(group)
    return number


def _labels(graph: Graph, of_op: I64, num_groups: int) -> tuple[str, ...]:
    free = is_free(graph)
    parts: list[list[str]] = [[] for _ in range(num_groups)]
    views: list[list[str]] = [[] for _ in range(num_groups)]
    for op, group in enumerate(of_op.tolist()):
        if group != NO_GROUP:
            (views if free[op] else parts)[group].append(base_name(graph.op_kinds[op]))
    return tuple("+".join(own or other) for own, other in zip(parts, views, strict=True))


def check_groups(graph: Graph, groups: Groups) -> None:
    """Raise ``ModelError`` with every problem found: sizes, numbering, constants, and groups that are not convex."""
    problems = _shape_problems(graph, groups) or _order_problems(graph, groups)
    if problems:
        raise ModelError(f"groups of graph {graph.name!r}: {'; '.join(problems[:_MAX_SHOWN])}")


def _shape_problems(graph: Graph, groups: Groups) -> list[str]:
    of_op = groups.of_op
    if len(of_op) != graph.num_ops:
        return [f"there are {len(of_op)} entries for {graph.num_ops} operators"]
    problems = []
    wrong = np.flatnonzero((of_op < 0) != loose_constants(graph))
    for op in wrong[:_MAX_SHOWN]:
        problems.append(f"operator {graph.op_names[op]!r} " + ("has no group" if of_op[op] < 0 else
                        "is a constant that any device computes for itself: it must be in no group"))
    used = np.unique(of_op[of_op >= 0])
    if not np.array_equal(used, np.arange(groups.num_groups)):
        problems.append(f"the numbers in use are not 0 to {groups.num_groups - 1}, one for each label")
    return problems


def _order_problems(graph: Graph, groups: Groups) -> list[str]:
    edges = group_edges(graph)
    pairs = groups.of_op[edges]
    return [f"group {groups.of_op[source]} ({groups.labels[groups.of_op[source]]}) is numbered after group "
            f"{groups.of_op[target]} ({groups.labels[groups.of_op[target]]}), but its operator "
            f"{graph.op_names[source]!r} feeds {graph.op_names[target]!r}: groups must be convex and numbered in "
            "topological order" for source, target in edges[pairs[:, 0] > pairs[:, 1]][:_MAX_SHOWN]]


def choose_kernels(graph: Graph, known: Sequence[Sequence[int]]) -> list[int]:
    """Return the kernel of each operator; kernels are numbered in the order in which they run.

    ``known`` are the kernels in which an operator occurs, best first. The operator belongs to the first of them that
    is not before any kernel whose results it needs, so groups are convex. One that occurs in none (the backend did away
    with it), and every view, belongs to the kernel that reads what it makes; if there are several, to the last that it
    reads from.
    """
    producers: list[list[int]] = [[] for _ in known]
    readers: list[list[int]] = [[] for _ in known]
    for source, target in group_edges(graph).tolist():
        producers[target].append(source)
        readers[source].append(target)
    has_none = (loose_constants(graph) | is_free(graph)).tolist()
    earliest = [0] * graph.num_ops
    chosen: list[int | None] = [None] * graph.num_ops
    for op in range(graph.num_ops):
        earliest[op] = max((earliest[producer] for producer in producers[op]), default=0)
        if not has_none[op]:
            chosen[op] = next((kernel for kernel in known[op] if kernel >= earliest[op]), None)
        earliest[op] = max(earliest[op], chosen[op] or 0)
    result = [0] * graph.num_ops
    for op in reversed(range(graph.num_ops)):
        kernel = chosen[op]
        after = {result[reader] for reader in readers[op]}
        is_late = len(after) == 1 or (after and not producers[op])
        result[op] = kernel if kernel is not None else min(after) if is_late else earliest[op]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """What holds for a group so far."""

    keys: frozenset[str] | None
    """What its times are given by: device kinds or names; the empty set for operations and bytes; None for free ops."""
    allowed: frozenset[str] | None
    colocate: str | None


class Limits:
    """What holds for growing groups, by their representative operator."""

    def __init__(self, graph: Graph, free: Bool) -> None:
        self._limits: list[_Limit] | None = None
        if graph.given is not None:
            self._limits = [_limit(graph.given, op, is_free) for op, is_free in enumerate(free.tolist())]

    def allow(self, ops: Iterable[int]) -> bool:
        """Return whether the groups of these representatives may be one group."""
        return self._limits is None or _merged([self._limits[op] for op in ops]) is not None

    def join(self, first: int, second: int) -> None:
        """Note that both groups are one now, represented by ``second``."""
        if self._limits is not None:
            merged = _merged([self._limits[first], self._limits[second]])
            assert merged is not None
            self._limits[second] = merged


def _limit(given: GivenCosts, op: int, is_free: bool) -> _Limit:
    times, allowed = given.times[op], given.allowed_kinds[op]
    return _Limit(keys=None if is_free else frozenset(times or ()),
                  allowed=None if allowed is None else frozenset(allowed), colocate=given.colocate[op])


def _merged(limits: Sequence[_Limit]) -> _Limit | None:
    keys = {limit.keys for limit in limits if limit.keys is not None}
    texts = {limit.colocate for limit in limits if limit.colocate is not None}
    sets = [limit.allowed for limit in limits if limit.allowed is not None]
    allowed = frozenset.intersection(*sets) if sets else None
    if len(keys) > 1 or len(texts) > 1 or allowed == frozenset():
        return None
    return _Limit(keys=next(iter(keys), None), allowed=allowed, colocate=next(iter(texts), None))


def contract_given(graph: Graph, members: Sequence[Sequence[int]], kept: Sequence[int],
                   free: Bool) -> GivenCosts | None:
    """Return what holds for groups of these operators and for the tensors ``kept``; None if the graph says nothing.

    Raise ``InputError`` where operators cannot be one group.
    """
    given = graph.given
    if given is None:
        return None
    limits = []
    for ops in members:
        merged = _merged([_limit(given, op, bool(free[op])) for op in ops])
        if merged is None:
            names = ", ".join(repr(graph.op_names[op]) for op in ops)
            raise InputError(f"operators {names} cannot be one group: they may run on no common device kind, must "
                             "share a device with different others, or give their times in different ways. "
                             "Take them apart")
        limits.append(merged)
    return GivenCosts(
        times=tuple(_sum_times([given.times[op] for op in ops]) for ops in members),
        memory_bytes=tuple(sum(given.memory_bytes[op] for op in ops) for ops in members),
        allowed_kinds=tuple(None if limit.allowed is None else tuple(sorted(limit.allowed)) for limit in limits),
        colocate=tuple(limit.colocate for limit in limits),
        transfer_times=tuple(given.transfer_times[tensor] for tensor in kept))


def _sum_times(times: Sequence[Mapping[str, float] | None]) -> Mapping[str, float] | None:
    known = [item for item in times if item]
    if not known:
        return times[0] if len(times) == 1 else None
    return {key: sum(item[key] for item in known if key in item) for key in known[0]}
