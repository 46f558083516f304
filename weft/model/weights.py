"""Parameter values that need no file: the same for a name and a seed on every rank, and in the reference run.

A zoo model is built without memory for its parameters (``without_memory``). Whoever needs a value asks for it by name:
``initial_value`` depends on nothing but the name, the shape and the seed, so each rank makes just its own parameters,
and ``materialize`` gives the single-process reference the very same ones. Of tied parameters the first name counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from weft.base.errors import ModelError

STANDARD_DEVIATION: Final = 0.02
"""Of the values of matrices and kernels, as GPT-2 and BERT start."""
_FILLERS: Final = ("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "xavier_uniform_",
                   "xavier_normal_", "kaiming_uniform_", "kaiming_normal_")
"""Functions of ``torch.nn.init`` that take long to do nothing to a tensor without memory."""
_LARGE_ENTRIES: Final = 1 << 28
"""Uninitialised tensors with more are parameters (the experts of a layer): even to reserve their memory may fail."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Let modules that are built in the body have parameters on ``meta``; buffers keep their true values."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            param._is_hf_initialized = True  # transformers then leaves it alone: drawing nothing takes it long
        register(self, name, param)

    def empty_on_meta(*sizes: Any, **options: Any) -> torch.Tensor:
        if "device" not in options and "out" not in options:
            found = empty(*sizes, **options, device="meta")
            if found.numel() > _LARGE_ENTRIES:
                return found
        return empty(*sizes, **options)

    fillers, empty = {name: getattr(torch.nn.init, name) for name in _FILLERS}, torch.empty
    torch.nn.Module.register_parameter = register_on_meta
    torch.empty = empty_on_meta
    for name, filler in fillers.items():
        setattr(torch.nn.init, name, partial(_fill_unless_meta, filler))
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register
        torch.empty = empty
        for name, filler in fillers.items():
            setattr(torch.nn.init, name, filler)


def _fill_unless_meta(filler: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any,
                      **kwargs: Any) -> torch.Tensor:
    return tensor if tensor.is_meta else filler(tensor, *args, **kwargs)


def initial_value(name: str, shape: Sequence[int], dtype: torch.dtype, seed: int,
                  device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the starting value of the parameter ``name``: biases 0, scales (at most one dimension) 1, others random.

    Random values are drawn in float32 and then converted, so that runs in different dtypes start alike.
    """
    leaf = name.rsplit(".", 1)[-1]
    if "bias" in leaf:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    if len(shape) <= 1:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    value = torch.randn(tuple(shape), generator=generator, dtype=torch.float32).mul_(STANDARD_DEVIATION)
    return value.to(dtype=dtype, device=device)


def materialize(module: torch.nn.Module, seed: int, device: torch.device | str = "cpu") -> torch.nn.Module:
    """Return ``module`` itself, its meta parameters replaced by their initial values; others keep their values.

    Tied parameters stay tied.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        owner, leaf = _owner(module, name)
        if id(parameter) not in made:
            value = (initial_value(name, parameter.shape, parameter.dtype, seed, device) if parameter.is_meta
                     else parameter.detach().to(device))
            made[id(parameter)] = torch.nn.Parameter(value, parameter.requires_grad)
        setattr(owner, leaf, made[id(parameter)])  # not through _parameters: nn.LSTM keeps a second list
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if buffer.is_meta:
            raise ModelError(f"buffer {name!r} is on the meta device and has no value: give buffers real values")
        owner, leaf = _owner(module, name)
        setattr(owner, leaf, buffer.to(device))
    return module


def _owner(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
