"""What every rank is doing right now, readable from outside even after the rank has died.

Each rank owns one line of a small memory-mapped file: a place and a step. Writing the place costs one store, so the
executor does it for every instruction. Zero and positive places are positions in the rank's instruction list, negative
ones are the milestones below. Without a launcher there is no file, and the line is plain memory.
"""

from __future__ import annotations

import enum
import mmap
import sys
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


DESCRIPTIONS = {
    Milestone.STARTING: "starting up",
    Milestone.TRACING: "tracing the model",
    Milestone.CONNECTING: "connecting to the other ranks",
    Milestone.LOADING: "loading its parameters",
    Milestone.WAITING: "waiting for the other ranks",
    Milestone.COLLECTING: "sending its results",
    Milestone.VERIFYING: "verifying the results",
    Milestone.DONE: "ending",
}


class StatusLine:
    """One rank's line: ``cell[0]`` is the place, ``cell[1]`` the step."""

    __slots__ = ("_labels", "_labels_file", "_memory", "cell")

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray
        if path is None:
            self._memory = bytearray(_LINE_BYTES)
            start = 0
        else:
            with open(path, "r+b") as stream:
                self._memory = mmap.mmap(stream.fileno(), 0)
            start = rank * _LINE_BYTES
        self.cell = memoryview(self._memory)[start : start + _LINE_BYTES].cast("q")
        self._labels: tuple[str, ...] = ()
        self._labels_file = None if path is None else labels_file(path, rank)
        self.cell[0] = Milestone.STARTING

    def set(self, milestone: Milestone) -> None:
        """Record that the rank is at a milestone."""
        self.cell[0] = milestone

    def name_instructions(self, labels: tuple[str, ...]) -> None:
        """Remember what the instructions are, for ``describe`` and for readers of the file."""
        self._labels = labels
        if self._labels_file is not None:
            self._labels_file.write_text("\n".join(labels), encoding="utf-8")

    def describe(self) -> str:
        """Return what the rank is doing, for people."""
        return describe_place(self.cell[0], self.cell[1], self._labels)


def describe_place(place: int, step: int, labels: tuple[str, ...]) -> str:
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
    place, step = (int.from_bytes(part, sys.byteorder, signed=True) for part in (data[:8], data[8:]))
    names = labels_file(path, rank)
    labels = tuple(names.read_text(encoding="utf-8").split("\n")) if names.exists() else ()
    return describe_place(place, step, labels)
