"""Factor rules of operators entry by entry, reductions and constants, split in every way and compared with one piece."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.factor_harness import MESHES, Checked, call_node, check_call, check_meshes
from weft.sharding.factor_rules import elementwise, factors_of
from weft.sharding.factor_rules.common import RULES

aten = torch.ops.aten


def check(target: object, *args: object, **kwargs: object) -> Checked:
    """Return all strategies checked on a line of three ranks and on a square of four."""
    return check_meshes(target, *args, meshes=((3,), (2, 2)), **kwargs)


POINTWISE = sorted(target for target, function in RULES.items() if function is elementwise._pointwise
                   and target != "aten.empty_like.default")

UNTAGGED = {"hardswish", "log_sigmoid", "special_expit", "special_ndtr", "fix", "absolute", "greater", "greater_equal",
            "less", "less_equal", "not_equal", "isclose", "__and__", "__or__", "floor_divide", "zeros_like", "ones_like",
            "full_like", "zero", "fill"}
"""Operators entry by entry that PyTorch does not tag so: they are made of others that it does, or read only the shape."""


def tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return numbers between 0.1 and 0.9 (integers: 1 to 5), the same for the same shape."""
    generator = torch.Generator().manual_seed(len(shape) + math.prod(shape))
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype, generator=generator) * 0.8 + 0.1
    return torch.randint(1, 6, shape, generator=generator).to(dtype)


def overload(target: str) -> Any:
    """Return the operator that a rule's name means."""
    _, name, kind = target.split(".")
    return getattr(getattr(aten, name), kind)


def arguments(target: Any, dtype: torch.dtype) -> list[Any]:
    """Return arguments that the operator's schema asks for; tensors need to be broadcast."""
    shapes = itertools.cycle([(4, 3), (2, 1, 3), (3,)])
    made: list[Any] = []
    for item in target._schema.arguments:
        kind = str(item.type)
        if item.kwarg_only or (item.has_default_value() and "Tensor" not in kind):
            break
        made.append(tensor(*next(shapes), dtype=dtype) if "Tensor" in kind else 1 if kind == "int" or
                    not dtype.is_floating_point else 0.5)
    return made


def accepts(target: Any, args: list[Any]) -> bool:
    """Return whether the operator takes the arguments."""
    try:
        target(*args)
    except (RuntimeError, NotImplementedError):
        return False
    return True


BOUNDS = {"aten.clamp.default": [0.3, 0.7], "aten.clip.default": [None, 0.7], "aten.round.decimals": [],
          "aten.clamp.Tensor": [tensor(3)], "aten.clip.Tensor": [tensor(3), tensor(4, 1)]}
"""What follows the tensor for operators whose schema says too little."""

NO_DERIVATIVE = {"aten.floor_divide.Scalar", "aten.floor_divide.default", "aten.heaviside.default",
                 "aten.remainder.Scalar_Tensor"}


@pytest.mark.parametrize("name", POINTWISE)
def test_every_operator_entry_by_entry(name):
    target = overload(name)
    assert torch.Tag.pointwise in target.tags or name.split(".")[1] in UNTAGGED
    given = [[tensor(4, 3), *BOUNDS[name]]] if name in BOUNDS else \
        [arguments(target, dtype) for dtype in (torch.float64, torch.int64)]
    more = {"decimals": 1} if name.endswith("decimals") else {}
    args = next(args for args in given if name in BOUNDS or accepts(target, args))
    shape = target(*args, **more).shape
    checked = check_call(target, *args, mesh=(2,), no_gradient=args if name in NO_DERIVATIVE else [], **more)
    assert checked.split == {f"d{dim}" for dim in range(len(shape))}
    assert checked.op.linear == ()


@st.composite
def broadcast_pairs(draw):
    full = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    def part():
        cut = draw(st.integers(0, len(full)))
        return [size if draw(st.booleans()) else 1 for size in full[cut:]]
    return part(), part()


@settings(max_examples=40, deadline=None)
@given(broadcast_pairs(), st.sampled_from(MESHES), st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor]))
def test_broadcasting(shapes, mesh, target):
    check_call(target, tensor(*shapes[0]), tensor(*shapes[1]) + 1, mesh=mesh)


# ---- in which operands operators are linear ---------------------------------------------------------------------------

X, Y, ROW, MASK = tensor(4, 3), tensor(4, 3) + 0.5, tensor(3), tensor(4, 3) > 0.5


@pytest.mark.parametrize(("target", "args", "linear"), [
    (aten.add.Tensor, [X, Y], [(0, 1)]), (aten.add.Tensor, [X, ROW], [(0, 1)]), (aten.add.Tensor, [X, 1.5], []),
    (aten.add.Tensor, [X, 0], [(0,)]), (aten.add.Tensor, [X, X], [(0,)]), (aten.sub.Tensor, [X, Y], [(0, 1)]),
    (aten.rsub.Tensor, [X, Y], [(0, 1)]), (aten.rsub.Scalar, [X, 1.0], []), (aten.add.Scalar, [X, 2], []),
    (aten.mul.Tensor, [X, Y], [(0,), (1,)]), (aten.mul.Tensor, [X, X], []), (aten.mul.Tensor, [X, 2.0], [(0,)]),
    (aten.mul.Scalar, [X, 2.0], [(0,)]), (aten.mul.Tensor, [X, MASK], [(0,)]),
    (aten.div.Tensor, [X, Y], [(0,)]), (aten.div.Tensor, [X, X], []), (aten.div.Tensor, [X, 8], [(0,)]),
    (aten.neg.default, [X], [(0,)]), (aten.clone.default, [X], [(0,)]), (aten.contiguous.default, [X], [(0,)]),
    (aten.detach.default, [X], [(0,)]), (aten.alias.default, [X], [(0,)]),
    (aten.to.dtype, [X, torch.float64], [(0,)]), (aten.to.dtype, [X, torch.int64], []),
    (aten._to_copy.default, [X], [(0,)]), (aten.to.dtype, [MASK, torch.float64], []),
    (aten.type_as.default, [X, Y], [(0,)]), (aten.type_as.default, [X, ROW], [(0,)]),
    (aten.where.self, [MASK, X, Y], [(1, 2)]), (aten.where.ScalarOther, [MASK, X, 0.0], [(1,)]),
    (aten.where.ScalarOther, [MASK, X, -1.0], []), (aten.where.ScalarSelf, [MASK, 0, X], [(1,)]),
    (aten.where.self, [MASK, X, X], [(1,)]),
    (aten.masked_fill.Scalar, [X, MASK, 0.0], [(0,)]), (aten.masked_fill.Scalar, [X, MASK, -100.0], []),
    (aten.masked_fill.Tensor, [X, MASK, tensor()], [(0, 2)]),
    (aten.dropout.default, [X, 0.5, False], [(0,)]), (aten.dropout.default, [X, 0.0, True], [(0,)]),
    (aten.fill.Tensor, [X, tensor()], [(1,)]),
    (aten.gelu.default, [X], []), (aten.maximum.default, [X, Y], []),
    (aten.sum.default, [X], [(0,)]), (aten.mean.dim, [X, [0]], [(0,)]), (aten.cumsum.default, [X, 0], [(0,)]),
    (aten.amax.default, [X, [0]], []), (aten.sum.default, [MASK], []),
])
def test_sums_pass_through_linear_operators_only(target, args, linear):
    assert list(check(target, *args).op.linear) == linear


def test_division_that_rounds_is_not_linear():
    assert check(aten.div.Tensor_mode, X, Y, rounding_mode=None).op.linear == ((0,),)
    assert check(aten.div.Tensor_mode, X, Y, rounding_mode="floor").op.linear == ()


def test_dropout_that_drops_is_not_linear_and_split_by_entries():
    op = factors_of(call_node(aten.dropout.default, (X, 0.5, True), {})[0])
    assert op is not None
    assert (op.linear, [factor.name for factor in op.factors]) == ((), ["d0", "d1"])
    assert check(aten.native_dropout.default, X, 0.5, False).split == {"d0", "d1"}


def test_a_copy_is_linear_in_what_is_copied():
    assert check(aten.copy.default, X, ROW, no_gradient=[X, ROW]).op.linear == ((1,),)


def test_numbers_are_added_once():
    """The control: a rule that took ``x + 1`` for linear would add the 1 on every device."""
    from dataclasses import replace

    op = factors_of(call_node(aten.add.Tensor, (X, 1.0), {})[0])
    assert op is not None
    with pytest.raises(AssertionError, match="sum of inputs"):
        check_call(aten.add.Tensor, X, 1.0, op=replace(op, linear=((0,),)))


@pytest.mark.parametrize(("weight", "split"), [(4, {"d0", "d1", "d2"}), (1, {"d0", "d1", "d2"})])
def test_prelu(weight, split):
    assert check(aten.prelu.default, tensor(4, 4, 2) - 0.5, tensor(weight)).split == split


@pytest.mark.parametrize("dim", [-1, 0])
def test_gated_halves_are_split_in_blocks(dim):
    assert check(aten.glu.default, tensor(8, 8), dim).split == {"d0", "d1"}


# ---- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dims", "keep"), [([0], False), ([-1], True), ([0, 2], False), ([], False), (None, True)])
@pytest.mark.parametrize("target", [aten.sum.dim_IntList, aten.mean.dim])
def test_parts_of_sums_and_means_are_summed(target, dims, keep):
    checked = check(target, tensor(4, 3, 5), dims, keep)
    assert checked.split == {"d0", "d1", "d2"}
    assert any(factor.special for factor in checked.op.factors) == (target is aten.mean.dim)


def test_sums_of_everything():
    assert check(aten.sum.default, tensor(4, 3)).split == {"d0", "d1"}
    assert check(aten.mean.default, tensor(7, 3)).split == {"d0", "d1"}
    assert check(aten.sum.default, tensor()).split == set()
    assert check(aten.mean.dim, tensor(4, 3, dtype=torch.int64), [0], dtype=torch.float64).split == {"d0", "d1"}
    assert check(aten.sum.dim_IntList, tensor(4, 3, dtype=torch.int64), [1]).split == {"d0", "d1"}


def test_a_mean_of_parts_is_not_the_mean_of_means():
    """The control: without the local form a device would divide by the size of its own part."""
    from dataclasses import replace

    op = factors_of(call_node(aten.mean.default, (X,), {})[0])
    assert op is not None
    plain = replace(op, factors=tuple(replace(factor, special=False) for factor in op.factors))
    with pytest.raises(AssertionError, match="split by d0"):
        check_call(aten.mean.default, X, op=plain)


@pytest.mark.parametrize(("target", "args", "split"), [
    (aten.amax.default, [[1]], {"d0", "d2"}), (aten.amin.default, [[-1], True], {"d0", "d1"}),
    (aten.amax.default, [], set()), (aten.max.dim, [1], {"d0", "d2"}), (aten.min.dim, [-1, True], {"d0", "d1"}),
    (aten.max.default, [], set()), (aten.prod.dim_int, [0], {"d1", "d2"}), (aten.prod.default, [], set()),
    (aten.var.correction, [[1]], {"d0", "d2"}), (aten.var.default, [], set()), (aten.std.dim, [[0]], {"d1", "d2"}),
    (aten.var_mean.correction, [[0, 1]], {"d2"}), (aten.logsumexp.default, [[2]], {"d0", "d1"}),
    (aten.argmax.default, [1], {"d0", "d2"}), (aten.argmax.default, [], set()),
    (aten.argmin.default, [-1, True], {"d0", "d1"}), (aten.median.dim, [0], {"d1", "d2"}),
    (aten.linalg_vector_norm.default, [2, [1]], {"d0", "d2"}), (aten.cumsum.default, [1], {"d0", "d2"}),
    (aten.cumprod.default, [-1], {"d0", "d1"}), (aten.topk.default, [2], {"d0", "d1"}),
    (aten.topk.default, [3, 0, False], {"d1", "d2"}), (aten.sort.default, [1, True], {"d0", "d2"}),
    (aten.argsort.default, [], {"d0", "d1"}), (aten.cummax.default, [1], {"d0", "d2"}),
    (aten.kthvalue.default, [2, 1], {"d0", "d2"}), (aten.count_nonzero.dim_IntList, [[0]], {"d1", "d2"}),
])
def test_what_other_reductions_reduce_is_whole(target, args, split):
    assert check(target, tensor(4, 3, 5), *args).split == split


@pytest.mark.parametrize(("target", "args", "split"), [(aten.any.dim, [1], {"d0"}), (aten.all.dim, [-2, True], {"d1"}),
                                                       (aten.any.dims, [[1]], {"d0"})])
def test_truth_over_a_dimension(target, args, split):
    assert check(target, tensor(4, 3) > 0.5, *args).split == split


# ---- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "args"), [(aten.zeros.default, [[4, 3]]), (aten.ones.default, [[4, 3]]),
                                              (aten.full.default, [[4, 3], 2.5])])
def test_constants_have_the_shape_of_a_part(target, args):
    assert check(target, *args).split == {"d0", "d1"}
    assert check(target, *args, dtype=torch.float32).split == {"d0", "d1"}


@pytest.mark.parametrize(("target", "args"), [(aten.new_zeros.default, [[4, 3]]), (aten.new_full.default, [[4, 3], 1])])
def test_constants_of_the_type_of_a_tensor(target, args):
    assert check(target, tensor(5), *args).split == {"d0", "d1"}


@pytest.mark.parametrize(("target", "args"), [(aten.arange.default, [6]), (aten.arange.start, [2, 8]),
                                              (aten.eye.default, [4]), (aten.linspace.default, [0, 1, 5])])
def test_what_depends_on_the_position_is_not_split(target, args):
    op = factors_of(call_node(target, tuple(args), {})[0])
    assert op is not None
    assert op.factors == ()


def test_a_shape_given_by_name_is_not_split():
    assert factors_of(call_node(aten.zeros.default, (), {"size": [4]})[0]) is None
