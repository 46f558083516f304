"""Figures of the schedule search, each beside its reference.

    python -m benchmarks.bench_schedule [--only SECTION ...] [--problems FOLDER] [--json]

Sections:
    table        the 4-device problems, each in a fresh process: period, makespan, bounds, CPU seconds
    steady       the steady state alone
    scale        steady states on 16 devices; 256 micro-batches on 32 devices
    oracle       random small problems against brute force (``tests/search/schedule/oracle.py``)
    unequal      pipelines of unequal stages: the search against the best named schedule at the same memory
    infeasible   too little memory: exit code, and whether the memory that the message names works

Times are CPU seconds, over all threads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.schedule_common import FOLDER, Options, Row

SECTIONS = {"table": "schedule_table", "steady": "schedule_table", "scale": "schedule_table",
            "oracle": "schedule_random", "unequal": "schedule_random", "infeasible": "schedule_random"}
"""The module of each."""


def show(row: Row) -> None:
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
    print(f"{mark} {row.what}\n         {row.figure}   [{row.reference}]", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the schedule search, each beside its reference.")
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="a section to run; all if absent")
    parser.add_argument("--problems", type=Path, default=FOLDER, help="folder of the problem files")
    parser.add_argument("--time-limit", type=float, help="seconds for one search; its own default if absent")
    parser.add_argument("--num-problems", type=int, default=300, help="random problems of section oracle")
    parser.add_argument("--samples", type=int, default=5, help="pipelines of each kind in section unequal")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    options = Options(folder=args.problems, time_limit=args.time_limit, num_problems=args.num_problems,
                      num_samples=args.samples)
    rows: list[tuple[str, Row]] = []
    for section in args.only or SECTIONS:
        if not args.json:
            print(f"-- {section}", flush=True)
        for row in getattr(importlib.import_module(f"benchmarks.{SECTIONS[section]}"), section)(options):
            rows.append((section, row))
            if not args.json:
                show(row)
    if args.json:
        print(json.dumps([{"section": section, **asdict(row)} for section, row in rows], indent=1))
    missed = sum(row.ok is False for _, row in rows)
    print(f"{missed} of {len(rows)} rows missed", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
