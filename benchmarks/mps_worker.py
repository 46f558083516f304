"""One process of ``mps_slices``: does what it is told on standard input, a JSON object a line, and answers likewise.

    python -m benchmarks.mps_worker RANK DEVICES [LISTEN_FD]

It stays for many plans, so that torch, the GPU, connections and traced models are made ready once.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from weft.cluster.cluster_file import to_json
from weft.cluster.probe import probe
from weft.cost.profile import ProfileStore
from weft.cost.profiler import profile_model
from weft.model.load import trace_model
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import TracedModel
from weft.model.weights import materialize
from weft.plan.plan import load_plan
from weft.run.prepare import Tracer
from weft.run.result import RunOptions, rank_devices, save_result
from weft.run.transport import Transport, open_store
from weft.run.worker import execute, own_device, resolve_source

TIMEOUT_S: Final = 120.0
"""Of a message or collective."""

ROTATION: Final = 4
"""So many buffers in the host's memory take turns while ways are timed; as many first turns do not count."""

Command = dict[str, Any]


class Worker:
    """What one process can do; the names of methods are those of commands."""

    def __init__(self, rank: int, devices: str, listen_fd: int | None) -> None:
        self.rank, self.devices = rank, devices
        self.num_ranks = len(devices.split(","))
        rank_devices(devices, self.num_ranks)
        self.device = own_device(devices, rank=rank, num_ranks=self.num_ranks)
        self.transport = Transport(rank=rank, num_ranks=self.num_ranks, device=self.device, timeout_s=TIMEOUT_S,
                                   store=open_store(listen_fd=listen_fd, timeout_s=TIMEOUT_S), by_host=True)
        self._tracers: dict[tuple[str, str], Tracer] = {}
        self._loads: dict[tuple[str, int], Callable[[], None]] = {}

    def probe(self, command: Command) -> Command:
        """Return what this part of the device can do, as the value of a cluster file."""
        self.transport.barrier()
        return {"cluster": to_json(probe(1, device=self.device.type)), "threads": torch.get_num_threads()}

    def links(self, command: Command) -> Command:
        """Return [what, ranks, bytes, seconds] of messages and collectives that this rank is the first of.

        Messages and exchanges of gradients (``found``) are timed while all processes train a model on the side, since
        in a run they go on beside computes; collectives of ``together``, for which a stage waits (``waited``), with
        nothing else going on.
        """
        groups, together = ([tuple(ranks) for ranks in command[name]] for name in ("groups", "together"))
        self.transport.connect_groups(together, exchanges=groups)
        sizes, repeats = command["bytes"], command["repeats"]
        found: list[tuple[str, Sequence[int], int, float]] = []
        with self._training_aside(command["model"], command["batch"]):
            for ranks in groups:
                ways = {"all_reduce": self._exchange, **({"p2p": self._message} if len(ranks) == 2 else {})}
                found += [(name, ranks, size, self._median_s(way(ranks, size) if self.rank in ranks else None, repeats))
                          for name, way in ways.items() for size in sizes]
        waited = [(name, ranks, size, self._median_s(
            self._waiting(name, ranks, size) if self.rank in ranks else None, repeats))
            for ranks in together for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
            for size in command["stage_bytes"]]
        return {name: [row for row in rows if row[1][0] == self.rank] for name, rows in
                (("found", found), ("waited", waited))}

    def _message(self, pair: Sequence[int], size: int) -> Callable[[], object]:
        """Return what sends a tensor there and back; its time is that of two messages."""
        tensor = torch.zeros(size, dtype=torch.uint8, device=self.device)
        other, kept = pair[1 - pair.index(self.rank)], deque[object](maxlen=ROTATION)

        def action() -> None:
            for sender in pair:
                way = self.transport.send if sender == self.rank else self.transport.receive
                kept.append(work := way(tensor, other, 0))  # a run has a buffer for each message, not one that is warm
                work.wait()

        return action

    def _exchange(self, ranks: Sequence[int], size: int) -> Callable[[], object]:
        """Return what adds up a tensor over the ranks, as gradients are."""
        tensor, kept = torch.zeros(size // 4, device=self.device), deque[object](maxlen=ROTATION)

        def action() -> None:
            kept.append(work := self.transport.all_reduce(tensor, tuple(ranks)))
            work.wait()

        return action

    def _waiting(self, name: str, ranks: Sequence[int], size: int) -> Callable[[], object]:
        """Return a collective of so many bytes in all, as between the parts of a stage."""
        group, tensor = tuple(ranks), torch.zeros(size // 4, device=self.device)
        part, rows = tensor[: len(tensor) // len(group)], tensor.view(len(group), -1)
        pieces = [len(part)] * len(group)
        return {"all_to_all": lambda: self.transport.all_to_all(tensor, group, sent=pieces, received=pieces),
                "all_reduce": lambda: self.transport.reduced(tensor, group),
                "all_gather": lambda: self.transport.gathered(part, group),
                "reduce_scatter": lambda: self.transport.sum_scattered(rows, group)}[name]

    def _median_s(self, action: Callable[[], object] | None, repeats: int) -> float:
        times = []
        for _ in range(repeats + ROTATION):
            self.transport.barrier()
            begin = time.perf_counter()
            if action is not None:
                action()
                self._synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[ROTATION:])

    @contextmanager
    def _training_aside(self, model: str, batch: int) -> Iterator[None]:
        """Train a model on a thread and, on a GPU, a stream of its own meanwhile."""
        step, over, problems = self._training(model, batch), threading.Event(), list[Exception]()
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

        def train() -> None:
            try:
                while not over.is_set():
                    with torch.cuda.stream(stream) if stream is not None else nullcontext():
                        step()
            except Exception as problem:
                problems.append(problem)

        step()
        self.transport.barrier()
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if problems:  # then what was timed was not timed among busy parts
            raise RuntimeError(f"training on the side failed: {problems[0]}") from problems[0]

    def _synchronize(self) -> None:
        if self.transport.synchronize is not None:
            self.transport.synchronize()

    def profile(self, command: Command) -> Command:
        """Put the times of a model's operators into a store, while ``num_loaded`` other processes are busy."""
        folder = Path(command["folder"])
        traced = _traced(command["model"], command["batch"])
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(folder.glob("busy-*"))) < command["num_loaded"]:
            if time.monotonic() > deadline:
                raise TimeoutError("the other processes did not become busy")
            time.sleep(0.01)
        try:
            done = profile_model(traced, self.device.type, ProfileStore(command["store"]), kind=command["kind"],
                                 passes=command["passes"])
        finally:
            (folder / "stop").touch()
        self._release()
        return {"timed": done.num_timed, "forward_s": done.forward_s, "backward_s": done.backward_s,
                "problems": list(done.problems), "seconds": done.seconds_spent}

    def load(self, command: Command) -> Command:
        """Train the model, forward and backward, until the process that profiles has finished."""
        folder, key = Path(command["folder"]), (command["model"], command["batch"])
        if key not in self._loads:
            self._loads[key] = self._training(*key)
        count, deadline = 0, time.monotonic() + TIMEOUT_S
        while not (folder / "stop").exists() and time.monotonic() < deadline:
            self._loads[key]()
            count += 1
            (folder / f"busy-{self.rank}").touch()
        return {"count": count}

    def _training(self, model: str, batch: int) -> Callable[[], None]:
        source = _source(model)
        module = materialize(source.build(), 0, device=self.device)
        inputs = [tensor.to(self.device) for tensor in source.inputs(batch)]

        def action() -> None:
            module.zero_grad(set_to_none=True)
            module(*inputs).backward()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

        return action

    def run(self, command: Command) -> Command:
        """Run a plan; rank 0 writes the result into ``output``."""
        self._loads.clear()
        self._release()
        plan = load_plan(command["plan"])
        options = RunOptions(steps=command["steps"], warmup=command["warmup"], verify=command["verify"],
                             dtype=command["dtype"], device=self.devices, timeout_s=TIMEOUT_S)
        key = command["model"], options.dtype or plan.model.dtype
        if key not in self._tracers:
            self._tracers[key] = Tracer(resolve_source(plan, command["model"], options))
        before = self._held_bytes()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        result = execute(plan, self._tracers[key], options, transport=self.transport)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        if result is not None:
            save_result(result, Path(command["output"]))
        del result
        self._release()
        return {"peak_bytes": peak, "held_before_bytes": before, "held_after_bytes": self._held_bytes()}

    def _held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@cache
def _traced(model: str, batch: int) -> TracedModel:
    return trace_model(model, batch=batch)


@cache
def _source(model: str) -> ModelSource:
    source = resolve_model(model)
    assert isinstance(source, ModelSource)
    return source


def main(arguments: list[str]) -> None:
    """Do commands until standard input ends; then end at once, whatever threads of the backend do."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    worker = Worker(int(arguments[0]), arguments[1], int(arguments[2]) if arguments[2:] else None)
    print(json.dumps({"pid": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command["do"])(command)
        except Exception as problem:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
