"""Notices that another rank is gone, when no launcher of ours watches the processes (``torchrun`` on many hosts).

Every rank beats once a second in the job's TCP store, with what it is doing, and watches the next rank. Whoever misses
a beat for too long, or sees that the next rank's process on this machine is dead, writes down which rank is gone and
what it did last; all ranks look for that note and end. A rank that loses a connection leaves the verdict to the note,
so that there is one message, about the right rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from weft.errors import RunError
from weft.run.status import StatusLine, create_status_file
from weft.run.transport import Transport, open_store

BEAT_S: Final = 1.0
SILENCE_S: Final = 8.0
"""A rank that has not beaten for this long counts as gone."""
START_S: Final = 60.0
"""How long a rank may take to beat for the first time."""
_FAILED: Final = "failed"
_DONE: Final = "done|"


class Watch(threading.Thread):
    """The beating and watching thread of one rank."""

    def __init__(self, *, rank: int, num_ranks: int, status: StatusLine, store: Any, neighbours: Sequence[int] = (),
                 end: Callable[[int], None] = os._exit) -> None:
        """``neighbours`` are ranks whose lines ``status`` can read; ``end`` ends the process."""
        super().__init__(name="weft-watch", daemon=True)
        self.rank, self.num_ranks, self.status = rank, num_ranks, status
        self._store = dist.PrefixStore("weft-watch", store)
        self._neighbours, self._end = neighbours, end
        self._stopping = threading.Event()
        self._signals, self._signalled = os.pipe()
        os.set_blocking(self._signalled, False)

    def catch_termination(self) -> None:
        """Let SIGTERM, which torchrun sends to the others when a rank has died, be answered by the thread.

        The main thread may be deep in a wait and would not see it. Call this in the main thread.
        """
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)

    def run(self) -> None:
        """Beat and watch until stopped; end the process when a rank is gone."""
        try:
            is_over = self._watch()
        except RuntimeError as problem:
            is_over = not self._stopping.is_set()
            if is_over:
                _print(f"rank {self.rank}: the job's store is gone ({_first_line(problem)}), so the job has ended")
        if is_over:
            self._end(RunError.exit_code)

    def _watch(self) -> bool:
        """Return True when the job is over because a rank is gone, False when stopped."""
        other = (self.rank + 1) % self.num_ranks
        last, seen = "", time.monotonic() + START_S - SILENCE_S
        for number in itertools.count():
            is_terminated = self._wait_for_signal()
            if self._stopping.is_set():
                return False
            self._store.set(f"beat/{self.rank}", f"{number}|{self.status.describe()}")
            if is_terminated:
                self._name_the_dead()
            if is_terminated or self._failure() is not None:
                return True
            beat = self._read(f"beat/{other}")
            if beat != last:
                last, seen = beat, time.monotonic()
            elif self._is_gone(other, beat, time.monotonic() - seen):
                self.announce(f"rank {other} is gone; it was {self._last_known(other, beat)}")
                return True
        raise AssertionError("the loop has no other end")

    def _is_gone(self, other: int, beat: str, silence_s: float) -> bool:
        if beat.startswith(_DONE) or other == self.rank:
            return False
        return silence_s > SILENCE_S or (other in self._neighbours and self.status.has_died(other))

    def _last_known(self, other: int, beat: str) -> str:
        """Return what another rank was doing: its own line on this machine, else what it said with its last beat."""
        return self.status.describe(other) if other in self._neighbours else beat.partition("|")[2] or "starting up"

    def _wait_for_signal(self) -> bool:
        """Return whether SIGTERM has come, after waiting for it for one beat."""
        ready, _, _ = select.select([self._signals], [], [], BEAT_S)
        return bool(ready) and signal.SIGTERM in os.read(self._signals, 16)

    def _name_the_dead(self) -> None:
        for other in self._neighbours:
            is_done = self._read(f"beat/{other}").startswith(_DONE)
            if other != self.rank and not is_done and self.status.has_died(other):
                self.announce(f"rank {other} is gone; it was {self.status.describe(other)}")
                return

    def announce(self, message: str) -> None:
        """Make ``message`` the job's verdict, and print it, unless there is one already."""
        if self._store.compare_set(_FAILED, "", message).decode() == message:
            _print(message)

    def verdict(self, patience_s: float = SILENCE_S + 3 * BEAT_S) -> str | None:
        """Return why the job failed, waiting for another rank to find out; None if nobody does."""
        deadline = time.monotonic() + patience_s
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
        self.join(timeout=SILENCE_S)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self.rank}", _DONE)

    def _failure(self) -> str | None:
        return self._read(_FAILED) or None

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def start_watch(transport: Transport, status: StatusLine) -> Watch:
    """Return the started watch of a rank; the ranks of each machine now keep their lines in one file.

    The file has no name any more once all have opened it, so it cannot stay behind.
    """
    store = open_store(listen_fd=None, timeout_s=START_S)
    machines = transport.machines()
    neighbours = [rank for rank, machine in enumerate(machines) if machine == machines[transport.rank]]
    key = f"weft-status/{neighbours[0]}"
    path = None
    if transport.rank == neighbours[0]:
        handle, name = tempfile.mkstemp(prefix="weft-status-")
        os.close(handle)
        path = Path(name)
        create_status_file(path, transport.num_ranks)
        store.set(key, name)
    status.move(Path(store.get(key).decode()))
    transport.barrier()
    if path is not None:
        path.unlink()
    watch = Watch(rank=transport.rank, num_ranks=transport.num_ranks, status=status, store=store, neighbours=neighbours)
    watch.catch_termination()
    watch.start()
    return watch


def _print(message: str) -> None:
    print(f"weft: {message}", file=sys.stderr, flush=True)


def _first_line(problem: BaseException) -> str:
    lines = str(problem).splitlines()
    return lines[0] if lines else type(problem).__name__
