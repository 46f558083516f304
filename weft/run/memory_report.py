"""The most memory of each rank, as the account says and as measured, and the table of both for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.memory import CATEGORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The most that one rank held in a step, as the account says and as measured, in bytes by category."""

    device: str
    account: dict[str, int]
    measured: dict[str, int]
    inside: int
    """What of the measured peak was taken by the instruction that ran then, above what was held when it began."""
    account_at: str
    measured_at: str
    """The instructions during which the totals were largest."""

    @property
    def account_bytes(self) -> int:
        """Return the account's total."""
        return sum(self.account.values())

    @property
    def measured_bytes(self) -> int:
        """Return the measured total."""
        return sum(self.measured.values())

    @property
    def difference(self) -> float:
        """Return how far the measured peak is above the account's, as a part of the account's."""
        return self.measured_bytes / self.account_bytes - 1 if self.account_bytes else 0.0


def memory_table(ranks: Sequence[RankMemory]) -> str:
    """Return the comparison for people: for each rank the account's and the measured peak, by category, in MB."""
    heads = ["rank", "", *CATEGORIES, "peak", "off", "while"]
    rows = []
    for rank, item in enumerate(ranks):
        for parts, words in ((item.account, (f"{rank} ({item.device})", "account", "", item.account_at)),
                             (item.measured, ("", "measured", f"{item.difference:+.1%}", item.measured_at))):
            rows.append([*words[:2], *(_mb(parts[part]) for part in CATEGORIES), _mb(sum(parts.values())), *words[2:]])
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = [_line(row, widths) for row in (heads, *rows)]
    return "\n".join(["peak memory in MB:", *lines])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = range(2, len(cells) - 1)
    return "  ".join(cell.rjust(width) if place in numbers else cell.ljust(width)
                     for place, (cell, width) in enumerate(zip(cells, widths, strict=True))).rstrip()


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3f}"
