"""Factors of attention: batch, heads, query rows and the width of values; keys are never split.

    (b... kv.group rows e, b... kv keys e, b... kv keys width, mask) -> (b... kv.group rows width)

Where queries have more heads than keys and values, ``kv`` are the heads of keys and ``group`` the queries of each. The
rows are special in causal attention: a device's first row is not the first of all.
"""

from __future__ import annotations

from torch import fx

from weft.sharding.factor_rules.common import Call, shape_of
from weft.sharding.factor_rules.products import Items, aligned
from weft.sharding.factors import OpFactors, rule


@rule("aten.scaled_dot_product_attention.default")
def attention(node: fx.Node) -> OpFactors | None:
    """Return the factors of attention; None where it draws random numbers."""
    call = Call(node)
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
