"""Figures of deployment on any topology, each section beside what it is held against.

    python -m benchmarks.bench_deploy [--only SECTION ...] [--cpu-seconds 10] [--cases N] [--workers N] [--json]

    factors    which linear layers exchange factors instead of gradients, for known cases (predicted, nothing is run)
    unseen     held-out models on held-out clusters: data parallel, HEFT, annealing, tree search with and without the
               network, and all together, with the same CPU seconds each
    related    the same for models that are like a training family; shown only
    planning   CPU seconds to plan a model of 2,000 operators for 16 devices
    ablation   step times without the network, its feedback, sufficient factors, uneven shares

Step times are predicted by the simulator. Traced models are kept under ``out/``. Compiled code is kept on disk: the
first run takes longer. With ``--lines FILE`` each search's result is appended to a file of JSON lines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.sections import run_sections

SECTIONS = {"factors": "deploy_factors", "unseen": "deploy_compare", "related": "deploy_compare",
            "planning": "deploy_compare", "ablation": "deploy_compare"}
"""Each section and the module that has it."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of deployment on any topology.")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="a section to run; all if absent")
    parser.add_argument("--cpu-seconds", type=float, default=10.0, help="for each search of a case")
    parser.add_argument("--planning-seconds", type=float, default=18.0, help="for the search of section planning")
    parser.add_argument("--cases", type=int, help="run only so many cases of a section")
    parser.add_argument("--workers", type=int, default=1, help="searches at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=Path, help="file to append each search's result to, as JSON lines")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    return run_sections(SECTIONS, args, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
