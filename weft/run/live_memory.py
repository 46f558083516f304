"""The bytes of tensors that a process holds on its device while each of its instructions runs, now and at most.

    with live_memory(device, there) as memory:
        for action in actions:
            memory.begin()
            action()
            memory.end()
    memory.readings()

The device's allocator is asked, because whoever looks at operators from Python changes what they do: while a dispatch
mode is on, autograd adds up gradients in new memory that it would else add in place. On a CPU the allocator's calls are
noted by PyTorch's profiler, in the order in which they come, each thread's for itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Protocol

import torch
from torch import Tensor

_BEGIN: Final = "weft instruction begins"
_END: Final = "weft instruction ends"
_STARTED: Final = "__start_profile"
"""The mark that the profiler makes in the thread that starts it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was held in one instruction."""

    before: int
    """When it began."""
    peak: int
    """At most."""
    at: tuple[str, ...] = ()
    """What was running when the most was reached, from the outside in; empty where the allocator does not say."""
    inside: int = 0
    """Of the most, what the operator that was running had given back when it ended: its workspace."""


class LiveMemory(Protocol):
    """Counts bytes while instructions run."""

    def __enter__(self) -> LiveMemory: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None: ...

    def begin(self) -> None:
        """Note that an instruction begins."""

    def end(self) -> None:
        """Note that it has ended."""

    def readings(self) -> list[Reading]:
        """Return what was held in each instruction, when all is over."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context in which another thread's calls count as well."""


class GpuMemory:
    """What the allocator of a GPU has given to this process; ``there`` and what comes later count, nothing else."""

    def __init__(self, device: torch.device, there: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._other: int = torch.cuda.memory_allocated(device) - storage_bytes(there)
        self._before = 0
        self._readings: list[Reading] = []

    def __enter__(self) -> GpuMemory:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def begin(self) -> None:
        """Note that an instruction begins."""
        self._before = torch.cuda.memory_allocated(self._device) - self._other
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """Note that it has ended."""
        most: int = torch.cuda.max_memory_allocated(self._device)
        self._readings.append(Reading(self._before, most - self._other))

    def readings(self) -> list[Reading]:
        """Return what was held in each instruction."""
        return self._readings

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: the allocator sees all threads."""
        return nullcontext()


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    """Something that the profiler has noted: an operator begins or ends, or memory is given or taken back."""

    time_us: float
    order: int
    thread: int
    kind: str
    name: str
    num_bytes: int


class CpuMemory:
    """What the host's allocator gives to this thread, and to those that are watched; what is ``there`` counts, too."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        self._there = storage_bytes(there)
        self._noted: list[list[_Event]] = []
        self._readings: list[Reading] = []

    def __enter__(self) -> CpuMemory:
        self._own = self.watching()
        self._own.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._own.__exit__(kind, value, trace)
        if kind is None:
            self._readings = list(_read(sorted(event for events in self._noted for event in events), self._there))

    def begin(self) -> None:
        """Note that an instruction begins."""
        with torch.autograd.profiler.record_function(_BEGIN):
            pass

    def end(self) -> None:
        """Note that it has ended."""
        with torch.autograd.profiler.record_function(_END):
            pass

    def readings(self) -> list[Reading]:
        """Return what was held in each instruction."""
        return self._readings

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which the calling thread's calls of the allocator are noted."""
        autograd: Any = torch._C._autograd
        profiler: Any = torch._C._profiler
        started = time.perf_counter_ns() * 1e-3
        autograd._enable_profiler_legacy(profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, False, True, False, False, False, profiler._ExperimentalConfig()))
        try:
            yield
        finally:
            noted = autograd._disable_profiler_legacy()
            first = next(event for events in noted for event in events if event.name() == _STARTED)
            for events in noted:  # those of a backend's threads too, which begin later
                thread = len(self._noted)
                self._noted.append([
                    _Event(started + first.cpu_elapsed_us(event), order, thread, event.kind(), event.name(),
                           event.cpu_memory_usage() if event.kind() == "memory_alloc" else 0)
                    for order, event in enumerate(events)])


def _read(events: Iterable[_Event], held: int) -> Iterator[Reading]:
    """Yield what was held in each instruction; ``held`` at the beginning."""
    running: dict[int, list[str]] = {}
    reading, waits = Reading(held, held), -1
    for event in events:
        names = running.setdefault(event.thread, [])
        if event.kind == "push":
            if event.name == _END:
                yield reading
            names.append(event.name)
            if event.name == _BEGIN:
                reading, waits = Reading(held, held), -1
        elif event.kind == "pop" and names:
            names.pop()
            if waits == event.thread and not _is_in_operator(names):
                reading, waits = replace(reading, inside=max(0, reading.peak - held)), -1
        elif event.kind == "memory_alloc":
            held += event.num_bytes
            if held > reading.peak:
                reading = Reading(reading.before, held, tuple(names))
                waits = event.thread if _is_in_operator(names) else -1


def _is_in_operator(names: Iterable[str]) -> bool:
    return any(name.startswith("aten::") for name in names)


def live_memory(device: torch.device, there: Iterable[Tensor]) -> LiveMemory:
    """Return a counter for the device that begins with these tensors."""
    return GpuMemory(device, there) if device.type == "cuda" else CpuMemory(there)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages behind these tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
