"""Exact latency: the placement problem as one CP-SAT model, and problems in series solved part by part.

*One model*, for small problems and for windows of large ones. Variables, in ticks (see ``Ticks``):

    x[i, d]     unit of operator i runs on device d                        exactly one d for each unit
    s[i], e[i]  start and end of operator i;  e = s + sum of x[i, d] * time[i, d]
    y[t, c, d]  tensor t is sent from device c to device d                 x[writer, c] and x[reader, d] -> y[t, c, d]
    a[t, d]     start of the transfer of t to d, after e[writer];  the readers on d start after its end
    makespan    at least every e[i]

One operator at a time on each core, one transfer at a time on each resource (optional intervals, no overlap), memory as
a sum over the weights that a device holds. The start of an operator is bounded by the longest way to it, its end by the
longest way from it, with the least times of operators and transfers (``bounds.heads_and_tails``).

*In series* (``Series``): where every way leads through one operator, what is before it and what is after it are apart.
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

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64, I64, topological
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.place.fit import add_hints, chosen, held_on, unit_choices
from weft.search.place.latency.bounds import heads_and_tails, way_bound
from weft.search.place.problem import PlaceProblem, csr
from weft.search.place.timetable import Sent, Timetable, make_timetable

MAX_EXACT_TICKS: Final = 10**9
"""Times that are multiples of a power of ten are scaled exactly if the limit takes no more ticks."""
ROUNDED_TICKS: Final = 3 * 10**8
"""So many ticks for the limit otherwise; times are rounded down, which keeps bounds valid."""
SMALL: Final = 60
SECONDS_PER_UNIT: Final = (2.0, 3.0)
"""CPU seconds of one unit of CP-SAT's deterministic time, about: with up to ``SMALL`` operators, and with more."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """How seconds become whole numbers."""

    per_second: Fraction
    is_exact: bool

    def of(self, seconds: float) -> int:
        """Return the ticks of a time: exactly, or rounded down."""
        ticks = min(float(self.per_second) * seconds, 1e15)
        return round(ticks) if self.is_exact else math.floor(ticks * (1 - 1e-12))

    def below(self, seconds: float) -> int:
        """Return the most ticks that a time below this one can have."""
        ticks = float(self.per_second) * seconds
        return math.ceil(ticks - 1e-6) - 1 if self.is_exact else math.floor(ticks * (1 + 1e-12))


def choose_ticks(problem: PlaceProblem, limit_s: float) -> Ticks:
    """Return exact ticks where all times are multiples of one power of ten (or are whole), else rounded ones.

    ``limit_s``: what takes longer is of no interest.
    """
    times = np.concatenate([problem.time_s.ravel(), problem.transfer_table.ravel()])
    values = np.unique(times[(times > 0) & (times <= limit_s)])
    if not len(values):
        return Ticks(per_second=Fraction(1), is_exact=True)
    for digits in range(-3, 16):
        scaled = values * 10.0**digits
        if limit_s * 10.0**digits > MAX_EXACT_TICKS:
            break
        if np.all(np.abs(scaled - np.round(scaled)) <= 1e-6 * np.minimum(1.0, scaled)) and scaled.min() > 0.5:
            return Ticks(per_second=Fraction(10) ** digits, is_exact=True)
    return Ticks(per_second=Fraction(ROUNDED_TICKS) / Fraction(limit_s), is_exact=False)


def longest(problem: PlaceProblem) -> float:
    """Return a time within which every placement ends: everything one after the other, at its slowest."""
    times = np.where(np.isfinite(problem.time_s), problem.time_s, 0.0).max(axis=1, initial=0.0).sum()
    sent = np.where(np.isfinite(problem.transfer_table), problem.transfer_table, 0.0).max(axis=(1, 2), initial=0.0)
    fan_out = np.minimum(np.diff(problem.readers[0]), problem.num_devices - 1)
    return float(times + (sent * fan_out).sum())


class Model:
    """The CP-SAT model of one problem."""

    def __init__(self, problem: PlaceProblem, *, limit_s: float = math.inf) -> None:
        """``limit_s``: only placements that take less are of interest."""
        self.problem = problem
        limit_s = min(limit_s, longest(problem) * 1.001 + 1e-300)
        self.ticks = choose_ticks(problem, limit_s)
        self.model = cp_model.CpModel()
        heads, tails = heads_and_tails(problem)
        horizon = max(0, self.ticks.below(limit_s))
        self.makespan = self.model.new_int_var(0, horizon, "makespan")
        self.x = unit_choices(self.model, problem.is_allowed)
        self.start: list[cp_model.IntVar] = []
        self.end: list[cp_model.LinearExprT] = []
        self._add_ops(heads, tails, horizon)
        self._add_transfers(horizon)
        self._add_memory()
        self.model.minimize(self.makespan)

    def _device_of(self, op: int) -> dict[int, cp_model.IntVar]:
        return self.x[int(self.problem.unit_of_op[op])]

    def _add_ops(self, heads: F64, tails: F64, horizon: int) -> None:
        problem, model = self.problem, self.model
        cores: dict[int, list[cp_model.IntervalVar]] = {}
        for op in range(problem.num_ops):
            choices = self._device_of(op)
            head = min((self.ticks.of(float(heads[op, device])) for device in choices), default=0)
            start = model.new_int_var(min(head, horizon), horizon, f"s{op}")
            ticks = {device: self.ticks.of(float(problem.time_s[op, device])) for device in choices}
            end = start + sum(ticks[device] * item for device, item in choices.items())
            self.start.append(start)
            self.end.append(end)
            for device, item in choices.items():
                tail = self.ticks.of(float(tails[op, device]))
                model.add(start >= self.ticks.of(float(heads[op, device]))).only_enforce_if(item)
                model.add(start + ticks[device] + tail <= self.makespan).only_enforce_if(item)
                if ticks[device] > 0:
                    cores.setdefault(int(problem.core_of_device[device]), []).append(
                        model.new_optional_fixed_size_interval_var(start, ticks[device], item, f"o{op},{device}"))
        for intervals in cores.values():
            model.add_no_overlap(intervals)

    def _add_transfers(self, horizon: int) -> None:
        problem, model = self.problem, self.model
        busy: dict[int, list[cp_model.IntervalVar]] = {}
        self.sent: dict[tuple[int, int], cp_model.IntVar] = {}
        self.is_sent: dict[tuple[int, int, int], cp_model.IntVar] = {}
        for tensor, writer in enumerate(problem.producer.tolist()):
            ops = problem.readers_of(tensor)
            sources = self._device_of(writer)
            for op in ops:
                model.add(self.start[op] >= self.end[writer])
            for target in sorted({device for op in ops for device in self._device_of(op)}):
                self._add_transfer(tensor, writer, sources, target, [op for op in ops if target in self._device_of(op)],
                                   busy, horizon)
        for intervals in busy.values():
            model.add_no_overlap(intervals)

    def _add_transfer(self, tensor: int, writer: int, sources: dict[int, cp_model.IntVar], target: int, ops: list[int],
                      busy: dict[int, list[cp_model.IntervalVar]], horizon: int) -> None:
        """Add the transfer of the tensor to one device, from whichever device it is written on."""
        problem, model = self.problem, self.model
        ways = {source: problem.transfer_s(tensor, source, target) for source in sources if source != target}
        ops = [op for op in ops if problem.unit_of_op[op] != problem.unit_of_op[writer]]
        if not ways or not ops:
            return
        ticks = {source: self.ticks.of(seconds) for source, seconds in ways.items() if math.isfinite(seconds)}
        for source in ways:
            if source not in ticks:
                for op in ops:
                    model.add_bool_or(~sources[source], ~self._device_of(op)[target])
        start = model.new_int_var(0, horizon, f"a{tensor},{target}")
        self.sent[tensor, target] = start
        for source, amount in ticks.items():
            if amount == 0:
                continue
            sent = model.new_bool_var(f"y{tensor},{source},{target}")
            self.is_sent[tensor, source, target] = sent
            model.add_implication(sent, sources[source])
            model.add(start >= self.end[writer]).only_enforce_if(sent)
            for op in ops:
                here = self._device_of(op)[target]
                model.add_bool_or(~sources[source], ~here, sent)
                model.add(start + amount <= self.start[op]).only_enforce_if(sent, here)
            used = problem.ways(source, target).tolist()
            if used:
                interval = model.new_optional_fixed_size_interval_var(start, amount, sent,
                                                                      f"i{tensor},{source},{target}")
                for resource in used:
                    busy.setdefault(resource, []).append(interval)

    def _add_memory(self) -> None:
        problem, model = self.problem, self.model
        for device in range(problem.num_devices):
            held = held_on(model, self.x, problem.weight_users, problem.weight_bytes.tolist(), device)
            amounts = [float(problem.weight_bytes[weight]) for _, weight in held]
            if not math.isfinite(problem.capacity[device]) or sum(amounts) <= problem.capacity[device]:
                continue
            shrink = max(1.0, sum(amounts) / 2**50)  # beyond that, rounded in favour of what may just fit
            sizes = [math.ceil(amount) if shrink <= 1 else math.floor(amount / shrink) for amount in amounts]
            room = math.floor(problem.capacity[device]) if shrink <= 1 else math.ceil(problem.capacity[device] / shrink)
            model.add(sum(size * kept for size, (kept, _) in zip(sizes, held, strict=True)) <= room)

    def hint(self, timetable: Timetable) -> None:
        """Start from this timetable."""
        add_hints(self.model, self.x, timetable.device[self.problem.first_op])
        for op, start in enumerate(self.start):
            self.model.add_hint(start, self.ticks.of(float(timetable.start_s[op])))
        for sent in timetable.transfers:
            if (sent.tensor, sent.target) in self.sent:
                self.model.add_hint(self.sent[sent.tensor, sent.target], self.ticks.of(sent.start_s))

    def solve(self, budget: Budget, *, effort: float, seed: int = 0, linearization: int = 1) -> Solved:
        """Return the best timetable, in real time, and the bound: infinite if nothing is below the limit."""
        unit = SECONDS_PER_UNIT[0 if self.problem.num_ops <= SMALL else 1]
        found = solve(self.model, budget, effort=effort, seed=seed, linearization=linearization,
                      seconds_per_unit=unit, max_seconds=1.0 + 2 * max(0.0, min(effort, budget.effort)))
        if not found.has_values or found.bound is None:
            return Solved(bound=math.inf if found.status == "infeasible" else 0.0)
        device = chosen(found, self.x)[self.problem.unit_of_op]
        starts = np.array([found.value(start) for start in self.start], dtype=np.float64)
        sent = {(tensor, target): float(found.value(self.sent[tensor, target]))
                for (tensor, source, target), item in self.is_sent.items() if found.value(item)
                if device[self.problem.producer[tensor]] == source}
        table = replay(self.problem, device, starts, sent)
        return Solved(timetable=table, bound=math.ceil(found.bound - 1e-6) / float(self.ticks.per_second))


def replay(problem: PlaceProblem, device: I64, starts: F64, sent: dict[tuple[int, int], float]) -> Timetable:
    """Return the earliest timetable in real time with the orders of these starts (in any unit).

    ``sent`` gives the starts of transfers by (tensor, device); those that are needed but not listed come as late as
    possible, before their first reader.
    """
    moves: dict[tuple[int, int], float] = {}
    for writer, reader, tensor in problem.edges.tolist():
        here = int(device[reader])
        if here != device[writer]:
            moves[tensor, here] = min(moves.get((tensor, here), math.inf), float(starts[reader]))
    clock = Clock(problem, device)
    for index, target in _in_order(problem, device, starts, moves | {key: sent[key] for key in moves if key in sent}):
        if target >= 0:
            clock.send(index, target)
        else:
            clock.run(index)
    return clock.timetable()


def _in_order(problem: PlaceProblem, device: I64, starts: F64, moves: dict[tuple[int, int], float]
              ) -> list[tuple[int, int]]:
    """Return operators as (operator, -1) and transfers as (tensor, device) by start, each after what it needs.

    Of those that start together, what takes no time comes first: it need not wait for the rest. The model lets it run
    even inside another, which a timetable does not: so the bound holds either way.
    """
    tasks = [*((op, -1) for op in range(problem.num_ops)), *moves]
    place = {task: index for index, task in enumerate(tasks)}
    follow: list[list[int]] = [[] for _ in tasks]
    for writer, reader, tensor in problem.edges.tolist():
        here = int(device[reader])
        follow[writer if device[writer] == here else place[tensor, here]].append(reader)
    for tensor, target in moves:
        follow[int(problem.producer[tensor])].append(place[tensor, target])

    def key(task: tuple[int, int]) -> tuple[float, bool, int, int]:
        index, target = task
        if target < 0:
            return (float(starts[index]), bool(problem.time_s[index, device[index]] > 0), *task)
        took = problem.transfer_s(index, int(device[problem.producer[index]]), target)
        return (moves[task], took > 0, *task)

    return [tasks[index] for index in topological(follow, [key(task) for task in tasks])]


class Clock:
    """Runs operators and transfers one after the other, each as early as what it needs allows."""

    def __init__(self, problem: PlaceProblem, device: I64) -> None:
        self.problem, self.device = problem, device
        self.core_free = np.zeros(problem.num_devices)
        self.way_free = np.zeros(max(1, problem.num_resources))
        self.start_s, self.end_s = np.zeros(problem.num_ops), np.zeros(problem.num_ops)
        self.sent: dict[tuple[int, int], Sent] = {}
        """By tensor and target."""

    def send(self, tensor: int, target: int) -> None:
        """Send the tensor to the device."""
        writer = int(self.problem.producer[tensor])
        source = int(self.device[writer])
        used = self.problem.ways(source, target)
        begin = max(float(self.end_s[writer]), float(self.way_free[used].max(initial=0.0)))
        done = begin + self.problem.transfer_s(tensor, source, target)
        self.way_free[used] = done
        self.sent[tensor, target] = Sent(tensor, source, target, begin, done)

    def run(self, op: int) -> None:
        """Run the operator; what it reads has been sent."""
        here = int(self.device[op])
        core = int(self.problem.core_of_device[here])
        ready = float(self.core_free[core])
        for tensor in self.problem.inputs_of(op).tolist():
            writer = int(self.problem.producer[tensor])
            ready = max(ready, float(self.end_s[writer]) if self.device[writer] == here else
                        self.sent[tensor, here].end_s)
        self.start_s[op] = ready
        self.end_s[op] = self.core_free[core] = ready + self.problem.time_s[op, here]

    def timetable(self) -> Timetable:
        """Return what was run and sent."""
        return Timetable(problem=self.problem, device=self.device, start_s=self.start_s,
                         transfers=tuple(self.sent.values()))


# ---- in series -----------------------------------------------------------------------------------------------------


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
            table = entry.timetable
            if entry.is_plain:  # every operator has one device left
                fixed = part.fixed(before, after)
                table = make_timetable(fixed, np.argmin(fixed.time_s, axis=1), np.arange(fixed.num_ops))
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
