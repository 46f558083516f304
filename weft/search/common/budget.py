"""What a search may spend, and how Ctrl-C and the clock end it. No solver is needed for that.

A ``Budget`` is asked between steps. Where one step may take long, ``cut_short`` raises ``OutOfTime`` inside it when the
deadline is past, as Ctrl-C raises ``KeyboardInterrupt``: whoever keeps the best so far catches it.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from weft.base.compiled import afterwards

AGAIN_S: Final = 0.05
"""So often ``OutOfTime`` is tried again, where it could not be raised or something has swallowed it."""
LONGEST_S: Final = 1e8
"""No alarm is further away: three years."""
NOT_INSIDE: Final = frozenset(("numba", "llvmlite", "importlib", "_frozen_importlib", "torch", "threading",
                               "concurrent", "ctypes", "weakref", "traceback"))
"""Packages that an exception out of nowhere may leave in disorder, or that turn it into another one."""
NOT_IN_FUNCTION: Final = frozenset(("__del__", "unraisable_hook"))
"""Likewise: Python calls these wherever it is, and what they raise is lost with a line on stderr."""
NOT_IN_MODULE: Final = "numpy._core._internal"
"""Likewise; compiled code calls it, for instance to compare records. The rest of numpy may be interrupted."""


_MARKED: list[Budget] = []
"""Budgets of the searches that Ctrl-C ends at this moment, the outermost first."""


class OutOfTime(BaseException):
    """The deadline is past. No error: like Ctrl-C it ends what runs, and passes all handlers of errors."""


@dataclass(kw_only=True)
class Budget:
    """What a search may still spend; shared by all its solver calls."""

    effort: float
    """CPU seconds left, about, by deterministic count."""
    deadline: float | None = None
    """On ``time.monotonic``'s clock; None for no limit."""
    is_interrupted: bool = False
    """Ctrl-C was pressed: nothing more is begun."""
    report: Callable[[str], None] = field(default=lambda text: None)
    clock: Callable[[], float] = time.monotonic
    paused_s: float = 0.0
    """Seconds that did not count."""
    num_pauses: int = 0
    """So many pauses, one in the other, are going on."""

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None if there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    @property
    def is_late(self) -> bool:
        """Return whether the deadline is past."""
        return self.deadline is not None and self.clock() >= self.deadline

    @property
    def is_spent(self) -> bool:
        """Return whether nothing more may be begun."""
        return self.is_interrupted or self.is_late or self.effort <= 0

    def has_s(self, seconds: float) -> bool:
        """Return whether something that takes so long may be begun."""
        return not self.is_spent and (self.deadline is None or self.clock() + seconds < self.deadline)

    def part(self, share: float) -> Budget:
        """Return a budget with this part of the time that is left."""
        left = self.seconds_left
        return Budget(effort=self.effort, report=self.report, clock=self.clock,
                      deadline=None if left is None else self.clock() + share * left)

    @contextmanager
    def lend(self, effort: float) -> Iterator[Budget]:
        """Lend so much of the effort at most; what is not spent comes back, and Ctrl-C counts for both."""
        lent = min(self.effort, effort)
        share = Budget(effort=lent, deadline=self.deadline, report=self.report, clock=self.clock,
                       is_interrupted=self.is_interrupted)
        try:
            yield share
        finally:
            self.effort -= lent - share.effort
            self.is_interrupted |= share.is_interrupted

    @contextmanager
    def without(self, effort: float) -> Iterator[None]:
        """Keep so much of the effort for later. It stays one budget, so that Ctrl-C reaches what is done inside."""
        self.effort -= effort
        try:
            yield
        finally:
            self.effort += effort

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let what is done inside not count: the deadline moves by as long as it takes."""
        begin = self.clock()
        self.num_pauses += 1
        try:
            with ctrl_c_not_lost():
                yield
        finally:
            self.num_pauses -= 1
            took_s = self.clock() - begin
            self.paused_s += took_s
            if self.deadline is not None:
                self.deadline += took_s


def time_budget(time_limit_s: float | None, report: Callable[[str], None] = lambda text: None) -> Budget:
    """Return a budget that only the clock limits, from now on."""
    return Budget(effort=float("inf"), report=report,
                  deadline=None if time_limit_s is None else time.monotonic() + time_limit_s)


@contextmanager
def cut_short(end: float | Budget | None) -> Iterator[None]:
    """Raise ``OutOfTime`` inside the block when the deadline (``time.monotonic``'s clock, or a budget's) is past.

    A budget's deadline may move, by pauses inside the block; nothing is raised in these.

    Compiled code and imports are not interrupted, only what comes after them. Signals reach the main thread alone: in
    others nothing happens. Of two blocks, one in the other, the sooner deadline counts in the inner one.
    """
    deadline, budget = (end.deadline, end) if isinstance(end, Budget) else (end, None)
    if deadline is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_on = True

    def ring(number: int, frame: FrameType | None) -> None:
        if not is_on or (budget is not None and budget.num_pauses):
            return
        if budget is not None and not budget.is_late and (outer_s == 0 or time.monotonic() < begin + outer_s):
            _ring_in(budget.seconds_left or 0.0)  # it has moved
        elif _may_raise(frame):
            raise OutOfTime
        else:
            afterwards[:] = [try_again]

    def try_again() -> None:
        if threading.current_thread() is threading.main_thread():
            afterwards.clear()
            ring(signal.SIGALRM, sys._getframe())

    handler = signal.signal(signal.SIGALRM, ring)
    begin, (outer_s, outer_again_s) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        left_s = deadline - begin if outer_s == 0 else min(deadline - begin, outer_s)
        _ring_in(left_s)
        yield
    finally:
        is_on = False
        afterwards.clear()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if outer_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, outer_s - (time.monotonic() - begin)), outer_again_s)


def _ring_in(seconds: float) -> None:
    """Set the alarm; one that is years away is beyond what a system's clock can count."""
    signal.setitimer(signal.ITIMER_REAL, min(max(1e-6, seconds), LONGEST_S), AGAIN_S)


def _may_raise(frame: FrameType | None) -> bool:
    """Return whether nothing that runs at this moment must not be interrupted."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if (name == NOT_IN_MODULE or name.partition(".")[0] in NOT_INSIDE
                or frame.f_code.co_name in NOT_IN_FUNCTION):
            return False
        frame = frame.f_back
    return True


@contextmanager
def ctrl_c_not_lost() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at the end of the block where Ctrl-C came inside and something has swallowed it.

    For imports and tracing: there it is lost now and then, and nothing in them is meant to catch it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def ended_by_ctrl_c(budget: Budget) -> Iterator[None]:
    """Let Ctrl-C mark the budget instead of raising, for searches that spend most of their time in compiled code.

    An exception there would end the process or be lost. A second Ctrl-C raises as usual. Of searches inside others all
    budgets are marked. Only the main thread gets signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def mark(number: int, frame: FrameType | None) -> None:
        for item in _MARKED:
            item.is_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, mark)
    _MARKED.append(budget)
    try:
        yield
    finally:
        _MARKED.pop()
        signal.signal(signal.SIGINT, before)
