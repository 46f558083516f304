"""Notices that another rank is gone, when no launcher of ours watches the processes (``torchrun`` on many hosts).

Every rank beats once a second in the job's TCP store, with what it is doing, and watches the next rank. Whoever misses
a beat for too long, or sees that the next rank's process on this machine is dead, writes down which rank is gone and
what it did last; all ranks look for that note and end. A rank that loses a connection leaves the verdict to the note,
so that there is one message, about the right rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container
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
_FAILED: Final = "weft/failed"


class Watch(threading.Thread):
    """The beating and watching thread of one rank."""

    def __init__(self, *, rank: int, num_ranks: int, status: StatusLine, store: Any, neighbours: Container[int] = (),
                 end: Callable[[int], None] = os._exit) -> None:
        """``neighbours`` are ranks whose lines ``status`` can read; ``end`` ends the process."""
        super().__init__(name="weft-watch", daemon=True)
        self.rank, self.num_ranks, self.status = rank, num_ranks, status
        self._store = dist.PrefixStore("weft-watch", store)
        self._neighbours, self._end = neighbours, end
        self._stop = threading.Event()

    def run(self) -> None:
        """Beat and watch until stopped; end the process when a rank is gone."""
        other = (self.rank + 1) % self.num_ranks
        last, seen = "", time.monotonic() + START_S - SILENCE_S
        number = 0
        try:
            while not self._stop.wait(BEAT_S):
                number += 1
                self._store.set(f"beat/{self.rank}", f"{number}|{self.status.describe()}")
                if self._failure() is not None:
                    self._end(RunError.exit_code)
                beat = self._read(f"beat/{other}")
                if beat != last:
                    last, seen = beat, time.monotonic()
                elif not beat.startswith("done") and other != self.rank and (
                        time.monotonic() - seen > SILENCE_S
                        or (other in self._neighbours and self.status.has_died(other))):
                    self.announce(f"rank {other} is gone; it was {self._last_known(other, beat)}")
                    self._end(RunError.exit_code)
        except RuntimeError as problem:
            if not self._stop.is_set():
                _print(f"rank {self.rank}: the job's store is gone ({_first_line(problem)}), so the job has ended")
                self._end(RunError.exit_code)

    def _last_known(self, other: int, beat: str) -> str:
        """Return what another rank was doing: its own line on this machine, else what it said with its last beat."""
        return self.status.describe(other) if other in self._neighbours else beat.partition("|")[2] or "starting up"

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
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self.rank}", "done|")

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
    watch.start()
    return watch


def _print(message: str) -> None:
    print(f"weft: {message}", file=sys.stderr, flush=True)


def _first_line(problem: BaseException) -> str:
    lines = str(problem).splitlines()
    return lines[0] if lines else type(problem).__name__
