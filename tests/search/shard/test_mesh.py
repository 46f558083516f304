"""Changes of layout: which collectives, on how many bytes, in which time; by hand, and against what the runtime does."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search.shard.worlds import cluster_of
from weft.base.errors import InputError
from weft.cost.collectives import Collective, CollectiveModel
from weft.cost.mesh import KINDS, Mesh
from weft.cost.profile import CommFit
from weft.search.shard.mesh import Resharding, mesh_shapes
from weft.sharding.layout_steps import find_steps
from weft.sharding.tensor_layout import SUM, parse_placement

LINK, NETWORK = (1e9, 1e-6), (1e8, 1e-5)
N = 1e6
TENSOR = (720, 720, 720)


def resharding(hosts, shape, **options):
    cluster = cluster_of(hosts, link=LINK, network=NETWORK, **options)
    return Resharding(Mesh(cluster, range(sum(hosts)), shape))


def layout(text):
    return tuple(parse_placement(item) for item in text.split())


def steps_of(change, source, target, tensor=TENSOR):
    """Return {(axis, collective): part of the tensor} of a change, without what is nothing."""
    return {(step.axis, KINDS[step.kind].value): step.part(change.mesh.shape) for step in
            change.steps(change.number(layout(source)), change.number(layout(target)), tensor) if step.kind is not None}


def seconds_of(change, source, target, num_bytes=N, tensor=TENSOR):
    numbers = [np.array([change.number(layout(text))]) for text in (source, target)]
    return float(change.matrix(*numbers, num_bytes, tensor)[0, 0])


def ring(kind, size, num_bytes, link):
    times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}[kind]
    return times * ((size - 1) * link[1] + (size - 1) / size * num_bytes / link[0])


# ---- which steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "steps"), [
    ("R", "R", {}), ("R", "S0", {}), ("R", "P", {}), ("S0", "P", {}), ("S0", "S0", {}), ("P", "P", {}),
    ("P", "R", {(0, "all_reduce"): 1.0}),
    ("P", "S1", {(0, "reduce_scatter"): 1.0}),
    ("S0", "R", {(0, "all_gather"): 1.0}),
    ("S0", "S1", {(0, "all_to_all"): 0.25}),
    ("S0/3", "S0", {(0, "all_gather"): 1.0}),
    ("S1x64", "S1", {(0, "all_gather"): 1.0}),
])
def test_steps_on_one_axis_of_four(source, target, steps):
    assert steps_of(resharding((4,), (4,)), source, target) == steps


@pytest.mark.parametrize(("source", "target", "steps"), [
    # the other axis already divides what moves
    ("S0 P", "S0 R", {(1, "all_reduce"): 1 / 2}),
    ("P S1", "R S1", {(0, "all_reduce"): 1 / 4}),
    ("S0 S1", "S2 S1", {(0, "all_to_all"): 1 / 8}),
    # a slice comes first, and makes the all-reduce smaller
    ("P R", "R S0", {(0, "all_reduce"): 1 / 4}),
    # scatter, then sum the pieces
    ("P P", "R S0", {(1, "reduce_scatter"): 1.0, (0, "all_reduce"): 1 / 4}),
    # sums over both axes: scattered inside hosts, summed between them, gathered inside
    ("P P", "R R", {(1, "reduce_scatter"): 1.0, (0, "all_reduce"): 1 / 4, (1, "all_gather"): 1.0}),
    # the fast axis scatters first and gathers last
    ("P P", "S0 S1", {(1, "reduce_scatter"): 1.0, (0, "reduce_scatter"): 1 / 4}),
    ("S0 S1", "R R", {(0, "all_gather"): 1 / 4, (1, "all_gather"): 1.0}),
    ("S0 S1", "R S1", {(0, "all_gather"): 1 / 4}),
])
def test_steps_on_hosts_and_devices(source, target, steps):
    """Two hosts with four devices: the first axis is the network, the second is inside hosts."""
    assert steps_of(resharding((4, 4), (2, 4)), source, target) == steps


@pytest.mark.parametrize(("source", "target", "steps"), [
    ("R R", "S0 S0", {}),
    ("S0 R", "S0 S0", {}),
    ("S0 S0", "S0 R", {(1, "all_gather"): 1 / 2}),
    ("S0 S0", "R R", {(1, "all_gather"): 1 / 2, (0, "all_gather"): 1.0}),
    # a half of the rows is not made of every other quarter: the later axis is gathered first
    ("R S0", "S0 S0", {(1, "all_gather"): 1.0}),
    ("S0 S0", "R S0", {(1, "all_gather"): 1 / 2, (0, "all_gather"): 1.0}),
    ("P S0", "R S0", {(0, "all_reduce"): 1 / 4}),
    # the slow axis would have to scatter the whole: inside hosts it is scattered along another dimension first
    ("P P", "S0 S0", {(1, "reduce_scatter"): 1.0, (0, "reduce_scatter"): 1 / 4, (1, "all_to_all"): 1 / 8}),
    ("P P", "S0 R", {(1, "reduce_scatter"): 1.0, (0, "reduce_scatter"): 1 / 4, (1, "all_gather"): 1 / 2}),
    ("P P", "R P", {(1, "reduce_scatter"): 1.0, (0, "all_reduce"): 1 / 4}),
    # the later axis would have to be gathered before the exchange: both are
    ("S0 S1", "S1 S1", {(0, "all_gather"): 1 / 4, (1, "all_gather"): 1.0}),
])
def test_of_axes_on_one_dimension_the_earlier_cut_first(source, target, steps):
    assert steps_of(resharding((4, 4), (2, 4)), source, target) == steps


def test_sums_that_two_axes_of_equal_links_scatter():
    assert steps_of(resharding((8,), (2, 4)), "P P", "S0 S0") == {
        (0, "reduce_scatter"): 1.0, (1, "reduce_scatter"): 1 / 2}


@pytest.mark.parametrize(("source", "target", "tensor", "steps"), [
    # one dimension: what is summed between hosts is gathered inside them, and cut
    ("P P", "S0 R", (1 << 20,), {(1, "reduce_scatter"): 1.0, (0, "all_reduce"): 1 / 4, (1, "all_gather"): 1.0}),
    # nothing divides by four: there are no equal pieces
    ("P P", "R R", (7, 10 ** 6 + 1), {(0, "all_reduce"): 1.0, (1, "all_reduce"): 1.0}),
    # few entries: as few collectives as can be
    ("P P", "R R", (64, 64), {(0, "all_reduce"): 1.0, (1, "all_reduce"): 1.0}),
    ("P P", "S0 R", (64, 64), {(0, "reduce_scatter"): 1.0, (1, "all_reduce"): 1 / 2}),
    ("P P", "R R", (), {(0, "all_reduce"): 1.0, (1, "all_reduce"): 1.0}),
])
def test_a_way_depends_on_what_divides_and_on_size(source, target, tensor, steps):
    assert steps_of(resharding((4, 4), (2, 4)), source, target, tensor) == steps


PLACES = ("R", "P", "S0", "S1", "S1/3")


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(*[st.sampled_from(PLACES)] * 6), min_size=1, max_size=12),
       st.sampled_from([(2, 2), (4, 3), (2, 2, 2), (4, 2, 3)]),
       st.sampled_from([(720, 720), (6, 720, 720), (12, 18, 10 ** 4), (24, 8), (17, 10 ** 5)]))
def test_times_are_those_of_the_steps_that_are_run(places, shape, tensor):
    """Pairs of one form share their time; the steps of each pair by itself are those of the runtime."""
    pairs = [(items[:len(shape)], items[3:3 + len(shape)]) for items in places]
    pairs = [tuple(layout(" ".join(items)) for items in pair) for pair in pairs if all(
        len({item for item in items if item.startswith("S1")}) < 2 for items in pair)]
    change = resharding((math.prod(shape) // 2,) * 2, shape)
    sources, targets = (np.array([change.number(pair[side]) for pair in pairs], dtype=np.int64) for side in (0, 1))
    times = change.matrix(sources, targets, N, tensor)
    for (row, (source, _)), (column, (_, target)) in product(enumerate(pairs), enumerate(pairs)):
        steps = find_steps(source, target, shape, tensor, change.mesh.weights)
        seconds = sum(float(change.mesh.seconds(step.axis, step.kind, np.array([N * step.part(shape)]))[0])
                      for step in steps if step.kind is not None)
        assert times[row, column] == pytest.approx(seconds)


@pytest.mark.parametrize("hosts", [(8,), (4, 4)])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_no_change_takes_longer_than_to_make_the_tensor_whole(shape, hosts):
    change = resharding(hosts, shape)
    layouts = [layout(" ".join(items)) for items in product(("R", "P", "S0", "S1", "S1/3"), repeat=len(shape))]
    numbers = np.array([change.number(item) for item in layouts if item.count(SUM) < 2 and len({
        place for place in item if place.dim == 1}) < 2])
    times = change.matrix(numbers, numbers, 1e12, TENSOR)
    whole = change.matrix(numbers, np.array([change.number(layout(" ".join("R" * len(shape))))]), 1e12, TENSOR)
    assert (times <= whole * (1 + 1e-6)).all()
    assert (np.diagonal(times) == 0).all()


# ---- how long --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "kind"), [
    ("P", "R", "all_reduce"), ("P", "S0", "reduce_scatter"), ("S0", "R", "all_gather")])
def test_times_on_equal_links_are_those_of_the_best_algorithm(source, target, kind):
    change = resharding((4,), (4,))
    assert seconds_of(change, source, target) == pytest.approx(min(
        ring(kind, 4, N, LINK), CollectiveModel(change.mesh.cluster).cost(Collective(kind), N, range(4)).seconds))
    tree = {"all_reduce": 4 * (LINK[1] + 8 / LINK[0])}.get(kind, 2 * LINK[1] + 0.75 * 8 / LINK[0])
    assert seconds_of(change, source, target, 8.0) == pytest.approx(tree)  # few bytes go by a tree


def test_an_exchange_takes_a_share_of_what_is_held():
    change = resharding((4,), (4,))
    assert seconds_of(change, "S0", "S1") == pytest.approx(ring("all_to_all", 4, N / 4, LINK))
    assert seconds_of(change, "R", "S1") == 0.0
    assert seconds_of(change, "P", "R", 0.0) == 0.0


def test_all_groups_of_an_axis_share_the_network():
    """The axis between two hosts joins four pairs of devices, all on one network card."""
    change = resharding((4, 4), (2, 4))
    latency = LINK[1] + NETWORK[1]
    shared = (NETWORK[0] / 4, latency)
    assert seconds_of(change, "S0 R", "R R") == pytest.approx(ring("all_gather", 2, N, shared))
    assert seconds_of(change, "S0 S1", "R S1") == pytest.approx(ring("all_gather", 2, N / 4, shared))
    alone = CollectiveModel(change.mesh.cluster).cost(Collective.ALL_GATHER, N, (0, 4)).seconds
    assert alone == pytest.approx(ring("all_gather", 2, N, (NETWORK[0], latency)))


def test_groups_inside_hosts_do_not_meet():
    change = resharding((4, 4), (2, 4))
    model = CollectiveModel(change.mesh.cluster)
    assert seconds_of(change, "R P", "R R") == pytest.approx(model.cost(Collective.ALL_REDUCE, N, range(4)).seconds)


def test_a_sum_over_both_axes_is_taken_by_hosts():
    change = resharding((4, 4), (2, 4))
    shared = (NETWORK[0] / 4, LINK[1] + NETWORK[1])
    by_hand = (ring("reduce_scatter", 4, N, LINK) + ring("all_reduce", 2, N / 4, shared)
               + ring("all_gather", 4, N, LINK))
    assert seconds_of(change, "P P", "R R") == pytest.approx(by_hand, rel=1e-2)  # trees save a latency or two
    plain = seconds_of(change, "P R", "R R") + seconds_of(change, "R P", "R R")
    assert seconds_of(change, "P P", "R R") < 0.5 * plain
    assert seconds_of(change, "P P", "R R") == pytest.approx(
        CollectiveModel(change.mesh.cluster).cost(Collective.ALL_REDUCE, N, range(8)).seconds, rel=1e-2)


def test_an_axis_of_one_costs_nothing():
    change = resharding((4,), (1, 4))
    assert seconds_of(change, "P R", "R R") == 0.0
    assert seconds_of(change, "S0 R", "R R") == 0.0
    assert seconds_of(change, "P P", "R R") == pytest.approx(seconds_of(resharding((4,), (4,)), "P", "R"))


def test_times_of_a_matrix_are_those_of_its_pairs():
    change = resharding((4, 4), (2, 4))
    texts = ["R R", "S0 S0", "P S1", "P P", "S0 R"]
    rows, columns = (np.array([change.number(layout(text)) for text in items]) for items in (texts * 2, texts[1:]))
    first = change.matrix(rows, columns, N, TENSOR)
    assert np.array_equal(first, change.matrix(rows, columns, N, TENSOR))
    for (i, source), (j, target) in product(enumerate(texts * 2), enumerate(texts[1:])):
        assert first[i, j] == seconds_of(change, source, target)


def test_groups_that_span_hosts_unequally_are_not_mixed_up():
    """Groups {3 + 1} and {2 + 2} both have three rounds by hosts, of different kinds: such a form is left out."""
    cluster = cluster_of((5, 3), link=LINK, network=NETWORK)
    model = CollectiveModel(cluster)
    groups = [(0, 1, 2, 5), (3, 4, 6, 7)]
    together = min(line.at(N) for line in model.lines_together(Collective.ALL_REDUCE, groups))
    alone = [model.cost(Collective.ALL_REDUCE, N, group).seconds for group in groups]
    assert together >= max(alone) * (1 - 1e-12)


def test_groups_together_are_never_faster_than_alone():
    cluster = cluster_of((3, 3, 2), link=LINK, network=NETWORK)
    model = CollectiveModel(cluster)
    for groups in ([(0, 3), (1, 4), (2, 6)], [(0, 1, 3, 4), (2, 5, 6, 7)], [(0, 4, 6), (1, 2, 5)]):
        for kind in KINDS:
            for num_bytes in (1e2, 1e6):
                together = min(line.at(num_bytes) for line in model.lines_together(kind, groups))
                alone = max(model.cost(kind, num_bytes, group).seconds for group in groups)
                assert together >= alone * (1 - 1e-12), (kind, groups)


def fit(collective, scope, latency_s=3e-6, s_per_byte=5e-9):
    return {(collective, scope): CommFit(collective=collective, scope=scope, algorithm="ring", latency_s=latency_s,
                                         s_per_byte=s_per_byte, num_points=9, error=0.0)}


def test_measured_collectives_replace_those_by_links():
    cluster = cluster_of((4, 4), link=LINK, network=NETWORK)
    fits = fit("all_reduce", "host:unit") | fit("all_gather", "network:unit")
    plain, mesh = Mesh(cluster, range(8), (2, 4)), Mesh(cluster, range(8), (2, 4), comm_fits=fits)
    size = np.array([N])
    assert mesh.seconds(1, 0, size)[0] == pytest.approx(6 * 3e-6 + 1.5 * 5e-9 * N)  # 4 in a ring, each host by itself
    assert mesh.seconds(0, 2, size)[0] == pytest.approx(3e-6 + 4 * 0.5 * 5e-9 * N)  # 4 pairs share the network
    assert mesh.seconds(0, 0, size)[0] == plain.seconds(0, 0, size)[0]
    assert mesh.seconds(1, 2, size)[0] == plain.seconds(1, 2, size)[0]
    assert mesh.weights == plain.weights == (32.0, 1.0)  # by links alone: ten times slower, and shared by four


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_mesh_shapes():
    assert mesh_shapes(1) == [(1,)]
    assert mesh_shapes(7) == [(7,)]
    assert mesh_shapes(8) == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert mesh_shapes(12, max_axes=2) == [(12,), (2, 6), (3, 4), (4, 3), (6, 2)]
    assert all(math.prod(shape) == 64 for shape in mesh_shapes(64))
    assert len(set(mesh_shapes(64))) == len(mesh_shapes(64)) == 1 + 5 + 10


def test_devices_lie_row_by_row():
    mesh = Mesh(cluster_of((8,)), (7, 6, 5, 4, 3, 2), (2, 3))
    assert mesh.name == "2x3"
    assert mesh.groups(0) == [(7, 4), (6, 3), (5, 2)]
    assert mesh.groups(1) == [(7, 6, 5), (4, 3, 2)]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 4), (-2, -2), (2, 2, 2)])
def test_a_mesh_must_have_a_place_for_every_device(shape):
    with pytest.raises(InputError, match=r"choose sizes whose product is 4"):
        Mesh(cluster_of((4,)), range(4), shape)
