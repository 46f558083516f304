"""One rank of a plan alone, with pretended others: what its memory's allocator sees in a step.

Messages and collectives give tensors of the right shapes, made as the transport makes them, since the values do not
matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.plan import Plan
from weft.run.executor import Executor, loaded_executor
from weft.run.prepare import Prepared, Tracer, lower_to_run, prepare_rank
from weft.run.status import StatusLine


class Done:
    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


class PretendedTransport:
    """What a rank needs of a transport, without other ranks."""

    is_gloo = True
    staging = None

    def __init__(self, num_ranks: int, rank: int = 0) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, torch.device("cpu")
        self.status = StatusLine()

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        return Done()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Done:
        tensor.zero_()
        return Done()

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Done:
        return Done()

    def lane_group(self, ranks: tuple[int, ...]) -> None:
        return None

    def reduced(self, tensor: Tensor, ranks: tuple[int, ...], how: str = "sum") -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def gathered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        result = tensor.new_empty((len(ranks), *tensor.shape))
        result[:] = tensor
        return result

    def sum_scattered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return tensor[0].clone()

    def all_to_all(self, flat: Tensor, ranks: tuple[int, ...], *, sent: list[int], received: list[int]) -> Tensor:
        return flat.new_zeros(sum(received))

    def exchanged(self, flat: Tensor, ranks: tuple[int, ...], *, sent: list[int],
                  received: list[int]) -> Callable[[], Tensor]:
        result = flat.new_zeros(sum(received))
        return lambda: result


def prepared(tracer: Tracer, plan: Plan, rank: int = 0) -> tuple[Prepared, Executor]:
    """Return what a rank executes, with the model's inputs."""
    transport = PretendedTransport(len(plan.cluster.devices), rank)
    program = lower_to_run(plan, tracer)
    ready = prepare_rank(program, tracer, transport, seed=0)
    return ready, loaded_executor(ready, tracer.source, transport)


def measured(tracer: Tracer, plan: Plan, rank: int = 0) -> int:
    """Return the most that a rank holds in its second step, optimizer state not included."""
    ready, executor = prepared(tracer, plan, rank)
    executor.step()
    ready.parameters.clear_gradients()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.step()
    held = sum(item.numel() * item.element_size() for item in ready.parameters.tensors.values())
    held += sum(flat.numel() * flat.element_size() for flats in ready.parameters.flat for flat in flats)
    buffers = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
               for tensors in executor.binder.wiring.arrived.values() for tensor in tensors}
    return held + sum(buffers.values()) + _peak(profile)


def _peak(profile: Any) -> int:
    events = [(item.start_ns(), item.nbytes()) for item in profile.profiler.kineto_results.events()
              if item.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(events, key=lambda item: item[0]):
        now += change
        peak = max(peak, now)
    return peak
