"""Problems in series: where every way leads through one operator, what is before it and what is after it are apart.

A *cut* is an operator that every other operator either leads to or comes from, and that no tensor passes by. All that
is before it has ended when it starts, and all that is after it starts when it has ended: so with the devices of the
cuts given, the parts between them are placed independently, and the latency is the sum of theirs. The best devices for
the cuts are a shortest way through

    value[part, device of the cut before, device of the cut after]

of which only few entries have to be known: all begin as bounds, and the entries on the currently shortest way are
solved until none is left to solve. Memory, and operators in different parts that share a device, are left out: with
them the way is still a bound, and a placement if it happens to respect them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weft.model.graph import I64
from weft.search.place.latency.bounds import heads_and_tails, way_bound
from weft.search.place.problem import PlaceProblem, csr
from weft.search.place.timetable import Sent, Timetable, make_timetable

MAX_TRIES: Final = 3
"""So often a part is tried with the same devices, each time with a larger part of what effort is left."""
ANY: Final = -1
"""In place of a device: the part has no cut there (the first part's begin, the last part's end)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """One part with given devices of its cuts."""

    bound: float
    timetable: Timetable | None = None
    """The best found; in the part's own operators."""
    is_plain: bool = False
    """Nothing is open: the cuts follow each other, and the bound is the value."""

    @property
    def value(self) -> float:
        """Return the seconds of the best found, infinite if none was."""
        if self.is_plain:
            return self.bound
        return float("inf") if self.timetable is None else self.timetable.latency_s

    @property
    def is_closed(self) -> bool:
        """Return whether there is nothing left to find."""
        return self.value <= self.bound * (1 + 1e-9)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What is between two cuts, with both."""

    ops: I64
    """In topological order; the cut before is the first, the cut after the last, where there are such."""
    has_entry: bool
    has_exit: bool
    problem: PlaceProblem
    """Of these operators alone; the cut before takes no time here, memory is unlimited."""

    def fixed(self, entry: int, leave: int) -> PlaceProblem:
        """Return the part's problem with the cuts on these devices."""
        time_s = self.problem.time_s.copy()
        for is_cut, row, device in ((self.has_entry, 0, entry), (self.has_exit, len(self.ops) - 1, leave)):
            if is_cut:
                kept = time_s[row, device]
                time_s[row, :] = np.inf
                time_s[row, device] = kept
        return replace(self.problem, time_s=time_s)


def find_cuts(problem: PlaceProblem) -> list[int]:
    """Return the cuts in order."""
    num_ops = problem.num_ops
    edges = problem.edges
    last_reader = np.full(num_ops, -1, dtype=np.int64)
    np.maximum.at(last_reader, edges[:, 0], edges[:, 1])
    has_input = np.diff(problem.input_start) > 0
    sources, sinks = np.flatnonzero(~has_input), np.flatnonzero(last_reader < 0)
    last_source = int(sources.max(initial=-1))
    first_sink = int(sinks.min(initial=num_ops))
    reach = np.maximum.accumulate(last_reader) if num_ops else last_reader
    return [op for op in range(last_source, first_sink + 1)
            if 0 <= op < num_ops and (op == 0 or reach[op - 1] <= op)]


def split(problem: PlaceProblem) -> list[Part]:
    """Return the parts between the cuts, in order; the whole problem as one part if there are none."""
    cuts = find_cuts(problem)
    starts, stops = [ANY, *cuts], [*cuts, ANY]
    parts = []
    for before, after in zip(starts, stops, strict=True):
        first = 0 if before == ANY else before
        last = problem.num_ops - 1 if after == ANY else after
        ops = np.arange(first, last + 1, dtype=np.int64)
        if before == problem.num_ops - 1 and after == ANY:
            continue  # the last operator is a cut: nothing comes after it
        parts.append(Part(ops=ops, has_entry=before != ANY, has_exit=after != ANY,
                          problem=subproblem(problem, ops, entry=before != ANY)))
    return parts


def subproblem(problem: PlaceProblem, ops: I64, *, entry: bool) -> PlaceProblem:
    """Return the problem of some operators (ascending), with what they read of each other; memory is unlimited.

    With ``entry`` the first operator takes no time: it has ended.
    """
    new_op = np.full(problem.num_ops, -1, dtype=np.int64)
    new_op[ops] = np.arange(len(ops))
    reads = [[tensor for tensor in problem.inputs_of(op).tolist() if new_op[problem.producer[tensor]] >= 0]
             for op in ops.tolist()]
    if entry:
        reads[0] = []
    input_start, items = csr(reads)
    tensors, inputs = np.unique(items, return_inverse=True)
    time_s = problem.time_s[ops].copy()
    if entry:
        time_s[0] = np.where(np.isfinite(time_s[0]), 0.0, np.inf)
    rows, given_row = np.unique(problem.given_row[tensors], return_inverse=True)
    shift = int(np.count_nonzero(rows < 0))
    return replace(
        problem, op_names=tuple(problem.op_names[op] for op in ops.tolist()), time_s=time_s,
        unit_of_op=np.unique(problem.unit_of_op[ops], return_inverse=True)[1].astype(np.int64),
        capacity=np.full(problem.num_devices, np.inf), weight_start=np.zeros(len(ops) + 1, dtype=np.int64),
        weights=np.zeros(0, dtype=np.int64), weight_bytes=np.zeros(0), producer=new_op[problem.producer[tensors]],
        input_start=input_start, inputs=inputs.astype(np.int64),
        tensor_bytes=problem.tensor_bytes[tensors], given_row=(given_row - shift).astype(np.int64),
        given_s=problem.given_s[rows[shift:]], has_lifetimes=False,
        op_modules=tuple(problem.op_modules[op] for op in ops.tolist()) if problem.op_modules else ())


def signature(problem: PlaceProblem) -> bytes:
    """Return what two parts have in common if a solution of one is one of the other."""
    arrays = (problem.time_s, problem.unit_of_op, problem.producer, problem.input_start, problem.inputs,
              problem.tensor_bytes, problem.given_row, problem.given_s)
    return b"|".join(np.ascontiguousarray(array).tobytes() for array in arrays)


Solve = Callable[[PlaceProblem, float, float, float], Solved]
"""From a part's problem, the bound known, the value from which on it is of no use, and the share of what effort is left
that may go into it, to what was found."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """Devices for the cuts, and what they add up to."""

    devices: tuple[int, ...]
    """Of the cut after each part (``ANY`` for the last part, if it ends in none)."""
    seconds: float


class Series:
    """The parts of a problem and what is known of them."""

    def __init__(self, problem: PlaceProblem) -> None:
        self.problem = problem
        self.parts = split(problem)
        self.known: dict[tuple[bytes, int, int], Solved] = {}
        self.signatures = [signature(part.problem) for part in self.parts]
        self.tried: Counter[tuple[bytes, int, int]] = Counter()
        """How often an entry was to be solved."""

    def devices_after(self, index: int) -> list[int]:
        """Return the devices that the cut after a part may run on."""
        part = self.parts[index]
        if not part.has_exit:
            return [ANY]
        return np.flatnonzero(np.isfinite(part.problem.time_s[-1])).tolist()

    def entry(self, index: int, before: int, after: int) -> Solved:
        """Return what is known of a part with these devices."""
        key = (self.signatures[index], before, after)
        known = self.known.get(key)
        if known is None:
            fixed = self.parts[index].fixed(before, after)
            is_plain = fixed.num_ops - self.parts[index].has_entry <= self.parts[index].has_exit and (
                fixed.num_tensors <= 1)
            known = Solved(bound=way_bound(fixed, *heads_and_tails(fixed)), is_plain=is_plain)
            self.known[key] = known
        return known

    def record(self, index: int, before: int, after: int, solved: Solved) -> None:
        """Keep the better of what is known and what was found."""
        old = self.entry(index, before, after)
        if old.is_plain:
            return
        table = solved.timetable if solved.value < old.value else old.timetable
        self.known[self.signatures[index], before, after] = Solved(bound=max(old.bound, solved.bound), timetable=table)

    def shortest(self, *, by_bound: bool) -> Way:
        """Return the best devices for the cuts, by what is proven or by what was found."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {ANY: (0.0, ())}
        for index in range(len(self.parts)):
            after: dict[int, tuple[float, tuple[int, ...]]] = {}
            for device in self.devices_after(index):
                options = []
                for before, (seconds, way) in best.items():
                    entry = self.entry(index, before, device)
                    options.append((seconds + (entry.bound if by_bound else entry.value), (*way, device)))
                after[device] = min(options)
            best = after
        seconds, way = min(best.values())
        return Way(devices=way, seconds=seconds)

    def timetable(self, way: Way) -> Timetable:
        """Return the whole timetable that the parts' best add up to."""
        problem = self.problem
        device = np.zeros(problem.num_ops, dtype=np.int64)
        start_s = np.zeros(problem.num_ops)
        transfers: list[Sent] = []
        now, before = 0.0, ANY
        for index, after in enumerate(way.devices):
            part, entry = self.parts[index], self.entry(index, before, after)
            table = entry.timetable if not entry.is_plain else _plain_timetable(part.fixed(before, after))
            assert table is not None, "the way was found, so its parts are"
            skip = 1 if part.has_entry else 0
            device[part.ops[skip:]] = table.device[skip:]
            start_s[part.ops[skip:]] = now + table.start_s[skip:]
            ids = self._tensors(part)
            transfers += [Sent(int(ids[sent.tensor]), sent.source, sent.target, now + sent.start_s, now + sent.end_s)
                          for sent in table.transfers]
            now, before = now + table.latency_s, after
        return Timetable(problem=problem, device=device, start_s=start_s, transfers=tuple(transfers))

    def _tensors(self, part: Part) -> I64:
        """Return the whole problem's ids of the part's tensors."""
        problem, inside = self.problem, set(part.ops.tolist())
        return np.array(sorted({tensor for op in part.ops[1 if part.has_entry else 0 :].tolist()
                                for tensor in problem.inputs_of(op).tolist()
                                if int(problem.producer[tensor]) in inside}), dtype=np.int64)


def _plain_timetable(problem: PlaceProblem) -> Timetable:
    """Return the timetable of a part in which every operator has one device left."""
    device = np.argmin(problem.time_s, axis=1).astype(np.int64)
    return make_timetable(problem, device, np.arange(problem.num_ops))


def solve_series(series: Series, solve: Solve, *, upper: float, is_spent: Callable[[], bool],
                 report: Callable[[float], None]) -> None:
    """Solve entries on the shortest way by bounds until that way is as long as the best found (or as ``upper``).

    An entry is of use only if it takes less than its bound and what the shortest way is shorter than the best. So small
    parts come first, which make that less for the others. All entries of a way are solved before the next way is looked
    at, so that there is soon a whole way; those that were tried before come last, with what effort is left.
    """
    tried = series.tried
    while not is_spent():
        way = series.shortest(by_bound=True)
        report(way.seconds)
        pairs = zip((ANY, *way.devices[:-1]), way.devices, strict=True)
        keys = {(series.signatures[index], *pair): index for index, pair in enumerate(pairs)}
        is_open = [key for key, index in keys.items() if not series.entry(index, *key[1:]).is_closed]
        todo = [key for key in is_open if not tried[key]] or [key for key in is_open if tried[key] < MAX_TRIES][:1]
        upper = min(upper, series.shortest(by_bound=False).seconds)
        if not todo or way.seconds >= upper * (1 - 1e-9):
            break
        todo.sort(key=lambda key: len(series.parts[keys[key]].ops))
        for count, key in enumerate(todo):
            if is_spent():
                break
            tried[key] += 1
            index, entry = keys[key], series.entry(keys[key], *key[1:])
            slack = upper - series.shortest(by_bound=True).seconds
            series.record(index, *key[1:], solve(series.parts[index].fixed(*key[1:]), entry.bound, entry.bound + slack,
                                                 1 / (len(todo) - count)))
