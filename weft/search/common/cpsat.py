"""The adapter to OR-Tools' CP-SAT: one deterministic worker, limits, and a clean stop on Ctrl-C.

Searches are limited by CP-SAT's *deterministic time*, which counts operations: the same model ends at the same point on
any machine. *Effort* is deterministic time in what is about CPU seconds. The wall clock is a second limit, for the
user's ``--time-limit``.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Literal

from ortools.sat.python import cp_model

from weft.search.common.budget import Budget, OutOfTime

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

SECONDS_PER_UNIT: Final = (1.6, 3.0, 3.0)
"""CPU seconds that one unit of deterministic time takes, about, by how much goes into the linear relaxation."""
SECONDS_PER_LNS_UNIT: Final = 6.0
"""The same for large neighbourhood search, most of whose time is not counted."""
LEAST_LNS_UNITS: Final = 0.02
"""With less, large neighbourhood search may go round without counting anything, and never end."""
SECONDS_PER_CONSTRAINT: Final = 1e-4
"""CPU seconds before a search begins, which are not counted either."""

_STATUS: Final[dict[int, Status]] = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible",
                                     cp_model.INFEASIBLE: "infeasible", cp_model.UNKNOWN: "unknown"}


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver found."""

    status: Status
    objective: float | None = None
    bound: float | None = None
    """No solution has a better objective."""
    solver: cp_model.CpSolver = field(repr=False)

    @property
    def has_values(self) -> bool:
        """Return whether there is a solution."""
        return self.status in ("optimal", "feasible")

    def value(self, expression: cp_model.LinearExprT) -> int:
        """Return the expression's value in the solution."""
        return int(self.solver.value(expression))


def whole(value: float, scale: float, top: float) -> int:
    """Return a value in whole numbers, rounded down; one beyond ``top``, which no solution has, is just beyond it.

    The solver's numbers end at 2**63, and sums of such must not pass it.
    """
    return int(min(float(value) * scale, top + 1))


def solve(model: cp_model.CpModel, budget: Budget, *, effort: float, seed: int = 0, stop_at: float | None = None,
          linearization: int = 1, lns: bool = False, seconds_per_unit: float | None = None,
          max_seconds: float | None = None) -> Solution:
    """Return the best solution within ``effort`` (about CPU seconds), taken from the budget.

    ``stop_at`` ends the search as soon as the objective is at most that. ``linearization`` (0 to 2) says how much
    of the model goes into the linear relaxation. ``lns`` only improves the hint, by large neighbourhood search; it
    proves nothing. ``seconds_per_unit``: CPU seconds of a unit of deterministic time, where the caller knows better.
    ``max_seconds`` ends by the clock what takes far longer than its deterministic time says.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = seed
    parameters.catch_sigint_signal = False
    unit = seconds_per_unit or (SECONDS_PER_LNS_UNIT if lns else SECONDS_PER_UNIT[linearization])
    overhead = SECONDS_PER_CONSTRAINT * len(model.proto.constraints)
    units = (min(effort, budget.effort) - overhead) / unit
    if lns and units < LEAST_LNS_UNITS:
        budget.effort -= overhead
        return Solution(status="unknown", solver=solver)
    parameters.max_deterministic_time = max(1e-3, units)
    parameters.num_workers = 1
    parameters.linearization_level = linearization
    if lns:
        parameters.interleave_search = True
        parameters.use_lns_only = True
    if max_seconds is not None:
        parameters.max_time_in_seconds = max_seconds
    if budget.deadline is not None:
        left = max(0.001, budget.deadline - budget.clock())
        parameters.max_time_in_seconds = min(left, parameters.max_time_in_seconds)
    code = _run(solver, model, budget, _Stopper(stop_at) if stop_at is not None else None)
    budget.effort -= solver.response_proto.deterministic_time * unit + overhead
    status = _STATUS.get(code)
    assert status is not None, f"CP-SAT refused the model: {model.validate()}"
    # Without a solution the solver's bound may be a default rather than something it proved.
    is_known = model.has_objective() and status in ("optimal", "feasible")
    return Solution(status=status, solver=solver, objective=solver.objective_value if is_known else None,
                    bound=solver.best_objective_bound if is_known else None)


class _Stopper(cp_model.CpSolverSolutionCallback):
    """Ends the search at a solution that is good enough."""

    def __init__(self, stop_at: float) -> None:
        super().__init__()
        self.stop_at = stop_at

    def on_solution_callback(self) -> None:
        if self.objective_value <= self.stop_at + 1e-6:
            self.stop_search()


def _run(solver: cp_model.CpSolver, model: cp_model.CpModel, budget: Budget, stopper: _Stopper | None) -> int:
    """Solve in a thread of its own, so that Ctrl-C reaches Python at once and the best solution is kept."""
    if threading.current_thread() is not threading.main_thread():
        return int(solver.solve(model, stopper))
    code: Future[int] = Future()

    def work() -> None:
        try:
            code.set_result(int(solver.solve(model, stopper)))
        except BaseException as error:  # it belongs to the thread that waits
            code.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
    except KeyboardInterrupt:  # it may run all the same, and must not outlive this call
        budget.is_interrupted = True
        deadline = time.monotonic() + 1.0
        while thread.ident is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if thread.ident is None:
            return int(cp_model.UNKNOWN)
    while True:
        try:
            result = code.result(0.1)  # not thread.join(): interrupted, it takes the thread for ended
            thread.join(1.0)  # it has nothing more to do; one that ends while Python shuts down aborts the process
            return result
        except TimeoutError:
            if budget.is_interrupted:
                solver.stop_search()
        except OutOfTime:  # the thread must not outlive this call; it is raised again soon
            solver.stop_search()
        except KeyboardInterrupt:
            budget.is_interrupted = True
            solver.stop_search()
