"""Layouts: which devices form the stages of a pipeline."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search.deploy.worlds import cluster_of, host
from weft.search.joint.layouts import even, layouts, tp_groups_of

MAX_STAGES = 16
RATES = ("1GFLOP/s", "2GFLOP/s", "5GFLOP/s")
hosts = st.lists(st.tuples(st.sampled_from((1, 2, 3, 4, 6, 8)), st.sampled_from(RATES)), min_size=1, max_size=4)


def cluster_with(sizes):
    return cluster_of(*(host(f"h{index}x", count, rate=rate) for index, (count, rate) in enumerate(sizes)))


def all_layouts(cluster, degree, batch=2520):
    rates = {name: float(name[1:].removesuffix("GFLOP/s")) for name in cluster.kinds}
    return list(layouts(cluster, degree, lambda tp_group: rates[cluster.devices[tp_group[0]].kind], batch=batch, max_stages=MAX_STAGES))


@given(hosts)
@settings(max_examples=25, deadline=None)
def test_devices_are_used_once_at_most_and_tp_groups_stay_in_a_host_and_kind(sizes):
    cluster = cluster_with(sizes)
    for degree in (1, 2, 4):
        found = all_layouts(cluster, degree)
        assert len(found) == len({tuple(mesh.tp_groups for mesh in layout) for layout in found})
        for layout in found:
            used = [device for mesh in layout for device in mesh.devices]
            assert len(used) == len(set(used))
            assert 1 <= len(layout) <= MAX_STAGES
            for tp_group in itertools.chain.from_iterable(mesh.tp_groups for mesh in layout):
                assert len(tp_group) == degree
                assert len({(cluster.devices[device].host, cluster.devices[device].kind) for device in tp_group}) == 1


def test_equal_devices_are_divided_in_every_way():
    found = all_layouts(cluster_with([(8, RATES[0])]), 1)
    assert sorted((len(layout), len(layout[0].tp_groups)) for layout in found) == [(1, 8), (2, 4), (4, 2), (8, 1)]


def test_slow_groups_may_be_left_out_and_groups_be_stages_of_their_own():
    cluster = cluster_with([(2, RATES[0]), (4, RATES[2])])
    found = {tuple(tuple(sorted(mesh.devices)) for mesh in layout) for layout in all_layouts(cluster, 2)}
    assert ((2, 3, 4, 5),) in found, "only the fast host"
    assert ((0, 1), (2, 3, 4, 5)) in found
    assert ((2, 3, 4, 5), (0, 1)) in found
    assert ((0, 1, 2, 3, 4, 5),) in found


def test_devices_that_make_up_no_tp_group_stay_idle():
    cluster = cluster_with([(5, RATES[0]), (1, RATES[2]), (2, RATES[1])])
    found = {tuple(tuple(sorted(mesh.devices)) for mesh in layout) for layout in all_layouts(cluster, 2)}
    assert ((0, 1, 2, 3, 6, 7),) in found
    assert ((6, 7),) in found, "the fastest host that has a tp group"
    assert not any(4 in devices or 5 in devices for layout in found for devices in layout)
    assert all_layouts(cluster, 8) == []


def test_fewer_devices_are_tried_where_their_number_suits_better():
    seven = {(len(layout), len(layout[0].tp_groups)) for layout in all_layouts(cluster_with([(7, RATES[0])]), 1, batch=6)}
    assert seven == {(1, 7), (7, 1), (1, 6), (2, 3), (3, 2), (6, 1), (1, 4), (2, 2), (4, 1)}


def test_with_many_hosts_the_fastest_ones_alone_are_tried():
    cluster = cluster_with([(2, RATES[index % 3]) for index in range(8)])
    found = {tuple(sorted(device for mesh in layout for device in mesh.devices)) for layout in all_layouts(cluster, 2)}
    assert (4, 5, 10, 11) in found, "both of the fastest kind"


def test_even_layouts_are_of_equal_stages():
    tp_groups = [tp_groups_of(tuple(range(6)), 2)]
    assert [[len(mesh.tp_groups) for mesh in layout] for layout in even(tp_groups, 3)] == [[3], [1, 1, 1]]


def test_tp_groups_are_consecutive():
    assert tp_groups_of((0, 1, 2, 3), 2) == ((0, 1), (2, 3))
