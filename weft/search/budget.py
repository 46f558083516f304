"""What a search may spend, and how Ctrl-C ends it. No solver is needed for that."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


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

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None if there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def is_spent(self) -> bool:
        """Return whether nothing more may be begun."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.is_interrupted or is_late or self.effort <= 0


@contextmanager
def ended_by_ctrl_c(budget: Budget) -> Iterator[None]:
    """Let Ctrl-C mark the budget instead of raising, for searches that spend most of their time in compiled code.

    An exception there would end the process or be lost. A second Ctrl-C raises as usual. Only the main thread gets
    signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def mark(number: int, frame: FrameType | None) -> None:
        budget.is_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, mark)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
