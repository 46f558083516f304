"""What a device of a sharded stage has of each tensor, from the words of a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.worlds import dag_graph
from weft.model.graph import Graph
from weft.plan.local_tensors import LocalTensor, local_tensors
from weft.plan.plan import Replica, Sharding, Stage
from weft.plan.stage_memory import StageMemory, stage_memory

OPS = np.arange(3)
NOTHING = np.zeros(0, dtype=np.int64)


def graph_of(kinds: tuple[str, str, str] = ("a", "b", "c"), *, saved: bool = True) -> Graph:
    """Return a chain of three operators; the first two give 4 x 8 numbers, the third the loss."""
    graph = dag_graph([[-1], [0], [1]], sizes=[128, 128, 4], weights=[0, 1, 2])
    shapes = [(4, 8) if name in ("y0", "y1") else shape
              for name, shape in zip(graph.tensor_names, graph.tensor_shapes, strict=True)]
    return replace(graph, tensor_shapes=tuple(shapes), op_kinds=kinds,
                   is_saved=graph.is_saved if saved else np.zeros_like(graph.is_saved))


def found(graph: Graph, crossing: np.ndarray = NOTHING, **words: dict[str, tuple[str, ...]]) -> dict[str, LocalTensor]:
    """Return what one of four devices has, by the tensor's name."""
    replica = Replica(devices=("d0", "d1", "d2", "d3"), mesh={"tensor": 4})
    stage = Stage(name="s0", ops=graph.op_names, replicas=(replica,), sharding=Sharding(**words))
    items = local_tensors(graph, stage, replica, OPS, crossing)
    return {graph.tensor_names[tensor]: item for tensor, item in items.items()}


SPLIT = {"op0": ("n",), "op1": ("k",)}


@pytest.mark.parametrize(("words", "expected"), [
    ({"ops": SPLIT, "tensors": {"y0": ("S1",)}}, LocalTensor(made=0.25, read=0.25)),
    ({"ops": SPLIT}, LocalTensor(forward_room=1.0)),  # a sum of whole tensors
    ({"ops": {"op1": ("k",)}}, None),
    ({"ops": SPLIT, "tensors": {"y0": ("R:P",)}, "made": {"y0": ("S0",)}},
     LocalTensor(made=0.25, read=1.0, is_copied=True, forward_room=1.0, backward_room=1.0)),
    ({"ops": SPLIT, "tensors": {"y0": ("S1",)}, "made": {"y0": ("P",)}},  # terms of a sum; each device has its part of it
     LocalTensor(made=1.0, read=0.25, is_copied=True, forward_room=1.0, backward_room=1.0)),
    ({"ops": {"op1": ("k",)}, "tensors": {"y0": ("S1",)}},  # cut out of what is whole; its gradient is gathered
     LocalTensor(made=1.0, read=0.25, is_copied=True, backward_room=1.0)),
    ({"ops": SPLIT, "tensors": {"y0": ("S1",)}, "made": {"y0": ("S0",)}},
     LocalTensor(made=0.25, read=0.25, is_copied=True, forward_room=0.25, backward_room=0.25)),
    ({"tensors": {"y0": ("S1",)}}, LocalTensor(made=0.25, read=0.25)),  # nothing is known about operators
])
def test_what_a_device_has_of_a_tensor(words: dict[str, dict[str, tuple[str, ...]]], expected: LocalTensor | None) -> None:
    assert found(graph_of(), **words).get("y0") == expected


def test_parameters_are_there_as_stored_and_tensors_between_stages_whole() -> None:
    graph = graph_of()
    crossing = np.asarray([graph.tensor_index["y0"]])
    for made in ({"y0": ("S1",)}, {}):  # was: a sum of whole tensors, where nothing was said
        items = found(graph, crossing, ops=SPLIT, tensors={"y0": ("S1",), "w0": ("S0",)}, made=made)
        assert items["w0"].made == items["w0"].read < 1
        assert items["y0"] == LocalTensor(made=0.25, read=1.0, is_copied=True, forward_room=1.0, keeps_made=True)


def test_readers_that_want_all_of_what_others_find_in_parts_have_it_brought_once_more() -> None:
    """A product with rows of a matrix, beside an operator that takes the same part as the maker."""
    graph = dag_graph([[-1], [0], [0], [1, 2]], sizes=[128, 128, 128, 4], weights=[0, 1, 2, 3])
    shapes = [(4, 8) if name in ("y0", "y1", "y2") else shape
              for name, shape in zip(graph.tensor_names, graph.tensor_shapes, strict=True)]
    graph = replace(graph, tensor_shapes=tuple(shapes), op_kinds=("a", "aten.linear", "b", "c"))
    replica = Replica(devices=("d0", "d1", "d2", "d3"), mesh={"tensor": 4})
    ops = {"op0": ("n",), "op1": ("n",), "op2": ("d1",)}
    stage = Stage(name="s0", ops=graph.op_names, replicas=(replica,),
                  sharding=Sharding(ops=ops, tensors={"y0": ("S1",), "y1": ("S1",), "y2": ("S1",)}))
    local = local_tensors(graph, stage, replica, np.arange(4), NOTHING)
    item = local[graph.tensor_index["y0"]]
    assert item == LocalTensor(made=0.25, read=0.25, takers=frozenset((1,)), taken=1.0, taken_room=1.0, returned_room=1.0)
    without = {**local, graph.tensor_index["y0"]: LocalTensor(made=0.25, read=0.25)}
    taken, plain = (stage_memory(graph, np.arange(4), num_samples=graph.batch, training=True, crossing=NOTHING, local=parts)
                    for parts in (local, without))
    assert taken.forward_peak >= plain.forward_peak + 128
    assert taken.backward_work > plain.backward_work


def test_one_device_has_everything() -> None:
    graph, replica = graph_of(), Replica(devices=("d0",), mesh={"tensor": 1})
    stage = Stage(name="s0", ops=graph.op_names, replicas=(replica,), sharding=Sharding(ops=SPLIT, tensors={"y0": ("S1",)}))
    assert local_tensors(graph, stage, replica, OPS, NOTHING) == {}


def memory(graph: Graph, **words: dict[str, tuple[str, ...]]) -> StageMemory:
    local = {graph.tensor_index[name]: item for name, item in found(graph, **words).items()}
    return stage_memory(graph, OPS, num_samples=1, training=True, crossing=NOTHING, local=local)


def test_parts_count_and_a_gathered_tensor_is_memory_of_its_own() -> None:
    whole = memory(graph_of())
    assert (whole.saved, whole.forward_peak) == (128 + 128 + 4, 260)
    split = memory(graph_of(), ops=SPLIT, tensors={"y0": ("S1",)}, made={"y0": ("S1",)})
    assert split.saved == 32 + 128 + 4
    gathered = memory(graph_of(), ops={"op0": ("n",)}, made={"y0": ("S1",)})
    assert gathered.saved == 128 + 128 + 4  # the reader keeps what it reads, the part that was made is let go of
    assert gathered.forward_peak == 32 + 128 + 128  # part, whole, and the parts as they arrive; y1 is not yet there


def test_an_operator_that_needs_its_result_keeps_it_as_made() -> None:
    words = {"ops": SPLIT, "made": {"y0": ("S1",)}}
    assert memory(graph_of(("aten.relu", "b", "c")), **words).saved == 32 + 128 + 128 + 4


def test_scores_that_a_loss_over_split_classes_reads_are_not_kept() -> None:
    words = {"ops": {"op1": ("classes",)}, "tensors": {"y0": ("S1",)}}
    kept, not_kept = (memory(graph_of(("aten.log_softmax", kind, "c")), **words).saved
                      for kind in ("b", "aten.nll_loss_nd"))
    assert kept - not_kept == 32


def test_what_a_backward_takes_while_it_runs_counts_beside_what_is_there() -> None:
    plain = memory(graph_of())
    roomy = memory(replace(graph_of(), backward_room_bytes=np.asarray([0.0, 0.0, 128.0])))
    assert roomy.backward_work >= plain.backward_work
    assert roomy.backward_work == 128 + 4 + 128 + 16  # and what is new for its parameter


def test_an_operator_that_takes_more_of_a_tensor_than_others_has_the_room_for_that() -> None:
    """Was: the room inside a Fourier transform of a whole tensor was that of the half which the others read."""
    tensor = LocalTensor(made=0.5, read=0.5, takers=frozenset((3,)), taken=1.0)
    assert [tensor.part_for(op) for op in (2, 3)] == [0.5, 1.0]
