"""The search for the least largest load: intervals, annealing, exact reductions, CP-SAT, and annealing again.

Short annealing runs from a few starts give a first value. It makes the problem smaller (``throughput_reduce``), and
often CP-SAT then ends the matter. What effort is left goes into longer annealing of the smaller problem, and into a
last attempt at a proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.model.graph import I64
from weft.search.common.budget import Budget, OutOfTime
from weft.search.place.throughput_bounds import average_bound, shared_bound
from weft.search.place.throughput_exact import improve_or_prove
from weft.search.place.throughput_kernel import anneal
from weft.search.place.throughput_model import LoadProblem
from weft.search.place.throughput_reduce import Reduced, reduce_problem
from weft.search.place.throughput_seeds import hopeful, seeds

HEAT = (0.02, 0.003, 0.0005, 0.008)
"""Starting temperatures in turn, in parts of the energy."""
FIRST_HEAT = (0.02, 0.001)
COLD = 1e-5
PIECE_S = 0.4
"""Effort between looks at the clock."""
FIRST_S = 0.01
"""Effort of the first runs at most, for each unit: small problems are proven sooner than annealed."""
PROVEN = 1e-6
"""Relative: a bound so close to the value is a proof; whole numbers are no finer."""
EQUAL = 1e-9
"""Relative: nothing but rounding."""
RUN_STEPS = 5_000_000
"""Steps of one annealing run at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The best placement of the units, and what is known about it."""

    device: I64
    value: float
    bound: float
    is_optimal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """No placement was found that is allowed."""

    is_proven: bool
    """There is none."""


def minimise(problem: LoadProblem, *, budget: Budget, seed: int, starts: Sequence[I64] = ()) -> Found | NothingFits:
    """Return the best placement found, or that none was found."""
    search = _Search(problem, budget, seed)
    try:
        search.start([*starts, *seeds(problem)])
        if not np.isfinite(search.value) and search.find_any(0.5 * budget.effort):
            return NothingFits(is_proven=True)
        if not np.isfinite(search.value):
            return NothingFits(is_proven=False)
        effort = budget.effort
        search.bound_shared(0.05 * effort)
        search.prove(0.15 * effort)
        search.anneal_for(0.75 * budget.effort)
        search.bound_shared(0.15 * effort)
        if search.is_proof_near:
            search.prove(0.7 * budget.effort)
        search.anneal_for(budget.effort)
    except (KeyboardInterrupt, OutOfTime) as ended:
        budget.is_interrupted |= isinstance(ended, KeyboardInterrupt)
        if not np.isfinite(search.value):
            raise
    return search.found()


class _Search:
    """The best placement so far, the bound, and how much was spent."""

    def __init__(self, problem: LoadProblem, budget: Budget, seed: int) -> None:
        self.problem, self.budget, self.seed = problem, budget, seed
        self.device = np.zeros(problem.num_units, dtype=np.int64)
        self.value = float("inf")
        self.bound = average_bound(problem)
        self.num_runs = 0
        self.proof_value = float("inf")
        self.proof_bound = 0.0
        self.last: tuple[float, Reduced, I64] | None = None

    @property
    def is_done(self) -> bool:
        return self.budget.is_spent or self.bound >= self.value * (1 - PROVEN)

    @property
    def is_proof_near(self) -> bool:
        """Return whether the solver knew more than the other bounds."""
        return self.proof_bound >= self.bound

    def offer(self, device: I64) -> bool:
        """Take the placement if it is better."""
        value = self.problem.value(device)
        if not value < self.value * (1 - 1e-12):
            return False
        self.device, self.value = device.astype(np.int64).copy(), value
        self.budget.report(f"largest load {value:.6g}, bound {self.bound:.6g}")
        return True

    def start(self, starts: Sequence[I64]) -> None:
        """Take the best start, and improve the best few shortly; where none is allowed, look for one."""
        allowed = [device for device in starts if np.isfinite(self.problem.value(device))]
        for device in allowed:
            self.offer(device)
        chosen = sorted(allowed, key=self.problem.value)[:2] or hopeful(self.problem)
        for device, heat in itertools.product(chosen, FIRST_HEAT):
            if not self.is_done:
                effort = min(0.02 * self.budget.effort, FIRST_S * self.problem.num_units)
                self._run(self.problem, device, effort=effort, heat=heat)

    def _run(self, problem: LoadProblem, device: I64, *, effort: float, heat: float,
             expand: Reduced | None = None) -> None:
        """Anneal once, in pieces, between which the clock and Ctrl-C are looked at."""
        seconds = seconds_per_step(problem)
        steps = min(RUN_STEPS, max(1000, int(effort / seconds)))
        num_pieces = max(1, round(steps * seconds / PIECE_S))
        scale = max(float(problem.loads(device).max(initial=0.0)), 1e-300)
        hot, ratio = heat * min(scale, self.value), (COLD / heat) ** (1 / num_pieces)
        self.num_runs += 1
        now = device.copy()
        for piece in range(num_pieces):
            if self.is_done:
                return
            found, value = anneal(problem.arrays, now, steps // num_pieces, hot, hot * ratio,
                                  (1000 * self.seed + self.num_runs) * 1000 + piece, problem.contiguous)
            hot *= ratio
            self.budget.effort -= steps // num_pieces * seconds
            if np.isfinite(value):
                self.offer(found if expand is None else expand.expand(found))

    def find_any(self, effort: float) -> bool:
        """Let CP-SAT look for any placement; return whether there is none."""
        if self.is_done:
            return False
        found = improve_or_prove(self.problem, None, budget=self.budget, effort=effort, seed=self.seed)
        if found.device is not None:
            self.offer(found.device)
        return bool(np.isinf(found.bound))

    def reduced(self) -> tuple[Reduced, I64]:
        """Return the problem made smaller by the value known, and the best placement in it."""
        if self.last is None or self.last[0] != self.value:
            self.last = (self.value, *self._reduced())
        return self.last[1], self.last[2]

    def _reduced(self) -> tuple[Reduced, I64]:
        reduced = reduce_problem(self.problem, self.value)
        first = np.full(reduced.problem.num_units, -1, dtype=np.int64)
        for unit in reversed(range(self.problem.num_units)):
            if self.problem.arrays.time_s[unit].max() > 0 or first[reduced.group[unit]] < 0:
                first[reduced.group[unit]] = unit
        device = self.device[first]
        if not reduced.problem.value(device) <= self.value * (1 + 1e-9):
            return Reduced(problem=self.problem, group=np.arange(self.problem.num_units, dtype=np.int64)), self.device
        return reduced, device

    def prove(self, effort: float) -> None:
        """Let CP-SAT improve the best placement or raise the bound, if the value is new to it."""
        if self.is_done or self.value >= self.proof_value:
            return
        self.proof_value = self.value
        reduced, device = self.reduced()
        found = improve_or_prove(reduced.problem, device, budget=self.budget, effort=effort, seed=self.seed)
        self.proof_bound = min(found.bound, self.value)
        self.bound = max(self.bound, self.proof_bound)
        if found.device is not None:
            self.offer(reduced.expand(found.device))

    def bound_shared(self, effort: float) -> None:
        """Raise the bound by what one of several equal devices must take."""
        if not self.is_done:
            reduced, _ = self.reduced()
            found = shared_bound(reduced.problem, self.value, budget=self.budget, effort=effort, seed=self.seed)
            self.bound = max(self.bound, min(found, self.value))

    def anneal_for(self, effort: float) -> None:
        """Anneal the reduced problem from the best placement, from hot to less hot, again and again."""
        least = self.budget.effort - effort
        while not self.is_done and self.budget.effort > max(least, 0.0) + 0.01:
            reduced, device = self.reduced()
            share = min(self.budget.effort - least, 0.25 * effort)
            self._run(reduced.problem, device, effort=share, heat=HEAT[self.num_runs % len(HEAT)], expand=reduced)

    def found(self) -> Found:
        is_equal = self.bound >= self.value * (1 - EQUAL)
        return Found(device=self.device, value=self.value, bound=self.value if is_equal else self.bound,
                     is_optimal=self.bound >= self.value * (1 - PROVEN))


def seconds_per_step(problem: LoadProblem) -> float:
    """Return about how long one annealing step takes, so that effort is spent alike on any machine."""
    a = problem.arrays
    degree = (len(a.owner) + len(a.readers)) / max(1, problem.num_units)
    contiguity = 2e-9 * (len(a.node_unit) + len(a.sources)) if problem.contiguous else 0.0
    return 8e-7 + 3e-8 * (a.num_cores + a.num_resources) + 5.5e-8 * degree * problem.num_devices + contiguity


def warm_up(problem: LoadProblem) -> None:
    """Import and compile everything that a search uses, with a problem that is very small."""
    where = np.zeros(problem.num_units, dtype=np.int64)
    problem.value(where)
    average_bound(problem)
    anneal(problem.arrays, where, 1, 1.0, 1.0, 0, False)
