"""Who holds which part of a parameter, and among whom its gradient has to be summed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worlds import chain_graph
from weft.model.graph import Graph, TensorRole
from weft.plan.holders import exchange_sets, layout_problems, parameter_copies, parameter_holdings, parameter_parts
from weft.plan.plan import ClusterRef, ModelRef, Plan, Replica, Sharding, Stage
from weft.plan.sharding import format_layout, parse_layout


def world(*stages: tuple[list[Replica], dict[str, tuple[str, ...]]]) -> tuple[Plan, Graph]:
    """Return one operator for each stage, all with one parameter of 6 entries."""
    graph = chain_graph(len(stages), parameter_bytes=24, tied=tuple((0, index) for index in range(1, len(stages))))
    made = tuple(Stage(name=f"s{index}", ops=(f"op{index}",), replicas=tuple(replicas), sharding=Sharding(tensors=tensors))
                 for index, (replicas, tensors) in enumerate(stages))
    plan = Plan(model=ModelRef(name="chain", digest=graph.digest, batch=4), microbatches=1, stages=made, order={},
                cluster=ClusterRef(digest="", devices=("a", "b", "c", "d")))
    return plan, graph


def mesh(devices: str, **axes: int) -> Replica:
    return Replica(devices=tuple(devices), mesh=axes)


SETS = {
    "one device": ([([mesh("a")], {})], []),
    "two replicas": ([([mesh("a"), mesh("b")], {})], ["ab"]),
    "all do the same": ([([mesh("abcd", t=4)], {})], []),
    "parts": ([([mesh("abcd", t=4)], {"w0": ("S0",)})], []),
    "sums": ([([mesh("abcd", t=4)], {"w0": ("R:P",)})], ["abcd"]),
    "parts on one axis, sums on the other": ([([mesh("abcd", d=2, t=2)], {"w0": ("R:P", "S0")})], ["ac", "bd"]),
    "sums on one axis, equal on the other": ([([mesh("abcd", d=2, t=2)], {"w0": ("R:P", "R")})], ["ac", "bd"]),
    "replicas of parts": ([([mesh("ab", t=2), mesh("cd", t=2)], {"w0": ("S0",)})], ["ac", "bd"]),
    "replicas in which all do the same": ([([mesh("ab", t=2), mesh("cd", t=2)], {})], ["ac", "bd"]),
    "the same parts in two stages": ([([mesh("abcd", t=4)], {"w0": ("S0",)})] * 2, []),
    "two stages of other shape": ([([mesh("ab", t=2)], {}), ([mesh("c")], {})], ["abc"]),
    "two stages on the same devices": ([([mesh("ab", t=2)], {}), ([mesh("a")], {})], ["ab"]),
}


@pytest.mark.parametrize("case", SETS)
def test_exchange_sets(case):
    stages, expected = SETS[case]
    plan, graph = world(*stages)
    found = exchange_sets(plan, graph)
    assert ["".join(members) for sets in found.values() for members in sets] == expected
    assert not list(layout_problems(plan, graph))


def test_gradients_of_frozen_parameters_are_not_exchanged():
    plan, graph = world(([mesh("a"), mesh("b")], {}))
    assert exchange_sets(plan, graph)
    assert not exchange_sets(plan, replace(graph, is_frozen=graph.tensor_role == TensorRole.PARAMETER))


def test_uneven_parts_and_their_sizes():
    plan, graph = world(([mesh("abcd", t=4)], {"w0": ("S0",)}))
    tensor = graph.tensor_index["w0"]
    held = parameter_holdings(plan, graph)[tensor]
    assert [held[device][0].region for device in "abcd"] == [(((0, 2),),), (((2, 4),),), (((4, 5),),), (((5, 6),),)]
    assert parameter_parts(plan, graph)[tensor] == dict.fromkeys("abcd", pytest.approx(1 / 3))
    assert [item.devices for item in parameter_copies(plan, graph)[tensor]] == [("a",), ("b",), ("c",), ("d",)]


@pytest.mark.parametrize(("stages", "message"), [
    ([([mesh("ab", t=2)], {"w0": ("S0",)}), ([mesh("c")], {})], "laid out differently"),
    ([([mesh("ab", t=2), mesh("c", t=1)], {"w0": ("S0",)})], "laid out differently"),
    ([([mesh("ab", t=2)], {"w0": ("S0",)}), ([mesh("ab", t=2)], {"w0": ("S0/3",)})], "'a' holds parameter 'w0' in two layouts"),
])
def test_parts_that_overlap_are_refused(stages, message):
    assert message in next(layout_problems(*world(*stages)))


@pytest.mark.parametrize("words", [("R", "S0"), ("R:P", "S1/3"), ("P", "S2x64"), ("S0:P", "R:S1")])
def test_words_of_layouts(words):
    assert format_layout(parse_layout(words)) == words


def test_a_bucket_counts_the_bytes_of_parts():
    from weft.plan.layout import build_layout
    from weft.search.common.problem import add_gradients

    plan, graph = world(([mesh("ab", t=2), mesh("cd", t=2)], {"w0": ("S0",)}))
    halves = tuple(replace(item, share=0.5) for item in plan.stages[0].replicas)
    plan = replace(plan, stages=(replace(plan.stages[0], replicas=halves),))
    buckets = build_layout(add_gradients(plan, graph), graph).buckets
    assert [(bucket.ranks, bucket.num_bytes) for bucket in buckets] == [((0, 2), 12), ((1, 3), 12)]
