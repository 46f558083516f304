"""Matrix products, convolutions, pools and lookups, split in every way their factors allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sharding.factor_harness import check_call, check_meshes
from weft.sharding.factors import Factor, OpFactors

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [(5,), (3, 4), (2, 3, 4), ()])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rows: tuple[int, ...], has_bias: bool) -> None:
    checked = check_meshes(aten.linear.default, rand(*rows, 7), rand(6, 7), *([rand(6)] if has_bias else []))
    assert checked.split == {"n", "k", *(f"b{dim}" for dim in range(len(rows)))}
    assert {factor.name for factor in checked.op.factors if factor.special} == ({"k"} if has_bias else set())
    assert checked.op.linear == (((0, 2), (1, 2)) if has_bias else ((0,), (1,)))
    assert checked.num_linear > 0


@pytest.mark.parametrize("added", [(6,), (5, 6), (1, 6), (5, 1), ()])
def test_addmm(added: tuple[int, ...]) -> None:
    checked = check_meshes(aten.addmm.default, rand(*added), rand(5, 7), rand(7, 6), beta=0.5, alpha=2.0)
    assert checked.split == {"m", "n", "k"}
    assert checked.op.linear == ((0, 1), (0, 2))


def test_baddbmm() -> None:
    assert check_meshes(aten.baddbmm.default, rand(4, 1, 6), rand(4, 5, 7), rand(4, 7, 6)).split == {"b0", "m", "n", "k"}


@pytest.mark.parametrize(("target", "left", "right", "factors"), [
    (aten.mm.default, (5, 7), (7, 6), "m n k"),
    (aten.bmm.default, (4, 5, 7), (4, 7, 6), "b0 m n k"),
    (aten.mv.default, (5, 7), (7,), "m k"),
    (aten.dot.default, (7,), (7,), "k"),
    (aten.matmul.default, (7,), (7,), "k"),
    (aten.matmul.default, (5, 7), (7,), "m k"),
    (aten.matmul.default, (7,), (7, 6), "k n"),
    (aten.matmul.default, (3, 5, 7), (7, 6), "b0 m n k"),
    (aten.matmul.default, (3, 1, 5, 7), (4, 7, 6), "b0 b1 m n k"),
    (aten.matmul.default, (7,), (3, 7, 6), "b0 n k"),
    (aten.matmul.default, (3, 5, 7), (7,), "b0 m k"),
])
def test_products(target: object, left: tuple[int, ...], right: tuple[int, ...], factors: str) -> None:
    checked = check_meshes(target, rand(*left), rand(*right))
    assert checked.split == set(factors.split())
    assert checked.op.linear == ((0,), (1,))


def test_a_product_of_a_tensor_with_itself_is_not_linear() -> None:
    x = rand(4, 1, 1)
    checked = check_call(aten.bmm.default, x, x)
    assert checked.split == {"b0"}
    assert checked.op.linear == ()


@pytest.mark.parametrize(("target", "x", "weight", "options", "factors"), [
    (aten.conv1d.default, (4, 6, 9), (5, 6, 3), (), "images in out"),
    (aten.conv1d.padding, (4, 6, 9), (5, 6, 3), ([1], "same"), "images in out"),
    (aten.conv2d.default, (5, 4, 6, 7), (6, 4, 3, 2), ([2, 1], [1, 1]), "images in out"),
    (aten.conv2d.default, (4, 6, 7), (6, 4, 3, 2), (), "in out"),
    (aten.conv2d.default, (3, 8, 5, 5), (12, 2, 3, 3), ([1, 1], [1, 1], [1, 1], 4), "images groups in out"),
    (aten.conv2d.default, (3, 8, 5, 5), (8, 1, 3, 3), ([1, 1], [1, 1], [1, 1], 8), "images groups"),
    (aten.conv3d.default, (2, 4, 4, 5, 3), (4, 4, 2, 2, 2), (), "images in out"),
    (aten.conv_transpose1d.default, (3, 4, 5), (4, 6, 3), ([2], [1], [1]), "images in out"),
    (aten.conv_transpose2d.input, (3, 8, 5, 4), (8, 3, 3, 2), ([2, 2], [1, 0], [1, 1], 4), "images groups in out"),
    (aten.convolution.default, (3, 4, 5), (4, 2, 3), ([2], [1], [1], True, [0], 2), "images groups in out"),
])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolutions(target: object, x: tuple[int, ...], weight: tuple[int, ...], options: tuple[object, ...],
                      factors: str, has_bias: bool) -> None:
    num_out = target(rand(*x), rand(*weight), None, *options).shape[len(x) - len(weight) + 1]
    bias = rand(num_out) if has_bias else None
    checked = check_meshes(target, rand(*x), rand(*weight), bias, *options)
    assert checked.split == set(factors.split())
    assert len(checked.op.linear) == 2


@pytest.mark.parametrize("padding", [-1, 3])
def test_embedding(padding: int) -> None:
    tokens = torch.randint(0, 11, (5, 6))
    tokens[0, :2] = 3
    checked = check_meshes(aten.embedding.default, rand(11, 7), tokens, padding)
    assert checked.split == {"t0", "t1", "d", "vocab"}
    assert checked.op.linear == ((0,),)


@pytest.mark.parametrize(("target", "args", "is_linear"), [
    (aten.avg_pool1d.default, ([2],), True),
    (aten.avg_pool2d.default, ([3, 3], [1, 1], [1, 1]), True),
    (aten.adaptive_avg_pool1d.default, ([3],), True),
    (aten.adaptive_avg_pool2d.default, ([2, 2],), True),
    (aten.max_pool2d.default, ([3, 3], [2, 2], [1, 1]), False),
    (aten.max_pool2d_with_indices.default, ([3, 3], [2, 2], [1, 1]), False),
    (aten.adaptive_max_pool2d.default, ([2, 2],), False),
    (aten.upsample_nearest2d.vec, (None, [2.0, 2.0]), True),
])
def test_pools(target: object, args: tuple[object, ...], is_linear: bool) -> None:
    shape = (5, 4, 8) if "1d" in str(target) else (5, 4, 6, 7)
    checked = check_meshes(target, rand(*shape), *args)
    assert checked.split == {"d0", "d1"}
    assert (checked.num_linear > 0) == is_linear


# ---- the harness sees wrong rules -----------------------------------------------------------------------------------

FACTORS = tuple(Factor(name=name, size=size) for name, size in zip("mnk", (5, 6, 7), strict=True))
PRODUCT = OpFactors(factors=FACTORS, inputs=(((0,), (2,)), ((2,), (1,))), outputs=(((0,), (1,)),),
                    linear=((0,), (1,)))


@pytest.mark.parametrize(("wrong", "message"), [
    (replace(PRODUCT, linear=((0, 1),)), "sum of inputs"),
    (replace(PRODUCT, inputs=(((0,), (2,)), ((2,), ()))), "split by n"),
    (replace(PRODUCT, outputs=(((0,), ()),)), "split by n"),
    (replace(PRODUCT, whole_outputs=(0,)), "split by k"),
    (replace(PRODUCT, inputs=(((0,), (2,)),)), "1 inputs described"),
    (replace(PRODUCT, inputs=(((0,), (2,)), ((1,), (2,)))), "do not make"),
])
def test_the_harness_catches_wrong_factors(wrong: OpFactors, message: str) -> None:
    left, right = rand(5, 7), rand(7, 6)
    assert len(check_meshes(aten.mm.default, left, right, op=PRODUCT).strategies) > 30
    with pytest.raises(AssertionError, match=message):
        check_meshes(aten.mm.default, left, right, op=wrong)


def test_the_harness_catches_a_bias_that_is_added_by_every_part() -> None:
    x, weight, bias = rand(5, 7), rand(6, 7), rand(6)
    right = check_call(aten.linear.default, x, weight, bias).op
    wrong = replace(right, factors=tuple(replace(factor, special=False) for factor in right.factors))
    with pytest.raises(AssertionError, match="split by k: result 0 in layout P"):
        check_call(aten.linear.default, x, weight, bias, op=wrong)


def test_the_harness_catches_a_wrong_gradient() -> None:
    """Softmax over split rows of equal scores: values agree whatever is split, gradients do not."""
    x = torch.zeros(4, 6, dtype=torch.float64)
    wrong = OpFactors(factors=(Factor(name="c", size=6),), inputs=(((), ()),), outputs=(((), (0,)),))
    with pytest.raises(AssertionError, match="split by c"):
        check_call(aten.softmax.int, x, 1, op=wrong)
