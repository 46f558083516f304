"""estimate_costs: the roofline, sources, given times, batch shares, transfers and the summary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost.worlds import FAST, SLOW, given_costs, make_cluster, make_graph
from weft.base.errors import ClusterError, InputError, ModelError
from weft.cluster.cluster import DeviceKind
from weft.cost.costs import estimate_costs
from weft.cost.figure import ZERO, Figure, Source, combine
from weft.cost.op_classes import op_class, op_classes
from weft.cost.roofline import peak_rate


def test_weakest_source_wins_and_zero_does_not_weaken():
    measured, fitted = Figure(1.0, Source.MEASURED), Figure(2.0, Source.FITTED)
    given_, roofline = Figure(4.0, Source.GIVEN), Figure(8.0, Source.ROOFLINE)
    assert measured + fitted == Figure(3.0, Source.FITTED)
    assert combine([measured, fitted, given_, roofline]) == Figure(15.0, Source.ROOFLINE)
    assert given_ + measured == Figure(5.0, Source.MEASURED)
    assert measured + Figure(0.0, Source.ROOFLINE) == measured
    assert combine([]) == ZERO
    assert [source.value for source in Source] == ["roofline", "fitted", "measured", "given"]


@pytest.mark.parametrize(("kind", "expected"), [
    ("aten.linear.default", "matmul"), ("aten.addmm", "matmul"), ("aten.bmm.default", "matmul"), ("Gemm", "matmul"),
    ("aten.convolution.default", "convolution"), ("Conv", "convolution"), ("conv2d", "convolution"),
    ("aten.scaled_dot_product_attention.default", "attention"),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
    ("aten.native_layer_norm", "normalisation"), ("aten._native_batch_norm_legit.default", "normalisation"),
    ("LayerNormalization", "normalisation"), ("aten._softmax.default", "softmax"), ("aten.gelu", "transcendental"),
    ("aten.add.Tensor", "elementwise"), ("Relu", "elementwise"), ("aten.mean.dim", "reduction"),
    ("MaxPool", "reduction"), ("aten.embedding", "embedding"), ("Gather", "embedding"), ("aten.view", "view"),
    ("aten.transpose.int", "view"), ("aten.t.default", "view"), ("Reshape", "view"), ("aten.lstm.input", "recurrent"),
    ("LSTM", "recurrent"), ("aten.something_new.default", "other"), ("", "other"),
])
def test_operator_classes(kind, expected):
    assert op_class(kind) == expected


def test_table_of_classes_is_sound():
    seen: set[str] = set()
    for name, entry in op_classes().items():
        assert entry.unit in ("matrix", "vector"), name
        for share in (entry.cpu, entry.gpu):
            assert 0 < share.compute <= 1
            assert 0 < share.memory <= 1
        assert seen.isdisjoint(entry.operators), name
        seen.update(entry.operators)


def test_roofline_closed_form():
    graph = make_graph(1, batch=512, width=256)
    costs = estimate_costs(graph, make_cluster((1,)))
    matmul, gelu = op_classes()["matmul"].gpu, op_classes()["transcendental"].gpu
    flops = 2 * 512 * 256 * 256
    num_bytes = 4 * (2 * 512 * 256 + 256 * 256)
    linear_s = 1e-6 + max(flops / (1e12 * matmul.compute), num_bytes / (1e11 * matmul.memory))
    gelu_s = 1e-6 + max(8 * 512 * 256 / (1e12 * gelu.compute), 8 * 512 * 256 / (1e11 * gelu.memory))
    assert costs.forward_s[:, 0] == pytest.approx([linear_s, 0.0, gelu_s])
    assert costs.stage_figure(np.arange(3), 0, "F") == Figure(pytest.approx(linear_s + gelu_s), Source.ROOFLINE)
    backward = costs.stage_figure(np.arange(3), 0, "B").seconds
    parts = [costs.stage_figure(np.arange(3), 0, phase).seconds for phase in "IW"]
    assert backward == pytest.approx(sum(parts))
    assert costs.weight_grad_s[2, 0] == 0  # gelu has no parameters, so not even the overhead
    assert costs.stage_figure(np.array([1]), 0, "F") == ZERO  # a view


def test_a_part_of_the_batch_still_reads_all_parameters():
    graph = make_graph(1, batch=1024, width=1024)
    costs = estimate_costs(graph, make_cluster((1,)))
    linear = np.array([0])
    whole, tiny = (costs.stage_figure(linear, 0, "F", fraction).seconds for fraction in (1.0, 1 / 1024))
    memory_rate = 1e11 * op_classes()["matmul"].gpu.memory
    assert tiny == pytest.approx(1e-6 + (4 * 1024 * 1024 + 2 * 4 * 1024) / memory_rate)
    assert tiny > whole / 1024
    half = costs.stage_figure(linear, 0, "F", 0.5).seconds
    assert half - 1e-6 == pytest.approx((whole - 1e-6) / 2)  # bound by compute: linear above the overhead


def test_work_that_does_not_depend_on_the_batch_does_not_shrink():
    graph = make_graph(1)
    fixed = dataclasses.replace(graph, tensor_batch_dim=np.full(graph.num_tensors, -1, dtype=np.int64))
    costs = estimate_costs(fixed, make_cluster((1,)))
    assert np.array_equal(costs.op_seconds("F", 0.25), costs.op_seconds("F"))


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 512), width=st.integers(1, 256),
       fractions=st.tuples(st.floats(1e-3, 4), st.floats(1e-3, 4)), phase=st.sampled_from("FBIW"))
def test_costs_are_finite_never_negative_and_monotone_in_the_share(batch, width, fractions, phase):
    costs = estimate_costs(make_graph(2, batch=batch, width=width), make_cluster((1, 1), kinds=(FAST, SLOW)))
    less, more = (costs.op_seconds(phase, fraction) for fraction in sorted(fractions))
    assert np.all(np.isfinite(more))
    assert np.all(less >= 0)
    assert np.all(less <= more + 1e-15)
    assert np.all(costs.op_seconds(phase, max(fractions)) <= max(1, max(fractions)) * costs.op_seconds(phase) + 1e-15)


def test_one_column_per_kind_in_use():
    unused = DeviceKind(name="unused")
    cluster = make_cluster((2, 1, 2), kinds=(FAST, SLOW))
    cluster = dataclasses.replace(cluster, kinds={**cluster.kinds, "unused": unused})
    costs = estimate_costs(make_graph(), cluster)
    assert costs.columns == ("fast", "slow")
    assert costs.column_of_device == (0, 0, 1, 0, 0)
    assert np.all(costs.forward_s[:, 0] <= costs.forward_s[:, 1])


def test_dtype_changes_rates_and_bytes():
    graph = make_graph(1, batch=4096, width=1024)
    graph = dataclasses.replace(graph, op_kinds=("aten.linear", "aten.view", "aten.relu"))
    cluster = make_cluster((1,))
    single, half = (estimate_costs(graph, cluster, dtype=dtype) for dtype in (None, "fp16"))
    assert (half.forward_s[0, 0] - 1e-6) * 8 == pytest.approx(single.forward_s[0, 0] - 1e-6)  # compute: 8 x rate
    assert (half.forward_s[2, 0] - 1e-6) * 2 == pytest.approx(single.forward_s[2, 0] - 1e-6)  # memory: half the bytes
    assert half.notes == ()
    brain = estimate_costs(graph, cluster, dtype="bf16")
    assert brain.notes == ("fast gives no bfloat16 rate: its float16 rate is used",)
    assert np.array_equal(brain.forward_s, half.forward_s)
    with pytest.raises(InputError, match="'int8' is not a floating-point type"):
        estimate_costs(graph, cluster, dtype="int8")


def test_missing_dtypes_fall_back_with_a_note():
    assert peak_rate(SLOW, "bfloat16").flop_per_s == 1e11
    assert peak_rate(SLOW, "bfloat16").note == "slow gives no bfloat16 rate: its float32 rate is used"
    assert peak_rate(SLOW, "float64").flop_per_s == 5e10
    assert peak_rate(SLOW, "float32").note is None
    assert peak_rate(SLOW, "int64").note is None
    with pytest.raises(ClusterError, match="device kind 'empty' gives no compute rate"):
        peak_rate(DeviceKind(name="empty"), "float32")


def test_float32_convolutions_run_at_the_tf32_rate_where_there_is_one():
    graph = dataclasses.replace(make_graph(1, batch=4096, width=1024), op_kinds=("Conv", "aten.view", "Relu"))
    with_tf32 = dataclasses.replace(FAST, flop_per_s={**FAST.flop_per_s, "tf32": 2e12})
    plain, fast = (estimate_costs(graph, make_cluster((1,), kinds=(kind,))).forward_s[:, 0] - 1e-6
                   for kind in (FAST, with_tf32))
    assert plain[0] == pytest.approx(2 * fast[0])
    assert plain[2] == fast[2]


def bare(graph):
    """Return ``graph`` without any figures but the given times."""
    zero = np.zeros(graph.num_ops)
    return dataclasses.replace(graph, flops=zero, bytes_read=zero, bytes_written=zero)


def test_given_times_by_kind_need_no_rates_and_scale_with_the_batch():
    graph = make_graph(1, training=False)
    times = [{"gpu": 0.5, "cpu": 2.0}, {"gpu": 0.25, "cpu": 0.25}, {"gpu": 1.0, "cpu": 3.0}]
    graph = bare(dataclasses.replace(graph, given=given_costs(times, num_tensors=graph.num_tensors)))
    graph = dataclasses.replace(graph, op_kinds=("a", "b", "c"))
    cluster = make_cluster((1, 1), kinds=(DeviceKind(name="gpu"), DeviceKind(name="cpu", type="cpu")))
    costs = estimate_costs(graph, cluster)
    assert costs.forward_s.tolist() == [[0.5, 2.0], [0.25, 0.25], [1.0, 3.0]]
    assert costs.stage_figure(np.arange(3), 1, "F") == Figure(5.25, Source.GIVEN)
    assert costs.stage_figure(np.arange(3), 1, "F", 0.5).seconds == pytest.approx(2.625)
    assert costs.stage_figure(np.arange(3), 0, "B") == ZERO


def test_given_times_by_device_name_make_a_column_per_device():
    graph = make_graph(1, training=False)
    times = [{"a0": 0.5, "fast": 2.0}, {"fast": 0.25}, None]
    graph = dataclasses.replace(graph, given=given_costs(times, num_tensors=graph.num_tensors))
    costs = estimate_costs(graph, make_cluster((2,)))
    assert costs.columns == ("a0", "a1")
    assert costs.forward_s[:2].tolist() == [[0.5, 2.0], [0.25, 0.25]]
    assert costs.source[:, 0].tolist() == [Source.GIVEN.code, Source.GIVEN.code, Source.ROOFLINE.code]
    assert costs.stage_figure(np.arange(3), 0, "F").source is Source.ROOFLINE


def test_missing_given_time_names_operator_and_kind():
    graph = make_graph(1, training=False)
    times = [{"fast": 0.5}, {"fast": 0.25}, {"fast": 1.0, "slow": 2.0}]
    graph = bare(dataclasses.replace(graph, given=given_costs(times, num_tensors=graph.num_tensors)))
    cluster = make_cluster((1, 1), kinds=(FAST, SLOW))
    with pytest.raises(ModelError, match=r"2 operators have no time on device kind 'slow': 'op0', 'op1'\. Add"):
        estimate_costs(graph, cluster)


def test_operators_that_may_not_run_somewhere_cost_infinity_there():
    graph = make_graph(1, training=False)
    times = [{"fast": 0.5}, None, None]
    given_ = given_costs(times, num_tensors=graph.num_tensors, allowed=[("fast",), None, ("slow",)])
    costs = estimate_costs(bare(dataclasses.replace(graph, given=given_)), make_cluster((1, 1), kinds=(FAST, SLOW)))
    assert np.isinf(costs.forward_s).tolist() == [[False, True], [False, False], [True, False]]


def test_kind_without_rates_is_named_where_they_are_needed():
    cluster = make_cluster((1,), kinds=(DeviceKind(name="mystery"),))
    with pytest.raises(ClusterError, match=r"'mystery' gives no compute rate .* 6 operators \('op0' first\)"):
        estimate_costs(make_graph(), cluster)


def test_transfers_and_collectives_through_costs():
    graph = make_graph(1)
    given_ = given_costs([None] * 3, num_tensors=graph.num_tensors, transfers={2: {"a0>a1": 0.125}})
    costs = estimate_costs(dataclasses.replace(graph, given=given_), make_cluster((2,)))
    assert costs.transfer(1e6, 0, 0) == ZERO
    assert costs.transfer(1e6, 0, 1) == Figure(pytest.approx(1e-6 + 1e6 / 1e11), Source.ROOFLINE)
    assert costs.tensor_transfer(2, 0, 1) == Figure(0.125, Source.GIVEN)
    assert costs.tensor_transfer(2, 1, 0).source is Source.ROOFLINE
    assert costs.tensor_transfer(2, 1, 1) == ZERO
    assert costs.collective("all_reduce", 1e6, (0, 1), "ring").seconds == pytest.approx(2e-6 + 1e6 / 1e11)
    assert costs.collective("all_reduce", 1e6, (0,)).seconds == 0
    for arguments, message in ((("all_reduc", 1, (0, 1)), "no collective 'all_reduc': choose one of all_reduce"),
                               (("all_reduce", 1, (0, 1), "best"), "no collective algorithm 'best'"),
                               (("all_reduce", -1, (0, 1)), "the size must be zero or more"),
                               (("all_reduce", float("nan"), (0, 1)), "the size must be zero or more")):
        with pytest.raises(InputError, match=message):
            costs.collective(*arguments)


def test_bad_shares_and_phases_are_refused():
    costs = estimate_costs(make_graph(1), make_cluster((1,)))
    for fraction in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="share of the batch"):
            costs.stage_figure(np.arange(3), 0, "F", fraction)
    with pytest.raises(InputError, match="phase must be one of F, B, I, W, not 'X'"):
        costs.stage_figure(np.arange(3), 0, "X")


def test_columns_of_a_large_graph_are_cheap():
    graph = make_graph(3000)
    costs = estimate_costs(graph, make_cluster((2, 2), kinds=(FAST, SLOW)))
    assert costs.forward_s.shape == (9000, 2)
    assert costs.stage_figure(np.arange(9000), 3, "B", 0.5).seconds > 0


def test_gradients_of_parameters_are_added_up_once_for_their_first_reader():
    from tests.worlds import linear_graph, plain_cluster

    graph, cluster = linear_graph(8, 64, 32), plain_cluster(1)
    terms = estimate_costs(graph, cluster).terms[0]
    rate = 1e12 * op_classes()["elementwise"].on("gpu").memory
    size = 4 * 64 * 32
    assert terms["weight_grad"].sum_s[0] == pytest.approx(3 * size / rate)
    assert not terms["forward"].sum_s.any()
    assert not terms["input_grad"].sum_s.any()
    both = [terms["weight_grad"].at(fraction)[0] for fraction in (0.5, 1.0)]
    assert both[0] >= 3 * size / rate  # fewer samples do not make gradients smaller
