"""The plan's own optimizer for the parameters of one rank.

Parameters in half precision are changed through *masters*, copies in float32 that the optimizer changes instead: steps
that are too small for the few digits of half precision add up there. The optimizer's state is in float32, too. This is
what the memory account counts (``weft.plan.memory.optimizer_bytes``). An optimizer that the user's script makes gets
the parameters as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from weft.plan.plan import Optimizer

HALF: Final = (torch.float16, torch.bfloat16)
KINDS: Final = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
CHUNK_BYTES: Final = 256 << 20
"""Masters whose gradients are in float32 at the same time: so much, or one parameter."""
MASTER: Final = "master"
"""The key of a parameter's master in the optimizer's state."""


def make_optimizer(tensors: Sequence[torch.nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer that the plan asks for, for these parameters, or None."""
    if settings.kind == "none" or not tensors:
        return None

    def make(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        fused = not any(item.is_complex() for item in parameters)  # one pass over parameters and state
        return KINDS[settings.kind](parameters, lr=settings.lr, fused=fused)

    return MasterWeights(tensors, make) if any(item.dtype in HALF for item in tensors) else make(tensors)


class MasterWeights(torch.optim.Optimizer):
    """Another optimizer, which changes float32 masters of the parameters; their values are rounded back.

    The state of a parameter is that of its master, with the master itself under ``master``. Parameters that are not in
    half precision are their own masters.
    """

    def __init__(self, tensors: Sequence[torch.nn.Parameter],
                 make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._pairs = [(item, _master_of(item)) for item in tensors]
        self._chunks = [(chunk, make([master for _, master in chunk])) for chunk in _chunks(self._pairs)]
        super().__init__(list(tensors), dict(self._chunks[0][1].defaults))

    @property
    def description(self) -> str:
        """Return what a checkpoint says about the optimizer that wrote it."""
        return f"{type(self._chunks[0][1]).__name__} with float32 masters"

    def step(self, closure: Any = None) -> None:
        """Change the masters by the parameters' gradients, and set the parameters to them."""
        assert closure is None, "steps are taken once the gradients are there"
        options = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        for chunk, optimizer in self._chunks:
            optimizer.param_groups[0].update(options)
            rounded = [pair for pair in chunk if pair[0] is not pair[1]]
            with torch.no_grad():
                for item, master in rounded:
                    master.grad = None if item.grad is None else item.grad.float()
                optimizer.step()
                for item, master in rounded:
                    master.grad = None
                    item.copy_(master)
        self._show_state()

    def refresh(self) -> None:
        """Take the masters from the parameters, which somebody else has changed."""
        with torch.no_grad():
            for item, master in self._pairs:
                master.copy_(item)

    def _show_state(self) -> None:
        for chunk, optimizer in self._chunks:
            for item, master in chunk:
                own = {} if master is item else {MASTER: master.detach()}
                self.state[item] = {**optimizer.state[master], **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the masters' values and state as they are: not rounded to the parameters' precision."""
        index = {item: place for place, (item, _) in enumerate(self._pairs)}
        with torch.no_grad():
            for chunk, optimizer in self._chunks:
                for item, master in chunk:
                    entry = dict(state_dict["state"].get(index[item], {}))
                    master.copy_(entry.pop(MASTER, item))
                    if entry:
                        optimizer.state[master] = {
                            key: value.to(item.device) if isinstance(value, Tensor) else value
                            for key, value in entry.items()}
        options = {key: value for key, value in state_dict["param_groups"][0].items() if key != "params"}
        self.param_groups[0].update(options)
        self._show_state()


def _master_of(item: torch.nn.Parameter) -> torch.nn.Parameter:
    if item.dtype not in HALF:
        return item
    return torch.nn.Parameter(item.detach().float(), requires_grad=item.requires_grad)


def refresh_masters(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that keeps masters take them from the parameters; nothing for others."""
    if isinstance(optimizer, MasterWeights):
        optimizer.refresh()


def _chunks(pairs: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]
            ) -> Iterator[list[tuple[torch.nn.Parameter, torch.nn.Parameter]]]:
    chunk: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
    size = 0
    for pair in pairs:
        num_bytes = pair[1].numel() * pair[1].element_size()
        if chunk and size + num_bytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(pair)
        size += num_bytes
    if chunk:
        yield chunk
