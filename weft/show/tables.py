"""Tables for the terminal: cells of plain text, drawn through rich.

Names come from files, so cells are shown as they are: markup and control characters in them have no effect. Colour is
off where the output is not a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from weft.base.units import format_time
from weft.show.names import printable

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN: Final = "-"
MAX_DEVICE_ROWS: Final = 32
"""Longer device tables are cut in the terminal."""
PLAIN_WIDTH: Final = 160
"""Columns for output that is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Cells of text, to be drawn."""

    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    """Columns that are aligned to the right."""
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    notes: tuple[str, ...] = ()
    """Lines below the table."""


def seconds(value: float | None) -> str:
    """Return the time for people, or ``-``."""
    return UNKNOWN if value is None else format_time(value)


def percent(value: float | None, *, signed: bool = False) -> str:
    """Return the fraction as a percentage, or ``-``."""
    if value is None:
        return UNKNOWN
    digits = 0 if abs(value) >= 1 else 1
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %"


def per_second(value: float | None) -> str:
    """Return samples per second for people, or ``-``."""
    return UNKNOWN if value is None else f"{value:,.0f}/s" if value >= 1e4 else f"{value:.4g}/s"


def make_table(title: str, header: Sequence[str], cells: Iterable[Sequence[str]], *, limit: int | None = None,
               marked: Iterable[bool] = (), notes: Iterable[str] = ()) -> TextTable:
    """Return a table: columns with ``#`` before their names are aligned to the right, ``marked`` rows stand out.

    Rows beyond ``limit`` are counted in the last one.
    """
    rows = [tuple(row) for row in cells]
    if limit is not None and len(rows) > limit:
        rows[limit - 1:] = [(f"... {len(rows) - limit + 1} more", *[""] * (len(header) - 1))]
    return TextTable(title=title, header=tuple(name.removeprefix("#") for name in header), rows=tuple(rows),
                     numeric=frozenset(index for index, name in enumerate(header) if name.startswith("#")),
                     marked=frozenset(index for index, is_marked in enumerate(marked) if is_marked), notes=tuple(notes))


def print_table(item: TextTable, *, width: int | None = None) -> None:
    """Draw one table on stdout, ``width`` columns wide (the terminal's)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console = make_console(width)
    cells = [[printable(cell) for cell in row] for row in (item.header, *item.rows)]
    table = Table(title=Text(printable(item.title), "bold") if item.title else None, title_justify="left",
                  box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, (name, wide) in enumerate(zip(cells[0], column_widths(cells, console.width), strict=True)):
        table.add_column(Text(name), justify="right" if index in item.numeric else "left", width=wide, overflow="fold")
    for index, row in enumerate(cells[1:]):
        table.add_row(*map(Text, row), style="bold" if index in item.marked else None)
    console.print(table)


def column_widths(cells: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return a width for each column so that the table fits if it can, the widest shrinking first, words kept whole.

    >>> column_widths([["ab", "a longer text"]], 12)
    [2, 8]
    """
    from rich.cells import cell_len

    columns = list(zip(*cells, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    least = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    least[0] = widths[0]
    for floor in (least, [4] * len(widths)):
        while sum(widths) + 2 * (len(widths) - 1) > available and (
                shrinkable := [(width, index) for index, width in enumerate(widths) if width > floor[index]]):
            widths[max(shrinkable)[1]] -= 1
    return widths


def make_console(width: int | None = None) -> Console:
    """Return a rich console for stdout; if that is not a terminal it gets no colour and a fixed width."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(width=width or (None if is_terminal else PLAIN_WIDTH), highlight=False, markup=False, emoji=False,
                   no_color=None if is_terminal else True)


def print_tables(*tables: TextTable, width: int | None = None) -> None:
    """Draw the tables with their notes on stdout, an empty line after each."""
    for table in tables:
        print_table(table, width=width)
        for note in table.notes:
            make_console(width).print(printable(note), soft_wrap=False)
        print()
