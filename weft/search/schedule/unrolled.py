"""The schedule of N micro-batches as one constraint problem, free or with a steady middle that can be prolonged.

Free (``Middle`` absent): every task of every micro-batch has a start; minimise the makespan

    start(j, n) >= start(i, n) + time(i) + delay                      for every edge i -> j           (_add_edges)
    start(i, n+1) >= start(i, n) + time(i)                            micro-batches are alike         (_add_edges)
    no two tasks of a resource overlap                                                                (_add_resources)
    sum of the amounts of holds [start of take, end of release) at any time <= limit, on every device (_add_memory)

With a steady middle of period P and K micro-batches per period, the micro-batches from ``first`` on, for ``laps`` + 1
periods, repeat: start(i, n+K) = start(i, n) + P; warm-up and cool-down are those before and after them. The pattern
itself is not given: it is found together with its warm-up and cool-down. If on every resource all micro-batches before
the second period of the middle are done before any from the last period on begins (``_add_cuts``), then any number of
periods can be inserted (``prolong``): two micro-batches that share a resource at a time were as far apart before.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64
from weft.search.common.budget import Budget
from weft.search.common.cpsat import Solution, solve
from weft.search.schedule.whole import WholeProblem


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the effort, and how it is spent."""

    part: float
    linearization: int = 0
    """How much of the model goes into the linear relaxation: without one better schedules are found sooner, with one
    they are proven to be the best sooner."""
    lns: bool = False
    """Improve the hint by large neighbourhood search."""


TO_IMPROVE: Final = (Slice(0.7), Slice(0.3, lns=True))
TO_PROVE: Final = (Slice(0.5), Slice(0.3, lns=True), Slice(0.2, linearization=1))


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
    makespan: int
    bound: float
    is_optimal: bool


def solve_unrolled(whole: WholeProblem, num_microbatches: int, budget: Budget, *, horizon: int, effort: float,
                   least: int = 0, middle: Middle | None = None, hint: F64 | None = None,
                   slices: tuple[Slice, ...] = TO_PROVE, seed: int = 0) -> Unrolled | None:
    """Return the shortest schedule found that ends by ``horizon``, or None.

    ``least`` is a known bound: reaching it ends the search (it is not put into the model: the solver would try to meet
    it rather than improve). ``hint`` [tasks, micro-batches] is a schedule to start
    from.
    """
    builder = _Builder(whole, num_microbatches, horizon=horizon, middle=middle)
    builder.build()
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

    def _add_start(self, task: int, index: int) -> None:
        middle = self.middle
        if middle is not None and middle.first + middle.microbatches <= index < middle.end:
            lap, copy = divmod(index - middle.first, middle.microbatches)
            self.start[task, index] = self.start[task, middle.first + copy] + lap * middle.period
            return
        last = self.horizon - self.tails[task] - self.whole.times[task]
        variable = self.model.new_int_var(self.heads[task], max(self.heads[task], last), "")
        self.start[task, index] = self.variables[task, index] = variable

    def build(self) -> None:
        """Add all constraints and the objective."""
        self._add_edges()
        self._add_resources()
        self._add_memory()
        if self.middle is not None and self.middle.can_grow:
            self._add_cuts(self.middle)
        self.model.minimize(self.makespan)

    def _add_edges(self) -> None:
        times, start = self.whole.times, self.start
        for index in range(self.num_microbatches):
            for source, target, delay in self.whole.edges:
                self.model.add(start[target, index] >= start[source, index] + times[source] + delay)
            for task in range(self.whole.num_tasks):
                if index:
                    self.model.add(start[task, index] >= start[task, index - 1] + times[task])
        for task in range(self.whole.num_tasks):
            end = start[task, self.num_microbatches - 1] + times[task]
            self.model.add(self.makespan >= end + self.tails[task])

    def _add_resources(self) -> None:
        for tasks in self.whole.problem.resource_tasks:
            self.model.add_no_overlap([
                self.model.new_fixed_size_interval_var(self.start[task, index], self.whole.times[task], "")
                for task in tasks for index in range(self.num_microbatches)])

    def _add_memory(self) -> None:
        for device, limit in enumerate(self.whole.limits):
            holds = [hold for hold in self.whole.holds if hold.device == device]
            if limit is None or not holds:
                continue
            before = sum(hold.amount for hold in holds if hold.take is None) * self.num_microbatches
            intervals, amounts = [], []
            for hold, index in itertools.product(holds, range(self.num_microbatches)):
                begin = 0 if hold.take is None else self.start[hold.take, index]
                end = self.horizon if hold.release is None else (
                    self.start[hold.release, index] + self.whole.times[hold.release])
                size = self.model.new_int_var(0, self.horizon, "")
                intervals.append(self.model.new_interval_var(begin, size, end, ""))
                amounts.append(hold.amount)
            self.model.add_cumulative(intervals, amounts, limit + before)

    def _add_cuts(self, middle: Middle) -> None:
        """Separate, on every resource, what comes before the second period of the middle from its last period on."""
        early = middle.first + middle.microbatches
        late = middle.first + middle.laps * middle.microbatches
        for tasks in self.whole.problem.resource_tasks:
            if not tasks:
                continue
            cut = self.model.new_int_var(0, self.horizon, "")
            for task in tasks:
                self.model.add(cut >= self.start[task, early - 1] + self.whole.times[task])
                if late < self.num_microbatches:
                    self.model.add(cut <= self.start[task, late])

    def add_hint(self, starts: F64) -> None:
        """Start the search from this schedule."""
        for (task, index), variable in self.variables.items():
            self.model.add_hint(variable, round(float(starts[task, index])))
        ends = starts + np.asarray(self.whole.times, dtype=np.float64)[:, None]
        self.model.add_hint(self.makespan, round(float(ends.max())))

    def read(self, solution: Solution) -> Unrolled:
        """Return the solution's starts."""
        starts = np.asarray([[solution.value(self.start[task, index]) for index in range(self.num_microbatches)]
                             for task in range(self.whole.num_tasks)], dtype=np.float64)
        assert solution.bound is not None
        return Unrolled(starts=starts, makespan=solution.value(self.makespan), bound=solution.bound,
                        is_optimal=solution.status == "optimal")
