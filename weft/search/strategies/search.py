"""The search for the best choice: rounds of bound and walks, fixing, and the exact solver; see ``solve``.

Solving strategy graphs: reductions, a rising bound and walks beside each other, and an exact solver for the rest.

    choose      x[i], a strategy for every node
    minimise    sum of costs[i][x[i]] + sum over edges of edge_costs[e][x[a], x[b]]      (``strategy_graph.evaluate``)
    subject to  usage of the nodes alive <= limit, at every time                         (``usage.add_usage``)
    bounds      of the dual: costs moved between nodes and edges, usage at prices        (``dual.Dual``)
                of the linear relaxation, of small cores                                 (``integer.solve_integer``)

    reduce     exact reductions (units, usage, shrink); many problems are solved by these
    rounds     one core raises the bound (dual), one walks (walk); after every round they exchange what they found
    fix        strategies whose bound is above the best choice are removed, and the rest is reduced again
    finish     what is small enough goes to a mixed integer program

A round is a fixed amount of work, and what is exchanged does not depend on which core is faster: without a time limit
the same problem and seed give the same choice.

A first choice of strategies in one pass over the nodes, for when there is little time.

At first every node is taken to use its least: what that leaves free at each time is there for dearer habits. Then, node
by node, the strategy that costs least beside the neighbours chosen before it, among those for which there is room.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.quiet import quiet_stdout
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c
from weft.search.common.incumbent import Incumbent
from weft.search.strategies.core import Compact, make_core
from weft.search.strategies.dual import Dual, cost_of
from weft.search.strategies.integer import IntegerResult, solve_integer
from weft.search.strategies.shrink import left, lowest, shrink
from weft.search.strategies.strategy_graph import FORBIDDEN, StrategyGraph, check_graph, evaluate
from weft.search.strategies.tuning import TUNING
from weft.search.strategies.units import Bools, add_usage, make_units, remove
from weft.search.strategies.walk import Found, Walker, complete, repair


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


# ---- solving ---------------------------------------------------------------------------------------------------------


DEFAULT_ROUNDS: Final = 300
"""Without a time limit the search ends after so many rounds, about as many tenths of a second on large problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSolution:
    """The best choice of strategies found."""

    status: Literal["optimal", "feasible"]
    """``optimal`` only with a proof; costs that are not whole numbers count as equal within 1e-9 of them."""
    cost: int | float
    bound: int | float
    """No choice costs less."""
    usage_peak: int | float
    choice: tuple[int, ...]
    """The strategy of every node."""
    seconds: float
    """Wall time."""
    is_interrupted: bool = False
    """The search was ended by Ctrl-C."""

    @property
    def gap(self) -> float:
        """Return how much less the best choice of all could cost, as a share of this one's cost."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(abs(self.cost), 1e-300)

    def to_json(self) -> dict[str, Any]:
        """Return the result object of ``weft shard --json``."""
        return {"status": self.status, "cost": self.cost, "bound": self.bound, "usage_peak": self.usage_peak,
                "choice": list(self.choice), "seconds": self.seconds}


def solve(graph: StrategyGraph, *, time_limit: float | None = None, seed: int = 0,
          progress: Callable[[str], None] = lambda text: None) -> ShardSolution:
    """Return the best choice of strategies found; raise ``NoFeasiblePlan`` if none exists, or none was found.

    ``time_limit`` is wall time in seconds, counted from this call. Ctrl-C ends the search with the best so far.
    """
    begin = time.monotonic()
    deadline = None if time_limit is None else begin + time_limit - min(TUNING.reserve_s, 0.02 * time_limit)
    budget = Budget(effort=DEFAULT_ROUNDS if time_limit is None else math.inf, report=progress, deadline=deadline)
    check_graph(graph)
    search = Search(graph, budget=budget, seed=seed)
    first = None if deadline is None else first_choice(graph, budget)
    is_whole = _run(search, budget, has_choice=first is not None)
    best = search.best
    found = [(evaluate(graph, choice), choice) for choice in (best.answer, first) if choice is not None]
    if not found:
        raise NoFeasiblePlan(search.why_none(is_proven=False))
    judged, choice = min(found, key=lambda item: item[0].cost)
    assert judged.is_feasible(graph.usage_limit), "the search returned a choice that the judge refuses"
    if best.bound == -math.inf:
        best.raise_bound(lowest_cost(graph))
    bound = judged.cost if _is_proof(best.is_proven, judged.cost) else _rounded(best.bound, judged.cost)
    solution = ShardSolution(status="optimal" if bound >= judged.cost else "feasible", cost=judged.cost, bound=bound,
                             usage_peak=judged.usage_peak, choice=tuple(choice), seconds=time.monotonic() - begin,
                             is_interrupted=budget.is_interrupted)
    if not is_whole:
        best.offer(judged.cost, choice)
        best.tell("time limit")
    return solution


def _run(search: Search, budget: Budget, *, has_choice: bool) -> bool:
    """Search until the deadline, a little longer where there is no choice yet; return whether it ended by itself."""
    end = None if budget.deadline is None else budget.deadline + (0.0 if has_choice else TUNING.grace_s)
    try:
        with ended_by_ctrl_c(budget), cut_short(end):
            search.run()
    except OutOfTime:
        return False
    return True


def _is_proof(is_proven: bool, cost: int | float) -> bool:
    """Return whether a proof by floating-point numbers is one: it cannot tell whole numbers beyond 2^52 apart."""
    return is_proven and not (isinstance(cost, int) and abs(cost) >= 2**52)


def _rounded(bound: float, cost: int | float) -> int | float:
    """Return the bound less rounding errors; the next whole number if costs are such."""
    safe = bound - 1e-12 * max(abs(cost), abs(bound))
    return min(cost, math.ceil(safe)) if isinstance(cost, int) else min(cost, safe)


# ---- a first choice --------------------------------------------------------------------------------------------------




def first_choice(graph: StrategyGraph, budget: Budget) -> list[int] | None:
    """Return a choice that the judge accepts, or None; once the time is up, nodes take what uses least."""
    least = [int(np.where(cost < FORBIDDEN, usage, np.inf).argmin())
             for cost, usage in zip(graph.costs, graph.usages, strict=True)]
    choice, room = list(least), _Room(graph, least)
    before: list[list[tuple[int, int, bool]]] = [[] for _ in range(graph.num_nodes)]
    for edge, (a, b) in enumerate(graph.edges.tolist()):
        before[max(a, b)].append((edge, min(a, b), a < b))
    for node in range(graph.num_nodes):
        if node % TUNING.checked == 0 and budget.is_spent:
            break
        total = graph.costs[node].astype(np.float64)
        for edge, other, is_first in before[node]:
            matrix = graph.edge_costs[edge]
            total = total + (matrix[choice[other]] if is_first else matrix[:, choice[other]])
        choice[node] = room.take(node, total, least[node])
    for found in (choice, least):
        if evaluate(graph, found).is_feasible(graph.usage_limit):
            return found
    return None


def lowest_cost(graph: StrategyGraph) -> float:
    """Return what no choice can cost less than: everything at its cheapest."""
    return float(sum(array.min() for array in (*graph.costs, *graph.edge_costs)))


class _Room:
    """What is used at every time by the strategies taken so far."""

    def __init__(self, graph: StrategyGraph, least: list[int]) -> None:
        self.usages, self.limit = graph.usages, graph.usage_limit
        times = np.unique(graph.intervals)
        self.spans: I64 = np.searchsorted(times, graph.intervals)
        self.used: F64 = np.zeros(len(times) + 1)
        if self.limit is not None:
            amounts = np.array([usage[strategy] for usage, strategy in zip(self.usages, least, strict=True)],
                               dtype=np.float64)
            alive = self.spans[:, 1] > self.spans[:, 0]
            np.add.at(self.used, self.spans[alive, 0], amounts[alive])
            np.subtract.at(self.used, self.spans[alive, 1], amounts[alive])
            self.used = np.cumsum(self.used)

    def take(self, node: int, total: F64, before: int) -> int:
        """Return the cheapest strategy for which there is room, with its usage in place of that of ``before``."""
        begin, end = self.spans[node]
        if self.limit is None or end <= begin:
            return int(total.argmin())
        more = self.usages[node] - self.usages[node][before]
        fits = self.used[begin:end].max() + more <= self.limit
        fits[before] = True
        best = int(np.where(fits, total, np.inf).argmin())
        self.used[begin:end] += more[best]
        return best
