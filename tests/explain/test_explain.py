"""What bounds a step, what devices wait for, and other clusters to plan for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.simulate.helpers import bare_cluster, given_graph, pipeline_world
from tests.simulate.random_tasks import random_placement
from tests.worlds import plain_cluster, plan_of
from weft.base.errors import NoFeasiblePlan
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster, Device, DeviceKind, Link
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.explain.explanation import Explanation, explain, sentence
from weft.explain.path import GRADIENTS, critical_path, device_waits, walk_back
from weft.explain.whatif import both_ways, memory_binds, tier_of, with_bandwidth, with_memory, with_more_devices
from weft.plan.lower import lower
from weft.plan.orders import one_f_one_b
from weft.planning.compare import Candidate, Comparison, compare_strategies
from weft.planning.replan import Request
from weft.search.common.budget import time_budget
from weft.search.common.problem import PlanOptions, Problem
from weft.show.explain_tables import changes_table, comparison_lines
from weft.simulate.engine import Simulator
from weft.simulate.tasks import make_task_graph
from weft.simulate.timing import simulate


def path_of(durations, edges, holds=(), num_resources=0):
    graph = make_task_graph(durations, edges=edges, holds=holds, num_resources=num_resources)
    simulator = Simulator(graph)
    simulator.run()
    return walk_back(graph, simulator.starts, simulator.ends)


def test_the_path_follows_what_ends_last():
    assert path_of([1.0, 3.0, 1.0, 2.0], edges=[(0, 3), (1, 3), (2, 3)]) == (1, 3)
    assert path_of([1.0, 3.0, 9.0], edges=[(0, 1)]) == (2,)


def test_the_path_goes_through_a_resource_that_was_taken():
    """Task 2 is ready at 1, but task 1 has the link until 5."""
    assert path_of([1.0, 5.0, 2.0], edges=[(0, 2)], holds=[(1, 0), (2, 0)], num_resources=1) == (1, 2)


def test_tasks_that_take_no_time_do_not_turn_the_path_in_circles():
    assert path_of([0.0, 0.0, 0.0, 1.0], edges=[(0, 1), (1, 2), (2, 3)],
                   holds=[(0, 0), (1, 0), (2, 0), (3, 0)], num_resources=1)[-1] == 3


@pytest.mark.parametrize("seed", range(20))
def test_the_path_has_no_gap_from_the_begin_to_the_end(seed):
    graph = random_placement(np.random.default_rng(seed), num_tasks=60, num_edges=90, num_devices=4)
    simulator = Simulator(graph)
    end = simulator.run()
    path = walk_back(graph, simulator.starts, simulator.ends)
    assert simulator.starts[path[0]] == 0.0
    assert simulator.ends[path[-1]] == end
    for one, other in itertools.pairwise(path):
        assert simulator.ends[one] == simulator.starts[other]


def test_a_slow_device_bounds_a_pipeline():
    graph = given_graph([1.0, 4.0], activation_bytes=0)
    cluster = bare_cluster(2)
    plan = plan_of(graph, [[0], [1]], order=one_f_one_b(2, 6), devices=[0, 1], microbatches=6, cluster=cluster,
                   optimizer="none")
    found = critical_path(lower(plan, graph), estimate_costs(graph, cluster), cluster)
    assert found.binding == "compute"
    assert found.shares[0].where == "d1"
    assert found.shares[0].seconds == pytest.approx(6 * 12.0)
    assert sum(share.seconds for share in found.shares) == pytest.approx(found.step_time_s)


def test_a_slow_link_bounds_a_pipeline():
    program, costs, cluster = pipeline_world("1f1b", 2, 4, activation_bytes=50)
    found = critical_path(program, costs, cluster)
    assert found.binding == "transfer"
    assert found.seconds_of("transfer") > 0.8 * found.step_time_s


def test_latency_is_told_from_bytes():
    program, _costs, cluster = pipeline_world("1f1b", 2, 1, activation_bytes=50)
    slow = replace(cluster, links=tuple(replace(link, latency_s=7.0) for link in cluster.links))
    found = critical_path(program, estimate_costs(program.graph, slow), slow)
    assert found.seconds_of("transfer") == pytest.approx(2 * 50)
    assert found.seconds_of("latency") == pytest.approx(2 * 14)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_waits_add_up_to_the_step(kind, size):
    program, costs, cluster = pipeline_world(kind, 3, 6, num_chunks=2 if kind == "interleaved" else 1,
                                             activation_bytes=size, optimizer="sgd")
    timeline = simulate(program, costs, cluster)
    for rank, item in enumerate(device_waits(timeline)):
        others, exposed = sum(item.for_others_s.values()), sum(item.exposed_s.values())
        assert item.busy_s + item.fill_s + others + exposed + item.drain_s == pytest.approx(timeline.step_time_s)
        assert exposed == pytest.approx(timeline.exposed_s[rank])
        assert item.fill_s + others + item.drain_s == pytest.approx(timeline.bubble_s[rank])


def test_waits_name_whom_a_device_waits_for():
    """Stage 1 takes four times as long, so that d0 waits for its gradients, and d1 for nothing but its first work."""
    graph = given_graph([1.0, 4.0], activation_bytes=0)
    cluster = bare_cluster(2)
    plan = plan_of(graph, [[0], [1]], order=one_f_one_b(2, 6), devices=[0, 1], microbatches=6, cluster=cluster,
                   optimizer="none")
    first, second = device_waits(simulate(lower(plan, graph), estimate_costs(graph, cluster), cluster))
    assert set(first.for_others_s) == {"d1"}
    assert first.longest[0] == "computing on d1"
    assert second.fill_s == pytest.approx(1.0)
    assert not second.for_others_s


def test_waits_for_gradients_are_told_apart():
    program, timeline = replicated(bytes_per_s=1.0)
    assert timeline.program is program
    assert all(item.exposed_s.get(GRADIENTS, 0.0) > 0 for item in device_waits(timeline))


def replicated(*, bytes_per_s: float):
    from tests.worlds import with_gradients
    from weft.plan.plan import Replica

    graph = given_graph([1.0, 1.0], batch=2)
    cluster = replace(plain_cluster(2, bytes_per_s=bytes_per_s), kinds={"unit": DeviceKind(name="unit")})
    plan = plan_of(graph, [[0, 1]], order=one_f_one_b(1, 1), devices=[0], microbatches=1, microbatch_size=2, cluster=cluster)
    stage = replace(plan.stages[0], replicas=tuple(Replica(devices=(name,), share=0.5) for name in ("d0", "d1")))
    plan = with_gradients(replace(plan, stages=(stage,), order=dict.fromkeys(("d0", "d1"), plan.order["d0"])), graph)
    program = lower(plan, graph)
    return program, simulate(program, estimate_costs(graph, cluster), cluster)


def explained(program, costs, cluster) -> Explanation:
    options = PlanOptions(batch=program.plan.model.batch, mode=program.plan.model.mode)
    request = Request(graph=program.graph, options=options, costs_of=lambda graph, on: costs)
    return explain(program.plan, request, cluster, simulate(program, costs, cluster), replans=False)


def test_the_sentence_names_what_bounds_the_step():
    text = sentence(explained(*pipeline_world("1f1b", 2, 4, activation_bytes=50)))
    assert "is bound by sending tensors between stages (94 %), most of it over" in text
    program, costs, cluster = pipeline_world("1f1b", 1, 4, activation_bytes=0)
    assert sentence(explained(program, costs, cluster)) == "The step of 12 s is bound by computing (100 % on d0)."


# ---- other clusters -------------------------------------------------------------------------------------------------


def test_one_more_device_has_the_links_of_the_one_it_is_like():
    cluster = read_cluster("2 x A100-80GB, 1 x RTX3090")
    more = with_more_devices(cluster, cluster.device_index["a1"], 2)
    assert [device.name for device in more.devices] == ["a0", "a1", "a2", "a3", "a4"]
    assert more.devices[3].kind == more.devices[1].kind
    assert more.route(3, 0).bytes_per_s == cluster.route(1, 0).bytes_per_s
    assert more.route(4, 3).latency_s == cluster.route(1, 0).latency_s


def test_one_more_device_is_linked_with_its_like_where_there_is_no_switch():
    kind = DeviceKind(name="k")
    devices = tuple(Device(name=name, kind="k", host="h", memory_bytes=1, unit="core") for name in ("d0", "d1"))
    links = tuple(Link(source=a, target=b, bytes_per_s=5.0, latency_s=1.0) for a, b in (("d0", "d1"), ("d1", "d0")))
    more = with_more_devices(Cluster(name="c", kinds={"k": kind}, devices=devices, links=links), 0)
    assert [more.route(2, other).bytes_per_s for other in (0, 1)] == [5.0, 5.0]
    assert more.devices[2].unit != "core"


def two_hosts() -> Cluster:
    return parse_cluster({"format": "weft.cluster", "version": 1, "network": {"bandwidth": "10Gbit/s", "latency": "20us"},
                          "hosts": [{"name": "a", "count": 2, "devices": "2 x A100-80GB", "intra": "nvlink3"}]})


def test_tiers_are_links_of_one_sort():
    cluster = two_hosts()
    card = both_ways(cluster, "a-0/fabric>network")
    assert {cluster.links[index].name for index in card} == {"a-0/fabric>network", "network>a-0/fabric"}
    tier = tier_of(cluster, card)
    assert {cluster.links[index].bytes_per_s for index in tier} == {1.25e9}
    assert len(tier) == 4
    faster = with_bandwidth(cluster, tier, 2.0)
    assert faster.route(0, 2).bytes_per_s == 2 * cluster.route(0, 2).bytes_per_s
    assert faster.route(0, 1) == cluster.route(0, 1)


def test_more_memory_leaves_unlimited_devices_alone():
    cluster = plain_cluster(2, memory_bytes=100)
    mixed = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], memory_bytes=None)))
    assert [device.memory_bytes for device in with_memory(mixed, 7).devices] == [107, None]


def test_memory_binds_where_a_device_is_full():
    program, costs, cluster = pipeline_world("1f1b", 2, 4, activation_bytes=50)
    timeline = simulate(program, costs, cluster)
    peak = max(item.peak_bytes for item in timeline.summary())

    def limited(size: int) -> Cluster:
        return replace(cluster, devices=tuple(replace(device, memory_bytes=size) for device in cluster.devices))

    assert memory_binds(limited(peak), timeline, None)
    assert not memory_binds(limited(4 * peak), timeline, None)


# ---- planning again -------------------------------------------------------------------------------------------------


def planned_again(monkeypatch, replan, *, time_limit_s: float | None = None) -> tuple[Explanation, list[str]]:
    """Return the explanation of a small pipeline, with this instead of the planner, and what was reported."""
    from weft.explain import explanation, whatif

    program, costs, cluster = pipeline_world("1f1b", 2, 4, activation_bytes=5)
    request = Request(graph=program.graph, options=PlanOptions(batch=4),
                      costs_of=lambda graph, on: estimate_costs(graph, on))
    for module in (explanation, whatif):
        monkeypatch.setattr(module, "replan", replan)
    notes: list[str] = []
    found = explain(program.plan, request, cluster, simulate(program, costs, cluster),
                    budget=time_budget(time_limit_s, notes.append))
    return found, notes


def test_ctrl_c_keeps_the_explanation(monkeypatch):
    def interrupted(problem, request, **limits):
        raise KeyboardInterrupt

    found, notes = planned_again(monkeypatch, interrupted)
    assert found.comparison is None
    assert found.changes == ()
    assert found.path.shares
    assert "interrupted: nothing further is planned" in notes


def test_ctrl_c_inside_the_planner_ends_all_planning(monkeypatch):
    found, notes = planned_again(monkeypatch, lambda problem, request, **limits: replace(
        compare_strategies(problem, ["1f1b"]), interrupted_in="1f1b"))
    assert found.comparison is not None
    assert found.changes == ()
    assert "interrupted: nothing further is planned" in notes


def test_the_plan_as_it_is_counts_on_a_better_cluster(monkeypatch):
    """Nothing is planned for other clusters, but twice the bandwidth helps the plan at hand."""
    first: list[Comparison] = []

    def plan(problem, request, **limits):
        if first:
            raise NoFeasiblePlan("no strategy gives a plan:\n  - single: 3 B too little\nThe nearest: too little")
        first.append(compare_strategies(problem, ["1f1b"]))
        return first[0]

    found, _ = planned_again(monkeypatch, plan)
    by_name = {item.name.partition(" of ")[0].partition(" on ")[0]: item for item in found.changes}
    more = next(item for name, item in by_name.items() if name.startswith("one more"))
    assert (more.gain, more.step_time_s) == (0.0, found.comparison.best.step_time_s)
    assert more.note == "no other plan was found: The nearest: too little"
    wider = by_name["twice the bandwidth"]
    assert wider.gain > 0
    assert wider.strategy == ""
    assert "the plan as it is" in {row[3] for row in changes_table(found).rows}


def test_plans_found_for_a_change_count_for_the_cluster_as_it_is(monkeypatch):
    """The first search was cut: what a longer one finds is no gain of the change."""
    def plan(problem, request, **limits):
        return compare_strategies(problem, ["single"] if limits.get("strategies") else ["1f1b"])

    found, _ = planned_again(monkeypatch, plan)
    wider = next(item for item in found.changes if item.name.startswith("twice the bandwidth"))
    assert wider.before_s < found.comparison.best.step_time_s
    assert wider.gain == 0.0, "one device sends nothing"
    assert any("on the cluster as it is" in line for line in comparison_lines(found))


def test_second_best_is_another_plan_than_this_one():
    program, costs, cluster = pipeline_world("1f1b", 2, 4, activation_bytes=5)
    plan = replace(program.plan, search=replace(program.plan.search, by="deploy auto"))
    timeline = simulate(program, costs, cluster)
    same = Candidate(strategy="deploy", plan=plan, timeline=timeline)
    renamed = Candidate(strategy="other", timeline=timeline, plan=replace(
        plan, stages=tuple(replace(stage, name=f"x{stage.name}") for stage in plan.stages),
        order={device: tuple(f"x{action}" for action in actions) for device, actions in plan.order.items()}))
    request = Request(graph=program.graph, options=PlanOptions(batch=4), costs_of=lambda graph, on: estimate_costs(graph, on))
    found = explain(plan, request, cluster, timeline, replans=False,
                    comparison=Comparison(candidates=(same, renamed), bound_s=0.0))
    assert found.second is None


def test_changes_that_are_not_reached_are_listed(monkeypatch):
    found, _ = planned_again(monkeypatch, lambda problem, request, **limits: compare_strategies(problem),
                             time_limit_s=0.0)
    assert [item.note for item in found.changes if item.step_time_s is None][:2] == ["not tried: the time limit was reached"] * 2


def test_gains_are_what_planning_again_saves(monkeypatch):
    """The second op takes as long as the first: with twice the bandwidth transfers take half as long, as planned."""
    asked: list[Cluster] = []

    def plan(problem, request, **limits):
        asked.append(problem.cluster)
        return compare_strategies(problem, ["1f1b"])

    found, _ = planned_again(monkeypatch, plan)
    assert found.comparison is not None
    names = [item.name for item in found.changes]
    assert names[0] == "one more unit on host h"
    assert asked[1].num_devices == 3
    rates = [{link.bytes_per_s for link in cluster.links} for cluster in asked]
    assert rates[0] == {1.0}
    assert rates[2] == {1.0, 2.0}
    assert rates[3] == {2.0}
    before = min(found.timeline.step_time_s, found.comparison.best.step_time_s)
    for item, cluster in zip(found.changes[1:3], asked[2:4], strict=True):
        costs = estimate_costs(found.timeline.program.graph, cluster)
        problem = Problem(graph=found.timeline.program.graph, cluster=cluster, costs=costs, options=PlanOptions(batch=4))
        after = compare_strategies(problem, ["1f1b"]).best.step_time_s
        assert item.step_time_s == pytest.approx(min(before, after))
        assert item.gain == pytest.approx(1 - item.step_time_s / before)
    assert found.changes[2].gain > 0
    assert found.changes[-1].note == "no device has a limit"
