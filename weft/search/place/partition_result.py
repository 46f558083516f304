"""What a search over a dnn-partitioning problem returns: a checked split and how good it is known to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from weft.model.graph import I64
from weft.search.place.partition_check import Split
from weft.search.place.partition_problem import PartitionProblem
from weft.search.place.problem import Objective

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionResult:
    """The best split found, with a bound."""

    problem: PartitionProblem
    objective: Objective
    device: I64
    """[nodes] as in ``problem.device_names``; for latency the number after the accelerators stands for all CPUs."""
    figures: Split
    bound: float
    """No split has a smaller value."""
    status: Status
    seconds: float
    """CPU seconds of the search."""
    contiguous: bool = False
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""

    @property
    def value(self) -> float:
        """Return the largest load, or the latency."""
        return self.figures.value

    @property
    def gap(self) -> float:
        """Return how far the value may be above the best, as a part of the value."""
        return 0.0 if self.value <= 0 else max(0.0, (self.value - self.bound) / self.value)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the names of the devices; latency has one name for all CPUs."""
        if self.objective == "throughput":
            return self.problem.device_names
        return (*self.problem.device_names[: self.problem.num_accelerators], "cpu")

    def split(self) -> dict[str, Any]:
        """Return the split in the benchmark's own format."""
        problem, figures = self.problem, self.figures
        machines = []
        for index, _ in enumerate(self.device_names):
            nodes = [problem.node_ids[node] for node in range(problem.num_nodes) if self.device[node] == index]
            is_timed = self.objective == "throughput" or index < problem.num_accelerators
            machines.append({**({"load": float(figures.loads[index])} if is_timed else {}), "nodes": nodes})
        return {"maxLoad" if self.objective == "throughput" else "totalLatency": self.value,
                "fpgas": machines[: problem.num_accelerators], "cpus": machines[problem.num_accelerators :]}

    def to_json(self) -> dict[str, Any]:
        """Return the result object that ``weft place --format dnn-partitioning --json`` prints.

        ``starts`` and ``transfers`` say when things run in one request, so ``starts`` is empty for throughput;
        ``transfers`` is always empty, since the benchmark counts them among the loads.
        """
        problem, figures, names = self.problem, self.figures, self.device_names
        starts = {str(problem.node_ids[node]): [names[self.device[node]], float(figures.start_s[node]),
                                                float(figures.end_s[node])] for node in range(len(figures.start_s))}
        return {
            "status": self.status, "objective": self.objective, "value": self.value, "bound": self.bound,
            "placement": {str(problem.node_ids[node]): names[self.device[node]] for node in range(problem.num_nodes)},
            "starts": starts, "transfers": [],
            "peak_memory": {names[index]: float(used) for index, used in enumerate(figures.used)},
            "seconds": self.seconds, "split": self.split()}
