"""What a placement search returns: a checked placement, how good it is known to be, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from weft.search.place.problem import Objective, PlaceProblem
from weft.search.place.timetable import Timetable

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, kw_only=True)
class PlaceResult:
    """The best placement found, with a bound."""

    timetable: Timetable
    """Devices, and when everything of one request runs; for throughput as well."""
    objective: Objective
    value: float
    """Seconds: the latency, or the largest load."""
    bound: float
    """No placement has a smaller value."""
    status: Status
    by: str
    """The method that found it."""
    seconds: float
    """CPU seconds of the search."""
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""
    loads: dict[str, float] = field(default_factory=dict)
    """For throughput: seconds per request of every device and of everything that transfers occupy."""

    @property
    def problem(self) -> PlaceProblem:
        """Return what was placed."""
        return self.timetable.problem

    @property
    def gap(self) -> float:
        """Return how far the value may be above the best, as a part of the value."""
        return 0.0 if self.value <= 0 else max(0.0, (self.value - self.bound) / self.value)

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
