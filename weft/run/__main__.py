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
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from weft.base.ending import end_on_signals, finish_output
from weft.base.errors import RunError, WeftError
from weft.base.files import encode
from weft.base.units import parse_bytes
from weft.run.failures import end_process, exit_code_and_text, write_failure
from weft.run.launch import STATUS_FILE, run_plan
from weft.run.result import RunOptions, RunResult, finite, load_options, losses_or_none, memory_table
from weft.run.status import Beat, StatusLine


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code of the command."""
    args = _parser().parse_args(arguments)
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
    parser.add_argument("--compile", dest="compiled", action="store_true", default=None,
                        help="run stages as compiled graphs (default: as planned)")
    parser.add_argument("--eager", dest="compiled", action="store_false", help="run stages operator by operator")
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


def _fail(problem: Exception, folder: Path | None, rank: int) -> NoReturn:
    """Record or print what went wrong, and end the process."""
    code, text = exit_code_and_text(problem)
    if folder is not None:
        write_failure(folder, rank, problem)
    else:
        print(f"weft: rank {rank}: {text}", file=sys.stderr, flush=True)
    end_process(code)


def _follow_parent() -> None:
    """End the process when the launcher is gone: its end of our standard input is closed."""
    while os.read(0, 1):
        pass
    os._exit(RunError.exit_code)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        end_on_signals()
        sys.exit(finish_output(main()))
    _args = _parser().parse_args()
    _rank, _folder = int(os.environ["RANK"]), _args.launched_in
    _status = StatusLine(None if _folder is None else _folder / STATUS_FILE, _rank)
    if _folder is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the launcher's
        threading.Thread(target=_follow_parent, daemon=True).start()
        Beat(_status).start()
    try:  # PyTorch is loaded here, late: a rank that cannot load it says so to the launcher
        from weft.run.worker import run_rank

        _result = run_rank(_args.plan, _args.model, _options(_args), status=_status, folder=_folder,
                           listen_fd=_args.listen_fd, output=_args.output)
    except Exception as problem:
        _fail(problem, _folder, _rank)
    end_process(0 if _result is None or _folder is not None else report(_result, as_json=_args.json))
