"""What the joint search tried: the best settings with what they came to, and why the others were left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Final

from weft.show.tables import TextTable, percent, print_text_table, seconds

if TYPE_CHECKING:
    from weft.show.facts import StrategyFacts, TriedFacts

MAX_ROWS: Final = 20


def tried_tables(rows: Sequence[TriedFacts], *, limit: int = MAX_ROWS) -> Iterator[TextTable]:
    """Yield the best settings, then how many were left out for which reason."""
    known = sorted((row for row in rows if row.estimate_s is not None), key=_time)
    if known:
        best = min((row.step_time_s for row in known if row.step_time_s is not None), default=_time(known[0]))
        cells = tuple((row.setting, seconds(row.estimate_s), seconds(row.step_time_s), _why(row, best))
                      for row in known[:limit])
        more = len(known) - len(cells)
        yield TextTable(title="Tried", header=("setting", "estimate", "simulated", "why not"), rows=cells,
                        numeric=frozenset({1, 2}), notes=(f"and {more} more that were estimated",) if more else ())
    reasons: dict[str, list[TriedFacts]] = {}
    for row in rows:
        if row.estimate_s is None:
            reasons.setdefault(_kind(row), []).append(row)
    if reasons:
        yield TextTable(title="Left out", header=("reason", "settings", "such as"), numeric=frozenset({1}),
                        rows=tuple((kind, str(len(items)), _example(items[0])) for kind, items in sorted(
                            reasons.items(), key=lambda item: (-len(item[1]), item[0]))))


def _time(row: TriedFacts) -> float:
    """Return what a setting came to: as simulated, or else as estimated."""
    assert row.estimate_s is not None
    return row.estimate_s if row.step_time_s is None else row.step_time_s


def _why(row: TriedFacts, best_s: float) -> str:
    if row.reason:
        return row.reason
    loss = percent(_time(row) / best_s - 1, signed=True) if best_s > 0 else ""
    if row.step_time_s is None:
        return f"{loss}, not simulated"
    return "the best" if row.step_time_s <= best_s else f"{loss}"


def _kind(row: TriedFacts) -> str:
    """Return a reason without its figures."""
    text = row.reason.removeprefix(f"{row.setting}: ")
    return re.split(r"[:0-9]", text, maxsplit=1)[0].strip() or "no reason given"


def _example(row: TriedFacts) -> str:
    return f"{row.setting}: {row.reason.removeprefix(f'{row.setting}: ')}"


def print_tried(strategies: Sequence[StrategyFacts], *, file: IO[str] | None = None, width: int | None = None) -> None:
    """Draw the tables of every strategy that kept what it tried."""
    for strategy in strategies:
        for table in tried_tables(strategy.tried):
            print_text_table(table, file, width)
