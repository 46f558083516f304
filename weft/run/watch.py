"""Notices that another rank is gone or hangs, when no launcher of ours watches the processes (``torchrun``).

Every rank beats once a second in the job's TCP store, with its line and what it is doing, and watches the next rank;
rank 0 watches whether all of them get on (``weft.run.status.Observer``). Whoever misses a beat for too long, or sees
that the next rank's process on this machine is dead, writes down which rank it is and what it did last; all ranks look
for that note and end. A rank that loses a connection leaves the verdict to the note, so that there is one message,
about the right rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from weft.base.errors import RunError
from weft.base.scratch import scratch_file
from weft.run.failures import PeerLost, exit_code_and_text
from weft.run.status import (
    BEAT_S,
    START_S,
    Hang,
    Limits,
    Line,
    Milestone,
    Observer,
    StatusLine,
    create_status_file,
    describer,
    limits_of,
)
from weft.run.transport import Transport, open_store

ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_FAILED: Final = "failed"
"""Key of the verdict: exit code, rank that hangs (or nothing) and message, with bars between them."""
_DONE: Final = "done|"


class Watch(threading.Thread):
    """The beating and watching thread of one rank."""

    def __init__(self, *, rank: int, num_ranks: int, status: StatusLine, store: Any, neighbours: Sequence[int] = (),
                 limits: Limits | None = None, is_script: bool = False,
                 end: Callable[[int], None] = os._exit) -> None:
        """``neighbours`` are ranks whose lines ``status`` can read; ``end`` ends the process.

        In a script the job may go on without its store, where no launcher serves it: rank 0 may have come to its end.
        """
        super().__init__(name="weft-watch", daemon=True)
        self.rank, self.num_ranks, self.status = rank, num_ranks, status
        self.observer = Observer(limits or limits_of(None))
        self._store = dist.PrefixStore("weft-watch", store)
        self._neighbours, self._end, self._is_script = neighbours, end, is_script
        self.is_leaving = False
        """This rank has done its part: rank 0 may be gone before it, and the store with it."""
        self._stopping = threading.Event()
        self._signals, self._signalled = os.pipe()
        self._texts: dict[int, str] = {}
        self._other = (rank + 1) % num_ranks
        """The next rank that has not ended in order."""
        os.set_blocking(self._signalled, False)

    def catch_signals(self) -> None:
        """Let the signals that end the process be answered by the thread; torchrun sends SIGTERM when a rank has died.

        The main thread may be deep in a wait and would not see them. Call this in the main thread.
        """
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def run(self) -> None:
        """Beat and watch until stopped; end the process when the job is over."""
        self.status.beat()  # at once: before its first beat a rank may be silent for long
        try:
            code = self._watch()
        except RuntimeError as problem:
            code = self._without_store(problem)
        if code is not None:
            self._end(code)

    def _watch(self) -> int | None:
        """Return the exit code when the job is over because a rank is gone or hangs, None when stopped."""
        before = time.monotonic()
        while True:
            number = self._wait_for_signal()
            if self._stopping.is_set():
                return None
            self.status.beat()
            numbers = " ".join(map(str, self.status.read()))
            self._store.set(f"beat/{self.rank}", f"{numbers}|{self.status.describe()}")
            if number:
                return self._end_by(number)
            if self._failure() is not None:
                return self._end_with_others()
            now = time.monotonic()
            hang = self._look(now - before)
            before = now
            if hang is not None:
                self.announce(hang.message, hung=hang.rank)
                return self._end_with_others()

    def _look(self, elapsed_s: float) -> Hang | None:
        """Return what is wrong with the next rank, or on rank 0 with any."""
        other = self._other
        for rank in range(self.num_ranks) if self.rank == 0 else (other,):
            is_here = rank in self._neighbours
            line, is_done = self._line_of(rank)
            if is_done:
                line = line._replace(place=Milestone.DONE)
                self._other = (other + 1) % self.num_ranks if rank == other != self.rank else self._other
            elif rank == other != self.rank and is_here and self.status.has_died(rank):
                return Hang(rank=rank, message=f"rank {rank} is gone; it was {self.status.describe(rank)}")
            self.observer.note(rank, line, elapsed_s, process=line.process if is_here else None)
        hang = None if other == self.rank else self.observer.silent(
            other, self._describe, is_here=other in self._neighbours)
        return hang or (self.observer.stuck(self.num_ranks, self._describe) if self.rank == 0 else None)

    def _line_of(self, rank: int) -> tuple[Line, bool]:
        """Return the last line of a rank, and whether it has ended in order."""
        beat = self._read(f"beat/{rank}")
        if beat.startswith(_DONE):
            return self.status.read(), True
        numbers, _, self._texts[rank] = beat.partition("|")
        if rank in self._neighbours:
            return self.status.read(rank), False
        return Line(*map(int, numbers.split())) if numbers else _NOTHING, False

    def _describe(self, line: Line, rank: int) -> str:
        """Return what a rank does: as its line says on this machine, else as it said with its last beat."""
        if rank not in self._neighbours and rank != self.rank:
            return self._texts.get(rank) or "starting up"
        return describer(self.status.labels or (lambda rank: ()))(line, rank)

    def _wait_for_signal(self) -> int:
        """Return the signal that has come, after waiting for one for one beat; 0 for none."""
        ready, _, _ = select.select([self._signals], [], [], BEAT_S)
        found = [number for number in os.read(self._signals, 16) if number in ENDING] if ready else []
        return found[0] if found else 0

    def _end_by(self, number: int) -> int:
        """Return the exit code after a signal; where it came because a rank has died, that rank is named."""
        for other in self._neighbours:
            is_done = self._read(f"beat/{other}").startswith(_DONE)
            if other != self.rank and not is_done and self.status.has_died(other):
                self.announce(f"rank {other} is gone; it was {self.status.describe(other)}")
        if self._failure() is not None:
            return self._end_with_others()
        name = signal.Signals(number).name
        self.announce(f"rank {self.rank} was ended by {name}; it was {self.status.describe()}", code=128 + number)
        return 128 + number

    def _end_with_others(self) -> int:
        """Return the exit code of the verdict; a process on this machine that hangs is ended first."""
        code, hung, _ = self._read(_FAILED).split("|", 2)
        if hung and int(hung) in self._neighbours:
            self._kill(int(hung))
        return int(code)

    def _kill(self, rank: int) -> None:
        """End the process of a rank on this machine; one that is stopped can do nothing else."""
        process = self.status.read(rank).process
        if process not in (0, os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _without_store(self, problem: RuntimeError) -> int | None:
        """Return the exit code now that the store is gone, None if that is no reason to end.

        Where rank 0 serves it, that process may have been stopped.
        """
        is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._stopping.is_set() or self.is_leaving or (self._is_script and not is_served):
            return None
        first_line = next(iter(str(problem).splitlines()), type(problem).__name__)
        why = f"the job's store is gone ({first_line}), so the job has ended"
        if not is_served and self.rank != 0 and 0 in self._neighbours:
            how = "is gone" if self.status.has_died(0) else "does not answer"
            why = f"rank 0, which serves the job's store, {how}; it was {self.status.describe(0)}"
            self._kill(0)
        _print(f"rank {self.rank}: {why}")
        return RunError.exit_code

    def announce(self, message: str, *, code: int = RunError.exit_code, hung: int | None = None) -> None:
        """Make ``message`` the job's verdict, and print it, unless there is one already."""
        verdict = f"{code}|{'' if hung is None else hung}|{message}"
        if self._store.compare_set(_FAILED, "", verdict).decode() == verdict:
            _print(message)

    def fail(self, problem: Exception) -> int:
        """Return the exit code of this rank, which fails, once all know why: for its own reason or another rank's."""
        code, text = exit_code_and_text(problem)
        if not isinstance(problem, PeerLost) or self.verdict() is None:
            self.announce(f"rank {self.rank} failed while {self.status.describe()}: {text}", code=code)
        return code

    def verdict(self, patience_s: float | None = None) -> str | None:
        """Return why the job failed, waiting for another rank to find out; None if nobody does."""
        limit_s = self.observer.limits.silence_s + 3 * BEAT_S if patience_s is None else patience_s
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                failure = self._failure()
                if failure is not None:
                    return failure
                time.sleep(BEAT_S / 4)
        return None

    def stop(self) -> None:
        """Say that this rank ends in order."""
        self._stopping.set()
        os.write(self._signalled, b"\0")
        self.join(timeout=self.observer.limits.silence_s)
        self.status.set(Milestone.DONE)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self.rank}", _DONE)

    def _failure(self) -> str | None:
        verdict = self._read(_FAILED)
        return verdict.split("|", 2)[2] if verdict else None

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


_NOTHING: Final = Line(Milestone.STARTING, 0, 0, 0, 0, -1, 0, 0)
"""The line of a rank that has not said anything yet."""


def start_watch(transport: Transport, status: StatusLine, *, predicted_s: float | None = None,
                is_script: bool = False) -> Watch:
    """Return the started watch of a rank; the ranks of each machine now keep their lines in one file.

    The file has no name any more once all have opened it, so it cannot stay behind. In a script signals are left to it.
    """
    limits = limits_of(predicted_s)
    store = open_store(listen_fd=None, timeout_s=START_S)
    machines = transport.machines()
    neighbours = [rank for rank, machine in enumerate(machines) if machine == machines[transport.rank]]
    key = f"weft-status/{neighbours[0]}"
    path = None
    if transport.rank == neighbours[0]:
        path, handle = scratch_file("weft-status-")
        create_status_file(path, transport.num_ranks)
        store.set(key, str(path))
    status.move(Path(store.get(key).decode()))
    transport.barrier()
    if path is not None:
        path.unlink()
        os.close(handle)
    store.set_timeout(timedelta(seconds=limits.silence_s))
    watch = Watch(rank=transport.rank, num_ranks=transport.num_ranks, status=status, store=store, neighbours=neighbours,
                  limits=limits, is_script=is_script)
    if not is_script:
        watch.catch_signals()
    watch.start()
    return watch


_watches: list[Watch] = []
"""The watch of a script, which all its trainers share."""


def watch_script(transport: Transport) -> None:
    """Let this rank of a script be watched from now on, until the process ends; where it is alone, by nobody."""
    if transport.num_ranks == 1 or "MASTER_ADDR" not in os.environ:
        return
    if _watches:
        _watches[0].status.is_cpu = transport.status.is_cpu
        transport.status = _watches[0].status
        return
    watch = start_watch(transport, transport.status, is_script=True)
    _watches.append(watch)
    process = os.getpid()
    atexit.register(lambda: watch.stop() if os.getpid() == process else None)
    end_by_ctrl_c_at_once()


def end_by_ctrl_c_at_once() -> None:
    """Let a Ctrl-C that nothing catches end the process by its signal once it is told and what is to be done is done.

    Else threads of the backend may abort the process while Python shuts down, and that is what a launcher tells.
    """
    before = sys.excepthook

    def tell(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        before(kind, problem, trace)
        if issubclass(kind, KeyboardInterrupt):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    sys.excepthook = tell


def expect_steps(predicted_s: float | None) -> None:
    """Tell the watch of a script how long its steps should take."""
    for watch in _watches:
        watch.observer.limits = limits_of(predicted_s)


def _print(message: str) -> None:
    print(f"weft: {message}", file=sys.stderr, flush=True)
