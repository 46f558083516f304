"""Local search around the best placement: rounds of annealing, from warm and from hot, as long as they pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.budget import Budget
from weft.search.place.anneal import Annealer
from weft.search.place.problem import PlaceProblem, unit_weights
from weft.search.place.timetable import Timetable, make_timetable

HEAT: Final = (0.02, 0.005, 0.05, 0.01)
"""Starting temperatures in turn, as parts of the value."""
COLD: Final = 0.0002
PRICE: Final = 0.3
"""Of a byte over a device's memory, at first, as a part of the best time by byte."""
SECONDS_PER_STEP: Final = 50e-9
"""CPU seconds of timing one operator, about."""
ROUNDS: Final = 4
MAX_ATTEMPTS: Final = 4
"""So often a run goes on from where it does not fit, each time half as long."""


class Local:
    """Local search on one problem, and what it has learnt about memory."""

    def __init__(self, problem: PlaceProblem, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.annealer = Annealer(problem)
        self.num_runs = 0
        self.has_limits = problem.has_lifetimes and bool(np.isfinite(problem.capacity).any())
        """Tensors that are alive for a while may not fit."""
        self.bytes_held = float(problem.weight_bytes.sum()) or float(problem.tensor_bytes.sum())

    def improve(self, best: Timetable, budget: Budget, *, effort: float) -> Iterator[Timetable]:
        """Yield the better timetables that rounds of annealing end with; each starts from the best so far."""
        steps = max(10_000, int(effort / ROUNDS / SECONDS_PER_STEP))
        for index in range(ROUNDS):
            if budget.is_spent:
                break
            found = self._anneal(best, budget, steps=steps, hot=HEAT[index], is_priced=index % 2 == 0)
            if found is not None and found.latency_s < best.latency_s:
                best = found
                yield best

    def make_fit(self, start: Timetable, budget: Budget, *, effort: float) -> Timetable | None:
        """Return what annealing comes to from a timetable that need not fit, None if it finds none that does."""
        return self._anneal(start, budget, steps=max(10_000, int(effort / SECONDS_PER_STEP)), hot=HEAT[0],
                            is_priced=True)

    def _anneal(self, best: Timetable, budget: Budget, *, steps: int, hot: float, is_priced: bool) -> Timetable | None:
        """Return what a run ends with, None where its tensors do not fit beside the weights.

        With ``is_priced`` it may pass through what does not fit, where memory is tight at all. Annealing counts tensors
        by the order of operators; by time a little more may be alive. If what was found does not fit, so much less
        memory is given, and it goes on from there.
        """
        self.num_runs += 1
        device, order = best.device, best.order
        capacity = self.problem.capacity.copy()
        price = PRICE * best.latency_s / self.bytes_held if is_priced and self.problem.is_tight else 0.0
        for attempt in range(MAX_ATTEMPTS if self.has_limits else 1):
            found = self.annealer.run(device, order, steps=steps >> attempt, hot=hot, cold=COLD, capacity=capacity,
                                      seed=self.seed + 97 * self.num_runs + attempt, price=price,
                                      is_spent=lambda: budget.is_spent)
            budget.effort -= found.num_steps * SECONDS_PER_STEP
            if not np.isfinite(found.value):
                return None
            table = make_timetable(self.problem, found.device, found.order)
            over = np.maximum(table.peak_bytes() - self.problem.capacity, 0.0)
            if not self.has_limits or not over.any():
                return table
            capacity -= 1.1 * over
            resident = self.problem.resident_bytes(found.device)
            device = make_fit(self.problem, found.device, np.where(over > 0, resident - 1.1 * over, capacity))
            order = found.order
        return None


def make_fit(problem: PlaceProblem, device: I64, capacity: F64) -> I64:
    """Return the devices changed until the weights fit, if they can: units go where a byte costs the least time."""
    device = device.copy()
    weights = unit_weights(problem)
    sizes = np.array([problem.weight_bytes[items].sum() for items in weights])
    unit_time = np.zeros((problem.num_units, problem.num_devices))
    np.add.at(unit_time, problem.unit_of_op, problem.time_s)
    first = np.unique(problem.unit_of_op, return_index=True)[1]
    for _ in range(problem.num_units):
        used = problem.resident_bytes(device)
        full = int(np.argmax(used - capacity))
        if used[full] <= capacity[full]:
            break
        units = np.flatnonzero((device[first] == full) & (sizes > 0))
        fits = (used + sizes[units][:, None] <= capacity) & np.isfinite(unit_time[units])
        fits[:, full] = False
        if not fits.any():
            break
        worse = np.where(fits, unit_time[units] - unit_time[units, full][:, None], np.inf)
        ratio = worse / np.minimum(sizes[units], used[full] - capacity[full])[:, None]
        row, target = np.unravel_index(int(np.argmin(ratio)), ratio.shape)
        device[problem.unit_of_op == units[row]] = target
    return device
