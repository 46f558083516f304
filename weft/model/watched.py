"""Numbers that must not be looked at: what tells a layer from its equals while the model is traced.

Equal layers may each have a number of their own, such as the position in the stack that a cache would need. A layer
that computes with it may do something else in one of the layers that are not traced, whatever the traced ones do. So
while layers are folded these numbers are replaced by ones that raise ``FoldMismatch`` when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch


class Watched(int):
    """A whole number that raises ``problem`` when anything is done with it but printing."""

    problem: Exception


def _refuse(self: Watched, *args: Any) -> Any:
    raise self.problem


_USES: Final = (
    "eq ne lt le gt ge hash bool index int float complex trunc round floor ceil abs neg pos invert add radd sub rsub "
    "mul rmul mod rmod floordiv rfloordiv truediv rtruediv divmod rdivmod pow rpow and rand or ror xor rxor lshift "
    "rlshift rshift rrshift")
for _name in _USES.split():
    setattr(Watched, f"__{_name}__", _refuse)


def watch_numbers(layers: Sequence[torch.nn.Module], stack: ExitStack, problem: Callable[[str], Exception]) -> None:
    """Replace the whole numbers in which equal ``layers`` differ by watched ones, until ``stack`` is closed.

    ``problem`` makes the exception from a reason; it is raised at once where numbers differ inside a list or dict.
    """
    first, last = (dict(layer.named_modules()) for layer in (layers[0], layers[-1]))
    for path, module in first.items():
        for key, value in module.__dict__.items():
            other = last[path].__dict__.get(key)
            if isinstance(value, list | tuple | dict):
                if value and key not in ("_modules", "_parameters", "_buffers") and _numbers(value) != _numbers(other):
                    raise problem(f"{key} differs between layers")
            elif type(value) is int and value != other:
                for layer in layers:
                    _watch(layer.get_submodule(path).__dict__, key, stack, problem("a layer looks at its own number"))


def _watch(settings: dict[str, Any], key: str, stack: ExitStack, problem: Exception) -> None:
    value = settings[key]
    stack.callback(settings.__setitem__, key, value)
    settings[key] = Watched(value)
    settings[key].problem = problem


def _numbers(value: Any) -> list[int]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    return [value] if type(value) is int else []
