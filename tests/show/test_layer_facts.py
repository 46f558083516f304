from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worlds import chain_graph, pipeline
from weft.plan.lower import lower
from weft.plan.plan import Replica, Sharding
from weft.show.facts import OUTSIDE, Split, layer_facts, layer_path


def with_modules(num_ops: int, modules: dict[int, str]):
    graph, plan = pipeline("1f1b", num_ops, 2)
    graph = replace(graph, op_modules=tuple(modules.get(op, f"net.layers.{op}.fc") for op in range(num_ops)))
    return graph, replace(plan, model=replace(plan.model, digest=graph.digest))


def test_equal_layers_are_one_row_with_the_stages_that_run_them():
    graph, plan = with_modules(5, {0: "net.embed", 4: ""})
    rows = layer_facts(lower(plan, graph))
    assert [(row.title, row.count) for row in rows] == [("net.embed", 1), ("net.layers.1 - 3", 3), (OUTSIDE, 1)]
    assert rows[1].stages == (("s1", 1), ("s2", 1), ("s3", 1))
    assert (rows[1].num_ops, rows[1].parameter_bytes, rows[1].splits) == (1, 4, ())
    assert [row.work for row in rows] == pytest.approx([0.2, 0.6, 0.2])


def test_layers_that_differ_in_work_are_apart():
    graph, plan = with_modules(4, {})
    flops = graph.flops.copy()
    flops[2] = 7.0
    graph = replace(graph, flops=flops)
    plan = replace(plan, model=replace(plan.model, digest=graph.digest))
    assert [row.title for row in layer_facts(lower(plan, graph))] == ["net.layers.0 - 1, 3", "net.layers.2"]


def test_splits_are_in_the_words_of_people_and_part_layers_that_are_split_otherwise():
    graph = chain_graph(3, parameter_bytes=16)
    graph = replace(graph, op_modules=tuple(f"layers.{op}.fc" for op in range(3)),
                    op_names=tuple(f"layers.{op}.fc.linear" for op in range(3)))
    _, plan = pipeline("1f1b", 3, 2)
    stages = list(plan.stages)
    for index, word in ((0, "n"), (1, "n/3"), (2, "m")):
        stages[index] = replace(
            stages[index], ops=(graph.op_names[index],), replicas=(Replica(devices=(f"d{index}",), mesh={"tensor": 1}),),
            sharding=Sharding(ops={graph.op_names[index]: (word,)}, tensors={f"w{index}": ("S0",)} if index < 2 else {}))
    plan = replace(plan, stages=tuple(stages), model=replace(plan.model, digest=graph.digest))
    rows = layer_facts(lower(plan, graph))
    assert [row.splits for row in rows] == [
        (Split(("fc",), (("tensor", "column"),), ("tensor",)),), (Split(("fc",), (("tensor", "column"),), ("tensor",)),),
        (Split(("fc",), (("tensor", "samples"),), ()),)]


@pytest.mark.parametrize(("module", "path"), [("", ""), ("a.b", "a.b"), ("a.0", "a.0"), ("a.0.b.1.c", "a.0"),
                                              ("encoder.block.12.layer.0", "encoder.block.12")])
def test_a_layer_is_a_path_up_to_its_first_number(module, path):
    assert layer_path(module) == path
