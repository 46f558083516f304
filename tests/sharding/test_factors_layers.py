"""Normalisations, softmax, attention and recurrent layers, split in every way their factors allow."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.factor_harness import call_node, check_call, check_meshes
from weft.sharding import local_ops
from weft.sharding.factor_rules import factors_of

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- normalisations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "normalized"), [((5, 7), (7,)), ((4, 5, 6), (6,)), ((5, 4, 3), (4, 3))])
def test_layer_norms(shape: tuple[int, ...], normalized: tuple[int, ...]) -> None:
    rows = {f"d{dim}" for dim in range(len(shape) - len(normalized))}
    x, weight, bias = rand(*shape), rand(*normalized), rand(*normalized)
    assert check_meshes(aten.layer_norm.default, x, normalized, weight, bias).split == rows
    assert check_meshes(aten.layer_norm.default, x, normalized).split == rows
    assert check_meshes(aten.native_layer_norm.default, x, normalized, weight, bias, 1e-5).split == rows
    assert check_meshes(aten.rms_norm.default, x, normalized, weight).split == rows


@pytest.mark.parametrize("target", [aten.softmax.int, aten.log_softmax.int])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax(target: object, dim: int) -> None:
    checked = check_meshes(target, rand(4, 5, 6), dim)
    assert checked.split == {"d0", "d1", "d2"} - {f"d{dim % 3}"}


@pytest.mark.parametrize("shape", [(5, 12, 3, 4), (4, 6)])
@pytest.mark.parametrize("is_affine", [True, False])
def test_group_norm(shape: tuple[int, ...], is_affine: bool) -> None:
    vectors = [rand(shape[1]), rand(shape[1])] if is_affine else []
    checked = check_meshes(aten.group_norm.default, rand(*shape), 3, *vectors, meshes=[(2,), (3,), (2, 2), (3, 2)])
    assert checked.split == {"images", "groups"}


@pytest.mark.parametrize("shape", [(5, 4, 3, 2), (6, 5), (7, 4, 3)])
@pytest.mark.parametrize("is_affine", [True, False])
def test_batch_norm_over_the_whole_batch(shape: tuple[int, ...], is_affine: bool) -> None:
    vectors = [rand(shape[1]), rand(shape[1])] if is_affine else [None, None]
    mean, variance = rand(shape[1]), rand(shape[1]).abs()
    for training in (True, False):
        checked = check_meshes(aten._native_batch_norm_legit_functional.default, 3 + 2 * rand(*shape), *vectors, mean,
                               variance, training, 0.1, 1e-5, no_gradient=[mean, variance])
        assert checked.split == {"images", "channels"}
        images = next(factor for factor in checked.op.factors if factor.name == "images")
        assert (images.forward_sums, images.backward_sums) == (
            ((8.0 * shape[1],) * 2, (16.0 * shape[1],)) if training else ((), ()))


def test_batch_norm_in_low_precision() -> None:
    mean, variance = torch.randn(4), torch.rand(4)
    checked = check_meshes(aten._native_batch_norm_legit_functional.default, rand(6, 4, 3).bfloat16(), torch.randn(4),
                           torch.randn(4), mean, variance, True, 0.1, 1e-5, no_gradient=[mean, variance],
                           tolerance=0.05)
    assert checked.split == {"images", "channels"}


def test_batch_norm_in_inference() -> None:
    mean, variance = rand(4), rand(4).abs()
    checked = check_meshes(aten.batch_norm.default, rand(5, 4, 3), rand(4), rand(4), mean, variance, False, 0.1, 1e-5,
                           False, no_gradient=[mean, variance])
    assert checked.split == {"images", "channels"}
    assert not any(factor.special for factor in checked.op.factors)


def test_batch_norm_of_each_part_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: statistics of a device's own images are not those of the batch."""
    class Alone:
        size, rank = 1, 0

        def all_reduce(self, tensor: torch.Tensor, how: str = "sum") -> torch.Tensor:
            return tensor * 2

    apply = local_ops._WholeBatchNorm.apply
    monkeypatch.setattr(local_ops._WholeBatchNorm, "apply",
                        lambda x, weight, bias, eps, _, count: apply(x, weight, bias, eps, Alone(), count))
    mean, variance = rand(3), rand(3).abs()
    with pytest.raises(AssertionError, match="split by images: result 0"):
        check_call(aten._native_batch_norm_legit_functional.default, rand(4, 3, 2), rand(3), rand(3), mean, variance,
                   True, 0.1, 1e-5, no_gradient=[mean, variance])


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", [5, 3, 8])
def test_attention(is_causal: bool, keys: int) -> None:
    checked = check_meshes(aten.scaled_dot_product_attention.default, rand(3, 4, 5, 4), rand(3, 4, keys, 4),
                           rand(3, 4, keys, 6), None, 0.0, is_causal)
    assert checked.split == {"b0", "heads", "rows", "width"}
    assert {factor.name for factor in checked.op.factors if factor.special} == ({"rows"} if is_causal else set())
    assert checked.op.linear == ((2,),)
    assert checked.num_linear > 0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv"), [(8, 2), (6, 3), (4, 1), (4, 4)])
def test_attention_with_fewer_key_heads(is_causal: bool, heads: int, kv: int) -> None:
    checked = check_meshes(aten.scaled_dot_product_attention.default, rand(2, heads, 5, 4), rand(2, kv, 5, 4),
                           rand(2, kv, 5, 3), None, 0.0, is_causal, scale=0.3, enable_gqa=True)
    by_heads = {"heads"} if heads == kv else {"group"} if kv == 1 else {"kv", "group"}
    assert checked.split == {"b0", "rows", "width"} | by_heads


@pytest.mark.parametrize("mask", [(3, 4, 5, 6), (1, 4, 5, 6), (3, 1, 1, 6), (5, 6), (4, 5, 6), (3, 1, 5, 1)])
def test_attention_with_a_mask(mask: tuple[int, ...]) -> None:
    checked = check_meshes(aten.scaled_dot_product_attention.default, rand(3, 4, 5, 4), rand(3, 4, 6, 4),
                           rand(3, 4, 6, 2), rand(*mask))
    assert checked.split == {"b0", "heads", "rows", "width"}


def test_attention_with_a_mask_of_truths_and_one_batch() -> None:
    mask = torch.rand(1, 1, 5, 6) > 0.4
    mask[..., 0] = True
    checked = check_meshes(aten.scaled_dot_product_attention.default, rand(3, 8, 5, 4), rand(3, 2, 6, 4),
                           rand(3, 2, 6, 2), mask, enable_gqa=True)
    assert checked.split == {"b0", "kv", "group", "rows", "width"}
    assert check_meshes(aten.scaled_dot_product_attention.default, rand(3, 5, 4), rand(3, 6, 4),
                        rand(3, 6, 2)).split == {"b0", "rows", "width"}


def test_attention_of_one_tensor_is_not_linear_in_it() -> None:
    x = rand(2, 4, 1, 1)
    checked = check_meshes(aten.scaled_dot_product_attention.default, rand(2, 4, 5, 1), x, x)
    assert checked.split == {"b0", "heads", "rows"}
    assert checked.op.linear == ()


def test_attention_that_draws_random_numbers_is_not_split() -> None:
    node, _ = call_node(aten.scaled_dot_product_attention.default, (rand(2, 4, 5, 4), rand(2, 4, 5, 4),
                                                                   rand(2, 4, 5, 4), None, 0.1), {})
    assert factors_of(node) is None


# ---- recurrent layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_lstm(batch_first: bool) -> None:
    x = rand(5, 3, 4) if batch_first else rand(3, 5, 4)
    weights = [rand(24, 4), rand(24, 6), rand(24), rand(24)]
    checked = check_meshes(aten.lstm.input, x, [rand(1, 5, 6), rand(1, 5, 6)], weights, True, 1, 0.0, True, False,
                           batch_first)
    assert checked.split == {"batch"}
