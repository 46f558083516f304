"""Whether one of PyTorch's optimizers can go on from the state and the options that a checkpoint has: it is tried.

What an optimizer keeps for a parameter, and what its kernels take for granted of it, differs by class, options and
version of PyTorch, so it is not written down here. An optimizer of the same class gets small parameters: as many
dimensions as the real ones, each of another size. It takes a step from nothing, which shows what it keeps: all of that
must be stored, in the shapes that belong to the real parameters, or its kernels would read beyond the end of a tensor.
Then it takes over what is stored, with ones in place of large tensors, and takes another step. So no state is loaded
that would end the next step of the training with an error about something else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.base.errors import InputError

FAILURES: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What optimizers raise on state or options that are not theirs."""
State = Mapping[str, Mapping[str, Any]]
"""Name of the parameter -> key -> number, or tensor: on the meta device where only its shape and dtype count."""


def try_state(kind: type[torch.optim.Optimizer], parameters: Mapping[str, Tensor], own: Mapping[str, Any],
              options: Mapping[str, Any], state: State) -> None:
    """Raise ``InputError``, which says why, unless an optimizer of that class can go on from the state.

    ``options`` are those of a parameter group that it goes on with. If its ``own`` cannot be tried, nothing can: it
    needs sparse gradients or a closure.
    """
    try:
        _Trial(kind, parameters, own, own).step()
    except FAILURES:
        return
    try:
        fresh = _Trial(kind, parameters, own, options)
        fresh.step()
        for name in [name for name in parameters if name in state]:
            _check_kept(name, parameters[name], fresh.parameters[name], fresh.state(name), state[name])
        again = _Trial(kind, parameters, own, options)
        again.load(state)
        again.step()
    except FAILURES as problem:
        what = str(problem) if isinstance(problem, _UnfitError) else f"{type(problem).__name__}: {problem}"
        raise InputError(what) from problem


class _UnfitError(ValueError):
    """Stored state that is not what the optimizer keeps, with the sentence that says so."""


def _check_kept(name: str, parameter: Tensor, small: Tensor, kept: Mapping[str, Any],
                stored: Mapping[str, Any]) -> None:
    """Raise unless all that the optimizer keeps for a parameter is stored in its shape, and numbers are sound."""
    for key, value in kept.items():
        if stored.get(key) is None and value is not None:
            raise _UnfitError(f"it has no {key!r} of {name!r}")
    sizes = dict(zip(small.shape, parameter.shape, strict=True))
    for key, value in stored.items():
        like, shape = kept.get(key), tuple(value.shape) if isinstance(value, Tensor) else ()
        if isinstance(like, Tensor):
            wanted = tuple(sizes.get(size, size) for size in like.shape)
        else:
            wanted = shape if math.prod(shape) == 1 else tuple(parameter.shape)
        if shape != wanted:
            raise _UnfitError(f"it has {key!r} of {name!r} in the shape {list(shape)}, not {list(wanted)}")
        if isinstance(like, Tensor | int | float) and not isinstance(value, Tensor) and type(value) not in (int, float):
            raise _UnfitError(f"it has {value!r:.60} for {key!r} of {name!r}, not a number")
        if not shape and (not _is_finite(value) or (key == "step" and value < 0)):
            raise _UnfitError(f"it has {float(value)} for {key!r} of {name!r}")


def _is_finite(value: object) -> bool:
    """Return whether a number is; anything that is not a number counts as finite."""
    if isinstance(value, Tensor):
        return bool(value.isfinite())
    return not isinstance(value, int | float) or math.isfinite(value)


def _small(tensor: Tensor) -> Parameter:
    """Return a parameter with as many dimensions, each of another size, but for those of none or one."""
    shape = [size if size < 2 else dim + 2 for dim, size in enumerate(tensor.shape)]
    return Parameter(torch.ones(shape, dtype=tensor.dtype, device=tensor.device),
                     requires_grad=tensor.is_floating_point() or tensor.is_complex())


class _Trial:
    """An optimizer of small parameters."""

    def __init__(self, kind: type[torch.optim.Optimizer], parameters: Mapping[str, Tensor], own: Mapping[str, Any],
                 options: Mapping[str, Any]) -> None:
        self._real = parameters
        self.parameters = {name: _small(tensor) for name, tensor in parameters.items()}
        known = inspect.signature(kind).parameters
        self._optimizer = kind(list(self.parameters.values()), **{key: value for key, value in own.items()
                                                                  if key in known and key != "params"})
        self._optimizer.param_groups[0].update({key: value for key, value in options.items() if key != "params"})

    def load(self, state: State) -> None:
        """Take over the state, ones in place of what is as large as the real parameters."""
        packed = self._optimizer.state_dict()
        packed["state"] = {index: {key: self._fill(name, value) for key, value in state[name].items()}
                           for index, name in enumerate(self.parameters) if name in state}
        self._optimizer.load_state_dict(packed)

    def _fill(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if not value.is_meta:
            return value.clone()
        sizes = zip(value.shape, self._real[name].shape, self.parameters[name].shape, strict=True)
        return torch.ones([few if size == real else size for size, real, few in sizes], dtype=value.dtype)

    def step(self) -> None:
        """Change the parameters once, by gradients of ones; not seen by the hooks of all optimizers."""
        for item in self.parameters.values():
            item.grad = torch.ones_like(item)
        step = type(self._optimizer).step
        getattr(step, "__wrapped__", step)(self._optimizer)

    def state(self, name: str) -> dict[str, Any]:
        """Return what the optimizer keeps for a parameter."""
        kept: dict[str, Any] = self._optimizer.state[self.parameters[name]]
        return kept
