"""Factors of matrix products, the lookup of embeddings, attention, convolutions and pools.

    linear  (b... k, n k, n) -> (b... n)        addmm  (m n, m k, k n) -> (m n)
    matmul  (b... m k, b... k n) -> (b... m n)  embedding  (vocab d, t...) -> (t... d)
    grouped (m k, e k n, e) -> (m n)            neither rows nor experts can be split: offsets say which meet

Where a bias is added to the product, ``k`` is special: only the first of its parts adds the bias, so that the sum of
all has it once. The vocabulary is special too: a device looks up the tokens that it has, for others it gives zeros.

    attention   (b... kv.group rows e, b... kv keys e, b... kv keys width, mask) -> (b... kv.group rows width)

Its keys are never split. Where queries have more heads than keys and values, ``kv`` are the heads of keys and ``group``
the queries of each. The rows are special in causal attention: a device's first row is not the first of all.

    convolution             (images g.in, g.out in, g.out) -> (images g.out)
    transposed convolution  (images g.in, g.in out, g.out) -> (images g.out)
    pool                    (images channels) -> (images channels)

What lies in space is never split. Groups are special, because the number of groups is an argument; the input channels
are where there is a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.sharding.factor_rules.common import Call, Items, Shape, aligned, rule, shape_of
from weft.sharding.factors import OpFactors


def linear_in(*groups: Sequence[Any]) -> list[list[Any]]:
    """Return the sets of nodes in which a product is linear, without missing ones; none if they share a tensor."""
    given = [[node for node in group if node is not None] for group in groups]
    firsts = [group[0] for group in given]
    return given if len(set(firsts)) == len(firsts) else []


@rule("aten.linear.default")
def linear(call: Call) -> OpFactors | None:
    """Return the factors of ``x @ weight.T + bias``."""
    x, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if len(shape_of(weight)) != 2:
        return None
    (n_size, k_size), rows = shape_of(weight), _batch(call, shape_of(x)[:-1])
    n, k = call.factor("n", n_size), call.factor("k", k_size, special=bias is not None)
    inputs = [(x, [*rows, k]), (weight, [n, k])] + ([] if bias is None else [(bias, [n])])
    return call.done(inputs, [[*rows, n]], linear=linear_in((x, bias), (weight, bias)))


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(call: Call) -> OpFactors | None:
    """Return the factors of ``beta * self + alpha * left @ right``."""
    names = ("self", "mat1", "mat2") if "mat1" in call.args else ("self", "batch1", "batch2")
    added, left, right = (call.args[name] for name in names)
    batch = _batch(call, shape_of(left)[:-2])
    m, n = call.factor("m", shape_of(left)[-2]), call.factor("n", shape_of(right)[-1])
    k = call.factor("k", shape_of(left)[-1], special=True)
    output = [*batch, m, n]
    return call.done([(added, aligned(shape_of(added), output)), (left, [*batch, m, k]), (right, [*batch, k, n])],
                     [output], linear=linear_in((left, added), (right, added)))


@rule("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default", "aten.dot.default")
def matmul(call: Call) -> OpFactors | None:
    """Return the factors of a product of vectors, matrices or batches of matrices, with broadcasting."""
    left, right = call.tensors if len(call.tensors) == 2 else call.tensors * 2
    left_shape, right_shape = shape_of(left), shape_of(right)
    has_m, has_n = len(left_shape) > 1, len(right_shape) > 1
    batch = _batch(call, call.output[:len(call.output) - has_m - has_n])
    m = [call.factor("m", left_shape[-2])] if has_m else []
    n = [call.factor("n", right_shape[-1])] if has_n else []
    k = [call.factor("k", left_shape[-1])]
    inputs = [(left, aligned(left_shape[:-2], batch) + m + k), (right, aligned(right_shape[:-2], batch) + k + n)]
    return call.done(inputs, [batch + m + n], linear=linear_in((left,), (right,)))


@rule("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped(call: Call) -> OpFactors | None:
    """Return the factors of rows, sorted by expert, times one matrix for each expert."""
    left, right = call.node.args[:2]
    if call.args.get("bias") is not None or (len(shape_of(left)), len(shape_of(right))) != (2, 3):
        return None
    n, k = call.factor("n", shape_of(right)[-1]), call.factor("k", shape_of(left)[-1])
    return call.done([(left, [(), k]), (right, [(), k, n])], [[(), n]], linear=linear_in((left,), (right,)))


@rule("aten.embedding.default")
def embedding(call: Call) -> OpFactors | None:
    """Return the factors of a lookup of rows of a table."""
    if call.args["scale_grad_by_freq"] or call.args["sparse"]:
        return None
    weight, indices = call.args["weight"], call.args["indices"]
    tokens = _batch(call, shape_of(indices), "t")
    hidden = call.factor("d", shape_of(weight)[1])
    vocabulary = call.factor("vocab", shape_of(weight)[0], special=True)
    return call.done([(weight, [vocabulary, hidden]), (indices, tokens)], [[*tokens, hidden]], linear=[[weight]])


def _batch(call: Call, shape: Shape, name: str = "b") -> Items:
    """Return a factor for each leading dimension."""
    return [call.factor(f"{name}{dim}", size) for dim, size in enumerate(shape)]


# ---- attention ------------------------------------------------------------------------------------------------------


@rule("aten.scaled_dot_product_attention.default")
def attention(call: Call) -> OpFactors | None:
    """Return the factors of attention; None where it draws random numbers."""
    query, key, value, mask = (call.args[name] for name in ("query", "key", "value", "attn_mask"))
    if call.args["dropout_p"] > 0:
        return None
    shape = shape_of(query)
    batch, heads, key_heads = _batch_and_heads(call, shape_of(key))
    rows = call.factor("rows", shape[-2], special=bool(call.args["is_causal"]))
    width = call.factor("width", shape_of(value)[-1], divides=0.5)
    inputs = [(query, [*aligned(shape[:-2], batch + heads), rows, ()]),
              (key, [*aligned(shape_of(key)[:-2], batch + key_heads), (), ()]),
              (value, [*aligned(shape_of(value)[:-2], batch + key_heads), (), width])]
    if mask is not None:
        inputs.append((mask, aligned(shape_of(mask), [*batch, *heads, rows, ()])))
    return call.done(inputs, [[*batch, *heads, rows, width]], linear=[[value]] if value not in (query, key) else [])


def _batch_and_heads(call: Call, key_shape: tuple[int, ...]) -> tuple[Items, Items, Items]:
    """Return the factors of the leading dimensions, of the query's heads and of the key's heads."""
    leading = call.output[:-2]
    if len(leading) < 2:
        return [call.factor(f"b{dim}", size) for dim, size in enumerate(leading)], [], []
    batch = [call.factor(f"b{dim}", size) for dim, size in enumerate(leading[:-1])]
    if not call.args["enable_gqa"] or leading[-1] == key_shape[-3]:
        heads = call.factor("heads", leading[-1])
        return batch, [heads], [heads]
    kv = call.factor("kv", key_shape[-3])
    group = call.factor("group", leading[-1] // key_shape[-3])
    return batch, [kv + group], [kv]


# ---- convolutions and pools -----------------------------------------------------------------------------------------


@rule("aten.conv1d.default", "aten.conv1d.padding", "aten.conv2d.default", "aten.conv2d.padding",
      "aten.conv3d.default", "aten.conv3d.padding", "aten.conv_transpose1d.default", "aten.conv_transpose2d.input",
      "aten.conv_transpose3d.input", "aten.convolution.default")
def convolution(call: Call) -> OpFactors | None:
    """Return the factors of a convolution, transposed or not."""
    x, weight, bias, num_groups = (call.args[name] for name in ("input", "weight", "bias", "groups"))
    is_transposed = call.args.get("transposed", "transpose" in call.operator)
    shape, weight_shape = shape_of(x), shape_of(weight)
    space: Items = [()] * (len(weight_shape) - 2)
    images = [call.factor("images", shape[0])] if len(shape) == len(weight_shape) else []
    groups = call.factor("groups", num_groups, special=True)
    channels = shape[len(images)]
    inner = call.factor("in", channels // num_groups, special=bias is not None)
    outer = call.factor("out", weight_shape[1] if is_transposed else weight_shape[0] // num_groups)
    weight_dims = [groups + inner, outer] if is_transposed else [groups + outer, inner]
    inputs: list[tuple[Any, Items]] = [(x, [*images, groups + inner, *space]), (weight, [*weight_dims, *space])]
    if bias is not None:
        inputs.append((bias, [groups + outer]))
    return call.done(inputs, [[*images, groups + outer, *space]], linear=linear_in((x, bias), (weight, bias)))


_LINEAR_POOLS = ("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "adaptive_avg_pool1d.default",
                 "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default", "_adaptive_avg_pool2d.default",
                 "upsample_nearest2d.default", "upsample_bilinear2d.default", "upsample_nearest2d.vec",
                 "upsample_bilinear2d.vec")
_OTHER_POOLS = ("max_pool1d.default", "max_pool2d.default", "max_pool3d.default", "max_pool2d_with_indices.default",
                "max_pool3d_with_indices.default", "adaptive_max_pool1d.default", "adaptive_max_pool2d.default",
                "adaptive_max_pool3d.default")


@rule(*(f"aten.{name}" for name in _LINEAR_POOLS + _OTHER_POOLS))
def pool(call: Call) -> OpFactors | None:
    """Return the factors of a pool: all leading dimensions, images and channels or channels only."""
    x = call.tensors[0]
    num_space = next(count for count in (1, 2, 3) if f"{count}d" in call.operator)
    shape = shape_of(x)
    dims = call.plain(shape, but=range(len(shape) - num_space, len(shape)))
    is_linear = call.operator.removeprefix("aten.") in _LINEAR_POOLS
    return call.done([(x, dims)], [dims for _ in call.outputs], linear=[[x]] if is_linear else [])
