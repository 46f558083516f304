"""Calls of operators on random shapes (multiples of 4), for the comparison of factor rules with DTensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.1


def ints(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape)


def sample(target: Any, seed: int) -> Arguments:
    """Return arguments for an operator: from ``SAMPLES``, or tensors of one shape and plain numbers by its schema."""
    draw = random.Random(f"{target} {seed}")
    sizes = [draw.choice([4, 8, 12]) for _ in range(4)]
    made = SAMPLES.get(str(target).removeprefix("aten."))
    return made(*sizes) if made is not None else _by_schema(target, sizes)


def _by_schema(target: Any, sizes: list[int]) -> Arguments:
    kinds = [str(item.type) for item in target._schema.arguments]
    shape = sizes[:1] if kinds.count("Tensor") > 1 else sizes[:2]
    has_bits = any(part in str(target) for part in ("bitwise", "__", "gcd", "lcm"))
    make: Mapping[str, Callable[[], Any]] = {
        "Tensor": lambda: 1 + ints(4, *shape) if has_bits else rand(*shape), "number": lambda: 2, "int": lambda: 1,
        "float": lambda: 0.5, "bool": lambda: False, "List[int]": lambda: [1],
        "List[Tensor]": lambda: [rand(*shape), rand(*shape)], "Optional[str]": lambda: "floor",
        "Optional[bool]": lambda: True, "Optional[List[int]]": lambda: [0]}
    required = [item for item in target._schema.arguments if not item.has_default_value()]
    return (tuple(make[str(item.type)]() for item in required if not item.kwarg_only),
            {item.name: make[str(item.type)]() for item in required if item.kwarg_only})


def _image(a: int, b: int, *_: int) -> Tensor:
    return rand(a, b, 8, 8)


def _half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")  # of a kernel that only GPUs have


def _norm(a: int, b: int, *more: Any) -> Arguments:
    return call(rand(a, b, 4), rand(b), rand(b), rand(b), rand(b), *more)


SAMPLES: Mapping[str, Callable[..., Arguments]] = {
    # products
    "mm.default": lambda a, b, c, d: call(rand(a, b), rand(b, c)),
    "addmm.default": lambda a, b, c, d: call(rand(c), rand(a, b), rand(b, c)),
    "_grouped_mm.default": lambda a, b, c, d: call(
        rand(4 * a, 64).bfloat16(), rand(a, 64, 64).bfloat16(), 4 * torch.arange(1, a + 1, dtype=torch.int32)),
    "bmm.default": lambda a, b, c, d: call(rand(a, b, c), rand(a, c, d)),
    "baddbmm.default": lambda a, b, c, d: call(rand(a, b, d), rand(a, b, c), rand(a, c, d)),
    "dot.default": lambda a, b, c, d: call(rand(a), rand(a)),
    "embedding.default": lambda a, b, c, d: call(rand(a, b), ints(a, c, d)),
    "convolution.default": lambda a, b, c, d: call(_image(a, b), rand(c, b, 3, 3), None, [1, 1], [1, 1], [1, 1], False,
                                                   [0, 0], 1),
    # normalisations and pools
    "native_layer_norm.default": lambda a, b, c, d: call(rand(a, b, c), [c], rand(c), rand(c), 1e-5),
    "_softmax.default": lambda a, b, c, d: call(rand(a, b, c), 1, False),
    "_log_softmax.default": lambda a, b, c, d: call(rand(a, b, c), 1, False),
    "_native_batch_norm_legit_functional.default": lambda a, b, c, d: _norm(a, b, True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training.default": lambda a, b, c, d: _norm(a, b, 0.1, 1e-5),
    **dict.fromkeys(("_adaptive_avg_pool2d.default", "adaptive_max_pool2d.default", "avg_pool2d.default",
                     "max_pool2d_with_indices.default", "upsample_nearest2d.default"),
                    lambda a, b, c, d: call(_image(a, b), [2, 2])),
    "upsample_bilinear2d.default": lambda a, b, c, d: call(_image(a, b), [4, 4], False),
    **dict.fromkeys(("adaptive_max_pool3d.default", "avg_pool3d.default", "max_pool3d_with_indices.default"),
                    lambda a, b, c, d: call(rand(a, b, 4, 4, 4), [2, 2, 2])),
    **dict.fromkeys(("adaptive_avg_pool1d.default", "adaptive_max_pool1d.default", "avg_pool1d.default"),
                    lambda a, b, c, d: call(rand(a, b, 8), [2])),
    # entries
    **dict.fromkeys(("add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor", "maximum.default"),
                    lambda a, b, c, d: call(rand(a, b, c), rand(b, 1))),
    **dict.fromkeys(("clamp.Tensor", "clip.Tensor"), lambda a, b, c, d: call(rand(a, b), rand(a, b))),
    **dict.fromkeys(("clamp.default", "clip.default"), lambda a, b, c, d: call(rand(a, b), 0.5)),
    "masked_fill.Scalar": lambda a, b, c, d: call(rand(a, b), rand(b) > 0.5, 0.0),
    "where.self": lambda a, b, c, d: call(rand(a, b) > 0.5, rand(a, b), rand(b)),
    "to.dtype": lambda a, b, c, d: call(rand(a, b), torch.float32),
    "_to_copy.default": lambda a, b, c, d: call(rand(a, b), dtype=torch.float32),
    # reductions
    **dict.fromkeys(("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"),
                    lambda a, b, c, d: call(rand(a, b, c), [1])),
    # views
    **dict.fromkeys(("view.default", "reshape.default", "_unsafe_view.default", "view_copy.default"),
                    lambda a, b, c, d: call(rand(a, 4 * b, c), [4 * a, b, c])),
    "expand.default": lambda a, b, c, d: call(rand(a, 1, b), [c, a, d, b]),
    "permute.default": lambda a, b, c, d: call(rand(a, b, c), [2, 0, 1]),
    "repeat.default": lambda a, b, c, d: call(rand(a, b), [2, 1, 1]),
    "select.int": lambda a, b, c, d: call(rand(a, b, c), 1, 2),
    "slice.Tensor": lambda a, b, c, d: call(rand(a, b), 1, 0, 2),
    "split.Tensor": lambda a, b, c, d: call(rand(a, 2 * b), b, 1),
    "split_with_sizes.default": lambda a, b, c, d: call(rand(a, 2 * b), [b, b], 1),
    "squeeze.dim": lambda a, b, c, d: call(rand(a, 1, b), 1),
    "squeeze.dims": lambda a, b, c, d: call(rand(a, 1, b), [1]),
    "squeeze.default": lambda a, b, c, d: call(rand(a, 1, b)),
    "constant_pad_nd.default": lambda a, b, c, d: call(rand(a, b), [1, 1]),
    # complex numbers, and places in images
    "_conj.default": lambda a, b, c, d: call(torch.complex(rand(a, b), rand(a, b))),
    "_fft_c2c.default": lambda a, b, c, d: call(torch.complex(rand(a, b), rand(a, b)), [1], 0, True),
    "_fft_c2r.default": lambda a, b, c, d: call(torch.complex(rand(a, b), rand(a, b)), [1], 0, 2 * b - 2),
    "grid_sampler_2d.default": lambda a, b, c, d: call(rand(a, b, 8, 8), rand(a, c, d, 2), 0, 0, False),
    "grid_sampler_3d.default": lambda a, b, c, d: call(rand(a, b, 4, 4, 4), rand(a, c, d, 4, 3), 0, 0, False),
    "view_as_complex.default": lambda a, b, c, d: call(rand(a, b, 2)),
    "view_as_real.default": lambda a, b, c, d: call(torch.complex(rand(a, b), rand(a, b))),
    # rows by number
    "gather.default": lambda a, b, c, d: call(rand(a, b), 1, ints(b, a, c)),
    "index_select.default": lambda a, b, c, d: call(rand(a, b), 0, ints(a, c)),
    "index.Tensor": lambda a, b, c, d: call(rand(a, b), [ints(a, c)]),
    "index_put.default": lambda a, b, c, d: call(rand(a, b), [torch.randperm(a)], rand(a, b)),
    "index_fill.int_Scalar": lambda a, b, c, d: call(rand(a, b), 0, ints(a, c), 1.0),
    "scatter.src": lambda a, b, c, d: call(rand(a, b), 1, ints(b, a, b), rand(a, b)),
    "scatter.value": lambda a, b, c, d: call(rand(a, b), 1, ints(b, a, b), 1.0),
    "scatter_add.default": lambda a, b, c, d: call(rand(a, b), 1, ints(b, a, b), rand(a, b)),
    "randint_like.low_dtype": lambda a, b, c, d: call(rand(a, b), 0, 9),
    "select_scatter.default": lambda a, b, c, d: call(rand(a, b), rand(a), 1, 2),
    "topk.default": lambda a, b, c, d: call(rand(a, b), 2),
    # what DTensor takes apart, or knows under another name
    "scaled_dot_product_attention.default": lambda a, b, c, d: call(rand(a, b, c, 4), rand(a, b, d, 4),
                                                                    rand(a, b, d, 4)),
    "_scaled_dot_product_efficient_attention.default": lambda a, b, c, d: call(
        _half(a, b, c, 4), _half(a, b, d, 4), _half(a, b, d, 4), None, False),
    "group_norm.default": lambda a, b, c, d: call(rand(a, 2 * b, c), b, rand(2 * b), rand(2 * b)),
    "native_group_norm.default": lambda a, b, c, d: call(rand(a, 2 * b, c), rand(2 * b), rand(2 * b), a, 2 * b, c, b,
                                                         1e-5),
    "linear.default": lambda a, b, c, d: call(rand(a, c), rand(d, c)),
    "matmul.default": lambda a, b, c, d: call(rand(a, b, c), rand(c, d)),
    "mv.default": lambda a, b, c, d: call(rand(a, b), rand(b)),
    "rms_norm.default": lambda a, b, c, d: call(rand(a, c), [c], rand(c)),
    "softmax.int": lambda a, b, c, d: call(rand(a, b, c), 1),
    "cross_entropy_loss.default": lambda a, b, c, d: call(rand(a, b), ints(b, a)),
    "max_pool2d.default": lambda a, b, c, d: call(_image(a, b), [2, 2]),
    "nll_loss.default": lambda a, b, c, d: call(rand(a, b), ints(b, a)),
    "nll_loss_forward.default": lambda a, b, c, d: call(rand(a, b), ints(b, a), None, 1, -100),
}
"""Arguments by operator, from four sizes."""
