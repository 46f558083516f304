"""What every rank is doing right now, readable from outside even after the rank has died.

Each rank owns one line of a small memory-mapped file: eight numbers, see ``Line``. Writing the place costs one store,
so the executor does it for every instruction. Zero and positive places are positions in the rank's instruction list,
negative ones are the milestones below. Without a launcher there is no file, and the line is plain memory.
"""

from __future__ import annotations

import enum
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_LINE_BYTES = 64  # one cache line for each rank
BEAT_S = 1.0
"""So often every rank shows that its process lives."""


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
    BETWEEN = -10
    UPDATING = -11
    COMPILING = -12
    """Set while code is compiled, which may take minutes: no limit on getting on holds then."""


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
    Milestone.BETWEEN: "in the script, between steps",
    Milestone.UPDATING: "updating its parameters",
    Milestone.COMPILING: "compiling",
}
IN_STEP = (Milestone.WAITING, Milestone.UPDATING)
"""Milestones inside a step: a rank that stays there does not get on."""


Labels = Callable[[int], Sequence[str]]
"""What the instructions of a rank are, in order, for people."""


class Line(NamedTuple):
    """The numbers of one rank's line."""

    place: int
    """Position of the instruction, or a milestone."""
    step: int
    process: int
    steps: int
    """Steps begun: with the place, a counter of instructions."""
    marks: int
    """Counts up when the rank begins to wait for another, and when it has waited: odd while it waits."""
    awaited: int
    """Position of the message or collective that it waits for; -1 for one inside an instruction."""
    beat: int
    """Counts up while the process lives."""
    cpu_ms: int
    """What the main thread has computed; always 0 where a GPU does it, since waiting for one takes CPU time too."""

    @property
    def is_waiting(self) -> bool:
        """Return whether the rank waits for another."""
        return self.marks % 2 == 1

    @property
    def is_in_step(self) -> bool:
        """Return whether the rank is inside a step, where it must get on."""
        return self.place >= 0 or self.place in IN_STEP


class StatusLine:
    """One rank's line; the lines of other ranks in the file can be read."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self.rank = rank
        self.is_cpu = True
        """Whether the rank computes on a CPU."""
        self.labels: Labels | None = None
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
        before = self.cell.tolist()
        with open(path, "r+b") as stream:
            self._open(mmap.mmap(stream.fileno(), 0))
        for index, number in enumerate(before):
            self.cell[index] = number

    def set(self, milestone: Milestone) -> None:
        """Record that the rank is at a milestone; a wait that failed is over."""
        self.cell[0] = milestone
        self.cell[4] += self.cell[4] % 2

    def name_instructions(self, labels: Labels) -> None:
        """Remember what instructions are, for ``describe`` and for readers of the file."""
        self.labels = labels
        if self._labels_file is not None:
            self._labels_file.write_text("\n".join(labels(self.rank)), encoding="utf-8")

    def begin_wait(self, awaited: int = -1) -> None:
        """Record that the rank waits for another from now on."""
        self.cell[5] = awaited
        self.cell[4] += 1

    def end_wait(self) -> None:
        """Record that it has what it waited for. After a failed wait this is left out."""
        self.cell[4] += 1

    def beat(self) -> None:
        """Show that the process lives, and what its main thread has computed."""
        self.cell[7] = round(_main_thread_s() * 1e3) if self.is_cpu else 0
        self.cell[6] += 1

    def read(self, rank: int | None = None) -> Line:
        """Return the line of this or another rank."""
        start = (self.rank if rank is None else rank) * _LINE_BYTES
        return read_line(bytes(self._memory[start : start + _LINE_BYTES]))

    def has_died(self, rank: int) -> bool:
        """Return whether the process of a rank on this machine is known to be dead (zombies are)."""
        return process_state(self.read(rank).process) in ("Z", "X", "gone")

    def describe(self, rank: int | None = None) -> str:
        """Return what this or another rank is doing, for people."""
        wanted = self.rank if rank is None else rank
        return describe_line(self.read(wanted), () if self.labels is None else self.labels(wanted))


class Beat(threading.Thread):
    """Beats on a rank's line for as long as the process lives."""

    def __init__(self, status: StatusLine) -> None:
        super().__init__(name="weft-beat", daemon=True)
        self._status = status

    def run(self) -> None:
        """Beat for ever."""
        while True:
            self._status.beat()
            time.sleep(BEAT_S)


def _main_thread_s() -> float:
    """Return the CPU time of the main thread, or where the system does not tell, of the process."""
    thread = threading.main_thread().ident
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def process_state(process: int) -> str:
    """Return the letter for the state of a process here, ``gone`` without one, ``""`` where that is not known."""
    if process <= 0 or not Path("/proc/self/stat").exists():
        return ""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def process_cpu_s(process: int) -> float:
    """Return the CPU time that a process of this machine has used; 0 where that is not known."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def read_line(data: bytes) -> Line:
    """Return the numbers in a line."""
    return Line(*memoryview(data).cast("q"))


def describe_line(line: Line, labels: Sequence[str]) -> str:
    """Return what a rank does: ``at instruction 7 (F s1 mb 0) of step 0`` or a milestone's text."""
    if line.place < 0:
        return DESCRIPTIONS[Milestone(line.place)]
    what = f" ({labels[line.place]})" if line.place < len(labels) else ""
    return f"at instruction {line.place}{what} of step {line.step}"


def create_status_file(path: Path, num_ranks: int) -> None:
    """Write the file in which ``num_ranks`` ranks keep their lines, all at the first milestone."""
    line = int(Milestone.STARTING).to_bytes(8, sys.byteorder, signed=True).ljust(_LINE_BYTES, b"\0")
    path.write_bytes(line * num_ranks)


def labels_file(path: Path, rank: int) -> Path:
    """Return the file beside the status file in which a rank lists its instructions."""
    return path.with_name(f"labels-{rank}.txt")


def read_lines(path: Path, num_ranks: int) -> list[Line]:
    """Return the lines of all ranks in a file."""
    data = path.read_bytes()
    return [read_line(data[rank * _LINE_BYTES : (rank + 1) * _LINE_BYTES]) for rank in range(num_ranks)]


def read_labels(path: Path, rank: int) -> Sequence[str]:
    """Return the instructions that a rank has listed beside the status file."""
    names = labels_file(path, rank)
    return tuple(names.read_text(encoding="utf-8").split("\n")) if names.exists() else ()


def read_status_file(path: Path, rank: int) -> str:
    """Return what a rank is doing, for people."""
    return describe_line(read_lines(path, rank + 1)[rank], read_labels(path, rank))
