"""Processes on parts of one device, told what to do together; leaving the context ends all of them.

    with Slices(["cuda:0@50%", "cuda:0@25%"], folder) as slices:
        slices.ask_all({"do": "probe"})

A process that fails, or does not answer in time, ends all; the next question starts new ones.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from weft.base.errors import RunError
from weft.run.result import share_environment

ROOT: Final = Path(__file__).resolve().parents[1]
START_S: Final = 120.0
"""Imports, the GPU's context and connections."""

Answer = dict[str, Any]


class Slices:
    """One process for each device; see the module's docstring."""

    def __init__(self, devices: Sequence[str], folder: Path) -> None:
        self.devices, self.folder = tuple(devices), folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._answers: queue.Queue[tuple[int, Answer | None]] = queue.Queue()

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask_all(self, command: Mapping[str, Any], *, timeout_s: float = 120.0) -> list[Answer]:
        """Return the answers of all processes to one command."""
        return self.ask([command] * len(self.devices), timeout_s=timeout_s)

    def ask(self, commands: Sequence[Mapping[str, Any] | None], *, timeout_s: float = 120.0) -> list[Answer]:
        """Return the answers, each process having its own command; None leaves it alone and answers nothing."""
        if not self._children:
            self._start()
        asked = {rank for rank, command in enumerate(commands) if command is not None}
        for rank in sorted(asked):
            stream = self._children[rank].stdin
            assert stream is not None
            stream.write(json.dumps(commands[rank]).encode() + b"\n")
            stream.flush()
        return self._collect(asked, timeout_s)

    def _start(self) -> None:
        self._answers = queue.Queue()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            for rank in range(len(self.devices)):
                self._children.append(self._start_one(rank, listener))
        for rank, child in enumerate(self._children):
            assert child.stdout is not None
            threading.Thread(target=_read, args=(rank, child.stdout, self._answers), daemon=True).start()
        self._collect(set(range(len(self.devices))), START_S)

    def _start_one(self, rank: int, listener: socket.socket) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, **share_environment(self.devices[rank]), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        fd = [str(listener.fileno())] if rank == 0 else []
        with open(self._words(rank), "ab") as words:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.mps_worker", str(rank), ",".join(self.devices), *fd], cwd=ROOT,
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
                pass_fds=[listener.fileno()] if rank == 0 else [])

    def _words(self, rank: int) -> Path:
        return self.folder / f"words-{rank}.txt"

    def _collect(self, asked: set[int], timeout_s: float) -> list[Answer]:
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout_s
        while asked - found.keys():
            try:
                rank, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(asked - found.keys())
                self.end()
                raise RunError(f"ranks {missing} gave no answer in {timeout_s:.0f} s; all were ended") from None
            if answer is None or "error" in answer:
                self.end()
                raise RunError(f"rank {rank} ({self.devices[rank]}): "
                               f"{self._last_words(rank) if answer is None else answer['error']}")
            found[rank] = answer
        return [found.get(rank, {}) for rank in range(len(self.devices))]

    def _last_words(self, rank: int) -> str:
        lines = self._words(rank).read_text(errors="replace").strip().splitlines()
        return f"it ended; its last words: {lines[-1] if lines else 'none'}"

    def end(self) -> None:
        """End all processes."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self._children = []


def _read(rank: int, stream: IO[bytes], answers: queue.Queue[tuple[int, Answer | None]]) -> None:
    """Put what a process answers into the queue, and None when it has ended."""
    with stream:
        for line in stream:
            answers.put((rank, json.loads(line)))
    answers.put((rank, None))
