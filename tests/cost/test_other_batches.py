"""Operators that were measured for several numbers of samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cost.worlds import make_cluster, make_graph
from weft.cost.costs import estimate_costs
from weft.cost.entries import at_batch
from weft.cost.figure import Source
from weft.cost.profile import OpKey, OpTiming, ProfileStore, op_signature
from weft.model.graph import UNKNOWN_BATCH_DIM

CLUSTER = make_cluster((1,))


@pytest.fixture
def store(tmp_path) -> ProfileStore:
    return ProfileStore(tmp_path / "profile.sqlite")


def put(store: ProfileStore, batch: int, forward_s: float) -> None:
    timing = OpTiming(forward_s=forward_s, input_grad_s=2 * forward_s, weight_grad_s=3 * forward_s, spread=0.0, repeats=1,
                      threads=1, torch_version="", recorded_at="")
    graph = make_graph(1, batch=4, width=8)
    store.put_timings([(OpKey("fast", graph.op_kinds[0], op_signature(graph, 0, "float32", batch), "float32"), timing)])


def test_between_sizes_times_are_interpolated_and_beyond_they_follow_the_roofline(store):
    for batch, seconds in ((4, 1.0), (8, 1.5), (16, 2.5)):
        put(store, batch, seconds)
    costs = estimate_costs(make_graph(1, batch=4, width=8), CLUSTER, profile=store)
    seconds = {fraction: costs.op_seconds("F", fraction)[0, 0] for fraction in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)}
    assert [seconds[fraction] for fraction in (1.0, 1.5, 2.0, 3.0, 4.0)] == [1.0, 1.25, 1.5, 2.0, 2.5]
    ratio = costs.terms[0]["forward"].ratio
    assert seconds[8.0] == pytest.approx(2.5 * ratio(8.0)[0] / ratio(4.0)[0])
    assert seconds[0.5] == pytest.approx(1.0 * ratio(0.5)[0])
    added = costs.terms[0]["weight_grad"].sum_s[0]
    assert costs.op_seconds("B", 2.0)[0, 0] == pytest.approx(5 * 1.5 + added)


def test_a_size_that_was_not_measured_is_scaled_from_one_that_was(store):
    put(store, 4, 1.0)
    put(store, 64, 9.0)
    costs = estimate_costs(make_graph(1, batch=8, width=8), CLUSTER, profile=store)
    assert costs.source[0, 0] == costs.backward_source[0, 0] == Source.FITTED.code
    assert costs.forward_s[0, 0] == pytest.approx(1.0 / costs.terms[0]["forward"].ratio(0.5)[0])
    assert costs.op_seconds("F", 0.5)[0, 0] == 1.0
    assert costs.op_seconds("F", 8.0)[0, 0] == 9.0


def test_without_batch_dimensions_only_the_traced_size_counts(store):
    put(store, 4, 1.0)
    put(store, 16, 3.0)
    graph = make_graph(1, batch=4, width=8)
    blind = replace(graph, tensor_batch_dim=np.full(graph.num_tensors, UNKNOWN_BATCH_DIM))
    assert at_batch(blind, 8) is None
    costs = estimate_costs(blind, CLUSTER, profile=store)
    assert costs.measured_at == ()
    assert costs.op_seconds("F", 4.0)[0, 0] != pytest.approx(3.0)


def test_graphs_of_other_sizes_have_tensors_of_these_sizes():
    graph, other = make_graph(2, batch=4, width=8), make_graph(2, batch=12, width=8)
    grown = at_batch(graph, 12)
    assert grown is not None
    assert (grown.batch, grown.tensor_shapes) == (12, other.tensor_shapes)
    assert grown.tensor_bytes.tolist() == other.tensor_bytes.tolist()
