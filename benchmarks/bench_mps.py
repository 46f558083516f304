"""Plans on unequal parts of one GPU (CUDA's multi-process service, 50, 25, 12 and 12 %): predicted against measured.

    python -m benchmarks.bench_mps [--only SECTION ...] [--model NAME ...] [--keep FOLDER] [--json]
    python -m benchmarks.bench_mps --device cpu          the same with small models on processes of the CPU, as a test

Sections:
    shares   data parallel with even shares against the plan of weft deploy, two models with much to compute for each
             parameter; gradients against one process
    plans    pipelines, schedules, data and tensor parallelism and their mixtures, for a language model and a
             translator: step times, peak memory, ranking, the searched plan against uniform ones

Parts, messages between them and operators are measured first, and predictions are made from that
(``benchmarks/mps_measure.py``). Needs an NVIDIA GPU and nvidia-cuda-mps-control, else every section is skipped.
On the CPU the processes share two cores or so: there predictions miss, and only that all runs through is of interest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.mps_runs import PLANNED, SHARED, Options
from benchmarks.sections import run_sections

SECTIONS = dict.fromkeys(("shares", "plans"), "mps_runs")


def parse() -> argparse.Namespace:
    names = [model.name for table in (SHARED, PLANNED) for models in table.values() for model in models]
    parser = argparse.ArgumentParser(description="Plans on unequal parts of one GPU, predicted and measured.")
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="a section to run; all if absent")
    parser.add_argument("--model", action="append", choices=sorted(set(names)), help="a model; all if absent")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--keep", type=Path, help="folder for profiles, plans and timelines")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    options = Options(device=args.device, steps=args.steps, keep=args.keep, models=tuple(args.model or ()))
    return run_sections(SECTIONS, options, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
