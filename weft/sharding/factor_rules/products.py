"""Factors of matrix products and of the lookup of embeddings.

    linear  (b... k, n k, n) -> (b... n)        addmm  (m n, m k, k n) -> (m n)
    matmul  (b... m k, b... k n) -> (b... m n)  embedding  (vocab d, t...) -> (t... d)
    grouped (m k, e k n, e) -> (m n)            neither rows nor experts can be split: offsets say which meet

Where a bias is added to the product, ``k`` is special: only the first of its parts adds the bias, so that the sum of
all has it once. The vocabulary is special too: a device looks up the tokens that it has, for others it gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from weft.sharding.factor_rules.common import Call, Shape, shape_of
from weft.sharding.factors import OpFactors, rule

Items = list[tuple[int, ...]]
"""For each dimension its factors, as ``Call`` makes them."""


def aligned(shape: Sequence[int], items: Items) -> Items:
    """Return the factors of a tensor that is broadcast to dimensions with these factors."""
    here = items[len(items) - len(shape):]
    return [() if size == 1 else item for size, item in zip(shape, here, strict=True)]


def linear_in(*groups: Sequence[Any]) -> list[list[Any]]:
    """Return the sets of nodes in which a product is linear, without missing ones; none if they share a tensor."""
    given = [[node for node in group if node is not None] for group in groups]
    firsts = [group[0] for group in given]
    return given if len(set(firsts)) == len(firsts) else []


@rule("aten.linear.default")
def linear(node: fx.Node) -> OpFactors | None:
    """Return the factors of ``x @ weight.T + bias``."""
    call = Call(node)
    x, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if len(shape_of(weight)) != 2:
        return None
    (n_size, k_size), rows = shape_of(weight), _batch(call, shape_of(x)[:-1])
    n, k = call.factor("n", n_size), call.factor("k", k_size, special=bias is not None)
    inputs = [(x, [*rows, k]), (weight, [n, k])] + ([] if bias is None else [(bias, [n])])
    return call.done(inputs, [[*rows, n]], linear=linear_in((x, bias), (weight, bias)))


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(node: fx.Node) -> OpFactors | None:
    """Return the factors of ``beta * self + alpha * left @ right``."""
    call = Call(node)
    names = ("self", "mat1", "mat2") if "mat1" in call.args else ("self", "batch1", "batch2")
    added, left, right = (call.args[name] for name in names)
    batch = _batch(call, shape_of(left)[:-2])
    m, n = call.factor("m", shape_of(left)[-2]), call.factor("n", shape_of(right)[-1])
    k = call.factor("k", shape_of(left)[-1], special=True)
    output = [*batch, m, n]
    return call.done([(added, aligned(shape_of(added), output)), (left, [*batch, m, k]), (right, [*batch, k, n])],
                     [output], linear=linear_in((left, added), (right, added)))


@rule("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default", "aten.dot.default")
def matmul(node: fx.Node) -> OpFactors | None:
    """Return the factors of a product of vectors, matrices or batches of matrices, with broadcasting."""
    call = Call(node)
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
def grouped(node: fx.Node) -> OpFactors | None:
    """Return the factors of rows, sorted by expert, times one matrix for each expert."""
    call = Call(node)
    left, right = node.args[:2]
    if call.args.get("bias") is not None or (len(shape_of(left)), len(shape_of(right))) != (2, 3):
        return None
    n, k = call.factor("n", shape_of(right)[-1]), call.factor("k", shape_of(left)[-1])
    return call.done([(left, [(), k]), (right, [(), k, n])], [[(), n]], linear=linear_in((left,), (right,)))


@rule("aten.embedding.default")
def embedding(node: fx.Node) -> OpFactors | None:
    """Return the factors of a lookup of rows of a table."""
    call = Call(node)
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
