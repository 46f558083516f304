"""Timers for single operators: thread CPU time, wall time, or CUDA events; see ``make_clock``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

_CALIBRATION_RUNS: Final = 200
_EVICT_BYTES: Final = 128 * 2**20
CACHE_BYTES: Final = 32 * 2**20
"""A model with less than this in parameters may stay in cache from step to step."""
_SLEEP_CYCLES: Final = 2_000_000
"""About a millisecond: longer than the host needs to queue an operator and its backward."""


class Clock(Protocol):
    """Takes the time between ``start`` and ``stop``; ``settle`` ends a pass over the model."""

    def start(self) -> Any:
        """Return a mark of now."""

    def stop(self, mark: Any, sink: Callable[[float], None]) -> None:
        """Give the seconds since ``mark`` to ``sink``, at the latest when the pass settles."""

    def settle(self) -> None:
        """Finish the pass: deliver outstanding times, and clear what caches hold of it if the model is large."""

    def floor(self) -> float:
        """Return the least time that a single operator takes in a running model."""


class CpuClock:
    """Thread CPU time for one thread, so that other processes do not count; wall time for several."""

    def __init__(self, threads: int, *, evict: bool) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self._own_s = 0.0
        self._own_s = _median_time(self._now, lambda: None)
        self._scratch = torch.zeros(_EVICT_BYTES // 4 if evict else 0)

    def start(self) -> float:
        """Return the present time."""
        return self._now()

    def stop(self, mark: float, sink: Callable[[float], None]) -> None:
        """Give the time since ``mark``, less what reading the clock takes."""
        sink(max(self._now() - mark - self._own_s, 0.0))

    def settle(self) -> None:
        """Write more memory than the caches hold: a large model's parameters are not in them when a layer runs."""
        self._scratch.add_(1.0)

    def floor(self) -> float:
        """Return zero: small operators are timed as they are."""
        return 0.0


class CudaClock:
    """Time on the GPU between two events in its stream.

    The stream pauses before each operator until the host has queued it, so what is timed is the work of the GPU, as in
    a model that keeps it busy. A model of tiny operators waits for the host instead and takes longer than their sum.
    """

    def __init__(self, *, evict: bool) -> None:
        self._open: list[tuple[Any, Any, Callable[[float], None]]] = []
        self._scratch = torch.zeros(_EVICT_BYTES // 4 if evict else 0, device="cuda")
        self._own_s = 0.0
        self._own_s = self._empty_time()
        self._floor = self._launch_time()

    def _empty_time(self) -> float:
        times: list[float] = []
        for _ in range(_CALIBRATION_RUNS // 10):
            self.stop(self.start(), times.append)
        self.settle()
        return statistics.median(times)

    def _launch_time(self) -> float:
        tiny = torch.zeros(1, device="cuda")
        for _ in range(_CALIBRATION_RUNS):
            tiny = tiny + 1
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALIBRATION_RUNS):
            tiny = tiny + 1
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / _CALIBRATION_RUNS

    def start(self) -> Any:
        """Return an event in the stream, behind a pause in which the host gets ahead."""
        torch.cuda._sleep(_SLEEP_CYCLES)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, mark: Any, sink: Callable[[float], None]) -> None:
        """Note the event pair; the time is known when the pass settles."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._open.append((mark, event, sink))

    def settle(self) -> None:
        """Wait for the GPU, deliver all times, and overwrite its cache."""
        self._scratch.add_(1.0)
        torch.cuda.synchronize()
        for begin, end, sink in self._open:
            sink(max(begin.elapsed_time(end) / 1e3 - self._own_s, 0.0))
        self._open.clear()

    def floor(self) -> float:
        """Return the time between two launches of tiny operators."""
        return self._floor


def make_clock(device: torch.device, threads: int, parameter_bytes: int) -> CpuClock | CudaClock:
    """Return the clock for ``device`` and a model of ``parameter_bytes``, which says whether caches are cleared."""
    evict = parameter_bytes > CACHE_BYTES
    return CudaClock(evict=evict) if device.type == "cuda" else CpuClock(threads, evict=evict)


def _median_time(now: Callable[[], float], work: Callable[[], None]) -> float:
    times = []
    for _ in range(_CALIBRATION_RUNS):
        begin = now()
        work()
        times.append(now() - begin)
    return statistics.median(times)
