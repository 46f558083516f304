"""What every rank is doing right now, readable from outside even after the rank has died; and which rank hangs.

Each rank owns one line of a small memory-mapped file: eight numbers, see ``Line``. Writing the place costs one store,
so the executor does it for every instruction. Zero and positive places are positions in the rank's instruction list,
negative ones are the milestones below. Without a launcher there is no file, and the line is plain memory.

Whoever watches (the launcher, or the ranks themselves under ``torchrun``) looks at the lines of all ranks about once a
second, with an ``Observer``. A process *lives* while its beats count up, or while it uses CPU time: a call that keeps
Python from running stops the beats. A rank *gets on* while its counter of instructions moves, and while its main thread
computes: one instruction may be long on a slow CPU. On a GPU computing cannot be told from waiting for the device, so
only the counter counts. Outside steps (tracing, loading, compiling, saving, verifying, the script of a trainer) a rank
need not get on. One that waits for another is not to blame while that other one does something; so what is named is a
rank that neither gets on nor waits, or all of them, where each waits.

Times are sums of the watcher's own turns, none longer than ``MAX_TURN_S``: one that was stopped itself, or a machine
that slept, raises no alarm.
"""

from __future__ import annotations

import enum
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from weft.base.errors import InputError

_LINE_BYTES = 64  # one cache line for each rank
BEAT_S = 1.0
"""So often every rank shows that its process lives."""


class Milestone(enum.IntEnum):
    """What a rank does outside its instructions, with words for it."""

    text: str

    def __new__(cls, number: int, text: str) -> Milestone:
        """Return the milestone, a number with a text."""
        member = int.__new__(cls, number)
        member._value_, member.text = number, text
        return member

    STARTING = -1, "starting up"
    TRACING = -2, "tracing the model"
    CONNECTING = -3, "connecting to the other ranks"
    LOADING = -4, "loading its parameters"
    WAITING = -5, "waiting for the other ranks"
    COLLECTING = -6, "sending its results"
    VERIFYING = -7, "verifying the results"
    DONE = -8, "ending"
    SAVING = -9, "writing a checkpoint"
    BETWEEN = -10, "in the script, between steps"
    UPDATING = -11, "updating its parameters"
    COMPILING = -12, "compiling"
    """Set while code is compiled, which may take minutes: no limit on getting on holds then."""


_BY_PLACE = {int(item): item for item in Milestone}
IN_STEP = (Milestone.WAITING, Milestone.UPDATING)
"""Milestones inside a step: a rank that stays there does not get on."""


Labels = Callable[[int], Sequence[str]]
"""What the instructions of a rank are, in order, for people."""


class Line(NamedTuple):
    """The numbers of one rank's line."""

    place: int
    """Position of the instruction, or a milestone."""
    step: int
    """While the rank compiles, the number of the graph."""
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


def _stat(process: int) -> list[str]:
    """Return what the system says of a process here, from its state on; raise ``OSError`` if there is none."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def process_state(process: int) -> str:
    """Return the letter for the state of a process here, ``gone`` without one, ``""`` where that is not known."""
    if process <= 0 or not Path("/proc/self/stat").exists():
        return ""
    try:
        return _stat(process)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def process_cpu_s(process: int) -> float:
    """Return the CPU time that a process of this machine has used; 0 where that is not known."""
    try:
        return sum(map(int, _stat(process)[11:13])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def read_line(data: bytes) -> Line:
    """Return the numbers in a line."""
    return Line(*memoryview(data).cast("q"))


def describe_line(line: Line, labels: Sequence[str]) -> str:
    """Return what a rank does: ``at instruction 7 (F s1 mb 0) of step 0`` or a milestone's text."""
    if line.place == Milestone.COMPILING:
        return f"compiling graph {line.step}"
    if line.place < 0:
        return _BY_PLACE[line.place].text
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


MAX_TURN_S: Final = 3.0
START_S: Final = 60.0
"""How long a process may take to its first beat; and between the beats of a script on another machine, which may keep
Python from running between its steps."""
NUM_STEPS: Final = 10
"""An instruction may take as long as this many whole steps, predicted or measured."""
BUSY: Final = 0.1
"""A main thread that uses this part of a core computes."""
Describe = Callable[[Line, int], str]
"""Says what a rank does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a rank may be silent, and how long it may stay at an instruction."""

    silence_s: float = 15.0
    still_s: float = 60.0
    predicted_s: float = 0.0
    """Of a step."""


def limits_of(predicted_s: float | None) -> Limits:
    """Return the limits for steps of a predicted time; the environment may have others.

    ``WEFT_BEAT_LIMIT_S`` and ``WEFT_STEP_LIMIT_S`` are for debuggers, which stop processes, and for tests.
    """
    usual = Limits()
    return Limits(silence_s=_given("WEFT_BEAT_LIMIT_S", usual.silence_s),
                  still_s=_given("WEFT_STEP_LIMIT_S", usual.still_s), predicted_s=predicted_s or 0.0)


def _given(name: str, usual: float) -> float:
    text = os.environ.get(name, str(usual))
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise InputError(f"{name} must be a number of seconds above 0, not {text!r}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What is wrong; ``rank`` is None where all ranks wait for each other."""

    rank: int | None
    message: str


@dataclass(slots=True)
class _Seen:
    """What was seen of one rank so far."""

    line: Line | None = None
    cpu_s: float = 0.0
    silent_s: float = 0.0
    still_s: float = 0.0
    in_step_s: float = 0.0


@dataclass(slots=True)
class Observer:
    """Remembers how long each rank has been silent, and how long it has not got on."""

    limits: Limits
    who: Callable[[int], str] = "rank {}".format
    """The name of a rank in messages."""
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _longest_s: float = 0.0

    @property
    def still_limit_s(self) -> float:
        """Return how long a rank may stay at an instruction."""
        return max(self.limits.still_s, NUM_STEPS * self.limits.predicted_s, NUM_STEPS * self._longest_s)

    def note(self, rank: int, line: Line, elapsed_s: float, *, process: int | None) -> None:
        """Take in the line of a rank, so many seconds after the last time; ``process`` is its process, if it is here.
        """
        seen = self._seen.setdefault(rank, _Seen())
        before, turn_s = seen.line, min(elapsed_s, MAX_TURN_S)
        cpu_s = 0.0 if process is None else process_cpu_s(process)
        seen.line = line
        if before is None:
            seen.cpu_s = cpu_s
            return
        used_s, seen.cpu_s = cpu_s - seen.cpu_s, cpu_s
        lives = line.beat != before.beat or used_s > BUSY * turn_s
        seen.silent_s = 0.0 if lives else seen.silent_s + turn_s
        gets_on = (line.place, line.steps, line.marks) != (before.place, before.steps, before.marks)
        computes = not line.is_waiting and line.cpu_ms - before.cpu_ms > BUSY * 1e3 * turn_s
        seen.still_s = 0.0 if gets_on or computes or not line.is_in_step else seen.still_s + turn_s
        if line.steps != before.steps:
            self._longest_s, seen.in_step_s = max(self._longest_s, seen.in_step_s), 0.0
        seen.in_step_s += turn_s if line.is_in_step else 0.0

    def silent(self, rank: int, describe: Describe, *, is_here: bool) -> Hang | None:
        """Return what is wrong if the process of a rank gives no sign of life; ``is_here``: it is on this machine."""
        seen = self._seen[rank]
        if seen.line is None or seen.line.place == Milestone.DONE:
            return None
        is_free = seen.line.beat == 0 or (seen.line.place == Milestone.BETWEEN and not is_here)
        if seen.silent_s <= (max(START_S, self.limits.silence_s) if is_free else self.limits.silence_s):
            return None
        is_stopped = is_here and process_state(seen.line.process) in ("T", "t")
        how = "is stopped (by SIGSTOP or a debugger)" if is_stopped else "hangs"
        return Hang(rank=rank, message=f"{self.who(rank)} {how}: no sign of life for {seen.silent_s:.0f} s; it was "
                    f"{describe(seen.line, rank)}")

    def stuck(self, num_ranks: int, describe: Describe) -> Hang | None:
        """Return what is wrong if ranks do not get on, and whose fault that is."""
        lines = {rank: seen.line for rank, seen in self._seen.items() if seen.line is not None}
        limit_s = self.still_limit_s
        late = [rank for rank in lines if self._seen[rank].still_s > limit_s]
        for rank in late:
            if not lines[rank].is_waiting:
                return Hang(rank=rank, message=f"{self.who(rank)} hangs: for {self._seen[rank].still_s:.0f} s it has "
                            f"not got on, and it waits for no other rank; it was {describe(lines[rank], rank)}")
        if len(late) < num_ranks:
            return None
        behind = min(late, key=lambda rank: (lines[rank].steps, lines[rank].place))
        others = "; ".join(f"{self.who(rank)} {describe(lines[rank], rank)}" for rank in late[:8] if rank != behind)
        return Hang(rank=None, message=f"the ranks have waited for each other for {limit_s:.0f} s: {self.who(behind)} "
                    f"is the furthest behind, {describe(lines[behind], behind)}; {others}")


def describer(labels: Callable[[int], Sequence[str]]) -> Describe:
    """Return what says what a rank does, and for what it waits, if its instructions are known."""
    def describe(line: Line, rank: int) -> str:
        names = labels(rank)
        what = describe_line(line, names)
        if not line.is_waiting:
            return what
        known = 0 <= line.awaited < len(names) and line.awaited != line.place
        return f"{what}, waiting for {names[line.awaited] if known else 'other ranks'}"

    return describe
