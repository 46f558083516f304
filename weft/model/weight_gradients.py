"""Which gradients of parameters a backward can leave for later: where it is split, ``W`` computes them, not ``I``.

The runtime has a rule for each of these operators (``weft.run.split_backward``); the costs of the two parts and the
memory account follow the same list.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from weft.model.graph import Bool, Graph

ADDED_IN_PLACE: Final = frozenset(f"aten.{name}" for name in ("linear", "mm", "matmul", "addmm"))
"""Products: their gradients are added to the sum over micro-batches as they are computed."""
MADE_FIRST: Final = frozenset(f"aten.{name}" for name in (
    "convolution", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm"))
"""Here the gradient is made first and added then."""
DEFERRED: Final = ADDED_IN_PLACE | MADE_FIRST


def can_wait(kind: str) -> bool:
    """Return whether the gradients of the parameters that such an operator reads can be computed later.

    Operators that are not PyTorch's are planned and not run: they are taken to be like products.
    """
    return kind in DEFERRED or not kind.startswith(("aten.", "prims."))


def ops_that_can_wait(graph: Graph) -> Bool:
    """Return it for every operator of the graph."""
    known = {kind: can_wait(kind) for kind in set(graph.op_kinds)}
    return np.asarray([known[kind] for kind in graph.op_kinds], dtype=bool)
