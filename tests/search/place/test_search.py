"""The search for the lowest latency: what it promises, with and without a solver, in time and out of it."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.latency.test_series import draw as draw_series
from tests.search.place.odd_inputs import chain, cluster, diamond, edge, graph, op
from tests.search.place.oracle import min_latency
from tests.search.place.random_problems import random_problem
from tests.search.place.test_oracle import draw
from tests.search.place.worlds import problem_of
from weft.base.errors import InputError, NoFeasiblePlan
from weft.search.common.budget import Budget
from weft.search.place import search
from weft.search.place.latency.exact import Solved, subproblem
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem
from weft.search.place.search import LatencySearch, compare, pinned, place, solve_exactly
from weft.search.place.timetable import PlaceResult, check_timetable, make_timetable


def middle_sized(seed: int) -> PlaceProblem:
    return random_problem(np.random.default_rng(seed), 60, 3, contention=("link", "port", "none")[seed % 3],
                          tight_memory=seed % 2 == 0, colocate=seed % 2 == 1, lifetimes=seed % 3 == 2)


def method_values(problem: PlaceProblem) -> dict[str, float]:
    found = {}
    for name, method in METHODS.items():
        try:
            answer = method(problem)
        except NoFeasiblePlan:
            continue
        found[name] = make_timetable(problem, answer.device, answer.order).latency_s
    return found


def check(result: PlaceResult) -> None:
    check_timetable(result.timetable)
    assert result.value == result.timetable.latency_s
    assert 0 <= result.bound <= result.value
    assert result.gap == pytest.approx(0 if result.value == 0 else 1 - result.bound / result.value)


# ---- promises ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_any_method_however_short_the_time(seed):
    problem = middle_sized(seed)
    result = place(problem, time_limit=0.1)
    check(result)
    values = method_values(problem)
    assert bool(values) == (seed != 0)  # there memory is so full that only a search for room finds any
    assert result.value <= min(values.values(), default=np.inf) * (1 + 1e-12)


def test_effort_makes_it_better_than_the_methods(monkeypatch):
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, effort=1.0))
    better = 0
    for seed in (1, 3, 4):
        problem = middle_sized(seed)
        better += place(problem).value < min(method_values(problem).values(), default=0.0) * 0.99
    assert better >= 2


@pytest.mark.parametrize("seed", range(6))
def test_series_are_solved_to_the_end(seed, monkeypatch):
    """Whether the parts are what is solved, or the whole problem first, the optimum is found and proven."""
    problem = draw_series(seed, 3)
    best = min_latency(problem)
    assert best is not None
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, small=4 if seed % 2 else 40))
    result = place(problem, time_limit=20.0)
    check(result)
    assert result.value == pytest.approx(best.latency_s)
    assert result.status == "optimal"
    assert result.bound == pytest.approx(best.latency_s)


def test_same_input_same_placement(monkeypatch):
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, effort=0.8))
    problem = middle_sized(3)
    one, two = (place(problem, seed=7) for _ in range(2))
    check(one)
    assert np.array_equal(one.timetable.device, two.timetable.device)
    assert np.array_equal(one.timetable.start_s, two.timetable.start_s)
    assert one.timetable.transfers == two.timetable.transfers
    assert (one.value, one.bound, one.by, one.status) == (two.value, two.bound, two.by, two.status)


def test_a_method_by_name_is_that_method():
    problem = middle_sized(1)
    for name, value in method_values(problem).items():
        result = place(problem, method=name)
        check(result)
        assert (result.value, result.by) == (value, name)


def test_what_a_method_misses_is_not_called_optimal():
    missed = 0
    for seed in range(12):
        problem = draw(seed, 6)
        best = min_latency(problem)
        assert best is not None
        for name in method_values(problem):
            result = place(problem, method=name)
            assert result.bound <= best.latency_s * (1 + 1e-9)
            if result.value > best.latency_s * (1 + 1e-6):
                assert result.status == "feasible"
                missed += 1
    assert missed > 20


def test_progress_tells_of_better_placements_and_bounds():
    texts: list[str] = []
    result = place(middle_sized(1), time_limit=0.3, progress=texts.append)
    assert texts[0].startswith("heft: best ")  # no device may run all, so ``single`` has nothing
    assert all(", bound " in text and ", gap " in text for text in texts)
    assert f"best {result.value:.6g} s" in texts[-1]


# ---- small and odd ----------------------------------------------------------------------------------------------------------


def test_nothing_to_place():
    problem = subproblem(draw(3, 5), np.arange(0), entry=False)
    result = place(problem)
    assert (result.value, result.bound, result.status) == (0.0, 0.0, "optimal")
    assert result.to_json()["placement"] == {}


def test_one_operator_goes_where_it_is_fastest():
    result = place(problem_of(graph([op("a", 3, 2)]), cluster()))
    assert (result.value, result.status, result.timetable.device.tolist()) == (2.0, "optimal", [1])


def test_all_on_the_best_device_is_proven_without_a_search():
    result = place(problem_of(chain(50, 1, 5), cluster()))
    assert (result.value, result.status, result.by) == (50.0, "optimal", "single")


@pytest.mark.parametrize(("options", "sentence"), [
    ({"method": "magic"}, "there is no method 'magic': choose one of auto, single, heft"),
    ({"time_limit": 0.0}, "the time limit must be more than 0 seconds, not 0.0"),
    ({"time_limit": -1.0}, "more than 0 seconds"),
    ({"time_limit": float("nan")}, "more than 0 seconds"),
    ({"contiguous": True}, "contiguous placements are for the objective throughput"),
])
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        place(problem_of(diamond(1, 1), cluster()), **options)


def test_what_cannot_fit_is_said():
    files = graph([op(name, memory=10) for name in "abc"], [edge("a", "b", 1), edge("b", "c", 1)])
    problem = problem_of(files, cluster(memory={"x": 14, "y": 10}))
    with pytest.raises(NoFeasiblePlan, match=r"does not fit: .* 6 B are missing \(6 bytes\)") as caught:
        place(problem)
    assert caught.value.missing_bytes == 6


def test_tensors_that_do_not_fit_beside_the_weights_are_said():
    files = graph([op(name, memory=10) for name in "ab"], [edge("a", "b", 1)])
    problem = replace(problem_of(files, cluster(memory={"x": 25, "y": 25})), has_lifetimes=True,
                      tensor_bytes=np.array([100.0]))
    with pytest.raises(NoFeasiblePlan, match=r"its weights do, but not with the tensors .* bytes are missing on '\w'"):
        place(problem, time_limit=3)
    assert place(replace(problem, tensor_bytes=np.array([5.0]))).status == "optimal"


def test_a_placement_that_only_memory_finds_is_found():
    """Sizes that fill both devices exactly: lists that go by time miss it."""
    sizes = [7, 6, 5, 4, 3, 3]
    problem = problem_of(graph([op(f"op{index}", 1, 2, memory=size) for index, size in enumerate(sizes)]),
                         cluster(memory={"x": 14, "y": 14}))
    best = min_latency(problem)
    assert best is not None
    assert place(problem).value == best.latency_s


# ---- without a proof ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_parts_that_nobody_solved_prove_nothing(seed, monkeypatch):
    monkeypatch.setattr(search, "solve_exactly", lambda *arguments, **options: Solved(bound=0.0))
    problem = draw_series(seed, 3)
    best = min_latency(problem)
    assert best is not None
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, effort=0.01, small=4))
    result = place(problem)
    check(result)
    assert result.bound <= best.latency_s * (1 + 1e-9)
    assert result.status == "feasible" or result.value == pytest.approx(best.latency_s)


# ---- Ctrl-C -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_ctrl_c_ends_it_with_the_best_so_far(delay):
    """At once where the first placement is told, or a little later, in the middle of compiled code or of the solver."""
    before = signal.getsignal(signal.SIGINT)
    texts: list[str] = []

    def progress(text: str) -> None:
        texts.append(text)
        if len(texts) == 1 and delay:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        elif len(texts) == 1:
            signal.raise_signal(signal.SIGINT)

    result = place(middle_sized(1), time_limit=60.0, progress=progress)
    check(result)
    assert result.is_interrupted
    assert result.status == "feasible"
    assert delay or len(texts) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_comparison_has_the_rows_so_far():
    def progress(text: str) -> None:
        if text.startswith("peft"):
            signal.raise_signal(signal.SIGINT)

    rows = compare(problem_of(diamond(1, 0.5), cluster()), progress=progress)
    assert [row.method for row in rows] == ["single", "heft", "heft-subsets", "peft"]
    assert rows[-1].result is not None
    assert rows[-1].result.is_interrupted


# ---- comparisons and steps ----------------------------------------------------------------------------------------------------


def test_a_comparison_has_every_method_and_auto_last():
    files = graph([op("a", 4, 1, memory=10), op("b", 1, 4, memory=10), op("c", 2, 2, memory=10)],
                  [edge("a", "b", 1), edge("a", "c", 1)])
    rows = compare(problem_of(files, cluster(memory={"x": 20, "y": 10})), time_limit=2.0)
    assert [row.method for row in rows] == [*METHODS, "auto"]
    assert rows[0].value is None
    assert "missing" in rows[0].reason
    values = [row.value for row in rows if row.value is not None]
    assert len(values) > 5
    assert rows[-1].value == min(values)
    assert all(row.reason == "" or row.result is None for row in rows)


def test_a_comparison_of_what_cannot_fit_is_refused():
    with pytest.raises(NoFeasiblePlan, match="cannot fit"):
        compare(problem_of(graph([op("a", memory=9)]), cluster(memory={"x": 5, "y": 5})))


def test_only_valid_and_better_timetables_are_kept():
    problem = problem_of(diamond(1, 0.5), cluster())
    state = LatencySearch(problem, Budget(effort=1.0), 0)
    slow, fast = (make_timetable(problem, np.array(device), np.arange(4)) for device in ([0, 0, 0, 0], [0, 0, 1, 0]))
    assert state.offer(slow, "slow")
    assert state.offer(fast, "fast")
    assert not state.offer(slow, "slow")
    assert not state.offer(fast, "again")
    assert not state.offer(replace(fast, start_s=fast.start_s / 2), "too early")
    assert (state.best.value, state.best.by) == (6.0, "fast")


def test_fixed_devices_leave_only_the_order():
    problem = middle_sized(1)
    device = METHODS["heft"](problem).device
    fixed = pinned(problem, device)
    assert np.isfinite(fixed.time_s).sum() == 60
    assert np.array_equal(np.argmin(fixed.time_s, axis=1), device)


@pytest.mark.parametrize("seed", range(8))
def test_exact_answers_have_a_bound_within_the_optimum_of_the_order(seed):
    problem = draw(seed, 6)
    best = min_latency(problem)
    assert best is not None
    device = best.timetable.device
    start = make_timetable(problem, device, best.timetable.order)
    order = solve_exactly(problem, Budget(effort=5.0), effort=5.0, start=start, limit=start.latency_s * 1.01 + 1, seed=0,
                          device=device)
    assert order.timetable is not None
    assert order.value == pytest.approx(best.latency_s, rel=1e-6, abs=1e-12)
    assert np.array_equal(order.timetable.device, device)
    assert order.bound <= best.latency_s * (1 + 1e-9)
    nothing = solve_exactly(problem, Budget(effort=5.0), effort=5.0, start=None, limit=best.latency_s, seed=0)
    assert nothing.bound <= best.latency_s * (1 + 1e-9)
    assert nothing.timetable is None or nothing.value >= best.latency_s * (1 - 1e-9)
