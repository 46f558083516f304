"""Opening a profile store that may come from anyone: plain tables of the known form, and an end to all work.

A sqlite file can hold more than data: views, triggers, checks, defaults and generated columns run SQL when a table is
read or written, for ever if they like; pages may be linked so that a small file has endless rows. So nothing but the
very tables that Weft makes is read or written, every statement ends after a number of steps that follows from the
file's size, and no more text is taken out of a file than is in it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_BUSY_S: Final = 30.0
_MAX_VALUE_BYTES: Final = 1_000_000
"""No text of a profile store is longer: a signature of a hundred tensors has some kilobytes."""
_MAX_SQL_BYTES: Final = 100_000
_STEPS: Final = 1_000_000
_STEPS_PER_BYTE: Final = 20
"""A statement may take this many steps of sqlite's machine, and so many for each byte of the file; reading takes less
than one for each byte."""
_ROLLBACK_MODE: Final = b"\x01\x01"
_JOURNAL_MAGIC: Final = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"


class StoreProblem(Exception):  # noqa: N818 - the store says it with its own name
    """The file is not a store that Weft has written."""


def check_mode(header: bytes, path: Path) -> None:
    """Raise ``StoreProblem`` if the file, or the journal beside it, is of a kind that Weft does not write."""
    if header[18:20] != _ROLLBACK_MODE:
        raise StoreProblem("it has a write-ahead log, which Weft's stores have not")
    journal = Path(f"{path}-journal")
    if journal.exists():
        with open(journal, "rb") as stream:
            stream.seek(max(journal.stat().st_size - len(_JOURNAL_MAGIC), 0))
            if stream.read() == _JOURNAL_MAGIC:  # it names another file, which sqlite might delete
                raise StoreProblem("the journal beside it belongs to several files")


def open_store(path: Path, *, write: bool) -> sqlite3.Connection:
    """Return a connection that ends every statement after some work; see the module's docstring."""
    # Readers open it for writing too after a crash, where they may: the first one must roll back the journal.
    is_open_to_write = write or (Path(f"{path}-journal").exists() and os.access(path, os.W_OK))
    mode = "rwc" if write else "rw" if is_open_to_write else "ro"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_BUSY_S,
                                 isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _MAX_SQL_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    size = path.stat().st_size if path.exists() else 0
    left = [(_STEPS + _STEPS_PER_BYTE * size) // 1000]

    def count_down() -> bool:
        left[0] -= 1
        return left[0] < 0

    connection.set_progress_handler(count_down, 1000)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def check_tables(connection: sqlite3.Connection, schema: Mapping[str, str]) -> None:
    """Raise ``StoreProblem`` unless the file has exactly the tables of ``schema`` (their ``CREATE`` by name)."""
    indexes = {f"sqlite_autoindex_{name}_1": name for name in schema}
    found = set()
    for kind, name, table, sql in connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100"):
        is_table = kind == "table" and isinstance(sql, str) and _plain(sql) == _plain(schema.get(str(name), ""))
        is_index = kind == "index" and sql is None and indexes.get(name) == table
        if not (is_table and name == table) and not is_index:
            raise StoreProblem(f"it has the {str(kind)[:20]} {str(name)[:60]!r}, which is none of Weft's plain tables")
        found.add(name)
    missing = sorted({*schema, *indexes} - found)
    if missing:
        raise StoreProblem(f"it has no {missing[0]}")


def _plain(sql: str) -> str:
    return " ".join(sql.replace("IF NOT EXISTS", "").split())


def fetch(connection: sqlite3.Connection, path: Path, query: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the rows; raise ``StoreProblem`` if they have more text than the whole file."""
    left = path.stat().st_size
    rows = []
    for row in connection.execute(query, arguments):
        left -= sum(len(item) if isinstance(item, str | bytes) else 1 for item in row)
        if left < 0:
            raise StoreProblem("its rows have more text than the file: it is damaged")
        rows.append(row)
    return rows
