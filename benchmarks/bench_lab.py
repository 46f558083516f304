"""Plans on several hosts of one machine with limited links (``benchmarks/lab``): predicted against measured.

    python -m benchmarks.bench_lab [--only SECTION ...] [--hosts 2 4] [--model NAME ...] [--json]

Sections:
    links      messages and collectives between hosts, against the cluster file
    exchange   data parallel at 200 Mbit/s, models of fully connected layers, 4 samples on each host: all-reduce
               everywhere, and sufficient factors for linear layers
    slow_port  four hosts at 1 Gbit/s but one at 100 Mbit/s: the plan of weft deploy against data parallel

Links, cores and operators are measured first, in the laboratory, and predictions are made from that. Needs root and
iproute2, else every section is skipped. The machine must do nothing else: a row says so if others took much.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.lab_runs import HOSTS, MODELS, Options
from benchmarks.sections import run_sections

SECTIONS = dict.fromkeys(("links", "exchange", "slow_port"), "lab_runs")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plans on several hosts of one machine, predicted and measured.")
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="a section to run; all if absent")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS), help="numbers of hosts")
    parser.add_argument("--model", action="append", choices=[*MODELS], help="a model; all if absent")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each run")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    options = Options(steps=args.steps, hosts=tuple(args.hosts), models=tuple(args.model or MODELS))
    return run_sections(SECTIONS, options, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
