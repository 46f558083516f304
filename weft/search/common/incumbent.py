"""The best answer of a search so far, and what no answer can beat: kept, proven and told in one way by all searchers.

    best = Incumbent[Schedule](budget, what="makespan", unit="")
    best.offer(schedule.makespan, schedule, by="1f1b")   keeps it if it is better, and says so
    best.raise_bound(12.5)                               no schedule is shorter
    best.is_proven                                       the bound meets the value
    best.status                                          "optimal" only with a proof

Values are minimised. Two values closer than ``SAME`` of them are equal: what differs is rounding. A bound is a proof
when it comes within ``proof`` of the value, which each searcher sets to what its solvers' tolerances allow.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from weft.search.common.budget import Budget

Answer = TypeVar("Answer")

SAME: Final = 1e-12
"""Relative: values no further apart are equal up to rounding."""


@dataclass(kw_only=True)
class Incumbent(Generic[Answer]):
    """The best answer so far, its value, and the proven bound."""

    budget: Budget
    what: str = "best"
    """What is minimised, for people: ``makespan``, ``latency``."""
    unit: str = ""
    proof: float = 1e-9
    """Relative: so close to the value the bound is a proof."""
    same: float = SAME
    """Relative: a value is better if it is less by more than this; 0 where values are whole numbers."""
    digits: int = 6
    """That are told of values."""
    every_s: float = 0.0
    """Better answers are told no more often than after so many seconds."""
    bound: float = -math.inf
    value: float = math.inf
    excess: float = 0.0
    """By how much the answer is over a limit, such as that of memory: less is better, whatever the values."""
    answer: Answer | None = None
    by: str = ""
    """Who found the answer."""
    told: float = -math.inf
    """When, on ``time.monotonic``'s clock."""

    def is_better(self, value: float, excess: float = 0.0) -> bool:
        """Return whether a value would be kept."""
        if self.answer is not None and excess != self.excess:
            return value < math.inf and excess < self.excess
        return value < math.inf and (self.answer is None or value < self.value - self.same * abs(self.value))

    def offer(self, value: float, answer: Answer, by: str = "", excess: float = 0.0) -> bool:
        """Keep the answer if it is better than the best so far; return whether it was kept."""
        if not self.is_better(value, excess):
            return False
        self.value, self.excess, self.answer, self.by = value, excess, answer, by
        self.note(by)
        return True

    def raise_bound(self, bound: float) -> None:
        """Keep a bound that is higher than what is known; it never passes the value by more than rounding."""
        self.bound = max(self.bound, min(bound, self.value))

    @property
    def gap(self) -> float:
        """Return how much less the best answer of all could be, as a part of this one."""
        if self.answer is None:
            return math.inf
        return 0.0 if self.is_proven else max(0.0, (self.value - self.bound) / max(abs(self.value), 1e-300))

    @property
    def is_proven(self) -> bool:
        """Return whether nothing can be better."""
        return self.answer is not None and self.excess == 0 and self.bound >= self.value - self.proof * abs(self.value)

    @property
    def is_done(self) -> bool:
        """Return whether the search should end: there is an answer, and it is proven or nothing may be spent."""
        return self.is_proven or (self.answer is not None and self.budget.is_spent)

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Return what may be claimed of the answer."""
        return "optimal" if self.is_proven else "feasible"

    def note(self, text: str) -> None:
        """Report where the search is, unless that has just been done."""
        if time.monotonic() >= self.told + self.every_s:
            self.tell(text)

    def tell(self, text: str = "") -> None:
        """Report where the search is: what is being done, the best so far, the bound and the gap."""
        self.told = time.monotonic()
        unit = f" {self.unit}" if self.unit else ""
        best = "nothing yet" if self.answer is None else f"{self.value:.{self.digits}g}{unit}"
        best += f", over the limit by {self.excess:.4g}" if self.excess else ""
        gap = "" if self.answer is None or self.bound == -math.inf else f", gap {100 * self.gap:.2g} %"
        bound = "" if self.bound == -math.inf else f", bound {min(self.bound, self.value):.{self.digits}g}{unit}"
        self.budget.report(f"{text}: {self.what} {best}{bound}{gap}" if text else f"{self.what} {best}{bound}{gap}")
