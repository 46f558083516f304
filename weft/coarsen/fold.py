"""Runs of equal stretches of operators, found by structure alone: ``find_runs(graph) -> tuple[OpRun, ...]``.

For graphs without modules (ONNX, graph files) and for models whose layers are not in a list; models with modules are
folded while they are traced (``weft.model.folded``). In the order of the graph

    embed | norm linear relu linear add | norm linear relu linear add | norm linear relu linear add | head

the middle part is a run of three copies with period 5. Copies are equal in three respects:

- their operators, one by one: kind, costs, shapes and dtypes of inputs and results, and what else the caller knows
  (``details``, such as the arguments of calls);
- their wiring: an input comes from the same place in the copy, from the same place in the copy before, or is the very
  same tensor for all copies; parameters are either a copy's own, read in the same places, or the same for all;
- their results: only a copy itself and the next one read what it makes, except for the last one's.

Operators become numbers, equal ones equal numbers. Where a pattern of a few numbers comes again is a *period* worth
trying (``_periods``, at most ``MAX_PERIODS``); each is tried over the whole graph at once, and the stretches that cover
most are then checked copy by copy. All of it takes a time that grows linearly with the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from weft.model.graph import I64, Bool, Graph, TensorRole

MIN_COPIES: Final = 3
"""Fewer equal stretches than this are no run."""
MIN_PERIOD: Final = 3
"""A copy has at least this many operators: shorter ones are chains of small operators, not layers."""
MAX_PERIODS: Final = 32
"""How many periods are tried; the most frequent distances first."""
_PATTERN: Final = 4
"""Operators in a pattern whose next occurrence suggests a period."""

_Signature = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRun:
    """Equal stretches of operators, one after the other."""

    start: int
    """The first operator."""
    period: int
    """Operators per copy."""
    count: int
    """Number of copies."""

    @property
    def copies(self) -> tuple[range, ...]:
        """Return the operators of each copy, in corresponding order."""
        return tuple(range(first, first + self.period)
                     for first in range(self.start, self.start + self.period * self.count, self.period))


def find_runs(graph: Graph, *, details: Sequence[Hashable] | None = None) -> tuple[OpRun, ...]:
    """Return runs of equal stretches of ``graph``, without overlap, in order; ``details`` say more of each operator."""
    tokens = _tokens(graph, details)
    wiring = _Wiring.of(graph)
    taken = np.zeros(graph.num_ops, dtype=bool)
    runs: list[OpRun] = []
    for start, stop, period in _all_stretches(tokens):
        for first, last in _free_parts(taken[start:stop]):
            for run in wiring.runs_in(start + first, start + last, period):
                taken[run.start : run.start + run.period * run.count] = True
                runs.append(run)
    return tuple(sorted(runs, key=lambda run: run.start))


# ---- operators as numbers -----------------------------------------------------------------------------------------


def _tokens(graph: Graph, details: Sequence[Hashable] | None) -> I64:
    """Return a number for each operator, the same for those that look the same by themselves."""
    known: dict[Hashable, int] = {}
    tensors = list(zip(graph.tensor_shapes, graph.tensor_dtypes, graph.tensor_bytes.tolist(),
                       (graph.tensor_role == TensorRole.ACTIVATION).tolist(), strict=True))
    starts, inputs = graph.input_start.tolist(), graph.inputs.tolist()
    output_starts, outputs = (column.tolist() for column in graph.outputs_by_op)
    costs = zip(graph.flops.tolist(), graph.bytes_read.tolist(), graph.bytes_written.tolist(),
                graph.is_constant.tolist(), strict=True)
    given = _given(graph)
    result = []
    for op, cost in enumerate(costs):
        token = (graph.op_kinds[op], cost, tuple(tensors[index] for index in inputs[starts[op] : starts[op + 1]]),
                 tuple(tensors[index] for index in outputs[output_starts[op] : output_starts[op + 1]]),
                 None if details is None else details[op], None if given is None else given[op])
        result.append(known.setdefault(token, len(known)))
    return np.array(result, dtype=np.int64)


def _given(graph: Graph) -> list[Hashable] | None:
    """Return what a graph file says of each operator and of sending its results, as text."""
    if graph.given is None:
        return None
    given = graph.given
    sends = [[repr(given.transfer_times[tensor]) for tensor in graph.op_outputs(op)] for op in range(graph.num_ops)]
    return [repr((given.times[op], given.memory_bytes[op], given.allowed_kinds[op], given.colocate[op], sends[op]))
            for op in range(graph.num_ops)]


def _periods(tokens: I64) -> list[int]:
    """Return distances at which patterns come again, the most frequent first, then the shorter."""
    last: dict[tuple[int, ...], int] = {}
    votes: Counter[int] = Counter()
    numbers = tokens.tolist()
    for end in range(_PATTERN, len(numbers) + 1):
        pattern = tuple(numbers[end - _PATTERN : end])
        if pattern in last:
            votes[end - last[pattern]] += 1
        last[pattern] = end
    frequent = sorted(votes, key=lambda period: (-votes[period] * period, period))
    return sorted(period for period in frequent[:MAX_PERIODS] if period >= MIN_PERIOD)


def _all_stretches(tokens: I64) -> list[tuple[int, int, int]]:
    """Return (start, stop, period) of stretches that repeat, the longest first; of equal ones the shorter period."""
    found = [(start, stop + period, period) for period in _periods(tokens) if period < len(tokens)
             for start, stop in _free_parts(tokens[period:] != tokens[:-period])
             if stop - start >= (MIN_COPIES - 1) * period]
    return sorted(found, key=lambda stretch: (stretch[0] - stretch[1], stretch[2], stretch[0]))


def _free_parts(taken: Bool) -> list[tuple[int, int]]:
    """Return the (start, stop) of the stretches that are not taken."""
    free = np.concatenate(([False], ~taken, [False]))
    edges = np.flatnonzero(free[1:] != free[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


# ---- copies are compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wiring:
    """Who reads what, as plain lists."""

    starts: list[int]
    inputs: list[int]
    producer: list[int]
    place: list[int]
    """Which of its producer's results a tensor is."""
    first_reader: list[int]
    last_reader: list[int]
    """One past the last operator for results of the model."""
    last_use: list[int]
    """The last reader of any result of an operator."""

    @staticmethod
    def of(graph: Graph) -> _Wiring:
        """Return the wiring of ``graph``."""
        first = np.full(graph.num_tensors, graph.num_ops, dtype=np.int64)
        last = np.full(graph.num_tensors, -1, dtype=np.int64)
        np.minimum.at(first, graph.inputs, graph.consumer_op)
        np.maximum.at(last, graph.inputs, graph.consumer_op)
        last[list(graph.outputs)] = graph.num_ops
        begin, tensors = graph.outputs_by_op
        place = np.zeros(graph.num_tensors, dtype=np.int64)
        place[tensors] = np.arange(len(tensors)) - begin[graph.tensor_producer[tensors]]
        use = np.full(graph.num_ops, -1, dtype=np.int64)
        np.maximum.at(use, graph.tensor_producer[tensors], last[tensors])
        return _Wiring(starts=graph.input_start.tolist(), inputs=graph.inputs.tolist(),
                       producer=graph.tensor_producer.tolist(), place=place.tolist(),
                       first_reader=first.tolist(), last_reader=last.tolist(), last_use=use.tolist())

    def runs_in(self, start: int, stop: int, period: int) -> Iterator[OpRun]:
        """Yield the runs of a stretch whose operators repeat: it is cut where the wiring does not."""
        while start + MIN_COPIES * period <= stop:
            count, wrong = self._count_copies(start, stop, period)
            if count >= MIN_COPIES:
                yield OpRun(start=start, period=period, count=count)
            start = start + count * period if count >= MIN_COPIES else wrong + 1

    def _count_copies(self, start: int, stop: int, period: int) -> tuple[int, int]:
        """Return how many equal copies begin at ``start``, and the operator that a longer run must not have."""
        before = self._signature(start, period, start)
        for count in range(1, (stop - start) // period):
            here = start + count * period
            far = max(range(here - period, here), key=self.last_use.__getitem__)
            if self.last_use[far] >= here + period:
                return count, far
            signature = self._signature(here, period, start)
            for one, other in zip(before, signature, strict=True):
                if one != other and not (count == 1 and one[1] == "outside" and other[1] == "before"):
                    return count, here - period + one[0]
            before = signature
        return (stop - start) // period, stop

    def _signature(self, here: int, period: int, start: int) -> _Signature:
        """Return where each input of each operator of the copy at ``here``, of a run from ``start``, comes from."""
        before = here - period if here > start else here
        seen: dict[int, int] = {}
        result: _Signature = []
        for op in range(here, here + period):
            for tensor in self.inputs[self.starts[op] : self.starts[op + 1]]:
                producer, place = self.producer[tensor], self.place[tensor]
                if producer >= here:
                    result.append((op - here, "copy", producer - here, place))
                elif producer >= before:
                    result.append((op - here, "before", producer - before, place))
                elif producer < 0 and here <= self.first_reader[tensor] and self.last_reader[tensor] < here + period:
                    result.append((op - here, "own", seen.setdefault(tensor, len(seen))))
                else:
                    result.append((op - here, "outside", tensor))
        return result
