"""Timetables: when every operator and transfer of one request runs; how they are made from an order, and checked.

``make_timetable`` places operators one after the other in a given order (with every operator after those it reads
from): the tensors that an operator still needs from other devices are sent as soon as they are written and the way is
free, in the order in which they were written, and the operator runs as soon as they are there and its device is free.
Nothing is put into gaps, so the timetable follows from the devices and the order alone, and a change late in the order
leaves what is before untouched.

``check_timetable`` knows nothing of that: it checks any timetable against the problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.base.errors import InputError, PlanError
from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem, check_placement

TOLERANCE = 1e-9
"""Times may differ by so much of the largest time and still count as equal."""


SMALL = 300
"""Up to so many operators, timetables are made in plain Python."""


class Sent(NamedTuple):
    """One transfer: a tensor, from its writer's device to another."""

    tensor: int
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Timetable:
    """When every operator and transfer of one request runs."""

    problem: PlaceProblem
    device: I64
    """[n] where each operator runs."""
    start_s: F64
    """[n]"""
    transfers: tuple[Sent, ...]

    @property
    def end_s(self) -> F64:
        """Return [n] when each operator ends."""
        return np.asarray(self.start_s + self.problem.time_s[np.arange(self.problem.num_ops), self.device])

    @property
    def latency_s(self) -> float:
        """Return when the last operator ends."""
        return float(self.end_s.max(initial=0.0))

    @property
    def order(self) -> I64:
        """Return the operators by start, in an order that also respects what they read."""
        position = np.lexsort((np.arange(self.problem.num_ops), self.end_s, self.start_s))
        return np.asarray(position, dtype=np.int64)

    def peak_bytes(self) -> F64:
        """Return [m] the most memory that every device holds at once."""
        problem = self.problem
        resident = problem.resident_bytes(self.device)
        if not problem.has_lifetimes:
            return resident
        held: list[list[tuple[float, int, float]]] = [[] for _ in range(problem.num_devices)]
        start, readers = problem.readers
        arrival = {(sent.tensor, sent.target): sent.start_s for sent in self.transfers}
        leaves: dict[int, float] = {}
        for sent in self.transfers:
            leaves[sent.tensor] = max(leaves.get(sent.tensor, 0.0), sent.end_s)
        end_s = self.end_s
        for tensor, op in enumerate(problem.producer.tolist()):
            last = {int(self.device[op]): max(float(end_s[op]), leaves.get(tensor, 0.0))}
            for reader in readers[start[tensor] : start[tensor + 1]].tolist():
                where = int(self.device[reader])
                last[where] = max(last.get(where, 0.0), float(end_s[reader]))
            for where, until in last.items():
                since = float(self.start_s[op]) if where == self.device[op] else arrival[tensor, where]
                held[where].append((since, 1, problem.tensor_bytes[tensor]))
                held[where].append((until, 0, -problem.tensor_bytes[tensor]))
        peaks = [max(np.cumsum([amount for _, _, amount in sorted(items)]).tolist(), default=0.0) for items in held]
        return np.asarray(resident + np.maximum(peaks, 0.0), dtype=np.float64)


def make_timetable(problem: PlaceProblem, device: I64, order: I64) -> Timetable:
    """Return the timetable that the devices and the order mean; see the module's docstring."""
    check_placement(problem, device)
    if problem.num_ops <= SMALL:  # not worth a compiler's start
        start_s, sent_s = decode(problem, device, order)
    else:
        from weft.search.place import kernel

        start_s, sent_s = kernel.decode(kernel.Arrays.of(problem), device, order)
    row, target = np.nonzero(np.isfinite(sent_s))
    transfers = []
    for tensor, there in zip(row.tolist(), target.tolist(), strict=True):
        source, begin = int(device[problem.producer[tensor]]), float(sent_s[tensor, there])
        transfers.append(Sent(tensor, source, there, begin, begin + problem.transfer_s(tensor, source, there)))
    return Timetable(problem=problem, device=device.copy(), start_s=start_s,
                     transfers=tuple(sorted(transfers, key=lambda sent: (sent.start_s, sent.tensor, sent.target))))


def decode(problem: PlaceProblem, device: I64, order: I64) -> tuple[F64, F64]:
    """Return the start of each operator and of each transfer [tensors, devices]; ``kernel.decode`` in plain Python."""
    core_free = np.zeros(problem.num_devices)
    way_free = np.zeros(max(1, problem.num_resources))
    start_s, end_s = np.zeros(problem.num_ops), np.zeros(problem.num_ops)
    sent_s = np.full((problem.num_tensors, problem.num_devices), np.inf)
    arrival: dict[tuple[int, int], float] = {}
    for op in order.tolist():
        here = int(device[op])
        inputs = problem.inputs[problem.input_start[op] : problem.input_start[op + 1]].tolist()
        for tensor in sorted(inputs, key=lambda tensor: end_s[problem.producer[tensor]]):
            writer = int(problem.producer[tensor])
            source = int(device[writer])
            if source == here or (tensor, here) in arrival:
                continue
            pair = source * problem.num_devices + here
            used = problem.resources[problem.resource_start[pair] : problem.resource_start[pair + 1]]
            begin = max(float(end_s[writer]), float(way_free[used].max(initial=0.0)))
            sent_s[tensor, here] = begin
            way_free[used] = arrival[tensor, here] = begin + problem.transfer_s(tensor, source, here)
        core = int(problem.core_of_device[here])
        ready = float(core_free[core])
        for tensor in inputs:
            writer = int(problem.producer[tensor])
            ready = max(ready, float(end_s[writer]) if device[writer] == here else arrival[tensor, here])
        start_s[op] = ready
        end_s[op] = core_free[core] = ready + problem.time_s[op, here]
    return start_s, sent_s


def check_timetable(timetable: Timetable) -> None:
    """Raise ``PlanError`` with everything that is wrong: order, transfers, overlaps, memory."""
    problem = timetable.problem
    problems: list[str] = []
    try:
        check_placement(problem, timetable.device)
    except InputError as error:
        raise PlanError(f"placement of {problem.name!r}: {error}", [str(error)]) from error
    slack = TOLERANCE * max(1e-300, timetable.latency_s)
    problems += _missing_inputs(timetable, slack)
    problems += _wrong_transfers(timetable, slack)
    ends = timetable.end_s
    names = problem.op_names
    for core in range(int(problem.core_of_device.max(initial=-1)) + 1):
        ops = np.flatnonzero(problem.core_of_device[timetable.device] == core)
        spans = [(float(timetable.start_s[op]), float(ends[op]), names[op]) for op in ops]
        where = problem.device_names[int(np.flatnonzero(problem.core_of_device == core)[0])]
        problems += _overlaps(spans, slack, f"on {where!r}")
    problems += _busy_ways(timetable, slack)
    peaks = timetable.peak_bytes()
    for index in np.flatnonzero(peaks > problem.capacity * (1 + TOLERANCE)):
        problems.append(f"{problem.device_names[index]!r} holds {peaks[index]:.0f} bytes but has "
                        f"{problem.capacity[index]:.0f}")
    if problems:
        raise PlanError(f"placement of {problem.name!r}: " + "; ".join(problems[:10]), problems)


def _missing_inputs(timetable: Timetable, slack: float) -> list[str]:
    problem = timetable.problem
    arrival = {(sent.tensor, sent.target): sent.end_s for sent in timetable.transfers}
    ends, problems = timetable.end_s, []
    for source, reader, tensor in problem.edges.tolist():
        here = int(timetable.device[reader])
        ready = float(ends[source]) if timetable.device[source] == here else arrival.get((tensor, here))
        if ready is None:
            problems.append(f"{problem.op_names[reader]!r} never gets what it reads from {problem.op_names[source]!r}")
        elif timetable.start_s[reader] < ready - slack:
            problems.append(f"{problem.op_names[reader]!r} starts at {timetable.start_s[reader]:.9g}, before it has "
                            f"what it reads from {problem.op_names[source]!r} at {ready:.9g}")
    if timetable.start_s.min(initial=0.0) < -slack:
        problems.append("an operator starts before time 0")
    return problems


def _wrong_transfers(timetable: Timetable, slack: float) -> list[str]:
    problem, ends, problems = timetable.problem, timetable.end_s, []
    for sent in timetable.transfers:
        op = int(problem.producer[sent.tensor])
        took = problem.transfer_s(sent.tensor, sent.source, sent.target)
        if sent.source != timetable.device[op] or sent.start_s < ends[op] - slack:
            problems.append(f"a tensor of {problem.op_names[op]!r} is sent before it is there")
        if not sent.end_s >= sent.start_s + took - slack:
            problems.append(f"a tensor of {problem.op_names[op]!r} is sent in {sent.end_s - sent.start_s:.9g} s, "
                            f"which takes {took:.9g} s")
    return problems


def _busy_ways(timetable: Timetable, slack: float) -> list[str]:
    """Return the overlaps of transfers on what they occupy."""
    problem = timetable.problem
    spans: list[list[tuple[float, float, str]]] = [[] for _ in range(problem.num_resources)]
    for sent in timetable.transfers:
        pair = sent.source * problem.num_devices + sent.target
        label = f"a tensor of {problem.op_names[int(problem.producer[sent.tensor])]}"
        for resource in problem.resources[problem.resource_start[pair] : problem.resource_start[pair + 1]]:
            spans[resource].append((sent.start_s, sent.end_s, label))
    return [text for resource, items in enumerate(spans)
            for text in _overlaps(items, slack, f"over {problem.resource_names[resource]!r}")]


def _overlaps(spans: Iterable[tuple[float, float, str]], slack: float, where: str) -> list[str]:
    """Return a sentence for each two neighbours in time that overlap; what takes no time overlaps what it is inside."""
    problems = []
    latest: tuple[float, float, str] | None = None
    for span in sorted(spans):
        if latest is not None and span[0] < latest[1] - slack and max(span[0] - latest[0], span[1] - span[0]) > slack:
            problems.append(f"{latest[2]!r} and {span[2]!r} run at the same time {where}")
        if latest is None or span[1] > latest[1]:
            latest = span
    return problems
