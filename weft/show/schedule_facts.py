"""What the pictures and tables of a schedule say: rows of boxes, the steady part, shades of blocks, memory over time.

The steady part is where every block repeats with the period that the search found. One period in its middle is marked:
a span of time in which each block starts once for each micro-batch of the period, cut where the fewest blocks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from weft.model.graph import F64, I64
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Role, find_roles
from weft.search.schedule.schedule import TOLERANCE, Phase, Schedule, ScheduleResult
from weft.show.drawing import Shade

_SHADES: Final[dict[Role, Shade]] = {Role.FORWARD: "forward", Role.BACKWARD: "backward",
                                     Role.INPUT_GRADIENT: "backward", Role.WEIGHT_GRADIENT: "weight"}


class Named(Protocol):
    """A named schedule of the same problem, or why there is none."""

    @property
    def name(self) -> str:
        """Return the name, such as ``1f1b``."""
    @property
    def schedule(self) -> Schedule | None:
        """Return the schedule, or None where it does not apply."""
    @property
    def reason(self) -> str | None:
        """Return why it does not apply or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The span of time in which all blocks repeat, and the period in it that is marked."""

    start: float
    end: float
    period_start: float
    period_end: float
    num_microbatches: int
    """Micro-batches in one period."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one device, or one direction of a link, does; by start."""

    name: str
    is_link: bool
    tasks: I64
    microbatches: I64
    starts: F64
    ends: F64
    busy: float
    """Part of the makespan in which something runs."""
    steady: tuple[float, float] | None
    """From the first steady block's start to the last one's end; None where no whole period is there."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What a picture shows: the rows, with whole periods of a long steady part left out."""

    rows: tuple[Row, ...]
    """Starts and ends are in the picture's time; boxes that the gap cuts are shortened."""
    span: float
    steady: Steady | None
    gap: float | None = None
    """Where something is left out."""
    num_periods: int = 0
    """How many periods are left out there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """One line of the comparison of schedules."""

    name: str
    is_search: bool = False
    is_best: bool = False
    makespan: float | None = None
    idle: float | None = None
    """Part of the makespan in which the busiest device is idle."""
    peak_memory: dict[str, float] | None = None
    reason: str | None = None
    """Why there is none, or why it does not fit."""


def rows_of(result: ScheduleResult) -> tuple[Row, ...]:
    """Return the devices, then the directions of links in use."""
    schedule, problem = result.schedule, result.schedule.problem
    phases, ends = result.phases() if find_steady(result) is not None else None, schedule.ends
    rows = []
    for resource, (name, order) in enumerate(zip(problem.resource_names, schedule.orders(), strict=True)):
        tasks, microbatches = np.asarray(order, dtype=np.int64).reshape(-1, 2).T
        start, end = schedule.starts[tasks, microbatches], ends[tasks, microbatches]
        busy = float((end - start).sum()) / schedule.makespan if schedule.makespan > 0 else 0.0
        rows.append(Row(name=name, is_link=resource >= problem.num_devices, tasks=tasks, microbatches=microbatches,
                        starts=start, ends=end, busy=busy, steady=_steady_span(phases, order, start, end)))
    return tuple(rows)


def _steady_span(phases: list[list[Phase]] | None, order: Sequence[tuple[int, int]], starts: F64,
                 ends: F64) -> tuple[float, float] | None:
    if phases is None:
        return None
    steady = np.asarray([phases[task][index] == "steady" for task, index in order], dtype=bool)
    return (float(starts[steady].min()), float(ends[steady].max())) if steady.any() else None


def find_steady(result: ScheduleResult) -> Steady | None:
    """Return where everything repeats, or None where the micro-batches are too few for a whole period."""
    period, number = result.period, result.period_microbatches
    if period is None or number is None or period <= 0:
        return None
    schedule, slack = result.schedule, TOLERANCE * result.makespan
    after, until = -np.inf, np.inf
    for row, phases in zip(schedule.starts, result.phases(), strict=True):
        steady = np.flatnonzero(np.asarray(phases) == "steady")
        if len(steady) < number:
            return None
        # A period that begins after the first and no later than the second of these has `number` starts of the task.
        first, last = int(steady[0]), int(steady[-1])
        after = max(after, row[first + number - 1] - period, row[first - 1] if first else -np.inf)
        until = min(until, row[last + 1 - number])
    starts = np.sort(schedule.starts[: schedule.problem.num_blocks].ravel())
    cuts = starts[(starts > after + slack) & (starts <= until + slack)]
    if not len(cuts):
        return None
    cut = _best_cut(schedule, cuts)
    inside = (schedule.starts >= cut - slack) & (schedule.starts < cut + period - slack)
    if (inside.sum(axis=1) != number).any():
        return None  # micro-batches that overtake each other
    return Steady(start=float(cuts[0]), end=float(cuts[-1]) + period, period_start=cut, period_end=cut + period,
                  num_microbatches=number)


def _best_cut(schedule: Schedule, cuts: F64) -> float:
    """Return the cut at which the fewest blocks run, of equals the nearest to the middle."""
    blocks, slack = schedule.problem.num_blocks, TOLERANCE * schedule.makespan
    starts, ends = np.sort(schedule.starts[:blocks].ravel()), np.sort(schedule.ends[:blocks].ravel())
    running = np.searchsorted(starts, cuts - slack) - np.searchsorted(ends, cuts + slack)
    distance = np.round(np.abs(cuts - (cuts[0] + cuts[-1]) / 2) / slack) if slack > 0 else cuts
    return float(cuts[np.lexsort((distance, running))[0]])


def make_view(result: ScheduleResult, *, max_span: float) -> View:
    """Return what to draw: all of it if that fits ``max_span``, else with periods left out, no more than needed."""
    rows, steady, makespan = rows_of(result), find_steady(result), result.makespan
    if steady is None or makespan <= max_span:
        return View(rows=rows, span=makespan, steady=steady)
    period = steady.period_end - steady.period_start
    begin = steady.period_start - period * int((steady.period_start - steady.start) / period + 1e-9)
    number = min(int(np.ceil((makespan - max_span) / period)), int((steady.end - begin) / period + 1e-9) - 2)
    if number < 1:
        return View(rows=rows, span=makespan, steady=steady)
    gap, left_out = begin + period, number * period
    return View(rows=tuple(_without_gap(row, gap, left_out) for row in rows), span=makespan - left_out, gap=gap,
                steady=replace(steady, end=steady.end - left_out, period_start=begin, period_end=gap),
                num_periods=number)


def _without_gap(row: Row, gap: float, left_out: float) -> Row:
    """Return the row with the time from ``gap`` on, so long, taken out."""
    def moved(times: F64) -> F64:
        return np.where(times <= gap, times, np.maximum(gap, times - left_out))

    starts, ends = moved(row.starts), moved(row.ends)
    kept = (ends > starts) | (row.ends <= row.starts) & (starts != gap)
    steady = None if row.steady is None else (float(moved(np.asarray(row.steady[0]))),
                                              float(moved(np.asarray(row.steady[1]))))
    return replace(row, tasks=row.tasks[kept], microbatches=row.microbatches[kept], starts=starts[kept],
                   ends=ends[kept], steady=steady)


def block_shades(problem: ScheduleProblem) -> tuple[Shade, ...]:
    """Return for each task how dark it is drawn; transfers have the shade of the block that they come from."""
    roles = find_roles(problem)
    if roles is None or not roles.is_training:
        shades = _shades_by_memory(problem)
    else:
        known = roles.of_blocks()
        shades = [_SHADES[known[block].role] for block in range(problem.num_blocks)]
    return (*shades, *(shades[transfer.source] for transfer in problem.linked))


def _shades_by_memory(problem: ScheduleProblem) -> list[Shade]:
    """Return forward for what takes memory or leads to something that does; the rest is backward if any releases."""
    if all(block.memory >= 0 for block in problem.blocks):
        return ["forward"] * problem.num_blocks
    leads = [problem.memory_of(task) > 0 for task in range(problem.num_tasks)]
    for task in reversed(problem.topological):
        leads[task] = leads[task] or any(leads[edge.target] for edge in problem.successors[task])
    return ["forward" if lead else "backward" for lead in leads[: problem.num_blocks]]


def memory_curve(schedule: Schedule, row: Row) -> tuple[F64, F64]:
    """Return (times, amounts): what the device holds from each time on; only changes are listed."""
    problem = schedule.problem
    change = np.asarray([problem.memory_of(task) for task in row.tasks.tolist()], dtype=np.float64)
    is_late = (change < 0) & (problem.free_at == "end")
    kept = change != 0
    return np.where(is_late, row.ends, row.starts)[kept], np.cumsum(change)[kept]


def idle_part(schedule: Schedule) -> float:
    """Return the part of the makespan in which the device with the most work is idle."""
    problem, makespan = schedule.problem, schedule.makespan
    work = max(problem.device_work[: problem.num_devices], default=0.0) * schedule.num_microbatches
    return max(0.0, 1.0 - work / makespan) if makespan > 0 else 0.0


def compare_facts(result: ScheduleResult, named: Sequence[Named]) -> list[ScheduleFacts]:
    """Return the search's result and the named schedules; the shortest that fits is marked, the search among equals."""
    rows = [_facts(name="search", schedule=result.schedule, reason=None, is_search=True),
            *(_facts(name=item.name, schedule=item.schedule, reason=item.reason or None) for item in named)]
    fitting = [row.makespan for row in rows if row.makespan is not None and row.reason is None]
    limit = min(fitting) * (1 + TOLERANCE)
    best = next(row for row in rows if row.reason is None and row.makespan is not None and row.makespan <= limit)
    return [replace(row, is_best=row is best) for row in rows]


def _facts(*, name: str, schedule: Schedule | None, reason: str | None, is_search: bool = False) -> ScheduleFacts:
    if schedule is None:
        return ScheduleFacts(name=name, reason=reason or "it does not apply")
    return ScheduleFacts(name=name, is_search=is_search, makespan=schedule.makespan, idle=idle_part(schedule),
                         peak_memory=schedule.peak_memory(), reason=reason)


def facts_json(row: ScheduleFacts) -> dict[str, Any]:
    """Return the line as plain JSON values."""
    return {"name": row.name, "makespan": row.makespan, "idle": row.idle, "peak_memory": row.peak_memory,
            "fits": row.makespan is not None and row.reason is None, "reason": row.reason}
