"""Ranks in forked processes that run plans of one model one after the other, and say what came out, as measured too."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import Tensor

from weft.plan.plan import Plan
from weft.plan.program import Op, Phase
from weft.run.executor import Executor, loaded_executor
from weft.run.memory_meter import MeterRecord, measure_step
from weft.run.parameters import gradient_regions, kept_regions
from weft.run.prepare import Prepared, Tracer, connect_ranks, lower_to_run, prepare_rank
from weft.run.transport import Transport, open_store

LIMIT_S = 60.0
"""A plan that takes longer hangs."""
COMPILING_S = 500.0
"""The same for one that is compiled before it runs."""
_CHANGES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "doubled gradient": lambda before, after: 2 * after - before,
    "skipped micro-batch": lambda before, after: before}
"""What becomes of a gradient, from what it is before and after a backward."""
FAULTS: Final = ("dropped message", *_CHANGES)
LEAST: Final = 1e-9
"""Where a backward has added no more to any entry of a gradient, it may have been rounding alone."""


@dataclass(kw_only=True)
class RankOutcome:
    """What one rank has after one step of a plan."""

    error: str = ""
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """After the optimizer's step."""
    regions: dict[str, Any] = field(default_factory=dict)
    """What of each parameter the rank holds."""
    gradient_regions: dict[str, Any] = field(default_factory=dict)
    """Of which part of each it has the gradient."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[tuple[int, int, dict[str, Tensor]]] = field(default_factory=list)
    """(instance, micro-batch, outputs by name) in inference."""
    memory: MeterRecord | None = None
    was_damaged: bool = False
    libraries: int = 0
    """Bytes that PyTorch keeps for cuBLAS, whatever the model."""


class Ranks:
    """Processes that have this process's traces; a context manager that leaves none behind.

    On a GPU, ``cuda``, they share it, and their messages pass through the host's memory. This process must not have
    touched it before.
    """

    def __init__(self, tracer: Tracer, num_ranks: int, device: str = "cpu", *, limit_s: float = LIMIT_S) -> None:
        self._tracer, self._num_ranks, self._device, self._limit_s = tracer, num_ranks, device, limit_s
        self._pids: list[int] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            for rank in range(self._num_ranks):
                ours, theirs = multiprocessing.Pipe()
                pid = os.fork()
                if pid == 0:
                    try:
                        ours.close()
                        _serve(rank, self._num_ranks, listener.fileno(), theirs, self._tracer, self._device)
                    except EOFError:  # there are no more plans
                        pass
                    except BaseException as problem:
                        print(f"rank {rank}: {problem!r}", file=sys.stderr, flush=True)
                    os._exit(0)
                theirs.close()
                self._pids.append(pid)
                self._pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()

    def run(self, plan: Plan, fault: str = "") -> list[RankOutcome]:
        """Return what each rank has; one that does not answer in time has an error."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps((plan, fault)))
        deadline = time.monotonic() + self._limit_s
        return [_answer(pipe, deadline) for pipe in self._pipes]


def _answer(pipe: Connection, deadline: float) -> RankOutcome:
    try:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return RankOutcome(error="no answer in time")
        outcome: RankOutcome = pickle.loads(pipe.recv_bytes())
    except (OSError, EOFError):
        return RankOutcome(error="the process has ended")
    return outcome


def _serve(rank: int, num_ranks: int, listen_fd: int, pipe: Connection, tracer: Tracer, device: str) -> None:
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(0)
    store = open_store(listen_fd=listen_fd if rank == 0 else None, timeout_s=10)
    transport = Transport(rank=rank, num_ranks=num_ranks, device=torch.device(device), timeout_s=30, store=store,
                          by_host=device != "cpu")
    while True:
        plan, fault = pickle.loads(pipe.recv_bytes())
        try:
            outcome = run_rank(plan, tracer, transport, fault)
        except Exception as problem:
            outcome = RankOutcome(error=f"{type(problem).__name__}: {problem}")
        pipe.send_bytes(pickle.dumps(outcome))


def run_rank(plan: Plan, tracer: Tracer, transport: Transport, fault: str = "") -> RankOutcome:
    """Take one step of the plan on this rank, then another that is measured."""
    program = lower_to_run(plan, tracer)
    connect_ranks(program, tracer, transport)
    ready = prepare_rank(program, tracer, transport, seed=0)
    executor = loaded_executor(ready, tracer.source, transport)
    damaged = damage(executor, fault) if fault else []
    executor.step()
    ready.buffer_shares.spread()
    outcome = _outcome(executor, ready, bool(damaged))
    transport.barrier()
    outcome.memory = measure_step(executor, buffers=ready.buffers.values())
    if transport.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        outcome.libraries = before - torch.cuda.memory_allocated()
    return outcome


def _outcome(executor: Executor, ready: Prepared, was_damaged: bool) -> RankOutcome:
    tensors, rank = executor.parameters.tensors, executor.transport.rank
    is_training = executor.program.plan.model.mode == "training"
    return RankOutcome(
        loss=executor.take_loss(), was_damaged=was_damaged, regions=kept_regions(executor.program, rank),
        gradient_regions=gradient_regions(executor.program, rank),
        gradients={name: executor.parameters.gradient(name).detach().clone().cpu()
                   for name, item in tensors.items() if item.requires_grad and is_training and (
                       name not in executor.parameters.units.of or name in executor.parameters.units.of[name].rows)},
        parameters={name: item.detach().clone().cpu() for name, item in tensors.items()},
        buffers={name: item.clone().cpu() for name, item in ready.buffers.items()},
        outputs=[(instance, microbatch, {name: item.cpu() for name, item in values.items()})
                 for instance, microbatch, values in executor.take_results()])


# ---- faults, for the control ------------------------------------------------------------------------------------------


def damage(executor: Executor, fault: str) -> list[int]:
    """Let something go wrong once on this rank; return a list in which the place stands, when it has.

    Backwards of stages without parameters, or before any gradient, have nothing that could go wrong.
    """
    rank, actions, damaged = executor.transport.rank, executor.binder.actions, list[int]()
    for place, item in enumerate(executor.program.instructions(rank)):
        if fault == "dropped message" and item.op == Op.RECV:
            key = item.channel, item.microbatch
            transfer, buffers = executor.binder.transfers[key], executor.binder.wiring.arrived[key]
            actions[place] = _without_message(actions[place], transfer.wait, buffers)
            return [place]
        if fault in _CHANGES and item.op == Op.COMPUTE and item.phase in (Phase.B, Phase.W):
            actions[place] = _with_gradients(actions[place], executor, _CHANGES[fault], place, damaged)
    return damaged


def _without_message(action: Callable[[], None], wait: Callable[[], None], buffers: tuple[Tensor, ...]) -> Callable[[], None]:
    def damaged() -> None:
        action()
        wait()
        for buffer in buffers:
            buffer.zero_()

    return damaged


def _with_gradients(action: Callable[[], None], executor: Executor, change: Callable[[Tensor, Tensor], Tensor],
                    place: int, damaged: list[int]) -> Callable[[], None]:
    def changing() -> None:
        if damaged:
            action()
            return
        parameters = executor.parameters
        before = {name: parameters.gradient(name).clone() for name in parameters.tensors}
        action()
        for name, item in parameters.tensors.items():
            if item.grad is not None and float((item.grad - before[name]).abs().amax()) > LEAST:
                item.grad.copy_(change(before[name], item.grad.clone()))
                damaged[:] = [place]

    return changing
