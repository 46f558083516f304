"""Factors of the operators of layers: products, embeddings, attention, convolutions, pools, normalisations, losses.

    linear  (b... k, n k, n) -> (b... n)        addmm  (m n, m k, k n) -> (m n)
    matmul  (b... m k, b... k n) -> (b... m n)  embedding  (vocab d, t...) -> (t... d)
    grouped (e.m k, e k n, e) -> (e.m n)        every expert has rows of its own, as many as offsets say

Where a bias is added to the product, ``k`` is special: only the first of its parts adds the bias, so that the sum of
all has it once. The vocabulary is special too: a device looks up the tokens that it has, for others it gives zeros.

    attention   (b... kv.group rows e, b... kv keys e, b... kv keys width, mask) -> (b... kv.group rows width)

Its keys are split in the form only in which devices pass them round (``factors.passed_round``). Where queries have
more heads than keys and values, ``kv`` are the heads of keys and ``group`` the queries of each. The rows are special in
causal attention: a device's first row is not the first of all.

    convolution             (images g.in, g.out in, g.out) -> (images g.out)
    transposed convolution  (images g.in, g.in out, g.out) -> (images g.out)
    pool                    (images channels) -> (images channels)

What lies in space is never split. Groups are special, because the number of groups is an argument; the input channels
are where there is a bias.

Normalisations and recurrent layers: everything but what is normalised over is a factor.
The images of a batch normalisation in training are special: its statistics are taken over the whole batch, by
all-reduces inside; all devices then have the same statistics, so these results are whole. The groups of a group
normalisation are special, because their number is an argument.

Losses have rows (all dimensions but the classes) and classes:

    cross entropy, likelihood  (rows... classes, rows..., classes) -> () or (rows...)
    squared error              (d..., d...) -> () or (d...)      and other errors taken entry by entry

Rows of a mean are special: it is the sum over a device's rows divided by the number (or weight) of all rows that count,
so that the devices' results add up to the mean however many rows each has. Classes are special: the sum of exponentials
is taken over all devices, and the loss of a row comes from the device that has its true class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from weft.sharding.expert_rows import EXPERTS, experts_sort
from weft.sharding.factor_rules.common import Call, Items, Shape, aligned, is_float, rule, shape_of
from weft.sharding.factors import ROWS, OpFactors


def linear_in(*groups: Sequence[Any]) -> list[list[Any]]:
    """Return the sets of nodes in which a product is linear, without missing ones; none if they share a tensor."""
    given = [[node for node in group if node is not None] for group in groups]
    firsts = [group[0] for group in given]
    return given if len(set(firsts)) == len(firsts) else []


@rule
def linear(call: Call) -> OpFactors | None:
    """Return the factors of ``x @ weight.T + bias``."""
    x, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if len(shape_of(weight)) != 2:
        return None
    (n_size, k_size), rows = shape_of(weight), _batch(call, shape_of(x)[:-1])
    n, k = call.factor("n", n_size), call.factor("k", k_size, special=bias is not None)
    inputs = [(x, [*rows, k]), (weight, [n, k])] + ([] if bias is None else [(bias, [n])])
    return call.done(inputs, [[*rows, n]], linear=linear_in((x, bias), (weight, bias)))


@rule
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


@rule
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


@rule
def grouped(call: Call) -> OpFactors | None:
    """Return the factors of rows, sorted by expert, times one matrix for each expert."""
    left, right = call.node.args[:2]
    if call.args.get("bias") is not None or (len(shape_of(left)), len(shape_of(right))) != (2, 3):
        return None
    n, k = call.factor("n", shape_of(right)[-1]), call.factor("k", shape_of(left)[-1])
    experts = experts_factor(call, shape_of(right)[0]) if experts_sort(call.node) is not None else ()
    return call.done([(left, [experts, k]), (right, [experts, k, n])], [[experts, n]],
                     linear=linear_in((left,), (right,)))


def experts_factor(call: Call, num_experts: int) -> tuple[int, ...]:
    """Return the factor of experts, with which rows are divided that are sorted by them."""
    return call.factor(EXPERTS, num_experts, special=True, even=True, ragged=True)


class BagMode(IntEnum):
    """How ATen numbers what is made of the rows of a bag."""

    SUM = 0
    MEAN = 1
    MAX = 2


@rule
def embedding(call: Call) -> OpFactors | None:
    """Return the factors of a lookup of rows of a table."""
    if call.args["scale_grad_by_freq"] or call.args["sparse"]:
        return None
    weight, indices = call.args["weight"], call.args["indices"]
    tokens = _batch(call, shape_of(indices), "t")
    hidden = call.factor("d", shape_of(weight)[1])
    vocabulary = call.factor("vocab", shape_of(weight)[0], special=True)
    return call.done([(weight, [vocabulary, hidden]), (indices, tokens)], [[*tokens, hidden]], linear=[[weight]])


@rule
def embedding_bag(call: Call) -> OpFactors | None:
    """Return the factors of sums, means or maxima over bags of rows of a table; the bags are whole."""
    if call.args["scale_grad_by_freq"] or call.args["sparse"]:
        return None
    weight, mode = call.args["weight"], call.args["mode"]
    hidden = call.factor("d", shape_of(weight)[1])
    vocabulary = call.factor("vocab", shape_of(weight)[0], special=True) if mode == BagMode.SUM else ()
    others = [[(), hidden] if mode == BagMode.MAX and len(shape) == 2 else [()] * len(shape)
              for shape in call.outputs[1:]]
    found = call.done([(weight, [vocabulary, hidden])], [[(), hidden], *others],
                      linear=[[weight]] if mode != BagMode.MAX else [])
    return None if found is None else replace(found, whole_outputs=tuple(range(1, len(call.outputs))))


def _batch(call: Call, shape: Shape, name: str = "b") -> Items:
    """Return a factor for each leading dimension."""
    return [call.factor(f"{name}{dim}", size) for dim, size in enumerate(shape)]


# ---- attention ------------------------------------------------------------------------------------------------------


@rule
def attention(call: Call) -> OpFactors | None:
    """Return the factors of attention; None where it draws random numbers."""
    query, key, value, mask = (call.args[name] for name in ("query", "key", "value", "attn_mask"))
    if call.args["dropout_p"] > 0:
        return None
    shape = shape_of(query)
    batch, heads, key_heads = _batch_and_heads(call, shape_of(key))
    is_causal = bool(call.args["is_causal"])
    rows = call.factor(ROWS, shape[-2], special=is_causal, grows=is_causal)
    width = call.factor("width", shape_of(value)[-1], divides=0.5)
    inputs = [(query, [*aligned(shape[:-2], batch + heads), rows, ()]),
              (key, [*aligned(shape_of(key)[:-2], batch + key_heads), (), ()]),
              (value, [*aligned(shape_of(value)[:-2], batch + key_heads), (), width])]
    if mask is not None:
        inputs.append((mask, aligned(shape_of(mask), [*batch, *heads, rows, ()])))
    found = call.done(inputs, [[*batch, *heads, rows, width]], linear=[[value]] if value not in (query, key) else [])
    if (found is None or mask is not None or len({query, key, value}) < 3 or len(shape) != 4
            or {shape_of(key)[0], shape_of(value)[0]} != {shape[0]} or shape_of(key)[-2] != shape[-2]):
        return found
    places = tuple((call.tensors.index(node), len(shape_of(node)) - 2) for node in (key, value))
    item = key.meta["val"].dtype.itemsize
    numbers = float(math.prod(shape_of(key)) + math.prod(shape_of(value)))
    return replace(found, keys=places, passed=(numbers * item, numbers * (item + max(item, 4))))


def _batch_and_heads(call: Call, key_shape: tuple[int, ...]) -> tuple[Items, Items, Items]:
    """Return the factors of the leading dimensions, of the query's heads and of the key's heads."""
    leading = call.output[:-2]
    if len(leading) < 2:
        return _batch(call, leading), [], []
    batch = _batch(call, leading[:-1])
    if not call.args["enable_gqa"] or leading[-1] == key_shape[-3]:
        heads = call.factor("heads", leading[-1])
        return batch, [heads], [heads]
    kv = call.factor("kv", key_shape[-3])
    group = call.factor("group", leading[-1] // key_shape[-3])
    return batch, [kv + group], [kv]


# ---- convolutions and pools -----------------------------------------------------------------------------------------


@rule
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


def _over_space(call: Call, linear: Sequence[Sequence[Any]]) -> OpFactors | None:
    num_space = next(count for count in (1, 2, 3) if f"{count}d" in call.operator)
    dims = call.plain(call.shape, but=range(len(call.shape) - num_space, len(call.shape)))
    return call.done([(call.tensors[0], dims)], [dims for _ in call.outputs], linear=linear)


@rule
def pool(call: Call) -> OpFactors | None:
    """Return the factors of a pool: all leading dimensions, images and channels or channels only."""
    return _over_space(call, [])


@rule
def linear_pool(call: Call) -> OpFactors | None:
    """Return the factors of a pool that takes means, or of an enlargement."""
    return _over_space(call, [call.tensors])


# ---- normalisations and recurrent layers ----------------------------------------------------------------------------

@rule
def layer_norm(call: Call) -> OpFactors | None:
    """Return the factors of a normalisation over the last dimensions."""
    num_rows = len(call.shape) - len(call.args["normalized_shape"])
    dims = call.plain(call.shape, but=range(num_rows, len(call.shape)))
    return call.done([(call.args["input"], dims)], [dims for _ in call.outputs])


@rule
def group_norm(call: Call) -> OpFactors | None:
    """Return the factors of a normalisation of groups of channels."""
    x, num_groups, shape = call.args["input"], call.args["num_groups"], call.shape
    images, groups = call.factor("images", shape[0]), call.factor("groups", num_groups, special=True)
    within = call.factor("within", shape[1] // num_groups, fixed=True)
    dims = [images, groups + within, *[()] * (len(shape) - 2)]
    channels = [(call.args[name], [groups + within]) for name in ("weight", "bias") if call.args[name] is not None]
    return call.done([(x, dims), *channels], [dims])


@rule
def batch_norm(call: Call) -> OpFactors | None:
    """Return the factors of a normalisation of channels over the batch."""
    x, shape = call.args["input"], call.shape
    in_training = call.args.get("training", False)
    if in_training and "functional" not in call.operator:
        return None  # it changes its statistics in place
    vector = float(shape[1] * max(x.meta["val"].dtype.itemsize, 4))
    images = call.factor("images", shape[0], special=in_training,  # mean, then variance; back both at once
                         forward_sums=(vector, vector) if in_training else (),
                         backward_sums=(2 * vector,) if in_training else ())
    channels = call.factor("channels", shape[1])
    dims = [images, channels, *[()] * (len(shape) - 2)]
    names = ("weight", "bias", "running_mean", "running_var")
    vectors = [(call.args[name], [channels]) for name in names if call.args[name] is not None]
    statistics = [[channels] if result == (shape[1],) else [()] for result in call.outputs[1:]]
    found = call.done([(x, dims), *vectors], [dims, *statistics])
    return None if found is None else replace(found, whole_outputs=tuple(range(1, len(call.outputs))))


@rule
def recurrent(call: Call) -> OpFactors | None:
    """Return the factors of a recurrent layer: the sequences of the batch."""
    x, shape = call.args["input"], call.shape
    if len(shape) != 3 or (call.args["dropout"] and call.args["train"]):
        return None
    batch_dim = 0 if call.args["batch_first"] else 1
    batch = call.factor("batch", shape[batch_dim])
    dims = [batch if dim == batch_dim else () for dim in range(3)]
    states = call.args["hx"] if isinstance(call.args["hx"], list | tuple) else [call.args["hx"]]
    state_dims = [(), batch, ()]
    return call.done([(x, dims), *((state, state_dims) for state in states)],
                     [dims, *[state_dims] * (len(call.outputs) - 1)])


# ---- losses ----------------------------------------------------------------------------------------------------------


class Reduction(IntEnum):
    """How ATen numbers what a loss does with its rows."""

    NONE = 0
    MEAN = 1
    SUM = 2


@rule
def cross_entropy(call: Call) -> OpFactors | None:
    """Return the factors of a cross entropy or of a likelihood of given classes."""
    scores, target, weight = (call.args[name] for name in ("self", "target", "weight"))
    shape = shape_of(scores)
    class_dim = 0 if len(shape) == 1 else 1
    has_indices = not is_float(target)
    is_mean = call.args["reduction"] == Reduction.MEAN
    is_linear = "nll" in call.operator
    number = float(max(scores.meta["val"].dtype.itemsize, 4))
    by_row = number * math.prod(shape) / shape[class_dim]
    rows = [() if dim == class_dim else call.factor(f"rows{dim}", size, special=is_mean, forward_sums=(
        (number,) if is_mean and has_indices else ())) for dim, size in enumerate(shape)]  # how much all rows count
    classes = call.factor("classes", shape[class_dim], special=True,  # the maximum, and the sum of exponentials
                          forward_sums=() if is_linear else (by_row, by_row)) if has_indices else ()
    dims = [classes if dim == class_dim else rows[dim] for dim in range(len(shape))]
    row_dims = [row for dim, row in enumerate(rows) if dim != class_dim]
    inputs = [(scores, dims), (target, row_dims if has_indices else dims)]
    if weight is not None:
        inputs.append((weight, [classes]))
    return call.done(inputs, [row_dims if call.args["reduction"] == Reduction.NONE else []],
                     linear=[[scores]] if is_linear else [])


@rule
def distance(call: Call) -> OpFactors | None:
    """Return the factors of an error taken entry by entry: squared, absolute, or a cross entropy of two classes."""
    left, right = call.args["self"], call.args["target"]
    if shape_of(left) != shape_of(right):
        return None
    is_mean = call.args["reduction"] == Reduction.MEAN
    dims = [call.factor(f"d{dim}", size, special=is_mean) for dim, size in enumerate(shape_of(left))]
    weights = [item for name in ("weight", "pos_weight") if (item := call.args.get(name)) is not None]
    return call.done([(left, dims), (right, dims), *((item, aligned(shape_of(item), dims)) for item in weights)],
                     [dims if call.args["reduction"] == Reduction.NONE else []])
