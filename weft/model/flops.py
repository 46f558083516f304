"""How many floating-point operations an ``aten`` operator takes: the counting rules, in one table.

Matrix products, convolutions and attention are counted as ``torch.utils.flop_counter`` counts them: a multiply-add is
two operations, and a causal mask does not halve attention. Everything else costs a fixed number of operations per
element of its largest tensor (``FLOPS_PER_ELEMENT``): 0 for moving data, 1 for simple arithmetic and reductions (the
default), more for functions such as ``exp`` and for normalisations. Pooling costs one operation per element of the
window. These small counts only matter next to bytes moved, which dominate the time of such operators.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

_MOVES: Final = (
    "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "bernoulli", "cat", "clone", "constant_pad_nd",
    "contiguous", "copy", "copy_", "detach", "embedding", "empty", "empty_like", "empty_strided", "expand", "fill",
    "fill_", "full", "full_like", "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh_copy",
    "masked_fill", "masked_fill_", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "one_hot",
    "ones", "ones_like", "pad", "permute", "rand", "rand_like", "randn", "randn_like", "repeat", "roll",
    "scalar_tensor", "scatter", "select_backward", "slice_backward", "slice_scatter", "stack", "to", "topk", "tril",
    "triu", "unfold_backward", "unsafe_split", "upsample_nearest2d", "where", "zero_", "zeros", "zeros_like",
)
FLOPS_PER_ELEMENT: Final[dict[str, float]] = {
    **dict.fromkeys(_MOVES, 0.0),
    **dict.fromkeys(("cos", "erf", "exp", "log", "log1p", "pow", "sigmoid", "sigmoid_", "silu", "sin", "softplus",
                     "tanh", "tanh_"), 4.0),
    **dict.fromkeys(("gelu", "gelu_backward", "hardswish", "mish", "silu_backward"), 8.0),
    **dict.fromkeys(("sigmoid_backward", "tanh_backward"), 3.0),
    **dict.fromkeys(("_log_softmax", "_softmax", "_safe_softmax"), 5.0),
    **dict.fromkeys(("_log_softmax_backward_data", "_softmax_backward_data"), 4.0),
    **dict.fromkeys(("_fused_rms_norm", "native_group_norm", "native_layer_norm"), 7.0),
    **dict.fromkeys(("_fused_rms_norm_backward", "native_group_norm_backward", "native_layer_norm_backward"), 12.0),
    **dict.fromkeys(("_batch_norm_with_update", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
                     "_native_batch_norm_legit_no_training", "native_batch_norm"), 5.0),
    **dict.fromkeys(("native_batch_norm_backward",), 8.0),
    **dict.fromkeys(("linalg_vector_norm", "norm", "std", "var", "var_mean"), 3.0),
}
"""Operations per element of the operator's largest tensor, by the operator's name; others take 1."""

_POOLS: Final = {"max_pool2d_with_indices": 1, "avg_pool2d": 1, "avg_pool2d_backward": 2,
                 "max_pool2d_with_indices_backward": 2}
"""Position of the window's size among the arguments."""


def operator_name(target: Any) -> str:
    """Return the bare name of an operator: ``"mul"`` for ``aten.mul.Tensor``."""
    packet = str(getattr(target, "overloadpacket", None) or getattr(target, "__name__", target))
    return packet.rsplit(".", 1)[-1]


def count_flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return the operations of one operator, no view, that ran on ``args`` and gave ``result``."""
    formula = flop_registry.get(getattr(target, "overloadpacket", target))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    name = operator_name(target)
    if name == "_grouped_mm":  # each row (each column, if only the left has groups) meets the matrix of one group
        left, right = args[:2]
        groups = left.shape[0] if left.ndim > right.ndim else 1
        return float(2 * left.numel() * right.shape[-1] / groups)
    if name in _POOLS:
        window = args[_POOLS[name]]
        return float(min(tensor.numel() for tensor in _tensors((args[0], result))) * math.prod(window))
    largest = max((tensor.numel() for tensor in _tensors((args, kwargs, result))), default=0)
    return FLOPS_PER_ELEMENT.get(name, 1.0) * largest


def attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> float:
    """Return the operations of scaled dot-product attention, whose two products are counted in full.

    >>> attention_flops((2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 128, 64)) == 2 * (2 * 2 * 4 * 128 * 128 * 64)
    True
    """
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> float:
    """Return the operations of its backward pass: four products, and the scores once more (they are not kept)."""
    scores, mixed = query[-1], value[-1]
    return 2.0 * math.prod(query[:-1]) * key[-2] * (3 * scores + 2 * mixed)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
