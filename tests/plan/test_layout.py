"""Which tensors cross between which ranks: cases small enough to be written down by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.plan.bases import Place, custom_plan
from tests.worlds import chain_graph, dag_graph
from weft.base.errors import PlanError
from weft.model.graph import UNKNOWN_BATCH_DIM, Graph
from weft.plan.layout import Layout, build_layout
from weft.plan.plan import GradientExchange


def on(*devices: str) -> Place:
    return ((devices, 1.0),)


def shared(**shares: float) -> Place:
    return tuple(((device,), share) for device, share in shares.items())


def layout_of(graph: Graph, groups: list[list[int]], places: list[Place], *, size: int = 4, mode: str = "training",
              microbatches: int = 1, num_devices: int = 4, handled: list[tuple[int, ...]] | None = None) -> Layout:
    plan = custom_plan(graph, groups, places, microbatches=microbatches, size=size, num_devices=num_devices,
                       handled=handled)
    return build_layout(replace(plan, model=replace(plan.model, mode=mode)), graph)


def described(layout: Layout, graph: Graph, kind: str) -> list[tuple[object, ...]]:
    """Return (producer, consumers, source, target, tensor names, samples or "whole") of the channels of a kind."""
    return [(channel.producer, channel.consumers, channel.source, channel.target,
             tuple(graph.tensor_names[tensor] for tensor in channel.tensors),
             "whole" if channel.whole else channel.samples)
            for channel in layout.channels if channel.kind == kind]


def test_what_several_stages_on_one_rank_read_is_sent_there_once():
    graph = chain_graph(3, skips=((0, 2),))
    layout = layout_of(graph, [[0], [1], [2]], [on("d0"), on("d1"), on("d1")])
    assert described(layout, graph, "activation") == [(0, (1, 2), 0, 1, ("y0",), "whole")]
    # Each reader has a gradient of its own; the producer adds them up.
    assert described(layout, graph, "gradient") == [(1, (0,), 1, 0, ("y0",), "whole"),
                                                    (2, (0,), 1, 0, ("y0",), "whole")]
    assert layout.instances[0].consumers == (1, 2)
    assert layout.instances[2].producers == (0, 1)
    assert layout.instances[2].forward_channels == (0,)
    assert layout.instances[0].gradient_channels == (1, 2)


def test_what_several_stages_on_several_ranks_read_is_sent_to_each():
    graph = chain_graph(3, skips=((0, 2),))
    layout = layout_of(graph, [[0], [1], [2]], [on("d0"), on("d1"), on("d2")])
    assert described(layout, graph, "activation") == [
        (0, (1,), 0, 1, ("y0",), "whole"), (0, (2,), 0, 2, ("y0",), "whole"), (1, (2,), 1, 2, ("y1",), "whole")]
    assert described(layout, graph, "gradient") == [
        (1, (0,), 1, 0, ("y0",), "whole"), (2, (0,), 2, 0, ("y0",), "whole"), (2, (1,), 2, 1, ("y1",), "whole")]


def test_all_tensors_between_two_stages_go_in_one_message():
    graph = dag_graph([[-1], [0], [0, 1], [0, 1, 2]])
    layout = layout_of(graph, [[0, 1], [2, 3]], [on("d0"), on("d1")])
    assert described(layout, graph, "activation") == [(0, (1,), 0, 1, ("y0", "y1"), "whole")]
    assert described(layout, graph, "gradient") == [(1, (0,), 1, 0, ("y0", "y1"), "whole")]


def test_tensors_with_different_readers_go_in_messages_of_their_own():
    graph = dag_graph([[-1], [0], [0], [0, 1, 2]])
    layout = layout_of(graph, [[0, 1], [2], [3]], [on("d0"), on("d1"), on("d1")])
    assert described(layout, graph, "activation") == [(0, (1, 2), 0, 1, ("y0",), "whole"),
                                                      (0, (2,), 0, 1, ("y1",), "whole")]


def test_stages_on_one_rank_need_no_channel():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1]], [on("d0"), on("d0")])
    assert layout.channels == ()
    assert layout.instances[1].producers == (0,)
    assert layout.instances[0].consumers == (1,)


def test_inference_has_no_gradients():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1]], [on("d0"), on("d1")], mode="inference")
    assert [channel.kind for channel in layout.channels] == ["activation"]
    assert layout.instances[0].consumers == ()


def test_only_what_depends_on_a_parameter_and_is_floating_point_has_a_gradient():
    # op 0 reads the input only, op 1 writes whole numbers, op 2 has a parameter.
    graph = dag_graph([[-1], [0], [0], [0, 1, 2]], weights=[None, 1, 2, 3], whole_numbers=(1,))
    layout = layout_of(graph, [[0, 1, 2], [3]], [on("d0"), on("d1")])
    assert described(layout, graph, "activation") == [(0, (1,), 0, 1, ("y0", "y1", "y2"), "whole")]
    assert described(layout, graph, "gradient") == [(1, (0,), 1, 0, ("y2",), "whole")]


def test_a_stage_that_gets_no_gradient_waits_for_none():
    graph = dag_graph([[-1], [0], [1]], weights=[None, 1, 2])
    layout = layout_of(graph, [[0], [1], [2]], [on("d0"), on("d1"), on("d2")])
    assert layout.instances[0].consumers == ()
    assert layout.instances[0].gradient_channels == ()
    assert described(layout, graph, "gradient") == [(2, (1,), 2, 1, ("y1",), "whole")]


def test_constants_are_computed_by_whoever_reads_them():
    graph = dag_graph([[-1], [], [1], [0, 2]], weights=[0, None, None, 3])
    assert graph.is_constant.tolist() == [False, True, True, False]
    layout = layout_of(graph, [[0, 1, 2], [3]], [on("d0"), on("d1")])
    assert described(layout, graph, "activation") == [(0, (1,), 0, 1, ("y0",), "whole")]


def test_equal_replicas_talk_in_pairs():
    graph = chain_graph(2, batch=1)
    layout = layout_of(graph, [[0], [1]], [shared(d0=0.75, d1=0.25), shared(d2=0.75, d3=0.25)])
    assert described(layout, graph, "activation") == [(0, (2,), 0, 2, ("y0",), "whole"),
                                                      (1, (3,), 1, 3, ("y0",), "whole")]
    assert [item.samples for item in layout.instances] == [(0, 3), (3, 4), (0, 3), (3, 4)]
    assert [channel.num_bytes for channel in layout.channels] == [24, 8, 24, 8]


def test_unequal_replicas_exchange_the_rows_they_have_in_common():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1]], [shared(d0=0.75, d1=0.25), shared(d1=0.5, d2=0.5)])
    assert described(layout, graph, "activation") == [
        (0, (2,), 0, 1, ("y0",), (0, 2)), (0, (3,), 0, 2, ("y0",), (2, 3)), (1, (3,), 1, 2, ("y0",), (3, 4))]
    assert described(layout, graph, "gradient") == [
        (2, (0,), 1, 0, ("y0",), (0, 2)), (3, (0,), 2, 0, ("y0",), (2, 3)), (3, (1,), 2, 1, ("y0",), (3, 4))]
    assert [channel.num_bytes for channel in layout.channels] == [16, 8, 8] * 2


def test_rows_that_stay_on_their_rank_are_not_sent():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1]], [shared(d0=0.5, d1=0.5), on("d0")])
    assert described(layout, graph, "activation") == [(1, (2,), 1, 0, ("y0",), (2, 4))]
    assert layout.instances[2].producers == (0, 1)


def table_graph() -> Graph:
    """Return a graph in which op 1 makes a table of a parameter alone, and op 3 reads it with what op 2 makes."""
    return dag_graph([[-1], [], [0], [1, 2]], unbatched=(1,))


def test_a_tensor_without_a_batch_comes_whole_from_one_replica():
    graph = table_graph()
    layout = layout_of(graph, [[0, 1, 2], [3]], [shared(d0=0.5, d1=0.5), on("d2")])
    assert described(layout, graph, "activation") == [
        (0, (2,), 0, 2, ("y1",), "whole"), (0, (2,), 0, 2, ("y2",), (0, 2)), (1, (2,), 1, 2, ("y2",), (2, 4))]
    # Its gradient is the whole one, and must be counted once.
    assert described(layout, graph, "gradient") == [
        (2, (0,), 2, 0, ("y1",), "whole"), (2, (0,), 2, 0, ("y2",), (0, 2)), (2, (1,), 2, 1, ("y2",), (2, 4))]
    sizes = {channel.tensors: channel.num_bytes for channel in layout.channels}
    assert sizes[(graph.tensor_index["y1"],)] == 8


def test_each_replica_that_reads_a_table_gives_its_gradient_once():
    graph = table_graph()
    layout = layout_of(graph, [[0, 1, 2], [3]], [on("d2"), shared(d0=0.5, d1=0.5)])
    gradients = [item for item in described(layout, graph, "gradient") if "y1" in item[4]]
    assert gradients == [(1, (0,), 0, 2, ("y1",), "whole"), (2, (0,), 1, 2, ("y1",), "whole")]


def test_a_table_that_two_replicas_on_one_rank_read_is_sent_there_once():
    graph = dag_graph([[-1], [], [0, 1], [1, 2]], unbatched=(1,))
    layout = layout_of(graph, [[0, 1], [2], [3]], [on("d0"), shared(d1=0.75, d2=0.25), shared(d1=0.25, d2=0.75)])
    tables = [item for item in described(layout, graph, "activation") if "y1" in item[4]]
    assert tables == [(0, (1, 3), 0, 1, ("y1",), "whole"), (0, (2, 4), 0, 2, ("y1",), "whole")]


def test_a_value_that_mixes_samples_cannot_be_cut():
    """A mean over the batch differs from replica to replica; taking one of them would be silently wrong."""
    graph = dag_graph([[-1], [0], [1]], unbatched=(1,))
    with pytest.raises(PlanError, match="tensor 'y1' goes between stages whose replicas divide the samples differently, "
                                        "but it mixes the samples of a batch"):
        layout_of(graph, [[0, 1], [2]], [shared(d0=0.5, d1=0.5), on("d2")])
    aligned = layout_of(graph, [[0, 1], [2]], [shared(d0=0.5, d1=0.5), shared(d2=0.5, d3=0.5)])
    assert len(aligned.channels) == 4


@pytest.mark.parametrize("dim", [1, UNKNOWN_BATCH_DIM])
def test_rows_can_be_cut_only_along_the_first_dimension(dim):
    graph = chain_graph(2)
    graph = replace(graph, tensor_batch_dim=np.where(graph.tensor_batch_dim == 0, dim, graph.tensor_batch_dim))
    with pytest.raises(PlanError, match=r"tensor 'y0' goes between stages .* its first dimension is not known"):
        layout_of(graph, [[0], [1]], [shared(d0=0.5, d1=0.5), on("d2")])
    assert len(layout_of(graph, [[0], [1]], [shared(d0=0.5, d1=0.5), shared(d2=0.5, d3=0.5)]).channels) == 4


def test_a_stage_on_several_devices_gets_its_inputs_on_each():
    graph = chain_graph(3)
    layout = layout_of(graph, [[0], [1], [2]], [on("d0", "d1"), on("d1", "d2", "d3"), on("d0")])
    assert described(layout, graph, "activation") == [
        (0, (1,), 1, 2, ("y0",), "whole"), (0, (1,), 0, 3, ("y0",), "whole"), (1, (2,), 1, 0, ("y1",), "whole")]
    assert described(layout, graph, "gradient") == [
        (1, (0,), 1, 0, ("y0",), "whole"), (2, (1,), 0, 1, ("y1",), "whole"), (2, (1,), 0, 2, ("y1",), "whole"),
        (2, (1,), 0, 3, ("y1",), "whole")]


def test_stages_on_several_devices_send_rank_by_rank():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1]], [on("d0", "d1"), on("d2", "d3")])
    assert described(layout, graph, "activation") == [(0, (1,), 0, 2, ("y0",), "whole"), (0, (1,), 1, 3, ("y0",), "whole")]
    assert described(layout, graph, "gradient") == [(1, (0,), 2, 0, ("y0",), "whole"), (1, (0,), 3, 1, ("y0",), "whole")]


def test_opposite_pipelines_do_not_talk_to_each_other():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1], [0], [1]], [on("d0"), on("d1"), on("d1"), on("d0")], microbatches=4, size=1,
                       handled=[(0, 1), (0, 1), (2, 3), (2, 3)])
    assert [(channel.producer, channel.consumers, channel.microbatches) for channel in layout.channels] == [
        (0, (1,), (0, 1)), (2, (3,), (2, 3)), (1, (0,), (0, 1)), (3, (2,), (2, 3))]


def test_a_common_stage_sends_each_micro_batch_to_the_pipeline_that_handles_it():
    graph = chain_graph(2)
    layout = layout_of(graph, [[0], [1], [1]], [on("d0"), on("d1"), on("d2")], microbatches=3, size=1,
                       handled=[(0, 1, 2), (0, 2), (1,)])
    assert [(channel.kind, channel.target, channel.microbatches) for channel in layout.channels] == [
        ("activation", 1, (0, 2)), ("activation", 2, (1,)), ("gradient", 0, (0, 2)), ("gradient", 0, (1,))]


def test_sizes_do_not_overflow():
    graph = replace(chain_graph(2, batch=2**20), tensor_bytes=np.full(5, 2**50, dtype=np.int64))
    layout = layout_of(graph, [[0], [1]], [on("d0"), on("d1")], size=2**20)
    assert layout.channels[0].num_bytes == 2**50


def test_exchanges_among_one_device_need_no_bucket():
    graph = chain_graph(2)
    plan = custom_plan(graph, [[0], [1]], [on("d0"), shared(d1=0.5, d2=0.5)], microbatches=1, size=2, num_devices=3)
    plan = replace(plan, gradients=(GradientExchange(parameters=("w0",), devices=("d0",)),
                                    GradientExchange(parameters=("w1",), devices=("d2", "d1"))))
    buckets = build_layout(plan, graph).buckets
    assert [(bucket.parameters, bucket.ranks, bucket.num_bytes) for bucket in buckets] == [
        ((graph.tensor_index["w1"],), (1, 2), 4)]
