"""Figures of the schedule search, each beside its reference.

    python -m benchmarks.bench_schedule [--only SECTION ...] [--problems FOLDER] [--json]

Sections:
    table        the 4-device problems, each in a fresh process: period, makespan, bounds, CPU seconds
    steady       the steady state alone
    scale        steady states on 16 devices; 256 micro-batches on 32 devices
    oracle       random small problems against brute force (``tests/search/schedule/oracle.py``)
    unequal      pipelines of unequal stages: the search against the best named schedule at the same memory
    memory       steady states with less memory than 1F1B needs, and what becomes of them with 16 and 64 micro-batches
    v-shape      two stages on each device: at all, a half and a third of 1F1B's memory beside ZBV, V-Half and V-Min
    tight-run    searched schedules with all, a half and a third of 1F1B's memory, run on four processes
    random-memory  random problems with little memory (--first, --count, --kind) beside a plain model (--reference seconds each)
    overlap      forward and backward at once: DualPipe's and DualPipeV's settings
    offload      memory that leaves for the host: a third of 1F1B's memory
    joint-oracle random small problems with pairs and copies against brute force (``tests/search/schedule/oracle_joint.py``)
    infeasible   too little memory: exit code, and whether the memory that the message names works

Times are CPU seconds, over all threads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.schedule_common import FOLDER, Options
from benchmarks.sections import run_sections

SECTIONS = {"table": "schedule_table", "steady": "schedule_table", "scale": "schedule_table",
            "oracle": "schedule_random", "unequal": "schedule_random", "memory": "schedule_memory", "random-memory": "schedule_memory",
            "overlap": "schedule_joint", "offload": "schedule_joint", "joint-oracle": "schedule_joint",
            "infeasible": "schedule_random", "v-shape": "schedule_v", "tight-run": "schedule_run"}
"""The module of each."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the schedule search, each beside its reference.")
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="a section to run; all if absent")
    parser.add_argument("--problems", type=Path, default=FOLDER, help="folder of the problem files")
    parser.add_argument("--time-limit", type=float, help="seconds for one search; its own default if absent")
    parser.add_argument("--num-problems", type=int, default=300, help="random problems of section oracle")
    parser.add_argument("--samples", type=int, default=5, help="pipelines of each kind in section unequal")
    parser.add_argument("--first", type=int, default=0, help="first problem of section random-memory")
    parser.add_argument("--count", type=int, default=80, help="problems of section random-memory")
    parser.add_argument("--kind", choices=["pipelines", "graphs"], default="pipelines", help="of these problems")
    parser.add_argument("--reference", type=float, default=120.0, help="CPU seconds for the plain model on each of them")
    parser.add_argument("--workers", type=int, default=1, help="so many of these problems at a time")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    options = Options(folder=args.problems, time_limit=args.time_limit, num_problems=args.num_problems,
                      num_samples=args.samples, first=args.first, count=args.count, kind=args.kind,
                      workers=args.workers, reference_s=args.reference)
    return run_sections(SECTIONS, options, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
