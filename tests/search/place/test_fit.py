"""Is there room at all: against trying everything, and the sentences where there is none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.worlds import problem_of
from weft.base.errors import NoFeasiblePlan
from weft.search.place.fit import fitting_devices
from weft.search.place.problem import PlaceProblem, check_placement


def least_excess(problem: PlaceProblem) -> float:
    """Return the bytes that are missing in all however units are placed."""
    best = float("inf")
    for choice in itertools.product(*(np.flatnonzero(row) for row in problem.is_allowed)):
        device = np.array(choice)[problem.unit_of_op]
        best = min(best, float(np.maximum(problem.resident_bytes(device) - problem.capacity, 0).sum()))
    return best


def draw(seed: int) -> PlaceProblem:
    """Return a problem with about as much memory as some placement needs."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 6, 2 + seed % 2, tight_memory=True, colocate=seed % 3 == 0,
                             shared_weights=seed % 2 == 0)
    capacity = np.maximum(0, problem.capacity + rng.integers(-9, 8, size=problem.num_devices))
    if seed % 5 == 0:
        capacity[0] = np.inf
    return replace(problem, capacity=capacity)


@pytest.mark.parametrize("seed", range(40))
def test_it_fits_exactly_if_something_does(seed):
    problem = draw(seed)
    missing = least_excess(problem)
    if missing > 0:
        with pytest.raises(NoFeasiblePlan) as caught:
            fitting_devices(problem)
        assert caught.value.missing_bytes is not None
        assert caught.value.missing_bytes <= missing
        assert f"({caught.value.missing_bytes} bytes)" in str(caught.value)
        if "does not fit" in str(caught.value):  # no operator is too large by itself
            assert caught.value.missing_bytes == missing
    else:
        device = fitting_devices(problem)
        check_placement(problem, device)
        assert np.all(problem.resident_bytes(device) <= problem.capacity)


def test_both_answers_come_up():
    answers = [least_excess(draw(seed)) > 0 for seed in range(40)]
    assert 8 < sum(answers) < 32


def test_what_is_missing_and_for_what_is_said():
    """Three operators of 10 bytes, room for two and for a half: what is left over lacks 6 bytes."""
    problem = problem_of(graph([op(name, memory=10) for name in ("one", "two", "three")]),
                         cluster(memory={"x": 14, "y": 10}))
    with pytest.raises(NoFeasiblePlan, match=r"30 B stay resident .* 24 B in all, .* 6 B are missing \(6 bytes\), best on "
                                             r"'x', for '\w+'\. Try more memory") as caught:
        fitting_devices(problem)
    assert caught.value.missing_bytes == 6
    assert caught.value.device == "x"


def test_a_unit_larger_than_every_device_is_named():
    problem = problem_of(graph([op("a", memory=6, colocate="g"), op("b", memory=1), op("c", memory=7, colocate="g")]),
                         cluster(memory={"x": 9, "y": 11}))
    with pytest.raises(NoFeasiblePlan, match=r"'a', 'c' cannot fit: 13 B stay resident, .* 'y', has 11 B: 2 B are "
                                             r"missing \(2 bytes\)") as caught:
        fitting_devices(problem)
    assert (caught.value.missing_bytes, caught.value.device) == (2, "y")


def test_only_devices_that_a_unit_may_run_on_count_for_it():
    problem = problem_of(graph([op("a", memory=10, on=["x"])]), cluster(memory={"x": 9, "y": 100}))
    with pytest.raises(NoFeasiblePlan, match=r"'a' cannot fit: .* may run it, 'x', has 9 B"):
        fitting_devices(problem)


def test_a_unit_without_a_device_is_named():
    problem = problem_of(graph([op("a", on=["x"], colocate="g"), op("b", on=["y"], colocate="g")]), cluster())
    with pytest.raises(NoFeasiblePlan, match="'a', 'b' share a device, but there is none that all of them may run on"):
        fitting_devices(problem)


def test_many_names_are_cut_short():
    problem = problem_of(graph([op(f"op{index}", memory=5, colocate="g") for index in range(9)]), cluster(memory={
        "x": 10, "y": 10}))
    with pytest.raises(NoFeasiblePlan, match="'op0', 'op1', 'op2' and 6 more cannot fit"):
        fitting_devices(problem)


def test_without_limits_every_unit_is_where_it_may_be():
    problem = random_problem(np.random.default_rng(1), 12, 3, colocate=True)
    problem = replace(problem, capacity=np.full(3, np.inf))
    check_placement(problem, fitting_devices(problem))


def test_sizes_of_terabytes_are_counted_to_the_byte_or_on_the_safe_side():
    tera = 2**44
    problem = problem_of(graph([op("a", memory=tera), op("b", memory=tera), op("c", memory=tera)]),
                         cluster(memory={"x": 2 * tera, "y": tera}))
    device = fitting_devices(problem)
    assert sorted(np.bincount(device).tolist()) == [1, 2]
    with pytest.raises(NoFeasiblePlan):
        fitting_devices(replace(problem, capacity=np.array([2.0 * tera - 1, tera])))
