"""``python -m weft.run.selftest``: is what this machine's ranks compute together what one process computes?

Runs every kind of plan on a tiny model with several ranks of this machine, by nccl on GPUs or by gloo on the CPU, in
float64, and compares the loss and all gradients of the first step, and the losses of the steps after it, with one
process. Each kind runs operator by operator and with compiled stages. By gloo too messages have queues without tags, as
nccl's have (``weft.run.transport``). A control, in which gradients are not exchanged, must fail.

    python -m weft.run.selftest [--ranks N] [--device cuda|cpu] [--eager] [--only KIND] [--json]

The ranks stay up from kind to kind; they are ended, and new ones started for what is left, when one of them fails or
does not answer in time. The exit code is 4 if a kind is not right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from weft.base.ending import end_on_signals, finish_output
from weft.base.errors import InputError, RunError, WeftError
from weft.base.scratch import scratch_folder
from weft.model.source import ModelSource
from weft.model.weights import materialize
from weft.plan.program import Op
from weft.run.executor import Executor
from weft.run.optimizers import make_optimizer
from weft.run.prepare import Tracer
from weft.run.result import RunOptions, finite
from weft.run.selftest_plans import ADAM, KINDS, World, model_of
from weft.run.transport import Transport, open_store
from weft.run.worker import execute, own_device

STEPS: Final = 3
LIMIT_S: Final = 120.0
"""For one kind of plan, and for the ranks to start."""
LATER_STEPS: Final = 1e-9
"""Largest relative error of the losses after the first step: Adam divides by the size of gradients, however small."""
CONTROL: Final = "control"


# ---- one rank -------------------------------------------------------------------------------------------------------


def serve_rank(rank: int, num_ranks: int, device: str, *, listen_fd: int | None, limit_s: float) -> NoReturn:
    """Run the kinds that come on standard input, one a line, and answer each with a line."""
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    lines: list[str] = []
    given = threading.Semaphore(0)

    def read() -> None:  # beside the work, so that a rank ends with whoever started it
        for line in jobs:
            lines.append(line)
            given.release()
        os._exit(RunError.exit_code)

    threading.Thread(target=read, daemon=True).start()
    source = model_of(num_ranks)
    tracers = {"training": Tracer(source), "inference": Tracer(source.with_mode("inference"))}
    transport = Transport(rank=rank, num_ranks=num_ranks, device=own_device(device, rank=rank, num_ranks=num_ranks),
                          timeout_s=limit_s, store=open_store(listen_fd=listen_fd, timeout_s=limit_s), in_pairs=True)
    answer: dict[str, Any] = {"ready": True}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        given.acquire()
        try:
            answer = _run(json.loads(lines.pop(0)), tracers, transport)
        except Exception as problem:
            answer = {"error": f"rank {rank}: {type(problem).__name__}: {problem}"}


def _run(job: Mapping[str, Any], tracers: Mapping[str, Tracer], transport: Transport) -> dict[str, Any]:
    """Return what rank 0 found for a kind of plan; nothing on other ranks."""
    kind = "data-parallel" if job["kind"] == CONTROL else job["kind"]
    mode = "inference" if kind == "inference" else "training"
    world = World(num_ranks=transport.num_ranks, graph=tracers[mode].trace(1).graph, mode=mode)
    plan = replace(KINDS[kind](world), compiled=job["compiled"])
    fallbacks: list[str] = []

    def adjust(executor: Executor) -> None:
        if executor.binder.compiler is not None:
            fallbacks.extend(executor.binder.compiler.fallbacks)
        if job["kind"] == CONTROL:
            _without_exchanges(executor)

    result = execute(plan, tracers[mode], RunOptions(steps=STEPS, verify=True), transport=transport, adjust=adjust)
    if result is None or result.verification is None:
        return {}
    check, later_error = result.verification, 0.0
    if mode == "training":
        expected = _losses(tracers[mode].source, plan.model.batch, transport.device)
        later_error = max(abs(loss / other - 1) for loss, other in zip(result.losses, expected, strict=True))
    return {"passed": check.passed and later_error <= LATER_STEPS, "loss_error": check.loss_error,
            "gradient_error": check.gradient_error, "later_error": later_error, "fallbacks": fallbacks}


def _losses(source: ModelSource, batch: int, device: torch.device) -> list[float]:
    """Return the losses of one process."""
    module = materialize(source.build(), 0, device=device)
    inputs = [item.to(device) for item in source.inputs(batch, 0)]
    optimizer, losses = make_optimizer(list(module.parameters()), ADAM), []
    assert optimizer is not None, "it has a kind"
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def _without_exchanges(executor: Executor) -> None:
    for early in executor.binder.early.values():
        early.items.clear()
    for position, item in enumerate(executor.program.instructions(executor.transport.rank)):
        if item.op == Op.COLLECTIVE:
            executor.binder.actions[position] = lambda: None


# ---- all ranks ------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes; leaving the context ends them."""

    def __init__(self, num_ranks: int, device: str, folder: Path, *, limit_s: float = LIMIT_S) -> None:
        self._folder, self._children = folder, list[subprocess.Popen[str]]()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            package = str(Path(__file__).resolve().parents[2])
            environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
                           "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **os.environ, "TMPDIR": str(folder),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
                           "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
            if sys.platform == "linux":
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            for rank in range(num_ranks):
                command = [sys.executable, "-m", "weft.run.selftest", "--device", device, "--ranks", str(num_ranks),
                           "--limit", str(limit_s), "--rank", str(rank)]
                command += ["--listen-fd", str(listener.fileno())] if rank == 0 else []
                with open(folder / f"stderr-{rank}", "w") as errors:
                    self._children.append(subprocess.Popen(
                        command, env={**environment, "LOCAL_RANK": str(rank)}, stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                        pass_fds=[listener.fileno()] if rank == 0 else []))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and the compiler that it may have started
        for child in self._children:
            child.communicate()

    def ask(self, job: Mapping[str, Any] | None, *, limit_s: float) -> dict[str, Any]:
        """Return rank 0's answer when all have answered; raise ``RunError`` if one does not, or has failed."""
        if job is not None:
            for child in self._children:
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(json.dumps(job) + "\n")
                    child.stdin.flush()
        deadline, answers = time.monotonic() + limit_s, dict[int, dict[str, Any]]()
        while len(answers) < len(self._children):
            waiting = {child.stdout: rank for rank, child in enumerate(self._children)
                       if rank not in answers and child.stdout is not None}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise RunError(f"no answer within {limit_s:.0f} s from rank {late}")
            for stream in ready:
                line, rank = stream.readline(), waiting[stream]
                answers[rank] = json.loads(line) if line else {"error": f"rank {rank} has died: {self._last(rank)}"}
                if "error" in answers[rank]:
                    raise RunError(answers[rank]["error"])
        return answers[0]

    def _last(self, rank: int) -> str:
        lines = (self._folder / f"stderr-{rank}").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def run_all(jobs: Sequence[Mapping[str, Any]], *, num_ranks: int, device: str, limit_s: float = LIMIT_S,
            report: Callable[[dict[str, Any]], None] = lambda row: None) -> list[dict[str, Any]]:
    """Return a row for each job; ``report`` is told each at once."""
    rows: list[dict[str, Any]] = []
    while len(rows) < len(jobs):
        with scratch_folder("weft-selftest-") as folder, Ranks(num_ranks, device, folder, limit_s=limit_s) as ranks:
            ranks.ask(None, limit_s=limit_s)
            for job in jobs[len(rows):]:
                begin, row = time.monotonic(), dict(job)
                try:
                    row |= ranks.ask(job, limit_s=limit_s)
                except RunError as problem:
                    row |= {"passed": False, "error": str(problem)}
                row["seconds"] = time.monotonic() - begin
                rows.append(row)
                report(row)
                if "error" in row:
                    break
    return rows


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether a row is as it must be: the control has to miss."""
    return "error" not in row and row["passed"] == (row["kind"] != CONTROL)


def _line(row: Mapping[str, Any]) -> str:
    name = f"{'ok' if is_right(row) else 'WRONG':6}{row['kind'] + (', compiled' if row['compiled'] else ''):30}"
    if "error" in row:
        return f"{name}{row['error']} ({row['seconds']:.1f} s)"
    errors = "  ".join(f"{what} {row[key]:.1e}" for what, key in (
        ("loss", "loss_error"), ("gradients", "gradient_error"), ("later steps", "later_error")))
    left = f"  not compiled: {row['fallbacks'][0]}" if row["fallbacks"] else ""
    return f"{name}{errors}  {row['seconds']:.1f} s{' (must miss)' if row['kind'] == CONTROL else ''}{left}"


def _has_compiler(device: str) -> bool:
    return device == "cuda" or shutil.which(os.environ.get("CXX", "g++")) is not None


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m weft.run.selftest", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, 8 at most; 4 on the CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.device_count() > 1 else "cpu")
    parser.add_argument("--eager", action="store_true", help="without compiled stages")
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one kind (default 120)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    num_ranks = args.ranks or (4 if args.device == "cpu" else min(num_gpus, 8))
    if args.rank is not None:
        serve_rank(args.rank, num_ranks, args.device, listen_fd=args.listen_fd, limit_s=args.limit)
    if num_ranks < 2 or (args.device == "cuda" and num_ranks > num_gpus):
        raise InputError(f"{num_ranks} ranks on {num_gpus} GPUs: at least 2 are needed, and a GPU for each")
    ways = [False, True] if not args.eager and _has_compiler(args.device) else [False]
    jobs = [{"kind": kind, "compiled": way} for kind in args.only or KINDS for way in ways]
    by = "nccl" if args.device == "cuda" else "gloo"
    print(f"{num_ranks} ranks, {args.device} ({by}), PyTorch {torch.__version__}", file=sys.stderr)
    rows = run_all([*jobs, {"kind": CONTROL, "compiled": False}], num_ranks=num_ranks, device=args.device,
                   limit_s=args.limit, report=(lambda row: None) if args.json else (
                       lambda row: print(_line(row), flush=True)))
    if args.json:
        print(json.dumps(finite({"ranks": num_ranks, "device": args.device, "torch": torch.__version__, "rows": rows,
                                 "passed": all(map(is_right, rows))})))
    return 0 if all(map(is_right, rows)) else RunError.exit_code


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(finish_output(main()))
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
