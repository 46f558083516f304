"""The search for the least largest load: intervals, annealing, exact reductions, CP-SAT, and annealing again.

Short annealing runs from a few starts give a first value. It makes the problem smaller (``throughput_reduce``), and often
CP-SAT then ends the matter. What effort is left goes into longer annealing of the smaller problem, and into a last
attempt at a proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.model.graph import I64
from weft.search.cpsat import Budget
from weft.search.place.throughput_bounds import average_bound, shared_bound
from weft.search.place.throughput_exact import improve_or_prove
from weft.search.place.throughput_kernel import anneal
from weft.search.place.throughput_model import LoadProblem
from weft.search.place.throughput_reduce import Reduced, reduce_problem
from weft.search.place.throughput_seeds import hopeful, seeds

HEAT = (0.02, 0.005, 0.05, 0.002)
"""Starting temperatures in turn, in parts of the energy."""
COLD = 1e-5
ROUND_S = 0.5
"""Effort between looks at the clock."""
PROVEN = 1e-6
"""Relative: a bound so close to the value is a proof; whole numbers are no finer."""
RUN_STEPS = 4_000_000
"""Steps of one annealing run at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The best placement of the units, and what is known about it."""

    device: I64
    value: float
    bound: float
    is_optimal: bool


def minimise(problem: LoadProblem, *, budget: Budget, seed: int, starts: Sequence[I64] = ()) -> Found | None:
    """Return the best placement found; None if none was found that is allowed."""
    search = _Search(problem, budget, seed)
    search.start([*starts, *seeds(problem)])
    if not np.isfinite(search.value):
        return None
    effort = budget.effort
    search.prove(0.25 * effort)
    search.bound_shared(0.15 * effort)
    search.anneal_for(0.7 * budget.effort)
    search.prove(0.8 * budget.effort)
    search.anneal_for(budget.effort)
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

    @property
    def is_done(self) -> bool:
        return self.budget.is_spent or self.bound >= self.value * (1 - PROVEN)

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
        chosen = sorted(allowed, key=self.problem.value)[:3] or hopeful(self.problem)
        for device in chosen:
            if not self.is_done:
                self._run(self.problem, device, effort=0.02 * self.budget.effort, heat=HEAT[0])

    def _run(self, problem: LoadProblem, device: I64, *, effort: float, heat: float, expand: Reduced | None = None) -> None:
        steps = min(RUN_STEPS, max(1000, int(effort / seconds_per_step(problem))))
        self.num_runs += 1
        found, value = anneal(problem.arrays, device, steps, heat, min(COLD, heat), 1000 * self.seed + self.num_runs,
                              problem.contiguous)
        self.budget.effort -= steps * seconds_per_step(problem)
        if np.isfinite(value):
            self.offer(found if expand is None else expand.expand(found))

    def reduced(self) -> tuple[Reduced, I64]:
        """Return the problem made smaller by the value known, and the best placement in it."""
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
        self.bound = max(self.bound, min(found.bound, self.value))
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
        is_optimal = self.bound >= self.value * (1 - PROVEN)
        return Found(device=self.device, value=self.value, bound=self.value if is_optimal else self.bound,
                     is_optimal=is_optimal)


def seconds_per_step(problem: LoadProblem) -> float:
    """Return about how long one annealing step takes, so that effort is spent alike on any machine."""
    a = problem.arrays
    degree = (len(a.owner) + len(a.readers)) / max(1, problem.num_units)
    contiguity = 2e-9 * (len(a.node_unit) + len(a.sources)) if problem.contiguous else 0.0
    return 6e-7 + 2.5e-8 * (a.num_cores + a.num_resources) + 4e-8 * degree * problem.num_devices + contiguity
