"""Products of tensors of two precisions: tensors without values let them pass, real kernels refuse them."""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from weft.base.errors import ModelError

_PRODUCTS: Final = frozenset(f"aten.{name}" for name in (
    "linear.default", "mm.default", "addmm.default", "bmm.default", "baddbmm.default", "matmul.default", "mv.default",
    "convolution.default", "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding",
    "conv3d.padding", "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"))


def find_mixed_product(graph: fx.Graph) -> fx.Node | None:
    """Return the first product of the graph whose factors have different floating-point dtypes."""
    for node in graph.nodes:
        if str(node.target) in _PRODUCTS and len(_dtypes(node)) > 1:
            return node
    return None


def mixed_product_error(node: fx.Node, place: str) -> ModelError:
    """Return the error for a product of two precisions."""
    found = _dtypes(node)
    kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
    return ModelError(f"operator {node.target}{place} multiplies {kinds}, which PyTorch refuses: give inputs of the "
                      f"parameters' precision, such as x.to({found[-1]}), or convert the model")


def _dtypes(node: fx.Node) -> list[torch.dtype]:
    values = [item.meta.get("val") for item in node.all_input_nodes[:2]]
    return list(dict.fromkeys(item.dtype for item in values if isinstance(item, torch.Tensor)
                              and item.is_floating_point()))
