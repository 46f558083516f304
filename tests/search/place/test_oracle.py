"""The oracle against two other ways to the optimum; the checker of results against broken ones; methods above it."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.check_json import check_result
from tests.search.place.odd_inputs import odd_inputs
from tests.search.place.oracle import all_latencies, min_latency
from tests.search.place.oracle_cp import min_latency_cp
from tests.search.place.random_problems import random_files, random_problem
from tests.search.place.worlds import problem_of
from weft.base.errors import NoFeasiblePlan
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import PlaceResult, check_timetable, make_timetable

CONTENTIONS = ("link", "port", "none")


def draw(seed: int, max_ops: int, *, min_devices: int = 2, speed: float = 1.0) -> PlaceProblem:
    """Return a random problem; the seed decides contention, memory, colocation, shared cores and weights too."""
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, int(rng.integers(2, max_ops + 1)), int(rng.integers(min_devices, 4)), contention=CONTENTIONS[seed % 3],
        tight_memory=bool(seed // 3 % 2), colocate=bool(seed // 6 % 2), limited=bool(seed % 4 == 0),
        shared_cores=bool(seed % 7 == 0), shared_weights=bool(seed % 5 == 0))
    return replace(problem, time_s=problem.time_s * speed)


@pytest.mark.parametrize("seed", range(40))
def test_brute_force_equals_the_constraint_solver(seed):
    problem = draw(seed, 6, speed=1 + seed % 3)
    optimum = min_latency(problem)
    assert optimum is not None
    check_timetable(optimum.timetable)
    assert optimum.timetable.latency_s == pytest.approx(optimum.latency_s, rel=1e-12)
    assert min_latency_cp(problem) == pytest.approx(optimum.latency_s, rel=1e-9)


@pytest.mark.parametrize("zero_occupies", [False, True])
def test_brute_force_equals_all_permutations(zero_occupies):
    num_checked = 0
    for seed in range(100, 160):
        problem = draw(seed, 4, min_devices=2)
        if problem.num_ops + problem.num_tensors > 7:
            continue
        optimum = min_latency(problem, zero_occupies=zero_occupies)
        assert optimum is not None
        assert all_latencies(problem, zero_occupies=zero_occupies) == optimum.latency_s
        num_checked += 1
    assert num_checked > 20


def test_no_placement_is_said_by_both():
    problem = draw(2, 4)
    problem = replace(problem, capacity=np.zeros(problem.num_devices), weight_bytes=problem.weight_bytes + 1)
    assert min_latency(problem) is None
    assert min_latency_cp(problem) is None


def test_a_transfer_that_waits_on_purpose_is_found():
    """Operator a ends first, but what b writes is urgent: the optimum sends b's tensor before a's."""
    graph = {"format": "weft.graph", "version": 1, "ops": [
        {"name": "a", "times": {"x": 1}, "on": ["x"]}, {"name": "b", "times": {"x": 1}, "on": ["x"]},
        {"name": "c", "times": {"y": 1}, "on": ["y"]}, {"name": "d", "times": {"y": 20}, "on": ["y"]}],
        "edges": [{"from": "a", "to": "c", "times": {"x>y": 10}}, {"from": "b", "to": "d", "times": {"x>y": 1}}]}
    problem = problem_of(graph, _two_devices("port"))
    optimum = min_latency(problem)
    assert optimum is not None
    assert optimum.latency_s == 23  # b, its tensor, then d; c after d
    assert min_latency_cp(problem) == 23


def _two_devices(contention: str) -> dict:
    return {"format": "weft.cluster", "version": 1, "contention": contention,
            "devices": [{"name": "x", "kind": "x", "memory": 100}, {"name": "y", "kind": "y", "memory": 100}]}


@pytest.mark.parametrize("seed", range(30))
def test_decoded_orders_pass_the_format_checker_and_are_not_below_the_optimum(seed):
    rng = np.random.default_rng(seed)
    graph, cluster = random_files(rng, int(rng.integers(2, 8)), int(rng.integers(2, 4)),
                                  contention=CONTENTIONS[seed % 3], shared_cores=bool(seed % 5 == 0))
    problem = problem_of(graph, cluster)
    optimum = min_latency(problem)
    assert optimum is not None
    device = optimum.timetable.device
    table = make_timetable(problem, device, np.arange(problem.num_ops, dtype=np.int64))
    assert table.latency_s >= optimum.latency_s - 1e-9
    for timetable in (table, optimum.timetable):
        result = PlaceResult(timetable=timetable, objective="latency", value=timetable.latency_s,
                             bound=optimum.latency_s, status="feasible", by="test", seconds=0.0)
        assert check_result(graph, cluster, result.to_json()) == []


# ---- the checker of results against broken ones ------------------------------------------------------------------

GRAPH = {"format": "weft.graph", "version": 1, "ops": [
    {"name": "a", "times": {"x": 1, "y": 2}, "memory": 60}, {"name": "b", "times": {"x": 3, "y": 4}, "memory": 50},
    {"name": "c", "times": {"y": 5}, "memory": 10, "on": ["y"], "colocate": "g"},
    {"name": "d", "times": {"x": 1, "y": 1}, "colocate": "g"}],
    "edges": [{"from": "a", "to": "c", "times": {"x>y": 2, "y>x": 2}, "tensor": "t"},
              {"from": "a", "to": "d", "times": {"x>y": 2, "y>x": 2}, "tensor": "t"},
              {"from": "b", "to": "d", "times": {"x>y": 3, "y>x": 3}}]}
GOOD = {"status": "feasible", "objective": "latency", "value": 13.0, "bound": 4.0,
        "placement": {"a": "x", "b": "y", "c": "y", "d": "y"},
        "starts": {"a": ["x", 0, 1], "b": ["y", 3, 7], "c": ["y", 7, 12], "d": ["y", 12, 13]},
        "transfers": [["a", "c", 1, 3], ["a", "d", 1, 3]],
        "peak_memory": {"x": 60, "y": 60}, "seconds": 0.1}


def test_a_right_result_passes():
    assert check_result(GRAPH, _two_devices("link"), GOOD) == []


@pytest.mark.parametrize(("path", "value", "message"), [
    (("placement", "c"), "x", "c may not run on x"),
    (("placement", "a"), "z", "which is no device"),
    (("starts", "a"), ["y", 0, 2], "is placed on x but starts on y"),
    (("starts", "b"), ["y", 3, 6], "runs from 3 to 6"),
    (("starts", "c"), ["y", 5, 10], "b and c at once"),
    (("starts", "c"), ["y", 2, 7], "c starts at 2"),
    (("transfers",), [["a", "c", 1, 3]], "a > d: 0 transfers, not 1"),
    (("transfers",), [["a", "c", 1, 2], ["a", "d", 1, 2]], "do not take"),
    (("transfers",), [["a", "c", 0, 2], ["a", "d", 0, 2]], "is sent at 0.0, before 1"),
    (("transfers",), [["a", "c", 1, 3], ["a", "d", 4, 6]], "sent to y twice"),
    (("transfers",), [["a", "c", 1, 3], ["a", "d", 1, 3], ["c", "a", 1, 3]], "which no edge joins"),
    (("value",), 12.0, "the value is 13"),
    (("bound",), 14.0, "is above the value"),
    (("status",), "optimal", "optimal, but the bound"),
    (("peak_memory", "x"), 10, "peak_memory of x"),
    (("placement",), {"a": "x"}, "names other operators"),
])
def test_a_broken_result_is_refused(path, value, message):
    result = copy.deepcopy(GOOD)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(message in problem for problem in check_result(GRAPH, _two_devices("link"), result))


def test_too_much_memory_and_torn_groups_are_refused():
    graph = copy.deepcopy(GRAPH)
    graph["ops"][2]["memory"] = 60
    assert any("holds 110" in item for item in check_result(graph, _two_devices("link"), GOOD))
    result = copy.deepcopy(GOOD)
    result["placement"]["d"] = "x"
    assert any("others of g" in item for item in check_result(GRAPH, _two_devices("link"), result))


def test_two_transfers_through_one_port_are_refused():
    graph = copy.deepcopy(GRAPH)
    graph["edges"][1] = {"from": "a", "to": "d", "times": {"x>y": 2}}
    for contention, num_problems in (("port", 2), ("link", 1), ("none", 0)):
        assert len(check_result(graph, _two_devices(contention), GOOD)) == num_problems


@pytest.mark.parametrize("name", odd_inputs())
def test_named_methods_survive_odd_inputs(name):
    graph, cluster = odd_inputs()[name]
    problem = problem_of(graph, cluster)
    optimum = min_latency(problem)
    assert optimum is not None
    strict = min_latency(problem, zero_occupies=True)
    assert strict is not None
    check_timetable(strict.timetable)
    for method in METHODS.values():
        try:
            found = method(problem)
        except NoFeasiblePlan:
            continue
        timetable = make_timetable(problem, found.device, found.order)
        check_timetable(timetable)
        assert timetable.latency_s >= optimum.latency_s * (1 - 1e-9)
