"""The steady state: the smallest period in which every block runs once for each of K micro-batches.

Modulo scheduling. For a trial period P (ticks), every task i of each of the K micro-batches has

    start(i, k) = offset(i, k) + P * lap(i, k)          0 <= offset < P                                  (``modulo``)

A period is feasible if a smaller one is (stretch time), so the smallest is found by bisection (``_Search.bisect``),
below what annealing of cyclic orders has found (``anneal``). Every solution found is tightened to the smallest period
of its own cyclic order (``tighten``), in real time at the end; one with copies to the host, where more than the order
counts, stays as it is. No period is smaller, per micro-batch and for any K, than ``period_bound``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64
from weft.search.common.budget import Budget, OutOfTime
from weft.search.common.cpsat import solve
from weft.search.common.incumbent import Incumbent
from weft.search.schedule.anneal import Annealer
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.cyclic import NoPeriod, Tight, tighten
from weft.search.schedule.first import first_schedule
from weft.search.schedule.modulo import ModuloModel
from weft.search.schedule.moves import rows_of
from weft.search.schedule.named import named_schedules
from weft.search.schedule.offload import with_copies
from weft.search.schedule.pairing import with_pairs
from weft.search.schedule.pairs import find_pairs
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule, find_problems
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.whole import WholeProblem, to_whole


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """A pattern that can repeat for ever: task i of micro-batch k + K m starts at ``starts[i, k] + m * period``."""

    problem: ScheduleProblem
    starts: F64
    """[tasks, K], the earliest is 0."""
    period: float
    bound: float
    """No steady state takes less per micro-batch."""
    proven: tuple[int, ...] = ()
    """The K for which no smaller period exists on the solver's grid, by exhaustive search."""
    moves: F64 | None = None
    """[2 * copies, K]: when what copies take leaves and comes back, NaN where it stays; None: all of it stays."""

    @property
    def num_microbatches(self) -> int:
        """Return K."""
        return int(self.starts.shape[1])

    @property
    def rate(self) -> float:
        """Return the time per micro-batch."""
        return self.period / self.num_microbatches

    @property
    def is_optimal(self) -> bool:
        """Return whether the bound is met."""
        return self.rate <= self.bound * (1 + 1e-9)

    def in_ticks(self, whole: WholeProblem) -> Tight:
        """Return the steady state with the same cyclic order in ticks, with a whole period."""
        ticks = float(whole.ticks)
        if self.moves is not None:
            rows, period = np.vstack([self.starts, self.moves]) * ticks, self.period * ticks
            if np.nanmax(np.abs(rows - np.round(rows))) > TUNING.tick_slack or abs(period - round(period)) > (
                    TUNING.tick_slack):
                raise NoPeriod("it is not on the grid")
            return Tight(starts=np.round(rows), period=round(period))
        return tighten(whole, self.starts * ticks, self.period * ticks, whole=True)

    def unroll(self, num_microbatches: int) -> Schedule:
        """Return the schedule that repeats the pattern from the first micro-batch to the last."""
        laps, copies = np.divmod(np.arange(num_microbatches), self.num_microbatches)
        starts = self.starts[:, copies] + laps * self.period
        moves = None if self.moves is None else self.moves[:, copies] + laps * self.period - starts.min()
        return Schedule(problem=self.problem, starts=starts - starts.min(), moves=moves)

    def busy(self) -> float:
        """Return how long the busiest device does something in a period; of a pair once."""
        problem = self.problem
        work = [self.num_microbatches * time for time in problem.device_work[: problem.num_devices]]
        lap = np.floor(self.starts / self.period + 1e-9) if self.period > 0 else 0.0
        for one, other in find_pairs(problem, self.starts - lap * self.period, 1e-9 * self.period):
            saved = problem.task_times[one[0]] + problem.task_times[other[0]] - problem.joint[one[0], other[0]]
            for device in problem.blocks[one[0]].devices:
                work[device] -= saved
        return max(work, default=0.0)


def find_steady_state(problem: ScheduleProblem, *, budget: Budget, seed: int = 0,
                      max_microbatches: int = TUNING.max_microbatches) -> SteadyState | None:
    """Return the steady state of smallest period per micro-batch that was found; None if memory admits none at all.

    What named schedules repeat in their middle is a start, and the bound is tried, which is most often the answer. Then
    come rounds, each with more effort: annealing for every K finds patterns, also of larger K, and bisection between
    what is excluded and the best found so far excludes the rest. No hard period keeps the search from the others. It
    ends when the bound is met, or the budget is spent.
    """
    return next(iter(find_steady_states(problem, budget=budget, seed=seed, max_microbatches=max_microbatches)), None)


def find_steady_states(problem: ScheduleProblem, *, budget: Budget, seed: int = 0,
                       max_microbatches: int = TUNING.max_microbatches,
                       examples: Sequence[Schedule] = ()) -> list[SteadyState]:
    """Return the steady state of smallest period per micro-batch, then the best with fewer micro-batches per period.

    ``examples`` are schedules that may repeat something in their middle, perhaps with too little memory for it.
    ``OutOfTime`` ends the search with what has been found.
    """
    bound = period_bound(problem)
    if bound is None:
        return []
    search = _Search(to_whole(problem), bound, budget, seed, examples, max_microbatches)
    with suppress(OutOfTime):
        search.run()
    proven = () if problem.copies else tuple(sorted(search.proven))
    found: list[SteadyState] = []
    for number in sorted(search.patterns):
        steady = search.patterns[number]
        if not found or steady.rate < found[0].rate * (1 - 1e-9):
            found.insert(0, replace(steady, proven=proven))
    return found


def variants(steady: SteadyState, *, budget: Budget, seed: int = 0) -> Iterator[SteadyState]:
    """Yield other steady states of the same period: one with short micro-batches, then random ones until time is up.

    The solver gives the same answer to the same question, so each random one minimises starts with random weights.
    """
    search = _Search(to_whole(steady.problem), steady.bound, budget, seed)
    if steady.period <= 0 or search.is_large(steady.num_microbatches):
        return
    tight = steady.in_ticks(search.whole)
    for number in range(TUNING.max_variants):
        if budget.is_spent:
            break
        builder = ModuloModel(search.whole, int(tight.period), steady.num_microbatches)
        if number == 0:
            builder.minimize_latency(tight.starts[: search.whole.num_tasks])
        else:
            builder.minimize_weighted(Random(f"{seed} {number}"))
        effort = TUNING.quick_effort if number == 0 else TUNING.variant_effort
        solution = solve(builder.model, budget, effort=effort, seed=seed + number, linearization=0)
        if not solution.has_values:
            break
        found = steady_from_ticks(search.whole, builder.read(solution), tight.period, steady.bound)
        if found.rate <= steady.rate * (1 + 1e-9) and _fits(found):
            yield found


class _Search:
    """The best steady state so far, and what is known to be impossible for each K."""

    def __init__(self, whole: WholeProblem, bound: float, budget: Budget, seed: int,
                 examples: Sequence[Schedule] = (), most: int = TUNING.max_microbatches) -> None:
        self.whole, self.budget, self.seed, self.examples = whole, budget, seed, examples
        self.most = most
        """Micro-batches per period, at most."""
        self.best = Incumbent[SteadyState](budget=budget, what="period per micro-batch", bound=bound)
        self.lowest: dict[int, int] = {}
        """Smallest period (ticks) not yet excluded, by K."""
        self.proven: set[int] = set()
        self.patterns: dict[int, SteadyState] = {}
        """The best found, by K."""
        self.annealer: Annealer | None = None
        self.tried: dict[tuple[int, int], float] = {}
        """Effort that was spent in vain, by K and period."""

    @property
    def may_go_on(self) -> bool:
        return not self.budget.is_spent and not self.best.is_proven

    def run(self) -> None:
        """Search until the bound is met or the budget is spent."""
        self.start()
        numbers = [number for number in range(1, self.most + 1) if not self.is_large(number)]
        exact = numbers[: TUNING.max_exact_microbatches]
        for number in exact:
            self.try_bound(number)
        for effort in TUNING.trial_efforts:
            for number in numbers:
                self.anneal(number, TUNING.anneal_share * effort)
            for number in exact:
                self.bisect(number, effort)

    def start(self) -> None:
        """Begin with one micro-batch after the other, and with what schedules by rule repeat."""
        try:
            alone = first_schedule(self.whole.problem, 1, self.budget)
        except NoFeasiblePlan:  # only several together fit: some release what they have not taken
            return
        steady = SteadyState(problem=alone.problem, starts=alone.starts, period=alone.makespan, bound=self.best.bound,
                             moves=alone.moves)
        if not self.is_large(1) and alone.moves is None:
            if alone.makespan <= 0:
                return
            steady = make_steady(self.whole.problem, alone.starts, alone.makespan, self.best.bound)
        self.offer(steady, "one micro-batch after the other")
        length = max(TUNING.example_length, TUNING.example_per_device * alone.problem.num_devices)
        most = TUNING.max_greedy // self.whole.num_tasks
        if length <= most:
            for example in named_schedules(alone.problem, min(2 * length, most)).values():
                self.offer_repeated(example, "named")
        for example in self.examples:
            self.offer_repeated(example, "with pairs and copies")

    def offer(self, steady: SteadyState, by: str) -> None:
        """Keep the steady state if it is the best, or the best of its K."""
        known = self.patterns.get(steady.num_microbatches)
        if known is None or steady.rate < known.rate * (1 - 1e-9):
            self.patterns[steady.num_microbatches] = steady
        self.best.offer(steady.rate, steady, f"steady state: {steady.num_microbatches} per period, {by}")

    def offer_repeated(self, example: Schedule, by: str) -> None:
        """Offer what a schedule repeats in its middle, and where blocks may run at once, with pairs in its order."""
        for item in (example, *(with_pairs(example) if example.problem.overlaps else ())):
            fitted = with_copies(item) if item.problem.copies else item
            found = None if fitted is None else find_pattern(fitted, self.best.value, self.best.bound, self.most)
            if found is None and fitted is not None and fitted.moves is None and self.may_go_on:
                found = about_pattern(fitted, self.best.value, self.best.bound, self.most)
            if found is not None:
                self.offer(found, by)

    def anneal(self, number: int, effort: float) -> None:
        """Anneal the best of K = ``number``, or of a divisor."""
        known = [steady for divisor, steady in self.patterns.items() if number % divisor == 0 and steady.moves is None]
        is_large = number * self.whole.num_tasks > TUNING.max_annealed
        if not self.may_go_on or number in self.proven or not known or self.best.bound <= 0 or is_large:
            return
        self.best.tell(f"steady state: {number} per period, annealing")
        if self.annealer is None:
            self.annealer = Annealer(self.whole.problem, self.best.bound, self.seed)
        best = min(known, key=lambda steady: steady.rate)
        times = number // best.num_microbatches
        begin = np.hstack([best.starts / best.period + lap for lap in range(times)]) / times
        places = self.annealer.run(begin, effort, self.budget)
        if places is not None:
            with suppress(NoPeriod):
                found = make_steady(self.whole.problem, places, 1.0, self.best.bound)
                if _fits(found):
                    self.offer(found, "annealed")
                    if self.whole.joint:
                        self.offer_repeated(found.unroll(TUNING.example_length), "annealed")

    def try_bound(self, number: int) -> None:
        """Try the bound itself, where times and K admit it."""
        period = self._least(number)
        if self.may_go_on and period <= self.best.bound * number * float(self.whole.ticks) * (1 + 1e-9):
            self._try(period, number, TUNING.trial_efforts[0])

    def is_large(self, number: int) -> bool:
        """Return whether the solver's model for K = ``number`` would take long even to build."""
        return sum((len(tasks) * number) ** 2 // 2 for tasks in self.whole.resource_tasks) > TUNING.max_pairs

    def bisect(self, number: int, effort: float) -> None:
        """Find the smallest period for K = ``number`` with so much effort for each trial.

        A trial that stays undecided counts as impossible in this round. The bound itself is tried first, since a period
        that meets it ends the search.
        """
        low, high = max(self._least(number), self.lowest.get(number, 0)), self._high(number)
        period = low
        while number not in self.proven and low < high and self.may_go_on:
            if self.tried.get((number, period), 0.0) < effort and self._try(period, number, effort) is not None:
                high = self._high(number)
            else:
                self.tried[number, period] = effort
                low = max(period + 1, self.lowest.get(number, 0))
            period = (low + high) // 2
        if self.lowest.get(number, 0) >= self._high(number):
            self.proven.add(number)

    def _high(self, number: int) -> int:
        """Return the smallest period, in ticks, that would be no better than the best."""
        if self.best.answer is None:  # a cyclic order has no critical cycle that is longer than everything together
            return 2 + number * (sum(self.whole.times) + sum(delay for _, _, delay in self.whole.edges))
        return math.ceil(self.best.value * number * float(self.whole.ticks) - 1e-6)

    def _least(self, number: int) -> int:
        """Return the bound for K = ``number`` in ticks, of the rounded times."""
        rounded = max(self.whole.work, default=0) * number
        return max(1, rounded, math.ceil(self.best.bound * float(self.whole.ticks) * number - 1e-6))

    def _try(self, period: int, number: int, effort: float) -> SteadyState | None:
        """Return the tightened steady state of this period, if there is one and the solver finds it."""
        self.best.tell(f"steady state: {number} per period, trying {period / float(self.whole.ticks):.6g}")
        for item in TUNING.trial_slices:
            model = ModuloModel(self.whole, period, number, is_ordered=item.ordered)
            solution = solve(model.model, self.budget, effort=item.part * effort, seed=self.seed,
                             linearization=item.linearization)
            if solution.status != "unknown" or self.budget.is_spent:
                break
        if not solution.has_values:
            if solution.status == "infeasible":
                self.lowest[number] = max(self.lowest.get(number, 0), period + 1)
            return None
        found = steady_from_ticks(self.whole, model.read(solution), float(period), self.best.bound)
        if not _fits(found):
            return None
        self.offer(found, "by the solver")
        return found


def steady_from_ticks(whole: WholeProblem, rows: F64, period: float, bound: float) -> SteadyState:
    """Return the steady state with these starts of tasks and copies in ticks, tightened where nothing leaves."""
    if np.isnan(rows[whole.num_tasks:]).all():  # only the order counts, whatever the units
        return make_steady(whole.problem, rows[: whole.num_tasks], period, bound)
    ticks = float(whole.ticks)
    return _from_rows(whole.problem, rows / ticks, period / ticks, bound)


def make_steady(problem: ScheduleProblem, starts: F64, period: float, bound: float,
                most: float = math.inf) -> SteadyState:
    """Return the steady state with the cyclic order of these starts (in any units), tightened in real time.

    Raise ``NoPeriod`` where its period is longer than ``most``.
    """
    tight = tighten(problem, starts, period, most=most)
    exact = tight.starts - tight.starts.min()
    for task in problem.topological:  # no rounding may turn the order of what takes no time and what depends on it
        for edge in problem.predecessors[task]:
            exact[task] = np.maximum(exact[task], exact[edge.source] + problem.task_times[edge.source] + edge.delay)
    return SteadyState(problem=problem, starts=exact, period=tight.period, bound=bound)


def find_pattern(schedule: Schedule, rate: float, bound: float,
                 most: int = TUNING.max_microbatches) -> SteadyState | None:
    """Return what the schedule repeats in its middle, tightened, if that takes less than ``rate`` per micro-batch.

    A period has at most so many micro-batches.
    """
    starts, total = rows_of(schedule), schedule.num_microbatches
    begin, end = total // 3, total - total // 4
    for number in range(1, min(most, (end - begin) // 3) + 1):
        steps = starts[:, begin + number: end] - starts[:, begin: end - number]
        period = float(steps[0, 0])
        is_kept = (np.isnan(starts[:, begin + number: end]) == np.isnan(starts[:, begin: end - number])).all()
        is_same = is_kept and np.nanmax(np.abs(steps - period)) <= 1e-9 * schedule.makespan
        if 0 < period < rate * number * (1 - 1e-9) and is_same:
            found = _from_rows(schedule.problem, starts[:, begin: begin + number], period, bound)
            return found if _fits(found) else None
    return None


def about_pattern(schedule: Schedule, rate: float, bound: float, most: int) -> SteadyState | None:
    """Return the best that becomes of the order in a schedule's middle, where that repeats itself only about.

    What one window of it comes to is chance, so there are several, fewer of the longer ones, which take more time.
    """
    total, best, starts = schedule.num_microbatches, None, schedule.starts
    for number in range(1, min(most, total // 6) + 1):
        for begin in np.unique(np.linspace(total // 4, 2 * total // 3, max(1, TUNING.windows // number), dtype=int)):
            with suppress(NoPeriod):
                period = float(np.mean(starts[:, begin + number] - starts[:, begin]))
                found = make_steady(schedule.problem, starts[:, begin: begin + number], period, bound,
                                    most=rate * number * (1 - 1e-9))
                if _fits(found):
                    best, rate = found, found.rate
    return best


def _from_rows(problem: ScheduleProblem, rows: F64, period: float, bound: float) -> SteadyState:
    """Return the steady state of a table of tasks and copies, tightened where nothing leaves."""
    starts, moves = rows[: problem.num_tasks], rows[problem.num_tasks:]
    if np.isnan(moves).all():
        return make_steady(problem, starts, period, bound)
    return SteadyState(problem=problem, starts=starts - starts.min(), moves=moves - starts.min(), period=period,
                       bound=bound)


def _fits(steady: SteadyState) -> bool:
    """Return whether memory suffices: the order of what takes no time, or differs by rounding, may have been lost.

    So many laps are looked at that the first micro-batches end before the last begin.
    """
    laps = 2 + math.ceil(float(steady.starts.max()) / steady.period) if steady.period > 0 else 2
    return not find_problems(steady.unroll(steady.num_microbatches * min(laps, TUNING.max_laps)))
