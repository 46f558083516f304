"""What a schedule search returns: a checked schedule, how good it is known to be, and the steady state it repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from weft.search.schedule.schedule import Phase, Schedule, phases

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, kw_only=True)
class ScheduleResult:
    """The best schedule found, with bounds."""

    schedule: Schedule
    status: Status
    """``optimal`` if no schedule for so many micro-batches is shorter, by proof."""
    makespan_bound: float
    """No schedule of so many micro-batches ends earlier."""
    period: float | None
    """Duration of the steady state that was found; None where memory admits none (blocks that keep what they take)."""
    period_microbatches: int | None
    """Micro-batches in one period."""
    period_bound: float | None
    """No steady state takes less time per micro-batch; of however many micro-batches its period is."""
    seconds: float
    """CPU seconds of the search."""
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""
    by: str = "search"
    """What made the schedule: the search, or the named schedule that it could not beat."""

    @property
    def makespan(self) -> float:
        """Return when the last block ends."""
        return self.schedule.makespan

    @property
    def bubble(self) -> float | None:
        """Return the part of a period in which the busiest device is idle."""
        if self.period is None or self.period_microbatches is None:
            return None
        problem = self.schedule.problem
        busy = max(problem.device_work[: problem.num_devices], default=0.0) * self.period_microbatches
        return max(0.0, 1.0 - busy / self.period) if self.period > 0 else 0.0

    def phases(self) -> list[list[Phase]]:
        """Return for each task and micro-batch whether it is in the warm-up, the steady state or the cool-down."""
        if self.period is None or self.period_microbatches is None:
            return [["warm-up"] * self.schedule.num_microbatches for _ in range(self.schedule.problem.num_tasks)]
        return phases(self.schedule, self.period, self.period_microbatches)

    def to_json(self) -> dict[str, Any]:
        """Return the result object that ``weft schedule --json`` prints."""
        problem, starts = self.schedule.problem, self.schedule.starts
        rows = sorted((float(starts[task, index]), task, index) for task in range(problem.num_tasks)
                      for index in range(self.schedule.num_microbatches))
        listed = [[problem.task_names[task], index, start] for start, task, index in rows if task < problem.num_blocks]
        moved = [[problem.blocks[problem.linked[task - problem.num_blocks].source].name,
                  problem.blocks[problem.linked[task - problem.num_blocks].target].name, index, start]
                 for start, task, index in rows if task >= problem.num_blocks]
        return {
            "status": self.status, "microbatches": self.schedule.num_microbatches, "makespan": self.makespan,
            "makespan_bound": self.makespan_bound, "period": self.period,
            "period_microbatches": self.period_microbatches, "period_bound": self.period_bound, "bubble": self.bubble,
            "peak_memory": self.schedule.peak_memory(), "starts": listed,
            **({"transfer_starts": moved} if moved else {}), "seconds": self.seconds}
