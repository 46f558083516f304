"""The profile store: measured operator times and fitted parameters in one sqlite file.

An operator's time is kept under (device kind, operator kind, signature, dtype). The *signature* is what a ``Graph``
knows about the operator's tensors: shapes of inputs and outputs, and dtypes where they differ from the one it computes
in. Constant arguments (strides, dimensions, ...) show in the output shapes; operators of one signature that differ
otherwise share an entry, the mean over those of the profiled model.

    aten.linear.default   [2,128,768] [768,768] [768] -> [2,128,768]   float32

Every call opens the file for itself and writes in one transaction, so that many processes may read while one profiles,
and an interrupted profile leaves the old content. A file that is not a profile store is refused and left alone.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from weft.base.errors import InputError
from weft.cost.store_file import StoreProblem, check_mode, check_tables, fetch, open_store
from weft.model.graph import Graph

SCHEMA_VERSION: Final = 1
_APPLICATION_ID: Final = 0x57454654
_MAGIC: Final = b"SQLite format 3\x00"

_SCHEMA: Final = {
    "op_times": """CREATE TABLE IF NOT EXISTS op_times (
        device_kind TEXT NOT NULL, op_kind TEXT NOT NULL, signature TEXT NOT NULL, dtype TEXT NOT NULL,
        forward_s REAL NOT NULL, input_grad_s REAL, weight_grad_s REAL, spread REAL NOT NULL, repeats INTEGER NOT NULL,
        threads INTEGER NOT NULL, torch_version TEXT NOT NULL, recorded_at TEXT NOT NULL,
        PRIMARY KEY (device_kind, op_kind, signature, dtype))""",
    "class_fits": """CREATE TABLE IF NOT EXISTS class_fits (
        device_kind TEXT NOT NULL, op_class TEXT NOT NULL, compute REAL NOT NULL, memory REAL NOT NULL,
        num_points INTEGER NOT NULL, error REAL NOT NULL, PRIMARY KEY (device_kind, op_class))""",
    "comm_fits": """CREATE TABLE IF NOT EXISTS comm_fits (
        collective TEXT NOT NULL, scope TEXT NOT NULL, algorithm TEXT NOT NULL, latency_s REAL NOT NULL,
        s_per_byte REAL NOT NULL, num_points INTEGER NOT NULL, error REAL NOT NULL,
        PRIMARY KEY (collective, scope))""",
}


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


class ProfileStore:
    """A profile store at ``path``; the file is created when something is first put in."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self._is_new():
            self._check_header()  # so that a foreign file is refused before any work is done

    def timings(self, device_kind: str) -> dict[OpKey, OpTiming]:
        """Return all measured operators of ``device_kind``."""
        names = [field.name for field in fields(OpTiming)]
        rows = self._read(f"SELECT {', '.join(OpKey._fields)}, {', '.join(names)} FROM op_times"
                          " WHERE device_kind = ? ORDER BY 1, 2, 3, 4", (device_kind,))
        return {self._key(row[:4]): self._record(OpTiming, dict(zip(names, row[4:], strict=True))) for row in rows}

    def device_kinds(self) -> tuple[str, ...]:
        """Return the device kinds that operators were measured on."""
        rows = self._read("SELECT DISTINCT device_kind FROM op_times ORDER BY 1", ())
        if not all(isinstance(row[0], str) for row in rows):
            raise self._broken("a device_kind is no text")
        return tuple(row[0] for row in rows)

    def put_timings(self, timings: Iterable[tuple[OpKey, OpTiming]]) -> None:
        """Add measured operators in one transaction; an existing entry is replaced."""
        rows = [(*key, *astuple(timing)) for key, timing in timings]
        self._write("op_times", (*OpKey._fields, *(field.name for field in fields(OpTiming))), rows)

    def class_fits(self, device_kind: str) -> dict[str, ClassFit]:
        """Return the fitted efficiencies on ``device_kind`` by operator class."""
        names = [field.name for field in fields(ClassFit)]
        rows = self._read(f"SELECT {', '.join(names)} FROM class_fits WHERE device_kind = ? ORDER BY 2",
                          (device_kind,))
        return {row[1]: self._record(ClassFit, dict(zip(names, row, strict=True))) for row in rows}

    def put_class_fits(self, fits: Iterable[ClassFit]) -> None:
        """Add fitted efficiencies in one transaction; existing ones are replaced."""
        self._write("class_fits", [field.name for field in fields(ClassFit)], [astuple(fit) for fit in fits])

    def comm_fits(self) -> dict[tuple[str, str], CommFit]:
        """Return the fitted link parameters by (collective, scope)."""
        names = [field.name for field in fields(CommFit)]
        rows = self._read(f"SELECT {', '.join(names)} FROM comm_fits ORDER BY 1, 2", ())
        return {(row[0], row[1]): self._record(CommFit, dict(zip(names, row, strict=True))) for row in rows}

    def put_comm_fits(self, fits: Iterable[CommFit]) -> None:
        """Add fitted link parameters in one transaction; existing ones are replaced."""
        self._write("comm_fits", [field.name for field in fields(CommFit)], [astuple(fit) for fit in fits])

    def _key(self, row: tuple[Any, ...]) -> OpKey:
        if not all(isinstance(item, str) for item in row):
            raise self._broken("a key of op_times is no text")
        return OpKey(*row)

    def _record(self, target: type[T], values: dict[str, Any]) -> T:
        for field in fields(target):  # type: ignore[arg-type]
            value = values[field.name]
            if not isinstance(value, _ACCEPTED[str(field.type)]):
                raise self._broken(f"{field.name} is {value!r}")
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise self._broken(f"{field.name} is {value}")
        return target(**values)

    def _is_new(self) -> bool:
        """Return whether there is no content yet (a first write that was interrupted leaves an empty file)."""
        try:
            return self.path.stat().st_size == 0
        except FileNotFoundError:
            return True
        except OSError as problem:
            raise InputError(f"cannot read the profile store {str(self.path)!r}: {problem}") from problem

    def _read(self, query: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self._is_new():
            return []
        with self._connect(write=False) as connection:
            return fetch(connection, self.path, query, arguments)

    def _write(self, table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        is_new = self._is_new()
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
            connection = open_store(self.path, write=write)
        except (OSError, sqlite3.Error) as problem:
            raise InputError(f"cannot open the profile store {str(self.path)!r}: {problem}") from problem
        try:
            if not is_new:
                check_tables(connection, _SCHEMA)
            yield connection
        except StoreProblem as problem:
            raise self._broken(str(problem)) from problem
        except sqlite3.OperationalError as problem:
            if str(problem) == "interrupted":
                raise self._broken("reading it takes more work than any store of its size") from problem
            raise InputError(f"the profile store {str(self.path)!r} cannot be used: {problem}. Check that the folder "
                             "is writable and no other process holds the file") from problem
        except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:  # sqlite's own words may quote broken text
            raise self._broken(str(problem)) from problem
        finally:
            connection.close()

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
        try:
            check_mode(header, self.path)
        except StoreProblem as problem:
            raise self._broken(str(problem)) from problem

    def _broken(self, why: str) -> InputError:
        return InputError(f"{str(self.path)!r} is not a usable profile store: {why}. It was left as it is; name "
                          "another file, or delete this one and profile again")
