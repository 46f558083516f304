"""Both objectives of dnn-partitioning problems against trying everything."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.search.place.partition.problems import (
    best_latency,
    best_throughput,
    has_circle,
    is_allowed,
    is_convex,
    plain_latency,
    plain_loads,
    random_partition,
    random_value,
)
from weft.base.errors import InputError, NoFeasiblePlan, PlanError
from weft.search.place.partition import search as partition
from weft.search.place.partition.problem import check_latency, check_throughput, parse_partition
from weft.search.place.partition.search import solve_partition


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little effort for every search, counted without the clock."""
    monkeypatch.setattr(partition, "TUNING", replace(partition.TUNING, effort=1.0))


@pytest.mark.parametrize("seed", range(30))
def test_throughput_equals_trying_everything(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contiguous = bool(seed % 2)
    problem = random_partition(rng, 6, accelerators=2 + seed % 2, backward=seed % 4 == 1, tight=seed % 3 == 0)
    result = solve_partition(problem, objective="throughput", contiguous=contiguous, seed=seed)
    best = best_throughput(problem, contiguous=contiguous)
    assert result.bound <= best * (1 + 1e-9)
    assert result.value == pytest.approx(best, rel=1e-6)
    assert result.status == "optimal"
    device = result.device.tolist()
    assert is_allowed(problem, device)
    assert max(plain_loads(problem, device)) == pytest.approx(result.value)
    assert not contiguous or is_convex(problem, device)


@pytest.mark.parametrize("seed", range(30))
def test_latency_equals_trying_everything(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    problem = random_partition(rng, 6, accelerators=2 + seed % 2, tight=seed % 2 == 0)
    result = solve_partition(problem, objective="latency", seed=seed)
    best = best_latency(problem)
    assert result.bound <= best * (1 + 1e-9)
    assert result.value == pytest.approx(best, rel=1e-6)
    device = result.device.tolist()
    assert not has_circle(problem, device)
    assert plain_latency(problem, device) == pytest.approx(result.value)


@pytest.mark.parametrize("seed", range(20))
def test_the_checker_agrees_with_the_plain_definitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_partition(rng, 9, accelerators=2, classes=False, backward=True)
    device = rng.integers(0, 3, size=9)
    if not is_allowed(problem, device.tolist()):
        with pytest.raises(PlanError):
            check_throughput(problem, device)
        return
    assert check_throughput(problem, device).loads == pytest.approx(plain_loads(problem, device.tolist()))
    if is_convex(problem, device.tolist()):
        check_throughput(problem, device, contiguous=True)
    else:
        with pytest.raises(PlanError, match="not contiguous"):
            check_throughput(problem, device, contiguous=True)
    if has_circle(problem, device.tolist()):
        with pytest.raises(PlanError, match="wait for each other"):
            check_latency(problem, device)
    else:
        assert check_latency(problem, device).value == pytest.approx(plain_latency(problem, device.tolist()))


def test_the_checker_refuses_torn_classes_and_full_memory() -> None:
    value = random_value(np.random.default_rng(0), 4, classes=False)
    for node in value["nodes"]:
        node.update(colorClass=7, supportedOnFpga=1, size=10.0)
    value["maxSizePerFPGA"] = 30.0
    problem = parse_partition(value)
    with pytest.raises(PlanError, match="nodes 3 and 33 are of one colour class"):
        check_throughput(problem, np.array([0, 0, 0, 1]))
    with pytest.raises(PlanError, match="'fpga0' holds 40 bytes but has 30"):
        check_throughput(problem, np.zeros(4, dtype=np.int64))


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_same_seed_same_result(objective: Any) -> None:
    problem = random_partition(np.random.default_rng(5), 40, accelerators=3)
    first, second = (solve_partition(problem, objective=objective, seed=3) for _ in range(2))
    assert (first.value, first.bound) == (second.value, second.bound)
    assert (first.device == second.device).all()


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_result_has_the_fields_of_both_formats(objective: Any) -> None:
    problem = random_partition(np.random.default_rng(2), 7, accelerators=2)
    result = solve_partition(problem, objective=objective)
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert set(value) == {"status", "objective", "value", "bound", "placement", "starts", "transfers", "peak_memory",
                          "seconds", "split"}
    split = value["split"]
    assert split["maxLoad" if objective == "throughput" else "totalLatency"] == value["value"]
    assert len(split["fpgas"]) == 2
    listed = [node for machine in split["fpgas"] + split["cpus"] for node in machine["nodes"]]
    assert sorted(listed) == sorted(problem.node_ids)
    for index, machine in enumerate(split["fpgas"]):
        assert all(value["placement"][str(node)] == f"fpga{index}" for node in machine["nodes"])
    if objective == "latency":
        assert max(end for _, _, end in value["starts"].values()) == pytest.approx(value["value"])


def test_one_class_that_fits_nowhere() -> None:
    value = random_value(np.random.default_rng(1), 5, cpus=0, classes=False)
    value["nodes"][2]["size"] = 1000.0
    value["maxSizePerFPGA"] = 900.0
    with pytest.raises(NoFeasiblePlan, match="node 23 needs 1000 B on one accelerator, which has 900 B") as caught:
        solve_partition(parse_partition(value), objective="throughput")
    assert caught.value.missing_bytes == 100


def test_too_little_memory_in_all() -> None:
    value = random_value(np.random.default_rng(1), 5, cpus=0, classes=False)
    for node in value["nodes"]:
        node["size"] = 10.0
    value["maxSizePerFPGA"] = 24.0
    with pytest.raises(NoFeasiblePlan, match="2 bytes are missing, and there is no room for node") as caught:
        solve_partition(parse_partition(value), objective="throughput")
    assert caught.value.missing_bytes == 2


def test_a_node_for_cpus_without_a_cpu() -> None:
    value = random_value(np.random.default_rng(1), 5, cpus=0, classes=False)
    value["nodes"][1]["supportedOnFpga"] = False
    with pytest.raises(NoFeasiblePlan, match="node 13 cannot run on an accelerator"):
        solve_partition(parse_partition(value), objective="throughput")


def test_no_time_is_refused() -> None:
    problem = random_partition(np.random.default_rng(2), 3)
    with pytest.raises(InputError, match="time limit must be more than 0"):
        solve_partition(problem, objective="latency", time_limit=0.0)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_single_node_without_edges_and_no_accelerator(objective: Any) -> None:
    value = random_value(np.random.default_rng(0), 1, accelerators=0)
    value["nodes"][0].update(cpuLatency=5.0)
    result = solve_partition(parse_partition(value), objective=objective)
    assert (result.value, result.status) == (5.0, "optimal")


def test_a_circle_is_no_matter_for_throughput_alone() -> None:
    value = random_value(np.random.default_rng(4), 4, classes=False)
    ids = [node["id"] for node in value["nodes"]]
    value["edges"] = [{"sourceId": ids[index], "destId": ids[(index + 1) % 4], "cost": 1.0} for index in range(4)]
    problem = parse_partition(value)
    result = solve_partition(problem, objective="throughput")
    assert max(plain_loads(problem, result.device.tolist())) == pytest.approx(result.value)
    for options in ({"objective": "throughput", "contiguous": True}, {"objective": "latency"}):
        with pytest.raises(InputError, match="in a circle"):
            solve_partition(problem, **options)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize(("part", "field", "number"), [
    ("nodes", "fpgaLatency", 2.0**53), ("nodes", "cpuLatency", 1e25), ("nodes", "size", 1e25), ("edges", "cost", 1e25)])
def test_one_number_far_beyond_the_others_is_as_good_as_one_beyond(objective: Any, part: str, field: str,
                                                                   number: float) -> None:
    """Scaled to whole numbers it was beyond the solver's range: ``TypeError``."""
    value = random_value(np.random.default_rng(3), 6, classes=False)
    for node in value["nodes"]:
        node.update(supportedOnFpga=1, size=1.0, cpuLatency=4.0, fpgaLatency=1.0)
    found = []
    for item in (1e6, number):
        for each in value[part] if part == "edges" else value[part][:1]:
            each[field] = item
        result = solve_partition(parse_partition(value), objective=objective)
        found.append((result.value, result.status))
    assert found[0] == found[1]
