"""The placement problem: what graph and cluster files become, by hand-made cases and by slow definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import chain, cluster, edge, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.worlds import problem_of
from weft.base.errors import ClusterError, InputError, ModelError
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import Costs, estimate_costs
from weft.model.graph import topological
from weft.model.graph_file import parse_graph
from weft.search.place.problem import check_placement

LINKS = [{"from": "x", "to": "s", "bandwidth": 4, "latency": 0.25}, {"from": "y", "to": "s", "bandwidth": 2}]


def test_times_are_infinite_where_an_operator_may_not_run():
    problem = problem_of(graph([op("a", 1, 2), op("b", 3, 4, on=["y"])]), cluster())
    assert problem.time_s.tolist() == [[1, 2], [np.inf, 4]]
    assert problem.is_allowed.tolist() == [[True, True], [False, True]]


def test_an_operator_without_a_device_is_named():
    only_z = {"name": "lonely", "times": {"x": 1, "y": 1, "z": 1}, "on": ["z"]}
    with pytest.raises(ModelError, match=r"'lonely' can run on no device .* allows z, .* of the kinds x, y"):
        problem_of(graph([only_z]), cluster())


def test_clusters_of_too_many_devices_for_all_pairs_are_refused_at_once():
    many = [{"name": f"d{index}", "kind": "x", "host": "h"} for index in range(1025)]
    large = {**cluster(), "devices": [*cluster()["devices"], *many]}
    with pytest.raises(ClusterError, match=r"has 1,027 devices, and placement, .* at most 1,024: place on a part .* `weft plan`"):
        problem_of(graph([op("a", 1, 2)]), large)


def test_equal_routes_are_timed_once_and_as_each_alone(monkeypatch):
    rates = [{"from": f"d{index}", "to": "s", "bandwidth": 1 + index % 2, "latency": 0.25 * (index % 3)} for index in range(24)]
    devices = [{"name": f"d{index}", "kind": "x", "host": "h"} for index in range(24)]
    content = {**cluster(links=LINKS), "devices": devices, "links": rates, "switches": ["s"]}
    timed = []
    transfer = Costs.transfer
    monkeypatch.setattr(Costs, "transfer", lambda self, *what: timed.append(what) or transfer(self, *what))
    problem = problem_of(graph([op("a", 1), op("b", 1)], [edge("a", "b", bytes=8)]), content)
    assert len(timed) <= 2 * 12
    monkeypatch.undo()
    costs = estimate_costs(parse_graph(graph([op("a", 1)])), parse_cluster(content))
    for source, target in ((0, 1), (5, 2), (22, 23), (4, 4)):
        assert problem.latency_s[source, target] == costs.transfer(0.0, source, target).seconds
        assert problem.latency_s[source, target] + 1e9 * problem.s_per_byte[source, target] == pytest.approx(
            costs.transfer(1e9, source, target).seconds)


def test_units_are_numbered_without_holes_and_allow_what_all_members_allow():
    problem = problem_of(graph([op("a"), op("b", colocate="g"), op("c", on=["x"]), op("d", on=["y"], colocate="g"),
                                op("e", colocate="0")]), cluster())
    assert problem.unit_of_op.tolist() == [0, 1, 2, 1, 3]
    assert problem.is_allowed.tolist() == [[True, True], [False, True], [True, False], [True, True]]


def test_transfer_times_are_given_or_by_bytes():
    problem = problem_of(graph([op("a"), op("b"), op("c")],
                               [edge("a", "b", bytes=8), edge("a", "c", 7.5)]), cluster(links=LINKS))
    by_bytes, given = (problem.edges[problem.edges[:, 1] == reader][0, 2] for reader in (1, 2))
    assert problem.transfer_s(by_bytes, 0, 1) == pytest.approx(0.25 + 8 / 2, rel=1e-9)
    assert problem.transfer_s(given, 0, 1) == 7.5
    assert problem.transfer_s(given, 1, 1) == problem.transfer_s(by_bytes, 0, 0) == 0.0


def test_pairs_without_a_way_take_for_ever():
    one_way = {"from": "a", "to": "b", "times": {"x>y": 1}}
    problem = problem_of(graph([op("a"), op("b")], [one_way]), cluster())
    assert problem.transfer_s(0, 0, 1) == 1
    assert problem.transfer_s(0, 1, 0) == np.inf


def test_tensors_by_bytes_need_links():
    with pytest.raises(ClusterError):
        problem_of(graph([op("a"), op("b")], [edge("a", "b", bytes=3)]), cluster())


@pytest.mark.parametrize(("contention", "names", "occupied"), [
    ("none", (), []),
    ("port", ("x out", "y out", "x in", "y in"), ["x out", "y in"]),
    ("link", ("x>x", "x>y", "y>x", "y>y"), ["x>y"]),
])
def test_what_a_transfer_occupies_without_links(contention, names, occupied):
    problem = problem_of(chain(2, 1, 1), cluster(contention=contention))
    used = problem.resources[problem.resource_start[1] : problem.resource_start[2]]  # pair 0 * 2 + 1: x to y
    assert problem.resource_names == names
    assert [names[item] for item in used] == occupied


def test_what_a_transfer_occupies_on_links():
    problem = problem_of(chain(2, 1, 1), cluster(links=LINKS))
    used = problem.resources[problem.resource_start[1] : problem.resource_start[2]]
    assert len(used) == 2
    back = problem.resources[problem.resource_start[2] : problem.resource_start[3]]
    assert not set(used) & set(back)


def test_one_medium_is_one_resource_for_both_ways():
    bus = [{**link, "shared": "bus"} for link in LINKS]
    problem = problem_of(chain(2, 1, 1), cluster(links=bus))
    assert problem.resource_names == ("bus",)
    assert problem.resources.tolist() == [0, 0]  # once each way, not once for each link


def test_devices_with_one_processing_unit_have_one_core():
    problem = problem_of(graph([op("a") | {"times": dict.fromkeys("wxyz", 1)}]),
                         cluster("wxyz", units={"w": "core", "y": "core"}))
    assert problem.core_of_device.tolist() == [0, 1, 0, 2]


def test_what_is_read_twice_is_one_input():
    twice = [edge("a", "b", 1, tensor="t"), edge("a", "b", 1, tensor="t")]
    problem = problem_of(graph([op("a"), op("b")], twice), cluster())
    assert problem.inputs.tolist() == [0]
    assert problem.edges.tolist() == [[0, 1, 0]]


def test_memory_is_what_operators_keep_and_unlimited_if_unknown():
    problem = problem_of(graph([op("a", memory=5), op("b"), op("c", memory=7)]), cluster(memory={"y": 9}))
    assert problem.capacity.tolist() == [np.inf, 9]
    assert problem.resident_bytes(np.array([0, 0, 0])).tolist() == [12, 0]
    assert problem.resident_bytes(np.array([0, 1, 1])).tolist() == [5, 7]
    assert not problem.has_lifetimes


@pytest.mark.parametrize("seed", range(6))
def test_derived_tables_follow_their_definitions(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 15, 3, shared_weights=True, colocate=True)
    devices = range(problem.num_devices)
    table = [[[problem.transfer_s(tensor, source, target) for target in devices] for source in devices]
             for tensor in range(problem.num_tensors)]
    assert np.array_equal(problem.transfer_table, np.array(table).reshape(-1, 3, 3))
    start, readers = problem.readers
    for tensor in range(problem.num_tensors):
        by_scan = [op for op in range(15)
                   if tensor in problem.inputs[problem.input_start[op] : problem.input_start[op + 1]]]
        assert readers[start[tensor] : start[tensor + 1]].tolist() == by_scan
    device = rng.integers(3, size=15)
    held = [{int(problem.weights[op]) for op in range(15) if device[op] == index} for index in devices]
    assert problem.resident_bytes(device) == pytest.approx(
        [sum(problem.weight_bytes[item] for item in items) for items in held])
    for unit, items in enumerate(problem.unit_weights):
        assert items == sorted({int(problem.weights[op]) for op in range(15) if problem.unit_of_op[op] == unit})


def test_a_placement_is_refused_where_it_may_not_be_or_tears_a_unit():
    problem = problem_of(graph([op("a", on=["y"]), op("b", colocate="g"), op("c", colocate="g")]), cluster())
    check_placement(problem, np.array([1, 0, 0]))
    with pytest.raises(InputError, match="'a' may not run on 'x'"):
        check_placement(problem, np.array([0, 0, 0]))
    with pytest.raises(InputError, match="'b' and 'c' must share a device"):
        check_placement(problem, np.array([1, 0, 1]))
    check_placement(replace(problem, unit_of_op=np.arange(3)), np.array([1, 0, 1]))


def test_topological_order_takes_the_smallest_key_first_and_leaves_out_circles():
    follow = [{2}, {2, 3}, set(), set(), {5}, {4, 6}, set()]
    assert topological(follow, [5, 1, 0, 2, 0, 0, 0]) == [1, 3, 0, 2]
