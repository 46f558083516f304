"""Notices that another rank is gone, when no launcher of ours watches the processes (``torchrun`` on many hosts).

Every rank beats once a second in the job's TCP store, with what it is doing, and watches the next rank. Whoever misses
a beat for too long writes down which rank is gone and what it did last; all ranks look for that note and end. A rank
that loses a connection leaves the verdict to the note, so that there is one message, about the right rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from weft.errors import RunError
from weft.run.status import StatusLine
from weft.run.transport import open_store

BEAT_S: Final = 1.0
SILENCE_S: Final = 8.0
"""A rank that has not beaten for this long counts as gone."""
START_S: Final = 60.0
"""How long a rank may take to beat for the first time."""
_FAILED: Final = "weft/failed"


class Watch(threading.Thread):
    """The beating and watching thread of one rank."""

    def __init__(self, *, rank: int, num_ranks: int, status: StatusLine,
                 end: Callable[[int], None] = os._exit) -> None:
        super().__init__(name="weft-watch", daemon=True)
        self.rank, self.num_ranks, self.status = rank, num_ranks, status
        self._end = end
        self._stop = threading.Event()
        self._store = dist.PrefixStore("weft-watch", open_store(listen_fd=None, timeout_s=START_S))

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
                elif time.monotonic() - seen > SILENCE_S and not beat.startswith("done") and other != self.rank:
                    what = beat.partition("|")[2] or "starting up"
                    self.announce(f"rank {other} is gone; it was {what}")
                    self._end(RunError.exit_code)
        except RuntimeError as problem:
            if not self._stop.is_set():
                _print(f"rank {self.rank}: the job's store is gone ({_first_line(problem)}), so the job has ended")
                self._end(RunError.exit_code)

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


def _print(message: str) -> None:
    print(f"weft: {message}", file=sys.stderr, flush=True)


def _first_line(problem: BaseException) -> str:
    lines = str(problem).splitlines()
    return lines[0] if lines else type(problem).__name__
