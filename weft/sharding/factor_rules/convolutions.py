"""Factors of convolutions and pools: images, channels and groups; what lies in space is never split.

    convolution             (images g.in, g.out in, g.out) -> (images g.out)
    transposed convolution  (images g.in, g.in out, g.out) -> (images g.out)
    pool                    (images channels) -> (images channels)

Groups are special, because the number of groups is an argument; the input channels are where there is a bias.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from weft.sharding.factor_rules.common import Call, shape_of
from weft.sharding.factor_rules.products import linear_in
from weft.sharding.factors import OpFactors, rule


@rule("aten.conv1d.default", "aten.conv1d.padding", "aten.conv2d.default", "aten.conv2d.padding",
      "aten.conv3d.default", "aten.conv3d.padding", "aten.conv_transpose1d.default", "aten.conv_transpose2d.input",
      "aten.conv_transpose3d.input", "aten.convolution.default")
def convolution(node: fx.Node) -> OpFactors | None:
    """Return the factors of a convolution, transposed or not."""
    call = Call(node)
    x, weight, bias, num_groups = (call.args[name] for name in ("input", "weight", "bias", "groups"))
    is_transposed = call.args.get("transposed", "transpose" in str(node.target))
    shape, weight_shape = shape_of(x), shape_of(weight)
    space: list[tuple[int, ...]] = [()] * (len(weight_shape) - 2)
    images = [call.factor("images", shape[0])] if len(shape) == len(weight_shape) else []
    groups = call.factor("groups", num_groups, special=True)
    channels = shape[len(images)]
    inner = call.factor("in", channels // num_groups, special=bias is not None)
    outer = call.factor("out", weight_shape[1] if is_transposed else weight_shape[0] // num_groups)
    weight_dims = [groups + inner, outer] if is_transposed else [groups + outer, inner]
    inputs: list[tuple[Any, list[tuple[int, ...]]]] = [(x, [*images, groups + inner, *space]),
                                                       (weight, [*weight_dims, *space])]
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
def pool(node: fx.Node) -> OpFactors | None:
    """Return the factors of a pool: all leading dimensions, images and channels or channels only."""
    call = Call(node)
    x = call.tensors[0]
    num_space = next(count for count in (1, 2, 3) if f"{count}d" in str(node.target))
    shape = shape_of(x)
    dims = call.plain(shape, but=range(len(shape) - num_space, len(shape)))
    is_linear = str(node.target).removeprefix("aten.") in _LINEAR_POOLS
    return call.done([(x, dims)], [dims for _ in call.outputs], linear=[[x]] if is_linear else [])
