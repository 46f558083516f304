"""Ranks of training runs that may be killed: one process that has imported everything forks them, attempt after attempt.

``Ranks`` starts that process and hands it jobs. A rank counts the *points* that it comes past: every instruction of the
plan, and on rank 0 everything that writing a checkpoint does to the disk (each tensor, each rename, each deletion). A
job may name a rank and a point at which it kills itself with SIGKILL; the others are then killed too, as torchrun does.
The model is traced before ranks are forked, because that takes longer than all else they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB_LIMIT_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt at a training run."""

    plan: str
    """Path of the plan."""
    folder: str
    """Of the checkpoints."""
    steps: int
    """In all, those before a checkpoint included."""
    every: int = 1
    """Steps between checkpoints."""
    kill: tuple[int, int] | None = None
    """(rank, point), counted from 1."""
    max_grad_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an attempt."""

    codes: list[int]
    """Exit codes by rank, negative for a signal."""
    losses: dict[int, float]
    """By step."""
    saved: list[int]
    """Steps at which a call of ``save_checkpoint`` returned."""
    points: list[list[str]]
    """For each rank that ended well the points it came past: ``compute`` or what was done to the disk."""


class Ranks:
    """The process that forks ranks, as a context manager; ``model`` is trained in float64, in parts of these sizes."""

    def __init__(self, model: str, batch: int, *, sizes: Sequence[int]) -> None:
        self.model, self.batch, self.sizes = model, batch, sizes

    def __enter__(self) -> Ranks:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.resume_ranks", self.model, str(self.batch), *map(str, self.sizes)], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def train(self, job: Job) -> Outcome:
        """Return what became of one attempt."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({name: getattr(job, name) for name in Job.__slots__}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process that forks ranks has died"
        value = json.loads(line)
        return Outcome(codes=value["codes"], saved=value["saved"], points=value["points"],
                       losses={int(step): loss for step, loss in value["losses"].items()})


def reference_losses(model: str, batch: int, steps: int, *, max_grad_norm: float | None = None) -> list[float]:
    """Return the losses of the same training in this process, without Weft's runtime."""
    import torch

    source = _source(model)
    module, losses = source.build(), []
    optimizer = make_optimizer(module.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(*source.inputs(batch, step))
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-2)


def _source(model: str) -> Any:
    from weft.model.source import resolve_model

    return resolve_model(model).with_dtype("float64")


# ---- the process that forks -----------------------------------------------------------------------------------------


def _serve(model: str, batch: int, sizes: Sequence[int]) -> None:
    from weft.training import parallelize

    source = _source(model)
    tracer = parallelize.Tracer(source)
    for size in sizes:
        tracer.trace(size)
    parallelize.Tracer = lambda source: tracer  # type: ignore[assignment,misc,return-value]
    for line in sys.stdin:
        value = json.loads(line)
        print(json.dumps(_run(source, batch, Job(**{**value, "kill": value["kill"] and tuple(value["kill"])}))), flush=True)


def _run(source: Any, batch: int, job: Job) -> dict[str, Any]:
    from weft.plan.plan import load_plan

    num_ranks = len(load_plan(job.plan).cluster.devices)
    reports = [os.pipe() for _ in range(num_ranks)]
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
                       "WORLD_SIZE": str(num_ranks)}
        children = []
        for rank in range(num_ranks):
            children.append(os.fork())
            if children[-1] == 0:
                _rank(source, batch, job, rank, listener.fileno(), reports[rank][1])
    for _, end in reports:
        os.close(end)
    codes = _wait(children)
    records = [record for reader, _ in reports for record in _read(reader)]
    return {"codes": codes, "losses": {record["step"]: record["loss"] for record in records if "loss" in record},
            "saved": [record["saved"] for record in records if "saved" in record],
            "points": [record["points"] for record in records if "points" in record]}


def _wait(children: list[int]) -> list[int]:
    """Return the exit codes; when a child fails, or after too long, the others are killed."""
    codes: dict[int, int] = {}
    deadline, killed = time.monotonic() + JOB_LIMIT_S, False
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
        if not killed and (any(codes.values()) or time.monotonic() > deadline):
            killed = True
            for other in children:
                if other not in codes:
                    os.kill(other, signal.SIGKILL)
        if not child:
            time.sleep(0.005)
    return [codes[child] for child in children]


def _read(reader: int) -> list[dict[str, Any]]:
    with os.fdopen(reader) as stream:
        return [json.loads(line) for line in stream if line.endswith("\n")]


# ---- a rank ---------------------------------------------------------------------------------------------------------


def _rank(source: Any, batch: int, job: Job, rank: int, listen_fd: int, report_fd: int) -> None:
    code = 1
    try:
        os.environ["RANK"] = str(rank)
        with os.fdopen(report_fd, "w", buffering=1) as report:
            _train(source, batch, job, rank, listen_fd if rank == 0 else None, report)
        code = 0
    except Exception as problem:
        if job.kill is None:
            print(f"rank {rank}: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _train(source: Any, batch: int, job: Job, rank: int, listen_fd: int | None, report: Any) -> None:
    import torch.distributed as dist

    from weft.run.transport import open_store
    from weft.training.parallelize import parallelize

    store = open_store(listen_fd=listen_fd, timeout_s=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    trainer = parallelize(source.build(), source.inputs(batch), job.plan, optimizer=make_optimizer,
                          max_grad_norm=job.max_grad_norm)
    points = _Points(job.kill[1] if job.kill is not None and job.kill[0] == rank else None)
    trainer.executor.binder.actions[:] = [points.before(action, "compute") for action in trainer.executor.binder.actions]
    if rank == 0:
        _watch_disk(points)
    trainer.resume(job.folder)
    while trainer.num_steps < job.steps:
        step = trainer.num_steps
        loss = trainer.step(source.inputs(batch, step))
        if rank == 0:
            report.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if trainer.num_steps % job.every == 0:
            trainer.save_checkpoint(job.folder)
            if rank == 0:
                report.write(json.dumps({"saved": trainer.num_steps}) + "\n")
    report.write(json.dumps({"points": points.seen}) + "\n")
    trainer.transport.leave()


class _Points:
    def __init__(self, target: int | None) -> None:
        self.target = target
        self.seen: list[str] = []

    def before(self, action: Any, kind: str) -> Any:
        """Return the action with a point before it."""
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(kind)
            if len(self.seen) == self.target:
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*args, **kwargs)

        return counted


def _watch_disk(points: _Points) -> None:
    from weft.run.checkpoint_folder import TensorWriter

    for owner, name in ((TensorWriter, "write"), (os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "unlink"),
                        (os, "rmdir"), (shutil, "rmtree")):
        setattr(owner, name, points.before(getattr(owner, name), name))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
