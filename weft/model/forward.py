"""What is switched in PyTorch while a model's forward runs: autocast, checkpointing, custom autograd functions.

* **Autocast.** What is on while a model is traced is part of it, and nothing else is. A traced graph has a dtype for
  every tensor, and messages between devices are planned with them. So the casts of autocast are written into the graph
  (``within``), and graphs are traced and run with autocast switched off.
* **Checkpointing** that a model asks for is seen while its forward runs (``checkpoints_noted``), since a traced graph
  does not show it.
* **Custom autograd functions.** Export runs the forward of a ``torch.autograd.Function`` and writes down the operators
  inside; the function's own backward is lost, and autograd would differentiate those operators instead. So a function
  of the user's is refused for training (``refused_functions``). An operator of ``torch.library`` is another matter: its
  formula (``register_autograd``) is an autograd function too, one that PyTorch has made, but the graph holds the
  operator itself, which brings its formula along.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.utils import checkpoint

from weft.base.errors import ModelError

_MADE_BY: Final = "torch._library.autograd"
"""Where PyTorch makes the autograd functions of registered operators."""
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


@contextmanager
def checkpoints_noted() -> Iterator[list[str]]:
    """Run functions under ``torch.utils.checkpoint`` plainly while the body runs; each leaves its kind in the list.

    A model may have imported ``checkpoint`` under a name of its own, so what it calls is replaced: a generator around
    the call in the usual kind, an autograd function in the old, reentrant one.
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


def is_registered(function: type) -> bool:
    """Return whether PyTorch has made the autograd function for an operator of ``torch.library``."""
    return all(getattr(getattr(function, name, None), "__module__", "") == _MADE_BY for name in ("forward", "backward"))


@contextmanager
def refused_functions(place: Callable[[Iterable[traceback.FrameSummary]], str | None]) -> Iterator[None]:
    """Raise ``ModelError`` where the body applies an autograd function whose backward a traced graph would lose.

    ``place`` finds the user's line in a stack.
    """
    function = torch.autograd.Function
    apply = function.__dict__["apply"]

    def checked(cls: type, *args: Any, **kwargs: Any) -> Any:
        if is_registered(cls):
            return apply.__get__(None, cls)(*args, **kwargs)
        raise ModelError(f"the model calls the custom autograd function {cls.__name__} at "
                         f"{place(traceback.extract_stack())}, whose own backward pass a traced graph cannot keep. "
                         "Write it with differentiable operators, or as an operator with torch.library.custom_op and "
                         "register_autograd, or plan for inference")

    function.apply = classmethod(checked)
    try:
        yield
    finally:
        function.apply = apply
