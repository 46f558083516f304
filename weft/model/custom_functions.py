"""Custom autograd functions in a model's forward: which of them a traced graph keeps.

Export runs the forward of a ``torch.autograd.Function`` and writes down the operators inside; the function's own
backward is lost, and autograd would differentiate those operators instead. So a function of the user's is refused for
training. An operator of ``torch.library`` is another matter: its formula (``register_autograd``) is an autograd
function too, one that PyTorch has made, but the graph holds the operator itself, which brings its formula along.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from weft.base.errors import ModelError

_MADE_BY: Final = "torch._library.autograd"
"""Where PyTorch makes the autograd functions of registered operators."""


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
