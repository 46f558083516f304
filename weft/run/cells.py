"""What lives between instructions: cells, messages under way, and buffers for what arrives.

A *cell* is one micro-batch in one stage instance between its forward and the end of its backward. Tensors that arrive
lie in buffers that are assigned like registers: taken at the receive, given back after the last compute that may read
them, and used again by later receives and later steps. A buffer has memory only while it is taken. A message is kept
alive by its ``Transfer`` until it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.run.clock import Clock, Moment
from weft.run.failures import failure
from weft.run.split_backward import Deferred
from weft.run.status import StatusLine
from weft.run.wire import Work, strides_in


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

    __slots__ = ("clock", "done", "ends", "position", "status", "tensors", "works")

    def __init__(self, position: int, ends: list[Moment], clock: Clock, status: StatusLine | None = None) -> None:
        """Those who wait for it say so on the line ``status``."""
        self.works: Sequence[Work] = ()
        self.tensors: Sequence[Tensor] = ()
        self.position, self.ends, self.clock, self.status = position, ends, clock, status
        self.done: Moment = None

    def wait(self) -> None:
        """Return when the message is done; at once if it was waited for before."""
        if self.works:
            if self.status is not None:
                self.status.begin_wait(self.position)
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as problem:
                raise failure(problem, lost="a message or collective failed",
                              doing="a message or collective") from problem
            if self.status is not None:
                self.status.end_wait()
            self.works = ()
            self.tensors = ()
            self.done = self.clock.now()
        if self.done is not None:
            self.ends[self.position] = self.done

    def is_seen_done(self) -> bool:
        """Return whether a collective of the backend is done, and note the time if so; on a CPU only."""
        works: Any = self.works
        if self.clock.is_gpu or not all(work.is_completed() for work in works):
            return False
        self.wait()
        return True


def occupy(buffer: Tensor) -> None:
    """Give a buffer memory, with any values, unless it has some."""
    num_bytes = buffer.numel() * buffer.element_size()
    storage = buffer.untyped_storage()
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


def vacate(buffers: Sequence[Tensor]) -> None:
    """Take the memory of buffers back; the tensors stay what they are for the next to occupy them."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


class Buffers:
    """Tensors by shape, strides and dtype that are free to be used.

    They have no memory until somebody occupies them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, order: Sequence[int]) -> Tensor:
        """Return a tensor of that shape whose dimensions lie in that order, from the slowest to the fastest."""
        strides = strides_in(shape, order)
        free = self._free.get((shape, strides, dtype))
        if free:
            return free.pop()
        buffer = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        vacate([buffer])
        return buffer

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors back: nobody will read them any more."""
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.stride(), tensor.dtype), []).append(tensor)

    def free(self) -> list[Tensor]:
        """Return the tensors that nobody uses; when all instructions are bound, that is all of them."""
        return [tensor for tensors in self._free.values() for tensor in tensors]
