"""Timers for single operators: thread CPU time, wall time, or CUDA events; see ``make_clock``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

_CALIBRATION_RUNS: Final = 200
_EVICT_BYTES: Final = 128 * 2**20
_SLEEP_CYCLES: Final = 400_000
"""About a quarter of a millisecond: longer than autograd needs to start its first kernel."""


class Clock(Protocol):
    """Takes the time between ``start`` and ``stop``; ``settle`` ends a pass over the model."""

    def start(self, *, ahead: bool = False) -> Any:
        """Return a mark of now; with ``ahead`` the device is kept busy until the host has queued the work."""

    def stop(self, mark: Any, sink: Callable[[float], None]) -> None:
        """Give the seconds since ``mark`` to ``sink``, at the latest when the pass settles."""

    def settle(self) -> None:
        """Finish the pass: deliver outstanding times, and clear what caches hold of it."""

    def floor(self) -> float:
        """Return the least time that a single operator takes in a running model."""


class CpuClock:
    """Thread CPU time for one thread, so that other processes do not count; wall time for several."""

    def __init__(self, threads: int) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self._own_s = 0.0
        self._own_s = _median_time(self._now, lambda: None)
        self._scratch = torch.zeros(_EVICT_BYTES // 4)

    def start(self, *, ahead: bool = False) -> float:
        """Return the present time; ``ahead`` means nothing on a CPU."""
        return self._now()

    def stop(self, mark: float, sink: Callable[[float], None]) -> None:
        """Give the time since ``mark``, less what reading the clock takes."""
        sink(max(self._now() - mark - self._own_s, 0.0))

    def settle(self) -> None:
        """Write more memory than the caches hold: in a model, a layer's parameters are never in them either."""
        self._scratch.add_(1.0)

    def floor(self) -> float:
        """Return zero: small operators are timed as they are."""
        return 0.0


class CudaClock:
    """Time on the GPU's stream between two events, idle time while it waits for the host included."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any, Callable[[float], None]]] = []
        self._scratch = torch.zeros(_EVICT_BYTES // 4, device="cuda")
        self._floor = self._launch_time()

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

    def start(self, *, ahead: bool = False) -> Any:
        """Return an event in the stream; with ``ahead`` behind a pause in which the host gets ahead."""
        if ahead:
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
            sink(begin.elapsed_time(end) / 1e3)
        self._open.clear()

    def floor(self) -> float:
        """Return the time between two launches of tiny operators."""
        return self._floor


def make_clock(device: torch.device, threads: int) -> CpuClock | CudaClock:
    """Return the clock for ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock(threads)


def backward_start_time(clock: Clock, device: torch.device) -> float:
    """Return what calling autograd for one operator costs beyond the operator: a whole model pays it once."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    times: list[float] = []
    for _ in range(_CALIBRATION_RUNS):
        output = leaf.view(1)
        seed = torch.ones(1, device=device)
        mark = clock.start(ahead=True)
        torch.autograd.grad(output, leaf, seed)
        clock.stop(mark, times.append)
    clock.settle()
    return statistics.median(times)


def _median_time(now: Callable[[], float], work: Callable[[], None]) -> float:
    times = []
    for _ in range(_CALIBRATION_RUNS):
        begin = now()
        work()
        times.append(now() - begin)
    return statistics.median(times)
