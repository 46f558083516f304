"""The bytes of tensors that a process holds on its device, now and at most.

On a GPU the allocator counts them, on a CPU ``weft.model.live_storages``. What one operator takes and gives back inside
is seen by the allocator only.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.model.live_storages import LiveStorages


class LiveMemory(Protocol):
    """A counter of bytes."""

    def now(self) -> int:
        """Return the bytes that are held."""

    def peak(self) -> int:
        """Return the most that was held since ``restart``."""

    def restart(self) -> None:
        """Let ``peak`` begin with what is held now."""

    def recount(self, tensors: Iterable[Tensor]) -> None:
        """Look at the sizes of these tensors' storages again: they change without an operator."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context inside which the thread's new tensors are seen."""


class GpuMemory:
    """What the allocator of a GPU has given to this process; ``there`` and what comes later count, nothing else."""

    def __init__(self, device: torch.device, there: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._other: int = torch.cuda.memory_allocated(device) - storage_bytes(there)
        self.restart()

    def now(self) -> int:
        """Return the bytes that are held."""
        held: int = torch.cuda.memory_allocated(self._device)
        return held - self._other

    def peak(self) -> int:
        """Return the most that was held since ``restart``."""
        most: int = torch.cuda.max_memory_allocated(self._device)
        return most - self._other

    def restart(self) -> None:
        """Let ``peak`` begin with what is held now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def recount(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the allocator sees everything."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: the allocator sees everything."""
        return nullcontext()


def live_memory(device: torch.device, there: Iterable[Tensor]) -> LiveMemory:
    """Return a counter for the device that begins with these tensors."""
    return GpuMemory(device, there) if device.type == "cuda" else LiveStorages(there)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages behind these tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
