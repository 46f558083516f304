"""How experts are assumed to be loaded, over how many devices they divide, and what is said about it."""

from __future__ import annotations

import pytest

from tests.run.plans import traced
from weft.base.errors import InputError
from weft.cluster import read_cluster
from weft.plan.expert_load import check_degree, largest_share, parse_load, rows_by_experts
from weft.plan.notes import load_notes

MOE = "mixtral-8x:layers=1,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=64,seq=8"
DENSE = "gpt2-tiny"


def test_loads_are_shares_of_all_rows() -> None:
    assert parse_load("even", 4) == (0.25,) * 4
    assert parse_load("1, 1, 2, 0", 4) == (0.25, 0.25, 0.5, 0.0)
    assert parse_load("power:1", 2) == pytest.approx((2 / 3, 1 / 3))
    assert largest_share(parse_load("0.1,0.2,0.3,0.4", 4), 2) == pytest.approx(0.7)
    assert largest_share(parse_load("even", 8), 4) == 0.25


@pytest.mark.parametrize("text", ["uneven", "power", "power:x", "1,2", "0,0,0,0", "1,1,1,-1", "inf,1,1,1", "nan,1,1,1", ""])
def test_other_loads_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not even, power:1\.2, or 4 shares"):
        parse_load(text, 4)


def test_what_is_assumed_is_said() -> None:
    graph = traced(MOE).graph
    assert rows_by_experts(graph) == {8: 2 * 8 * 2}
    assert list(load_notes(graph, "even")) == [
        "all 8 experts are assumed to be chosen equally often: 4 rows each of the 32 for 2 samples"]
    (note,) = load_notes(graph, "power:1")
    assert "36.8% are assumed to fall on one" in note
    assert list(load_notes(traced(DENSE).graph, "even")) == []


@pytest.mark.parametrize(("model", "cluster", "degree", "message"), [
    (DENSE, "4 x A100-80GB", 2, "has none: leave it out"),
    (MOE, "4 x A100-80GB", 3, "the 8 experts of a layer cannot be divided evenly over 3 .* try 2"),
    (MOE, "4 x A100-80GB", 8, "which has 4 at most; try 4"),
    (MOE, "1 x A100-80GB", 2, "try 1"),
])
def test_degrees_that_cannot_be_are_refused_with_the_nearest_that_can(model: str, cluster: str, degree: int,
                                                                     message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_degree(traced(model).graph, read_cluster(cluster), degree)


def test_a_degree_that_divides_is_taken() -> None:
    check_degree(traced(MOE).graph, read_cluster("4 x A100-80GB"), 4)
