"""Placement for a stream of requests: loads that are true, contiguous parts, methods by name, and what cannot fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import chain, cluster, edge, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.throughput.test_throughput import best_value, is_convex, plain_loads
from tests.search.place.worlds import problem_of
from weft.base.errors import NoFeasiblePlan
from weft.search.place import search
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem
from weft.search.place.search import compare, place
from weft.search.place.timetable import PlaceResult


def draw(seed: int, num_ops: int = 6, *, limited: bool = True) -> PlaceProblem:
    return random_problem(np.random.default_rng(seed), num_ops, 2 + seed % 2, contention=("link", "port", "none")[seed % 3],
                          tight_memory=seed % 4 == 0, shared_cores=seed % 5 == 1, limited=limited)


def check(result: PlaceResult) -> None:
    problem, device = result.problem, result.timetable.device
    expected = plain_loads(problem, device)
    assert list(result.loads) == [*problem.device_names, *problem.resource_names]
    assert list(result.loads.values()) == pytest.approx(expected)
    assert result.value == pytest.approx(max(result.loads.values()))
    assert result.objective == "throughput"
    assert 0 <= result.bound <= result.value
    assert np.all(problem.resident_bytes(device) <= problem.capacity)
    assert result.to_json()["loads"] == result.loads


@pytest.mark.parametrize("seed", range(12))
def test_the_value_is_the_largest_load_and_the_best(seed):
    problem = draw(seed)
    contiguous = seed % 2 == 1
    result = place(problem, objective="throughput", contiguous=contiguous, time_limit=20.0)
    check(result)
    assert not contiguous or is_convex(problem, result.timetable.device)
    assert (result.status, result.by) == ("optimal", "loads")
    assert result.value == pytest.approx(best_value(problem, contiguous=contiguous), rel=1e-6)


def test_a_chain_is_divided_evenly():
    """Eight operators of 1 s on two devices, 0.5 s to send: four each, contiguous or not."""
    for contiguous in (False, True):
        result = place(problem_of(chain(8, 1, 0.5), cluster()), objective="throughput", contiguous=contiguous)
        check(result)
        assert result.value == 4
        assert np.bincount(result.timetable.device).tolist() == [4, 4]


def test_contiguous_parts_cost_what_they_cost():
    """x is good at every other operator: alone it would take those, in one piece it cannot."""
    ops = [op(f"op{index}", *((1, 9) if index % 2 else (9, 1))) for index in range(4)]
    problem = problem_of(graph(ops, [edge(f"op{index}", f"op{index + 1}", 0.1) for index in range(3)]), cluster())
    free, whole = (place(problem, objective="throughput", contiguous=contiguous) for contiguous in (False, True))
    assert free.value == 2
    assert not is_convex(problem, free.timetable.device)
    assert is_convex(problem, whole.timetable.device)
    assert whole.value == best_value(problem, contiguous=True) == 10


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_name_has_its_own_loads(name):
    problem = draw(3, 15, limited=False)
    result = place(problem, objective="throughput", method=name)
    check(result)
    assert result.by == name
    assert result.bound > 0
    assert result.status == "feasible"
    assert np.array_equal(result.timetable.device, METHODS[name](problem).device)


def test_auto_is_never_worse_than_a_method():
    problem = draw(4, 40)
    rows = compare(problem, objective="throughput", time_limit=0.5)
    assert [row.method for row in rows] == [*METHODS, "auto"]
    values = [row.value for row in rows if row.value is not None]
    assert rows[-1].value == min(values)


def test_what_cannot_fit_is_said():
    problem = problem_of(graph([op(name, memory=10) for name in "abc"]), cluster(memory={"x": 14, "y": 10}))
    for method in ("auto", "heft"):
        with pytest.raises(NoFeasiblePlan, match=r"6 B are missing \(6 bytes\)") as caught:
            place(problem, objective="throughput", method=method)
        assert caught.value.missing_bytes == 6


def test_a_method_that_misses_what_would_fit_says_so():
    problem = problem_of(graph([op(name, memory=10) for name in "abc"]), cluster(memory={"x": 20, "y": 10}))
    with pytest.raises(NoFeasiblePlan, match="missing"):
        place(problem, objective="throughput", method="single")
    check(place(problem, objective="throughput"))


def test_same_input_same_placement(monkeypatch):
    monkeypatch.setattr(search, "TUNING", replace(search.TUNING, effort=0.5))
    problem = draw(7, 30)
    one, two = (place(problem, objective="throughput", seed=5) for _ in range(2))
    assert np.array_equal(one.timetable.device, two.timetable.device)
    assert (one.value, one.bound) == (two.value, two.bound)


@pytest.mark.parametrize("contiguous", [False, True])
def test_tensors_that_are_alive_fit_beside_the_weights(contiguous):
    """y has room for the weights of three operators, but not for what b sends to c: it gets a or d alone."""
    problem = problem_of(chain(4, 1, 0.1), cluster())
    problem = replace(problem, has_lifetimes=True, capacity=np.array([1000.0, 30.0]), weight_bytes=np.full(4, 10.0),
                      tensor_bytes=np.array([1.0, 50.0, 1.0]))
    result = place(problem, objective="throughput", contiguous=contiguous, time_limit=5.0)
    check(result)
    assert np.all(result.timetable.peak_bytes() <= problem.capacity)
    assert result.value == 3
    assert result.status == "feasible"
    assert result.bound == pytest.approx(2)
    with pytest.raises(NoFeasiblePlan, match=r"bytes are missing on '.' in the nearest") as caught:
        place(replace(problem, capacity=np.array([30.0, 30.0])), objective="throughput", time_limit=5.0)
    assert caught.value.missing_bytes
