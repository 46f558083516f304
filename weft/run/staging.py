"""Messages of a GPU by way of the host's memory: copies there and back that run beside the computes.

What is sent is copied on a stream of its own, which waits for what the rank has computed so far; a thread sends the
copy when it is there, while the rank goes on. One thread, so that collectives start in the order in which they were
asked for. What arrives is copied back when the rank waits for it, in the stream that will read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A transfer or collective under way."""

    def wait(self) -> Any:
        """Return when it is done (on a GPU: when later kernels will see its result)."""


class OnHost:
    """A transfer of a tensor's copy in the host's memory; what arrives goes to the tensor when it is waited for."""

    def __init__(self, work: Future[Work] | Work, copy: Tensor, target: Tensor | None = None) -> None:
        self._work, self._copy, self._target = work, copy, target

    def wait(self) -> None:
        """Return when it is done and, for an arrival, on its way to the device before all that is issued later."""
        work = self._work.result() if isinstance(self._work, Future) else self._work
        work.wait()
        if self._target is not None:
            self._target.copy_(self._copy, non_blocking=True)


class Staging:
    """The stream and the thread of one rank's outgoing copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return room in memory that the GPU copies from and to at full speed."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._is_cuda)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in the host's memory, when it is there."""
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)

    def send(self, tensor: Tensor, start: Callable[[Tensor], Work], *, brings_back: bool = False) -> OnHost:
        """Copy the tensor and ``start`` a transfer of the copy; what that leaves in it may be to be brought back.

        The tensor must stay as it is until the work has been waited for.
        """
        copy = self.room(tensor.shape, tensor.dtype)
        is_there = self._begin_copy(copy, tensor)

        def run() -> Work:
            if is_there is not None:
                is_there.synchronize()
            return start(copy)

        return OnHost(self._thread.submit(run), copy, tensor if brings_back else None)

    def _begin_copy(self, copy: Tensor, tensor: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            copy.copy_(tensor)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
            is_there = torch.cuda.Event()
            is_there.record(self._stream)
        tensor.record_stream(self._stream)
        return is_there
