"""Measures what a rank holds while each of its instructions runs, by the categories of the memory account.

    meter = MemoryMeter(executor, buffers=prepared.buffers.values())
    with meter:
        executor.step()
    meter.record()

The device's allocator is asked for the totals (``GpuMemory``, ``CpuMemory``), because whoever looks at operators from
Python changes what they do: while a dispatch mode is on, autograd adds up gradients in new memory that it would else
add in place. On a CPU the allocator's calls are noted by PyTorch's profiler, in the order in which they come, each
thread's for itself. Parameters, gradients, the optimizer's state and messages are looked up where the runtime keeps
them when an instruction ends; all else that was there while it ran is ``activations``: what forwards have kept, and
what the running compute takes inside. What a stage has received and keeps for its backward is with ``buffers`` here,
with ``activations`` in the account; their sum is the same. The model's inputs and outputs do not count.

A meter changes the executor's actions while it is on, and nothing when it is off. Rank 0 gathers what the ranks have
measured, and puts it beside the account (``add_memory``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from weft.base.errors import RunError
from weft.base.files import decode, encode
from weft.model.graph import I64
from weft.model.source import ModelSource
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES, MemoryAccount, account_memory
from weft.plan.program import Program
from weft.run.executor import Executor
from weft.run.result import RankMemory, RunResult
from weft.run.transport import Transport

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


class GpuMemory:
    """What the allocator of a GPU has given to this process; ``there`` and what comes later count, nothing else."""

    def __init__(self, device: torch.device, there: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._other: int = torch.cuda.memory_allocated(device) - storage_bytes(there)
        self._before = 0
        self._readings: list[Reading] = []

    def begin(self) -> None:
        """Note that an instruction begins."""
        self._before = torch.cuda.memory_allocated(self._device) - self._other
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """Note that it has ended."""
        most: int = torch.cuda.max_memory_allocated(self._device)
        self._readings.append(Reading(self._before, most - self._other))

    def readings(self) -> list[Reading]:
        """Return what was held in each instruction, when all is over."""
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
        self._noted: list[_Event] = []
        self._num_threads = 0

    def begin(self) -> None:
        """Note that an instruction begins."""
        with torch.autograd.profiler.record_function(_BEGIN):
            pass

    def end(self) -> None:
        """Note that it has ended."""
        with torch.autograd.profiler.record_function(_END):
            pass

    def readings(self) -> list[Reading]:
        """Return what was held in each instruction, when all is over."""
        return list(_read(sorted(self._noted), self._there))

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
                self._num_threads += 1
                self._noted += [
                    _Event(started + first.cpu_elapsed_us(event), order, self._num_threads, event.kind(),
                           event.name(), event.cpu_memory_usage() if event.kind() == "memory_alloc" else 0)
                    for order, event in enumerate(events)]


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


def live_memory(device: torch.device, there: Iterable[Tensor]) -> GpuMemory | CpuMemory:
    """Return a counter for the device that begins with these tensors."""
    return GpuMemory(device, there) if device.type == "cuda" else CpuMemory(there)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages behind these tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _BUFFERS = range(len(CATEGORIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterRecord:
    """What one rank has measured; the columns have one entry for each of its instructions."""

    static: tuple[int, ...]
    """By category: parameters and buffers of the model, gradients that are exchanged, optimizer's state, none, and
    room for factors of gradients, which are there all the time."""
    peak: tuple[int, ...]
    """The most that was held while the instruction ran."""
    before: tuple[int, ...]
    """What was held when it began."""
    gradients: tuple[int, ...]
    """Gradients that were there when it ended, besides those in ``static``."""
    buffers: tuple[int, ...]
    """Messages, likewise."""
    at: tuple[tuple[str, ...], ...]
    """What was running when the most was held, from the outside in; empty where the allocator does not say."""
    inside: tuple[int, ...]
    """Of the most, what the operator that was running gave back when it ended: its workspace."""


class MemoryMeter:
    """Measures the steps that an executor takes inside its context; the last of them counts."""

    def __init__(self, executor: Executor, *, buffers: Iterable[Tensor] = ()) -> None:
        """Measure this executor; ``buffers`` are those of the model that the rank holds."""
        self._executor, self._model_buffers = executor, list(buffers)
        self._rows: list[list[int]] = []
        self._actions: list[Callable[[], None]] = []
        self._live = live_memory(executor.transport.device, ())
        self._watch = self._live.watching()

    def __enter__(self) -> MemoryMeter:
        executor = self._executor
        executor.parameters.clear_gradients()  # as a step does first: what goes was there before anybody counted
        there = [*self._parameters(), *self._gradients(), *self._optimizer_state(), *self._messages(),
                 *self._results()]
        self._live = live_memory(executor.transport.device, there)
        self._rows = [[0, 0, 0] for _ in executor.binder.actions]
        self._actions = list(executor.binder.actions)
        executor.binder.actions[:] = [self._metered(place, action) for place, action in enumerate(self._actions)]
        executor.binder.lane.around = self._live.watching
        executor.transport.is_metered = executor.transport.device.type == "cpu"
        self._watch = self._live.watching()
        self._watch.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._watch.__exit__(*failure)
        self._executor.binder.actions[:] = self._actions
        self._executor.binder.lane.around = None
        self._executor.transport.is_metered = False

    def _metered(self, place: int, action: Callable[[], None]) -> Callable[[], None]:
        live, row = self._live, self._rows[place]

        def metered() -> None:
            done = storage_bytes(self._results())  # of earlier instructions
            live.begin()
            action()
            live.end()
            row[:] = done, storage_bytes(self._gradients()), storage_bytes(self._messages())

        return metered

    def record(self) -> MeterRecord:
        """Return what was measured in the last step."""
        readings = self._live.readings()[-len(self._rows):] if self._rows else []
        if not readings and self._executor.binder.actions:
            raise RunError("the meter has measured nothing: take a step inside its context first")
        parameters = self._executor.parameters
        flat = storage_bytes([*(tensor for tensors in parameters.flat for tensor in tensors),
                              *parameters.units.lasting_gradients()])
        room = storage_bytes([parameters.units.room,
                              *(block.flat for block in self._executor.binder.factors.values())])
        done, gradients, buffers = (tuple(column) for column in zip(*self._rows, strict=True)) if self._rows \
            else ((), (), ())
        return MeterRecord(
            static=(storage_bytes(self._parameters()), flat, storage_bytes(self._optimizer_state()), 0, room),
            peak=tuple(item.peak - gone for item, gone in zip(readings, done, strict=True)),
            before=tuple(item.before - gone for item, gone in zip(readings, done, strict=True)),
            at=tuple(item.at for item in readings), inside=tuple(item.inside for item in readings),
            gradients=tuple(item - flat for item in gradients),
            buffers=tuple(item - room for item in buffers))

    # ---- where the runtime keeps what ------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[Tensor]:
        yield from self._executor.parameters.tensors.values()
        yield from self._model_buffers

    def _gradients(self) -> Iterator[Tensor]:
        parameters = self._executor.parameters
        yield from (tensor for tensors in parameters.flat for tensor in tensors)
        yield from (*parameters.units.lasting_gradients(), *parameters.units.passing_gradients())
        yield from (item.grad for item in parameters.tensors.values() if item.grad is not None)

    def _optimizer_state(self) -> Iterator[Tensor]:
        optimizer = self._executor.optimizer
        for state in {} if optimizer is None else optimizer.state.values():
            yield from (item for item in state.values() if isinstance(item, Tensor))

    def _results(self) -> Iterator[Tensor]:
        """Yield what the model gives, which stays until the caller takes it."""
        yield from (loss for loss, _ in self._executor.binder.losses)
        yield from (tensor for _, _, values in self._executor.binder.results for tensor in values.values())

    def _messages(self) -> Iterator[Tensor]:
        """Yield room for messages, what stages hand over, and what is under way."""
        binder = self._executor.binder
        yield from (tensor for tensors in binder.wiring.arrived.values() for tensor in tensors)
        yield from binder.wiring.buffers.free()
        yield from (block.flat for block in binder.factors.values())
        yield from (*binder.parameters.units.wholes(), binder.parameters.units.room)
        for cell in binder.wiring.cells.values():
            yield from cell.outputs or ()
            yield from (item for item in cell.gradients if item is not None)
        for transfer in binder.transfers.values():
            yield from transfer.tensors


def measured_account(program: Program, records: Sequence[MeterRecord]) -> MemoryAccount:
    """Return what all ranks have measured in the form of the memory account."""
    static = np.asarray([record.static for record in records], dtype=np.int64).reshape(len(records), len(CATEGORIES))
    peak, gradients, buffers = (_column(records, name) for name in ("peak", "gradients", "buffers"))
    held: I64 = static.sum(axis=1)[program.rank_of()]
    return MemoryAccount(static=static, gradients=gradients, activations=peak - held - gradients - buffers,
                         buffers=buffers, rank_start=program.rank_start)


def _column(records: Sequence[MeterRecord], name: str) -> I64:
    return np.asarray([item for record in records for item in getattr(record, name)], dtype=np.int64)


def compare_memory(program: Program, account: MemoryAccount, records: Sequence[MeterRecord]) -> tuple[RankMemory, ...]:
    """Return each rank's peak by the account and as measured."""
    measured, before = measured_account(program, records), _column(records, "before")
    result = []
    for rank, device in enumerate(program.rank_names):
        at = [_largest(item, rank) for item in (account, measured)]
        result.append(RankMemory(
            device=device, account=account.peak(rank), measured=measured.peak(rank),
            inside=measured.peak_bytes(rank) - int(before[at[1]]) if at[1] >= 0 else 0,
            account_at=program.label(at[0]) if at[0] >= 0 else "",
            measured_at=program.label(at[1]) if at[1] >= 0 else ""))
    return tuple(result)


def _largest(account: MemoryAccount, rank: int) -> int:
    """Return the instruction during which the rank holds most; -1 where it has none."""
    held = account.held(rank)
    return int(account.rank_start[rank]) + int(np.argmax(held)) if len(held) else -1


def measure_step(executor: Executor, *, buffers: Iterable[Tensor] = (), number: int = 0) -> MeterRecord:
    """Return what the rank holds in one more step of the executor; all ranks take it together."""
    with MemoryMeter(executor, buffers=buffers) as meter:
        executor.step(number)
    executor.take_loss()
    executor.take_results()
    return meter.record()


def add_memory(result: RunResult | None, program: Program, own: MeterRecord, *, source: ModelSource,
               transport: Transport) -> RunResult | None:
    """Return rank 0's result with the memory of all ranks, in its timeline too; all ranks call this together."""
    found = transport.gather_records(encode(own))
    if result is None or found is None:
        return result
    assert result.timeline is not None
    records = [decode(MeterRecord, record, where="memory") for record in found]
    timeline = replace(result.timeline, stored_memory=measured_account(program, records), memory_source="measured")
    return replace(result, memory=compare_memory(program, promised_memory(program, source), records), timeline=timeline)


def promised_memory(program: Program, source: ModelSource) -> MemoryAccount:
    """Return the account of a program that is run, with what autograd keeps of each operator looked at, as in planning.

    To run it, the model was traced without that, which takes longer.
    """
    graph = trace(source, batch=program.graph.batch, batch_dims=True).graph
    return account_memory(lower(replace(program.plan, model=replace(program.plan.model, digest=graph.digest)), graph))
