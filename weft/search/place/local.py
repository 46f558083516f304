"""Local search around the best placement: rounds of annealing, from warm and from hot, as long as they pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from weft.model.graph import F64
from weft.search.budget import Budget
from weft.search.place.anneal import Annealer
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Timetable, make_timetable

HEAT: Final = (0.02, 0.005, 0.05, 0.01)
"""Starting temperatures in turn, as parts of the value."""
COLD: Final = 0.0002
SECONDS_PER_STEP: Final = 50e-9
"""CPU seconds of timing one operator, about."""
ROUNDS: Final = 4


class Local:
    """Local search on one problem, and what it has learnt about memory."""

    def __init__(self, problem: PlaceProblem, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.annealer = Annealer(problem)
        self.num_runs = 0
        self.reserve: F64 | None = None
        """Bytes on each device kept free of weights, for tensors that are alive for a while."""

    def improve(self, best: Timetable, budget: Budget, *, effort: float) -> Iterator[Timetable]:
        """Yield the better timetables that rounds of annealing end with; each starts from the best so far."""
        steps = max(10_000, int(effort / ROUNDS / SECONDS_PER_STEP))
        for index in range(ROUNDS):
            if budget.is_spent:
                break
            found = self._anneal(best, budget, steps=steps, hot=HEAT[index])
            if found is not None and found.latency_s < best.latency_s:
                best = found
                yield best

    def _anneal(self, best: Timetable, budget: Budget, *, steps: int, hot: float) -> Timetable | None:
        """Return what a run ends with, None where its tensors do not fit beside the weights: it knows only these."""
        self.num_runs += 1
        found = self.annealer.run(best.device, best.order, steps=steps, hot=hot, cold=COLD,
                                  seed=self.seed + self.num_runs, capacity=self._capacity(best),
                                  is_spent=lambda: budget.is_spent)
        budget.effort -= found.num_steps * SECONDS_PER_STEP
        if not np.isfinite(found.value):
            return None
        table = make_timetable(self.problem, found.device, found.order)
        over = table.peak_bytes() - self.problem.capacity
        if self.reserve is not None and over.max(initial=0.0) > 0:
            self.reserve = self.reserve + np.maximum(over, 0.0)
            return None
        return table

    def _capacity(self, best: Timetable) -> F64 | None:
        """Return the memory for weights: what tensors take in the best timetable, or took too much before, is kept."""
        if not self.problem.has_lifetimes or not np.isfinite(self.problem.capacity).any():
            return None
        if self.reserve is None:
            tensors = best.peak_bytes() - self.problem.resident_bytes(best.device)
            self.reserve = np.full(self.problem.num_devices, float(np.median(tensors)))
        return np.asarray(self.problem.capacity - self.reserve, dtype=np.float64)
