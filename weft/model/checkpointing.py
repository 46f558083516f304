"""Gradient checkpointing that a model asks for: seen while its forward runs, since a traced graph does not show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint


@contextmanager
def checkpoints_noted() -> Iterator[list[str]]:
    """Run functions under ``torch.utils.checkpoint`` plainly while the body runs; each leaves its kind in the list.

    Models have ``checkpoint`` itself under other names, so what it calls is replaced: a generator around the call in
    the usual kind, an autograd function in the old, reentrant one.
    """
    noted: list[str] = []
    function, generator = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator

    def apply(run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        noted.append("reentrant")
        with torch.set_grad_enabled(any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)):
            return run_function(*args)  # without an input that needs one, it gives no gradients at all

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        noted.append("plain")
        yield

    function.apply = staticmethod(apply)
    checkpoint._checkpoint_without_reentrant_generator = plain
    try:
        yield noted
    finally:
        del function.apply
        checkpoint._checkpoint_without_reentrant_generator = generator
