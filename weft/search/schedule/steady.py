"""The steady state: the smallest period in which every block runs once for each of K micro-batches.

Modulo scheduling. For a trial period P (ticks), every task i of each of the K micro-batches has

    start(i, k) = offset(i, k) + P * lap(i, k)          0 <= offset < P                                  (_Builder)

    start(j, k) >= start(i, k) + time(i) + delay                        for every edge i -> j            (_add_edges)
    on every resource, offsets do not overlap, round the clock of P                                      (_add_overlaps)
    what a device holds when x starts = sum over holds (take a, release b) on it of
        amount * (lap(b) - lap(a) + [a is not after x] - [b is before x])   <=  limit                    (_add_memory)
    sum over holds of amount * (end of b - start of a)  <=  limit * P      (implied; makes proofs quick) (_add_memory)

Micro-batches are interchangeable, so copies of one task are in order of k and within one period of each other
(``_add_order_of_copies``). A period is feasible if a smaller one is (stretch time), so the smallest is found by
bisection (``_Search.bisect``), below what annealing of cyclic orders has found (``anneal``). Every solution found is
tightened to the smallest period of its own cyclic order (``tighten``), in real time at the end. No period is smaller,
per micro-batch and for any K, than ``period_bound``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from ortools.sat.python import cp_model

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64
from weft.search.common.budget import Budget, OutOfTime
from weft.search.common.cpsat import Solution, solve
from weft.search.common.incumbent import Incumbent
from weft.search.schedule.anneal import Annealer
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.cyclic import NoPeriod, Tight, tighten
from weft.search.schedule.first import first_schedule
from weft.search.schedule.named import named_schedules
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule, find_problems
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.whole import WholeProblem, to_whole

Key = tuple[int, int]
"""(task, micro-batch of the period)"""

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
        return tighten(whole, self.starts * ticks, self.period * ticks, whole=True)

    def unroll(self, num_microbatches: int) -> Schedule:
        """Return the schedule that repeats the pattern from the first micro-batch to the last."""
        laps, copies = np.divmod(np.arange(num_microbatches), self.num_microbatches)
        starts = self.starts[:, copies] + laps * self.period
        return Schedule(problem=self.problem, starts=starts - starts.min())


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
                       max_microbatches: int = TUNING.max_microbatches) -> list[SteadyState]:
    """Return the steady state of smallest period per micro-batch, then the best with fewer micro-batches per period.

    ``OutOfTime`` ends the search with what has been found.
    """
    bound = period_bound(problem)
    if bound is None:
        return []
    search = _Search(to_whole(problem), bound, budget, seed)
    with suppress(OutOfTime):
        search.run(max_microbatches)
    proven = tuple(sorted(search.proven))
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
        builder = _Builder(search.whole, int(tight.period), steady.num_microbatches)
        if number == 0:
            builder.minimize_latency(tight.starts)
        else:
            builder.minimize_weighted(Random(f"{seed} {number}"))
        effort = TUNING.quick_effort if number == 0 else TUNING.variant_effort
        solution = solve(builder.model, budget, effort=effort, seed=seed + number, linearization=0)
        if not solution.has_values:
            break
        found = make_steady(search.whole.problem, builder.read(solution), tight.period, steady.bound)
        if found.rate <= steady.rate * (1 + 1e-9) and _fits(found):
            yield found


class _Search:
    """The best steady state so far, and what is known to be impossible for each K."""

    def __init__(self, whole: WholeProblem, bound: float, budget: Budget, seed: int) -> None:
        self.whole, self.budget, self.seed = whole, budget, seed
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

    def run(self, max_microbatches: int) -> None:
        """Search until the bound is met or the budget is spent."""
        self.start()
        numbers = [number for number in range(1, max_microbatches + 1) if not self.is_large(number)]
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
        steady = SteadyState(problem=alone.problem, starts=alone.starts, period=alone.makespan, bound=self.best.bound)
        if not self.is_large(1):
            if alone.makespan <= 0:
                return
            steady = make_steady(self.whole.problem, alone.starts, alone.makespan, self.best.bound)
        self.offer(steady, "one micro-batch after the other")
        if self.whole.num_tasks * TUNING.example_length <= TUNING.max_greedy:
            for example in named_schedules(alone.problem, TUNING.example_length).values():
                found = find_pattern(example, self.best.value, self.best.bound)
                if found is not None:
                    self.offer(found, "named")

    def offer(self, steady: SteadyState, by: str) -> None:
        """Keep the steady state if it is the best, or the best of its K."""
        known = self.patterns.get(steady.num_microbatches)
        if known is None or steady.rate < known.rate * (1 - 1e-9):
            self.patterns[steady.num_microbatches] = steady
        self.best.offer(steady.rate, steady, f"steady state: {steady.num_microbatches} per period, {by}")

    def anneal(self, number: int, effort: float) -> None:
        """Anneal the best of K = ``number``, or of a divisor."""
        known = [steady for divisor, steady in self.patterns.items() if number % divisor == 0]
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
            model = _Builder(self.whole, period, number, is_ordered=item.ordered)
            solution = solve(model.model, self.budget, effort=item.part * effort, seed=self.seed,
                             linearization=item.linearization)
            if solution.status != "unknown" or self.budget.is_spent:
                break
        if not solution.has_values:
            if solution.status == "infeasible":
                self.lowest[number] = max(self.lowest.get(number, 0), period + 1)
            return None
        found = make_steady(self.whole.problem, model.read(solution), float(period), self.best.bound)
        if not _fits(found):
            return None
        self.offer(found, "by the solver")
        return found


def make_steady(problem: ScheduleProblem, starts: F64, period: float, bound: float) -> SteadyState:
    """Return the steady state with the cyclic order of these starts (in any units), tightened in real time."""
    tight = tighten(problem, starts, period)
    exact = tight.starts - tight.starts.min()
    for task in problem.topological:  # no rounding may turn the order of what takes no time and what depends on it
        for edge in problem.predecessors[task]:
            exact[task] = np.maximum(exact[task], exact[edge.source] + problem.task_times[edge.source] + edge.delay)
    return SteadyState(problem=problem, starts=exact, period=tight.period, bound=bound)


def find_pattern(schedule: Schedule, rate: float, bound: float) -> SteadyState | None:
    """Return what the schedule repeats in its middle, tightened, if that takes less than ``rate`` per micro-batch."""
    starts, total = schedule.starts, schedule.num_microbatches
    begin, end = total // 3, total - total // 4
    for number in range(1, min(TUNING.max_microbatches, (end - begin) // 3) + 1):
        steps = starts[:, begin + number: end] - starts[:, begin: end - number]
        period = float(steps[0, 0])
        if 0 < period < rate * number * (1 - 1e-9) and (np.abs(steps - period) <= 1e-9 * schedule.makespan).all():
            found = make_steady(schedule.problem, starts[:, begin: begin + number], period, bound)
            return found if not find_problems(found.unroll(total)) else None
    return None


def _fits(steady: SteadyState) -> bool:
    """Return whether memory suffices: the order of what takes no time, or differs by rounding, may have been lost."""
    laps = 2 + math.ceil(float(steady.starts.max()) / steady.period) if steady.period > 0 else 2
    return not find_problems(steady.unroll(steady.num_microbatches * min(laps, 50)))


class _Builder:
    """Variables and constraints of one trial period; see the module's docstring.

    ``is_ordered`` has a literal for the order of every two tasks of a resource, and all that is implied: impossible
    periods are excluded sooner. Without them possible ones are found sooner.
    """

    def __init__(self, whole: WholeProblem, period: int, number: int, *, is_ordered: bool = True) -> None:
        self.whole, self.period, self.number, self.is_ordered = whole, period, number, is_ordered
        self.model = cp_model.CpModel()
        longest = max((whole.times[a] + delay for a, _, delay in whole.edges), default=0)
        # Tasks further apart than this could be moved together by whole periods without harm.
        self.max_lap = max_lap = whole.num_tasks * number * (1 + longest // period) + 2
        self.keys: list[Key] = list(itertools.product(range(whole.num_tasks), range(number)))
        self.offset = {key: self.model.new_int_var(0, period - 1, "") for key in self.keys}
        self.lap = {key: self.model.new_int_var(0, max_lap, "") for key in self.keys}
        self.start = {key: self.offset[key] + period * self.lap[key] for key in self.keys}
        self.literals: dict[tuple[Key, Key], cp_model.LiteralT] = {}
        first = self.whole.problem.topological[0]
        self.model.add(self.offset[first, 0] == 0)
        self._add_edges()
        self._add_order_of_copies()
        if is_ordered:
            self._add_lags()
        for resource, tasks in enumerate(self.whole.problem.resource_tasks):
            keys = list(itertools.product(tasks, range(self.number)))
            self._add_overlaps(keys)
            if resource < self.whole.problem.num_devices and self.whole.limits[resource] is not None:
                self._add_memory(resource, keys)

    def minimize_latency(self, hint: F64) -> None:
        """Minimise the time from the first start to the last end of a micro-batch, beginning with these starts."""
        laps = np.floor(hint / self.period)
        for task, k in self.keys:
            self.model.add_hint(self.lap[task, k], int(laps[task, k]))
            self.model.add_hint(self.offset[task, k], round(float(hint[task, k] - laps[task, k] * self.period)))
        latency = self.model.new_int_var(0, round(float(hint.max() - hint.min())) + max(self.whole.times), "")
        begin = self.model.new_int_var(0, self.period * self.max_lap, "")
        for task, k in self.keys:
            shift = k * self.period // self.number
            self.model.add(begin <= self.start[task, k] - shift + self.period)
            self.model.add(self.start[task, k] + self.whole.times[task] - shift + self.period <= begin + latency)
        self.model.minimize(latency)

    def minimize_weighted(self, rng: Random) -> None:
        """Minimise a random sum of starts."""
        self.model.minimize(sum(rng.randint(0, 3) * self.start[key] for key in self.keys))

    def read(self, solution: Solution) -> F64:
        """Return the starts [tasks, K] of the solution."""
        return np.asarray([[solution.value(self.start[task, k]) for k in range(self.number)]
                           for task in range(self.whole.num_tasks)], dtype=np.float64)

    def _add_edges(self) -> None:
        for (source, target, delay), k in itertools.product(self.whole.edges, range(self.number)):
            self.model.add(self.start[target, k] >= self.start[source, k] + self.whole.times[source] + delay)

    def _add_order_of_copies(self) -> None:
        for task in range(self.whole.num_tasks) if self.number > 1 else ():
            time = self.whole.times[task]
            for k in range(self.number - 1):
                self.model.add(self.start[task, k + 1] >= self.start[task, k] + time)
            self.model.add(self.start[task, 0] + self.period >= self.start[task, self.number - 1] + time)

    def _add_overlaps(self, keys: list[Key]) -> None:
        """Forbid overlap round the clock: as a whole, and where wanted for each pair, by the literal of its order."""
        times, model = self.whole.times, self.model
        for one, other in itertools.combinations(keys, 2) if self.is_ordered else ():
            if (one, other) in self.literals:
                continue
            literal = model.new_bool_var("")
            self.literals[one, other], self.literals[other, one] = literal, ~literal
            for early, late, holds in ((one, other, literal), (other, one, ~literal)):
                model.add(self.offset[late] >= self.offset[early] + times[early[0]]).only_enforce_if(holds)
                model.add(self.offset[early] + self.period >= self.offset[late] + times[late[0]]).only_enforce_if(holds)
        model.add_no_overlap([model.new_fixed_size_interval_var(self.offset[key] + lap * self.period, times[key[0]], "")
                              for key in keys for lap in range(2)])

    def _is_before(self, one: Key, other: Key) -> cp_model.LiteralT:
        """Return the literal that says that ``one`` starts earlier on the clock."""
        literal = self.literals.get((one, other))
        if literal is None:
            literal = self.literals[one, other] = self.model.new_bool_var("")
            self.model.add(self.offset[one] < self.offset[other]).only_enforce_if(literal)
            self.model.add(self.offset[one] >= self.offset[other]).only_enforce_if(~literal)
        return literal

    def _add_memory(self, device: int, keys: list[Key]) -> None:
        limit = self.whole.limits[device]
        assert limit is not None
        holds = [hold for hold in self.whole.holds if hold.device == device]
        amounts: dict[int, int] = {}
        for hold in holds:
            if hold.take is not None:
                amounts[hold.take] = amounts.get(hold.take, 0) + hold.amount
            if hold.release is not None:
                amounts[hold.release] = amounts.get(hold.release, 0) - hold.amount
        total, largest = sum(amounts.values()), max(amounts, key=lambda task: (abs(amounts[task]), task), default=0)
        if abs(total) > 1e-6 * abs(amounts.get(largest, 0)):  # it falls with every micro-batch: there will be room
            return
        if total:  # amounts were rounded
            amounts[largest] -= total
        changing = [key for key in keys if amounts.get(key[0])]
        base = sum(-amounts[key[0]] * self.lap[key] for key in changing)
        for key in changing:
            if amounts[key[0]] > 0:
                earlier = sum(amounts[other[0]] * self._is_before(other, key) for other in changing if other != key)
                self.model.add(base + amounts[key[0]] + earlier <= limit)
        if self.is_ordered and device in self.whole.balanced:
            held = sum(hold.amount * (self.start[hold.release, k] + self.whole.times[hold.release]
                                      - self.start[hold.take, k])
                       for hold in holds for k in range(self.number)
                       if hold.take is not None and hold.release is not None)
            self.model.add(held <= limit * self.period)

    def _add_lags(self) -> None:
        """Add what follows from the edges: a hold is at least as long as the longest path from take to release."""
        pairs = sorted({(hold.take, hold.release) for hold in self.whole.holds
                        if hold.take is not None and hold.release is not None})
        for take, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            lags = self.whole.lags_from(take)
            for (_, release), k in itertools.product(group, range(self.number)):
                lag = lags[release]
                assert lag is not None, "a release depends on its take"
                self.model.add(self.start[release, k] >= self.start[take, k] + lag)
