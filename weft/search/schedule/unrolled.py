"""The schedule of N micro-batches as one constraint problem, free or with a steady middle that can be prolonged.

Free (``Middle`` absent): every task of every micro-batch has a start; minimise the makespan

    what waits for what, resources, memory, pairs and copies                                   (``timeline_model``)
    makespan >= end(i, n) + the longest path from the end of i to the end of a micro-batch             (_Builder)

With a steady middle of period P and K micro-batches per period, the micro-batches from ``first`` on, for ``laps`` + 1
periods, repeat: start(i, n+K) = start(i, n) + P; warm-up and cool-down are those before and after them. The pattern
itself is not given: it is found together with its warm-up and cool-down. If on every resource all micro-batches before
the second period of the middle are done before any from the last period on begins (``_add_cuts``), then any number of
periods can be inserted (``prolong``): two micro-batches that share a resource at a time were as far apart before.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import Solution, solve
from weft.search.schedule.timeline_model import TimelineModel
from weft.search.schedule.tuning import TUNING, Slice
from weft.search.schedule.whole import WholeProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """The part that repeats: micro-batches ``first .. first + (laps + 1) * microbatches - 1``."""

    period: int
    """In ticks."""
    microbatches: int
    """In one period."""
    first: int
    laps: int
    """How often the first period of the middle is repeated."""
    can_grow: bool = True
    """Whether more periods are to be inserted later (see ``_add_cuts``)."""

    @property
    def end(self) -> int:
        """Return the first micro-batch after the middle."""
        return self.first + (self.laps + 1) * self.microbatches


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """The best schedule found, in ticks, and what the solver proved about this model."""

    starts: F64
    """Of tasks, and below them of copies where there can be any (``moves.rows_of``)."""
    makespan: int
    bound: float
    is_optimal: bool


def solve_unrolled(whole: WholeProblem, num_microbatches: int, budget: Budget, *, effort: float, least: int = 0,
                   horizon: int | None = None, middle: Middle | None = None, hint: F64 | None = None,
                   slices: tuple[Slice, ...] = TUNING.to_prove, seed: int = 0) -> Unrolled | None:
    """Return the shortest schedule found that ends by ``horizon``, or None.

    ``least`` is a known bound: reaching it ends the search (it is not put into the model: the solver would try to meet
    it rather than improve). ``hint`` [tasks, micro-batches] is a schedule to start from; without a ``horizon`` none
    that ends later is looked for.
    """
    if horizon is None:
        assert hint is not None, "something must limit the model"
        horizon = whole.end_of(hint)
    builder = _Builder(whole, num_microbatches, horizon=horizon, middle=middle)
    best: Unrolled | None = None
    for item in slices:
        if item.lns and hint is None:
            continue
        if hint is not None:
            builder.model.clear_hints()
            builder.add_hint(hint)
        solution = solve(builder.model, budget, effort=item.part * effort, seed=seed, stop_at=least,
                         linearization=item.linearization, lns=item.lns)
        if solution.has_values:
            found = builder.read(solution)
            best = replace(found, bound=max(found.bound, best.bound) if best is not None else found.bound)
            hint = best.starts
        if solution.status in ("optimal", "infeasible") or budget.is_spent or (best and best.makespan <= least):
            break
    return best


def prolong(starts: F64, middle: Middle, num_microbatches: int) -> F64:
    """Return the schedule with so many micro-batches: more periods in the middle, what follows is moved."""
    extra, rest = divmod(num_microbatches - starts.shape[1], middle.microbatches)
    assert rest == 0, "only whole periods can be inserted"
    assert extra >= 0
    begin, size = middle.first, middle.microbatches
    inserted = [starts[:, begin: begin + size] + lap * middle.period for lap in range(extra)]
    moved = starts[:, begin:] + extra * middle.period
    return np.concatenate([starts[:, :begin], *inserted, moved], axis=1)


class Completion:
    """Schedules with a steady middle, each the hint of the next."""

    def __init__(self, whole: WholeProblem, starts: F64, period: int, num_microbatches: int) -> None:
        self.starts, self.period, self.num_microbatches = starts, period, num_microbatches
        self.number = starts.shape[1]
        self.last: tuple[F64, Middle] | None = None
        starts = starts[: whole.num_tasks]
        ends = starts + np.asarray(whole.times)[:, None] + max(whole.joint.values(), default=0)
        spans = [ends[list(tasks)].max() - starts[list(tasks)].min() for tasks in whole.resource_tasks if tasks]
        self.laps = max(1, *(math.ceil(float(span) / period - 1e-9) for span in spans))
        """Periods after which micro-batches no longer share a resource at a time."""

    def middle(self, size: int) -> Middle | None:
        """Return the middle after ``size`` micro-batches of warm-up, or None if there are too few micro-batches.

        With few micro-batches it is so long that nothing needs to be inserted.
        """
        middle = Middle(period=self.period, microbatches=self.number, first=size, laps=self.laps)
        if self.total(middle, size) <= self.num_microbatches:
            return middle
        laps = (self.num_microbatches - 2 * size) // self.number - 1
        return replace(middle, laps=laps, can_grow=False) if laps >= 1 else None

    def total(self, middle: Middle, size: int) -> int:
        """Return the micro-batches of warm-up, middle and cool-down, so that whole periods make up the rest."""
        least = middle.end + size
        return least + (self.num_microbatches - least) % middle.microbatches

    def hint(self, middle: Middle, total: int) -> F64:
        """Return a schedule of this form: the last one prolonged, or the steady state unrolled."""
        if self.last is not None and self.last[1].can_grow and (total - self.last[0].shape[1]) % self.number == 0:
            return prolong(self.last[0], self.last[1], total)
        laps, copies = np.divmod(np.arange(total) - middle.first, self.number)
        starts = self.starts[:, copies] + laps * self.period
        return np.asarray(starts - np.nanmin(starts), dtype=np.float64)


class _Builder:
    """Variables and constraints; see the module's docstring."""

    def __init__(self, whole: WholeProblem, num_microbatches: int, *, horizon: int,
                 middle: Middle | None) -> None:
        self.whole, self.num_microbatches, self.middle = whole, num_microbatches, middle
        self.model = cp_model.CpModel()
        self.heads, self.tails = whole.heads(), whole.tails()
        self.horizon = horizon
        self.makespan = self.model.new_int_var(0, horizon, "")
        self.start: dict[tuple[int, int], cp_model.LinearExprT] = {}
        self.variables: dict[tuple[int, int], cp_model.IntVar] = {}
        for task, index in itertools.product(range(whole.num_tasks), range(num_microbatches)):
            self._add_start(task, index)
        self.timeline = TimelineModel(self.model, whole, self.start, num_microbatches, horizon)
        self.timeline.add_order()
        for task in range(whole.num_tasks):
            for index in range(num_microbatches) if whole.copy_times else (num_microbatches - 1,):
                self.model.add(self.makespan >= self.timeline.end[task, index] + self.tails[task])
        self.timeline.add_resources()
        for device in range(whole.problem.num_devices):
            self.timeline.add_memory(device)
        if middle is not None and middle.can_grow:
            self._add_cuts(middle)
        self.model.minimize(self.makespan)

    def _add_start(self, task: int, index: int) -> None:
        middle = self.middle
        if middle is not None and middle.first + middle.microbatches <= index < middle.end:
            lap, copy = divmod(index - middle.first, middle.microbatches)
            self.start[task, index] = self.start[task, middle.first + copy] + lap * middle.period
            return
        last = self.horizon - self.tails[task] - self.whole.times[task]
        variable = self.model.new_int_var(self.heads[task], max(self.heads[task], last), "")
        self.start[task, index] = self.variables[task, index] = variable

    def _add_cuts(self, middle: Middle) -> None:
        """Separate, on every resource, what comes before the second period of the middle from its last period on."""
        early = middle.first + middle.microbatches
        late = middle.first + middle.laps * middle.microbatches
        for tasks in self.whole.problem.resource_tasks:
            if not tasks:
                continue
            cut = self.model.new_int_var(0, self.horizon, "")
            for task in tasks:
                self.model.add(cut >= self.timeline.end[task, early - 1])
                if late < self.num_microbatches:
                    self.model.add(cut <= self.start[task, late])

    def add_hint(self, starts: F64) -> None:
        """Start the search from this schedule."""
        for (task, index), variable in self.variables.items():
            self.model.add_hint(variable, round(float(starts[task, index])))
        self.timeline.add_hint(starts)
        self.model.add_hint(self.makespan, self.whole.end_of(starts))

    def read(self, solution: Solution) -> Unrolled:
        """Return the solution's starts."""
        assert solution.bound is not None
        bound = solution.bound if self.timeline.is_complete else 0.0
        return Unrolled(starts=self.timeline.read(solution), makespan=solution.value(self.makespan), bound=bound,
                        is_optimal=self.timeline.is_complete and solution.status == "optimal")
