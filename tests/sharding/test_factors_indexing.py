"""Factor rules of look-ups and writes by index, split in every way and compared with one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.factor_harness import MESHES, Checked, call_node, check_call, check_meshes
from weft.sharding.factor_rules import factors_of
from weft.sharding.factors import Factor

aten = torch.ops.aten


def check(target: object, *args: object, **kwargs: object) -> Checked:
    """Return all strategies checked on a line of three ranks and on a square of four."""
    return check_meshes(target, *args, meshes=((3,), (2, 2)), **kwargs)



def tensor(*shape: int) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def index(size: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random indices below ``size``."""
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(seed))


# ---- looking up -----------------------------------------------------------------------------------------------------


def test_rows_of_a_table():
    checked = check(aten.index.Tensor, tensor(6, 4), [index(6, 8)])
    assert checked.split == {"i0", "d1", "looked_up"}
    assert checked.op.linear == ((0,),)


def test_experts_of_a_layer_are_split_with_zeros_for_those_elsewhere():
    checked = check(aten.index.Tensor, tensor(5, 3, 2), [index(5, 4, 2)])
    assert checked.split == {"i0", "i1", "d1", "d2", "looked_up"}


def test_negative_indices_count_from_the_end_of_the_whole():
    assert "looked_up" in check(aten.index.Tensor, tensor(6, 4), [index(6, 8) - 6]).split


def test_taking_the_index_as_it_is_fails():
    """The control: without the local form a device would look up in its part what is in another."""
    args = (tensor(6, 4), [torch.tensor([0, 1, 2, 0])])
    op = factors_of(call_node(aten.index.Tensor, args, {})[0])
    assert op is not None
    plain = replace(op, factors=tuple(replace(factor, special=False) for factor in op.factors))
    with pytest.raises(AssertionError, match="split by looked_up"):
        check_call(aten.index.Tensor, *args, op=plain)


@pytest.mark.parametrize(("indices", "split"), [
    ([None, index(6, 4)], {"d0", "d2", "i0", "looked_up"}),
    ([None, None, index(4, 2, 3)], {"d0", "d1", "i0", "i1", "looked_up"}),
    ([index(4, 3, 1), index(6, 4)], {"d2", "i0", "i1"}),
    ([index(4, 3), None, index(4, 3)], {"d1", "i0"}),
    ([None, index(6, 3), index(4, 1)], {"d0", "i0"}),
    ([index(4, 2), index(6, 2), index(4, 2)], {"i0"}),
])
def test_several_indices_and_dimensions_in_between(indices, split):
    assert check(aten.index.Tensor, tensor(4, 6, 4), indices).split == split


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([None, "scalar", "row", "column", "table"]), min_size=1, max_size=3).filter(any),
       st.sampled_from(MESHES))
def test_random_indices(kinds, mesh):
    shapes = {"scalar": (), "row": (3,), "column": (4, 1), "table": (4, 3)}
    indices = [None if kind is None else index(4, *shapes[kind], seed=place) for place, kind in enumerate(kinds)]
    check_call(aten.index.Tensor, tensor(4, 5, 6)[:, :4], indices, mesh=mesh)


@pytest.mark.parametrize("num_rows", [4, 7, 12])
def test_rows_that_devices_ask_each_other_for(num_rows):
    """Both what is looked up and what asks are split, evenly or not; no part of a row is made twice."""
    args = tensor(9, 5), [index(9, num_rows)]
    op = factors_of(call_node(aten.index.Tensor, args, {})[0])
    names = [factor.name for factor in op.factors]
    joins = names.index("looked_up"), names.index("i0")
    asks = Factor(name="exchanged", size=min(9, num_rows), special=True, joins=joins)
    for mesh in ((2,), (3,), (2, 2)):
        checked = check_call(aten.index.Tensor, *args, mesh=mesh, op=replace(op, factors=(*op.factors, asks)))
        assert "exchanged" in checked.split
        assert not [item for item in checked.strategies if len(op.factors) in item and set(joins) & set(item)]


def test_the_same_index_twice():
    rows = index(4, 6)
    assert check(aten.index.Tensor, tensor(4, 4), [rows, rows]).split == {"i0"}


def test_a_mask_is_not_split():
    mask = torch.tensor([True, False, True, True])
    assert factors_of(call_node(aten.index.Tensor, (tensor(4), [mask]), {})[0]) is None


def test_parts_of_truth_values_are_not_summed():
    assert check(aten.index.Tensor, tensor(4, 3) > 0, [index(4, 6)]).split == {"i0", "d1"}
    assert check(aten.index_select.default, tensor(4, 3) > 0, 1, index(3, 6)).split == {"i0", "d0"}


@pytest.mark.parametrize("dim", [0, -2, 2])
def test_index_select(dim):
    checked = check(aten.index_select.default, tensor(4, 4, 4), dim, index(4, 6))
    assert checked.split == {"i0", "looked_up", *(f"d{other}" for other in range(3) if other != dim % 3)}


@pytest.mark.parametrize(("shape", "rows", "dim", "split"), [
    ((4, 6), (4, 3), 1, {"d0", "d1"}), ((4, 6), (4, 6), -1, {"d0", "d1"}), ((4, 6), (3, 6), -2, {"d0", "d1"}),
    ((4, 6), (2, 6), 1, {"d1"}), ((4, 6, 2), (4, 1, 2), 1, {"d0", "d2"})])
def test_gather(shape, rows, dim, split):
    checked = check(aten.gather.default, tensor(*shape), dim, index(shape[dim], *rows))
    assert checked.split == split
    assert checked.op.linear == ((0,),)


def test_one_hot():
    assert check(aten.one_hot.default, index(5, 4, 3), 5).split == {"d0", "d1"}
    assert factors_of(call_node(aten.one_hot.default, (index(5, 4), -1), {})[0]) is None


# ---- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "linear"), [(aten.scatter.src, ((0, 2),)), (aten.scatter_add.default, ((0, 2),))])
def test_scatter(target, linear):
    rows = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:3] for seed in range(4)])
    checked = check(target, tensor(4, 6), 1, rows, tensor(4, 3))
    assert (checked.split, checked.op.linear) == ({"d0"}, linear)
    assert check(target, tensor(4, 6), 1, rows[:2], tensor(2, 3)).split == set()


def test_scatter_of_numbers_and_reductions():
    rows = index(6, 4, 3)
    assert check(aten.scatter.value, tensor(4, 6), -1, rows, 2.0).split == {"d0"}
    assert check(aten.scatter_reduce.two, tensor(4, 6), -1, rows, tensor(4, 3), "amax").split == {"d0"}


@pytest.mark.parametrize("target", [aten.index_add.default, aten.index_copy.default])
def test_index_add(target):
    checked = check(target, tensor(6, 4), 0, torch.tensor([4, 1, 3]), tensor(3, 4))
    assert (checked.split, checked.op.linear) == ({"d1"}, ((0, 2),))


@pytest.mark.parametrize(("target", "shape", "args", "split"), [
    (aten.slice_scatter.default, (4, 3, 2), [1, 2, 5], {"d0", "d2"}),
    (aten.slice_scatter.default, (4, 6, 2), [-2], {"d0", "d2"}),
    (aten.select_scatter.default, (4, 6), [-1, 1], {"d0", "d1"}),
])
def test_writing_slices(target, shape, args, split):
    checked = check(target, tensor(4, 6, 2), tensor(*shape), *args)
    assert (checked.split, checked.op.linear) == (split, ((0, 1),))


def test_index_fill():
    assert check(aten.index_fill.int_Scalar, tensor(6, 4), 1, torch.tensor([2, 0]), 0.0).op.linear == ((0,),)
    assert check(aten.index_fill.int_Scalar, tensor(6, 4), 1, torch.tensor([2, 0]), 1.0).op.linear == ()


@pytest.mark.parametrize(("indices", "values", "split"), [
    ([torch.tensor([1, 3, 0])], (3, 6, 2), {"d1", "d2"}),
    ([torch.tensor([1, 3, 0])], (6, 2), {"d1", "d2"}),
    ([torch.tensor([1, 3, 0])], (), {"d1", "d2"}),
    ([torch.tensor([1, 3, 0])], (3, 1, 2), {"d1", "d2"}),
    ([None, torch.tensor([5, 2])], (4, 2, 2), {"d0", "d2"}),
    ([torch.tensor([1, 3]), None, torch.tensor([0, 1])], (2, 6), {"d1"}),
])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(indices, values, split, accumulate):
    checked = check(aten.index_put.default, tensor(4, 6, 2), indices, tensor(*values), accumulate)
    assert checked.split == split
