"""Bytes over links, against closed forms: pipelines, rings, parameter servers, shared media."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulate.helpers import pipeline_world
from tests.worlds import chain_graph, linear_graph, plain_cluster, plan_of
from weft.cluster.cluster import Cluster, Link
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.orders import one_f_one_b
from weft.plan.plan import GradientExchange, Plan, Replica, Stage
from weft.simulate.timing import link_bytes


def traffic(plan: Plan, graph: Graph, cluster: Cluster) -> dict[str, int]:
    return link_bytes(lower(plan, graph), estimate_costs(graph, cluster), cluster)


def copies(graph: Graph, num_devices: int, **exchange) -> tuple[Plan, Cluster]:
    """Return the whole model on every device, with that exchange of all gradients."""
    cluster = plain_cluster(num_devices)
    devices = tuple(device.name for device in cluster.devices)
    plan = plan_of(graph, [[*range(graph.num_ops)]], order=one_f_one_b(1, 1) * num_devices, devices=[0], microbatches=1,
                   num_devices=num_devices, microbatch_size=num_devices)
    stage = Stage(name="s0", ops=graph.op_names,
                  replicas=tuple(Replica(devices=(device,), share=1 / num_devices) for device in devices))
    names = tuple(graph.tensor_names[tensor] for tensor in graph.parameters)
    return replace(plan, stages=(stage,), order=dict.fromkeys(devices, plan.order["d0"]), gradients=(
        GradientExchange(parameters=names, devices=devices, **exchange),)), cluster


def test_a_pipeline_sends_activations_there_and_gradients_back():
    program, costs, cluster = pipeline_world("1f1b", 3, 5, activation_bytes=8)
    found = link_bytes(program, costs, cluster)
    once = 5 * 8
    assert found == {"d0>h/fabric": once, "h/fabric>d0": once, "d1>h/fabric": 2 * once, "h/fabric>d1": 2 * once,
                     "d2>h/fabric": once, "h/fabric>d2": once}


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_a_ring_moves_each_byte_twice_but_for_a_part(num_devices):
    graph = chain_graph(4, parameter_bytes=2**20)
    plan, cluster = copies(graph, num_devices)
    wanted = round(2 * (num_devices - 1) / num_devices * 4 * 2**20)
    assert set(traffic(plan, graph, cluster).values()) == {wanted}


def test_a_parameter_server_gets_and_sends_all():
    graph = chain_graph(2, parameter_bytes=100)
    plan, cluster = copies(graph, 4, method="parameter_server", server="d1")
    found = traffic(plan, graph, cluster)
    assert found["h/fabric>d1"] == found["d1>h/fabric"] == 3 * 200
    assert found["h/fabric>d2"] == found["d2>h/fabric"] == 200


def test_groups_sum_inside_and_between():
    graph = chain_graph(2, parameter_bytes=2**20)
    plan, cluster = copies(graph, 4, method="hierarchical", groups=(("d0", "d1"), ("d2", "d3")))
    found, all_bytes = traffic(plan, graph, cluster), 2 * 2**20
    assert found["d1>h/fabric"] == all_bytes, "a ring of two"
    assert found["h/fabric>d1"] == 2 * all_bytes, "and the sum comes back"
    assert found["d0>h/fabric"] == 3 * all_bytes, "two rings and the way back"


def test_factors_are_gathered():
    graph = linear_graph(4, 64, 32)
    plan, cluster = copies(graph, 4, method="sufficient_factors")
    both = plan.gradients[0]
    plan = replace(plan, gradients=(replace(both, parameters=("w0",)),
                                    replace(both, parameters=("w1",), method="parameter_server", server="d1")))
    row, other = (64 + 32) * 4, 4
    assert traffic(plan, graph, cluster)["d0>h/fabric"] == 3 * row + other


def test_a_shared_medium_counts_together():
    program, costs, cluster = pipeline_world("gpipe", 2, 1, activation_bytes=8)
    bus = replace(cluster, links=tuple(replace(link, shared="bus") for link in cluster.links))
    assert link_bytes(program, costs, bus) == {"bus": 16}
    direct = replace(cluster, links=tuple(Link(source=a, target=b, bytes_per_s=1.0, latency_s=0.0)
                                          for a, b in (("d0", "d1"), ("d1", "d0"))))
    assert link_bytes(program, costs, direct) == {"d0>d1": 8, "d1>d0": 8}
    assert link_bytes(program, costs, replace(cluster, links=())) == {"d0>d1": 8, "d1>d0": 8}
