"""``python -m weft.run PLAN MODEL``: run a plan on local processes, or be one rank of it under ``torchrun``.

    python -m weft.run plan.json gpt2-tiny --verify                       starts one process for each device of the plan
    torchrun --nproc-per-node 4 -m weft.run plan.json gpt2-tiny --verify  is one of them, on one host or many

Without ``RANK`` in the environment the first form is meant. The variable ``WEFT_TEST_FAULT`` (``rank:place``, where
place is ``init``, ``F``, ``B``, ``I``, ``W`` or ``all_reduce``, and ``F@2`` is in step 2) makes a rank kill itself
there, ``F!stop`` lets it stop itself and ``F!hang`` wait for ever; it is for tests only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from weft.base.ending import end_on_signals, finish_output
from weft.base.errors import RunError, WeftError
from weft.base.files import encode
from weft.base.units import parse_bytes
from weft.plan.plan import load_plan
from weft.plan.program import Op
from weft.run.failures import PeerLost, write_failure
from weft.run.launch import STATUS_FILE, run_plan
from weft.run.result import (
    RunOptions,
    RunResult,
    check_folders,
    finite,
    load_options,
    losses_or_none,
    memory_table,
    save_result,
)
from weft.run.status import Beat, Milestone, StatusLine

if TYPE_CHECKING:
    from weft.run.executor import Executor
    from weft.run.watch import Watch


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code of the command."""
    args = _parser().parse_args(arguments)
    if "RANK" in os.environ:
        _Rank(args).run()
    try:
        result = run_plan(args.plan, args.model, options=_options(args), threads=args.threads, keep=args.output)
    except WeftError as problem:
        print(f"weft: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print("weft: interrupted; all ranks were ended", file=sys.stderr)
        return 130
    return report(result, as_json=args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weft.run", description="Run a plan on its model.")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("model", help="model: a name from the zoo or file.py:function")
    parser.add_argument("--steps", type=int, default=1, help="measured steps (default 1)")
    parser.add_argument("--warmup", type=int, default=0, help="steps before the measured ones (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="for parameters and inputs (default 0)")
    parser.add_argument("--dtype", help="run in this dtype, for instance float64")
    parser.add_argument("--device", default="cpu", help="cpu (gloo) or cuda (nccl), or with gloo one for each rank: "
                        "cuda,cpu")
    parser.add_argument("--gpu-memory", help="the most that a rank may take of its GPU's memory, for instance 4GiB")
    parser.add_argument("--threads", type=int, default=1, help="threads of each started process (default 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="longest wait for a message, in seconds")
    parser.add_argument("--verify", action="store_true", help="compare loss and gradients with one process")
    parser.add_argument("--gradients", action="store_true", help="collect the gradients of the first step")
    parser.add_argument("--memory", action="store_true", help="measure what every rank holds, in one more step")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder for checkpoints; one comes after the last step")
    parser.add_argument("--checkpoint-every", type=int, metavar="N", help="also after every N steps")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint, if there is one")
    parser.add_argument("--output", type=Path, help="folder for the result, the timeline and the gradients")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--launched-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    return parser


def _options(args: argparse.Namespace) -> RunOptions:
    if args.launched_in is not None:
        return load_options(args.launched_in)
    given = {item.name: getattr(args, item.name) for item in fields(RunOptions) if hasattr(args, item.name)}
    memory = None if args.gpu_memory is None else parse_bytes(args.gpu_memory)
    return RunOptions(**given, gpu_memory_bytes=memory, timeout_s=args.timeout)


def report(result: RunResult, *, as_json: bool) -> int:
    """Print a result and return the exit code: 4 if it was verified and differs from one device."""
    check = result.verification
    if as_json:
        facts = {"num_ranks": result.num_ranks, "losses": losses_or_none(result), "step_times_s": result.step_times_s,
                 "cpu_s": result.cpu_s, "verification": check, "notes": result.notes}
        if result.memory is not None:
            facts["memory"] = result.memory
        print(json.dumps(finite(encode(facts))))
    else:
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
        loss = f"loss {result.losses[0]:.6f}, " if result.losses else ""
        print(f"{result.num_ranks} ranks: {loss}step time {result.step_time_s * 1e3:.2f} ms "
              f"(median of {len(result.step_times_s)})")
        if check is not None:
            print(f"{'equal to' if check.passed else 'DIFFERENT FROM'} one process: loss error "
                  f"{_error(check.loss_error)}, largest gradient error {_error(check.gradient_error)} {check.worst} "
                  f"over {check.num_gradients} gradients (tolerance {check.tolerance:.0e})")
            if check.passed and check.float64_error is not None:
                print(f"What exceeds the tolerance is rounding: in float64 the same plan is equal to "
                      f"{check.float64_error:.1e}, and rounding moves one process by {check.rounding_error:.1e}.")
            elif check.note:
                print(f"{check.note[0].upper()}{check.note[1:]}.")
            if check.reason:
                print(f"The reason: {check.reason}.")
            elif check.draws_random and not check.passed:
                print("The model draws random numbers, as dropout does, and under another plan it draws others: "
                      "compare it in evaluation mode or with dropout 0.")
        if result.memory is not None:
            print(memory_table(result.memory))
    return 0 if check is None or check.passed else RunError.exit_code


def _error(value: float) -> str:
    return f"{value:.1e}" if abs(value) < 1e308 else "not finite"  # files have no infinity


class _Rank:
    """This process as one rank of a run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.launched_in
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.status = StatusLine(None if self.folder is None else self.folder / STATUS_FILE, self.rank)
        self.fault = _requested_fault(self.rank)
        self.watch: Watch | None = None
        if self.folder is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the launcher's
            threading.Thread(target=_follow_parent, daemon=True).start()
            Beat(self.status).start()

    def run(self) -> NoReturn:
        """Run this rank and end the process; every failure ends in one record or message."""
        try:
            result = self._execute()
        except Exception as problem:
            self._fail(problem)
        code = 0 if result is None or self.folder is not None else report(result, as_json=self.args.json)
        _end(code)

    def _execute(self) -> RunResult | None:
        # PyTorch is loaded here, late: a rank that cannot load it says so to the launcher.
        from weft.run.prepare import Tracer
        from weft.run.transport import Transport, meeting_store, open_store
        from weft.run.watch import start_watch
        from weft.run.worker import check_world, execute, limit_memory, own_device, resolve_source

        options = _options(self.args)
        plan = load_plan(self.args.plan)
        check_world(plan, self.num_ranks)
        source = resolve_source(plan, self.args.model, options)
        self.status.set(Milestone.CONNECTING)
        if self.fault == "init":
            os.kill(os.getpid(), signal.SIGKILL)
        device = own_device(options.device, rank=self.rank, num_ranks=self.num_ranks)
        if options.gpu_memory_bytes is not None and device.type == "cuda":
            limit_memory(device, options.gpu_memory_bytes)
        if self.folder is not None:
            store = open_store(listen_fd=self.args.listen_fd, timeout_s=options.timeout_s)
        else:
            store = meeting_store(options.timeout_s, rank=self.rank)
        transport = Transport(rank=self.rank, num_ranks=self.num_ranks, device=device, timeout_s=options.timeout_s,
                              store=store, by_host="," in options.device, status=self.status)
        if self.folder is None:
            self.watch = start_watch(transport, self.status, predicted_s=plan.search.step_time)
        if self.folder is None and self.rank == 0:
            check_folders(options, self.args.output)
        result = execute(plan, Tracer(source), options, transport=transport, adjust=self._adjust)
        output = self.folder or self.args.output
        if result is not None and output is not None:
            save_result(result, output)
        if self.watch is not None:
            self.watch.is_leaving = True
        transport.leave()
        if self.watch is not None:
            self.watch.stop()
        return result

    def _adjust(self, executor: Executor) -> None:
        """Let the first instruction of the kind that a test asked for kill the process."""
        text, _, how = (self.fault or "").partition("!")
        place, _, step = text.partition("@")
        for position, item in enumerate(executor.program.instructions(self.rank)):
            kind = item.phase.name if item.op == Op.COMPUTE else "all_reduce" if item.op == Op.COLLECTIVE else ""
            if place and kind == place:
                executor.binder.actions[position] = self._faulty(executor.binder.actions[position], int(step or 0), how)
                return

    def _faulty(self, action: Callable[[], None], step: int, how: str) -> Callable[[], None]:
        def faulty() -> None:
            if self.status.cell[1] >= step:
                while how == "hang":
                    time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            action()

        return faulty

    def _fail(self, problem: Exception) -> NoReturn:
        """Record or print what went wrong, and end the process."""
        code = problem.exit_code if isinstance(problem, WeftError) else RunError.exit_code
        text = str(problem) if isinstance(problem, WeftError) else f"{type(problem).__name__}: {problem}"
        is_peer = isinstance(problem, PeerLost)
        if self.folder is not None:
            record = {"kind": "peer" if is_peer else "own", "type": type(problem).__name__, "message": text,
                      "is_input": code != RunError.exit_code}
            write_failure(self.folder, self.rank, record)
        elif self.watch is None:
            print(f"weft: rank {self.rank}: {text}", file=sys.stderr, flush=True)
        elif not is_peer or self.watch.verdict() is None:
            self.watch.announce(f"rank {self.rank} failed while {self.status.describe()}: {text}", code=code)
        _end(code)


def _end(code: int) -> NoReturn:
    """End the process at once: threads of the backend may hang on lost connections, or abort when torn down."""
    code = finish_output(code)
    sys.stderr.flush()
    os._exit(code)


def _requested_fault(rank: int) -> str | None:
    wanted, _, place = os.environ.get("WEFT_TEST_FAULT", "").partition(":")
    return place if wanted == str(rank) else None


def _follow_parent() -> None:
    """End the process when the launcher is gone: its end of our standard input is closed."""
    while os.read(0, 1):
        pass
    os._exit(RunError.exit_code)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        end_on_signals()
    sys.exit(finish_output(main()))
