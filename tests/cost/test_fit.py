"""Fits recover known parameters, also through noise and outliers, and costs use them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost.worlds import FAST, make_cluster, make_graph
from weft.base.errors import InputError
from weft.cost.collectives import Algorithm, Collective, CollectiveModel
from weft.cost.costs import estimate_costs
from weft.cost.figure import Source
from weft.cost.fit import fit_collective, fit_efficiencies, fit_transfer
from weft.cost.profile import OpKey, OpTiming, ProfileStore, op_signature

SIZES = [2**k for k in range(6, 31, 2)]


@settings(max_examples=50, deadline=None)
@given(latency=st.floats(1e-7, 1e-3), rate=st.floats(1e7, 1e12))
def test_transfer_fit_recovers_exact_parameters(latency, rate):
    fit = fit_transfer([(n, latency + n / rate) for n in SIZES], scope="host:fast")
    assert fit.latency_s == pytest.approx(latency, rel=1e-6)
    assert fit.s_per_byte == pytest.approx(1 / rate, rel=1e-6)
    assert fit.error < 1e-9


def test_transfer_fit_survives_noise_and_outliers():
    random = np.random.default_rng(3)
    points = [(n, (5e-6 + n / 2e10) * random.uniform(0.97, 1.03)) for n in SIZES for _ in range(3)]
    for index in (4, 17, 30):
        points[index] = (points[index][0], points[index][1] * 20)
    fit = fit_transfer(points, scope="host:fast")
    assert fit.latency_s == pytest.approx(5e-6, rel=0.05)
    assert 1 / fit.s_per_byte == pytest.approx(2e10, rel=0.05)


def test_fit_is_never_negative():
    decreasing = fit_transfer([(10, 3.0), (1000, 2.0), (100000, 1.0)], scope="host:x")
    assert decreasing.latency_s > 0
    assert decreasing.s_per_byte == 0
    no_latency = fit_transfer([(n, (n - 32) / 1e9) for n in SIZES], scope="host:x")
    assert no_latency.latency_s == 0
    assert no_latency.s_per_byte > 0


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL])
@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.TREE])
def test_collective_fit_recovers_the_links_of_the_model(collective, algorithm):
    model = CollectiveModel(make_cluster((6,), intra=(4e10, 7e-6)))
    points = [(n, model.cost(collective, n, range(6), algorithm).seconds) for n in SIZES]
    fit = fit_collective(collective, points, num_devices=6, scope="host:fast", algorithm=algorithm)
    assert fit.latency_s == pytest.approx(7e-6, rel=1e-6)
    assert fit.s_per_byte == pytest.approx(1 / 4e10, rel=1e-6)


def test_bad_points_are_refused():
    for points in ([], [(1, 1.0)], [(1, 1.0), (1, 2.0)]):
        with pytest.raises(InputError, match="at least two sizes"):
            fit_transfer(points, scope="host:x")
    for point in ((-1, 1.0), (1, 0.0), (float("nan"), 1.0), (1, float("inf"))):
        with pytest.raises(InputError, match="measured points must be"):
            fit_transfer([(1, 1.0), point], scope="host:x")
    with pytest.raises(InputError, match="cannot fit a hierarchical all_reduce"):
        fit_collective(Collective.ALL_REDUCE, [(1, 1.0), (2, 1.5)], num_devices=4, scope="host:x",
                       algorithm=Algorithm.HIERARCHICAL)


def test_costs_use_fitted_links_where_they_hold(tmp_path):
    store = ProfileStore(tmp_path / "profile.db")
    store.put_comm_fits([fit_transfer([(n, 1e-3 + n / 1e6) for n in SIZES], scope="host:fast"),
                         fit_collective(Collective.ALL_REDUCE, [(n, 6e-3 + 1.5 * n / 1e6) for n in SIZES],
                                        num_devices=4, scope="host:fast")])
    costs = estimate_costs(make_graph(1), make_cluster((4, 4)), profile=store)
    assert costs.transfer(1e6, 0, 1).seconds == pytest.approx(1.001)
    assert costs.transfer(1e6, 0, 1).source is Source.FITTED
    assert costs.transfer(1e6, 0, 4).source is Source.ROOFLINE  # over the network: no fit
    reduced = costs.collective("all_reduce", 1e6, range(4))
    assert (reduced.source, reduced.algorithm) == (Source.FITTED, "ring")
    assert reduced.seconds == pytest.approx(6e-3 + 1.5)
    assert costs.collective("all_reduce", 1e6, range(2)).seconds == pytest.approx(2e-3 + 1.0)
    assert costs.collective("all_reduce", 1e6, range(4), "tree").source is Source.ROOFLINE


def profiled(store: ProfileStore, graph, seconds, device_kind: str = "fast") -> None:
    store.put_timings(
        (OpKey(device_kind, graph.op_kinds[op], op_signature(graph, op, "float32"), "float32"),
         OpTiming(forward_s=float(seconds[op]), input_grad_s=None, weight_grad_s=None, spread=0.0, repeats=1, threads=1,
                  torch_version="0", recorded_at=""))
        for op in range(graph.num_ops))


def test_efficiency_fit_recovers_known_efficiencies_and_is_used(tmp_path):
    store = ProfileStore(tmp_path / "profile.db")
    sizes = ((1, 4096), (4, 2048), (4096, 2048), (8192, 1024))
    graphs = [make_graph(1, batch=batch, width=width) for batch, width in sizes]
    for graph in graphs:
        compute_s = graph.flops / 1e12
        memory_s = (graph.bytes_read + graph.bytes_written) / 1e11
        profiled(store, graph, 1e-6 + np.maximum(compute_s / 0.35, memory_s / 0.55))
    fits = {fit.op_class: fit for fit in fit_efficiencies(graphs, FAST, store)}
    assert set(fits) == {"matmul", "transcendental"}
    assert fits["matmul"].compute == pytest.approx(0.35)
    assert fits["matmul"].memory == pytest.approx(0.55)
    assert fits["matmul"].error < 1e-9
    assert fits["transcendental"].memory == pytest.approx(0.55)
    store.put_class_fits(fits.values())
    other = make_graph(1, batch=2048, width=512)
    costs = estimate_costs(other, make_cluster((1,)), profile=store)
    assert costs.source[:, 0].tolist() == [Source.FITTED.code, Source.ROOFLINE.code, Source.FITTED.code]
    assert costs.forward_s[0, 0] == pytest.approx(1e-6 + max(other.flops[0] / 0.35e12, (
        other.bytes_read[0] + other.bytes_written[0]) / 0.55e11))
    assert costs.stage_figure(np.arange(3), 0, "F").source is Source.FITTED  # the view costs nothing


def test_measured_beats_fitted_and_given_beats_measured(tmp_path):
    from tests.cost.worlds import given_costs

    store = ProfileStore(tmp_path / "profile.db")
    graph = make_graph(1)
    profiled(store, graph, [0.5, 0.25, 0.125])
    store.put_class_fits(fit_efficiencies([graph], FAST, store))
    given_ = given_costs([{"fast": 2.0}, None, None], num_tensors=graph.num_tensors)
    costs = estimate_costs(dataclasses.replace(graph, given=given_), make_cluster((1,)), profile=store)
    assert costs.forward_s[:, 0].tolist() == [2.0, 0.25, 0.125]
    assert costs.source[:, 0].tolist() == [Source.GIVEN.code, Source.MEASURED.code, Source.MEASURED.code]
    # Backward was not measured: forward times the roofline's ratio, which is less than a measurement.
    assert costs.backward_source[2, 0] == Source.FITTED.code
    plain = estimate_costs(graph, make_cluster((1,)))
    ratio = plain.input_grad_s[2, 0] / plain.forward_s[2, 0]
    assert costs.input_grad_s[2, 0] == pytest.approx(0.125 * ratio)
