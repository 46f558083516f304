"""What lives between instructions: cells, messages under way, and buffers for what arrives.

A *cell* is one micro-batch in one stage instance between its forward and the end of its backward. Tensors that arrive
lie in buffers that are assigned like registers: taken at the receive, given back after the last compute that may read
them, and used again by later receives and later steps. A message is kept alive by its ``Transfer`` until it is done.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.run.split_backward import Deferred
from weft.run.staging import Work
from weft.run.transport import PeerLost


class Cell:
    """What one micro-batch keeps in one instance."""

    __slots__ = ("arguments", "deferred", "edges", "gradients", "leaves", "outputs", "random_states")

    def __init__(self) -> None:
        self.arguments: list[Any] = []
        self.outputs: tuple[Tensor, ...] | None = None
        self.edges: list[Any] = []
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.deferred: list[Deferred] = []
        self.random_states: dict[str, Tensor] = {}


class Transfer:
    """A message under way: its works, what must stay alive, and when it was seen to be done."""

    __slots__ = ("done_ns", "ends", "position", "synchronize", "tensors", "works")

    def __init__(self, position: int, ends: array[int], synchronize: Callable[[], None] | None) -> None:
        self.works: Sequence[Work] = ()
        self.tensors: Sequence[Tensor] = ()
        self.position, self.ends, self.synchronize = position, ends, synchronize
        self.done_ns = 0

    def wait(self) -> None:
        """Return when the message is done; at once if it was waited for before."""
        if self.works:
            try:
                for work in self.works:
                    work.wait()
                if self.synchronize is not None:
                    self.synchronize()
            except RuntimeError as problem:
                raise PeerLost(f"a message or collective failed: {problem}") from problem
            self.works = ()
            self.tensors = ()
            self.done_ns = time.perf_counter_ns()
        if self.done_ns:
            self.ends[self.position] = self.done_ns

    def is_seen_done(self) -> bool:
        """Return whether a collective of the backend is done, and note the time if so; on a CPU only."""
        works: Any = self.works
        if self.synchronize is not None or not all(work.is_completed() for work in works):
            return False
        self.wait()
        return True


class Buffers:
    """Tensors by shape and dtype that are free to be used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of that shape, with any values."""
        free = self._free.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self._device)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors back: nobody will read them any more."""
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)
