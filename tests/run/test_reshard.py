"""Resharding against what layouts mean: every part, cut from the whole by its ranges; and what it costs."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.run.threads import on_ranks
from weft.plan.sharding import coordinates_of
from weft.run.mesh import Change, ReplicaMesh, Reshard
from weft.run.parameters import cut_region, put_region
from weft.sharding.layout_steps import find_steps
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, dim_ranges, parse_placement


def layout(*words: str) -> Layout:
    return tuple(parse_placement(word) for word in words)


def part_of(whole: Tensor, places: Layout, mesh: tuple[int, ...], coordinates: tuple[int, ...]) -> Tensor:
    """Return a device's part by the ranges alone; of sums, a different share at each coordinate."""
    result = whole
    for dim, ranges in enumerate(dim_ranges(whole.shape, places, mesh, coordinates)):
        result = torch.cat([result.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    for axis, place in enumerate(places):
        if place == SUM:
            count = mesh[axis]
            weight = coordinates[axis] + 1.0 if coordinates[axis] < count - 1 else 1.0 - sum(range(1, count))
            result = result * weight
    return result


def summed(parts: dict[tuple[int, ...], Tensor], places: Layout, coordinates: tuple[int, ...]) -> Tensor:
    """Return the sum over the axes that hold sums."""
    chosen = [value for other, value in parts.items()
              if all(place == SUM or a == b for place, a, b in zip(places, coordinates, other, strict=True))]
    return torch.stack(chosen).sum(0)


def check_change(shape: tuple[int, ...], mesh: tuple[int, ...], source: Layout, target: Layout,
                 weights: tuple[float, ...] = ()) -> Counter[str]:
    """Check that all parts come out right on ranks in an odd order; return what the first rank issued."""
    whole = torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)
    ranks = list(range(torch.Size(mesh).numel()))
    random.Random(1).shuffle(ranks)

    def run(transport):
        devices = ReplicaMesh(transport, ranks, mesh, weights)
        change = Change(devices, shape, source, target)
        return devices.coordinates, change(part_of(whole, source, mesh, devices.coordinates)), devices.counts

    results = on_ranks(len(ranks), run)
    parts = {coordinates: value for coordinates, value, _ in results}
    plain = tuple(WHOLE if place == SUM else place for place in target)
    for coordinates in parts:
        expected = part_of(whole, plain, mesh, coordinates)
        torch.testing.assert_close(summed(parts, target, coordinates), expected, rtol=1e-12, atol=1e-12)
    return results[0][2]


WORDS = ("R", "P", "S0", "S1", "S1/2", "S0x2")
NO_SUM = [word for word in WORDS if word != "P"]


@pytest.mark.parametrize(("source", "target"), itertools.product(WORDS, WORDS))
@pytest.mark.parametrize("size", [2, 3])
def test_every_change_on_one_axis(source, target, size):
    check_change((8, 14), (size,), layout(source), layout(target))


CASES = random.Random(0).sample([
    (shape, mesh, source, target)
    for shape in ((8, 12), (9, 10)) for mesh in ((2, 2), (2, 3), (3, 2))
    for source in itertools.product(WORDS, WORDS) for target in itertools.product(WORDS, WORDS)
    if all({pair[0][:2], pair[1][:2]} != {pair[0][:2]} or pair[0] == pair[1] or "S" not in pair[0]
           for pair in (source, target))
    and not (shape == (9, 10) and "S0x2" in source + target)], 250)


@pytest.mark.parametrize("chunk", range(10))
def test_changes_on_two_axes(chunk, monkeypatch):
    """Layouts that split one dimension twice do so in the same blocks. Every other chunk is taken for large tensors."""
    monkeypatch.setattr("weft.sharding.layout_steps.SMALL_ENTRIES", chunk % 2 * 1000)
    for shape, mesh, source, target in CASES[chunk::10]:
        check_change(shape, mesh, layout(*source), layout(*target))


@pytest.mark.parametrize(("source", "target"), itertools.permutations(("R", "P", "S0/2z", "S0", "S1/4z", "S1"), 2))
def test_changes_in_zigzag(source, target):
    check_change((8, 24), (2,), layout(source), layout(target))
    check_change((12, 24), (3,), layout(source), layout(target))
    if source in ("R", "P") or target in ("R", "P"):
        check_change((8, 32), (2, 2), layout(source, source), layout(target, target))


@pytest.mark.parametrize("small", [0, 1000])
def test_three_axes(small, monkeypatch):
    monkeypatch.setattr("weft.sharding.layout_steps.SMALL_ENTRIES", small)
    check_change((12, 8), (2, 2, 2), layout("S0", "S0", "S0"), layout("S1", "S0", "R"))
    check_change((12, 8), (2, 2, 2), layout("P", "S0", "P"), layout("S0", "S0", "S1"))
    check_change((12, 8), (2, 2, 2), layout("P", "P", "P"), layout("R", "S0", "R"))
    check_change((8,), (2, 2, 2), layout("P", "P", "P"), layout("S0", "P", "S0"))


@pytest.mark.parametrize(("target", "counts"), [
    (("R", "R"), {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}),
    (("S0", "R"), {"reduce_scatter": 2, "all_gather": 1}),
    (("S0", "S0"), {"reduce_scatter": 2, "all_to_all": 1}),
    (("R", "P"), {"reduce_scatter": 1, "all_reduce": 1}),
])
def test_sums_of_large_tensors_are_scattered_along_the_fast_axis(target, counts, monkeypatch):
    monkeypatch.setattr("weft.sharding.layout_steps.SMALL_ENTRIES", 0)
    steps = find_steps(layout("P", "P"), layout(*target), (2, 2), (8, 12), (8.0, 1.0))
    assert [step.axis for step in steps][:2] == [1, 0]
    assert check_change((8, 12), (2, 2), layout("P", "P"), layout(*target), weights=(8.0, 1.0)) == counts


@pytest.mark.parametrize(("source", "target", "counts"), [
    ("R", "R", {}), ("R", "S0", {}), ("R", "P", {}), ("S0", "P", {}), ("P", "R", {"all_reduce": 1}),
    ("P", "S1", {"reduce_scatter": 1}), ("S0", "R", {"all_gather": 1}), ("S0", "S1", {"all_to_all": 1}),
    ("S1", "S1/2", {"all_gather": 1}),
])
def test_no_more_is_sent_than_must_be(source, target, counts):
    assert check_change((8, 12), (2,), layout(source), layout(target)) == counts


@pytest.mark.parametrize(("source", "target", "counts"), [
    (("P", "R"), ("R", "S0"), {"all_reduce": 1}),
    (("S0", "S0"), ("S0", "R"), {"all_gather": 1}),
    (("S0", "S0"), ("R", "S0"), {"all_gather": 2}),
    (("S0", "S0"), ("S1", "S0"), {"all_gather": 1, "all_to_all": 1}),
    (("S0", "P"), ("S0", "S0"), {"reduce_scatter": 1}),
    (("P", "P"), ("S0", "S0"), {"reduce_scatter": 2}),
    (("S0", "R"), ("S0", "S1"), {}),
])
def test_order_of_axes(source, target, counts):
    assert check_change((8, 12), (2, 2), layout(*source), layout(*target)) == counts


def test_free_cuts_come_before_what_is_sent():
    steps = find_steps(layout("P", "R"), layout("R", "S0"), (2, 2), (64, 64))
    assert [step.axis for step in steps] == [1, 0]


@pytest.mark.parametrize(("value", "gradient", "counts"), [
    (("R", "R"), ("R", "P"), ({}, {"all_reduce": 1})),
    (("P", "R"), ("R", "R"), ({"all_reduce": 1}, {})),
    (("S0", "R"), ("S0", "P"), ({"all_gather": 1}, {"reduce_scatter": 1})),
    (("R", "S0"), ("R", "S0"), ({}, {"all_gather": 1})),
], ids=["begin of a block", "end of a block", "gathered parameter", "cut"])
def test_gradients_have_layouts_of_their_own(value, gradient, counts):
    """The pairs of operators that Megatron-LM writes by hand."""
    whole = torch.arange(24.0, dtype=torch.float64).reshape(6, 4)

    def run(transport):
        mesh = ReplicaMesh(transport, [0, 1], (2,))
        there = Change(mesh, whole.shape, layout(value[0]), layout(value[1]))
        back = Change(mesh, whole.shape, layout(gradient[1]), layout(gradient[0]))
        leaf = part_of(whole, layout(value[0]), (2,), mesh.coordinates).requires_grad_()
        result = Reshard.apply(leaf, there, back)
        forward = dict(mesh.counts)
        mesh.counts.clear()
        result.backward(part_of(whole, layout(gradient[1]), (2,), mesh.coordinates))
        return result.detach(), leaf.grad, forward, dict(mesh.counts)

    for rank, (result, grad, forward, backward) in enumerate(on_ranks(2, run)):
        assert (forward, backward) == counts
        torch.testing.assert_close(result, part_of(whole, layout(value[1]), (2,), (rank,)))
        torch.testing.assert_close(grad, part_of(whole, layout(gradient[0]), (2,), (rank,)))


def test_coordinates_are_row_major():
    assert [coordinates_of(position, (2, 3)) for position in range(6)] == list(itertools.product(range(2), range(3)))


@pytest.mark.parametrize("words", [("R", "S0"), ("S0", "S0"), ("S1/2", "S0"), ("S1/3", "S1/3")])
def test_regions_are_cut_and_put_back(words):
    whole = torch.arange(6.0 * 24).reshape(6, 24)
    again = torch.zeros_like(whole)
    for coordinates in itertools.product(range(2), range(3)):
        region = dim_ranges(whole.shape, layout(*words), (2, 3), coordinates)
        part = cut_region(whole, region)
        torch.testing.assert_close(part, part_of(whole, layout(*words), (2, 3), coordinates))
        put_region(again, region, part.reshape(-1))
    assert torch.equal(again, whole)
