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
import sys
from pathlib import Path

from benchmarks.place_common import DATA, Options
from benchmarks.sections import run_sections

SECTIONS = {"moirai": "place_table", "oracle": "place_random", "zoo": "place_table", "scale": "place_table",
            "infeasible": "place_random"}
"""The module of each."""


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
    return run_sections(SECTIONS, options, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
