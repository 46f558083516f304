"""The adapter to CP-SAT: what comes back, what it costs, and how it stops; on Golomb rulers, whose optima are known."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest
from ortools.sat.python import cp_model

from weft.search.common.budget import Budget, ended_by_ctrl_c
from weft.search.common.cpsat import solve

SHORTEST = {3: 3, 4: 6, 5: 11, 6: 17, 7: 25}


def ruler(num_marks: int, *, longest: int | None = None, has_objective: bool = True) -> cp_model.CpModel:
    """Return: marks at whole places, all distances different; minimise the last place."""
    model = cp_model.CpModel()
    most = longest if longest is not None else 2 ** num_marks
    marks = [model.new_int_var(0, most, "") for _ in range(num_marks)]
    model.add(marks[0] == 0)
    for one, other in itertools.pairwise(marks):
        model.add(one < other)
    distances = []
    for one, other in itertools.combinations(marks, 2):
        distances.append(model.new_int_var(1, most, ""))
        model.add(distances[-1] == other - one)
    model.add_all_different(distances)
    if has_objective:
        model.minimize(marks[-1])
    return model


@pytest.mark.parametrize("num_marks", [3, 4, 5, 6])
@pytest.mark.parametrize("linearization", [0, 1, 2])
def test_optima(num_marks, linearization):
    model = ruler(num_marks)
    solution = solve(model, Budget(effort=20.0), effort=20.0, linearization=linearization)
    assert (solution.status, solution.has_values) == ("optimal", True)
    assert (solution.objective, solution.bound) == (SHORTEST[num_marks], SHORTEST[num_marks])
    assert solution.value(model.get_int_var_from_proto_index(num_marks - 1)) == SHORTEST[num_marks]


def test_nothing_is_claimed_where_nothing_was_found():
    infeasible = solve(ruler(5, longest=10), Budget(effort=20.0), effort=20.0)
    unknown = solve(ruler(11, longest=73), Budget(effort=20.0), effort=0.0)
    assert (infeasible.status, unknown.status) == ("infeasible", "unknown")
    for solution in (infeasible, unknown):
        assert (solution.objective, solution.bound, solution.has_values) == (None, None, False)


def test_a_model_without_objective_has_no_bound():
    solution = solve(ruler(5, has_objective=False), Budget(effort=20.0), effort=20.0)
    assert (solution.has_values, solution.objective, solution.bound) == (True, None, None)


def test_effort_is_taken_from_the_budget_and_ends_the_search():
    budget = Budget(effort=5.0)
    solution = solve(ruler(11), budget, effort=0.4)
    assert solution.status == "feasible"
    assert solution.bound < solution.objective
    assert 0.1 < 5.0 - budget.effort < 1.0
    before = budget.effort = 0.3
    solve(ruler(11), budget, effort=100.0)
    assert budget.effort < before
    assert budget.is_spent


def test_a_deadline_ends_the_search():
    budget = Budget(effort=1000.0, deadline=time.monotonic() + 0.3)
    assert not budget.is_spent
    assert solve(ruler(11), budget, effort=1000.0).status == "feasible"
    assert budget.effort > 900
    late = Budget(effort=1000.0, deadline=time.monotonic() - 1.0)
    assert late.is_spent
    assert solve(ruler(11), late, effort=1000.0).status in ("unknown", "feasible")


def found_with(seed: int, **options) -> tuple[int, ...]:
    model = ruler(9, has_objective=False)
    solution = solve(model, Budget(effort=9.0), effort=1.0, seed=seed, **options)
    return tuple(solution.value(model.get_int_var_from_proto_index(index)) for index in range(9))


def test_the_same_seed_gives_the_same_solution():
    assert found_with(1) == found_with(1)


def test_stop_at_ends_at_a_solution_that_is_good_enough():
    whole, part = Budget(effort=50.0), Budget(effort=50.0)
    assert solve(ruler(7), whole, effort=50.0).objective == SHORTEST[7]
    solution = solve(ruler(7), part, effort=50.0, stop_at=40.0)
    assert solution.status == "feasible"
    assert solution.objective <= 40
    assert solution.bound <= SHORTEST[7]
    assert part.effort > whole.effort


def test_large_neighbourhood_search_improves_the_hint():
    model = ruler(8)
    marks = [0, 1, 3, 7, 15, 31, 63, 127]
    for index, value in enumerate([*marks, *(other - one for one, other in itertools.combinations(marks, 2))]):
        model.add_hint(model.get_int_var_from_proto_index(index), value)
    solution = solve(model, Budget(effort=9.0), effort=1.0, lns=True)
    assert solution.status == "feasible"
    assert solution.objective < 127


def test_ctrl_c_keeps_the_best_solution():
    budget = Budget(effort=1000.0)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    try:
        timer.start()
        solution = solve(ruler(11), budget, effort=60.0)
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, old)
    assert budget.is_interrupted
    assert budget.is_spent, "nothing more is begun"
    assert solution.status == "feasible"
    assert budget.effort > 940, "it ended long before its effort was spent"


def test_a_solve_in_another_thread():
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(solve(ruler(5), Budget(effort=20.0), effort=20.0).objective))
    thread.start()
    thread.join(60)
    assert found == [SHORTEST[5]]


def test_errors_of_the_solver_arrive():
    model = cp_model.CpModel()
    model.add(sum(model.new_int_var(0, 2**62, "") for _ in range(4)) >= 1)
    with pytest.raises(AssertionError, match="CP-SAT refused the model"):
        solve(model, Budget(effort=1.0), effort=1.0)


def test_ctrl_c_marks_the_budget_and_a_second_one_raises():
    budget = Budget(effort=1.0)
    with pytest.raises(KeyboardInterrupt), ended_by_ctrl_c(budget):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert budget.is_interrupted
        assert budget.is_spent
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_large_neighbourhood_search_with_nothing_left_is_not_begun():
    """With hardly any deterministic time it may go round for ever."""
    budget = Budget(effort=1.0)
    found = solve(ruler(7), budget, effort=1e-4, lns=True)
    assert (found.status, found.has_values) == ("unknown", False)
    assert budget.effort < 1.0


def test_ctrl_c_while_the_solver_is_started_does_not_leave_it_behind(monkeypatch):
    """A solver that goes on while Python shuts down aborts the process."""
    started = threading.Thread.start

    def interrupted(thread):
        started(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    budget = Budget(effort=1e6)
    before = threading.active_count()
    solve(ruler(12), budget, effort=1e6)
    assert budget.is_interrupted
    assert threading.active_count() == before
