"""Collectives against closed forms, and what must hold for every group."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost.worlds import make_cluster
from weft.base.errors import ClusterError, InputError
from weft.cluster.cluster import Cluster, Contention, Device, DeviceKind, Link
from weft.cost.collectives import Algorithm, Collective, CollectiveModel, scope_of

BANDWIDTH, LATENCY = 1e11, 1e-6
MIB = 2**20


def time_of(model: CollectiveModel, name: str, num_bytes: float, devices, algorithm: str | None = "ring") -> float:
    chosen = None if algorithm is None else Algorithm(algorithm)
    return model.cost(Collective(name), num_bytes, devices, chosen).seconds


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16])
def test_closed_forms_on_equal_links(p):
    model = CollectiveModel(make_cluster((p,)))
    group, n = range(p), 64 * MIB
    a, b, depth = LATENCY, n / BANDWIDTH, math.ceil(math.log2(p))
    expected = {
        ("all_reduce", "ring"): 2 * (p - 1) * a + 2 * (p - 1) / p * b,
        ("all_gather", "ring"): (p - 1) * a + (p - 1) / p * b,
        ("reduce_scatter", "ring"): (p - 1) * a + (p - 1) / p * b,
        ("all_to_all", "ring"): (p - 1) * a + (p - 1) / p * b,
        ("broadcast", "ring"): (p - 1) * a + b,
        ("all_reduce", "tree"): 2 * depth * (a + b),
        ("broadcast", "tree"): depth * (a + b),
        ("all_gather", "tree"): depth * a + (p - 1) / p * b,
        ("reduce_scatter", "tree"): depth * a + (p - 1) / p * b,
        ("all_to_all", "tree"): depth * (a + b / 2),
    }
    for (name, algorithm), seconds in expected.items():
        assert time_of(model, name, n, group, algorithm) == pytest.approx(seconds, rel=1e-12), (name, algorithm)


def test_p2p_is_latency_plus_bytes_over_bandwidth():
    model = CollectiveModel(make_cluster((2, 1), network=(1e10, 1e-5)))
    assert time_of(model, "p2p", MIB, (0, 1)) == pytest.approx(1e-6 + MIB / 1e11)
    # The route of a0 to b0: two half-latency device links of 1e-6 / 2 and two network links of 1e-5 / 2.
    assert time_of(model, "p2p", MIB, (0, 2)) == pytest.approx(1.1e-5 + MIB / 1e10)


def test_hierarchical_all_reduce_shares_the_network_card():
    hosts, width, n = 4, 8, 256 * MIB
    model = CollectiveModel(make_cluster((width,) * hosts))
    inside = (width - 1) * LATENCY + (width - 1) / width * n / BANDWIDTH
    # Eight rings of n/8 leave every host through one card at the same time: together they are one ring of n.
    between = 2 * (hosts - 1) * 1.1e-5 + 2 * (hosts - 1) / hosts * (n / width) / (1e10 / width)
    expected = 2 * inside + between
    assert time_of(model, "all_reduce", n, range(hosts * width), "hierarchical") == pytest.approx(expected, rel=1e-12)
    gather = inside + (hosts - 1) * 1.1e-5 + (hosts - 1) / hosts * n / 1e10
    for name in ("all_gather", "reduce_scatter"):
        assert time_of(model, name, n, range(hosts * width), "hierarchical") == pytest.approx(gather, rel=1e-12)


def test_ring_order_matters_where_hosts_share_a_card():
    model = CollectiveModel(make_cluster((2, 2)))
    n = 64 * MIB
    sorted_order = model.cost(Collective.ALL_REDUCE, n, (0, 1, 2, 3), Algorithm.RING)
    zigzag = model.cost(Collective.ALL_REDUCE, n, (0, 2, 1, 3), Algorithm.RING)
    assert zigzag.bandwidth_s == pytest.approx(2 * sorted_order.bandwidth_s)
    assert zigzag.latency_s == pytest.approx(sorted_order.latency_s)


def test_shared_medium_counts_once_for_all_its_links():
    kind = DeviceKind(name="k")
    devices = tuple(Device(name=f"d{i}", kind="k", host=f"h{i}", memory_bytes=None) for i in range(4))
    links = tuple(Link(source=f"d{i}", target=f"d{j}", bytes_per_s=1e9, latency_s=0.0, shared="bus")
                  for i in range(4) for j in range(4) if i != j)
    model = CollectiveModel(Cluster(name="bus", kinds={"k": kind}, devices=devices, links=links))
    # All four ring transfers of a step go over the one bus, so it carries 4 times as much as one private link would.
    assert time_of(model, "all_gather", 1e9, range(4)) == pytest.approx(4 * 3 / 4)
    private = CollectiveModel(Cluster(name="bus", kinds={"k": kind}, devices=devices, links=links,
                                      contention=Contention.NONE))
    assert time_of(private, "all_gather", 1e9, range(4)) == pytest.approx(3 / 4)


def test_unequal_hosts_go_through_leaders():
    model = CollectiveModel(make_cluster((3, 1)))
    n = 8 * MIB
    chain = 2 * LATENCY + n / BANDWIDTH
    between = 2 * (1.1e-5 + n / 2 / 1e10)
    assert time_of(model, "all_reduce", n, range(4), "hierarchical") == pytest.approx(2 * chain + between)
    with pytest.raises(InputError, match="no hierarchical all_gather for a0, a1, a2, b0"):
        time_of(model, "all_gather", n, range(4), "hierarchical")


def test_auto_takes_the_cheapest_and_says_which():
    model = CollectiveModel(make_cluster((4, 4)))
    for n in (0, 1024, MIB, 1024 * MIB):
        cost = model.cost(Collective.ALL_REDUCE, n, range(8))
        each = {name: time_of(model, "all_reduce", n, range(8), name) for name in ("ring", "tree", "hierarchical")}
        assert cost.seconds == min(each.values())
        assert each[cost.algorithm] == cost.seconds
        assert cost.seconds == pytest.approx(cost.latency_s + cost.bandwidth_s)
    assert model.cost(Collective.ALL_REDUCE, 0, range(8)).algorithm == "tree"
    assert model.cost(Collective.ALL_REDUCE, 1024 * MIB, range(8)).algorithm != "tree"


@settings(max_examples=60, deadline=None)
@given(hosts=st.lists(st.integers(1, 4), min_size=1, max_size=4), name=st.sampled_from(list(Collective)),
       sizes=st.tuples(st.integers(0, 2**34), st.integers(0, 2**34)), data=st.data())
def test_never_negative_monotone_in_bytes_and_free_alone(hosts, name, sizes, data):
    cluster = make_cluster(hosts)
    model = CollectiveModel(cluster)
    limit = 2 if name is Collective.P2P else cluster.num_devices
    group = data.draw(st.permutations(range(cluster.num_devices)))[:data.draw(st.integers(1, limit))]
    small, large = (model.cost(name, size, group) for size in sorted(sizes))
    assert 0 <= small.seconds <= large.seconds
    if len(group) == 1:
        assert large.seconds == 0
    elif max(sizes) > 0:
        assert large.seconds > 0


def test_more_bandwidth_never_costs_more():
    slow, fast = (CollectiveModel(make_cluster((4, 4), network=(rate, 1e-5))) for rate in (1e9, 1e10))
    for name in Collective:
        group = (0, 4) if name is Collective.P2P else range(8)
        assert fast.cost(name, MIB, group).seconds < slow.cost(name, MIB, group).seconds


def test_topology_is_read_once_per_group(monkeypatch):
    model = CollectiveModel(make_cluster((8,) * 4))
    group = tuple(range(32))
    first = model.cost(Collective.ALL_REDUCE, 1000, group)

    def refuse(*_arguments):
        raise AssertionError("routes are looked up again")

    monkeypatch.setattr(Cluster, "route", refuse)
    assert model.cost(Collective.ALL_REDUCE, 1000, group) == first
    assert model.cost(Collective.ALL_REDUCE, 2000, list(group)).seconds > first.seconds


def test_bad_groups_are_refused():
    model = CollectiveModel(make_cluster((2,)))
    for group in ((), (0, 0), (0, 7), (-1, 0)):
        with pytest.raises(InputError, match="needs a group of different devices, each 0 to 1"):
            model.cost(Collective.ALL_REDUCE, 1, group)
    with pytest.raises(InputError, match="p2p is between two devices, not 3"):
        CollectiveModel(make_cluster((3,))).cost(Collective.P2P, 1, (0, 1, 2))


def test_disconnected_devices_raise():
    cluster = make_cluster((2,))
    apart = Cluster(name="apart", kinds=cluster.kinds, devices=cluster.devices)
    with pytest.raises(ClusterError, match="nothing can be sent"):
        CollectiveModel(apart).cost(Collective.ALL_REDUCE, 1, (0, 1))


def test_scope_names_kinds_and_whether_hosts_are_crossed():
    cluster = make_cluster((2, 2))
    assert scope_of(cluster, (0, 1)) == "host:fast"
    assert scope_of(cluster, (0, 2)) == "network:fast"
