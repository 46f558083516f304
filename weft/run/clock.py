"""When things happen on a rank: on a CPU the time itself, on a GPU a mark in its stream that is read when all is done.

So a rank on a GPU queues its instructions and waits for none of them; measuring changes nothing.

    clock.begin()               once before a step: the marks of the last are used again
    moments[3] = clock.now()    may happen on the device much later
    clock.read(moments)[0]      nanoseconds of ``time.perf_counter_ns``; waits until the device has done what was queued
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weft.model.graph import F64

Moment = Any
"""Nanoseconds, or an event of the GPU."""


class Clock:
    """The clock of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self._device, self._marks, self._used = device, list[Any](), 0
        self._stream: Any = None
        self.now: Callable[[], Moment] = self._mark if self.is_gpu else time.perf_counter_ns

    def begin(self) -> None:
        """Use the marks again, from the first, in the stream that is used now."""
        self._used = 0
        if self.is_gpu:
            self._stream = torch.cuda.current_stream(self._device)

    def moments(self, count: int) -> list[Moment]:
        """Return room for so many moments, all of them now."""
        self.begin()
        return [self.now()] * count

    def _mark(self) -> Any:
        if self._used == len(self._marks):
            self._marks.append(torch.cuda.Event(enable_timing=True))
        mark = self._marks[self._used]
        self._used += 1
        mark.record(self._stream)
        return mark

    def read(self, *moments: Sequence[Moment]) -> list[F64]:
        """Return rows of moments in nanoseconds."""
        if not self.is_gpu:
            return [np.asarray(row, dtype=np.float64) for row in moments]
        last = torch.cuda.Event(enable_timing=True)
        last.record(torch.cuda.current_stream(self._device))
        last.synchronize()
        end_ns = time.perf_counter_ns()
        return [np.asarray([end_ns - mark.elapsed_time(last) * 1e6 for mark in row]) for row in moments]
