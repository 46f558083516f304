"""What every rank is doing right now, readable from outside even after the rank has died.

Each rank owns one line of a small memory-mapped file: a place and a step. Writing the place costs one store, so the
executor does it for every instruction. Zero and positive places are positions in the rank's instruction list, negative
ones are the milestones below. Without a launcher there is no file, and the line is plain memory.
"""

from __future__ import annotations

import enum
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_LINE_BYTES = 64  # one cache line for each rank


class Milestone(enum.IntEnum):
    """What a rank does outside its instructions."""

    STARTING = -1
    TRACING = -2
    CONNECTING = -3
    LOADING = -4
    WAITING = -5
    COLLECTING = -6
    VERIFYING = -7
    DONE = -8
    SAVING = -9


DESCRIPTIONS = {
    Milestone.STARTING: "starting up",
    Milestone.TRACING: "tracing the model",
    Milestone.CONNECTING: "connecting to the other ranks",
    Milestone.LOADING: "loading its parameters",
    Milestone.WAITING: "waiting for the other ranks",
    Milestone.COLLECTING: "sending its results",
    Milestone.VERIFYING: "verifying the results",
    Milestone.DONE: "ending",
    Milestone.SAVING: "writing a checkpoint",
}


Labels = Callable[[int], Sequence[str]]
"""What the instructions of a rank are, in order, for people."""


class StatusLine:
    """One rank's line: place, step and process id; the lines of other ranks in the file can be read."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self.rank = rank
        self._labels: Labels | None = None
        self._memory: mmap.mmap | bytearray = bytearray(_LINE_BYTES * (rank + 1))
        self._labels_file: Path | None = None
        self._open(self._memory)
        if path is not None:
            self.move(path)
            self._labels_file = labels_file(path, rank)

    def _open(self, memory: mmap.mmap | bytearray) -> None:
        start = self.rank * _LINE_BYTES
        self._memory = memory
        self.cell = memoryview(memory)[start : start + _LINE_BYTES].cast("q")
        self.cell[0] = Milestone.STARTING
        self.cell[2] = os.getpid()

    def move(self, path: Path) -> None:
        """Keep the line in the file from now on."""
        place = self.cell[0]
        with open(path, "r+b") as stream:
            self._open(mmap.mmap(stream.fileno(), 0))
        self.cell[0] = place

    def set(self, milestone: Milestone) -> None:
        """Record that the rank is at a milestone."""
        self.cell[0] = milestone

    def name_instructions(self, labels: Labels) -> None:
        """Remember what instructions are, for ``describe`` and for readers of the file."""
        self._labels = labels
        if self._labels_file is not None:
            self._labels_file.write_text("\n".join(labels(self.rank)), encoding="utf-8")

    def has_died(self, rank: int) -> bool:
        """Return whether the process of a rank on this machine is known to be dead (zombies are)."""
        start = rank * _LINE_BYTES + 16
        process = int.from_bytes(self._memory[start : start + 8], sys.byteorder, signed=True)
        state = Path(f"/proc/{process}/stat")
        if process == 0 or not Path("/proc/self/stat").exists():
            return False
        try:
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def describe(self, rank: int | None = None) -> str:
        """Return what this or another rank is doing, for people."""
        wanted = self.rank if rank is None else rank
        start = wanted * _LINE_BYTES
        place, step = _read_line(bytes(self._memory[start : start + 16]))
        return describe_place(place, step, () if self._labels is None else self._labels(wanted))


def _read_line(data: bytes) -> tuple[int, int]:
    place, step = (int.from_bytes(part, sys.byteorder, signed=True) for part in (data[:8], data[8:16]))
    return place, step


def describe_place(place: int, step: int, labels: Sequence[str]) -> str:
    """Return what a place means: ``at instruction 7 (F s1 mb 0) of step 0`` or a milestone's text."""
    if place < 0:
        return DESCRIPTIONS[Milestone(place)]
    what = f" ({labels[place]})" if place < len(labels) else ""
    return f"at instruction {place}{what} of step {step}"


def create_status_file(path: Path, num_ranks: int) -> None:
    """Write the file in which ``num_ranks`` ranks keep their lines, all at the first milestone."""
    line = int(Milestone.STARTING).to_bytes(8, sys.byteorder, signed=True).ljust(_LINE_BYTES, b"\0")
    path.write_bytes(line * num_ranks)


def labels_file(path: Path, rank: int) -> Path:
    """Return the file beside the status file in which a rank lists its instructions."""
    return path.with_name(f"labels-{rank}.txt")


def read_status_file(path: Path, rank: int) -> str:
    """Return what a rank is doing, for people."""
    with open(path, "rb") as stream:
        stream.seek(rank * _LINE_BYTES)
        data = stream.read(16)
    place, step = _read_line(data)
    names = labels_file(path, rank)
    labels = tuple(names.read_text(encoding="utf-8").split("\n")) if names.exists() else ()
    return describe_place(place, step, labels)
