"""Figures of the sharding search for models, each beside its reference.

    python -m benchmarks.bench_shard_models [--only SECTION] [--match TEXT] [--json]

The sections: ``speed`` (from model to plan, in a fresh process), ``named`` (against plans with names), ``resnet`` (a very
wide classifier), ``mixing`` (little memory), ``folded`` (against the search without folding).
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.sections import run_sections

SECTIONS = {"speed": "shard_speed", "named": "shard_models", "resnet": "shard_models", "mixing": "shard_models",
            "folded": "shard_models"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the sharding search for models.")
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="a section to run; all if absent")
    parser.add_argument("--match", default="", help="only rows whose model or cluster has this text in it")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    return run_sections(SECTIONS, args, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
