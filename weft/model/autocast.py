"""``torch.autocast`` and traced models: what is on while a model is traced is part of it, and nothing else is.

A traced graph has a dtype for every tensor, and messages between devices are planned with them. So the casts of
autocast are written into the graph (``within``), and graphs are traced and run with autocast switched off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from weft.base.errors import ModelError

_KINDS = ("cpu", "cuda")


def current_autocast() -> str | None:
    """Return what autocast is on, as ``cpu bfloat16``; None if none is."""
    found = [f"{kind} {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
             for kind in _KINDS if torch.is_autocast_enabled(kind)]
    return " and ".join(found) or None


@contextmanager
def autocast_off() -> Iterator[None]:
    """Switch autocast off while the body runs."""
    with ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def within(module: torch.nn.Module, autocast: str | None) -> Iterator[None]:
    """Let the module's forward run under ``autocast`` while the body runs, which itself runs without.

    Raise ``ModelError`` for a GPU's: tracing is done on tensors of a CPU, where its rules are others.
    """
    if autocast is None:
        yield
        return
    kind, _, name = autocast.partition(" ")
    if kind != "cpu" or " " in name:
        raise ModelError(f"torch.autocast is on for {autocast}, and its casts cannot be traced: leave it out and "
                         "convert the model, model.to(torch.bfloat16), or write the casts into the forward")
    original, dtype = module.forward, getattr(torch, name)
    was_own = "forward" in module.__dict__

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype, cache_enabled=False):
            return original(*args, **kwargs)

    module.forward = forward
    try:
        with autocast_off():
            yield
    finally:
        if was_own:
            module.forward = original
        else:
            del module.forward
