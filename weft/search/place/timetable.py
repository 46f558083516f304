"""Timetables: when every operator and transfer of one request runs; how they are made from an order, and checked.

``make_timetable`` places operators one after the other in a given order (with every operator after those it reads
from): the tensors that an operator still needs from other devices are sent as soon as they are written and the way is
free, in the order in which they were written, and the operator runs as soon as they are there and its device is free.
Nothing is put into gaps, so the timetable follows from the devices and the order alone, and a change late in the order
leaves what is before untouched.

``check_timetable`` knows nothing of that: it checks any timetable against the problem.

Methods return an ``Assignment``: devices and such an order. They take weights into account while they place; tensors
that are alive only for a while (``has_lifetimes``) are known once there is a timetable: ``with_room_for_tensors`` makes
it, takes what is over from the memory that weights may use, and lets the method place again. A search returns a
``PlaceResult``: a checked timetable, how good it is known to be, and how it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.errors import InputError, NoFeasiblePlan, PlanError
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.search.place.kernel import Arrays, decode
from weft.search.place.problem import Bools, Found, PlaceProblem, check_placement

TOLERANCE: Final = 1e-9
"""Times may differ by so much of the largest time and still count as equal."""
MAX_AGAIN: Final = 8
"""Times that a method places again because tensors do not fit beside the weights."""


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

    def memory_curves(self) -> list[tuple[F64, F64]]:
        """Return for each device (times, bytes): what it holds from each time on.

        A tensor is on its writer's device and on those that read it, from when it is written or received to when it is
        last used or sent.
        """
        problem, end_s = self.problem, self.end_s
        changes: list[list[tuple[float, int, float]]] = [[] for _ in problem.device_names]
        arrival = {(sent.tensor, sent.target): sent.start_s for sent in self.transfers}
        leaves: dict[int, float] = {}
        for sent in self.transfers:
            leaves[sent.tensor] = max(leaves.get(sent.tensor, 0.0), sent.end_s)
        for tensor, op in enumerate(problem.producer.tolist() if problem.has_lifetimes else ()):
            home, size = int(self.device[op]), float(problem.tensor_bytes[tensor])
            last = {home: max(float(end_s[op]), leaves.get(tensor, 0.0))}
            for reader in problem.readers_of(tensor):
                where = int(self.device[reader])
                last[where] = max(last.get(where, 0.0), float(end_s[reader]))
            for where, until in last.items():
                since = float(self.start_s[op]) if where == home else arrival[tensor, where]
                changes[where] += (since, 1, size), (until, 0, -size)
        curves = []
        for amount, items in zip(problem.resident_bytes(self.device).tolist(), changes, strict=True):
            rows = [(0.0, 0, amount), *sorted(items)]
            times, amounts = np.array([row[0] for row in rows]), np.cumsum([row[2] for row in rows])
            # A tensor that goes when another comes goes first, so the last of several changes at a time is what counts.
            kept = np.concatenate((np.diff(times) > 0, [True]))
            curves.append((times[kept], amounts[kept]))
        return curves

    def peak_bytes(self) -> F64:
        """Return [m] the most memory that every device holds at once."""
        return np.array([amounts.max() for _, amounts in self.memory_curves()], dtype=np.float64)


def make_timetable(problem: PlaceProblem, device: I64, order: I64) -> Timetable:
    """Return the timetable that the devices and the order mean; see the module's docstring."""
    check_placement(problem, device)
    start_s, sent_s = decode(Arrays.of(problem), device, order)
    row, target = np.nonzero(np.isfinite(sent_s))
    transfers = []
    for tensor, there in zip(row.tolist(), target.tolist(), strict=True):
        source, begin = int(device[problem.producer[tensor]]), float(sent_s[tensor, there])
        transfers.append(Sent(tensor, source, there, begin, begin + problem.transfer_s(tensor, source, there)))
    return Timetable(problem=problem, device=device.copy(), start_s=start_s,
                     transfers=tuple(sorted(transfers, key=lambda sent: (sent.start_s, sent.tensor, sent.target))))


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
        label = f"a tensor of {problem.op_names[int(problem.producer[sent.tensor])]}"
        for resource in problem.ways(sent.source, sent.target):
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Where every operator runs, and in which order operators are taken."""

    device: I64
    """[n]"""
    order: I64
    """[n] all operators, each after those it reads from."""


Method = Callable[[PlaceProblem], Assignment]


def with_room_for_tensors(problem: PlaceProblem, method: Method) -> Assignment:
    """Return the method's answer with which weights and tensors fit; raise ``NoFeasiblePlan`` if there is none."""
    found = method(problem)
    if not problem.has_lifetimes or not np.isfinite(problem.capacity).any():
        return found
    limit = problem.capacity.copy()
    missing, held, worst = np.inf, 0.0, 0
    for _ in range(MAX_AGAIN):
        peaks = make_timetable(problem, found.device, found.order).peak_bytes()
        over = np.maximum(peaks - problem.capacity, 0.0)
        if not over.any():
            return found
        if over.max() < missing:
            worst = int(np.argmax(over))
            missing, held = float(over[worst]), float(peaks[worst])
        resident = problem.resident_bytes(found.device)
        limit = np.where(over > 0, np.minimum(limit - over, resident - 1), limit)  # so that something has to change
        try:
            found = method(replace(problem, capacity=limit))
        except NoFeasiblePlan:
            break
    name = problem.device_names[worst]
    raise NoFeasiblePlan(
        f"{name!r} would hold {format_bytes(held)} at its peak, tensors included, but has "
        f"{format_bytes(problem.capacity[worst])}: {format_bytes(missing)} are missing. Try another method, a smaller "
        "batch, or a device with more memory.", missing_bytes=int(np.ceil(missing)), device=name)


def no_room_for_tensors(problem: PlaceProblem, miss: NoFeasiblePlan) -> NoFeasiblePlan:
    """Return the error where weights alone would fit, from that of the nearest placement."""
    return NoFeasiblePlan(
        f"no placement of {problem.name!r} was found that fits: its weights do, but not with the tensors that are "
        f"alive at the same time ({miss.missing_bytes} bytes are missing on {miss.device!r} in the nearest). Try a "
        "smaller batch or a device with more memory.", missing_bytes=miss.missing_bytes, device=miss.device)


def check_room(problem: PlaceProblem, assignment: Assignment) -> Assignment:
    """Return the assignment; raise ``NoFeasiblePlan`` if it does not fit: for rules that do not look at memory."""
    held = problem.resident_bytes(assignment.device)
    if problem.has_lifetimes and np.isfinite(problem.capacity).any():
        held = make_timetable(problem, assignment.device, assignment.order).peak_bytes()
    over = held - problem.capacity
    worst = int(np.argmax(over))
    if over[worst] <= 0:
        return assignment
    name = problem.device_names[worst]
    raise NoFeasiblePlan(
        f"{name!r} would hold {format_bytes(held[worst])} but has {format_bytes(problem.capacity[worst])}: "
        f"{format_bytes(over[worst])} are missing for {_some_names(problem, assignment.device, worst)}. Try a method "
        "that looks at memory, or a device with more memory.", missing_bytes=int(np.ceil(over[worst])), device=name)


def _some_names(problem: PlaceProblem, device: I64, index: int) -> str:
    """Return the operators that keep the most on the device."""
    ops = np.flatnonzero(device == index)
    sizes = [float(problem.weight_bytes[problem.weights_of(op)].sum()) for op in ops.tolist()]
    largest = ops[np.argsort(sizes, kind="stable")[::-1][:3]]
    rest = f" and {len(ops) - len(largest)} more operators" if len(ops) > len(largest) else ""
    return ", ".join(repr(problem.op_names[op]) for op in largest) + rest


def no_room(problem: PlaceProblem, op: int, device: I64, allowed: Bools) -> NoFeasiblePlan:
    """Return the error that the operator's unit fits nowhere; ``device`` is -1 for what has no place yet.

    ``allowed`` [m] says where the unit may run.
    """
    unit, home = int(problem.unit_of_op[op]), np.full(problem.num_units, -1, dtype=np.int64)
    home[problem.unit_of_op[device >= 0]] = device[device >= 0]
    held = np.zeros((problem.num_devices, len(problem.weight_bytes)), dtype=np.bool_)
    needs = np.zeros(len(problem.weight_bytes), dtype=np.bool_)
    for other in np.flatnonzero(home >= 0).tolist():
        held[home[other], problem.unit_weights[other]] = True
    if home[unit] < 0:
        needs[problem.unit_weights[unit]] = True
    lacking = (~held & needs) @ problem.weight_bytes - (problem.capacity - held @ problem.weight_bytes)
    lacking = np.where(allowed, lacking, np.inf)
    best = int(np.argmin(lacking))
    members = np.flatnonzero(problem.unit_of_op == unit)
    what = repr(problem.op_names[op]) + (f" (with {len(members) - 1} more that share its device)"
                                         if len(members) > 1 else "")
    if not lacking[best] > 0:
        return NoFeasiblePlan(f"operator {what} cannot get what it reads on any device with room for it: there is no "
                              "way between the devices. Add links to the cluster file, or try another method.")
    name = problem.device_names[best]
    size = float(needs @ problem.weight_bytes)
    return NoFeasiblePlan(
        f"operator {what} keeps {format_bytes(size)} and fits on no device that it may run on: "
        f"{format_bytes(lacking[best])} are missing on {name!r}, the best of them, beside what was placed before. "
        "Try another method, or a device with more memory.", missing_bytes=int(np.ceil(lacking[best])), device=name)


@dataclass(frozen=True, kw_only=True)
class PlaceResult(Found):
    """The best placement found."""

    timetable: Timetable
    """Devices, and when everything of one request runs; for throughput as well."""
    by: str
    """The method that found it."""
    loads: dict[str, float] = field(default_factory=dict)
    """For throughput: seconds per request of every device and of everything that transfers occupy."""

    @property
    def problem(self) -> PlaceProblem:
        """Return what was placed."""
        return self.timetable.problem

    def to_json(self) -> dict[str, Any]:
        """Return the result object that ``weft place --json`` prints.

        ``transfers`` has one row for each edge between devices; edges of one tensor to one device share its times,
        since it is sent once.
        """
        problem, table = self.problem, self.timetable
        names, devices, ends = problem.op_names, problem.device_names, table.end_s
        sent = {(row.tensor, row.target): row for row in table.transfers}
        rows = []
        for source, reader, tensor in problem.edges.tolist():
            if table.device[source] != table.device[reader]:
                row = sent[tensor, int(table.device[reader])]
                rows.append([names[source], names[reader], row.start_s, row.end_s])
        return {
            "status": self.status, "objective": self.objective, "value": self.value, "bound": self.bound,
            "placement": {names[op]: devices[table.device[op]] for op in range(problem.num_ops)},
            "starts": {names[op]: [devices[table.device[op]], float(table.start_s[op]), float(ends[op])]
                       for op in range(problem.num_ops)},
            "transfers": sorted(rows, key=lambda row: (row[2], row[3])),
            "peak_memory": dict(zip(devices, table.peak_bytes().tolist(), strict=True)),
            **({"loads": self.loads} if self.loads else {}),
            "by": self.by, "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What one method came to, where several are compared."""

    method: str
    value: float | None = None
    """None if it has no placement."""
    reason: str = ""
    """Why there is none."""
    result: PlaceResult | None = None
