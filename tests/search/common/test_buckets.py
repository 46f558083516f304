"""Gradients in buckets: as many as end first by simulation, in the order in which they are final."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.worlds import chain_graph
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.plan import Plan
from weft.plan.program import inside_backward
from weft.search.common import problem as buckets
from weft.search.common.problem import PlanOptions, Problem, StageSpec, add_gradients, make_plan
from weft.search.joint.baselines import data_parallel
from weft.simulate.timeline import Timeline
from weft.simulate.timing import simulate


def cluster_of(num_devices: int, *, bandwidth: str, latency: str = "5us") -> Cluster:
    devices = [{"name": f"d{i}", "kind": "k", "memory": "64GB"} for i in range(num_devices)]
    links = [{"from": f"d{i}", "to": "switch", "bandwidth": bandwidth, "latency": latency} for i in range(num_devices)]
    return parse_cluster({
        "format": "weft.cluster", "version": 1, "devices": devices, "switches": ["switch"], "links": links,
        "kinds": {"k": {"flops": {"float32": 1e12}, "memory_bandwidth": "100TB/s"}}})


def problem_of(cluster: Cluster, num_ops: int = 24, *, seed: int = 0, tied=()) -> Problem:
    rng = np.random.default_rng(seed)
    graph = chain_graph(num_ops, batch=4, parameter_bytes=4_000_000, activation_bytes=4000, tied=tied)
    graph = replace(graph, flops=rng.integers(1, 20, num_ops) * 1e9, input_grad_flops=rng.integers(1, 20, num_ops) * 1e9,
                    weight_grad_flops=rng.integers(1, 20, num_ops) * 1e9)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(batch=8))


def predicted(plan: Plan, problem: Problem) -> Timeline:
    return simulate(check_plan(plan, problem.graph, problem.cluster), problem.costs, problem.cluster)


def step_s(plan: Plan, problem: Problem) -> float:
    return predicted(plan, problem).step_time_s


def test_buckets_are_in_the_order_of_the_backward_and_hide_the_exchange():
    problem = problem_of(cluster_of(4, bandwidth="2GB/s"), tied=((0, 23),))
    plan = data_parallel(problem, 1)
    assert len(plan.gradients) > 4
    order = [int(name[1:]) for item in plan.gradients for name in sorted(item.parameters, key=lambda name: -int(name[1:]))]
    assert order == list(reversed(range(23)))  # the tied w0, which the last operator reads as well, comes last
    assert (inside_backward(check_plan(plan, problem.graph, problem.cluster)) >= 0).sum() == 4 * len(plan.gradients)
    timeline, after = predicted(plan, problem), predicted(add_gradients(plan, problem.graph), problem)
    assert timeline.exposed_s[0] < 0.1 * after.exposed_s[0]
    assert after.step_time_s - timeline.step_time_s == pytest.approx(after.exposed_s[0] - timeline.exposed_s[0])


@pytest.mark.parametrize("bandwidth", ["100MB/s", "1GB/s", "10GB/s", "1TB/s"])
@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_buckets_is_the_best_of_those_tried(bandwidth, seed, monkeypatch):
    problem = problem_of(cluster_of(2, bandwidth=bandwidth), seed=seed)
    monkeypatch.setattr(buckets, "ISSUE_S", 0.0)
    found = step_s(data_parallel(problem, 2), problem)
    monkeypatch.setattr(buckets, "WORTHWHILE", -1e9)
    for count in (1, 2, 4, 8, 16, 32):
        monkeypatch.setattr(buckets, "COUNTS", (1, count) if count > 1 else (1,))
        forced = data_parallel(problem, 2)
        assert len(forced.gradients) <= count
        assert found <= step_s(forced, problem) * 1.006


def test_what_latency_makes_slower_is_not_cut():
    problem = problem_of(cluster_of(4, bandwidth="100GB/s", latency="1s"))
    assert len(data_parallel(problem, 1).gradients) == 1
    small = replace(problem_of(cluster_of(4, bandwidth="100GB/s")).graph, tensor_bytes=problem.graph.tensor_bytes // 1000)
    cluster = problem_of(cluster_of(4, bandwidth="100GB/s")).cluster
    tiny = Problem(graph=small, cluster=cluster, costs=estimate_costs(small, cluster), options=PlanOptions(batch=8))
    assert len(data_parallel(tiny, 1).gradients) == 1


def two_stages(problem: Problem, *, phases: str = "B") -> Plan:
    """Return a pipeline of two stages on two devices each."""
    specs = [StageSpec(ops=np.arange(first, first + 12), replicas=tuple(((device,), 0.5) for device in devices))
             for first, devices in ((0, (0, 1)), (12, (2, 3)))]
    order = [[(stage, phase, 0) for phase in ("F", *phases)] for stage in (0, 0, 1, 1)]
    return make_plan(problem, specs, order, microbatches=1, by="test")


def test_only_stages_that_send_no_gradients_are_cut():
    problem = problem_of(cluster_of(4, bandwidth="2GB/s"))
    plan = two_stages(problem)
    counts = [sum("d0" in item.devices for item in plan.gradients), sum("d2" in item.devices for item in plan.gradients)]
    assert counts[0] > 2
    assert counts[1] == 1
    assert step_s(plan, problem) < step_s(add_gradients(plan, problem.graph), problem)
    assert len(two_stages(problem, phases="IW").gradients) == 2
