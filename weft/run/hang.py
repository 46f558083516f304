"""Says which rank hangs, from two signs: that its process lives, and that it gets on.

Whoever watches (the launcher, or the ranks themselves under ``torchrun``) looks at the lines of all ranks about once a
second. A process *lives* while its beats count up, or while it uses CPU time: a call that keeps Python from running
stops the beats. A rank *gets on* while its counter of instructions moves, and while its main thread computes: one
instruction may be long on a slow CPU. On a GPU computing cannot be told from waiting for the device, so only the
counter counts. Outside steps (tracing, loading, compiling, saving, verifying, the script of a trainer) a rank need not
get on. One that waits for another is not to blame while that other one does something; so what is named is a rank that
neither gets on nor waits, or all of them, where each waits.

Times are sums of the watcher's own turns, none longer than ``MAX_TURN_S``: one that was stopped itself, or a machine
that slept, raises no alarm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from weft.base.errors import InputError
from weft.run.status import Line, Milestone, describe_line, process_cpu_s, process_state

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
