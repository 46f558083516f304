"""What a graph file says about costs and placement, for groups: what may be one group, and what then holds for it.

Times and memory add up; a group may run where all its operators may; it shares a device with whatever one of them
must share a device with. Operators cannot be one group if that leaves no device kind, if they must be with different
others, or if they give their times in different ways (one by device kind and one by operations, say).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.base.errors import InputError
from weft.model.graph import Bool, GivenCosts, Graph


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
