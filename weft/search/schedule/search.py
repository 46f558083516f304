"""Schedule search: the main path.

    variables    start(i, n) >= 0      for every task i (a block or a transfer) of every micro-batch n < N    (Schedule)
    minimise     the latest start(i, n) + time(i)                                                    (Schedule.makespan)
    subject to   start(j, n) >= start(i, n) + time(i) + delay      for every edge i -> j                 (_dependencies)
                 no two tasks of a device, or of a direction of a link, overlap                              (_overlaps)
                 on every device the memory of the blocks that have begun <= its limit                         (_memory)

(``find_problems`` of ``weft.search.schedule.schedule`` checks all three.) That is too large to be solved as it stands,
so the search goes in steps:

    some schedule within memory      one micro-batch after the other, or NoFeasiblePlan      first
    without pairs and copies         the whole search, its schedules with pairs and copies   pairing, offload
    named schedules, greedy rules    what everybody would try, made to fit where it does not  named, first
    steady state                     smallest period, for K = 1, 2, 3, ... micro-batches     steady, anneal
    completion                       warm-up, steady middle and cool-down found together     unrolled (Completion)
    all of it at once                where N is small                                        unrolled
    bounds                           work, paths, memory; idle while filling and draining    bounds

Every schedule that is kept has passed ``check_schedule``; the best of all is returned, so the result is never worse
than a named schedule that fits. The search ends when a bound is met, or when its budget is spent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from weft.base.errors import InputError, NoFeasiblePlan
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.search.common.incumbent import Incumbent
from weft.search.schedule.bounds import earliest_starts, least_idle, makespan_bound, period_bound
from weft.search.schedule.cyclic import NoPeriod
from weft.search.schedule.first import first_schedule, greedy_schedules
from weft.search.schedule.moves import NoOrder, earliest
from weft.search.schedule.named import named_rows
from weft.search.schedule.offload import with_copies
from weft.search.schedule.pairing import with_pairs
from weft.search.schedule.problem import ScheduleProblem, simplified, without_instants
from weft.search.schedule.schedule import Schedule, ScheduleResult, check_schedule, find_problems
from weft.search.schedule.steady import SteadyState, find_pattern, find_steady_states, variants
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.unrolled import Completion, Middle, prolong, solve_unrolled
from weft.search.schedule.whole import Rounding, WholeProblem, to_whole

log = logging.getLogger(__name__)


def schedule(problem: ScheduleProblem, *, microbatches: int, time_limit: float | None = None,
             effort: float | None = None, seed: int = 0,
             progress: Callable[[str], None] = lambda text: None) -> ScheduleResult:
    """Return the best checked schedule of so many micro-batches, with its bound.

    ``time_limit`` is in seconds. ``effort`` is about how many CPU seconds the search takes at most, by deterministic
    count; unless given, as many as the limit, or without one as the problem's size suggests. Ctrl-C ends the search
    with the best schedule so far. Raises ``NoFeasiblePlan`` if memory admits no schedule.
    """
    if microbatches < 1:
        raise InputError(f"the number of micro-batches must be 1 or more, not {microbatches}")
    if microbatches * problem.num_tasks > TUNING.max_instances:
        raise InputError(f"{microbatches} micro-batches of {problem.num_tasks} blocks and transfers are more than "
                         f"{TUNING.max_instances} in all; try fewer micro-batches: the steady state is the same")
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"the time limit must be more than 0 seconds, not {time_limit}")
    begin = time.process_time()
    seconds = time_limit
    if seconds is None:  # more for more blocks
        seconds = TUNING.default_seconds * min(6.0, max(1.0, problem.num_tasks / 24))
    budget = Budget(effort=seconds if effort is None else effort, report=progress,
                    deadline=None if time_limit is None else time.monotonic() + time_limit)
    search = _Search(problem, microbatches, budget, seed)
    search.run()
    return search.result(time.process_time() - begin)


class _Search:
    """The best schedule and the best bound so far, and what the methods tell each other."""

    def __init__(self, problem: ScheduleProblem, num_microbatches: int, budget: Budget, seed: int) -> None:
        self.problem, self.num_microbatches, self.budget, self.seed = problem, num_microbatches, budget, seed
        self.effort = budget.effort
        self.whole = self._to_whole("up")
        self.best = Incumbent[Schedule](budget=budget, what="makespan", bound=makespan_bound(problem, num_microbatches))
        self.steady: SteadyState | None = None
        """The one of smallest period."""
        self.middle: SteadyState | None = None
        """The one that does best for so many micro-batches: a longer period per micro-batch may be sooner in reach."""
        self.completion: Completion | None = None
        self.examples: list[Schedule] = []
        """Schedules in whose middle a steady state may be found."""
        self.simple: SteadyState | None = None
        """The one of smallest period without pairs and copies, where there could be some."""
        self.rival: _Search | None = None
        """The search with pairs and copies, of which this is a part: it gets all that is found here at once."""

    def _to_whole(self, rounding: Rounding) -> WholeProblem:
        if self.problem.num_tasks * self.num_microbatches <= TUNING.max_tiny:
            return to_whole(self.problem, rounding=rounding, max_exact=TUNING.tiny_exact,
                            resolution=TUNING.tiny_resolution)
        return to_whole(self.problem, rounding=rounding)

    @cached_property
    def lower(self) -> WholeProblem:
        """Return the problem on the coarse grid with times rounded down, for bounds that need no finer one."""
        return to_whole(self.problem, rounding="down")

    def run(self) -> None:
        """Search until a bound is met or the budget is spent; Ctrl-C ends it once there is a schedule."""
        try:
            for phase in self._phases():
                with cut_short(None if self.best.answer is None else self.budget.deadline), suppress(NoPeriod, NoOrder):
                    phase()
                if self.best.is_proven and self.steady is not None:
                    break
                if self.rival is not None and self.steady is not None and self.best.answer is not None:
                    self.rival.offer_order(self.best.answer)
                    if self.rival.best.value <= self.best.bound:
                        break
        except OutOfTime:
            if self.best.answer is None:  # it is a caller's time that is over
                raise
            self.best.tell("time limit")
        except KeyboardInterrupt:
            if self.best.answer is None:
                raise
            self.budget.is_interrupted = True

    def _phases(self) -> Iterator[Callable[[], None]]:
        """Yield what to do next; cheap things first."""
        yield self.start
        if self.effort > TUNING.rules_effort and (self.problem.overlaps or self.problem.copies):
            yield self.try_simpler  # first: whatever else there is to try, time may be up before
        yield self.try_rules
        if self.effort <= TUNING.rules_effort:
            return
        if self.problem.instants:
            yield self.try_instants
        yield self.find_steady
        if self.best.is_done:
            return
        yield self.bound_by_order
        is_small = self.num_microbatches * self.problem.num_tasks <= TUNING.max_free
        yield lambda: self.complete(TUNING.first_sizes[:2] if is_small else TUNING.first_sizes)
        if self.whole.is_exact:
            yield self.bound_by_windows
        if is_small:
            yield lambda: self.solve_whole(TUNING.whole_share * self.budget.effort)
        if not self.whole.is_exact:
            yield self.bound_by_windows
        yield lambda: self.complete(TUNING.later_sizes)
        if is_small:
            yield lambda: self.solve_whole(self.budget.effort)
            yield self.bound_whole

    def offer(self, candidate: Schedule, by: str = "search") -> None:
        """Keep the schedule if it is allowed and shorter than the best."""
        if self.best.is_better(candidate.makespan) and not find_problems(candidate):
            self.best.offer(candidate.makespan, candidate, by)
            if self.rival is not None:
                self.rival.offer(replace(candidate, problem=self.rival.problem))

    def offer_order(self, candidate: Schedule, by: str = "search") -> None:
        """Offer the schedule, perhaps of a loosened problem: where that can be, also with pairs and with copies."""
        candidate = replace(candidate, problem=self.problem)
        for item in (candidate, *(with_pairs(candidate) if self.problem.overlaps else ())):
            note = by if item is candidate or by == "search" else f"{by} with pairs"
            self.offer(item, note)
            if self.problem.copies and self.best.is_better(item.makespan):
                fitted = with_copies(item)
                if fitted is not None:
                    self.offer(fitted, note if by == "search" else f"{note}, with offload")

    def raise_bound(self, bound: float) -> None:
        """Keep the bound if it is better. One above a schedule that exists would be wrong, and proves nothing."""
        if bound > self.best.value * (1 + 1e-6):
            log.warning("a bound of %.9g lies above a schedule of %.9g: left out", bound, self.best.value)
        else:
            self.best.raise_bound(bound)

    def start(self) -> None:
        """Find some schedule."""
        self.offer(first_schedule(self.problem, self.num_microbatches, self.budget))

    def try_rules(self) -> None:
        """Find more schedules by rules."""
        size = self.problem.num_tasks * self.num_microbatches
        if size > TUNING.max_greedy and self.budget.is_spent:
            return
        problems = (self.problem, *([simplified(self.problem, None)] if self.problem.copies else []))
        too_large = []
        for problem in problems:
            for row in named_rows(problem, self.num_microbatches, hopeful_first=self.budget.deadline is not None):
                if row.schedule is not None and row.is_usable:
                    self.offer_order(row.schedule, row.name)
                elif row.schedule is not None:
                    too_large.append(row.schedule)
        if not self.best.is_proven and size <= TUNING.max_greedy:
            is_small = size <= TUNING.max_greedy // (8 if too_large else 20)
            limits = TUNING.in_flight if is_small else (self.problem.num_devices,)
            limits = tuple(sorted({min(self.num_microbatches, limit) for limit in (*limits, self.num_microbatches)}))
            for problem in problems:
                for item in greedy_schedules(problem, self.num_microbatches, limits, self.budget, models=too_large):
                    self.offer_order(item)

    def find_steady(self) -> None:
        """Find the smallest period, then a steady state that does well from the start."""
        with self.budget.lend(TUNING.steady_share * self.effort) as share:
            found = find_steady_states(self.problem, budget=share, seed=self.seed, examples=self.examples)
        if not found:
            return
        self.steady = found[0]
        if self.rival is not None and (bound := period_bound(self.rival.problem)) is not None:
            self.rival.simple = replace(self.steady, problem=self.rival.problem, bound=bound, proven=())
        self.middle = min(found, key=self._offer_unrolled)
        with self.budget.lend(TUNING.variants_share * self.effort) as share:
            others = variants(self.middle, budget=share, seed=self.seed)
            self.middle = next(others, self.middle)
            self._offer_unrolled(self.middle)
            for other in others:
                if self.best.is_proven:
                    break
                self._offer_unrolled(other)

    def try_simpler(self) -> None:
        """Search without pairs and copies; then with more memory where memory can leave, until copies make it fit.

        The first has all the effort that it would have alone, until no schedule without them can be better than what
        is known by then: who allows pairs ends no worse than who does not. The rest has most of the effort again.
        """
        for factor in (1.0, *(TUNING.loose_factors if self.problem.copies else ())):
            if self.best.is_done:
                break
            before, part = self.best.value, 1.0 if factor == 1.0 else TUNING.loose_share
            with self.budget.lend(part * self.effort) as share, suppress(NoFeasiblePlan):
                search = _Search(simplified(self.problem, factor), self.num_microbatches, share, self.seed)
                search.rival = self if factor == 1.0 else None
                search.run()
                self._take_over(search)
                if factor is None and not self.problem.overlaps:
                    self.raise_bound(search.best.bound)
            if factor == 1.0:
                self.budget.effort = max(self.budget.effort, (1 - TUNING.simple_share) * self.effort)
            elif self.best.value < before:
                break

    def try_instants(self) -> None:
        """Search with copies that take a little where they take none: no interval says what is back for an instant."""
        with self.budget.lend(TUNING.instants_share * self.effort) as share, suppress(NoFeasiblePlan, NoOrder):
            search = _Search(without_instants(self.problem), self.num_microbatches, share, self.seed)
            search.run()
            if search.best.answer is not None:
                found = replace(search.best.answer, problem=self.problem)
                self.offer(found)
                self.offer(earliest(found))

    def _take_over(self, simpler: _Search) -> None:
        """Offer what was found for a simpler problem, with pairs and copies where they help."""
        if simpler.best.answer is not None:
            self.offer_order(simpler.best.answer)
        if self.problem.num_tasks * TUNING.example_length <= TUNING.max_greedy:
            self.examples += [replace(item.unroll(TUNING.example_length), problem=self.problem)
                              for item in (simpler.steady, simpler.middle) if item is not None]

    def _offer_unrolled(self, steady: SteadyState) -> float:
        """Offer the steady state from the first micro-batch to the last, played as early as its orders allow.

        Return its makespan; 0 if it takes too long to play.
        """
        if self.problem.num_tasks * self.num_microbatches > TUNING.max_greedy and self.budget.is_spent:
            return 0.0
        played = earliest(steady.unroll(self.num_microbatches))
        self.offer_order(played)
        return played.makespan

    def bound_by_order(self) -> None:
        """Bound the makespan by the order of equal micro-batches and the room for them in memory."""
        lower = self.lower
        rows, tails = earliest_starts(lower, self.num_microbatches), lower.tails()
        ends = [at + time + tail for at, time, tail in zip(rows[-1], lower.times, tails, strict=True)]
        self.raise_bound(max(ends) / float(lower.ticks))

    def complete(self, sizes: tuple[int, ...]) -> None:
        """Find warm-up, steady middle and cool-down together, with ever more micro-batches in them."""
        if self.middle is None:
            return
        if self.completion is None:
            tight = self.middle.in_ticks(self.whole)
            self.completion = Completion(self.whole, tight.starts, int(tight.period), self.num_microbatches)
        state = self.completion
        for size in sizes:
            middle = state.middle(size)
            if middle is None or self.best.is_done:
                break
            if state.total(middle, size) * self.problem.num_tasks > TUNING.max_unrolled:
                break
            self._complete(state, middle, size)

    def _complete(self, state: Completion, middle: Middle, size: int) -> None:
        total = state.total(middle, size)
        extra = (self.num_microbatches - total) // middle.microbatches * middle.period
        least = max(0, math.floor(self.best.bound * float(self.whole.ticks) + 1e-6) - extra)
        self.best.tell(f"{size} micro-batches of warm-up and cool-down")
        effort = TUNING.completion_share * self.effort
        found = solve_unrolled(self.whole, total, self.budget, effort=effort, least=least, middle=middle,
                               hint=state.hint(middle, total), slices=TUNING.to_improve, seed=self.seed)
        if found is not None:
            state.last = found.starts, middle
            self.offer(self.whole.to_real(prolong(found.starts, middle, self.num_microbatches)))

    def bound_by_windows(self) -> None:
        """Bound the makespan by what devices must idle while the pipeline fills and drains."""
        lower = self.lower
        longest = max(head + time + tail
                      for head, time, tail in zip(lower.heads(), lower.times, lower.tails(), strict=True))
        window = min(longest, math.floor(self.best.bound * float(lower.ticks)) // 2)
        if window < 1 or lower.num_tasks > TUNING.max_window or self.problem.overlaps:
            return
        with self.budget.lend(TUNING.window_share * self.effort) as share:
            self._bound_by_windows(lower, window, share)

    def _bound_by_windows(self, lower: WholeProblem, window: int, share: Budget) -> None:
        mirror = lower.reversed()
        for device in sorted(range(self.problem.num_devices), key=lambda device: -lower.work[device]):
            if share.is_spent or self.best.is_proven:
                break
            busy = self.num_microbatches * lower.work[device]
            if self.best.value * float(lower.ticks) - busy - 2 * window >= 0:
                continue
            effort = share.effort / 6
            idle = sum(least_idle(side, device, window, self.num_microbatches, share, effort=effort, seed=self.seed)
                       for side in (lower, mirror))
            self.raise_bound((busy + idle) / float(lower.ticks))

    def solve_whole(self, effort: float) -> None:
        """Solve all micro-batches at once, from the best schedule so far."""
        if self.best.answer is None or self.best.is_done:
            return
        self.best.tell("all at once")
        least = math.floor(self.best.bound * float(self.whole.ticks) + 1e-6)
        effort = effort if self.whole.is_exact else TUNING.rounded_share * effort
        found = solve_unrolled(self.whole, self.num_microbatches, self.budget, effort=effort, least=least,
                               hint=self.whole.in_ticks(self.best.answer), seed=self.seed)
        if found is None:
            return
        self.offer(self.whole.to_real(found.starts))
        if self.whole.is_exact:
            self.raise_bound(found.bound / float(self.whole.ticks))

    def bound_whole(self) -> None:
        """Where times had to be rounded: bound the makespan by solving with times rounded down."""
        if self.whole.is_exact or self.best.answer is None or self.best.is_done:
            return
        lower = self._to_whole("down")
        horizon = math.ceil(self.best.value * float(lower.ticks)) + 1
        found = solve_unrolled(lower, self.num_microbatches, self.budget, horizon=horizon, effort=self.budget.effort,
                               least=math.floor(self.best.bound * float(lower.ticks)), seed=self.seed,
                               hint=lower.in_ticks(self.best.answer))
        if found is not None:
            self.raise_bound(found.bound / float(lower.ticks))

    def result(self, seconds: float) -> ScheduleResult:
        """Return the best, checked once more."""
        assert self.best.answer is not None, "start() leaves a schedule or raises"
        check_schedule(self.best.answer)
        steady = min((item for item in (self.steady, self.simple) if item is not None), default=None,
                     key=lambda item: item.rate)
        if steady is not None:
            with suppress(NoPeriod):
                steady = find_pattern(self.best.answer, steady.rate, steady.bound) or steady
        return ScheduleResult(
            schedule=self.best.answer, status=self.best.status, by=self.best.by, seconds=seconds,
            makespan_bound=min(self.best.bound, self.best.value),
            is_interrupted=self.budget.is_interrupted,
            period_busy=steady.busy() if steady is not None and self.problem.overlaps else None,
            period=steady.period if steady is not None else None,
            period_microbatches=steady.num_microbatches if steady is not None else None,
            period_bound=steady.bound if steady is not None else period_bound(self.problem))

