"""The profile store: measured operator times and fitted parameters in one sqlite file.

An operator's time is kept under (device kind, operator kind, signature, dtype). The *signature* is what a ``Graph``
knows about the operator's tensors: shapes of inputs and outputs, and dtypes where they differ from the one it computes
in. Constant arguments (strides, dimensions, ...) show in the output shapes; operators of one signature that differ
otherwise share an entry, the mean over those of the profiled model.

    aten.linear.default   [2,128,768] [768,768] [768] -> [2,128,768]   float32

Every call opens the file for itself and writes in one transaction, so that many processes may read while one profiles,
and an interrupted profile leaves the old content. A file that is not a profile store is refused and left alone.

A store may come from anyone, and a sqlite file can hold more than data: views, triggers, checks, defaults and generated
columns run SQL when a table is read or written, for ever if they like; pages may be linked so that a small file has
endless rows. So nothing but the very tables that Weft makes is read or written, every statement ends after a number of
steps that follows from the file's size, and no more text is taken out of a file than is in it.
"""

from __future__ import annotations

import itertools
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from weft.base.errors import InputError
from weft.model.graph import Graph

SCHEMA_VERSION: Final = 1
_APPLICATION_ID: Final = 0x57454654
_MAGIC: Final = b"SQLite format 3\x00"
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


class OpKey(NamedTuple):
    """What identifies a measured operator."""

    device_kind: str
    op_kind: str
    signature: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTiming:
    """A measured operator: medians over ``repeats`` runs."""

    forward_s: float
    input_grad_s: float | None
    """The part of the backward pass that the gradient of the inputs needs; None if not measured."""
    weight_grad_s: float | None
    """The rest of the backward pass, for the gradients of parameters; None if not measured."""
    spread: float
    """Half the distance between the quartiles, relative to the median, of the forward time."""
    repeats: int
    threads: int
    torch_version: str
    recorded_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFit:
    """Fitted efficiencies of one operator class on one device kind."""

    device_kind: str
    op_class: str
    compute: float
    memory: float
    num_points: int
    error: float
    """Median relative error of the fitted times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommFit:
    """Fitted latency and inverse bandwidth of the links that a collective (or ``p2p``) uses."""

    collective: str
    scope: str
    """Where it holds, see ``weft.cost.collectives.scope_of``."""
    algorithm: str
    latency_s: float
    s_per_byte: float
    num_points: int
    error: float
    """Median relative error of the fitted times."""


def op_signature(graph: Graph, op: int, dtype: str, batch: int | None = None) -> str:
    """Return the operator's signature, where ``dtype`` is what it computes in as traced.

    With ``batch`` it is that for so many samples, as far as the graph knows its batch dimensions.
    """
    sides = (graph.op_inputs(op), graph.op_outputs(op))
    return " -> ".join(" ".join(_tensor_text(graph, int(tensor), dtype, batch) for tensor in side) for side in sides)


def _tensor_text(graph: Graph, tensor: int, dtype: str, batch: int | None) -> str:
    own, sizes = graph.tensor_dtypes[tensor], list(graph.tensor_shapes[tensor])
    dim = -1 if batch is None else int(graph.tensor_batch_dim[tensor])
    if batch is not None and dim >= 0:
        sizes[dim] = sizes[dim] * batch // graph.batch
    shape = ",".join(map(str, sizes))
    return f"[{shape}]" if own == dtype else f"{own}[{shape}]"


T = TypeVar("T")
_ACCEPTED: Final = {"str": str, "int": int, "float": float, "float | None": float | None}
_SQL: Final = {"str": "TEXT NOT NULL", "int": "INTEGER NOT NULL", "float": "REAL NOT NULL", "float | None": "REAL"}


def _types(record: type) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields(record)}


_COLUMNS: Final = {"op_times": {**dict.fromkeys(OpKey._fields, "str"), **_types(OpTiming)},
                   "class_fits": _types(ClassFit), "comm_fits": _types(CommFit)}
_KEYS: Final = {"op_times": OpKey._fields, "class_fits": ("device_kind", "op_class"),
                "comm_fits": ("collective", "scope")}
_SCHEMA: Final = {
    table: f"CREATE TABLE IF NOT EXISTS {table} ( {', '.join(f'{name} {_SQL[kind]}' for name, kind in columns.items())}"
           f", PRIMARY KEY ({', '.join(_KEYS[table])}))" for table, columns in _COLUMNS.items()}


class ProfileStore:
    """A profile store at ``path``; the file is created when something is first put in."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self._is_new():
            self._check_header()  # so that a foreign file is refused before any work is done

    def timings(self, device_kind: str) -> dict[OpKey, OpTiming]:
        """Return all measured operators of ``device_kind``."""
        return {self._key(row[:4]): self._record(OpTiming, row[4:]) for row in self._rows("op_times", device_kind)}

    def device_kinds(self) -> tuple[str, ...]:
        """Return the device kinds that operators were measured on."""
        rows = self._read("SELECT DISTINCT device_kind FROM op_times ORDER BY 1")
        if not all(isinstance(row[0], str) for row in rows):
            raise self._broken("a device_kind is not text")
        return tuple(row[0] for row in rows)

    def put_timings(self, timings: Iterable[tuple[OpKey, OpTiming]]) -> None:
        """Add measured operators in one transaction; an existing entry is replaced."""
        self._write("op_times", [(*key, *astuple(timing)) for key, timing in timings])

    def class_fits(self, device_kind: str) -> dict[str, ClassFit]:
        """Return the fitted efficiencies on ``device_kind`` by operator class."""
        return {row[1]: self._record(ClassFit, row) for row in self._rows("class_fits", device_kind)}

    def put_class_fits(self, fits: Iterable[ClassFit]) -> None:
        """Add fitted efficiencies in one transaction; existing ones are replaced."""
        self._write("class_fits", [astuple(fit) for fit in fits])

    def comm_fits(self) -> dict[tuple[str, str], CommFit]:
        """Return the fitted link parameters by (collective, scope)."""
        return {(row[0], row[1]): self._record(CommFit, row) for row in self._rows("comm_fits")}

    def put_comm_fits(self, fits: Iterable[CommFit]) -> None:
        """Add fitted link parameters in one transaction; existing ones are replaced."""
        self._write("comm_fits", [astuple(fit) for fit in fits])

    def _key(self, row: tuple[Any, ...]) -> OpKey:
        if not all(isinstance(item, str) for item in row):
            raise self._broken("a key of op_times is not text")
        return OpKey(*row)

    def _record(self, target: type[T], row: tuple[Any, ...]) -> T:
        values = dict(zip(_types(target), row, strict=True))
        for name, kind in _types(target).items():
            value = values[name]
            if not isinstance(value, _ACCEPTED[kind]):
                raise self._broken(f"{name} is {value!r}")
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise self._broken(f"{name} is {value}")
        return target(**values)

    def _is_new(self) -> bool:
        """Return whether there is no content yet (a first write that was interrupted leaves an empty file)."""
        try:
            return self.path.stat().st_size == 0
        except FileNotFoundError:
            return True
        except OSError as problem:
            raise InputError(f"cannot read the profile store {str(self.path)!r}: {problem}") from problem

    def _rows(self, table: str, device_kind: str | None = None) -> list[tuple[Any, ...]]:
        """Return the table's rows (of one device kind) in the order of their keys."""
        where = "" if device_kind is None else " WHERE device_kind = ?"
        return self._read(f"SELECT {', '.join(_COLUMNS[table])} FROM {table}{where} ORDER BY 1, 2, 3, 4",
                          *([] if device_kind is None else [device_kind]))

    def _read(self, query: str, *arguments: str) -> list[tuple[Any, ...]]:
        """Return the rows; raise if they have more text than the whole file."""
        if self._is_new():
            return []
        left, rows = self.path.stat().st_size, []
        with self._connect(write=False) as connection:
            for row in connection.execute(query, arguments):
                left -= sum(len(item) if isinstance(item, str | bytes) else 1 for item in row)
                if left < 0:
                    raise self._broken("its rows have more text than the file: it is damaged")
                rows.append(row)
        return rows

    def _write(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        is_new, columns = self._is_new(), _COLUMNS[table]
        marks = ", ".join("?" * len(columns))
        with self._connect(write=True) as connection:
            connection.execute("BEGIN IMMEDIATE")
            if is_new:
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                for statement in _SCHEMA.values():
                    connection.execute(statement)
            connection.executemany(f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})", rows)
            connection.execute("COMMIT")

    @contextmanager
    def _connect(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        """Yield a connection to the checked file; sqlite's errors become ``InputError``."""
        is_new = self._is_new()
        if not is_new:
            self._check_header()
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._open(write=write)
        except (OSError, sqlite3.Error) as problem:
            raise InputError(f"cannot open the profile store {str(self.path)!r}: {problem}") from problem
        try:
            if not is_new:
                self._check_tables(connection)
            yield connection
        except sqlite3.OperationalError as problem:
            if str(problem) == "interrupted":
                raise self._broken("reading it takes more work than any store of its size") from problem
            raise InputError(f"the profile store {str(self.path)!r} cannot be used: {problem}. Check that the folder "
                             "is writable and no other process holds the file") from problem
        except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:  # sqlite's own words may quote broken text
            raise self._broken(str(problem)) from problem
        finally:
            connection.close()

    def _open(self, *, write: bool) -> sqlite3.Connection:
        """Return a connection that ends every statement after some work; see the module's docstring."""
        path = self.path
        # Readers open it for writing too after a crash, where they may: the first one must roll back the journal.
        is_open_to_write = write or (Path(f"{path}-journal").exists() and os.access(path, os.W_OK))
        mode = "rwc" if write else "rw" if is_open_to_write else "ro"
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_BUSY_S,
                                     isolation_level=None)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _MAX_SQL_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        size = path.stat().st_size if path.exists() else 0
        left = itertools.count((_STEPS + _STEPS_PER_BYTE * size) // 1000 - 1, -1)
        connection.set_progress_handler(lambda: next(left) < 0, 1000)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        return connection

    def _check_header(self) -> None:
        """Raise unless the first 100 bytes are those of a profile store; sqlite itself might change a foreign file."""
        try:
            with open(self.path, "rb") as stream:
                header = stream.read(100)
        except OSError as problem:
            raise InputError(f"cannot read the profile store {str(self.path)!r}: {problem}") from problem
        if len(header) < 100 or not header.startswith(_MAGIC):
            raise self._broken("it is not a sqlite file")
        version, identity = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
        if identity != _APPLICATION_ID:
            raise self._broken("it is a sqlite file of another program")
        if version != SCHEMA_VERSION:
            raise self._broken(f"its version is {version}, this Weft reads {SCHEMA_VERSION}")
        if header[18:20] != _ROLLBACK_MODE:
            raise self._broken("it has a write-ahead log, which Weft's stores do not have")
        journal = Path(f"{self.path}-journal")
        if journal.exists():
            with open(journal, "rb") as stream:
                stream.seek(max(journal.stat().st_size - len(_JOURNAL_MAGIC), 0))
                if stream.read() == _JOURNAL_MAGIC:  # it names another file, which sqlite might delete
                    raise self._broken("the journal beside it belongs to several files")

    def _check_tables(self, connection: sqlite3.Connection) -> None:
        """Raise unless the file has exactly the tables of ``_SCHEMA`` (their ``CREATE`` by name)."""
        indexes = {f"sqlite_autoindex_{name}_1": name for name in _SCHEMA}
        found = set()
        for kind, name, table, sql in connection.execute(
                "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100"):
            is_table = kind == "table" and isinstance(sql, str) and _plain(sql) == _plain(_SCHEMA.get(str(name), ""))
            is_index = kind == "index" and sql is None and indexes.get(name) == table
            if not (is_table and name == table) and not is_index:
                raise self._broken(f"it has the {str(kind)[:20]} {str(name)[:60]!r}, which is not one of Weft's plain "
                                   "tables")
            found.add(name)
        missing = sorted({*_SCHEMA, *indexes} - found)
        if missing:
            raise self._broken(f"it has no {missing[0]}")

    def _broken(self, why: str) -> InputError:
        return InputError(f"{str(self.path)!r} is not a usable profile store: {why}. It was left as it is; name "
                          "another file, or delete this one and profile again")


def _plain(sql: str) -> str:
    return " ".join(sql.replace("IF NOT EXISTS", "").split())
