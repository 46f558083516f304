"""What the search claims, held against brute force, and its JSON against a checker that knows only the formats."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.check_json import check_result
from tests.search.place.odd_inputs import odd_inputs
from tests.search.place.oracle import min_latency
from tests.search.place.random_problems import random_files, random_problem
from tests.search.place.worlds import problem_of
from weft.search.place.problem import PlaceProblem
from weft.search.place.search import place
from weft.search.place.timetable import check_timetable

CONTENTIONS = ("link", "port", "none")


def check_claims(problem: PlaceProblem, *, time_limit: float) -> None:
    """Search, and check the claims of the result against the optimum."""
    optimum = min_latency(problem)
    assert optimum is not None
    best = optimum.latency_s
    result = place(problem, objective="latency", time_limit=time_limit)
    check_timetable(result.timetable)
    assert result.timetable.latency_s == pytest.approx(result.value, rel=1e-9)
    assert result.bound <= best * (1 + 1e-9)
    assert result.value >= best * (1 - 1e-9)
    if result.status == "optimal":
        assert result.value == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_claims_hold_on_random_problems(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, int(rng.integers(2, 8)), int(rng.integers(2, 4)), contention=CONTENTIONS[seed % 3],
        tight_memory=bool(seed // 3 % 2), colocate=bool(seed // 6 % 2), limited=bool(seed % 4 == 0),
        shared_cores=bool(seed % 7 == 0), shared_weights=bool(seed % 5 == 0))
    check_claims(replace(problem, time_s=problem.time_s * (1.0, 3.0, 3**0.5)[seed % 3]), time_limit=2.0)


@pytest.mark.parametrize("exponent", [-12, -6, 9])
def test_claims_hold_at_any_scale(exponent):
    problem = random_problem(np.random.default_rng(5), 6, 3, contention="port")
    factor = 10.0**exponent
    check_claims(replace(problem, time_s=problem.time_s * factor, latency_s=problem.latency_s * factor,
                         s_per_byte=problem.s_per_byte * factor, given_s=problem.given_s * factor), time_limit=2.0)


@pytest.mark.parametrize("name", odd_inputs())
def test_claims_and_json_hold_on_odd_inputs(name):
    graph, cluster = odd_inputs()[name]
    problem = problem_of(graph, cluster)
    check_claims(problem, time_limit=2.0)
    assert check_result(graph, cluster, place(problem, objective="latency", time_limit=2.0).to_json()) == []


def test_the_command_line_prints_a_right_result(tmp_path):
    graph, cluster = random_files(np.random.default_rng(3), 12, 3, contention="port", tight_memory=True)
    for name, value in (("graph", graph), ("cluster", cluster)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    run = subprocess.run([sys.executable, "-m", "weft", "place", str(tmp_path / "graph.json"),
                          str(tmp_path / "cluster.json"), "--json", "--time-limit", "2"],
                         capture_output=True, text=True, timeout=120, check=True)
    assert check_result(graph, cluster, json.loads(run.stdout)) == []
