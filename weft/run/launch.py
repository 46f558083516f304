"""Starts a plan on processes of this machine, one for each device, and never leaves one behind.

The launcher writes the plan into a folder of its own, starts ``python -m weft.run`` with the environment that
``torchrun`` would give, and watches. Ranks keep their place in a status file and write down why they fail; when one
ends early or hangs (``weft.run.status``), the others are ended too, and one ``RunError`` says which rank it was and
what it was doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, Final

import weft.base.errors
from weft.base.errors import InputError, RunError, WeftError
from weft.base.scratch import scratch_folder
from weft.plan.plan import Plan, load_plan, save_plan
from weft.run.failures import make_room, read_failure
from weft.run.result import (
    RunOptions,
    RunResult,
    check_folders,
    keep_files,
    load_result,
    rank_devices,
    save_options,
    share_environment,
)
from weft.run.status import (
    BEAT_S,
    Line,
    Milestone,
    Observer,
    create_status_file,
    describer,
    limits_of,
    read_labels,
    read_lines,
    read_status_file,
)

POLL_S: Final = 0.05
PATIENCE_S: Final = 3.0
"""How long to look for the rank that is to blame, after a rank has ended because it lost another."""
END_S: Final = 10.0
"""How long to wait for a process that was killed; one inside a driver may take for ever."""
STATUS_FILE: Final = "status"
"""In the folder of a run, what its ranks do."""


class RankLost(RunError):  # noqa: N818 - it says what happened
    """A process ended without a word, or hangs: it was killed or stopped, or its device is gone."""

    def __init__(self, message: str, *, device: str) -> None:
        super().__init__(message)
        self.device = device
        """Its name in the plan."""


def run_plan(plan: Plan | str | PathLike[str], model: str, *, options: RunOptions | None = None, threads: int = 1,
             keep: str | PathLike[str] | None = None, tell: Callable[[str], None] = lambda text: None) -> RunResult:
    """Return the result of running ``plan`` on ``model`` with one local process for each of its devices.

    ``model`` is what the command line takes: a name from the zoo or ``file.py:function``. ``threads`` is for each
    process. ``keep`` names a folder for the result's files. ``tell`` is told what takes long. Raise ``RunError`` if a
    rank fails (``RankLost`` if it was killed), ``PlanError`` or ``ModelError`` if the plan or model is wrong.
    """
    options = options or RunOptions()
    _check_options(options, threads)
    check_folders(options, keep)
    given = plan if isinstance(plan, Plan) else load_plan(plan)
    with scratch_folder("weft-run-") as folder:
        _prepare(folder, given, options)
        file, colon, function = model.partition(".py:")  # messages name the file of a model fully
        named = f"{Path(file).resolve()}.py:{function}" if colon else model
        with _Ranks(given, named, options, threads, folder, tell) as ranks:
            ranks.wait()
        result = load_result(folder)
        if keep is not None:
            keep_files(folder, Path(keep))
    return result


def _prepare(folder: Path, plan: Plan, options: RunOptions) -> None:
    """Write what the ranks find in the folder."""
    save_plan(plan, folder / "plan.json")
    save_options(options, folder)
    num_ranks = len(plan.cluster.devices)
    try:
        create_status_file(folder / STATUS_FILE, num_ranks)
        for rank in range(num_ranks):
            make_room(folder, rank)
    except OSError as problem:
        raise RunError(f"no room for temporary files: {problem}. Make some, or set TMPDIR to another folder"
                       ) from problem


def _check_options(options: RunOptions, threads: int) -> None:
    if options.steps < 1 or options.warmup < 0 or threads < 1:
        raise InputError(f"steps ({options.steps}) and threads ({threads}) must be 1 or more, "
                         f"warmup ({options.warmup}) 0 or more")
    if not options.timeout_s > 0:
        raise InputError(f"timeout_s is {options.timeout_s}: it must be more than zero")
    if options.checkpoint is None and (options.resume or options.checkpoint_every is not None):
        raise InputError("resume and checkpoint_every need a folder of checkpoints: give checkpoint as well")
    if options.checkpoint_every is not None and options.checkpoint_every < 1:
        raise InputError(f"checkpoint_every must be 1 or more, not {options.checkpoint_every}")


@dataclass(frozen=True, slots=True)
class _Process:
    rank: int
    child: subprocess.Popen[bytes]
    errors: IO[bytes]


class _Ranks:
    """The processes of a run; leaving the context ends all of them."""

    def __init__(self, plan: Plan, model: str, options: RunOptions, threads: int, folder: Path,
                 tell: Callable[[str], None]) -> None:
        self.plan, self.folder, self._tell, self._told = plan, folder, tell, ""
        self._devices = rank_devices(options.device, len(plan.cluster.devices))
        self._command = [sys.executable, "-m", "weft.run", str(folder / "plan.json"), model,
                         "--launched-in", str(folder)]
        self._threads = threads
        self._processes: list[_Process] = []
        self._observer = Observer(limits_of(plan.search.step_time), self._who)
        self._looked = time.monotonic()

    def __enter__(self) -> _Ranks:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            try:
                for rank in range(len(self.plan.cluster.devices)):
                    self._start(rank, listener)
            except BaseException:
                self._end_all()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def _start(self, rank: int, listener: socket.socket) -> None:
        """Start one rank, with the same ``weft`` as here; rank 0 serves the socket at which the others meet."""
        world, package = str(len(self.plan.cluster.devices)), Path(weft.base.errors.__file__).resolve().parents[2]
        environment = {
            **os.environ, **share_environment(self._devices[rank]),
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": str(self._threads),
            "PYTHONPATH": os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        extra = ["--listen-fd", str(listener.fileno())] if rank == 0 else []
        errors = open(self.folder / f"stderr-{rank}.txt", "w+b")  # noqa: SIM115 - closed in _end_all
        child = subprocess.Popen(
            [*self._command, *extra], env=environment, stdin=subprocess.PIPE, stdout=errors, stderr=errors,
            start_new_session=True, pass_fds=[listener.fileno()] if rank == 0 else [])
        self._processes.append(_Process(rank, child, errors))

    def wait(self) -> None:
        """Return when all ranks have ended well; raise for the first that has not."""
        running = list(self._processes)
        while running:
            for process in running:
                if process.child.poll() not in (None, 0):
                    raise self._failure(process)
            running = [process for process in running if process.child.poll() is None]
            self._look(running)
            time.sleep(POLL_S if running else 0)

    def _look(self, running: list[_Process]) -> None:
        """Raise if one of the processes hangs, about once in each beat."""
        elapsed_s = time.monotonic() - self._looked
        if elapsed_s < BEAT_S:
            return
        self._looked += elapsed_s
        lines = read_lines(self.folder / STATUS_FILE, len(self._processes))
        everybody = f"all {len(self._processes)} ranks were ended"
        self._tell_compiling(lines)
        describe = describer(lambda rank: read_labels(self.folder / STATUS_FILE, rank))
        for process in running:
            line = lines[process.rank]._replace(process=process.child.pid)
            self._observer.note(process.rank, line, elapsed_s, process=process.child.pid)
            hang = self._observer.silent(process.rank, describe, is_here=True)
            if hang is not None:
                raise self._lost(process.rank, f"{hang.message}; {everybody}")
        hang = self._observer.stuck(len(self._processes), describe)
        if hang is not None:
            raise RunError(hang.message) if hang.rank is None else self._lost(
                hang.rank, f"{hang.message}; {everybody}")

    def _tell_compiling(self, lines: Sequence[Line]) -> None:
        """Tell which graphs the ranks compile, when that has changed."""
        busy = [f"rank {rank} graph {line.step}" for rank, line in enumerate(lines)
                if line.place == Milestone.COMPILING]
        text = f"compiling: {', '.join(busy[:8])}{', ...' if len(busy) > 8 else ''}" if busy else ""
        if text != self._told:
            self._told = text
            if text:
                self._tell(text)

    def _lost(self, rank: int, message: str) -> RankLost:
        return RankLost(message, device=self.plan.cluster.devices[rank])

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self.plan.cluster.devices[rank]})"

    def _failure(self, first: _Process) -> WeftError:
        """Return the error of the rank that is to blame: one that was killed or broke, not one that lost another."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            failed = [item for item in self._processes if item.child.poll() not in (None, 0)]
            records = {item.rank: read_failure(self.folder, item.rank) for item in failed}
            for item in failed:
                record = records[item.rank]
                if record is None or record["kind"] == "own":
                    return self._error(item, record)
            if time.monotonic() > deadline:
                return self._keeps_waiting(records[first.rank]) or self._error(first, records[first.rank])
            time.sleep(POLL_S)

    def _keeps_waiting(self, record: dict[str, Any] | None) -> RankLost | None:
        """Return the error of a rank that lives and waits for nobody, when one that waited has given up."""
        lines = read_lines(self.folder / STATUS_FILE, len(self._processes))
        for process in self._processes:
            if process.child.poll() is None and not lines[process.rank].is_waiting and record is not None:
                doing = read_status_file(self.folder / STATUS_FILE, process.rank)
                return self._lost(process.rank, f"{self._who(process.rank)} kept another rank waiting while {doing}; "
                                  f"that one gave up: {record['message']}")
        return None

    def _error(self, process: _Process, record: dict[str, Any] | None) -> WeftError:
        if record is not None and record["is_input"]:
            kind = getattr(weft.base.errors, record["type"], InputError)
            error: WeftError = kind(record["message"])
            return error
        who = self._who(process.rank)
        doing = read_status_file(self.folder / STATUS_FILE, process.rank)
        if record is not None:
            return RunError(f"{who} failed while {doing}: {record['message']}")
        code = process.child.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others, said = len(self._processes) - 1, Path(process.errors.name).read_text(errors="replace").split("\n")
        last = next((f". Its last words: {line}" for line in reversed(said) if line.strip()), "")
        return self._lost(process.rank, f"{who} {how} while {doing}; the other {others} ranks were ended{last}")

    def _end_all(self) -> None:
        with _undisturbed():
            for process in self._processes:
                if process.child.poll() is None:
                    process.child.kill()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.child.wait(timeout=END_S)
                if process.child.stdin is not None:
                    process.child.stdin.close()
                process.errors.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals that end this process wait meanwhile: a second Ctrl-C must not leave processes behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
