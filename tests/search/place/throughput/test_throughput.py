"""The throughput objective of Weft's graphs against trying everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, graph
from tests.search.place.odd_inputs import op as make_op
from tests.search.place.random_problems import random_problem
from tests.search.place.worlds import problem_of
from weft.base.errors import NoFeasiblePlan
from weft.model.graph import I64
from weft.search.common.budget import Budget
from weft.search.place.problem import PlaceProblem, check_placement
from weft.search.place.search import place
from weft.search.place.throughput.exact import _split_bound
from weft.search.place.throughput.model import load_problem
from weft.search.place.throughput.search import solve_throughput


def plain_loads(problem: PlaceProblem, device: I64) -> list[float]:
    """Return the loads by the words of the definition: cores by device, then resources."""
    found = []
    for index in range(problem.num_devices):
        core = problem.core_of_device[index]
        found.append(sum(problem.time_s[op, device[op]] for op in range(problem.num_ops)
                         if problem.core_of_device[device[op]] == core))
    over = [0.0] * problem.num_resources
    start, readers = problem.readers
    for tensor in range(problem.num_tensors):
        source = int(device[problem.producer[tensor]])
        for target in {int(device[op]) for op in readers[start[tensor] : start[tensor + 1]]} - {source}:
            seconds = problem.transfer_s(tensor, source, target)
            if not np.isfinite(seconds):
                return [float("inf")]
            pair = source * problem.num_devices + target
            for resource in problem.resources[problem.resource_start[pair] : problem.resource_start[pair + 1]]:
                over[resource] += seconds
    return [float(load) for load in found + over]


def is_convex(problem: PlaceProblem, device: I64) -> bool:
    below: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for source, reader, _ in sorted(problem.edges.tolist(), reverse=True):
        below[source] |= {reader} | below[reader]
    return all(device[middle] == device[first] for first in range(problem.num_ops) for last in below[first]
               if device[first] == device[last] for middle in below[first] if last in below[middle])


def best_value(problem: PlaceProblem, *, contiguous: bool) -> float:
    best = float("inf")
    for choice in itertools.product(range(problem.num_devices), repeat=problem.num_units):
        device = np.array(choice)[problem.unit_of_op]
        if not np.isfinite(problem.time_s[np.arange(problem.num_ops), device]).all():
            continue
        if (problem.resident_bytes(device) > problem.capacity).any():
            continue
        value = max(plain_loads(problem, device))
        if value < best and (not contiguous or is_convex(problem, device)):
            best = value
    return best


def draw(seed: int) -> PlaceProblem:
    rng = np.random.default_rng(seed)
    return random_problem(rng, 6, 2 + seed % 2, contention=("link", "port", "none")[seed % 3], tight_memory=seed % 2 == 0,
                          colocate=seed % 5 == 0, shared_cores=seed % 7 == 3, shared_weights=seed % 4 == 2)


@pytest.mark.parametrize("seed", range(40))
def test_equal_to_trying_everything(seed: int) -> None:
    problem = draw(seed)
    contiguous = seed % 3 == 1
    best = best_value(problem, contiguous=contiguous)
    budget = Budget(effort=1.0)
    if not np.isfinite(best):
        with pytest.raises(NoFeasiblePlan):
            solve_throughput(problem, contiguous=contiguous, budget=budget, seed=seed)
        return
    found = solve_throughput(problem, contiguous=contiguous, budget=budget, seed=seed)
    check_placement(problem, found.answer)
    assert (problem.resident_bytes(found.answer) <= problem.capacity).all()
    assert max(plain_loads(problem, found.answer)) == pytest.approx(found.value)
    assert not contiguous or is_convex(problem, found.answer)
    assert found.bound <= best * (1 + 1e-9)
    assert found.value == pytest.approx(best, rel=1e-6)
    assert found.is_proven


@pytest.mark.parametrize("seed", range(12))
def test_loads_by_the_definition(seed: int) -> None:
    problem = draw(seed)
    device = np.random.default_rng(seed).integers(problem.num_devices, size=problem.num_units)[problem.unit_of_op]
    expected = plain_loads(problem, device)
    first = [int(np.flatnonzero(problem.unit_of_op == unit)[0]) for unit in range(problem.num_units)]
    found = load_problem(problem, contiguous=False).loads(device[first])
    assert len(found) == problem.num_devices + problem.num_resources
    if np.isfinite(expected).all():
        assert found == pytest.approx(expected)
    else:
        assert np.isinf(found).any()


def test_a_start_is_never_made_worse() -> None:
    problem = random_problem(np.random.default_rng(8), 30, 3)
    start = solve_throughput(problem, contiguous=False, budget=Budget(effort=0.5), seed=0).answer
    value = max(plain_loads(problem, start))
    found = solve_throughput(problem, contiguous=False, budget=Budget(effort=1e-6), seed=1, starts=[start])
    assert found.value <= value * (1 + 1e-12)


def test_interrupted_before_it_begins_it_still_returns_something() -> None:
    problem = random_problem(np.random.default_rng(8), 12, 3)
    found = solve_throughput(problem, contiguous=False, budget=Budget(effort=5.0, is_interrupted=True), seed=0)
    assert max(plain_loads(problem, found.answer)) == pytest.approx(found.value)
    assert found.bound <= found.value


def test_same_seed_same_placement() -> None:
    problem = random_problem(np.random.default_rng(3), 40, 3)
    first, second = (solve_throughput(problem, contiguous=False, budget=Budget(effort=1.5), seed=4) for _ in range(2))
    assert (first.answer == second.answer).all()
    assert (first.value, first.bound) == (second.value, second.bound)


def test_too_little_memory_says_what_is_missing() -> None:
    problem = random_problem(np.random.default_rng(3), 5, 2, limited=False)
    sizes = np.full(5, 10.0)
    problem = replace(problem, weight_start=np.arange(6), weights=np.arange(5), weight_bytes=sizes,
                      capacity=np.array([20.0, 24.0]))
    with pytest.raises(NoFeasiblePlan, match=r"6 B are missing \(6 bytes\), best on '.*', for '") as caught:
        solve_throughput(problem, contiguous=False, budget=Budget(effort=0.5), seed=0)
    assert caught.value.missing_bytes == 6


@pytest.mark.parametrize("contiguous", [False, True])
def test_where_there_is_no_way_no_memory_is_said_to_be_missing(contiguous: bool) -> None:
    ops = [make_op("a", on=["x"]), make_op("b", on=["y"]), make_op("c", on=["x"])]
    there = {"x>y": 1.0, "y>x": 1.0} if contiguous else {"x>y": 1.0}
    edges = [{"from": source, "to": target, "times": there} for source, target in ("ab", "bc")]
    problem = problem_of(graph(ops, edges), cluster())
    reason = "no path leaves a device and comes back" if contiguous else "every operator gets what it reads"
    with pytest.raises(NoFeasiblePlan, match=f"there is no placement of 'graph' in which .*{reason}") as caught:
        place(problem, objective="throughput", contiguous=contiguous)
    assert caught.value.missing_bytes is None


@pytest.mark.parametrize("exponent", [-12, -8, 0, 9])
def test_the_bound_by_work_holds_at_any_scale(exponent: int) -> None:
    rng = np.random.default_rng(8)
    times = rng.uniform(0.1, 1.0, (30, 4)) * 10.0 ** rng.integers(-4, 1, (30, 1))
    assert _split_bound(times * 10.0**exponent) == pytest.approx(_split_bound(times) * 10.0**exponent, rel=1e-9)
