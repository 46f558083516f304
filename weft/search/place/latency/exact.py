"""The placement problem as one CP-SAT model: exact for small problems, and for windows of large ones.

Variables, in ticks (see ``Ticks``):

    x[i, d]     unit of operator i runs on device d                        exactly one d for each unit
    s[i], e[i]  start and end of operator i;  e = s + sum of x[i, d] * time[i, d]
    y[t, c, d]  tensor t is sent from device c to device d                 x[writer, c] and x[reader, d] -> y[t, c, d]
    a[t, d]     start of the transfer of t to d, after e[writer];  the readers on d start after its end
    makespan    at least every e[i]

One operator at a time on each core, one transfer at a time on each resource (optional intervals, no overlap), memory as
a sum over the weights that a device holds. The start of an operator is bounded by the longest way to it, its end by the
longest way from it, with the least times of operators and transfers (``bounds.heads_and_tails``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import solve
from weft.search.place.fit import chosen, held_on, unit_choices
from weft.search.place.latency.bounds import heads_and_tails
from weft.search.place.latency.series import Solved
from weft.search.place.problem import PlaceProblem, topological
from weft.search.place.timetable import Clock, Timetable

MAX_EXACT_TICKS: Final = 10**9
"""Times that are multiples of a power of ten are scaled exactly if the limit takes no more ticks."""
ROUNDED_TICKS: Final = 3 * 10**8
"""So many ticks for the limit otherwise; times are rounded down, which keeps bounds valid."""
SMALL: Final = 60
SECONDS_PER_UNIT: Final = (2.0, 3.0)
"""CPU seconds of one unit of CP-SAT's deterministic time, about: with up to ``SMALL`` operators, and with more."""


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
        for unit, choices in enumerate(self.x):
            here = int(timetable.device[self.problem.first_op[unit]])
            for device, item in choices.items():
                self.model.add_hint(item, device == here)
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
    return _play(problem, device, _in_order(problem, device, starts, moves | {key: sent[key] for key in moves
                                                                            if key in sent}))


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


def _play(problem: PlaceProblem, device: I64, tasks: list[tuple[int, int]]) -> Timetable:
    """Run operators and transfers one after the other."""
    clock = Clock(problem, device)
    for index, target in tasks:
        if target >= 0:
            clock.send(index, target)
        else:
            clock.run(index)
    return Timetable(problem=problem, device=device, start_s=clock.start_s, transfers=tuple(clock.sent.values()))
