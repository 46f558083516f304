"""What benchmarks with sections share: rows, and running sections one after the other."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure and what it is held against."""

    what: str
    figure: str
    reference: str
    ok: bool | None = None
    details: dict[str, Any] | None = None


def show(row: Row) -> None:
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
    print(f"{mark} {row.what}\n         {row.figure}   [{row.reference}]", flush=True)


def run_sections(modules: Mapping[str, str], options: Any, *, only: Sequence[str] | None, as_json: bool) -> int:
    """Run the sections asked for, each a function of its name in its module; return 1 if a row was missed."""
    rows: list[tuple[str, Row]] = []
    for section in only or modules:
        if not as_json:
            print(f"-- {section}", flush=True)
        for row in getattr(importlib.import_module(f"benchmarks.{modules[section]}"), section.replace("-", "_"))(options):
            rows.append((section, row))
            if not as_json:
                show(row)
    if as_json:
        print(json.dumps([{"section": section, **asdict(row)} for section, row in rows], indent=1))
    missed = sum(row.ok is False for _, row in rows)
    print(f"{missed} of {len(rows)} rows missed", file=sys.stderr)
    return 1 if missed else 0
