"""Bounds from paths against trying everything."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.partition_models import MODELS, for_latency, for_throughput, training
from tests.search.place.partition.problems import best_latency, random_value
from weft.search.place.partition import search as partition
from weft.search.place.partition.kernel import Scratch, excess, latency, longest_path
from weft.search.place.partition.problem import PartitionProblem, check_latency, parse_partition
from weft.search.place.partition.search import cover, latency_graph, solve_partition


def chained(rng: np.random.Generator, count: int, *, is_pure: bool = False, **options: Any) -> PartitionProblem:
    """Return a random problem whose nodes are also in a row; with nothing else if ``is_pure``."""
    value = random_value(rng, count, **options)
    costs = {edge["sourceId"]: edge["cost"] for edge in value["edges"]}
    ids = [node["id"] for node in value["nodes"]]
    rows = [{"sourceId": one, "destId": other, "cost": costs.get(one, 2.0)} for one, other in itertools.pairwise(ids)]
    value["edges"] = rows if is_pure else rows + [edge for edge in value["edges"] if edge["destId"] - edge["sourceId"] > 10]
    return parse_partition(value)


@pytest.mark.parametrize("seed", range(25))
def test_no_path_has_a_bound_above_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = (chained(rng, 6, tight=True) if seed % 2 else
               parse_partition(random_value(rng, 6, tight=seed % 4 == 0, accelerators=1 + seed % 3)))
    g, best = latency_graph(problem), best_latency(problem)
    for weights in (np.minimum(g.cpu_s, g.fpga_s), g.cpu_s, g.cost_s, g.size, np.ones(6), *rng.random((5, 6))):
        assert cover(g, longest_path(g, weights))[0] <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_of_a_chain_is_its_best_and_its_sets_reach_it(seed: int) -> None:
    problem = chained(np.random.default_rng(seed), 7, is_pure=True, classes=False, tight=True)
    g = latency_graph(problem)
    bound, where = cover(g, longest_path(g, np.ones(7)))
    assert bound == pytest.approx(best_latency(problem))
    scratch = Scratch.of(g)
    assert latency(g, where, scratch) == pytest.approx(bound)
    assert excess(g, scratch) == 0


def test_a_skip_over_a_whole_set_costs_nothing_and_into_it_costs() -> None:
    value = {"maxSizePerFPGA": 2.0, "maxFPGAs": 1, "maxCPUs": 1, "nodes": [
        {"id": node, "supportedOnFpga": int(0 < node < 3), "cpuLatency": 50.0, "fpgaLatency": 1.0, "size": 1.0}
        for node in range(4)], "edges": [{"sourceId": one, "destId": other, "cost": 1.0 + one}
                                         for one, other in ((0, 1), (1, 2), (2, 3), (0, 3))]}
    g = latency_graph(parse_partition(value))
    assert cover(g, longest_path(g, np.ones(4)))[0] == 50 + (1 + 1 + 1 + 3) + 50
    value["edges"].append({"sourceId": 1, "destId": 3, "cost": 2.0})  # type: ignore[attr-defined]
    g = latency_graph(parse_partition(value))
    assert cover(g, longest_path(g, np.ones(4)))[0] == 50 + (1 + 1 + 1 + 2 + 3) + 50


def test_a_class_that_starts_before_a_set_is_not_in_it() -> None:
    """A table read first and last: it cannot be in the last set alone, so its cost is counted there."""
    nodes = [{"id": node, "supportedOnFpga": 1, "cpuLatency": cpu, "fpgaLatency": 1.0, "size": size}
             for node, (cpu, size) in enumerate([(2.0, 1.0), (90.0, 9.0), (90.0, 9.0), (2.0, 1.0)])]
    nodes[0]["colorClass"] = nodes[3]["colorClass"] = 5
    value = {"maxSizePerFPGA": 11.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes,
             "edges": [{"sourceId": one, "destId": other, "cost": 4.0} for one, other in ((0, 1), (1, 2), (3, 2))]}
    problem = parse_partition(value)
    g = latency_graph(problem)
    assert cover(g, longest_path(g, np.ones(4)))[0] == pytest.approx(best_latency(problem))


def test_the_longest_path_follows_edges_and_weights() -> None:
    g = latency_graph(chained(np.random.default_rng(3), 8, is_pure=True))
    assert longest_path(g, np.ones(8)).tolist() == list(range(8))
    assert longest_path(g, -np.ones(8)).tolist() == [0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("section", ["latency", "throughput", "contiguous"])
def test_problems_like_published_ones_are_solved_and_beat_simple_rules(name: str, section: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "TUNING", replace(partition.TUNING, effort=0.2))
    value = MODELS[name]()
    problem = parse_partition(for_latency(value) if section == "latency" else for_throughput(value, room=0.4))
    result = solve_partition(problem, objective="latency" if section == "latency" else "throughput",
                             contiguous=section == "contiguous")
    assert 0 < result.bound <= result.value
    if section == "latency":
        on_cpus = check_latency(problem, np.full(problem.num_nodes, problem.num_accelerators)).value
        assert result.value < (1.0 if name.endswith("training") else 0.7) * on_cpus
    else:
        assert result.value < 0.3 * problem.fpga_s.sum()  # six accelerators and a CPU


def test_training_has_each_node_twice_in_one_class() -> None:
    value = training(MODELS["gnmt"]())
    problem = parse_partition(for_throughput(value))
    assert problem.num_nodes == 2 * problem.num_units
    assert problem.is_backward.sum() == problem.num_units
