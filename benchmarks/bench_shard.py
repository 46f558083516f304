"""Figures of the sharding search, each beside its reference.

    python -m benchmarks.bench_shard [--data FOLDER] [--only SECTION] [--problem A] [--share 0.5] [--json]

Every search runs in a fresh process. Wall seconds count everything from its start; CPU seconds are over all threads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.sections import run_sections

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
SECTIONS = {"contest": "shard_contest"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the sharding search, each beside its reference.")
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the benchmark inputs")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="a section to run; all if absent")
    parser.add_argument("--problem", action="append", help="contest: a problem to run; all if absent")
    parser.add_argument("--share", type=float, default=1.0, help="contest: share of the time limit to use")
    parser.add_argument("--seed", type=int, default=0, help="seed of the searches")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    return run_sections(SECTIONS, args, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
