"""The search for the best choice: rounds of bound and walks, fixing, and the exact solver; see ``solve``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.common.incumbent import Incumbent
from weft.search.strategies.core import Compact, make_core
from weft.search.strategies.dual import Dual, cost_of
from weft.search.strategies.integer import IntegerResult, quiet_stdout, solve_integer
from weft.search.strategies.local_kernel import complete, repair
from weft.search.strategies.shrink import left, lowest, shrink
from weft.search.strategies.strategy_graph import StrategyGraph, evaluate
from weft.search.strategies.tuning import TUNING
from weft.search.strategies.units import Bools, make_units, remove
from weft.search.strategies.usage import add_usage
from weft.search.strategies.walk import Found, Walker


class Search:
    """One search; afterwards ``best`` is the answer."""

    def __init__(self, graph: StrategyGraph, *, budget: Budget, seed: int) -> None:
        self._graph, self._budget, self._seed = graph, budget, seed
        self._begin = time.monotonic()
        self.best = Incumbent[list[int]](budget=budget, proof=0.0, same=0.0, digits=12, told=self._begin,
                                         every_s=TUNING.seconds_between_reports)
        self._strategy: dict[int, int] = {}
        self._num_cores = 0

    def run(self) -> None:
        """Search until there is a proof, or the budget is spent."""
        self._units = make_units(self._graph)
        add_usage(self._graph, self._units)
        shrink(self._units, self._is_late_for_reductions)
        self.best.raise_bound(lowest(self._units))
        self._ignore_usage()
        self._reduced_s = time.monotonic() - self._begin
        dual = None
        while not self.best.is_done:
            compact = make_core(self._units)
            if not compact.num_units:
                self._offer(compact, np.zeros(0, dtype=np.int64), compact.constant)
                self.best.raise_bound(np.inf)
                break
            dual = Dual(compact, dual)
            self._num_cores += 1
            self._run_core(compact, dual)
            if self.best.is_proven or not self._budget.has_s(self._reduced_s) or not self._fix(compact, dual):
                break
        self.best.tell(f"{self._now}, done")

    @property
    def _now(self) -> str:
        return f"{time.monotonic() - self._begin:6.1f} s"

    def _is_late_for_reductions(self) -> bool:
        """Return whether a time limit leaves no more for reductions: what follows needs some of it, too."""
        deadline = self._budget.deadline
        part = TUNING.reductions_part
        return deadline is not None and time.monotonic() > self._begin + part * (deadline - self._begin)

    def _ignore_usage(self) -> None:
        """Solve the problem without its limit, where reductions do: a bound, and the answer if it fits nevertheless."""
        if not len(self._units.base) or len(left(self._units)) > TUNING.max_relaxed:
            return
        relaxed = self._units.without_usage()
        shrink(relaxed)
        if left(relaxed):
            return
        self.best.raise_bound(relaxed.constant)
        strategy = relaxed.all_strategies({})
        choice = relaxed.choice_of(strategy)
        if evaluate(self._graph, choice).is_feasible(self._graph.usage_limit):
            self._strategy = strategy
            self.best.offer(relaxed.constant, choice, self._now)

    # ---- one core ----------------------------------------------------------------------------------------------------

    def _run_core(self, compact: Compact, dual: Dual) -> None:
        """Search in a core until it is solved, can be reduced, or the budget is spent."""
        walkers = [Walker(compact.core, seed=self._seed * 1_000_003 + 2 * self._num_cores + index) for index in (0, 1)]
        self._x = self._start(compact)
        sweeps, has_asked, longest = 5, False, 0.0
        most = max(5, min(400, TUNING.swept_per_round // max(len(compact.core.matrices), 1)))
        with ThreadPoolExecutor(1) as pool:
            while True:
                begin = time.monotonic()
                self._play_round(compact, dual, walkers, sweeps, sweeps / most, pool)
                longest = max(longest, time.monotonic() - begin)
                sweeps = min(2 * sweeps, most)
                if self._is_solved(compact, dual) or not self._budget.has_s(longest):
                    return
                share = float(self._ruled_out(compact, dual).mean())
                is_worth_it = share > TUNING.worth_fixing or (dual.is_stalled and share > 0)
                if is_worth_it and self._budget.has_s(2.0 * self._reduced_s):
                    return
                if dual.is_stalled and not has_asked and _is_small(compact):
                    has_asked = True
                    self._finish(compact, dual)
                    if self.best.is_proven:
                        return

    def _start(self, compact: Compact) -> I64 | None:
        """Return the best choice known as one of the core, or one to begin with; None if none fits yet."""
        if self.best.answer is not None:
            x = compact.positions(self._strategy)
        else:
            x = np.full(compact.num_units, -1, dtype=np.int64)
        complete(compact.core, x)
        if not repair(compact.core, x, 4 * len(x)):
            return None
        self._offer(compact, x, cost_of(compact.core, x) + compact.constant)
        return x

    def _play_round(self, compact: Compact, dual: Dual, walkers: list[Walker], sweeps: int, part: float,
                    pool: ThreadPoolExecutor) -> None:
        """Raise the bound beside a walk, or walk twice if it has stalled; then exchange what was found."""
        best = self.best.value - compact.constant
        suggested, price = dual.x.copy(), dual.best_price.copy()
        heat = _heat(compact, best, dual.bound)
        if dual.is_stalled:
            beside = pool.submit(self._walk, walkers[1], price, heat, part)
        else:
            beside = pool.submit(dual.advance, sweeps, best=best)
        found = [self._walk(walkers[0], price, heat, part)]
        if dual.bound > -np.inf and not dual.is_stalled:
            found.append(walkers[0].suggest(suggested, price, best=best, heat=heat, part=part))
        found.append(beside.result())
        for item in found:
            if item is not None and self._offer(compact, item.x, item.cost + compact.constant):
                self._x = item.x
        self._raise_bound(dual.bound + compact.constant)
        self._budget.effort -= 1
        self.best.note(self._now)

    def _walk(self, walker: Walker, price: F64, heat: float, part: float) -> Found | None:
        return None if self._x is None else walker.walk(self._x, price, heat=heat, part=part)

    def _offer(self, compact: Compact, x: I64, cost: float) -> bool:
        """Keep a choice of the core if it is the best so far and fits; return whether it was kept."""
        if not self.best.is_better(cost) or cost - compact.constant >= compact.penalty:
            return False
        self._strategy = self._units.all_strategies(compact.strategies(x))
        return self.best.offer(cost, self._units.choice_of(self._strategy), self._now)

    # ---- proofs ------------------------------------------------------------------------------------------------------

    def _threshold(self) -> float:
        """Return the cost from which on choices are of no interest, with the best one known."""
        cost = self.best.value
        rounding = 1e-12 * abs(cost)
        if self._graph.is_integral and rounding < 0.5:
            return cost - 1.0 + rounding
        return cost + rounding if self._graph.is_integral else cost - 1e-9 * abs(cost)

    def _raise_bound(self, bound: float) -> None:
        """Keep a bound; it proves the best choice only where it is above all that would be of interest."""
        is_proof = bound > self._threshold()
        self.best.raise_bound(np.inf if is_proof else min(bound, float(np.nextafter(self.best.value, -np.inf))))

    def _is_solved(self, compact: Compact, dual: Dual) -> bool:
        if self.best.answer is None and dual.bound >= compact.penalty:
            raise NoFeasiblePlan(self.why_none(is_proven=True))
        self._raise_bound(dual.bound + compact.constant)
        return self.best.is_proven

    def _ruled_out(self, compact: Compact, dual: Dual) -> Bools:
        return dual.reach + compact.constant > self._threshold()

    def _fix(self, compact: Compact, dual: Dual) -> bool:
        """Remove strategies that are in no better choice, and reduce again; return whether there were any."""
        is_bad = self._ruled_out(compact, dual)
        if not is_bad.any():
            return False
        first = compact.core.first
        try:
            for index, unit in enumerate(compact.unit):
                bad = compact.kept[index][is_bad[first[index] : first[index + 1]]]
                gone = np.isin(self._units.kept[unit], bad)
                if gone.any():
                    remove(self._units, unit, gone)
            shrink(self._units)
        except NoFeasiblePlan:
            self.best.raise_bound(np.inf)
        return True

    def _finish(self, compact: Compact, dual: Dual) -> None:
        """Give the core to the integer program."""
        deadline = self._budget.deadline
        seconds = TUNING.integer_s if deadline is None else max(0.5 * (deadline - time.monotonic()), 0.01)
        best = self.best.value - compact.constant
        found = _in_background(lambda: solve_integer(compact.core, dual.messages, best=best, seconds=seconds),
                               self._budget)
        if found is None:
            return
        x = found.x
        if (x is not None and repair(compact.core, x, 4 * len(x))  # Tolerances may have let a little too much pass.
                and self._offer(compact, x, cost_of(compact.core, x) + compact.constant)):
            self._x = x
        if self.best.answer is None and (found.is_infeasible or found.bound >= compact.penalty):
            raise NoFeasiblePlan(self.why_none(is_proven=True))
        self._raise_bound(np.inf if found.is_infeasible else found.bound + compact.constant)

    # ---- telling -----------------------------------------------------------------------------------------------------

    def why_none(self, *, is_proven: bool) -> str:
        """Return why there is no choice."""
        limit = self._graph.usage_limit
        if limit is None:
            return "no choice is allowed: every one has a strategy or a pair of strategies that costs 10^18 or more"
        if is_proven:
            return f"no choice fits: none keeps to the usage limit of {limit}, by proof. Raise usage_limit."
        return f"no choice within the usage limit of {limit} was found. Raise usage_limit, or give more time."


def _heat(compact: Compact, best: float, bound: float) -> float:
    """Return how much dearer a step of a walk may well be: about what separates best and bound, per unit."""
    if np.isfinite(best) and np.isfinite(bound):
        return max(best - bound, 1e-12 * abs(best), 1e-300) / compact.num_units
    return max(float(np.abs(compact.core.cost).mean()), 1e-300)


def _is_small(compact: Compact) -> bool:
    core = compact.core
    sizes = np.repeat(np.diff(core.first), np.diff(core.span))
    return (len(core.matrices) <= 2 * TUNING.max_integer
            and int(((core.end - core.begin) * sizes).sum()) <= TUNING.max_integer_uses)


def _in_background(function: Callable[[], IntegerResult], budget: Budget) -> IntegerResult | None:
    """Return what the function does, run in a thread that is left alone when Ctrl-C is pressed."""
    result: list[IntegerResult] = []
    worker = threading.Thread(target=lambda: result.append(function()), daemon=True)
    with quiet_stdout():
        worker.start()
        while worker.is_alive() and not budget.is_interrupted:
            worker.join(0.05)
    return result[0] if result else None
