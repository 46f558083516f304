"""The benchmark over the zoo: its references are what they say, and its table adds up."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.bench_zoo import Result, read_lines, summarize, table
from benchmarks.zoo_baselines import EvenEstimator, references
from benchmarks.zoo_cases import CLUSTERS, MIXED, NAMES, Case, cluster_of
from tests.search.joint.worlds import data_parallel_s, mixed_problem, replicated, tensor_world
from weft.search.joint.chain import Chain


def test_references_are_even_and_none_is_missing():
    problem, splits = tensor_world()
    known = {item.name: item.step_time_s for item in references(problem, splits, {})}
    assert list(known) == ["data parallel", "1F1B", "ZeRO-like", "Megatron-style", "HEFT"]
    assert all(0 < seconds < float("inf") for seconds in known.values())
    assert known["Megatron-style"] <= 1.01 * data_parallel_s(problem), "a tp group of one device is data parallel"


def test_shares_of_references_do_not_follow_speed():
    problem = mixed_problem()
    estimator = EvenEstimator(Chain(problem, {}))
    mesh = replicated(problem).layout[0]
    assert estimator.counts(mesh, 24) == (6, 6, 6, 6)
    assert estimator.counts(mesh, 6) == (2, 2, 1, 1)
    assert estimator.counts(mesh, 3) is None


def result(cluster, seconds, **known):
    return Result(model="m", cluster=cluster, step_time_s=seconds, references=known, strategy="joint")


def test_the_table_adds_up(tmp_path):
    rows = [result("box4", 1.0, a=2.0, b=3.0), result("box8", 1.0, a=0.5), result("workstation", 1.0, a=8.0, b=None),
            result("generations", 1.0, a=None), result("generations", None, a=None)]
    lines = {line.cluster: line for line in table(rows)}
    assert lines["equal"].mean == pytest.approx(1.0)
    assert (lines["equal"].num_faster, lines["equal"].num_slower, lines["equal"].worst) == (1, 1, 0.5)
    assert (lines["mixed"].mean, lines["mixed"].only_weft, lines["mixed"].nothing) == (pytest.approx(8.0), 1, 1)
    assert summarize("all", rows).num_cases == lines["all"].num_cases == 5
    path = tmp_path / "lines"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in (rows[1], rows[0], rows[1])))
    assert {row.cluster: row.gain for row in read_lines(path)} == {"box4": 2.0, "box8": 0.5}


def test_data_parallel_by_speed_counts_apart():
    row = Result(model="m", cluster="workstation", step_time_s=1.0, references={"a": 3.0}, by_speed_s=1.5)
    assert (row.gain, row.gain_by_speed) == (3.0, 1.5)


def test_clusters_are_half_equal_half_mixed_and_up_to_64_devices():
    kinds = {name: len({device.kind for device in cluster_of(name).devices}) for name in CLUSTERS}
    assert {name for name, count in kinds.items() if count > 1} == MIXED
    assert len(CLUSTERS) == 2 * len(MIXED) == 8
    assert max(cluster_of(name).num_devices for name in CLUSTERS) == 64
    assert len(NAMES) == 27
    assert Case(model="llama-7b", cluster="box4").batch == 64
