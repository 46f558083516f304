"""Rounding is told from errors: sound models whose batch norm sees few values were called different in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.run.plans import traced
from tests.run.pool import Pool
from tests.run.sharded_plans import sharded_plan, sharding_of
from weft.plan.plan import Plan
from weft.run.__main__ import report
from weft.run.result import RunResult, Verification, load_result, save_result
from weft.run.verify import verdict

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(2, tmp_path_factory.mktemp("pool"), models=("few_values",)) as running:
        yield running


def plan_of(mode: str = "training") -> Plan:
    """Return a plan that adds up the batch norm's inputs in two parts, in another order than one process."""
    sharding = sharding_of("few_values", (2,), [{"first.linear": "k"}], mode=mode)
    return sharded_plan("few_values", {"tensor": 2}, sharding, num_devices=2, mode=mode)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_was_called_different(pool, dtype):
    found = pool.run(plan_of(), "few_values", dtype=dtype)["verification"]
    assert found["gradient_error"] > found["tolerance"]
    assert found["passed"], found
    assert found["float64_error"] < 1e-10
    assert found["rounding_error"] > found["tolerance"]


def test_a_real_error_stays_different(pool):
    """Control: gradients that are lost on one rank are lost in float64 as well."""
    found = pool.run(plan_of(), "few_values", dtype="float32", damage="lost_weight_gradient")["verification"]
    assert not found["passed"]
    assert found["float64_error"] > 1e-7
    assert "this is not rounding" in found["note"]


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_an_error_that_does_not_come_twice_stays_different(pool, mode):
    """Control: a sum that is lost once, in float32 alone."""
    found = pool.run(plan_of(mode), "few_values", dtype="float32", damage="lost all_reduce 1")["verification"]
    assert not found["passed"]
    assert found["float64_error"] < 1e-10
    assert "something else went wrong" in found["note"]


CHECK = Verification(passed=False, tolerance=1e-5, loss_error=1e-7, gradient_error=3e-3, worst="a (rank 0)",
                     num_gradients=3, reference_loss=1.0)
PRECISE = replace(CHECK, passed=True, tolerance=1e-10, loss_error=1e-16, gradient_error=2e-11)


def test_what_the_verdict_says(capsys, tmp_path):
    equal = verdict(CHECK, PRECISE, 2e-3)
    assert (equal.passed, equal.float64_error, equal.rounding_error) == (True, 2e-11, 2e-3)
    result = RunResult(num_ranks=2, losses=(1.0,), step_times_s=(0.1,), cpu_s=(0.1, 0.1), verification=equal)
    save_result(result, tmp_path)
    assert load_result(tmp_path).verification == equal
    assert report(result, as_json=False) == 0
    assert "rounding: in float64 the same plan is equal to 2.0e-11, and rounding moves one process by 2.0e-03" in (
        capsys.readouterr().out)
    assert report(result, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["verification"]["float64_error"] == 2e-11


@pytest.mark.parametrize(("precise", "own", "words"), [
    (replace(PRECISE, passed=False, gradient_error=3e-3), 2e-3, "in float64 the same plan differs by 3.0e-03: this is no"),
    (PRECISE, 1e-6, "but rounding moves one process by 1.0e-06 alone: something else went wrong"),
    (replace(PRECISE, passed=False, gradient_error=float("nan")), 2e-3, "differs by inf"),
])
def test_what_is_no_rounding_is_different(capsys, precise, own, words):
    found = verdict(CHECK, precise, own)
    assert not found.passed
    result = RunResult(num_ranks=2, losses=(1.0,), step_times_s=(0.1,), cpu_s=(0.1, 0.1), verification=found)
    assert report(result, as_json=False) == 4
    assert words in capsys.readouterr().out.replace("In float64", "in float64")
    report(result, as_json=True)
    assert "Infinity" not in capsys.readouterr().out, "JSON has no such number"


def test_not_a_number_is_never_rounding():
    assert not verdict(replace(CHECK, loss_error=float("nan")), PRECISE, 1.0).passed


def test_a_model_that_does_not_run_in_float64_says_so(pool):
    """It casts to bfloat16 by itself, so that float64 is no more precise."""
    graph = traced("stubborn").graph
    sharding = sharding_of("stubborn", (2,), [{"first.linear": "k"}])
    assert "bfloat16" in graph.tensor_dtypes
    found = pool.run(sharded_plan("stubborn", {"tensor": 2}, sharding, num_devices=2), "stubborn",
                     dtype="float32", damage="lost_weight_gradient")["verification"]
    assert not found["passed"]
    assert found["float64_error"] is None
    assert "cannot be run in float64 (it computes in bfloat16 by itself)" in found["note"]
