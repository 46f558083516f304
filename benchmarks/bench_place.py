"""Figures of the placement search (latency of one request), each beside its reference.

    python -m benchmarks.bench_place [--only SECTION ...] [--data FOLDER] [--time-limit S] [--json]

Sections:
    moirai       the profiled graphs of Moirai (``--data``), each in a fresh process: value, bound, CPU seconds
    oracle       random small problems against brute force (``tests/search/place/oracle.py``)
    zoo          models x clusters: ``auto`` against every named method
    scale        10,000 operators on 16 devices
    infeasible   too little memory: exit code and message; and little memory where a placement exists

Times are CPU seconds of a fresh process, imports included. Compiled code is kept on disk: run twice for figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.place_common import DATA, Options, Row

SECTIONS = {"moirai": "place_table", "oracle": "place_random", "zoo": "place_table", "scale": "place_table",
            "infeasible": "place_random"}
"""The module of each."""


def show(row: Row) -> None:
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
    print(f"{mark} {row.what}\n         {row.figure}   [{row.reference}]", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Figures of the placement search, each beside its reference.")
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="a section to run; all if absent")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the public problems")
    parser.add_argument("--time-limit", type=float, default=60.0, help="CPU seconds for one search of section zoo")
    parser.add_argument("--num-problems", type=int, default=500, help="random problems of section oracle")
    parser.add_argument("--model", action="append", help="a model of section zoo; all if absent")
    parser.add_argument("--cluster", action="append", help="a cluster of section zoo; all if absent")
    parser.add_argument("--batch", type=int, help="samples of one request in section zoo, instead of its own")
    parser.add_argument("--fuse", default="rules", choices=["rules", "none"], help="fusion in section zoo")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    options = Options(data=args.data, time_limit=args.time_limit, num_problems=args.num_problems, batch=args.batch,
                      models=tuple(args.model or ()), clusters=tuple(args.cluster or ()), fuse=args.fuse)
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
