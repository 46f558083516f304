"""Routes, what transfers occupy, digests, groups and the checker."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.worlds import header, long_form, mixed_form, short_form, times_only
from weft.base.errors import ClusterError
from weft.cluster import Cluster, Contention, Device, DeviceKind, Link, check_cluster
from weft.cluster.cluster_file import parse_cluster


def make(num_devices: int, links: list[tuple[str, str, float]], **fields) -> Cluster:
    devices = tuple(Device(name=f"d{i}", kind="k", host="h", memory_bytes=None) for i in range(num_devices))
    made = tuple(Link(source=a, target=b, bytes_per_s=rate, latency_s=1e-6) for a, b, rate in links)
    return Cluster(name="t", kinds={"k": DeviceKind(name="k")}, devices=devices, links=made, **fields)


def names(cluster: Cluster, source: int, target: int) -> list[str]:
    return [cluster.links[link].name for link in cluster.route(source, target).links]


def test_route_in_a_host_and_between_hosts():
    cluster = parse_cluster(short_form())
    inside, outside = cluster.route(0, 1), cluster.route(0, 9)
    assert names(cluster, 0, 1) == ["a0>a-0/fabric", "a-0/fabric>a1"]
    assert (inside.bytes_per_s, inside.latency_s) == (300e9, pytest.approx(2e-6))
    assert names(cluster, 0, 9) == ["a0>a-0/fabric", "a-0/fabric>network", "network>b/fabric", "b/fabric>b1"]
    assert (outside.bytes_per_s, outside.latency_s) == (12.5e9, pytest.approx(1e-6 + 10e-6 + 2.5e-6))


def test_route_to_itself_is_free():
    route = parse_cluster(short_form()).route(3, 3)
    assert (route.links, route.bytes_per_s, route.latency_s) == ((), math.inf, 0.0)


def test_fewest_hops_win_over_width_and_width_over_order():
    cluster = make(2, [("d0", "s", 1.0), ("s", "d1", 1.0), ("d0", "t", 5.0), ("t", "d1", 5.0)])
    assert names(cluster, 0, 1) == ["d0>t", "t>d1"]
    cluster = make(2, [("d0", "t", 5.0), ("t", "d1", 5.0), ("d0", "d1", 0.1)])
    assert names(cluster, 0, 1) == ["d0>d1"]


def test_devices_relay_only_where_there_is_no_other_way():
    links = [("d0", "d1", 9.0), ("d1", "d2", 9.0)]
    assert names(make(3, links), 0, 2) == ["d0>d1", "d1>d2"]
    slow = [("d0", "s", 1.0), ("s", "t", 1.0), ("t", "d2", 1.0)]
    assert names(make(3, links + slow), 0, 2) == ["d0>s", "s>t", "t>d2"]


@st.composite
def small_networks(draw):
    num_devices, num_switches = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    nodes = [f"d{i}" for i in range(num_devices)] + [f"s{i}" for i in range(num_switches)]
    pairs = [pair for pair in itertools.permutations(nodes, 2) if draw(st.booleans())]
    return make(num_devices, [(a, b, float(draw(st.integers(1, 4)))) for a, b in pairs])


def all_paths(cluster: Cluster, source: str, target: str, seen: tuple[str, ...] = ()):
    for link in cluster.links:
        if link.source == source and link.target not in (*seen, source):
            if link.target == target:
                yield (link,)
            else:
                yield from ((link, *rest) for rest in all_paths(cluster, link.target, target, (*seen, source)))


@settings(max_examples=150, deadline=None)
@given(small_networks())
def test_routes_are_as_good_as_the_best_of_all_paths(cluster):
    def quality(path):
        relays = any(link.target in cluster.device_index for link in path[:-1])
        return (relays, len(path), -min(link.bytes_per_s for link in path))

    for source, target in itertools.permutations(range(cluster.num_devices), 2):
        paths = list(all_paths(cluster, f"d{source}", f"d{target}"))
        if not paths:
            with pytest.raises(ClusterError, match=f"nothing can be sent from 'd{source}' to 'd{target}'"):
                cluster.route(source, target)
            continue
        route = cluster.route(source, target)
        found = tuple(cluster.links[link] for link in route.links)
        assert found[0].source == f"d{source}"
        assert found[-1].target == f"d{target}"
        assert all(a.target == b.source for a, b in itertools.pairwise(found))
        assert quality(found) == min(map(quality, paths))
        assert route.bytes_per_s == min(link.bytes_per_s for link in found)
        assert route.latency_s == pytest.approx(sum(link.latency_s for link in found))


def test_no_links_says_what_to_add():
    cluster = parse_cluster(times_only())
    with pytest.raises(ClusterError, match=r"from 'd0' to 'd1': cluster 'cluster' has no links. Add 'network:'"):
        cluster.route(0, 1)


def test_routes_of_1024_devices_are_searched_once_per_host():
    cluster = parse_cluster(header(hosts=[{"name": "a", "count": 128, "devices": "8 x H100", "intra": "nvlink4"}],
                                   network="infiniband-ndr"))
    routes = [cluster.route(i, (i + 511) % 1024) for i in range(1024)]
    assert {len(route.links) for route in routes} == {4}
    assert len(cluster._route_table._near) == 128


def test_link_resources_are_links_and_shared_media_once():
    cluster = parse_cluster(long_form())
    n0, n1, g0 = (cluster.device_index[name] for name in ("n0", "n1", "g0"))
    assert len(cluster.links) == 10
    assert cluster.num_resources == 7, "the four links of 'bus' are one"
    assert len(cluster.transfer_resources(n0, g0)) == 2
    assert cluster.transfer_resources(n0, g0)[0] == cluster.transfer_resources(n1, g0)[0]
    assert set(cluster.transfer_resources(n0, g0)) & set(cluster.transfer_resources(g0, n1))
    assert not set(cluster.transfer_resources(n0, n1)) & set(cluster.transfer_resources(n1, n0))


def test_transfers_of_one_host_share_its_card_but_not_its_fabric():
    cluster = parse_cluster(short_form())
    assert set(cluster.transfer_resources(0, 8)) & set(cluster.transfer_resources(1, 9))
    assert not set(cluster.transfer_resources(0, 1)) & set(cluster.transfer_resources(2, 3))
    assert not set(cluster.transfer_resources(0, 8)) & set(cluster.transfer_resources(8, 0)), "directions are apart"


def test_a_route_through_one_medium_twice_occupies_it_once():
    cluster = parse_cluster(mixed_form() | {"contention": "link"})
    assert len(cluster.route(0, 1).links) == 2
    assert len(cluster.transfer_resources(0, 1)) == 1


def test_port_and_no_contention():
    cluster = parse_cluster(times_only())
    assert cluster.num_resources == 4
    assert (cluster.transfer_resources(0, 1), cluster.transfer_resources(1, 0)) == ((0, 3), (1, 2))
    free = dataclasses.replace(cluster, contention=Contention.NONE)
    assert (free.num_resources, free.transfer_resources(0, 1)) == (0, ())


def test_without_links_each_ordered_pair_is_a_link():
    cluster = dataclasses.replace(parse_cluster(times_only()), contention=Contention.LINK)
    ids = {cluster.transfer_resources(a, b) for a, b in itertools.permutations(range(2), 2)}
    assert len(ids) == 2
    assert max(max(resources) for resources in ids) < cluster.num_resources
    assert cluster.transfer_resources(1, 1) == ()


def test_groups_by_host_and_kind():
    assert parse_cluster(short_form()).groups_by_host_and_kind() == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
    assert parse_cluster(mixed_form()).groups_by_host_and_kind() == ((0, 1), (2,), (3,), (4,))


def test_digest_counts_content_and_not_notes():
    cluster = parse_cluster(short_form())
    assert len(cluster.digest) == 16
    assert int(cluster.digest, 16) >= 0
    assert dataclasses.replace(cluster, name="other").digest == cluster.digest
    other = dataclasses.replace(cluster, contention=Contention.PORT)
    slower = dataclasses.replace(cluster, links=(dataclasses.replace(cluster.links[0], bytes_per_s=1.0),
                                                 *cluster.links[1:]))
    assert len({cluster.digest, other.digest, slower.digest}) == 3
    assert hash(cluster) == hash(parse_cluster(short_form()))


def test_a_used_cluster_can_be_pickled():
    cluster = parse_cluster(short_form())
    cluster.route(0, 9)
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def device(name="d0", **fields) -> Device:
    return Device(**{"name": name, "kind": "k", "host": "h", "memory_bytes": None} | fields)


def link(source="d0", target="d1", **fields) -> Link:
    return Link(**{"source": source, "target": target, "bytes_per_s": 1.0, "latency_s": 0.0} | fields)


BROKEN = [
    ({"devices": ()}, "there are no devices"),
    ({"devices": (device(), device())}, "the device name 'd0' is there 2 times"),
    ({"devices": (device("a b"),)}, "the device name 'a b' must have no spaces"),
    ({"devices": (device(""),)}, "the device name '' must have 1 to 100 characters"),
    ({"devices": (device(kind="q"),)}, "device 'd0' is of the unknown kind 'q'"),
    ({"devices": (device(memory_bytes=0),)}, "device 'd0' has 0 bytes of memory"),
    ({"links": (link(bytes_per_s=0.0), link("d1", "d0"))}, "link 'd0>d1': the bandwidth is 0.0"),
    ({"links": (link(bytes_per_s=math.nan), link("d1", "d0"))}, "the bandwidth is nan"),
    ({"links": (link(latency_s=-1.0), link("d1", "d0"))}, "the latency is -1.0"),
    ({"links": (link(), link(), link("d1", "d0"))}, "the link 'd0>d1' is there 2 times"),
    ({"links": (link("d0", "d0"),)}, "joins a node with itself"),
    ({"links": (link(),)}, "disconnected: 'd1' cannot reach 'd0'"),
    ({"links": (link("d1", "d0"),)}, "disconnected: 'd1' cannot be reached from 'd0'"),
    ({"kinds": {"k": DeviceKind(name="k", flop_per_s={"float32": -1.0})}}, "the float32 rate is -1.0"),
    ({"kinds": {"k": DeviceKind(name="k", memory_bytes_per_s=math.inf)}}, "the memory bandwidth is inf"),
    ({"kinds": {"k": DeviceKind(name="k", overhead_s=-1.0)}}, "the overhead is -1.0"),
    ({"kinds": {"k": DeviceKind(name="k", memory_bytes=0)}}, "kind 'k' has 0 bytes of memory"),
    ({"kinds": {"k": DeviceKind(name="other")}}, "the kind 'other' stands under the name 'k'"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_check_cluster_reports(fields, message):
    good = Cluster(name="c", kinds={"k": DeviceKind(name="k")}, devices=(device("d0"), device("d1")),
                   links=(link(), link("d1", "d0")))
    check_cluster(good)
    with pytest.raises(ClusterError) as caught:
        check_cluster(dataclasses.replace(good, **fields))
    assert message in str(caught.value)


def test_all_disconnected_devices_are_named():
    cluster = make(4, [("d0", "d1", 1.0), ("d1", "d0", 1.0)])
    with pytest.raises(ClusterError, match=r"disconnected: 'd2', 'd3' cannot be reached from 'd0'; add 'network:'"):
        check_cluster(cluster)
