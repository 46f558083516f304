"""A stage made ready to run: one plain function call per forward, for whole and for split backward passes.

``GraphModule.__call__`` and attribute look-up through ``nn.Module`` cost as much as a small operator, so the generated
``forward`` is called directly with an object that has the parameters as plain attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from weft.run.mesh import DeviceMesh
from weft.run.partition import StageModule, attribute_name
from weft.run.random_state import RankRandom
from weft.run.split_backward import WeightGradients, split_weight_gradients

Forward = Callable[..., tuple[Tensor, ...]]


class Stage:
    """The callables of one stage: ``forward`` for ``B``, ``split_forward`` for ``I`` and ``W``."""

    def __init__(self, module: StageModule, *, split: bool, random: RankRandom, mesh: DeviceMesh | None = None) -> None:
        self.module, self.mesh, self.random = module, mesh, random
        """The mesh is that of a stage on several devices, with the number of its collectives."""
        self.updates = [(len(module.outputs) + number, self.buffer(name))
                        for number, name in enumerate(module.updated_buffers)]
        self.forward = self._with_stream(_direct_call(module.module))
        self.queue = WeightGradients()
        self.split_forward: Forward | None = None
        if split:
            self.split_forward = self._with_stream(_direct_call(split_weight_gradients(module.module, self.queue)))

    def _with_stream(self, forward: Forward) -> Forward:
        """Return the forward with random numbers of the rank's own; on several devices its operators see to that."""
        if not self.module.uses_random or self.mesh is not None:
            return forward
        return self.random.drawing(forward, self.random.own)

    def buffer(self, name: str) -> Tensor:
        """Return a buffer by its name in the model."""
        tensor: Tensor = getattr(self.module.module, attribute_name(name))
        return tensor


def _direct_call(module: GraphModule) -> Forward:
    """Return the module's forward as a function of its arguments alone."""
    attributes: dict[str, Any] = {str(node.target): getattr(module, str(node.target))
                                  for node in module.graph.nodes if node.op == "get_attr"}
    holder = SimpleNamespace(**attributes)
    forward: Forward = type(module).forward.__get__(holder)
    return forward


def run_backward(edges: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """Run autograd from the graph's edges, accumulating into the leaves.

    ``torch.autograd.backward`` does the same after checks of about ten microseconds; shapes were checked when the
    stages were made.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
