"""Times of exchanges against closed forms: hosts, servers, factors, and where factors begin to pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.worlds import chain_graph, linear_graph, plain_cluster, with_gradients
from weft.cluster.cluster import Cluster, Contention, Link
from weft.cluster.cluster_file import parse_cluster
from weft.cost.collectives import Collective, CollectiveModel
from weft.cost.costs import Costs, estimate_costs
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.memory import static_bytes
from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Optimizer, Plan, Replica, Stage
from weft.plan.program import Op, Program
from weft.simulate.exchange_time import (
    MAX_EXCHANGE,
    TYPICAL_BYTES,
    exchange_figure,
    exchange_limits,
    exchange_together,
    large_reduce_line,
    reduce_line,
    reduce_seconds,
)
from weft.simulate.timing import simulate


def world(graph: Graph, cluster: Cluster, *, shares: tuple[float, ...] | None = None, microbatches: int = 1,
          optimizer: str = "none", **exchange) -> tuple[Program, Costs]:
    """Return one stage on all devices; the gradient of ``w0`` is exchanged as said, that of ``w1`` by all-reduce."""
    devices = tuple(device.name for device in cluster.devices)
    shares = shares or (1 / len(devices),) * len(devices)
    actions = tuple(f"s:{phase}:{microbatch}" for microbatch in range(microbatches) for phase in "FB")
    plan = with_gradients(Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=graph.batch * microbatches),
        cluster=ClusterRef(digest=cluster.digest, devices=devices), microbatches=microbatches,
        stages=(Stage(name="s", ops=graph.op_names, replicas=tuple(
            Replica(devices=(name,), share=share) for name, share in zip(devices, shares, strict=True))),),
        order=dict.fromkeys(devices, actions), optimizer=Optimizer(kind=optimizer)), graph)
    plan = replace(plan, gradients=(GradientExchange(parameters=("w0",), devices=devices, **exchange),
                                    GradientExchange(parameters=("w1",), devices=devices)))
    return lower(plan, graph), estimate_costs(graph, cluster)


def seconds(graph: Graph, cluster: Cluster, **exchange) -> float:
    """Return the time of the exchange of ``w0``."""
    program, costs = world(graph, cluster, **exchange)
    devices = [cluster.device_index[name] for name in program.rank_names]
    return exchange_figure(program, costs, devices, program.buckets[0]).seconds


def uneven_cluster(rates: dict[str, float], contention: Contention = Contention.LINK) -> Cluster:
    """Return devices that are joined to a switch by links of these rates."""
    cluster = plain_cluster(len(rates), contention=contention)
    return replace(cluster, links=tuple(
        Link(source=a, target=b, bytes_per_s=rate, latency_s=0.0)
        for name, rate in rates.items() for a, b in ((name, "h/fabric"), ("h/fabric", name))))


@pytest.mark.parametrize("num_devices", [2, 4, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(25088, 4096), (4096, 4096), (4096, 1000), (1024, 4096), (768, 3072)])
def test_factors_pay_up_to_the_break_even_rows(num_devices, inputs, outputs):
    even = 2 * inputs * outputs / (inputs + outputs)
    cluster = plain_cluster(num_devices, bytes_per_s=1e9)
    for rows, pays in ((even * 0.98, True), (even * 1.02, False)):
        graph = linear_graph(round(rows / num_devices) * num_devices, inputs, outputs, batch=num_devices)
        ways = [seconds(graph, cluster, method=method) for method in ("sufficient_factors", "all_reduce")]
        assert (ways[0] < ways[1]) is pays


def test_latency_moves_the_break_even_by_its_share():
    cluster = plain_cluster(4, bytes_per_s=1e9, latency_s=1e-3)
    graph = linear_graph(4, 64, 64)
    gathered, summed = (seconds(graph, cluster, method=method, optimizer="sgd")  # products belong to the step then
                        for method in ("sufficient_factors", "all_reduce"))
    # Recursive doubling takes two rounds, the tree of a small all-reduce four; a route is two links.
    assert gathered == pytest.approx(2 * 2e-3 + 3 / 4 * 4 * 128 * 4 / 1e9)
    assert summed == pytest.approx(4 * 2e-3 + 4 * 64 * 64 * 4 / 1e9)


def test_factors_of_uneven_shares_take_as_long_as_the_largest_block():
    cluster, graph = plain_cluster(2, bytes_per_s=1e9), linear_graph(40, 64, 32)
    even = seconds(graph, cluster, method="sufficient_factors", optimizer="sgd")
    uneven = seconds(graph, cluster, method="sufficient_factors", optimizer="sgd", shares=(0.75, 0.25))
    assert even == pytest.approx(1 / 2 * 2 * 20 * 96 * 4 / 1e9)
    assert uneven == pytest.approx(1 / 2 * 2 * 30 * 96 * 4 / 1e9)


def test_factors_are_gathered_for_all_microbatches_and_multiplied_once():
    cluster = plain_cluster(2, bytes_per_s=1e9)
    graph = linear_graph(40, 64, 32, flops=1.0)
    once, twice = (seconds(graph, cluster, method="sufficient_factors", microbatches=count) for count in (1, 2))
    costs = estimate_costs(graph, cluster)
    gather = 1 / 2 * 2 * 20 * 96 * 4 / 1e9
    products = [costs.stage_figure(np.asarray([0]), 0, "W", float(count)).seconds for count in (1, 2)]
    assert products[1] > products[0] > 0.1  # one operation takes a second or so
    assert once == pytest.approx(gather + products[0])
    assert twice == pytest.approx(2 * gather + products[1])


def test_backward_leaves_out_the_products():
    cluster, graph = plain_cluster(2), linear_graph(40, 64, 32, flops=1.0)
    backwards = []
    for method in ("all_reduce", "sufficient_factors"):
        program, costs = world(graph, cluster, method=method)
        timeline = simulate(program, costs, cluster)
        chosen = (timeline.op == Op.COMPUTE) & (np.asarray(program.phase) == 1)
        backwards.append((timeline.end_s - timeline.start_s)[chosen])
    saved = costs.stage_figure(np.asarray([0]), 0, "W", 0.5).seconds
    assert saved > 0
    assert backwards[0] - backwards[1] == pytest.approx(np.full(2, saved))


def test_products_come_before_the_optimizer_step():
    cluster, graph = plain_cluster(2, bytes_per_s=1e9), linear_graph(40, 64, 32, flops=1.0)
    took = []
    for method in ("all_reduce", "sufficient_factors"):
        program, costs = world(graph, cluster, method=method, optimizer="sgd")
        timeline = simulate(program, costs, cluster)
        seconds_of = timeline.end_s - timeline.start_s
        took.append(seconds_of[timeline.op == Op.STEP])
    gathers = seconds_of[(timeline.op == Op.COLLECTIVE) & (program.bucket == 0)]
    assert gathers == pytest.approx(np.full(2, 20 * 96 * 4 / 1e9))
    product = costs.stage_figure(np.asarray([0]), 0, "W", 1.0).seconds
    assert took[1] - took[0] == pytest.approx(np.full(2, product))


@pytest.mark.parametrize("contention", [Contention.LINK, Contention.PORT])
def test_the_server_carries_all_others(contention):
    cluster = plain_cluster(4, bytes_per_s=1e9, contention=contention)
    graph = linear_graph(40, 64, 32)
    num_bytes = 64 * 32 * 4
    assert seconds(graph, cluster, method="parameter_server", server="d2") == pytest.approx(2 * 3 * num_bytes / 1e9)
    free = replace(cluster, contention=Contention.NONE)
    assert seconds(graph, free, method="parameter_server", server="d2") == pytest.approx(2 * num_bytes / 1e9)


def test_a_fast_server_waits_for_the_slowest_link():
    rates = {"d0": 1e9, "d1": 1e8, "d2": 1e9, "d3": 1e9}
    cluster, graph = uneven_cluster(rates), linear_graph(40, 64, 32)
    num_bytes = 64 * 32 * 4
    assert seconds(graph, cluster, method="parameter_server", server="d0") == pytest.approx(2 * num_bytes / 1e8)
    assert seconds(graph, cluster, method="parameter_server", server="d1") == pytest.approx(2 * 3 * num_bytes / 1e8)


def test_hosts_sum_inside_then_among_the_first():
    rates = {"d0": 1e9, "d1": 1e9, "d2": 1e9, "d3": 1e8}
    cluster, graph = uneven_cluster(rates), linear_graph(40, 64, 32)
    num_bytes = 64 * 32 * 4
    groups = (("d0", "d1", "d2"), ("d3",))
    inside = 2 * 2 / 3 * num_bytes / 1e9 + num_bytes / 1e9
    among = 2 * 1 / 2 * num_bytes / 1e8
    found = seconds(graph, cluster, method="hierarchical", groups=groups)
    assert found == pytest.approx(inside + among)
    assert found < seconds(graph, cluster, method="all_reduce")


def test_factors_and_servers_take_memory():
    graph = linear_graph(40, 64, 32)
    plain, factors, server = (static_bytes(world(graph, plain_cluster(4), **exchange)[0]) for exchange in (
        {}, {"method": "sufficient_factors"}, {"method": "parameter_server", "server": "d1"}))
    block = 10 * 96 * 4
    assert (factors - plain).sum(axis=1).tolist() == [block + 2 * 4 * block] * 4
    assert (server - plain).sum(axis=1).tolist() == [0, 3 * 64 * 32 * 4, 0, 0]


# ---- exchanges over one link ----------------------------------------------------------------------------------------


def two_hosts(*, network: str, intra: str = "nvlink3") -> Cluster:
    """Return two hosts of two GPUs each, with one network card for each host."""
    return parse_cluster({"format": "weft.cluster", "version": 1, "name": "two hosts",
                          "hosts": [{"name": name, "devices": ["A100-40GB"] * 2, "intra": intra} for name in "ab"],
                          "network": {"bandwidth": network, "latency": "0us"}})


def step_of_two_stages(cluster: Cluster, graph: Graph, pairs: tuple[tuple[str, str], tuple[str, str]]) -> float:
    """Return the step with an operator on each pair of devices, two samples for each of these."""
    names = tuple(device.name for device in cluster.devices)
    stages = tuple(Stage(name=f"s{index}", ops=(graph.op_names[index],), replicas=tuple(
        Replica(devices=(device,), share=0.5) for device in pair)) for index, pair in enumerate(pairs))
    order = {device: tuple(f"s{index}:{phase}:0" for phase in "FB") for index, pair in enumerate(pairs)
             for device in pair}
    plan = with_gradients(Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=graph.batch),
        cluster=ClusterRef(digest=cluster.digest, devices=names), microbatches=1, stages=stages, order=order,
        optimizer=Optimizer(kind="none")), graph)
    return simulate(lower(plan, graph), estimate_costs(graph, cluster), cluster).step_time_s


def test_exchanges_over_one_network_card_come_one_after_the_other():
    graph = chain_graph(2, batch=4, parameter_bytes=4096 * 4096 * 4, flops=0.0)
    cluster = two_hosts(network="10Gbit/s")
    num_bytes = 4096 * 4096 * 4
    across = step_of_two_stages(cluster, graph, (("a0", "b0"), ("a1", "b1")))
    inside = step_of_two_stages(cluster, graph, (("a0", "a1"), ("b0", "b1")))
    assert across == pytest.approx(2 * num_bytes / 1.25e9, rel=0.02)
    assert inside < across / 20
    alone = replace(cluster, contention=Contention.NONE)
    assert step_of_two_stages(alone, graph, (("a0", "b0"), ("a1", "b1"))) == pytest.approx(across / 2, rel=0.02)


def test_only_what_is_busy_most_of_the_time_is_in_the_way():
    cluster = two_hosts(network="10Gbit/s")
    model = CollectiveModel(cluster)
    card = {cluster.link_resources[index] for index, link in enumerate(cluster.links)
            if "network" in (link.source, link.target)}
    assert set(model.limits(Collective.ALL_REDUCE, 1e8, (0, 2))) == card
    assert not card & set(model.limits(Collective.ALL_REDUCE, 1e8, (0, 1)))
    assert model.limits(Collective.ALL_REDUCE, 1e8, (0,)) == ()
    ports = replace(cluster, contention=Contention.PORT)
    assert CollectiveModel(ports).limits(Collective.ALL_REDUCE, 1e8, (0, 2)) == ()


def test_searches_and_the_simulator_say_the_same_of_a_bucket():
    cluster = uneven_cluster({"d0": 1e9, "d1": 1e9, "d2": 4e8, "d3": 1e9})
    program, costs = world(linear_graph(4, 64, 64), cluster, method="all_reduce")
    devices = [cluster.device_index[name] for name in program.rank_names]
    bucket = program.buckets[0]
    expected = exchange_figure(program, costs, devices, bucket).seconds
    assert reduce_seconds(costs, bucket.num_bytes, devices) == expected
    assert exchange_together(costs, bucket.num_bytes, [devices]) == (
        expected, exchange_limits(costs, bucket.num_bytes, devices))
    assert reduce_line(costs, bucket.num_bytes, devices).at(bucket.num_bytes) == pytest.approx(expected)
    assert large_reduce_line(costs, devices).at(TYPICAL_BYTES) == pytest.approx(
        reduce_seconds(costs, TYPICAL_BYTES, devices))


def test_groups_that_meet_on_a_link_exchange_one_after_the_other():
    cluster = parse_cluster({"format": "weft.cluster", "version": 1, "network": {"bandwidth": "1GB/s"}, "hosts": [
        {"name": name, "devices": "2 x A100-80GB", "intra": {"bandwidth": "100GB/s"}} for name in "ab"]})
    costs = estimate_costs(linear_graph(4, 64, 64), cluster)
    apart, limits = exchange_together(costs, 1e8, [(0, 2)])
    assert limits
    assert exchange_together(costs, 1e8, [(0, 2), (1, 3)]) == (pytest.approx(2 * apart), limits)


def test_of_many_devices_the_exchange_is_that_of_a_ring_of_all():
    cluster = plain_cluster(MAX_EXCHANGE + 32, bytes_per_s=1e9)
    costs = estimate_costs(linear_graph(4, 64, 64), cluster)
    everyone = range(cluster.num_devices)
    assert large_reduce_line(costs, everyone).s_per_byte == pytest.approx(
        reduce_line(costs, TYPICAL_BYTES, everyone).s_per_byte, rel=0.01)
